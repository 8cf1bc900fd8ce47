"""ROUGE: what one counts by hand, document by document."""

import sys
import types

import pytest

from ngramloss.metrics.rouge import rouge as rouge_of_many


def rouge(references, predictions, **options):
    """Scores of documents with one reference each."""
    return rouge_of_many([[reference] for reference in references], predictions, **options).values


@pytest.mark.parametrize(
    ("reference", "prediction", "scores"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", (1, 1, 1, 1)),
        ("a b c d", "e f g", (0, 0, 0, 0)),
        ("a b c d", "a c", (2 * 2 / 6, 0, 2 * 2 / 6, 2 * 2 / 6)),  # 2 of 4 and 2 of 2
        ("a b c d", "d c b a", (1, 0, 1 / 4, 1 / 4)),
        ("a a b", "a b b", (2 / 3, 1 / 2, 2 / 3, 2 / 3)),  # counts are clipped
        ("The CATS, running!", "the cat runs", (1, 1, 1, 1)),  # case, punctuation, stems
        ("a b\nc d", "c d\na b", (1, 2 / 3, 1 / 2, 1)),  # Lsum takes lines by themselves
        ("", "a", (0, 0, 0, 0)),
        ("a", "", (0, 0, 0, 0)),
        ("", "", (0, 0, 0, 0)),
    ],
)
def test_rouge_is_what_one_counts_by_hand(reference, prediction, scores):
    found = rouge([reference], [prediction])
    assert list(found) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert [values[0] for values in found.values()] == pytest.approx([100 * score for score in scores])


def test_rouge_without_stems():
    assert rouge(["cats"], ["cat"])["rouge1"] == [100]
    assert rouge(["cats"], ["cat"], stemmer=False)["rouge1"] == [0]


def test_rouge_scores_each_document_by_itself():
    found = rouge(["a b", "a b", "a b"], ["a b", "x", "a"])
    assert found["rouge1"] == pytest.approx([100, 0, 200 / 3])
    assert rouge([], []) == {name: [] for name in found}


def test_rouge_needs_a_prediction_for_each_reference():
    with pytest.raises(ValueError, match=r"lengths differ: 2 references, 1 predictions"):
        rouge(["a", "b"], ["a"])


def test_rouge_says_which_package_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score_rs", types.ModuleType("rouge_score_rs"))
    with pytest.raises(ValueError, match=r"ROUGE needs the package rouge-score-rs: pip install 'ngramloss\[\w+\]'\."):
        rouge(["a"], ["a"])
