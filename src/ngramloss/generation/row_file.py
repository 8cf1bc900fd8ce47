"""examples and a function that writes rows → a file of rows by id, in shares of processes, continued if stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.data import Example
from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.output.progress import Progress
from ngramloss.recipe import AUTO
from ngramloss.search.batches import Budget, batches
from ngramloss.search.registry import ENGINES
from ngramloss.search.search import Options
from ngramloss.storage.files import appended, object_or_empty, whole_rows, write_whole
from ngramloss.storage.run_folder import NAMES, RunFolder


class Output(NamedTuple):
    """Where the rows of a job go."""

    run: RunFolder
    noun: str  # what the rows are, ``predictions`` or ``candidates``
    key: str  # what a finished row has, besides its id
    whole: Path  # the file of all rows
    about: Path  # the file with the settings of the job

    @property
    def share(self) -> Path:
        """The file of this process."""
        return self.run.share(rank(), self.noun)

    @property
    def exists(self) -> bool:
        """Whether the folder has such rows, all or some."""
        return self.whole.exists() or bool(self.run.shares(self.noun))


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """How many processes share the job."""
    return int(os.environ.get("WORLD_SIZE", 1))


class Author(NamedTuple):
    """What writes the rows of examples."""

    ids: Callable[[Sequence[Example]], list[list[int]]]  # examples → the ids of their sources
    write: Callable[[Sequence[Example], Sequence[Sequence[int]]], list[dict[str, Any]]]
    """Examples and their ids → the row of each, without its id."""
    budget: Budget


@contextmanager
def claimed(folder: Path) -> Iterator[RunFolder]:
    """Create the folder of a job if it does not exist, and lock it. If nothing was written, it is deleted again."""
    if RunFolder(folder.parent).recipe.exists() and folder.name in NAMES:
        raise UserError(
            f"{folder} is a part of the run {folder.parent} and would be deleted with it. Choose another --out."
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, but --out needs a folder. It is created if it does not exist.")
    run = RunFolder(folder)
    created = rank() == 0 and not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with nullcontext() if rank() else run.lock(option="--out"):
            yield run
    except BaseException:
        if created and not any(folder.iterdir()):  # the error occurred before anything was written
            folder.rmdir()
        raise


def begin(output: Output, settings: Mapping[str, Any], *, references: str = "") -> bool:
    """Save a job's settings, or continue one of its first documents; whether rows are left. Raises for another job."""
    if _was_begun(output, settings, references) and output.whole.exists():
        return False
    if processes() == 1:
        output.run.tidy()
    if rank() == 0:
        write_whole(output.about, json.dumps(settings, indent=1))
    return True


def _was_begun(output: Output, settings: Mapping[str, Any], references: str) -> bool:
    if not output.exists:
        return False
    if not output.about.exists() and not output.whole.exists():
        return False  # another process started before the first one, which writes the settings
    before = object_or_empty(output.about)
    files = [path for path in (output.whole, *output.run.shares(output.noun)) if path.exists()]
    advice = f"Choose another --out, or delete {' and '.join(map(str, files))}."
    if "model" not in before:
        raise UserError(
            f"{output.run.path} has {output.noun} but no valid {output.about.name} with their settings. {advice}"
        )
    settings = json.loads(json.dumps(settings))  # as they are saved: a tuple becomes a list
    # Weights identify the model; a folder's name can be spelled in several ways, and folders are moved.
    same_weights = settings.get("weights") is not None and before.get("weights") == settings["weights"]
    left_out = {"versions", "model", "runs"} if same_weights else {"versions"}
    every = {
        key: list(_differences(key, before.get(key), value)) for key, value in settings.items() if key not in left_out
    }
    changed = {key: changes for key, changes in every.items() if changes}
    if changed and changed.keys() <= {"documents", "fingerprint"} and processes() == 1:
        done = output.run.references.read_text(encoding="utf-8") if output.run.references.is_file() else ""
        if done and references.startswith(done):
            logger.info(f"the {output.noun} of the first {before['documents']:,} documents are kept or continued.")
            if output.whole.exists():
                output.whole.replace(output.share)
            return True
    if changed:
        changes = [change for each in changed.values() for change in each]
        raise UserError(
            f"{output.run.path} has {output.noun} made with other settings ({'; '.join(changes)}). {advice}"
        )
    return True


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """What differs in a setting, as ``generation.num_beams: 4 → 8``; of nested settings only those that differ."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        written = ["not set" if value is None else repr(value) for value in (before, now)]
        yield f"{name}: {written[0]} → {written[1]}"


def engine_that_began(output: Output, name: str, options: Options) -> str:
    """The name of the engine; for ``auto`` without groups, the one that began the rows that are in the folder."""
    continues = name == AUTO and options.groups == 1 and output.exists
    engine = object_or_empty(output.about).get("engine") if continues else None
    began = engine.get("name") if isinstance(engine, dict) else None
    if began not in ENGINES:
        return name
    logger.info(f"engine {began}, which began the {output.noun} in {output.run.path}.")
    return str(began)


def write_share(
    output: Output, examples: Sequence[Example], author: Author, *, unit: str, only: Container[str] | None = None
) -> None:
    """Write the rows of this process that are not done yet, batch by batch; ``only`` those of these ids if given."""
    share = output.share
    write_whole(share, "".join(map(line, whole_rows(share))))  # removes a line that a kill truncated
    done = done_rows(output)
    mine = [
        example
        for example in examples[rank() :: processes()]
        if example.id not in done and (only is None or example.id in only)
    ]
    mine.sort(key=lambda example: len(example.source), reverse=True)  # similar lengths together, longest first
    with appended(share) as file, Progress(f"writing {output.noun}", len(mine), unit=unit) as progress:
        for batch, rows in batches(mine, *author):
            pairs = zip(batch, rows, strict=True)
            file.write("".join(line({"id": example.id, **row}) for example, row in pairs))
            file.flush()
            progress.update(len(batch))


def collected(output: Output, ids: Sequence[str]) -> list[dict[str, Any]]:
    """All rows in the order of the ids, when all processes have written theirs; torchrun ends this one if one dies."""
    began = time.monotonic()
    while len(done := done_rows(output)) < len(ids):
        time.sleep(max(0.5, 5 * (time.monotonic() - began)))  # large files take long to read
        began = time.monotonic()
    return [done[key] for key in ids]


def finish(output: Output, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the file of all rows, and delete the shares."""
    write_whole(output.whole, "".join(map(line, rows)))
    for path in output.run.shares(output.noun):
        path.unlink()


def done_rows(output: Output) -> dict[str, dict[str, Any]]:
    """The rows that are already written, by id."""
    rows = (row for path in output.run.shares(output.noun) for row in whole_rows(path))
    return {row["id"]: row for row in rows if "id" in row and output.key in row}


def line(row: Mapping[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"
