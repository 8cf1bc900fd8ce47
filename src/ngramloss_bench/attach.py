"""a model, lengths, other people's trainers → documents per second with stock cross-entropy and with attach."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

from ngramloss import UserError
from ngramloss_bench import options as add
from ngramloss_bench import step
from ngramloss_bench.benchmark import NAN, Column, Plan, Row, check_objectives, ratio
from ngramloss_bench.child import Failed, in_child, shortened

SUMMARY = "attach in other people's trainers"
TEXT = """\
Train with stock cross-entropy, with attach and with Liger-Kernel, under Hugging Face's Trainer, a plain loop and, for a
decoder-only model, TRL's SFTTrainer. The trainings of a trainer alternate in one process, each a few times. All rows
have the same lengths; for a decoder-only model, only the target has labels."""
EXAMPLES = """\
examples:
  ngramloss bench attach --batch-size 64
  ngramloss bench attach --model smollm2-135m --batch-size 32 --source 461 --target 51 -o attach.json
  ngramloss bench attach --device cpu --model bart-tiny --batch-size 2 --source 16 --target 8 --steps 4      # quick
"""
STOCK, LIGER = "stock cross-entropy", "Liger-Kernel, cross-entropy"
TRAINERS = {"trainer": "Hugging Face's Trainer", "loop": "a plain loop", "trl": "TRL's SFTTrainer"}
COLUMNS = [
    Column("docs/s", 1),
    ratio("× stock", "docs/s", STOCK),
    ratio("× Liger", "docs/s", LIGER),
    Column("ms a step", 1, "ms"),
    Column("peak GiB", unit="GiB"),
]
Values = dict[str, list[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.model(parser)
    objectives = "objectives to attach (default: 'ce' and 'ce + matches(2,3,4)')"
    parser.add_argument("--objectives", nargs="+", default=step.OBJECTIVES, metavar="OBJECTIVE", help=objectives)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, help="trainers (default: all that take the model)")
    add.number(parser, "--batch-size", 16, "B", "batch size")
    add.number(parser, "--source", 1024, "T", "document tokens")
    add.number(parser, "--target", 128, "T", "summary tokens")
    add.number(parser, "--warm-up", 5, "N", "steps before the measurement")
    add.number(parser, "--steps", 20, "N", "steps that are measured")
    add.number(parser, "--repeats", 3, "N", "trainings of each row, in turn with the others; the median counts")
    add.number(parser, "--workers", 2, "N", "processes that load data")
    add.precision(parser, "bf16 and fp16 are mixed precision")
    add.number(parser, "--seed", 0, "N", "random seed of rows and their order")


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Every way to compute the loss, under every trainer."""
    import numpy as np

    from ngramloss_bench import lengths, models

    check_objectives(options.objectives)
    config, given = models.configuration(options.model), (options.source, options.target)
    decoder_only, longest = models.is_decoder_only(config), models.most_positions(config)
    if min(options.batch_size, *given) < 1 or (sum(given) if decoder_only else max(given)) > longest:
        raise UserError(
            f"expected a batch of at least 1 and lengths from 1 to {longest}, got {options.batch_size}, {given[0]} and "
            f"{given[1]}."
        )
    options.trainers = options.trainers or [name for name in TRAINERS if decoder_only or name != "trl"]
    options.accumulate = 1
    documents = options.batch_size * (options.warm_up + options.steps)
    sources, targets = (np.full(documents, length) for length in given)
    lengths.write_tokens(folder, sources, targets, vocabulary=config.vocab_size, seed=options.seed)
    names = [STOCK, *(f'attach(model, "{objective}")' for objective in options.objectives), LIGER]
    measured = cache(lambda trainer: in_child(alternated, options, names, folder, trainer))

    def of(trainer: str, name: str) -> Values:
        values, why_not = measured(trainer)[name]
        if why_not:
            raise Failed(why_not)
        return values

    rows = [Row(name, partial(of, trainer, name), TRAINERS[trainer]) for trainer in options.trainers for name in names]
    return Plan(f"{step.title(options)}, {len(names)} ways in turn", COLUMNS, rows)


def alternated(
    options: argparse.Namespace, names: list[str], tokens: Path, trainer: str
) -> Mapping[str, tuple[Values, str]]:
    """Train in each way in turn, several times, in this process. Returns name → values, and why there are none."""
    import torch

    from ngramloss_bench import models, trainings
    from ngramloss_bench.window import Window

    models.prepare(options)
    cuda, objectives = options.device == "cuda", ["", *options.objectives, ""]
    train: Callable[..., object] = (
        trainings.loop if trainer == "loop" else partial(trainings.stock, trl=trainer == "trl")
    )
    values: dict[str, Values] = {name: {"docs/s": [], "ms a step": [], "peak GiB": []} for name in names}
    failed: dict[str, str] = {}
    for _ in range(options.repeats):
        for name, objective in zip(names, objectives, strict=True):
            if name in failed:
                continue
            gc.collect()
            before = 0.0
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() / 2**30
            window = Window(warm_up=options.warm_up, steps=options.steps, cuda=cuda, profiled=False)
            try:
                with tempfile.TemporaryDirectory() as output:
                    train(options, tokens, output, window, objective=objective, liger=name == LIGER)
            except Failed as reason:
                failed[name] = str(reason)
            except Exception as reason:
                failed[name] = shortened(reason)
            else:
                (spent,) = window.milliseconds
                values[name]["docs/s"].append(1e3 * options.batch_size / spent)
                values[name]["ms a step"].append(spent)
                values[name]["peak GiB"].append(window.gibibytes - before if cuda else NAN)
    return {name: (values[name], failed.get(name, "")) for name in names}
