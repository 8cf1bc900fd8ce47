"""a model, lengths, batch sizes → documents and tokens per second of each engine, compared with Hugging Face's."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import logging

from ngramloss.bench import chart, step
from ngramloss.bench.child import in_child
from ngramloss.bench.clock import peak_resident, seconds
from ngramloss.engine_registry import AUTO, ENGINES, PRECISIONS, STANDARD, raise_if_unknown
from ngramloss.errors import UserError
from ngramloss.generation import engines
from ngramloss.generation.engines.hf import search_of
from ngramloss.models.loading import is_causal
from ngramloss.output.console import logger
from ngramloss.output.tabular import aligned, fixed

NAN = float("nan")
Texts = list[list[list[int]]]


@dataclass(frozen=True)
class Setup:
    """What all engines have in common."""

    model: str
    batches: tuple[int, ...]
    beams: int
    length: int
    """Tokens of every text, with its start and end: random weights would never end one. A prompt's are not counted."""
    source: int
    repeats: int
    device: str
    seed: int
    cache: str
    """A folder for converted models."""
    trust_remote_code: bool = False
    precision: str = "fp32"
    """Of the weights, for Hugging Face and the engines that take the model as it is."""


class Row(NamedTuple):
    """One line of the table. Numbers that could not be measured are NaN."""

    engine: str
    batch: int
    docs_per_second: float = NAN
    tokens_per_second: float = NAN
    to_hf: float = NAN
    """Documents per second, as a multiple of Hugging Face's."""
    to_best_hf: float = NAN
    """As a multiple of Hugging Face's at its best batch size."""
    same: float = NAN
    """The share of texts that are Hugging Face's, token for token."""
    gibibytes: float = NAN
    """Peak memory while texts are written: of the process, on a GPU of its tensors."""
    why_not: str = ""

    @property
    def what(self) -> str:
        """The engine's name in tables and charts."""
        return "Hugging Face (hf)" if self.engine == STANDARD else f"ngramloss, {self.engine}"


class Measured(NamedTuple):
    """What one engine did with one batch."""

    row: Row
    texts: Texts


def chosen(only: Sequence[str]) -> list[str]:
    """The engines to measure, Hugging Face first: those that were asked for, or all that are installed."""
    for name in only:
        raise_if_unknown(name)
        if name == AUTO:
            raise UserError(f"auto is not an engine of its own. Choose from {', '.join(ENGINES)}.")
    others = only or [name for name, engine in ENGINES.items() if not engine.needs]
    return list(dict.fromkeys([STANDARD, *others]))


def raise_unless_possible(setup: Setup) -> None:
    """Raise if a number is too small, or larger than the model's positions allow."""
    config = step.configuration(setup.model, trust_remote_code=setup.trust_remote_code)
    both = setup.source + setup.length
    longest = getattr(config, "max_position_embeddings", None) or both
    if min(setup.batches) < 1:
        raise UserError(f"--batch must be 1 or more, got {min(setup.batches)}.")
    for flag, value, least in (("--source", setup.source, 1), ("--length", setup.length, 4)):
        if not least <= value <= longest:
            raise UserError(f"{flag} must be from {least} to {longest:,} for {setup.model}, got {value:,}.")
    if is_causal(config) and both > longest:
        raise UserError(f"--source and --length are {both:,} together, but {setup.model} has {longest:,} positions.")


def measure(setup: Setup, names: Sequence[str]) -> list[Row]:
    """Write texts with each engine in a process of its own. One that fails gets rows with the reason."""
    answers: dict[str, list[Measured]] = {}
    for number, name in enumerate(names, 1):
        logger.info(f"{number} of {len(names)}: {name}")
        answer = in_child(written, setup, name)
        failed = [Measured(Row(name, batch, why_not=answer.why_not), []) for batch in setup.batches]
        answers[name] = answer.result or failed
        for measured in answers[name]:
            row = measured.row
            logger.info(f"  batch {row.batch}: {row.why_not or f'{row.docs_per_second:.2f} documents per second'}")
    return [
        row
        for rows in zip(*(compared(found, answers[STANDARD]) for found in answers.values()), strict=True)
        for row in rows
    ]


