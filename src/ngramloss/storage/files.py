"""text and rows → files and folders that are written completely or not at all; JSON and TOML from files; a lock."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from ngramloss.errors import UserError

LONGEST_TOML = 2**20  # Bytes of a TOML file that is read, at most
MOST_DOTS = 500  # Dots in one of its lines, at most


def cache_folder() -> Path:
    """The folder for prepared data: ``$NGRAMLOSS_CACHE``, or ``ngramloss`` in the user's cache."""
    return Path(os.environ.get("NGRAMLOSS_CACHE") or user_cache())


def user_cache() -> Path:
    """``ngramloss`` in the user's own cache, which nobody else writes to."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ngramloss"


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Errors of a disk, a quota or a file that is full
_FULL_TEXTS = re.compile(r"No space left on device|\(os error (28|122|27)\)|\d+ requested and \d+ written")
"""How Rust and NumPy tell of them, in other exceptions."""


def inside(folder: Path, *names: str, may_link: bool = False) -> Path:
    """The path of a file in a folder that somebody else may have made, from its name or from those of folders and file.

    Raises ``UserError`` if a name is a path, such as ``../x``, or if a link leads out of the folder, unless it may.

    >>> inside(Path("runs"), "mine", "log.jsonl").as_posix()
    'runs/mine/log.jsonl'
    """
    for name in names:
        if not is_file_name(name):
            raise UserError(f"{name!r} is not the name of a file or folder in {folder}.")
    path = folder.joinpath(*names)
    real = Path(os.path.realpath(path))  # unlike resolve(), of a link to itself, too
    if not may_link and not real.is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{path} leads out of {folder}, to {real}. Replace the link by a copy, if you trust it.")
    return path


def is_file_name(name: object) -> TypeGuard[str]:
    """Whether something from a file is the name of a file or folder, and not a path."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and "\0" not in name


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file or folder in the error of a full disk: Python may leave it out, libraries may raise anything."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        named = isinstance(error, OSError) and error.filename and not error.filename2
        if named or not (number in FULL or _FULL_TEXTS.search(str(error))):
            raise
        number = number or errno.ENOSPC
        raise OSError(number, os.strerror(number), str(path)) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old file or the complete new one. A link at ``path`` is replaced.

    The temporary name cannot be guessed and must not exist yet, so nobody can place a link there for us to follow.
    """
    partial = _beside(path)
    try:
        with (
            writing(path),
            os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file,
        ):
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def appended(path: Path) -> Iterator[TextIO]:
    """Open a file for appending. Raises ``OSError`` if the path is a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with writing(path), os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:
        yield file


def fingerprint(paths: Sequence[Path]) -> str:
    """Hash the names and contents of files to 12 hexadecimal digits. Their folder does not matter."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file. Truncated and damaged lines are skipped; a missing file has no objects."""
    rows = []
    # Not splitlines(): a text may contain U+2028 or U+0085, which end a line there but not in JSON lines.
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):  # not JSON, too deep, an enormous number
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_json(path: Path, advice: str = "") -> Any:
    """Read a JSON file. Raises ``UserError`` with its name and the advice if it is damaged, whatever it contains."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as reason:  # not JSON, not UTF-8, too deep, an enormous number
        raise UserError(f"{path} is not JSON: {_reason(reason)}. {advice}".rstrip()) from None


def read_object(path: Path, advice: str = "") -> dict[str, Any]:
    """Read a JSON file that contains an object, as :func:`read_json` does."""
    content = read_json(path, advice)
    if not isinstance(content, dict):
        raise UserError(f"{path} should contain a JSON object, got {type(content).__name__}. {advice}".rstrip())
    return content


def object_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is no such file or it contains something else."""
    try:
        return read_object(path)
    except (OSError, UserError):
        return {}


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """Read TOML. Raises ``UserError`` with the place if it is damaged, whatever it contains."""
    # The reader needs memory for the square of the parts of a key: a.a.a. … of 200 KB would take 40 GB.
    if len(content) > LONGEST_TOML or any(line.count(b".") > MOST_DOTS for line in content.split(b"\n")):
        expected = f"at most {LONGEST_TOML:,} bytes, and at most {MOST_DOTS:,} dots in a line"
        raise UserError(f"{where} is not a file of settings: expected {expected}.")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as reason:  # not TOML, not UTF-8, too deep, an enormous number
        raise UserError(f"{where} is not TOML: {_reason(reason)}.") from None


def _reason(reason: Exception) -> str:
    return str(reason).partition("; use sys.")[0].rstrip(".")  # without the advice for programmers


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: fill it under a temporary name, and rename it at the end."""
    partial = _beside(folder)
    partial.mkdir(parents=True)
    try:
        with writing(folder):
            yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written the same content first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists. A folder disappears at once; a link's target stays."""
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
    """Lock a folder for one process; wait until it is free, or raise ``BlockingIOError``.

    The lock needs no file and no write permission, and is released when the process ends, even if it is killed. On
    systems (Windows) or file systems (some network ones) without such locks, nothing is locked.
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


def _close_handles() -> None:
    """Drop the parent's locks in a forked process, which may outlive a killed parent."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_handles)
