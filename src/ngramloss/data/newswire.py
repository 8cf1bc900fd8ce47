"""newswire.toml, a seed, a split and a number → one invented news item: the built-in corpus.

A field such as ``{person judge}`` names a pool and, after a space, the role of the drawn value in its item.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from math import nan
from random import Random
from string import Formatter
from typing import Any, NamedTuple

from ngramloss.errors import UserError

SPLITS = {"train": 24_000, "validation": 500, "test": 500}
"""Split → default number of items."""


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def joined(starts: str, ends: str) -> tuple[str, ...]:
    """Every start joined with every end, except those that would double a letter."""
    return tuple(start + end for start in words(starts) for end in words(ends) if start[-1] != end[0])


def numbers(start: int, stop: int, step: int = 1) -> tuple[str, ...]:
    """Whole numbers with a comma after the thousands, excluding ``stop``."""
    return tuple(f"{number:,}" for number in range(start, stop, step))


FIRST = words(
    """
    Ada Adam Aisha Alan Albert Alice Amara Amir Anders Andrea Anita Anna Anton Arjun Arthur Astrid Barbara Basil
    Beatrix Ben Bridget Bruno Callum Carla Carmen Cecil Celia Clara Colin Cora Cyril Daisy Dalia Daniel Daphne
    Darius Dora Dylan Edith Edna Edwin Elena Elias Ella Elsa Emil Emma Enid Eric Erik Esme Esther Ethan Eva Ewan
    Faith Farah Felix Fergus Fiona Flora Frances Frank Freya Gemma George Gilbert Gina Grace Greta Gwen Hana
    Hannah Harold Harriet Harvey Hassan Hazel Hector Heidi Helen Henry Hilda Holly Hugo Ian Ida Imogen Imran Ines
    Ingrid Iris Isaac Isla Ivan Ivy Jack Jacob Jamal Jane Janet Jasmine Jean Joan Joel Jonas Joseph Josie Judith
    Julia Karen Karim Keith Kenji Kiran Kofi Lara Laura Leah Leila Lena Leo Leon Lewis Lily Linda Lois Louis Lucas
    Lucy Luis Luna Lydia Mabel Magda Maria Marion Martha Martin Mason Matilda Maya Megan Mia Milo Mina Miriam Mona
    Morgan Nadia Naomi Nathan Neil Nell Nina Noah Nora Oliver Olga Omar Oscar Otto Owen Paula Pearl Peggy Percy
    Petra Philip Phoebe Priya Rachel Ralph Ravi Rhys Rita Robin Rosa Rowan Ruby Rufus Ruth Sadie Salma Samir
    Sandra Sara Selma Sidney Silas Simon Sofia Stella Stephen Susan Sven Tamsin Tara Tessa Theo Thomas Tilda Toby
    Tomas Ursula Vera Victor Viola Walter Wanda Wesley Wilma Yusuf Zara Zoe
    """
)
LAST = joined(
    "Ard Bel Bran Cald Cor Dal Drum Esk Fal Gar Gren Hal Hart Kel Kirk Lang Lor Mar Mel Nor Pel Quin Ros Sel Tal Thor "
    "Var Wen Yar Zel",
    "ander beck den ding good itt man more rick son ster vey well wood",
)
TOWNS = joined(
    "Amber Ash Birch Black Bram Bright Broad Castle Clay Cold Cop Crow Dray Dun East Elm Fair Fern Glen Green Hazel "
    "Hinter High Iron Lark Lime Long Maple Marsh Mill Moss North Oak Otter Pine Raven Red Salt Sand Silver South Stone "
    "Swan Thorn West Whin Wind Wolf",
    "bourne bridge bury by combe dale field ford gate ham haven mouth port stead ton wick",
)
BRANDS = joined(
    "Acto Alva Bryo Cento Delta Evo Fusi Gala Heli Inno Juno Kora Luma Nexo Opti Prima Quanta Rivo Sola Tera Uni Vela "
    "Xeno Zeta",
    "bond core dyne flex lane mark nova path rise tech",
)
CLUBS = words("Albion Athletic City Harriers Rangers Rovers Town United Wanderers")
FIRMS = words("Brothers Group Holdings Industries Partners Systems Works")
RIVERS = words("Arrel Bure Calden Dorn Elver Fenn Garl Isk Leam Mardle Nyle Orrin Pell Rook Sarn Tarrow Ulver Wend")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")

NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "person": (FIRST, (" ",), LAST),
    "place": (TOWNS,),
    "team": (TOWNS, (" ",), CLUBS),
    "company": (BRANDS, (" ",), FIRMS),
    "university": (TOWNS, (" University",)),
    "river": (("River ",), RIVERS),
    "road": (("A", "B"), numbers(101, 990)),
}
"""Names, by pool: the parts from which one is put together."""

FIGURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "rout": (("4-0", "5-0", "6-0", "7-0", "4-1", "5-1", "6-1", "7-1", "5-2", "6-2", "7-2", "6-3", "7-3"),),
    "clear": (("2-0", "3-0", "3-1", "4-2", "5-3"),),
    "narrow": (("1-0", "2-1", "3-2", "4-3", "5-4"),),
    "level": (("1-1", "2-2", "3-3", "4-4"),),
    "shootout": (("3-1", "3-2", "4-2", "4-3", "5-3", "5-4", "6-5", "7-6"),),
    "crowd": (numbers(1100, 9900, 100),),
    "count": (numbers(20, 990, 10),),
    "few": (numbers(12, 90),),
    "percent": (numbers(3, 70), (" per cent",)),
    "rise": (numbers(2, 10), (" per cent",)),
    "million": (("£",), numbers(1, 90), (".",), numbers(1, 10), (" million",)),
    "thousand": (("£",), numbers(11, 100), (",",), ("000", "500")),
    "fine": (("£",), numbers(250, 9000, 50)),
    "fare": (("£",), numbers(19, 320)),
    "pence": (numbers(2, 60), ("p",)),
    "millimetres": (numbers(20, 150, 5), ("mm",)),
    "centimetres": (numbers(5, 60), ("cm",)),
    "mph": (numbers(55, 110), ("mph",)),
    "degrees": (numbers(30, 43), ("C",)),
    "votes": (numbers(15, 40), ("-",), numbers(2, 15)),
    "months": (numbers(4, 48), (" months",)),
    "minutes": (numbers(15, 125, 5), (" minutes",)),
    "days": (numbers(2, 15), (" days",)),
    "years": (numbers(2, 35), (" years",)),
    "ages": (numbers(3, 240), (" million years",)),
    "year": (tuple(str(year) for year in range(1951, 2015)),),
    "age": (numbers(19, 88),),
    "elder": (numbers(55, 89),),
}
"""Figures, by pool: the parts from which one is put together."""

_TEMPLATES: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("newswire.toml").read_text("utf-8"))

PHRASES: dict[str, dict[str, str]] = {
    "weekday": {day: day for day in WEEKDAYS},
    "month": {month: month for month in MONTHS},
    **_TEMPLATES["phrases"],
}
"""Plain words, by pool: what a document says → what its summary makes of it."""
EVENTS: dict[str, dict[str, Any]] = _TEMPLATES["events"]
"""Name → outcomes of the event, each with reports and a summary, and irrelevant sentences: opens, fills and closes."""


class Item(NamedTuple):
    """A document, its summary, and the facts that a prediction is checked for."""

    id: str
    event: str
    document: str
    summary: str
    names: tuple[str, ...]  # people, places and organisations in the summary, as written there and in the document
    figures: tuple[str, ...]  # numbers in the summary, as written there and in the document
    decoy: str  # the right wording with wrong facts: what a model would score if it ignored the document's facts


def items(split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
    """The first ``count`` items of a split; a longer list starts with every shorter one.

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
    outcome = rng.choice(event["outcomes"])
    facts = drawn(rng, fields_of(event, outcome), taken=set())
    asked = fields(outcome["summary"])
    others = drawn(rng, asked, taken={facts[field] for field in asked})
    return Item(
        id=f"newswire-{split}-{index}",
        event=name,
        document=document(rng, event, outcome, facts),
        summary=summary(outcome["summary"], facts),
        names=tuple(facts[field] for field in asked if pool(field) in NAMES),
        figures=tuple(facts[field] for field in asked if pool(field) in FIGURES),
        decoy=summary(outcome["summary"], others),
    )


