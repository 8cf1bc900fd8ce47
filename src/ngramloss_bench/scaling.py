"""a model, rows, numbers of processes → how the cost of a training grows, measured; and computed for more devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ngramloss import UserError
from ngramloss_bench import lengths
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import NAN, Column, Measured, Plan, Row, check_objectives, repeated
from ngramloss_bench.child import in_children

SUMMARY = "cost by tokens, rows and processes"
TEXT = """\
Train shortly with more and more rows in a step, rows in all, and processes, which average their gradients or shard the
model (FSDP), and show how the cost grows, which share of the time goes into communication, and whether losses are the
same. Each process has one thread. With --bandwidth, also compute what more devices like this one would do, on paper: a
step takes a + b · tokens / N + 2 · (N − 1) / N · bytes of gradients / bandwidth."""
EXAMPLES = """\
examples:
  ngramloss bench scaling
  ngramloss bench scaling --model bart-base --batch-size 4 8 16 --bandwidth 25 --devices 2 8 64 -o scaling.json
  ngramloss bench scaling --model bart-tiny --batch-size 4 8 --rows 64 --warm-up 1 --steps 2      # quick
"""
PROFILED = 3
"""Steps after those that are timed, in which communication is recorded."""
TOLERANCE, ROUGH = 1e-4, 1e-2
"""The largest relative difference of losses in fp32, where rounding gives about 1e-6, and in 16 bits."""
COLLECTIVES = ("gloo:", "nccl:")
"""How the profiler's names of operations of several processes begin."""
COMPUTED = "devices"
"""The group of what is computed, and not measured."""
GRADIENTS = "bytes of gradients"
"""Measured, but not shown."""
SHARED, GROWN, SHARDED = "rows/s, shared", "rows/s, N × rows", "the same, FSDP"
COLUMNS = [
    Column("rows/s", 1),
    Column("sending ms", 1, "ms"),
    Column("ms a step", 1, "ms"),
    Column("tokens a step", 0, "tokens"),
    Column("sending %", 0, "%"),
    Column("s to begin", 1, "s"),
    Column("loss", 6, "nats"),
    Column(SHARED, 1, "rows/s"),
    Column(GROWN, 1, "rows/s"),
    Column(SHARDED, 1, "rows/s"),
]
"""``sending %``: of a step, in which processes send each other gradients or weights, or wait for it; ``s to begin``:
until the end of the first step, before which steps are planned; ``loss``: the mean of all steps after it."""


