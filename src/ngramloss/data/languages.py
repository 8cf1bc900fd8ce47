"""texts → letters by script, the language that a script suggests, and tokens in any script."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ngramloss.errors import UserError

AUTO = "auto"
"""Choose the language by script, text by text."""
LATIN = "Latin"

SCRIPTS = {
    LATIN: (
        "en",
        "English",
        "0041-005a 0061-007a 00aa-00aa 00ba-00ba 00c0-02af 1e00-1eff 2c60-2c7f a720-a7ff fb00-fb06 ff21-ff3a ff41-ff5a",
    ),
    "Han": (
        "zh",
        "Chinese",
        "2e80-2fdf 3005-3007 3021-3029 3038-303b 3105-312f 31a0-31bf 3400-4dbf 4e00-9fff f900-faff 20000-3ffff",
    ),
    "kana": ("ja", "Japanese", "3041-309f 30a1-30fa 30fc-30ff 31f0-31ff ff66-ff9f 1b000-1b16f"),
    "Hangul": ("ko", "Korean", "1100-11ff 3131-318e a960-a97f ac00-d7ff ffa1-ffdc"),
    "Thai": ("th", "Thai", "0e01-0e4e"),
    "Lao": ("lo", "Lao", "0e80-0ecf 0edc-0edf"),
    "Khmer": ("km", "Khmer", "1780-17d3 17d7-17dd"),
    "Myanmar": ("my", "Burmese", "1000-103f 104a-108f 109a-109f a9e0-a9ef a9fa-a9fe aa60-aa7f"),
    "Arabic": ("ar", "Arabic", "0600-06ff 0750-077f 0870-08ff fb50-fdff fe70-fefc"),
    "Hebrew": ("he", "Hebrew", "0590-05ff fb1d-fb4f"),
    "Cyrillic": ("ru", "Russian", "0400-052f 1c80-1c8f 2de0-2dff a640-a69f"),
    "Greek": ("el", "Greek", "0370-03ff 1f00-1fff"),
    "Armenian": ("hy", "Armenian", "0530-058f fb13-fb17"),
    "Georgian": ("ka", "Georgian", "10a0-10ff 1c90-1cbf 2d00-2d2f"),
    "Ethiopic": ("am", "Amharic", "1200-139f 2d80-2ddf ab00-ab2f"),
    "Devanagari": ("hi", "Hindi", "0900-097f a8e0-a8ff"),
    "Bengali": ("bn", "Bengali", "0980-09ff"),
    "Gurmukhi": ("pa", "Punjabi", "0a00-0a7f"),
    "Gujarati": ("gu", "Gujarati", "0a80-0aff"),
    "Odia": ("or", "Odia", "0b00-0b7f"),
    "Tamil": ("ta", "Tamil", "0b80-0bff"),
    "Telugu": ("te", "Telugu", "0c00-0c7f"),
    "Kannada": ("kn", "Kannada", "0c80-0cff"),
    "Malayalam": ("ml", "Malayalam", "0d00-0d7f"),
    "Sinhala": ("si", "Sinhala", "0d80-0dff"),
    "Tibetan": ("bo", "Tibetan", "0f00-0fff"),
}
"""Script → the language that it suggests, its name, and the script's blocks: the first and the last code point of each.
Digits of scripts without spaces are left out: they make numbers, as in other scripts."""
SPACELESS = ("Han", "kana", "Thai", "Lao", "Khmer", "Myanmar")
"""Scripts whose words are not separated by spaces."""

NAMES = {code: name for code, name, _ in SCRIPTS.values()}
"""Code of a language → its name."""

_WEIGHT = 3  # A character of a script without spaces counts as three letters: it says about as much
_KANA = 0.05  # From this share of kana among Han and kana on, a text is Japanese: Chinese texts quote single kana

_NOT_ASCII = re.compile("[^\x00-\x7f]")
_NOT_ASCII_LETTER = bytes(code for code in range(128) if not chr(code).isalpha())
_INVISIBLE = re.compile(
    r"[\u00ad\u061c\u200c-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef]"
)
"""Joiners, soft hyphens, marks of direction, selectors of variants: they neither separate nor distinguish words."""


class Letters(NamedTuple):
    """How many letters some texts have: a to z, and each other letter."""

    ascii: int
    others: Counter[str]

    @property
    def total(self) -> int:
        """The number of letters."""
        return self.ascii + self.others.total()

    @property
    def scripts(self) -> Counter[str]:
        """Script → number of letters; "other" for scripts that are not in ``SCRIPTS``."""
        counts = Counter({LATIN: self.ascii}) if self.ascii else Counter[str]()
        for letter, count in self.others.items():
            counts[script(letter)] += count
        return counts

    @property
    def share_not_ascii(self) -> float:
        """The share of letters other than a to z."""
        return self.others.total() / self.total if self.total else 0.0


def letters(texts: Iterable[str]) -> Letters:
    """Count the letters of texts."""
    plain, characters = 0, Counter[str]()
    for text in texts:
        plain += len(text.encode("ascii", "ignore").translate(None, _NOT_ASCII_LETTER))
        if not text.isascii():
            characters.update(_NOT_ASCII.findall(text))
    others = {letter: count for letter, count in characters.items() if letter.isalpha()}
    return Letters(plain, Counter(others))


def script(letter: str) -> str:
    """The script of a letter; "other" for scripts that are not in ``SCRIPTS``.

    >>> script("ж"), script("中"), script("ü"), script("ᚠ")
    ('Cyrillic', 'Han', 'Latin', 'other')
    """
    blocks = _blocks()
    index = bisect_right(blocks, letter, key=lambda block: block[0]) - 1
    return blocks[index][2] if index >= 0 and letter <= blocks[index][1] else "other"


def language_of(texts: Iterable[str]) -> str:
    """The code of the language that most letters' script suggests, also where languages share it; "en" for none."""
    counts = letters(texts).scripts
    weights = {name: count * (_WEIGHT if name in SPACELESS else 1) for name, count in counts.items() if name in SCRIPTS}
    han, kana = weights.pop("Han", 0), weights.pop("kana", 0)
    if han + kana:
        weights["kana" if kana >= _KANA * (han + kana) else "Han"] = han + kana
    return SCRIPTS[max(weights, key=lambda name: weights[name])][0] if weights else "en"


