"""the name of a metric, and candidates of sources → the score of each candidate, from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isnan
from typing import Any, NamedTuple

from ngramloss.data import Example
from ngramloss.data.languages import language_of
from ngramloss.data.sentences import in_processes, processors, sentences
from ngramloss.errors import UserError
from ngramloss.metrics.registry import (
    METRICS,
    checked_options,
    missing_options,
    notes_on_references,
    references_of,
    score_owners,
    scores_of,
    scores_on,
)
from ngramloss.metrics.scores import Absent
from ngramloss.output.progress import Progress
from ngramloss.settings import nearest
from ngramloss.version import installed

BY_TASK = {"summarisation": "rouge", "translation": "bleu"}
"""Task → the metric of candidates unless another is chosen."""
MEANS = {"rouge": ("rouge1", "rouge2", "rougeLsum")}
"""Metric → those of its scores whose mean is a candidate's score. Other metrics have one score."""
IN_PARTS = ("rouge", "bleu", "chrf")
"""Metrics that score each text on its own and in Python or Rust alone, so that processes can share the texts."""
PART = 256  # sources that a process scores at a time
IN_PROCESS = 20_000  # fewer texts are scored in this process: to start others takes longer
TRIED = 2  # examples on which a metric is tried before anything is generated
READ = 100  # examples whose references are looked at, whether the metric reads their letters
CORRECT = "Correct its plugin, and run the same command again."  # what helps if the metric of a plugin fails
LONGEST_SHOWN = 200  # characters of a text in a message
TOLERANCE = 1e-6  # how far rounding may take a score beyond 0 or 100


