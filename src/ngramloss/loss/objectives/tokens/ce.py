"""TokenStats → cross-entropy, summed over the tokens of each sequence."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import over_tokens
from ngramloss.loss.stats import TokenStats


def ce(stats: TokenStats, labels: Tensor, *, smoothing: float = 0.0, temperature: float = 1.0) -> Tensor:
    r"""Negative log-likelihood of the reference tokens, summed over each sequence, [B].

    .. math::
        \ell_b = -\sum_t \Big[ (1-\varepsilon) \log p_t(y_t) + \frac{\varepsilon}{V} \sum_v \log p_t(v) \Big]

    with p = softmax(z / τ), times τ. Divided by the number of tokens this is
    ``τ * F.cross_entropy(logits / τ, labels, label_smoothing=ε)``, after any soft-cap. The factor τ keeps the size of
    the gradient, p − y. Zhu et al., eq. 2, print the sum over t; their code averages over tokens, and so does the joint
    loss.

    Args:
        smoothing: share of the target spread evenly over the vocabulary, from 0 to 1.
        temperature: τ. Above 1 the model learns to be surer than its softmax says here; below 1 less sure.

    Returns:
        Sums, 0 or more; 0 for a row that contains only padding.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> ce(token_stats(torch.zeros(1, 3, 4), labels), labels) / torch.tensor(4.0).log()
        tensor([2.])
        >>> cold = token_stats(torch.zeros(1, 3, 4), labels, needs=("tempered_lse=0.5",))
        >>> ce(cold, labels, temperature=0.5) / torch.tensor(4.0).log()
        tensor([1.])
    """
    logp = stats.label_logp                                              # [B, T]
    if smoothing:
        logp = (1 - smoothing) * logp + smoothing * stats.need("mean_logp", "ce with smoothing")   # [B, T]
    if temperature == 1:
        return over_tokens(stats, labels, -logp)
    tempered = stats.need("tempered_lse", "ce with a temperature", f"tempered_lse={temperature}")   # [B, T]
    return over_tokens(stats, labels, tempered - stats.lse - logp)       # [B]
