"""ngramloss candidates: several distinct texts of each source, the beam's first, and what each scores."""

import json

import pytest

from ngramloss.data.candidates import read_candidates
from ngramloss.errors import MissingFileError, UserError

ROW = {"id": "a", "candidates": ["x", "y"], "gains": [0.5, 1], "tokens": [3, 4]}


# Reading


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_candidates_are_read_by_id_in_the_order_of_the_file(tmp_path):
    path = written(tmp_path / "candidates.jsonl", ROW, {"id": 7, "candidates": [""], "gains": [0.0]})
    found = read_candidates(path)
    assert found.rows == {"a": (("x", "y"), (0.5, 1.0)), "7": (("",), (0.0,))}
    assert list(found.rows) == ["a", "7"]
    assert read_candidates(tmp_path) == found, "a folder stands for its file"
    assert len(found.fingerprint) == 16


@pytest.mark.parametrize("change", [
    {"id": "b"}, {"candidates": ["y", "x"]}, {"gains": [0.5, 0.9]}, {"gains": [1, 0.5]}, {"candidates": ["xy", ""]},
    {"candidates": ["x"], "gains": [0.5]},
])
def test_the_fingerprint_is_that_of_ids_texts_and_gains(tmp_path, change):
    def fingerprint(row):
        return read_candidates(written(tmp_path / "c.jsonl", row)).fingerprint

    assert fingerprint(ROW | change) != fingerprint(ROW) == fingerprint(ROW | {"tokens": [8, 9], "more": 1})


@pytest.mark.parametrize(("line", "sentence"), [
    ("{", "c.jsonl:2: malformed JSON"),
    ("[1]", "c.jsonl:2: expected a JSON object, got list"),
    ({"id": "b", "candidates": ["x"]}, "c.jsonl:2: no key 'gains'"),
    ({"gains": [1]}, "no key 'id', 'candidates'"),
    ({"id": None, "candidates": ["x"], "gains": [1]}, "'id' should be text, got null"),
    ({"id": True, "candidates": ["x"], "gains": [1]}, "'id' should be text, got bool"),
    ({"id": "b", "candidates": "x", "gains": [1]}, "'candidates' should be a list, got str"),
    ({"id": "b", "candidates": ["x"], "gains": 1}, "'gains' should be a list, got int"),
    ({"id": "b", "candidates": [], "gains": []}, "'candidates' is empty"),
    ({"id": "b", "candidates": ["x", "y"], "gains": [1]}, "lengths differ: 2 candidates, 1 gains"),
    ({"id": "b", "candidates": ["x", 3], "gains": [1, 1]}, "candidate 2 should be text, got int"),
    ({"id": "b", "candidates": ["x", "\ud800"], "gains": [1, 1]}, "candidate 2 is not UTF-8 text, at character 1"),
    ({"id": "\ud800", "candidates": ["x"], "gains": [1]}, "'id' is not UTF-8 text, at character 1"),
    ({"id": "b", "candidates": ["x"], "gains": [None]}, "gain 1 should be a number, got null"),
    ({"id": "b", "candidates": ["x"], "gains": [True]}, "gain 1 should be a number, got bool"),
    ({"id": "b", "candidates": ["x"], "gains": [float("nan")]}, "gain 1 should be between 0 and 1, got nan"),
    ({"id": "b", "candidates": ["x"], "gains": [float("inf")]}, "gain 1 should be between 0 and 1, got inf"),
    ('{"id": "b", "candidates": ["x"], "gains": [1' + "0" * 400 + "]}", "gain 1 should be between 0 and 1, got 1"),
    ({"id": "b", "candidates": ["x"], "gains": [-0.1]}, "gain 1 should be between 0 and 1, got -0.1"),
    ({"id": "b", "candidates": ["x", "y"], "gains": [1, 42.5]}, "gain 2 should be between 0 and 1, got 42.5"),
    (ROW, "c.jsonl:2: id 'a' was already used in line 1"),
])
def test_a_row_that_cannot_be_used_is_named_with_the_reason(tmp_path, line, sentence):
    path = written(tmp_path / "c.jsonl", ROW, line, {"id": "c", "candidates": ["x"], "gains": [2]})
    with pytest.raises(UserError) as stop:
        read_candidates(path)
    assert sentence in str(stop.value)
    assert str(stop.value).startswith(f"2 of 3 rows of {path} cannot be used:"), "all of them at once"


def test_files_that_are_none_get_a_sentence(tmp_path):
    with pytest.raises(MissingFileError, match=r"has no candidates\.jsonl\. Make candidates with: ngramloss candidates RUN_OR_MODEL"):
        read_candidates(tmp_path)
    with pytest.raises(MissingFileError, match=r"there is no file .*c\.jsonl\. Make candidates with"):
        read_candidates(tmp_path / "c.jsonl")
    with pytest.raises(UserError, match=r"c\.jsonl is empty\. Make candidates with"):
        read_candidates(written(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match=r"c\.csv should be a file of JSON lines, with a name that ends in \.jsonl"):
        read_candidates(written(tmp_path / "c.csv", "id,candidates"))
