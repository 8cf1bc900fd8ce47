"""a mistake in what a person gave us → a sentence that says what to do; every other exception is a bug of ours."""

from __future__ import annotations


class UserError(ValueError):
    """Something that was given cannot be used. The command line prints the sentence alone and exits with 2."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that was named is not there."""


class UnsupportedModelError(UserError, TypeError):
    """A model that cannot be served, with the reason."""
