"""results and messages → the terminal, with control characters escaped.

The library reports through ``logging.getLogger("ngramloss")``; the command line shows that with ``show_messages``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, TypeGuard

from ngramloss.output import escape

logger = logging.getLogger("ngramloss")
logger.addHandler(logging.NullHandler())  # without any handler, Python would print warnings


def print_result(result: object) -> None:
    """Print a result to standard output."""
    print(escape.for_terminal(str(result)), flush=True)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines with these columns aligned to the left and the others to the right.

    >>> aligned([["a", "1.50"], ["long", "10.25"]])
    ['a      1.50', 'long  10.25']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def is_number(value: object) -> TypeGuard[float]:
    """Whether there is a value at all: not None, not NaN, not infinite."""
    return isinstance(value, (int, float)) and isfinite(value)


def fixed(value: float | None, decimals: int) -> str:
    """A value with its decimals, or a dash.

    >>> fixed(4.5, 2), fixed(None, 2)
    ('4.50', '–')
    """
    return f"{value:.{decimals}f}" if is_number(value) else "–"


def peak_memory(device: Any) -> float:
    """Peak memory of this process in GiB: on the GPU, or resident memory on a CPU; NaN where that is not known."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def show_messages() -> None:
    """Write the library's messages to standard error: all of them in the first process, errors alone in the others."""
    if not shows_messages():
        logger.addHandler(_ToStandardError())
    logger.setLevel(logging.INFO if first_process() else logging.ERROR)
    logger.propagate = False


def shows_messages() -> bool:
    """Whether ``show_messages`` was called."""
    return any(isinstance(handler, _ToStandardError) for handler in logger.handlers)


def first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide transformers' progress bar and its table of unused weights. Loaders check for missing weights."""
    from transformers.utils import logging as hf_logging

    shown: Any = hf_logging
    level, bar = shown.get_verbosity(), shown.is_progress_bar_enabled()
    shown.set_verbosity_error()
    shown.disable_progress_bar()
    try:
        yield
    finally:
        shown.set_verbosity(level)
        if bar:
            shown.enable_progress_bar()


class _ToStandardError(logging.Handler):
    """Writes above a progress bar if there is one. Looks standard error up each time, because tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        text = escape.for_terminal(record.getMessage())
        try:
            if "tqdm" in sys.modules:
                sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr)
        except Exception:
            self.handleError(record)
