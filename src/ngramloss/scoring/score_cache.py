"""scores of a run's documents → sealed files in its folder, reused until texts, options or versions change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics.scores import Scores
from ngramloss.storage.files import fingerprint, read_object, whole_rows, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.storage.typed import typed
from ngramloss.version import __version__, installed

PATIENCE = 10.0  # Seconds to wait while another process saves scores in the same folder
PACKAGES = ("numpy", "pysbd", "torch")  # Packages that may change the scores of any metric


class Keyed(NamedTuple):
    """A metric's scores, and a hash of everything they depend on."""

    key: str  # the hash
    scores: Scores  # the scores of each document
    texts: Mapping[str, str]  # "references" and "documents", if the metric reads them → a hash of those that it read
    pooled: bool = False  # whether the corpus score is not their mean, so that it must be computed from the texts again
    version: str = __version__  # of ngramloss

    def reads(self, hashes: Mapping[str, str]) -> bool:
        """Whether these are the :func:`text_hashes` of what it read; a text that has no hash is not compared."""
        return all(hashes.get(name, known) == known for name, known in self.texts.items())


class Corpus(NamedTuple):
    """The score of a corpus and its 95% interval over documents. None is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class _Metric(NamedTuple):
    """What ``scores.json`` says of a metric."""

    key: str
    signature: str
    figures: list[str]
    texts: dict[str, str]
    pooled: bool
    version: str = ""


class _File(NamedTuple):
    """The contents of ``scores.json``."""

    scores: dict[str, float | None]
    predictions: str
    metrics: dict[str, _Metric]
    rows: str
    seal: str
    intervals: dict[str, list[float | None]] = {}  # noqa: RUF012 -- nobody changes it


class CachedScores(NamedTuple):
    """The scores that a folder has for some predictions."""

    metrics: dict[str, Keyed]  # metric → its scores; empty if there are none or a file is damaged
    corpus: dict[str, Corpus]  # name of a score → its value for the corpus, and its interval
    damage: str = ""  # why the folder's scores cannot be used; empty if they can, or if there are none


def key(
    metric: str, options: Mapping[str, Any], texts: Mapping[str, Any], *, packages: Sequence[str] = (), source: str = ""
) -> str:
    """A hash of everything that a metric's scores depend on, also of files that options name and of versions."""
    named = {name: [str(value), _content(value)] for name, value in options.items()}
    versions = {name: installed(name) for name in {*PACKAGES, *packages}} | {"ngramloss": __version__}
    return _hash([metric, named, dict(texts), versions, source])


def text_hashes(texts: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of the references and the documents, which metrics may read."""
    return {name: _hash(texts[name]) for name in ("references", "documents")}


def read(folder: Path, ids: Sequence[str], predictions: Sequence[str]) -> CachedScores:
    """The saved scores of these predictions."""
    run = RunFolder(folder)
    if not run.scores.exists():
        return CachedScores({}, {})
    try:
        about = read_object(run.scores)
        if damage := _damage(run, about):
            return CachedScores({}, {}, damage)
        known: _File = typed(_File, about, run.scores)
        rows = whole_rows(run.document_scores)
        if known.predictions != _hash([ids, predictions]) or [row["id"] for row in rows] != list(ids):
            return CachedScores({}, {})
        metrics = {}
        for metric, own in known.metrics.items():
            columns = {name: [nan if row[name] is None else float(row[name]) for row in rows] for name in own.figures}
            scores = Scores(columns, own.signature)
            metrics[metric] = Keyed(own.key, scores, own.texts, own.pooled, own.version)
        corpus = {name: Corpus(value, *known.intervals.get(name, ())) for name, value in known.scores.items()}
        return CachedScores(metrics, corpus)
    except UserError as reason:
        return CachedScores({}, {}, str(reason).rstrip("."))
    except OSError:
        return CachedScores({}, {}, f"{run.document_scores.name} is missing")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return CachedScores({}, {})


def write(
    folder: Path,
    ids: Sequence[str],
    predictions: Sequence[str],
    scores: Mapping[str, Keyed],
    corpus: Mapping[str, Corpus],
    hashes: Mapping[str, str],
) -> None:
    """Save the scores beside other metrics' of the same texts and ``hashes``. ``Busy`` if the folder is locked."""
    run = RunFolder(folder)
    with run.lock(option="folder", patience=PATIENCE):
        before = read(folder, ids, predictions)  # again: another process may have written
        kept = {metric: keyed for metric, keyed in before.metrics.items() if keyed.reads(hashes)}
        by_metric = {**kept, **scores}
        about = {}
        for metric, own in by_metric.items():
            pooled, scored = own.pooled or bool(own.scores.pooled), own.scores
            known = _Metric(own.key, scored.signature, list(scored.values), dict(own.texts), pooled, own.version)
            about[metric] = known._asdict()
        values = {name: column for keyed in by_metric.values() for name, column in keyed.scores.values.items()}
        columns = {"id": ids, **{name: [number(value) for value in column] for name, column in values.items()}}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        run.scores.unlink(missing_ok=True)  # it must never describe other rows
        write_whole(run.document_scores, "".join(json.dumps(row) + "\n" for row in rows))
        whole = {name: corpus.get(name) or before.corpus.get(name) or Corpus() for name in values}
        content = {
            "scores": {name: number(of_corpus.value) for name, of_corpus in whole.items()},
            "intervals": {name: [number(of_corpus.low), number(of_corpus.high)] for name, of_corpus in whole.items()},
            "predictions": _hash([ids, predictions]),
            "metrics": about,
            "rows": _rows_hash(run.document_scores),
        }
        write_whole(run.scores, json.dumps({**content, "seal": _hash(content)}, indent=1))


def number(value: float | None) -> float | None:
    """The value, or None for NaN and infinity, which JSON lacks."""
    return value if value is not None and isfinite(value) else None


def _damage(run: RunFolder, about: Mapping[str, Any]) -> str:
    """Why scores described so cannot be used; empty if they can."""
    if "seal" not in about:
        return f"{run.scores.name} has no checksum"
    try:
        if about["seal"] != _hash({name: value for name, value in about.items() if name != "seal"}):
            return f"{run.scores.name} was changed"
        return "" if about["rows"] == _rows_hash(run.document_scores) else f"{run.document_scores.name} was changed"
    except (KeyError, RecursionError):
        return f"{run.document_scores.name} is missing"


def _rows_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _content(value: Any) -> str:
    """A hash of the files that an option's value names; empty if it names none."""
    path = Path(str(value))
    if not isinstance(value, (str, Path)) or not path.exists():
        return ""
    return fingerprint([path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()])
