"""the number of updates done → the learning rate, as a factor of the largest."""

from __future__ import annotations

import math
from collections.abc import Callable

END = 1e-7
"""The learning rate at which ``polynomial`` ends."""


def linear(done: int, warmup: int, total: int, rate: float) -> float:
    """Down to 0 at the end, in equal steps."""
    return max(0.0, (total - done) / max(1, total - warmup))


def cosine(done: int, warmup: int, total: int, rate: float) -> float:
    """Down to 0 at the end, as half a wave."""
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (done - warmup) / max(1, total - warmup))))


def constant_with_warmup(done: int, warmup: int, total: int, rate: float) -> float:
    """The same until the end."""
    return 1.0


def inverse_sqrt(done: int, warmup: int, total: int, rate: float) -> float:
    """Down with the root of the steps, counted from the warm-up's length, or from 10,000 without one."""
    scale = warmup or 10_000
    return 1 / math.sqrt((done + scale - warmup) / scale)


def polynomial(done: int, warmup: int, total: int, rate: float) -> float:
    """Down to 1e-7 at the end, in equal steps."""
    if done > total:
        return END / rate
    left = 1 - (done - warmup) / max(1, total - warmup)
    return ((rate - END) * left + END) / rate


def noam(done: int, warmup: int, total: int, rate: float) -> float:
    """min(t^-½, t · warmup^-1.5) for update t, at most warmup^-½, so ``rate`` is no maximum (Vaswani et al. 2017)."""
    step = done + 1
    falling = 1 / math.sqrt(step)
    return min(falling, step / (warmup * math.sqrt(warmup))) if warmup else falling


SCHEDULES: dict[str, Callable[[int, int, int, float], float]] = {
    schedule.__name__: schedule for schedule in (linear, cosine, constant_with_warmup, inverse_sqrt, polynomial, noam)
}
"""Name → what the learning rate is after the warm-up; that of ``noam`` has its own."""


def names() -> tuple[str, ...]:
    """The values of ``train.schedule``."""
    return tuple(SCHEDULES)


def warmup_steps(schedule: str, asked: float, total: int) -> int:
    """Steps of a warm-up, from steps or a share of all; one that would not end takes a tenth, except that of ``noam``.

    >>> [warmup_steps("linear", asked, total) for asked, total in ((100, 1800), (100, 90), (0.1, 90))]
    [100, 9, 9]
    """
    if asked < 1:
        return min(round(asked * total), total - 1)
    return int(asked) if asked < total or schedule == noam.__name__ else total // 10


def learning_rate(name: str, done: int, *, warmup: int, total: int, rate: float) -> float:
    """The learning rate of the next update."""
    if done < warmup and name != noam.__name__:
        return rate * done / max(1, warmup)
    return rate * SCHEDULES[name](done, warmup, total, rate) if rate else 0.0
