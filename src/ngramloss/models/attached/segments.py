"""what a trainer passes to a model, and labels → where the texts of packed rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.stats import BESIDE_LABELS, IGNORE_INDEX, WEIGHTS, check_segments
from ngramloss.loss.stats.segments import boundaries, number_of_texts, turns

Unit = Literal["documents", "turns"]
"""What is a text of its own."""
OWN_ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations that see the documents of a row only by ``position_ids``, without a mask or cache beside them."""
KEY = "segments"
"""The name of segments in a batch. A model does not take it."""
POSITIONS = "label_positions"
"""The name of the positions that predict the labels, if a batch knows them. A model does not take it."""
BESIDE_NAMES = {name: (name,) for name in BESIDE_LABELS} | {WEIGHTS: (WEIGHTS, "loss_weights", "loss_scale")}
"""Argument of the joint loss → its names in batches, ours first; models do not take them."""
BESIDE = tuple(name for names in BESIDE_NAMES.values() for name in names)


def segments_of_batch(
    inputs: Mapping[str, Any], labels: Tensor, *, causal: bool, shift: bool, texts: Unit = "documents"
) -> Tensor | None:
    """The text of each label of a batch, [B, T]; None if every row is one text.

    ``segments`` belong to the labels as passed, shifted if they are; other keys to the input tokens of decoder-only
    models. A document's first token is predicted from another one, so its label belongs to no text, unless it begins
    the row.
    """
    given = inputs.get(KEY)
    segments: Tensor | None = None  # [B, T]
    if given is not None:
        if not isinstance(given, Tensor):
            raise TypeError(
                f"segments must be a tensor of integers in the shape of the labels, got {type(given).__name__}."
            )
        check_segments(given, labels)
        segments = predicted(given.to(labels.device)) if shift else given.to(labels.device)
        if causal and labels.numel() and not torch.compiler.is_compiling():
            _refuse_contradiction(segments, inputs, labels)
    elif causal:
        documents = _documents(inputs, labels)  # [B, T]
        segments = None if documents is None else predicted(documents)
    if texts == "turns":
        segments = turns(labels, segments)  # [B, T]
    return segments if labels.numel() else None


def mixes_documents(model: Any, inputs: Mapping[str, Any], labels: Tensor, *, cached: bool) -> bool:
    """Whether tokens of a packed row see other documents: transformers' attention may not know where these begin."""
    mask = inputs.get("attention_mask")
    if getattr(model.config, "_attn_implementation", None) not in OWN_ATTENTION:
        return False
    if mask is None and inputs.get("position_ids") is not None and not cached:
        return False
    if isinstance(mask, Tensor) and mask.ndim == 4:  # it says itself what each token sees
        return False
    documents = _documents(inputs, labels)  # [B, T]
    rows = (labels != IGNORE_INDEX).any(-1).sum()  # []
    return documents is not None and bool(number_of_texts(labels, predicted(documents)) > rows)


def check_unit(texts: object) -> None:
    """Raise unless this names what a text is."""
    if texts not in get_args(Unit):
        raise UserError(
            f"segments must be {' or '.join(map(repr, get_args(Unit)))}, got {texts!r}. The segments of a batch are "
            "one of its inputs: model(..., labels=labels, segments=segments)."
        )


def predicted(segments: Tensor) -> Tensor:
    """Segments of input tokens → of the tokens that they predict, [B, T]; −1 across segments, and at the end."""
    own = segments.where(~boundaries(segments), -1)  # [B, T]
    return torch.cat([own[:, 1:], segments[:, -1:]], 1)  # [B, T]


