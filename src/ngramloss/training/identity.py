"""a checkpoint and a prepared run → a sentence if the run was started with other data, another model or other code."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.recipe import Train
from ngramloss.storage.files import read_object
from ngramloss.training.prepared import Prepared

LOOKED_AT = 100
"""Rows of a training in Python that are compared when it is continued."""
MAY_CHANGE = (
    "epochs", "max_steps", "max_tokens", "precision", "log_every", "eval_every", "save_every", "keep", "average", "ema",
    "best", "best_limit", "best_beams", "best_options", "early_stopping", "eval_batch_size", "gradient_checkpointing",
    "capture", "compile", "fsdp", "memory", "report_to",
)  # fmt: skip
"""Settings that may differ when a training in Python is continued: its length, and what does not change its steps."""
IDENTITY = "data.json"
"""The file of a checkpoint that has ``Prepared.identity``."""


def raise_unless_same(folder: Path, checkpoint: Path, prepared: Prepared, *, may_change: Collection[str] = ()) -> None:
    """Raise unless a checkpoint was trained on what is prepared now.

    Args:
        folder: the run folder, for the message.
        checkpoint: the one to continue from.
        prepared: what the training would continue with.
        may_change: metrics of plugins of which other code is only said.
    """
    saved = read_object(checkpoint / IDENTITY, f"Delete {checkpoint} to continue from the previous checkpoint.")
    _raise_unless_same_data(folder, saved, prepared)
    _raise_unless_same_model(folder, saved, prepared)
    _raise_unless_same_code(folder, saved, prepared, may_change)


def training_identity(settings: Train, objective: str, examples: Any) -> dict[str, Any]:
    """What a training in Python must keep to be continued: its objective, its settings, and its rows."""
    looked_at = range(0, len(examples), max(len(examples) // LOOKED_AT, 1))
    digest = hashlib.sha256()
    for row in looked_at:
        for name in ("input_ids", "labels"):
            digest.update(np.asarray(examples[row][name], dtype=np.int64).tobytes() + b"|")
    kept = {name: value for name, value in dataclasses.asdict(settings).items() if name not in MAY_CHANGE}
    return {"objective": objective, **kept, "rows": f"{len(examples):,} ({digest.hexdigest()[:8]})"}


def raise_unless_same_training(checkpoint: Path, identity: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint has this :func:`training_identity`. Those of earlier versions have none."""
    saved = read_object(checkpoint / IDENTITY) if (checkpoint / IDENTITY).exists() else identity
    changed = [name for name, value in identity.items() if saved.get(name, value) != value]
    if changed:
        raise UserError(
            f"{checkpoint.parent} has checkpoints of another training ("
            + "; ".join(f"{name}: {saved[name]!r} → {identity[name]!r}" for name in changed)
            + "). Choose another folder, delete this one, or train with the same settings to continue it."
        )


def _raise_unless_same_data(folder: Path, saved: Mapping[str, Any], prepared: Prepared) -> None:
    for name, fingerprint in prepared.fingerprints.items():
        if saved.get(name) != fingerprint:
            what = {"candidates": "candidates have", "language_model": "language model has"}.get(name)
            restored = "it" if name == "language_model" else "them"
            raise UserError(
                f"the {what or f'{name} data have'} changed since {folder} was started (fingerprint {fingerprint}, not "
                f"{saved.get(name)}). Restore {restored} to continue, or start over with --fresh."
            )


def _raise_unless_same_model(folder: Path, saved: Mapping[str, Any], prepared: Prepared) -> None:
    """Raise if the model has another configuration or tokenizer than when the run was started.

    Its weights may have changed: they are read from the checkpoint. Checkpoints of earlier versions lack the hashes.
    """
    if names := _changed(saved.get("model_files"), prepared.model_files):
        raise UserError(
            f"files of the model have changed since {folder} was started ({names}). Restore them to continue, or "
            "start over with --fresh."
        )
    if names := _changed(saved.get("tokens"), prepared.tokens):
        raise UserError(
            f"the tokens ({names}) are not those with which {folder} was started, although the texts are: the "
            "tokenizer has changed, or the version of the package that splits sentences. Restore it to continue, or "
            "start over with --fresh."
        )


def _changed(before: Any, now: Mapping[str, str]) -> str:
    """The names whose values differ; empty if it is not known what they were."""
    if not isinstance(before, dict):
        return ""
    return ", ".join(sorted(name for name in {*before, *now} if before.get(name) != now.get(name)))


def _raise_unless_same_code(
    folder: Path, saved: Mapping[str, Any], prepared: Prepared, may_change: Collection[str]
) -> None:
    """Raise if an objective or a metric of a plugin is not the one that the run was started with."""
    for key, noun, code in (("plugins", "objective", prepared.plugins), ("metrics", "metric", prepared.metrics)):
        before = saved.get(key)
        before = before if isinstance(before, dict) else {}
        for name, source in code.items():
            if before.get(name, source) != source:
                if key == "metrics" and name in may_change:
                    logger.warning(
                        f"warning: the code of the metric {name!r} has changed since {folder} was started. From now on "
                        "texts gain what the new code says."
                    )
                    continue
                raise UserError(
                    f"the code of the {noun} {name!r} has changed since {folder} was started (fingerprint {source}, "
                    f"not {before[name]}). Restore the old plugin to continue, or start over with --fresh."
                )
