"""a value from a user → the value in its type and within its bounds, or an error that says what is wrong."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngramloss.errors import UserError

REQUIRED: Any = object()  # Marks a setting without a default
EFFECTS = {
    "documents": "which texts are read, as sources and as references",
    "rows": "which of them are trained and validated on",
    "sentences": "how sources are split into sentences",
    "tokens": "which ids they become",
    "weights": "what a step does to the weights",
    "length": "how many steps there are, and when a training validates, saves and stops",
    "scores": "what a validation measures, and so which weights become the model",
    "texts": "which texts the model writes",
    "speed": "time, memory and what is shown; results differ by rounding and dropout alone",
    "place": "nothing by itself: it names a file or folder, whose content counts",
}
"""What a setting may affect, in the order of a run. It names what it affects itself; what follows from that changes,
too."""
LARGEST = 2**32  # Whole numbers must be below this: products of steps, rows and tokens then fit into 64 bits


class Switch:
    """The type of a setting that is true, false, or ``auto``: the program decides."""

    AUTO = "auto"


_KINDS: dict[type, str] = {
    bool: "true or false",
    Switch: "true, false or auto",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    list: "a list of texts",
}


@dataclass(frozen=True)
class Setting:
    """One setting: its default, type, bounds and choices.

    Example:
        >>> Setting(16, least=1).check("train.batch_size", 0)
        Traceback (most recent call last):
        ...
        ngramloss.errors.UserError: train.batch_size: must be at least 1, got 0.
    """

    default: Any = REQUIRED
    """Its value if none is given. A setting without a default is required."""
    kind: type = None  # type: ignore[assignment]
    """``bool``, ``Switch``, ``int``, ``float``, ``str``, ``Path`` or ``list`` (of texts); by default the type of the
    default."""
    least: float | None = None
    """The smallest value allowed."""
    above: float | None = None
    """Values must be larger than this."""
    most: float | None = None
    """The largest value allowed."""
    below: float | None = None
    """Values must be smaller than this."""
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    """The texts allowed; for a list, the texts allowed in it. A function if entries can be added to them."""
    help: str = ""
    """A one-line description."""
    affects: frozenset[str] = frozenset()
    """What it affects: some of ``EFFECTS``."""
    systems: bool = True
    """Whether systems with a loss of their own have it, too."""

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", type(self.default))
        if self.kind not in _KINDS:
            raise TypeError(f"a setting needs a default or a kind: one of {[kind.__name__ for kind in _KINDS]}.")
        if unknown := self.affects - {*EFFECTS}:
            raise TypeError(f"a setting affects some of {', '.join(EFFECTS)}, not {', '.join(unknown)}.")

    @property
    def allowed(self) -> tuple[str, ...]:
        """The choices that there are now."""
        return self.choices() if callable(self.choices) else self.choices

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is REQUIRED

    def read(self, text: str) -> Any:
        """Read the text after ``=`` on the command line, as TOML or as plain text. :meth:`check` checks it."""
        value = toml_value(text.lstrip())
        return text.lstrip() if self.kind in (str, Path) and not isinstance(value, str) else value  # a file named 2024

    def check(self, key: str, value: Any) -> Any:
        """The value in its type. Raises a :class:`UserError` that begins with the key."""
        value = self._typed(key, value)
        if self.kind in (int, float):
            self._check_bounds(key, value)
        for text in value if self.kind is list else [value]:
            if self.allowed and text not in self.allowed:
                raise UserError(f"{key}: must be one of {', '.join(self.allowed)}, got {text!r}.")
        return value

    def _typed(self, key: str, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind in (int, float) and isinstance(value, int) and number and abs(value) >= LARGEST:
            raise UserError(f"{key}: must be below {LARGEST:,}, got {few_digits(value)}.")
        if self.kind is float and number and not math.isfinite(value):
            raise UserError(f"{key}: must be finite, got {value!r}.")
        fits = {
            bool: isinstance(value, bool),
            Switch: isinstance(value, bool) or value == Switch.AUTO,
            int: number and isinstance(value, int),
            float: number,
            str: isinstance(value, str),
            Path: isinstance(value, (str, Path)),
            list: isinstance(value, list) and all(isinstance(text, str) for text in value),
        }
        if fits[self.kind]:
            return self.kind(value) if self.kind in (float, Path) else value
        expected = f"one of {', '.join(self.allowed)}" if self.kind is str and self.allowed else _KINDS[self.kind]
        raise UserError(f"{key}: must be {expected}, got {value!r}.")

    def _check_bounds(self, key: str, value: float) -> None:
        bounds = (
            (self.least, operator.ge, "at least"),
            (self.above, operator.gt, "above"),
            (self.most, operator.le, "at most"),
            (self.below, operator.lt, "below"),
        )
        for bound, holds, words in bounds:
            if bound is not None and not holds(value, bound):
                raise UserError(f"{key}: must be {words} {bound:,}, got {value:,}.")


def setting(default: Any, affects: str, **more: Any) -> Any:
    """A field of a dataclass: its default, what it affects (``"tokens texts"``), and more of :class:`Setting`."""
    described = Setting(default, affects=frozenset(affects.split()), **more)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"setting": described})
    return dataclasses.field(default=default, metadata={"setting": described})


def settings_of(section: type) -> dict[str, Setting]:
    """The settings of a dataclass: name of a field → its setting."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(section)
    return {field.name: field.metadata.get("setting") or Setting(field.default) for field in fields}


