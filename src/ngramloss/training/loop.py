"""a task and settings → a trained model: the loop of everything that is trained here, to be read from top to bottom.

Everything that must survive a stop is in the model, the optimiser, :class:`State`, the moving average and what the task
saves. Random numbers are drawn from seed, step and process, so they need not be saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.data.batches.padding import Batch
from ngramloss.data.batches.planned import CannotMakeStep, PlannedSteps
from ngramloss.errors import UserError
from ngramloss.models.adapters import raise_unless_mergeable
from ngramloss.models.attached.unmasked import as_if_captured
from ngramloss.recipe import Train
from ngramloss.storage.typed import typed
from ngramloss.training import averaging, checkpoints
from ngramloss.training.best import is_better
from ngramloss.training.log import Log, Write
from ngramloss.training.optimiser import set_rates, warmups_of
from ngramloss.training.precision import autocast, restore_scale, scaler_of, update
from ngramloss.training.processes import Processes
from ngramloss.training.running import StepRunner
from ngramloss.training.stopping import Stopping
from ngramloss.training.task import Task


class Diverged(Exception):
    """The loss became NaN or infinite."""


@dataclasses.dataclass
class State:
    """What must survive a stop, besides the model and the optimiser."""

    step: int = 0
    updates: int = 0
    """Steps that changed the weights. fp16 skips one whose gradients are infinite, and the schedule waits."""
    best: float | None = None
    best_step: int | None = None
    ended_early: bool = False
    scale: float = 2.0**16
    """What fp16 multiplies the loss with."""
    scale_grows_in: int = 0
    """Steps since the scale last changed."""
    averages: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """At the end: of ``ema``."""

    def judge(self, value: float, settings: Train, *, higher: bool) -> bool:
        """Keep the best value, or end a training that has not improved for long. Returns whether to save this step."""
        if is_better(value, self.best, higher=higher):
            self.best, self.best_step = value, self.step
            return True
        patience = settings.early_stopping * settings.eval_every
        self.ended_early = patience > 0 and self.step - (self.best_step or 0) >= patience
        return self.ended_early


class TrainingOutcome(NamedTuple):
    """How a training ended."""

    step: int
    total: int
    finished: bool
    continued_from: int
    state: State
    steps: PlannedSteps
    why_not_captured: str


class Around(NamedTuple):
    """What happens around a training. ``saved_with``: file name → text, for each checkpoint, if there is a folder."""

    folder: Path | None = None
    saved_with: Mapping[str, str] = {}
    continued_from: Path | None = None
    logs: Sequence[Write] = ()
    on_step: Callable[[int, Mapping[str, float]], object] = lambda step, line: None


def run(task: Task, settings: Train, here: Processes, around: Around) -> TrainingOutcome:
    """Train. Every process calls this."""
    if around.folder is not None:
        raise_unless_mergeable(task.model)
    task.begin(here)
    model, optimiser, scaler = task.model, task.optimiser(), scaler_of(task.precision, here.device)
    ema = averaging.MovingAverage(model, settings.ema) if settings.ema else None
    steps = task.plan()
    if not steps.total:
        raise UserError("there are no examples to train on.")
    state, checkpoint = State(), around.continued_from
    if checkpoint is not None:
        state = restored(checkpoint, model, optimiser, sharded=settings.fsdp)
        restore_scale(scaler, state.scale, state.scale_grows_in)
        task.restore(checkpoint)
        if ema is not None:
            ema.restore(checkpoint)
    began = saved_at = state.step
    warmups = warmups_of(settings, steps.total)

    def share(batch: Batch, counts: Tensor) -> Tensor:
        """Run forward and backward of a micro-batch's share of the step. Returns its loss and terms, [1 + parts]."""
        with autocast(task.precision, here.device), nullcontext() if runner.why_not_captured else as_if_captured():
            loss, parts = task.loss(batch, counts)
        scaler.scale(loss * here.count).backward()  # gradients are averaged over processes
        return torch.stack([loss.detach(), *parts.values()])

    runner = StepRunner(model, share, device=here.device, processes=here.count, sharded=settings.fsdp)
    runner.why_not_captured, runner.largest = task.why_not_captured, task.largest
    log = Log(around.logs, task.terms, steps, here, since=began)

    def save(*, finished: bool) -> None:
        """Write a checkpoint, if there is a folder for it; at the end, the averages of the weights beside it."""
        if around.folder is not None:
            with log.paused():
                if scaler.is_enabled():
                    state.scale, state.scale_grows_in = scaler.get_scale(), scaler._get_growth_tracker()
                if finished:
                    state.averages = averaging.write(around.folder, task, here, state.step, ema, log)
                more = {**around.saved_with, **task.saved(state.step)}
                checkpoints.save(around.folder, task, optimiser, state, here, settings, more, ema, finished=finished)

    with Stopping(here) as stop:
        try:
            for step in () if state.ended_early else task.steps(steps, began):
                seed_step(settings.seed, step.number, here.rank)
                changing = task.before_step(step.number, steps.total)
                rate, encoder_rate = set_rates(optimiser, settings, state.updates, warmups, steps.total)
                values = runner.run(step)  # [1 + parts]: gradients are now those of the whole step
                scaler.unscale_(optimiser)
                norm = runner.clip(settings.clip)  # []
                updated = update(scaler, optimiser)
                state.step, state.updates = step.number, state.updates + updated
                if ema is not None and updated:
                    ema.update(state.updates)
                runner.forget_gradients()
                log.add(values, step)

                stops, last = stop.asked(step.number), step.number == steps.total
                evaluates = task.validates and (step.ends(settings.eval_every) or last)
                saves = step.ends(settings.save_every) or last or stops
                line: dict[str, float] = {}
                if step.number == 1 or step.ends(settings.log_every) or saves or evaluates:
                    with log.paused():
                        more = {**changing, **task.values(runner.last_batch, log.spent), **encoder_rate}
                        line = log.write(step.number, norm=norm, rate=rate, more=more)
                        raise_if_diverged(line["loss"], step.number, log, fp16=scaler.is_enabled())
                if evaluates:
                    with log.paused():
                        line |= log.write_validation(step.number, task.validate())
                        raise_if_diverged(line["eval_loss"], step.number, log, fp16=scaler.is_enabled())
                    value = line.get(f"eval_{task.best.name}", math.nan)
                    saves |= state.judge(value, settings, higher=task.best.higher)
                if saves:
                    save(finished=last or state.ended_early)
                    saved_at = step.number
                around.on_step(step.number, line)
                if stops or state.ended_early:
                    break
        except CannotMakeStep as reason:
            if state.step > saved_at:  # what was trained since the last checkpoint is not lost
                save(finished=False)
            raise reason.reason from None
    task.end()
    finished = state.step >= steps.total or state.ended_early
    return TrainingOutcome(state.step, steps.total, finished, began, state, steps, runner.why_not_captured)


