"""newswire.toml and lists of words → the sentence templates of invented news items.

A field such as ``{person judge}`` names a pool and, after a space, the role of the drawn value in its item.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any, NamedTuple

Slot = tuple[str, ...]
"""Sentences with the same meaning in different words."""


class Outcome(NamedTuple):
    """One outcome of an event: the sentences that report it in a document, and the summary."""

    reports: tuple[Slot, ...]
    summary: str


class Event(NamedTuple):
    """An event: its outcomes, and irrelevant sentences to open, fill and close the document."""

    outcomes: tuple[Outcome, ...]
    opens: Slot
    fills: tuple[Slot, ...]
    closes: tuple[Slot, ...]


def words(text: str) -> Slot:
    """The words of a text."""
    return tuple(text.split())


def joined(starts: str, ends: str) -> Slot:
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

NAMES: dict[str, tuple[Slot, ...]] = {
    "person": (FIRST, (" ",), LAST),
    "place": (TOWNS,),
    "team": (TOWNS, (" ",), CLUBS),
    "company": (BRANDS, (" ",), FIRMS),
    "university": (TOWNS, (" University",)),
    "river": (("River ",), RIVERS),
    "road": (("A", "B"), numbers(101, 990)),
}
"""Names, by pool: the parts from which one is put together."""

FIGURES: dict[str, tuple[Slot, ...]] = {
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


def _slots(lists: list[list[str]]) -> tuple[Slot, ...]:
    return tuple(map(tuple, lists))


EVENTS = {
    name: Event(
        tuple(Outcome(_slots(outcome["reports"]), outcome["summary"]) for outcome in event["outcomes"]),
        tuple(event["opens"]),
        _slots(event["fills"]),
        _slots(event["closes"]),
    )
    for name, event in _TEMPLATES["events"].items()
}
