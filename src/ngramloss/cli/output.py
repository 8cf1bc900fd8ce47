"""results and messages → the terminal, with control characters escaped.

Everything that the program prints goes through these functions, so names from untrusted files cannot control the
terminal.
"""

from __future__ import annotations

import sys

from ngramloss.output import escape


def print_result(result: object) -> None:
    """Print a result to standard output."""
    print(escape.for_terminal(str(result)), flush=True)


def tell(sentence: object) -> None:
    """Print a message to standard error."""
    print(escape.for_terminal(str(sentence)), file=sys.stderr)


def show_progress(what: str) -> None:
    """Replace the terminal's last line by this text."""
    print(f"\r\033[K{escape.name(what)}", end="", file=sys.stderr, flush=True)