def restored(checkpoint: Path, model: Any, optimiser: Any, *, sharded: bool) -> State:
    """Give model and optimiser what a checkpoint has of them, and return its state. Raises if it is not one of them."""
    saved = checkpoints.restore(checkpoint, model, optimiser, sharded=sharded)
    path = checkpoint / checkpoints.STATE
    state: State = typed(State, saved, path, checkpoints.AGAIN)
    in_order = state.step >= state.updates >= 0 and state.scale > 0 and state.scale_grows_in >= 0
    if not in_order or state.step != checkpoints.facts(checkpoint)["step"]:
        raise UserError(f"{path} does not belong to this checkpoint: it says step {state.step}. {checkpoints.AGAIN}")
    return state


def seed_step(seed: int, step: int, rank: int) -> None:
    """Set the random numbers of a step. ``torch.manual_seed`` would take 0.2 ms for devices that are not there."""
    number = (seed * 1_000_003 + step) * 4099 + rank
    if not torch.cuda.is_initialized() and torch.accelerator.is_available():  # such as MPS or XPU
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def raise_if_diverged(loss: float, step: int, log: Log, *, fp16: bool) -> None:
    """Stop a training whose loss is NaN or infinite before it is saved. fp16 tolerates two logs: the scale adjusts."""
    log.broken = 0 if math.isfinite(loss) else log.broken + 1
    if log.broken > (2 if fp16 else 0):
        raise Diverged(
            f"the loss became NaN or infinite at step {step}. Lower train.learning_rate, raise train.warmup_steps, or "
            "use bf16 instead of fp16; then start over with --fresh."
        )
