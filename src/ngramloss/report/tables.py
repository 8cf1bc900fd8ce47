"""the record of a report → its tables: results, comparisons, seeds, ablation, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ngramloss.metrics.registry import Score
from ngramloss.output import tabular
from ngramloss.output.console import fixed, is_number
from ngramloss.output.tabular import Cell, Head, Parts, Row, Table, chance, signed
from ngramloss.report.record import Ablation, Report, ReportSystem
from ngramloss.scoring.tables import cell, seed_cell

_SPEED = Head(
    "docs_per_second",
    "Docs/s",
    help="The paper's documents per second in training. Trainings here ran at other times and cannot be compared",
)


def quality_and_description(report: Report) -> tuple[list[str], list[str]]:
    """Scores that rank systems, and scores that only describe texts. If none rank, the others take their place."""
    quality = [name for name, score in report.scores.items() if score.better != "neither"]
    description = [name for name in report.scores if name not in quality]
    return (quality, description) if quality else (description, [])


def results(report: Report, names: Sequence[str], *, speed: bool = True, paper: bool = True) -> Table:
    """The table of these scores, with the paper's rows and their speeds where there are some.

    Trainings here ran at different times, so their speeds could not be compared and are left out.
    """
    scores = {name: report.scores[name] for name in names}
    printed = report.paper.rows if report.paper and paper else []
    rows = _with_best([_row(system, scores) for system in report.systems], scores.values())
    cells = [[*_plain_cells(row.values, scores), _speed_cell(row.docs_per_second, row.ratio)] for row in printed]
    theirs = [Row(row.label, row.label, own, "paper") for row, own in zip(printed, cells, strict=True)]
    rows += _with_best(theirs, scores.values())
    if speed and any(row.cells[-1].value is not None for row in rows):
        return _grouped([*_heads(scores), _SPEED], rows)
    return _grouped(_heads(scores), [replace(row, cells=row.cells[:-1]) for row in rows])


def _grouped(heads: Sequence[Head], rows: Sequence[Row]) -> Table:
    kinds = "system", "baseline", "paper"
    systems, baselines, paper = ([row for row in rows if row.kind == kind] for kind in kinds)
    return Table(heads, systems, baselines, paper)


def copies(report: Report) -> dict[str, Parts]:
    """The main table in each form, in parts."""
    names, _ = quality_and_description(report)
    shown = (seeds if report.seeds else results)(report, names)
    return {"latex": tabular.as_latex(shown), "markdown": tabular.as_markdown(shown)}


def description(report: Report, names: Sequence[str]) -> Table:
    """The table of scores that only describe texts, with the rows of the main table."""
    return seeds(report, names) if report.seeds else results(report, names, speed=False, paper=False)


def runs(report: Report, names: Sequence[str]) -> dict[str, list[Row]]:
    """The label of a row over several seeds → its runs, in the same columns: scores alone, all else as a title."""
    scores = {name: report.scores[name] for name in names}
    rows: dict[str, list[Row]] = {}
    for system in report.systems:
        cells = [cell(system.values[name], score) for name, score in scores.items()]
        plain = [Cell(shown.text, shown.value, title=shown.title) for shown in cells]
        rows.setdefault(system.group, []).append(Row(system.name, system.label, [Cell(""), *plain]))
    return {group.label: rows[group.label] for group in report.seeds if len(group.names) > 1}


def comparisons(report: Report) -> list[tuple[str, ...]]:
    """Every test against the first system, as cells: system, score, difference, interval, p of each test, p of Holm."""
    return [
        (
            system.label,
            score.label,
            signed(test.difference, score.decimals) + tabular.mark(test.p_holm),
            " to ".join(signed(end, score.decimals) for end in (test.difference_low, test.difference_high))
            if is_number(test.difference_low)
            else "",
            *map(chance, [*test.chances.values(), test.p_holm]),
        )
        for system in report.systems
        for name, score in report.scores.items()
        if is_number((test := system.values[name]).difference)
    ]


def marked(report: Report) -> list[tuple[str, str]]:
    """Label of a system → how many of its texts are empty or may be cut off, for those that have some."""
    if report.cases is None:
        return []
    lines = []
    cases = zip(report.systems, report.cases.empty, report.cases.cut_off, strict=True)
    for system, empty, full in cases:
        notes = [f"{len(empty):,} empty"] if empty else []
        if full:
            notes.append(f"{len(full):,} with the most tokens allowed, {system.most_tokens:,}, which may be cut off")
        if notes:
            lines.append((system.label, f"of {len(report.cases.ids):,} texts, {'; '.join(notes)}."))
    return lines


def seeds(report: Report, names: Sequence[str]) -> Table:
    """Means over seeds, a row for each system; its name lists the runs. Baselines have one run."""
    scores = {name: report.scores[name] for name in names}
    rows = []
    for system in (system for system in report.systems if system.is_baseline and not system.group):
        values = {name: score.value for name, score in system.values.items()}
        rows.append(Row(system.name, system.label, [Cell("1", 1), *_plain_cells(values, scores)], "baseline"))
    for group in report.seeds:
        cells = [seed_cell(group, name, score) for name, score in scores.items()]
        rows.append(Row(", ".join(group.names), group.label, [Cell(str(len(group.names)), len(group.names)), *cells]))
    best = _with_best(rows, [Score("Seeds", better="neither"), *scores.values()])
    return _grouped([Head("seeds", "Seeds"), *_heads(scores)], best)


def ablation(part: Ablation, scores: Mapping[str, Score]) -> dict[str, Any]:
    """A row's scores here and in the paper, the best of each column marked; ``of_paper``: which columns are its."""
    known = {False: [row.here for row in part.rows], True: [row.paper for row in part.rows]}
    pairs = [(name, of_paper) for name in part.scores for of_paper in known]
    columns = [(name, side) for name, side in pairs if any(row[name] is not None for row in known[side])]
    rows = []
    for index, row in enumerate(part.rows):
        values = [(name, known[of_paper][index][name]) for name, of_paper in columns]
        cells = [Cell(fixed(value, scores[name].decimals), value) for name, value in values]
        rows.append(Row(row.label, row.label, cells))
    heads = [_head(name, scores[name]) for name, _ in columns]
    table = Table(heads, _with_best(rows, [scores[name] for name, _ in columns]))
    return {"title": part.title, "table": table, "of_paper": [of_paper for _, of_paper in columns]}


