"""TokenStats → reward for n-grams predicted at their own reference position."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.objectives.windows.matches import Earned, earned
from ngramloss.loss.stats import TokenStats


def rewards(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""One minus the mean probability of correctly placed n-grams, [B].

    .. math::
        \ell_b = 1 - \frac{1}{W} \sum_{t:\, c_{t:t+n} = y_{t:t+n}} \frac{1}{K_t} \prod_{i<n} \max_v p_{t+i}(v)

    with c the most probable tokens and :math:`K_t` the number of correct placements of that same n-gram, so an
    n-gram that repeats earns one reward in total: Zhu et al., eqs. 10 and 11 and Algorithm 1.

    Returns:
        Losses in [0, 1]. A reference shorter than n scores exactly 1, and its gradient is zero.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference, predicted = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 6]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(predicted, 8).float()
        >>> rewards(token_stats(sure, reference), reference, n=2)
        tensor([0.5000])
    """
    return window_counts.missed(stats, labels, placed(stats, labels, n=n).amount, n=n)   # [B]


def rewards_twin(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """As :func:`rewards`, where the row's twin predicts the n-gram, with this row's probability of it, [B].

    K counts the placements where the twin is right. The twin gets no gradient from this row, but has the term itself.
    """
    return rewards(by_twin(stats), labels, n=n)                          # [B]


def by_twin(stats: TokenStats) -> TokenStats:
    """The statistics with the twin's most probable token instead of the row's own.

    Its log-probability in this row is read only where it is correct, and there it is that of the label.
    """
    return stats._replace(best_token=stats.need("twin_token", "a twin's gate"), best_logp=stats.label_logp)


def placed(stats: TokenStats, labels: Tensor, *, n: int) -> Earned:
    """The windows of :func:`rewards`."""
    real = window_counts.real(labels, n)                                        # [B, S]
    candidate, reference = window_counts.ids(stats.best_token, labels, n=n)     # [B, S] each
    hit = real & (candidate == reference)                                # [B, S]
    copies = window_counts.count(reference, among=reference, where=hit)         # [B, S]
    return earned(stats, hit=hit, copies=copies, real=real, n=n)
