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
    """What systems are judged by: references, one or more for each id, and documents where they are known."""

    ids: list[str]
    references: list[list[str]]
    documents: list[str] | None


class Aligned(NamedTuple):
    """Systems with their texts in the order of the task's ids; ``folders`` has None for a system that is a file."""

    task: Task
    names: list[str]
    texts: list[list[str]]
    folders: list[Path | None]
    warnings: list[str]


def align(references: Path | None, predictions: Sequence[Path], documents: Path | None = None) -> Aligned:
    """Read and align everything. Missing, extra or duplicate ids are errors that name them.

    Args:
        references: a file; None takes those that ``ngramloss generate`` wrote into the first folder, with their
            documents. All folders must then have the same.
        predictions: files, or folders with predictions in them.
        documents: a file.
    """
    if not predictions:
        raise UserError("there is nothing to score: name one or more files of predictions, or runs.")
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
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise UserError("give --references FILE: only folders that ngramloss generate wrote bring their own.")
    return found


def _has_documents(path: Path) -> bool:
    try:
        row = json.loads(next(lines(path), "{}") or "{}")
    except (ValueError, RecursionError):   # told with the line's number where the references are read
        return False
    return isinstance(row, dict) and any(field in row for field in _FIELDS["document"])


def _raise_unless_alike(references: Path, gold: dict[str, Any], folders: Sequence[Path]) -> None:
    """Raise if a folder's predictions were written for other references."""
    for folder in folders:
        path = RunFolder(folder).references
        if not path.is_file():
            continue
        other, _ = table(path, "reference")
        apart = [key for key in gold if other.get(key) != gold[key]]
        if apart:
            raise UserError(
                f"{path} and {references} have other references for {len(apart)} ids ({listed(apart)}): the systems "
                "were not judged by the same data. Generate them for the same data and split."
            )


def _texts(
    path: Path, what: str, ids: list[str], numbered: bool, references: Path, warnings: list[str]
) -> list[str]:
    """The texts of a file in the order of the ids."""
    found, by_line = table(path, what)
    if by_line != numbered and (by_line or not set(ids) <= found.keys()):
        raise UserError(
            f"{path} has {'no ids' if by_line else 'ids'} and {references} has {'no ids' if numbered else 'ids'}: they "
            "cannot be aligned. Give both as JSONL with ids, or both as lines."
        )
    if by_line and len(found) != len(ids):
        kept = _without_blank_end(found)
        if len(kept) != len(ids):
            raise UserError(
                f"{path} has {len(found)} lines and {references} {len(ids)}: a text may hold line ends of its own. "
                "Write JSONL with ids instead."
            )
        warnings.append(f"{path}: {len(found) - len(kept)} empty lines at the end were left out.")
        found = kept
    known = set(ids)
    wrong = {"missing": [key for key in ids if key not in found], "extra": [key for key in found if key not in known]}
    if wrong["missing"] or (wrong["extra"] and what != "document"):
        told = ", ".join(f"{len(those)} {kind} ({listed(those)})" for kind, those in wrong.items() if those)
        raise UserError(f"{path} does not have the ids of {references}: {told}.")
    return [str(found[key]) for key in ids]


def _without_blank_end(found: dict[str, Any]) -> dict[str, Any]:
    keys = list(found)
    while keys and not str(found[keys[-1]]).strip():
        keys.pop()
    return {key: found[key] for key in keys}


def table(path: Path, what: str) -> tuple[dict[str, Any], bool]:
    """Texts by id, and whether the ids are the lines' numbers."""
    if not path.exists():
        raise MissingFileError(f"there is no {path}.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file of {what}s in it.")
    if _bare(path).suffix.lower() in (".jsonl", ".json", ".ndjson"):
        return _rows(path, what)
    found = {str(number): line for number, line in enumerate(lines(path), 1)}
    if not found:
        raise UserError(f"{path} is empty.")
    return found, True


def _bare(path: Path) -> Path:
    """A file's path without the ending of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def _rows(path: Path, what: str) -> tuple[dict[str, Any], bool]:
    found: dict[str, Any] = {}
    has_ids: bool | None = None
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as mistake:
            reason = mistake.msg.removesuffix(" at")
            hint = " Write one object a line, not a list." if line.lstrip().startswith("[") else ""
            raise UserError(f"{path}:{number} is not JSON: {reason} at character {mistake.pos + 1}.{hint}") from None
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number} has JSON that is too deep, or numbers that are too long.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} should be an object such as {{\"id\": …, \"{what}\": …}}.")
        field = next((field for field in _FIELDS[what] if field in row), None)
        if field is None:
            there = ", ".join(map(escape.name, row)) or "nothing"
            read = ", ".join(_FIELDS[what])
            raise UserError(f"{path}:{number} has no {what}: it has {there}; one of {read} is read.")
        if has_ids is None:
            has_ids = "id" in row
        if ("id" in row) != has_ids:
            raise UserError(f"{path}:{number} has {'an' if 'id' in row else 'no'} id, unlike the lines before.")
        key = _id(row["id"], path, number) if has_ids else str(len(found) + 1)
        if key in found:
            raise UserError(f"{path}:{number} repeats the id {key!r}.")
        found[key] = _checked(row[field], path, number, what)
    if not found:
        raise UserError(f"{path} is empty.")
    return found, not has_ids


def _id(value: Any, path: Path, number: int) -> str:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _whole(str(value))
    raise UserError(f"{path}:{number}: id should be text or a number, got {json.dumps(value)[:40]}.")


def _checked(value: Any, path: Path, number: int, what: str) -> Any:
    if isinstance(value, str):
        return _whole(value)
    if what == "reference" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return [_whole(one) for one in value]
    several = " or a list of texts" if what == "reference" else ""
    found = "an empty list" if value == [] else type(value).__name__
    raise UserError(f"{path}:{number}: {what} should be text{several}, got {found}.")


def _whole(text: str) -> str:
    """The text with U+FFFD for halves of characters, which JSON can write and UTF-8 cannot: an emoji cut in two.

    >>> _whole(chr(0xD83D) + " cut")
    '\ufffd cut'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file, compressed or not; a sentence for one that cannot be read."""
    try:
        compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
        with io.TextIOWrapper(opened(path, compression), encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as mistake:
        raise UserError(f"{path} is not UTF-8: byte {mistake.object[mistake.start]:#x} cannot be read.") from None
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as mistake:
        if isinstance(mistake, OSError) and mistake.errno is not None:   # the system's own, not of what was unpacked
            raise
        raise UserError(f"{path} ends too early or is damaged: {mistake}.") from None


def _names(paths: Sequence[Path], files: Sequence[Path]) -> list[str]:
    """The stem of each file, the name of each folder; where two are alike, with the folder above."""
    real = [os.path.realpath(file) for file in files]
    for place, path in enumerate(paths):
        before = real.index(real[place])
        if before < place:
            raise UserError(f"{paths[before]} and {path} are the same file. Name each system once.")
    whole = [Path(os.path.abspath(path)) for path in paths]   # a link keeps its own name
    stems = [path.name if path.is_dir() else _bare(path).stem for path in whole]
    pairs = zip(whole, stems, strict=True)
    names = [escape.name(stem if stems.count(stem) == 1 else f"{path.parent.name}/{stem}") for path, stem in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two systems are called {name!r}. Rename a file.")
    return names


def listed(keys: Sequence[str]) -> str:
    """The first few of these, quoted."""
    shown = ", ".join(repr(key) for key in keys[:SHOWN])
    return shown + (", …" if len(keys) > SHOWN else "")
