"""column names of a table → which of them are the source, the target and the id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from ngramloss.data.language_codes import column_names
from ngramloss.errors import UserError

SOURCES = ("document", "article", "source", "text", "dialogue", "input", "src", "prompt")
TARGETS = ("summary", "highlights", "target", "reference", "abstract", "output", "tgt", "completion")
INSTRUCTION, BESIDE = "instruction", ("input", "context", "document", "article", "dialogue")
"""Data of instructions, and the names of the text that they concern. Beside them ``text`` is often the whole prompt."""
RESPONSE = "response"  # A target if there is no other; with numbers, as in data of preferences, it is none
FIRST = {"translation": (("source", "src"), ("target", "tgt", "translation"))}
"""Task → the names of its source and target columns that come before the others."""
IDS = ("id", "doc_id", "guid", "fname", "article_id", "dialogue_id", "uid")


PREDICTIONS = ("prediction", "predictions", "hypothesis", "generated", "summary", "output")

NO_ID = "none"  # Given as the id column: rows have no ids, and their order counts

NO_TARGET = "none"
"""Given as the target column where none is needed: rows have no targets, whatever their columns are called."""


class Columns(NamedTuple):
    """The columns to read. Without ``id`` rows are numbered. ``others``: references; ``more``: further sources."""

    source: str
    target: str | None
    id: str | None
    others: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


def columns(
    present: Sequence[str],
    where: str,
    *,
    source: str | None = None,
    target: str | None = None,
    id: str | None = None,
    languages: tuple[str, str] = ("", ""),
    task: str = "",
    need_target: bool = True,
) -> Columns:
    """The columns to read: the given ones, or else the first present of the usual names, whose case does not matter.

    Commas separate several source columns, which are joined, or several references. Columns may be named after
    ``languages``. Without ``need_target`` a given target need not be there; ``none`` means that there is none.

    >>> columns(["fname", "dialogue", "topic", "summary"], "data/train.csv")
    Columns(source='dialogue', target='summary', id='fname', others=(), more=())
    >>> columns(["text", "summary1", "summary2"], "test.csv").others
    ('summary2',)
    >>> columns(["de", "en"], "train.tsv", languages=("en_XX", "de_DE"))
    Columns(source='en', target='de', id=None, others=(), more=())
    >>> columns(["instruction", "input", "output"], "alpaca.json")
    Columns(source='instruction', target='output', id=None, others=(), more=('input',))
    >>> columns(["id", "document"], "new.jsonl", need_target=False)
    Columns(source='document', target=None, id='id', others=(), more=())
    """
    without = not need_target and target == NO_TARGET
    given_sources, given_targets = given_columns(source, present), [] if without else given_columns(target, present)
    if not need_target and given_targets and not {*given_targets} & {*present}:
        unnamed = columns(present, where, source=source, id=id, languages=languages, task=task, need_target=False)
        if unnamed.target is None:
            return unnamed
    given = [("source", name) for name in given_sources] + [("target", name) for name in given_targets]
    if absent := [_absent(name, role, present) for role, name in given if name not in present]:
        raise UserError(f"{where} has {' and '.join(absent)}. Its columns are {listed(present)}.")
    if both := [name for name in given_sources if name in given_targets]:
        raise UserError(f"source and target of {where} must be different columns, but both are {both[0]!r}.")
    first = FIRST.get(task, ((), ()))
    sources, all_targets = (
        tuple(dict.fromkeys([*column_names(code), *of_task, *names]))
        for code, of_task, names in zip(languages, first, (SOURCES, TARGETS), strict=True)
    )
    found = [] if given_targets else reference_columns(all_targets, present)
    if [name.casefold() for name in found[:1]] == ["completion"]:
        sources = ("prompt", *sources)
    chosen_sources = given_sources or found_sources(sources, present, given_targets)
    targets = given_targets or reference_columns(all_targets, present, taken=chosen_sources)
    targets = targets or [name for name in [usual([RESPONSE], present, chosen_sources)] if name]
    targets = [] if without else targets
    missing = {} if chosen_sources else {"source": sources}
    missing |= {} if targets or not need_target else {"target": all_targets}
    if missing:
        guess = ""
        if "conversations" in present:
            guess = " Conversations are read from a column 'messages', whose messages have role and content."
        elif any(" " in name.strip() for name in present):
            guess = " The first line is read as the names of the columns: perhaps the file has no such line."
        called = [f"a {role} is called {', '.join(names[:-1])} or {names[-1]}" for role, names in missing.items()]
        raise UserError(
            f"cannot find the {' and the '.join(missing)} column of {where}. Its columns are {listed(present)}; "
            f"usually {'; '.join(called)}. Set it with {' and '.join(f'data.{role} = …' for role in missing)} in a "
            f"recipe, {' '.join(f'--{role} COLUMN' for role in missing)} on the command line or "
            f"{', '.join(f'{role}=…' for role in missing)} in Python.{guess}"
        ).on_page("columns")
    first_source, *more = chosen_sources
    first_target = targets[0] if targets else None
    return Columns(first_source, first_target, id_column(id, present, where), tuple(targets[1:]), tuple(more))


def found_sources(names: Sequence[str], present: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """The first column with one of the names; or an instruction, if there is one, and the text beside it."""
    instruction = usual([INSTRUCTION], present, taken)
    found = usual(names if instruction is None else BESIDE, present, taken)
    return [name for name in (instruction, found) if name]


def joined(texts: Sequence[str]) -> str:
    """The texts of several source columns as one, with an empty line between them. Those behind the first may be empty.

    >>> joined(["Shorten it.", "", "The text."])
    'Shorten it.\\n\\nThe text.'
    """
    return "\n\n".join(text for at, text in enumerate(texts) if text or at == 0)


def given_columns(written: str | None, present: Sequence[str]) -> list[str]:
    """The names in a list with commas; a name that has a comma itself is taken whole."""
    if written in present:
        return [written] if written else []
    return [name.strip() for name in written.split(",") if name.strip()] if written else []


def check_present(name: str, role: str, present: Sequence[str], where: str) -> None:
    """Raise an error if a table does not have the given column."""
    if name not in present:
        raise UserError(f"{where} has {_absent(name, role, present)}. Its columns are {listed(present)}.")


def _absent(name: str, role: str, present: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, present, n=1)
    return f"no column {name!r} for the {role}{f' (did you mean {close[0]!r}?)' if close else ''}"


def id_column(given: str | None, present: Sequence[str], where: str) -> str | None:
    """The given id column, or one with a usual name, or None."""
    if not given:
        return usual(IDS, present)
    if given == NO_ID:
        return None
    check_present(given, "id", present, where)
    return given


def reference_columns(names: Sequence[str], present: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """The first column with one of the names, and the numbered ones beside it, in their order.

    >>> reference_columns(["reference"], ["id", "reference_2", "reference_1", "reference_10"])
    ['reference_1', 'reference_2', 'reference_10']
    """
    for name in names:
        numbered = []
        for column in present:
            match = re.fullmatch(rf"{name}s?[_ -]?(\d+)", column, re.IGNORECASE)
            if match and column not in taken:
                numbered.append((int(match[1]), column))
        plain = usual([name], present, taken)
        if plain or numbered:
            return [*([plain] if plain else []), *(column for _, column in sorted(numbered))]
    return []


def usual(names: Sequence[str], present: Sequence[str], taken: Sequence[str] = ()) -> str | None:
    """The first of the names that a table has, in any case."""
    folded = {column.casefold(): column for column in reversed(present) if column not in taken}
    return next((folded[name] for name in names if name in folded), None)


def listed(present: Sequence[str]) -> str:
    """Column names in quotes. Long ones are truncated: a table without a header has texts in their place."""
    shown = [repr(name if len(name) <= 40 else name[:39] + "…") for name in present[:20]]
    return (", ".join(shown) or "none") + (f" and {len(present) - 20} more" if len(present) > 20 else "")
