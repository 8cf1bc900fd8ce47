"""rows of cells → a table as text, Markdown or LaTeX, each escaped for where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ngramloss.output import escape
from ngramloss.output.console import aligned, is_number


@dataclass(frozen=True)
class Cell:
    """One value as it is shown."""

    text: str
    value: float | None = None  # the number in full, for sorting
    mark: str = ""
    interval: str = ""  # half the width of its interval, such as ±0.21
    difference: str = ""  # to the first system; only the page shows it
    note: str = ""  # what stands behind it in brackets
    title: str = ""  # all that is known about it, in words; only the page shows it
    best: bool = False  # whether it is the best of its column


@dataclass(frozen=True)
class Head:
    """The head of a column."""

    name: str  # of the score, by which the page knows the column
    label: str = ""  # what is shown; by default the name
    lower: bool = False  # whether lower values are better. An arrow says so.
    help: str = ""  # what it is, in one line; only the page shows it

    @property
    def text(self) -> str:
        """The label, and the arrow where lower is better."""
        return (self.label or self.name) + (" ↓" if self.lower else "")


@dataclass(frozen=True)
class Row:
    """A system, a baseline or a row of the paper."""

    name: str
    label: str
    cells: Sequence[Cell]
    kind: Literal["baseline", "system", "paper"] = "system"


@dataclass(frozen=True)
class Table:
    """Rows in up to three groups: baselines, systems, and rows of the paper."""

    heads: Sequence[Head]  # of all columns but the first
    systems: Sequence[Row]
    baselines: Sequence[Row] = ()
    paper: Sequence[Row] = ()
    corner: str = ""  # the head of the first column
    intervals: bool = False  # whether text, Markdown and LaTeX have the cells' intervals


class Parts(NamedTuple):
    """A table's lines, so that a reader can put the systems in another order."""

    before: list[str]
    rows: list[str]  # one line for each system
    after: list[str]

    @property
    def text(self) -> str:
        """The whole table."""
        return "\n".join([*self.before, *self.rows, *self.after])


def as_text(table: Table) -> str:
    """The table for a terminal: the first column aligned to the left, the others to the right."""
    heads = [table.corner, *(head.text for head in table.heads)]
    rows = [
        [row.label, *(_plain(cell, table) for cell in row.cells)]
        for row in [*table.baselines, *table.systems, *table.paper]
    ]
    return "\n".join(aligned([[escape.name(text) for text in row] for row in [heads, *rows]]))


def as_markdown(table: Table) -> Parts:
    """The table in Markdown. Rows of the paper say that they are."""

    def line(row: Row) -> str:
        label = f"{row.label} (paper)" if row.kind == "paper" else row.label
        return _markdown_line([escape.in_markdown(label), *(_in_markdown(cell, table) for cell in row.cells)])

    heads = [escape.in_markdown(text) for text in (table.corner, *(head.text for head in table.heads))]
    rule = ["---", *("---:" for _ in table.heads)]
    return Parts(
        [_markdown_line(heads), _markdown_line(rule), *map(line, table.baselines)],
        list(map(line, table.systems)),
        list(map(line, table.paper)),
    )


def as_latex(table: Table) -> Parts:
    """The table in LaTeX, for the package booktabs, with a rule between the groups."""

    def line(row: Row) -> str:
        return _latex_line([escape.in_latex(row.label), *(_in_latex(cell, table) for cell in row.cells)])

    heads = [escape.in_latex(text) for text in (table.corner, *(head.text for head in table.heads))]
    rule = [r"\midrule"]
    return Parts(
        [
            rf"\begin{{tabular}}{{l{'r' * len(table.heads)}}}",
            r"\toprule",
            _latex_line(heads),
            *rule,
            *map(line, table.baselines),
            *(rule if table.baselines else []),
        ],
        list(map(line, table.systems)),
        [*(rule if table.paper else []), *map(line, table.paper), r"\bottomrule", r"\end{tabular}"],
    )


def mark(p: float | None) -> str:
    """``**`` below 1%, ``*`` below 5%, for a p that is corrected (Holm) for the systems compared; else nothing.

    Of six comparisons at 5% without a correction, one in four tables would show a star by chance.

    >>> mark(0.009), mark(0.01), mark(0.05), mark(None)
    ('**', '*', '', '')
    """
    return "" if p is None else "**" if p < 0.01 else "*" if p < 0.05 else ""


def signed(value: float | None, decimals: int) -> str:
    """A difference with its sign, and a real minus.

    >>> signed(-0.125, 2), signed(0.001, 2)
    ('−0.12', '+0.00')
    """
    return f"{value:+.{decimals}f}".replace("-", "−") if is_number(value) else "–"


def half_width(low: float | None, high: float | None, decimals: int) -> str:
    """Half the width of an interval, or nothing.

    >>> half_width(1.0, 2.0, 2), half_width(None, None, 2)
    ('±0.50', '')
    """
    return f"±{(high - low) / 2:.{decimals}f}" if is_number(low) and is_number(high) else ""


def chance(p: float | None) -> str:
    """A p as it is printed.

    >>> chance(0.0004), chance(0.0312), chance(None)
    ('< 0.001', '0.031', '')
    """
    return "" if not is_number(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _plain(cell: Cell, table: Table) -> str:
    note = f" ({cell.note})".replace("−", "-") if cell.note else ""  # the minus that other programs read
    return " ".join(filter(None, [cell.text, cell.interval if table.intervals else ""])) + cell.mark + note


def _in_markdown(cell: Cell, table: Table) -> str:
    text = escape.in_markdown(cell.text)
    interval = f" {cell.interval}" if cell.interval and table.intervals else ""
    note = f" ({escape.in_markdown(cell.note)})" if cell.note else ""
    return (f"**{text}**" if cell.best else text) + interval + escape.in_markdown(cell.mark) + note


def _in_latex(cell: Cell, table: Table) -> str:
    text = escape.in_latex(cell.text)
    interval = escape.in_latex(f" {cell.interval}") if cell.interval and table.intervals else ""
    note = f" ({escape.in_latex(cell.note)})" if cell.note else ""
    raised = f"$^{{{cell.mark}}}$" if cell.mark else ""
    return (rf"\textbf{{{text}}}" if cell.best else text) + interval + raised + note


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
