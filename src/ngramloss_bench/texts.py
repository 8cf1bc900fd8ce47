"""finished runs with settings → documents per second and latency, as they write texts of real documents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ngramloss as ng
from ngramloss_bench import clock
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import Column, Plan, Row, ratio
from ngramloss_bench.child import in_child

SUMMARY = "documents per second of finished runs"
TEXT = """\
Measure how fast finished runs write texts of the test documents of the first run's data, from text to text, at several
batch sizes. Each row is measured in a process of its own, after every document was written once. Latency is the time
of a batch."""
EXAMPLES = """\
examples:
  ngramloss bench texts --writer runs/demo --writer runs/demo generation.num_beams=1
  ngramloss bench texts --writer runs/ce generation.num_beams=4 --writer runs/matches generation.num_beams=1
  ngramloss bench texts --writer runs/teacher --writer runs/parallel 'system="parallel(passes=2)"' --batch-size 1 64
"""
FEWEST, BATCHES = 32, 4
"""Documents that are written at least, and batches."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    writer = (
        "a run's folder and changes of its settings, each key=value; repeatable, and others are compared with the first"
    )
    parser.add_argument("--writer", nargs="+", action="append", required=True, metavar="RUN_OR_SETTING", help=writer)
    add.numbers(parser, "--batch-size", [1, 8, 64], "B", "documents at a time")
    add.number(parser, "--repeats", 3, "N", "times that the documents are written")


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Every writer at every batch size."""
    if min(options.batch_size) < 1:
        raise ng.UserError(f"--batch-size must be 1 or more, got {min(options.batch_size)}.")
    names = [name_of(writer) for writer in options.writer]
    documents = sources(options.writer[0], max(FEWEST, BATCHES * max(options.batch_size)))
    rows = [
        Row(name, partial(in_child, timed, options, writer, documents, batch), f"batch {batch}")
        for batch in options.batch_size
        for name, writer in zip(names, options.writer, strict=True)
    ]
    columns = [Column("docs/s", 1), Column("ms a batch", 1, "ms"), ratio("× first", "docs/s", names[0])]
    return Plan(f"{len(documents)} documents of {options.writer[0][0]}", columns, rows)


def name_of(writer: Sequence[str]) -> str:
    """A run with its settings, as a row is called.

    >>> name_of(["runs/ce", "generation.num_beams=1"])
    'runs/ce num_beams=1'
    """
    return " ".join(text.removeprefix("generation.").removeprefix("system=") for text in writer)


def sources(writer: Sequence[str], count: int) -> list[str]:
    """The first test documents of a run's data."""
    work: Any = ng.TextGenerator(writer[0]).job
    if not work.is_run:
        raise ng.UserError(f"--writer: {writer[0]} is not a run, so it names no documents. Begin with a run's folder.")
    return [example.source for example in ng.data.load_split(work.data, work.task, "test", limit=count).examples]


def timed(
    options: argparse.Namespace, writer: Sequence[str], documents: Sequence[str], batch: int
) -> dict[str, list[float]]:
    """The speed of one writer, in this process."""
    run, *settings = writer
    generate = ng.TextGenerator(run, source="text", settings=settings, batch_size=batch, device=options.device)
    some = documents[: max(FEWEST, BATCHES * batch)]
    batches = [{"text": some[start : start + batch]} for start in range(0, len(some), batch)]

    def write() -> None:
        for each in batches:
            generate(each)

    write()
    spent = [clock.once(write, options.device) for _ in range(options.repeats)]
    return {"docs/s": [1e3 * len(some) / each for each in spent], "ms a batch": [each / len(batches) for each in spent]}
