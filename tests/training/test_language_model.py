"""A language model of the targets: trained, asked once about every label, and refused where it does not fit."""

import json
import shutil

import numpy as np
import pytest
import torch
from commands import TRAIN as TRAIN_PROGRAM
from commands import environment
from forks import fork_ranks
from models import SHORT_TRAINING, TINY_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.data.tokens import Tokens
from ngramloss.errors import UserError
from ngramloss.training.language_model import label_logp, load_language_model
from ngramloss.training.prepared import Prepared

pytestmark = pytest.mark.usefixtures("own_cache")

DATA = """
[data]
name = "data"
separator = "none"
max_source = 96
max_target = 160
"""
LM = (
    DATA.replace("max_source = 96", 'max_source = 4\nprompt = "none"')
    + TINY_MODEL
    + 'architecture = "llama"\n'
    + SHORT_TRAINING
)
FES = 'objective = "ce(smoothing=0.1) + margin"\n' + DATA + TINY_MODEL + SHORT_TRAINING


def train(name, *settings, run):
    return cli.main(["train", name, "--run", run, *(word for one in settings for word in ("--set", one))])


@pytest.fixture(scope="module")
def made(tmp_path_factory, own_cache):
    """Data, a language model of its targets, and a model that was trained with the margin to it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "data").mkdir()
    for split, count in (("train", 12), ("validation", 4), ("test", 3)):
        items = enumerate(newswire.items(split, count))
        rows = [{"id": str(number), "document": item.document, "summary": item.summary} for number, item in items]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lm.toml").write_text(LM)
    (folder / "fes.toml").write_text(FES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("lm.toml", run="lm") == 0
        assert train("fes.toml", "data.language_model=lm", run="fes") == 0
    return folder


@pytest.fixture
def place(made, monkeypatch, tmp_path):
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "place"))
    return tmp_path / "place"


def lines(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_a_model_trains_and_validates_with_the_margin(made):
    log = lines(made / "fes")
    assert [line["step"] for line in log if "margin" in line] == [1, 2]
    assert all(0 < line["margin"] < 1 and line["gradient/margin"] > 0 for line in log if "margin" in line)
    assert all(0 < line["eval_margin"] < 1 for line in log if "eval_loss" in line)
    card = (made / "fes" / "card.md").read_text()
    assert f"language model `{made / 'lm' / 'model'}` says of the targets" in card
    assert "Its questions and answers and its coverage of entities are left out" in card


def test_every_label_has_what_the_model_says_of_it(made):
    prepared = Prepared.read(made / "fes" / "prepared.json")
    model = AutoModelForCausalLM.from_pretrained(made / "lm" / "model").eval()
    for split in prepared.splits.values():
        rows = Tokens(split.tokens, split.beside)
        for row in rows:
            labels, found = torch.tensor(row["labels"]).long(), row["lm_logp"]
            assert labels[0] == 0  # <s>, which begins every text
            logp = model(labels[None]).logits[0, :-1].log_softmax(-1)
            expected = logp.gather(-1, labels[1:, None])[:, 0].detach().numpy()
            np.testing.assert_allclose(found, [0.0, *expected], rtol=1e-4, atol=1e-5)
    numbers = np.load(prepared.splits["train"].beside["lm_logp"])
    assert prepared.language_model.perplexity == pytest.approx(np.exp(-numbers[numbers < 0].mean()), rel=1e-5)


def test_a_language_model_reads_no_source(made):
    rows = Tokens(Prepared.read(made / "lm" / "prepared.json").splits["train"].tokens)
    theirs = Tokens(Prepared.read(made / "fes" / "prepared.json").splits["train"].tokens)
    for own, other in zip(rows, theirs, strict=True):
        assert own["input_ids"].tolist() == [0]
        assert [0, *own["labels"]] == other["labels"].tolist()


def test_texts_without_a_start_token_are_asked_about_from_the_first_token_on(made):
    folder = made / "lm" / "model"
    lm = load_language_model(str(folder), AutoTokenizer.from_pretrained(folder), torch.device("cpu"))
    (whole,), (bare,), (empty,) = (label_logp(lm, [ids]) for ids in ([0, 7, 8, 2], [7, 8, 2], []))
    assert whole[0] == 0
    assert bare == pytest.approx(whole[1:], rel=1e-5)
    assert empty == []


def test_numbers_are_computed_once(place, monkeypatch):
    monkeypatch.setattr("ngramloss.training.language_model.label_logp", None)
    assert train("fes.toml", "data.language_model=lm/model", run="again") == 0
    assert lines(place / "again")[-1]["eval_margin"] == lines(place / "fes")[-1]["eval_margin"]


def test_another_language_model_has_other_numbers_and_does_not_continue_a_run(place, capsys):
    files = place / "fes" / "prepared.json"
    before = Prepared.read(files)
    shutil.rmtree(place / "fes" / "model")
    shutil.rmtree(place / "fes" / "checkpoints" / "checkpoint-2")
    settings = place / "fes" / "recipe.toml"
    settings.write_text(settings.read_text().replace(before.language_model.name, str(place / "lm" / "model")))
    assert train("lm.toml", "train.seed=7", run="lm2") == 0
    shutil.rmtree(place / "lm")
    (place / "lm2").rename(place / "lm")
    assert train("fes.toml", "data.language_model=lm", run="fes") == 2
    assert (
        "settings, data or code of fes have changed since it was started:\n  language model: "
        in capsys.readouterr().err
    )
    assert train("fes.toml", "data.language_model=lm", run="other") == 0
    now = Prepared.read(place / "other" / "prepared.json")
    assert now.splits["train"].beside != before.splits["train"].beside


def test_a_decoder_only_model_trains_with_the_margin(place):
    (place / "causal.toml").write_text(FES.replace("[train]", 'architecture = "llama"\n[train]'))
    assert train("causal.toml", "data.language_model=lm", run="causal") == 0
    assert 0 < lines(place / "causal")[-1]["eval_margin"] < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), "margin reads a language model of the targets alone, but data.language_model is empty. Train one"),
        (
            ("data.language_model=fes",),
            "fes/model is an encoder-decoder, but a language model of the targets must be deco",
        ),
        (("data.language_model=nowhere",), "cannot load the model of 'nowhere'"),
        (
            ("data.language_model=lm", "model.vocabulary=500"),
            "lm/model has another tokenizer than the model, so its token ids",
        ),
        (("data.language_model=new",), "data.language_model is in the run's own folder new, where --fresh"),
    ],
)
def test_a_language_model_that_does_not_fit_is_refused(place, capsys, settings, message):
    (place / "new").mkdir()
    assert train("fes.toml", *settings, run="new") == 2
    assert message in capsys.readouterr().err


def test_a_language_model_that_no_term_reads_is_named(place, capsys):
    assert train("fes.toml", "objective=ce", "data.language_model=lm", "train.max_steps=1", run="plain") == 0
    assert "data.language_model is not used: no term of 'ce' reads one." in capsys.readouterr().err


def test_a_model_from_scratch_takes_a_tokenizer(place):
    assert train("lm.toml", "model.tokenizer=fes/model", "model.vocabulary=500", run="same") == 0
    assert train("fes.toml", "data.language_model=same", "train.max_steps=1", run="new") == 0
    saved = recipe.load(str(place / "same" / "recipe.toml"))
    assert saved.model.tokenizer == "fes/model"
    own, other = (AutoTokenizer.from_pretrained(place / run / "model") for run in ("same", "fes"))
    assert own.get_vocab() == other.get_vocab()


def test_a_tokenizer_belongs_to_a_model_from_scratch():
    with pytest.raises(
        UserError, match=r"model.tokenizer: is for a model from scratch, model.name = .scratch. without"
    ):
        recipe.load("xsum", ["model.tokenizer=x"])


def test_systems_have_no_language_model(place, capsys):
    changes = ("data.language_model=lm", "model.tokenizer=lm", "model.name=scratch")
    assert train("bertsum-ext-demo", *changes, run="system") == 2
    said = capsys.readouterr().err
    assert "data.language_model: is not a setting of bertsum_ext. Leave it out." in said
    assert "model.tokenizer: is not a setting of bertsum_ext. Leave it out." in said


@pytest.mark.slow  # starts two processes
def test_two_processes_have_the_losses_of_one(place):
    names = [f"data.language_model={place / 'lm'}", f"data.name={place / 'data'}", "model.dropout=0.0"]
    settings = [word for name in names for word in ("--set", name)]
    command = ["train", str(place / "fes.toml"), *settings, "--run"]  # the processes may have begun in another folder
    assert cli.main([*command, str(place / "one")]) == 0
    codes, err = fork_ranks(TRAIN_PROGRAM, [*command, str(place / "two")], environment=environment())
    assert codes == [0, 0], err
    for one, two in zip(lines(place / "one"), lines(place / "two"), strict=True):
        for name in ("margin", "eval_margin"):
            assert one.get(name, 0) == pytest.approx(two.get(name, 0), rel=1e-4)
