"""systems and their figures → rows of the results' table, and the same as LaTeX, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngramloss.escape import in_csv, in_latex, in_markdown
from ngramloss.report.blocks import is_number

Figures = Mapping[str, Mapping[str, Any]]

_PERCENT = ("rouge", "bleu", "chrf")


class Cell(NamedTuple):
    """One figure of one system, as it is shown.

    Attributes:
        text: the figure.
        value: to sort by; None where there is no figure.
        mark: ``*`` and ``**`` for a difference at 5% and 1%.
        interval: half the width of the interval, ``±0.21``.
        difference: to the first system.
        title: all that is known of it, in words.
        best: whether no system in the same part of the table has a better one.
    """

    text: str
    value: float | None = None
    mark: str = ""
    interval: str = ""
    difference: str = ""
    title: str = ""
    best: bool = False


class Row(NamedTuple):
    """A system: its name, what it was trained with, its figures, and its speed with the ratio to the first."""

    name: str
    label: str
    cells: list[Cell]
    speed: Cell


class Table(NamedTuple):
    """Floors stand above the rule, systems below it, the paper's rows last."""

    baselines: list[Row]
    systems: list[Row]
    paper: list[Row]
    has_speed: bool


def parted(figures: Figures) -> tuple[Figures, Figures]:
    """Figures that say how good texts are, and those of their shape; where there are none but the latter, these."""
    shape = {name: figure for name, figure in figures.items() if figure.get("metric") == "shape"}
    rest = {name: figure for name, figure in figures.items() if name not in shape}
    return (rest, shape) if rest else (shape, {})


def results(data: Mapping[str, Any], figures: Figures) -> Table:
    """The table of these figures."""
    everything = data.get("systems") or []
    systems = [system for system in everything if not system.get("baseline")]
    decimals = {name: places(name, figures[name], everything) for name in figures}
    base = _number(systems[0].get("docs_per_second")) if systems else None
    baselines = [_row(system, figures, decimals, base) for system in everything if system.get("baseline")]
    rows = _with_best([_row(system, figures, decimals, base) for system in systems], figures)
    printed = [_paper_row(row, figures, decimals) for row in (data.get("paper") or {}).get("rows") or []]
    paper = _with_best(printed, figures)
    return Table(baselines, rows, paper, any(row.speed.text for row in [*baselines, *rows, *paper]))


def places(name: str, figure: Mapping[str, Any], systems: Sequence[Mapping[str, Any]]) -> int:
    """Decimals of a figure: two, but three where all are below ten and no per cent, as with distances."""
    values = [value for system in systems if is_number(value := (system.get("scores") or {}).get(name))]
    return 3 if values and max(abs(value) for value in values) < 10 and figure.get("metric") not in _PERCENT else 2


def ranks(figure: Mapping[str, Any]) -> bool:
    """Whether more of a figure is better, or less: a text's shape, such as its length, only describes it."""
    return figure.get("metric") != "shape" or bool(figure.get("lower_is_better"))


def mark(test: Mapping[str, Any] | None) -> str:
    """``**`` below 1%, ``*`` below 5%: the corrected chance where there is one, else both tests, if both were made.

    >>> mark({"p_bootstrap": 0.001, "p_randomisation": 0.02}), mark({"p_bootstrap": 0.001, "p_randomisation": None})
    ('*', '')
    >>> mark({"p_bootstrap": 0.001, "p_randomisation": 0.002, "p_holm": 0.06})
    ''
    """
    known = test or {}
    chances = [known.get("p_holm")] if is_number(known.get("p_holm")) else [
        known.get(name) for name in ("p_bootstrap", "p_randomisation")]
    if not all(is_number(chance) for chance in chances):
        return ""
    worst = max(chance for chance in chances if chance is not None)
    return "**" if worst < 0.01 else "*" if worst < 0.05 else ""


