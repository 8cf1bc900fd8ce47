"""labels of twins → which positions answer each other; logits of both → how far their distributions are apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.stats.labels import IGNORE_INDEX

FARTHEST = 1e30  # logits of twins differ by at most this: 0 times an infinite difference would be NaN


class Pairs(NamedTuple):
    """The positions of twins, and what a sweep adds up for them. Rows of logits are the N positions of a batch."""

    rows: Tensor  # the two positions of each pair. Every position is in one pair, [2, M]
    gap: Tensor  # Σ exp(logit − largest)·(difference − shift), then the mean difference from the twin's logits, [N]
    kl: Tensor | None = None  # half the symmetric divergence, [N]; none in the backward pass
    slope: Tensor | None = None
    """The loss's gradient by the whole divergence of each pair, [M]; none in the forward pass."""


def twin_rows(
    labels: Tensor, *, positions: Tensor | None = None, owner: Tensor | None = None, check: bool = False
) -> Tensor:
    """The positions of rows 2i and 2i + 1 that answer each other, as indices into the flattened positions, [2, M].

    ``positions``: indices into the B·T positions, −1 for none, if only these are computed, [N]. ``owner``: the text of
    each position of packed rows, [B, T]. Only ``check`` makes the host wait for a device.
    """
    B, T = labels.shape
    if B % 2:
        raise ValueError(f"an odd number of rows, {B}, cannot be twins. {TWINS_ARE}")
    _raise_unless_equal(labels, "labels", check=check)
    if owner is not None:
        starts = F.pad(owner[:, 1:] != owner[:, :-1], (1, 0), value=True)[:, :T]   # [B, T]
        _raise_unless_equal(starts + 2 * (owner < 0), "texts", check=check)
    if positions is None:
        index = torch.arange(B * T, device=labels.device).view(B // 2, 2, T)   # [B / 2, 2, T]
        return index.transpose(0, 1).reshape(2, -1).contiguous()         # [2, M]
    if len(positions) % 2:
        raise ValueError(f"positions of twins come in pairs, got {len(positions)}. Fill them up with -1.")
    real = (positions >= 0) & (labels.flatten()[positions.clamp_min(0)] != IGNORE_INDEX)   # [N]
    row, column = positions // max(T, 1), positions % max(T, 1)          # [N] each
    number = ((row // 2) * T + column) * 2 + row % 2                     # [N], twins have neighbouring numbers
    return number.where(real, B * T).argsort(stable=True).view(-1, 2).t().contiguous()   # [2, M]


TWINS_ARE = (
    "Rows 2i and 2i + 1 must be the same example, each with its own dropout: set train.twins=true, wrap the collator "
    "with ng.twins(collator), or repeat every row of a batch with repeat_interleave(2, dim=0). Where there are no "
    "twins, as in evaluation, leave out the terms that need them: loss_fn.without('twins')."
)
"""What to do if rows are no twins."""


def _raise_unless_equal(rows: Tensor, what: str, *, check: bool) -> None:
    """Raise if something of rows 2i and 2i + 1 differs, [B, T]."""
    differs = rows[0::2] != rows[1::2]                                   # [B / 2, T]
    if torch.compiler.is_compiling() or not (check or rows.device.type == "cpu"):
        torch._assert_async(~differs.any(), f"rows 2i and 2i + 1 must be twins, with equal {what}")
    elif differs.any():
        pair = differs.any(-1).nonzero()[0].item()
        raise ValueError(f"rows {2 * pair} and {2 * pair + 1} are no twins: their {what} differ. {TWINS_ARE}")


def twin_kl(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Half the symmetric divergence of each position from its twin, ½ (KL(p‖q) + KL(q‖p)), [B, T].

    With δ the logits' difference this is ½ Σ (p − q)(δ − c) for any c. Sums of each row's own logits would cancel where
    the two agree; with c the difference of the log-sum-exps all addends are at least 0.
    """
    flat = logits.flatten(0, 1)                                          # [N, V]
    own, twin = flat[rows[0]], flat[rows[1]]                             # [M, V] each
    shift = (own.detach().logsumexp(-1) - twin.detach().logsumexp(-1)).unsqueeze(-1)   # [M, 1]
    neither = own.isneginf() & twin.isneginf()                           # [M, V], impossible in both
    gap = (own - twin).masked_fill(neither, 0.0) - shift                 # [M, V]
    apart = (own.softmax(-1) - twin.softmax(-1)) * gap.clamp(-FARTHEST, FARTHEST)   # [M, V]
    half = apart.sum(-1).clamp_min(0.0) / 2                              # [M]
    kl = half.new_zeros(len(flat)).index_copy(0, rows[0], half).index_copy(0, rows[1], half)   # [N]
    return kl.view_as(labels).where(labels != IGNORE_INDEX, 0.0)         # [B, T]


def twin_tokens(best_token: Tensor, rows: Tensor) -> Tensor:
    """The most probable token of each position's twin, [B, T]."""
    flat = best_token.flatten()                                          # [N]
    return flat.index_copy(0, rows.flatten(), flat[rows.flip(0).flatten()]).view_as(best_token)   # [B, T]
