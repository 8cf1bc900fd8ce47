"""CandidateStats → scores of the candidates, in falling order of gain."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ngramloss.loss.stats import CandidateStats


class Ranked(NamedTuple):
    """The candidates of each row in falling order of gain. Those that are absent come last, with a score of 0."""

    score: Tensor  # f = logp / length^alpha, with gradient, [B, K]
    order: Tensor  # the place of each candidate in the statistics, [B, K]
    number: Tensor  # how many candidates a row has, [B]


def ranked(stats: CandidateStats, *, alpha: float) -> Ranked:
    """Scores in falling order of gain. Candidates with the same gain keep their order."""
    score = stats.logp / stats.length.where(stats.present, 1.0) ** alpha   # [B, K]
    gain = stats.gain.detach().where(stats.present, float("-inf"))       # [B, K]
    order = gain.sort(dim=-1, descending=True, stable=True).indices      # [B, K]
    return Ranked(score.gather(-1, order), order, stats.present.sum(-1))
