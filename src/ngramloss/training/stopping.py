"""Ctrl-C or SIGTERM → the step is finished and saved, in all processes the same one."""

from __future__ import annotations

import signal
from typing import Any

from ngramloss.output.console import logger
from ngramloss.training.processes import Processes

EVERY = 10  # On a GPU processes agree only every tenth step, because that waits for the work given to it


class Stopping:
    """Watches for signals while it is entered. A second Ctrl-C stops at once."""

    def __init__(self, here: Processes) -> None:
        self.here, self._signalled = here, False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread, which alone gets signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def asked(self, step: int) -> bool:
        """Whether to stop after this step: all processes agree."""
        if self.here.count > 1 and step % (1 if self.here.device.type == "cpu" else EVERY):
            return False
        return self.here.any(self._signalled)

    def _ask(self, number: int, frame: Any) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
        if self.here.first:
            logger.info("stopping after this step and saving it. Press Ctrl-C again to stop at once.")
