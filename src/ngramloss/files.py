"""text and rows → files and folders that are never seen in part, and one process at a time in a folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def cache_folder() -> Path:
    """Where prepared data are kept: ``$NGRAMLOSS_CACHE``, or ``ngramloss`` in the user's cache."""
    given = os.environ.get("NGRAMLOSS_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ngramloss"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never seen in part.

    The text goes into a new file beside it, which then takes its name. That file's name cannot be guessed and must not
    exist yet, so nobody can put a link there for us to write through; a link at ``path`` itself is replaced.
    """
    partial = _beside(path)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def appended(path: Path) -> TextIO:
    """Open a file to write at its end. Nothing is written through a link: then an ``OSError`` is raised."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def fingerprint(paths: Sequence[Path]) -> str:
    """A hash of files' contents, 12 hexadecimal digits, whatever their folder."""
    found = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        found.update(path.name.encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:12]


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; a line that a kill cut short is left out. No file, no objects."""
    rows = []
    # Not splitlines(): a text may hold U+2028 or U+0085, which end a line there and not in JSON lines.
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            row = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all: it is filled under another name and renamed at the end."""
    partial = _beside(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():   # else another process was quicker with the same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there. A folder is never seen in part; what a link names stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    partial = path if _PARTIAL.search(path.name) else path.rename(_beside(path))
    shutil.rmtree(partial)


_PARTIAL = re.compile(r"\.partial-[0-9a-f]+$")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")


@contextmanager
def lock_folder(folder: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder against other processes that ask for it; however this one ends, it is free again.

    No file is left behind, and a folder that cannot be written to can be locked. Where the system (Windows) or the file
    system (some on a network) has no such locks, nothing is locked.

    Args:
        folder: that there is.
        wait: until it is free; else ``BlockingIOError`` is raised where it is not.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    _handles.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            if reason.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        _handles.discard(handle)
        os.close(handle)


_handles: set[int] = set()


def _let_go() -> None:
    """A forked process has no part in its parent's locks: it may live on after the parent was killed."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
