"""generate --like: other models and baselines read the documents of a run."""

import dataclasses
import json
from pathlib import Path

import pytest
import transformers
from models import BART, LLAMA

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
    changed = {**COLUMNS, "data.name": str(tmp_path / "data"), "data.max_source": 99, "data.prefix": "p: "}
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
                UserError, match=r"was trained with data.test_fraction = 0: with another one, rows that it"
            ):
                job(str(own.path), like=str(trained))


@pytest.fixture
def bases(tmp_path):
    """The configurations of an encoder-decoder and of a decoder-only model."""
    transformers.BartConfig(**BART).save_pretrained(tmp_path / "bart")
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "bart"), str(tmp_path / "llama")


def change(trained, *settings):
    about = RunFolder(trained).recipe
    about.write_text(recipe.dump(recipe.changed(recipe.load(str(about)), settings)))


def test_another_model_reads_the_same_documents(trained, bases):
    work = job(bases[0], like=str(trained))
    assert (work.data.source, work.data.target, work.data.id) == ("body", "gold", "key")
    assert work.data.separator == "none"
    change(trained, "task=translation")
    assert job(bases[0], like=str(trained)).task == "translation"
    assert job(bases[0], like=str(trained), overrides=["data.target=other"]).data.target == "other"


def test_another_model_decodes_like_the_run_but_for_what_is_given(trained, bases, messages):
    change(trained, "generation.num_beams=3", "generation.length_penalty=0.5", "generation.max_length=33")
    work = job(bases[0], like=str(trained), overrides=["generation.num_beams=2"])
    theirs = recipe.load(str(RunFolder(trained).recipe)).generation
    assert work.generation == dataclasses.replace(theirs, num_beams=2)
    assert work.only == ()  # all of them count, and none of the model's own
    assert (work.data.max_source, work.data.prefix) == (99, "p: ")
    (said,) = messages
    assert said.startswith("decoded like the run: length_penalty 0.5, min_length 0, max_length 33, ")
    assert said.endswith("precision fp32, max_source 99, prefix p: .")
    assert job("lead-1", like=str(trained)).generation is None
    preset = job(bases[0], like=str(trained), preset="xsum")
    assert preset.generation.num_beams == 6
    assert messages[-1] == f"only the documents are those of {trained}: --preset xsum has a search of its own."


def test_a_model_of_another_kind_takes_no_prompt_and_the_line_says_so(trained, bases, messages):
    work = job(bases[1], like=str(trained))
    assert (work.data.prefix, work.data.max_source) == ("", 99)
    assert messages[0].endswith("Not taken: data.prefix 'p: '.")
    change(trained, "data.prefix=", "data.prompt={source} TL;DR:")
    assert job(bases[1], like=str(trained)).data.prompt == "{source} TL;DR:"
    assert job(bases[0], like=str(trained)).data.prompt == ""
    assert messages[-1].endswith("Not taken: data.prompt '{source} TL;DR:'.")


def test_what_a_run_recorded_of_its_texts_comes_before_its_recipe(trained, bases, messages):
    search = {"max_new_tokens": 20, "do_sample": True, "top_p": 0.9, "early_stopping": "never", "rerank": "mbr"}
    engine = {"name": "hf", "precision": "bf16"}
    about = RunFolder(trained).generation
    about.write_text(json.dumps({"shape": {"max_source": 55}, "generation": search, "engine": engine}))
    work = job(bases[0], like=str(trained))
    assert (work.generation.num_beams, work.generation.max_length, work.precision) == (1, 20, "bf16")
    assert work.data.max_source == 55
    assert messages[0].endswith("Not taken: early_stopping never, do_sample True, top_p 0.9, rerank mbr.")
    about.write_text(json.dumps({"model": "mine"}))
    job(bases[0], like=str(trained))
    assert "Not taken: its search, which mine has by itself." in messages[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--like", "nowhere"], "no such file or folder: nowhere. The folder . contains empty."),
        (["--like", "empty"], "--like takes a run's folder, and empty has no recipe.toml."),
        (["--like", "nowhere", "--data", "newswire"], "choose the documents once: with --data, or with --like."),
    ],
)
def test_what_is_no_run_gets_a_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert generate("lead-1", *arguments, "--out", "x") == 2
    assert f"error: {sentence}" in capsys.readouterr().err
