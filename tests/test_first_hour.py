"""The first hour on one's own file: train, generate, score, report, and every command that is suggested on the way."""

import csv
import re
import shlex
from pathlib import Path

import pytest
from models import TINY_MODEL

from ngramloss import cli
from ngramloss.data import newswire

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

RECIPE = f"""
base = "demo"
objective = "ce + matches(2)"
[data]
name = "mine.csv"
max_source = 96
max_target = 32
{TINY_MODEL}
[train]
max_steps = 2
"""


def write_rows(path, split, count):
    """Rows with a header that is found by itself."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["article", "highlights"])
        writer.writerows((item.document, item.summary) for item in newswire.items(split, count))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of a new user, who works in it: one CSV file and a recipe that names it."""
    write_rows(tmp_path / "mine.csv", "train", 60)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, command):
    """Run a command as it is written in a terminal. Returns what it prints, and what it says on the way."""
    program, *arguments = shlex.split(command)
    assert program == "ngramloss"
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured


def suggested(said):
    return re.findall(r"^next: (.*)$", said, re.MULTILINE)


def test_a_next_command_is_printed_in_one_place():
    """Whoever suggests another command adds it to the test below."""
    source = Path(cli.__file__).parent.parent
    places = [path.name for path in source.rglob("*.py") for _ in re.findall(r"\bnext: ", path.read_text())]
    assert places == ["train.py"]


def two_files(here):
    write_rows(here / "dev.csv", "validation", 6)
    return "--set data.name=train=mine.csv,validation=dev.csv"


def three_files(here):
    write_rows(here / "dev.csv", "validation", 6)
    write_rows(here / "test.csv", "test", 6)
    return "--set data.name=train=mine.csv,validation=dev.csv,test=test.csv"


@pytest.mark.parametrize(
    ("data", "command"),
    [
        ("--set train.eval_every=0", "ngramloss generate 'my runs/a' --split train --limit 20"),
        ("--set data.validation_fraction=0.1", "ngramloss generate 'my runs/a' --split validation"),
        ("--set train.eval_every=0 --set data.test_fraction=0.1", "ngramloss generate 'my runs/a'"),
        (
            "--set data.validation_fraction=0.1 --set data.test_fraction=0.1 --set data.id=none --on-bad-row skip",
            "ngramloss generate 'my runs/a'",
        ),
        (two_files, "ngramloss generate 'my runs/a' --split validation"),
        (three_files, "ngramloss generate 'my runs/a'"),
        ("--set data.name=newswire --set data.limit=60", "ngramloss generate 'my runs/a'"),
    ],
)
def test_the_next_command_works(here, capsys, data, command):
    options = data if isinstance(data, str) else data(here)
    again = f"ngramloss train tiny.toml --run 'my runs/a' {options}"
    said = run(capsys, again).err
    assert suggested(said) == [command]
    assert ("the data have no test split, so the next command writes texts of the training split" in said) == (
        "--split train" in command
    )
    assert suggested(run(capsys, again).err) == [command]  # the run is finished
    limit = " --limit 3" if "--limit" not in command else ""
    assert run(capsys, command + limit).out == "my runs/a/predictions.jsonl\n"


def test_rows_that_were_trained_on_are_not_held_out_afterwards(here, capsys):
    run(capsys, "ngramloss train tiny.toml --run a --set data.validation_fraction=0.1")
    assert cli.main(["generate", "a", "--set", "data.test_fraction=0.1"]) == 2
    assert (
        "error: a was trained with data.test_fraction = 0: with another one, rows that it was trained on would be held out. "
        "Train again with data.test_fraction, or choose other data with --data."
    ) in capsys.readouterr().err
    assert cli.main(["generate", "a"]) == 2
    assert "mine.csv is a single file, so it has no split 'test'" in capsys.readouterr().err
