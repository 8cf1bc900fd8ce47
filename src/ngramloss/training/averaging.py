"""weights of all steps → their moving average, which is kept while training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.training import checkpoints

if TYPE_CHECKING:
    from ngramloss.training.log import Log
    from ngramloss.training.processes import Processes
    from ngramloss.training.task import Task

EMA = "ema"
"""The setting of ``train``, and the folder beside the checkpoints that the averaged model is written to."""


def write(
    folder: Path, task: Task, here: Processes, step: int, ema: MovingAverage | None, log: Log
) -> dict[str, float | None]:
    """Validate the average as a checkpoint is, and write it as a model beside these. Returns ``State.averages``."""
    if ema is None:
        return {}
    value: float | None = None
    with exchanged(task.model, ema.values):
        if task.validates:
            values = {key.removeprefix("eval_"): value for key, value in task.validate().items()}
            log.write_validation(step, {f"{EMA}_{key}": value for key, value in values.items()})
            measured = values.get(task.best.name, math.nan)
            value = measured if math.isfinite(measured) else None
        if here.first:
            checkpoints.save_model(folder / EMA, task.model, task.tokenizer)
    return {EMA: value}


def trained(model: Any) -> list[Any]:
    """The parameters that training changes; tied ones once. All others, and buffers, are those of the last step."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class MovingAverage:
    """After each update, in fp32 or more: ema ← d · ema + (1 − d) · weights, with d = min(decay, t / (9 + t))."""

    def __init__(self, model: Any, decay: float) -> None:
        self.decay, self.parameters = decay, trained(model)
        self.values = [_wide(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the weights after this many updates. Nothing is read from the device."""
        decay = min(self.decay, updates / (9 + updates))
        current = [p.detach().to(own.dtype) for p, own in zip(self.parameters, self.values, strict=True)]
        torch._foreach_lerp_(self.values, current, 1 - decay)

    def restore(self, checkpoint: Path) -> None:
        """Take the values that were saved with a checkpoint. Nothing that is read can run code."""
        path = checkpoint / checkpoints.EMA
        try:
            saved = checkpoints.read_tensors(path)
        except OSError as reason:
            raise UserError(
                f"{checkpoint} has no readable moving average of the weights. {checkpoints.AGAIN}"
            ) from reason
        alike = type(saved) is list and len(saved) == len(self.values)
        if not alike or not all(map(checkpoints.is_dense, saved, (own.shape for own in self.values))):
            raise UserError(f"{path} does not have the shapes of the model's weights. {checkpoints.AGAIN}")
        for own, value in zip(self.values, saved, strict=True):
            own.copy_(value)


@contextmanager
def exchanged(model: Any, weights: Sequence[Tensor]) -> Iterator[None]:
    """Give a model these weights, and its own back at the end. They stay where they are, for graphs that read them."""
    parameters = trained(model)
    own = [parameter.detach().clone() for parameter in parameters]
    _copy(parameters, weights)
    try:
        yield
    finally:
        _copy(parameters, own)


@torch.no_grad()
def _copy(parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, weights, strict=True):
        parameter.copy_(value)


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
