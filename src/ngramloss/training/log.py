"""the terms of each step → lines of the log: means since the last line, diagnostics, documents per second, memory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ngramloss.data.batches.padding import Step
from ngramloss.data.batches.planned import PlannedSteps
from ngramloss.output.console import logger, peak_memory
from ngramloss.output.progress import Progress
from ngramloss.storage.files import appended, whole_rows, write_whole
from ngramloss.training.processes import Processes

Write = Callable[[Mapping[str, float], int], object]


class Log:
    """Adds up what the steps compute, the loss and then ``terms``, and writes it to every log."""

    def __init__(
        self, writers: Sequence[Write], terms: Sequence[str], steps: PlannedSteps, here: Processes, *, since: int
    ) -> None:
        self.writers, self.names, self.steps, self.here = writers, ["loss", *terms], steps, here
        self.broken = 0
        """Lines in a row whose loss is NaN or infinite."""
        self._count_from(since)

    def add(self, values: Tensor, step: Step) -> None:
        """Add the loss and the terms of a step, [1 + parts]. Nothing is read from the device."""
        self._values = values if self._values is None else self._values + values  # [1 + parts]
        self._sequences += float(step.counts[1])

    def write(self, step: int, *, norm: Tensor, rate: float, more: Mapping[str, float]) -> dict[str, float]:
        """Write a line with the means of the steps since the last one. Returns it."""
        assert self._values is not None
        means = (self.here.total(self._values) / (step - self._since)).tolist()  # a step's terms add up over processes
        line = {
            **dict(zip(self.names, means, strict=True)),
            "grad_norm": float(norm),
            "learning_rate": rate,
            "docs_per_second": self._sequences / max(self.spent, 1e-9),
            "memory_gib": peak_memory(self.here.device),
            **more,
            "epoch": step / self.steps.epochs.steps,
        }
        self._write(line, step)
        self._count_from(step)
        return line

    @property
    def spent(self) -> float:
        """Seconds since the last line, without pauses."""
        return (self._pause or time.perf_counter()) - self._began - self._paused

    def write_validation(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Write a line with the terms and scores of a validation. Returns these."""
        self._write({**values, "epoch": step / self.steps.epochs.steps}, step)
        return values

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of a log, a validation or a checkpoint from documents per second."""
        if self.here.device.type == "cuda":
            torch.cuda.synchronize(self.here.device)  # steps that still run there do count
        self._pause = time.perf_counter()
        yield
        self._paused += time.perf_counter() - max(self._pause, self._began)
        self._pause = None

    def _write(self, line: Mapping[str, float], step: int) -> None:
        for writer in self.writers:
            writer(line, step)

    def _count_from(self, step: int) -> None:
        self._since, self._values, self._sequences = step, None, 0.0
        self._began, self._paused = time.perf_counter(), 0.0

    _values: Tensor | None
    _pause: float | None = None  # when the pause began, in one


class LogFile:
    """Writes ``log.jsonl``, an object for each line. Lines after the step that a run continues from are deleted."""

    def __init__(self, path: Path, since: int) -> None:
        self.path = path
        earlier = [row for row in whole_rows(path) if isinstance(row.get("step"), int) and row["step"] <= since]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in earlier))

    def __call__(self, line: Mapping[str, float], step: int) -> None:
        """Write a line; a number that JSON does not have becomes null."""
        plain = {name: value if math.isfinite(value) else None for name, value in line.items()}
        with appended(self.path) as file:
            file.write(json.dumps({"step": step} | plain) + "\n")


def show_lines(progress: Progress, parts: Sequence[str], *, score: str = "") -> Write:
    """What shows lines of the log to the user; ``score``: that of generated texts, if validation computes one."""

    first = progress.done + 1  # loads, compiles and captures: its speed is not that of the training

    def show(line: Mapping[str, float], step: int) -> None:
        if "docs_per_second" in line:
            terms = [f"{name} {line[name]:.3f}" for name in parts if name in line]
            speed = line["docs_per_second"]
            shown = [] if step == first else [f"{speed:.0f} docs/s" if speed >= 10 else f"{speed:.2g} docs/s"]
            progress.update(step - progress.done, note=" · ".join([*terms, *shown]))
        elif "eval_loss" in line:
            terms = [f"{name} {line[f'eval_{name}']:.4f}" for name in ["ce", *parts] if f"eval_{name}" in line]
            if f"eval_{score}" in line:
                seconds = line["eval_generation_runtime"]
                terms.append(f"{score} {line[f'eval_{score}']:.2f} (generated in {seconds:.0f} s)")
            logger.info(f"step {step}: validation {' · '.join(dict.fromkeys(terms))}")

    return show
