"""what is prepared once for all processes of a training → ``prepared.json``, and back, checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ngramloss.errors import UserError
from ngramloss.storage.files import read_object


class Stopped(Exception):
    """Another process of this run reported an error."""


@dataclass(frozen=True)
class PreparedSplit:
    """A split that was read and tokenised."""

    examples: int
    skipped: tuple[str, ...]
    fingerprint: str
    tokens: Path
    beside: Mapping[str, Path] = field(default_factory=dict)
    """Name → file of numbers beside the labels, such as ``lm_logp``."""


@dataclass(frozen=True)
class PreparedLanguageModel:
    """The language model of the targets whose numbers are beside the labels."""

    name: str
    fingerprint: str
    perplexity: float
    """Of the training targets."""


@dataclass(frozen=True)
class PreparedCandidates:
    """Candidates of the training split."""

    file: Path
    fingerprint: str
    examples: int
    """Examples that have candidates."""
    texts: int
    cut: int
    tokens: Path
    metric: str
    """The scores that the gains are; empty if unknown."""


@dataclass(frozen=True)
class Machine:
    """What a training runs on."""

    processes: int
    device: str
    precision: str


@dataclass(frozen=True)
class Prepared:
    """What is prepared once for all processes: the contents of ``prepared.json``."""

    splits: Mapping[str, PreparedSplit]
    used: tuple[str, ...]
    """What is used of the data, in sentences."""
    candidates: PreparedCandidates | None
    language_model: PreparedLanguageModel | None
    model_files: Mapping[str, str]
    tokens: Mapping[str, str]
    """Split, or "candidates" → the fingerprint of its tokens."""
    plugins: Mapping[str, str]
    """Objective of a plugin → a hash of its code."""
    metrics: Mapping[str, str]
    """Metric of a plugin → a hash of its code."""
    tokenizer: str
    column: str
    """The source column of the training split; empty if it has no name."""
    continued_from: Path | None
    trust_remote_code: bool
    machine: Machine

    @property
    def fingerprints(self) -> dict[str, str]:
        """What the run is trained on → its fingerprint."""
        more = {name: getattr(self, name) for name in ("candidates", "language_model")}
        given = {name: part.fingerprint for name, part in more.items() if part is not None}
        return {name: split.fingerprint for name, split in self.splits.items()} | given

    @property
    def identity(self) -> dict[str, Any]:
        """What each checkpoint says of the data, the model and the code that it was trained with."""
        fields = ("plugins", "metrics", "model_files", "tokens")
        return {**self.fingerprints, **{field: getattr(self, field) for field in fields}}

    def to_json(self) -> str:
        """The text of ``prepared.json``."""
        fields = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        return json.dumps(fields, indent=1, default=str)  # str for paths

    @classmethod
    def read(cls, path: Path) -> Prepared:
        """Read ``prepared.json``.

        Raises:
            Stopped: it contains the error of the first process.
            UserError: it is damaged, or a file of something else.
        """
        content = read_object(path, "Start the training again.")
        if "error" in content:
            raise Stopped(content["error"])
        names = {key: name for name, key in _KEYS.items()}
        try:
            prepared: Prepared = _typed(cls, {names.get(key, key): value for key, value in content.items()}, "it")
            if "train" not in prepared.splits:
                raise TypeError("splits has no train")
        except TypeError as reason:
            raise UserError(f"{path} is not what a training prepares: {reason}. Start the training again.") from None
        return prepared


_KEYS = {"continued_from": "continue"}
"""Fields with another name in the file."""


def _typed(kind: Any, value: Any, name: str) -> Any:
    """A value from JSON as a field of this type. Raises ``TypeError`` with its name if it cannot be one."""
    inner = get_args(kind)
    if get_origin(kind) is UnionType:
        return None if value is None else _typed(inner[0], value, name)
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return {key: _typed(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_typed(inner[0], item, name) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        types = get_type_hints(kind)
        if wrong := sorted(types.keys() ^ value.keys()):
            raise TypeError(f"{name} should have {', '.join(types)}; missing or unknown: {', '.join(wrong)}")
        made: Any = kind
        return made(**{field: _typed(types[field], value[field], field) for field in types})
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise TypeError(f"{name} cannot be {value!r}")
    return value
