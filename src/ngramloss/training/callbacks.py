"""a trainer's events → the log, the progress line, complete checkpoints, and a stop that loses nothing."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ngramloss.files import appended, whole_rows, write_whole
from ngramloss.loss import JointLoss
from ngramloss.recipe import Train
from ngramloss.training import checkpoints
from ngramloss.training.best import is_better


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class Log(TrainerCallback):
    """Writes the log, one JSON object per logging step. Lines after the step that a run continues from are deleted."""

    def __init__(self, path: Path, since: int) -> None:
        self.path = path
        rows = whole_rows(path)
        earlier = [row for row in rows if isinstance(row.get("step"), int) and row["step"] <= since]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in earlier))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a line."""
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        with appended(self.path) as file:
            file.write(json.dumps({"step": state.global_step} | {name: _plain(value) for name, value in logs.items()}))
            file.write("\n")


class Progress(TrainerCallback):
    """A progress line with the step, the remaining time, the loss terms and the speed.

    Args:
        loss_fn: has the terms.
        score: the score of generated texts that validation computes; empty if it computes none.
    """

    def __init__(self, loss_fn: JointLoss, score: str = "") -> None:
        self.parts = [part.name for part in loss_fn.parts]
        self.score = f"eval_{score}"
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the line."""
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", desc="training", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update it."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show terms and speed on it, and validations above it."""
        if self.bar is None:
            return
        if "docs_per_second" in logs:
            terms = [f"{name} {logs[name]:.3f}" for name in self.parts if name in logs]
            self.bar.set_postfix_str(" · ".join([*terms, f"{logs['docs_per_second']:.0f} docs/s"]))
        elif "eval_loss" in logs:
            terms = [f"{name} {logs[f'eval_{name}']:.4f}" for name in ["ce", *self.parts] if f"eval_{name}" in logs]
            if self.score in logs:
                name = self.score.removeprefix("eval_")
                terms.append(f"{name} {logs[self.score]:.2f} (generated in {logs['eval_generation_runtime']:.0f} s)")
            self.bar.write(f"step {state.global_step}: validation {' · '.join(dict.fromkeys(terms))}", file=sys.stderr)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it."""
        if self.bar is not None:
            self.bar.close()


class Sealing(TrainerCallback):
    """Saves each new best and the last step, marks checkpoints as complete, and deletes old ones."""

    def __init__(self, folder: Path, *, keep: int, wait: Callable[[], None], ended: Callable[[], bool]) -> None:
        self.folder, self.keep, self.wait, self.ended = folder, keep, wait, ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log when saving, so that a continued run logs the same values as an uninterrupted one."""
        control.should_log |= control.should_save or control.should_evaluate

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Save a new best, and the last step."""
        if _is_new_best(args, state, metrics) or control.should_training_stop:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the checkpoint as complete when every process has written it; then delete old ones."""
        self.wait()
        if state.is_world_process_zero:
            checkpoint = self.folder / f"checkpoint-{state.global_step}"
            try:
                checkpoints.seal(
                    checkpoint,
                    step=state.global_step,
                    best_step=state.best_global_step,
                    best=state.best_metric,
                    finished=state.global_step >= state.max_steps or self.ended(),
                )
            except OSError as reason:
                raise CheckpointError(f"cannot write {checkpoint}: {reason}.") from reason
            checkpoints.prune(self.folder, keep=self.keep, best=state.best_global_step)
        self.wait()


class Warmup(TrainerCallback):
    """Says that a warm-up is shortened because the training would end before it."""

    def __init__(self, settings: Train, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare both numbers of steps."""
        if self.settings.warmup_steps >= max(state.max_steps, 1):
            self.say(
                f"a warm-up of {self.settings.warmup_steps:,.0f} steps does not end within this training of "
                f"{state.max_steps:,} steps, so it takes a tenth of them, {self.settings.warmup(state.max_steps):,}. A "
                "share, such as train.warmup_steps=0.05, fits every length."
            )


class Finite(TrainerCallback):
    """Stops a run whose loss is NaN or infinite, before it is saved. fp16 tolerates two logs: the scaler may adjust."""

    def __init__(self) -> None:
        self.broken = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Check the training or validation loss."""
        losses = [logs[name] for name in ("loss", "eval_loss") if name in logs]
        if not losses:
            return
        self.broken = 0 if all(math.isfinite(loss) for loss in losses) else self.broken + 1
        if self.broken > (2 if args.fp16 else 0):
            raise FloatingPointError(
                f"the loss became NaN or infinite at step {state.global_step}. Lower train.learning_rate, raise "
                "train.warmup_steps, or use bf16 instead of fp16; then start over with --fresh."
            )


class Patience(TrainerCallback):
    """Stops training after a number of validations without a new best; 0 never stops it.

    It counts by steps, so a continued run keeps counting.
    """

    def __init__(self, validations: int) -> None:
        self.validations = validations
        self.ended = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Check how long ago the best was."""
        if _is_new_best(args, state, metrics):
            return
        if self.validations and state.global_step - (state.best_global_step or 0) >= self.validations * args.eval_steps:
            self.ended = control.should_training_stop = True


class Stopping(TrainerCallback):
    """Finishes and saves the step on Ctrl-C or SIGTERM. A second Ctrl-C stops at once."""

    def __init__(self, *, processes: int, speaks: bool = True) -> None:
        self.asked = self.agreed = False
        self.processes, self.speaks = processes, speaks
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._ask)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if a signal was received."""
        # All processes must stop at the same step. On a GPU this check waits for the step, so it runs less often.
        if self.processes > 1 and state.global_step % (1 if args.device.type == "cpu" else 10) == 0:
            asked = torch.tensor(float(self.asked), device=args.device)  # []
            torch.distributed.all_reduce(asked)
            self.agreed = self.asked = bool(asked.item())
        if self.agreed or (self.processes == 1 and self.asked):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the signal handlers."""
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        if self.speaks:
            tqdm.write("stopping after this step and saving it. Press Ctrl-C again to stop at once.", file=sys.stderr)


def discard_unsealed(folder: Path) -> None:
    """Delete incomplete checkpoints."""
    for path in checkpoints.find(folder).broken:
        checkpoints.delete(path)


def _is_new_best(args: Any, state: Any, metrics: Any) -> bool:
    value = metrics.get(f"eval_{args.metric_for_best_model}", math.nan)
    return state.best_metric is None or is_better(value, state.best_metric, higher=args.greater_is_better)


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
