"""lengths of examples → the steps of an epoch, each cut into micro-batches of few shapes.

Any split of a step gives the same gradient. A new shape costs set-up in every library, and a captured step needs one
graph for each shape, so on a GPU micro-batches are filled up with rows that have no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

Lengths = NDArray[np.int64]
Joined = Literal["", "turns", "repeated", "shared"]
"""How a source and its texts stand in the rows of a decoder-only model; empty is an encoder-decoder.

``turns``: the source, then what follows it, of which only turns may be learnt. ``repeated``: likewise, and each
candidate is a row of its own with the source before it. ``shared``: the source once, then the reference and all
candidates, one directly behind the other."""
POOL = 50  # Number of steps whose rows are sorted by length together
COARSE, FINE = (12, 2), (24, 3)
"""Most source and target lengths of a grid; shapes are their pairs. A fine one pads less, but has more to capture."""
LONG = 40_000
"""Steps of a training that makes up for a fine grid: with BART-base on XSum's lengths it saves 1 ms of 28 a step, and
its captures take as long as 500 steps."""
OPEN = 4
"""Most lengths of each axis of a grid for texts that are written later: each is half of the next, as a new shape costs
more than some padding."""
MULTIPLE = 8
"""Lengths of a grid are multiples of this, which suits the matrix units of a GPU."""


def data_seed(args: Any) -> int:
    """The seed of the order of the rows: the trainer's ``data_seed``, which may be 0; if it has none, its ``seed``."""
    return int(args.seed if args.data_seed is None else args.data_seed)


class LengthGrouped(Sampler[int]):
    """Row numbers in random order, with similar lengths in a step, by seed, epoch and rows of a step alone."""

    def __init__(self, lengths: Sequence[int] | Lengths, *, step: int, seed: int, grouped: bool = True) -> None:
        self.lengths = torch.as_tensor(lengths)  # [rows]
        self.step, self.seed, self.grouped, self.epoch = step, seed, grouped, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        source = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=source)  # [rows]
        if not self.grouped:
            yield from order.tolist()
            return
        pools = [
            pool[self.lengths[pool].argsort(descending=True, stable=True)] for pool in order.split(POOL * self.step)
        ]
        steps = list(torch.cat(pools).split(self.step)) if pools else []
        # A short last step stays last: elsewhere it would shift the rows of every later step.
        whole = [rows for rows in steps if len(rows) == self.step]
        rest = [rows for rows in steps if len(rows) < self.step]
        for index in torch.randperm(len(whole), generator=source).tolist():
            yield from whole[index].tolist()
        for rows in rest:
            yield from rows.tolist()


class Size(NamedTuple):
    """The size of a micro-batch. ``rows`` counts sources; of a decoder-only model ``source`` is a length with texts.

    ``texts`` are those of each source: the reference and its candidates, or the turns of an assistant.
    """

    rows: int
    source: int
    target: int
    texts: int = 1
    joined: Joined = ""

    @property
    def tokens(self) -> int:
        """All its positions."""
        if not self.joined:
            return self.rows * (self.source + self.texts * self.target)
        return self.rows * self.source * (self.texts if self.joined == "repeated" else 1)


class MicroBatch(NamedTuple):
    """Row numbers, and the size to fill up to; None is the smallest that holds them."""

    rows: list[int]
    size: Size | None


