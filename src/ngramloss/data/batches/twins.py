"""a collator → one that puts every example into the batch twice, as neighbours, for terms that compare twins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ngramloss.data.batches.plan import Size
from ngramloss.errors import UserError
from ngramloss.loss.stats import BESIDE_LABELS


class Twins:
    """Wrap a collator such that rows 2i and 2i + 1 of a batch are the same example, each with its own dropout.

    For terms such as ``rdrop`` under any trainer. A batch has twice the rows that the trainer counts. In evaluation
    such terms are left out, but rows are there twice too, so a trainer that returns predictions is refused.

    Args:
        collator: a list of examples → a batch, such as ``DataCollatorForSeq2Seq``. Around a :class:`Padder` or a
            :class:`JoinedPadder` the wrapper takes a size, too.

    >>> twins(lambda rows: [row["labels"] for row in rows])([{"labels": 1}, {"labels": 2}])
    [1, 1, 2, 2]
    """

    def __init__(self, collator: Callable[..., Any]) -> None:
        if not callable(collator):
            raise UserError(f"twins wraps a collator, a function of examples, got {type(collator).__name__}.")
        self.collator = collator

    def __call__(self, rows: Sequence[Any], size: Size | None = None) -> Any:
        """The batch of these examples, each twice."""
        # Each its own: some collators change the examples that they get.
        doubled = [dict(row) if isinstance(row, Mapping) else row for row in rows for _ in range(2)]
        if size is not None:
            batch = self.collator(doubled, size._replace(rows=2 * size.rows))
        elif doubled:
            batch = self.collator(doubled)
        else:  # one blank row
            return {name: value.repeat_interleave(2, 0) for name, value in self.collator([]).items()}
        if isinstance(batch, dict) and "label_positions" in batch and "candidates" not in batch:
            texts = [name for name in ("labels", "label_positions", *BESIDE_LABELS) if name in batch]
            batch |= {name: _neighbours(batch[name], batch["input_ids"]) for name in texts}
        return batch


twins = Twins
"""Its name in ``ngramloss``: ``ng.twins(collator)``."""


def _neighbours(texts: Any, rows: Any) -> Any:
    """Texts, of which each row may have several, such that those of twins are neighbours, [S, T]."""
    each = len(texts) // len(rows)
    if each == 1:
        return texts
    return texts.view(len(rows) // 2, 2, each, -1).transpose(1, 2).reshape(texts.shape)
