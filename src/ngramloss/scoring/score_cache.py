"""scores of a run's documents → sealed files in its folder, reused until texts, options or versions change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.files import fingerprint, read_object, whole_rows, write_whole
from ngramloss.metrics.scores import Scores
from ngramloss.run_folder import RunFolder
from ngramloss.version import __version__, installed

PATIENCE = 10.0
"""Seconds to wait while another process saves scores in the same folder."""
PACKAGES = ("numpy", "pysbd", "torch")
"""Packages that may change the scores of any metric."""


class Keyed(NamedTuple):
    """A metric's scores, and a hash of everything they depend on.

    Attributes:
        key: the hash.
        scores: the scores of each document.
        texts: "references" and "documents", if the metric reads them → a hash of those that it read.
        pooled: whether the corpus score is not their mean, so that it must be computed from the texts again.
    """

    key: str
    scores: Scores
    texts: Mapping[str, str]
    pooled: bool = False


def key(
    metric: str, options: Mapping[str, Any], texts: Mapping[str, Any], *, packages: Sequence[str] = (), source: str = ""
) -> str:
    """A hash of everything that a metric's scores depend on.

    Args:
        metric: its name.
        options: its options; the contents of files they name count too.
        texts: the texts it reads.
        packages: the packages it needs; their versions count.
        source: a hash of its code, if the metric is not ours.
    """
    named = {name: [str(value), _content(value)] for name, value in options.items()}
    versions = {name: installed(name) for name in {*PACKAGES, *packages}} | {"ngramloss": __version__}
    return _hash([metric, named, dict(texts), versions, source])


def text_hashes(taken: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of the references and documents among the texts that a metric reads."""
    return {name: _hash(taken[name]) for name in ("references", "documents") if name in taken}


def damage(folder: Path) -> str:
    """Why the saved scores of a folder cannot be used; empty if they can, or if there are none."""
    run = RunFolder(folder)
    if not run.scores.exists():
        return ""
    try:
        about = read_object(run.scores)
        if "seal" not in about:
            return f"{run.scores.name} has no checksum"
        if about.pop("seal") != _hash(about):
            return f"{run.scores.name} was changed"
        return "" if about["rows"] == _rows_hash(run.document_scores) else f"{run.document_scores.name} was changed"
    except (OSError, UserError, KeyError, RecursionError) as reason:
        return f"{reason}".rstrip(".") if isinstance(reason, UserError) else f"{run.document_scores.name} is missing"


def read(folder: Path, ids: Sequence[str], predictions: Sequence[str]) -> dict[str, Keyed]:
    """The saved scores of these predictions by metric; empty if there are none or a file is damaged."""
    if damage(folder):
        return {}
    try:
        run = RunFolder(folder)
        about = read_object(run.scores)
        rows = whole_rows(run.document_scores)
        if about["predictions"] != _hash([ids, predictions]) or [row["id"] for row in rows] != list(ids):
            return {}
        return {metric: Keyed(known["key"], Scores(_columns(rows, known["figures"]), known["signature"]),
                              dict(known["texts"]), known["pooled"]) for metric, known in about["metrics"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def write(
    folder: Path, ids: Sequence[str], predictions: Sequence[str], scores: Mapping[str, Keyed],
    corpus: Mapping[str, float], given: Mapping[str, Any],
) -> None:
    """Save the scores of each document, and the corpus scores with their signatures.

    Scores of other metrics that were saved for the same texts are kept. If another process is writing here, wait for
    it. Raises ``Busy`` if the folder stays locked, for example by a training.

    Args:
        folder: the run's folder.
        ids: the ids of the documents, in the order of the scores.
        predictions: the texts that were scored.
        scores: metric → its scores.
        corpus: name of a score → its value for the corpus.
        given: "references" and "documents" → the texts; scores of metrics that read others are dropped. None if they
            are not given this time.
    """
    run = RunFolder(folder)
    with run.lock(option="folder", patience=PATIENCE):
        current = text_hashes({name: texts for name, texts in given.items() if texts is not None})
        kept = {metric: keyed for metric, keyed in read(folder, ids, predictions).items()
                if all(current.get(name, known) == known for name, known in keyed.texts.items())}
        before = _corpus(folder) if kept else {}
        by_metric = {**kept, **scores}
        about = {metric: {"key": keyed.key, "signature": keyed.scores.signature, "figures": list(keyed.scores.values),
                          "texts": dict(keyed.texts), "pooled": keyed.pooled or bool(keyed.scores.pooled)}
                 for metric, keyed in by_metric.items()}
        values = {name: column for keyed in by_metric.values() for name, column in keyed.scores.values.items()}
        rows = ({"id": document, **{name: number(column[index]) for name, column in values.items()}}
                for index, document in enumerate(ids))
        run.scores.unlink(missing_ok=True)   # it must never describe other rows
        write_whole(run.document_scores, "".join(json.dumps(row) + "\n" for row in rows))
        plain = {name: number(corpus[name]) if name in corpus else before.get(name) for name in values}
        content = {"scores": plain, "predictions": _hash([ids, predictions]), "metrics": about,
                   "rows": _rows_hash(run.document_scores)}
        write_whole(run.scores, json.dumps({**content, "seal": _hash(content)}, indent=1))


def number(value: float | None) -> float | None:
    """The value, or None for NaN and infinity, which JSON lacks."""
    return value if value is not None and isfinite(value) else None


def _corpus(folder: Path) -> dict[str, Any]:
    """The corpus scores saved in a folder whose files are not damaged."""
    return dict(read_object(RunFolder(folder).scores)["scores"])


def _rows_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float]]:
    return {name: [nan if row[name] is None else float(row[name]) for row in rows] for name in names}


def _content(value: Any) -> str:
    """A hash of the files that an option's value names; empty if it names none."""
    path = Path(str(value))
    if not isinstance(value, (str, Path)) or not path.exists():
        return ""
    return fingerprint([path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()])