def toml_value(text: str) -> Any:
    """The text after ``=`` as a TOML value, or as plain text if it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def part_of(text: str) -> tuple[int, int] | None:
    """Number and count of ``K/N``; None if it is something else.

    >>> part_of("1/4"), part_of("5/4"), part_of("half")
    ((1, 4), None, None)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    return (number, count) if 1 <= number <= count else None


def few_digits(value: int) -> str:
    """A number that may have thousands of digits, shortened.

    >>> few_digits(2**33), few_digits(10**30)
    ('8,589,934,592', 'about 10^30')
    """
    return f"{value:,}" if abs(value) < 10**18 else f"about {'-' * (value < 0)}10^{int(math.log10(abs(value)))}"


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.0) -> str:
    """``Did you mean 'x'? `` for an error, if there is a choice that is close enough."""
    close = closest(word, choices, cutoff)
    return f"Did you mean {close!r}? " if close else ""


def closest(word: str, choices: Iterable[str], cutoff: float = 0.0) -> str:
    """The choice that a word misspells or abbreviates, or the most similar one; empty if none is close enough.

    >>> names = ["clip", "learning_rate", "max_length", "batch_size", "epochs"]
    >>> [closest(word, names) for word in ("clp", "lr", "max_len", "batch", "num_train_epochs")]
    ['clip', 'learning_rate', 'max_length', 'batch_size', 'epochs']
    """
    word, choices = word.lower(), list(choices)
    if not difflib.get_close_matches(word, choices, 1, max(cutoff, 0.8)):
        short = [choice for choice in choices if _abbreviates(word, choice.lower())]
        choices, cutoff = (short, 0.0) if short else (choices, cutoff)
    return next(iter(difflib.get_close_matches(word, choices, 1, cutoff)), "")


def _abbreviates(word: str, name: str) -> bool:
    """Whether a word is a name's initials, or every part of one of them begins a part of the other, or the reverse."""
    parts, others = ([part for part in re.split(r"\W|_", text) if part] for text in (word, name))
    if not parts or not others:
        return False
    alike = [[_begins(one, other) for other in others] for one in parts]
    initials = len(others) > 1 and word == "".join(other[0] for other in others)
    return initials or all(map(any, alike)) or all(map(any, zip(*alike, strict=True)))


def _begins(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return one == other or (len(short) > 2 and long.startswith(short))
