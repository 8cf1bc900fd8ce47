"""figures of several systems → a table for a terminal, JSON, Markdown, LaTeX, and a line for each document."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

from ngramloss import escape
from ngramloss.files import write_whole
from ngramloss.scoring import provenance
from ngramloss.scoring.results import Result
from ngramloss.scoring.score_cache import number
from ngramloss.scoring.significance import Figure


def write_documents(result: Result, path: Path) -> None:
    """Write the figures of every document, a line of JSON for each document of each system."""
    lines = []
    for name, figures in zip(result.names, result.documents, strict=True):
        for index, key in enumerate(result.ids):
            row = {figure: number(values[index]) for figure, values in figures.items()}
            lines.append(json.dumps({"system": name, "id": key, **row}))
    write_whole(path, "\n".join(lines) + "\n")


def record(result: Result) -> dict[str, Any]:
    """The result as ``{"systems": [{"name", "scores", "intervals", "against_first", "signature", …}], …}``.

    What is no number is None.
    """
    systems = []
    for index, name in enumerate(result.names):
        each = {figure: figures[index] for figure, figures in result.figures.items()}
        run = result.runs[index]
        system: dict[str, Any] = {
            "name": name,
            "scores": {figure: number(score.value) for figure, score in each.items()},
            "intervals": {figure: [number(score.low), number(score.high)] for figure, score in each.items()},
            "signature": result.signatures,
            "audit": result.audit[index],
        }
        if run is not None:
            system |= {"label": run.label, "generation": provenance.written_by(run)}
        if index:
            system["against_first"] = {figure: _against(score) for figure, score in each.items()}
        systems.append(system)
    return {
        "systems": systems, "documents": len(result.ids), "lower_is_better": _lower(result), "absent": result.absent,
        "left_out": result.left_out, "over_seeds": [_seeds(seeds._asdict()) for seeds in result.seeds],
    }  # fmt: skip


def as_json(result: Result) -> str:
    """The record as text."""
    return escape.in_json(json.dumps(record(result), indent=1, allow_nan=False, ensure_ascii=False))


def cells(result: Result) -> list[list[str]]:
    """A table: a row for each system, a column for each figure, with intervals and marks."""
    lower = _lower(result)
    rows = [["system", *(f"{name} ↓" if name in lower else name for name in result.figures)]]
    for index, name in enumerate(result.names):
        rows.append([name, *(cell(figures[index]) for figures in result.figures.values())])
    return rows


def as_text(result: Result) -> str:
    """The table for a terminal, what the marks mean, spread over seeds, what is odd, and every signature."""
    lines = [*columns(cells(result)), "", "± half of the 95% interval over documents (bootstrap)."]
    if len(result.names) > 1:
        several = f", corrected (Holm) for the {len(result.names) - 1} comparisons" if len(result.names) > 2 else ""
        swapped = any(figures[1].p_randomisation is not None for figures in result.figures.values())
        tests = "the paired bootstrap and in the paired randomisation" if swapped else "the paired bootstrap alone"
        lines += [f"* and **: differs from {result.names[0]} at 5% and 1% in {tests}{several}."]
    if _lower(result):
        lines += ["↓: lower is better."]
    lines += [f"{name}: {count} documents without a figure in some system are left out."
              for name, count in result.left_out.items()]
    if result.seeds:
        lines += ["", *columns(_seed_cells(result)), "",
                  "± standard deviation over seeds; in brackets the difference to the first and its 95% interval; *"
                  " and **: at 5% and 1% (Student's t over seeds, Holm)."]
    lines += [f"{name}: {', '.join(odd)}." for name, odd in zip(result.names, result.audit, strict=True) if odd]
    lines += [f"{metric} was left out: {why}" for metric, why in result.absent.items()]
    written = [(name, provenance.written_by(run)) for name, run in zip(result.names, result.runs, strict=True) if run]
    return "\n".join([*lines, *result.signatures.values(), *(f"{name}: {by}" for name, by in written if by)])


def as_markdown(result: Result) -> str:
    """The table in Markdown."""
    heads, *rows = [[escape.in_markdown(text) for text in row] for row in cells(result)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def as_latex(result: Result) -> str:
    """The table in LaTeX, for the package booktabs."""
    heads, *rows = [[escape.in_latex(text) for text in row] for row in cells(result)]
    body = [" & ".join(row) + r" \\" for row in rows]
    frame = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", " & ".join(heads) + r" \\", r"\midrule"]
    return "\n".join([*frame, *body, r"\bottomrule", r"\end{tabular}"])


def mark(chance: float | None) -> str:
    """``**`` below 1%, ``*`` below 5%."""
    return "" if chance is None else "**" if chance < 0.01 else "*" if chance < 0.05 else ""


def _lower(result: Result) -> list[str]:
    return [name for name in result.figures if result.described[name].better == "lower"]


def _against(figure: Figure) -> dict[str, Any]:
    return {
        "difference": number(figure.difference),
        "interval": [number(figure.difference_low), number(figure.difference_high)],
        "p_bootstrap": number(figure.p_bootstrap), "p_randomisation": number(figure.p_randomisation),
        "p_holm": number(figure.p_holm),
    }  # fmt: skip


def _seeds(seeds: dict[str, Any]) -> dict[str, Any]:
    def plain(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
        return {name: {key: number(value) for key, value in values.items()} for name, values in figures.items()}

    return {"label": seeds["label"], "runs": seeds["names"], "scores": plain(seeds["spread"]),
            "against_first": plain(seeds["against_first"])}


def _seed_cells(result: Result) -> list[list[str]]:
    rows = [["over seeds", "runs", *result.figures]]
    for seeds in result.seeds:
        values = (_seed_cell(spread, seeds.against_first.get(name)) for name, spread in seeds.spread.items())
        rows.append([seeds.label, str(len(seeds.names)), *values])
    return rows


def _seed_cell(spread: dict[str, float], test: dict[str, float] | None) -> str:
    if not isfinite(spread["mean"]):
        return "–"
    figure = f"{spread['mean']:.2f} ±{spread['spread']:.2f}"
    if test is None:
        return figure
    return f"{figure}{mark(test['p_holm'])} ({test['difference']:+.2f}, {test['low']:+.2f} to {test['high']:+.2f})"


def columns(table: list[list[str]]) -> list[str]:
    """A table's lines, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for name, *row in table:
        figures = [text.rjust(width) for text, width in zip(row, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *figures]))
    return lines


def cell(figure: Figure) -> str:
    """A figure, half of its interval, and its mark."""
    if not isfinite(figure.value):
        return "–"
    return f"{figure.value:.2f} ±{(figure.high - figure.low) / 2:.2f}{mark(figure.p_holm)}"
