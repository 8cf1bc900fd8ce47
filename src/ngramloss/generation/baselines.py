"""the name of a baseline → summaries made without a model, which any trained system should beat."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ngramloss.data import Example, newswire
from ngramloss.data.languages import AUTO
from ngramloss.data.sentences import sentences
from ngramloss.errors import UserError
from ngramloss.metrics.oracle import SENTENCES, greedy_oracle

Write = Callable[[Sequence[Example]], list[str]]  # examples → a text of each


class Baseline(NamedTuple):
    """A rule that writes summaries without a model."""

    pattern: re.Pattern[str]  # matches its name; a group in it is its number
    about: str
    write: Callable[[int, str, Sequence[Example], str], list[str]]
    """``(number, split, examples, language) → texts``; the number is 0 if the name has none."""
    data: str = ""  # the only data set that it works on; empty if it works on any
    splits_sentences: bool = False
    reads_targets: bool = False


def lead(number: int, split: str, examples: Sequence[Example], language: str = AUTO) -> list[str]:
    """The first sentences of each document, one per line."""
    return ["\n".join(sentences(example.source, language=language)[:number]) for example in examples]


def ext_oracle(number: int, split: str, examples: Sequence[Example], language: str = AUTO) -> list[str]:
    """The sentences that a greedy search for ROUGE against the references takes, one per line, in their order."""
    texts = []
    for example in examples:
        parts = sentences(example.source, language=language)
        places = greedy_oracle(parts, example.references or [example.target], most=number or SENTENCES)
        texts.append("\n".join(parts[place] for place in places))
    return texts


def random_facts(number: int, split: str, examples: Sequence[Example], language: str = AUTO) -> list[str]:
    """The right template with wrong facts: what a model would score if it ignored the document's facts."""
    items = [int(example.id.rpartition("-")[2]) for example in examples]
    return [newswire.item(split, item, seed=0).decoy for item in items]


BASELINES = {
    "lead-N": Baseline(re.compile(r"lead-(\d+)"), "the first N sentences of the document", lead, splits_sentences=True),
    "ext-oracle": Baseline(
        re.compile(r"ext-oracle(?:-(\d+))?"),
        f"the best {SENTENCES} sentences, or N with ext-oracle-N, by a greedy search that reads the reference",
        ext_oracle,
        splits_sentences=True,
        reads_targets=True,
    ),
    "random-facts": Baseline(
        re.compile("random-facts"), "the right template with the wrong facts", random_facts, data="newswire"
    ),
}
"""All baselines by name. A new one is a function and a line here; ``generate`` and ``list`` then include it."""


def is_baseline(model: str) -> bool:
    """Whether this is the name of a baseline."""
    return baseline_of(model) is not None


def baseline_of(model: str) -> Baseline | None:
    """The baseline of a name; None if there is none."""
    return next((baseline for baseline in BASELINES.values() if baseline.pattern.fullmatch(model)), None)


def baseline_writer(model: str, data: str, split: str, language: str = AUTO) -> Write | None:
    """The function (examples → texts) of a baseline; None without one of this name. Raises if it cannot run here."""
    baseline = baseline_of(model)
    match = baseline.pattern.fullmatch(model) if baseline else None
    if baseline is None or match is None:
        return None
    given = match[1] if match.groups() else None
    number = int(given or 0)
    if given and number == 0:
        name = model.rpartition("-")[0]
        raise UserError(f"{model} would write nothing; use {name}-1, {name}-2, {name}-3, ….")
    if baseline.data and data != baseline.data:
        raise UserError(f"{model} works only on {baseline.data}, not on {data}; use lead-3 for other data.")
    write = baseline.write
    return lambda examples: write(number, split, examples, language)
