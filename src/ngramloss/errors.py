"""a user's mistake → an exception whose message says what to do; every other exception is a bug."""

from __future__ import annotations

from typing import Self

PAGES = {
    "candidates": "candidates#make-candidates",
    "code": "security#code-that-comes-with-a-model",
    "columns": "data#columns",
    "continue": "train#stop-and-continue",
    "data": "data#where-data-come-from",
    "memory": "train#precision-memory-speed",
    "models": "train#models",
    "own file": "start_3_train#your-own-file",
    "rows": "data#rows-that-cannot-be-used",
    "settings": "settings#every-setting",
}
"""What an error is about → the page and the part of the guide that help further."""


def see(topic: str) -> str:
    """The line after an error that names a page."""
    return f"see: ngramloss docs {PAGES[topic]}"


DIVERGED = 3  # Exit code of a training whose loss became NaN or infinite: its settings are why, and not the machine


class UserError(ValueError):
    """An input cannot be used. The command line prints only the message and exits with code 2.

    The message says what was expected, what was given, and what to do. It has no ``__init__``: compiled code raises it.
    """

    about: str = ""
    """A topic of ``PAGES``, if a page helps."""

    def on_page(self, topic: str) -> Self:
        """The same error, below which the command line names the page of a topic."""
        self.about = topic
        return self


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder does not exist."""


class UnsupportedModelError(UserError, TypeError):
    """A model is not supported; the message gives the reason."""
