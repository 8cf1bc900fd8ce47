"""a checkpoint and a prepared run → a sentence if the run was started with other data, another model or other code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngramloss.errors import UserError
from ngramloss.storage.files import read_object
from ngramloss.training.prepared import Prepared

IDENTITY = "data.json"
"""The file of a checkpoint that has ``Prepared.identity``."""


def raise_unless_same(folder: Path, checkpoint: Path, prepared: Prepared) -> None:
    """Raise unless a checkpoint was trained on what is prepared now.

    Args:
        folder: the run folder, for the message.
        checkpoint: the one to continue from.
        prepared: what the training would continue with.
    """
    saved = read_object(checkpoint / IDENTITY, f"Delete {checkpoint} to continue from the previous checkpoint.")
    _raise_unless_same_data(folder, saved, prepared)
    _raise_unless_same_model(folder, saved, prepared)
    _raise_unless_same_code(folder, saved, prepared)


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


def _raise_unless_same_code(folder: Path, saved: Mapping[str, Any], prepared: Prepared) -> None:
    """Raise if an objective or a metric of a plugin is not the one that the run was started with."""
    for key, noun, code in (("plugins", "objective", prepared.plugins), ("metrics", "metric", prepared.metrics)):
        before = saved.get(key)
        before = before if isinstance(before, dict) else {}
        for name, source in code.items():
            if before.get(name, source) != source:
                raise UserError(
                    f"the code of the {noun} {name!r} has changed since {folder} was started (fingerprint {source}, "
                    f"not {before[name]}). Restore the old plugin to continue, or start over with --fresh."
                )
