"""a block of logits → running statistics, or its gradient, in plain PyTorch and small slices of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ngramloss.stats.head import Block, Running, Slopes
from ngramloss.stats.labels import IGNORE_INDEX
from ngramloss.stats.token_stats import FAR_BELOW, Texts, cross_labels

SLICE_NUMBERS = {"cpu": 2**18}
"""Approximate number of logits in a slice: on a CPU few enough to stay in its cache, elsewhere 2²⁴."""


def absorb(block: Block, labels: Tensor, running: Running) -> None:
    """Add the block to the running statistics."""
    lse, best_logp, best_token, label_logp, mean_logp, entropy = running
    for rows in _slices(block):
        logits = _exact(block, rows, copy=True)                          # [R, width]
        largest, best = logits.max(-1)                                   # [R] each
        if not block.first:
            newer = largest > lse[rows]                                  # [R]
            best = (best + block.start).where(newer, best_token[rows])   # [R]
            largest = largest.maximum(lse[rows])                         # [R]
        if mean_logp is not None:
            mean_logp[rows] = logits.sum(-1) + (0 if block.first else mean_logp[rows])
        here, column = _label_column(block, labels[rows])                # [R] each
        picked = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)     # [R]
        label_logp[rows] = picked.where(here, 0.0 if block.first else label_logp[rows])
        finite = largest.where(largest > -torch.inf, 0.0)                # [R]
        below = logits.sub_(finite.unsqueeze(-1))                        # [R, width]
        powers = below.exp_() if entropy is None else below.exp()        # [R, width]
        total = powers.sum(-1)                                           # [R]
        if entropy is not None:
            spread = powers.mul_(below.clamp_min_(FAR_BELOW)).sum(-1)    # [R]
            if not block.first:
                drop = (lse[rows] - finite).clamp_min(FAR_BELOW)         # [R]
                spread += drop.exp() * (entropy[rows] + drop * best_logp[rows])
            entropy[rows] = spread
        if not block.first:
            total += best_logp[rows] * (lse[rows] - finite).exp()
        lse[rows], best_logp[rows], best_token[rows] = largest, total, best
    if block.last:
        ignored = labels == IGNORE_INDEX                                 # [N]
        if entropy is not None:
            entropy.div_(best_logp).neg_().add_(best_logp.log()).masked_fill_(ignored, 0.0)
        best_logp.log_().neg_()
        lse.sub_(best_logp)
        best_logp.masked_fill_(ignored, 0.0)
        label_logp.sub_(lse).masked_fill_(ignored, 0.0)
        if mean_logp is not None:
            mean_logp.div_(block.vocabulary).sub_(lse).masked_fill_(ignored, 0.0)


def absorb_cross(block: Block, labels: Tensor, texts: Texts, lse: Tensor, cross_logp: Tensor) -> None:
    """Write the reference tokens' logits of this block to ``cross_logp``; after the last block, turn them into logs."""
    reference = cross_labels(labels, texts)                              # [N, U]
    column = _cross_column(block, reference)                             # [N, U]
    picked = block.space.gather(-1, column).to(lse.dtype)                # [N, U]
    if block.bias is not None:
        picked = picked + block.bias[column.clamp_max(block.width - 1)]  # [N, U]
    if block.softcap is not None:
        picked = (picked / block.softcap).tanh() * block.softcap         # [N, U]
    cross_logp.copy_(picked.where(column < block.width, 0.0 if block.first else cross_logp))
    if block.last:
        cross_logp.sub_(lse.unsqueeze(-1)).masked_fill_(reference == IGNORE_INDEX, 0.0)


