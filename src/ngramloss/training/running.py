"""the micro-batches of a step → gradients in the model and the step's terms: eager, or one CUDA graph a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ngramloss.data.batches.padding import Batch, Step
from ngramloss.loss.kernels.graphs import CannotCapture
from ngramloss.output.console import logger
from ngramloss.training.captured import CapturedStep, Gradients

Share = Callable[[Batch, Tensor], Tensor]
"""A micro-batch on the device, and the counts of the step, [2] → forward and backward of its share of the step's loss,
and [1 + parts] numbers for the log: the loss, and each term."""


NOT_CAPTURED = "steps are not captured as CUDA graphs: {}. Training is the same, but slower."


@dataclass
class StepRunner:
    """Runs forward and backward of whole steps. ``largest`` is captured first; other shapes reuse its memory."""

    model: Any
    share: Share
    _: KW_ONLY
    device: torch.device
    processes: int = 1
    sharded: bool = False
    why_not_captured: str = ""
    largest: Batch | None = None

    def __post_init__(self) -> None:
        self.captured: CapturedStep | None = None
        self.last_batch: Batch = {}

    def run(self, step: Step) -> Tensor:
        """Compute the gradients of the whole step. Returns this process's loss and terms, [1 + parts]."""
        batches = [batch | {"counts": step.counts} for batch in step.batches]
        captured = self._begin_captured(batches)
        total: Tensor | None = None  # [1 + parts]
        for batch in batches:
            if captured is None:
                sent = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
                values = self._share(sent)  # [1 + parts]
            else:
                values, sent = captured(batch), captured.held(batch)
            total = values.clone() if total is None else total + values
            self.last_batch = {name: value for name, value in sent.items() if name != "counts"}
        if self.processes > 1 and not self.sharded:
            average_gradients(self.model, self.gradients)
        assert total is not None, "a step has a micro-batch"
        return total

    @property
    def gradients(self) -> Gradients | None:
        """The buffers of captured gradients, if steps are captured."""
        return self.captured.gradients if self.captured is not None else None

    def clip(self, most: float) -> Tensor:
        """Scale the gradients such that their norm is at most this; 0 leaves them. Returns the norm before, []."""
        limit = most or float("inf")
        if self.gradients is not None:
            return self.gradients.clip(limit)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)  # []
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shards

    def forget_gradients(self) -> None:
        """Delete the gradients before the next step, or leave them to the graphs, which write into the same buffers."""
        if self.gradients is None:
            self.model.zero_grad()

    def _share(self, inputs: Batch) -> Tensor:
        return self.share({name: value for name, value in inputs.items() if name != "counts"}, inputs["counts"])

    def _begin_captured(self, batches: list[Batch]) -> CapturedStep | None:
        """Begin a step that runs as graphs; None if it cannot. The reason is logged once."""
        if self.why_not_captured:
            return None
        try:
            if self.captured is None:
                self.captured = CapturedStep(self.model, self._share)
                if self.largest:
                    self.captured.begin([self.largest | {"counts": torch.zeros(2)}])
            self.captured.begin(batches)
        except CannotCapture as reason:
            self.why_not_captured, self.captured = str(reason), None
            self.model.zero_grad()
            logger.warning(NOT_CAPTURED.format(reason))
        return self.captured


def average_gradients(model: Any, buffered: Gradients | None = None) -> None:
    """Replace every gradient by its mean over the processes, with one operation for each type."""
    having = [p for p in model.parameters() if p.grad is not None] if buffered is None else []
    gradients: list[Any] = [parameter.grad for parameter in having]
    buffers = Gradients(having) if buffered is None else buffered  # the same layout with and without graphs
    if gradients:
        torch._foreach_copy_(buffers.views, gradients)
    for buffer in buffers.buffers.values():
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
    if gradients:
        torch._foreach_copy_(gradients, buffers.views)
