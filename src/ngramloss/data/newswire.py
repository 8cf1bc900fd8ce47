"""a seed, a split and a number → one invented news item: the built-in corpus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from random import Random
from string import Formatter
from typing import NamedTuple

from ngramloss.data.newswire_words import EVENTS, FIGURES, NAMES, PHRASES, Event, Outcome
from ngramloss.errors import UserError

SPLITS = {"train": 24_000, "validation": 500, "test": 500}
"""Split → default number of items."""


class Item(NamedTuple):
    """A document, its summary, and the facts that a prediction is checked for."""

    id: str
    event: str
    document: str
    summary: str
    names: tuple[str, ...]
    """People, places and organisations in the summary, as written there and in the document."""
    figures: tuple[str, ...]
    """Numbers in the summary, as written there and in the document."""
    decoy: str
    """The right wording with wrong facts: what a model would score if it ignored the document's facts."""


def items(split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
    """The first ``count`` items of a split; a longer list starts with every shorter one.

    Args:
        split: one of ``SPLITS``.
        count: how many; by default the size in ``SPLITS``.
        seed: another seed gives another corpus.

    Example:
        >>> for item in items("validation", 2):
        ...     print(item.summary)
        Profits at carmaker Galaflex Industries jumped 6 per cent to £78.3 million, helped by a hit product.
        Joel Branding is retiring as Nexotech Partners strategy director aged 69, Rachel Wenbeck taking charge.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r} of newswire; choose from {sorted(SPLITS)}")
    if count is not None and count < 0:
        raise UserError(f"newswire needs a count of 0 or more, got {count}. Omit it for {SPLITS[split]:,} items.")
    return [item(split, index, seed=seed) for index in range(SPLITS[split] if count is None else count)]


def item(split: str, index: int, *, seed: int) -> Item:
    """One item; it depends only on the arguments."""
    # A string as seed gives the same numbers in every process and on every version of Python.
    rng = Random(f"{seed}-{split}-{index}")
    name = rng.choice(list(EVENTS))
    event = EVENTS[name]
    outcome = rng.choice(event.outcomes)
    facts = drawn(rng, fields_of(event, outcome), taken=set())
    asked = fields(outcome.summary)
    others = drawn(rng, asked, taken={facts[field] for field in asked})
    return Item(
        id=f"newswire-{split}-{index}",
        event=name,
        document=document(rng, event, outcome, facts),
        summary=summary(outcome, facts),
        names=tuple(facts[field] for field in asked if pool(field) in NAMES),
        figures=tuple(facts[field] for field in asked if pool(field) in FIGURES),
        decoy=summary(outcome, others),
    )


def document(rng: Random, event: Event, outcome: Outcome, facts: dict[str, str]) -> str:
    """What happened, mixed with irrelevant sentences, in random order: 4 to 9 sentences."""
    opening = [event.opens] if rng.random() < 0.7 else []
    middle = [*outcome.reports, *rng.sample(event.fills, rng.randint(1, 4))]
    rng.shuffle(middle)
    slots = [*opening, *middle, *rng.sample(event.closes, rng.randint(1, 2))]
    return " ".join(sentence(rng.choice(slot), facts) for slot in slots)


def summary(outcome: Outcome, facts: dict[str, str]) -> str:
    """The outcome's summary, with each phrase of the document replaced by the summary's wording."""
    words = {field: PHRASES.get(pool(field), {}).get(facts[field], facts[field]) for field in fields(outcome.summary)}
    return sentence(outcome.summary, words)


def sentence(template: str, facts: dict[str, str]) -> str:
    """Fill the facts into the template and capitalise the first letter."""
    text = template.format_map(facts)
    return text[0].upper() + text[1:]


def drawn(rng: Random, asked: tuple[str, ...], *, taken: set[str]) -> dict[str, str]:
    """Draw a fact for each field, all different and none of them in ``taken``."""
    facts: dict[str, str] = {}
    for field in asked:
        while (fact := value(rng, pool(field))) in taken:
            pass
        taken.add(fact)
        facts[field] = fact
    return facts


def value(rng: Random, name: str) -> str:
    """Draw one value from a pool."""
    if name in PHRASES:
        return rng.choice(list(PHRASES[name]))
    return "".join(rng.choice(part) for part in (NAMES.get(name) or FIGURES[name]))


@cache
def fields_of(event: Event, outcome: Outcome) -> tuple[str, ...]:
    """Every field that a document with this outcome may use."""
    slots = (*outcome.reports, event.opens, *event.fills, *event.closes)
    return fields("".join(template for slot in slots for template in slot))


@cache
def fields(template: str) -> tuple[str, ...]:
    """The fields of a template, each once, in the order of their first use."""
    return tuple(dict.fromkeys(field for _, field, _, _ in Formatter().parse(template) if field))


def pool(field: str) -> str:
    """The pool that a field draws from."""
    return field.split()[0]


def share(wanted: Sequence[tuple[str, ...]], predictions: Sequence[str]) -> float:
    """Percentage of all wanted strings that occur in their predictions; 100 if there are none."""
    pairs = zip(wanted, predictions, strict=True)
    hits = [stands_in(text, prediction) for texts, prediction in pairs for text in texts]
    return 100 * sum(hits) / len(hits) if hits else 100.0


def stands_in(text: str, prediction: str) -> bool:
    """Whether the text occurs in the prediction, not as part of a longer word or number."""
    return bool(re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(text)}(?!\w)(?![.,]\d)", prediction, re.IGNORECASE))
