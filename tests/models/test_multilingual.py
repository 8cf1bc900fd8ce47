"""Multilingual models: training and generation begin with the same tokens, whatever the folder says."""

import json
import re

import pytest
import sacrebleu
import tiny_tokenizers
import torch
from lanes import few
from tiny_multilingual import LANGUAGES, PAIRS, model_folder, sentencepiece_model

from ngramloss import cli
from ngramloss.data import Example
from ngramloss.data.tokens import Shape, tokenise, tokenizer_fingerprint
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.first_tokens import align_start
from ngramloss.models.languages import codes, set_languages
from ngramloss.recipe import Model

pytestmark = pytest.mark.slow

RECIPE = """
base = "translation"
objective = "ce"
[data]
name = "{data}"
source_language = "{source}"
target_language = "{target}"
max_source = 32
max_target = 32
[model]
name = "{model}"
[train]
max_steps = {steps}
batch_size = 16
accumulate = 1
learning_rate = 5e-3
warmup_steps = 10
schedule = "linear"
weight_decay = 0.0
log_every = 50
eval_every = 0
save_every = 1000
[generation]
num_beams = 1
max_length = 40
"""


@pytest.fixture
def data(tmp_path):
    rows = ({"source": english, "target": german} for english, german in PAIRS)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_file(tmp_path, model, data, family, steps=150, **changes):
    source, target = LANGUAGES[family]
    path = tmp_path / "mine.toml"
    path.write_text(
        RECIPE.format(model=model, data=data, steps=steps, **{"source": source, "target": target, **changes})
    )
    return path


def bleu(folder):
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    references = [json.loads(line)["reference"] for line in (folder / "references.jsonl").read_text().splitlines()]
    return sacrebleu.corpus_bleu([row["prediction"] for row in rows], [references]).score


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "start"),
    few(
        [("mbart", "wrong"), ("m2m100", "absent"), ("mbart50", "given")],
        [
            *((family, start) for family in LANGUAGES for start in ("given", "absent")),
            ("mbart", "wrong"),
            ("m2m100", "none"),
        ],
    ),
)
def test_an_overfitted_model_gives_its_training_pairs_back(tmp_path, data, family, start, capsys):
    folder = model_folder(family, tmp_path / "model", start=start)
    run = tmp_path / "run"
    assert cli.main(["train", str(recipe_file(tmp_path, folder, data, family)), "--run", str(run)]) == 0
    said = capsys.readouterr().err
    assert ("generation will start with" in said) == (start != "given")
    assert cli.main(["generate", str(run), "--split", "train"]) == 0
    assert "generation will start with" not in capsys.readouterr().err  # it was saved with the model
    assert bleu(run) > 95
    forced = [json.loads(line) for line in (run / "seen.jsonl").read_text().splitlines()]
    assert all(min(row["label_probability"]) > 0.5 for row in forced)  # the same start, also in teacher forcing


# Languages of a tokenizer


@pytest.fixture(scope="module", params=LANGUAGES)
def family(request, tmp_path_factory):
    return request.param, model_folder(request.param, tmp_path_factory.mktemp(request.param), start="absent")


def loaded(folder, source="", target=""):
    settings = Model(name=str(folder))
    tokenizer, _ = loading.load_tokenizer(settings, lambda: (), "")
    if source or target:
        set_languages(tokenizer, source, target, model="m")
    return loading.load(settings, tokenizer), tokenizer


def test_a_multilingual_tokenizer_without_languages_is_an_error_that_names_the_settings(family):
    _, tokenizer = loaded(family[1])
    with pytest.raises(
        UserError,
        match=r"^m is multilingual. Set data.source_language and data.target_language to codes of its "
        r"languages: \w+, .* and \d+ more. If sources and targets have the same language, set it twice.$",
    ):
        set_languages(tokenizer, "", "", model="m")
    with pytest.raises(UserError, match="is multilingual"):
        set_languages(tokenizer, LANGUAGES[family[0]][0], "", model="m")


@pytest.mark.parametrize(
    ("family", "given", "meant"),
    [
        ("mbart", ("en", "deu_Latn"), ("en_XX", "de_DE")),
        ("mbart50", ("EN", "de-AT"), ("en_XX", "de_DE")),
        ("m2m100", ("eng_Latn", "de_DE"), ("en", "de")),
        ("nllb", ("en", "de_DE"), ("eng_Latn", "deu_Latn")),
    ],
    indirect=["family"],
)
def test_unknown_languages_are_reported_together_with_the_codes_that_may_be_meant(family, given, meant):
    _, tokenizer = loaded(family[1])
    with pytest.raises(UserError) as error:
        set_languages(tokenizer, *given, model="m")
    assert str(error.value) == (
        f"data.source_language: m has no language {given[0]!r}. Did you mean {meant[0]!r}?\n"
        f"data.target_language: m has no language {given[1]!r}. Did you mean {meant[1]!r}?"
    )


