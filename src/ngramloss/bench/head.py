"""sizes → cost of hidden states → loss → gradients, for each objective and backend, compared with other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ngramloss
from ngramloss.bench import chart, peers
from ngramloss.bench.captured import captured_cost
from ngramloss.bench.child import shortened
from ngramloss.bench.clock import Cost, cost
from ngramloss.loss import JointLoss
from ngramloss.stats import IGNORE_INDEX, Packing, at_positions, chosen_backend, labelled


class Size(NamedTuple):
    """The sizes of a head's input."""

    B: int
    T: int
    V: int
    D: int

    def __str__(self) -> str:
        return f"B={self.B} T={self.T:,} V={self.V:,} D={self.D:,}"


SIZES = {
    "bart-16": Size(16, 128, 50_265, 768),
    "bart-64": Size(64, 128, 50_265, 768),
    "bart-short": Size(64, 64, 50_265, 768),
    "bart-long": Size(2, 4_096, 50_265, 768),
    "llama": Size(4, 1_024, 128_256, 2_048),
    "smollm2": Size(32, 512, 49_152, 576),
    "cpu": Size(8, 128, 50_265, 768),
}
OBJECTIVES = ["ce", "ce + matches(2,3,4)", "ce + rewards(2,3,4)", "ce + precision(2)", "ce + bag(2)"]
FLOOR, STOCK = "three matrix products (lower bound)", "cross-entropy, stock"
NAN = float("nan")
LABELLED = ", labelled positions"
"""At the end of what computes only positions that have a label."""
CAPTURED = ", captured"
"""At the end of what is timed as a CUDA graph."""


class Row(NamedTuple):
    """One line of the table."""

    size: str
    what: str
    milliseconds: float
    gibibytes: float
    to_stock: float
    to_floor: float
    why_not: str = ""


def measure(
    sizes: list[str],
    device: str,
    dtype: torch.dtype,
    *,
    loops: bool,
    objectives: Sequence[str] = (),
    share: float = 1.0,
) -> Iterator[Row]:
    """Measure every contestant at every size; the lower bound and stock come first, as references.

    Args:
        sizes: names of sizes.
        device: "cpu" or "cuda".
        dtype: of hidden states and weights.
        loops: whether to time the paper's loops.
        objectives: instead of those that are measured otherwise.
        share: of the positions that have a label, the last ones of each row, as behind a prompt.
    """
    for name in sizes:
        size = SIZES[name]
        twins = any(JointLoss(objective).needs_twins for objective in objectives)
        hidden, weight, labels = example(size, device, dtype, twins=twins)
        labels[:, : size.T - max(round(share * size.T), 1)] = IGNORE_INDEX
        results: dict[str, Cost | str] = {}
        for what, run, leaves in contestants(
            hidden, weight, labels, loops=loops, capture=device == "cuda", objectives=objectives or OBJECTIVES
        ):
            try:
                cost_of = captured_cost if what.endswith(CAPTURED) else cost
                results[what] = cost_of(run, device, clear=partial(_drop_gradients, *leaves))
            except Exception as reason:  # a peer that cannot run here gets a line with the reason
                results[what] = shortened(reason)
            if what != FLOOR:  # which is compared with stock, the next one
                yield from (_row(name, each, results) for each in ([FLOOR, STOCK] if what == STOCK else [what]))


def _row(size: str, what: str, results: Mapping[str, Cost | str]) -> Row:
    """One line of the table; NaN where something could not be measured."""
    spent, stock, floor = results[what], results[STOCK], results[FLOOR]
    if isinstance(spent, str):
        return Row(size, what, NAN, NAN, NAN, NAN, spent)
    to_stock, to_floor = (
        NAN if isinstance(other, str) else spent.milliseconds / other.milliseconds for other in (stock, floor)
    )
    return Row(size, what, *spent, to_stock, to_floor)


