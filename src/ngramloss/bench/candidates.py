"""a model, lengths, a number of candidates → the time of a step that compares them, and of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.bench.captured import captured_cost
from ngramloss.bench.clock import Cost, cost
from ngramloss.bench.step import built, dtype_of, example
from ngramloss.errors import UserError
from ngramloss.hf.heads import has_encoder

NAN = float("nan")
PLAIN, ENCODER = "ce", "the encoder alone"


class Row(NamedTuple):
    """One line of the table: forward and backward of a batch, on a GPU as a CUDA graph."""

    what: str
    docs_per_second: float
    milliseconds: float
    gibibytes: float
    """Peak memory besides the model and the batch."""
    to_parts: float = NAN
    """Its time, divided by that of its parts: the encoder once, and the rest of the plain step for each text."""


def measure(
    model_name: str,
    objective: str,
    *,
    count: int,
    batch: int,
    source: int,
    target: int,
    precision: str,
    device: str,
    trust_remote_code: bool = False,
) -> Iterator[Row]:
    """Measure a plain step, its encoder, and a step that compares candidates of each source.

    Args:
        model_name: as in :func:`built`.
        objective: has a term that compares candidates.
        count: candidates of each source.
        batch: sources.
        source: tokens of each.
        target: tokens of the reference and of each candidate.
        precision: bf16 and fp16 are mixed.
        device: of the model.
        trust_remote_code: whether code that comes with the model may run.
    """
    from ngramloss.hf.attach import attach, detach

    if min(count, batch, source, target) < 1:
        raise UserError(f"expected numbers of at least 1, got {count}, {batch}, {source} and {target}.")
    model: Any = built(model_name, trust_remote_code=trust_remote_code).to(device)
    if not has_encoder(model):
        raise UserError(f"{model_name} is decoder-only, and has no encoder to time. Name an encoder-decoder.")
    longest = getattr(model.config, "max_position_embeddings", None) or max(source, target)
    if max(source, target) > longest:
        raise UserError(f"{model_name} has {longest:,} positions, but {max(source, target):,} tokens were asked for.")
    inputs = example(model, batch, source, target, device)
    others = example(model, batch * count, 1, target, device)["labels"].view(batch, count, target)  # [B, K, T]
    gains = torch.linspace(1, 0, count, device=device).expand(batch, -1)  # [B, K]

    def loss_of(**more: Tensor) -> Tensor:
        loss: Tensor = model(**inputs, **more).loss
        return loss

    def encoded() -> Tensor:
        hidden: Tensor = model.get_encoder()(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).last_hidden_state  # [B, S, D]
        return hidden.float().square().mean()

    attach(model, PLAIN)
    plain = _cost(model, loss_of, precision, device)
    yield _row(PLAIN, plain, batch)
    detach(model)
    encoder = _cost(model, encoded, precision, device)
    yield _row(ENCODER, encoder, batch)
    attach(model, objective)
    found = _cost(model, lambda: loss_of(candidates=others, gains=gains), precision, device)
    parts = encoder.milliseconds + (1 + count) * (plain.milliseconds - encoder.milliseconds)
    yield _row(f"{objective}, {count} candidates", found, batch)._replace(to_parts=found.milliseconds / parts)


def _row(what: str, spent: Cost, batch: int) -> Row:
    return Row(what, 1e3 * batch / spent.milliseconds, spent.milliseconds, spent.gibibytes)


def _cost(model: Any, loss_of: Callable[[], Tensor], precision: str, device: str) -> Cost:
    """The cost of forward and backward."""

    def run() -> None:
        model.zero_grad()
        with torch.autocast(device, dtype_of(precision), enabled=precision != "fp32"):
            loss = loss_of()
        loss.backward()

    if device == "cuda":
        return captured_cost(run, device, clear=model.zero_grad)
    return cost(run, device, clear=model.zero_grad, repeats=3, warm_up=1)
