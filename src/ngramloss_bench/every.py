"""a list of bench commands → the JSON of each in a folder, and what is there already is not measured again."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import NamedTuple

from ngramloss import UserError, console, files
from ngramloss.cli import main
from ngramloss_bench import benchmark
from ngramloss_bench.child import in_child

SUMMARY = "all of it, in parts that can be continued"
TEXT = """\
Run the benchmarks whose results are on the project's pages, one after the other, and write the JSON of each as soon as
it is measured. A part whose file has at least 3 values of each time, for this machine, these versions and this code, is
not measured again, so the same command continues what was stopped."""
EXAMPLES = """\
examples:
  ngramloss bench all --gpu --minutes 9
  ngramloss bench all --gpu --parts attach_bart_16 attach_bart_64 -o try
"""
ENOUGH = 3
TIMES = ("ms", "docs/s")


class Part(NamedTuple):
    """One command."""

    title: str
    """Of its rows, in a table of several parts."""
    command: str
    minutes: float
    """An estimate, on an H200."""


SHORT = "--repeats 1 --windows 3 --warm-up 10 --steps 20"
OURS = "captured captured-compiled"
GPU = {
    "head_bart_16": Part("B = 16", "head --sizes bart-16 --repeats 10", 0.7),
    "head_bart_64": Part("B = 64", "head --sizes bart-64 --repeats 10", 0.7),
    "head_llama": Part("B = 4, V = 128,256", "head --sizes llama --repeats 10", 0.7),
    "step": Part("BART-base, batch 16", "step --repeats 10", 2.2),
    "attach_bart_16": Part("BART-base, 16", "attach --steps 10", 1.1),
    "attach_bart_64": Part("BART-base, 64", "attach --batch-size 64 --steps 10", 1.4),
    "attach_smollm2": Part(
        "SmolLM2-135M's sizes, 16 × 512, a tenth labelled",
        "attach --model smollm2-135m --source 461 --target 51 --steps 10",
        2.2,
    ),
    "train_xsum_32": Part("XSum, 16 × 2", f"train --documents 3200 {SHORT} --only stock-random {OURS}", 2.0),
    "train_xsum_64": Part(
        "XSum, 64", f"train --batch-size 64 --accumulate 1 --documents 3200 {SHORT} --only stock-random {OURS}", 2.0
    ),
    "train_cnndm_32": Part(
        "CNN/DailyMail, 16 × 2", f"train --lengths cnndm --documents 3200 {SHORT} --only stock-random {OURS}", 2.0
    ),
    "train_full_16": Part(
        "full length, 1,024 → 128, 16",
        f"train --lengths full --accumulate 1 --documents 800 {SHORT} --only captured-compiled",
        1.1,
    ),
    "train_small": Part(
        "3 + 3 layers of width 256, Multi30k, 128",
        f"train --model small --lengths multi30k --batch-size 128 --accumulate 1 --documents 12800 {SHORT} "
        "--only stock-random captured",
        0.7,
    ),
    "train_smollm2": Part(
        "SmolLM2-135M's sizes, DialogSum, 32",
        f"train --model smollm2-135m --lengths dialogsum --batch-size 32 --accumulate 1 --documents 3200 {SHORT} "
        f"--only stock-random liger-random {OURS}",
        2.8,
    ),
    **{
        f"generate_{name}_{beams}": Part(
            f"{title}, {f'{beams} beams' if beams > 1 else 'greedy'}",
            f"generate --model {model} {lengths} --beams {beams} --batch-size 1 8 32 128 --engines graph",
            minutes,
        )
        for name, title, model, lengths, minutes in (
            ("bart", "BART-base, 512 → 62", "bart-base", "--source 512 --length 62", 0.7),
            ("smollm2", "SmolLM2-135M's sizes, 256 → 48", "smollm2-135m", "--source 256 --length 48", 0.9),
        )
        for beams in (1, 4, 6)
    },
    "candidates": Part("16 × 16 candidates", "candidates", 0.5),
}
"""For one GPU: file → command."""
CPU = {
    "head_cpu": Part("B = 8", "head --sizes cpu --device cpu", 4),
    "attach_cpu": Part("BART-base, 2", "attach --device cpu --batch-size 2 --source 256 --target 64 --steps 4", 6),
    "generate_cpu": Part("BART-base, 400 → 62", "generate --device cpu --batch-size 8", 10),
}
IN_CHILD = ("head", "step", "candidates")
"""These would use the GPU in the process that starts the others."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parts = "; ".join(f"{name}: {part.minutes:g}" for name, part in GPU.items())
    parser.add_argument("--gpu", action="store_true", help=f"the parts for a GPU (minutes on an H200: {parts})")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    minutes = "start no part that is not expected to end within this time (default: no limit)"
    parser.add_argument("--minutes", type=float, metavar="M", help=minutes)
    parser.add_argument(
        "-o", "--out", default="benchmarks", metavar="DIR", help="folder of the files (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure what is missing. Returns 1 if something still is."""
    began, folder, parts = time.monotonic(), Path(options.out), GPU if options.gpu else CPU
    if unknown := {*(options.parts or ())} - {*parts}:
        raise UserError(f"unknown part {min(unknown)!r}. Choose from {', '.join(parts)}.")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}. Create it, or name another one with --out.")
    about = benchmark.about("cuda" if options.gpu else "cpu")
    left = []
    for name, part in parts.items():
        file = folder / f"{name}.json"
        if (options.parts and name not in options.parts) or is_measured(file, part, about):
            continue
        if options.minutes and (time.monotonic() - began) / 60 + part.minutes > options.minutes:
            left.append(name)
            continue
        command = ["bench", *shlex.split(part.command), "-o", str(file)]
        started = time.monotonic()
        failed = in_child(main, command) if command[1] in IN_CHILD else main(command)
        spent = (time.monotonic() - started) / 60
        console.logger.info(f"{name}: {spent:.1f} minutes, expected {part.minutes:g}")
        if failed:
            left.append(name)
        if file.exists():
            content = files.object_or_empty(file)
            about_part = {"part": part.title, "command": f"ngramloss bench {part.command}", "minutes": round(spent, 2)}
            benchmark.write_json(file, content | about_part)
    if left:
        console.logger.info(f"not measured: {', '.join(left)}. The same command continues.")
    return int(bool(left))


def is_measured(file: Path, part: Part, about: dict[str, object]) -> bool:
    """Whether a file has enough repeats of this command, on this machine, with these versions and this code."""
    content = files.object_or_empty(file)
    times = [row["values"] for row in content.get("rows", []) if row["column"] in TIMES]
    same = all(content.get(name) == value for name, value in about.items())
    same = same and content.get("command") == f"ngramloss bench {part.command}"
    return same and bool(times) and min(map(len, times)) >= ENOUGH
