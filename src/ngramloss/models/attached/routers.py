"""a mixture of experts, and its outputs for a batch → what its router adds to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.stats import IGNORE_INDEX
from ngramloss.models.attached.heads import has_encoder


def asks_for_router_loss(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a call asks for a router's loss; raises if the model, like encoder-decoders of experts, has none."""
    asked = inputs.get("output_router_logits")
    asked = bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)
    if asked and _weight(model) is None:
        raise UserError(
            f"{type(model).__name__} adds the loss of its router if `output_router_logits` is on, and attach would "
            "drop it. Turn it off, or compute both: JointLoss on the logits, plus the model's `aux_loss`."
        )
    return asked


def router_loss(model: Any, outputs: Any, labels: Tensor, counts: Mapping[str, Any]) -> Tensor | float:
    """What a router adds to the loss: in a step of several micro-batches, weighted by its share of the labels."""
    loss: Tensor | None = outputs.get("aux_loss")  # []
    if loss is None:
        return 0.0
    tokens = counts["num_items_in_batch"] if counts["num_tokens"] is None else counts["num_tokens"]  # []
    if tokens is not None:
        counted = (labels != IGNORE_INDEX).sum()  # []
        loss = loss * (counted / tokens).to(loss.device)
    return loss * float(_weight(model) or 0.0)


def _weight(model: Any) -> float | None:
    """The weight of the ``aux_loss`` of a decoder-only mixture of experts."""
    if has_encoder(model):
        return None
    weights = (getattr(model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    return next((float(weight) for weight in weights if weight is not None), None)
