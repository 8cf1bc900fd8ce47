"""a folder → the run in it: the path of each file, its lock, whether it is finished, which weights wrote its texts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ngramloss.errors import UserError
from ngramloss.storage.files import fingerprint, inside, lock_folder, object_or_empty, read_object, remove, write_whole
from ngramloss.storage.typed import typed


class Busy(UserError):
    """Another process has locked the folder."""


class _Part:
    """A file or folder of a run, as an attribute that returns its path. Raises if it is a link out of the folder."""

    def __init__(self, name: str, *, may_link: bool = False) -> None:
        self.name, self.may_link = name, may_link

    def __get__(self, run: RunFolder, owner: object = None) -> Path:
        return inside(run.path, self.name, may_link=self.may_link)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. Only this module knows the names of its files.

    Example:
        >>> RunFolder(Path("runs/mine")).recipe.as_posix()
        'runs/mine/recipe.toml'
    """

    path: Path

    # In the order in which a run writes them; clear() deletes them in reverse order.
    recipe = _Part("recipe.toml")  # every setting of the training
    prepared = _Part("prepared.json")  # where the tokens are, and which checkpoint is continued
    log = _Part("log.jsonl")  # a line for each logging step
    tensorboard = _Part("tensorboard")  # if that tracker was requested
    checkpoints = _Part("checkpoints")
    card = _Part("card.md")  # what was trained on which data
    weights = _Part("weights.json")  # the fingerprint of the model's weights
    model = _Part("model", may_link=True)  # written last, in one step; large, so it may be elsewhere
    generation = _Part("generation.json")  # which weights wrote the predictions, with which settings
    references = _Part("references.jsonl")
    predictions = _Part("predictions.jsonl")
    seen = _Part("seen.jsonl")  # what the objective sees, for some documents
    document_scores = _Part("scores.jsonl")
    scores = _Part("scores.json")
    about_candidates = _Part("candidates.json")  # which weights wrote the candidates, with which settings
    candidates = _Part("candidates.jsonl")  # several texts of each source, and what each scores

    def share(self, rank: int, noun: str = "predictions") -> Path:
        """The file in which one process collects its predictions or candidates."""
        return inside(self.path, f"{noun}.partial-{rank}.jsonl")

    def shares(self, noun: str = "predictions") -> list[Path]:
        """These files of all processes of an unfinished job."""
        return [inside(self.path, path.name) for path in sorted(self.path.glob(f"{noun}.partial-*.jsonl"))]

    @property
    def made_of(self) -> dict[str, Any]:
        """What the training was made of, as its first checkpoint says; empty if there is none."""
        saved = next(iter(sorted(self.checkpoints.glob("*/data.json"))), None)
        return {} if saved is None else read_object(inside(self.checkpoints, saved.parent.name, saved.name))

    @property
    def finished(self) -> bool:
        """Whether the training has ended."""
        return self.model.is_dir()

    @property
    def has_predictions(self) -> bool:
        """Whether the folder has predictions, complete or partial."""
        return self.predictions.exists() or bool(self.shares())

    def content(self) -> list[str]:
        """Names in the folder, except what a killed process may leave before it writes ``recipe.toml``."""
        checkpoints = self.checkpoints
        without = {checkpoints.name} if checkpoints.is_dir() and not any(checkpoints.iterdir()) else set()
        names = {path.name for path in self.path.iterdir() if not _UNFINISHED.fullmatch(path.name)}
        return sorted(names - without)

    def tidy(self) -> None:
        """Delete files and folders that a killed process left half written or half deleted. Call it under the lock."""
        for path in [path for path in self.path.iterdir() if _UNFINISHED.fullmatch(path.name)]:
            remove(path)

    def clear(self) -> None:
        """Delete everything that belongs to the run and nothing else, ``recipe.toml`` last. Call it under the lock.

        If the process is killed meanwhile, the folder is still recognised as a run, and never has predictions without
        ``generation.json``.
        """
        self.tidy()
        shares = [*self.shares(), *self.shares("candidates")]
        for path in [*shares, *(self.path / name for name in reversed(NAMES))]:
            remove(path)

    @contextmanager
    def lock(self, *, option: str, patience: float = 1.0) -> Iterator[None]:
        """Lock the folder. Raises :class:`Busy` after ``patience`` seconds; ``option`` chooses another folder."""
        until = time.monotonic() + patience
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(lock_folder(self.path, wait=False))
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        what = f"another process is training, generating or scoring in {self.path}"
                        raise Busy(f"{what}. Wait for it to end, or choose another {option}.") from None
                time.sleep(0.1)
            yield

    def record_weights(self, model: Path) -> None:
        """Save the fingerprint of the weights that become this run's model."""
        files = weight_files(model)
        record = {"fingerprint": fingerprint(files), "files": _stamps(files)} if files else {}
        write_whole(self.weights, json.dumps(record, indent=1))

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the model's weights, even if the model was deleted to save space; None if unknown.

        The saved fingerprint is valid while sizes and times of the files are unchanged; otherwise they are hashed.
        """
        record = object_or_empty(self.weights)
        files = weight_files(self.model)
        if not self.finished or (files and record.get("files") == _stamps(files)):
            return record.get("fingerprint")
        return fingerprint(files) if files else None

    @property
    def wrote_predictions(self) -> bool:
        """Whether this run's own model wrote the predictions in the folder."""
        about, own = object_or_empty(self.generation), self.fingerprint
        if own is not None:
            return bool(about.get("weights") == own)
        # Without fingerprints compare only the name: the path may come from another time or working directory.
        named, here = Path(str(about.get("model", ""))), self.path.resolve()
        return named.name == here.name and (not named.is_dir() or named.resolve() == here)

    def raise_unless_current(self) -> None:
        """Raise if the folder has the run's model, but other weights or settings wrote the predictions."""
        written = object_or_empty(self.generation).get("weights")
        if written is not None and self.recipe.exists() and self.finished and self.fingerprint is not None:
            again = f"make new ones with: ngramloss generate {self.path}"
            self.raise_unless_written_by(self, self.generation, self.predictions, again)

    def raise_unless_written_by(self, run: RunFolder, about: Path, texts: Path, again: str) -> None:
        """Raise if a run's present weights and settings did not write the texts that ``about`` describes."""
        facts = object_or_empty(about)
        written, files = facts.get("weights"), facts.get("model_files")
        if run.fingerprint != written:
            other = f"by other weights ({written}) than those in {run.model} ({run.fingerprint})"
        elif isinstance(files, dict) and run.finished and (now := model_files(run.model)) != files:
            names = ", ".join(sorted(name for name in {*files, *now} if files.get(name) != now.get(name)))
            other = f"before files in {run.model} were changed ({names})"
        else:
            return
        there = ", ".join(map(str, [texts] if texts.exists() else self.shares(texts.stem)))
        raise UserError(f"the {texts.stem} in {self.path} were written {other}. Delete {there} and {again}")


