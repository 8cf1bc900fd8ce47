"""logits → TokenStats, the few numbers per position that objectives read."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.stats.labels import IGNORE_INDEX, NOT_FLATTENED, legal_labels
from ngramloss.loss.stats.pairs import twin_kl, twin_rows, twin_tokens
from ngramloss.loss.stats.teachers import Teacher, divergences, needed_teacher
from ngramloss.loss.terms.registry import TEACHER_STATISTICS, TWIN_STATISTICS, temperature_of

LARGEST_VOCABULARY = 2**31  # two ids are packed into one int64 where n-grams are compared
TOP = 20  # how many of the most probable tokens ``top_entropy`` reads
FAR_BELOW = -1000.0
"""The least difference from the largest logit to multiply by its exponential, 0 there: 0 times −inf would be NaN."""
LOGITS_ONLY = frozenset({"top_entropy"})
"""Statistics that need all logits of a position at once, so that a sweep in blocks cannot compute them."""


class TextIds(NamedTuple):
    """The texts of a packed batch, for ``cross_logp``. Without packing every row is a text."""

    labels: Tensor  # the reference ids of each text, [S, U]
    owner: Tensor  # the text of each position, −1 where there is none, [B, T]


class TokenStats(NamedTuple):
    """Everything that an objective may know about a model's predictions.

    Every log-probability is at most 0, in every precision, because all of them come from the same stored logits. At
    positions whose label does not count, log-probabilities are 0 and have no gradient, and ``lse``, ``tempered_lse``
    and ``best_token`` are undefined. Entropies are 0 there. The attributes from ``cross_logp`` on are ``None`` unless
    requested, and those from ``lm_logp`` on unless given: the logits do not have them.
    """

    lse: Tensor
    """Log-sum-exp of the logits, [B, T]."""
    best_token: Tensor
    """The most probable id, the lowest one if several tie, [B, T]."""
    best_logp: Tensor
    """Log-probability of ``best_token``, [B, T]."""
    label_logp: Tensor
    """Log-probability of the reference token, [B, T]."""
    cross_logp: Tensor | None = None
    """Log-probability at position t of the u-th reference token of its text, [B, T, U]. A text is the row, so that U is
    T, unless rows are packed."""
    mean_logp: Tensor | None = None
    """Mean log-probability over the vocabulary, [B, T]."""
    entropy: Tensor | None = None
    """Entropy of the prediction over the whole vocabulary, in nats, without gradient, [B, T]."""
    top_entropy: Tensor | None = None
    """Entropy of the 20 most probable tokens, renormalised, without gradient, [B, T]. Only from logits."""
    lm_logp: Tensor | None = None
    """Log-probability of the reference token under a language model of the targets alone, without gradient, [B, T]."""
    future_logp: Tensor | None = None
    """``label_logp`` of a ProphetNet's further streams, summed over them, [B, T]."""
    future_mean_logp: Tensor | None = None
    """``mean_logp`` of these streams, summed over them, [B, T]."""
    weights: Tensor | None = None
    """The weight of each token, which no head computes: a caller gives it beside the labels.
    0 at positions whose label does not count, [B, T]."""
    anchors: Tensor | None = None
    """1 where a block begins, which a caller gives beside the labels; 0 elsewhere, [B, T]."""
    twin_kl: Tensor | None = None
    """Half the symmetric Kullback-Leibler divergence of a prediction from its twin's, at least 0, the same number in
    both rows, [B, T]."""
    twin_token: Tensor | None = None
    """The twin's most probable id, [B, T]."""
    teacher_kl: Tensor | None = None
    """KL(q‖p) of the prediction p from the teacher's q, both at a temperature, at least 0, [B, T]."""
    teacher_reverse_kl: Tensor | None = None
    """KL(p‖q), [B, T]."""
    tempered_lse: Tensor | None = None
    """Log-sum-exp at a temperature τ, in the size of the logits: τ · lse(z / τ), [B, T]."""

    def need(self, name: str, whose: str, written: str = "") -> Tensor:
        """An optional statistic. Raises if it was not computed; ``whose`` formula reads it."""
        if (found := getattr(self, name)) is None:
            raise ValueError(f"{whose} needs `{name}`: compute the stats with needs=('{written or name}',).")
        return found  # type: ignore[no-any-return]


