"""CandidateStats → log-probabilities of the candidates, from the highest score to the lowest."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ngramloss.loss.stats import CandidateStats


class Ranked(NamedTuple):
    """Each row's candidates from the highest score to the lowest; absent ones last, with a log-probability of 0."""

    scaled_logp: Tensor  # f = logp / length^alpha, with gradient, [B, K]
    order: Tensor  # the place of each candidate in the statistics, [B, K]
    number: Tensor  # how many candidates a row has, [B]


def ranked(stats: CandidateStats, *, alpha: float) -> Ranked:
    """Candidates from the highest score to the lowest. Those with the same score keep their order."""
    scaled_logp = stats.logp / stats.length.where(stats.present, 1.0) ** alpha   # [B, K]
    score = stats.score.detach().where(stats.present, float("-inf"))     # [B, K]
    order = score.sort(dim=-1, descending=True, stable=True).indices     # [B, K]
    return Ranked(scaled_logp.gather(-1, order), order, stats.present.sum(-1))
