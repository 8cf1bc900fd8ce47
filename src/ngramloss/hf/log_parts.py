"""a stock trainer's events → every term of the attached objective in its log, in training and in evaluation."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ngramloss.hf.attach import attached_loss, last_call
from ngramloss.hf.step_loss import LastCall
from ngramloss.stats import IGNORE_INDEX


class LogParts(TrainerCallback):
    """Logs each term of the attached objective, unweighted, beside ``loss`` and ``eval_loss`` of a stock trainer.

    In training a term is the mean over the steps since the last log, as ``loss`` is. In evaluation it is the mean over
    the data set's tokens or sequences, whatever the batches, while ``eval_loss`` is the trainer's mean of its batches'
    means. Over several processes a stock trainer repeats rows to fill the last round, and they count here too;
    :class:`NgramTrainer`, which logs every term itself, counts each row once.

    Example:
        >>> from transformers import Trainer  # doctest: +SKIP
        >>> Trainer(model=ng.attach(model, "ce + matches(2)"), callbacks=[ng.LogParts()], ...)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._steps = 0
        self._trained: dict[str, Tensor] = {}
        self._step: list[LastCall] = []
        self._evaluated: dict[str, Tensor] = {}
        self._evaluates: Any = None
        self._last: LastCall | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go before the callbacks that report, so that they see the terms too: Trainer puts a user's callbacks last."""
        handler = sys._getframe(1).f_locals.get("self")
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)
        attached_loss(kwargs["model"])   # raises where there is no objective

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew."""
        self._steps, self._trained, self._step, self._evaluated = 0, {}, [], {}

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a micro-batch."""
        self._step.append(last_call(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the last micro-batch, and the step."""
        self.on_substep_end(args, state, control, **kwargs)
        for call in self._step:
            # A share of the step adds up over micro-batches and processes; a mean of its own is averaged over them.
            weight = _processes() if call.num_tokens is not None else 1 / len(self._step)
            for name, value in call.parts.items():
                self._trained[name] = self._trained.get(name, 0) + value * weight
        self._steps, self._step = self._steps + 1, []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a batch of evaluation."""
        if kwargs.get("eval_dataloader") is not self._evaluates:   # an evaluation that was broken off does not count
            self._evaluates, self._evaluated = kwargs.get("eval_dataloader"), {}
        model = kwargs["model"]
        call = last_call(model)
        if call.labels is None or call is self._last:   # a batch without labels computes no loss
            return
        self._last = call
        real = call.labels != IGNORE_INDEX                               # [B, T]
        counts = {"token": real.sum().float(), "sequence": real.any(-1).sum().float()}   # [] each
        given = {"token": call.num_tokens, "sequence": call.num_sequences}
        divisors = {per: count if given[per] is None else given[per] for per, count in counts.items()}
        sums = {part.name: call.parts[part.name] * divisors[part.per] for part in attached_loss(model).parts}
        for name, value in (sums | counts).items():
            self._evaluated[name] = self._evaluated.get(name, 0) + value

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Put the terms beside the loss, in what is reported and in ``state.log_history``."""
        found: dict[str, float] = {}
        if "loss" in logs and self._steps:
            found = {name: value / _processes() / self._steps for name, value in _over_processes(self._trained).items()}
            self._steps, self._trained = 0, {}
        found |= self._evaluation(logs, kwargs["model"])
        logs |= found
        if state.log_history:
            state.log_history[-1] |= found


    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Put the terms beside the loss of ``predict``."""
        metrics |= self._evaluation(metrics, kwargs["model"])

    def _evaluation(self, metrics: Any, model: Any) -> dict[str, float]:
        """The terms of the evaluation that these metrics are of, under their prefix."""
        prefix = next((key.removesuffix("_loss") for key in metrics if key.endswith("_loss")), None)
        if prefix in (None, "train") or not self._evaluated:
            return {}
        sums, self._evaluated = _over_processes(self._evaluated), {}
        parts = attached_loss(model).parts
        return {f"{prefix}_{part.name}": sums[part.name] / max(sums[part.per], 1) for part in parts}


def _processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _over_processes(sums: dict[str, Tensor]) -> dict[str, float]:
    values = torch.stack(list(sums.values()))                            # [sums]
    if _processes() > 1:
        torch.distributed.all_reduce(values)
    return dict(zip(sums, values.tolist(), strict=True))