def compared(found: Sequence[Measured], stock: Sequence[Measured]) -> list[Row]:
    """The rows of an engine with their multiples of Hugging Face's speed, and the share of equal texts."""
    rows = []
    best = max((reference.docs_per_second for reference, _ in stock if not reference.why_not), default=NAN)
    for (row, texts), (reference, expected) in zip(found, stock, strict=True):
        equal = [text == other for text, other in zip(texts, expected, strict=False)]
        rows.append(
            row._replace(
                to_hf=row.docs_per_second / reference.docs_per_second,
                to_best_hf=row.docs_per_second / best,
                same=sum(equal) / len(equal) if equal else NAN,
            )
        )
    return rows


def written(setup: Setup, name: str) -> list[Measured]:
    """Write texts with one engine, in this process."""
    os.environ["NGRAMLOSS_CACHE"] = setup.cache
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    model = step.built(setup.model, trust_remote_code=setup.trust_remote_code).eval()
    model.to(setup.device, getattr(torch, PRECISIONS[setup.precision]))
    lengths: dict[str, Any] = dict.fromkeys(("min_length", "max_length", "min_new_tokens", "max_new_tokens"))
    names = ("min_new_tokens", "max_new_tokens") if is_causal(model.config) else ("min_length", "max_length")
    search = search_of(
        model,
        num_beams=setup.beams,
        early_stopping=setup.beams > 1,
        renormalize_logits=True,
        **lengths | dict.fromkeys(names, setup.length),
    )
    V = model.get_output_embeddings().weight.shape[0]
    write = engines.load(name, model, search).write
    del model  # an engine may need it no longer
    gc.collect()
    return [_measured(setup, name, batch, V, write) for batch in setup.batches]


def _measured(setup: Setup, name: str, batch: int, V: int, write: engines.Write) -> Measured:
    generator = torch.Generator().manual_seed(setup.seed)
    sources = torch.randint(4, V, (batch, setup.source), generator=generator).tolist()
    texts: Texts = []

    def run() -> None:
        texts[:] = write(sources)

    write(sources[:1] if setup.device == "cpu" else sources)  # warm up; on a GPU, for this number of documents
    with peak_resident(setup.device) as peak:
        spent = seconds(run, setup.device, repeats=setup.repeats)
    tokens = sum(len(best[0]) - 1 for best in texts)  # the start token is not written
    known = setup.device == "cpu" or ENGINES[name].in_torch  # torch does not see what other libraries have on a GPU
    return Measured(Row(name, batch, batch / spent, tokens / spent, gibibytes=peak() if known else NAN), list(texts))


HEADS = ("docs/s", "tokens/s", "× hf", "× best hf", "same texts %", "peak GiB")


def as_text(rows: Sequence[Row]) -> str:
    """The rows as a table, then a line for each engine that failed."""
    table: list[tuple[str, ...]] = [("", *HEADS)]
    for row in rows:
        if not row.why_not:
            numbers = (
                row.docs_per_second,
                row.tokens_per_second,
                row.to_hf,
                row.to_best_hf,
                100 * row.same,
                row.gibibytes,
            )
            table.append((f"batch {row.batch}: {row.what}", *map(fixed, numbers, (2, 1, 2, 2, 0, 2))))
    failed = dict.fromkeys(f"{row.what}: {row.why_not}" for row in rows if row.why_not)
    return "\n".join([*(aligned(table) if len(table) > 1 else []), *failed])


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw bars of documents per second, one panel for each batch size."""
    panels = []
    for batch in dict.fromkeys(row.batch for row in rows):
        shown = [row for row in rows if row.batch == batch and not row.why_not]
        bars = [(row.what, row.docs_per_second, f"{row.docs_per_second:.2f}") for row in shown]
        panels.append(chart.Panel(f"batch {batch}", "documents per second", bars))
    chart.draw(panels, path, title)


def settings(setup: Setup) -> dict[str, Any]:
    """The settings that are saved with the measurements."""
    names = ("model", "batches", "beams", "length", "source", "repeats", "device", "seed", "precision")
    return {name: getattr(setup, name) for name in names}
