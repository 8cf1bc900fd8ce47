"""references and predictions → ROUGE-1, 2, L and Lsum of each document, 0 to 100."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ngramloss.data.sentences import split_many
from ngramloss.errors import UserError
from ngramloss.metrics.scores import Absent, Scores, check_lengths, reference_count, signature

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
PARTS = tuple(f"{name}_{part}" for name in NAMES for part in ("precision", "recall"))
"""Scores that are returned only on request."""
TOKENIZERS = {"default": re.compile("[a-z0-9]+", re.IGNORECASE), "unicode": re.compile(r"\w+"),
              "characters": re.compile(r"\S")}
"""Name → approximately what a token is, to estimate memory."""
LARGEST = 500_000_000
"""The most tokens of a prediction times tokens of a reference: ROUGE-L needs 4 bytes for each pair."""


def rouge(
    references: Sequence[Sequence[str]], predictions: Sequence[str], *,
    stemmer: bool = True, sentences: str = "newline", tokenizer: str = "default",
    parts: bool = False,
) -> Scores:
    """F-measures of each document, the numbers of Google's ``rouge-score``.

    L compares whole texts, Lsum sentence by sentence. With several references, each score is the highest over the
    references.

    Args:
        references: one or more for each document.
        predictions: one for each document.
        stemmer: compare Porter stems, as most published scores do.
        sentences: how Lsum splits sentences: ``newline``, or a splitter such as ``pysbd``.
        tokenizer: ``default`` keeps only a–z and 0–9; ``unicode`` keeps letters of any script; ``characters`` makes
            each character a token, for scripts without spaces.
        parts: also return precision and recall. With several references, they are those of the reference with the
            highest F-measure.

    Example:
        >>> rouge([["the cat sat"]], ["the cat ran"]).values["rouge1"]
        [66.66...]
    """
    check_lengths(references=references, predictions=predictions)
    if tokenizer not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {tokenizer!r} for ROUGE; choose from {', '.join(TOKENIZERS)}.")
    several = reference_count(references)
    _check_sizes(references, predictions, TOKENIZERS[tokenizer])
    plain, lines = list(NAMES), list(NAMES[:0])
    if sentences != "newline":
        plain, lines = list(NAMES[:3]), [NAMES[3]]
    values = _measures(references, predictions, plain, stemmer, tokenizer)
    if lines:
        flat = [text for golds in references for text in golds]
        split = iter("\n".join(parts) for parts in split_many([*flat, *predictions], sentences))
        split_references = [[next(split) for _ in golds] for golds in references]
        values |= _measures(split_references, list(split), lines, stemmer, tokenizer)
    wanted = (*NAMES, *PARTS) if parts else NAMES
    return Scores({name: values[name] for name in wanted}, signature(
        "rouge", refs=several, stemmer=stemmer, lsum=sentences, tokens=tokenizer,
        rouge_score_rs=version("rouge-score-rs"),
    ))


def _check_sizes(references: Sequence[Sequence[str]], predictions: Sequence[str], token: re.Pattern[str]) -> None:
    """Raise if ROUGE-L would need too much memory: the scorer would abort the program."""
    for number, (golds, prediction) in enumerate(zip(references, predictions, strict=True), 1):
        for reference in golds:
            if len(reference) * len(prediction) <= LARGEST:
                continue   # there are no more tokens than characters
            gold_words, text_words = (sum(1 for _ in token.finditer(text)) for text in (reference, prediction))
            if gold_words * text_words > LARGEST:
                raise UserError(
                    f"ROUGE-L of document {number} would need {4 * gold_words * text_words / 1e9:.0f} GB: its "
                    f"reference has {gold_words:,} words and the prediction {text_words:,}. Shorten one of them."
                )


def _measures(
    references: Sequence[Sequence[str]], predictions: Sequence[str], names: list[str], stemmer: bool, tokenizer: str
) -> dict[str, list[float]]:
    try:
        from rouge_score_rs import RougeScorer, tokenizers
    except ImportError:
        raise Absent("ROUGE needs the package rouge-score-rs: pip install 'ngramloss[score]'.") from None
    class_name: Any = {"default": None, "unicode": "UnicodeTokenizer", "characters": "CharacterTokenizer"}[tokenizer]
    options = {"tokenizer": getattr(tokenizers, class_name)()} if class_name else {}
    kind: Any = RougeScorer
    scorer = kind(names, use_stemmer=stemmer, **options)
    if all(len(golds) == 1 for golds in references):
        scored = scorer.score_batch([golds[0] for golds in references], list(predictions))
    else:
        pairs = zip(references, predictions, strict=True)
        scored = [scorer.score_multi(list(golds), prediction) for golds, prediction in pairs]
    values = {name: [100 * scores[name].fmeasure for scores in scored] for name in names}
    for name in names:
        values[f"{name}_precision"] = [100 * scores[name].precision for scores in scored]
        values[f"{name}_recall"] = [100 * scores[name].recall for scores in scored]
    return values
