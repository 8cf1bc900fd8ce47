"""TokenStats → reward for the reference's n-grams, weighted by how nearly they are predicted."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import TokenStats


def near(stats: TokenStats, labels: Tensor, *, n: int, power: float = 4.0) -> Tensor:
    r"""One minus the mean probability of the reference's n-grams, each weighted by how nearly it is predicted, [B].

    .. math::
        \ell_b = 1 - \frac{1}{W} \sum_t \mathrm{sg}\Big( \prod_{i<n} \Big( \frac{p_{t+i}(y_{t+i})}
                 {\max_v p_{t+i}(v)} \Big)^{\!\textit{power}} \Big) \prod_{i<n} p_{t+i}(y_{t+i})

    where sg stops the gradient. The weight is a soft gate: 1 where the whole window is predicted, near 0 where some
    token is far from the most probable one. With power 0 it is ``soft``; as power grows it approaches ``gated``. It
    sharpens what is right and, unlike ``gated``, also raises what is almost right.

    Args:
        power: how quickly the weight falls with the distance to the most probable tokens, 0 or more.

    Returns:
        Losses in [0, 1]. A reference shorter than n scores exactly 1, and its gradient is zero. A window whose
        probability underflows earns 0 and has no gradient.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[0, 1]])
        >>> logits = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]]).log()   # p/q is 1 and ½
        >>> near(token_stats(logits, labels), labels, n=2, power=1)                 # 1 − ½ · ½ · ¼
        tensor([0.9375])
    """
    probability, weight = nearness(stats, labels, n=n, power=power)      # [B, S] each
    windows = window_counts.real(labels, n).sum(-1, keepdim=True).clamp_min(1)  # [B, 1]
    return window_counts.missed(stats, labels, weight * probability / windows, n=n)   # [B]


def nearness(stats: TokenStats, labels: Tensor, *, n: int, power: float = 4.0) -> tuple[Tensor, Tensor]:
    """The probability of each window of :func:`near`, 0 if it is not real, and its weight, without gradient."""
    logp = window_counts.sums(stats.label_logp, n)                              # [B, S]
    probability = logp.exp().where(window_counts.real(labels, n), 0.0)          # [B, S]
    if power == 0:                                                       # 0 · −inf is NaN
        return probability, torch.ones_like(probability)
    gap = logp - window_counts.sums(stats.best_logp, n)                         # [B, S]
    return probability, (power * gap).exp().detach()
