"""a model, rows, numbers of processes → how the cost of a training grows, measured; and computed for more devices.

Trainings are those of ``ngramloss train``: planned steps, averaged gradients or FSDP. With the same rows in a step they
must have the same losses, whatever the number of processes; dropout is off for that.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import logging

from ngramloss.bench import step
from ngramloss.bench.child import in_children
from ngramloss.bench.window import busy
from ngramloss.data.tokens import Tokens
from ngramloss.output.tabular import aligned, fixed
from ngramloss.plugins import load_file
from ngramloss.recipe import Train
from ngramloss.training import loop
from ngramloss.training.processes import start_processes

NAN = float("nan")
PROFILED = 3
"""Steps after those that are timed, in which communication is recorded."""
TOLERANCE, ROUGH = 1e-4, 1e-2
"""The largest relative difference of losses in fp32, where rounding gives about 1e-6, and in 16 bits."""
COLLECTIVES = ("gloo:", "nccl:")
"""How the profiler's names of operations of several processes begin."""


@dataclass(frozen=True)
class Setup:
    """What all trainings have in common."""

    model: str
    objective: str
    warm_up: int
    steps: int
    precision: str
    seed: int
    trust_remote_code: bool = False
    plugins: tuple[str, ...] = ()


class Row(NamedTuple):
    """One training, or why there is none."""

    what: str
    processes: int
    fsdp: bool
    batch: int
    """Rows of a step, over all processes."""
    documents: int
    """Rows of the data."""
    tokens: float = NAN
    """Of a step, sources and targets, on average."""
    step_milliseconds: float = NAN
    """The median."""
    start_seconds: float = NAN
    """Until the end of the first step: steps are planned before it."""
    communication: float = NAN
    """The share of a step in which processes send each other gradients or weights, or wait for it."""
    gradient_bytes: float = NAN
    loss: float = NAN
    """The mean of all steps after the first."""
    why_not: str = ""

    @property
    def docs_per_second(self) -> float:
        """Rows per second, over all processes."""
        return 1e3 * self.batch / self.step_milliseconds


class Line(NamedTuple):
    """A step's time as a function of its tokens: fixed + tokens × slope, in milliseconds."""

    fixed: float
    slope: float


class Forecast(NamedTuple):
    """What a formula says of several devices. Nothing of it was measured."""

    devices: int
    communication_milliseconds: float
    shared_milliseconds: float
    """Of a step with the same rows, shared by the devices."""
    shared_docs_per_second: float
    grown_docs_per_second: float
    """If each device has as many rows as one has alone."""
    sharded_docs_per_second: float
    """The same with FSDP."""


def measure(
    setup: Setup, folders: Mapping[int, Path], batches: Sequence[int], processes: Sequence[int]
) -> Iterator[Row]:
    """Train with steps of each size; with each number of rows in all; with each number of processes, also with FSDP.

    Args:
        setup: what all trainings have in common.
        folders: number of rows → a folder of :class:`Tokens` that contains them.
        batches: rows of a step, ascending. The largest is that of all other trainings.
        processes: numbers of processes.
    """
    few, most = min(folders), max(batches)
    for batch in batches:
        yield _trained(setup, folders, f"{batch} rows in a step", batch, few)
    for documents in sorted(folders)[1:]:
        yield _trained(setup, folders, f"{documents:,} rows in all", most, documents)
    for count in (count for count in processes if count > 1):
        for fsdp in (False, True):
            what = f"{count} processes{', FSDP' * fsdp}"
            yield _trained(setup, folders, what, most, few, processes=count, fsdp=fsdp)


def _trained(
    setup: Setup,
    folders: Mapping[int, Path],
    what: str,
    batch: int,
    documents: int,
    *,
    processes: int = 1,
    fsdp: bool = False,
) -> Row:
    row = Row(what, processes, fsdp, batch, documents)
    answers = in_children(processes, trained, setup, folders[documents], row)
    failed = [answer.why_not for answer in answers if answer.result is None]
    return answers[0].result or row._replace(why_not=failed[0])


