"""TokenStats of twins → how far their predictions are apart (R-Drop), summed over the tokens of each sequence."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import over_tokens
from ngramloss.loss.stats import TokenStats


def rdrop(stats: TokenStats, labels: Tensor) -> Tensor:
    r"""Half the symmetric Kullback-Leibler divergence of a row from its twin, summed over its tokens, [B].

    .. math::
        \ell_b = \sum_t \tfrac12 \big[ \mathrm{KL}(p_t \| q_t) + \mathrm{KL}(q_t \| p_t) \big]

    with p the row's predictions and q those of its twin, the same example with another dropout. It is the same number
    in both rows of a pair, with gradient to both. Divided by the number of tokens of both rows it is the mean over
    pairs. Liang et al. (2021), *R-Drop: Regularized Dropout for Neural Networks*, eqs. 2 and 4, and their code for
    translation and summarisation add up the cross-entropies of both rows, where ``ce`` is their mean: their α is twice
    the weight of this term, and ``ce + 2.5*rdrop`` has α = 5.

    Returns:
        Sums, 0 or more; 0 for a row that contains only padding.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1], [1]])
        >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 2.0]]])
        >>> rdrop(token_stats(logits, labels, needs=("twin_kl",)), labels)
        tensor([0.3808, 0.3808])
    """
    return over_tokens(stats, labels, stats.need("twin_kl", "rdrop"))    # [B]
