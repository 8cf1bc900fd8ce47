"""a model, lengths, batch sizes → documents and tokens per second of each engine, compared with Hugging Face's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ngramloss import UserError, engines, recipe
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import NAN, Column, Measured, Plan, Row, ratio
from ngramloss_bench.child import in_child

SUMMARY = "documents per second of each engine"
TEXT = """\
Measure documents and tokens per second of each engine that is installed, at several batch sizes, beside Hugging Face's
`generate`, and the share of texts that are the same. Each row is measured in a process of its own. Documents are random
tokens, and all texts have the same length, because random weights would not end them."""
EXAMPLES = """\
examples:
  ngramloss bench generate
  ngramloss bench generate --beams 4 --length 62 --source 400 --batch-size 8 -o generate.json
  ngramloss bench generate --model path/or/hub-id --engines ctranslate2-int8
  ngramloss bench generate --beams 6 --source 512 --batch-size 32 128 --engines graph      # on a GPU
  ngramloss bench generate --model smollm2-135m --source 256 --length 48 --batch-size 64 --engines graph
  ngramloss bench generate --model bart-tiny --source 50 --length 20      # quick
"""
HF = "Hugging Face (hf)"
SAME = "same texts %"
COLUMNS = [
    Column("docs/s"),
    Column("tokens/s", 1),
    ratio("× hf", "docs/s", HF),
    ratio("× best hf", "docs/s", HF, everywhere=True),
    Column(SAME, 0, "%"),
    Column("peak GiB", unit="GiB"),
]
Texts = list[list[list[int]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.model(parser)
    engines = "engines beside hf, as in `ngramloss list engines` (default: all that are installed)"
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME", help=engines)
    add.numbers(parser, "--batch-size", [1, 8], "B", "batch sizes")
    add.number(parser, "--beams", 4, "N", "beams; 1 is greedy")
    add.number(parser, "--length", 62, "T", "tokens of each text, with its start and end; behind a prompt, new ones")
    add.number(parser, "--source", 400, "T", "tokens of each document, or of each prompt")
    add.number(parser, "--repeats", 3, "N", "times that each batch is written; the median counts")
    add.precision(parser, "of the weights, for engines that take them as they are")
    add.number(parser, "--seed", 0, "N", "random seed of the documents")


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Every engine at every batch size."""
    names = chosen(options.engines)
    raise_unless_possible(options)
    texts: dict[tuple[str, str], Texts] = {}
    title = f"{options.model}, {options.beams} beams, {options.source} → {options.length} tokens, {options.precision}"
    return Plan(title, COLUMNS, rows(options, names, folder, texts), partial(compare, texts))


def chosen(only: Sequence[str]) -> list[str]:
    """The engines to measure, Hugging Face first: those that were asked for, or all that can write here."""
    for name in only:
        engines.raise_if_unknown(name)
        if name == recipe.AUTO:
            raise UserError(f"auto is not an engine of its own. Choose from {', '.join(engines.ENGINES)}.")
    others = only or [name for name, engine in engines.ENGINES.items() if not engine.needs and not engine.needs_drafter]
    return list(dict.fromkeys([engines.STANDARD, *others]))


def raise_unless_possible(options: argparse.Namespace) -> None:
    """Raise if a number is too small, or larger than the model's positions allow."""
    from ngramloss_bench import models

    config = models.configuration(options.model)
    both, longest = options.source + options.length, models.most_positions(config)
    if min(options.batch_size) < 1:
        raise UserError(f"--batch-size must be 1 or more, got {min(options.batch_size)}.")
    for flag, value, least in (("--source", options.source, 1), ("--length", options.length, 4)):
        if not least <= value <= longest:
            raise UserError(f"{flag} must be from {least} to {longest:,} for {options.model}, got {value:,}.")
    if models.is_decoder_only(config) and both > longest:
        raise UserError(f"--source and --length are {both:,} together, but {options.model} has {longest:,} positions.")


def label(engine: str) -> str:
    """The name of an engine in tables and charts."""
    return HF if engine == engines.STANDARD else f"ngramloss, {engine}"


def rows(
    options: argparse.Namespace, names: Sequence[str], cache: Path, texts: dict[tuple[str, str], Texts]
) -> Iterator[Row]:
    """Each in a process of its own. What is written goes into ``texts``, by group and name of the row."""

    def measure(group: str, batch: int, name: str) -> dict[str, list[float]]:
        values, texts[group, label(name)] = in_child(written, options, cache, name, batch)
        return values

    for batch in options.batch_size:
        group = f"batch {batch}"
        for name in names:
            yield Row(label(name), partial(measure, group, batch, name), group)


def compare(texts: dict[tuple[str, str], Texts], measured: list[Measured]) -> None:
    """Add the share of texts that are Hugging Face's, token for token."""
    for row in measured:
        expected, found = (texts.get((row.group, name), []) for name in (HF, row.name))
        if equal := [text == other for text, other in zip(found, expected, strict=False)]:
            row.values[SAME] = [100 * sum(equal) / len(equal)]


def written(options: argparse.Namespace, cache: Path, name: str, batch: int) -> tuple[dict[str, list[float]], Texts]:
    """Write texts of one batch with one engine, in this process. Memory is its peak, on a GPU that of its tensors."""
    import gc
    import os

    import torch

    from ngramloss_bench import clock, models

    os.environ["NGRAMLOSS_CACHE"] = str(cache)
    models.prepare(options)
    model = models.built(options.model, options.device).eval()
    model.to(options.device, getattr(torch, recipe.PRECISIONS[options.precision]))
    lengths: dict[str, Any] = dict.fromkeys(("min_length", "max_length", "min_new_tokens", "max_new_tokens"))
    new = "new_tokens" if models.is_decoder_only(model.config) else "length"
    lengths |= {f"min_{new}": options.length, f"max_{new}": options.length}
    search = {"num_beams": options.beams, "early_stopping": options.beams > 1, "renormalize_logits": True}
    V = model.get_output_embeddings().weight.shape[0]
    write = engines.load_engine(name, model, **search, **lengths)
    del model  # an engine may need it no longer
    gc.collect()
    generator = torch.Generator().manual_seed(options.seed)
    sources = torch.randint(4, V, (batch, options.source), generator=generator).tolist()
    texts: Texts = []

    def run() -> None:
        texts[:] = write(sources)

    write(sources[:1] if options.device == "cpu" else sources)  # warm up; on a GPU, for this number of documents
    with clock.peak_memory(options.device) as peak:
        spent = [clock.once(run, options.device) / 1e3 for _ in range(options.repeats)]
    tokens = sum(len(best[0]) - 1 for best in texts)  # the start token is not written
    # torch does not see the memory of other libraries
    known = options.device == "cpu" or engines.ENGINES[name].in_torch
    values = {
        "docs/s": [batch / each for each in spent],
        "tokens/s": [tokens / each for each in spent],
        "peak GiB": [peak() if known else NAN],
    }
    return values, texts