class CandidateMetric(NamedTuple):
    """How candidates are scored."""

    name: str  # a metric in ``METRICS``
    scores: tuple[str, ...]  # a candidate's score is their mean, divided by 100
    options: dict[str, Any]  # of the metric
    lines: str | None = None
    """Sentences, one per line, are split by the splitter of this language before scoring; None: texts as they are."""
    key: str = "--metric"  # the option or setting that names it, for messages

    @property
    def settings(self) -> dict[str, Any]:
        """What is saved with the scores."""
        own = METRICS.source(self.name)
        options = {name: str(value) for name, value in self.options.items()}
        return {
            "name": self.name,
            "scores": list(self.scores),
            "options": options,
            "sentence_a_line": self.lines or False,
            **({"source": own} if own else {}),
        }

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that compute it."""
        found = {package: installed(package) for package in METRICS[self.name].packages}
        return {package: version for package, version in found.items() if version is not None}


def metric_of(name: str, key: str = "--metric") -> str:
    """The metric of this name, or the one that has a score of this name; errors name the option or setting ``key``."""
    if name in METRICS:
        METRICS.entry(name)  # raises if the package that adds it has a problem
        return name
    owners = score_owners(metric for metric in METRICS if not METRICS.problem(metric))
    if name not in owners:
        raise UserError(
            f"{key}: unknown metric or score {name!r}. {nearest(name, [*METRICS, *owners], 0.6)}Choose "
            f"from {', '.join(METRICS)}, or one of their scores."
        )
    return owners[name]


def candidate_metric(
    name: str, options: Mapping[str, Any], *, lines: str | None = None, key: str = "--metric"
) -> CandidateMetric:
    """Scores by a metric (``rouge``) or by one of its scores (``rouge2``), or a UserError that names ``key``."""
    metric = metric_of(name, key)
    scores = MEANS.get(name) or (name,)
    if metric == name and not set(scores) <= set(scores_of(metric)):
        better = [score for score, about in scores_of(metric).items() if about.better == "higher"]
        which = f"Choose one of its scores: {', '.join(better)}." if better else _OTHER
        raise UserError(f"{key} {name} is not a single score. {which}")
    for score in scores:
        if scores_of(metric)[score].better != "higher":
            raise UserError(
                f"{key} {name}: higher values of {score} are not better, so candidates cannot be scored by it. {_OTHER}"
            )
    if needed := METRICS[metric].packages_needed:
        raise UserError(f"{key} {name} {needed}.")
    checked = checked_options(metric, options)
    if lacking := missing_options(metric, checked):
        given = ", ".join(f"--set {metric}.{option}=…" for option in lacking)
        raise UserError(f"{key} {name} needs {given}; ngramloss docs metrics says what to give.")
    return CandidateMetric(metric, scores, checked, lines, key)


_OTHER = "Use rouge, bleu or chrf."


def check_metric(metric: CandidateMetric, examples: Sequence[Example]) -> list[str]:
    """Try a metric on a few references, or raise; returns sentences about texts that it does not read well."""
    tried = examples[:TRIED]
    score_candidates(metric, tried, [[example.target] for example in tried])
    return notes_on_references(metric.name, examples[:READ], metric.options)


def score_candidates(
    metric: CandidateMetric,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    *,
    processes: int | None = None,
    unit: str = "examples",
) -> list[list[float]]:
    """The score of each candidate of each example, 0 to 1; several references count as in the metric.

    ``processes`` is how many share the texts; None: one for each processor, if there are many texts. Raises if the
    metric lacks something, or a candidate has no score between 0 and 100.
    """
    workers = _workers(metric, sum(map(len, texts)), processes)
    size = PART if metric.name in IN_PARTS else max(len(texts), 1)
    starts = range(0, len(texts), size)
    parts = (
        (metric, list(examples[start : start + size]), [list(each) for each in texts[start : start + size]])
        for start in starts
    )
    found: list[list[float]] = []
    with Progress("scoring candidates", total=len(texts), unit=unit) as progress:
        for part in in_processes(_part, parts, workers):
            found += part
            progress.update(len(part))
    _raise_unless_scores(metric, examples, texts, found)
    return found


def scores_at_once(
    metric: CandidateMetric, examples: Sequence[Example], texts: Sequence[Sequence[str]]
) -> list[list[float]]:
    """As :func:`score_candidates`, here and without progress; an error names the first text that raises it."""
    try:
        found = _part((metric, list(examples), [list(each) for each in texts]))
    except Exception as reason:
        if METRICS.origin(metric.name):
            _raise_with_text(metric, examples, texts, reason)
        raise
    _raise_unless_scores(metric, examples, texts, found)
    return found


def _raise_with_text(
    metric: CandidateMetric, examples: Sequence[Example], texts: Sequence[Sequence[str]], reason: Exception
) -> None:
    """Raise an error that names the first text which cannot be scored alone, if there is one."""
    for example, text in ((example, text) for example, group in zip(examples, texts, strict=True) for text in group):
        try:
            _part((metric, [example], [[text]]))
        except Exception as alone:
            what = str(alone) if isinstance(alone, UserError) else f"{type(alone).__name__}: {alone}"
            raise UserError(
                f"{metric.key} {metric.name} cannot score a text of {example.id!r}, {_shown(text)}: "
                f"{what.rstrip('.')}. {CORRECT}"
            ) from reason


def _raise_unless_scores(
    metric: CandidateMetric,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    found: Sequence[Sequence[float]],
) -> None:
    """Raise if a candidate has no score between 0 and 100."""
    for example, own, values in zip(examples, texts, found, strict=True):
        for number, (text, value) in enumerate(zip(own, values, strict=True), 1):
            if isnan(value) or not 0 <= value <= 1:
                what = "no score" if isnan(value) else f"a score of {100 * value:g}, not between 0 and 100,"
                advice = CORRECT if METRICS.origin(metric.name) else "Use another metric."
                raise UserError(
                    f"{metric.key} {metric.name} has {what} for candidate {number} of {example.id!r}, {_shown(text)}. "
                    f"{advice}"
                )


def _shown(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…")


def _workers(metric: CandidateMetric, texts: int, processes: int | None) -> int:
    if metric.name not in IN_PARTS or not isinstance(METRICS[metric.name].function, str):
        return 1  # a plugin's function is not known to other processes
    return processes or (1 if texts < IN_PROCESS else processors())


Part = tuple[CandidateMetric, list[Example], list[list[str]]]


def _part(part: Part) -> list[list[float]]:
    """The scores of some examples. What depends on the script of references depends on those of each example alone."""
    metric, examples, texts = part
    alone = metric.name in IN_PARTS
    languages = [language_of(references_of(example)) if alone else "" for example in examples]
    found: dict[int, list[float]] = {}
    for language in dict.fromkeys(languages):
        alike = [row for row, own in enumerate(languages) if own == language]
        of_alike = ([examples[row] for row in alike], [texts[row] for row in alike])
        found |= zip(alike, _scores_of_language(metric, *of_alike), strict=True)
    return [found[row] for row in range(len(examples))]


def _scores_of_language(
    metric: CandidateMetric, examples: Sequence[Example], texts: Sequence[Sequence[str]]
) -> list[list[float]]:
    """The scores of examples of one language. Equal texts of an example are scored once, if each is scored alone."""
    each = [list(dict.fromkeys(own)) if metric.name in IN_PARTS else own for own in texts]
    owners = [example for example, own in zip(examples, each, strict=True) for _ in own]
    scored = [
        text if metric.lines is None else "\n".join(sentences(text, language=metric.lines))
        for own in each
        for text in own
    ]
    try:
        scores = scores_on(metric.name, owners, scored, metric.options)
    except Absent as reason:
        raise UserError(f"{metric.key} {metric.name}: {reason}") from None
    if lacking := [name for name in metric.scores if name not in scores.values]:
        raise UserError(
            f"{metric.key} {metric.name} has no {', '.join(lacking)} of each document with these options. {_OTHER}"
        )
    columns = [scores.values[name] for name in metric.scores]
    means = iter([_unit(fsum(values) / len(columns)) for values in zip(*columns, strict=True)])
    means_of_texts = [[next(means) for _ in own] for own in each]
    if metric.name not in IN_PARTS:
        return means_of_texts
    by_text = [dict(zip(own, values, strict=True)) for own, values in zip(each, means_of_texts, strict=True)]
    return [[known[text] for text in own] for known, own in zip(by_text, texts, strict=True)]


def _unit(score: float) -> float:
    value = score / 100
    return min(max(value, 0.0), 1.0) if -TOLERANCE <= value <= 1 + TOLERANCE else value
