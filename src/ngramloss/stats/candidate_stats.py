"""numbers of K candidates a source → CandidateStats, which the objectives that compare candidates read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CandidateStats(NamedTuple):
    """Everything that an objective may know about the candidates of each source: texts that a model has generated.

    A row may have fewer than K candidates. A ``length`` of 0 says that there is no such candidate; its other numbers
    do not count then, whatever they are. Absent candidates may be at any place.
    """

    logp: Tensor
    """Log-probability of each candidate, the sum over its tokens, with gradient, [B, K]."""
    length: Tensor
    """Number of tokens of each candidate, 0 where there is none, [B, K]."""
    gain: Tensor
    """What each candidate scores against the reference, from 0 to 1, [B, K]."""
    baseline: Tensor | None = None
    """What the greedy output scores, for self-critical training, [B]. No objective reads it yet."""
    greedy: Tensor | None = None
    """Which candidate is the greedy output, if one is, [B, K]. No objective reads it yet."""

    @property
    def present(self) -> Tensor:
        """Whether there is such a candidate, [B, K]."""
        return self.length != 0


def checked_candidates(stats: CandidateStats) -> CandidateStats:
    """The same candidates with ``logp`` in fp32 or better and the rest in its precision; 0 where there is none.

    The joint loss does this once, and objectives read the result. ``gain`` keeps its own precision if that is a
    floating-point one, because rounding could make ties.

    Raises if a shape or dtype is wrong. Values are not checked, which would have to wait for the device.

    Example:
        >>> logp = torch.tensor([[-3.0, float("nan")]], dtype=torch.bfloat16)
        >>> stats = checked_candidates(CandidateStats(logp, torch.tensor([[4, 0]]), torch.tensor([[1, 1]])))
        >>> stats.logp, stats.length, stats.gain
        (tensor([[-3.,  0.]]), tensor([[4., 0.]]), tensor([[1., 0.]]))
    """
    if not isinstance(stats, CandidateStats):
        raise TypeError(f"candidates must be CandidateStats(logp, length, gain), got {type(stats).__name__}.")
    _check_shapes(stats)
    present = stats.present                                              # [B, K]
    dtype = torch.promote_types(stats.logp.dtype, torch.float32)
    gain = stats.gain if stats.gain.is_floating_point() else stats.gain.to(dtype)   # [B, K]
    return CandidateStats(
        stats.logp.to(dtype).where(present, 0.0), stats.length.to(dtype), gain.where(present, 0.0), stats.baseline,
        stats.greedy,
    )


def _check_shapes(stats: CandidateStats) -> None:
    if stats.logp.ndim != 2:
        raise ValueError(f"candidates: `logp` must be [B, K], one row of candidates for each source, got a tensor of "
                         f"shape {list(stats.logp.shape)}.")
    if not stats.logp.is_floating_point():
        raise TypeError(f"candidates: `logp` must be floating point, got {stats.logp.dtype}. It has log-probabilities.")
    for name, given in (("length", stats.length), ("gain", stats.gain)):
        if given.shape != stats.logp.shape:
            raise ValueError(f"candidates: `{name}` must be [B, K] like `logp`, {list(stats.logp.shape)}, got "
                             f"{list(given.shape)}.")
    if stats.greedy is not None and stats.greedy.shape != stats.logp.shape:
        raise ValueError(f"candidates: `greedy` must be [B, K] like `logp`, {list(stats.logp.shape)}, got "
                         f"{list(stats.greedy.shape)}.")
    if stats.baseline is not None and stats.baseline.shape != stats.logp.shape[:1]:
        raise ValueError(f"candidates: `baseline` must be [B], {list(stats.logp.shape[:1])}, got "
                         f"{list(stats.baseline.shape)}.")
