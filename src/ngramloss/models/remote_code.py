"""a person's consent, from a command line or Python alone → whether code that comes with a model may run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_allowed: ContextVar[bool] = ContextVar("remote code", default=False)


@contextmanager
def allow_remote_code(allowed: bool) -> Iterator[None]:
    """Let code that comes with models run for a while, in this thread; or, inside, forbid it again."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def remote_code_allowed() -> bool:
    """Whether code that comes with a model may run."""
    return _allowed.get()