def checked_language(language: str) -> str:
    """A code of a language or ``auto``. Raises if it has another form."""
    if language != AUTO and not re.fullmatch("[a-z]{2,3}", language):
        raise UserError(f"the language must be auto or a code of two letters such as de, got {language!r}.")
    return language


def name_of(language: str) -> str:
    """The name of a language, or its code in quotes if it is not in ``NAMES``."""
    return NAMES.get(language, repr(language))


def percent(share: float) -> str:
    """A share for a message.

    >>> percent(1), percent(0.234), percent(0.0123)
    ('100%', '23%', '1.2%')
    """
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def normalised(text: str) -> str:
    """The text in NFKC with case folded, without invisible characters. Full-width letters become ordinary ones."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _INVISIBLE.sub("", folded)


@lru_cache(maxsize=1)
def token_pattern() -> re.Pattern[str]:
    """One character of a script without spaces, or letters and digits of others, with combining marks behind them."""
    single, mark = _spaceless(), _mark()
    return re.compile(rf"(?=\w)[{single}]{mark}*|[^\W_{single}]+(?:{mark}+[^\W_{single}]*)*")


@lru_cache(maxsize=1)
def word_pattern() -> re.Pattern[str]:
    """``WORD`` of the statistics for any script: also one character of a script without spaces, and combining marks."""
    single, mark = _spaceless(), _mark()
    word = rf"[^\W{single}]+(?:{mark}+[^\W{single}]*)*"
    return re.compile(rf"\d+(?:[.,]\d+)+|(?=\w)[{single}]{mark}*|{word}(?:['’-]{word})*")


@lru_cache(maxsize=1)
def special_pattern() -> re.Pattern[str]:
    """A character that ``\\w+`` does not treat as part of a word or does not separate."""
    return re.compile(f"[{_spaceless()}]|{_mark()}")


@lru_cache(maxsize=1)
def _blocks() -> list[tuple[str, str, str]]:
    blocks = ((block.split("-"), name) for name, (*_, written) in SCRIPTS.items() for block in written.split())
    return sorted((chr(int(first, 16)), chr(int(last, 16)), name) for (first, last), name in blocks)


def _spaceless() -> str:
    return "".join(f"{first}-{last}" for first, last, name in _blocks() if name in SPACELESS)


def _mark() -> str:
    # Python finds a character quickly in a class of the first 2^16 characters, but goes through others one by one.
    return rf"(?:[{_marks(0x300, 0x10000)}]|(?=[\U00010000-\U0010ffff])[{_marks(0x10000, 0x20000)}])"


def _marks(start: int, stop: int) -> str:
    """The combining marks in a range of code points, which ``\\w`` lacks."""
    return "".join(chr(code) for code in range(start, stop) if unicodedata.category(chr(code)).startswith("M"))