class Training(NamedTuple):
    """What one row trains."""

    batch: int
    """Rows of a step, over all processes."""
    documents: int
    """Rows of the data."""
    processes: int = 1
    fsdp: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.model(parser, "small")
    add.objective(parser, "ce + matches(2,3,4)", "objective to train on")
    drawn = "rows are random tokens, as long as this data set's documents; full: 1,024 and 128 (default: %(default)s)"
    parser.add_argument("--lengths", choices=lengths.NAMES, default="multi30k", help=drawn)
    batches = "rows of a step over all processes; all but the first lines have the largest"
    add.numbers(parser, "--batch-size", [8, 16, 32], "B", batches)
    add.numbers(parser, "--rows", [1_000, 100_000], "N", "rows in all; all but one line for each have the fewest")
    processes = "numbers of processes (default: 1 2; on GPUs, 1 and all GPUs)"
    parser.add_argument("--processes", type=int, nargs="+", metavar="N", help=processes)
    add.number(parser, "--warm-up", 3, "N", "steps before the measurement")
    add.number(parser, "--steps", 10, "N", "steps that are measured")
    add.number(parser, "--repeats", 3, "N", "trainings of each row; the median counts")
    bandwidth = "compute what more devices would do that send and receive this many GB per second each"
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help=bandwidth)
    add.numbers(parser, "--devices", [2, 4, 8, 16, 64], "N", "numbers of devices to compute that for")
    add.precision(parser, "bf16 is mixed precision")
    add.number(parser, "--seed", 0, "N", "random seed of rows and their order")


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Steps of each size; each number of rows in all; each number of processes, also with FSDP."""
    check_objectives([options.objective])
    if not options.processes:
        import torch

        options.processes = [1, 2] if options.device == "cpu" else sorted({1, torch.accelerator.device_count()})
    options.batch_size, options.rows = sorted(set(options.batch_size)), sorted(set(options.rows))
    _check(options)

    from ngramloss_bench import models, trainings

    config = models.configuration(options.model)
    for number in options.rows:
        (folder / str(number)).mkdir()
        trainings.write_rows(folder / str(number), options.lengths, number, config, seed=options.seed)
    few, most = options.rows[0], options.batch_size[-1]
    each = {f"{batch} rows in a step": Training(batch, few) for batch in options.batch_size}
    each |= {f"{number:,} rows in all": Training(most, number) for number in options.rows[1:]}
    for count in (count for count in options.processes if count > 1):
        for fsdp in (False, True):
            each[f"{count} processes{', FSDP' * fsdp}"] = Training(most, few, count, fsdp)

    def once(training: Training) -> dict[str, float]:
        return in_children(training.processes, trained, options, folder / str(training.documents), training)[0]

    def compare(measured: list[Measured]) -> list[str]:
        agree = losses_agree(measured, each, options.precision)
        said = {True: "are the same", False: "differ", None: "were not compared: no two trainings have the same"}
        notes = [f"losses of the same steps {said[agree]}."]
        line = line_of([row for row in measured if each[row.name][1:3] == (few, 1)])
        alone = next(row for row in measured if each[row.name] == Training(most, few))
        if options.bandwidth and not isnan(line.slope + alone.median(GRADIENTS)):
            notes.append(
                f"lines by devices are computed, not measured: devices like this one with {options.bandwidth:g} GB per "
                f"second each, {alone.median(GRADIENTS) / 1e6:,.0f} MB of gradients."
            )
            measured += [forecast(alone, line, most, devices, options.bandwidth) for devices in options.devices]
        return notes

    def failed(measured: list[Measured]) -> bool:
        return any(row.why_not for row in measured) or losses_agree(measured, each, options.precision) is False

    rows = [Row(name, partial(repeated, partial(once, training), options.repeats)) for name, training in each.items()]
    title = f"{options.model}, {options.objective}, {options.lengths}, {options.precision}"
    return Plan(title, COLUMNS, rows, compare, failed)


def _check(options: argparse.Namespace) -> None:
    batches, numbers = options.batch_size, options.rows
    least = min(*batches, *numbers, *options.processes, *options.devices, options.warm_up, options.steps)
    if least < 1:
        raise UserError(f"numbers must be at least 1, got {least}.")
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise UserError(f"--bandwidth must be above 0, got {options.bandwidth:g}.")
    if options.bandwidth and len(batches) < 2:
        raise UserError("--bandwidth needs two batch sizes or more, such as --batch-size 8 16.")
    if batches[-1] > numbers[0]:
        raise UserError(f"--rows must be at least {batches[-1]}, the rows of a step, got {numbers[0]}.")
    for count in options.processes:
        if batches[-1] % count:
            raise UserError(f"--batch-size counts rows over all processes: {batches[-1]} cannot be divided by {count}.")


def trained(options: argparse.Namespace, tokens: Path, training: Training) -> dict[str, float]:
    """Train in this process, with the others if there are any. One thread each: a process is a core."""
    import os
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile

    import ngramloss as ng
    from ngramloss_bench import models
    from ngramloss_bench.window import busy

    models.prepare(options)
    torch.set_num_threads(1)
    rows = ng.tokens.Tokens(tokens)
    model = models.built(options.model)
    _without_dropout(model)
    gradient_bytes = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    timed, measures = options.warm_up + options.steps, os.environ.get("RANK") == "0"  # the first of several
    clock: dict[int, float] = {0: time.perf_counter()}
    lines: list[Mapping[str, float]] = []
    profiler = profile(activities=[ProfilerActivity.CPU])

    def after(number: int, line: Mapping[str, float]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        clock[number] = time.perf_counter()
        if line:
            lines.append(line)
        if number == timed and measures:
            profiler.start()

    settings = {"max_steps": timed + PROFILED, "batch_size": training.batch, "accumulate": 1, "fsdp": training.fsdp}
    models.train(options, model, rows, after, **settings, seed=options.seed)
    sending = 0.0
    if measures:
        profiler.stop()
        events: list[Any] = [event for event in profiler.events() or () if event.name.startswith(COLLECTIVES)]
        microseconds = busy((event.time_range.start, event.time_range.end) for event in events)
        sending = microseconds / (1e6 * (clock[timed + PROFILED] - clock[timed]))
    spent = median(clock[number] - clock[number - 1] for number in range(options.warm_up + 1, timed + 1))
    return {
        "rows/s": training.batch / spent,
        "ms a step": 1e3 * spent,
        "tokens a step": training.batch * float((rows.lengths + rows.target_lengths).mean()),
        "sending %": 100 * sending,
        "s to begin": clock[1] - clock[0],
        "loss": lines[-1]["loss"],
        GRADIENTS: float(gradient_bytes),
    }


def _without_dropout(model: Any) -> None:
    """Random numbers are those of a process, so with dropout losses would depend on how many there are."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def losses_agree(measured: Sequence[Measured], each: Mapping[str, Training], precision: str) -> bool | None:
    """Whether trainings with the same rows in the same steps have the same loss; None if there are no two of them."""
    losses: dict[tuple[int, int], list[float]] = {}
    for row in measured:
        if row.name in each and not row.why_not:
            losses.setdefault(each[row.name][:2], []).append(row.median("loss"))
    compared = [same for same in losses.values() if len(same) > 1]
    tolerance = TOLERANCE if precision == "fp32" else ROUGH
    return all(max(same) - min(same) <= tolerance * abs(same[0]) for same in compared) if compared else None