def token_stats(
    logits: Tensor, labels: Tensor, *, needs: Collection[str] = (), check: bool = False, texts: TextIds | None = None,
    twins: Tensor | None = None, teacher: Teacher | Tensor | None = None,
) -> TokenStats:
    """Summarise logits, in fp32 or better.

    Args:
        logits: [B, T, V], any floating-point dtype.
        labels: reference ids, [B, T], ``IGNORE_INDEX`` where they do not count.
        needs: the optional statistics to compute: ``"cross_logp"`` (T² numbers per row), ``"mean_logp"``,
            ``"entropy"`` and ``"top_entropy"``; ``"twin_kl"`` and ``"twin_token"`` compare rows 2i and 2i + 1,
            ``"teacher_kl"`` and ``"teacher_reverse_kl"`` compare with a teacher. ``"tempered_lse=2"`` is
            ``tempered_lse`` at the temperature 2.
        check: check the labels' range on any device, see :func:`legal_labels`.
        texts: the texts of packed rows, which ``cross_logp`` stays within.
        twins: the positions that answer each other, of :func:`twin_rows`, if rows are not neighbours any more, [2, M].
        teacher: what another model predicts at the same positions, with the temperature to compare at; not read unless
            it is needed.

    Example:
        >>> stats = token_stats(torch.tensor([[[0.0, 2.0, 1.0]]]), torch.tensor([[2]]))
        >>> stats.best_token
        tensor([[1]])
        >>> stats.label_logp - stats.best_logp
        tensor([[-1.]])
    """
    if logits.ndim != 3 or logits.shape[-1] == 0:
        hint = NOT_FLATTENED.format("logits") if logits.ndim == 2 else ""
        raise ValueError(f"logits must be [B, T, V] with V of at least 1, got {list(logits.shape)}.{hint}")
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be floating point, got {logits.dtype}. They are scores before the softmax.")
    if logits.shape[-1] > LARGEST_VOCABULARY:
        raise ValueError(f"a vocabulary may have at most {LARGEST_VOCABULARY} ids, got {logits.shape[-1]}.")
    labels = legal_labels(labels, logits, logits.shape[-1], check=check)
    if twins is None and not TWIN_STATISTICS.isdisjoint(needs):
        twins = twin_rows(labels, owner=texts and texts.owner, check=check)   # [2, M]
    logits = _at_least_fp32(logits)                                      # [B, T, V]
    real = labels != IGNORE_INDEX                                        # [B, T]
    ids = labels.where(real, 0)                                          # [B, T]
    lse = logits.logsumexp(-1)                                           # [B, T]
    best_token = logits.argmax(-1)                                       # [B, T]
    picked = logits.gather(-1, torch.stack([best_token, ids], -1)) - lse.unsqueeze(-1)   # [B, T, 2]
    best_logp, label_logp = picked.where(real.unsqueeze(-1), 0.0).unbind(-1)   # [B, T] each
    cross_logp = mean_logp = entropy = top_entropy = None
    if "cross_logp" in needs:
        reference = cross_labels(labels, texts or rows_as_texts(labels))   # [B, T, U]
        cross_logp = logits.gather(-1, reference.clamp_min(0)) - lse.unsqueeze(-1)   # [B, T, U]
        cross_logp = cross_logp.where(reference != IGNORE_INDEX, 0.0)    # [B, T, U]
    if "mean_logp" in needs:
        mean_logp = (logits.mean(-1) - lse).where(real, 0.0)             # [B, T]
    if "entropy" in needs:
        entropy = _entropy(logits).where(real, 0.0)                      # [B, T]
    if "top_entropy" in needs:
        most_probable = logits.detach().topk(min(TOP, logits.shape[-1])).values   # [B, T, TOP]
        top_entropy = _entropy(most_probable).where(real, 0.0)           # [B, T]
    stats = TokenStats(lse, best_token, best_logp, label_logp, cross_logp, mean_logp, entropy, top_entropy)
    if (temperature := temperature_of(needs)) is not None:
        largest = logits.detach().amax(-1, keepdim=True)                 # [B, T, 1], so that τ does not round it
        below = logits - largest.where(largest > -torch.inf, 0.0)        # [B, T, V]
        spread = temperature * (below / temperature).logsumexp(-1)       # [B, T]
        stats = stats._replace(tempered_lse=spread + largest.squeeze(-1))
    if "twin_kl" in needs and twins is not None:
        stats = stats._replace(twin_kl=twin_kl(logits, labels, twins))
    if "twin_token" in needs and twins is not None:
        stats = stats._replace(twin_token=twin_tokens(best_token, twins))
    if not TEACHER_STATISTICS.isdisjoint(needs):
        known = needed_teacher(teacher, labels.shape, logits.shape[-1], logits.device)
        other = known.logits                                             # [B, T, V]
        if other is None:
            with torch.no_grad():
                head = {name: value for name, value in known._asdict().items() if name not in ("logits", "temperature")}
                other = head_logits(**head)                              # [B, T, V]
        found = divergences(logits, other, labels, temperature=known.temperature, needs=needs)   # [B, T] each
        stats = stats._replace(**found)
    return stats


def _entropy(logits: Tensor) -> Tensor:
    """``entr(logits.softmax(-1)).sum(-1)`` without its error of 3e-5 in fp32, without gradient, [B, T].

    It is log Z − Σ exp(x)·x / Z, x below the largest logit: two numbers of at least 0, which cannot cancel.
    """
    below = logits.detach() - logits.detach().amax(-1, keepdim=True)     # [B, T, V]
    powers = below.exp()                                                 # [B, T, V]
    total = powers.sum(-1)                                               # [B, T]
    return total.log() - (powers * below.clamp_min(FAR_BELOW)).sum(-1) / total   # [B, T]


def rows_as_texts(labels: Tensor) -> TextIds:
    """Every row is a text."""
    row = torch.arange(len(labels), device=labels.device)                # [B]
    return TextIds(labels, row.unsqueeze(-1).expand(labels.shape))


def cross_labels(labels: Tensor, texts: TextIds) -> Tensor:
    """The reference ids of each position's text, ``IGNORE_INDEX`` if either position does not count, [N, U]."""
    counts = (labels != IGNORE_INDEX) & (texts.owner >= 0)               # [N]
    return texts.labels[texts.owner.clamp_min(0)].where(counts.unsqueeze(-1), IGNORE_INDEX)   # [N, U]


def head_logits(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None, scale: float, softcap: float | None,
    low_rank: Tensor | None = None,
) -> Tensor:
    """What backends must equal, [B, T, V]: ``softcap·tanh((scale·hidden @ [weight, low_rank].T + bias) / softcap)``."""
    scaled = hidden if scale == 1.0 else hidden * scale                  # [B, T, D]
    flat_bias = None if bias is None else bias.reshape(-1).to(weight.dtype)   # [V]
    D = weight.shape[1]
    logits = F.linear(scaled[..., :D], weight, flat_bias)                # [B, T, V]
    if low_rank is not None:
        logits = logits + F.linear(scaled[..., D:], low_rank)            # [B, T, V]
    if softcap is not None:
        logits = (_at_least_fp32(logits) / softcap).tanh() * softcap     # [B, T, V]
    return logits


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
