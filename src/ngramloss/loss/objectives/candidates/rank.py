"""CandidateStats → penalty where a worse candidate scores as high as a better one (BRIO)."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives.candidates.by_gain import ranked
from ngramloss.loss.stats import CandidateStats


def rank(stats: CandidateStats, *, margin: float = 0.001, alpha: float = 2.0) -> Tensor:
    r"""Penalty for pairs of candidates that the model does not score in the order of their gains, [B].

    .. math::
        \ell_b = \sum_{d=1}^{K-1} \frac{1}{K-d} \sum_{i=1}^{K-d} \max(0, f_{i+d} - f_i + d \cdot \textit{margin}),
        \qquad f_k = \frac{\log p_k}{|k|^{\alpha}}

    with the K candidates of the row in falling order of gain. The ranking loss of Liu et al. (2022), BRIO, as their
    code has it: the pairs at each distance d are averaged, and the distances added up. It is not a mean over all
    pairs: far pairs, of which there are few, weigh more than near ones.

    Candidates with the same gain keep their order and are a pair like any other, as in that code: the one given first
    should score higher.

    Args:
        margin: by how much a candidate should score higher than the next one, 0 or more.
        alpha: exponent of the length, 0 or more; 0 compares log-probabilities, 1 their means over tokens.

    Returns:
        Penalties of 0 or more; 0 for a row with one candidate or none. A pair whose scores are further apart than its
        margin has no gradient, and neither has one that is exactly as far. Time and memory grow with K².

    Example:
        >>> logp, length = torch.tensor([[-4.0, -6.0, -9.0]]), torch.tensor([[2.0, 2.0, 3.0]])
        >>> stats = CandidateStats(logp, length, gain=torch.tensor([[0.2, 0.9, 0.5]]))
        >>> rank(stats, margin=0.5, alpha=1)   # f = −3, −3, −2: (0.5 + 1.5) / 2 + 2
        tensor([3.])
    """
    return costs(stats, margin=margin, alpha=alpha).sum((-2, -1))        # [B]


def costs(stats: CandidateStats, *, margin: float = 0.001, alpha: float = 2.0) -> Tensor:
    """What the pair of the i-th and j-th best candidate adds, 0 if i ≥ j or one is absent, [B, K, K]."""
    score, _, number = ranked(stats, alpha=alpha)                        # [B, K], [B]
    return pair_costs(score, number, margin=margin)                      # [B, K, K]


def pair_costs(score: Tensor, number: Tensor, *, margin: float) -> Tensor:
    """What each pair of scores, [B, K] in falling order of gain, adds to the ranking sum; 0 if i ≥ j or absent."""
    place = torch.arange(score.shape[-1], device=score.device)           # [K]
    distance = place - place.unsqueeze(-1)                               # [K, K]
    too_high = score.unsqueeze(-2) - score.unsqueeze(-1) + distance.to(score) * margin   # [B, K, K]
    pairs = (number[:, None, None] - distance).clamp_min(1)              # [B, K, K]
    pair = (distance > 0) & (place < number[:, None, None])              # [B, K, K]
    return (too_high.relu() / pairs).where(pair, 0.0)                    # [B, K, K]
