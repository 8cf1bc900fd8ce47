"""labels, and segments of packed rows → which positions have labels, and statistics with one text a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.stats.labels import IGNORE_INDEX
from ngramloss.loss.stats.token_stats import TextIds, TokenStats

TEXTS, LENGTH, POSITIONS = 8, 32, 64
"""Sizes and the number of labels are rounded up to multiples of these, so that few shapes occur."""
MOST_LABELLED = 0.9  # if a larger share of the positions has a label, gathering those that have one saves nothing


class Packing(NamedTuple):
    """Where the labels of each text of a packed batch are: S texts of at most U labels and gaps."""

    position: Tensor  # index into the B·T positions of the batch, 0 where there is none, [S, U]
    labels: Tensor  # the text's labels, ``IGNORE_INDEX`` in gaps and after its end, [S, U]
    owner: Tensor  # the text that each label of the batch belongs to, −1 where there is none, [B, T]

    @property
    def texts(self) -> TextIds:
        """What ``cross_logp`` needs: the tokens of each text, and the text of each position."""
        return TextIds(self.labels, self.owner)

    @property
    def row(self) -> Tensor:
        """The row of the batch that each text is in; any row if it has no labels, [S]."""
        return self.position[:, 0] // self.owner.shape[1]                # [S]


class Labelled(NamedTuple):
    """The positions of a batch that have a label, and the texts that they form."""

    positions: Tensor | None
    """Indices into the B·T positions of the batch, −1 where there is none, [N]; None if nearly all have a label."""
    packed: Packing | None  # none if every row is one text, with labels at most of its positions


def labelled(labels: Tensor, segments: Tensor | None = None) -> Labelled:
    """Find the labels and the texts of a batch; shapes depend on them, so the host reads four numbers, at once."""
    return _find(labels, torch.zeros_like(labels) if segments is None else segments, compact=True)


def packing(labels: Tensor, segments: Tensor) -> Packing | None:
    """Find the texts of packed rows; None if every row is one text. The host reads it once, as shapes depend on it.

    A text is a run of equal segments of at least 0 with a label. Only its labels are kept, with one gap where others
    separate two of them: no n-gram spans it.
    """
    return _find(labels, segments, compact=False).packed


def _find(labels: Tensor, segments: Tensor, *, compact: bool) -> Labelled:
    """With ``compact``, leave out positions without labels even where every row is one text."""
    check_segments(segments, labels)
    segments = segments.to(labels.device)                                # [B, T]
    text, slot = _places(labels, segments)                               # [B·T] each
    several = (boundaries(segments).sum() > len(labels)) | (segments < 0).any()   # []
    label = (labels != IGNORE_INDEX).flatten()                           # [B·T]
    is_packed, S, U, N = torch.stack([several.long(), text.max() + 1, slot.max() + 1, label.sum()]).tolist()
    S, U, N = _up(S, TEXTS), _up(U, LENGTH), _up(N, POSITIONS)
    positions = packed = None
    if compact and MOST_LABELLED * labels.numel() > N:
        positions = _indices((label.long().cumsum(0) - 1).where(label, N), N)   # [N]
    if is_packed or (compact and labels.shape[1] > U):
        position = _indices((text * U + slot).where(text >= 0, S * U), S * U).view(S, U)   # [S, U]
        filled = position >= 0                                           # [S, U]
        position = position.clamp_min(0)                                 # [S, U]
        own = labels.long().flatten()[position].where(filled, IGNORE_INDEX)   # [S, U]
        packed = Packing(position, own, text.view_as(labels))
    return Labelled(positions, packed)


def _up(size: int, multiple: int) -> int:
    return -(-max(size, 1) // multiple) * multiple


def _indices(place: Tensor, size: int) -> Tensor:
    """Which position has each place; −1 where none has. Positions with a place of ``size`` have none, [size]."""
    flat = torch.arange(len(place), device=place.device)                 # [B·T]
    return flat.new_full((size + 1,), -1).scatter(0, place, flat)[:-1]   # [size]


def at_positions(rows: Tensor, positions: Tensor) -> Tensor:
    """What was computed at these of the B·T positions; its gradient is added up, not sorted as by indexing."""
    chosen = rows.flatten(0, 1).index_select(0, positions.to(rows.device).flatten())   # [N, …]
    return chosen.view(*positions.shape, *rows.shape[2:])


def number_of_texts(labels: Tensor, segments: Tensor) -> Tensor:
    """How many texts have a label, []."""
    return _places(labels, segments)[0].max() + 1                        # []


def _places(labels: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """The text of each label, and its slot there, [B·T] each; −1 where there is none."""
    label = (labels != IGNORE_INDEX) & (segments >= 0)                   # [B, T]
    fresh = boundaries(segments)                                         # [B, T]
    begins = label & (fresh | ~_before(label))                           # [B, T], a label after a gap takes two slots
    label, fresh = label.flatten(), fresh.flatten()                      # [B·T] each
    taken = label.long() + begins.flatten().long()                       # [B·T]
    until = taken.cumsum(0)                                              # [B·T]
    base = (until - taken).where(fresh, 0)                               # [B·T], slots taken before the segment
    slot = until - 2 - base.cummax(0).values                             # [B·T]
    text = (label & (slot == 0)).long().cumsum(0) - 1                    # [B·T]
    return text.where(label, -1), slot.where(label, -1)


def unpack(stats: TokenStats, packed: Packing) -> TokenStats:
    """The statistics with one text a row: [S, U] each, ``cross_logp`` [S, U, U]; 0 at positions without a label."""
    filled = packed.labels != IGNORE_INDEX                               # [S, U]

    def of_texts(statistic: Tensor) -> Tensor:
        picked = statistic.flatten(0, 1)[packed.position]                # [S, U, …]
        return picked.where(filled if picked.ndim == 2 else filled.unsqueeze(-1), 0)   # [S, U, …]

    return TokenStats(**{name: of_texts(value) for name, value in stats._asdict().items() if value is not None})


def boundaries(segments: Tensor) -> Tensor:
    """Whether a segment begins at each position; one always does at the first position of a row, [B, T]."""
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)[:, : segments.shape[1]]   # [B, T]


def turns(labels: Tensor, segments: Tensor | None = None) -> Tensor:
    """Segments in which every run of labels is a text of its own; negative ones stay negative, [B, T]."""
    label = labels != IGNORE_INDEX                                       # [B, T]
    begins = label & ~_before(label)                                     # [B, T]
    if segments is None:
        return begins.long().cumsum(-1)                                  # [B, T]
    refined = (begins | boundaries(segments)).long().cumsum(-1)          # [B, T]
    return refined.where(segments >= 0, -1)                              # [B, T]


def check_segments(segments: Tensor, labels: Tensor) -> None:
    """Raise unless the segments are integers in the shape of the labels."""
    if segments.dtype.is_floating_point or segments.dtype.is_complex or segments.dtype == torch.bool:
        raise TypeError(
            f"segments must be integers, the number of each position's text, got {segments.dtype}. Convert them with "
            "segments.long()."
        )
    if segments.shape != labels.shape:
        raise ValueError(
            f"segments must have the shape of the labels, [B, T] = {list(labels.shape)}, got {list(segments.shape)}. "
            "Give one number for each position; equal neighbours belong to the same text."
        )


def _before(flags: Tensor) -> Tensor:
    return F.pad(flags[:, :-1], (1, 0), value=False)[:, : flags.shape[1]]   # [B, T]
