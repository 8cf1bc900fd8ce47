"""TokenStats and a weight for each token → weighted cross-entropy. What dft, tailr, mixce and eaft share."""

from __future__ import annotations

from torch import Tensor

from ngramloss.stats import IGNORE_INDEX, TokenStats


def weighted_ce(stats: TokenStats, labels: Tensor, weight: Tensor) -> Tensor:
    """−Σ_t sg(weight_t) · log p_t(y_t) over the labels that count, [B].

    The weight has no gradient. A token with weight 0 adds exactly 0, also where log p is −inf: p · log p goes to 0.
    """
    weight = weight.detach()                                             # [B, T]
    cost = (-weight * stats.label_logp).masked_fill(weight == 0, 0.0)    # [B, T]
    return cost.where(labels != IGNORE_INDEX, 0.0).sum(-1)               # [B]
