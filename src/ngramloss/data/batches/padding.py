"""rows of token ids → padded batches of an encoder-decoder; batches made ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from struct import pack
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngramloss.data.batches.plan import Size
from ngramloss.errors import UserError
from ngramloss.loss.stats import ANCHORS, BESIDE_LABELS, IGNORE_INDEX, WEIGHTS

Batch = dict[str, Tensor]


class Pad(Protocol):
    """Rows, and the size to fill up to, → a batch. Without a size it is the smallest that holds them."""

    def __call__(self, rows: Sequence[dict[str, Any]], size: Size | None = None) -> Batch:
        """Make the batch."""


Item = TypeVar("Item")


@dataclass
class Padder:
    """Collate rows into a batch: pad ids, pad labels with −100, derive ``decoder_input_ids`` from the labels.

    If rows have ``candidates``, lists of ids, and ``scores``, the batch has ``candidates`` [B, K, T], with −100 where
    there is none, ``candidate_inputs`` [B, K, T] and ``scores`` [B, K]. If they have numbers beside their labels,
    ``lm_logp`` or ``weights``, the batch has them in the shape of the labels, with 0 where there is none.

    Attributes:
        pad: padding id for sources.
        decoder_inputs: labels [B, T] → the decoder's input, [B, T]. Some rows may have no labels.
        multiple: where no size is given, lengths are rounded up to a multiple of this.
        always_mask: False leaves out the ``attention_mask`` of a batch without padding, so that attention takes its
            fastest kernel. While a CUDA graph is captured, transformers replaces a missing mask by one of ones, with
            which attention takes its slowest.
        beside: the names of numbers beside the labels that every batch has, also one without rows; without it, those
            that the rows have.
        own: those of ``OWN_TEXTS`` that every batch with candidates has.
        start: the token that candidates start with, if the model has written them; without it, inputs are derived from
            their labels as for the reference.
        forced: whether the first token of candidates was forced and not drawn: it is read, but is no label.
    """

    pad: int
    decoder_inputs: Callable[[Tensor], Tensor]
    _: KW_ONLY
    multiple: int = 1
    always_mask: bool = False
    beside: Collection[str] | None = None
    own: Collection[str] = ()
    start: int | None = None
    forced: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]], size: Size | None = None) -> Batch:
        """Collate these rows to this size or the smallest. Rows that fill it up have one source token and no labels."""
        size = size or self._smallest(rows)
        ids, mask = padded([row["input_ids"] for row in rows], self.pad, size.rows, size.source)  # [B, S]
        labels, _ = padded([row["labels"] for row in rows], IGNORE_INDEX, size.rows, size.target)  # [B, T]
        mask[len(rows) :, 0] = 1
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        batch["decoder_input_ids"] = self.decoder_inputs(batch["labels"])  # [B, T]
        for name in names_beside(rows, self.beside):
            numbers = np.zeros((size.rows, size.target), np.float32)  # [B, T]
            for index, row in enumerate(rows):
                numbers[index, : len(row["labels"])] = numbers_beside(row, name)
            batch[name] = torch.from_numpy(numbers)  # [B, T]
        if size.texts > 1:
            batch |= self._candidates(rows, size)
        if self.always_mask or not mask.all():
            batch["attention_mask"] = torch.from_numpy(mask)  # [B, S]
        return batch

    def _smallest(self, rows: Sequence[dict[str, Any]]) -> Size:
        """The smallest size that holds these rows; if they have candidates, with room for one at least."""
        texts = [[row["labels"], *row.get("candidates", ())] for row in rows]
        source = max((len(row["input_ids"]) for row in rows), default=1)
        target = max((len(ids) for group in texts for ids in group), default=1)
        most = max((len(group) for group in texts), default=1)
        source, target = (-(-length // self.multiple) * self.multiple for length in (source, target))
        return Size(max(len(rows), 1), source, target, max(most, 2) if any("candidates" in row for row in rows) else 1)

    def _candidates(self, rows: Sequence[dict[str, Any]], size: Size) -> Batch:
        K = size.texts - 1
        labels = np.full((size.rows, K, size.target), IGNORE_INDEX)  # [B, K, T]
        scores = np.zeros((size.rows, K), np.float32)  # [B, K]
        for index, row in enumerate(rows):
            texts, values = candidates_of(row)
            labels[index], _ = padded(texts, IGNORE_INDEX, K, size.target)
            scores[index, : len(texts)] = values
        ids = torch.from_numpy(labels)  # [B, K, T]
        made = {"candidates": ids, "candidate_inputs": self._inputs(ids), "scores": torch.from_numpy(scores)}
        ids[..., : int(self.forced)] = IGNORE_INDEX
        return made | of_own_texts(rows, self.own, size.rows, K)

    def _inputs(self, ids: Tensor) -> Tensor:
        if self.start is None:
            return self.decoder_inputs(ids.flatten(0, 1)).view(ids.shape)
        # mBART would start with the last label, which a text that the model has written lacks.
        read = torch.cat([torch.full_like(ids[..., :1], self.start), ids[..., :-1]], -1)  # [B, K, T]
        return read.masked_fill(read == IGNORE_INDEX, self.pad)


OWN_TEXTS = ("greedy", "baseline")
"""What batches of the model's own texts may have: which is the greedy one, [B, K], and what it scores, [B]."""


