"""prepared.json: what it says comes back, and what is damaged or foreign is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_folders import PREPARED

from ngramloss.errors import UserError
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training.prepare import prepare_once
from ngramloss.training.prepared import Prepared, PreparedCandidates, Stopped
from ngramloss.training.processes import Processes

COMPARED = PreparedCandidates(Path("c.jsonl"), "00ff", 3, 12, 1, Path("cache/candidates"), "rouge1, rouge2")
WHOLE = replace(
    PREPARED, candidates=COMPARED, continued_from=Path("checkpoint-3"), made_of={"plugin objective mine": "abc"}
)


@pytest.mark.parametrize("prepared", [PREPARED, WHOLE], ids=["least", "most"])
def test_what_is_written_is_what_is_read(tmp_path, prepared):
    path = tmp_path / "prepared.json"
    path.write_text(prepared.to_json())
    assert Prepared.read(path) == prepared


def test_the_file_has_these_names():
    content = json.loads(WHOLE.to_json())
    assert list(content) == [
        "splits", "used", "candidates", "language_model", "made_of", "tokenizer", "column", "continue", "trust_remote_code", "machine",
    ]  # fmt: skip
    assert content["continue"] == "checkpoint-3"
    assert content["splits"]["train"]["skipped"] == ["a.jsonl:3: blank"]


def test_other_processes_make_what_they_need_while_the_first_prepares(tmp_path):
    folder, order = RunFolder(tmp_path), []

    def elsewhere():
        order.append(folder.prepared.exists())
        folder.prepared.write_text(PREPARED.to_json())  # by the first process, meanwhile
        return "task"

    second = Processes(1, 2, torch.device("cpu"))
    assert prepare_once(folder, second, lambda: order.append("made"), elsewhere) == (PREPARED, "task")
    assert order == [False]


DAMAGED = {
    "no JSON": ("oops", "is not JSON: "),
    "a list": ("[]", "should contain a JSON object, got list"),
    "something else": ('{"a": 1}', "is not what a training prepares: it has no splits, used, candidates, "),
    "a field less": ({"used": None}, "it has no used"),
    "no training split": ({"splits": {}}, "splits has no train"),
    "a split that is none": ({"splits": {"train": 3}}, "splits.train should be an object, got 3"),
    "a number for a path": ({"tokenizer": 1}, "tokenizer should be text, got 1"),
    "a text for a list": ({"used": "train"}, "used should be a list, got 'train'"),
    "a number for a claim": ({"trust_remote_code": 1}, "trust_remote_code should be true or false, got 1"),
    "a machine without precision": ({"machine": {"processes": 1, "device": "CPU"}}, "machine has no precision"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_file_is_refused_with_a_sentence(tmp_path, damage):
    change, sentence = DAMAGED[damage]
    path = tmp_path / "prepared.json"
    content = change
    if isinstance(change, dict):
        merged = json.loads(PREPARED.to_json()) | change
        content = json.dumps({key: value for key, value in merged.items() if value is not None or key != "used"})
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        Prepared.read(path)
    assert str(refused.value).startswith(f"{path} ")
    assert sentence in str(refused.value)
    assert str(refused.value).endswith("Start the training again.")


def test_the_error_of_the_first_process_reaches_the_others(tmp_path):
    (tmp_path / "prepared.json").write_text('{"error": "no data"}')
    with pytest.raises(Stopped, match="no data"):
        Prepared.read(tmp_path / "prepared.json")
