"""a model and settings → AdamW, and the learning rates of each step."""

from __future__ import annotations

from typing import Any

import torch

from ngramloss.errors import UserError
from ngramloss.models.attached.heads import has_encoder
from ngramloss.output.console import logger
from ngramloss.recipe import Train
from ngramloss.training.learning_rates import learning_rate, warmup_steps


def optimiser_of(model: Any, settings: Train, device: torch.device) -> torch.optim.Optimizer:
    """AdamW without decay of vectors. An encoder with its own learning rate has the last groups, marked ``encoder``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own: set[int] = set()  # the encoder's weights, without those that the decoder shares
    if settings.encoder_learning_rate:
        if not has_encoder(model):
            raise UserError("train.encoder_learning_rate: the model is decoder-only. Leave it out.")
        own = {*map(id, model.get_encoder().parameters())} - {*map(id, model.get_decoder().parameters())}
    groups = [
        {"params": [p for p in trained if (p.ndim >= 2) == decays and (id(p) in own) == encoder]}
        | {"weight_decay": settings.weight_decay if decays else 0.0}
        | ({"encoder": True} if encoder else {})
        for encoder in ((False, True) if own else (False,))
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=not settings.fsdp and device.type in ("cpu", "cuda"),
    )


def warmups_of(settings: Train, steps: int) -> tuple[int, int]:
    """Steps of the warm-up, and of the encoder's. Logs if they are not those that were asked for."""
    own, encoder = settings.warmup_steps, settings.encoder_warmup_steps or settings.warmup_steps
    for asked in dict.fromkeys((own, encoder)):
        if asked >= max(steps, 1):
            so = (
                "the learning rate rises to the end"
                if settings.schedule == "noam"
                else f"it takes a tenth of them, {steps // 10:,}"
            )
            logger.info(
                f"a warm-up of {asked:,.0f} steps does not end within this training of {steps:,} steps, so {so}. A "
                "share, such as train.warmup_steps=0.05, fits every length."
            )
    return warmup_steps(settings.schedule, own, steps), warmup_steps(settings.schedule, encoder, steps)


def set_rates(
    optimiser: torch.optim.Optimizer, settings: Train, done: int, warmups: tuple[int, int], total: int
) -> tuple[float, dict[str, float]]:
    """Set the learning rates of the next update; returns the rate, and the encoder's by its name if it has its own."""
    largest = settings.learning_rate, settings.encoder_learning_rate or settings.learning_rate
    rate, encoder_rate = (
        learning_rate(settings.schedule, done, warmup=warmup, total=total, rate=each)
        for warmup, each in zip(warmups, largest, strict=True)
    )
    for group in optimiser.param_groups:
        group["lr"] = encoder_rate if "encoder" in group else rate
    return rate, {"encoder_learning_rate": encoder_rate} if settings.encoder_learning_rate else {}
