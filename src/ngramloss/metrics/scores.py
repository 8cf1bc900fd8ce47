"""what every metric gives: figures of each document → and the signature that says how they came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.files import fingerprint as fingerprint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


class Pooled(NamedTuple):
    """A figure of the whole corpus that is no mean of its documents' figures, such as BLEU.

    Attributes:
        statistics: what each document adds, [documents, k].
        combine: sums of statistics [..., k] → figures [...]; scaling the sums must not change it.
    """

    statistics: Numbers
    combine: Callable[[Any], Any]


class Scores(NamedTuple):
    """Figures of each document by name, 0 to 100 unless the metric says otherwise, and what could change them.

    The figure of a corpus is the mean of its documents', but for the names in ``pooled``.
    """

    values: dict[str, list[float]]
    signature: str
    pooled: dict[str, Pooled] = {}   # noqa: RUF012, never changed


class Absent(ValueError):
    """A metric lacks a model or a package. The sentence says what, and how to point to it; other metrics still run."""


def signature(metric: str, **facts: object) -> str:
    """What could change a figure, to be pasted into a paper.

    >>> signature("rouge1", refs=1, stemmer=True, version="0.2.1")
    'rouge1|refs:1|stemmer:yes|version:0.2.1'
    """
    written = {True: "yes", False: "no"}
    return "|".join([metric, *(f"{name}:{written.get(value, value) if isinstance(value, bool) else value}"
                               for name, value in facts.items())])


def check_lengths(**texts: Sequence[object]) -> None:
    """Raise unless there are as many of one as of the other."""
    counts = {name: len(values) for name, values in texts.items()}
    if len(set(counts.values())) > 1:
        raise ValueError("one for each document: got " + ", ".join(f"{count} {name}" for name, count in counts.items()))


def reference_count(references: Sequence[Sequence[str]]) -> str:
    """How many references documents have, for a signature: a number, or "var". Raises unless each has one or more.

    >>> reference_count([["a", "b"], ["c"]])
    'var'
    """
    for number, golds in enumerate(references, 1):
        if isinstance(golds, str):
            raise TypeError(f"references of a document are a list of texts; document {number} has the text "
                            f"{golds[:40]!r}. Put it in a list.")
        if not golds:
            raise ValueError(f"document {number} has no reference.")
    counts = {len(golds) for golds in references} or {1}
    return str(counts.pop()) if len(counts) == 1 else "var"
