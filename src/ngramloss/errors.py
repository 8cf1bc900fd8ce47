"""a user's mistake → an exception whose message says what to do; every other exception is a bug."""

from __future__ import annotations

PAGES = {
    "candidates": "docs/candidates.md#make-candidates",
    "code": "docs/security.md#code-that-comes-with-a-model",
    "columns": "docs/data.md#columns",
    "continue": "docs/continue.md",
    "data": "docs/data.md#where-data-come-from",
    "memory": "docs/train.md#precision-memory-speed",
    "models": "docs/train.md#models",
    "own file": "docs/start_3_train.md#your-own-file",
    "rows": "docs/data.md#rows-that-cannot-be-used",
    "settings": "docs/settings.md#every-setting",
}
"""What an error is about → the part of the documentation that helps further."""


def see(topic: str) -> str:
    """The line after an error that names a page.

    >>> see("columns")
    'see docs/data.md#columns'
    """
    return f"see {PAGES[topic]}"


class UserError(ValueError):
    """An input cannot be used. The command line prints only the message and exits with code 2.

    Args:
        message: what was expected, what was given, and what to do.
        about: a topic of ``PAGES``, if a page helps; the command line names it below the message.
    """

    def __init__(self, message: str = "", *, about: str = "") -> None:
        super().__init__(message)
        self.about = about


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder does not exist."""


class UnsupportedModelError(UserError, TypeError):
    """A model is not supported; the message gives the reason."""
