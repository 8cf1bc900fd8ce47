"""Models and tokenizers: made from scratch, loaded from a folder, or refused with a sentence that says what to do."""

import json
import math
import os
import pickle
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import tiny_tokenizers
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from ngramloss import attach, recipe
from ngramloss.data import Example
from ngramloss.data.batches.padding import Padder
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.remote_code import allow_remote_code
from ngramloss.recipe import Generation, Model
from ngramloss.settings import settings_of
from ngramloss.storage.run_folder import weight_files

pytestmark = pytest.mark.slow

ARCHITECTURES = [name for name in settings_of(recipe.Model)["architecture"].choices if name != "llama"]
"""Of encoder-decoders. test_prompts.py has what is decoder-only."""
SMALL = Model(
    name="scratch",
    width=16,
    heads=2,
    encoder_layers=2,
    decoder_layers=1,
    feed_forward=24,
    dropout=0.0,
    vocabulary=400,
    init_std=0.09,
)
TEXT = "The naïve cat — “Łódź” — sat on 2,024 mats; 日本 😀\n  and slept."


@pytest.fixture(autouse=True)
def _without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def tokenizer():
    return tiny_tokenizers.ours()


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A folder with a model and its tokenizer."""
    folder = tmp_path / "saved"
    built("bart").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def built(architecture, seed=0, **changes):
    torch.manual_seed(seed)
    return loading.from_scratch(replace(SMALL, architecture=architecture, **changes), tiny_tokenizers.ours())


def inputs(model, tokenizer):
    from functools import partial

    from ngramloss.models.attached.decoder_inputs import decoder_inputs

    rows = [
        {"input_ids": tokenizer(text)["input_ids"], "labels": tokenizer(text[:20])["input_ids"]}
        for text in tiny_tokenizers.TEXTS
    ]
    return Padder(tokenizer.pad_token_id, partial(decoder_inputs, model))(rows)


# From scratch


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_trains_is_saved_and_is_loaded(architecture, tokenizer, tmp_path):
    model = built(architecture)
    loss = attach(model, "ce + matches(2)")(**inputs(model, tokenizer)).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = Model(name=str(tmp_path))
    again, (words, folder) = loading.load(settings, tokenizer), loading.load_tokenizer(settings, lambda: (), "")
    assert folder is None
    assert words(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.config.model_type == architecture.replace("m2m100", "m2m_100")
    for (name, one), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_model_has_the_sizes_and_tokens_it_was_asked_for(architecture, tokenizer, caplog):
    model = loading.load(replace(SMALL, architecture=architecture), tokenizer)
    assert "WARNING" not in caplog.text
    config = model.config
    assert config.model_type == architecture.replace("m2m100", "m2m_100")
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    wide = ("encoder_ffn_dim", "decoder_ffn_dim")
    names = {
        "t5": ("num_layers", "num_decoder_layers", "d_ff"),
        "prophetnet": ("num_encoder_layers", "num_decoder_layers", *wide),
    }.get(architecture, ("encoder_layers", "decoder_layers", *wide))
    assert [getattr(config, name) for name in names] == [2, 1, 24, 24][: len(names)]
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 0, 2)
    start = tokenizer.pad_token_id if architecture == "t5" else tokenizer.eos_token_id
    assert config.decoder_start_token_id == model.generation_config.decoder_start_token_id == start
    assert model.generation_config.forced_eos_token_id is None
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))


def test_dropout_heads_and_spread_are_those_asked_for():
    bart = built("bart", dropout=0.25, init_std=0.5, heads=4)
    assert bart.config.dropout == 0.25
    assert (bart.config.attention_dropout, bart.config.activation_dropout) == (0, 0)
    assert bart.config.encoder_attention_heads == bart.config.decoder_attention_heads == 4
    assert bart.get_input_embeddings().weight.std().item() == pytest.approx(0.5, rel=0.1)
    t5 = built("t5", dropout=0.25, heads=4)
    assert (t5.config.dropout_rate, t5.config.num_heads, t5.config.d_kv) == (0.25, 4, 4)


def test_the_seed_decides_the_weights():
    one, same, other = (built("mbart", seed).get_input_embeddings().weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# Copying


def projections(model):
    for module in model.get_decoder().layers:
        yield from (module.encoder_attn.v_proj, module.encoder_attn.out_proj)


@pytest.mark.parametrize("architecture", ["bart", "mbart", "m2m100", "pegasus", "marian"])
def test_copying_starts_cross_attention_at_the_identity(architecture):
    model, plain = built(architecture, copying=True, decoder_layers=2), built(architecture, decoder_layers=2)
    assert len(list(projections(model))) == 4
    for projection in projections(model):
        assert torch.equal(projection.weight, torch.eye(16))
        assert not projection.bias.any()
        assert projection.weight.requires_grad
    assert not any(torch.equal(projection.weight, torch.eye(16)) for projection in projections(plain))
    query = [layer.encoder_attn.q_proj.weight for layer in model.get_decoder().layers]
    assert not any(torch.equal(weight, torch.eye(16)) for weight in query)


@pytest.mark.parametrize("architecture", ["bart", "mbart"])
def test_copying_starts_learned_positions_as_sinusoids(architecture):
    model = built(architecture, copying=True, init_std=0.5)
    for part in (model.get_encoder(), model.get_decoder()):
        weight = part.embed_positions.weight
        assert weight.requires_grad
        for position, column in [(0, 0), (0, 1), (7, 0), (7, 5), (300, 14)]:
            angle = position / 10000 ** (column // 2 * 2 / 16)
            wave = math.cos(angle) if column % 2 else math.sin(angle)
            assert weight[position, column].item() == pytest.approx(wave * 0.5 * math.sqrt(2), abs=1e-4)
        assert weight.square().mean().sqrt().item() == pytest.approx(0.5, rel=1e-3)  # as far as others are spread


@pytest.mark.parametrize("architecture", ["pegasus", "marian"])
def test_positions_that_are_fixed_sinusoids_stay_as_they_are(architecture):
    one, other = built(architecture, copying=True), built(architecture)
    assert torch.equal(one.get_encoder().embed_positions.weight, other.get_encoder().embed_positions.weight)


def test_copying_is_refused_where_there_is_no_such_path():
    with pytest.raises(
        ValueError,
        match=r"model.copying: T5ForConditionalGeneration has no `encoder_attn` to initialise as the identity\. "
        r"Set model.copying=false, or choose the architecture bart, mbart, m2m100, pegasus or marian\.",
    ):
        built("t5", copying=True)


# Tokenizers


def test_a_trained_tokenizer_gives_back_any_text(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.decode(ids, skip_special_tokens=True) == f" {TEXT}"  # it writes a space before the first word
    assert tokenizer.unk_token_id not in ids
    assert (
        tokenizer("cat cat", add_special_tokens=False)["input_ids"]
        == 2 * tokenizer("cat", add_special_tokens=False)["input_ids"]
    )


def test_training_a_tokenizer_twice_gives_the_same():
    texts = [example for text in tiny_tokenizers.TEXTS for example in text.split()] * 3
    one, same = loading.train_tokenizer(texts, 320), loading.train_tokenizer(iter(texts), 320)
    assert one.backend_tokenizer.to_str() == same.backend_tokenizer.to_str()
    assert len(one) == 320
    assert [one.convert_tokens_to_ids(token) for token in loading.SPECIAL] == [0, 1, 2, 3]
    assert (one.sep_token, one.pad_token) == ("</s>", "<pad>")


def test_a_tokenizer_is_trained_once_for_the_same_texts_and_size(tmp_path, monkeypatch):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path))
    asked = []

    def texts():
        asked.append(1)
        return tiny_tokenizers.TEXTS

    first, folder = loading.load_tokenizer(SMALL, texts, "print")
    again, same = loading.load_tokenizer(SMALL, texts, "print")
    assert folder == same
    assert folder.parent == tmp_path / "tokenizers"
    assert len(asked) == 1
    assert first(TEXT)["input_ids"] == again(TEXT)["input_ids"] == tiny_tokenizers.ours()(TEXT)["input_ids"]
    others = [
        loading.load_tokenizer(SMALL, texts, "another")[1],
        loading.load_tokenizer(replace(SMALL, vocabulary=350), texts, "print")[1],
    ]
    assert len({folder, *others}) == 3
    assert len(asked) == 3


@pytest.mark.parametrize("damage", [lambda text: text[:-100], lambda text: text.replace('"Ġ', '"Ã', 1), lambda _: "[]"])
def test_a_damaged_tokenizer_in_the_cache_is_named_and_trained_again(tmp_path, monkeypatch, damage, messages):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path))
    first, folder = loading.load_tokenizer(SMALL, lambda: tiny_tokenizers.TEXTS, "print")
    (folder / "tokenizer.json").write_text(damage((folder / "tokenizer.json").read_text()))
    again, _ = loading.load_tokenizer(SMALL, lambda: tiny_tokenizers.TEXTS, "print")
    assert messages[0].startswith(f"the tokenizer cache {folder} is damaged (tokenizer.json ")
    assert again(TEXT)["input_ids"] == first(TEXT)["input_ids"]


def test_a_tokenizer_learns_from_sources_and_targets():
    assert list(loading.iterate_texts([Example("1", "a", "b"), Example("2", "c", "d")])) == ["a", "b", "c", "d"]


# Generation


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generation_settings_are_the_models_own_and_are_saved_with_it(architecture, tmp_path):
    model = built(architecture)
    wanted = Generation(
        num_beams=3,
        length_penalty=2.5,
        min_length=5,
        max_length=19,
        no_repeat_ngram_size=3,
        early_stopping=True,
        renormalize=True,
    )
    loading.prepare_generation(model, wanted)
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        found = one.generation_config
        same = wanted.__dataclass_fields__.keys() - {"renormalize", "engine", "precision", "drafter"}
        assert (
            Generation(**{name: getattr(found, name) for name in same}, renormalize=found.renormalize_logits) == wanted
        )
        assert (found.pad_token_id, found.eos_token_id) == (1, 2)
        written = one.generate(torch.tensor([[0, 9, 2]]))
        assert 5 <= written.shape[1] <= 19
    assert "num_beams" not in json.loads((tmp_path / "config.json").read_text())


def test_one_beam_stops_by_itself(tmp_path):
    model = built("bart")
    loading.prepare_generation(model, Generation(num_beams=1, early_stopping=True))
    assert model.generation_config.early_stopping is False
    loading.prepare_generation(model, Generation(num_beams=2, early_stopping=False))
    assert model.generation_config.early_stopping is False


def test_generation_settings_are_not_made_anew_from_the_config():
    model = built("bart")
    loading.prepare_generation(model, Generation())
    assert model.generation_config._from_model_config is False


# Refusals


def refused(settings, tokenizer, part="model"):
    load = {
        "model": lambda: loading.load(settings, tokenizer),
        "tokenizer": lambda: loading.load_tokenizer(settings, lambda: (), ""),
    }
    with pytest.raises(ValueError) as mistake:
        load[part]()
    told = str(mistake.value)
    assert told.startswith(f"cannot load the {part} of {settings.name!r}: ")
    assert ".." not in told.replace("...", "")
    return told


FOLDER = (
    "The folder must contain what save_pretrained writes: config, tokenizer files, and weights as model.safetensors or "
    "pytorch_model.bin."
)


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_name_that_is_nowhere_is_told_with_what_to_give(part, tokenizer):
    told = refused(Model(name="nobody/nothing"), tokenizer, part)
    assert told.endswith(
        'Give a folder that save_pretrained wrote, a hub id (the hub must be reachable), or model.name = "scratch" for a new model.'
    )


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_where_no_hub_answers_it_is_asked_once_and_not_for_long(part, tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = []

    class Unreachable:
        def head(self, address, timeout):
            asked.append(timeout)
            raise ConnectionError("Name or service not known")

        def __getattr__(self, name):
            pytest.fail(f"the hub was asked again ({name})")

    monkeypatch.setattr("huggingface_hub.get_session", Unreachable)
    loading.hub_answers.cache_clear()
    try:
        for _ in range(2):
            refused(Model(name="nobody/nothing"), tokenizer, part)
    finally:
        loading.hub_answers.cache_clear()
    assert asked == [3]


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_an_empty_folder_is_told(part, tokenizer, tmp_path):
    assert refused(Model(name=str(tmp_path)), tokenizer, part).endswith(FOLDER)


def test_a_folder_without_weights_is_told(saved, tokenizer):
    (saved / "model.safetensors").unlink()
    assert refused(Model(name=str(saved)), tokenizer).endswith(FOLDER)


def pickled(folder, parts=1):
    """Replace the weights of a folder by the same in a .bin file, or in several with an index."""
    weights = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return weights
    files = [f"pytorch_model-{part + 1:05}-of-{parts:05}.bin" for part in range(parts)]
    places = {name: files[number % parts] for number, name in enumerate(weights)}
    for file in files:
        torch.save({name: weights[name] for name in weights if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return weights


@pytest.mark.parametrize("parts", [1, 3])
def test_pickled_weights_are_read_and_have_a_fingerprint(saved, tokenizer, parts):
    expected = pickled(saved, parts)
    found = loading.load(Model(name=str(saved)), tokenizer).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert len(weight_files(saved)) == parts
    assert all(path.suffix == ".bin" for path in weight_files(saved))
    built("bart", seed=1).save_pretrained(saved)
    assert [path.name for path in weight_files(saved)] == ["model.safetensors"], "which are read if there are both"


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("named", ["pytorch_model.bin", "pytorch_model-00002-of-00003.bin"])
@pytest.mark.parametrize("content", ["code", "garbage", "empty"])
def test_code_in_pickled_weights_does_not_run(saved, tokenizer, tmp_path, named, content):
    pickled(saved, 1 if named == "pytorch_model.bin" else 3)
    if content == "code":
        torch.save({"model.shared.weight": Malicious(str(tmp_path / "ran"))}, saved / named)
    else:
        (saved / named).write_bytes(b"garbage" if content == "garbage" else b"")
    told = refused(Model(name=str(saved)), tokenizer)
    assert told.endswith(FOLDER)
    assert not (tmp_path / "ran").exists()
    if content != "empty":
        reason = "its .bin file is damaged, or contains more than tensors, which is never loaded"
        assert told == f"cannot load the model of {str(saved)!r}: {reason}. {FOLDER}"


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"a": "pytorch_model.bin"}, "names 'pytorch_model.bin', which is not a .safetensors file in the same folder"),
        ({"a": "/b.safetensors"}, "names '/b.safetensors', which is not a .safetensors file in the same folder"),
        ({"a": 3}, "names 3, which is not a .safetensors file in the same folder"),
        ({}, "has no weight_map, which says where each tensor is"),
        (None, "has no weight_map, which says where each tensor is"),
    ],
)
def test_an_index_names_files_of_its_own_kind_beside_it(saved, tokenizer, index, reason):
    pickled(saved)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    told = refused(Model(name=str(saved)), tokenizer)
    assert told == f"cannot load the model of {str(saved)!r}: model.safetensors.index.json {reason}. {FOLDER}"


def test_weights_that_lack_a_tensor_are_refused(saved, tokenizer):
    weights = pickled(saved)
    del weights["model.encoder.layers.0.fc1.weight"]
    torch.save(weights, saved / "pytorch_model.bin")
    told = refused(Model(name=str(saved)), tokenizer)
    assert "its weights lack 1 tensors, such as model.encoder.layers.0.fc1.weight, which would be random. " in told


CONFIG, GENERATION = "config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("file", "name", "value", "reason"),
    [
        (
            CONFIG,
            "eos_token_id",
            10**6,
            "eos_token_id in config.json: must be the number of a token, 0 to 388, got 1000000",
        ),
        (CONFIG, "pad_token_id", None, "config.json has no padding token (pad_token_id). Batches need one"),
        (CONFIG, "decoder_start_token_id", -1, "decoder_start_token_id in config.json: must be the number of a token"),
        (CONFIG, "activation_dropout", 77, "dropout probability has to be between 0 and 1, but got 77"),
        (CONFIG, "decoder_attention_heads", -1, "RuntimeError: invalid shape dimension"),
        (CONFIG, "decoder_layers", -1, "decoder_layers in config.json: must be at least 1, got -1"),
        (GENERATION, "eos_token_id", "x", "eos_token_id in generation_config.json: must be the number of a token"),
        (GENERATION, "forced_eos_token_id", [], "forced_eos_token_id in generation_config.json: must be the number"),
        (GENERATION, "num_beams", "4", "num_beams in generation_config.json: must be a whole number, got '4'"),
        (GENERATION, "num_beams", 0, "num_beams in generation_config.json: must be at least 1, got 0"),
        (GENERATION, "bad_words_ids", [3], "bad_words_ids in generation_config.json: must be lists of token ids, got"),
        (GENERATION, "bad_words_ids", [[-3]], "bad_words_ids in generation_config.json: must be the number of a token"),
    ],
)
def test_a_wrong_setting_of_a_model_is_named_when_it_is_loaded(saved, tokenizer, file, name, value, reason):
    content = json.loads((saved / file).read_text())
    (saved / file).write_text(json.dumps({**content, name: value}))
    told = refused(Model(name=str(saved)), tokenizer)
    assert reason in told
    assert told.endswith(FOLDER)


def test_damaged_weights_are_told(saved, tokenizer):
    (saved / "model.safetensors").write_bytes(b"garbage")
    assert refused(Model(name=str(saved)), tokenizer).endswith(FOLDER)


@pytest.mark.parametrize("config", ["{", "{}", '{"model_type": "unheard-of"}'])
def test_a_config_that_says_nothing_is_told(saved, tokenizer, config):
    (saved / "config.json").write_text(config)
    assert refused(Model(name=str(saved)), tokenizer).endswith(FOLDER)


ANYTHING = ["[]", "null", "3", '"x"', "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "", "\x00", "{}"]


@pytest.mark.parametrize("text", ANYTHING, ids=lambda text: text[:9])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "config.json", "generation_config.json"])
def test_a_file_of_a_model_that_contains_anything_is_told_or_does_not_matter(saved, tokenizer, name, text):
    (saved / name).write_text(text)
    for load in (
        lambda: loading.load(Model(name=str(saved)), tokenizer),
        lambda: loading.load_tokenizer(Model(name=str(saved)), lambda: (), ""),
    ):
        with suppress(UserError):
            load()


def test_a_folder_without_a_tokenizer_is_told(saved, tokenizer):
    for path in saved.glob("*token*"):
        path.unlink()
    told = refused(Model(name=str(saved)), tokenizer, "tokenizer")
    assert "it has only special tokens; its vocabulary is missing. " in told
    assert told.endswith(FOLDER)


def test_a_tokenizer_that_cannot_be_used_is_told_when_it_is_loaded(saved, tokenizer):
    path = saved / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": []}))
    told = refused(Model(name=str(saved)), tokenizer, "tokenizer")
    assert "TypeError: '>' not supported between" in told


CODE = """
from transformers import BartConfig, BartForConditionalGeneration
class Mine(BartConfig):
    model_type = "mine"
