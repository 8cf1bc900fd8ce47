"""hidden states, weight and labels → losses of other implementations, and ours where few positions have labels."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss import IGNORE_INDEX, JointLoss
from ngramloss.loss.stats import Packing, at_positions, labelled
from ngramloss_bench.child import Failed

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def stock(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy as Hugging Face computes it: logits, in fp32, then ``F.cross_entropy``."""
    logits = F.linear(hidden, weight).float()  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def papers_loops(hidden: Tensor, weight: Tensor, labels: Tensor, *, placed: bool, lengths: tuple[int, ...]) -> Tensor:
    """Cross-entropy plus Algorithm 1 (``placed``) or 2 of Zhu et al. for each n, with the paper's loops."""
    logits = F.linear(hidden, weight).float()  # [B, T, V]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    probability, candidates = logits.softmax(-1).max(-1)  # [B, T] each
    for row in range(len(labels)):
        length = int((labels[row] >= 0).sum())
        values, candidate, reference = probability[row, :length], candidates[row, :length], labels[row, :length]
        for n in lengths:
            kept: dict[str, list[Tensor]] = {}
            for s in range(length - n + 1):
                found = kept.setdefault("_".join(map(str, reference[s : s + n].tolist())), [])
                if placed and torch.all(candidate[s : s + n] == reference[s : s + n]):
                    found.append(values[s : s + n].prod())
            for s in range(0 if placed else length - n + 1):
                match = kept.get("_".join(map(str, candidate[s : s + n].tolist())))
                if match is not None:
                    match.append(values[s : s + n].prod())
            each = 1 / max(length - n + 1, 1)
            loss = loss + 1 / len(labels)
            for found in kept.values():
                for value in found:
                    loss = loss - each / len(found) * value / len(labels)
    return loss


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's own fused cross-entropy, in chunks; without these options it is stock cross-entropy."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Failed(f"needs torch 2.13 or newer, this is {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(hidden.flatten(0, -2), weight, labels.flatten(), options=options)
    return loss


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy."""
    function = _imported("liger_kernel.transformers", "liger-kernel").LigerFusedLinearCrossEntropyLoss()
    loss: Tensor = function(weight, hidden.flatten(0, -2), labels.flatten())
    return loss


def cut(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Apple's cut cross-entropy."""
    module = _imported("cut_cross_entropy", "cut-cross-entropy")
    loss: Tensor = module.linear_cross_entropy(hidden, weight, labels)
    return loss


def _imported(module: str, package: str) -> Any:
    if find_spec(module.partition(".")[0]) is None:
        raise Failed(f"not installed: pip install {package}")
    return import_module(module)


PEERS: dict[str, Loss] = {
    "F.linear_cross_entropy": linear_cross_entropy,
    "Liger-Kernel, cross-entropy": liger,
    "cut-cross-entropy": cut,
}
"""Fused losses of others. One that is not installed raises :class:`Failed` with the reason."""


def of_labelled(loss_fn: JointLoss, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of the positions that have a label, found again each time, as an attached decoder-only model does."""
    positions, packed = labelled(labels)
    return loss_fn.from_hidden(hidden, weight, labels, segments=packed, positions=positions)


def of_known(loss_fn: JointLoss, packed: Packing, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same where it is known which positions have a label, as in the steps of ``ngramloss train``."""
    anywhere = torch.arange(packed.labels.numel(), device=labels.device) % labels.numel()  # [S · U]
    positions = packed.position.where(packed.labels != IGNORE_INDEX, anywhere.view_as(packed.labels))  # [S, U]
    return loss_fn.from_hidden(at_positions(hidden, positions), weight, packed.labels)


def three_products(rows: Tensor, weight: Tensor) -> None:
    """The matrix products that every implementation must compute."""
    logits = rows @ weight.t()  # [N, V']
    logits @ weight
    logits.t() @ rows
