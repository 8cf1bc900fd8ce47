"""a system's texts, and limits of their length → notes on suspicious texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ngramloss.errors import UserError


class LengthLimits(NamedTuple):
    """The fewest and most tokens that a text may have; 0 means no limit."""

    least: int = 0
    most: int = 0


class CutOff(NamedTuple):
    """The texts of a system that have the most tokens allowed, and so may be cut off."""

    most: int = 0  # the limit, in tokens; 0 if there is none, or if tokens were not counted
    documents: Sequence[int] = ()  # the indices of the texts


def limits(written: str) -> LengthLimits:
    """Read ``56:142``; either end may be left out."""
    least, colon, most = written.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (least, most)) or not least + most:
        raise UserError(f"limits must be written MIN:MAX, such as 56:142, got {written!r}.")
    parsed = LengthLimits(int(least or 0), int(most or 0))
    if parsed.most and parsed.least > parsed.most:
        raise UserError(f"limits must be written MIN:MAX, but {parsed.least} is above {parsed.most}.")
    return parsed


def oddities(texts: Sequence[str], lengths: list[int] | None = None, allowed: LengthLimits | None = None) -> list[str]:
    """Count empty texts, the same text for several documents, and texts outside the limits, in tokens or else words."""
    allowed = allowed or LengthLimits()
    unit, note = ("words", " (words were counted; a text has more tokens)") if lengths is None else ("tokens", "")
    counts = [len(text.split()) for text in texts] if lengths is None else lengths
    shared = sum(count - 1 for text, count in Counter(texts).items() if text.strip())
    short = sum(count < allowed.least for count in counts)
    long = sum(count > allowed.most for count in counts) if allowed.most else 0
    full = len(cut_off(lengths, allowed).documents)
    notes = [f"{empty} empty"] if (empty := sum(not text.strip() for text in texts)) else []
    found = {
        "identical to another document's": shared,
        f"with fewer than {allowed.least} {unit}{note}": short,
        f"with more than {allowed.most} {unit}": long,
        f"with exactly the maximum of {allowed.most} tokens, which may be cut off": full,
    }
    return notes + [f"{count} text{'s' * (count > 1)} {what}" for what, count in found.items() if count]


def cut_off(lengths: Sequence[int] | None, allowed: LengthLimits | None) -> CutOff:
    """The texts whose number of tokens is the limit."""
    if lengths is None or allowed is None or not allowed.most:
        return CutOff()
    return CutOff(allowed.most, [index for index, count in enumerate(lengths) if count == allowed.most])
