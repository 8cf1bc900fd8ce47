"""TokenStats → penalty for tokens that a language model, without the source, finds as likely as the model does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ngramloss as ng

if TYPE_CHECKING:
    from torch import Tensor


def margin(stats: ng.TokenStats, labels: Tensor, *, power: int = 5) -> Tensor:
    r"""Penalty for a small margin between the model and a language model of the targets, summed over a sequence, [B].

    .. math::
        \ell_b = \sum_t \big(1 - p_t(y_t)\big) \cdot \tfrac12 \big(1 - \Delta_t^{\,k}\big), \qquad
        \Delta_t = p_t(y_t) - p^{LM}_t(y_t)

    with k the power, whose sign is that of Δ. A model that is no better than one that has not read the source relies on
    what texts usually say, and invents. The factor 1 − p leaves out tokens that are learnt already. The formula is that
    of Miao et al. (2021), for translation. FES, Chen et al. (2022), adds it to cross-entropy with weight 1; in their
    code both factors have a gradient, and the language model has none.

    Departures from FES's code: the language model runs once, when the data are prepared, and without dropout, which
    theirs has in training. A text's start token, which it does not predict, has p of 1 under it. Their mean is over the
    tokens of a micro-batch, ours over those of a step.

    Args:
        power: 1 or more. The larger it is, the less a margin counts that is not nearly 1.

    Returns:
        Sums of 0 to 1 for each token; 0 for a row that contains only padding. A token of probability 1 adds 0.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> stats = token_stats(torch.zeros(1, 3, 4), labels)
        >>> stats = stats._replace(lm_logp=torch.tensor([[0.25, 0.75, 1.0]]).log())
        >>> margin(stats, labels, power=1)   # ¾ · ½ · (1 − 0), and ¾ · ½ · (1 + ½)
        tensor([0.9375])
    """
    if stats.lm_logp is None:
        raise ValueError("margin needs `lm_logp`, the log-probabilities of the labels under a language model.")
    p = stats.label_logp.exp()  # [B, T]
    gap = p - stats.lm_logp.exp()  # [B, T]
    cost = (1 - p) * (1 - gap * gap.abs() ** (power - 1)) / 2  # [B, T]
    return ng.OBJECTIVES["ce"].formula()(stats._replace(label_logp=-cost), labels)  # [B], added up as ce adds up −log p


MARGIN = ng.Objective(
    margin,
    about={"": "FES: penalty for tokens that a language model of the targets finds as likely. Reads one."},
    options={"power": ng.Setting(5, least=1, most=1024, help="exponent of the margin, which keeps its sign")},
    needs=("lm_logp",),
    least_n=None,
    per="token",
    by_position=True,
    weighted=True,
)
