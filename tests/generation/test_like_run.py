"""generate --like: other models and baselines read the documents of a run."""

import json
from pathlib import Path

import pytest
import transformers
from models import BART

from ngramloss import cli, recipe
from ngramloss.errors import UserError
from ngramloss.generation.job import job
from ngramloss.storage.run_folder import RunFolder

COLUMNS = {"data.source": "body", "data.target": "gold", "data.id": "key", "data.on_bad_row": "skip"}


@pytest.fixture
def trained(tmp_path):
    """The folder of a run on a file with odd columns and a bad row, as a training leaves it."""
    rows = [
        {"key": f"k{index}", "body": f"First of {index}. Second of {index}.", "gold": f"Gold {index}."}
        for index in range(6)
    ]
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"key": "bad", "body": 3, "gold": "x"}), *map(json.dumps, rows)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    changed = {**COLUMNS, "data.name": str(tmp_path / "data"), "data.max_source": 99}
    folder = tmp_path / "run"
    folder.mkdir()
    settings = recipe.load("demo", [f"{key}={json.dumps(value)}" for key, value in changed.items()])
    RunFolder(folder).recipe.write_text(recipe.dump(settings))
    return folder


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments)])


def test_a_baseline_reads_the_columns_of_a_run(trained, tmp_path):
    assert generate("lead-1", "--like", trained, "--out", tmp_path / "lead") == 0
    rows = [json.loads(line) for line in (tmp_path / "lead" / "predictions.jsonl").read_text().splitlines()]
    assert [(row["id"], row["prediction"]) for row in rows] == [(f"k{n}", f"First of {n}.") for n in range(6)]


def test_the_split_and_the_number_of_documents_are_those_of_its_predictions(trained):
    recorded = {"data": str(trained.parent / "data"), "split": "validation", "documents": 2}
    RunFolder(trained).generation.write_text(json.dumps(recorded))
    same = job("lead-1", like=str(trained))
    assert (same.split, same.limit) == ("validation", 2)
    other = job("lead-1", like=str(trained), split="test", limit=5)
    assert (other.split, other.limit) == ("test", 5)
    RunFolder(trained).generation.write_text(json.dumps({**recorded, "data": "elsewhere"}))
    elsewhere = job("lead-1", like=str(trained))
    assert (elsewhere.split, elsewhere.limit) == ("test", 0), "its predictions are of other documents"


def test_a_run_reads_them_with_its_own_prompt_and_not_rows_that_it_was_trained_on(trained, tmp_path):
    theirs = recipe.load("sft", [f"data.name={trained.parent / 'data' / 'train.jsonl'}", "data.test_fraction=0.5"])
    RunFolder(trained).recipe.write_text(recipe.dump(theirs))
    own = RunFolder(tmp_path / "own")
    for change, other in (("data.prompt={source} =", "other.jsonl"), ("data.test_fraction=0.0", "train.jsonl")):
        own.model.mkdir(parents=True, exist_ok=True)
        data = f"data.name={trained.parent / 'data' / other}"
        own.recipe.write_text(recipe.dump(recipe.changed(theirs, [data, change], objective=False)))
        if other == "other.jsonl":
            assert job(str(own.path), like=str(trained)).data.prompt == "{source} ="
        else:
            with pytest.raises(
                UserError, match=r"was trained with data.test_fraction = 0. With another value, some held-out rows"
            ):
                job(str(own.path), like=str(trained))


def change(trained, *settings):
    about = RunFolder(trained).recipe
    about.write_text(recipe.dump(recipe.changed(recipe.load(str(about)), settings)))


def test_another_model_reads_the_same_documents_with_its_own_search(trained, tmp_path):
    transformers.BartConfig(**BART).save_pretrained(tmp_path / "bart")
    base = str(tmp_path / "bart")
    work = job(base, like=str(trained))
    assert (work.data.source, work.data.target, work.data.id) == ("body", "gold", "key")
    assert (work.data.separator, work.generation) == ("none", None)
    change(trained, "task=translation")
    assert job(base, like=str(trained)).task == "translation"
    assert job(base, like=str(trained), overrides=["data.target=other"]).data.target == "other"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--like", "nowhere"], "no such file or folder: nowhere. The folder . contains empty."),
        (["--like", "empty"], "--like takes a run's folder, and empty has no recipe.toml."),
        (["--like", "nowhere", "--data", "newswire"], "give --data or --like, not both: each chooses the documents."),
    ],
)
def test_what_is_no_run_gets_a_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert generate("lead-1", *arguments, "--out", "x") == 2
    assert f"error: {sentence}" in capsys.readouterr().err
