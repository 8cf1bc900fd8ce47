"""files of candidates, of any writer → the examples that they belong to, the texts, and the gain of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data import Example, columns_of, fingerprint, load
from ngramloss.data.candidates import (
    Candidates,
    about_candidates,
    candidates_fingerprint,
    check_candidates,
    read_candidates,
)
from ngramloss.errors import UserError
from ngramloss.metrics.gains import BY_TASK, gain_of, gains_of
from ngramloss.output.console import logger
from ngramloss.recipe import Data
from ngramloss.storage.files import read_object
from ngramloss.storage.run_folder import RunFolder

OF_THE_DATA = (
    "source",
    "target",
    "id",
    "source_language",
    "target_language",
    "validation_fraction",
    "test_fraction",
    "on_bad_row",
)
"""Settings that say which documents there are, taken from the run that wrote the candidates."""


class CandidateSet(NamedTuple):
    """Examples and their candidates.

    Attributes:
        data: where they are from; of several files, the first.
        split: likewise.
        examples: those that have candidates, in the order of the data.
        candidates: theirs, each with a gain.
        fingerprint: of the examples.
    """

    data: Data
    split: str
    examples: list[Example]
    candidates: Candidates
    fingerprint: str

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The candidates of each example."""
        return [self.candidates.rows[example.id][0] for example in self.examples]

    @property
    def gains(self) -> list[tuple[float, ...]]:
        """The gains of each example's candidates."""
        return [self.candidates.rows[example.id][1] for example in self.examples]


def named_files(text: str) -> dict[str, list[Path]]:
    """Split → its files of candidates, from ``data.candidates``: one path, or ``train=a,train=b,validation=c``.

    >>> {split: [path.name for path in paths] for split, paths in named_files("train=a,train=b,validation=c").items()}
    {'train': ['a', 'b'], 'validation': ['c']}
    """
    found: dict[str, list[Path]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        split, equals, path = part.partition("=")
        key, name = (split.strip(), path.strip()) if equals else ("train", part)
        if key not in ("train", "validation") or not name:
            raise UserError(
                f"data.candidates: expected a path, or train=PATH,validation=PATH; train may come several times. Got "
                f"{part!r}."
            )
        found.setdefault(key, []).append(Path(name))
    return found


def read_set(paths: Sequence[Path], data: Data, task: str, split: str) -> CandidateSet:
    """Read candidates of one or several writers, and the examples that they belong to.

    A file or folder that ``ngramloss candidates`` or ``generate`` wrote names its data and its split. For another file,
    they are those of the recipe. Candidates without gains get those of the task's usual metric.

    Args:
        paths: files, or folders with one.
        data: the data section of the recipe.
        task: of the recipe.
        split: of candidates that do not say theirs.

    Raises:
        UserError: candidates are of other texts, of no example, or of an example that has some already.
    """
    parts = [_read(path, data, task, split) for path in paths]
    rows: dict[str, Any] = {}
    for part, path in zip(parts, paths, strict=True):
        if twice := rows.keys() & part.candidates.rows.keys():
            raise UserError(
                f"{len(twice):,} of the ids in {path} have candidates in an earlier file, too, such as "
                f"{min(twice)!r}. Give each source's candidates once."
            )
        rows |= part.candidates.rows
    examples = [example for part in parts for example in part.examples]
    candidates = Candidates(rows, candidates_fingerprint(rows))
    return CandidateSet(parts[0].data, parts[0].split, examples, candidates, fingerprint(examples))


def _read(path: Path, data: Data, task: str, split: str) -> CandidateSet:
    found, about = read_candidates(path, need_gains=False), about_of(path)
    data, split = _data_of(about, data), str(about.get("split", split))
    whole = load(
        data.name,
        split,
        **columns_of(data, task),
        on_bad_row=data.on_bad_row,
        validation_fraction=data.validation_fraction,
        test_fraction=data.test_fraction,
    )
    if doubt := check_candidates(found, about, whole.examples, path=path, split=split):
        logger.info(doubt)
    examples = [example for example in whole.examples if example.id in found.rows]
    if not examples:
        raise UserError(
            f"no candidate in {path} has a source and a reference: the ids of {data.name} ({split}) are like "
            f"{whole.examples[0].id!r}, those of the candidates like {next(iter(found.rows))!r}. Name their data and "
            "split, with --data and --split, or set data.id to the column with the ids."
        )
    if lacking := len(found.rows) - len(examples):
        logger.warning(
            f"{lacking:,} of {len(found.rows):,} rows of candidates in {path} are left out: {data.name} ({split}) has "
            "no source and no reference with their ids."
        )
    rows = {example.id: found.rows[example.id] for example in examples}
    if without := [example for example in examples if not rows[example.id][1]]:
        logger.info(f"computing the gains of candidates in {path}, which has none of {len(without):,} sources.")
        gains = gains_of(gain_of(BY_TASK[task], {}), without, [rows[example.id][0] for example in without])
        rows |= {
            example.id: (rows[example.id][0], tuple(values)) for example, values in zip(without, gains, strict=True)
        }
    return CandidateSet(data, split, examples, Candidates(rows, candidates_fingerprint(rows)), whole.fingerprint)


def about_of(path: Path) -> dict[str, Any]:
    """What is saved beside candidates, or beside predictions with several texts each; empty for another file."""
    folder = RunFolder(path.parent)
    if path == folder.predictions and folder.generation.is_file():
        return read_object(folder.generation)
    return about_candidates(path)


def _data_of(about: Mapping[str, Any], data: Data) -> Data:
    """The data of candidates: those that they name, read as their writer's run reads them."""
    if "data" not in about:
        return data
    name, run = str(about["data"]), RunFolder(Path(str(about.get("model", ""))))
    if run.recipe.is_file():
        theirs = recipe.load(str(run.recipe), objective=False).data
        if theirs.name == name:
            data = dataclasses.replace(data, **{key: getattr(theirs, key) for key in OF_THE_DATA})
    return dataclasses.replace(data, name=name)


def data_of(path: Path) -> str:
    """The data set of candidates; empty if they do not name it."""
    return str(about_of(path).get("data", ""))


def whole_paths(text: str) -> str:
    """``data.candidates`` with whole paths, so that a run does not depend on the working directory."""
    files = named_files(text).items()
    return ",".join(f"{split}={path.expanduser().resolve()}" for split, paths in files for path in paths)
