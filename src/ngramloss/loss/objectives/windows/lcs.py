"""TokenStats → continuous longest common subsequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.stats import IGNORE_INDEX, TokenStats


def lcs(stats: TokenStats, labels: Tensor) -> Tensor:
    r"""Minus the log of the soft longest common subsequence, as a share of the reference, [B].

    .. math::
        S_{i,j} = p_i(y_j)(S_{i-1,j-1} + 1) + (1 - p_i(y_j)) \max(S_{i-1,j}, S_{i,j-1}), \qquad
        \ell_b = -\log \max(S_{T,T} / T, 10^{-30})

    with zero borders, after Yavuz et al. (2018). Positions that do not count are skipped: with p = 0 a cell copies its
    larger neighbour, and S never falls along a row or a column. The table is filled diagonal by diagonal, in 2T − 1
    sequential steps: the number of launches is linear, time is quadratic, memory is about 20 times ``cross_logp``.
    ``torch.compile`` unrolls the steps and compiles again for every T.

    Returns:
        Losses of 0 or more, at most about 69.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference, predicted = torch.tensor([[5, 6, 7, 5]]), torch.tensor([[5, 7, 5, 1]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(predicted, 8).float()
        >>> lcs(token_stats(sure, reference, needs=("cross_logp",)), reference).neg().exp()   # 5 7 5, of four
        tensor([0.7500])
    """
    real = labels != IGNORE_INDEX                                        # [B, T]
    both = real.unsqueeze(2) & real.unsqueeze(1)                         # [B, T, T]
    diagonals = _skewed(stats.need("cross_logp", "lcs").exp().where(both, 0.0))         # [2T-1, B, T]
    before = previous = torch.zeros_like(stats.lse)                      # [B, T]
    for probability in diagonals:                                        # [B, T]
        longer = F.pad(before, (1, 0))[:, :-1] + 1                       # [B, T]
        best = torch.maximum(F.pad(previous, (1, 0))[:, :-1], previous)  # [B, T]
        before, previous = previous, probability * longer + (1 - probability) * best   # [B, T]
    share = previous[:, -1:].sum(-1) / real.sum(-1).clamp_min(1)         # [B]
    return -share.clamp_min(1e-30).log()                                 # [B]


def _skewed(table: Tensor) -> Tensor:
    """The diagonals of each [T, T] table: row d has the cells (i, d − i), 0 outside the table, [2T-1, B, T]."""
    B, T, _ = table.shape
    if T == 0:
        return table.new_zeros(0, B, 0)
    shifted = F.pad(table, (0, T)).flatten(1)[:, : T * (2 * T - 1)].view(B, T, 2 * T - 1)   # [B, T, 2T-1]
    return shifted.permute(2, 0, 1)                                      # [2T-1, B, T]