def test_a_language_that_resembles_none_is_reported_with_the_codes_there_are(family):
    _, tokenizer = loaded(family[1])
    with pytest.raises(UserError, match=r"has no language 'klingon'\. It has \w+, "):
        set_languages(tokenizer, "klingon", LANGUAGES[family[0]][1], model="m")


def test_a_tokenizer_that_was_saved_with_its_languages_needs_no_settings(family, tmp_path):
    name, folder = family
    _, tokenizer = loaded(folder, *LANGUAGES[name])
    tokenizer.save_pretrained(tmp_path)
    again, _ = loading.load_tokenizer(Model(name=str(tmp_path)), lambda: (), "")
    set_languages(again, "", "", model="m")
    assert (again.src_lang, again.tgt_lang) == LANGUAGES[name]


def test_languages_are_refused_where_the_tokenizer_has_none():
    assert codes(tiny_tokenizers.ours()) == {}
    set_languages(tiny_tokenizers.ours(), "", "", model="m")
    with pytest.raises(
        UserError,
        match=r"data.target_language: the tokenizer of m has no languages, so 'de' means nothing to it. Leave the "
        r"setting out; columns are chosen with data.source and data.target.",
    ):
        set_languages(tiny_tokenizers.ours(), "", "de", model="m")


def test_each_pair_of_languages_has_its_own_tokens_in_the_cache(family, tmp_path):
    name, folder = family
    source, target = LANGUAGES[name]
    examples = [Example("1", *PAIRS[0])]
    tokens = []
    for pair in ((source, target), (target, source), (source, source)):
        _, tokenizer = loaded(folder, *pair)
        tokens.append(tokenise(examples, "f", tokenizer, Shape(separator="none"), cache=tmp_path))
        ids = codes(tokenizer)
        row = tokens[-1][0]
        assert ids[pair[0]] in row["input_ids"]
        assert ids[pair[1]] in row["labels"]
    assert len({rows.folder for rows in tokens}) == 3


@pytest.mark.parametrize("family", ["m2m100"], indirect=True)
def test_tokens_depend_on_how_sentencepiece_splits(family):
    (_, tokenizer), (_, same) = loaded(family[1]), loaded(family[1])
    for each in (tokenizer, same):
        set_languages(each, "en", "de", model="m")
    before = tokenizer_fingerprint(tokenizer)
    assert before == tokenizer_fingerprint(same)
    tokenizer.sp_model.LoadFromSerializedProto(sentencepiece_model(["aaa bbb abab"], 8))
    assert tokenizer_fingerprint(tokenizer) != before


@pytest.mark.parametrize("family", ["m2m100"], indirect=True)
def test_a_model_without_embeddings_for_its_languages_is_refused(family, tmp_path, data, capsys):
    model, tokenizer = loaded(family[1])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    assert (
        cli.main(
            ["train", str(recipe_file(tmp_path, tmp_path / "small", data, "m2m100")), "--run", str(tmp_path / "run")]
        )
        == 2
    )
    assert re.search(
        rf"the tokenizer has \d+ tokens but the model has {len(tokenizer)} embeddings", capsys.readouterr().err
    )


# The start of the decoder


def test_generation_begins_with_the_decoder_inputs_of_training(family, messages):
    name, folder = family
    model, tokenizer = loaded(folder, *LANGUAGES[name])
    align_start(model, tokenizer, name="m", training=True)
    labels = torch.tensor([tokenizer(text_target=PAIRS[0][1])["input_ids"]])
    language = codes(tokenizer)[LANGUAGES[name][1]]
    trained = decoder_inputs(model, labels)[0].tolist()[: 1 if name == "mbart" else 2]
    assert trained[-1] == language
    written = model.generate(torch.tensor([tokenizer(PAIRS[0][0])["input_ids"]]), max_length=5)[0].tolist()
    assert written[: len(trained)] == trained
    assert model.generation_config.forced_bos_token_id == (None if name == "mbart" else language)
    assert len(messages) == 1
    assert messages[0].startswith(
        f"generation will start with {tokenizer.convert_ids_to_tokens(trained[0])!r} ({trained[0]}), as training does, "
        "and not with '<s>' (0), as the settings of m say."
    )


def test_a_language_forced_by_the_models_settings_gives_way_to_the_one_asked_for(family, messages):
    name, folder = family
    model, tokenizer = loaded(folder, *LANGUAGES[name])
    model.generation_config.forced_bos_token_id = other = codes(tokenizer)[LANGUAGES[name][0]]
    align_start(model, tokenizer, name="m", training=False)
    assert model.generation_config.forced_bos_token_id != other
    assert f"({other}), as the settings of m say." in messages[1]
    assert ("the first generated token will be any token" in messages[1]) == (name == "mbart")


def scratch(architecture, **ids):
    tokenizer = tiny_tokenizers.ours()
    model = loading.from_scratch(
        Model(name="scratch", architecture=architecture, width=16, heads=2, feed_forward=16), tokenizer
    )
    for key, value in ids.items():
        setattr(model.generation_config, key, value)
    return model, tokenizer


