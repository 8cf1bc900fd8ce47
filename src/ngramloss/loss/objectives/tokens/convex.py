"""TokenStats → a power of the reference's mean probability (convex learning)."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.stats import IGNORE_INDEX, TokenStats


def convex(stats: TokenStats, labels: Tensor, *, order: float = 1.0) -> Tensor:
    r"""Minus a power of the geometric mean of the reference tokens' probabilities, times their number, [B].

    .. math::
        \ell_b = -T_b \exp\Big( \frac{\textit{order}}{T_b} \sum_t \log p_t(y_t) \Big)

    with :math:`T_b` the number of labels that count. The joint loss divides by the number of tokens, so a batch has
    the mean of −exp(order · mean log p) weighted by length, Σ T_b · value / Σ T_b, as the code of Shao et al. (2023)
    has it. It sharpens whole sequences: the gradient of every token of a sequence is that of ``ce`` times
    order · exp(order · mean log p), so likely references are learned and unlikely ones are left alone.

    Args:
        order: the exponent, above 0; larger ones are sharper.

    Returns:
        Values from −T_b to 0; 0 for a row that contains only padding. Where the power underflows, the value is 0 and
        there is no gradient.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> convex(token_stats(torch.zeros(1, 3, 4), labels), labels, order=2)   # −2 · (¼)²
        tensor([-0.1250])
    """
    real = labels != IGNORE_INDEX                                        # [B, T]
    length = real.sum(-1)                                                # [B]
    mean = stats.label_logp.where(real, 0.0).sum(-1) / length.clamp_min(1)   # [B]
    return -length * (order * mean).exp()                                # [B]
