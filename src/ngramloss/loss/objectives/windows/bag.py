"""TokenStats → distance between the expected and the reference bag of n-grams (BoN)."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import TokenStats


def bag(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""One minus half the share of the reference's n-grams that the model expects, [B].

    .. math::
        \ell_b = \frac{2W - \sum_g \min(B(g), C(g))}{2W}, \qquad B(g) = \sum_t \prod_{i<n} p_{t+i}(g_i)

    over the distinct n-grams g of the reference, where C(g) is the count of g: Zhu et al., eqs. 7 to 9. As printed, a
    perfect model scores ½, not 0, and the gradient is half that of Shao et al. (2020): see :func:`bag_original`.
    Time and memory grow with T², like ``cross_logp``.

    Returns:
        Losses in [½, 1]. A reference shorter than n scores exactly 1, and its gradient is zero.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference = torch.tensor([[5, 6, 7]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(reference, 8).float()
        >>> bag(token_stats(sure, reference, needs=("cross_logp",)), reference, n=2)
        tensor([0.5000])
    """
    return 1 - found(stats, labels, n=n).sum(-1) / 2                     # [B]


def bag_original(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """1 − Σ_g min(B, C)/W, the L1 distance of the two bags as Shao et al. (2020) scale it, in [0, 1], [B]."""
    return 1 - found(stats, labels, n=n).sum(-1)                         # [B]


def bag_released(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """−(1/W) Σ_u min(B(g_u), 1) over the reference's positions u, in [−1, 0]; 1 if W = 0, [B].

    The authors' published code does this: its counter treats every occurrence as a separate n-gram.
    """
    real = window_counts.real(labels, n)                                        # [B, S]
    windows = real.sum(-1)                                               # [B]
    capped = expected(stats, labels, n=n).clamp_max(1).where(real, 0.0)  # [B, S]
    return (-capped.sum(-1) / windows.clamp_min(1)).where(windows > 0, 1.0)   # [B]


def found(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """Each reference window's contribution to Σ_g min(B, C)/W: its share of its n-gram's, [B, S]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    (reference,) = window_counts.ids(labels, n=n)                               # [B, S]
    copies = window_counts.count(reference, among=reference, where=real).clamp_min(1)   # [B, S]
    bounded = torch.minimum(expected(stats, labels, n=n), copies.to(stats.lse.dtype))   # [B, S]
    return (bounded / copies).where(real, 0.0) / real.sum(-1, keepdim=True).clamp_min(1)   # [B, S]


def expected(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """B(g) of each reference window's n-gram, [B, S]."""
    return placements(stats, labels, n=n).sum(1)                         # [B, S]


def placements(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """Probability of the n-gram of reference window u at window t, 0 where either is not real, [B, S, S]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    probability = window_counts.diagonal_sums(stats.need("cross_logp", "bag, as bleu,"), n).exp()        # [B, S, S]
    return probability.where(real.unsqueeze(2) & real.unsqueeze(1), 0.0)   # [B, S, S]
