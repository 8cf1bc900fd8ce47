"""logits, or hidden states and a head → TokenStats, the few numbers per position that objectives read."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.stats.labels import IGNORE_INDEX, legal_labels

LARGEST_VOCABULARY = 2**31
"""Two ids are packed into one int64 where n-grams are compared."""


class TokenStats(NamedTuple):
    """The waist: all that an objective may know of a model's predictions.

    Every log-probability is at most 0, in every precision: all of them come from the same stored logits.
    The last two are ``None`` unless asked for.
    """

    lse: Tensor
    """Log-sum-exp of the logits, [B, T]."""
    best_token: Tensor
    """The most probable id, the lowest one if several tie, [B, T]."""
    best_logp: Tensor
    """Log-probability of ``best_token``, [B, T]."""
    label_logp: Tensor
    """Log-probability of the reference token, [B, T]; 0 where the label does not count."""
    cross_logp: Tensor | None = None
    """Log-probability at position t of the reference token of position u, [B, T, T]."""
    mean_logp: Tensor | None = None
    """Mean log-probability over the vocabulary, [B, T]."""


def token_stats(logits: Tensor, labels: Tensor, *, needs: Collection[str] = (), check: bool = False) -> TokenStats:
    """Summarise logits, in fp32 or better.

    Args:
        logits: [B, T, V], any floating kind.
        labels: reference ids, [B, T], ``IGNORE_INDEX`` where they do not count.
        needs: the optional statistics to compute, of ``"cross_logp"`` (T² numbers a row) and ``"mean_logp"``.
        check: look at the labels' range on any device, see :func:`legal_labels`.

    Example:
        >>> stats = token_stats(torch.tensor([[[0.0, 2.0, 1.0]]]), torch.tensor([[2]]))
        >>> stats.best_token
        tensor([[1]])
        >>> stats.label_logp - stats.best_logp
        tensor([[-1.]])
    """
    if logits.ndim != 3 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [B, T, V] with V of at least 1, got {list(logits.shape)}.")
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be floating point, got {logits.dtype}. They are scores before the softmax.")
    if logits.shape[-1] > LARGEST_VOCABULARY:
        raise ValueError(f"a vocabulary may have {LARGEST_VOCABULARY} ids at most, got {logits.shape[-1]}.")
    labels = legal_labels(labels, logits, logits.shape[-1], check=check)
    logits = _at_least_fp32(logits)                                      # [B, T, V]
    real = labels != IGNORE_INDEX                                        # [B, T]
    ids = labels.where(real, 0)                                          # [B, T]
    lse = logits.logsumexp(-1)                                           # [B, T]
    best_token = logits.argmax(-1)                                       # [B, T]
    picked = logits.gather(-1, torch.stack([best_token, ids], -1)) - lse.unsqueeze(-1)   # [B, T, 2]
    best_logp, label_logp = picked.unbind(-1)                            # [B, T] each
    cross_logp = mean_logp = None
    if "cross_logp" in needs:
        everywhere = ids.unsqueeze(1).expand(-1, ids.shape[1], -1)       # [B, T, T]
        cross_logp = logits.gather(-1, everywhere) - lse.unsqueeze(-1)   # [B, T, T]
    if "mean_logp" in needs:
        mean_logp = logits.mean(-1) - lse                                # [B, T]
    return TokenStats(lse, best_token, best_logp, label_logp.where(real, 0.0), cross_logp, mean_logp)


def token_stats_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    needs: Collection[str] = (),
    check: bool = False,
) -> TokenStats:
    """Summarise what a head makes of hidden states: ``softcap·tanh((scale·hidden @ weight.T + bias) / softcap)``.

    This is the specification in plain PyTorch: it makes the logits, once, in the precision of the product
    (autocast's, where that is active), and reads every statistic off them.

    Args:
        hidden: the head's input, [B, T, D].
        weight: the head's weight, [V, D].
        labels: reference ids, [B, T], ``IGNORE_INDEX`` where they do not count.
        bias: added to the logits, V numbers in any shape.
        scale: multiplies the hidden states.
        softcap: bounds the logits smoothly by plus and minus this.
        needs: as in :func:`token_stats`.
        check: as in :func:`token_stats`.

    Example:
        >>> hidden, weight, labels = torch.eye(2).unsqueeze(0), torch.eye(3, 2), torch.tensor([[0, 1]])
        >>> torch.equal(token_stats_from_hidden(hidden, weight, labels).lse,
        ...             token_stats(hidden @ weight.T, labels).lse)
        True
    """
    _check_head(hidden, weight, bias, scale, softcap)
    scaled = hidden if scale == 1.0 else hidden * scale                  # [B, T, D]
    flat_bias = None if bias is None else bias.reshape(-1).to(weight.dtype)   # [V]
    logits = F.linear(scaled, weight, flat_bias)                         # [B, T, V]
    if softcap is not None:
        logits = (_at_least_fp32(logits) / softcap).tanh() * softcap     # [B, T, V]
    return token_stats(logits, labels, needs=needs, check=check)


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> None:
    if hidden.ndim != 3:
        raise ValueError(f"hidden must be [B, T, D], got {list(hidden.shape)}.")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [V, D] with D = {hidden.shape[-1]} as in hidden, got {list(weight.shape)}. "
            "Pass the head's own weight, as in torch.nn.Linear, not its transpose."
        )
    if bias is not None and bias.numel() != weight.shape[0]:
        raise ValueError(f"bias must hold V = {weight.shape[0]} numbers, got {list(bias.shape)}.")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}. Run under torch.autocast, or cast one of them."
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}.")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive finite number or None, got {softcap!r}.")
