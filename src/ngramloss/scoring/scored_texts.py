"""files of references, documents and predictions, or run folders → texts of each system, aligned by id."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.data.columns import SOURCES, usual
from ngramloss.data.data_sets import missing
from ngramloss.data.rows import FORMATS, STDIN, is_saved, uncompressed
from ngramloss.errors import MissingFileError, UserError
from ngramloss.output import escape
from ngramloss.scoring.texts import Named, check_ids, columns_of, listed, read_texts
from ngramloss.storage.run_folder import RunFolder


class Given(NamedTuple):
    """Texts as a person names them."""

    path: Path  # a file, or a run's folder
    column: str = ""  # the column of the texts; empty: found by its usual name
    group: str = ""  # the group of a system, whose runs differ in their seed; empty: a system on its own


class DocumentSet(NamedTuple):
    """The test set: ids, one or more references for each id, and documents. What is not known is None."""

    ids: list[str]
    references: list[list[str]] | None
    documents: list[str] | None


class Aligned(NamedTuple):
    """The systems with their texts in the order of the task's ids."""

    task: DocumentSet
    names: list[str]
    texts: list[list[str]]
    folders: list[Path | None]  # None for a system that is a file
    warnings: list[str]
    groups: Sequence[str] = ()  # of each system, if there are groups


def parse_file(text: str, group: str = "") -> Given:
    """``FILE``, or ``FILE:COLUMN`` if there is no file of the whole name."""
    if not Path(text).exists():
        for colon in reversed([index for index, letter in enumerate(text) if letter == ":"]):
            path, column = Path(text[:colon]), text[colon + 1 :]
            if column and (path.is_file() or is_saved(path) or uncompressed(path).suffix.lower() in FORMATS):
                return Given(path, column, group)
    return Given(Path(text), "", group)


def parse_groups(texts: Sequence[str]) -> list[Given]:
    """``NAME=FILES`` → the systems of each group, by the numbers in their names. Commas, patterns, ``FILE:COLUMN``."""
    given = []
    for text in texts:
        name, sign, written = (part.strip() for part in text.partition("="))
        if not (name and sign and written):
            raise UserError(f"--group takes NAME=FILES, such as --group 'ce=ce-*.jsonl', got {text!r}.")
        for part in [written] if Path(written).exists() else written.split(","):
            paths = sorted(glob(part), key=_natural) if has_magic(part) and not Path(part).exists() else [part]
            if not paths:
                raise MissingFileError(f"no file or folder matches {part!r} of the group {name!r}.")
            given += [parse_file(path, escape.name(name)) for path in paths]
    return given


def _natural(text: str) -> list[str | int]:
    """A sorting key by which seed-2 comes before seed-10."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", text))]


def align(
    references: Sequence[Path | Given] | Path | None,
    predictions: Sequence[Path | Given],
    documents: Path | Given | None = None,
    *,
    named: Named | None = None,
) -> Aligned:
    """Read all files and align their texts by id; by default with the references that ``generate`` wrote to all."""
    if not predictions:
        raise UserError("there is nothing to score: give one or more files of predictions, or run folders.")
    systems = [_given(system) for system in predictions]
    folders = [system.path if system.path.is_dir() and not is_saved(system.path) else None for system in systems]
    own = zip(systems, folders, strict=True)
    files = [system._replace(path=_predictions_in(folder)) if folder else system for system, folder in own]
    runs = [folder for folder in folders if folder is not None]
    given = [_given(file) for file in ([references] if isinstance(references, Path) else references or [])]
    source = _given(documents) if documents else None
    if sum(file.path == STDIN for file in (*given, *([source] if source else []), *files)) > 1:
        raise UserError("standard input (-) can be read only once. Give the other texts as a file.")
    if lost := [system.path for system in systems if not given and not system.path.exists() and system.path != STDIN]:
        raise MissingFileError(missing(lost[0]))
    first = given[0] if given else Given(_references_of(runs))
    if not given and usual(SOURCES, columns_of(first.path)):
        source = source or first
    what = "reference" if given or (named and named.reference) or _has_references(first.path) else "document"
    gold, numbered = read_texts(first.path, what, _named(named, what, first.column))
    several = {key: [value] if isinstance(value, str) else value for key, value in gold.items()}
    warnings: list[str] = []
    for file in given[1:]:
        others = _texts(file, "reference", list(gold), numbered, first.path, warnings, named)
        for key, more in zip(gold, others, strict=True):
            several[key] = [*several[key], *([more] if isinstance(more, str) else more)]
    read = _texts(source, "document", list(gold), numbered, first.path, warnings, named) if source else None
    names, groups = _names(systems, files), [system.group for system in systems]
    for name in names:
        if name in groups and groups[names.index(name)] != name:
            raise UserError(f"a group and a system are both called {name!r}. Rename the group.")
    texts = [_texts(file, "prediction", list(gold), numbered, first.path, warnings, named) for file in files]
    if not given:
        _raise_unless_alike(first.path, gold, runs, what)
    if read is not None and not documents and (other := _other_documents(first.path, list(gold), read, runs)):
        why = f"{other} has other documents than {first.path}, so scores that read documents are left out"
        warnings.append(f"{why}. Score each alone, or give the documents: --documents FILE.")
        read = None
    task = DocumentSet(list(gold), list(several.values()) if what == "reference" else None, read)
    return Aligned(task, names, texts, folders, warnings, groups if any(groups) else ())


def _given(file: Path | Given) -> Given:
    return file if isinstance(file, Given) else Given(file)


def _named(named: Named | None, what: str, column: str) -> Named:
    return (named or Named())._replace(**{what: column} if column else {})


def _predictions_in(folder: Path) -> Path:
    run = RunFolder(folder)
    if run.predictions.is_file():
        run.raise_unless_current()
        return run.predictions
    if not (run.shares() or run.recipe.is_file()):
        what = f"no predictions in {folder}, and it is not a run's folder"
        raise MissingFileError(f"{what}. Give a run's folder after ngramloss generate, or a file of predictions.")
    what = f"the predictions in {folder} are not finished" if run.shares() else f"no predictions in {folder}"
    raise MissingFileError(f"{what}. Generate them with: ngramloss generate {folder}")


def _references_of(folders: Sequence[Path]) -> Path:
    """The references of the first folder that has some; if none has, its documents."""
    paths = [path for folder in folders if (path := RunFolder(folder).references).is_file()]
    if not paths:
        raise UserError("give --references FILE. It may be left out only for folders that `ngramloss generate` wrote.")
    return next(filter(_has_references, paths), paths[0])


def _has_references(path: Path) -> bool:
    """Whether a folder's file of references has any: of data without targets, ``generate`` writes documents alone."""
    return columns_of(path) != ["id", "document"]


