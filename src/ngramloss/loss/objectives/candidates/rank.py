"""CandidateStats → penalty where a worse candidate is as probable as a better one (BRIO)."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives.candidates.by_score import ranked
from ngramloss.loss.stats import CandidateStats


def rank(stats: CandidateStats, *, margin: float = 0.001, alpha: float = 2.0) -> Tensor:
    r"""Penalty for pairs of candidates whose log-probabilities are not in the order of their scores, [B].

    .. math::
        \ell_b = \sum_{d=1}^{K-1} \frac{1}{K-d} \sum_{i=1}^{K-d} \max(0, f_{i+d} - f_i + d \cdot \textit{margin}),
        \qquad f_k = \frac{\log p_k}{|k|^{\alpha}}

    with the K candidates of the row from the highest score to the lowest. The ranking loss of Liu et al. (2022), BRIO,
    as their code has it: the pairs at each distance d are averaged, and the distances added up. It is not a mean
    over all pairs: far pairs are few, and weigh more than near ones.

    Candidates with the same score keep their order and are a pair like any other, as in that code: the one given first
    should be more probable.

    Args:
        margin: by how much f of a candidate should exceed f of the next one, 0 or more.
        alpha: exponent of the length, 0 or more; 0 compares log-probabilities, 1 their means over tokens.

    Returns:
        Penalties of 0 or more; 0 for a row with one candidate or none. A pair whose f are further apart than its
        margin has no gradient, and neither has one that is exactly as far. Time and memory grow with K².

    Example:
        >>> logp, length = torch.tensor([[-4.0, -6.0, -9.0]]), torch.tensor([[2.0, 2.0, 3.0]])
        >>> stats = CandidateStats(logp, length, score=torch.tensor([[0.2, 0.9, 0.5]]))
        >>> rank(stats, margin=0.5, alpha=1)   # f = −3, −3, −2: (0.5 + 1.5) / 2 + 2
        tensor([3.])
    """
    return costs(stats, margin=margin, alpha=alpha).sum((-2, -1))        # [B]


def costs(stats: CandidateStats, *, margin: float = 0.001, alpha: float = 2.0) -> Tensor:
    """What the pair of the i-th and j-th best candidate adds, 0 if i ≥ j or one is absent, [B, K, K]."""
    scaled_logp, _, number = ranked(stats, alpha=alpha)                  # [B, K], [B]
    return pair_costs(scaled_logp, number, margin=margin)                # [B, K, K]


def pair_costs(scaled_logp: Tensor, number: Tensor, *, margin: float) -> Tensor:
    """What each pair of log-probabilities, [B, K] from the best candidate on, adds to the sum; 0 if i ≥ j or absent."""
    place = torch.arange(scaled_logp.shape[-1], device=scaled_logp.device)   # [K]
    distance = place - place.unsqueeze(-1)                               # [K, K]
    higher = scaled_logp.unsqueeze(-2) - scaled_logp.unsqueeze(-1)       # [B, K, K]
    too_high = higher + distance.to(higher) * margin                     # [B, K, K]
    pairs = (number[:, None, None] - distance).clamp_min(1)              # [B, K, K]
    pair = (distance > 0) & (place < number[:, None, None])              # [B, K, K]
    return (too_high.relu() / pairs).where(pair, 0.0)                    # [B, K, K]
