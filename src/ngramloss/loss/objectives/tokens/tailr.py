"""TokenStats → cross-entropy that discounts tokens the model thinks unlikely (TaiLr)."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import weighted_ce
from ngramloss.loss.stats import TokenStats


def tailr(stats: TokenStats, labels: Tensor, *, gamma: float = 0.8, min_weight: float = 0.2) -> Tensor:
    r"""Cross-entropy of the reference tokens, discounted where they are unlikely, summed over a sequence, [B].

    .. math::
        \ell_b = -\sum_t \mathrm{sg}\Big( \mathrm{clamp}\Big( \frac{p_t(y_t)}{\gamma + (1-\gamma)\, p_t(y_t)},\;
                 \textit{min\_weight},\; 1 \Big) \Big) \log p_t(y_t)

    where sg stops the gradient: the total variation distance as a weight, Ji et al. (2023). It sharpens, the more the
    larger γ is: γ = 0 is cross-entropy, γ = 1 without a lowest weight is ``dft``. The lowest weight keeps the gradient
    of unlikely tokens, which an untrained model needs. Formula and clamp are those of the authors' code; the defaults
    are the values of its summarisation script.

    Args:
        gamma: from 0, cross-entropy, to 1, the strongest discount.
        min_weight: the smallest weight of a token, from 0 to 1.

    Returns:
        Sums of 0 or more; 0 for a row that contains only padding. With γ = 0 every weight is 1, also where p
        underflows. A token of weight 0 adds 0; any other token of probability 0 adds infinity, as in ``ce``.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> stats = token_stats(torch.zeros(1, 3, 4), labels)
        >>> tailr(stats, labels, gamma=0.5) / torch.tensor(4.0).log()   # the weight is ¼ / (½ + ⅛)
        tensor([0.8000])
    """
    return weighted_ce(stats, labels, discount(stats, gamma=gamma, min_weight=min_weight))   # [B]


def discount(stats: TokenStats, *, gamma: float, min_weight: float) -> Tensor:
    """The weight of each token in :func:`tailr`, [B, T]."""
    if gamma == 0:                                                       # 0 / 0 where p underflows
        return torch.ones_like(stats.label_logp)
    weight = 1 / (gamma * (-stats.label_logp).exp() + (1 - gamma))       # [B, T]
    return weight.clamp(min_weight, 1.0)
