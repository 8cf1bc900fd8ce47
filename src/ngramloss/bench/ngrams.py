"""an objective → cost of its n-gram part, as T grows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ngramloss.bench.clock import median_milliseconds
from ngramloss.errors import UserError
from ngramloss.loss import JointLoss
from ngramloss.stats import TokenStats

BASE = 512
"""Costs are shown as a multiple of the cost at this T."""


def measure(objective: str, *, batch: int, longest: int, device: str) -> Iterator[str]:
    """Yield a line for each T: milliseconds from statistics to loss and gradient, and the multiple of T = 512."""
    loss_fn = JointLoss(objective)
    if loss_fn.needs:
        raise UserError(f"{objective!r} reads more than [B, T] numbers. Use matches, rewards or precision here.")
    if longest < 128 or batch < 1:
        raise UserError(f"expected T of at least 128 and a batch of at least 1, got {longest} and {batch}.")
    yield f"{objective}, B={batch}, {device}, torch {torch.__version__}: statistics → loss → their gradient, median"
    yield f"{'T':>7} {'ms':>9} {'× T=512':>8}"
    base = _milliseconds(loss_fn, batch, BASE, device)
    for T in (2**power for power in range(7, 40) if 2**power <= longest):
        cost = base if T == BASE else _milliseconds(loss_fn, batch, T, device)
        yield f"{T:>7,} {cost:>9.2f} {cost / base:>8.2f}"


def _milliseconds(loss_fn: JointLoss, B: int, T: int, device: str) -> float:
    generator = torch.Generator().manual_seed(T)
    labels = torch.randint(0, 50_000, (B, T), generator=generator)  # [B, T]
    right = torch.rand(B, T, generator=generator) < 0.6  # [B, T]
    best_token = labels.where(right, 7).to(device)  # [B, T]
    logp = torch.rand(B, T, generator=generator).neg().to(device).requires_grad_()  # [B, T]
    labels = labels.to(device)  # [B, T]
    stats = TokenStats(logp.detach(), best_token, logp, logp)
    return median_milliseconds(lambda: loss_fn.from_stats(stats, labels)[0].backward(), device, repeats=20, warm_up=3)
