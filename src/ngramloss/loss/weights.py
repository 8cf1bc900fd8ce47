"""a part of a loss and the progress of training → the share of its weight; weights as a tensor on each device."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.terms.term import Part

if TYPE_CHECKING:
    from ngramloss.loss.joint_loss import JointLoss

_sent: WeakKeyDictionary[JointLoss, dict[tuple[torch.dtype, torch.device], tuple[tuple[float, ...], Tensor]]]
_sent = WeakKeyDictionary()
"""The weights of a loss on each device, and their values when they were sent; a copy of a loss has its own."""


def share_now(part: Part, progress: float | None) -> float:
    """The share of its weight that a part has. Raises if it has a schedule and the progress is not known."""
    if part.schedule is None:
        return 1.0
    if torch.compiler.is_compiling():
        raise UserError(
            f"{part.name}{part.schedule} changes its weight during training, which compiled code would "
            "not see. Compile the encoder and decoder only, or leave the schedule out."
        )
    if progress is None:
        raise UserError(
            f"the weight of {part.name}{part.schedule} depends on the progress of training, which was not set. "
            "NgramTrainer and NgramSFTTrainer set it; give other Hugging Face trainers callbacks=[ng.LogParts()]; in "
            "your own loop set loss_fn.progress (for an attached model ng.attached_loss(model).progress) to the "
            "share of steps done."
        )
    return part.schedule.share(progress)


def weights_on_device(loss_fn: JointLoss, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weights on a device, [parts]: always the same tensor, because a CUDA graph reads it where it was."""
    weights = loss_fn.weights
    if torch.compiler.is_compiling():
        return torch.tensor(weights, dtype=dtype, device=device)
    sent = _sent.setdefault(loss_fn, {})
    if (dtype, device) not in sent:
        with torch.inference_mode(False):
            sent[dtype, device] = weights, torch.tensor(weights, dtype=dtype, device=device)
    return sent[dtype, device][1]


def refresh_weights(loss_fn: JointLoss) -> None:
    """Overwrite the tensors of :func:`weights_on_device` where the weights have changed."""
    weights = loss_fn.weights
    for key, (before, tensor) in _sent.get(loss_fn, {}).items():
        if before != weights:
            tensor.copy_(torch.tensor(weights))
            _sent[loss_fn][key] = weights, tensor
