"""TokenStats → reward for every n-gram of the reference, predicted or not."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import TokenStats


def soft(stats: TokenStats, labels: Tensor, *, n: int, kappa: float | None = None) -> Tensor:
    r"""One minus the mean over the reference's n-grams of a power of their probability, [B].

    .. math::
        \ell_b = 1 - \frac{1}{W} \sum_t \exp\Big( \frac{\kappa}{n} \sum_{i<n} \log p_{t+i}(y_{t+i}) \Big)

    With κ = n, the default, this is ``rewards`` without its gate and without its division by copies: the mean
    probability of the reference's own n-grams. A window's gradient is proportional to its probability to the power
    κ/n, so the term sharpens: it raises what is already likely and leaves the rest to ``ce``. There is no argmax, so
    the value is continuous. ``soft(1)`` is one minus the mean probability of the reference tokens.

    Args:
        kappa: exponent of the geometric mean of a window's probabilities, above 0; by default n.

    Returns:
        Losses in [0, 1]. A reference shorter than n scores exactly 1, and its gradient is zero. A window whose
        probability underflows earns 0 and has no gradient.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 2, 3]])
        >>> half = torch.zeros(1, 3, 4).scatter(-1, labels.unsqueeze(-1), torch.tensor(3.0).log().expand(1, 3, 1))
        >>> soft(token_stats(half, labels), labels, n=2), soft(token_stats(half, labels), labels, n=2, kappa=1)
        (tensor([0.7500]), tensor([0.5000]))
    """
    return window_counts.missed(stats, labels, powers(stats, labels, n=n, kappa=kappa), n=n)   # [B]


def powers(stats: TokenStats, labels: Tensor, *, n: int, kappa: float | None = None) -> Tensor:
    """What each window earns in :func:`soft`, [B, S]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    exponent = 1.0 if kappa is None else kappa / n
    earned = (exponent * window_counts.sums(stats.label_logp, n)).exp()         # [B, S]
    return earned.where(real, 0.0) / real.sum(-1, keepdim=True).clamp_min(1)   # [B, S]
