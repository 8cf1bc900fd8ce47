"""A job array: tasks write their shares in any order, one is lost, and a last command completes the predictions."""

import json

import pytest

from ngramloss import cli
from ngramloss.data import newswire

DOCUMENTS = 11


def generate(folder, *more):
    return cli.main(
        ["generate", "lead-2", "--data", "newswire", "--limit", str(DOCUMENTS), "--out", str(folder), *more]
    )


@pytest.mark.parametrize("order", [[3, 1, 2], [2], []])
def test_tasks_of_an_array_in_any_order_and_a_last_command_write_every_document_once(tmp_path, monkeypatch, order):
    assert generate(tmp_path / "one") == 0
    monkeypatch.setenv("WORLD_SIZE", "4")  # three tasks, and the last command
    for task in order:
        monkeypatch.setenv("RANK", str(task))
        assert generate(tmp_path / "array") == 0
        assert not (tmp_path / "array" / "predictions.jsonl").exists()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE")
    assert generate(tmp_path / "array") == 0
    one, array = ((tmp_path / name / "predictions.jsonl").read_text() for name in ("one", "array"))
    assert array == one
    assert [json.loads(line)["id"] for line in array.splitlines()] == [
        item.id for item in newswire.items("test", DOCUMENTS)
    ]
    assert sorted(path.name for path in (tmp_path / "array").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )
