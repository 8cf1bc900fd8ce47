"""A folder to start from: its recipe, its data, and that the commands in it work."""

import json
import re
import shlex
from importlib.resources import files

import pytest

from ngramloss import cli, recipe
from ngramloss.cli.new import ROWS, TASKS, made_up_rows

SMALL = "--set train.max_steps=2 --set train.eval_every=1 --set train.save_every=2 --set data.limit=64"


@pytest.mark.parametrize("task", TASKS)
def test_made_up_splits_share_no_row_and_are_the_same_every_time(task):
    splits = made_up_rows(task)
    assert {split: len(rows) for split, rows in splits.items()} == ROWS
    texts = [tuple(value for key, value in row.items() if key != "id") for rows in splits.values() for row in rows]
    assert len(set(texts)) == sum(ROWS.values())
    assert len({row["id"] for rows in splits.values() for row in rows}) == sum(ROWS.values())
    assert made_up_rows(task) == splits
    assert all(value.strip() == value and value for row in splits["test"] for value in row.values())


def test_german_sentences_have_the_nouns_article():
    for row in made_up_rows("translation")["test"]:
        assert re.fullmatch(r"The [a-z]+ [a-z]+ [a-z]+s [a-z ]+\.", row["en"])
        assert re.match(r"(Der|Die|Das) \w+e [A-ZÄ]\w+ \w+t ", row["de"])


def test_every_task_can_be_chosen_and_has_a_starter():
    starters = {path.name for path in files("ngramloss").joinpath("cli", "starters").iterdir()}
    assert {f"{task}.toml" for task in TASKS} == starters


def test_starters_explain_every_line(tmp_path):
    """Each section begins with a comment, and the commands in the recipe are those of the greeting."""
    for task in TASKS:
        text = files("ngramloss").joinpath("cli", "starters", f"{task}.toml").read_text()
        (tmp_path / "recipe.toml").write_text(text)
        settings = recipe.load(str(tmp_path / "recipe.toml"))
        assert settings.data.name == "data"
        assert re.findall(r"^#   ngramloss (\w+)", text, re.M) == ["train", "generate", "score", "report"]
        assert max(map(len, text.splitlines())) <= 125


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("task", TASKS)
def test_the_commands_of_a_new_folder_work(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my folder", "--task", task]) == 0
    said = capsys.readouterr()
    assert said.out == "my folder/small.toml\n"
    assert said.err == "next: cd 'my folder' && ngramloss train small.toml --run run\n"
    monkeypatch.chdir(tmp_path / "my folder")
    commands = re.findall(r"^#   ngramloss (.+?)(?:   |$)", (tmp_path / "my folder/small.toml").read_text(), re.M)
    for command in commands:
        verb, *arguments = shlex.split(command)
        more = {"train": SMALL, "generate": "--limit 3"}.get(verb, "--samples 10 --shuffles 10")
        assert cli.main([verb, *arguments, *shlex.split(more)]) == 0, capsys.readouterr().err
    assert (tmp_path / "my folder" / "report" / "index.html").is_file()
    rows = [
        json.loads(line) for line in (tmp_path / "my folder" / "run" / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert cli.main(["new", str(tmp_path / name)]) == 2
        assert "exists and is not an empty folder. Choose another name." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert cli.main(["new", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "data" / "train.jsonl").is_file()
