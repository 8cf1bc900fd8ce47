"""a folder → the run in it: each of its files by name, its lock, whether it is finished, who wrote its predictions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngramloss.errors import UserError
from ngramloss.files import fingerprint, lock_folder, remove, write_whole


class Busy(UserError):
    """Another process holds the folder's lock."""


class _Part:
    """A file or folder of a run: an attribute that is its path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFolder, owner: object = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. No other module writes the names of its files.

    Example:
        >>> RunFolder(Path("runs/mine")).recipe.as_posix()
        'runs/mine/recipe.toml'
    """

    path: Path

    # In the order in which a run makes them; they are deleted the other way round, see clear().
    recipe = _Part("recipe.toml")                # every setting of the training
    prepared = _Part("prepared.json")            # where the tokens are, and which checkpoint is continued
    log = _Part("log.jsonl")                     # a line for each logging step
    tensorboard = _Part("tensorboard")           # where that tracker was asked for
    checkpoints = _Part("checkpoints")
    card = _Part("card.md")                      # what was trained on what
    weights = _Part("weights.json")              # the fingerprint of the model's weights
    model = _Part("model")                       # appears last and whole
    generation = _Part("generation.json")        # what wrote the predictions, and how
    references = _Part("references.jsonl")
    predictions = _Part("predictions.jsonl")
    seen = _Part("seen.jsonl")                   # what the objective sees of some documents
    document_scores = _Part("scores.jsonl")
    scores = _Part("scores.json")

    def share(self, rank: int) -> Path:
        """The predictions of one process, while they are written."""
        return self.path / f"predictions.partial-{rank}.jsonl"

    def shares(self) -> list[Path]:
        """The predictions of every process of a job that has not ended."""
        return sorted(self.path.glob("predictions.partial-*.jsonl"))

    @property
    def finished(self) -> bool:
        """Whether the training has ended."""
        return self.model.is_dir()

    @property
    def has_predictions(self) -> bool:
        """Whether predictions were written here, or begun."""
        return self.predictions.exists() or bool(self.shares())

    def content(self) -> list[str]:
        """What is in the folder, but for what a kill can leave before ``recipe.toml`` is there."""
        left = self._cut_short()
        return sorted(path.name for path in self.path.iterdir() if path not in left and not self._is_bare(path))

    def _is_bare(self, path: Path) -> bool:
        return path == self.checkpoints and path.is_dir() and not any(path.iterdir())

    def _cut_short(self) -> list[Path]:
        """Files and folders of this run whose writing or deleting was cut short."""
        return [path for path in self.path.iterdir() if _CUT_SHORT.fullmatch(path.name)]

    def tidy(self) -> None:
        """Delete what a kill cut short. Call it under the lock."""
        for path in self._cut_short():
            remove(path)

    def clear(self) -> None:
        """Delete all that belongs to the run and nothing else, ``recipe.toml`` last. Call it under the lock.

        Killed on the way, the folder is still a run's, and never has predictions without what tells of them.
        """
        self.tidy()
        for path in [*self.shares(), *(self.path / name for name in reversed(NAMES))]:
            remove(path)

    @contextmanager
    def lock(self, *, option: str, patience: float = 1.0) -> Iterator[None]:
        """Train, generate or score here while no other process does.

        Args:
            option: of the command line that names another folder.
            patience: seconds to wait for the lock; a scoring holds it for a moment only.

        Raises:
            Busy: another process holds it.
        """
        until = time.monotonic() + patience
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(lock_folder(self.path, wait=False))
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise Busy(f"another process is training, generating or scoring in {self.path}. Wait for it to "
                                   f"end, or choose another {option}.") from None
                time.sleep(0.1)
            yield

    # Which weights

    def record_weights(self, model: Path) -> None:
        """Write down the fingerprint of the weights that become this run's model."""
        files = weight_files(model)
        record = {"fingerprint": fingerprint(files), "files": _stamps(files)} if files else {}
        write_whole(self.weights, json.dumps(record, indent=1))

    @property
    def fingerprint(self) -> str | None:
        """Of the model's weights, also where the model was deleted to save space; None where there are none.

        The recorded one holds while sizes and times of the files are those of the record; else they are hashed.
        """
        record = _json(self.weights)
        files = weight_files(self.model)
        if not self.finished or (files and record.get("files") == _stamps(files)):
            return record.get("fingerprint")
        return fingerprint(files) if files else None

    @property
    def wrote_predictions(self) -> bool:
        """Whether the predictions here were written by this run's own model."""
        about, own = _json(self.generation), self.fingerprint
        if own is not None:
            return bool(about.get("weights") == own)
        # Nothing to compare: the name counts, for a path may be of another time or working directory.
        named, here = Path(str(about.get("model", ""))), self.path.resolve()
        return named.name == here.name and (not named.is_dir() or named.resolve() == here)

    def raise_unless_current(self) -> None:
        """Raise if this run's model is here, and the predictions were written by other weights."""
        written = _json(self.generation).get("weights")
        if written is None or not self.recipe.exists() or not self.finished or self.fingerprint in (None, written):
            return
        raise UserError(
            f"the predictions in {self.path} were written by other weights ({written}) than those in {self.model} "
            f"({self.fingerprint}). Delete {self.predictions} and write new ones with: ngramloss generate {self.path}"
        )


NAMES = tuple(part.name for part in vars(RunFolder).values() if isinstance(part, _Part))
_CUT_SHORT = re.compile(rf"({'|'.join(map(re.escape, NAMES))}|predictions\.partial-\d+\.jsonl)\.partial-[0-9a-f]{{16}}")


def weight_files(model: Path) -> list[Path]:
    """The files with the weights of a model's folder."""
    return sorted(model.glob("*.safetensors"))


def _stamps(files: Sequence[Path]) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _json(path: Path) -> dict[str, Any]:
    """What a file says; nothing where there is none, or where something else lies there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
