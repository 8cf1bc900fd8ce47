"""aligned texts and metrics' names → every figure with its signature, intervals, tests and spread over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import isfinite, isnan
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics.bertscore import bertscore
from ngramloss.metrics.factcc import factcc
from ngramloss.metrics.facts import facts
from ngramloss.metrics.overlap import bleu, chrf
from ngramloss.metrics.rouge import rouge
from ngramloss.metrics.scores import Absent, Pooled, Scores
from ngramloss.metrics.shape import shape
from ngramloss.metrics.summac import summac
from ngramloss.metrics.wmd import wmd
from ngramloss.run_folder import Busy
from ngramloss.scoring import provenance, score_cache, significance
from ngramloss.scoring.audit import Limits, oddities
from ngramloss.scoring.provenance import Run
from ngramloss.scoring.score_cache import Keyed
from ngramloss.scoring.significance import Figure
from ngramloss.scoring.systems import Aligned
from ngramloss.version import __version__

METRICS: dict[str, tuple[Callable[..., Scores], tuple[str, ...]]] = {
    "rouge": (rouge, ("references", "predictions")),
    "bleu": (bleu, ("references", "predictions")),
    "chrf": (chrf, ("references", "predictions")),
    "shape": (shape, ("predictions", "documents")),
    "bertscore": (bertscore, ("references", "predictions")),
    "wmd": (wmd, ("references", "predictions")),
    "summac": (summac, ("documents", "predictions")),
    "factcc": (factcc, ("documents", "predictions")),
    "facts": (facts, ("ids", "predictions")),
}
"""Name → the metric, and the texts it takes in this order. ``documents`` may be None for ``shape`` alone."""

LOWER_IS_BETTER = ("wmd",)


class Seeds(NamedTuple):
    """The runs of one system that differ in their seed alone.

    Attributes:
        label: of the system.
        names: of its runs.
        spread: figure → mean, standard deviation and 95% interval over the runs.
        against_first: figure → difference to the first system's mean, its interval, p, and p corrected for the systems;
            empty for the first.
    """

    label: str
    names: list[str]
    spread: dict[str, dict[str, float]]
    against_first: dict[str, dict[str, float]]


class Result(NamedTuple):
    """All figures of all systems.

    Attributes:
        names: of the systems, the first of which the others are compared with.
        ids: of the documents.
        figures: figure's name → one for each system.
        documents: for each system, figure's name → the figures of its documents.
        signatures: metric → what could change its figures.
        absent: metric → why it could not run.
        left_out: figure → documents that some system has no figure for, where there are any.
        audit: for each system, what is odd about its texts.
        runs: for each system what its folder says; None for a file.
        seeds: systems with several runs.
        unkept: sentences about folders whose figures could not be kept.
    """

    names: list[str]
    ids: list[str]
    figures: dict[str, list[Figure]]
    documents: list[dict[str, list[float]]]
    signatures: dict[str, str]
    absent: dict[str, str]
    left_out: dict[str, int]
    audit: list[list[str]]
    runs: list[Run | None]
    seeds: list[Seeds]
    unkept: list[str]


def score_systems(
    texts: Aligned, metrics: Sequence[str] = ("rouge",), *, options: Mapping[str, Mapping[str, Any]] | None = None,
    samples: int = significance.SAMPLES, shuffles: int = significance.SHUFFLES, seed: int = significance.SEED,
    limits: Limits | None = None, count: Callable[[Sequence[str]], list[int]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Score every system with every metric, and compare each with the first.

    A system that is a folder keeps its documents' figures there, and has them read again while nothing that could
    change them has changed.

    Args:
        texts: references, documents and the systems' texts.
        metrics: names in :data:`METRICS`. One whose model or package is absent is told of in ``absent``.
        options: metric → its own options.
        samples: of the bootstrap.
        shuffles: of the randomisation.
        seed: of both.
        limits: tokens that texts were to have; a folder that states its own needs none.
        count: texts → their tokens, for systems that did not count them.
        progress: called with what is done next.
    """
    if not metrics:
        raise UserError(f"name one metric or more; there are {', '.join(METRICS)}.")
    for name in metrics:
        if name not in METRICS:
            raise UserError(f"unknown metric {name!r}; choose from {', '.join(METRICS)}.")
    significance.check(samples=samples, shuffles=shuffles, seed=seed)
    tell = progress or (lambda _: None)
    keeping = [score_cache.read(folder, texts.task.ids, predictions) if folder else {}
               for folder, predictions in zip(texts.folders, texts.texts, strict=True)]
    # Now: what is in a folder may be another run's by the time that the metrics are done.
    about = [provenance.run(folder) if folder else None for folder in texts.folders]
    scores: list[dict[str, Keyed]] = [{} for _ in texts.names]
    absent = {}
    for name in metrics:
        metric, takes = METRICS[name]
        given: dict[str, Any] = {
            "ids": texts.task.ids, "references": texts.task.references, "documents": texts.task.documents
        }
        if "documents" in takes and given["documents"] is None and name != "shape":
            absent[name] = "needs the documents: give them with --documents."
            continue
        chosen, lacking = _options(metric, dict((options or {}).get(name, {})))
        if lacking:
            missing = ", ".join(f"--set {name}.{option}=…" for option in lacking)
            absent[name] = f"needs {missing}; docs/metrics.md says what to give."
            continue
        for index, system in enumerate(texts.names):
            taken = {text: (given | {"predictions": texts.texts[index]})[text] for text in takes}
            key = score_cache.key(name, chosen, taken)
            before = keeping[index].get(name)
            if before is not None and before.key == key and not before.pooled:
                scores[index][name] = before
                continue
            tell(f"{name} of {system}")
            try:
                watched = _progress(metric, f"{name} of {system}", len(texts.task.ids), tell)
                scores[index][name] = Keyed(key, metric(*taken.values(), **chosen, **watched))
            except Absent as reason:
                absent[name] = str(reason)
                break
    for name in absent:
        for by_metric in scores:
            by_metric.pop(name, None)
    tell("intervals and tests")
    result = _comparison(texts, scores, about, samples=samples, shuffles=shuffles, seed=seed)
    audit = [_audit(texts, index, run, limits, count) for index, run in enumerate(result.runs)]
    result = result._replace(absent=absent, audit=audit, seeds=_over_seeds(result))
    return result._replace(unkept=_write_caches(texts, scores, result))


