"""scores of rows with their intervals and differences → a forest plot: dots and intervals, one line a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, NamedTuple

from ngramloss.output.console import fixed, is_number
from ngramloss.output.tabular import signed
from ngramloss.report.drawing import INK, MUTED, SETTINGS, colour, drawable, markup, new_figure, round_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL = 36  # Characters of a label, at most: its values stand on the same line
_WIDTH = 3.9
_TITLE, _ROW, _AXIS = 0.24, 0.33, 0.26
"""Inches: the width of a drawing, and the heights of a set's name, of a row, and of an axis with its numbers."""
_SIDE = 0.005  # The share of the width that is left free on either side, so that no line is cut


class Estimate(NamedTuple):
    """A row of a forest plot. Without an interval its ends are NaN; without a difference it and its ends are NaN."""

    label: str
    value: float
    low: float = nan  # Lower end of the 95% interval of the value
    high: float = nan
    difference: float = nan  # To the first row of its set
    difference_low: float = nan  # Lower end of the 95% interval of the difference
    difference_high: float = nan
    mark: str = ""  # Stars of a significant difference
    runs: Sequence[float] = ()  # The values of which this is the mean, if it is one
    difference_runs: Sequence[float] = ()  # Likewise, the differences of which the difference is the mean
    is_first: bool = False  # Whether the others of its set are compared with it
    data: str = ""
    """The set that it belongs to. Rows of a set stand together below its name, with an axis of their own."""


class Forest(NamedTuple):
    """A forest plot in two drawings, which a wide screen has side by side and a narrow one below each other."""

    scores: str
    differences: str  # Empty if there is no difference


class _Line(NamedTuple):
    label: str
    text: str
    value: float
    low: float
    high: float
    runs: Sequence[float]
    is_first: bool


def draw_forest(rows: Sequence[Estimate], name: str, *, score: str, decimals: int = 2) -> Forest:
    """Draw rows of one set or of several, each with one row that is the first. ``score`` is what the values are."""
    sets: dict[str, list[Estimate]] = {}
    for row in rows:
        sets.setdefault(row.data, []).append(row)
    scores = {data: list(_score_lines(members, decimals)) for data, members in sets.items()}
    differences = {data: list(_difference_lines(members, decimals)) for data, members in sets.items()}
    compared = any(is_number(row.difference) for row in rows)
    first = _draw(scores, f"r{name}", score)
    second = _draw(differences, f"d{name}", f"{score}, difference", one_axis=True) if compared else ""
    return Forest(first, second)


def _score_lines(rows: Sequence[Estimate], decimals: int) -> Iterator[_Line]:
    for row in rows:
        text = fixed(row.value, decimals) + _brackets([fixed(end, decimals) for end in (row.low, row.high)])
        yield _Line(row.label, text, row.value, row.low, row.high, row.runs, row.is_first)


def _difference_lines(rows: Sequence[Estimate], decimals: int) -> Iterator[_Line]:
    """The first row is at 0, and in its place, so that lines of the two drawings are level."""
    for row in rows:
        if row.is_first:
            yield _Line(row.label, "", 0.0, nan, nan, (), is_first=True)
            continue
        ends = row.difference_low, row.difference_high
        written = _brackets([signed(end, decimals) for end in ends])
        text = f"{signed(row.difference, decimals)}{written}{' ' if row.mark else ''}{row.mark}"
        yield _Line(row.label, text, row.difference, *ends, row.difference_runs, is_first=False)


def _brackets(ends: Sequence[str]) -> str:
    return "" if "–" in ends else f" [{', '.join(ends)}]"


def _draw(sets: Mapping[str, Sequence[_Line]], name: str, title: str, *, one_axis: bool = False) -> str:
    import matplotlib

    heights = [_TITLE * bool(data) + _ROW * len(lines) + _AXIS for data, lines in sets.items()]
    whole = sum(heights)
    with matplotlib.rc_context({**SETTINGS, "font.size": 8.5}):
        figure = new_figure(_WIDTH, whole)
        top = whole
        axes: Axes | None = None
        for (data, lines), height in zip(sets.items(), heights, strict=True):
            top -= height
            box = (_SIDE, (top + _AXIS) / whole, 1 - 2 * _SIDE, _ROW * len(lines) / whole)
            axes = figure.add_axes(box, sharex=axes if one_axis else None)
            axes.set_title(drawable(data), loc="left", fontsize=8.5, fontweight="bold", color=INK, parse_math=False)
            _draw_set(axes, lines)
        return markup(figure, name, title, " ".join(_described(data, lines) for data, lines in sets.items()))


def _draw_set(ax: Axes, lines: Sequence[_Line]) -> None:
    for place, line in enumerate(lines):
        shade = colour(6 if line.is_first else 0)
        label = drawable(line.label)
        label = label if len(label) <= LABEL else label[: LABEL - 1] + "…"
        for across, text, side in ((0, label, "left"), (1, line.text, "right")):
            ink = INK if side == "left" else MUTED
            at = ax.get_yaxis_transform()  # across in shares of the width, down in rows
            ax.text(across, place + 0.32, text, transform=at, ha=side, va="center", color=ink, parse_math=False)
        if line.is_first:
            for row in range(len(lines)):  # below its label, which the line would cross
                ends = (row + 0.52, row + 1)
                ax.plot([line.value] * 2, ends, color=MUTED, linewidth=0.8, linestyle="--", zorder=1)
        height = place + 0.72
        if is_number(line.low) and is_number(line.high):
            ax.plot([line.low, line.high], [height, height], color=shade, linewidth=1.6, solid_capstyle="round")
        below = [height + 0.14] * len(line.runs)
        ax.scatter(line.runs, below, s=7, color=MUTED, linewidths=0, zorder=3)
        if is_number(line.value):
            shape = "D" if line.is_first else "o"
            ax.scatter([line.value], [height], s=26, marker=shape, color=shade, linewidths=0, zorder=4)
    ax.set_ylim(len(lines), 0)
    ax.set_yticks([])
    round_ticks(ax, "x")
    ax.margins(x=0.05)
    ax.spines["left"].set_visible(False)


def _described(data: str, lines: Sequence[_Line]) -> str:
    """The lines in words, for readers who do not see the drawing."""
    said = [f"{line.label}: {line.text or 'the others are compared with it'}" for line in lines]
    return f"{data + ': ' if data else ''}{'; '.join(said)}."
