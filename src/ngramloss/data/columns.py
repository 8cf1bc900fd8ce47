"""the names of a table's columns → which of them are the source, the target and the id."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from ngramloss.errors import UserError

SOURCES = ("document", "article", "source", "text", "dialogue", "input", "src")
TARGETS = ("summary", "highlights", "target", "reference", "abstract", "output", "tgt")
IDS = ("id", "doc_id", "guid", "fname", "article_id", "dialogue_id", "uid")


class Columns(NamedTuple):
    """The columns that are read. Without an id column a row's number is its id."""

    source: str
    target: str
    id: str | None


def columns(present: Sequence[str], where: str, *, source: str | None = None, target: str | None = None) -> Columns:
    """The columns to read: those given, and otherwise the first one present of the usual names.

    Upper and lower case are alike among the usual names (``Document`` is found), not in a given one.

    Args:
        present: the columns there are.
        where: the file or data set, for messages.
        source: the column of the source, if it was named.
        target: the column of the target, if it was named.

    Example:
        >>> columns(["fname", "dialogue", "topic", "summary"], "data/train.csv")
        Columns(source='dialogue', target='summary', id='fname')
    """
    for role, given in (("source", source), ("target", target)):
        if given is not None and given not in present:
            close = difflib.get_close_matches(given, present, n=1)
            raise UserError(
                f"{where} has no column {given!r} for the {role}{f' (did you mean {close[0]!r}?)' if close else ''}. "
                f"Its columns are {_listed(present)}."
            )
    if source is not None and source == target:
        raise UserError(f"source and target of {where} must be two columns, but both were given as {source!r}.")
    chosen_source = source if source is not None else _usual(SOURCES, present, taken=target)
    chosen_target = target if target is not None else _usual(TARGETS, present, taken=source)
    for role, chosen, usual in (("source", chosen_source, SOURCES), ("target", chosen_target, TARGETS)):
        if chosen is None:
            raise UserError(
                f"cannot tell which column of {where} is the {role}. Its columns are {_listed(present)}, and none of "
                f"them is called {', '.join(usual[:-1])} or {usual[-1]}. Name it with data.{role} = \"…\" in a recipe, "
                f'--{role} on the command line or {role}="…" in Python.'
            )
    assert chosen_source is not None
    assert chosen_target is not None
    return Columns(chosen_source, chosen_target, _usual(IDS, present))


def _usual(names: Sequence[str], present: Sequence[str], taken: str | None = None) -> str | None:
    folded = {column.casefold(): column for column in reversed(present) if column != taken}
    return next((folded[name] for name in names if name in folded), None)


def _listed(present: Sequence[str]) -> str:
    """Column names in quotes; long ones cut, for a table without a header has texts in their place."""
    shown = [repr(name if len(name) <= 40 else name[:39] + "…") for name in present[:20]]
    return (", ".join(shown) or "none") + (f" and {len(present) - 20} more" if len(present) > 20 else "")