@dataclass(frozen=True)
class Grid:
    """The lengths to which sources and targets are padded, ascending; texts of each source, and how they are joined."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    texts: int = 1
    joined: Joined = ""

    def source(self, length: int) -> int:
        """The smallest that holds a source of this length."""
        return self.sources[int(np.searchsorted(self.sources, length))]

    def target(self, length: int) -> int:
        """The smallest that holds a target of this length."""
        return self.targets[int(np.searchsorted(self.targets, length))]

    def size(self, rows: int, source: int, target: int) -> Size:
        """The smallest that holds this many rows with sources and targets of these lengths."""
        return Size(rows, self.source(source), self.target(target), self.texts, self.joined)


@dataclass(frozen=True)
class Plan:
    """How rows of a step become micro-batches of ``max_tokens``; lengths and texts are as in ``ExampleLengths``."""

    sources: Lengths
    targets: Lengths
    most_rows: int
    max_tokens: int | None = None
    grid: Grid | None = None
    texts: Lengths | None = None
    joined: Joined = ""

    def cut(self, rows: Sequence[int]) -> list[MicroBatch]:
        """The micro-batches of these rows: at least one, even without rows, so that no process is without one."""
        if self.grid is None and not len(rows):
            return [MicroBatch([], self._blank)]
        if self.grid is None and self.max_tokens is None:
            pieces = [list(rows[start : start + self.most_rows]) for start in range(0, len(rows), self.most_rows)]
            return [MicroBatch(piece, None) for piece in pieces]
        if self._by_cost:
            return self._cut_by_cost(rows)
        ordered = sorted(rows, key=lambda row: -self.sources[row])
        batches: list[MicroBatch] = []
        while ordered or not batches:
            longest = int(self.sources[ordered[0]]) if ordered else 1
            taken = self._rows_at(longest, self.grid.targets[-1], len(rows)) if self.grid else self._fitting(ordered)
            piece, ordered = ordered[:taken], ordered[taken:]
            target = int(self.targets[piece].max()) if piece else 1
            batches.append(MicroBatch(piece, self.grid.size(taken, longest, target) if self.grid else None))
        return batches

    def with_lengths(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> Plan:
        """The same plan with other lengths of these rows, which the grid must hold."""
        changed = self.sources.copy(), self.targets.copy()
        for lengths, new in zip(changed, (sources, targets), strict=True):
            lengths[list(rows)] = new
        return replace(self, sources=changed[0], targets=changed[1])

    @property
    def _by_cost(self) -> bool:
        """Whether rows with most tokens come first: in an encoder-decoder one long candidate would pad all others."""
        return self.grid is not None and self.grid.texts > 1 and not self.joined

    def _cut_by_cost(self, rows: Sequence[int]) -> list[MicroBatch]:
        assert self.grid is not None
        ordered = sorted(rows, key=lambda row: -self._smallest([row]).tokens)
        batches: list[MicroBatch] = []
        while ordered or not batches:
            held, grown = (0, 0), self._held(ordered[:1])
            while held != grown:  # longer sources or texts among the next rows may leave room for fewer
                held, piece = grown, ordered[: self._rows_at(*grown, len(rows))]
                longest = self._held(piece)
                grown = max(held[0], longest[0]), max(held[1], longest[1])
            batches.append(MicroBatch(piece, self.grid.size(self._rows_at(*held, len(rows)), *held)))
            ordered = ordered[len(piece) :]
        return batches

    def _held(self, piece: Sequence[int]) -> tuple[int, int]:
        assert self.grid is not None
        if not len(piece):
            return self.grid.sources[0], self.grid.targets[0]
        return self.grid.source(int(self.sources[piece].max())), self.grid.target(int(self.targets[piece].max()))

    def sizes(self, step: int) -> list[Size]:
        """Every size that steps of this many rows can have, the largest first."""
        assert self.grid is not None
        most = self.grid.targets[-1]
        sizes = [
            self.grid.size(self._rows_at(source, target if self._by_cost else most, step), source, target)
            for source in self.grid.sources
            for target in self.grid.targets
        ]
        return sorted(sizes, key=lambda size: -size.tokens)

    def _rows_at(self, source: int, target: int, step: int) -> int:
        """Rows of a micro-batch with these greatest lengths, such that a step's micro-batches are equal."""
        assert self.grid is not None
        fitting = self.most_rows
        if self.max_tokens is not None:
            fitting = min(fitting, max(1, self.max_tokens // self.grid.size(1, source, target).tokens))
        full = max(self.most_rows, step)
        return -(-full // -(-full // fitting))

    def _fitting(self, ordered: Sequence[int]) -> int:
        """How many of these rows, longest first, a micro-batch without a grid can hold."""
        assert self.max_tokens is not None
        target, texts = 0, 1
        for count, row in enumerate(ordered):
            target, texts = max(target, int(self.targets[row])), max(texts, self._texts([row]))
            size = Size(count + 1, int(self.sources[ordered[0]]), target, texts, self.joined)
            if count and size.tokens > self.max_tokens:
                return count
        return len(ordered)

    @property
    def _blank(self) -> Size | None:
        return None if self.texts is None else Size(1, 1, 1, 2, self.joined)

    def _texts(self, rows: Sequence[int]) -> int:
        """The most texts of one of these rows; with candidates, room for one at least."""
        return 1 if self.texts is None else max(int(self.texts[rows].max()), 2)

    def padding(self, steps: Sequence[Sequence[int]]) -> float:
        """The share of positions of these steps that are padding; texts of a source count like the longest of them."""
        real = sum(self._smallest([row]).tokens for rows in steps for row in rows)
        micro = [batch for rows in steps for batch in self.cut(rows)]
        return 1 - real / sum((batch.size or self._smallest(batch.rows)).tokens for batch in micro)

    def _smallest(self, rows: Sequence[int]) -> Size:
        longest = int(self.sources[rows].max()), int(self.targets[rows].max())
        return Size(len(rows), *longest, self._texts(rows), self.joined)


def most_lengths(steps: int) -> tuple[int, int]:
    """Most source and target lengths of a grid, in a training with this many captured steps.

    >>> most_lengths(5_000), most_lengths(60_000)
    ((12, 2), (24, 3))
    """
    return FINE if steps >= LONG else COARSE


def fitted_grid(
    sources: Lengths,
    targets: Lengths,
    steps: Sequence[Sequence[int]],
    *,
    longest: int | None = None,
    texts: int = 1,
    joined: Joined = "",
    most: tuple[int, int] = COARSE,
) -> Grid:
    """The grid that wastes the fewest positions in these steps and holds every example."""
    limit = longest or 2**62
    axes = []
    for lengths, number in zip((sources, targets), most, strict=True):
        highest = max(int(lengths.max()), 1)
        tops = np.array([int(lengths[list(rows)].max()) for rows in steps] + [highest])
        axes.append(tuple(min(bound, max(limit, highest)) for bound in bounds(tops, number)))
    return Grid(axes[0], axes[1], texts, joined)


def open_grid(
    lengths: Lengths, longest_text: int, *, longest: int | None = None, texts: int, joined: Joined = ""
) -> Grid:
    """A grid for texts that are not written yet: it holds every source, with texts of the greatest length."""
    targets = [-(-longest_text // MULTIPLE) * MULTIPLE]
    while targets[-1] > 2 * MULTIPLE and len(targets) < OPEN:
        targets.append(-(-targets[-1] // 2 // MULTIPLE) * MULTIPLE)
    targets.reverse()
    if joined:  # a row is a prompt with a text of any length, or with all texts
        behind = texts if joined == "shared" else 1
        tops = np.concatenate([lengths + behind * target for target in targets])
        tops = np.append(tops[tops <= np.quantile(tops, 0.99)], lengths.max() + behind * longest_text)
    else:
        tops = lengths
    axes = [
        tuple(min(bound, max(longest or 2**62, highest)) for bound in axis)
        for axis, highest in ((bounds(tops, OPEN), int(tops.max())), (targets, longest_text))
    ]
    return Grid(axes[0], axes[1], texts, joined)


def bounds(lengths: Lengths, most: int) -> list[int]:
    """At most ``most`` multiples of 8, the last of which holds every length, with the least total rounding up.

    >>> bounds(np.array([3, 9, 10, 30, 31]), 2)
    [16, 32]
    """
    rounded, counts = np.unique(-(-np.maximum(lengths, 1) // MULTIPLE) * MULTIPLE, return_counts=True)
    # waste[i][j]: of rounding the lengths i … j up to the j-th
    before = np.concatenate([[0], np.cumsum(counts)])
    total = np.concatenate([[0], np.cumsum(counts * rounded)])
    best = np.array([rounded[j] * before[j + 1] - total[j + 1] for j in range(len(rounded))])
    starts: list[list[int]] = [[0] * len(rounded)]
    for _ in range(min(most, len(rounded)) - 1):
        chosen, worth = [], []
        for j in range(len(rounded)):
            cost = [
                rounded[j] * (before[j + 1] - before[i]) - (total[j + 1] - total[i]) + (best[i - 1] if i else 0)
                for i in range(j + 1)
            ]
            chosen.append(int(np.argmin(cost)))
            worth.append(cost[chosen[-1]])
        starts.append(chosen)
        best = np.array(worth)
    ends, end = [], len(rounded) - 1
    for chosen in reversed(starts):
        ends.append(int(rounded[end]))
        end = chosen[end] - 1
        if end < 0:
            break
    return sorted(ends)