@pytest.mark.parametrize("architecture", ["bart", "mbart", "m2m100", "pegasus", "marian", "t5"])
def test_whatever_the_family_a_wrong_start_is_set_right_and_reported(architecture, messages):
    model, tokenizer = scratch(architecture)
    right = model.generation_config.decoder_start_token_id
    align_start(model, tokenizer, name="m", training=True)
    assert messages == []
    assert model.generation_config.forced_bos_token_id is None
    model.generation_config.decoder_start_token_id = 3
    align_start(model, tokenizer, name="m", training=True)
    assert model.generation_config.decoder_start_token_id == right
    assert [line.partition(" (")[0] for line in messages] == [
        f"generation will start with {tokenizer.convert_ids_to_tokens(right)!r}"
    ]


def test_a_first_token_that_training_never_sees_is_not_forced(messages):
    model, tokenizer = scratch("bart", forced_bos_token_id=0)
    align_start(model, tokenizer, name="m", training=True)
    assert (messages, model.generation_config.forced_bos_token_id) == ([], 0)  # its labels begin with <s>
    model.generation_config.forced_bos_token_id = 3
    align_start(model, tokenizer, name="m", training=True)
    assert model.generation_config.forced_bos_token_id == 0
    assert messages == [
        "the first generated token will be '<s>' (0), as in training, and not '<unk>' (3), as the settings of m say."
    ]


@pytest.mark.parametrize("architecture", ["bart", "t5"])
def test_a_model_without_a_start_token_is_refused_with_what_to_do(architecture):
    model, tokenizer = scratch(architecture, decoder_start_token_id=None)
    model.config.decoder_start_token_id = None
    with pytest.raises(
        UserError,
        match=r"m has no decoder_start_token_id, the token that the decoder starts with. Set it in its config.json "
        r"to the token that the model was trained with.",
    ):
        align_start(model, tokenizer, name="m", training=True)


def test_the_start_token_of_the_generation_settings_serves_training_too():
    model, tokenizer = scratch("bart", decoder_start_token_id=3)
    model.config.decoder_start_token_id = None
    align_start(model, tokenizer, name="m", training=True)
    assert decoder_inputs(model, torch.tensor([[5, 2]])).tolist() == [[3, 5]]


@pytest.mark.parametrize("family", ["m2m100", "nllb"], indirect=True)
def test_m2m100_and_nllb_start_with_the_end_of_a_text_where_nothing_is_said(family):
    model, tokenizer = loaded(family[1], *LANGUAGES[family[0]])
    model.config.decoder_start_token_id = None
    align_start(model, tokenizer, name="m", training=True)
    assert (
        model.config.decoder_start_token_id == model.generation_config.decoder_start_token_id == tokenizer.eos_token_id
    )


@pytest.mark.parametrize("family", ["nllb"], indirect=True)
def test_a_tokenizer_that_hides_the_target_language_from_the_decoder_is_not_trained_with(family):
    model, tokenizer = loaded(family[1])
    tokenizer.legacy_behaviour = True
    set_languages(tokenizer, "eng_Latn", "deu_Latn", model="m")
    with pytest.raises(
        UserError,
        match=r"the tokenizer of m puts the target language after the text, where the decoder does not see it in time. "
        r"Set legacy_behaviour to false in its tokenizer_config.json.",
    ):
        align_start(model, tokenizer, name="m", training=True)
    align_start(model, tokenizer, name="m", training=False)
    assert model.generation_config.forced_bos_token_id == codes(tokenizer)["deu_Latn"]


# Models trained elsewhere


def test_a_model_trained_elsewhere_writes_in_the_language_asked_for(family, tmp_path, data, capsys):
    name, folder = family
    source, target = LANGUAGES[name]
    command = [
        "generate",
        str(folder),
        "--data",
        str(data),
        "--split",
        "train",
        "--limit",
        "2",
        "--out",
        str(tmp_path / "out"),
        "--preset",
        "translation",
        "--set",
        "generation.max_length=6",
    ]
    assert cli.main(command) == 2
    assert "is multilingual. Set data.source_language and data.target_language" in capsys.readouterr().err
    languages = ["--set", f"data.source_language={source}", "--set", f"data.target_language={target}"]
    assert cli.main([*command, *languages]) == 0
    assert "generation will start with" in capsys.readouterr().err
    about = json.loads((tmp_path / "out" / "generation.json").read_text())
    assert (about["languages"], about["task"]) == ([source, target], "translation")
    _, tokenizer = loaded(folder, source, target)
    started = about["generation"]["decoder_start_token_id"], about["generation"].get("forced_bos_token_id")
    language = codes(tokenizer)[target]
    assert started == ((language, None) if name == "mbart" else (tokenizer.eos_token_id, language))
    predictions = [
        json.loads(line)["prediction"] for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    assert not any(word in text for text in predictions for word in ("__", target))
    assert (
        cli.main([*command, "--set", f"data.source_language={source}", "--set", f"data.target_language={source}"]) == 2
    )
    assert "made with other settings" in capsys.readouterr().err
