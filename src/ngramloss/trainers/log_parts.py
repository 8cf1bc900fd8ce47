"""a stock trainer's events → every term of its objective in its log, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.models.attached.attach import attached_step_loss
from ngramloss.models.attached.callers import calling_loss_func, put_first
from ngramloss.models.attached.heads import bare
from ngramloss.models.attached.step_loss import LastCall, StepLoss, see_inputs, step_loss_of
from ngramloss.output.console import logger


def lower_is_better(args: Any, loss_fn: JointLoss) -> None:
    """Let ``metric_for_best_model`` select a term's lowest value: of names without "loss" it takes the highest."""
    name = (getattr(args, "metric_for_best_model", None) or "").removeprefix("eval_")
    if args.greater_is_better and name in {"ce", *(part.name for part in loss_fn.parts)}:
        args.greater_is_better = False
        logger.info(f"metric_for_best_model={name!r} is a term of the objective, so its lowest value is the best.")


class LogParts(TrainerCallback):
    """Logs each term of the objective, unweighted, next to a stock trainer's ``loss`` and ``eval_loss``.

    The objective is the attached one, or that of ``compute_loss_func=ng.compute_loss_func(...)``. Terms with a schedule
    get the progress of training from here.

    In training a term is the mean over the steps since the last log, like ``loss``. In evaluation it is the exact mean
    over the data set's tokens or sequences, while ``eval_loss`` is the trainer's mean of batch means. With several
    processes a stock trainer repeats rows to fill the last round, and they count here too. :class:`NgramTrainer` logs
    every term itself and counts each row once.

    Args:
        loss_func: what :func:`compute_loss_func` returned. Needed only if the trainer does not keep it as its
            ``compute_loss_func``.

    Example:
        >>> from transformers import Trainer  # doctest: +SKIP
        >>> Trainer(model=ng.attach(model, "ce + matches(2)"), callbacks=[ng.LogParts()], ...)  # doctest: +SKIP
    """

    def __init__(self, loss_func: Any = None) -> None:
        self._function = loss_func
        if loss_func is not None and step_loss_of(loss_func) is None:
            raise TypeError(
                f"LogParts takes what ng.compute_loss_func(...) returned, got {type(loss_func).__name__}. For an "
                "attached model write ng.LogParts()."
            )
        self._steps = 0
        self._trained: dict[str, Tensor] = {}
        self._step: list[LastCall] = []
        self._evaluated: dict[str, Tensor] = {}  # a term → its sum over the data set, and what that is divided by, [2]
        self._evaluates: Any = None
        self._last: LastCall | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move before the reporting callbacks, so that they see the terms: Trainer puts a user's callbacks last."""
        self._begin(kwargs["model"])
        loss_fn = self._step_loss(kwargs["model"]).loss_fn
        lower_is_better(args, loss_fn)
        if loss_fn.progress is None:
            loss_fn.progress = 1.0  # for an evaluation without training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset all sums."""
        self._begin(kwargs["model"])  # again: callbacks that were added later get no `on_init_end`
        self._steps, self._trained, self._step, self._evaluated = 0, {}, [], {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the progress, which weights with a schedule depend on."""
        self._step_loss(kwargs["model"]).loss_fn.progress = state.global_step / max(state.max_steps, 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a micro-batch."""
        self._last = self._step_loss(kwargs["model"]).last
        self._step.append(self._last)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the last micro-batch, and the step."""
        self.on_substep_end(args, state, control, **kwargs)
        for call in self._step:
            # Shares of a step add up over micro-batches and processes; means of micro-batches are averaged.
            weight = _processes() if call.num_tokens is not None else 1 / len(self._step)
            for name, value in call.parts.items():
                self._trained[name] = self._trained.get(name, 0) + value * weight
        self._steps, self._step = self._steps + 1, []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add an evaluation batch."""
        if kwargs.get("eval_dataloader") is not self._evaluates:  # drop an evaluation that was interrupted
            self._evaluates, self._evaluated = kwargs.get("eval_dataloader"), {}
        step_loss = self._step_loss(kwargs["model"])
        call = step_loss.last
        if call is self._last:  # a batch without labels computes no loss
            return
        self._last = call
        for name, (value, count) in step_loss.sums().items():
            self._evaluated[name] = self._evaluated.get(name, 0) + torch.stack([value, count])  # [2]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the terms to the logs and to ``state.log_history``."""
        trains = "loss" in logs and self._steps
        terms = self._of_training(kwargs["model"], args.device) if trains else {}
        add_to_log(terms | self._evaluation(logs), logs, state)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Add the terms to the metrics of ``predict``."""
        metrics |= self._evaluation(metrics)

    def _of_training(self, model: Any, device: torch.device) -> dict[str, float]:
        steps, self._steps = self._steps, 0
        sums, self._trained = _over_processes(self._trained), {}
        return {name: value / _processes() / steps for name, value in sums.items()}

    def take_evaluation(self) -> dict[str, float]:
        """The terms of the evaluation, which are then forgotten: exact means over the data set and all processes."""
        if not self._evaluated:
            return {}
        sums, self._evaluated = _over_processes(self._evaluated), {}
        return {name: value / max(count, 1) for name, (value, count) in sums.items()}

    def _begin(self, model: Any) -> None:
        """Find the objective, or raise. A ``compute_loss_func`` without a model sees the inputs of this one."""
        put_first(self)
        self._function = self._function or calling_loss_func()
        self._step_loss(model)
        if step_loss_of(self._function) is not None:
            see_inputs(self._function, model)

    def _step_loss(self, model: Any) -> StepLoss:
        """The loss that is trained: of a ``compute_loss_func`` of ours, or attached."""
        found = step_loss_of(self._function) or attached_step_loss(model)
        if found is None:
            raise UserError(
                f"LogParts found no objective: this {type(bare(model)).__name__} has none, and the trainer has no "
                "compute_loss_func of ours. Call ng.attach(model, ...) before the trainer is made, or give it "
                "compute_loss_func=ng.compute_loss_func(...)."
            )
        return found

    def _evaluation(self, metrics: Any) -> dict[str, float]:
        """The terms of the evaluation, with the prefix of these metrics."""
        prefix = next((key.removesuffix("_loss") for key in metrics if key.endswith("_loss")), None)
        if prefix in (None, "train"):
            return {}
        return {f"{prefix}_{name}": value for name, value in self.take_evaluation().items()}


def add_to_log(values: dict[str, float], logs: dict[str, Any], state: Any) -> None:
    """Add values to what a trainer is about to log, and to its history."""
    logs |= values
    if state.log_history:
        state.log_history[-1] |= values


def _processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _over_processes(sums: dict[str, Tensor]) -> dict[str, Any]:
    values = torch.stack(list(sums.values()))  # [sums]
    if _processes() > 1:
        torch.distributed.all_reduce(values)
    return dict(zip(sums, values.tolist(), strict=True))
