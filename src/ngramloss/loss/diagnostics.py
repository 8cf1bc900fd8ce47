"""joint loss, logits and labels → match rates, confidence, lowest values and gradient shares, for a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.objectives.windows.matches import matched
from ngramloss.loss.objectives.windows.rewards import placed
from ngramloss.loss.stats import (
    ANCHORS,
    GIVEN,
    IGNORE_INDEX,
    WEIGHTS,
    Packing,
    TokenStats,
    token_stats,
    unpack,
    with_given,
)
from ngramloss.loss.terms.registry import TEMPERED

if TYPE_CHECKING:
    from ngramloss.loss.joint_loss import JointLoss
    from ngramloss.loss.terms.term import Part


def diagnose(
    loss_fn: JointLoss, logits: Tensor, labels: Tensor, packed: Packing | None = None,
    given: Mapping[str, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Numbers to log with the loss, as detached 0-d tensors; docs/objectives.md says what they are.

    ``gradient/part`` costs one backward pass of a plain head for each part. Parts that read candidates, or streams of a
    ProphetNet, are left out: their gradient does not pass through these logits. So are parts that need twins or a
    teacher. In packed rows the windows are those of the texts. ``given`` has what ``JointLoss`` takes beside labels.
    """
    read = {*loss_fn.needs, WEIGHTS, ANCHORS}
    given = {name: value for name, value in (given or {}).items() if value is not None and name in read}
    absent = GIVEN.keys() - given.keys()
    loss_fn = loss_fn.without("candidates", "twins", "teacher").only(lambda term: not term.needs & absent)
    labels = labels.long()                                               # [B, T]
    with torch.no_grad():
        stats, own = with_given(token_stats(logits, labels), labels, given), labels
        if packed is not None:
            stats, own = unpack(stats, packed), packed.labels            # [S, U]
        lengths = dict.fromkeys(n for term in loss_fn.terms for n in term.n)
        shares = {name: value for n in lengths for name, value in match_shares(stats, own, n=n).items()}
        return shares | floors(loss_fn, own, stats.anchors) | gradient_shares(loss_fn, logits, labels, packed, given)


def match_shares(stats: TokenStats, labels: Tensor, *, n: int) -> dict[str, Tensor]:
    """``matched/n``, ``placed/n`` and ``confidence/n`` over all windows of a batch."""
    windows = window_counts.real(labels, n).sum().clamp_min(1)                  # []
    hit = matched(stats, labels, n=n).hit                                # [B, S]
    sure = window_counts.sums(stats.best_logp, n).exp().where(hit, 0.0)         # [B, S]
    return {
        f"matched/{n}": hit.sum() / windows,
        f"placed/{n}": placed(stats, labels, n=n).hit.sum() / windows,
        f"confidence/{n}": sure.sum() / hit.sum().clamp_min(1),
    }


def floors(loss_fn: JointLoss, labels: Tensor, anchors: Tensor | None = None) -> dict[str, Tensor]:
    """``floor/part`` of each part that is averaged over sequences."""
    sure = certain(labels, cross="cross_logp" in loss_fn.needs)._replace(anchors=anchors)
    values = loss_fn.part_values(sure, labels)                           # [parts]
    parts = zip(loss_fn.parts, values.unbind(), strict=True)
    return {f"floor/{part.name}": value for part, value in parts if part.per == "sequence"}


def certain(labels: Tensor, *, cross: bool) -> TokenStats:
    """The statistics of a model that predicts exactly the reference, with certainty."""
    sure = torch.zeros(labels.shape, device=labels.device)               # [B, T]
    others = dict.fromkeys(("mean_logp", "entropy", "top_entropy", TEMPERED, *GIVEN), sure)
    if not cross:
        return TokenStats(sure, labels, sure, sure, **others)
    same = labels.unsqueeze(2) == labels.unsqueeze(1)                    # [B, T, T]
    cross_logp = torch.full(same.shape, -1e30, device=labels.device).masked_fill(same, 0.0)   # [B, T, T]
    return TokenStats(sure, labels, sure, sure, cross_logp, **others)


def gradient_shares(
    loss_fn: JointLoss, logits: Tensor, labels: Tensor, packed: Packing | None = None,
    given: Mapping[str, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """``gradient/part`` of each part."""
    norms = {}
    with torch.inference_mode(False), torch.enable_grad():
        leaf = (logits.clone() if logits.is_inference() else logits.detach()).requires_grad_()   # [B, T, V]
        stats = token_stats(leaf, labels, needs=loss_fn.needs, texts=packed and packed.texts)
        stats = with_given(stats, labels, given or {})
        values = loss_fn.part_values(stats, labels, packed=packed)       # [parts]
        for part, weight, value in zip(loss_fn.parts, loss_fn.weights, values.unbind(), strict=True):
            (gradient,) = torch.autograd.grad(weight * value, leaf, retain_graph=True)   # [B, T, V]
            norms[part.name] = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(leaf.dtype, torch.float32))
    total = torch.stack(list(norms.values())).sum()                      # []
    return {f"gradient/{name}": norm / total.clamp_min(torch.finfo(total.dtype).tiny) for name, norm in norms.items()}


def raise_unless_finite(stats: TokenStats, labels: Tensor, parts: Sequence[Part], values: Tensor) -> None:
    """The check of ``check=True``: name the first position or part that is NaN or infinite. Values are [parts, …]."""
    broken = (labels != IGNORE_INDEX) & ~stats.lse.isfinite()            # [B, T]
    if broken.any():
        row, position = broken.nonzero()[0].tolist()
        raise ValueError(
            f"the logits at row {row}, position {position} contain NaN or infinity (log-sum-exp "
            f"{stats.lse[row, position].item()}). Look for an overflow before the head: a learning rate that is too "
            "high, fp16 without loss scaling, or a fully masked attention row."
        )
    for part, shares in zip(parts, values.unbind(), strict=True):
        value = shares.sum()                                             # []
        if not value.isfinite():
            cause = _CAUSES[part.reads]
            raise ValueError(f"{part.name} is {value.item()} although every log-sum-exp is finite: {cause}")


_CAUSES = {
    "tokens": "some logit is -inf. Do not mask out tokens that may be labels; with smoothing, do not mask out any "
              "token.",
    "candidates": "a candidate's log-probability, length or score is NaN or infinite.",
}
