"""column names of a table → which of them are the source, the target and the id."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from ngramloss.errors import UserError

SOURCES = ("document", "article", "source", "text", "dialogue", "input", "src")
TARGETS = ("summary", "highlights", "target", "reference", "abstract", "output", "tgt")
IDS = ("id", "doc_id", "guid", "fname", "article_id", "dialogue_id", "uid")


class Columns(NamedTuple):
    """The columns to read. Without an id column, the row number is the id."""

    source: str
    target: str
    id: str | None


def columns(present: Sequence[str], where: str, *, source: str | None = None, target: str | None = None) -> Columns:
    """Choose the columns to read: the given ones, or else the first one present of the usual names.

    Case does not matter for the usual names (``Document`` is found). It matters for a given name.

    Args:
        present: all columns of the table.
        where: the file or data set, for messages.
        source: the source column, if given.
        target: the target column, if given.

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
        raise UserError(f"source and target of {where} must be different columns, but both are {source!r}.")
    chosen_source = source if source is not None else _usual(SOURCES, present, taken=target)
    chosen_target = target if target is not None else _usual(TARGETS, present, taken=source)
    for role, chosen, usual in (("source", chosen_source, SOURCES), ("target", chosen_target, TARGETS)):
        if chosen is None:
            raise UserError(
                f"cannot find the {role} column of {where}. Its columns are {_listed(present)}, and none of them is "
                f"called {', '.join(usual[:-1])} or {usual[-1]}. Set it with data.{role} = \"…\" in a recipe, "
                f'--{role} on the command line or {role}="…" in Python.'
            )
    assert chosen_source is not None
    assert chosen_target is not None
    return Columns(chosen_source, chosen_target, _usual(IDS, present))


def _usual(names: Sequence[str], present: Sequence[str], taken: str | None = None) -> str | None:
    folded = {column.casefold(): column for column in reversed(present) if column != taken}
    return next((folded[name] for name in names if name in folded), None)


def _listed(present: Sequence[str]) -> str:
    """Column names in quotes. Long ones are truncated: a table without a header has texts in their place."""
    shown = [repr(name if len(name) <= 40 else name[:39] + "…") for name in present[:20]]
    return (", ".join(shown) or "none") + (f" and {len(present) - 20} more" if len(present) > 20 else "")
