"""texts and scores of every case → compressed blocks that the page unpacks when they are looked at."""

from __future__ import annotations

import gzip
import json
import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ngramloss.output.console import is_number
from ngramloss.report.record import TeacherForced

BLOCK = 256  # Cases in a block. Texts of one case lie side by side, so near-equal summaries cost almost nothing.
DOCUMENT_BLOCK = 200_000  # Characters of documents in a block, about
NOTHING = 0xFFFF  # The code of a score that a case does not have
_PATIENCE = 4


class Encoded(NamedTuple):
    """A score of every case and system: value = low + code / 10^decimals, codes of one case side by side."""

    low: float
    decimals: int
    codes: str


class Documents(NamedTuple):
    """The documents that fit."""

    blocks: list[str]  # each a list of texts
    starts: list[int]  # how many documents lie before each block
    cases: list[int]  # which cases have their document in the page, in the order of the texts
    known: int  # how many documents there are in all


def pack(value: Any) -> str:
    """JSON, gzipped, in base64. Half a surrogate pair, which no UTF-8 can hold, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _base64(text.encode("utf-8", "replace"))


def pack_texts(references: Sequence[Sequence[str]], systems: Sequence[Sequence[str]]) -> list[str]:
    """Blocks of ``[references of a case, its texts by system]``."""
    rows = [[list(gold), [system[case] for system in systems]] for case, gold in enumerate(references)]
    return [pack(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK)]


def encode_scores(systems: Sequence[Sequence[float | None]]) -> Encoded:
    """One score of all systems as numbers of 16 bits, in steps of a power of ten: 0.01 for scores from 0 to 100."""
    known = [value for system in systems for value in system if is_number(value)]
    least, most = min(known, default=0.0), max(known, default=0.0)
    decimals = math.floor(math.log10((NOTHING - 2) / max(most - least, 1.0)))
    step = 10.0**-decimals
    low = math.floor(least / step) * step
    values = (value for case in zip(*systems, strict=True) for value in case)
    codes = array("H", (round((value - low) / step) if is_number(value) else NOTHING for value in values))
    if sys.byteorder == "big":
        codes.byteswap()
    return Encoded(low, decimals, _base64(codes.tobytes()))


def pack_documents(sources: Sequence[str | None], room: int) -> Documents:
    """As many documents as fit into ``room`` bytes, from the first on. A block that does not fit is left out."""
    blocks, starts, cases = list[str](), list[int](), list[int]()
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
        starts.append(len(cases))
        cases += group
    return Documents(blocks, starts, cases, sum(text is not None for text in sources))


def pack_forced(cases: Mapping[str, TeacherForced]) -> str:
    """What a system predicted of the references, by id, with probabilities as exact as a shade can show them."""
    packed: dict[str, dict[str, Any]] = {}
    for key, case in cases.items():
        packed[key] = {"tokens": case.tokens, "best": case.best}
        for name in ("confidence", "label_probability"):
            packed[key][name] = [round(x, 3) if is_number(x) else None for x in getattr(case, name)]
    return pack(packed)


def _groups(sources: Sequence[str | None]) -> Iterator[list[int]]:
    """Which cases' documents make a block together."""
    group: list[int] = []
    size = 0
    for index, text in ((index, text) for index, text in enumerate(sources) if text is not None):
        if group and size + len(text) > DOCUMENT_BLOCK:
            yield group
            group, size = [], 0
        group.append(index)
        size += len(text)
    if group:
        yield group


def _base64(content: bytes) -> str:
    return b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")
