"""BertSumAbs: a pretrained encoder, a new decoder, two learning rates; every objective works on it."""

import json
import shutil

import pytest
import torch
from commands import assert_equal_runs, finished
from models import tiny
from safetensors.torch import load_file
from tiny_encoders import MODEL
from transformers import AutoModelForSeq2SeqLM

import ngramloss as ng
from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.errors import UserError
from ngramloss.recipe import Model, Train
from ngramloss.training.optimiser import optimiser_of

pytestmark = pytest.mark.usefixtures("own_cache")

EXT = f"""
system = "bertsum_ext(layers=1,heads=2,feed_forward=16,dropout=0.0,min_words=2)"
[data]
name = "data"
max_source = 96
{MODEL}[train]
max_steps = 2
batch_size = 4
accumulate = 1
warmup_steps = 0
eval_every = 0
best = "last"
"""
ABS = """
objective = "ce + matches(2)"
[data]
name = "data"
separator = "none"
max_source = 96
max_target = 24
[model]
name = "scratch"
encoder = "ext/model"
decoder_layers = 1
heads = 2
feed_forward = 16
dropout = 0.1
[train]
max_steps = 4
batch_size = 4
accumulate = 1
learning_rate = 1e-2
warmup_steps = 2
encoder_learning_rate = 1e-3
encoder_warmup_steps = 1
log_every = 1
eval_every = 2
save_every = 2
keep = 9
[generation]
num_beams = 2
max_length = 12
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, a trained extractor, and a trained model with its encoder."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    for split, count in (("train", 12), ("validation", 4), ("test", 3)):
        items = enumerate(newswire.items(split, count))
        rows = [{"id": f"{number}", "document": item.document, "summary": item.summary} for number, item in items]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ext.toml").write_text(EXT)
    (folder / "abs.toml").write_text(ABS.replace('"data"', json.dumps(str(folder / "data"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "ext.toml", "--run", "ext"]) == 0
        assert cli.main(["train", "abs.toml", "--run", "abs"]) == 0
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def test_it_begins_with_the_extractor_s_encoder_and_a_decoder_of_its_own(here):
    from ngramloss.models import loading

    settings = recipe.load("abs.toml").model
    tokenizer, _ = loading.load_tokenizer(settings, lambda: (), "")
    model = loading.load(settings, tokenizer)
    saved = load_file("ext/model/model.safetensors")
    encoder = model.get_encoder().state_dict()
    assert all(torch.equal(saved[f"bert.{name}"], tensor) for name, tensor in encoder.items())
    words = encoder["embeddings.word_embeddings.weight"]
    assert torch.equal(model.get_decoder().get_input_embeddings().weight, words)
    assert torch.equal(model.get_output_embeddings().weight, words)
    assert model.get_output_embeddings().weight is model.get_decoder().get_input_embeddings().weight
    assert model.config.decoder.num_hidden_layers == 1


def test_it_is_trained_saved_generated_and_scored_as_any_model(here, tmp_path, capsys):
    model = AutoModelForSeq2SeqLM.from_pretrained("abs/model")
    assert model.config.model_type == "encoder-decoder"
    assert cli.main(["generate", "abs", "--out", str(tmp_path / "texts")]) == 0
    capsys.readouterr()
    assert cli.main(["score", str(tmp_path / "texts")]) == 0
    assert "The encoder is `ext/model`, the decoder is new" in (here / "abs" / "card.md").read_text()


def test_both_learning_rates_follow_their_own_warm_up(here):
    lines = [json.loads(line) for line in (here / "abs" / "log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    # linear: up in 2 steps or 1, then down to 0 at step 4
    assert [line["learning_rate"] for line in lines] == pytest.approx([0, 5e-3, 1e-2, 5e-3])
    assert [line["encoder_learning_rate"] for line in lines] == pytest.approx([0, 1e-3, 2e-3 / 3, 1e-3 / 3])


@pytest.mark.slow
def test_a_killed_training_continues_to_the_same_weights(here, tmp_path):
    encoder = f"model.encoder={here / 'ext' / 'model'}"
    arguments = ["train", str(here / "abs.toml"), "--run", str(tmp_path / "run"), "--set", encoder]
    assert finished(arguments, sabotage="saving:4")[0] == -9
    assert finished(arguments)[0] == 0
    assert_equal_runs(tmp_path / "run", here / "abs")


def test_a_changed_encoder_is_not_continued(here, tmp_path, capsys):
    run, encoder = tmp_path / "run", tmp_path / "encoder"
    shutil.copytree("ext/model", encoder)
    arguments = ["train", "abs.toml", "--run", str(run), "--set", f"model.encoder={encoder}"]
    assert cli.main(arguments) == 0
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    assert cli.main(arguments) == 2
    assert "have changed since it was started:\n  model: config.json: " in capsys.readouterr().err


@pytest.mark.parametrize("family", ["bart", "bert2bert", "t5"])
def test_an_encoder_s_weights_have_their_own_group_and_shared_ones_do_not(family):
    model = tiny(family)
    optimiser = optimiser_of(model, Train(encoder_learning_rate=1e-3), torch.device("cpu"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {names[id(weight)] for group in optimiser.param_groups if "encoder" in group for weight in group["params"]}
    others = {
        names[id(weight)] for group in optimiser.param_groups if "encoder" not in group for weight in group["params"]
    }
    assert own | others == set(names.values())
    assert not own & others
    assert all("encoder." in name for name in own)
    assert all("decoder." in name or "shared" in name or "lm_head" in name or "bias" in name for name in others)
    plain = optimiser_of(model, Train(), torch.device("cpu"))
    assert [sorted(group) for group in plain.param_groups] == [sorted(plain.defaults | {"params": 0})] * 2


def test_the_encoder_learns_at_its_own_rate():
    """Without gradient clipping, decay and momentum's history, Adam's first update is the learning rate in size."""
    model = tiny("bert2bert")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    rows = [{"input_ids": [4, 5, 6], "labels": [7, 8, 2]}, {"input_ids": [9, 5], "labels": [8, 2]}]
    settings = Train(
        max_steps=1,
        batch_size=2,
        accumulate=1,
        learning_rate=1e-2,
        encoder_learning_rate=1e-4,
        warmup_steps=0,
        weight_decay=0.0,
        clip=0.0,
        eval_every=0,
        schedule="constant_with_warmup",
    )
    ng.train(model, None, rows, settings)
    moved = {name: (weight - before[name]).abs().max().item() for name, weight in model.named_parameters()}
    encoder = [value for name, value in moved.items() if name.startswith("encoder.") and value]
    decoder = [value for name, value in moved.items() if name.startswith("decoder.") and value]
    assert max(encoder) == pytest.approx(1e-4, rel=0.01)
    assert max(decoder) == pytest.approx(1e-2, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["model.name=ext/model"],
            'model.encoder: is for a model with a new decoder. Set model.name = "scratch", too.',
        ),
        (["model.encoder=abs/model"], "is an encoder-decoder (its type is encoder-decoder), but an encoder is needed"),
        (["model.heads=3", "model.width=24"], "model.heads: must divide the width of ext/model, 16, got 3."),
        (["data.max_source=1025"], "ext/model reads at most 1024 tokens, and the recipe asks for 1025."),
        (["train.encoder_learning_rate=0"], "train.encoder_warmup_steps: needs train.encoder_learning_rate."),
        (["train.encoder_warmup_steps=1.5"], "train.encoder_warmup_steps: must be a whole number of steps"),
        (["system=bertsum_abs"], "system: bertsum_abs is trained like any model. Leave system out"),
    ],
)
def test_mistakes_are_sentences(here, tmp_path, capsys, settings, sentence):
    changes = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["train", "abs.toml", "--run", str(tmp_path / "run"), *changes]) == 2
    assert sentence in capsys.readouterr().err


def test_a_decoder_only_model_has_no_encoder_to_learn_at_another_rate():
    with pytest.raises(UserError, match="the model is decoder-only"):
        optimiser_of(tiny("llama"), Train(encoder_learning_rate=1e-3), torch.device("cpu"))


def test_the_folder_of_a_run_is_its_model_not_its_encoder(here):
    from ngramloss.generation.job import job

    assert job("abs").loading == Model("abs/model", decoder_layers=1, heads=2, feed_forward=16, dropout=0.1)
