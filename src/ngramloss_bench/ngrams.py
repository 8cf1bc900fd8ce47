"""an objective → cost of its n-gram part, as T grows."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ngramloss import UserError
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import Column, Plan, Row, check_objectives, ratio

if TYPE_CHECKING:
    from ngramloss import JointLoss

SUMMARY = "the n-gram part as T grows"
TEXT = "Time the n-gram part of an objective for T = 128 to 32,768 tokens. It grows like T log T, not T²."
EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch-size 16 --device cuda
"""
COLUMNS = [Column("ms"), ratio("× T=512", "ms", "512")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.objective(parser, "matches(2,3,4)", "objective to time")
    add.number(parser, "--batch-size", 4, "B", "sequences per batch")
    add.number(parser, "--longest", 32768, "T", "longest sequence to time, in tokens")
    add.calls(parser, "20, or 3 of a call that takes over 2 seconds")


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """One row for each T."""
    from ngramloss import JointLoss

    check_objectives([options.objective])
    B, longest, loss_fn = options.batch_size, options.longest, JointLoss(options.objective)
    if loss_fn.needs:
        raise UserError(
            f"{options.objective!r} reads more than [B, T] numbers. Use matches, rewards or precision here."
        )
    if longest < 128 or B < 1:
        raise UserError(f"expected T of at least 128 and a batch of at least 1, got {longest} and {B}.")
    lengths = [2**power for power in range(7, 40) if 2**power <= longest]
    rows = [Row(f"{T:,}", partial(_milliseconds, loss_fn, T, options)) for T in lengths]
    return Plan(f"{options.objective}, B={B}: statistics → loss → their gradient, by T", COLUMNS, rows)


def _milliseconds(loss_fn: JointLoss, T: int, options: argparse.Namespace) -> dict[str, list[float]]:
    import torch

    from ngramloss import TokenStats
    from ngramloss_bench import clock

    B, device, generator = options.batch_size, options.device, torch.Generator().manual_seed(T)
    labels = torch.randint(0, 50_000, (B, T), generator=generator)  # [B, T]
    right = torch.rand(B, T, generator=generator) < 0.6  # [B, T]
    best_token = labels.where(right, 7).to(device)  # [B, T]
    logp = torch.rand(B, T, generator=generator).neg().to(device).requires_grad_()  # [B, T]
    labels = labels.to(device)  # [B, T]
    stats = TokenStats(logp.detach(), best_token, logp, logp)

    def run() -> None:
        loss_fn.from_stats(stats, labels)[0].backward()

    return {"ms": clock.milliseconds(run, device, repeats=options.repeats, usual=20, warm_up=3)}
