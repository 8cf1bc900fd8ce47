"""the data of a recipe and the name of a split → the split, or the training rows without a part that is left out."""

from __future__ import annotations

import hashlib

from ngramloss.data.examples import Split, columns_of, fingerprint, load
from ngramloss.errors import UserError
from ngramloss.recipe import Data
from ngramloss.settings import part_of


def load_split(
    data: Data,
    task: str,
    split: str,
    *,
    limit: int = 0,
    leave_out: str = "",
    weights: bool = False,
    need_target: bool = True,
) -> Split:
    """Read a split of a recipe's data, without a part such as ``1/2`` that training leaves out (``data.leave_out``).

    With ``weights``, those of tokens (``data.weights``) are read, too, as a part of the fingerprint.
    """
    options = columns_of(data, task)
    options["need_target"] = need_target
    found = load(
        data.name,
        split,
        on_bad_row=data.on_bad_row,
        limit=limit,
        validation_fraction=data.validation_fraction,
        test_fraction=data.test_fraction,
        weights=(data.weights or None) if weights else None,
        **options,
    )
    return without_part(found, leave_out) if leave_out and split == "train" else found


def without_part(split: Split, part: str) -> Split:
    """The rows that do not belong to a part. Raises if that are all of them, or none."""
    kept = [example for example in split.examples if not in_part(example.id, part)]
    if not kept or len(kept) == len(split.examples):
        raise UserError(
            f"data.leave_out = {part!r}: {'none' if kept else 'all'} of the {len(split.examples):,} training rows of "
            f"{split.name} fall into this part, by their ids. Use fewer parts or more rows."
        )
    return split._replace(examples=kept, fingerprint=fingerprint(kept))


def in_part(key: str, part: str) -> bool:
    """Whether the row with this id is in part ``K/N``, by the last bytes of its hash: the first ones hold out rows.

    >>> [in_part("a", f"{number}/3") for number in (1, 2, 3)]
    [False, True, False]
    """
    numbers = part_of(part)
    assert numbers is not None, "recipes are checked"
    number, count = numbers
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[-8:], "big") % count == number - 1
