"""a folder → held by one process at a time while it writes there, with no file left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder against other processes that ask for it; however this one ends, it is free again.

    Where the system knows no such locks (Windows) nothing is held.

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
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