def _documents(inputs: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    """The document of each input token, [B, T]; None if no key can tell. One begins wherever any key says so."""
    found = [read(inputs[name], labels) for name, read in READERS.items() if isinstance(inputs.get(name), Tensor)]
    begins = [boundaries(documents.to(labels.device)) for documents in found if documents is not None]  # [B, T] each
    return torch.stack(begins).any(0).long().cumsum(-1) if begins else None  # [B, T]


def _from_boundaries(starts: Tensor, labels: Tensor) -> Tensor:
    """``cu_seq_lens_q``: where each document begins in the only row, and where the last one ends."""
    if len(labels) != 1:
        raise UserError(
            f"`cu_seq_lens_q` and `packed_seq_lengths` count the tokens of one row, and the labels have {len(labels)} "
            "rows. Pass `position_ids`, or `segments` in the shape of the labels."
        )
    place = torch.arange(labels.numel(), device=starts.device)  # [B·T]
    return torch.searchsorted(starts.flatten().long(), place, right=True).view(labels.shape)  # [B, T]


def _from_mask(mask: Tensor, labels: Tensor) -> Tensor | None:
    """``attention_mask`` with the number of each token's document, from 1; padding, 0, belongs to the one before it."""
    if mask.ndim != 2 or mask.dtype.is_floating_point or mask.dtype == torch.bool:
        return None
    mask = _rows("attention_mask", mask, labels).long()  # [B, T]
    if torch.compiler.is_compiling():  # masks are rarely numbers, and reading them would break every compiled graph
        torch._assert_async(
            (mask <= 1).all(),
            "attention_mask has numbers of documents above 1, which compiled code cannot read: pass `segments` too",
        )
        return None
    place = torch.arange(mask.shape[1], device=mask.device).where(mask > 0, -1)  # [B, T]
    last = place.cummax(-1).values  # [B, T]
    first = (mask > 0).long().argmax(-1, keepdim=True)  # [B, 1]
    return mask.gather(-1, last.where(last >= 0, first))  # [B, T]


def _from_positions(positions: Tensor, labels: Tensor) -> Tensor | None:
    """``position_ids``, which go up by one within a document. Three dimensions, as for images, say nothing."""
    if positions.ndim != 2:
        return None
    positions = _rows("position_ids", positions, labels)  # [B, T]
    return F.pad(positions[:, 1:] - positions[:, :-1] != 1, (1, 0)).long().cumsum(-1)  # [B, T]


READERS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "cu_seq_lens_q": _from_boundaries,
    "packed_seq_lengths": lambda lengths, labels: _from_boundaries(lengths.flatten().long().cumsum(0), labels),
    "seq_idx": lambda numbers, labels: _rows("seq_idx", numbers, labels),
    "position_ids": _from_positions,
    "attention_mask": _from_mask,
}
"""Key of a batch → where it marks documents, if it does."""


def _rows(name: str, numbers: Tensor, labels: Tensor) -> Tensor:
    """One number for each token; a single row holds for all, [B, T]."""
    if numbers.ndim != 2 or numbers.shape[1] != labels.shape[1] or len(numbers) not in (1, len(labels)):
        raise UserError(
            f"`{name}` of shape {list(numbers.shape)} does not fit labels of shape {list(labels.shape)}, so the "
            f"documents of a packed row cannot be found. Pass `{name}` with one number for each token, or "
            "`segments` in the shape of the labels."
        )
    return numbers.expand(labels.shape)  # [B, T]


def _refuse_contradiction(segments: Tensor, inputs: Mapping[str, Any], labels: Tensor) -> None:
    """Raise if ``position_ids`` begin a document in the middle of a text. A text may be a part of a document."""
    positions = inputs.get("position_ids")
    documents = _from_positions(positions, labels) if isinstance(positions, Tensor) else None  # [B, T]
    if documents is None:
        return
    begins = predicted(documents.to(labels.device)) < 0  # [B, T]
    finer = (boundaries(segments) | begins).long().cumsum(-1).where(segments >= 0, -1)  # [B, T]
    if (number_of_texts(labels, finer) != number_of_texts(labels, segments)).item():
        raise UserError(
            "`segments` and `position_ids` contradict each other: `position_ids` begin a new document inside a text of "
            "`segments`. Make both from the same documents, or pass only one of them."
        )


def taken_beside(inputs: Mapping[str, Any], *, shift: bool) -> dict[str, Any]:
    """Argument of the joint loss → a number for each label, [B, T], shifted as the labels are."""
    found: dict[str, Any] = {}
    for argument, names in BESIDE_NAMES.items():
        given = [name for name in names if inputs.get(name) is not None]
        if len(given) > 1:
            raise UserError(f"the batch has {' and '.join(given)}, which are two names for one input. Leave one out.")
        for name in given:
            array = inputs[name]
            found[argument] = F.pad(array, (0, 1))[..., 1:] if shift else array  # [B, T]
    if found and inputs.get("shift_labels") is not None:
        raise UserError(
            f"the batch has {' and '.join(found)} for its labels, and `shift_labels`, which are aligned in another "
            "way. Leave shift_labels out."
        )
    return found
