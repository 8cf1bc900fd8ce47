"""a model in training and its last micro-batch → diagnostics for the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.joined import TEXT_NUMBERS
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import BESIDE_LABELS
from ngramloss.models.attached.adapted_heads import evaluating
from ngramloss.models.attached.attach import aligned_given, aligned_labels, aligned_packing, attached_loss, logits_of
from ngramloss.models.attached.segments import POSITIONS

DIAGNOSED_ROWS = 4  # Number of rows used for diagnostics: they need full logits, which must not fill the memory
INPUTS = ("input_ids", "attention_mask", "position_ids", TEXT_NUMBERS)
"""What a batch with ``label_positions`` may have of each row of the model."""


def diagnostics(
    model: Any, loss_fn: JointLoss, batch: Mapping[str, Any], autocast: Callable[[], Any]
) -> dict[str, float]:
    """``JointLoss.diagnose`` on a few rows of a micro-batch, without dropout."""
    loss_fn.progress = attached_loss(model).progress
    rows = _first_rows(batch)
    # Compiled layers would be compiled again for these few rows.
    with evaluating(model.modules()), torch.no_grad(), autocast(), torch.compiler.set_stance("force_eager"):
        labels, packed = aligned_labels(model, rows), aligned_packing(model, rows)
        given = aligned_given(model, rows)
        values = loss_fn.diagnose(logits_of(model, rows).float(), labels, segments=packed, **given)
    return {name: value.item() for name, value in values.items()}


def _first_rows(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first rows of a batch. What has no row for each row of the labels, such as lengths of documents, stays."""
    size = len(batch["labels"])
    if TEXT_NUMBERS in batch:
        batch = _without_later_texts(batch)
    if size <= DIAGNOSED_ROWS:
        return batch
    if POSITIONS in batch:  # text s is in a row that comes no later than row s
        beside = [name for name in BESIDE_LABELS if name in batch]
        names = [name for name in INPUTS if name in batch]
        return {name: batch[name][:DIAGNOSED_ROWS] for name in ("labels", POSITIONS, *beside, *names)}
    return {
        name: value[:DIAGNOSED_ROWS] if isinstance(value, Tensor) and len(value) == size else value
        for name, value in batch.items()
    }


def _without_later_texts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Rows without what follows their labels: texts that share their prompt, which would need most of the logits."""
    rows, columns = (op(batch[POSITIONS], batch["input_ids"].shape[1]) for op in (torch.floor_divide, torch.remainder))
    length = int(columns.max()) + 1
    cut = {name: batch[name][:, :length] for name in INPUTS if name in batch}
    return {**batch, **cut, POSITIONS: rows * length + columns}


def scheduled_weights(loss_fn: JointLoss) -> dict[str, float]:
    """The weights of terms that change in the training, for the log."""
    weights = zip(loss_fn.parts, loss_fn.weights, strict=True)
    return {f"weight/{part.name}": weight for part, weight in weights if part.schedule is not None}