def example(size: Size, device: str, dtype: torch.dtype, *, twins: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states with which a model is right about half the time, like a fine-tuned model.

    With ``twins``, rows 2i and 2i + 1 have the same labels, and hidden states that differ as by dropout.
    """
    generator = torch.Generator().manual_seed(0)
    B, T, V, D = size
    labels = torch.randint(0, V, (B, T), generator=generator)  # [B, T]
    weight = torch.randn(V, D, generator=generator) * D**-0.5  # [V, D]
    hidden = torch.randn(B, T, D, generator=generator)  # [B, T, D]
    if twins:
        labels[1::2] = labels[::2]
        hidden[1::2] = hidden[::2] + 0.3 * hidden[1::2]
    hidden += 4.5 * weight[labels]
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, labels.to(device)


def contestants(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, objectives: Sequence[str], loops: bool, capture: bool = False
) -> Iterator[tuple[str, Callable[[], Any], list[Tensor]]]:
    """The name of each contestant, a function that runs it, and the leaf tensors that get gradients.

    With ``capture``, the best backend's come again, to be timed as CUDA graphs. They come last, because a capture that
    fails may leave the device unusable.
    """

    def step(loss: Callable[..., Tensor], parameter: Tensor = weight) -> tuple[Callable[[], None], list[Tensor]]:
        def run() -> None:
            hidden.grad = parameter.grad = None
            loss(hidden, parameter, labels).backward()

        return run, [hidden, parameter]

    def compiled() -> Callable[..., Tensor]:
        torch._dynamo.reset()  # otherwise the second size would be compiled for any size, which is slower
        return torch.compile(peers.stock, dynamic=False)

    round_number = -(-weight.shape[0] // 128) * 128
    padded = torch.zeros(round_number, weight.shape[1], device=weight.device, dtype=weight.dtype)  # [V', D]
    padded[: weight.shape[0]] = weight.detach()
    padded.requires_grad_()
    yield FLOOR, partial(_three_products, hidden.detach().flatten(0, 1), padded.detach()), []
    yield STOCK, *step(peers.stock)
    yield "cross-entropy, torch.compile", *step(compiled())
    yield "cross-entropy, vocabulary padded", *step(peers.stock, padded)
    yield "cross-entropy, padded and torch.compile", *step(compiled(), padded)
    for name, peer in (("Liger-Kernel, cross-entropy", peers.liger()), ("cut-cross-entropy", peers.cut())):
        if peer is not None:
            yield name, *step(peer)
    if loops:
        for name, placed in (("matches", False), ("rewards", True)):
            loop = partial(peers.papers_loops, placed=placed, lengths=(2, 3, 4))
            yield f"the paper's loops, ce + {name}(2,3,4)", *step(loop)
    best = chosen_backend(hidden.device, hidden.dtype).backend
    for backend in dict.fromkeys([best, "chunked", "plain"]):
        for objective in objectives if backend == best else objectives[:2]:
            for memory in ("fast", "lean") if backend != "plain" and objective in objectives[:2] else ("fast",):
                loss_fn = JointLoss(objective, backend=backend, memory=memory)
                yield f"ngramloss {backend} {memory}, {objective}", *step(loss_fn.from_hidden)
    for objective in objectives if (labels == IGNORE_INDEX).any() else ():
        yield f"ngramloss {best} fast, {objective}{LABELLED}", *step(partial(_of_labelled, JointLoss(objective)))
    for objective in objectives if capture else ():
        loss_fn = JointLoss(objective, backend=best, memory="fast")
        yield f"ngramloss {best} fast, {objective}{CAPTURED}", *step(loss_fn.from_hidden)
    if capture and (packed := labelled(labels).packed) is not None:
        for objective in objectives:
            loss_fn = JointLoss(objective, backend=best, memory="fast")
            known = partial(_of_known, loss_fn, packed)
            yield f"ngramloss {best} fast, {objective}{LABELLED}{CAPTURED}", *step(known)


def _of_labelled(loss_fn: JointLoss, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of the positions that have a label, found again each time, as an attached decoder-only model does."""
    positions, packed = labelled(labels)
    return loss_fn.from_hidden(hidden, weight, labels, segments=packed, positions=positions)


def _of_known(loss_fn: JointLoss, packed: Packing, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same where it is known which positions have a label, as in the steps of ``ngramloss train``."""
    anywhere = torch.arange(packed.labels.numel(), device=labels.device) % labels.numel()  # [S · U]
    positions = packed.position.where(packed.labels != IGNORE_INDEX, anywhere.view_as(packed.labels))  # [S, U]
    return loss_fn.from_hidden(at_positions(hidden, positions), weight, packed.labels)


def _drop_gradients(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.grad = None


def _three_products(rows: Tensor, weight: Tensor) -> None:
    logits = rows @ weight.t()  # [N, V']
    logits @ weight
    logits.t() @ rows


def machine(device: str) -> str:
    """A description of the machine and the versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"{name}, torch {torch.__version__}, ngramloss {ngramloss.__version__}"


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Draw bars of time for each size."""
    panels = []
    for name in dict.fromkeys(row.size for row in rows):
        shown = [row for row in rows if row.size == name and row.milliseconds == row.milliseconds]
        shown = [row for row in shown if "loops" not in row.what and "plain" not in row.what]
        bars = [(row.what, row.milliseconds, f"{row.milliseconds:.2f} ms") for row in shown]
        panels.append(chart.Panel(str(SIZES[name]), "milliseconds, hidden states → loss → gradients", bars))
    chart.draw(panels, path, title)
