"""hidden states, weight and labels → losses of other implementations, and ours where few positions have labels."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss import IGNORE_INDEX, JointLoss
from ngramloss.loss.stats import Packing, at_positions, labelled

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


def liger() -> Loss | None:
    """Liger-Kernel's fused linear cross-entropy, if it is installed."""
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: function(weight, hidden.flatten(0, 1), labels.flatten())


def cut() -> Loss | None:
    """Apple's cut cross-entropy, if it is installed."""
    if find_spec("cut_cross_entropy") is None:
        return None
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels)


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
