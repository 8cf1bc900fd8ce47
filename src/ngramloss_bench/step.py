"""a model, an objective, lengths → documents per second of whole training steps, compared with the model's own loss."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ngramloss import UserError
from ngramloss_bench import head
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import NAN, Column, Measured, Plan, Row, check_objectives, ratio

SUMMARY = "documents per second in training"
TEXT = """\
Measure documents per second in training: with the model's own loss, eagerly and compiled, with the fused losses of
other libraries on the decoder's output, and with each objective attached."""
EXAMPLES = """\
examples:
  ngramloss bench step --batch-size 64
  ngramloss bench step --model path/or/hub-id --objectives "ce + rewards(2,3,4)" --source 512 --target 64
"""
OBJECTIVES = ["ce", "ce + matches(2,3,4)"]
STOCK = "the model's own cross-entropy"
COMPILED = f"{STOCK}, torch.compile"
CAPTURED = ", captured"
"""At the end of objectives whose forward and backward pass is a CUDA graph."""
ADDED = "+ ms to ce"
"""Of a captured forward and backward pass, in addition to that of captured ``ce``."""
COLUMNS = [
    Column("docs/s", 1),
    ratio("× stock", "docs/s", STOCK),
    Column("ms", 1),
    Column("GiB"),
    Column(ADDED, unit="ms"),
]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.model(parser)
    objectives = (
        f"objectives to attach (default: {' and '.join(map(repr, OBJECTIVES))}; as CUDA graphs, also rewards, "
        "precision and bag)"
    )
    parser.add_argument("--objectives", nargs="+", metavar="OBJECTIVE", help=objectives)
    add.number(parser, "--batch-size", 16, "B", "batch size")
    add.number(parser, "--source", 1024, "T", "document tokens")
    add.number(parser, "--target", 128, "T", "summary tokens")
    add.precision(parser, "bf16 and fp16 are mixed precision; bf16-pure has bf16 weights too", "bf16-pure")
    add.calls(parser, "15, or 3 of a step that takes over 2 seconds")


def title(options: argparse.Namespace) -> str:
    """The model and the shape of a step."""
    shape = f"{options.source} → {options.target} tokens, batch {options.batch_size}"
    return f"{options.model}, {shape}, {options.precision}"


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Forward, backward and optimiser: first with the model's own loss, then with each objective."""
    check_objectives(options.objectives or ())
    return Plan(title(options), COLUMNS, rows(options), compare)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """On a GPU, objectives come again at the end, after ``ce``, with their passes as CUDA graphs."""
    import torch

    from ngramloss import attach, detach
    from ngramloss_bench import clock, models, peers

    device, batch, precision = options.device, options.batch_size, options.precision
    model: Any = models.built(options.model, device)
    lengths = options.source, options.target
    longest, decoder_only = models.most_positions(model.config), models.is_decoder_only(model.config)
    if min(batch, *lengths) < 1 or (sum(lengths) if decoder_only else max(lengths)) > longest:
        raise UserError(
            f"expected a batch of at least 1 and lengths from 1 to {longest}, got {batch}, {lengths[0]} and "
            f"{lengths[1]}."
        )
    if precision.endswith("pure"):
        model.to(models.dtype_of(precision))
    inputs = models.example(model, batch, *lengths, device)

    def optimiser_of(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), 3e-5, fused=device == "cuda")

    optimiser = optimiser_of(model)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    timing: dict[str, Any] = {"repeats": options.repeats, "usual": 15, "warm_up": 5}

    def loss_of(output: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with models.autocast(device, precision):
                loss = output()
            scaler.scale(loss).backward()

        return run

    passes = loss_of(lambda: model(**inputs).loss)

    def update(optimiser: Any = optimiser) -> None:
        scaler.step(optimiser)
        scaler.update()

    def eager(passes: Callable[[], None] = passes, optimiser: Any = optimiser) -> dict[str, list[float]]:
        def run() -> None:
            passes()
            update(optimiser)
            optimiser.zero_grad(set_to_none=True)

        return clock.per_second(clock.cost(run, device, **timing), batch)

    def compiled(*, padded: bool) -> dict[str, list[float]]:
        torch._dynamo.reset()
        own = model
        if padded:
            own = copy.deepcopy(model)
            own.resize_token_embeddings(-(-own.config.vocab_size // 128) * 128, mean_resizing=False)
        call: Any = torch.compile(own, dynamic=False)
        return eager(loss_of(lambda: call(**inputs).loss), optimiser_of(own))

    def peer(loss: peers.Loss) -> dict[str, list[float]]:
        def output() -> Any:
            hidden, labels = models.head_inputs(model, inputs)  # [B, T, D], [B, T]
            weight = model.get_output_embeddings().weight.to(hidden.dtype)  # [V, D]
            return loss(hidden, weight, labels)

        return eager(loss_of(output))

    def captured() -> dict[str, list[float]]:
        def fresh() -> None:
            optimiser.zero_grad()
            passes()

        def run() -> None:
            replay()
            update()

        try:
            replay, gibibytes = clock.captured(fresh, optimiser.zero_grad)
            alone, whole = (clock.milliseconds(call, device, **timing) for call in (replay, run))
            return clock.per_second({"ms": whole, "GiB": [gibibytes], ADDED: alone}, batch)
        finally:
            optimiser.zero_grad()

    yield Row(STOCK, eager)
    yield Row(COMPILED, partial(compiled, padded=False))
    yield Row(f"{COMPILED}, vocabulary padded", partial(compiled, padded=True))
    for name, loss in peers.PEERS.items():
        yield Row(name, partial(peer, loss))
    for objective in options.objectives or OBJECTIVES:
        attach(model, objective)
        yield Row(objective, eager)
        detach(model)
    for objective in captured_objectives(options):
        attach(model, objective)
        yield Row(objective + CAPTURED, captured)
        detach(model)


def captured_objectives(options: argparse.Namespace) -> list[str]:
    """The objectives whose passes are CUDA graphs: ``ce`` first."""
    return list(dict.fromkeys(["ce", *(options.objectives or head.OBJECTIVES)])) if options.device == "cuda" else []


def compare(measured: list[Measured]) -> None:
    """Subtract captured ``ce`` from what is captured."""
    base = next((row.median(ADDED) for row in measured if row.name == "ce" + CAPTURED), NAN)
    for row in measured:
        if base == base and ADDED in row.values:
            row.values[ADDED] = [spent - base for spent in row.values[ADDED]]
