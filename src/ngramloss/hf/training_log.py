"""the steps of ``NgramTrainer`` → its log: terms, diagnostics, documents per second, memory and scheduled weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ngramloss.hf.attach import aligned_labels, aligned_packing, attached_loss, logits_of
from ngramloss.hf.log_parts import LogParts
from ngramloss.loss import JointLoss

DIAGNOSED_ROWS = 4
"""Number of rows used for diagnostics: they need full logits, which must not fill the memory."""


class TrainingLog(LogParts):
    """Logs what ``LogParts`` does, and what only a trainer that counts its steps knows.

    Args:
        trainer: an ``NgramTrainer``.
        loss_fn: its objective, without terms that are only watched.
    """

    def __init__(self, trainer: Any, loss_fn: JointLoss) -> None:
        super().__init__()
        self._trainer, self._loss_fn = trainer, loss_fn
        self._began = self._step_ended = 0.0
        self._sequences: Any = 0
        self.last_batch: dict[str, Any] = {}
        """The last micro-batch, for diagnostics."""

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

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """As ``LogParts``, with the rest."""
        if "loss" in logs and self._steps:
            more = self._of_training(kwargs["model"], args.device)
            logs |= more
            state.log_history[-1] |= more
        super().on_log(args, state, control, logs, **kwargs)

    def _of_training(self, model: Any, device: torch.device) -> dict[str, float]:
        loss_fn = self._loss_fn
        loss_fn.progress = attached_loss(model).progress
        speed = float(self._sequences) / max(time.perf_counter() - self._began, 1e-9)
        weights = zip(loss_fn.parts, loss_fn.weights, strict=True)
        more = {"docs_per_second": speed, "memory_gib": _memory(device)} | self._diagnostics(model)
        self._sequences, self._began = 0, time.perf_counter()
        return more | {f"weight/{part.name}": weight for part, weight in weights if part.schedule is not None}

    def _diagnostics(self, model: Any) -> dict[str, float]:
        """``JointLoss.diagnose`` on a few rows of the last micro-batch, without dropout."""
        rows, was_training = _first_rows(self.last_batch, DIAGNOSED_ROWS), model.training
        model.eval()
        try:
            with torch.no_grad(), self._trainer.compute_loss_context_manager():
                labels, packed = aligned_labels(model, rows), aligned_packing(model, rows)
                watched = self._loss_fn.diagnose(logits_of(model, rows).float(), labels, segments=packed)
        finally:
            model.train(was_training)
        return {name: value.item() for name, value in watched.items()}


def _first_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """The first rows of a batch. What has no row for each row of the labels, such as lengths of documents, stays."""
    size = len(batch["labels"])
    if size <= rows:
        return batch
    return {
        name: value[:rows] if isinstance(value, Tensor) and len(value) == size else value
        for name, value in batch.items()
    }


def _memory(device: torch.device) -> float:
    """Peak memory of this process in GiB: on the GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
