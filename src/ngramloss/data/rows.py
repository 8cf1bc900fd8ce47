"""a file of JSON lines, CSV, TSV, Parquet or plain lines, compressed or not → its rows, each with its line number."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2", ".zst": "pyarrow"}
"""File name ending → the module that opens it."""

STDIN = Path("-")
"""Stands for standard input."""

LINE = "text"
"""The column of a file of plain lines."""

MISTAKEN = {
    b"\xff\xfe": "UTF-16 text. Save it as UTF-8.",
    b"\xfe\xff": "UTF-16 text. Save it as UTF-8.",
    b"\x1f\x8b": "gzip data. Rename it so that it ends in .gz.",
    b"\xfd7zXZ\x00": "xz data. Rename it so that it ends in .xz.",
    b"\x28\xb5\x2f\xfd": "Zstandard data. Rename it so that it ends in .zst.",
    b"PAR1": "Parquet data. Rename it so that it ends in .parquet.",
    b"PK\x03\x04": "a zip archive. Unpack it first.",
}
"""First bytes of a file that is not the text its name says → what it is, and what to do."""

LONGEST_ROW = 2**26
"""Bytes of the longest row, for CSV characters: a line of a compressed file may be gigabytes, and fill the memory."""

UNQUOTED = (
    "a quotation mark is closed only on a later line, although each of these lines has all fields, so several rows "
    "would be read as one. Write such a mark twice, in quotes, or use parallel files of plain lines"
)
"""Why a row of tab-separated values is bad, of which every line could be a row."""

LONGEST_LIST = 2**31  # Bytes of the longest JSON list, which is in memory as a whole


class RawRow(NamedTuple):
    """One row as read, with unchecked values."""

    file: str
    line: int
    values: Mapping[str, object]


class BadRow(NamedTuple):
    """A row that cannot be used. Prints as ``FILE:LINE: reason``; in Parquet or a JSON list, LINE is its number."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


SHOWN = 10
"""Number of bad rows that an error lists."""


