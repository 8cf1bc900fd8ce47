"""TokenStats → cross-entropy that counts less where the reference token is probable already (focal loss)."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import over_tokens
from ngramloss.loss.stats import TokenStats
from ngramloss.loss.stats.token_stats import FAR_BELOW


def focal(stats: TokenStats, labels: Tensor, *, gamma: float = 2.0) -> Tensor:
    r"""Cross-entropy of the reference tokens, less where they are probable already, summed over a sequence, [B].

    .. math::
        \ell_b = -\sum_t \big(1 - p_t(y_t)\big)^\gamma \log p_t(y_t)

    The gradient goes through both factors: Lin et al. (2017), for each token of a text. It flattens: tokens that the
    model is sure of are hardly pushed further. γ = 0 is cross-entropy.

    Args:
        gamma: how much less a probable token counts, 0 or more.

    Returns:
        Sums of 0 or more; 0 for a row that contains only padding. A token with p = 1 adds 0 and has no gradient, for
        every γ above 0. A token whose probability underflows counts as in ``ce``.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> focal(token_stats(torch.zeros(1, 3, 4), labels), labels) / torch.tensor(4.0).log()   # 2 · (¾)²
        tensor([1.1250])
    """
    logp = stats.label_logp                                              # [B, T]
    if gamma == 0:
        return over_tokens(stats, labels, -logp)
    inside = (logp < 0) & (logp > FAR_BELOW)                             # [B, T], the slope is 0 · ∞ at the ends
    safe = logp.where(inside, -1.0)                                      # [B, T]
    cost = -(-safe.expm1()).pow(gamma) * safe                            # [B, T]
    return over_tokens(stats, labels, cost.where(inside, -logp.where(logp != 0, logp.detach())))   # [B]
