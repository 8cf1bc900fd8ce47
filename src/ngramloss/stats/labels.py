"""labels as a user has them → int64 labels known to be legal, or an error that says why not."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a position that does not count: padding, or a masked prompt."""


def legal_labels(
    labels: Tensor, predictions: Tensor, vocabulary: int, *, check: bool = False, guarded: bool = False
) -> Tensor:
    """The labels as int64, checked against the predictions they belong to, [B, T].

    Shape and kind are always checked. The range is checked at once on a CPU in eager mode, where looking
    at values costs nothing; elsewhere by an assertion on the device, which raises later and without
    naming the place, but never makes the host wait. ``check=True`` looks at the values anywhere.

    Args:
        labels: reference ids, [B, T], of any integer kind, ``IGNORE_INDEX`` where they do not count.
        predictions: logits or hidden states, [B, T, anything]; only the shape is read.
        vocabulary: ids must be below this.
        check: look at the values on any device, at the price of a synchronisation.
        guarded: a kernel that reads the labels next asserts their range itself.

    Example:
        >>> legal_labels(torch.tensor([[1, 9]]), torch.zeros(1, 2, 4), 4)
        Traceback (most recent call last):
        ...
        ValueError: labels must be -100 or an id from 0 to 3, got 9 at row 0, position 1. ...
    """
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integer ids, got {labels.dtype}. Convert them with labels.long().")
    if labels.shape != predictions.shape[:2]:
        raise ValueError(
            f"labels must be [B, T] = {list(predictions.shape[:2])} to go with predictions of shape "
            f"{list(predictions.shape)}, got {list(labels.shape)}. One label belongs to one position: "
            "pad labels with -100, and for a decoder-only model shift them first."
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