def settings(each: Sequence[Mapping[str, str]]) -> dict[str, list[tuple[str, Any]]]:
    """Names and values of settings that all systems share, and of different ones; a dash is one that a system lacks."""
    names = list(dict.fromkeys(name for own in each for name in own))
    known = {name: list(dict.fromkeys(own[name] for own in each if name in own)) for name in names}
    rows = [dict.fromkeys(names, "–") | dict(own) for own in each]
    shared = [(name, values[0]) for name, values in known.items() if len(values) == 1]
    different = [(name, [row[name] for row in rows]) for name, values in known.items() if len(values) > 1]
    return {"shared": shared, "different": different}


def _heads(scores: Mapping[str, Score]) -> list[Head]:
    return [_head(name, score) for name, score in scores.items()]


def _head(name: str, score: Score) -> Head:
    return Head(name, score.label, score.better == "lower", help=score.help)


def _row(system: ReportSystem, scores: Mapping[str, Score]) -> Row:
    cells = [cell(system.values[name], score) for name, score in scores.items()]
    cells.append(_speed_cell(None, None))
    return Row(system.name, system.label, cells, "baseline" if system.is_baseline else "system")


def _plain_cells(values: Mapping[str, float | None], scores: Mapping[str, Score]) -> list[Cell]:
    known = [(score.decimals, values[name]) for name, score in scores.items()]
    return [Cell(fixed(value, decimals), value if is_number(value) else None) for decimals, value in known]


def _speed_cell(rate: float | None, ratio: float | None) -> Cell:
    return Cell(fixed(rate, 2), rate, note="" if ratio is None else f"×{ratio:.2f}")


def _with_best(rows: Sequence[Row], scores: Iterable[Score]) -> list[Row]:
    """Mark the best value of each column as it is shown; equal ones share the mark. A single value is not the best."""
    best = []
    for column, score in enumerate(scores):
        known = [(cell.value, cell.text) for cell in (row.cells[column] for row in rows) if cell.value is not None]
        ranked = sorted(known, reverse=score.better == "higher")
        best.append(ranked[0][1] if len(ranked) > 1 and score.better != "neither" else None)
    marked = []
    for row in rows:
        pairs = zip_longest(row.cells, best)
        cells = [replace(cell, best=True) if cell.text == text else cell for cell, text in pairs]
        marked.append(replace(row, cells=cells))
    return marked
