"""TokenStats → cross-entropy weighted by the probability of each token."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import weighted_ce
from ngramloss.loss.stats import TokenStats


def dft(stats: TokenStats, labels: Tensor) -> Tensor:
    r"""Cross-entropy of the reference tokens, each weighted by its own probability, summed over a sequence, [B].

    .. math::
        \ell_b = -\sum_t \mathrm{sg}\big(p_t(y_t)\big) \log p_t(y_t)

    where sg stops the gradient: dynamic fine-tuning, Wu et al. (2025). Its gradient is that of −Σ_t p_t(y_t), so it
    sharpens: a token that the model thinks unlikely has next to no gradient. The value itself is not monotonic in p; it
    is largest at p = 1/e. The paper and its authors' code agree.

    Returns:
        Sums of 0 or more, at most 1/e for each token; 0 for a row that contains only padding. A token whose probability
        underflows adds 0 and has no gradient.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> dft(token_stats(torch.zeros(1, 3, 4), labels), labels) / torch.tensor(4.0).log()   # 2 · ¼ · log 4
        tensor([0.5000])
    """
    return weighted_ce(stats, labels, stats.label_logp.exp())            # [B]
