"""TokenStats → edit-invariant sequence loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import TokenStats


def eisl(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""Negative log-likelihood of each reference n-gram at the positions that the model itself prefers, [B].

    .. math::
        \ell_b = -\frac{1}{W} \sum_u \sum_t \mathrm{softmax}_t(A(u))\, A_t(u), \qquad
        A_t(u) = \frac{1}{n} \sum_{i<n} \log p_{t+i}(y_{u+i})

    after Liu et al. (2022), without their Gumbel noise; the gradient flows through both factors. Unlike
    ``matches`` it gives every window a gradient, even those not predicted yet. Time and memory grow with T².

    Returns:
        Losses of 0 or more. A reference shorter than n scores 0, and its gradient is zero. An n-gram that is
        impossible everywhere (a logit of −inf in each placement) costs 1e30, not infinity.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference = torch.tensor([[5, 6, 7]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(reference, 8).float()
        >>> eisl(token_stats(sure, reference, needs=("cross_logp",)), reference, n=2) + 0
        tensor([0.])
    """
    real = window_counts.real(labels, n)                                        # [B, S]
    return -preferred(stats, labels, n=n).sum(-1) / real.sum(-1).clamp_min(1)   # [B]


def preferred(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """Σ_t softmax_t(A(u)) · A_t(u) of each reference window, 0 if it is not real, [B, S]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    fit = (window_counts.diagonal_sums(stats.need("cross_logp", "eisl"), n) / float(n)).clamp_min(-1e30)   # [B, S, S]
    outside = ~real.unsqueeze(2)                                         # [B, S, 1]
    share = fit.masked_fill(outside, torch.finfo(fit.dtype).min).softmax(1)   # [B, S, S]
    return (share * fit.masked_fill(outside, 0.0)).sum(1).where(real, 0.0)   # [B, S]
