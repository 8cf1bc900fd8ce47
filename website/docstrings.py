"""docstrings, which write formulas and names as Sphinx does → Markdown. An extension of Griffe."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

FORMULA = re.compile(r"^(?P<indent> *)\.\. math::\n(?P<lines>(?:(?P=indent) +\S.*\n?|\n(?=(?P=indent)    ))+)", re.M)
ROLE = re.compile(r":(?P<role>math|func|class|meth|mod|data|attr):`~?(?P<text>[^`]+)`")


def markdown(text: str) -> str:
    r"""A docstring with its formulas between dollars and its names in backquotes; Griffe knows ``Examples:`` alone.

    >>> print(markdown(":func:`f` of :math:`x`:\n\n.. math::\n    a = 1\n    + 2\n\nthen"))
    `f` of $x$:
    <BLANKLINE>
    $$
    a = 1
    + 2
    $$
    <BLANKLINE>
    then
    """

    def display(found: re.Match[str]) -> str:
        formula = textwrap.dedent(found["lines"]).strip()
        return textwrap.indent(f"$$\n{formula}\n$$\n", found["indent"])

    def inline(found: re.Match[str]) -> str:
        return f"${found['text']}$" if found["role"] == "math" else f"`{found['text']}`"

    return ROLE.sub(inline, FORMULA.sub(display, text)).replace("Example:\n", "Examples:\n")


class Docstrings(Extension):
    """Rewrites each docstring after it was read."""

    def on_object(self, *, obj: Object, **given: Any) -> None:
        """One object."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
