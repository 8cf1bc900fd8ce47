"""a trainer's events → the log, the progress line, sealed checkpoints, and a stop that loses nothing."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ngramloss.files import appended, whole_rows, write_whole
from ngramloss.hf.trainer import CheckpointError
from ngramloss.loss import JointLoss
from ngramloss.training import checkpoints


class Log(TrainerCallback):
    """Writes the log, one JSON object a logging step. Lines after the step a run continues from are dropped."""

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
    """One line that tells how far training is, how long it will take, its terms and its speed."""

    def __init__(self, loss_fn: JointLoss) -> None:
        self.parts = [part.name for part in loss_fn.parts]
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the line."""
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", desc="training",
                            dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move it on."""
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
            self.bar.write(f"step {state.global_step}: validation {' · '.join(dict.fromkeys(terms))}", file=sys.stderr)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it."""
        if self.bar is not None:
            self.bar.close()


class Sealing(TrainerCallback):
    """Saves whatever is the best so far and where training ends; seals what was saved; deletes what is not kept."""

    def __init__(self, folder: Path, *, keep: int, wait: Callable[[], None], ended: Callable[[], bool]) -> None:
        self.folder, self.keep, self.wait, self.ended = folder, keep, wait, ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have it logged where it is saved: a run that goes on from here then logs what an undisturbed one does."""
        control.should_log |= control.should_save or control.should_evaluate

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Have a new best saved, and whatever training ends with."""
        best = state.best_metric
        value = metrics.get(f"eval_{args.metric_for_best_model}", math.inf)
        if best is None or value < best or control.should_training_stop:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal what every process has written; then delete what is not kept."""
        self.wait()
        if state.is_world_process_zero:
            checkpoint = self.folder / f"checkpoint-{state.global_step}"
            try:
                checkpoints.seal(
                    checkpoint, step=state.global_step, best_step=state.best_global_step, best=state.best_metric,
                    finished=state.global_step >= state.max_steps or self.ended(),
                )
            except OSError as reason:
                raise CheckpointError(f"{checkpoint} could not be written: {reason}.") from reason
            checkpoints.prune(self.folder, keep=self.keep, best=state.best_global_step)
        self.wait()


class Finite(TrainerCallback):
    """Ends a run whose loss is no number, before that is saved. With fp16 a single one may be the scaler's search."""

    def __init__(self) -> None:
        self.broken = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look at the loss, of training or of validation."""
        figures = [logs[name] for name in ("loss", "eval_loss") if name in logs]
        if not figures:
            return
        self.broken = 0 if all(math.isfinite(figure) for figure in figures) else self.broken + 1
        if self.broken > (2 if args.fp16 else 0):
            raise FloatingPointError(
                f"the loss is no number any more at step {state.global_step}. Lower train.learning_rate, raise "
                "train.warmup_steps, or leave fp16 if it was chosen; then start over with --fresh."
            )


class Patience(TrainerCallback):
    """Ends training after so many validations without a new best, never with 0.

    It counts by steps, so a continued run counts on.
    """

    def __init__(self, validations: int) -> None:
        self.validations = validations
        self.ended = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Look how long ago the best was."""
        if state.best_metric is None or metrics[f"eval_{args.metric_for_best_model}"] < state.best_metric:
            return
        if self.validations and state.global_step - (state.best_global_step or 0) >= self.validations * args.eval_steps:
            self.ended = control.should_training_stop = True


class Stopping(TrainerCallback):
    """On Ctrl-C or SIGTERM the step is finished and saved. A second Ctrl-C stops at once."""

    def __init__(self, *, processes: int, speaks: bool = True) -> None:
        self.asked = self.agreed = False
        self.processes, self.speaks = processes, speaks
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen to the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._ask)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where it was asked for."""
        # All must stop at the same step. On a GPU asking waits for the step, so it is asked less often.
        if self.processes > 1 and state.global_step % (1 if args.device.type == "cpu" else 10) == 0:
            asked = torch.tensor(float(self.asked), device=args.device)   # []
            torch.distributed.all_reduce(asked)
            self.agreed = self.asked = bool(asked.item())
        if self.agreed or (self.processes == 1 and self.asked):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the signals back."""
        self.restore()

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        if self.speaks:
            tqdm.write("stopping after this step, which will be saved. Ctrl-C again stops at once.", file=sys.stderr)


def discard_unsealed(folder: Path) -> None:
    """Delete the checkpoint whose writing failed."""
    for path in checkpoints.find(folder).broken:
        shutil.rmtree(path, ignore_errors=True)


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
