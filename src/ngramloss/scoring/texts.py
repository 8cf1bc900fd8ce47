"""a file of references, documents or predictions → its texts by id."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.data import columns
from ngramloss.data import rows as files
from ngramloss.data.data_sets import missing
from ngramloss.data.rows import BadRow, RawRow
from ngramloss.errors import MissingFileError, UserError
from ngramloss.output import escape

SHOWN = 5  # Ids in a message
LOOKED_AT = 100  # Number of rows read to find the columns: a JSON object may omit some

REFERENCES = ("reference", "references", *(name for name in columns.TARGETS if name != "reference"))
USUAL = {"prediction": columns.PREDICTIONS, "reference": REFERENCES, "document": columns.SOURCES}
OPTIONS = {"prediction": "--prediction", "reference": "--target", "document": "--source"}
"""What a file holds → the option that names its column."""

_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")


class Named(NamedTuple):
    """Columns that a person named; those that are empty are found by their usual names."""

    prediction: str = ""
    reference: str = ""
    document: str = ""
    id: str = ""


class Texts(NamedTuple):
    """Texts by id, a list for each reference; whether the ids are only the numbers of the rows."""

    by_id: dict[str, Any]
    numbered: bool


def read_texts(path: Path, what: str, named: Named | None = None) -> Texts:
    """Read the "prediction", "reference" or "document", as ``what`` says, of each row of a file or of standard input.

    A file in no format of :mod:`ngramloss.data.rows` is read as plain lines.
    """
    named = named or Named()
    rows = _rows(path, what)
    first = list(islice(rows, LOOKED_AT))
    present = list(dict.fromkeys(name for row in first for name in row.values))
    if not first:
        raise UserError(f"{path} is empty.")
    given = columns.given_columns(getattr(named, what), present)
    for name in given:
        columns.check_present(name, what, present, str(path))
    if what != "reference" and len(given) > 1:
        why = f"the {what}s are one column, got {getattr(named, what)!r}. Each system has a column of its own"
        raise UserError(f"{why}: give {path}:{given[0]} {path}:{given[1]}.")
    chosen = given
    if not given and what == "reference":
        chosen = columns.reference_columns(REFERENCES, present)
    elif not given and (column := columns.usual(USUAL[what], present)):
        chosen = [column]
    plain = present == [files.LINE] and not given
    key = None if plain else columns.id_column(named.id, present, str(path))
    texts: dict[str, Any] = {}
    for number, row in enumerate(chain(first, rows), 1):
        identity = str(number) if key is None else _id(row, key)
        if identity in texts:
            raise UserError(f"{row.file}:{row.line} repeats the id {identity!r}.")
        texts[identity] = _value(row, what, [files.LINE] if plain else chosen)
    return Texts(texts, key is None)


def columns_of(path: Path) -> list[str]:
    """The columns of a file, as far as its first rows have them; none if it cannot be read."""
    try:
        return list(dict.fromkeys(name for row in islice(_rows(path, "reference"), LOOKED_AT) for name in row.values))
    except UserError:  # reported when its texts are read
        return []


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file, compressed or not."""
    for text, number in files.lines(path):
        yield _checked(text, f"{path}:{number}")


def check_ids(ids: Sequence[str], ours: Collection[str], path: Path, references: Path, remedy: str = "") -> None:
    """Raise unless a file has the ids of the references, in any order."""
    theirs, known = set(ids), set(ours)
    wrong = {"missing": [key for key in ours if key not in theirs], "extra": [key for key in ids if key not in known]}
    message = ", ".join(f"{len(keys)} {kind} ({listed(keys)})" for kind, keys in wrong.items() if keys)
    if message:
        raise UserError(f"{path} and {references} must have the same ids. In {path.name}: {message}.{remedy}")


def listed(keys: Sequence[str]) -> str:
    """The first few keys, quoted."""
    shown = ", ".join(repr(key) for key in keys[:SHOWN])
    return shown + (", …" if len(keys) > SHOWN else "")


def _rows(path: Path, what: str) -> Iterator[RawRow]:
    if path != files.STDIN:
        if not path.exists():
            raise MissingFileError(missing(path))
        if path.is_dir() and not files.is_saved(path):
            raise UserError(f"{path} is a folder. Name a file of {what}s in it.")
    known = path.is_dir() or files.has_format(path)
    plain = (RawRow(str(path), number, {files.LINE: text}) for text, number in files.lines(path))
    for row in files.rows(path) if known else plain:
        if isinstance(row, BadRow):
            raise UserError(f"{row}.")
        yield row


def _id(row: RawRow, column: str) -> str:
    value = row.values.get(column)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _checked(str(value), f"{row.file}:{row.line}")
    raise UserError(f"{row.file}:{row.line}: the id should be text or a number, got {json.dumps(value)[:40]}.")


def _value(row: RawRow, what: str, names: Sequence[str]) -> Any:
    """The text of a row; of references a list if there are several."""
    where = f"{row.file}:{row.line}"
    found = [row.values[column] for column in names if column in row.values]
    if not found:
        own = ", ".join(map(escape.name, row.values)) or "nothing"
        names = " or ".join(USUAL[what])
        raise UserError(
            f"{where} has no {what}. Its columns are {own}; expected {names}. Name another column with {OPTIONS[what]}."
        )
    texts = []
    for index, value in enumerate(found):
        if index and value in (None, ""):
            continue  # a row may have fewer references than another
        values = value if what == "reference" and isinstance(value, list) and value else [value]
        for text in values:
            if not isinstance(text, str):
                several = " or a list of texts" if what == "reference" else ""
                got = "an empty list" if text == [] else files.kind_of(text)
                raise UserError(f"{where}: the {what} should be text{several}, got {got}.")
            texts.append(_checked(text, where))
    return texts[0] if len(texts) == 1 else texts


def _checked(text: str, where: str) -> str:
    """The text with U+FFFD for halves of characters, which JSON can write and UTF-8 cannot: an emoji cut in two."""
    if text.isascii():
        return text
    if _NOT_UTF8.search(text):
        raise UserError(f"{where} is not UTF-8 text. Save the file as UTF-8.")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