def trained(setup: Setup, tokens: Path, row: Row) -> Row:
    """Train in this process, with the others if there are any. One thread each: a process is a core."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for plugin in setup.plugins:
        load_file(Path(plugin))
    here, rows = start_processes(), Tokens(tokens)
    model = step.built(setup.model, trust_remote_code=setup.trust_remote_code)
    _without_dropout(model)
    gradient_bytes = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    timed, measures = setup.warm_up + setup.steps, here.count > 1 and here.first
    clock: dict[int, float] = {0: time.perf_counter()}
    lines: list[Mapping[str, float]] = []
    profiler = profile(activities=[ProfilerActivity.CPU])

    def after(number: int, line: Mapping[str, float]) -> None:
        if here.device.type == "cuda":
            torch.cuda.synchronize(here.device)
        clock[number] = time.perf_counter()
        if line:
            lines.append(line)
        if number == timed and measures:
            profiler.start()

    settings = Train(
        max_steps=timed + PROFILED,
        batch_size=row.batch,
        accumulate=1,
        learning_rate=3e-5,
        warmup_steps=0,
        precision=setup.precision,
        log_every=10**9,
        eval_every=0,
        seed=setup.seed,
        fsdp=row.fsdp,
    )
    loop.run(loop.Job(model, None, rows, settings, setup.objective, on_step=after), here)
    share = 0.0
    if measures:
        profiler.stop()
        share = _communication(profiler) / (1e6 * (clock[timed + PROFILED] - clock[timed]))
    targets = [len(rows[number]["labels"]) for number in range(min(len(rows), 1000))]
    return row._replace(
        tokens=row.batch * (float(rows.lengths.mean()) + float(np.mean(targets))),
        step_milliseconds=1e3 * median(clock[n] - clock[n - 1] for n in range(setup.warm_up + 1, timed + 1)),
        start_seconds=clock[1] - clock[0],
        communication=share,
        gradient_bytes=float(gradient_bytes),
        loss=lines[-1]["loss"],
    )


def _without_dropout(model: Any) -> None:
    """Random numbers are those of a process, so with dropout losses would depend on how many there are."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _communication(profiler: Any) -> float:
    """Microseconds in which an operation of several processes was under way."""
    events = [event.time_range for event in profiler.events() if event.name.startswith(COLLECTIVES)]
    return busy((event.start, event.end) for event in events)


def losses_agree(rows: Sequence[Row], *, precision: str = "fp32") -> bool | None:
    """Whether trainings with the same rows in the same steps have the same loss; None if there are no two of them."""
    losses: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if not row.why_not:
            losses.setdefault((row.batch, row.documents), []).append(row.loss)
    compared = [same for same in losses.values() if len(same) > 1]
    tolerance = TOLERANCE if precision == "fp32" else ROUGH
    return all(max(same) - min(same) <= tolerance * abs(same[0]) for same in compared) if compared else None


# On paper


def line_of(rows: Sequence[Row]) -> Line:
    """The straight line through the times of steps in one process, by least squares.

    >>> rows = [Row("", 1, False, batch, 100, tokens=10.0 * batch, step_milliseconds=5.0 + batch) for batch in (4, 8)]
    >>> [round(value, 3) for value in line_of(rows)]
    [5.0, 0.1]
    """
    alone = [row for row in rows if row.processes == 1 and not row.why_not]
    if len({row.tokens for row in alone}) < 2:
        return Line(NAN, NAN)
    slope, fixed_part = np.polyfit([row.tokens for row in alone], [row.step_milliseconds for row in alone], 1)
    return Line(max(float(fixed_part), 0.0), float(slope))


def forecast(row: Row, line: Line, *, devices: int, bandwidth: float) -> Forecast:
    r"""The time of a step on N devices, by a formula.

    .. math::
        t_N = a + b \frac{T}{N} + k \frac{N-1}{N} \frac{G}{w}

    with a and b of the line, T tokens of a step, G bytes of gradients and w bytes per second. A ring all-reduce sends
    each byte k = 2 times. FSDP gathers the weights in forward and in backward and scatters the gradients: k = 3.
    Nothing overlaps, and all devices are as far from each other.

    Args:
        row: a training in one process.
        line: how its time grows with tokens.
        devices: N.
        bandwidth: of each device, in GB per second.
    """
    sent = (devices - 1) / devices * row.gradient_bytes / (bandwidth * 1e9) * 1e3  # ms for each time
    shared = line.fixed + line.slope * row.tokens / devices + 2 * sent
    alone = line.fixed + line.slope * row.tokens
    return Forecast(
        devices,
        2 * sent,
        shared,
        1e3 * row.batch / shared,
        1e3 * row.batch * devices / (alone + 2 * sent),
        1e3 * row.batch * devices / (alone + 3 * sent),
    )


# As text

HEADS = ("rows/s", "ms a step", "tokens a step", "sending %", "s to begin", "loss")


def as_text(rows: Sequence[Row]) -> str:
    """The trainings as a table, then a line for each that failed."""
    table: list[tuple[str, ...]] = [("", *HEADS)]
    for row in (row for row in rows if not row.why_not):
        numbers = (row.docs_per_second, row.step_milliseconds, row.tokens, 100 * row.communication, row.start_seconds)
        table.append((row.what, *map(fixed, numbers, (1, 1, 0, 0, 1)), f"{row.loss:.6f}"))
    failed = [f"{row.what}: {row.why_not}" for row in rows if row.why_not]
    return "\n".join([*(aligned(table) if len(table) > 1 else []), *failed])


def forecast_text(forecasts: Sequence[Forecast]) -> str:
    """The computed lines as a table."""
    heads = ("sending ms", "ms a step", "rows/s", "rows/s, N × rows", "the same, FSDP")
    table: list[tuple[str, ...]] = [("devices", *heads)]
    for each in forecasts:
        table.append((str(each.devices), *map(fixed, each[1:], (1, 1, 1, 1, 1))))
    return "\n".join(aligned(table))