def of_own_texts(rows: Sequence[Mapping[str, Any]], names: Collection[str], B: int, K: int) -> Batch:
    """Those of ``OWN_TEXTS`` that are named, of B rows with K candidates."""
    made: Batch = {}
    if "greedy" in names:
        made["greedy"] = torch.zeros(B, K, dtype=torch.bool)  # [B, K]
        made["greedy"][: len(rows), 0] = True
    if "baseline" in names:
        made["baseline"] = torch.zeros(B)  # [B]
        made["baseline"][: len(rows)] = torch.tensor([row["baseline"] for row in rows])
    return made


def candidates_of(row: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[float]]:
    """The ids of each candidate of a row, and their scores. Raises unless there are as many."""
    texts, scores = row.get("candidates", ()), row.get("scores", ())
    if len(texts) != len(scores):
        raise UserError(f"lengths differ: a row has {len(texts)} candidates and {len(scores)} scores.")
    return texts, scores


def names_beside(rows: Sequence[Mapping[str, Any]], expected: Collection[str] | None) -> list[str]:
    """The names of the numbers beside the labels of rows. Raises if rows have others than expected."""
    found = [name for name in BESIDE_LABELS if any(name in row for row in rows)]
    if expected is None:
        return found
    if unread := next((name for name in found if name not in (*expected, WEIGHTS)), ""):
        if unread == ANCHORS:
            raise UserError("some rows have anchors, and the first row has none. Give them to all rows, or to none.")
        raise UserError(f"the rows have {unread}, which no term of the objective reads. Leave it out.")
    return [*expected, *(name for name in found if name not in expected)]


def numbers_beside(row: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    """The numbers beside the labels of a row. Raises unless there is one for each label; a row may have no weights."""
    if name == WEIGHTS and name not in row:
        return np.ones(len(row["labels"]), np.float32)
    if name not in row:
        raise UserError(f"a row has no {name}, which the objective reads: a number for each of its labels.")
    numbers = np.asarray(row[name], np.float32)  # [T]
    if len(numbers) != len(row["labels"]):
        what = name if name == WEIGHTS else f"numbers of {name}"
        raise UserError(f"lengths differ: a row has {len(row['labels'])} labels and {len(numbers)} {what}.")
    return numbers


def padded(
    rows: Sequence[Any], fill: int, count: int | None = None, length: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of ids, filled up on the right to the smallest or the given size, and a mask of what is real."""
    count, length = count or len(rows), length or max(map(len, rows), default=1)
    padded = np.full((count, length), fill)  # [B, S]
    mask = np.zeros_like(padded)  # [B, S]
    for index, row in enumerate(rows):
        # Given a list, NumPy takes twice as long.
        ids = np.frombuffer(pack(f"{len(row)}q", *row), np.int64) if isinstance(row, list) else row  # [S]
        padded[index, : len(row)] = ids
        mask[index, : len(row)] = 1
    return padded, mask


class Step(NamedTuple):
    """What one process does in an optimiser step; ``counts`` are tokens and sequences over all processes, [2]."""

    batches: list[Batch]
    counts: Tensor
    number: int = 0

    def ends(self, every: int) -> bool:
        """Whether this step is the last of ``every`` steps; never if that is 0."""
        return bool(every) and self.number % every == 0


def ahead(items: Iterator[Item], *, by: int = 2, begin: Callable[[], object] = bool) -> Iterator[Item]:
    """The same items, made in a thread while the caller works on earlier ones. ``begin`` is called in that thread."""
    end: Any = object()
    with ThreadPoolExecutor(1, initializer=begin) as maker:
        waiting = deque(maker.submit(next, items, end) for _ in range(by))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(maker.submit(next, items, end))
            yield item