# On paper


class Line(NamedTuple):
    """A step's time as a function of its tokens: fixed + tokens × slope, in milliseconds."""

    fixed: float
    slope: float


def line_of(measured: Sequence[Measured]) -> Line:
    """The straight line through the times of steps in one process, by least squares."""
    import numpy as np

    points = [(row.median("tokens a step"), row.median("ms a step")) for row in measured if not row.why_not]
    if len({tokens for tokens, _ in points}) < 2:
        return Line(NAN, NAN)
    tokens, spent = np.array(points).T
    slope, fixed = np.polyfit(tokens, spent, 1)
    return Line(max(float(fixed), 0.0), float(slope))


def forecast(alone: Measured, line: Line, batch: int, devices: int, bandwidth: float) -> Measured:
    """The time of a step on N devices, t = a + b T / N + k (N − 1) / N · G / w, of T tokens, G bytes, w bytes/s.

    A ring all-reduce sends each byte of gradients k = 2 times; FSDP gathers the weights twice and scatters gradients,
    k = 3. Devices share the rows of a step; rows per second are those if each device has the batch of one alone.
    """
    tokens = alone.median("tokens a step")
    sent = (devices - 1) / devices * alone.median(GRADIENTS) / (bandwidth * 1e9) * 1e3  # ms for each time
    shared = line.fixed + line.slope * tokens / devices + 2 * sent
    whole = line.fixed + line.slope * tokens
    found = {
        "sending ms": 2 * sent,
        "ms a step": shared,
        SHARED: 1e3 * batch / shared,
        GROWN: 1e3 * batch * devices / (whole + 2 * sent),
        SHARDED: 1e3 * batch * devices / (whole + 3 * sent),
    }
    return Measured(str(devices), COMPUTED, {name: [value] for name, value in found.items()})
