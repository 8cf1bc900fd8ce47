"""arguments of ``ngramloss bench`` → time and memory on this machine, printed."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from types import ModuleType

from ngramloss import UserError
from ngramloss import options as cli
from ngramloss_bench import attach, candidates, every, generate, head, ngrams, scaling, step, texts, train
from ngramloss_bench.benchmark import run

BENCH = "Measure time and memory on this machine, and compare with other implementations."
BENCHMARKS = (head, step, attach, train, generate, texts, candidates, scaling, ngrams)


def add(bench: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    bench.description = BENCH
    benches = cli.choice(bench, metavar="WHAT", title="what to measure")
    for benchmark in BENCHMARKS:
        name = benchmark.__name__.rpartition(".")[2]
        parser = benches.add_parser(name, help=benchmark.SUMMARY)
        cli.describe(parser, benchmark.TEXT, benchmark.EXAMPLES, partial(_run, benchmark))
        benchmark.add_options(parser)
        parser.add_argument("-o", "--out", metavar="FILE", help="write settings and all measurements as JSON")
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.add_argument("--device", choices=["cpu", "cuda"], help="device to use (default: cuda if available)")
    parser = benches.add_parser("all", help=every.SUMMARY)
    cli.describe(parser, every.TEXT, every.EXAMPLES, _run_all)
    every.add_options(parser)


def _run_all(options: argparse.Namespace) -> int:
    _refuse_missing_gpu(options.gpu, "--gpu")
    return every.run(options)


def _refuse_missing_gpu(wanted: bool, option: str) -> None:
    import torch

    if wanted and not torch.cuda.is_available():
        raise UserError(f"no CUDA device found. Leave {option} out.")


def _run(benchmark: ModuleType, options: argparse.Namespace) -> int:
    import torch

    settings = vars(options)
    read = [settings.get("data")]
    out = cli.output_file(settings.pop("out"), read)
    cli.output_file(settings.get("profile"), read)
    command, shown = shlex.join(["ngramloss", *settings.pop("arguments")]), settings.pop("json")
    del settings["run_verb"]
    _refuse_missing_gpu(options.device == "cuda", "--device")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "precision" in settings:
        options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    return run(benchmark, options, command, out=out, shown=shown)
