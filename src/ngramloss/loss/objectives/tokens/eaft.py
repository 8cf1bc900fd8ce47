"""TokenStats → cross-entropy weighted by the entropy of each prediction (EAFT), summed over each sequence."""

from __future__ import annotations

from math import log

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import weighted_ce
from ngramloss.loss.stats import TokenStats


def eaft(stats: TokenStats, labels: Tensor, *, alpha: float = 1.0) -> Tensor:
    r"""Cross-entropy in which a position counts more the less certain the model is there, [B].

    .. math::
        \ell_b = -\sum_t \mathrm{sg}\Big[\Big(\frac{H_t}{\ln 20}\Big)^\alpha\Big] \log p_t(y_t), \qquad
        H_t = -\sum_v p_t(v) \log p_t(v)

    where sg stops the gradient. Diao et al. (2026), *Entropy-Adaptive Fine-Tuning*, take the entropy of the 20 most
    probable tokens, which is at most ln 20; ours is that of the whole vocabulary, so a weight can exceed 1. See
    :func:`eaft_released` for theirs. With alpha = 0 it is cross-entropy.

    Args:
        alpha: exponent of the weight, 0 or more.

    Returns:
        Sums, 0 or more; 0 for a row that contains only padding. A position with weight 0 adds 0, even if its label is
        impossible.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> even = token_stats(torch.zeros(1, 3, 20), labels, needs=("entropy",))
        >>> eaft(even, labels) / torch.tensor(20.0).log()
        tensor([2.])
    """
    return weighted_ce(stats, labels, (stats.need("entropy", "eaft") / log(20)) ** alpha)   # [B]


def eaft_released(stats: TokenStats, labels: Tensor, *, alpha: float = 1.0) -> Tensor:
    """As :func:`eaft`, with the entropy of the 20 most probable tokens, renormalised, divided by 3, [B].

    The authors' published code does this. It needs all logits at once: not from hidden states.
    """
    return weighted_ce(stats, labels, (stats.need("top_entropy", "eaft:released") / 3) ** alpha)   # [B]
