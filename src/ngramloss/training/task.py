"""what is trained → ``Task``, what the loop knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.padding import Batch, Step
from ngramloss.data.batches.planned import PlannedSteps
from ngramloss.loss.joint_loss import Loss
from ngramloss.training.best import Best
from ngramloss.training.processes import Processes


class Task:
    """What is trained. The loop knows nothing else of it, and calls these methods in this order, in every process.

    ``terms`` are known when the task has begun. ``best`` is what of a validation selects the best checkpoint.
    ``why_not_captured`` is empty if steps run as CUDA graphs; then ``largest`` is a batch of the largest shape.
    """

    model: Any
    tokenizer: Any
    examples: Any
    terms: Sequence[str]
    best: Best
    validates: bool
    precision = "fp32"
    why_not_captured = ""
    largest: Batch | None = None

    def begin(self, here: Processes) -> None:
        """Bring the model to this process's device, in training."""
        raise NotImplementedError

    def optimiser(self) -> torch.optim.Optimizer:
        """What changes the weights."""
        raise NotImplementedError

    def plan(self) -> PlannedSteps:
        """The steps of the whole training."""
        raise NotImplementedError

    def restore(self, checkpoint: Path) -> None:
        """Take what :meth:`saved` gave for a checkpoint."""

    def steps(self, planned: PlannedSteps, done: int) -> Iterable[Step]:
        """The steps after those that are done. Raises :class:`CannotMakeStep` if there can be no more."""
        return planned.from_(done)

    def before_step(self, step: int, total: int) -> Mapping[str, float]:
        """Set what depends on ``step`` and ``total`` alone, and return what the log has of it."""
        return {}

    def loss(self, batch: Batch, counts: Tensor) -> Loss:
        """A batch on the device, and the labels and rows of the whole step, [2] → its share of the step's loss."""
        raise NotImplementedError

    def values(self, batch: Batch, spent: float) -> Mapping[str, float]:
        """What else a line of the log has: of a batch, and of the seconds that were spent since the last line."""
        return {}

    def validate(self) -> dict[str, float]:
        """The loss and scores on validation data, ``eval_loss`` and so on."""
        raise NotImplementedError

    def saved(self, step: int) -> Mapping[str, str]:
        """File name → text for a checkpoint after this step."""
        return {}

    def end(self) -> None:
        """Leave the model as others can use it."""
