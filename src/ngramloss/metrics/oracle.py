"""the sentences of a document and its references → the sentences that a greedy search for ROUGE takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ngramloss.data.languages import normalised, token_pattern

SENTENCES = 3  # the most sentences that the search takes, as in PreSumm
_SMALL = 1e-8  # keeps a division by 0 away, as in PreSumm
Grams = tuple[set[str], set[tuple[str, str]]]  # the distinct words and pairs of neighbouring words of a text


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation; in scripts without spaces, its characters.

    >>> words("It's 3 o'clock, 北京!")
    ['it', 's', '3', 'o', 'clock', '北', '京']
    """
    return token_pattern().findall(normalised(text))


def greedy_oracle(sentences: Sequence[str], references: Sequence[str], *, most: int = SENTENCES) -> list[int]:
    r"""The sentences that add most to ROUGE-1 + ROUGE-2, one after the other, until none adds anything.

    .. math::
        \max_{\text{reference}} \; F(S_1, R_1) + F(S_2, R_2), \qquad F(S, R) = \frac{2pr}{p + r + 10^{-8}},
        \quad p = \frac{|S \cap R|}{|S|}, \; r = \frac{|S \cap R|}{|R|}

    with the sets of words and of word pairs of the chosen sentences and of a reference. As in the preparation of
    Liu and Lapata (2019), an n-gram counts once, and pairs do not reach over the end of a sentence. Of equally good
    sentences the first is taken. They compare with one reference, and words are what CoreNLP and ``[a-zA-Z0-9]`` leave;
    here any script has words.

    ``sentences``: of the document; there may be none. ``references``: one or more. ``most``: sentences to take at most.

    Returns:
        Their places in ascending order. Empty if no sentence shares a word with a reference.

    Example:
        >>> greedy_oracle(["It rained.", "Roads were closed.", "It was Monday."], ["Rain closed roads on Monday."])
        [1, 2]
    """
    grams = [_grams(sentence) for sentence in sentences]
    golds = [_grams(reference) for reference in references]
    chosen: list[int] = []
    taken: Grams = set(), set()
    best = 0.0
    for _ in range(most):
        place, highest = -1, best
        for index, (ones, twos) in enumerate(grams):
            if index not in chosen:
                ours = taken[0] | ones, taken[1] | twos
                values = (_f_measure(ours[0], gold[0]) + _f_measure(ours[1], gold[1]) for gold in golds)
                value = max(values, default=0.0)
                if value > highest:
                    place, highest = index, value
        if place < 0:
            break
        chosen.append(place)
        taken, best = (taken[0] | grams[place][0], taken[1] | grams[place][1]), highest
    return sorted(chosen)


def _grams(text: str) -> Grams:
    found = words(text)
    return set(found), set(pairwise(found))


def _f_measure(chosen: set[str] | set[tuple[str, str]], gold: set[str] | set[tuple[str, str]]) -> float:
    shared = len(chosen & gold)
    precision, recall = shared / max(len(chosen), 1), shared / max(len(gold), 1)
    return 2 * precision * recall / (precision + recall + _SMALL)
