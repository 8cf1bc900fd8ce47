"""sizes → cost of hidden states → loss → gradients, for each objective and backend, compared with other libraries."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ngramloss import UserError, console
from ngramloss_bench import options as add
from ngramloss_bench.benchmark import Column, Measured, Plan, Row, check_objectives, ratio

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUMMARY = "hidden states → loss → gradients"
TEXT = """\
Time the path from hidden states to the loss and its gradients, for each objective and backend. PyTorch's cross-entropy
and other libraries are timed in the same run."""
EXAMPLES = """\
examples:
  ngramloss bench head
  ngramloss bench head --sizes bart-16 bart-64 -o head.json
  ngramloss bench head --objectives ce "ce + soft(1)" "ce + unlikelihood"
  ngramloss bench head --sizes bart-64 --objectives ce "ce + rdrop"      # 2 × 32 rows, for every line
  ngramloss bench head --sizes bart-16 --loops        # the paper's own loops too: slow
"""
AXIS = "milliseconds, hidden states → loss → gradients"


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
COLUMNS = [Column("ms"), Column("GiB"), ratio("/ stock", "ms", STOCK), ratio("/ bound", "ms", FLOOR)]
LABELLED = ", labelled positions"
"""At the end of what computes only positions that have a label."""
CAPTURED = ", captured"
"""At the end of what is timed as a CUDA graph."""
Contestant = tuple[str, Callable[[], object], list["Tensor"]]
"""A name, a function that runs it, and the leaf tensors that get gradients."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    sizes = "sizes to time (default: bart-16 bart-64 llama; without a GPU: cpu)"
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help=sizes)
    objectives = "objectives to time (default: ce, and ce with matches, rewards, precision and bag)"
    parser.add_argument("--objectives", nargs="+", metavar="OBJECTIVE", help=objectives)
    parser.add_argument("--loops", action="store_true", help="also time the paper's own loops, which are slow")
    types = "data type (default: bfloat16 on a GPU, float32 on a CPU)"
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help=types)
    share = "share of the positions with a label, as behind a prompt; then labelled positions are also measured alone"
    parser.add_argument("--labelled", type=_share, default=1.0, metavar="SHARE", help=f"{share} (default: 1)")
    add.calls(parser, "30, or 3 of a call that takes over 2 seconds")


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return share


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Every contestant at every size."""
    check_objectives(options.objectives or (), has="twins")
    on_gpu = options.device == "cuda"
    options.sizes = options.sizes or (["bart-16", "bart-64", "llama"] if on_gpu else ["cpu"])
    for size in options.sizes:
        if size not in SIZES:
            raise UserError(f"unknown size {size!r}. Choose from {', '.join(SIZES)}.")
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    sizes = "\n".join(f"{size}: {SIZES[size]}" for size in options.sizes)
    return Plan(f"{AXIS}, {options.dtype}\n{sizes}", COLUMNS, rows(options), compare)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """The lower bound and stock come first at each size."""
    import torch

    from ngramloss import IGNORE_INDEX, JointLoss
    from ngramloss_bench import clock

    objectives = options.objectives or OBJECTIVES
    twins = any(JointLoss(objective).needs_twins for objective in objectives)
    for name in options.sizes:
        size = SIZES[name]
        hidden, weight, labels = example(size, options.device, getattr(torch, options.dtype), twins=twins)
        labels[:, : size.T - max(round(options.labelled * size.T), 1)] = IGNORE_INDEX
        for what, call, leaves in contestants(
            hidden, weight, labels, objectives=objectives, loops=options.loops, capture=options.device == "cuda"
        ):
            cost = clock.captured_cost if what.endswith(CAPTURED) else clock.cost
            drop = partial(_drop_gradients, *leaves)
            yield Row(what, partial(cost, call, options.device, repeats=options.repeats, clear=drop), name)


def compare(measured: list[Measured]) -> None:
    """Warn if something took less time than the lower bound."""
    if impossible := [row.name for row in measured if row.median("/ bound") < 0.95 and LABELLED not in row.name]:
        console.logger.warning(
            f"warning: {impossible[0]!r} took less time than the lower bound, so the machine was busy with something "
            "else and no time in this table can be trusted. Measure again when it is free."
        )


def _drop_gradients(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.grad = None


def example(size: Size, device: str, dtype: torch.dtype, *, twins: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states with which a model is right half the time; of ``twins`` two rows differ as by dropout."""
    import torch

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
) -> Iterator[Contestant]:
    """All that is timed. Captured ones come last, because a capture that fails may leave the device unusable."""
    import torch

    from ngramloss import IGNORE_INDEX, JointLoss
    from ngramloss.loss.stats import chosen_backend, labelled
    from ngramloss_bench import peers

    def step(what: str, loss: Callable[..., Tensor], parameter: Tensor = weight) -> Contestant:
        def run() -> None:
            hidden.grad = parameter.grad = None
            loss(hidden, parameter, labels).backward()

        return what, run, [hidden, parameter]

    def compiled() -> Callable[..., Tensor]:
        torch._dynamo.reset()  # otherwise the second size would be compiled for any size, which is slower
        return torch.compile(peers.stock, dynamic=False)

    round_number = -(-weight.shape[0] // 128) * 128
    padded = torch.zeros(round_number, weight.shape[1], device=weight.device, dtype=weight.dtype)  # [V', D]
    padded[: weight.shape[0]] = weight.detach()
    padded.requires_grad_()
    yield FLOOR, partial(peers.three_products, hidden.detach().flatten(0, 1), padded.detach()), []
    yield step(STOCK, peers.stock)
    yield step("cross-entropy, torch.compile", compiled())
    yield step("cross-entropy, vocabulary padded", peers.stock, padded)
    yield step("cross-entropy, padded and torch.compile", compiled(), padded)
    for name, peer in peers.PEERS.items():
        yield step(name, peer)
    for name, placed in (("matches", False), ("rewards", True)) if loops else ():
        loop = partial(peers.papers_loops, placed=placed, lengths=(2, 3, 4))
        yield step(f"the paper's loops, ce + {name}(2,3,4)", loop)
    best = chosen_backend(hidden.device, hidden.dtype).backend
    for backend in dict.fromkeys([best, "chunked", "plain"]):
        for objective in objectives if backend == best else objectives[:2]:
            for memory in ("fast", "lean") if backend != "plain" and objective in objectives[:2] else ("fast",):
                loss_fn = JointLoss(objective, backend=backend, memory=memory)
                yield step(f"ngramloss {backend} {memory}, {objective}", loss_fn.from_hidden)
    for objective in objectives if (labels == IGNORE_INDEX).any() else ():
        found = partial(peers.of_labelled, JointLoss(objective))
        yield step(f"ngramloss {best} fast, {objective}{LABELLED}", found)
    ours = [(objective, JointLoss(objective, backend=best, memory="fast")) for objective in objectives if capture]
    for objective, loss_fn in ours:
        yield step(f"ngramloss {best} fast, {objective}{CAPTURED}", loss_fn.from_hidden)
    packed = labelled(labels).packed
    for objective, loss_fn in ours:
        if packed is None:
            break
        known = partial(peers.of_known, loss_fn, packed)
        yield step(f"ngramloss {best} fast, {objective}{LABELLED}{CAPTURED}", known)
