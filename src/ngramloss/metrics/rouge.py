"""references and predictions → ROUGE-1, 2, L and Lsum of each document, 0 to 100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge(references: Sequence[str], predictions: Sequence[str], *, stemmer: bool = True) -> dict[str, list[float]]:
    """F-measures of each document, the numbers of Google's ``rouge-score``. Lsum splits sentences at line ends.

    Example:
        >>> rouge(["the cat sat"], ["the cat ran"])["rouge1"]
        [66.66...]
    """
    if len(references) != len(predictions):
        raise ValueError(f"one prediction for each reference, got {len(references)} and {len(predictions)}.")
    try:
        from rouge_score_rs import RougeScorer
    except ImportError:
        raise ValueError("ROUGE needs the package rouge-score-rs: pip install 'ngramloss[metrics]'.") from None
    made: Any = RougeScorer
    scorer = made(list(NAMES), use_stemmer=stemmer)
    scored = scorer.score_batch(list(references), list(predictions))
    return {name: [100 * scores[name].fmeasure for scores in scored] for name in NAMES}