class MineForWriting(BartForConditionalGeneration):
    config_class = Mine
"""


def test_code_that_comes_with_a_model_runs_only_if_asked_for(saved, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code"))
    config = json.loads((saved / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code_of_mine.Mine", "AutoModelForSeq2SeqLM": "code_of_mine.MineForWriting"},
    }
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "code_of_mine.py").write_text(CODE)
    told = refused(Model(name=str(saved)), tokenizer)
    assert told.endswith("It comes with its own code; if you trust it, pass --trust-remote-code on the command line.")
    with allow_remote_code(True):
        trusted = loading.load(Model(name=str(saved)), tokenizer)
    assert type(trusted).__name__ == "MineForWriting"


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, pickle.UnpicklingError, MemoryError])
def test_whatever_a_library_raises_at_a_file_is_told(error):
    with pytest.raises(UserError, match="cannot load the model of 'x': "), loading.explained("x", "model"):
        raise error


def test_a_full_disk_and_a_stop_are_not_errors_of_the_model():
    for error in (OSError(28, "No space left on device", "x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, loading.explained("x", "model"):
            raise error
        assert raised.value is error


def test_our_own_mistakes_are_not_explained_away():
    with pytest.raises(AttributeError), loading.explained("x", "model"):
        loading.prepare_generation(None, Generation())


def test_a_loaded_model_is_in_full_precision(saved, tokenizer):
    half = AutoModelForSeq2SeqLM.from_pretrained(saved).to(torch.bfloat16)
    shutil.rmtree(saved)
    half.save_pretrained(saved)
    assert loading.load(Model(name=str(saved)), tokenizer).dtype == torch.float32


def test_the_saved_tokenizer_is_read_by_the_library_alone(saved, tokenizer):
    assert AutoTokenizer.from_pretrained(saved)(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
