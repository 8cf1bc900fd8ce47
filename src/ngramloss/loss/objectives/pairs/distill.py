"""TokenStats with a teacher's divergence → distillation, or what holds a model to its start, summed over tokens."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import over_tokens
from ngramloss.loss.stats import TokenStats


def distill(stats: TokenStats, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""Kullback-Leibler divergence of the model from its teacher at a temperature, summed over tokens, [B].

    .. math::
        \ell_b = \tau^2 \sum_t \mathrm{KL}(q_t^\tau \| p_t^\tau)

    with p the model's and q the teacher's predictions, softmax(z / τ) each. There is no gradient to the teacher.
    Hinton, Vinyals and Dean (2015), *Distilling the Knowledge in a Neural Network*, section 2: the factor τ² keeps the
    size of the gradient.

    Args:
        temperature: τ.

    Returns:
        Sums, 0 or more; 0 for a row that contains only padding.

    Example:
        >>> import torch
        >>> from ngramloss.loss.stats import Teacher, token_stats
        >>> labels, teacher = torch.tensor([[1]]), Teacher(torch.tensor([[[0.0, 4.0]]]), temperature=2.0)
        >>> distill(token_stats(torch.zeros(1, 1, 2), labels, needs=("teacher_kl",), teacher=teacher), labels,
        ...         temperature=2.0)
        tensor([1.3113])
    """
    return temperature**2 * over_tokens(stats, labels, stats.need("teacher_kl", "distill"))   # [B]


def keep(stats: TokenStats, labels: Tensor) -> Tensor:
    r"""Divergence of the model p from its start q, KL(q‖p), summed over tokens, [B]: ``distill`` without temperature.

    Arguments are those of :func:`distill`; the start is the teacher.
    """
    return over_tokens(stats, labels, stats.need("teacher_kl", "keep"))  # [B]


def keep_reverse(stats: TokenStats, labels: Tensor) -> Tensor:
    r"""As :func:`keep`, in the other direction, KL(p‖q), which punishes most what the start excludes, [B]."""
    return over_tokens(stats, labels, stats.need("teacher_reverse_kl", "keep:reverse"))   # [B]
