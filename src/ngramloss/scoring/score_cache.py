"""figures of a run's documents → a file in its folder, read again while nothing they are made of has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.files import fingerprint, whole_rows, write_whole
from ngramloss.metrics.scores import Scores
from ngramloss.run_folder import RunFolder
from ngramloss.version import __version__, installed

PATIENCE = 10.0
"""Seconds to wait for other scorings that keep their figures in the same folder."""
PACKAGES = ("numpy", "pysbd", "torch")
"""Packages that may change the scores of any metric."""


class Keyed(NamedTuple):
    """A metric's figures, and a hash of all they were made of.

    Attributes:
        key: the hash.
        scores: the figures of each document.
        pooled: whether that of the corpus is no mean of them, and must be made anew from the texts.
    """

    key: str
    scores: Scores
    pooled: bool = False


def key(
    metric: str, options: Mapping[str, Any], texts: Mapping[str, Any], *, packages: Sequence[str] = (), source: str = ""
) -> str:
    """A hash of all that a metric's scores depend on.

    Args:
        metric: its name.
        options: its options, and the contents of the files they name.
        texts: the texts it reads.
        packages: the packages it needs, whose versions count.
        source: a hash of its code, if the metric is not ours.
    """
    named = {name: [str(value), _content(value)] for name, value in options.items()}
    versions = {name: installed(name) for name in {*PACKAGES, *packages}} | {"ngramloss": __version__}
    return _hash([metric, named, dict(texts), versions, source])


def read(folder: Path, ids: Sequence[str], predictions: Sequence[str]) -> dict[str, Keyed]:
    """What is kept in a folder of these documents' texts, by metric. Damaged or foreign files count as nothing."""
    try:
        run = RunFolder(folder)
        about = json.loads(run.scores.read_text(encoding="utf-8"))
        rows = whole_rows(run.document_scores)
        if about["predictions"] != _hash([ids, predictions]) or [row["id"] for row in rows] != list(ids):
            return {}
        return {metric: Keyed(known["key"], Scores(_columns(rows, known["figures"]), known["signature"]),
                              known["pooled"]) for metric, known in about["metrics"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def write(
    folder: Path, ids: Sequence[str], predictions: Sequence[str], scores: Mapping[str, Keyed],
    corpus: Mapping[str, float],
) -> None:
    """Keep the figures of each document, and beside them those of the corpus with their signatures.

    Metrics kept before stay, if they are of these texts. Of two processes that write here, one waits for the other.
    ``Busy`` is raised where the folder stays locked, as it is while a training runs in it.

    Args:
        folder: of the run.
        ids: of the documents, in the figures' order.
        predictions: that the figures are of.
        scores: metric → its figures.
        corpus: figure → that of all documents.
    """
    run = RunFolder(folder)
    with run.lock(option="folder", patience=PATIENCE):
        before = _corpus(folder)
        by_metric = {**read(folder, ids, predictions), **scores}
        about = {metric: {"key": keyed.key, "signature": keyed.scores.signature, "figures": list(keyed.scores.values),
                          "pooled": keyed.pooled or bool(keyed.scores.pooled)} for metric, keyed in by_metric.items()}
        values = {name: column for keyed in by_metric.values() for name, column in keyed.scores.values.items()}
        rows = ({"id": document, **{name: number(column[index]) for name, column in values.items()}}
                for index, document in enumerate(ids))
        run.scores.unlink(missing_ok=True)   # never beside rows it does not tell of
        write_whole(run.document_scores, "".join(json.dumps(row) + "\n" for row in rows))
        plain = {name: number(corpus[name]) if name in corpus else before.get(name) for name in values}
        content = {"scores": plain, "predictions": _hash([ids, predictions]), "metrics": about}
        write_whole(run.scores, json.dumps(content, indent=1))


def number(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and isfinite(value) else None


def _corpus(folder: Path) -> dict[str, Any]:
    """The figures of the corpus that are kept in a folder."""
    try:
        return dict(json.loads(RunFolder(folder).scores.read_text(encoding="utf-8"))["scores"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float]]:
    return {name: [nan if row[name] is None else float(row[name]) for row in rows] for name in names}


def _content(value: Any) -> str:
    """A hash of the files that an option names; empty for one that names none."""
    path = Path(str(value))
    if not isinstance(value, (str, Path)) or not path.exists():
        return ""
    return fingerprint([path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()])