class About(TypedDict, total=False):
    """What ``generation.json`` and ``candidates.json`` say of texts, as far as it is read; other keys may be there."""

    model: str | None
    weights: str | None
    data: str | None
    split: str | None
    fingerprint: str | None
    documents: int | None
    task: str
    seed: int | None
    generation: dict[str, Any]
    candidates: dict[str, Any]
    metric: dict[str, Any]
    model_files: dict[str, str]


def read_about(path: Path) -> dict[str, Any]:
    """What a folder says of its texts. Raises ``UserError`` if what is known is of another type."""
    content = read_object(path, again := "Make the texts again.")
    typed(About, {name: content[name] for name in About.__annotations__ if name in content}, path, again)
    return content


NAMES = tuple(part.name for part in vars(RunFolder).values() if isinstance(part, _Part))
_UNFINISHED = re.compile(
    rf"({'|'.join(map(re.escape, NAMES))}|(?:predictions|candidates)\.partial-\d+\.jsonl)\.partial-[0-9a-f]{{16}}"
)


READ = (".json", ".txt", ".model", ".spm", ".bpe", ".vocab", ".tiktoken", ".jinja", ".py")
"""How the names of files end that a model or a tokenizer is loaded from."""


def weight_files(model: Path) -> list[Path]:
    """The weight files in a model folder: safetensors, or pickled ones if there are no others."""
    return sorted(model.glob("*.safetensors")) or sorted(model.glob("pytorch_model*.bin"))


def weights_mark(model: Path, config: Any) -> str | None:
    """A hash of the weights in a model folder; of a model on the hub, the commit that its configuration names."""
    files = weight_files(model)
    return fingerprint(files) if files else getattr(config, "_commit_hash", None)


def model_files(model: Path) -> dict[str, str]:
    """Name → hash of the files that loading a model may read besides the weights: configuration, tokenizer, code."""
    if not model.is_dir():
        return {}
    files = (path for path in sorted(model.iterdir()) if path.suffix in READ and path.is_file())
    return {path.name: fingerprint([path]) for path in files}


def _stamps(files: Sequence[Path]) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
