"""texts → what every metric returns: scores of each document, and a signature that says how they were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from math import fsum, isfinite, isnan, nan
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.storage.files import fingerprint as fingerprint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


class Pooled(NamedTuple):
    """A score of the whole corpus that is not the mean of its documents' scores, such as BLEU."""

    statistics: Numbers  # the counts of each document, [documents, k]
    combine: Callable[[Any], Any]
    """Sums of statistics [..., k] → scores [...]. Scaling the sums must not change the score."""


class Scores(NamedTuple):
    """The scores of each document by name, 0 to 100 unless the metric says otherwise, and their signature.

    A corpus score is the mean of its documents' scores, except for the names in ``pooled``.
    """

    values: dict[str, list[float]]
    signature: str
    pooled: dict[str, Pooled] = {}  # noqa: RUF012, never changed


def corpus_score(scores: Scores, name: str) -> float:
    """The score of the whole corpus without documents that have none (NaN); NaN if none has one."""
    if name in scores.pooled:
        pooled = scores.pooled[name]
        rows = [row for row in pooled.statistics if all(map(isfinite, row))]
        return float(pooled.combine(sum(rows))) if rows else nan
    known = [value for value in scores.values[name] if not isnan(value)]
    return fsum(known) / len(known) if known else nan


def check_scores(metric: str, scores: Scores, known: Sequence[str], documents: int) -> None:
    """Raise if a metric, which may be a user's own, returns something other than its entry says."""
    if not isinstance(scores, Scores):
        raise UserError(f"the metric {metric!r} must return ngramloss.Scores, got {type(scores).__name__}.")
    if not isinstance(scores.values, dict) or not isinstance(scores.signature, str):
        raise UserError(
            f"the metric {metric!r} must return Scores(values, signature) with a dict, name → values, and a text; got "
            f"{type(scores.values).__name__} and {type(scores.signature).__name__}."
        )
    for name, column in scores.values.items():
        if name not in known:
            raise UserError(
                f"the metric {metric!r} returned the score {name!r}, which its entry does not name. It "
                f"names {', '.join(known)}."
            )
        if not isinstance(column, Sized) or len(column) != documents:
            count = f"{len(column)} values" if isinstance(column, Sized) else type(column).__name__
            raise UserError(f"the metric {metric!r} returned {count} for {name!r}, expected {documents} values.")
        for value in column:
            if not isinstance(value, Real) or isinstance(value, bool):
                raise UserError(
                    f"the metric {metric!r} must return numbers, or NaN for a document without a score; {name!r} has "
                    f"{value!r}."
                )


class Absent(ValueError):
    """A metric lacks a model or a package. The message says which, and how to provide it. Other metrics still run."""


def signature(metric: str, **facts: object) -> str:
    """Everything that can change a score, as one line for a paper."""
    written = {True: "yes", False: "no"}
    shown = (f"{name}:{written[value] if isinstance(value, bool) else value}" for name, value in facts.items())
    return "|".join([metric, *shown])


def check_lengths(**texts: Sequence[object]) -> None:
    """Raise unless all sequences have the same length."""
    counts = {name: len(values) for name, values in texts.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"lengths differ: {', '.join(f'{count} {name}' for name, count in counts.items())}.")


def reference_facts(count: str, rule: str) -> dict[str, str]:
    """What a signature says about references: their number, and for several the rule that makes one score of them."""
    return {"refs": count} if count == "1" else {"refs": count, "rule": rule}


def reference_count(references: Sequence[Sequence[str]]) -> str:
    """The number of references per document, for a signature; "var" if it varies. Raises if a document has none."""
    for number, golds in enumerate(references, 1):
        if isinstance(golds, str):
            raise TypeError(
                f"the references of a document must be a list of texts; document {number} has the text "
                f"{golds[:40]!r}. Put it in a list."
            )
        if not golds:
            raise ValueError(f"document {number} has no reference.")
    counts = {len(golds) for golds in references} or {1}
    return str(counts.pop()) if len(counts) == 1 else "var"
