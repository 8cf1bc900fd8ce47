"""work that takes long → a bar in a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from ngramloss.output import escape
from ngramloss.output.console import first_process, logger, shows_messages

SECONDS, BETWEEN_NOTES = 30, 1
"""The least time between two lines where standard error is not a terminal; with a new note."""


class Progress:
    """How much of some work is done. In a terminal it is a bar; in a log file, a line every thirty seconds.

    A bar appears only under the command line, and only in the first process.

    Args:
        what: the work, such as "reading train".
        total: how much there is; None if nobody knows.
        unit: what is counted; empty if nothing is.
        done: how much was done before.

    Example:
        >>> with Progress("reading train", total=3, unit="documents") as progress:
        ...     progress.update(3)
    """

    def __init__(self, what: str, total: int | None = None, *, unit: str = "documents", done: int = 0) -> None:
        self.what, self.total, self.unit, self.done = escape.name(what), total, unit, done
        self._began = self._logged = time.monotonic()
        self._before, self._note, self._noted, self._bar = done, "", done, self._new_bar()

    def update(self, count: int = 1, *, note: str = "") -> None:
        """Count what was done since the last call.

        Args:
            count: how much.
            note: a new text beside the bar, such as the loss; in a log file a line, but not two lines in a second.
                Later on, the bar says which count it belongs to, and lines leave it out.
        """
        self.done += count
        if note:
            self._note, self._noted = note, self.done
        if self._bar is None:
            least = SECONDS if not note else 0 if self.done == self.total else BETWEEN_NOTES
            if (now := time.monotonic()) - self._logged >= least:
                self._logged = now
                logger.info(str(self))
        else:
            earlier = f"at {self._noted:,}: " if self._note and self._noted != self.done else ""
            self._bar.set_postfix_str(escape.name(earlier + self._note), refresh=False)
            self._bar.update(count)

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        speed = (self.done - self._before) / max(seconds, 1e-9)
        of = f" of {self.total:,}" if self.total else ""
        left = (
            f", {_clock((self.total - self.done) / speed)} left"
            if self.total and self.total > self.done and speed
            else ""
        )
        note = f" · {self._note}" if self._note and self._noted == self.done else ""
        return f"{self.what}: {self.done:,}{of} {self.unit}{left}{note}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def _new_bar(self) -> Any:
        if not (shows_messages() and first_process() and sys.stderr.isatty()):
            return None
        from tqdm import tqdm

        return tqdm(
            desc=self.what,
            total=self.total,
            initial=self.done,
            unit=f" {self.unit}",
            bar_format=None if self.unit else "{desc}",
            leave=False,
            dynamic_ncols=True,
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
