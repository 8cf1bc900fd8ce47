"""TokenStats → reward for each correctly placed n-gram, every copy of it."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.objectives.windows.matches import Earned, earned
from ngramloss.loss.objectives.windows.rewards import by_twin
from ngramloss.loss.stats import IGNORE_INDEX, TokenStats


def gated(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""One minus the mean probability of correctly placed n-grams, each copy counted, [B].

    .. math::
        \ell_b = 1 - \frac{1}{W} \sum_{t:\, c_{t:t+n} = y_{t:t+n}} \prod_{i<n} \max_v p_{t+i}(v)

    with c the most probable tokens. It is ``rewards`` without the division by copies, so a reference that repeats
    n-grams can reach 0, and one more correct copy always lowers the loss. It sharpens only windows that are already
    correct: all others have no gradient, and the value jumps where the argmax changes.

    Returns:
        Losses in [0, 1]. A reference shorter than n scores exactly 1, and its gradient is zero.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference, predicted = torch.tensor([[5, 5, 5, 7]]), torch.tensor([[5, 5, 5, 5]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(predicted, 8).float()
        >>> gated(token_stats(sure, reference), reference, n=2)         # 5 5 twice, of three windows
        tensor([0.3333])
    """
    return window_counts.missed(stats, labels, correct(stats, labels, n=n).amount, n=n)   # [B]


def gated_twin(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """As :func:`gated`, where the row's twin predicts the n-gram, with this row's probability of it, [B].

    The twin gets no gradient from this row, but has the term itself.
    """
    return gated(by_twin(stats), labels, n=n)                            # [B]


def correct(stats: TokenStats, labels: Tensor, *, n: int) -> Earned:
    """The windows of :func:`gated`. Nothing is shared among copies: each has a reward of its own."""
    real = window_counts.real(labels, n)                                        # [B, S]
    predicted = labels.where(stats.best_token == labels, IGNORE_INDEX)   # [B, T]
    hit = window_counts.real(predicted, n)                                      # [B, S]
    return earned(stats, hit=hit, copies=hit.long(), real=real, n=n)
