"""TokenStats → objectives of windows, value and gradient in one Triton kernel each.

One program processes one sequence. :mod:`matches`, :mod:`rewards` and :mod:`precision` compare its windows pairwise, so
T must be at most :data:`LONGEST` and n at most :data:`MOST_N`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngramloss.loss.objectives.windows.matches import most_counted
from ngramloss.loss.objectives.windows.rewards import by_twin
from ngramloss.loss.stats import IGNORE_INDEX, TokenStats

LONGEST = 512
MOST_N = 16  # loops over n are unrolled, so compile time grows with n; above this limit the PyTorch formula runs
IGNORE = tl.constexpr(IGNORE_INDEX)


def _is_short(stats: TokenStats, n: int) -> bool:
    return stats.lse.shape[1] <= LONGEST and n <= MOST_N


class Kernel(NamedTuple):
    """A formula of the windows of the most probable tokens."""

    placed: bool = False
    precise: bool = False
    released: bool = False
    shared: bool = True  # whether equal windows share one reward
    twin: bool = False  # whether the twin predicts the windows

    def serves(self, stats: TokenStats, *, n: int) -> bool:
        """Whether the kernel supports rows and windows of this length."""
        return _is_short(stats, n)

    def __call__(self, stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
        """The value of the formula, [B], with its gradient."""
        stats = by_twin(stats) if self.twin else stats
        value: Tensor = _Best.apply(stats.best_logp, stats.best_token, labels, n, self)
        return value


matches = Kernel()
matches_released = Kernel(released=True)
rewards = Kernel(placed=True)
precision = Kernel(precise=True)
precision_released = Kernel(precise=True, released=True)
gated = Kernel(placed=True, shared=False)
rewards_twin, gated_twin = rewards._replace(twin=True), gated._replace(twin=True)


class LabelKernel(NamedTuple):
    """A formula of the windows of the reference's tokens: ``soft`` with ``kappa``, or ``near`` with ``power``."""

    power: float = 0.0  # of ``near``, if it is not given; ``soft`` has none

    def serves(self, stats: TokenStats, *, n: int) -> bool:
        """Whether the kernel supports rows and windows of this length."""
        return _is_short(stats, n)

    def __call__(
        self, stats: TokenStats, labels: Tensor, *, n: int, kappa: float | None = None, power: float | None = None
    ) -> Tensor:
        """The value of the formula, [B], with its gradient."""
        exponent, power = 1.0 if kappa is None else kappa / n, self.power if power is None else power
        value: Tensor = _Label.apply(stats.label_logp, stats.best_logp.detach(), labels, n, exponent, power)
        return value


soft = LabelKernel()
near = LabelKernel(power=4.0)


class _Sloped(torch.autograd.Function):
    """A formula whose forward saves the slope of its first argument, the only one with a gradient."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return by_value.unsqueeze(-1) * slope, *[None] * (len(ctx.needs_input_grad) - 1)


class _Best(_Sloped):
    @staticmethod
    def forward(ctx: Any, best_logp: Tensor, best_token: Tensor, labels: Tensor, n: int, kernel: Kernel) -> Tensor:
        value, slope, earned = _results(best_logp)
        B, T = labels.shape
        if n > T:   # no window: nothing to launch
            value.fill_(0.0 if kernel.precise else 1.0)
            slope.zero_()
        elif B:
            _windows[(B,)](
                best_logp.contiguous(), best_token.contiguous(), labels.contiguous(), value, slope, earned, T,
                N=n, PLACED=kernel.placed, PRECISE=kernel.precise, RELEASED=kernel.released, SHARED=kernel.shared,
                MOST=(kernel.released and most_counted(n)) or 0, BLOCK=triton.next_power_of_2(T), PAIRED=32,
                num_warps=8,
            )
        ctx.save_for_backward(slope)
        return value


class _Label(_Sloped):
    @staticmethod
    def forward(
        ctx: Any, label_logp: Tensor, best_logp: Tensor, labels: Tensor, n: int, exponent: float, power: float
    ) -> Tensor:
        value, slope, earned = _results(label_logp)
        B, T = labels.shape
        if n > T:   # no window: nothing to launch
            value.fill_(1.0)
            slope.zero_()
        elif B:
            _label_windows[(B,)](
                label_logp.contiguous(), best_logp.contiguous(), labels.contiguous(), value, slope, earned, T,
                float(exponent), float(power), N=n, WEIGHTED=power != 0, BLOCK=triton.next_power_of_2(T), num_warps=4,
            )
        ctx.save_for_backward(slope)
        return value


def _results(logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for values, [B], slopes and what each window earns, [B, T] each."""
    return logp.new_empty(len(logp)), torch.empty_like(logp), torch.empty_like(logp)


@triton.jit
def _equal(one, other, t, s, T, N: tl.constexpr):
    """Whether window t of one sequence equals window s of the other, for a column of t and a row of s."""
    equal = tl.load(one + t, mask=t < T, other=-1) == tl.load(other + s, mask=s < T, other=-2)
    for i in tl.static_range(1, N):
        equal &= tl.load(one + t + i, mask=t + i < T, other=-1) == tl.load(other + s + i, mask=s + i < T, other=-2)
    return equal


