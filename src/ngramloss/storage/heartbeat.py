"""a process that works → a file that is touched while it lives; the file → how long the process has been silent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY = 10.0  # Seconds between two beats
SILENCE = 120.0
"""Seconds without a beat after which a process counts as dead. A shared file system may show a beat a minute late."""


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Touch a file as long as the block runs, however slow it is, and delete it afterwards."""
    ended = threading.Event()
    path.touch()

    def beat() -> None:
        while not ended.wait(EVERY):
            try:
                os.utime(path)
            except OSError:  # the process that waits has deleted it: it needs no more beats
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


class Listener:
    """Listens for the beats of another process, by the own clock alone: clocks of two machines may differ."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: int | None = None
        self._heard = time.monotonic()

    @property
    def is_dead(self) -> bool:
        """Whether the process has been silent for too long, since it was first listened for."""
        try:
            beat = self.path.stat().st_mtime_ns
        except OSError:
            beat = None
        if beat is not None and beat != self._last:
            self._last, self._heard = beat, time.monotonic()
        return time.monotonic() - self._heard > SILENCE
