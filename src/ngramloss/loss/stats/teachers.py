"""logits of a model and of its teacher → how far the two distributions are apart, without gradient to the teacher."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.stats.labels import IGNORE_INDEX
from ngramloss.loss.stats.pairs import FARTHEST

NEAR = 10.0  # below this difference of two log-probabilities, their divergence is computed from the difference alone


class Teacher(NamedTuple):
    """What another model predicts at the same positions: its logits, or its hidden states and head.

    The logits of a head are ``softcap·tanh((scale·hidden @ weight.T + bias) / softcap)``, as those of the model itself;
    the width D' may be another one, the vocabulary not. Nothing here gets a gradient.

    Example:
        >>> from ngramloss import JointLoss
        >>> logits, labels = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[1]])
        >>> JointLoss("distill")(logits, labels, teacher=Teacher(torch.zeros(1, 1, 2)))
        tensor(0.4338)
    """

    logits: Tensor | None = None
    """[B, T, V]."""
    hidden: Tensor | None = None
    """The head's input, [B, T, D'], instead of logits."""
    weight: Tensor | None = None
    """The head's weight, [V, D']."""
    bias: Tensor | None = None
    """V numbers."""
    scale: float = 1.0
    softcap: float | None = None
    low_rank: Tensor | None = None
    """Further columns of the weight, [V, r], as in ``token_stats_from_hidden``."""
    temperature: float = 1.0
    """What the logits of both are divided by before they are compared. :class:`JointLoss` sets it."""


class Compared(NamedTuple):
    """What a sweep has found of a model and its teacher in the columns read so far, [N] each."""

    lse: Tensor  # log-sum-exp of the model's logits at the temperature
    teacher_lse: Tensor  # log-sum-exp of the teacher's
    kl: Tensor | None  # KL(q‖p), with p the model and q the teacher
    reverse_kl: Tensor | None  # KL(p‖q)


def needed_teacher(
    teacher: Teacher | Tensor | None, shape: torch.Size, vocabulary: int, device: torch.device
) -> Teacher:
    """The teacher, without gradient. Raises unless it predicts the same positions over the same vocabulary."""
    if teacher is None:
        raise UserError("`teacher_kl` and `teacher_reverse_kl` need a teacher. Pass teacher=logits, or "
                        "teacher=ngramloss.Teacher(hidden=..., weight=...).")
    teacher = Teacher(teacher) if isinstance(teacher, Tensor) else teacher
    if not isinstance(teacher, Teacher):
        raise TypeError(f"teacher must be logits [B, T, V] or ngramloss.Teacher(...), got {type(teacher).__name__}.")
    made, weight = teacher.hidden if teacher.logits is None else teacher.logits, teacher.weight
    given = tuple(x is not None for x in teacher[:3])
    if made is None or given not in ((True, False, False), (False, True, True)):
        raise ValueError("a teacher needs its logits, Teacher(logits), or its hidden states and the head's weight, "
                         "Teacher(hidden=..., weight=...). Give one of the two, complete.")
    what = "logits" if weight is None else "hidden"
    if made.ndim != 3 or made.shape[:2] != shape or not made.dtype.is_floating_point:
        raise ValueError(f"the teacher's {what} must be floating point, [B, T, …] with [B, T] = {list(shape)} as the "
                         f"labels, got {made.dtype} of shape {list(made.shape)}. It must read the same batch.")
    more = 0 if teacher.low_rank is None else teacher.low_rank.shape[-1]
    if weight is not None and (weight.ndim != 2 or weight.shape[1] + more != made.shape[-1]):
        raise ValueError(f"the teacher's weight must be [V, D'] with D' = {made.shape[-1] - more} as in its hidden "
                         f"states, got {list(weight.shape)}.")
    ids = made.shape[-1] if weight is None else weight.shape[0]
    if ids != vocabulary:
        raise ValueError(f"the teacher's vocabulary has {ids:,} ids and the model's {vocabulary:,}, so their "
                         "predictions cannot be compared. Use a teacher with the model's tokenizer and vocabulary.")
    if made.device != device:
        raise ValueError(f"the teacher's {what} are on {made.device}, and the model's on {device}. Move them there.")
    tensors: dict[str, Any] = {name: x.detach() for name, x in teacher._asdict().items() if isinstance(x, Tensor)}
    return teacher._replace(**tensors)


def divergences(
    logits: Tensor, other: Tensor, labels: Tensor, *, temperature: float, needs: Collection[str]
) -> dict[str, Tensor]:
    """``teacher_kl``, KL(q‖p), and ``teacher_reverse_kl``, KL(p‖q), whichever are needed, [B, T] each."""
    own, given = logits / temperature, other.to(logits.dtype) / temperature   # [B, T, V] each
    lse, teacher_lse = own.logsumexp(-1, keepdim=True), given.logsumexp(-1, keepdim=True)   # [B, T, 1] each
    p, q = (own - lse).exp(), (given - teacher_lse).exp()                # [B, T, V] each
    ratio = log_ratio(own, given, lse, teacher_lse)                      # [B, T, V]
    found = {}
    if "teacher_kl" in needs:
        found["teacher_kl"] = excess(q, p, ratio).sum(-1)                # [B, T]
    if "teacher_reverse_kl" in needs:
        found["teacher_reverse_kl"] = excess(p, q, -ratio).sum(-1)       # [B, T]
    real = labels != IGNORE_INDEX                                        # [B, T]
    return {name: value.clamp_min(0.0).where(real, 0.0) for name, value in found.items()}


def log_ratio(own: Tensor, given: Tensor, lse: Tensor, teacher_lse: Tensor) -> Tensor:
    """log p − log q, from the difference of the logits; bounded, and without NaN where both are −inf."""
    neither = (own == -torch.inf) & (given == -torch.inf)                # [R, width]
    return ((own - given).masked_fill(neither, 0.0) - (lse - teacher_lse)).clamp(-FARTHEST, FARTHEST)   # [R, width]


def excess(of: Tensor, to: Tensor, ratio: Tensor) -> Tensor:
    """What each token adds to KL(a‖b): a·(eˣ − 1 − x) with x = log b − log a, at least 0, because a·x would cancel.

    An error of the log-sum-exps, which moves every x alike, changes the sum only in second order.
    """
    near = ratio.clamp(-NEAR, NEAR)
    return (of * (near.expm1() - near)).where(ratio.abs() < NEAR, to - of - of * ratio)
