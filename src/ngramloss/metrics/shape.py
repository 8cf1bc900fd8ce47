"""predictions, and documents if given → length, repetition and novelty of each text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ngramloss.data.statistics import words_of
from ngramloss.metrics.scores import Scores, check_lengths, signature


def shape(predictions: Sequence[str], documents: Sequence[str] | None = None) -> Scores:
    """Length and repetition of each summary; with documents also compression, novelty, coverage and density.

    * ``words``: words of the summary; ``repeated3``: percentage of its trigrams that repeat an earlier one.
    * ``compression``: words of the document per word of the summary.
    * ``novel1`` … ``novel4``: percentage of the summary's distinct n-grams that are not in the document.
    * ``coverage``: percentage of the summary's words in fragments copied from the document; ``density``: the mean,
      over the summary's words, of the length of their fragment (Grusky et al. 2018, with their greedy fragments).

    A summary without such n-grams scores 0. Words are counted as in ``ngramloss data stats``.
    """
    written = [words_of(text) for text in predictions]
    values: dict[str, list[float]] = {
        "words": [float(len(text)) for text in written],
        "repeated3": [_repetition(text, 3) for text in written],
    }
    if documents is not None:
        check_lengths(documents=documents, predictions=predictions)
        pairs = [(words_of(document), text) for document, text in zip(documents, written, strict=True)]
        values["compression"] = [len(document) / max(len(text), 1) for document, text in pairs]
        for n in (1, 2, 3, 4):
            values[f"novel{n}"] = [_novelty(document, text, n) for document, text in pairs]
        copied = [fragments(document, text) for document, text in pairs]
        values["coverage"] = [100 * sum(spans) / max(len(text), 1) for spans, text in zip(copied, written, strict=True)]
        values["density"] = [
            sum(length**2 for length in spans) / max(len(text), 1) for spans, text in zip(copied, written, strict=True)
        ]
    return Scores(values, signature("shape", words="letters-digits-casefolded", documents=documents is not None))


def fragments(document: Sequence[str], text: Sequence[str]) -> list[int]:
    """Lengths of the fragments that the text shares with the document, found greedily from the left."""
    positions: dict[str, list[int]] = {}
    for position, word in enumerate(document):
        positions.setdefault(word, []).append(position)
    lengths, at = [], 0
    while at < len(text):
        longest = 0
        for position in positions.get(text[at], ()):
            if position + longest >= len(document) or at + longest >= len(text):
                break  # no later position has a longer one
            if document[position + longest] == text[at + longest]:  # otherwise it is not longer
                longest = max(longest, _shared_length(document, position, text, at))
        if longest:
            lengths.append(longest)
        at += max(longest, 1)
    return lengths


def _shared_length(document: Sequence[str], position: int, text: Sequence[str], at: int) -> int:
    """The number of equal words from these positions on."""
    length, most = 0, min(len(document) - position, len(text) - at)
    while length < most and document[position + length] == text[at + length]:
        length += 1
    return length


def _ngrams(text: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(pairwise(text)) if n == 2 else list(zip(*(text[start:] for start in range(n)), strict=False))


def _novelty(document: Sequence[str], text: Sequence[str], n: int) -> float:
    distinct = set(_ngrams(text, n))
    return 100 * len(distinct.difference(_ngrams(document, n))) / len(distinct) if distinct else 0.0


def _repetition(text: Sequence[str], n: int) -> float:
    counts = Counter(_ngrams(text, n))
    return 100 * (counts.total() - len(counts)) / counts.total() if counts else 0.0
