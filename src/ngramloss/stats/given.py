"""TokenStats, and numbers of each label that do not come from the logits → TokenStats with them, checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.stats.labels import IGNORE_INDEX
from ngramloss.stats.token_stats import TokenStats

BESIDE_LABELS = ("lm_logp",)
"""Statistics that are prepared with the data: a number for each label, which travels beside ``labels`` in rows and
batches. They have no gradient."""

_STREAMS = (
    "which predict the next tokens but one: attach(model, ...) to a ProphetNet reads them. Logits alone do not have "
    "them, and other models have no such streams"
)
GIVEN = {
    "lm_logp": "the log-probability of each label under a language model of the targets alone: name one in "
               "data.language_model (docs/systems.md shows how to train it), or give lm_logp, [B, T], beside labels",
    "future_logp": f"the further streams of a ProphetNet, {_STREAMS}",
    "future_mean_logp": f"the further streams of a ProphetNet, {_STREAMS}",
}
"""Statistics that are given, not computed from the logits → what they are, and where they come from."""


def with_given(stats: TokenStats, labels: Tensor, given: Mapping[str, Tensor | None]) -> TokenStats:
    """The statistics with those that are given, in the same precision, on the same device, and 0 without a label.

    Shape and dtype are always checked, values like those of labels: immediately on a CPU in eager mode, and otherwise
    by an assertion on the device, which never makes the host wait.

    Args:
        stats: of the logits.
        labels: [B, T], ``IGNORE_INDEX`` where they do not count.
        given: names of :data:`GIVEN` → log-probabilities, [B, T]; None is none.
    """
    found = {name: _legal(name, value, labels, stats.lse) for name, value in given.items() if value is not None}
    return stats._replace(**found)


def _legal(name: str, value: Tensor, labels: Tensor, like: Tensor) -> Tensor:
    """A given statistic as the others are, [B, T]."""
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be log-probabilities, a floating-point tensor [B, T], got {got}.")
    if value.shape != labels.shape:
        raise UserError(
            f"{name} must have a number for each label, [B, T] = {list(labels.shape)}, got {list(value.shape)}. Pad it "
            "as the labels are padded."
        )
    value = value.to(like.device, like.dtype)                            # [B, T]
    value = (value.detach() if name in BESIDE_LABELS else value).where(labels != IGNORE_INDEX, 0.0)   # [B, T]
    wrong = value > 0                                                    # [B, T]
    if torch.compiler.is_compiling() or value.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"{name} must be log-probabilities, which are at most 0")
    elif wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise UserError(
            f"{name} must be log-probabilities, which are at most 0, got {value[row, position].item():g} at row {row}, "
            f"position {position}. Pass the logarithm of a probability."
        )
    return value
