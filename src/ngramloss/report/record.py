"""scored systems, their texts and folders → the one record that the page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from ngramloss import paper
from ngramloss.files import whole_rows
from ngramloss.run_folder import RunFolder
from ngramloss.scoring import provenance, tables
from ngramloss.scoring.provenance import Run
from ngramloss.scoring.results import Result
from ngramloss.scoring.score_cache import number
from ngramloss.scoring.systems import Aligned
from ngramloss.version import __version__


def build_record(
    result: Result, texts: Aligned, *, title: str = "ngramloss report", notes: Sequence[str] = (),
    deviations: Sequence[str] = (), paper_of: str | None = None,
) -> dict[str, Any]:
    """The page's record; ``report.page.write_page`` says what is in it.

    Args:
        result: of scoring the texts.
        texts: references, documents and the systems' texts.
        title: of the page.
        notes: what a reader should know first.
        deviations: where this departs from the paper.
        paper_of: data set whose rows of the paper stand beside; by default the runs' own, where the paper has it. For
            other data only the rows of what was trained here stand there.
    """
    record = tables.record(result)
    labels = _labels(result)
    known = {run.generation.get("data") for run in result.runs if run is not None}
    beside = paper_of or next((name for name in paper.TABLE2 if name in known), None)
    return {
        "title": title, "notes": list(notes) or [_first_note(result)], "version": __version__,
        "made": date.today().isoformat(), "figures": _figures(result), "signatures": result.signatures,
        "systems": [_system(system, labels[index], result.runs[index])
                    for index, system in enumerate(record["systems"])],
        "over_seeds": record["over_seeds"], "absent": result.absent, "deviations": list(deviations),
        "paper": _paper(beside, result, whole=beside in known) if beside else None,
        "training": _training(result, labels), "ablation": _ablation(result), "cases": _cases(result, texts),
        "seen": _teacher_forced(result), "objectives": {name: run.label for name, run in _trained_runs(result)},
    }  # fmt: skip


def _first_note(result: Result) -> str:
    systems = "system" if len(result.names) == 1 else "systems"
    return f"{len(result.names)} {systems} on {len(result.ids):,} documents; differences are to {result.names[0]}."


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


def _figures(result: Result) -> dict[str, dict[str, Any]]:
    return {name: {"label": score.label, "lower_is_better": score.better == "lower", "metric": result.metric_of[name],
                   "help": score.help} for name, score in result.described.items()}


def _system(system: Mapping[str, Any], label: str, run: Run | None) -> dict[str, Any]:
    settings = {"written by": system.get("generation", ""), **({"recipe": run.recipe, "generation": run.generation}
                                                               if run else {})}
    return {
        "name": system["name"], "label": label, "scores": system["scores"],
        "intervals": {name: None if None in ends else ends for name, ends in system["intervals"].items()},
        "against_first": system.get("against_first", {}), "audit": system["audit"],
        "docs_per_second": provenance.docs_per_second(run.folder) if run and run.own else None,
        "baseline": run.is_baseline if run else False,
        "settings": {name: value for name, value in settings.items() if value},
    }  # fmt: skip


def _paper(name: str, result: Result, *, whole: bool) -> dict[str, Any]:
    trained = {run.label for _, run in _trained_runs(result)}
    rows = []
    for row in paper.TABLE2[name]:
        if not whole and row.objective not in trained:
            continue
        named = zip(paper.figures(name), row.scores, strict=True)
        scores = {figure: value for figure, value in named if value is not None}
        rows.append({"label": row.label, "scores": scores, "docs_per_second": row.docs_per_second, "ratio": row.ratio})
    return {"title": paper.TITLES[name], "rows": rows}


def _trained_runs(result: Result) -> list[tuple[str, Run]]:
    return [(name, run) for name, run in zip(result.names, result.runs, strict=True) if run is not None and run.recipe]


def _training(result: Result, labels: Sequence[str]) -> list[dict[str, Any]]:
    logs = []
    for name, label, run in zip(result.names, labels, result.runs, strict=True):
        rows = provenance.log(run.folder) if run and run.own else []
        if rows:
            logs.append({"system": name, "label": label, "rows": rows})
    return logs


def _ablation(result: Result) -> list[dict[str, Any]]:
    """The paper's Table 3 where two rows of one of its parts or more were trained besides cross-entropy."""
    means: dict[str, dict[str, float | None]] = {}
    for objective in {run.label for _, run in _trained_runs(result)}:
        indices = [index for index, run in enumerate(result.runs) if run is not None and run.label == objective]
        means[objective] = {name: number(sum(figures[index].value for index in indices) / len(indices))
                            for name, figures in result.figures.items()}
    parts = []
    for title, rows in paper.TABLE3.items():
        if sum(objective in means for _, objective, _ in rows) > 2:
            parts.append({"title": title, "rows": [
                {"label": "ce" if objective == "ce" else label, "objective": objective,
                 "scores": means.get(objective, {}),
                 "paper": dict(zip(paper.figures("cnn_dailymail")[:3], printed, strict=True))}
                for label, objective, printed in rows
            ]})
    return parts


def _cases(result: Result, texts: Aligned) -> dict[str, Any]:
    each = {name: [[_short(value) for value in system[name]] for system in result.documents] for name in result.figures}
    return {"ids": texts.task.ids, "references": texts.task.references, "documents": texts.task.documents,
            "texts": texts.texts, "scores": each}


def _short(value: float) -> float | None:
    plain = number(value)
    return None if plain is None else round(plain, 2)


def _teacher_forced(result: Result) -> dict[str, dict[str, Any]]:
    forced = {}
    for name, run in _trained_runs(result):
        rows = whole_rows(RunFolder(run.folder).seen)
        if rows:
            forced[name] = {str(row["id"]): {key: value for key, value in row.items() if key != "id"} for row in rows}
    return forced
