"""ngramloss generate on data without targets: texts are written, it is said that there are none, and nothing else is silent."""

import json
import os
import re
import shutil
import signal

import pytest
from forks import fork, fork_ranks, killed_at_third_call

from ngramloss import cli
from ngramloss.data import newswire
from ngramloss.generation.job import job, read_split

pytestmark = pytest.mark.usefixtures("own_cache")

ITEMS = newswire.items("test", 9)
PLAIN = [{"id": item.id, "document": item.document} for item in ITEMS]
WITH_TARGETS = [{**row, "summary": item.summary} for row, item in zip(PLAIN, ITEMS, strict=True)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny finished run on the built-in corpus."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    changes = ["model.width=16", "model.vocabulary=400", "data.limit=40", "train.max_steps=2", "train.warmup_steps=0"]
    changes += ["train.eval_every=0", "generation.max_length=12", "model.feed_forward=16"]
    assert cli.main(["train", "demo", "--run", str(folder), *(word for one in changes for word in ("--set", one))]) == 0
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments)])


def written(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def new(tmp_path):
    return f"test={written(tmp_path / 'new.jsonl', PLAIN)}"


# What is written


def test_texts_of_sources_alone_are_those_of_the_same_sources_with_targets(run, new, tmp_path, capsys):
    labelled = f"test={written(tmp_path / 'with.jsonl', WITH_TARGETS)}"
    assert generate(run, "--data", labelled, "--out", tmp_path / "with") == 0
    assert "has no targets" not in capsys.readouterr().err
    assert generate(run, "--data", new, "--out", tmp_path / "without") == 0
    line = f"{new} (test) has no targets: outputs are generated from its sources (document), but `ngramloss score` will have no"
    assert capsys.readouterr().err.count(line) == 1
    assert rows(tmp_path / "without" / "predictions.jsonl") == rows(tmp_path / "with" / "predictions.jsonl")
    assert rows(tmp_path / "without" / "references.jsonl") == PLAIN
    assert (tmp_path / "with" / "seen.jsonl").exists()
    assert not (tmp_path / "without" / "seen.jsonl").exists(), "the objective sees targets"


def test_predictions_with_and_without_targets_are_not_mixed(new, tmp_path, capsys):
    labelled = f"test={written(tmp_path / 'with' / 'new.jsonl', WITH_TARGETS)}"
    assert generate("lead-1", "--data", new, "--out", tmp_path / "x") == 0
    assert generate("lead-1", "--data", new, "--out", tmp_path / "x") == 0
    assert generate("lead-1", "--data", labelled, "--out", tmp_path / "x") == 2
    assert "fingerprint: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_job_goes_on_and_processes_share_the_sources(run, new, tmp_path):
    whole = ["generate", str(run), "--data", new, "--batch-size", "2", "--out"]
    assert cli.main([*whole, str(tmp_path / "whole")]) == 0
    stop = killed_at_third_call("ngramloss.search.writer", "decoded")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert fork(stop, [*whole, str(tmp_path / "killed")], environment=environment).wait() == -signal.SIGKILL
    assert len(rows(tmp_path / "killed" / "predictions.partial-0.jsonl")) == 4
    assert cli.main([*whole, str(tmp_path / "killed")]) == 0
    program = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"
    codes, err = fork_ranks(program, [*whole, str(tmp_path / "two")], environment=environment)
    assert codes == [0, 0], err[-2000:]
    for name in ("killed", "two"):
        assert rows(tmp_path / name / "predictions.jsonl") == rows(tmp_path / "whole" / "predictions.jsonl")
        assert rows(tmp_path / name / "references.jsonl") == PLAIN


def test_a_single_file_is_what_texts_are_written_of(run, tmp_path, messages):
    path = tmp_path / "new.jsonl"
    path.write_text("".join(json.dumps({"document": f"It rained in {town}."}) + "\n" for town in ("Bath", "York")))
    assert generate(run, "--data", path, "--out", tmp_path / "a") == 0
    assert generate(run, "--data", f"test={path}", "--out", tmp_path / "b") == 0
    assert (tmp_path / "a" / "generation.json").read_text() == (tmp_path / "b" / "generation.json").read_text()
    assert len((tmp_path / "a" / "predictions.jsonl").read_text().splitlines()) == 2
    path.write_text(path.read_text().replace("York", "Rome") + json.dumps({"document": "It rained in Hull."}) + "\n")
    assert generate(run, "--data", path, "--out", tmp_path / "a") == 2  # the first two are other documents
    settings = (run / "recipe.toml").read_text()
    trained = tmp_path / "trained"
    shutil.copytree(run, trained)
    (trained / "recipe.toml").write_text(re.sub(r'(?m)^name = ".*"', f'name = "{path}"', settings, count=1))
    messages.clear()
    job(str(trained), data=str(path))
    assert f"was trained on rows of {path}. Without --data, its held-out rows" in messages[0]


def test_lines_of_plain_text_are_sources(tmp_path):
    (tmp_path / "test.txt").write_text("A b. C d.\nE f. G h.\n")
    assert generate("lead-1", "--data", tmp_path, "--out", tmp_path / "o") == 0
    assert [row["prediction"] for row in rows(tmp_path / "o" / "predictions.jsonl")] == ["A b.", "E f."]


def test_several_source_columns_are_joined_without_targets_too(tmp_path):
    data = f"test={written(tmp_path / 'q.jsonl', [{'context': 'A b.', 'question': 'Who?'}])}"
    assert generate("lead-3", "--data", data, "--source", "context,question", "--out", tmp_path / "o") == 0
    assert rows(tmp_path / "o" / "references.jsonl") == [{"id": "1", "document": "A b.\n\nWho?"}]


# Which column is meant


@pytest.mark.parametrize("named", [("--target", "sumary"), ("--set", "data.target=sumary")], ids=["option", "set"])
def test_a_target_that_is_named_and_not_there_is_an_error(new, tmp_path, capsys, named):
    assert generate("lead-1", "--data", new, *named, "--out", tmp_path / "o") == 2
    assert "has no column 'sumary' for the target" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_columns_that_are_not_read_are_listed(tmp_path, capsys):
    data = f"test={written(tmp_path / 'a.jsonl', [row | {'headline': 'x'} for row in PLAIN])}"
    assert generate("lead-1", "--data", data, "--out", tmp_path / "o") == 0
    assert (
        "Columns that are not read: 'headline'. If one has the targets, name it with --target."
        in capsys.readouterr().err
    )
    assert generate("lead-1", "--data", data, "--target", "headline", "--out", tmp_path / "p") == 0
    assert "has no targets" not in capsys.readouterr().err
    assert rows(tmp_path / "p" / "references.jsonl")[0]["reference"] == "x"


def test_an_empty_column_of_targets_is_an_error_that_none_turns_off(tmp_path, capsys):
    data = f"test={written(tmp_path / 'a.jsonl', [row | {'summary': ''} for row in PLAIN])}"
    assert generate("lead-1", "--data", data, "--out", tmp_path / "o") == 2
    assert "'summary' is empty" in capsys.readouterr().err
    assert generate("lead-1", "--data", data, "--target", "none", "--out", tmp_path / "o") == 0
    assert rows(tmp_path / "o" / "references.jsonl") == PLAIN


def test_rows_of_which_some_have_targets_are_an_error_that_names_them(tmp_path, capsys):
    data = f"test={written(tmp_path / 'a.jsonl', [*WITH_TARGETS[:2], PLAIN[2]])}"
    assert generate("lead-1", "--data", data, "--out", tmp_path / "o") == 2
    assert "a.jsonl:3: no column 'summary'" in capsys.readouterr().err
    others = [{"document": "a"}] * 100
    late = f"test={written(tmp_path / 'b.jsonl', [*others, {'document': 'a', 'summary': 'b'}])}"
    assert generate("lead-1", "--data", late, "--out", tmp_path / "o") == 2
    assert "b.jsonl:101 has 'summary', which the first 100 rows lack" in capsys.readouterr().err


@pytest.fixture
def own_columns(run, tmp_path):
    """The settings of a run whose training named its columns, and the folder of its data; its test split has sources alone."""
    split = [{"body": row["document"], "title": "t"} for row in PLAIN]
    written(tmp_path / "data" / "train.jsonl", split)
    written(tmp_path / "data" / "test.jsonl", [{"body": row["body"]} for row in split])
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "model").symlink_to(run / "model")
    recipe = (run / "recipe.toml").read_text().replace('name = "newswire"', f'name = "{tmp_path / "data"}"')
    for key, column in (("source", "body"), ("target", "title")):
        assert f'{key} = ""' in recipe
        recipe = recipe.replace(f'{key} = ""', f'{key} = "{column}"')
    (folder / "recipe.toml").write_text(recipe)
    return folder, tmp_path / "data"