def _write_caches(texts: Aligned, scores: Sequence[Mapping[str, Keyed]], result: Result) -> list[str]:
    """Keep the figures of folders; a sentence for each where that cannot be done."""
    refused = []
    for index, folder in enumerate(texts.folders):
        if folder is None or not scores[index]:
            continue
        corpus = {name: figures[index].value for name, figures in result.figures.items()}
        if provenance.run(folder) != result.runs[index]:
            refused.append(f"the figures of documents are not kept in {folder}: its predictions are others by now.")
            continue
        try:
            score_cache.write(folder, texts.task.ids, texts.texts[index], scores[index], corpus)
        except Busy:
            refused.append(f"the figures of documents are not kept in {folder}: another process works in it.")
        except OSError as reason:
            refused.append(f"the figures of documents are not kept in {folder}: {reason.strerror or reason}.")
    return refused


def _comparison(
    texts: Aligned, by_system: Sequence[Mapping[str, Keyed]], about: list[Run | None], *, samples: int, shuffles: int,
    seed: int,
) -> Result:
    """The figures of the corpus with intervals and tests, of what was found of each document."""
    values: list[dict[str, Sequence[float] | Pooled]] = []
    documents: list[dict[str, list[float]]] = []
    for by_metric in by_system:
        each = [keyed.scores for keyed in by_metric.values()]
        documents.append({name: column for scores in each for name, column in scores.values.items()})
        values.append({**documents[-1], **{name: pooled for scores in each for name, pooled in scores.pooled.items()}})
    figures = significance.compare(values, samples=samples, shuffles=shuffles, seed=seed)
    signatures = {name: f"{keyed.scores.signature}|ngramloss:{__version__}" for name, keyed in by_system[0].items()}
    left_out = {}
    for name in figures:
        columns = zip(*(system[name] for system in documents), strict=True)
        without = sum(not all(map(isfinite, row)) for row in columns)
        if without:
            left_out[name] = without
    return Result(texts.names, texts.task.ids, figures, documents, signatures, {}, left_out, [], about, [], [])


