"""a file of JSON lines, CSV, TSV or Parquet, compressed or not → its rows, each with the line it came from."""

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
"""What a name ends in → the module that opens it."""

MISTAKEN = {
    b"\xff\xfe": "UTF-16 text. Save it as UTF-8.",
    b"\xfe\xff": "UTF-16 text. Save it as UTF-8.",
    b"\x1f\x8b": "gzip data. Let its name end in .gz.",
    b"\xfd7zXZ\x00": "xz data. Let its name end in .xz.",
    b"PK\x03\x04": "a zip archive. Unpack it first.",
}
"""How a file begins that is not the text its name promises → what it is, and what to do."""

LONGEST_FIELD = 2**31 - 1
"""Characters that a CSV field may hold. Python's own limit is 131,072, less than a long document."""


class Row(NamedTuple):
    """One row as it was read, its values unchecked."""

    file: str
    line: int
    values: Mapping[str, object]


class BadRow(NamedTuple):
    """A row that cannot be used: where it is and why. Prints as ``FILE:LINE: reason``.

    The line is the first one of the row, counted from 1; where there are no lines (Parquet, the hub, newswire) it is
    the row's number.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def rows(path: Path) -> Iterator[Row | BadRow]:
    """The rows of one file, good and bad, in order.

    Blank lines between rows hold nothing and are passed over. Bytes that are not UTF-8 are kept as lone surrogates, so
    that only the rows whose own texts hold them are bad; a byte order mark at the beginning is no part of the text.
    """
    _, kind, compression = parts(path)
    if kind == ".parquet":
        yield from _parquet(path)
        return
    with opened(path, compression) as stream:
        try:
            opening = stream.peek(6)
            for magic, what in MISTAKEN.items():
                if opening.startswith(magic):
                    raise UserError(f"{path} should hold {kind} text, but it is {what}")
            yield from _READERS[kind](stream, path)
        except (EOFError, zlib.error, OSError, import_module("lzma").LZMAError) as error:
            raise UserError(
                f"{path} is cut short or damaged: {error}. Copy or make it again; what was read so far was not used."
            ) from error


def parts(path: Path) -> tuple[str, str, str]:
    """A file's name as stem, format and compression.

    Example:
        >>> parts(Path("data/test.jsonl.xz"))
        ('test', '.jsonl', '.xz')
        >>> parts(Path("train.csv"))
        ('train', '.csv', '')
    """
    name = path.name
    compression = next((end for end in COMPRESSIONS if name.lower().endswith(end)), "")
    bare = name[: len(name) - len(compression)]
    kind = next((end for end in FORMATS if bare.lower().endswith(end)), "")
    if not kind or (kind == ".parquet" and compression):
        raise UserError(
            f"cannot tell the format of {path} from its name. Expected one of {', '.join(FORMATS)}; all but .parquet "
            f"may be followed by one of {', '.join(COMPRESSIONS)}."
        )
    return bare[: len(bare) - len(kind)], kind, compression


def needed(package: str, purpose: str, extra: str) -> Any:
    """A package that is imported only where it is used, or a sentence that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {package.split('.')[0]!r}, which cannot be imported here ({error}). "
            f"Install it with: pip install 'ngramloss[{extra}]'"
        ) from error


def opened(path: Path, compression: str) -> io.BufferedReader:
    """The bytes of a file, unpacked; ``compression`` is one of ``COMPRESSIONS`` or nothing."""
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
    except (ValueError, RecursionError) as error:     # a number or a nesting that Python will not read
        return BadRow(str(path), line, f"malformed JSON: {error}")


def _json(stream: io.BufferedReader, path: Path) -> Iterator[Row | BadRow]:
    """A list of objects, or one object a line."""
    if not stream.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _json_lines(stream, path)
        return
    text = _text(stream.read(), first=True)
    try:
        items = list(_list_items(text))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} begins as a JSON list but cannot be read to its end: {error}. Mend it there, or write one object "
            "a line, so that a bad row costs no more than itself."
        ) from error
    for line, item in items:
        yield _json_row(item, path, line)


def _list_items(text: str) -> Iterator[tuple[int, object]]:
    """The items of a JSON list, each with the line on which it begins."""
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
        raise json.JSONDecodeError("something follows the list", text, at + 1)


def _past_white(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _json_row(value: object, path: Path, line: int) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow(str(path), line, f"expected a JSON object, got {type(value).__name__}")
    return Row(str(path), line, value)


def _csv(stream: io.BufferedReader, path: Path, *, delimiter: str = ",") -> Iterator[Row | BadRow]:
    # Raised for good, not put back: two readers may be open at a time.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    # Strict, because the lenient reader lets an open quote swallow the rest of the file without a word.
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
                raise UserError(f"{path}:{line}: the line of column names cannot be read: {error}.") from error
            yield BadRow(str(path), line, f"malformed row: {error}; a quote inside quotes is written twice")
            continue
        if not fields:
            continue
        if not header:
            header = fields
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise UserError(f"{path}:{line}: each column needs a name of its own, but {twice} come twice.")
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
                f"{path} cannot be read as Parquet: {str(error).rstrip('.')}. Copy or make it again."
            ) from error


def _batch_rows(batch: Any) -> list[dict[str, object] | None]:
    """The rows of a batch; None for one that is not UTF-8, which Arrow refuses to turn into text."""
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
"""What the name of a file may end in, before its compression."""