def test_a_target_of_the_training_need_not_be_in_other_data_but_one_of_the_usual_names_is_not_passed_over(
    own_columns, tmp_path
):
    folder, data = own_columns
    assert job(str(folder)).read_sources().column == "body"
    assert not job(str(folder)).read_sources().has_targets
    assert job(str(folder), split="train").read_sources().has_targets
    other = f"test={written(tmp_path / 'other.jsonl', [{'body': 'a', 'summary': 'b'}])}"
    with pytest.raises(ValueError, match=r"has no column 'title' for the target"):
        job(str(folder), data=other).read_sources()
    with pytest.raises(ValueError, match=r"has no column 'title' for the target"):
        read_split(job(str(folder)))
    with pytest.raises(ValueError, match=r"has no column 'titel' for the target"):
        job(str(folder), overrides=["data.target=titel"]).read_sources()
    assert not job(str(folder), overrides=['data.target=""']).read_sources().has_targets
    held_out = f"train={data / 'test.jsonl'}"
    overrides = ["data.test_fraction=0.5", "data.source=body"]
    assert not job("lead-1", data=held_out, overrides=overrides).read_sources().has_targets


# Who needs targets


def test_what_reads_the_references_needs_them(new, tmp_path, capsys):
    for model in ("ext-oracle", "ext-oracle-2"):
        assert generate(model, "--data", new, "--out", tmp_path / "o") == 2
        assert f"{model} reads the targets, and {new} (test) has no targets." in capsys.readouterr().err
        assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("train", "demo", "--run", "r", "--set", "data.name={data}", "--set", "train.eval_every=0"),
        ("candidates", "{run}", "--data", "{data}", "--split", "train", "--out", "c"),
        ("data", "stats", "{data}", "--split", "train"),
    ],
    ids=lambda words: words[0],
)
def test_other_commands_need_targets(run, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    data = written(tmp_path / "train.jsonl", PLAIN)
    assert cli.main([word.format(run=run, data=data) for word in command]) == 2
    assert "cannot find the target column of" in capsys.readouterr().err
