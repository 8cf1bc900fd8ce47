"""weights of several steps → their mean: of the last checkpoints, or a moving average that is kept while training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.recipe import Train
from ngramloss.training import checkpoints

if TYPE_CHECKING:
    from ngramloss.training.log import Log
    from ngramloss.training.processes import Processes
    from ngramloss.training.task import Task

AVERAGE, EMA = "average", "ema"
"""The settings of ``train``, and the folders beside the checkpoints that the averaged models are written to."""


def write(
    folder: Path, task: Task, settings: Train, here: Processes, step: int, ema: MovingAverage | None, log: Log
) -> dict[str, checkpoints.Average]:
    """Validate the averages as a checkpoint is, and write each as a model beside these. Returns ``State.averages``."""
    model, found = task.model, {}
    if settings.average:
        others = members(folder, settings)
        steps = [*map(checkpoints.step, others), step]
        if len(steps) < settings.average:
            mean = f"the mean is that of {len(steps)}" if others else "there is no mean"
            logger.info(
                f"train.average asks for {settings.average} checkpoints, and there are {len(steps)}, so {mean}. "
                f"They are those of every {settings.save_every:,} steps (train.save_every), and the last weights."
            )
        if others:
            found[AVERAGE] = mean_weights(model, others), steps
    if ema is not None:
        found[EMA] = ema.values, [step]
    kept: dict[str, checkpoints.Average] = {}
    for name, (weights, steps) in found.items():
        value: float | None = None
        with exchanged(model, weights):
            if task.validates:
                values = {key.removeprefix("eval_"): value for key, value in task.validate().items()}
                log.write_validation(step, {f"{name}_{key}": value for key, value in values.items()})
                measured = values.get(task.best.name, math.nan)
                value = measured if math.isfinite(measured) else None
            if here.first:
                checkpoints.save_model(folder / name, model, task.tokenizer)
        kept[name] = {"value": value, "steps": steps}
    return kept


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
                f"{checkpoint} has no moving average of the weights that can be read. {checkpoints.AGAIN}"
            ) from reason
        alike = type(saved) is list and len(saved) == len(self.values)
        if not alike or not all(map(checkpoints.is_dense, saved, (own.shape for own in self.values))):
            raise UserError(f"{path} does not have the shapes of the model's weights. {checkpoints.AGAIN}")
        for own, value in zip(self.values, saved, strict=True):
            own.copy_(value)


def members(folder: Path, settings: Train) -> list[Path]:
    """The checkpoints to average, oldest first: only those of ``save_every``, so that a stop changes nothing."""
    saved = checkpoints.regular(folder, settings.save_every)[: settings.average - 1]
    return [path for path in reversed(saved) if not checkpoints.fault(path)]


@torch.no_grad()
def mean_weights(model: Any, others: Sequence[Path]) -> list[Tensor]:
    """The mean of the model's trained weights and those of checkpoints; of adapters, the mean of each factor."""
    parameters = trained(model)
    own = [*parameters, *model.buffers()]  # a checkpoint has buffers, too
    last = [tensor.detach().clone() for tensor in own]
    sums = [_wide(parameter) for parameter in parameters]
    for checkpoint in others:
        checkpoints.load_weights(checkpoint, model)
        torch._foreach_add_(sums, [p.detach().to(total.dtype) for p, total in zip(parameters, sums, strict=True)])
    _copy(own, last)
    torch._foreach_div_(sums, len(others) + 1)
    return sums


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
