"""a file of candidates, or the folder it is in → texts and gains of each source, checked, and their fingerprint."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.data.rows import BadRow, parts, rows
from ngramloss.errors import MissingFileError, UserError
from ngramloss.run_folder import RunFolder

SHOWN = 10
"""Number of bad rows that an error lists."""
KEYS = ("id", "candidates", "gains")
"""What every row has."""
ADVICE = "Make candidates with: ngramloss candidates RUN_OR_MODEL"


class Candidates(NamedTuple):
    """Candidates of sources and what they score.

    Attributes:
        rows: id of a source → its texts, and the gain of each, 0 to 1, in the order of the file.
        fingerprint: 16 hexadecimal digits that depend on ids, texts and gains.
    """

    rows: dict[str, tuple[tuple[str, ...], tuple[float, ...]]]
    fingerprint: str


def read_candidates(path: Path) -> Candidates:
    """Read a file that ``ngramloss candidates`` wrote, or one with the same rows.

    A row is a JSON object with ``id``, ``candidates`` (a list of texts) and ``gains`` (as many numbers). Other keys are
    ignored.

    Args:
        path: the file, or a folder with a ``candidates.jsonl``.

    Raises:
        UserError: rows that cannot be used, all of them listed at once, or none at all.
        MissingFileError: there is no such file.
    """
    file = RunFolder(path).candidates if path.is_dir() else path
    if not file.is_file():
        where = f"{path} has no {file.name}" if path.is_dir() else f"there is no file {path}"
        raise MissingFileError(f"{where}. {ADVICE}")
    if parts(file)[1] != ".jsonl":
        raise UserError(f"{file} should be a file of JSON lines, with a name that ends in .jsonl. {ADVICE}")
    found: dict[Any, tuple[tuple[str, ...], tuple[float, ...]]] = {}
    lines: dict[Any, int] = {}
    bad: list[BadRow] = []
    for row in rows(file):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        key, texts, gains = map(row.values.get, KEYS)  # type: Any, Any, Any
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        fault = _missing(row.values) or _text_fault("'id'", key) or _list_fault(texts, gains)
        if not fault and key in lines:
            fault = f"id {key!r} was already used in line {lines[key]}"
        if fault:
            bad.append(BadRow(row.file, row.line, fault))
            continue
        found[key] = tuple(texts), tuple(map(float, gains))
        lines[key] = row.line
    if bad:
        shown = [f"  {row}" for row in bad[:SHOWN]] + ([f"  … and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else [])
        raise UserError(
            "\n".join(
                [
                    f"{len(bad):,} of {len(bad) + len(found):,} rows of {file} cannot be used:",
                    *shown,
                    "Fix them, or make the file again with ngramloss candidates.",
                ]
            )
        )
    if not found:
        raise UserError(f"{file} is empty. {ADVICE}")
    return Candidates(found, _fingerprint(found))


def _missing(values: Mapping[str, object]) -> str:
    """The keys that a row lacks, as a clause; empty if it has all."""
    missing = [repr(key) for key in KEYS if key not in values]
    return f"no key {', '.join(missing)}" if missing else ""


def _list_fault(texts: Any, gains: Any) -> str:
    """Why candidates and gains cannot be used; empty if they can."""
    for name, value in zip(KEYS[1:], (texts, gains), strict=True):
        if not isinstance(value, list):
            return f"{name!r} should be a list, got {_kind(value)}"
    if not texts:
        return "'candidates' is empty"
    if len(texts) != len(gains):
        return f"lengths differ: {len(texts)} candidates, {len(gains)} gains"
    faults = [_text_fault(f"candidate {number}", text) for number, text in enumerate(texts, 1)]
    faults += [_gain_fault(f"gain {number}", gain) for number, gain in enumerate(gains, 1)]
    return next(filter(None, faults), "")


def _text_fault(name: str, text: object) -> str:
    if not isinstance(text, str):
        return f"{name} should be text, got {_kind(text)}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{name} is not UTF-8 text, at character {error.start + 1}"
    return ""


def _gain_fault(name: str, gain: object) -> str:
    if not isinstance(gain, (int, float)) or isinstance(gain, bool):
        return f"{name} should be a number, got {_kind(gain)}"
    return "" if 0 <= gain <= 1 else f"{name} should be between 0 and 1, got {str(gain)[:20]}"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _fingerprint(found: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]]) -> str:
    """Hash the content to 16 hexadecimal digits. Lengths come first, so different candidates give different input."""
    digest = hashlib.sha256()
    for key, (texts, gains) in found.items():
        digest.update(struct.pack(f">Q{len(gains)}d", len(texts), *gains))
        for text in (key, *texts):
            content = text.encode()
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]
