"""a user's mistake → an exception whose message says what to do; every other exception is a bug."""

from __future__ import annotations


class UserError(ValueError):
    """An input cannot be used. The command line prints only the message and exits with code 2."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder does not exist."""


class UnsupportedModelError(UserError, TypeError):
    """A model is not supported; the message gives the reason."""
