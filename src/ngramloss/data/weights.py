"""a row with a column of weights → the weights, checked."""

from __future__ import annotations

import json

from ngramloss.data.rows import RawRow, kind_of

LARGEST = 1e30
"""Larger weights overflow where they are multiplied in fp32."""


def read_weights(row: RawRow, column: str) -> tuple[tuple[float, ...], str]:
    """The list of numbers in a column, or in JSON text as CSV files have it; and why it cannot be used, if so.

    Example:
        >>> read_weights(RawRow("a.csv", 2, {"w": "[1, 0.5]"}), "w")
        ((1.0, 0.5), '')
        >>> read_weights(RawRow("a.csv", 2, {"w": [1, -1]}), "w")
        ((), "number 2 of 'w' is -1, and weights are finite and 0 or more")
    """
    if column not in row.values:
        return (), f"no column {column!r}"
    found = row.values[column]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return (), f"{column!r} should be a list of numbers, such as [1, 0.5, 1], got other text"
    if not isinstance(found, (list, tuple)):
        return (), f"{column!r} should be a list of numbers, such as [1, 0.5, 1], got {kind_of(found)}"
    if not found:
        return (), f"{column!r} is an empty list"
    for number, weight in enumerate(found, 1):
        if not isinstance(weight, (int, float)):
            return (), f"number {number} of {column!r} should be a number, got {kind_of(weight)}"
        if not 0 <= weight <= LARGEST:
            why = "0 or more" if weight <= LARGEST else f"at most {LARGEST:g}"
            return (), f"number {number} of {column!r} is {weight}, and weights are finite and {why}"
    return tuple(map(float, found)), ""
