"""CandidateStats → one minus the expected score of the candidates (minimum risk training)."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.stats import CandidateStats


def risk(stats: CandidateStats, *, sharpness: float = 0.005) -> Tensor:
    r"""One minus the score that the model expects from its candidates, [B].

    .. math::
        \ell_b = \sum_k \mathrm{softmax}_k(\textit{sharpness} \cdot \log p_k) \, (1 - \textit{score}_k)

    Minimum risk training, Shen et al. (2016), eqs. 6 to 8, with one minus the score as the loss of a candidate. The
    probabilities are shared out among the candidates of the row alone.

    Args:
        sharpness: exponent of the probabilities, 0 or more; 0 gives the mean of 1 − score, without a gradient.

    Returns:
        Values from 0 to 1. A row with one candidate has 1 − score and no gradient; a row without one has 0.

    Example:
        >>> import torch
        >>> logp, score = torch.tensor([[0.25, 1.0]]).log(), torch.tensor([[0.2, 0.9]])
        >>> risk(CandidateStats(logp, torch.tensor([[3.0, 3.0]]), score), sharpness=1)   # 0.2 · 0.8 + 0.8 · 0.1
        tensor([0.2400])
    """
    share = shares(stats, sharpness=sharpness)                           # [B, K]
    return (share * (1 - stats.score).to(share)).sum(-1)                 # [B]


def shares(stats: CandidateStats, *, sharpness: float = 0.005) -> Tensor:
    """The share of the probability that each candidate has, 0 where there is none, [B, K]."""
    some = stats.present.any(-1, keepdim=True)                           # [B, 1]
    # A softmax over a row of −inf alone would be NaN, in its gradient too.
    among = (sharpness * stats.logp).where(stats.present, float("-inf")).where(some, 0.0)   # [B, K]
    return among.softmax(-1).where(stats.present, 0.0)                   # [B, K]