@triton.jit
def _real(labels, t, T, N: tl.constexpr):
    """Whether each window has tokens only."""
    real = t + N <= T
    for i in tl.static_range(0, N):
        real = real & (tl.load(labels + t + i, mask=t + i < T, other=IGNORE) != IGNORE)
    return real


@triton.jit
def _total(logp, t, T, N: tl.constexpr):
    total = tl.zeros(t.shape, tl.float32)
    for i in tl.static_range(0, N):
        total += tl.load(logp + t + i, mask=t + i < T, other=0.0)
    return total


@triton.jit
def _probability(logp, labels, t, T, N: tl.constexpr):
    """Probability of each window, and 1 if it is real, 0 otherwise."""
    real = _real(labels, t, T, N)
    return tl.where(real, tl.exp(_total(logp, t, T, N)), 0.0), real.to(tl.int32)


@triton.jit
def _store_slopes(slope, earned, amount, t, T, N: tl.constexpr, BLOCK: tl.constexpr):
    """A token's slope is minus what the n windows over it earn."""
    tl.store(earned + t, amount, mask=t < T)
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(0, N):
        total -= tl.load(earned + t - i, mask=(t >= i) & (t < T), other=0.0)
    tl.store(slope + t, total, mask=t < T)


@triton.jit
def _label_windows(
    logp, best, labels, value, slope, earned, T, exponent, power, N: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * T
    logp, best, labels, slope, earned = logp + row, best + row, labels + row, slope + row, earned + row
    t = tl.arange(0, BLOCK)
    real = _real(labels, t, T, N)
    total = _total(logp, t, T, N)
    amount = tl.exp(exponent * total)
    if WEIGHTED:
        amount *= tl.exp(power * (total - _total(best, t, T, N)))
    amount = tl.where(real, amount, 0.0) / tl.maximum(tl.sum(real.to(tl.int32), 0), 1)
    tl.store(value + tl.program_id(0), 1.0 - tl.sum(amount, 0))
    _store_slopes(slope, earned, exponent * amount, t, T, N, BLOCK)


@triton.jit
def _windows(
    logp, best, labels, value, slope, earned, T, N: tl.constexpr, PLACED: tl.constexpr, PRECISE: tl.constexpr,
    RELEASED: tl.constexpr, SHARED: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * T
    logp, best, labels, slope, earned = logp + row, best + row, labels + row, slope + row, earned + row
    t = tl.arange(0, BLOCK)
    probability, real = _probability(logp, labels, t, T, N)
    known = tl.zeros((BLOCK,), tl.int32)      # windows of the reference equal to window t
    copies = tl.zeros((BLOCK,), tl.int32)     # windows that share its reward
    earlier = tl.zeros((BLOCK,), tl.int32)    # those of them that come before it
    expected = tl.zeros((BLOCK,), tl.float32)   # the sum of their probabilities
    column = t[:, None]
    for first in range(0, T - N + 1 if SHARED else 0, PAIRED):
        s = (first + tl.arange(0, PAIRED))[None, :]
        other, there = _probability(logp, labels, s, T, N)
        if PLACED:
            hit = there * _equal(best, labels, s, s, T, N).to(tl.int32)
            copies += tl.sum(_equal(labels, labels, column, s, T, N).to(tl.int32) * hit, 1)
        else:
            known += tl.sum(_equal(best, labels, column, s, T, N).to(tl.int32) * there, 1)
            same = _equal(best, best, column, s, T, N).to(tl.int32) * there
            copies += tl.sum(same, 1)
            if RELEASED:
                earlier += tl.sum(same * (s < column).to(tl.int32), 1)
            if PRECISE:
                expected += tl.sum(same * other, 1)
    if PRECISE:
        whole = tl.maximum(tl.sum(probability, 0), TINY)
        if RELEASED:
            # Only the last of equal windows counts, and it is never clipped.
            counted = tl.where((earlier == copies - 1) & (known > 0), 1.0, 0.0)
            share = counted
        else:
            counted = tl.where(expected < known, 1.0, tl.where(expected == known, 0.5, 0.0))   # as torch.minimum
            share = tl.minimum(expected, known.to(tl.float32)) / tl.maximum(expected, TINY)
        precision = tl.sum(probability * share, 0) / whole
        result = -precision
        amount = probability * (counted - precision) / whole
    else:
        if PLACED:
            hit = _equal(best, labels, t, t, T, N)
        else:
            hit = known > 0
            if MOST:
                hit = hit & (earlier < MOST)
                copies = tl.minimum(copies, MOST)
        shared = tl.maximum(copies, 1) * tl.maximum(tl.sum(real, 0), 1)
        amount = tl.where(hit, probability / shared, 0.0)
        result = 1.0 - tl.sum(amount, 0)
    tl.store(value + tl.program_id(0), result)
    _store_slopes(slope, earned, amount, t, T, N, BLOCK)


TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
