"""examples and a plan → the numbered steps of a training, from any of them on, made ahead of their use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ngramloss.data.batches.joined import SEVERAL_TURNS, split_turns
from ngramloss.data.batches.padding import Pad, Step, ahead
from ngramloss.data.batches.plan import Joined, LengthGrouped, Lengths, MicroBatch, Plan
from ngramloss.errors import UserError
from ngramloss.loss.stats import IGNORE_INDEX


class ExampleLengths(NamedTuple):
    """Numbers of each example: tokens of its source and longest text, texts, labels and reference texts that count.

    Of a decoder-only model ``sources`` are tokens of the longest row. Examples are sorted by ``order``, which does not
    depend on how texts are joined.
    """

    sources: Lengths
    targets: Lengths
    texts: Lengths | None
    counted: Lengths
    sequences: Lengths
    order: Lengths


def lengths_of(examples: Any, *, joined: Joined = "") -> ExampleLengths:
    """The lengths of examples: those that they know themselves, as prepared tokens do, or those of all rows."""
    knows = hasattr(examples, "lengths") and hasattr(examples, "target_lengths")
    if knows and not (joined and getattr(examples, "has_turns", False)):
        counted = getattr(examples, "label_lengths", examples.target_lengths)
        counted = counted - (examples.lengths == 0) if joined else counted  # the first token of a row is not predicted
        order = examples.lengths + examples.target_lengths if joined else examples.lengths
        sources, texts = order, getattr(examples, "texts", None)
        if joined == "shared":  # at most as many texts of the greatest length
            most = examples.target_lengths * (1 if texts is None else texts)
            sources = examples.lengths + getattr(examples, "all_target_lengths", most)
        return ExampleLengths(sources, examples.target_lengths, texts, counted, (counted > 0).astype(np.int64), order)
    try:
        rows = [examples[row] for row in range(len(examples))]
        if any("segments" in row for row in rows):
            raise UserError("planned steps take one text per row, without `segments`. Leave `segments` out.")
        if foreign := [name for name in ("loss_weights", "loss_scale") if any(name in row for row in rows)]:
            raise UserError(f"rows have {foreign[0]}, which is not read here. Call it weights, one for each label.")
        if joined and rows and (all(_repeats_its_source(row) for row in rows) or _has_only_ignored(rows)):
            raise UserError(
                f"the labels repeat the input_ids, or contain {IGNORE_INDEX}. For a decoder-only model, `input_ids` "
                "are the prompt alone, `labels` the ids that follow it; write ~id for one that is only read."
            )
        numbers = np.array([_joined_lengths(row, joined) if joined else _lengths(row) for row in rows]).reshape(-1, 6)
    except (TypeError, KeyError) as reason:
        raise UserError(
            f"planned steps need examples with a length, whose rows have `input_ids` and `labels` ({reason!r})."
        ) from reason
    sources, targets, texts, counted, sequences, order = numbers.T
    several = any("candidates" in row for row in rows) or bool((texts > 1).any())
    return ExampleLengths(sources, targets, texts if several else None, counted, sequences, order)


def _lengths(row: Mapping[str, Any]) -> tuple[int, ...]:
    texts = [row["labels"], *row.get("candidates", ())]
    counted, source = int((np.asarray(row["labels"]) != IGNORE_INDEX).sum()), len(row["input_ids"])
    return source, max(map(len, texts)), len(texts), counted, int(counted > 0), source


def _repeats_its_source(row: Mapping[str, Any]) -> bool:
    """Whether a row is one for Hugging Face's own loss: the whole text, and labels that are the same ids or −100."""
    ids, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
    return len(ids) == len(labels) and bool(((labels == IGNORE_INDEX) | (ids == labels)).all())


def _has_only_ignored(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the only negative label of all rows is −100, which otherwise is ~99, an id that is not learnt."""
    labels = np.concatenate([np.asarray(row["labels"], np.int64) for row in rows])
    negative = labels[labels < 0]
    return bool(len(negative)) and bool((negative == IGNORE_INDEX).all())


def _joined_lengths(row: Mapping[str, Any], joined: Joined) -> tuple[int, ...]:
    turns = split_turns(row["labels"])[1]
    candidates = [len(ids) for ids in row.get("candidates", ())]
    if candidates and len(turns) > 1:
        raise UserError(SEVERAL_TURNS)
    unpredicted = int(not len(row["input_ids"]) and bool(turns) and turns[0].start == 0)
    learnt = sum(map(len, turns)) - unpredicted
    order = len(row["input_ids"]) + max([len(row["labels"]), *candidates])
    source = len(row["input_ids"]) + len(row["labels"]) + sum(candidates) if joined == "shared" else order
    texts = 1 + len(candidates) if "candidates" in row else max(len(turns), 1)
    sequences = len(turns) - int(bool(turns) and len(turns[0]) == unpredicted)
    return source, max([1, *map(len, turns), *candidates]), texts, learnt, sequences, order


class CannotMakeStep(Exception):
    """The next step cannot be made, in any process; ``reason`` says why. What was trained so far can be saved."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Epochs:
    """The rows of each step of each epoch. The order depends on seed, epoch and step size alone."""

    def __init__(self, sources: Lengths, *, step: int, seed: int, grouped: bool) -> None:
        self.sampler = LengthGrouped(sources, step=step, seed=seed, grouped=grouped)
        self.steps = math.ceil(len(sources) / step)

    def __getitem__(self, epoch: int) -> list[list[int]]:
        self.sampler.set_epoch(epoch)
        rows = list(self.sampler)
        return [rows[start : start + self.sampler.step] for start in range(0, len(rows), self.sampler.step)]


@dataclass
class PlannedSteps:
    """The steps of a training, ``equally_many`` micro-batches in each process, which sharded weights need."""

    examples: Any
    epochs: Epochs
    plan: Plan
    padder: Pad
    _: KW_ONLY
    lengths: ExampleLengths
    total: int
    process: int = 0
    processes: int = 1
    equally_many: bool = False
    copies: int = 1
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.gpu = self.device if self.device is not None and self.device.type == "cuda" else None

    def from_(self, done: int) -> Iterator[Step]:
        """The steps after those that are done, made in a thread ahead of their use."""
        steps = (self.step(rows, number) for number, rows in self.rows_from(done))
        return ahead(steps, begin=bool if self.gpu is None else lambda: torch.cuda.set_device(self.gpu))

    def rows_from(self, done: int) -> Iterator[tuple[int, list[int]]]:
        """The number and the rows, of all processes, of each step after those that are done."""
        while done < self.total:
            epoch, first = divmod(done, self.epochs.steps)
            for rows in self.epochs[epoch][first : first + self.total - done]:
                done += 1
                yield done, rows

    def own(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows of a step that this process has."""
        return rows[self.process :: self.processes]

    def step(self, rows: Sequence[int], number: int = 0) -> Step:
        """What this process does of a step."""
        batches = [self.padder([self.examples[row] for row in piece.rows], piece.size) for piece in self._pieces(rows)]
        if self.gpu is not None:
            batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
        counted = [each[list(rows)].sum() for each in (self.lengths.counted, self.lengths.sequences)]
        counts = torch.tensor(counted, dtype=torch.float32) * self.copies  # [2]
        return Step(batches, counts.pin_memory() if self.gpu is not None else counts, number)

    def _pieces(self, rows: Sequence[int]) -> list[MicroBatch]:
        own = self.plan.cut(self.own(rows))
        if not self.equally_many:
            return own
        most = max(len(self.plan.cut(rows[process :: self.processes])) for process in range(self.processes))
        return own + self.plan.cut([]) * (most - len(own))
