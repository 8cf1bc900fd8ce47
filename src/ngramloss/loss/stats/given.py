"""TokenStats, and numbers of each label that do not come from the logits → TokenStats with them, checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.stats.labels import IGNORE_INDEX
from ngramloss.loss.stats.token_stats import TokenStats

WEIGHTS = "weights"  # the weight of each label. No term asks for it; those that can read it do
ANCHORS = "anchors"  # 1 where a block begins; terms of blocks read it if it is given
BESIDE_LABELS = ("lm_logp", WEIGHTS, ANCHORS)
"""Numbers of each label that come with the data and travel beside ``labels``, without gradient."""
_STREAMS = (
    "which predict the next tokens but one: attach(model, ...) to a ProphetNet reads them. Logits alone do not have "
    "them, and other models have no such streams"
)
GIVEN = {
    "lm_logp": "the log-probability of each label under a language model of the targets alone: name one in "
               "data.language_model (ngramloss docs systems shows how to train it), or give lm_logp, [B, T], beside "
               "labels",
    "future_logp": f"the further streams of a ProphetNet, {_STREAMS}",
    "future_mean_logp": f"the further streams of a ProphetNet, {_STREAMS}",
}
"""Statistics that a term reads and that are given, not computed from logits → what they are, and their source."""

_RULES = {
    WEIGHTS: (
        "finite and 0 or more",
        f"To leave a token out, give it the label {IGNORE_INDEX}, or the weight 0 to count it still.",
    ),
    ANCHORS: ("0 or 1", "They are not positions, but say of each label whether a block begins with it."),
}
"""Numbers that are not log-probabilities → what they must be, and the end of the error if they are not."""


def with_given(stats: TokenStats, labels: Tensor, given: Mapping[str, Tensor | None]) -> TokenStats:
    """The statistics with those that are given, [B, T], in the same precision and place, and 0 without a label.

    Values are checked at once on a CPU in eager mode, otherwise by an assertion on the device, so the host never waits.

    >>> from ngramloss.loss.stats import token_stats
    >>> labels = torch.tensor([[1, 0, -100]])
    >>> stats = token_stats(torch.zeros(1, 3, 4), labels)
    >>> with_given(stats, labels, {"weights": torch.tensor([[2, 1, 7]])}).weights
    tensor([[2., 1., 0.]])
    """
    found = {name: _legal(name, value, labels, stats.lse) for name, value in given.items() if value is not None}
    return stats._replace(**found) if found else stats


def _legal(name: str, value: Tensor, labels: Tensor, like: Tensor) -> Tensor:
    """A given statistic as the others are, [B, T]."""
    logp = name not in _RULES
    kind = "log-probabilities in floating point" if logp else "numbers"
    if not isinstance(value, Tensor) or not (value.dtype.is_floating_point or not (logp or value.dtype.is_complex)):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be {kind}, a tensor [B, T], got {got}.")
    rule, instead = _RULES.get(name, ("log-probabilities, which are at most 0", "Pass the logarithm of a probability."))
    if value.shape != labels.shape:
        raise UserError(
            f"{name} must have a number for each label, [B, T] = {list(labels.shape)}, got {list(value.shape)}. "
            + (instead if name == ANCHORS else "Pad it as the labels are padded.")
        )
    value = value.to(like.device, like.dtype)                            # [B, T]
    real = (labels != IGNORE_INDEX).to(like.device)                      # [B, T]
    value = (value.detach() if name in BESIDE_LABELS else value).where(real, 0.0)   # [B, T]
    if logp:
        legal = ~(value > 0)                                             # [B, T], NaN in a log-probability stays
    else:
        legal = (value == 0) | (value == 1) if name == ANCHORS else (value >= 0) & value.isfinite()   # [B, T]
    if torch.compiler.is_compiling() or value.device.type != "cpu":
        torch._assert_async(legal.all(), f"{name} must be {rule}")
    elif not legal.all():
        row, position = (~legal).nonzero()[0].tolist()
        raise UserError(
            f"{name} must be {rule}, got {value[row, position].item():g} at row {row}, position {position}. {instead}"
        )
    return value
