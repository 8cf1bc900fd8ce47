"""splits as they were read and tokenised → what is used, cut, repeated or in two splits, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramloss.data.examples import Example, Split
from ngramloss.data.languages import percent
from ngramloss.data.messages import MESSAGES
from ngramloss.recipe import Data

WARNING = "warning: "
"""What a sentence begins with that says something may be wrong."""
SHOWN = 3
"""Number of ids that a warning shows."""
LOOKED_AT, LEAST_WORDS = 1000, 3
"""Training rows that are looked at, whether they contain their targets; a target with fewer words does not count."""


def overview(
    splits: Mapping[str, Split],
    cut: Mapping[str, tuple[int, int]],
    data: Data,
    nouns: tuple[str, str] = ("source", "target"),
) -> list[str]:
    """A sentence for each split, then warnings about rows (source and target) that are also in the training split.

    ``cut``: split → how many of its sources and of its targets were cut, if it was tokenised.
    """
    train = _rows(splits["train"].examples)
    sentences, warnings = [], []
    for name, split in splits.items():
        sentences.append(_sentence(name, split, cut.get(name), data, nouns, splits["train"].column))
        shared = [] if name == "train" else [row.id for row in split.examples if (row.source, row.target) in train]
        if shared:
            held_out = data.validation_fraction or data.test_fraction
            remedy = "Remove repeated rows from the data" if held_out else "Remove them from one of the two splits"
            rows = _many(len(split.examples), f"{name} row")
            warnings.append(
                f"{WARNING}the training data contain {len(shared):,} of the {rows} (ids {_ids(shared)}), so scores on "
                f"them say little about new texts. {remedy}."
            )
    if told := _told(splits["train"].examples):
        warnings.insert(0, told)
    return sentences + warnings


def lost_ends(lost: int, count: int, what: str, longest: int, unit: str = "tokens", key: str = "max_source") -> str:
    """A sentence that says how many texts were cut to ``data.max_source``, or another ``key``."""
    return f"{lost:,} of {count:,} {what} are longer than data.{key} = {longest} {unit} and lost their end."


def _told(examples: Sequence[Example]) -> str:
    """A warning if most sources contain their whole target: then a column with the answer is read as the source."""
    looked_at = examples[:: max(len(examples) // LOOKED_AT, 1)]
    long = [example for example in looked_at if len(example.target.split()) >= LEAST_WORDS]
    told = [example for example in long if example.target in example.source]
    if 2 * len(told) <= len(looked_at):
        return ""
    return (
        f"{WARNING}most sources of the training data contain their whole target "
        f"({percent(len(told) / len(looked_at))} of those looked at, ids {_ids([example.id for example in told])}), "
        "so there is only copying to learn. Check data.source: is the answer read as the source?"
    )


def _ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:SHOWN]) + (", …" if len(ids) > SHOWN else "")


def _sentence(
    name: str, split: Split, cut: tuple[int, int] | None, data: Data, nouns: tuple[str, str], trained: str
) -> str:
    facts = [f"{name}: {_many(len(split.examples), 'row')}"]
    if name == "train" or split.column != trained:
        facts += _columns(split, named=split.column != trained)
    if split.more:
        setting, limit = ("limit", data.limit) if name == "train" else ("validation_limit", data.validation_limit)
        facts.append(f"the rest not used (data.{setting} = {limit:,})")
    if name == "train" and data.leave_out:
        facts.append(f"part {data.leave_out} left out (data.leave_out)")
    if split.skipped:
        facts.append(f"{_many(len(split.skipped), 'bad row')} skipped")
    if cut is not None:
        sources, targets = cut
        if sources:
            facts.append(f"{_many(sources, nouns[0])} cut to {data.max_source:,} tokens (data.max_source)")
        if targets:
            facts.append(f"{_many(targets, nouns[1])} cut to {data.max_target:,} tokens (data.max_target)")
        if not sources and not targets:
            facts.append("no text cut")
    if repeated := len(split.examples) - len(_rows(split.examples)):
        facts.append(_many(repeated, "repeated row"))
    return "; ".join(facts) + "."


def _columns(split: Split, *, named: bool) -> list[str]:
    """Which columns were read, if others were not, if several are joined, or if they are to be ``named`` anyway."""
    sources = [] if split.column == MESSAGES else split.column.split(",")
    if not split.unread and len(sources) < 2 and not named:
        return []
    rest = len(split.unread) - SHOWN
    unread = f"not read: {', '.join(split.unread[:SHOWN])}" + f" and {rest} more" * (rest > 0)
    read = f"sources are {' and '.join(sources)}, targets {split.target_column}"
    return [read] * bool(sources) + [unread] * bool(split.unread)


def _rows(examples: Sequence[Example]) -> set[tuple[str, str]]:
    return {(example.source, example.target) for example in examples}


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
