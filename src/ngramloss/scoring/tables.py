"""scores of several systems → a table for a terminal, in Markdown, LaTeX or CSV, JSON, and a line for each document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ngramloss.output import escape, tabular
from ngramloss.output.tabular import Cell, Head, Row, Table
from ngramloss.scoring import provenance
from ngramloss.scoring.results import Result, Seeds
from ngramloss.scoring.score_cache import number
from ngramloss.scoring.significance import Figure
from ngramloss.storage.files import write_whole


def write_documents(result: Result, path: Path) -> None:
    """Write the scores of every document, a line of JSON for each document of each system."""
    lines = []
    for name, columns in zip(result.names, result.documents, strict=True):
        for index, key in enumerate(result.ids):
            row = {score: number(values[index]) for score, values in columns.items()}
            lines.append(json.dumps({"system": name, "id": key, **row}))
    write_whole(path, "\n".join(lines) + "\n")


def record(result: Result) -> dict[str, Any]:
    """The result as ``{"systems": [{"name", "scores", "intervals", "against_first", "signature", …}], …}``.

    A score that is missing, NaN or infinite is None.
    """
    systems = []
    for index, name in enumerate(result.names):
        scores = {score: figures[index] for score, figures in result.figures.items()}
        run = result.runs[index]
        system: dict[str, Any] = {
            "name": name,
            "scores": {score: number(figure.value) for score, figure in scores.items()},
            "intervals": {score: [number(figure.low), number(figure.high)] for score, figure in scores.items()},
            "signature": result.signatures,
            "audit": result.audit[index],
        }
        if run is not None:
            system |= {"label": run.label, "generation": provenance.written_by(run)}
        if index:
            system["against_first"] = {score: _against(figure) for score, figure in scores.items()}
        systems.append(system)
    return {
        "systems": systems,
        "documents": len(result.ids),
        "lower_is_better": _lower(result),
        "absent": result.absent,
        "left_out": result.left_out,
        "notes": result.notes,
        "over_seeds": [_seeds(seeds) for seeds in result.seeds],
    }


def as_json(result: Result) -> str:
    """The record as text."""
    return escape.in_json(json.dumps(record(result), indent=1, allow_nan=False, ensure_ascii=False))


def table(result: Result) -> Table:
    """A row for each system, or for each group if there are groups, and a column for each score."""
    if result.groups:
        return _seed_table(result, corner="group")
    described = result.described
    rows = [
        Row(
            name,
            name,
            [cell(figures[index], described[score].decimals) for score, figures in result.figures.items()],
            _kind(result, index),
        )
        for index, name in enumerate(result.names)
    ]
    return Table(heads(result), rows, corner="system", intervals=True)


def heads(result: Result) -> list[Head]:
    """A head for each score, by its name."""
    described = result.described
    return [Head(score, lower=described[score].better == "lower") for score in result.figures]


def cell(figure: Figure, decimals: int) -> Cell:
    """A score of one system, half of its interval, and its mark."""
    text = tabular.fixed(figure.value, decimals)
    if not tabular.is_number(figure.value):
        return Cell(text)
    interval = tabular.half_width(figure.low, figure.high, decimals)
    return Cell(text, figure.value, tabular.mark(figure.p_holm), interval)


def as_text(result: Result) -> str:
    """The table for a terminal, what the marks mean, spread over seeds, the audit, and every signature."""
    lines = [tabular.as_text(table(result)), ""]
    lines += _seed_legend(result) if result.groups else ["± half of the 95% interval over documents (bootstrap)."]
    if len(result.names) > 1 and not result.groups:
        several = f", corrected (Holm) for the {len(result.names) - 1} comparisons" if len(result.names) > 2 else ""
        swapped = any(figures[1].p_randomisation is not None for figures in result.figures.values())
        tests = "the paired bootstrap and in the paired randomisation" if swapped else "the paired bootstrap alone"
        lines += [f"* and **: differs from {result.names[0]} at 5% and 1% in {tests}{several}."]
    if _lower(result):
        lines += ["↓: lower is better."]
    lines += [
        f"{name}: {count} documents without a score in some system are left out."
        for name, count in result.left_out.items()
    ]
    if result.seeds and not result.groups:
        lines += ["", tabular.as_text(_seed_table(result, corner="over seeds")), "", *_seed_legend(result)]
    lines += [f"{name}: {', '.join(odd)}." for name, odd in zip(result.names, result.audit, strict=True) if odd]
    lines += [f"{metric}: {note}" for metric, notes in result.notes.items() for note in notes]
    lines += [f"{metric} was left out: {why}" for metric, why in result.absent.items()]
    written = [(name, provenance.written_by(run)) for name, run in zip(result.names, result.runs, strict=True) if run]
    return "\n".join([*lines, *result.signatures.values(), *(f"{name}: {by}" for name, by in written if by)])


def as_markdown(result: Result) -> str:
    """The table in Markdown."""
    return tabular.as_markdown(table(result)).text


def as_latex(result: Result) -> str:
    """The table in LaTeX, for the package booktabs."""
    return tabular.as_latex(table(result)).text


def as_csv(result: Result) -> str:
    """The table in CSV, scores in full."""
    return tabular.as_csv(table(result)).text


def _lower(result: Result) -> list[str]:
    described = result.described
    return [name for name in result.figures if described[name].better == "lower"]


def _against(figure: Figure) -> dict[str, Any]:
    return {
        "difference": number(figure.difference),
        "interval": [number(figure.difference_low), number(figure.difference_high)],
        "p_bootstrap": number(figure.p_bootstrap),
        "p_randomisation": number(figure.p_randomisation),
        "p_holm": number(figure.p_holm),
    }


def _seeds(seeds: Seeds) -> dict[str, Any]:
    def plain(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
        return {name: {key: number(value) for key, value in values.items()} for name, values in figures.items()}

    return {
        "label": seeds.label,
        "runs": seeds.names,
        "scores": plain(seeds.spread),
        "test": seeds.test or None,
        "against_first": plain(seeds.against_first),
    }


def _seed_legend(result: Result) -> list[str]:
    """What the rows over seeds show, and what is tested."""
    first, *others = result.seeds
    lines = ["± standard deviation over seeds" + ("." if not others else "; ")]
    if others:
        lines[0] += f"in brackets the difference to {first.label} and, where it is tested, its 95% interval."
    lines += [f"* and **: {sentence}." for sentence in [seed_tests(result.seeds)] if sentence]
    return lines + [f"{sentence}." for sentence in [untested(result.seeds)] if sentence]


def seed_tests(rows: Sequence[Seeds]) -> str:
    """What the tests over seeds compare, and how; empty if there are none."""
    tested = [row for row in rows if row.test]
    if not tested:
        return ""
    ways = list(dict.fromkeys(row.test for row in tested))
    how = ways[0] if len(ways) == 1 else ", ".join(f"{row.label} {row.test}" for row in tested)
    several = f", corrected (Holm) for the {len(tested)} comparisons" if len(tested) > 1 else ""
    return f"the mean over seeds differs from that of {rows[0].label} at 5% and 1% (Student's t, {how}){several}"


def untested(rows: Sequence[Seeds]) -> str:
    """Which rows have no test over seeds, and why; empty if all have."""
    single = [row.label for row in rows if len(row.names) == 1]
    if not single or len(rows) < 2:
        return ""
    return f"No test over seeds with {', '.join(single)}, of one run: a test needs two runs or more of both"


def _seed_table(result: Result, *, corner: str) -> Table:
    """A row for each system with several seeds: mean, standard deviation, mark, and the difference to the first."""
    described = result.described
    rows = []
    for seeds in result.seeds:
        cells = [
            _seed_cell(spread, seeds.against_first.get(score), described[score].decimals)
            for score, spread in seeds.spread.items()
        ]
        runs = len(seeds.names)
        rows.append(Row(seeds.label, seeds.label, [Cell(str(runs), runs), *cells]))
    return Table([Head("runs", tested=False), *heads(result)], rows, corner=corner, intervals=True)


def _seed_cell(spread: dict[str, float], test: dict[str, float] | None, decimals: int) -> Cell:
    text = tabular.fixed(spread["mean"], decimals)
    if not tabular.is_number(spread["mean"]):
        return Cell(text)
    interval = f"±{spread['spread']:.{decimals}f}" if tabular.is_number(spread["spread"]) else ""
    if test is None:
        return Cell(text, spread["mean"], interval=interval)
    difference, low, high = (tabular.signed(test[name], decimals) for name in ("difference", "low", "high"))
    note = f"{difference}, {low} to {high}" if tabular.is_number(test["low"]) else difference
    return Cell(text, spread["mean"], tabular.mark(test["p_holm"]), interval, note=note)


def _kind(result: Result, system: int) -> Literal["baseline", "system"]:
    run = result.runs[system]
    return "baseline" if run is not None and run.is_baseline else "system"
