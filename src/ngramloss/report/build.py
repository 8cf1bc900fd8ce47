"""scored systems, their texts and folders → the record of a report."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ngramloss.data.overview import WARNING
from ngramloss.data.statistics import words_of
from ngramloss.errors import UserError
from ngramloss.metrics.registry import Score, scores_of
from ngramloss.metrics.shape import shape
from ngramloss.output import escape
from ngramloss.output.console import is_number
from ngramloss.recipe import TASKS, WORDS
from ngramloss.report import record
from ngramloss.report.record import LENGTH, NOVELTY, Cases, Report, ReportSystem, TeacherForced, TrainingCurves
from ngramloss.scoring import paper, provenance
from ngramloss.scoring.provenance import Provenance
from ngramloss.scoring.results import Result, Seeds
from ngramloss.scoring.score_cache import number
from ngramloss.scoring.scored_texts import Aligned
from ngramloss.scoring.significance import over_seeds
from ngramloss.scoring.tables import seed_tests, seed_verdicts, untested, verdicts
from ngramloss.storage.files import whole_rows
from ngramloss.storage.run_folder import RunFolder
from ngramloss.storage.typed import typed
from ngramloss.version import __version__

SHOWN = 3  # Systems that a title names, at most


def build_record(
    result: Result,
    texts: Aligned,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    deviations: Sequence[str] = (),
    paper_of: str | None = None,
) -> Report:
    """The record of a report. On data besides ``paper_of``, the paper has only rows of objectives trained here."""
    if texts.task.references is None:
        why = "a report shows texts beside their references, and the data of these texts have no targets"
        other = "Metrics that need none can be computed: ngramloss score --metrics shape"
        raise UserError(f"{why}. Give them with --references FILE. {other}.")
    labels = _labels(result)
    result = result._replace(seeds=_seed_rows(result, labels))
    rows = dict.fromkeys(result.names, "") | {name: seeds.label for seeds in result.seeds for name in seeds.names}
    groups = [rows[name] for name in result.names]
    tested = [f"* and **: {tests}."] if (tests := seed_tests(result.seeds)) else []
    seed_notes = [*tested, *seed_verdicts(result), *untested(result.seeds)] if len(result.seeds) > 1 else []
    systems = [_system(result, index, label, groups[index]) for index, label in enumerate(labels)]
    warnings = dict.fromkeys(sentence for system in systems for sentence in system.used if sentence.startswith(WARNING))
    differently = result._replace(names=labels).decoded_differently
    known = {str(run.generation["data"]) for run in result.runs if run is not None and "data" in run.generation}
    beside = paper_of or next((name for name in paper.TABLE2 if name in known), None)
    return Report(
        title=title or _title(result, groups),
        notes=[*(notes or [_first_note(result, labels)]), *differently, *warnings],
        version=__version__,
        made=date.today().isoformat(),
        task=_task(result),
        scores=_scores(result),
        systems=systems,
        seeds=result.seeds,
        seed_notes=seed_notes,
        verdicts=verdicts(result._replace(names=labels)),
        signatures=result.signatures,
        absent=result.absent,
        metric_notes=result.notes,
        deviations=list(deviations),
        paper=_paper(beside, result, whole=beside in known) if beside else None,
        training=_training(result, labels, groups),
        ablations=_ablations(result, beside),
        cases=_cases(result, texts, texts.task.references),
    )


def flat(value: Any, name: str = "") -> dict[str, str]:
    """Nested settings by dotted name, each as text."""
    if isinstance(value, Mapping) and (value or not name):
        settings: dict[str, str] = {}
        for key, inner in value.items():
            settings |= flat(inner, f"{name}.{key}" if name else str(key))
        return settings
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return {escape.name(name): escape.for_terminal(text)}


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Rows of a log → name → (step, value). Values that are not numbers are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "step" not in row or not is_number(step := row["step"]):
            continue
        for name, value in row.items():
            if name != "step" and is_number(value):
                found.setdefault(name, []).append((step, value))
    return found


def _seed_rows(result: Result, labels: Sequence[str]) -> list[Seeds]:
    """If some have several runs or belong to groups: the rows over seeds, then single runs, without a lone baseline."""
    baselines = [name for name, run in zip(result.names, result.runs, strict=True) if run and run.is_baseline]
    first, others = result.seeds[:1], result.seeds[1:]
    rows = first + [seeds for seeds in others if len(seeds.names) > 1 or seeds.names[0] not in baselines]
    if not rows:
        return []
    shared = [label for label, count in Counter(seeds.label for seeds in rows).items() if count > 1]
    rows = [x._replace(label=f"{x.label} ({x.names[0]}, …)") if x.label in shared else x for x in rows]
    there = {name for seeds in rows for name in seeds.names}
    single = [index for index, name in enumerate(result.names) if name not in there and name not in baselines]
    return rows + [_single_run(result, index, labels[index], rows[0]) for index in single]


def _single_run(result: Result, index: int, label: str, first: Seeds) -> Seeds:
    """A system of one run beside means over seeds: it has no spread, and a difference without a test."""
    values = {name: scores[index].value for name, scores in result.scores.items()}
    untested = dict.fromkeys(("low", "high", "p", "p_holm"), nan)
    spread = {name: over_seeds([value]) for name, value in values.items()}
    against = {name: {"difference": value - first.spread[name]["mean"]} | untested for name, value in values.items()}
    return Seeds(label, [result.names[index]], spread, against)


def _title(result: Result, groups: Sequence[str]) -> str:
    each = zip(result.names, result.runs, groups, strict=True)
    known = [group or (run.label if run else name) for name, run, group in each]
    trained = [label for label, run in zip(known, result.runs, strict=True) if run is None or not run.is_baseline]
    systems = list(dict.fromkeys(trained or known))
    read = [str(run.generation["data"]) for run in result.runs if run and "data" in run.generation]
    data = {escape.name(Path(name).name) for name in read}
    shown = f"{', '.join(systems[:-1])} and {systems[-1]}" if 1 < len(systems) <= SHOWN else systems[0]
    shown = shown if len(systems) <= SHOWN else f"{len(systems)} systems"
    return shown + (f" on {' and '.join(sorted(data))}" if data else "")


def _first_note(result: Result, labels: Sequence[str]) -> str:
    count = len(result.names)
    systems = "1 system" if count == 1 else f"{count} systems"
    first = labels[0]
    if result.seeds:
        rows = count + sum(1 - len(seeds.names) for seeds in result.seeds)
        systems, first = f"{rows} {'system' if rows == 1 else 'systems'}, {count} runs,", result.seeds[0].label
    return f"{systems} on {len(result.ids):,} {WORDS[_task(result)].sources}; differences are to {first}."


def _task(result: Result) -> str:
    return next((run.task for run in result.runs if run is not None and run.task != TASKS[0]), TASKS[0])


def _scores(result: Result) -> dict[str, Score]:
    """The scores, whose descriptions call the texts by the words of the task."""
    usual, words, scores = WORDS[TASKS[0]], WORDS[_task(result)], {}
    for name, score in ((name, result.described[name]) for name in result.scores):
        described = score.help.replace(usual.text, words.text).replace(usual.source, words.source)
        scores[name] = dataclasses.replace(score, help=described)
    return scores


def _labels(result: Result) -> list[str]:
    """The objective or model of each system; with the seed, or the folder, where several share it."""
    plain = [run.label if run else name for name, run in zip(result.names, result.runs, strict=True)]
    labels = []
    for name, label, run in zip(result.names, plain, result.runs, strict=True):
        alike = [other for other, its in zip(result.runs, plain, strict=True) if its == label]
        if len(alike) == 1:
            labels.append(label)
        elif run is not None and len({other.seed for other in alike if other}) == len(alike):
            labels.append(f"{label} (seed {run.seed})")
        else:
            labels.append(f"{label} ({name})" if label != name else name)
    return labels


def _system(result: Result, index: int, label: str, group: str) -> ReportSystem:
    run, values = result.runs[index], {name: scores[index] for name, scores in result.scores.items()}
    most, audit = result.cut_off[index].most or None, result.audit[index]
    plain = ReportSystem(result.names[index], label, values, group=group, most_tokens=most, audit=audit)
    if run is None:
        return plain
    settings = {"written by": provenance.written_by(run), "recipe": run.recipe, "generation": run.generation}
    return dataclasses.replace(
        plain,
        is_baseline=run.is_baseline,
        objective=run.label if run.recipe else None,
        used=provenance.used(run.folder) if run.recipe else [],
        settings=flat({key: value for key, value in settings.items() if value}),
        forced=_forced(run) if run.recipe else {},
    )


def _paper(name: str, result: Result, *, whole: bool) -> record.PaperTable:
    trained = _objectives(result)
    rows = []
    for row in paper.TABLE2[name]:
        if whole or row.objective in trained or row.system in trained:
            printed = _printed(result, paper.score_names(name), row.scores)
            rows.append(record.PaperRow(row.label, printed, row.docs_per_second, row.ratio))
    shown = trained.keys() & {row.system for row in paper.TABLE2[name] if row.system}
    return record.PaperTable(paper.title(name, systems=bool(shown)), rows)


def _printed(result: Result, names: Sequence[str], values: Sequence[float | None]) -> dict[str, float | None]:
    known = dict.fromkeys(result.scores) | dict(zip(names, values, strict=True))
    return {score: known[score] for score in result.scores}


def _objectives(result: Result) -> dict[str, list[int]]:
    systems: dict[str, list[int]] = {}
    for index, run in enumerate(result.runs):
        if run is not None and run.recipe:
            systems.setdefault(run.label, []).append(index)
    return systems


def _training(result: Result, labels: Sequence[str], groups: Sequence[str]) -> list[TrainingCurves]:
    logs = []
    for label, group, run in zip(labels, groups, result.runs, strict=True):
        rows = provenance.log(run.folder) if run and run.own else []
        if run and rows:
            logs.append(TrainingCurves(label, curves(rows), group, run.label if run.recipe else ""))
    return logs


def _ablations(result: Result, beside: str | None) -> list[record.Ablation]:
    """The parts of the paper's Table 3 with two trained rows or more; the paper's values on its data or if asked."""
    nothing = dict.fromkeys(result.scores)
    trained, names = _objectives(result), paper.score_names("cnn_dailymail")[:3]
    means: dict[str, dict[str, float | None]] = dict.fromkeys(paper.objectives("table3"), dict.fromkeys(result.scores))
    for objective, systems in trained.items():
        sums = {name: sum(scores[index].value for index in systems) for name, scores in result.scores.items()}
        means[objective] = {name: number(total / len(systems)) for name, total in sums.items()}
    parts = []
    for title, rows in paper.TABLE3.items():
        shown = []
        for label, objective, printed in rows:
            if beside or objective in trained:
                theirs = _printed(result, names, printed) if beside else nothing
                shown.append(record.AblationRow("ce" if objective == "ce" else label, means[objective], theirs))
        if sum(objective in trained for _, objective, _ in rows) > 2:
            parts.append(record.Ablation(title, shown))
    return parts


def _cases(result: Result, texts: Aligned, references: Sequence[Sequence[str]]) -> Cases:
    """Cases with every score, and with length and novelty by the same rules where they were not scored."""
    described = _scores(result)
    columns = {name: [system[name] for system in result.documents] for name in result.scores}
    wanted = [LENGTH] if texts.task.documents is None else [LENGTH, NOVELTY]
    missing = [name for name in wanted if name not in columns]
    if missing:
        documents = texts.task.documents if NOVELTY in missing else None
        shapes = [shape(predictions, documents).values for predictions in texts.texts]
        for name in missing:
            described[name] = scores_of("shape")[name]
            columns[name] = [values[name] for values in shapes]
    scores = {
        name: [[round(x, described[name].decimals) if isfinite(x) else None for x in system] for system in systems]
        for name, systems in columns.items()
    }
    words = [len(words_of(first)) for first, *_ in references]
    cut_off = [list(system.documents) for system in result.cut_off]
    return Cases(texts.task.ids, references, texts.texts, described, scores, words, cut_off, texts.task.documents)


def _forced(run: Provenance) -> dict[str, TeacherForced]:
    path, names = RunFolder(run.folder).seen, TeacherForced.__annotations__
    again = f"Delete it, or make it again with: ngramloss generate {run.folder}"
    found = {
        str(row["id"]): {name: row[name] for name in names if name in row} for row in whole_rows(path) if "id" in row
    }
    return {key: typed(TeacherForced, row, path, again) for key, row in found.items()}
