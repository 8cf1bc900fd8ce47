"""a model, lengths, a number of samples → documents and texts per second of a training on what the model writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ngramloss.bench.step import built, example
from ngramloss.data import Example
from ngramloss.errors import UserError
from ngramloss.hf.heads import has_encoder
from ngramloss.metrics import gains
from ngramloss.recipe import Generation, Online, Train
from ngramloss.training import loop
from ngramloss.training.online import OwnTexts
from ngramloss.training.processes import Processes

NAN = float("nan")
PLAIN = "ce, without writing"


class Row(NamedTuple):
    """One line of the table: means of the second half of a training."""

    what: str
    docs_per_second: float
    texts_per_second: float = NAN
    """While the model writes; scoring is counted."""
    writing_share: float = NAN
    """The share of the time in which it writes and scores."""
    gibibytes: float = NAN
    """Peak memory, on a GPU."""


class _Numbers:
    """A tokenizer whose words are ids."""

    pad_token_id: int | None = None

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def measure(
    model_name: str,
    objective: str,
    *,
    count: int,
    batch: int,
    source: int,
    target: int,
    steps: int,
    refreshes: Sequence[int],
    precision: str,
    device: str,
    trust_remote_code: bool = False,
) -> Iterator[Row]:
    """Train without writing, then with the model's own texts, for each number of steps between two refreshes.

    Each training has twice ``steps`` steps, of which the second half is measured. Random weights end few texts, so most
    have the greatest length.

    Args:
        model_name: as in :func:`built`.
        objective: has a term that compares candidates.
        count: samples of each source.
        batch: sources of a step.
        source: tokens of each.
        target: tokens of the reference, and the most of each sample.
        steps: that are measured.
        refreshes: numbers of steps for which texts are written at a time.
        precision: of training; the model writes in the precision of its weights.
        device: of the model.
        trust_remote_code: whether code that comes with the model may run.
    """
    numbers = count, batch, source, target, steps, *refreshes
    if min(numbers) < 1:
        raise UserError(f"expected numbers of at least 1, got {', '.join(map(str, numbers))}.")
    here = Processes(0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))
    for refresh in (0, *refreshes):
        model: Any = built(model_name, trust_remote_code=trust_remote_code)
        ids = example(model, batch * 8, source, target, "cpu")
        rows = [
            {"input_ids": read, "labels": labels}
            for read, labels in zip(ids["input_ids"][:, :source].tolist(), _labels(ids, target), strict=True)
        ]
        settings = Train(
            max_steps=2 * steps,
            batch_size=batch,
            accumulate=1,
            warmup_steps=0,
            log_every=steps,
            eval_every=0,
            save_every=2 * steps,
            precision=precision,
        )
        own = _own_texts(rows, Online(samples=count, refresh=refresh), target + has_encoder(model)) if refresh else None
        lines: list[Mapping[str, float]] = []
        if here.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(here.device)
        job = loop.Job(
            model,
            _Numbers(),
            rows,
            settings,
            objective if refresh else "ce",
            own_texts=own,
            on_step=partial(_keep, lines),
        )
        loop.run(job, here)
        yield _row(f"{objective}, {count} samples, refresh {refresh}" if refresh else PLAIN, lines[-1], here.device)


def _keep(lines: list[Mapping[str, float]], _: int, line: Mapping[str, float]) -> None:
    lines.append(line)


def _labels(ids: Mapping[str, Any], target: int) -> list[list[int]]:
    return [[int(token) for token in row[-target:]] for row in ids["labels"]]


def _own_texts(rows: Sequence[Mapping[str, Any]], settings: Online, max_length: int) -> OwnTexts:
    """What the model writes, scored with ROUGE: ids are words."""
    gain = gains.gain_of("rouge", {})
    examples = [
        Example(str(number), " ".join(map(str, row["input_ids"])), " ".join(map(str, row["labels"])))
        for number, row in enumerate(rows)
    ]
    return OwnTexts(
        settings,
        lambda numbers, texts: gains.gains_at_once(gain, [examples[number] for number in numbers], texts),
        Generation(max_length=max_length),
    )


def _row(what: str, line: Mapping[str, float], device: torch.device) -> Row:
    values = {name: line[name] for name in ("texts_per_second", "writing_share") if name in line}
    memory = {"gibibytes": line["memory_gib"]} if device.type == "cuda" else {}
    return Row(what, line["docs_per_second"], **values, **memory)
