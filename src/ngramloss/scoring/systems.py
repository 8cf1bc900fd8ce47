"""files of references, documents and predictions, or run folders → texts of each system, aligned by id."""

from __future__ import annotations

import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import escape
from ngramloss.data.rows import COMPRESSIONS, opened
from ngramloss.errors import MissingFileError, UserError
from ngramloss.run_folder import RunFolder

SHOWN = 5
_FIELDS = {
    "prediction": ("prediction", "summary", "hypothesis", "output"),
    "reference": ("reference", "references", "summary", "target", "highlights"),
    "document": ("document", "article", "source", "text", "dialogue"),
}


class Task(NamedTuple):
    """The test set: ids, one or more references for each id, and documents if they are known."""

    ids: list[str]
    references: list[list[str]]
    documents: list[str] | None


class Aligned(NamedTuple):
    """The systems with their texts in the order of the task's ids. ``folders`` has None for a system that is a file."""

    task: Task
    names: list[str]
    texts: list[list[str]]
    folders: list[Path | None]
    warnings: list[str]


def align(references: Path | None, predictions: Sequence[Path], documents: Path | None = None) -> Aligned:
    """Read all files and align their texts by id. Missing, extra or repeated ids raise an error that names them.

    Args:
        references: a file. None uses the references, and the documents, in the first folder that has them, where
            ``ngramloss generate`` wrote them. All folders must then have the same references.
        predictions: files, or folders with predictions.
        documents: a file.
    """
    if not predictions:
        raise UserError("there is nothing to score: give one or more files of predictions, or run folders.")
    folders = [path if path.is_dir() else None for path in predictions]
    files = [_predictions_in(path) if path.is_dir() else path for path in predictions]
    own = references is None
    if references is None:
        references = _references_of([folder for folder in folders if folder is not None])
        documents = documents or (references if _has_documents(references) else None)
    gold, numbered = table(references, "reference")
    several = {key: [value] if isinstance(value, str) else value for key, value in gold.items()}
    warnings: list[str] = []
    read = _texts(documents, "document", list(gold), numbered, references, warnings) if documents else None
    names = _names(predictions, files)
    texts = [_texts(path, "prediction", list(gold), numbered, references, warnings) for path in files]
    if own:
        _raise_unless_alike(references, gold, [folder for folder in folders if folder is not None][1:])
    return Aligned(Task(list(gold), list(several.values()), read), names, texts, folders, warnings)


def _predictions_in(folder: Path) -> Path:
    run = RunFolder(folder)
    if run.predictions.is_file():
        run.raise_unless_current()
        return run.predictions
    what = f"the predictions in {folder} are not finished" if run.shares() else f"no predictions in {folder}"
    raise MissingFileError(f"{what}. Make them with: ngramloss generate {folder}")


def _references_of(folders: Sequence[Path]) -> Path:
    """The references of the first folder that has some."""
    paths = (RunFolder(folder).references for folder in folders)
    references = next((path for path in paths if path.is_file()), None)
    if references is None:
        raise UserError("give --references FILE. It may be left out only for folders that `ngramloss generate` wrote.")
    return references


def _has_documents(path: Path) -> bool:
    try:
        row = json.loads(next(lines(path), "{}") or "{}")
    except (ValueError, RecursionError):   # reported with its line number when the references are read
        return False
    return isinstance(row, dict) and any(field in row for field in _FIELDS["document"])


def _raise_unless_alike(references: Path, gold: dict[str, Any], folders: Sequence[Path]) -> None:
    """Raise if a folder's predictions were written for other references."""
    for folder in folders:
        path = RunFolder(folder).references
        if not path.is_file():
            continue
        other, _ = table(path, "reference")
        ids = [key for key in gold if other.get(key) != gold[key]]
        if ids:
            raise UserError(
                f"{path} and {references} have different references for {len(ids)} ids ({listed(ids)}): the systems "
                "summarise different data. Generate all of them for the same data and split."
            )


def _texts(
    path: Path, what: str, ids: list[str], numbered: bool, references: Path, warnings: list[str]
) -> list[str]:
    """The texts of a file, in the order of the ids."""
    texts, by_line = table(path, what)
    if by_line != numbered and (by_line or not set(ids) <= texts.keys()):
        raise UserError(
            f"{path} has {'no ids' if by_line else 'ids'} and {references} has {'no ids' if numbered else 'ids'}: they "
            "cannot be aligned. Give both as JSONL with ids, or both as plain text."
        )
    if by_line and len(texts) != len(ids):
        trimmed = _without_blank_end(texts)
        if len(trimmed) != len(ids):
            raise UserError(
                f"{path} has {len(texts)} lines and {references} has {len(ids)}: a text may contain line breaks. "
                "Use JSONL with ids instead."
            )
        warnings.append(f"{path}: {len(texts) - len(trimmed)} empty lines at the end were ignored.")
        texts = trimmed
    known = set(ids)
    wrong = {"missing": [key for key in ids if key not in texts], "extra": [key for key in texts if key not in known]}
    if wrong["missing"] or (wrong["extra"] and what != "document"):
        message = ", ".join(f"{len(keys)} {kind} ({listed(keys)})" for kind, keys in wrong.items() if keys)
        raise UserError(f"{path} does not have the ids of {references}: {message}.")
    return [str(texts[key]) for key in ids]


