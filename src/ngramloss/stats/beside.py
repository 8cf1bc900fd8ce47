"""numbers that a caller gives beside the labels, one for each token → checked, as fields of TokenStats."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.stats.labels import IGNORE_INDEX
from ngramloss.stats.token_stats import TokenStats

BESIDE = {"weights": (0.0, "0 or more")}
"""Field of TokenStats that a caller gives → the least value, and what to say of it. All values are finite."""


def beside_labels(stats: TokenStats, labels: Tensor, **given: Tensor | None) -> TokenStats:
    """The statistics with what was given beside the labels; 0 where a label does not count, and without gradient.

    Shapes are always checked; values at once on a CPU in eager mode, otherwise by an assertion on the device.

    Args:
        stats: from the same labels.
        labels: reference ids, [B, T].
        given: name in ``BESIDE`` → a number for each label, [B, T], in any dtype; None is left out.

    Example:
        >>> from ngramloss.stats import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> beside_labels(token_stats(torch.zeros(1, 3, 4), labels), labels, weights=torch.tensor([[2, 1, 7]])).weights
        tensor([[2., 1., 0.]])
    """
    checked = {name: _checked(name, array, labels, stats.lse) for name, array in given.items() if array is not None}
    return stats._replace(**checked) if checked else stats


def _checked(name: str, array: Tensor, labels: Tensor, like: Tensor) -> Tensor:
    least, described = BESIDE[name]
    if not isinstance(array, Tensor) or array.dtype.is_complex:
        kind = array.dtype if isinstance(array, Tensor) else type(array).__name__
        raise TypeError(f"{name} must be a tensor of numbers, one for each label, got {kind}.")
    if array.shape != labels.shape:
        raise UserError(
            f"{name} must have the shape of the labels, [B, T] = {list(labels.shape)}, got {list(array.shape)}. Give "
            "one number for each label; at padding it is not read."
        )
    real = labels != IGNORE_INDEX                                        # [B, T]
    values = array.detach().to(like.device, like.dtype).where(real.to(like.device), 0.0)   # [B, T]
    legal = (values >= least) & values.isfinite()                        # [B, T]
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        torch._assert_async(legal.all(), f"{name} must be finite and {described}")
    elif not legal.all():
        row, position = (~legal).nonzero()[0].tolist()
        raise UserError(
            f"{name} must be finite and {described}, got {values[row, position].item():g} at row {row}, position "
            f"{position}. To leave a token out, give it the label {IGNORE_INDEX}, or the weight 0 to count it still."
        )
    return values
