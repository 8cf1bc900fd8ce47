"""a folder → one more file with the checksums of its files; later, what is damaged, or a rebuilt folder."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.storage.files import inside, lock_folder, read_object, remove, whole_folder, write_whole, writing

SEAL = "whole.json"
"""The file that is written last: names, sizes and checksums of the others, and facts about the folder."""
OWN = "checksum"  # The key in it for the checksum of its own content


def seal(folder: Path, **facts: Any) -> None:
    """Mark a folder as complete. Its files reach the disk before the mark does."""
    content = {}
    for path in _files(folder):
        with writing(path), path.open("rb") as file:
            os.fsync(file.fileno())
        content[str(path.relative_to(folder))] = [path.stat().st_size, _checksum(path)]
    described = {**facts, "files": content}
    write_whole(folder / SEAL, json.dumps({**described, OWN: _own_checksum(described)}, indent=1))


def facts(folder: Path) -> dict[str, Any]:
    """The facts that :func:`seal` saved. Raises ``UserError`` if the file cannot be read."""
    return read_object(folder / SEAL)


def damage(folder: Path, *, exact: bool = False) -> str:
    """Why a folder is incomplete or damaged, or nothing. ``exact``: files that the seal does not name are damage."""
    try:
        described = facts(folder)
        files = [(name, size, checksum) for name, (size, checksum) in described["files"].items()]
        if described.get(OWN) != _own_checksum(described):
            return f"its {SEAL} was changed"
    except FileNotFoundError:
        return "writing it did not finish"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # it may contain anything
        return f"its {SEAL} cannot be read"
    try:
        paths = [inside(folder, *Path(name).parts) for name, _, _ in files]
        for path in _files(folder):
            inside(folder, *path.relative_to(folder).parts)
    except UserError as reason:
        return str(reason).rstrip(".")
    for path, (name, size, checksum) in zip(paths, files, strict=True):
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
        if _checksum(path) != checksum:
            return f"{name} was changed"
    unknown = [path.name for path in _files(folder) if path not in paths] if exact else []
    return f"{unknown[0]} is not one of its files" if unknown else ""


def cached_folder(folder: Path, fill: Callable[[Path], None], *, what: str) -> Path:
    """A folder in the cache: the one that is there, if its checksums are right; otherwise ``fill`` makes a new one."""
    if folder.exists() and (reason := damage(folder, exact=True)):
        logger.warning(f"the {what} {folder} is damaged ({reason}); rebuilding it.")
        with lock_folder(folder.parent, wait=True):
            if damage(folder, exact=True):  # otherwise another process has rebuilt it
                remove(folder)
    if not folder.exists():
        with whole_folder(folder) as new:
            fill(new)
            seal(new)
    return folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SEAL)


def _own_checksum(described: dict[str, Any]) -> int:
    content = {key: value for key, value in described.items() if key != OWN}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            checksum = zlib.crc32(part, checksum)
    return checksum
