"""examples and a plan → the numbered steps of a training, from any of them on, made ahead of their use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ngramloss.errors import UserError
from ngramloss.stats import IGNORE_INDEX
from ngramloss.steps.padding import Padder, Step, ahead
from ngramloss.steps.plan import LengthGrouped, Lengths, MicroBatch, Plan


class ExampleLengths(NamedTuple):
    """Numbers of each example.

    Attributes:
        sources: source tokens.
        targets: target tokens; with candidates, those of the longest text.
        texts: the reference and the candidates; None if no example has candidates.
        counted: labels of the reference that count.
    """

    sources: Lengths
    targets: Lengths
    texts: Lengths | None
    counted: Lengths


def lengths_of(examples: Any) -> ExampleLengths:
    """The lengths of examples: those that they know themselves, as prepared tokens do, or those of all rows."""
    if hasattr(examples, "lengths") and hasattr(examples, "target_lengths"):
        counted = getattr(examples, "label_lengths", examples.target_lengths)
        return ExampleLengths(examples.lengths, examples.target_lengths, getattr(examples, "texts", None), counted)
    try:
        rows = [examples[row] for row in range(len(examples))]
        if any("segments" in row for row in rows):
            raise UserError("planned steps have one text in a row, and these rows have `segments`. Leave them out.")
        sources = [len(row["input_ids"]) for row in rows]
        targets = [max(len(ids) for ids in (row["labels"], *row.get("candidates", ()))) for row in rows]
        texts = [1 + len(row.get("candidates", ())) for row in rows]
        counted = [int((np.asarray(row["labels"]) != IGNORE_INDEX).sum()) for row in rows]
    except (TypeError, KeyError) as reason:
        raise UserError(
            f"planned steps need examples with a length, whose rows have `input_ids` and `labels` ({reason!r})."
        ) from reason
    several = np.array(texts) if any("candidates" in row for row in rows) else None
    return ExampleLengths(np.array(sources), np.array(targets), several, np.array(counted))


class Epochs:
    """The rows of each step of each epoch. The order depends on seed, epoch and step size alone."""

    def __init__(self, sources: Lengths, *, step: int, seed: int, grouped: bool) -> None:
        self.sampler = LengthGrouped(sources, step=step, seed=seed, grouped=grouped)
        self.steps = math.ceil(len(sources) / step)

    def __getitem__(self, epoch: int) -> list[list[int]]:
        self.sampler.set_epoch(epoch)
        rows = list(self.sampler)
        return [rows[start : start + self.sampler.step] for start in range(0, len(rows), self.sampler.step)]


class PlannedSteps:
    """The steps of a training.

    Args:
        examples: rows with ``input_ids`` and ``labels``.
        epochs: the order of the rows.
        plan: cuts a step into micro-batches.
        padder: makes batches.
        counted: labels that count, of each example.
        total: how many steps there are.
        process: the number of this process.
        processes: how many there are; each takes every n-th row of a step.
        equally_many: fill up with blank micro-batches, so that every process has as many: sharded weights need that.
        pin: keep batches where a GPU can copy them from.
    """

    def __init__(
        self,
        examples: Any,
        epochs: Epochs,
        plan: Plan,
        padder: Padder,
        *,
        counted: Lengths,
        total: int,
        process: int = 0,
        processes: int = 1,
        equally_many: bool = False,
        pin: bool = False,
    ) -> None:
        self.examples, self.epochs, self.plan, self.padder, self.counted = examples, epochs, plan, padder, counted
        self.total, self.process, self.processes = total, process, processes
        self.equally_many, self.pin = equally_many, pin

    def from_(self, done: int, *, begin: Callable[[], object] = bool) -> Iterator[Step]:
        """The steps after those that are done. ``begin`` is called in the thread that makes them."""
        return ahead(self._steps(done), begin=begin)

    def _steps(self, done: int) -> Iterator[Step]:
        while done < self.total:
            epoch, first = divmod(done, self.epochs.steps)
            for rows in self.epochs[epoch][first : first + self.total - done]:
                done += 1
                yield self.step(rows, done)

    def step(self, rows: Sequence[int], number: int = 0) -> Step:
        """What this process does of a step."""
        batches = [self.padder([self.examples[row] for row in piece.rows], piece.size) for piece in self._pieces(rows)]
        if self.pin:
            batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
        labels = self.counted[list(rows)]  # [rows]
        counts = torch.tensor([labels.sum(), (labels > 0).sum()], dtype=torch.float32)  # [2]
        return Step(batches, counts, number)

    def _pieces(self, rows: Sequence[int]) -> list[MicroBatch]:
        own = self.plan.cut(rows[self.process :: self.processes])
        if not self.equally_many:
            return own
        most = max(len(self.plan.cut(rows[process :: self.processes])) for process in range(self.processes))
        return own + self.plan.cut([]) * (most - len(own))
