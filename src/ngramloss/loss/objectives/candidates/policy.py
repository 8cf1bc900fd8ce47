"""CandidateStats → log-probability of each sample, times what it scores above a baseline (policy gradient)."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.stats import CandidateStats

TINY = 1e-6  # added to the standard deviation that divides an advantage


def policy(stats: CandidateStats, *, baseline: str = "mean", scale: str = "none", alpha: float = 0.0) -> Tensor:
    r"""Minus the log-probability of the samples, weighted by how much better than a baseline each is, [B].

    .. math::
        \ell_b = -\frac{1}{K} \sum_k A_k \frac{\log p_k}{|k|^{\alpha}}, \qquad A_k = \textit{score}_k - b,

    over the K samples of the row, without a gradient through A. The baseline b is ``mean``, the mean score of the K;
    ``others``, that of the K − 1 others (Kool et al. 2019; RLOO); or ``greedy``, what the model's greedy text scores:
    self-critical training, Rennie et al. (2017). With ``scale=std``, A is divided by the standard deviation of the K
    scores plus 1e-6: the advantage of GRPO, Shao et al. (2024).

    There is no ratio to an older model, no clipping and no divergence: samples are those of the model as it is, and
    ``keep`` holds it to its start. The value says nothing by itself, only its gradient does.

    Departures. Rennie et al. take one sample; here there are K, and their gradients are averaged. TRL's variance has
    K − 1 below the sum, not K, and its GRPO adds 1e-4 to the standard deviation. Where all scores are the same,
    ``scale=std`` gives no gradient, also with ``baseline=greedy``, whose advantage would otherwise be divided by 1e-6.

    Args:
        baseline: ``"mean"``, ``"others"`` or ``"greedy"``.
        scale: ``"none"`` or ``"std"``.
        alpha: exponent of the length, 0 or more; 1 takes the mean log-probability of a sample's tokens.

    Returns:
        Any numbers; 0 for a row without samples, and for one sample with the baselines ``mean`` and ``others``.

    Example:
        >>> import torch
        >>> logp, score = torch.tensor([[-2.0, -4.0]]), torch.tensor([[0.75, 0.25]])
        >>> policy(CandidateStats(logp, torch.tensor([[3.0, 3.0]]), score))   # −(0.25 · −2 − 0.25 · −4) / 2
        tensor([-0.2500])
    """
    scaled_logp = stats.logp / stats.length.where(stats.present, 1.0) ** alpha   # [B, K]
    advantage = advantages(stats, baseline=baseline, scale=scale)        # [B, K]
    number = stats.present.sum(-1).clamp_min(1)                          # [B]
    return -(advantage.to(scaled_logp.dtype) * scaled_logp).sum(-1) / number   # [B]


def advantages(stats: CandidateStats, *, baseline: str = "mean", scale: str = "none") -> Tensor:
    """How much better than the baseline each sample is, without gradient, 0 where there is none, [B, K]."""
    score, present = stats.score.detach(), stats.present                 # [B, K] each
    if score.shape[-1] == 0:
        return score
    number = present.sum(-1, keepdim=True)                               # [B, 1]
    # Differences from the best one first: equal scores then differ by exactly 0, as a rounded mean might not.
    best = score.where(present, float("-inf")).amax(-1, keepdim=True)    # [B, 1]
    below = (score - best).where(present, 0.0)                           # [B, K]
    centred = (below - below.sum(-1, keepdim=True) / number.clamp_min(1)).where(present, 0.0)   # [B, K]
    advantage = centred                                                  # [B, K]
    if baseline == "others":
        advantage = centred * number / (number - 1).clamp_min(1)         # [B, K]
    elif baseline == "greedy":
        assert stats.baseline is not None
        advantage = (score - stats.baseline.detach().unsqueeze(-1)).where(present, 0.0)   # [B, K]
    if scale == "none":
        return advantage
    deviation = (centred.square().sum(-1, keepdim=True) / number.clamp_min(1)).sqrt()   # [B, 1]
    return (advantage / (deviation + TINY)).where(deviation > 0, 0.0)    # [B, K]
