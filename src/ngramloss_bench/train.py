"""a model, an objective, lengths of documents → documents per second of whole trainings, stock and ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import UserError, console
from ngramloss_bench import lengths
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import Column, Plan, Row, check_objectives, ratio
from ngramloss_bench.child import in_child

SUMMARY = "documents per second of whole trainings"
TEXT = """\
Measure documents per second of real trainings: Hugging Face's trainer with the model's own cross-entropy, if it is
installed also with Liger-Kernel, and the loop of ngramloss train with an objective, on the same rows and with as many
sequences in a step. Each trains in a process of its own. The rows have the lengths of a known data set's documents, or
are your own data. For a decoder-only model, a target follows its source in one row, and only the target has labels."""
EXAMPLES = """\
examples:
  ngramloss bench train
  ngramloss bench train --lengths cnndm --compile -o train.json
  ngramloss bench train --model smollm2-135m --lengths dialogsum --batch-size 32 --accumulate 1      # decoder-only
  ngramloss bench train --model path/or/hub-id --data train.jsonl --profile trace.json
  ngramloss bench train --device cpu --model bart-tiny --lengths multi30k --warm-up 5 --steps 20      # quick
"""


class Contestant(NamedTuple):
    """A way to train."""

    label: str
    settings: dict[str, Any]
    """Of ``stock`` or ``ours`` in :mod:`ngramloss_bench.trainings`."""

    @property
    def ours(self) -> bool:
        """Whether it is the loop of ``ngramloss train``."""
        return "capture" in self.settings

    def why_not(self, device: str, decoder_only: bool) -> str:
        """Why it cannot run on this device with such a model; empty if it can."""
        liger = self.settings.get("liger")
        if (liger or self.settings.get("capture")) and device != "cuda":
            return "needs a GPU."
        if liger and not decoder_only:
            return "Liger-Kernel has no kernels for encoder-decoders."
        if liger and find_spec("liger_kernel") is None:
            return "needs the package liger-kernel: pip install liger-kernel"
        return ""


CONTESTANTS = {
    "stock-random": Contestant("stock trainer, random batches", {}),
    "stock-grouped": Contestant("stock trainer, group_by_length", {"grouped": True}),
    "stock-compiled": Contestant("stock trainer, group_by_length, torch_compile", {"grouped": True, "compiled": True}),
    "liger-random": Contestant("stock trainer with Liger-Kernel, random batches", {"liger": True}),
    "liger-grouped": Contestant("stock trainer with Liger-Kernel, group_by_length", {"grouped": True, "liger": True}),
    "eager": Contestant("ngramloss, eager", {"capture": False}),
    "captured": Contestant("ngramloss, captured", {"capture": True}),
    "captured-compiled": Contestant(
        "ngramloss, captured, compiled, as in a long training", {"capture": True, "compiled": True}
    ),
}
COLUMNS = [
    Column("docs/s", 1),
    ratio("× stock", "docs/s", CONTESTANTS["stock-random"].label),
    ratio("× best", "docs/s", *(each.label for each in CONTESTANTS.values() if not each.ours)),
    Column("ms a step", 1, "ms"),
    Column("MFU %", 1, "%"),
    Column("GPU ms", 1, "ms"),
    Column("idle %", 0, "%"),
    Column("padding %", 1, "%"),
    Column("peak GiB", unit="GiB"),
    Column("reserved GiB", unit="GiB"),
]
"""``MFU %``: the model's operations, averaged over all rows, by the device's peak (:mod:`ngramloss_bench.flops`).
``GPU ms``: of a step, in which the GPU was busy, measured in a few other steps; ``idle %``: the rest of these."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.model(parser)
    add.objective(parser, "ce + matches(2,3,4)", "objective of ngramloss")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--lengths",
        choices=lengths.NAMES,
        default="xsum",
        help="train on random tokens in rows as long as this data set's documents: 1.35 × words, cut at 1,024 and 128 "
        "tokens; full: all have these lengths (default: %(default)s)",
    )
    own_data = "train on this data set instead, as in `ngramloss train`; the model must have a tokenizer"
    rows.add_argument("--data", metavar="NAME", help=own_data)
    add.number(parser, "--documents", 6400, "N", "rows to train on, rounded down to whole steps")
    add.number(parser, "--batch-size", 16, "B", "batch size")
    add.number(parser, "--accumulate", 2, "N", "batches in a step")
    add.number(parser, "--warm-up", 20, "N", "steps before the measurement")
    steps = (
        "steps that are measured; the stock trainer sorts pools of up to 50 steps by length, so fewer may be the long "
        "or the short ones"
    )
    add.number(parser, "--steps", 50, "N", steps)
    add.number(parser, "--windows", 1, "N", "times that --steps steps are measured in a training, one after the other")
    add.number(parser, "--repeats", 3, "N", "trainings of each row; the median of all windows counts")
    add.number(parser, "--workers", 2, "N", "processes that load data, for each trainer")
    add.precision(parser, "bf16 and fp16 are mixed precision")
    parser.add_argument(
        "--compile", action="store_true", help="also let the stock trainer compile, which takes minutes"
    )
    only = f"train with these only: {', '.join(CONTESTANTS)}"
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[], metavar="NAME", help=only)
    add.number(parser, "--seed", 0, "N", "random seed of rows and their order")
    trace = "write a Chrome trace of a few steps of ngramloss, captured where that runs"
    parser.add_argument("--profile", metavar="FILE", help=trace)


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """A training of each contestant. The rows are written into the folder."""
    check_objectives([options.objective])
    step_size = options.batch_size * options.accumulate
    if not 1 <= step_size <= options.documents:
        raise UserError(
            f"a step of {options.batch_size} × {options.accumulate} rows needs at least 1 row and at most "
            f"--documents {options.documents}."
        )
    from ngramloss import tokens
    from ngramloss_bench import models, trainings

    config = models.configuration(options.model)
    decoder_only = models.is_decoder_only(config)
    names = chosen(options.only, compiled=options.compile, device=options.device, decoder_only=decoder_only)
    ours = [
        name for name in names if CONTESTANTS[name].ours and not CONTESTANTS[name].why_not(options.device, decoder_only)
    ]
    if options.profile and not ours:
        raise UserError("--profile traces ngramloss, but --only names none of its contestants that can run here.")
    if options.data:
        options.lengths = None
        folder = trainings.tokenised_rows(folder, options, config, step_size)
    else:
        whole = options.documents // step_size * step_size
        trainings.write_rows(folder, options.lengths, whole, config, seed=options.seed)
    options.documents = len(tokens.Tokens(folder))
    if options.documents < step_size * (options.warm_up + options.windows * options.steps):
        console.logger.info(
            f"note: {options.documents} rows are {options.documents // step_size} steps, so an epoch ends and the next "
            "begins in the steps that are measured. Raise --documents to leave that out."
        )
    title = (
        f"{options.model}, {options.objective}, {options.data or options.lengths}, {options.batch_size} × "
        f"{options.accumulate} rows, {options.precision}"
    )
    traced = "captured" if "captured" in ours else ours[-1] if ours else ""
    rows = []
    for name in names:
        trace = options.profile if name == traced else None
        once = partial(in_child, trainings.trained, CONTESTANTS[name], options, folder, trace)
        rows.append(Row(CONTESTANTS[name].label, partial(_repeated, once, options.repeats)))
    return Plan(title, COLUMNS, rows)


def _repeated(once: Callable[[], Mapping[str, Sequence[float]]], repeats: int) -> dict[str, list[float]]:
    """Measure several times. Returns column → the values of all windows."""
    found = [once() for _ in range(repeats)]
    return {name: [value for each in found for value in each[name]] for name in found[0]}


def chosen(only: Sequence[str], *, compiled: bool, device: str, decoder_only: bool = False) -> list[str]:
    """The contestants that were asked for: by name, or all that can run here."""
    if only:
        return [name for name in CONTESTANTS if name in only]
    return [
        name
        for name, contestant in CONTESTANTS.items()
        if (compiled or name != "stock-compiled") and not contestant.why_not(device, decoder_only)
    ]