def bad_row_lines(bad: Sequence[object]) -> list[str]:
    """The lines of an error that list bad rows: the first ones, and how many there are beside these."""
    more = [f"  … and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
    return [f"  {row}" for row in bad[:SHOWN]] + more


def kind_of(value: object) -> str:
    """What a value of another type than expected is called in an error."""
    return "null" if value is None else type(value).__name__


def text_fault(name: str, value: object) -> str:
    """Why a value, called so in the error, is not text in UTF-8; empty if it is."""
    if not isinstance(value, str):
        return f"{name} should be text, got {kind_of(value)}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{name} is not UTF-8 text, at character {error.start + 1}"
    return ""


def rows(path: Path) -> Iterator[RawRow | BadRow]:
    """The rows of one file, good and bad. Bytes that are not UTF-8 become lone surrogates: only their rows are bad."""
    if is_saved(path):
        yield from _saved(path)
        return
    _, kind, compression = parts(path)
    if kind == ".parquet":
        yield from _parquet(path)
        return
    yield from _checked(path, compression, kind)


def _checked(path: Path, compression: str, kind: str) -> Iterator[RawRow | BadRow]:
    """Read a file that is not Parquet; an error if it is truncated, or not what its name says."""
    with opened(path, compression) as stream:
        try:
            opening = stream.peek(6)
            if path == STDIN:  # it has no name: JSON if it begins like that, else plain lines
                start = opening.removeprefix(b"\xef\xbb\xbf").lstrip()
                kind = ".json" if start.startswith((b"[", b"{")) else ".txt"
            for magic, what in MISTAKEN.items():
                if opening.startswith(magic):
                    raise UserError(f"{path} should contain {kind} text, but it is {what}")
            yield from _READERS[kind](stream, path)
        except (EOFError, zlib.error, OSError, import_module("lzma").LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the content
                raise
            raise UserError(
                f"{path} is truncated or damaged: {error}. Copy or create the file again; no rows were used."
            ) from error


def parts(path: Path) -> tuple[str, str, str]:
    """Split a file name into stem, format and compression.

    >>> parts(Path("data/test.jsonl.xz"))
    ('test', '.jsonl', '.xz')
    >>> parts(Path("train.csv"))
    ('train', '.csv', '')
    """
    if path == STDIN:
        return "stdin", ".txt", ""
    name = path.name
    compression = next((end for end in COMPRESSIONS if name.lower().endswith(end)), "")
    bare = name[: len(name) - len(compression)]
    suffix = next((end for end in FORMATS if bare.lower().endswith(end)), "")
    if not suffix or (suffix == ".parquet" and compression):
        raise UserError(
            f"unknown file format: {path}. Expected a name that ends in one of {', '.join(FORMATS)}; all except "
            f".parquet may be followed by one of {', '.join(COMPRESSIONS)}."
        )
    return bare[: len(bare) - len(suffix)], suffix, compression


def has_format(path: Path) -> bool:
    """Whether a file's name ends in one of ``FORMATS``, maybe compressed."""
    try:
        parts(path)
    except UserError:
        return False
    return True


def uncompressed(path: Path) -> Path:
    """A file's path without the ending of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def needed(package: str, purpose: str, extra: str) -> Any:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {package.split('.')[0]!r}, which cannot be imported ({error}). "
            f"Install it with: pip install 'ngramloss[{extra}]'"
        ) from error


def opened(path: Path, compression: str) -> io.BufferedReader:
    """Open a file for reading bytes, decompressed; ``compression`` is one of ``COMPRESSIONS`` or empty."""
    if path == STDIN:
        return sys.stdin.buffer  # type: ignore[return-value]
    if not compression:
        return path.open("rb")
    if compression == ".zst":  # Arrow reads all frames of a file, and notices if it is truncated
        arrow = needed("pyarrow", f"reading {path}", "score")
        return io.BufferedReader(arrow.input_stream(path, compression="zstd"))
    return io.BufferedReader(import_module(COMPRESSIONS[compression]).open(path))


def _too_long(path: Path, line: int) -> UserError:
    return UserError(
        f"{path}:{line}: the row is longer than {LONGEST_ROW:,} bytes, the limit for one row. Look for an unclosed "
        "quote or bracket, or a missing line end; otherwise divide the text into several rows."
    )


def _raw_lines(stream: io.BufferedReader, path: Path) -> Iterator[bytes]:
    for line, raw in enumerate(iter(partial(stream.readline, LONGEST_ROW + 1), b""), 1):
        if len(raw) > LONGEST_ROW:
            raise _too_long(path, line)
        yield raw


def _json_lines(stream: io.BufferedReader, path: Path) -> Iterator[RawRow | BadRow]:
    for line, raw in enumerate(_raw_lines(stream, path), 1):
        text = _text(raw, first=line == 1)
        if text.strip():
            try:
                yield _json_row(json.loads(text.rstrip("\r\n")), path, line)
            except json.JSONDecodeError as error:
                yield BadRow(str(path), line, f"malformed JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # a number or nesting that Python refuses to read
                yield BadRow(str(path), line, f"malformed JSON: {error}")


def _json(stream: io.BufferedReader, path: Path) -> Iterator[RawRow | BadRow]:
    """Read a list of objects or of texts, or one object per line."""
    if not stream.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _json_lines(stream, path)
        return
    pieces = iter(partial(stream.read, 2**20), b"")  # a single read would reserve all that it may return
    raw = b"".join(islice(pieces, LONGEST_LIST // 2**20 + 1))
    try:
        if len(raw) > LONGEST_LIST:
            raise ValueError(f"it has more than {LONGEST_LIST:,} bytes")
        items = json.loads(_text(raw, first=True))
    except (ValueError, RecursionError) as reason:  # also a number or nesting that Python refuses to read
        raise UserError(
            f"{path} starts as a JSON list but cannot be read to its end: {reason}. Fix it there, or write one object "
            "per line; then a bad row affects no other rows."
        ) from reason
    plain = isinstance(next(iter(items), None), str)  # the first item says what the list contains
    for number, item in enumerate(items, 1):
        is_text = plain and isinstance(item, str)
        yield RawRow(str(path), number, {LINE: item}) if is_text else _json_row(item, path, number)


def _json_row(value: object, path: Path, line: int) -> RawRow | BadRow:
    if not isinstance(value, dict):
        return BadRow(str(path), line, f"expected a JSON object, got {type(value).__name__}")
    return RawRow(str(path), line, value)


def _lines(stream: io.BufferedReader, path: Path) -> Iterator[RawRow | BadRow]:
    for line, raw in enumerate(_raw_lines(stream, path), 1):
        yield RawRow(str(path), line, {LINE: _text(raw, first=line == 1).rstrip("\r\n")})


def lines(path: Path) -> Iterator[tuple[str, int]]:
    """The lines of a file of plain text, whatever its name ends in, each with its number."""
    for row in _checked(path, "" if uncompressed(path) == path else path.suffix.lower(), ".txt"):
        yield str(row.values[LINE]) if isinstance(row, RawRow) else "", row.line


def _delimiter(opening: bytes) -> str:
    r"""Comma, semicolon or tab: what the header has most outside of quotes.

    >>> _delimiter(b'id;"a,b,c";summary\\n1;2;3\\n')
    ';'
    """
    header = re.sub(rb'"[^"]*"', b"", opening).partition(b"\n")[0]
    return max(",;\t", key=lambda sign: header.count(sign.encode()))


def _csv(stream: io.BufferedReader, path: Path, *, delimiter: str = "") -> Iterator[RawRow | BadRow]:
    delimiter = delimiter or _delimiter(stream.peek(1 << 13))
    # Python's own limit is 131,072. It is raised permanently, because two readers may be open at the same time.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_ROW))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    line = size = 0
    tabs: list[int] = []  # of each line of a row

    def lines() -> Iterator[str]:
        nonlocal size
        for part in iter(partial(text.readline, LONGEST_ROW + 1), ""):
            size += len(part)
            if size > LONGEST_ROW:
                raise _too_long(path, line)
            tabs.append(part.count("\t"))
            yield part

    # Strict, because the lenient reader lets an open quote silently swallow the rest of the file.
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line, size = reader.line_num + 1, 0
        tabs.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if not header:
                raise UserError(f"{path}:{line}: the header line cannot be read: {error}.") from error
            yield BadRow(str(path), line, f"malformed row: {error}; write a quote inside quotes twice")
            continue
        if not fields:
            continue
        if not header:
            header = fields
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                raise UserError(f"{path}:{line}: column names must be unique, but {repeated} occur more than once.")
        elif len(fields) != len(header):
            yield BadRow(str(path), line, f"expected {len(header)} fields, got {len(fields)}")
        elif delimiter == "\t" and len(tabs) > 1 and set(tabs) == {len(header) - 1} != {0}:
            yield BadRow(str(path), line, UNQUOTED)
        else:
            yield RawRow(str(path), line, dict(zip(header, fields, strict=True)))


def _parquet(path: Path) -> Iterator[RawRow | BadRow]:
    arrow = needed("pyarrow", f"reading {path}", "score")
    parquet = needed("pyarrow.parquet", f"reading {path}", "score")
    with path.open("rb") as stream:
        try:
            number = 0
            for batch in parquet.ParquetFile(stream).iter_batches(batch_size=1000):
                for values in _batch_rows(batch):
                    number += 1
                    if sum(len(text) for text in (values or {}).values() if isinstance(text, str)) > LONGEST_ROW:
                        raise _too_long(path, number)
                    if values is None:
                        yield BadRow(str(path), number, "not UTF-8 text")
                    else:
                        yield RawRow(str(path), number, values)
        except (arrow.ArrowException, OSError) as error:
            raise UserError(
                f"{path} cannot be read as Parquet: {str(error).rstrip('.')}. Copy or create the file again."
            ) from error


def _batch_rows(batch: Any) -> list[dict[str, object] | None]:
    """The rows of a batch; None for a row that is not UTF-8, which Arrow cannot decode."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for at in range(batch.num_rows) for row in _batch_rows(batch.slice(at, 1))]


def _text(raw: bytes, *, first: bool) -> str:
    return raw.decode("utf-8-sig" if first else "utf-8", errors="surrogateescape")


def is_saved(path: Path) -> bool:
    """Whether a folder was written by ``datasets.Dataset.save_to_disk``."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _saved(folder: Path) -> Iterator[RawRow | BadRow]:
    datasets = needed("datasets", f"reading {folder}", "hf")
    try:
        table = datasets.load_from_disk(str(folder))
    except Exception as error:  # files may be missing or damaged in many ways
        message = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{folder} cannot be read as a saved data set: {message}. Save it again.") from error
    yield from (RawRow(str(folder), number, values) for number, values in enumerate(table, 1))


_READERS: dict[str, Callable[[io.BufferedReader, Path], Iterator[RawRow | BadRow]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _json),
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".txt": _lines,
}

FORMATS = [*_READERS, ".parquet"]
"""Supported file name endings, before the compression's."""
