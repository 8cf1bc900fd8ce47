"""a metric and the column of the references → a reward function as TRL's trainers call it, for a batch of completions.

>>> from ngramloss import rewards
>>> reward = rewards.rouge("rouge2", reference="summary")
>>> reward(prompts=["p", "p"], completions=["the cat sat", "a dog"], summary=["the cat sat down", None])
[0.8, None]
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ngramloss.data import Example
from ngramloss.data.languages import normalised, token_pattern
from ngramloss.errors import UserError
from ngramloss.metrics.candidate_scores import CandidateMetric, candidate_metric, score_candidates
from ngramloss.metrics.registry import notes_on_references
from ngramloss.metrics.rouge import NAMES as ROUGE

Texts = Sequence[str]
References = Sequence[tuple[str, ...]]
ARGUMENTS = 'Of a reward, options are arguments, such as rouge(tokens="auto").'


class Reward:
    """A reward function: ``(prompts, completions, **columns) → [float | None]``, all completions in one call.

    A completion is a text, or a list of messages, of which those of the assistant are read. A reference is a text, a
    list of texts, messages, or None: then the reward is None, which TRL leaves out. It can be pickled.

    Args:
        name: in logs, where TRL has ``rewards/NAME/mean``.
        reference: the column with the references.
        score: completions and the references of each → a reward for each.
        notes: references → sentences about texts that the metric does not read well; those of the first are warnings.
    """

    def __init__(
        self,
        name: str,
        reference: str,
        score: Callable[[Texts, References], list[float]],
        notes: Callable[[References], list[str]] | None = None,
    ) -> None:
        self.__name__, self.reference, self.score, self.notes = name, reference, score, notes
        if reference in ("prompt", "completion", "completion_ids"):
            raise UserError(
                f"TRL does not pass the column {reference!r} to rewards. Rename it, such as to 'reference'."
            )

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """A reward for each completion; None where there is no reference."""
        if self.reference not in columns:
            raise UserError(
                f"the reward {self.__name__} reads the references from a column {self.reference!r}, but the rows have "
                f"{', '.join(map(repr, sorted(columns))) or 'no columns'}. Name their column: reference='…'."
            )
        given = columns[self.reference]
        if len(given) != len(completions):
            raise UserError(
                f"lengths differ: {len(completions)} completions, {len(given)} references in {self.reference!r}."
            )
        references = [_references(value, self.reference) for value in given]
        texts = [_text(completion) for completion in completions]
        known = [number for number, golds in enumerate(references) if golds]
        if known and self.notes is not None:
            for note in self.notes([references[number] for number in known]):
                warnings.warn(f"the reward {self.__name__}: {note} {ARGUMENTS}", stacklevel=2)
            self.notes = None
        found = self.score([texts[number] for number in known], [references[number] for number in known])
        values: list[float | None] = [None] * len(texts)
        for number, value in zip(known, found, strict=True):
            values[number] = value
        return values

    def __repr__(self) -> str:
        return f"<reward {self.__name__} against {self.reference!r}>"


def metric(name: str, *, reference: str = "reference", **options: Any) -> Reward:
    """What a completion scores by any metric whose scores are better if higher, from 0 to 1, also one of a plugin."""
    metric = candidate_metric(name, options, key="metric")
    return Reward(name, reference, partial(_scores, metric), partial(_notes, metric))


def rouge(score: str = "rouge", *, reference: str = "reference", **options: Any) -> Reward:
    """ROUGE, from 0 to 1; of several references the best.

    Args:
        score: ``rouge1``, ``rouge2``, ``rougeL`` or ``rougeLsum``; ``rouge`` is the mean of 1, 2 and Lsum.
        options: of the metric, such as ``stemmer=False``, or ``tokens="auto"`` for letters beside a–z.
    """
    if score not in ("rouge", *ROUGE):
        raise UserError(f"rouge: choose from rouge, {', '.join(ROUGE)}, got {score!r}.")
    return metric(score, reference=reference, **options)


def bleu(*, reference: str = "reference", **options: Any) -> Reward:
    """Sentence BLEU with sacreBLEU's smoothing, from 0 to 1, with the tokenizer for the script of the references."""
    return metric("bleu", reference=reference, **options)


def chrf(*, reference: str = "reference", **options: Any) -> Reward:
    """Sentence chrF, from 0 to 1; ``word_order=2`` is chrF++."""
    return metric("chrf", reference=reference, **options)