def _audit(
    texts: Aligned, system: int, run: Run | None, limits: Limits | None,
    count: Callable[[Sequence[str]], list[int]] | None,
) -> list[str]:
    """What is odd about a system's texts; a folder states limits and the tokens that were written."""
    counts = provenance.token_counts(run.folder) if run else {}
    lengths = [counts[key] for key in texts.task.ids] if all(key in counts for key in texts.task.ids) else None
    if lengths is None and count is not None:
        lengths = count(texts.texts[system])
    if limits is None and run is not None and lengths is not None:
        least, most = (run.search.get(name) for name in ("min_length", "max_length"))
        limits = Limits(least if isinstance(least, int) else 0, most if isinstance(most, int) else 0)
    return oddities(texts.texts[system], lengths, limits)


def _over_seeds(result: Result) -> list[Seeds]:
    """Systems that several runs have in common, with what their figures do over the seeds."""
    kinds: dict[str, list[int]] = {}
    for system, run in enumerate(result.runs):
        if run is not None and run.kind:
            kinds.setdefault(run.kind, []).append(system)
    groups: list[Seeds] = []
    first: dict[str, dict[int, float]] = {}
    for systems in kinds.values():
        each = {name: {_seed(result, system): figures[system].value for system in systems}
                for name, figures in result.figures.items()}
        if len(systems) < 2 or any(len(values) < len(systems) for values in each.values()):
            continue   # one run, or the same seed twice
        spread = {name: significance.over_seeds(list(values.values())) for name, values in each.items()}
        against = {name: significance.between_seeds(values, first[name]) for name, values in each.items() if first}
        first = first or each
        label = next(run.label for run in (result.runs[system] for system in systems) if run is not None)
        groups.append(Seeds(label, [result.names[system] for system in systems], spread, against))
    for name in result.figures:
        others = [group.against_first[name] for group in groups[1:]]
        chances = [1.0 if isnan(test["p"]) else test["p"] for test in others]   # every seed the same: no difference
        for test, chance in zip(others, significance.holm(chances), strict=True):
            test["p_holm"] = chance
    return groups


def _seed(result: Result, system: int) -> int:
    run = result.runs[system]
    return -1 if run is None or run.seed is None else run.seed


def _progress(metric: Callable[..., Scores], what: str, total: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """A ``progress`` for a metric that takes one: it tells how many documents are done."""
    if "progress" not in signature(metric).parameters:
        return {}
    done = 0

    def count(documents: int) -> None:
        nonlocal done
        done += documents
        tell(f"{what}: {done:,} of {total:,} documents")

    return {"progress": count}


def _options(metric: Callable[..., Scores], given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A metric's options with paths as paths, and those it needs and was not given."""
    known = {name: option for name, option in signature(metric).parameters.items()
             if option.kind is option.KEYWORD_ONLY}
    for name in given:
        if name not in known or name == "progress":
            available = ", ".join(option for option in known if option != "progress") or "none"
            raise UserError(f"{metric.__name__} has no option {name!r}; it has {available}.")
    chosen = {name: _option(metric.__name__, name, str(known[name].annotation), value) for name, value in given.items()}
    return chosen, [name for name, option in known.items() if option.default is option.empty and name not in given]


def _option(metric: str, name: str, kind: str, value: Any) -> Any:
    """A value of the kind that an option has, such as ``int | None``: a text that says no would count as a yes."""
    kinds: dict[str, tuple[type, str]] = {"bool": (bool, "true or false"), "int": (int, "a whole number"),
                                          "float": (float, "a number"), "str": (str, "text"), "Path": (Path, "a path")}
    wanted, expected = kinds.get(kind.partition(" | ")[0], (object, ""))
    if wanted in (str, Path) and not isinstance(value, (str, Path)):
        value = str(value)   # a file may be called 2024
    if wanted is Path:
        return Path(value)
    if wanted is float and type(value) is int:
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise UserError(f"{metric}.{name} should be {expected}, got {value!r}.")
    return value