def comparisons(data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Every test against the first system, a row each."""
    figures: Figures = data.get("figures") or {}
    rows = []
    for system in data.get("systems") or []:
        for name, test in (system.get("against_first") or {}).items():
            if not test or not is_number(test.get("difference")):
                continue
            digits = places(name, figures.get(name, {}), data["systems"])
            low, high = test.get("interval") or (None, None)
            rows.append({
                "system": written_label(system), "figure": figures.get(name, {}).get("label", name), "mark": mark(test),
                "difference": signed(test["difference"], digits),
                "interval": f"{signed(low, digits)} to {signed(high, digits)}" if is_number(low) else "",
                **{key: chance(test.get(key)) for key in ("p_bootstrap", "p_randomisation", "p_holm")},
            })  # fmt: skip
    return rows


def seeds(data: Mapping[str, Any], figures: Figures) -> list[dict[str, Any]]:
    """Means over seeds, a row each, their cells in the order of the figures."""
    rows = []
    for group in data.get("over_seeds") or []:
        cells = []
        for name, figure in figures.items():
            spread = (group.get("scores") or {}).get(name) or {}
            digits = places(name, figure, data.get("systems") or [])
            test = (group.get("against_first") or {}).get(name) or {}
            shown = is_number(test.get("difference"))
            cells.append(Cell(
                fixed(spread.get("mean"), digits), _number(spread.get("mean")),
                interval=f"±{spread['spread']:.{digits}f}" if is_number(spread.get("spread")) else "",
                difference=signed(test["difference"], digits) if shown else "",
                title=_seed_title(spread, test, digits), mark=mark(test),
            ))  # fmt: skip
        rows.append({"label": group.get("label", ""), "runs": list(group.get("runs") or []), "cells": cells})
    return rows


def copies(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The table in each form, in parts: what stands before, a line for each system in its order, what stands after.

    The page joins them in the order in which the reader has sorted the systems. CSV has the texts' shape too.
    """
    everything: Figures = data.get("figures") or {}
    shown, _ = parted(everything)
    table = results(data, shown)
    csv_table = _csv(results(data, everything), everything)
    return {"latex": _latex(table, shown), "markdown": _markdown(table, shown), "csv": csv_table}


def chance(value: Any) -> str:
    """A probability as it is printed.

    >>> chance(0.0004), chance(0.0312), chance(None)
    ('< 0.001', '0.031', '')
    """
    return "" if not is_number(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def fixed(value: Any, digits: int) -> str:
    """A figure with its decimals, or a dash."""
    return f"{value:.{digits}f}" if is_number(value) else "–"


def signed(value: Any, digits: int) -> str:
    """A difference with its sign, and a real minus.

    >>> signed(-0.125, 2), signed(0.001, 2)
    ('−0.12', '+0.00')
    """
    return f"{value:+.{digits}f}".replace("-", "−") if is_number(value) else "–"


def written_label(system: Mapping[str, Any]) -> str:
    """What a system is called in the page."""
    return str(system.get("label") or system.get("name") or "")


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _row(system: Mapping[str, Any], figures: Figures, decimals: Mapping[str, int], base: float | None) -> Row:
    cells = [_cell(system, name, figures[name], decimals[name]) for name in figures]
    rate = _number(system.get("docs_per_second"))
    ratio = f"×{rate / base:.2f}" if rate is not None and base else ""
    speed = Cell("" if rate is None else f"{rate:.2f}", rate, difference=ratio)
    return Row(str(system.get("name", "")), written_label(system), cells, speed)


def _paper_row(row: Mapping[str, Any], figures: Figures, decimals: Mapping[str, int]) -> Row:
    scores = row.get("scores") or {}
    cells = [Cell(fixed(scores.get(name), decimals[name]), _number(scores.get(name))) for name in figures]
    rate, ratio = _number(row.get("docs_per_second")), _number(row.get("ratio"))
    speed = Cell("" if rate is None else f"{rate:.2f}", rate, difference="" if ratio is None else f"×{ratio:.2f}")
    return Row(str(row.get("label", "")), str(row.get("label", "")), cells, speed)


def _cell(system: Mapping[str, Any], name: str, figure: Mapping[str, Any], digits: int) -> Cell:
    value = _number((system.get("scores") or {}).get(name))
    if value is None:
        return Cell("–")
    interval = (system.get("intervals") or {}).get(name)
    test = (system.get("against_first") or {}).get(name) or {}
    compared = is_number(test.get("difference"))
    parts = [f"{figure.get('label', name)} {value:.{digits}f}"]
    if interval:
        parts.append(f"95% interval {interval[0]:.{digits}f} to {interval[1]:.{digits}f}")
    if compared:
        parts.append(f"against the first {signed(test['difference'], digits)}")
        parts += [f"p {chance(test[key])} ({how})" for key, how in _TESTS.items() if is_number(test.get(key))]
    return Cell(
        f"{value:.{digits}f}", value, mark(test),
        interval=f"±{(interval[1] - interval[0]) / 2:.{digits}f}" if interval else "",
        difference=signed(test["difference"], digits) if compared else "",
        title="; ".join(parts),
    )  # fmt: skip


_TESTS = {"p_bootstrap": "bootstrap", "p_randomisation": "randomisation", "p_holm": "Holm"}


def _seed_title(spread: Mapping[str, Any], test: Mapping[str, Any], digits: int) -> str:
    parts = []
    if is_number(spread.get("low")) and is_number(spread.get("high")):
        parts.append(f"from {spread['low']:.{digits}f} to {spread['high']:.{digits}f}")
    if is_number(test.get("low")) and is_number(test.get("high")):
        parts.append(f"difference from {signed(test['low'], digits)} to {signed(test['high'], digits)}")
    if is_number(test.get("p")):
        parts.append(f"p {chance(test['p'])}")
    return "; ".join(parts)


def _with_best(rows: Sequence[Row], figures: Figures) -> list[Row]:
    """Mark the best shown figure of each column; equal ones share it. A single row has no best."""
    rows = list(rows)
    if len(rows) < 2:
        return rows
    for column, figure in enumerate(figures.values()):
        if not ranks(figure):
            continue
        known = [(row.cells[column].value, row.cells[column].text) for row in rows]
        ranked = [(value, text) for value, text in known if value is not None]
        if len(ranked) < 2:
            continue
        _, best = min(ranked) if figure.get("lower_is_better") else max(ranked)
        for row in rows:
            if row.cells[column].text == best:
                row.cells[column] = row.cells[column]._replace(best=True)
    return rows


def _heads(figures: Figures, down: str) -> list[str]:
    return [str(figure.get("label", name)) + (down if figure.get("lower_is_better") else "")
            for name, figure in figures.items()]


def _latex(table: Table, figures: Figures) -> dict[str, Any]:
    heads = ["", *(in_latex(head) for head in _heads(figures, " ↓")), *(["Docs/s"] if table.has_speed else [])]

    def line(row: Row) -> str:
        cells = [in_latex(row.label)]
        for cell in row.cells:
            text = rf"\textbf{{{in_latex(cell.text)}}}" if cell.best else in_latex(cell.text)
            cells.append(text + (f"$^{{{cell.mark}}}$" if cell.mark else ""))
        if table.has_speed:
            cells.append(in_latex(" ".join(filter(None, [row.speed.text, _bracket(row)])) or "–"))
        return " & ".join(cells) + r" \\"

    rule = [r"\midrule"]
    return {
        "before": [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", " & ".join(heads) + r" \\", *rule,
                   *[line(row) for row in table.baselines], *(rule if table.baselines else [])],
        "rows": [line(row) for row in table.systems],
        "after": [*(rule if table.paper else []), *[line(row) for row in table.paper],
                  r"\bottomrule", r"\end{tabular}"],
    }  # fmt: skip


def _markdown(table: Table, figures: Figures) -> dict[str, Any]:
    heads = ["", *_heads(figures, " ↓"), *(["Docs/s"] if table.has_speed else [])]

    def line(row: Row, of: str = "") -> str:
        cells = [in_markdown(row.label + of)]
        for cell in row.cells:
            cells.append((f"**{cell.text}**" if cell.best else cell.text) + cell.mark.replace("*", r"\*"))
        if table.has_speed:
            cells.append(" ".join(filter(None, [row.speed.text, _bracket(row)])) or "–")
        return f"| {' | '.join(cells)} |"

    return {
        "before": [f"| {' | '.join(map(in_markdown, heads))} |", "|" + "---|" + "---:|" * (len(heads) - 1),
                   *[line(row) for row in table.baselines]],
        "rows": [line(row) for row in table.systems],
        "after": [line(row, " (paper)") for row in table.paper],
    }  # fmt: skip


def _csv(table: Table, figures: Figures) -> dict[str, Any]:
    def line(cells: Sequence[Any]) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(cells)
        return out.getvalue()

    def row(kind: str, system: Row) -> str:
        cells = [part for cell in system.cells for part in (cell.value, cell.interval.removeprefix("±"), cell.mark)]
        speed = [system.speed.value] if table.has_speed else []
        return line([in_csv(system.name), in_csv(system.label), kind, *cells, *speed])

    heads = [part for name in figures for part in (name, f"{name} ±", f"{name} mark")]
    return {
        "before": [line(["name", "label", "kind", *heads, *(["docs_per_second"] if table.has_speed else [])]),
                   *[row("baseline", system) for system in table.baselines]],
        "rows": [row("system", system) for system in table.systems],
        "after": [row("paper", system) for system in table.paper],
    }  # fmt: skip


def _bracket(row: Row) -> str:
    return f"({row.speed.difference})" if row.speed.difference else ""
