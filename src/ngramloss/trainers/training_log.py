"""the steps of ``ExactSteps`` → its log: terms, diagnostics, documents per second, memory and scheduled weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ngramloss.loss.joint_loss import JointLoss
from ngramloss.models.attached.attach import attached_loss
from ngramloss.models.attached.diagnosing import diagnostics, peak_memory
from ngramloss.trainers.log_parts import LogParts


class TrainingLog(LogParts):
    """Logs what ``LogParts`` does, and what only a trainer that counts its steps knows.

    Args:
        loss_fn: its objective, without terms that are only watched.
    """

    def __init__(self, trainer: Any, loss_fn: JointLoss) -> None:
        super().__init__()
        self._trainer, self._loss_fn = trainer, loss_fn
        self._began = self._step_ended = 0.0
        self._sequences: Any = 0
        self.last_batch: dict[str, Any] = {}
        """The last micro-batch, for diagnostics, which run the model once more. Without one there are none."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the objective. A trainer may load its model itself, and replace its forward later."""
        self._trainer.attach_objective(kwargs["model"])
        super().on_init_end(args, state, control, **kwargs)

    def begin_step(self) -> None:
        """Leave the time since the last step, or since a later log, out of documents per second."""
        self._began += time.perf_counter() - max(self._step_ended, self._began)

    def count(self, sequences: Tensor) -> None:
        """Add the sequences of a step over all processes, []."""
        self._sequences = self._sequences + sequences

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As ``LogParts``. Evaluations and checkpoints come after this."""
        super().on_step_end(args, state, control, **kwargs)
        self._step_ended = time.perf_counter()

    def _of_training(self, model: Any, device: torch.device) -> dict[str, float]:
        """As ``LogParts``, with the rest."""
        speed = float(self._sequences) / max(time.perf_counter() - self._began, 1e-9)
        more = {"docs_per_second": speed, "memory_gib": peak_memory(device)}
        if self.last_batch:
            more |= diagnostics(model, self._loss_fn, self.last_batch, self._trainer.compute_loss_context_manager)
        self._loss_fn.progress = attached_loss(model).progress
        weights = zip(self._loss_fn.parts, self._loss_fn.weights, strict=True)
        self._sequences, self._began = 0, time.perf_counter()
        more |= {f"weight/{part.name}": weight for part, weight in weights if part.schedule is not None}
        return more | super()._of_training(model, device)
