"""texts and figures of every case → compressed blocks that the page unpacks when they are looked at."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

BLOCK = 256
"""Cases in a block. Texts of one case lie side by side, so near-equal summaries cost almost nothing."""
DOCUMENT_BLOCK = 200_000
"""Characters of documents in a block, about."""
NOTHING = 0xFFFF
"""The code of a figure that a case does not have."""
_PATIENCE = 4
_WORD = re.compile(r"[^\W_]+")


class Figures(NamedTuple):
    """A figure of every case and system: value = low + code / 10^decimals, codes of one case side by side."""

    low: float
    decimals: int
    codes: str


class Documents(NamedTuple):
    """The documents that fit.

    Attributes:
        blocks: each a list of texts.
        starts: how many documents lie before each block.
        places: of the cases that have their document in the page, in the order of the texts.
        known: how many documents there are in all.
    """

    blocks: list[str]
    starts: list[int]
    places: list[int]
    known: int


def pack(value: Any) -> str:
    """JSON, gzipped, in base64. Half a surrogate pair, which no UTF-8 can hold, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _base64(text.encode("utf-8", "replace"))


def texts(references: Sequence[Sequence[str]], systems: Sequence[Sequence[str]]) -> list[str]:
    """Blocks of ``[references of a case, its texts by system]``."""
    rows = [[list(gold), [system[case] for system in systems]] for case, gold in enumerate(references)]
    return [pack(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK)]


def figures(systems: Sequence[Sequence[float | None]]) -> Figures:
    """The figures of all systems as whole numbers of 16 bits, in steps of a power of ten.

    The step is 0.01 for figures from 0 to 100, so that what is shown with two decimals is what was computed.
    """
    known = [value for system in systems for value in system if is_number(value)]
    least, most = min(known, default=0.0), max(known, default=0.0)
    decimals = math.floor(math.log10((NOTHING - 2) / max(most - least, 1.0)))
    step = 10.0**-decimals
    low = math.floor(least / step) * step
    codes = array("H", (
        round((value - low) / step) if is_number(value) else NOTHING
        for case in zip(*systems, strict=True) for value in case
    ))  # fmt: skip
    if sys.byteorder == "big":
        codes.byteswap()
    return Figures(low, decimals, _base64(codes.tobytes()))


def documents(sources: Sequence[str | None], room: int) -> Documents:
    """As many documents as fit into ``room`` bytes, from the first on. A block that does not fit is passed over."""
    blocks: list[str] = []
    starts: list[int] = []
    indices: list[int] = []
    failures = 0
    for group in _groups(sources):
        block = pack([sources[index] for index in group])
        if len(block) > room:
            failures += 1
            if failures == _PATIENCE:
                break
            continue
        room -= len(block)
        blocks.append(block)
        starts.append(len(indices))
        indices += group
    return Documents(blocks, starts, indices, sum(text is not None for text in sources))


def lengths(system: Sequence[str]) -> list[float | None]:
    """Words of each text: runs of letters and digits.

    >>> lengths(["It's 3.5 km, not 4.", ""])
    [7, 0]
    """
    return [len(_WORD.findall(text)) for text in system]


def novelty(system: Sequence[str], sources: Sequence[str | None]) -> list[float | None]:
    """How many of a text's bigrams are not in its document, in per cent; None without a document or a bigram.

    >>> novelty(["the cat sat", "the cat", "cat"], ["The cat ran.", None, "a cat"])
    [50.0, None, None]
    """
    return [
        None if source is None or not (own := _bigrams(text)) else 100 * len(own - _bigrams(source)) / len(own)
        for text, source in zip(system, sources, strict=True)
    ]


def pack_forced(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """What a system's objective saw, by id, with probabilities as far as a shade can show them."""
    rounded = {
        key: {name: [_short(value) for value in values] for name, values in case.items()} for key, case in cases.items()
    }
    return pack(rounded)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether there is a figure at all: not None, not NaN, not infinite."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _short(value: Any) -> Any:
    return round(value, 3) if is_number(value) else None if isinstance(value, float) else value


def _bigrams(text: str) -> set[tuple[str, str]]:
    words = _WORD.findall(text.lower())
    return set(pairwise(words))


def _groups(sources: Sequence[str | None]) -> Iterator[list[int]]:
    """Places of documents, so many together as make a block."""
    group: list[int] = []
    size = 0
    for index, text in enumerate(sources):
        if text is None:
            continue
        if group and size + len(text) > DOCUMENT_BLOCK:
            yield group
            group, size = [], 0
        group.append(index)
        size += len(text)
    if group:
        yield group


def _base64(content: bytes) -> str:
    return b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")
