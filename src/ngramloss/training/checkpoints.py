"""a folder of checkpoints → the newest complete one."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.files import write_whole

SEAL = "whole.json"
"""The file that is written last into a checkpoint: names, sizes and checksums of the others."""

_NOT_MODEL = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|trainer_state|training_args|pytorch_model_fsdp|whole|data)(\.|_\d)"
)


class Found(NamedTuple):
    """The newest complete checkpoint, and what is wrong with newer ones."""

    newest: Path | None
    broken: dict[Path, str]


def seal(checkpoint: Path, **facts: Any) -> None:
    """Mark a checkpoint as complete. Its files reach the disk before the mark does."""
    content = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SEAL):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        content[str(path.relative_to(checkpoint))] = [path.stat().st_size, _checksum(path)]
    write_whole(checkpoint / SEAL, json.dumps({"files": content, **facts}, indent=1))


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
    try:
        files = [(name, size, checksum) for name, (size, checksum) in facts(checkpoint)["files"].items()]
    except FileNotFoundError:
        return "writing it did not finish"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):   # a damaged file may contain anything
        return f"its {SEAL} cannot be read"
    for name, size, checksum in files:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
        if _checksum(path) != checksum:
            return f"{name} was changed"
    return ""


def facts(checkpoint: Path) -> dict[str, Any]:
    """The facts that :func:`seal` saved."""
    content: dict[str, Any] = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
    return content


def step(checkpoint: Path) -> int:
    """The optimiser step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Delete all but the newest and the best. The seal is deleted first, so a half-deleted one is not used."""
    for checkpoint in sorted(_all(folder), key=step, reverse=True)[keep:]:
        if step(checkpoint) != best:
            (checkpoint / SEAL).unlink(missing_ok=True)
            shutil.rmtree(checkpoint, ignore_errors=True)


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Copy what ``from_pretrained`` reads, and nothing that only training needs."""
    for path in checkpoint.iterdir():
        if path.is_file() and not _NOT_MODEL.match(path.name):
            shutil.copy2(path, folder / path.name)


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name.rpartition("-")[2].isdigit()]


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            checksum = zlib.crc32(part, checksum)
    return checksum
