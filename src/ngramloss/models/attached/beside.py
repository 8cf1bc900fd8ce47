"""a batch → what it has beside the labels, a number for each of them, aligned with the predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from ngramloss.errors import UserError
from ngramloss.loss.stats import BESIDE_LABELS, WEIGHTS

NAMES = {name: (name,) for name in BESIDE_LABELS} | {WEIGHTS: (WEIGHTS, "loss_weights", "loss_scale")}
"""Argument of the joint loss → what batches call it. The first is our own name, the others are those of other trainers;
a model does not take them."""
KEYS = tuple(name for names in NAMES.values() for name in names)


def taken_beside(inputs: Mapping[str, Any], *, shift: bool) -> dict[str, Any]:
    """What a batch has beside its labels: argument of the joint loss → a number for each label, [B, T].

    Args:
        shift: whether position t predicts label t + 1, so that the numbers must be shifted as the labels are.
    """
    found: dict[str, Any] = {}
    for argument, names in NAMES.items():
        given = [name for name in names if inputs.get(name) is not None]
        if len(given) > 1:
            raise UserError(f"the batch has {' and '.join(given)}, which are two names of the same. Leave one out.")
        for name in given:
            array = inputs[name]
            found[argument] = F.pad(array, (0, 1))[..., 1:] if shift else array  # [B, T]
    if found and inputs.get("shift_labels") is not None:
        raise UserError(
            f"the batch has {' and '.join(found)} for its labels, and `shift_labels`, which are aligned in another "
            "way. Leave shift_labels out."
        )
    return found