def _other_documents(first: Path, ids: list[str], documents: Sequence[Any], folders: Sequence[Path]) -> Path | None:
    """The first file of references whose documents are not these, if its folder has any."""
    for folder in folders:
        path = RunFolder(folder).references
        if path.is_file() and path != first and usual(SOURCES, columns_of(path)):
            found, _ = read_texts(path, "document")
            if [found.get(key) for key in ids] != list(documents):
                return path
    return None


def _raise_unless_alike(references: Path, gold: dict[str, Any], folders: Sequence[Path], what: str) -> None:
    """Raise if a folder's predictions were written for other references; or documents, if ``what`` says so."""
    for folder in folders:
        path = RunFolder(folder).references
        if not path.is_file() or path == references:
            continue
        if what == "reference" and not _has_references(path):
            why = f"{folder} has no references, because its data have no targets, and {references} has some"
            raise UserError(f"{why}. Give references for all systems with --references FILE, or score each alone.")
        other, _ = read_texts(path, what)
        ids = [key for key in gold if other.get(key) != gold[key]]
        if ids:
            why = f"{path} and {references} have different {what}s for {len(ids)} ids ({listed(ids)})"
            advice = "Generate all of them for the same data and split"
            raise UserError(f"{why}: the systems summarise different data. {advice}.")


def _texts(
    file: Given, what: str, ids: list[str], numbered: bool, references: Path, warnings: list[str], named: Named | None
) -> list[Any]:
    """The texts of a file in the order of the ids."""
    path = file.path
    texts, by_line = read_texts(path, what, _named(named, what, file.column))
    if by_line != numbered and (by_line or not set(ids) <= texts.keys()):
        both = f"{path} has {'no ids' if by_line else 'ids'} and {references} has {'no ids' if numbered else 'ids'}"
        advice = "Give both with ids, or both without; --id none compares them row by row"
        raise UserError(f"{both}: they cannot be aligned. {advice}.")
    if by_line and len(texts) != len(ids):
        trimmed = dict(texts)
        while trimmed and not str(trimmed[next(reversed(trimmed))]).strip():
            trimmed.popitem()
        if len(trimmed) != len(ids):
            lines = f"{path} has {len(texts)} lines and {references} has {len(ids)}"
            raise UserError(f"{lines}: a text may contain line breaks. Use JSONL with ids instead.")
        warnings.append(f"{path}: {len(texts) - len(trimmed)} empty lines at the end were ignored.")
        texts = trimmed
    if what != "document" or not set(ids) <= texts.keys():
        check_ids(list(texts), ids, path, references)
    return [texts[key] for key in ids]


def _names(systems: Sequence[Given], files: Sequence[Given]) -> list[str]:
    """The name of each folder, column or the stem of each file; with what it is in where two are equal."""
    paths = [system.path for system in systems]
    real = [(os.path.realpath(file.path) if file.path != STDIN else "-", file.column) for file in files]
    for index, system in enumerate(systems):
        before = real.index(real[index])
        if before < index and system.column:
            raise UserError(f"{system.path}:{system.column} is given twice. Give each system once.")
        if before < index:
            raise UserError(f"{paths[before]} and {system.path} are the same file. Give each system once.")
    stems, inside = [], []
    for system in systems:
        place = Path(os.path.abspath(system.path))  # a link keeps its own name
        stem = "stdin" if system.path == STDIN else place.name if place.is_dir() else uncompressed(place).stem
        stems.append(system.column or stem)
        inside.append(stem if system.column else place.parent.name)
    both = zip(stems, inside, strict=True)
    names = [escape.name(stem if stems.count(stem) == 1 else f"{outer}/{stem}") for stem, outer in both]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two systems are called {twice[0]!r}. Rename a file.")
    return names
