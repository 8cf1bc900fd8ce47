"""a folder of checkpoints → the newest complete one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import checksums
from ngramloss.checksums import SEAL, damage, seal

__all__ = ["SEAL", "Found", "copy_model", "delete", "facts", "fault", "find", "prune", "seal", "step"]

_NOT_MODEL = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|trainer_state|training_args|pytorch_model_fsdp|whole|data)(\.|_\d)"
)


class Found(NamedTuple):
    """The newest complete checkpoint, and what is wrong with newer ones."""

    newest: Path | None
    broken: dict[Path, str]


def find(folder: Path) -> Found:
    """Find the newest complete checkpoint in a folder."""
    broken: dict[Path, str] = {}
    for checkpoint in sorted(_all(folder), key=step, reverse=True):
        why = fault(checkpoint)
        if not why:
            return Found(checkpoint, broken)
        broken[checkpoint] = why
    return Found(None, broken)


def fault(checkpoint: Path) -> str:
    """The reason why a checkpoint is incomplete or damaged; empty if it is fine."""
    why = damage(checkpoint)
    if why:
        return why
    known = facts(checkpoint)
    best = known["best_step"] is None or (type(known["best_step"]) is int and type(known["best"]) in (int, float))
    return "" if best and isinstance(known["finished"], bool) else f"its {SEAL} cannot be read"


def facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's seal says of it; what it does not say is unknown, and the training not finished."""
    return {"step": step(checkpoint), "best_step": None, "best": None, "finished": False, **checksums.facts(checkpoint)}


def step(checkpoint: Path) -> int:
    """The optimiser step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Delete all but the newest and the best."""
    for checkpoint in sorted(_all(folder), key=step, reverse=True)[keep:]:
        if step(checkpoint) != best:
            delete(checkpoint)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, its seal first, so a half-deleted one is not used. Of a link, only the link is deleted."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    (checkpoint / SEAL).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Copy what ``from_pretrained`` reads, and nothing that only training needs."""
    for path in checkpoint.iterdir():
        if path.is_file() and not _NOT_MODEL.match(path.name):
            shutil.copy2(path, folder / path.name)


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name.rpartition("-")[2].isdigit()]
