"""TokenStats and what each token costs → sums over the tokens of a row. What all terms per token share."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.stats import IGNORE_INDEX, TokenStats


def over_tokens(stats: TokenStats, labels: Tensor, cost: Tensor) -> Tensor:
    """Σ_t w_t · cost_t over the labels that count, [B]; w are the weights of tokens, 1 if there are none.

    A token with weight 0 adds exactly 0, also if it costs infinity.
    """
    if stats.weights is not None:
        cost = (cost * stats.weights).masked_fill(stats.weights == 0, 0.0)   # [B, T]
    return cost.where(labels != IGNORE_INDEX, 0.0).sum(-1)               # [B]


def weighted_ce(stats: TokenStats, labels: Tensor, weight: Tensor) -> Tensor:
    """−Σ_t sg(weight_t) · log p_t(y_t) over the labels that count, [B]. What dft, tailr, mixce and eaft share.

    The weight has no gradient. A token with weight 0 adds exactly 0, also where log p is −inf: p · log p goes to 0.
    """
    weight = weight.detach()                                             # [B, T]
    cost = (-weight * stats.label_logp).masked_fill(weight == 0, 0.0)    # [B, T]
    return over_tokens(stats, labels, cost)                              # [B]
