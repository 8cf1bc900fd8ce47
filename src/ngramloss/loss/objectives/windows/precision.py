"""TokenStats → probabilistic n-gram precision (P-P2 is n = 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import TokenStats


def precision(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""Minus the share of probabilistic n-gram counts that the reference covers, [B].

    .. math::
        \ell_b = -\frac{\sum_g \min(\tilde C(g), C(g))}{\sum_g \tilde C(g)}, \qquad
        \tilde C(g) = \sum_{t:\, c_{t:t+n} = g} \prod_{i<n} \max_v p_{t+i}(v)

    over the distinct n-grams g of the most probable tokens c; C(g) is the count in the reference. Shao et al.
    (2018), as in Zhu et al., eqs. 3 to 6. Once an n-gram's count reaches C(g), more of it lowers the precision. If
    every window matches and nothing is clipped, the value is −1 at any confidence and there is no gradient. Products
    that underflow in fp32 (n of 9 or more with uniform predictions over 50,000 ids) count as 0.

    Returns:
        Losses in [−1, 0]. A reference shorter than n scores 0, and its gradient is zero.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference, predicted = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 5, 5]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(predicted, 8).float()
        >>> precision(token_stats(sure, reference), reference, n=1)     # three 5s, one of them in the reference
        tensor([-0.3333])
    """
    return -covered(stats, labels, n=n).sum(-1)                          # [B]


def precision_released(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """As :func:`precision`, but an n-gram's count is only its probability at its last occurrence, [B].

    The authors' published code does this: it overwrites the count instead of adding. The denominator still adds all
    occurrences, and since a probability never exceeds a count of 1, nothing is ever clipped.
    """
    return -covered_released(stats, labels, n=n).sum(-1)                 # [B]


def covered(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """Each window's contribution to :func:`precision`: its share of its n-gram's clipped count, [B, S]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    return clipped_shares(stats.best_token, stats.best_logp, labels, real=real, of_reference=real, n=n)   # [B, S]


def clipped_shares(
    tokens: Tensor, logp: Tensor, labels: Tensor, *, real: Tensor, of_reference: Tensor, n: int
) -> Tensor:
    """What each window adds to the precision of a text, by its tokens' log-probabilities, [B, S]."""
    candidate, reference = window_counts.ids(tokens, labels, n=n)               # [B, S] each
    probability = window_counts.sums(logp, n).exp().where(real, 0.0)            # [B, S]
    expected = window_counts.pooled(probability, ids=candidate).gather(-1, candidate)   # [B, S]
    actual = window_counts.count(candidate, among=reference, where=of_reference)   # [B, S]
    clipped = torch.minimum(expected, actual.to(expected.dtype)) / _positive(expected)   # [B, S]
    return probability * clipped / _positive(probability.sum(-1, keepdim=True))   # [B, S]


def covered_released(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """Each window's contribution to :func:`precision_released`, [B, S]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    candidate, reference = window_counts.ids(stats.best_token, labels, n=n)     # [B, S] each
    copies = window_counts.count(candidate, among=candidate, where=real)        # [B, S]
    last = window_counts.earlier(candidate, where=real) == copies - 1           # [B, S]
    known = window_counts.count(candidate, among=reference, where=real) > 0     # [B, S]
    probability = window_counts.sums(stats.best_logp, n).exp().where(real, 0.0)   # [B, S]
    return probability.where(last & known, 0.0) / _positive(probability.sum(-1, keepdim=True))   # [B, S]


def _positive(total: Tensor) -> Tensor:
    return total.clamp_min(torch.finfo(total.dtype).tiny)