def differentiate(block: Block, labels: Tensor, stats: Running, slopes: Slopes) -> None:
    """Overwrite the block's logits with their gradient, and rows or columns that are not real with 0."""
    _, by_best, by_label, by_mean = slopes
    soft = _soft(stats, slopes)                                          # [N]
    for rows in _slices(block):
        logits = _exact(block, rows, copy=False)                         # [R, width]
        curb = None if block.softcap is None else 1 - (logits / block.softcap).square_()   # [R, width]
        gradient = logits.sub_(stats.lse[rows].unsqueeze(-1)).exp_().mul_(soft[rows].unsqueeze(-1))   # [R, width]
        if by_mean is not None:
            gradient += by_mean[rows].unsqueeze(-1) / block.vocabulary
        for slope, ids in ((by_best, stats.best_token), (by_label, labels)):
            if slope is not None:
                here, column = _label_column(block, ids[rows])           # [R] each
                gradient.scatter_add_(-1, column.unsqueeze(-1), slope[rows].where(here, 0.0).unsqueeze(-1))
        if curb is not None:
            gradient.mul_(curb)
        gradient.masked_fill_((labels[rows] == IGNORE_INDEX).unsqueeze(-1), 0.0)
        if gradient.dtype != block.logits.dtype:
            block.logits[rows, : block.width] = gradient
    block.logits[:, block.width :] = 0


def differentiate_cross(
    block: Block, labels: Tensor, texts: Texts, stats: Running, slopes: Slopes, cross_logp: Tensor, by_cross: Tensor
) -> None:
    """Overwrite the gradient of the logits that ``cross_logp`` read with their full gradient, rounded once."""
    if by_cross.numel() == 0:
        return
    reference = cross_labels(labels, texts)                              # [N, U]
    same = texts.labels.unsqueeze(2) == texts.labels.unsqueeze(1)        # [S, U, U]
    first = same.long().argmax(-1)[texts.owner.clamp_min(0)]             # [N, U], all copies of a token share one logit
    total = torch.zeros_like(by_cross).scatter_add(-1, first, by_cross).gather(-1, first)   # [N, U]
    if slopes.best_logp is not None:
        at_best = stats.best_token.unsqueeze(-1) == reference            # [N, U]
        total = total + at_best * slopes.best_logp.unsqueeze(-1)         # [N, U]
    if slopes.label_logp is not None:
        total = total + (labels.unsqueeze(-1) == reference) * slopes.label_logp.unsqueeze(-1)   # [N, U]
    if slopes.mean_logp is not None:
        total = total + slopes.mean_logp.unsqueeze(-1) / block.vocabulary   # [N, U]
    total = total + cross_logp.exp() * _soft(stats, slopes).unsqueeze(-1)   # [N, U]
    if block.softcap is not None:
        total = total * (1 - ((cross_logp + stats.lse.unsqueeze(-1)) / block.softcap) ** 2)   # [N, U]
    block.space.scatter_(-1, _cross_column(block, reference), total.to(block.space.dtype))


def _soft(stats: Running, slopes: Slopes) -> Tensor:
    """The slope of the whole softmax: every log-probability falls when the log-sum-exp grows, [N]."""
    soft = torch.zeros_like(stats.lse) if slopes.lse is None else slopes.lse   # [N]
    for slope in slopes[1:]:
        soft = soft if slope is None else soft - slope                   # [N]
    return soft


def _cross_column(block: Block, reference: Tensor) -> Tensor:
    """The column of each reference token in the block's memory, the last column if it is not there, [N, U]."""
    here, column = _label_column(block, reference)                       # [N, U] each
    return column.where(here, block.space.shape[1] - 1)                  # [N, U]


def _slices(block: Block) -> Iterator[slice]:
    step = max(SLICE_NUMBERS.get(block.logits.device.type, 2**24) // block.width, 1)
    return (slice(start, start + step) for start in range(0, len(block.logits), step))


def _exact(block: Block, rows: slice, *, copy: bool) -> Tensor:
    """A slice of the real logits, in fp32 or better. It uses the block's memory if that is precise enough and allowed.

    Returns:
        [R, width].
    """
    stored = block.logits[rows, : block.width]                           # [R, width]
    logits = stored.to(torch.promote_types(stored.dtype, torch.float32), copy=copy)   # [R, width]
    if block.bias is not None:
        logits += block.bias
    if block.softcap is not None:
        logits.div_(block.softcap).tanh_().mul_(block.softcap)
    return logits


def _label_column(block: Block, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each id is in the block, and its column there, or 0, in the shape of the ids."""
    here = (ids >= block.start) & (ids < block.start + block.width)
    return here, (ids - block.start).where(here, 0)