def document(rng: Random, event: dict[str, Any], outcome: dict[str, Any], facts: dict[str, str]) -> str:
    """What happened, mixed with irrelevant sentences, in random order: 4 to 9 sentences."""
    opening = [event["opens"]] if rng.random() < 0.7 else []
    middle = [*outcome["reports"], *rng.sample(event["fills"], rng.randint(1, 4))]
    rng.shuffle(middle)
    slots = [*opening, *middle, *rng.sample(event["closes"], rng.randint(1, 2))]
    return " ".join(sentence(rng.choice(slot), facts) for slot in slots)


def summary(template: str, facts: dict[str, str]) -> str:
    """A summary, with each phrase of the document replaced by the summary's wording."""
    words = {field: PHRASES.get(pool(field), {}).get(facts[field], facts[field]) for field in fields(template)}
    return sentence(template, words)


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


def fields_of(event: dict[str, Any], outcome: dict[str, Any]) -> tuple[str, ...]:
    """Every field that a document with this outcome may use."""
    slots = (*outcome["reports"], event["opens"], *event["fills"], *event["closes"])
    return fields("".join(template for slot in slots for template in slot))


@cache
def fields(template: str) -> tuple[str, ...]:
    """The fields of a template, each once, in the order of their first use."""
    return tuple(dict.fromkeys(field for _, field, _, _ in Formatter().parse(template) if field))


def pool(field: str) -> str:
    """The pool that a field draws from."""
    return field.split()[0]


def share(wanted: tuple[str, ...], prediction: str) -> float:
    """Percentage of the wanted strings that occur in a prediction; NaN if none is wanted."""
    hits = [stands_in(text, prediction) for text in wanted]
    return 100 * sum(hits) / len(hits) if hits else nan


def stands_in(text: str, prediction: str) -> bool:
    """Whether the text occurs in the prediction, not as part of a longer word or number."""
    return bool(re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(text)}(?!\w)(?![.,]\d)", prediction, re.IGNORECASE))