def _without_blank_end(texts: dict[str, Any]) -> dict[str, Any]:
    keys = list(texts)
    while keys and not str(texts[keys[-1]]).strip():
        keys.pop()
    return {key: texts[key] for key in keys}


def table(path: Path, what: str) -> tuple[dict[str, Any], bool]:
    """Texts by id, and whether the ids are line numbers."""
    if not path.exists():
        raise MissingFileError(f"there is no file {path}.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file of {what}s in it.")
    if _bare(path).suffix.lower() in (".jsonl", ".json", ".ndjson"):
        return _rows(path, what)
    texts = {str(number): line for number, line in enumerate(lines(path), 1)}
    if not texts:
        raise UserError(f"{path} is empty.")
    return texts, True


def _bare(path: Path) -> Path:
    """A path without the suffix of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def _rows(path: Path, what: str) -> tuple[dict[str, Any], bool]:
    texts: dict[str, Any] = {}
    has_ids: bool | None = None
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as mistake:
            reason = mistake.msg.removesuffix(" at")
            hint = " Write one object per line, not a list." if line.lstrip().startswith("[") else ""
            raise UserError(f"{path}:{number} is not JSON: {reason} at character {mistake.pos + 1}.{hint}") from None
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number}: the JSON is nested too deeply, or a number is too long.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} should be an object such as {{\"id\": …, \"{what}\": …}}.")
        field = next((field for field in _FIELDS[what] if field in row), None)
        if field is None:
            fields = ", ".join(map(escape.name, row)) or "nothing"
            read = ", ".join(_FIELDS[what])
            raise UserError(f"{path}:{number} has no {what}: it has {fields}, but needs one of {read}.")
        if has_ids is None:
            has_ids = "id" in row
        if ("id" in row) != has_ids:
            raise UserError(f"{path}:{number} has {'an' if 'id' in row else 'no'} id, unlike the lines before it.")
        key = _id(row["id"], path, number) if has_ids else str(len(texts) + 1)
        if key in texts:
            raise UserError(f"{path}:{number} repeats the id {key!r}.")
        texts[key] = _text_value(row[field], path, number, what)
    if not texts:
        raise UserError(f"{path} is empty.")
    return texts, not has_ids


def _id(value: Any, path: Path, number: int) -> str:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _without_halves(str(value))
    raise UserError(f"{path}:{number}: id should be text or a number, got {json.dumps(value)[:40]}.")


def _text_value(value: Any, path: Path, number: int, what: str) -> Any:
    if isinstance(value, str):
        return _without_halves(value)
    if what == "reference" and isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return [_without_halves(text) for text in value]
    several = " or a list of texts" if what == "reference" else ""
    got = "an empty list" if value == [] else type(value).__name__
    raise UserError(f"{path}:{number}: {what} should be text{several}, got {got}.")


def _without_halves(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON allows and UTF-8 does not.

    >>> _without_halves(chr(0xD83D) + " cut")
    '\ufffd cut'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file, compressed or not. Raises a ``UserError`` if it cannot be read."""
    try:
        compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
        with io.TextIOWrapper(opened(path, compression), encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as mistake:
        raise UserError(f"{path} is not UTF-8: byte {mistake.object[mistake.start]:#x} cannot be read.") from None
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as mistake:
        if isinstance(mistake, OSError) and mistake.errno is not None:   # of the system, not of the data
            raise
        raise UserError(f"{path} is incomplete or damaged: {mistake}.") from None


def _names(paths: Sequence[Path], files: Sequence[Path]) -> list[str]:
    """The name of each folder and the stem of each file; with the parent folder where two are equal."""
    real = [os.path.realpath(file) for file in files]
    for index, path in enumerate(paths):
        before = real.index(real[index])
        if before < index:
            raise UserError(f"{paths[before]} and {path} are the same file. Give each system once.")
    absolute = [Path(os.path.abspath(path)) for path in paths]   # a link keeps its own name
    stems = [path.name if path.is_dir() else _bare(path).stem for path in absolute]
    pairs = zip(absolute, stems, strict=True)
    names = [escape.name(stem if stems.count(stem) == 1 else f"{path.parent.name}/{stem}") for path, stem in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two systems are called {name!r}. Rename a file.")
    return names


def listed(keys: Sequence[str]) -> str:
    """The first few keys, quoted."""
    shown = ", ".join(repr(key) for key in keys[:SHOWN])
    return shown + (", …" if len(keys) > SHOWN else "")
