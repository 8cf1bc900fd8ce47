"""files of references, documents and predictions, or run folders → texts of each system, aligned by id."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import escape
from ngramloss.data.columns import SOURCES, usual
from ngramloss.data.rows import COMPRESSIONS, STDIN, is_saved
from ngramloss.errors import MissingFileError, UserError
from ngramloss.run_folder import RunFolder
from ngramloss.scoring.texts import Named, columns_of, read_texts

SHOWN = 5


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


def align(
    references: Sequence[Path] | Path | None,
    predictions: Sequence[Path],
    documents: Path | None = None,
    *,
    named: Named | None = None,
) -> Aligned:
    """Read all files and align their texts by id. Missing, extra or repeated ids raise an error that names them.

    Args:
        references: a file, or several with one reference of each document. None uses the references, and the documents,
            in the first folder that has them, where ``ngramloss generate`` wrote them. All folders must then have the
            same references.
        predictions: files, or folders with predictions.
        documents: a file.
        named: columns to read, where their names are not the usual ones.
    """
    if not predictions:
        raise UserError("there is nothing to score: give one or more files of predictions, or run folders.")
    folders = [path if path.is_dir() and not is_saved(path) else None for path in predictions]
    files = [_predictions_in(path) if folder else path for path, folder in zip(predictions, folders, strict=True)]
    runs = [folder for folder in folders if folder is not None]
    given = [references] if isinstance(references, Path) else list(references or [])
    _raise_if_stdin_twice([*given, *([documents] if documents else []), *files])
    first = given[0] if given else _references_of(runs)
    if not given and usual(SOURCES, columns_of(first)):
        documents = documents or first
    gold, numbered = read_texts(first, "reference", named)
    several = {key: [value] if isinstance(value, str) else value for key, value in gold.items()}
    warnings: list[str] = []
    for path in given[1:]:
        others = _texts(path, "reference", list(gold), numbered, first, warnings, named)
        for key, more in zip(gold, others, strict=True):
            several[key] = [*several[key], *([more] if isinstance(more, str) else more)]
    read = _texts(documents, "document", list(gold), numbered, first, warnings, named) if documents else None
    names = _names(predictions, files)
    texts = [_texts(path, "prediction", list(gold), numbered, first, warnings, named) for path in files]
    if not given:
        _raise_unless_alike(first, gold, runs[1:])
    return Aligned(Task(list(gold), list(several.values()), read), names, texts, folders, warnings)


def _raise_if_stdin_twice(paths: Sequence[Path]) -> None:
    if sum(path == STDIN for path in paths) > 1:
        raise UserError("standard input (-) can be read only once. Give the other texts as a file.")


def _predictions_in(folder: Path) -> Path:
    run = RunFolder(folder)
    if run.predictions.is_file():
        run.raise_unless_current()
        return run.predictions
    if not (run.shares() or run.recipe.is_file()):
        raise MissingFileError(
            f"no predictions in {folder}, and it is not a run's folder. Give a run's folder after "
            "ngramloss generate, or a file of predictions."
        )
    what = f"the predictions in {folder} are not finished" if run.shares() else f"no predictions in {folder}"
    raise MissingFileError(f"{what}. Generate them with: ngramloss generate {folder}")


def _references_of(folders: Sequence[Path]) -> Path:
    """The references of the first folder that has some."""
    paths = (RunFolder(folder).references for folder in folders)
    references = next((path for path in paths if path.is_file()), None)
    if references is None:
        raise UserError("give --references FILE. It may be left out only for folders that `ngramloss generate` wrote.")
    return references


def _raise_unless_alike(references: Path, gold: dict[str, Any], folders: Sequence[Path]) -> None:
    """Raise if a folder's predictions were written for other references."""
    for folder in folders:
        path = RunFolder(folder).references
        if not path.is_file():
            continue
        other, _ = read_texts(path, "reference")
        ids = [key for key in gold if other.get(key) != gold[key]]
        if ids:
            raise UserError(
                f"{path} and {references} have different references for {len(ids)} ids ({listed(ids)}): the systems "
                "summarise different data. Generate all of them for the same data and split."
            )


def _texts(
    path: Path,
    what: str,
    ids: list[str],
    numbered: bool,
    references: Path,
    warnings: list[str],
    named: Named | None = None,
) -> list[Any]:
    """The texts of a file in the order of the ids."""
    texts, by_line = read_texts(path, what, named)
    if by_line != numbered and (by_line or not set(ids) <= texts.keys()):
        raise UserError(
            f"{path} has {'no ids' if by_line else 'ids'} and {references} has {'no ids' if numbered else 'ids'}: they "
            "cannot be aligned. Give both with ids, or both without; --id none compares them row by row."
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
        raise UserError(f"{path} and {references} must have the same ids. In {path.name}: {message}.")
    return [texts[key] for key in ids]


def _bare(path: Path) -> Path:
    """A file's path without the ending of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def _without_blank_end(texts: dict[str, Any]) -> dict[str, Any]:
    keys = list(texts)
    while keys and not str(texts[keys[-1]]).strip():
        keys.pop()
    return {key: texts[key] for key in keys}


def _names(paths: Sequence[Path], files: Sequence[Path]) -> list[str]:
    """The name of each folder and the stem of each file; with the parent folder where two are equal."""
    real = [os.path.realpath(file) if file != STDIN else "-" for file in files]
    for index, path in enumerate(paths):
        before = real.index(real[index])
        if before < index:
            raise UserError(f"{paths[before]} and {path} are the same file. Give each system once.")
    absolute = [Path(os.path.abspath(path)) for path in paths]  # a link keeps its own name
    stems = [
        "stdin" if path == STDIN else place.name if place.is_dir() else _bare(place).stem
        for path, place in zip(paths, absolute, strict=True)
    ]
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
