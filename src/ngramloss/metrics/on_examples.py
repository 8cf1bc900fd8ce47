"""a metric, examples and a text of each → the scores of the texts, and notes on what the metric does not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngramloss.data import Example
from ngramloss.metrics.registry import METRICS, compute_scores
from ngramloss.metrics.scores import Scores


def scores_on(name: str, examples: Sequence[Example], texts: Sequence[str], options: Mapping[str, Any]) -> Scores:
    """The scores of texts that were generated for these examples.

    Raises:
        Absent: the metric lacks something.
        UserError: it returned something else than its scores.
    """
    return compute_scores(name, _read(examples, texts), options, documents=len(examples))


def notes_on_references(name: str, examples: Sequence[Example], options: Mapping[str, Any]) -> list[str]:
    """Sentences about references that a metric does not read well with these options."""
    return METRICS[name].notes_on(_read(examples, [example.target for example in examples]), options)


def references_of(example: Example) -> list[str]:
    """Its references: several, or its target."""
    return list(example.references) or [example.target]


def _read(examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    """What a metric may read."""
    return {
        "ids": [example.id for example in examples],
        "documents": [example.source for example in examples],
        "references": [references_of(example) for example in examples],
        "predictions": list(texts),
    }
