"""The list of mutants stays true when the source changes. `make mutants` runs them."""

import pytest
from run_mutants import faults, mutated, read


@pytest.mark.slow
def test_each_mutant_is_one_place_of_the_source_and_names_tests_that_exist():
    mutants = read()
    assert len(mutants) >= 100
    assert faults(mutants) == []


def test_a_list_that_is_not_true_is_told(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "source.py").write_text("one = 1\n\n\ndef two():\n    one = 1\n    return 1\n")
    (tmp_path / "test_source.py").write_text("def test_one():\n    pass\n")
    sound = {"name": "a", "in": "source:two", "old": "one = 1", "new": "one = 2", "tests": ["test_source.py::test_one"]}
    assert faults([sound], tmp_path) == []
    assert mutated(sound, (tmp_path / "src" / "source.py").read_text()) == (
        "one = 1\n\n\ndef two():\n    one = 2\n    return 1\n"
    )
    assert faults([sound, {**sound, "in": "source"}, {**sound, "in": "source:three"}], tmp_path) == [
        "a is in the list 3 times",
        "a: source has its old text 2 times, expected once",
        "a: source:three has its old text 0 times, expected once",
    ]
    wrong = {**sound, "new": "one = 1", "tests": ["test_other.py", "test_source.py::test_two"]}
    assert faults([wrong], tmp_path) == [
        "a: changes nothing",
        "a: there is no test test_other.py",
        "a: there is no test test_source.py::test_two",
    ]