def credit(*n: int, reference: str = "reference") -> Reward:
    r"""N-gram credit: how much of a completion is in n-grams of the reference, from 0 to 1.

    A window is credited if its n-gram g is in the reference and it is among the first C(g) windows of g in the
    completion, where C(g) counts g in the reference. A token's credit is the share of credited windows among those that
    cover it, all n together, 0 if none does; the reward is the mean over tokens. These are the numbers that the term
    ``credit(n,…)`` has for each token, of words instead of the tokens of a model.

    Words are the tokens of ``rouge.tokens=auto``: letters and digits in lower case, of any script, without stemming; in
    Chinese, Japanese, Thai, Lao, Khmer and Burmese, single characters. With several references, the reward is the
    highest of them. It is a precision: a completion of one credited n-gram and nothing else earns 1.

    Example:
        >>> credit(2)(["p"], ["the cat sat here"], reference=["so the cat sat"])
        [0.625]
    """
    if not n or not all(type(length) is int and length >= 1 for length in n) or len({*n}) < len(n):
        raise UserError(f"credit needs different lengths of n-grams, 1 or more, such as credit(2, 3); got {n}.")
    return Reward(f"credit({','.join(map(str, n))})", reference, partial(_credits, n))


# Scores


def _scores(metric: CandidateMetric, texts: Texts, references: References) -> list[float]:
    each = [[text] for text in texts]
    found = score_candidates(metric, _examples(references), each, processes=1)  # others would import the user's program
    return [value for (value,) in found]


def _notes(metric: CandidateMetric, references: References) -> list[str]:
    return notes_on_references(metric.name, _examples(references), metric.options)


def _examples(references: References) -> list[Example]:
    pairs = enumerate(references)
    return [Example(str(number), "", golds[0], golds if len(golds) > 1 else ()) for number, golds in pairs]


def _credits(n: Sequence[int], texts: Texts, references: References) -> list[float]:
    pattern, golds_of_all = token_pattern(), [gold for golds in references for gold in golds]
    words = {text: pattern.findall(normalised(text)) for text in (*texts, *golds_of_all)}
    counts = {gold: [Counter(_windows(words[gold], length)) for length in n] for gold in golds_of_all}
    return [
        max(_credit(words[text], n, counts[gold]) for gold in golds)
        for text, golds in zip(texts, references, strict=True)
    ]


def _credit(words: Sequence[str], n: Sequence[int], counts: Sequence[Mapping[tuple[str, ...], int]]) -> float:
    """The mean credit of words, where ``counts`` has the n-grams of the reference for each n."""
    size = len(words)
    covered, credited = [0] * (size + 1), [0] * (size + 1)  # changes from one position to the next
    for length, known in zip(n, counts, strict=True):
        left = dict(known)
        for start, window in enumerate(_windows(words, length)):
            covered[start] += 1
            covered[start + length] -= 1
            if left.get(window, 0) > 0:
                left[window] -= 1
                credited[start] += 1
                credited[start + length] -= 1
    total, over, earned = 0.0, 0, 0
    for position in range(size):
        over, earned = over + covered[position], earned + credited[position]
        total += earned / over if over else 0.0
    return total / size if size else 0.0


def _windows(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


# Texts


def _text(value: Any) -> str:
    """A completion or a reference as text; of messages, what the assistant says, a line for each."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "role" in each for each in value):
        said = [_content(each.get("content")) for each in value if each.get("role") == "assistant"]
        return "\n".join(filter(None, said))
    if value == []:
        return ""
    raise UserError(f"a reward reads texts, or lists of messages with role and content, got {value!r:.80}.")


def _content(content: Any) -> str:
    """What a message says: a text, or the texts of its parts; one that only calls a tool says nothing."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _references(value: Any, column: str) -> tuple[str, ...]:
    """The references of a row; none if it has none. Raises if one is blank, which would score 0 whatever is written."""
    if value is None or value == []:
        return ()
    several = isinstance(value, list) and not isinstance(value[0], Mapping)
    texts = tuple(map(_text, value)) if several else (_text(value),)
    if not all(text.strip() for text in texts):
        raise UserError(
            f"a reference in the column {column!r} is blank. Fill it in, or set it to None, which leaves the row out."
        )
    return texts
