"""an objective → cost of its n-gram part, as T grows."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ngramloss.bench import options as add
from ngramloss.bench.benchmark import NAN, Column, Measured, Plan, Row, check_objectives
from ngramloss.errors import UserError

SUMMARY = "the n-gram part as T grows"
TEXT = "Time the n-gram part of an objective for T = 128 to 32,768 tokens. It grows like T log T, not T²."
EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch-size 16 --device cuda
"""
BASE = 512
"""Costs are shown as a multiple of the cost at this T."""
RATIO = f"× T={BASE}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.objective(parser, "matches(2,3,4)", "objective to time")
    add.number(parser, "--batch-size", 4, "B", "sequences per batch")
    add.number(parser, "--longest", 32768, "T", "longest sequence to time, in tokens")
    add.calls(parser, "20, or 3 of a call that takes over 2 seconds")


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """One row for each T."""
    from ngramloss.loss import JointLoss

    check_objectives([options.objective])
    if JointLoss(options.objective).needs:
        raise UserError(
            f"{options.objective!r} reads more than [B, T] numbers. Use matches, rewards or precision here."
        )
    if options.longest < 128 or options.batch_size < 1:
        raise UserError(
            f"expected T of at least 128 and a batch of at least 1, got {options.longest} and {options.batch_size}."
        )
    title = f"{options.objective}, B={options.batch_size}: statistics → loss → their gradient, by T"
    return Plan(title, [Column("ms"), Column(RATIO, unit="×")], rows(options), compare)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Sequences twice as long, again and again."""
    for T in (2**power for power in range(7, 40) if 2**power <= options.longest):
        yield Row(f"{T:,}", partial(_milliseconds, options, T))


def _milliseconds(options: argparse.Namespace, T: int) -> dict[str, list[float]]:
    import torch

    from ngramloss.bench import clock
    from ngramloss.loss import JointLoss
    from ngramloss.stats import TokenStats

    B, device, loss_fn = options.batch_size, options.device, JointLoss(options.objective)
    generator = torch.Generator().manual_seed(T)
    labels = torch.randint(0, 50_000, (B, T), generator=generator)  # [B, T]
    right = torch.rand(B, T, generator=generator) < 0.6  # [B, T]
    best_token = labels.where(right, 7).to(device)  # [B, T]
    logp = torch.rand(B, T, generator=generator).neg().to(device).requires_grad_()  # [B, T]
    labels = labels.to(device)  # [B, T]
    stats = TokenStats(logp.detach(), best_token, logp, logp)
    return {
        "ms": clock.milliseconds(
            lambda: loss_fn.from_stats(stats, labels)[0].backward(),
            device,
            repeats=options.repeats,
            usual=20,
            warm_up=3,
        )
    }


def compare(measured: list[Measured]) -> None:
    """Add the multiples of the time at T = 512."""
    times = {row.name: row.median("ms") for row in measured}
    for row in measured:
        row.relate(RATIO, "ms", times.get(str(BASE), NAN))
