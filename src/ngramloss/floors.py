"""a model trained on ``newswire`` → its scores beside two floors, and the share of names and figures that are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ngramloss.data import newswire
from ngramloss.metrics import rouge

ITEMS = 200
"""Test items that are looked at."""


class Row(NamedTuple):
    """One system: means of ROUGE F-measures, and of the summary's names and figures those that it has, in per cent."""

    system: str
    rouge1: float
    rouge2: float
    rougeL: float
    names: float
    figures: float


def rows(items: Sequence[newswire.Item], predictions: Sequence[str], system: str) -> list[Row]:
    """The system, and the floors any system must stand above on text made of templates.

    *lead-2* copies the document's first two sentences. *right template, random facts* knows how summaries of this kind
    of event are worded and nothing of the document.
    """
    floors = {
        "lead-2": [newswire.lead(item.document, 2) for item in items],
        "right template, random facts": [item.decoy for item in items],
    }
    return [_row(items, name, texts) for name, texts in {**floors, system: list(predictions)}.items()]


def looked_at(
    folder: Path, *, count: int = ITEMS, progress: Callable[[int], None] | None = None, trust_remote_code: bool = False
) -> tuple[list[newswire.Item], list[str]]:
    """Test items, and what the run's model writes for them."""
    from ngramloss.generation.search import of_run

    items = newswire.items("test", count)
    documents = [item.document for item in items]
    return items, of_run(folder, documents, progress=progress, trust_remote_code=trust_remote_code)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines."""
    heads = ["", "ROUGE-1", "ROUGE-2", "ROUGE-L", "names right", "figures right"]
    lines = [f"{heads[0]:<30}" + "".join(f"{head:>15}" for head in heads[1:])]
    return lines + [f"{row.system:<30}" + "".join(f"{value:>15.1f}" for value in row[1:]) for row in rows]


def _row(items: Sequence[newswire.Item], system: str, texts: Sequence[str]) -> Row:
    scores = rouge([[item.summary] for item in items], texts).values
    mean = {name: sum(values) / len(items) for name, values in scores.items()}
    right = newswire.right(items, texts)
    return Row(system, mean["rouge1"], mean["rouge2"], mean["rougeL"], right["names"], right["figures"])
