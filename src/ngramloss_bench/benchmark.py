"""a benchmark's rows → each measured several times, as a table and as JSON of one form (docs/performance.md).

A benchmark is a module with ``SUMMARY``, ``TEXT`` and ``EXAMPLES`` for its help, ``add_options(parser)``, and
``plan(options, folder)``, which returns a :class:`Plan`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.resources import files
from itertools import groupby
from multiprocessing import parent_process
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import ngramloss as ng
from ngramloss_bench.child import Failed, in_child, shortened

NAN = float("nan")
PACKAGES = ("torch", "transformers", "triton", "accelerate", "trl", "liger-kernel", "cut-cross-entropy")
MEASURED = ("loss", "models", "training", "data/batches", "search")
"""Where the code is whose speed is measured: other commits change nothing."""
STATM = "/proc/self/statm"
"""Where the memory of a process is read."""


class Column(NamedTuple):
    """A column of the table."""

    name: str
    decimals: int = 2
    unit: str = ""
    """By default the name."""
    of: str = ""
    """Of a ratio: the column that is divided."""
    to: Sequence[str] = ()
    """By the median of this row, or by the greatest of these."""
    everywhere: bool = False
    """Whether these rows may be in other groups."""


class Row(NamedTuple):
    """One line of the table, before it is measured."""

    name: str
    measure: Callable[[], Mapping[str, Sequence[float]]]
    """Returns column → the value of each repeat. What is NaN could not be measured."""
    group: str = ""


@dataclass
class Measured:
    """One line of the table."""

    name: str
    group: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    why_not: str = ""

    def median(self, column: str) -> float:
        """The median of the repeats; NaN if there are none."""
        return median(self.values.get(column) or [NAN])


def all_failed(measured: list[Measured]) -> bool:
    """Whether there is nothing to show."""
    return all(row.why_not for row in measured)


class Plan(NamedTuple):
    """What a benchmark measures."""

    title: str
    columns: Sequence[Column]
    """The first that a group has is shown with its spread."""
    rows: Iterable[Row]
    """A generator may set up before each row, and clean up behind it."""
    compare: Callable[[list[Measured]], list[str] | None] = lambda _: None
    """Adds what depends on several rows, besides ratios. May return notes."""
    failed: Callable[[list[Measured]], bool] = all_failed
    """Whether the command fails."""


def run(benchmark: ModuleType, options: argparse.Namespace, command: str, *, out: Path | None, shown: bool) -> int:
    """Run a benchmark: print its table, or with ``shown`` its JSON, and write its files. Returns the exit code."""
    with TemporaryDirectory() as folder:
        plan = benchmark.plan(options, Path(folder))
        where = about(options.device)
        if not shown:
            versions = ", ".join(" ".join(each) for each in where["versions"].items())
            ng.console.print_result(f"{plan.title}\n{where['machine']}, {versions}")
        measured = measure(plan.rows)
    relate(plan.columns, measured)
    notes = plan.compare(measured) or []
    content = {
        "benchmark": benchmark.__name__.rpartition(".")[2],
        "command": command,
        "title": plan.title,
        **where,
        "settings": vars(options),
        **as_json(plan.columns, measured),
        "notes": notes,
    }
    ng.console.print_result(
        json.dumps(content, indent=1) if shown else "\n".join([as_text(plan.columns, measured), *notes])
    )
    if options.device == "cpu" and not os.path.exists(STATM):
        ng.console.logger.info(
            "note: GiB is missing because this system has no /proc, where the memory of a process is read."
        )
    if out:
        write_json(out, content)
    return int(plan.failed(measured))


def about(device: str) -> dict[str, Any]:
    """What a measurement depends on: the machine, the versions of packages, and our code."""
    # a GPU is asked in a process of its own: one that starts others must not hold memory of it
    starts_others = device == "cuda" and parent_process() is None
    where = in_child(machine, device) if starts_others else machine(device)
    installed = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    names = [name for name in (*PACKAGES, *ng.engines.engine_packages()) if name in installed]
    packages = {name: installed[name] for name in names}
    versions = {"python": platform.python_version(), "ngramloss": ng.__version__, **packages}
    core = Path(str(files("ngramloss")))
    code = [file for folder in MEASURED for file in sorted((core / folder).rglob("*.py"))]
    return {"machine": where, "versions": versions, "code": ng.files.fingerprint(code)}


def machine(device: str) -> str:
    """A description of the machine."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"


