"""a file of JSON lines, CSV, TSV or Parquet, compressed or not → its rows, each with its line number."""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2"}
"""File name ending → the module that opens it."""

MISTAKEN = {
    b"\xff\xfe": "UTF-16 text. Save it as UTF-8.",
    b"\xfe\xff": "UTF-16 text. Save it as UTF-8.",
    b"\x1f\x8b": "gzip data. Rename it so that it ends in .gz.",
    b"\xfd7zXZ\x00": "xz data. Rename it so that it ends in .xz.",
    b"PK\x03\x04": "a zip archive. Unpack it first.",
}
"""First bytes of a file that is not the text its name says → what it is, and what to do."""

LONGEST_FIELD = 2**31 - 1
"""Maximum characters in a CSV field. Python's own limit is 131,072, less than a long document."""


class Row(NamedTuple):
    """One row as read, with unchecked values."""

    file: str
    line: int
    values: Mapping[str, object]


class BadRow(NamedTuple):
    """A row that cannot be used, with its position and the reason. Prints as ``FILE:LINE: reason``.

    ``line`` is the row's first line, counted from 1. Formats without lines (Parquet, the hub, newswire) use the row
    number.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def rows(path: Path) -> Iterator[Row | BadRow]:
    """Read the rows of one file, good and bad, in order.

    Blank lines between rows are skipped. Bytes that are not UTF-8 are kept as lone surrogates, so only the rows that
    contain them are bad. A byte order mark at the beginning is removed.
    """
    _, suffix, compression = parts(path)
    if suffix == ".parquet":
        yield from _parquet(path)
        return
    with opened(path, compression) as stream:
        try:
            opening = stream.peek(6)
            for magic, what in MISTAKEN.items():
                if opening.startswith(magic):
                    raise UserError(f"{path} should contain {suffix} text, but it is {what}")
            yield from _READERS[suffix](stream, path)
        except (EOFError, zlib.error, OSError, import_module("lzma").LZMAError) as error:
            raise UserError(
                f"{path} is truncated or damaged: {error}. Copy or create the file again; no rows were used."
            ) from error


def parts(path: Path) -> tuple[str, str, str]:
    """Split a file name into stem, format and compression.

    Example:
        >>> parts(Path("data/test.jsonl.xz"))
        ('test', '.jsonl', '.xz')
        >>> parts(Path("train.csv"))
        ('train', '.csv', '')
    """
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
    if not compression:
        return path.open("rb")
    return io.BufferedReader(import_module(COMPRESSIONS[compression]).open(path))


def _json_lines(stream: io.BufferedReader, path: Path) -> Iterator[Row | BadRow]:
    for line, raw in enumerate(stream, 1):
        text = _text(raw, first=line == 1)
        if text.strip():
            yield _json_line(text, path, line)


def _json_line(text: str, path: Path, line: int) -> Row | BadRow:
    try:
        return _json_row(json.loads(text), path, line)
    except json.JSONDecodeError as error:
        return BadRow(str(path), line, f"malformed JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:     # a number or nesting that Python refuses to read
        return BadRow(str(path), line, f"malformed JSON: {error}")


def _json(stream: io.BufferedReader, path: Path) -> Iterator[Row | BadRow]:
    """Read a list of objects, or one object per line."""
    if not stream.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _json_lines(stream, path)
        return
    text = _text(stream.read(), first=True)
    try:
        items = list(_list_items(text))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} starts as a JSON list but cannot be read to its end: {error}. Fix it there, or write one object "
            "per line; then a bad row affects no other rows."
        ) from error
    for line, item in items:
        yield _json_row(item, path, line)


def _list_items(text: str) -> Iterator[tuple[int, object]]:
    """The items of a JSON list, each with the line on which it starts."""
    decoder = json.JSONDecoder()
    at, line, counted = _past_white(text, text.index("[") + 1), 1, 0
    closed = text[at : at + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, at), at
        item, at = decoder.raw_decode(text, at)
        yield line, item
        at = _past_white(text, at)
        closed = text[at : at + 1] == "]"
        if not closed:
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("expected ',' or ']'", text, at)
            at = _past_white(text, at + 1)
    if text[at + 1 :].strip():
        raise json.JSONDecodeError("unexpected text after the list", text, at + 1)


def _past_white(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _json_row(value: object, path: Path, line: int) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow(str(path), line, f"expected a JSON object, got {type(value).__name__}")
    return Row(str(path), line, value)


def _csv(stream: io.BufferedReader, path: Path, *, delimiter: str = ",") -> Iterator[Row | BadRow]:
    # The limit is raised permanently, because two readers may be open at the same time.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    # Strict, because the lenient reader lets an open quote silently swallow the rest of the file.
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
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
        else:
            yield Row(str(path), line, dict(zip(header, fields, strict=True)))


def _tsv(stream: io.BufferedReader, path: Path) -> Iterator[Row | BadRow]:
    return _csv(stream, path, delimiter="\t")


def _parquet(path: Path) -> Iterator[Row | BadRow]:
    arrow = needed("pyarrow", f"reading {path}", "hf")
    parquet = needed("pyarrow.parquet", f"reading {path}", "hf")
    with path.open("rb") as stream:
        try:
            number = 0
            for batch in parquet.ParquetFile(stream).iter_batches(batch_size=1000):
                for values in _batch_rows(batch):
                    number += 1
                    if values is None:
                        yield BadRow(str(path), number, "not UTF-8 text")
                    else:
                        yield Row(str(path), number, values)
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


_READERS: dict[str, Callable[[io.BufferedReader, Path], Iterator[Row | BadRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
}

FORMATS = [*_READERS, ".parquet"]
"""Supported file name endings, before the compression's."""
