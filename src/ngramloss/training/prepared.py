"""what is prepared once for all processes of a training → ``prepared.json``, and back, checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ngramloss.errors import UserError
from ngramloss.storage.files import read_object
from ngramloss.storage.typed import typed


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
    perplexity: float  # of the training targets


@dataclass(frozen=True)
class PreparedCandidates:
    """Candidates of the training split."""

    file: Path
    fingerprint: str
    examples: int
    texts: int
    cut: int
    tokens: Path
    metric: str  # the metric's scores whose mean they have; empty if unknown


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
    used: tuple[str, ...]  # what is used of the data, in sentences
    candidates: PreparedCandidates | None
    language_model: PreparedLanguageModel | None
    made_of: Mapping[str, str]  # what the training is made of → its fingerprint; each checkpoint has this, too
    tokenizer: str
    column: str  # the source column of the training split; empty if it has no name
    continued_from: Path | None
    trust_remote_code: bool
    machine: Machine

    def to_json(self) -> str:
        """The text of ``prepared.json``."""
        fields = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        return json.dumps(fields, indent=1, default=str)  # str for paths

    @classmethod
    def read(cls, path: Path) -> Prepared:
        """Read ``prepared.json``. Raises :class:`Stopped` if it has the error of the first process."""
        advice = "Start the training again."
        content = read_object(path, advice)
        if "error" in content:
            raise Stopped(content["error"])
        names = {key: name for name, key in _KEYS.items()}
        what = f"{path} is not what a training prepares"
        prepared: Prepared = typed(cls, {names.get(key, key): value for key, value in content.items()}, what, advice)
        if prepared.tokenizer and "train" not in prepared.splits:  # systems have neither
            raise UserError(f"{what}: splits has no train. {advice}")
        return prepared


_KEYS = {"continued_from": "continue"}  # Fields with another name in the file