# Measuring


def measure(rows: Iterable[Row]) -> list[Measured]:
    """Measure one row after the other. One that fails gets the reason."""
    measured = []
    for row in rows:
        done = Measured(row.name, row.group)
        try:
            values = {name: list(values) for name, values in row.measure().items()}
            done.values = {name: each for name, each in values.items() if all(value == value for value in each)}
        except Failed as reason:
            done.why_not = str(reason)
        except Exception as reason:  # such as a peer that cannot run here
            done.why_not = shortened(reason)
        measured.append(done)
        first = next(iter(done.values), "")
        label = f"{row.group}: {row.name}" if row.group else row.name
        ng.console.logger.info(f"{label}: {done.why_not or f'{done.median(first):,.2f} {first}'}")
    return measured


def repeated(once: Callable[[], Mapping[str, float]], repeats: int) -> dict[str, list[float]]:
    """Measure several times. Returns column → the value of each repeat."""
    found = [once() for _ in range(repeats)]
    return {name: [each[name] for each in found] for name in found[0]}


def relate(columns: Sequence[Column], measured: Sequence[Measured]) -> None:
    """Add the ratios. One is left out if what it is divided by could not be measured."""
    for column in columns:
        for row in measured if column.to else ():
            others = [other for other in measured if other.name in column.to and column.of in other.values]
            found = [each.median(column.of) for each in others if column.everywhere or each.group == row.group]
            if found and column.of in row.values:
                row.values[column.name] = [value / max(found) for value in row.values[column.of]]


def ratio(name: str, of: str, *to: str, everywhere: bool = False) -> Column:
    """A column with another one, divided by that of another row."""
    return Column(name, unit="×", of=of, to=to, everywhere=everywhere)


def spread(values: Sequence[float]) -> float | None:
    """The interquartile range.

    >>> spread([1.0, 2.0, 4.0]), spread([1.0])
    (1.5, None)
    """
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, method="inclusive")
    return high - low


# As text and JSON


def as_text(columns: Sequence[Column], measured: Sequence[Measured]) -> str:
    """A table for each group, then a line for each row that failed."""
    lines = []
    for group, rows in _groups(measured):
        found = [column for column in columns if any(column.name in row.values for row in rows)]
        main = found[0].name
        repeats = any(len(row.values.get(main, ())) > 1 for row in rows)
        heads = [column.name for column in found]
        table = [[group, heads[0], *(["spread %"] if repeats else []), *heads[1:]]]
        for row in rows:
            cells = [ng.console.fixed(row.median(column.name), column.decimals) for column in found]
            share = 100 * (spread(row.values.get(main, ())) or NAN) / row.median(main)
            table.append([row.name, cells[0], *([ng.console.fixed(share, 1)] if repeats else []), *cells[1:]])
        lines += ng.console.aligned(table)
    failed = dict.fromkeys(f"{row.name}: {row.why_not}" for row in measured if row.why_not)
    return "\n".join([*lines, *failed])


def _groups(measured: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    done = [row for row in measured if not row.why_not]
    return [(group, list(rows)) for group, rows in groupby(done, lambda row: row.group)]


def as_json(columns: Sequence[Column], measured: Sequence[Measured]) -> dict[str, Any]:
    """The rows, and those that failed, as described above."""
    return {
        "rows": [
            {
                "group": row.group,
                "name": row.name,
                "column": column.name,
                "unit": column.unit or column.name,
                "values": row.values[column.name],
                "median": row.median(column.name),
                "spread": spread(row.values[column.name]),
            }
            for row in measured
            for column in columns
            if column.name in row.values
        ],
        "failed": [{"group": row.group, "name": row.name, "why_not": row.why_not} for row in measured if row.why_not],
    }


def write_json(path: Path, content: object) -> None:
    """Write JSON."""
    with ng.files.writing(path):
        path.write_text(json.dumps(content, indent=1) + "\n")


def check_objectives(objectives: Sequence[str], *, has: str = "") -> None:
    """Raise if an objective is written wrongly or needs candidates or twins; ``has`` names what this benchmark has."""
    for objective in objectives:
        for term in ng.JointLoss(objective).terms:
            for missing in term.requires - {has}:
                raise ng.UserError(f"{term.name} reads {missing}, and bench has none. Leave it out of {objective!r}.")
