"""results and sentences → the terminal, where names from files of strangers stay text.

Everything that the program prints goes through these functions.
"""

from __future__ import annotations

import sys

from ngramloss import escape


def print_result(result: object) -> None:
    """Print to the standard output."""
    print(escape.for_terminal(str(result)), flush=True)


def tell(sentence: object) -> None:
    """Print a sentence for the person, to the standard error."""
    print(escape.for_terminal(str(sentence)), file=sys.stderr)


def show_progress(what: str) -> None:
    """Put this in the place of the terminal's last line."""
    print(f"\r\033[K{escape.name(what)}", end="", file=sys.stderr, flush=True)
