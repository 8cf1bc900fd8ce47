"""TokenStats → penalty for the probability of tokens that the reference has used before."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import over_tokens
from ngramloss.loss.stats import IGNORE_INDEX, TokenStats

LEAST = 1e-5  # the lower limit of 1 − p, as in the authors' code


def unlikelihood(stats: TokenStats, labels: Tensor) -> Tensor:
    r"""Penalty for the probability of earlier tokens of the reference, summed over a sequence, [B].

    .. math::
        \ell_b = -\sum_t \sum_{c \in \{y_s : s < t\},\, c \ne y_t} \log \max\big(1 - p_t(c), 10^{-5}\big)

    Each c counts once for a position, however often it occurred: the token-level term of Welleck et al. (2020). Add
    ``ce`` for their objective, ``ce + unlikelihood``. It flattens: probability is taken from tokens that would
    repeat, and given to all others, not to the reference in particular. Time and memory grow with T², like
    ``cross_logp``.

    Positions that do not count neither are penalised nor add a token to later ones.

    Returns:
        Sums of 0 or more; 0 for a row with less than two different tokens. A token whose probability exceeds
        1 − 1e-5 costs 11.5 and has no gradient.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 1, 2]])                          # only position 3 has another token before it
        >>> unlikelihood(token_stats(torch.zeros(1, 3, 4), labels, needs=("cross_logp",)), labels).neg().exp()
        tensor([0.7500])
    """
    return over_tokens(stats, labels, penalties(stats, labels).sum(-1))   # [B]


def penalties(stats: TokenStats, labels: Tensor) -> Tensor:
    """What the token of position u costs at position t, 0 where it is not penalised, [B, T, T]."""
    probability = stats.need("cross_logp", "unlikelihood").exp().clamp_max(1 - LEAST)   # [B, T, T]
    return -(-probability).log1p().where(negatives(labels), 0.0)         # [B, T, T]


def negatives(labels: Tensor) -> Tensor:
    """Whether position t penalises the token of position u, at the first u with that token, [B, T, T]."""
    real = labels != IGNORE_INDEX                                        # [B, T]
    same = labels.unsqueeze(2) == labels.unsqueeze(1)                    # [B, T, T]
    before = torch.ones_like(same).tril(-1)                              # [B, T, T]
    first = ~(same & before).any(-1)                                     # [B, T]
    return before & ~same & (first & real).unsqueeze(1) & real.unsqueeze(2)   # [B, T, T]
