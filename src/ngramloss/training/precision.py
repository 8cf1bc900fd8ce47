"""``train.precision`` and a device → the precision of a training: what computes in it, and what scales its loss."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ngramloss.errors import UserError
from ngramloss.recipe import Train

if TYPE_CHECKING:
    import torch


PRECISION = "precision of training"
"""What the record of a training calls it: where ``train.precision`` is auto, the device decides."""


def precision_of(settings: Train, device: torch.device) -> str:
    """``bf16``, ``fp16`` or ``fp32``; raises if this device cannot."""
    import torch

    if settings.precision == "fp16" and device.type == "cpu":
        raise UserError("train.precision: fp16 needs a GPU. Use bf16 or fp32.")
    if settings.precision != "auto":
        return settings.precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"


def autocast(precision: str, device: torch.device) -> Any:
    """Autocast to this precision. Weights keep theirs."""
    import torch

    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if low is None else torch.autocast(device.type, low)


def scaler_of(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """What multiplies the loss of fp16, so that small gradients are not 0. In other precisions it changes nothing."""
    import torch

    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def restore_scale(scaler: torch.amp.GradScaler, scale: float, grows_in: int) -> None:
    """Give it the scale that a checkpoint has, and the steps since that last changed."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": grows_in})


def update(scaler: torch.amp.GradScaler, optimiser: torch.optim.Optimizer) -> bool:
    """Update the weights, unless a gradient of fp16 is infinite. Returns whether they were."""
    before = scaler.get_scale()
    scaler.step(optimiser)
    scaler.update()
    return bool(scaler.get_scale() >= before)
