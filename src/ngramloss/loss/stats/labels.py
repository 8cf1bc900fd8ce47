"""a user's labels → valid int64 labels, or an error that gives the reason."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100  # the label of a position that does not count: padding, or a masked prompt
NOT_FLATTENED = (
    " N-grams are read along rows, so do not flatten them: pass {0} and labels [B, T] without .view(-1, ...) or "
    ".flatten(0, 1). For a single row, pass {0}[None] and labels[None]."
)
"""What to write instead of rows that are flattened, as ``F.cross_entropy`` wants them."""


def legal_labels(
    labels: Tensor, predictions: Tensor, vocabulary: int, *, check: bool = False, guarded: bool = False
) -> Tensor:
    """The labels as int64, [B, T], checked against predictions [B, T, …]; only ``check`` waits for a device.

    ``guarded``: the kernel that reads the labels next asserts their range itself.

    >>> legal_labels(torch.tensor([[1, 9]]), torch.zeros(1, 2, 4), 4)
    Traceback (most recent call last):
    ...
    ValueError: labels must be -100 or an id from 0 to 3, got 9 at row 0, position 1. ...
    """
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integer ids, got {labels.dtype}. Convert them with labels.long().")
    if labels.shape != predictions.shape[:2]:
        hint = ""
        if labels.shape == (predictions.shape[0], predictions.shape[2]):
            hint = " F.cross_entropy takes logits [B, V, T]; pass logits.transpose(1, 2) here."
        raise ValueError(
            f"labels must have shape [B, T] = {list(predictions.shape[:2])} to match predictions of shape "
            f"{list(predictions.shape)}, got {list(labels.shape)}. Give one label for each position: "
            f"pad labels with -100, and for a decoder-only model shift them first.{hint}"
        )
    labels = labels.long()                                               # [B, T]
    if guarded and not check:
        return labels
    legal = (labels == IGNORE_INDEX) | ((labels >= 0) & (labels < vocabulary))   # [B, T]
    if torch.compiler.is_compiling() or not (check or labels.device.type == "cpu"):
        torch._assert_async(legal.all(), f"labels must be {IGNORE_INDEX} or an id below the vocabulary size")
    elif not legal.all():
        row, position = (~legal).nonzero()[0].tolist()
        raise ValueError(
            f"labels must be {IGNORE_INDEX} or an id from 0 to {vocabulary - 1}, "
            f"got {labels[row, position].item()} at row {row}, position {position}. "
            f"Mark positions that do not count with {IGNORE_INDEX}; if the id is a new token, resize the head."
        )
    return labels
