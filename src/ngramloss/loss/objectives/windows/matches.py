"""TokenStats → reward for predicted n-grams that occur anywhere in the reference."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import TokenStats


class Earned(NamedTuple):
    """The rewards of a candidate's windows, [B, S] each."""

    hit: Tensor  # whether the window matched
    copies: Tensor  # how many windows share the reward of its n-gram
    amount: Tensor  # the amount by which it lowers the loss


def matches(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""One minus the mean probability of n-grams found anywhere in the reference, [B].

    .. math::
        \ell_b = 1 - \frac{1}{W} \sum_{t:\, c_{t:t+n} \in y} \frac{1}{K_t} \prod_{i<n} \max_v p_{t+i}(v)

    with c the most probable tokens and :math:`K_t` the number of windows of c equal to window t: Zhu et al.,
    eqs. 12 and 13 and Algorithm 2. An n-gram earns its mean probability, no matter how often it is predicted, so with
    U distinct n-grams in the reference the loss is at least 1 − U/W. A window that does not match has no gradient.

    Returns:
        Losses in [0, 1]. A reference shorter than n scores exactly 1, and its gradient is zero.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference, predicted = torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 5]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(predicted, 8).float()
        >>> matches(token_stats(sure, reference), reference, n=2)       # 6 7 matches, 7 5 does not
        tensor([0.5000])
    """
    return window_counts.missed(stats, labels, matched(stats, labels, n=n).amount, n=n)   # [B]


def matches_released(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """As :func:`matches`, but for n of 3 or more only the first three matched windows of an n-gram count, [B].

    The authors' published code does this; the paper's text and algorithms do not.
    """
    amount = matched(stats, labels, n=n, most=most_counted(n)).amount    # [B, S]
    return window_counts.missed(stats, labels, amount, n=n)                     # [B]


def most_counted(n: int) -> int | None:
    """The number of windows of one n-gram that the published code counts: 3 for n of 3 or more; None means all."""
    return 3 if n >= 3 else None


def matched(stats: TokenStats, labels: Tensor, *, n: int, most: int | None = None) -> Earned:
    """The windows of :func:`matches`, counting at most the first ``most`` of each n-gram."""
    real = window_counts.real(labels, n)                                        # [B, S]
    candidate, reference = window_counts.ids(stats.best_token, labels, n=n)     # [B, S] each
    hit = real & (window_counts.count(candidate, among=reference, where=real) > 0)   # [B, S]
    copies = window_counts.count(candidate, among=candidate, where=real)        # [B, S]
    if most is not None:
        hit = hit & (window_counts.earlier(candidate, where=real) < most)       # [B, S]
        copies = copies.clamp_max(most)                                  # [B, S]
    return earned(stats, hit=hit, copies=copies, real=real, n=n)


def earned(stats: TokenStats, *, hit: Tensor, copies: Tensor, real: Tensor, n: int) -> Earned:
    """Π q / K / W for every window that hit."""
    probability = window_counts.sums(stats.best_logp, n).exp()                  # [B, S]
    windows = real.sum(-1, keepdim=True).clamp_min(1)                    # [B, 1]
    amount = (probability / (copies.clamp_min(1) * windows)).where(hit, 0.0)   # [B, S]
    return Earned(hit, copies, amount)
