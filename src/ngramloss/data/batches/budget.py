"""a model on a GPU and a grid of shapes → the most tokens of a micro-batch that fit into the free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.padding import Batch, Pad
from ngramloss.data.batches.plan import MULTIPLE, Grid, Size

SHARE = 0.8
"""The share of the free memory that micro-batches may take."""


def fitting_tokens(
    model: Any,
    loss: Callable[[Batch], Tensor],
    grid: Grid,
    rows: int,
    padder: Pad,
    device: torch.device,
    *,
    fewest: int = 1,
) -> int:
    """The most tokens of a micro-batch, found by running one and three rows of the longest examples."""
    longest = grid.size(1, grid.sources[-1], grid.targets[-1])
    counts = (fewest, fewest, fewest + 2)
    try:
        peaks = [_peak(model, loss, padder([], longest._replace(rows=count)), device) for count in counts]
    except torch.cuda.OutOfMemoryError:
        if fewest > 1:
            return fitting_tokens(model, loss, grid, rows, padder, device)
        return longest.tokens
    each = max((peaks[2] - peaks[1]) / 2, 1)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = 8 * trained  # the optimiser's two numbers of each weight
    free = torch.cuda.mem_get_info(device)[0] - kept - (peaks[1] - fewest * each)
    fitting = max(1, int(SHARE * free / each))
    if fitting < rows:  # a power of two, so that the split does not change with a little memory
        fitting = 2 ** (fitting.bit_length() - 1)
    return fitting * longest.tokens


def try_batch(model: Any, loss: Callable[[Batch], Tensor], grid: Grid, padder: Pad, device: torch.device) -> None:
    """Run a few rows of the longest examples, for code that is compiled then. The model and random numbers stay.

    The compiler takes sizes that are equal here for always equal. So sources and targets differ from each other and
    from every size of a weight, and there are three rows: few models have three of anything.
    """
    widths = {size for weight in model.parameters() for size in weight.shape}
    source = _unlike(grid.sources[-1], widths)
    target = _unlike(grid.targets[-1], widths | {source})
    _peak(model, loss, padder([], Size(3, source, target, grid.texts, grid.joined)), device)


def _unlike(length: int, others: set[int]) -> int:
    """The greatest length up to this one, in steps of the grid, that is none of the others."""
    return next((each for each in range(length, 0, -MULTIPLE) if each not in others), length)


def _peak(model: Any, loss: Callable[[Batch], Tensor], batch: Batch, device: torch.device) -> int:
    """Bytes that forward and backward of a batch without labels take besides what is allocated already."""
    state = torch.cuda.get_rng_state(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    was_training = model.training
    model.train()
    try:
        loss({name: value.to(device) for name, value in batch.items()}).backward()
        return torch.cuda.max_memory_allocated(device) - before
    finally:
        model.zero_grad()
        model.train(was_training)
        torch.cuda.set_rng_state(state, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
