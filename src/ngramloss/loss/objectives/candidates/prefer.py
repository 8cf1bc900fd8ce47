"""CandidateStats → contrast of the best candidate with the worst one (CPO, SimPO)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.objectives.candidates.by_score import ranked
from ngramloss.loss.stats import CandidateStats


def prefer(stats: CandidateStats, *, beta: float = 0.1, alpha: float = 0.0, margin: float = 0.0) -> Tensor:
    r"""Negative log-probability that the best candidate is preferred to the worst, [B].

    .. math::
        \ell_b = -\log \sigma\big( \beta (f_{\text{best}} - f_{\text{worst}}) - \textit{margin} \big),
        \qquad f_k = \frac{\log p_k}{|k|^{\alpha}}

    Best and worst are by score. With alpha=0 and margin=0 this is the contrast of Xu et al. (2024), CPO, whose
    objective also has cross-entropy on the preferred text: ``ce`` beside it is on the reference. With alpha=1
    and its own beta and margin it is SimPO, Meng et al. (2024).

    Of candidates tied for the highest score the first is the best; of those tied for the lowest the last is the worst.
    If all candidates have the same score, the first is still preferred to the last.

    Args:
        beta: how much a difference of f counts, above 0.
        alpha: exponent of the length, 0 or more; 0 compares log-probabilities, 1 their means over tokens.
        margin: by how much β times the difference should exceed 0, 0 or more.

    Returns:
        Values of 0 or more; 0 for a row with one candidate or none. Candidates between the best and the worst have no
        gradient.

    Example:
        >>> logp, score = torch.tensor([[-7.0, -5.0]]), torch.tensor([[0.9, 0.2]])
        >>> prefer(CandidateStats(logp, torch.tensor([[3.0, 3.0]]), score), beta=0.5).neg().exp()   # the sigmoid of −1
        tensor([0.2689])
    """
    scaled_logp, _, number = ranked(stats, alpha=alpha)                  # [B, K], [B]
    place = torch.arange(scaled_logp.shape[-1], device=scaled_logp.device)   # [K]
    best = scaled_logp[:, :1].sum(-1)                                    # [B]
    worst = scaled_logp.where(place == number.unsqueeze(-1) - 1, 0.0).sum(-1)   # [B]
    return (-F.logsigmoid(beta * (best - worst) - margin)).where(number > 1, 0.0)   # [B]
