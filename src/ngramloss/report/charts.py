"""results, training logs and ablations of a report → drawings whose colours follow the page's theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.etree import ElementTree

from ngramloss.metrics.registry import Score
from ngramloss.output.tabular import is_number
from ngramloss.report.record import Ablation, Report, TrainingLog
from ngramloss.report.tables import quality_and_description
from ngramloss.terms.registry import OBJECTIVES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 7
"""Series colours that the style sheet has; an eighth run takes the first again, dotted."""
SHOWN = 4
"""Scores of an ablation that are drawn, at most."""
LABEL = 30
"""Characters of a label in a drawing, at most."""
POINTS = 300
"""Points of a curve, at most: every k-th and the last."""

_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_INK, _LINE = "#000001", "#000002"
_SERIES = {f"#0001{run:02d}": f"var(--series-{run})" for run in range(COLOURS)}
_PLACES = {_INK: "var(--muted)", _LINE: "var(--line)", **_SERIES}
"""Colours that are drawn with, and what stands for them in the page."""
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ngramloss",
    "font.size": 8,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.4,
    "path.simplify": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_TERM = re.compile(r"[a-z_]+\(.*\)(:\w+)?")
_CLOCKS = ("runtime", "generation_runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Series(NamedTuple):
    """One curve: of one run, or the mean of a group of runs with its lowest and highest values."""

    run: int
    """The place of the run or group in ``run_groups``."""
    part: str
    dashed: bool
    x: list[float]
    y: list[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Estimate(NamedTuple):
    """A score of one row of the results with its 95% interval, and those of its runs if it is their mean."""

    label: str
    value: float
    low: float
    """NaN, like ``high``, if there is no interval."""
    high: float
    runs: list[float]


class Panel(NamedTuple):
    """One drawing of the training.

    Attributes:
        title: what is drawn.
        parts: what solid and dashed lines are.
        svg: the drawing.
        box: left, top, right, bottom of the axes in the drawing's units.
        steps: first and last step at the left and right end.
        series: the values, to be read off.
    """

    title: str
    parts: list[str]
    svg: str
    box: list[float]
    steps: list[float]
    series: list[Series]


class Drawings(NamedTuple):
    """All drawings of a report.

    Attributes:
        results: score → its values with intervals; empty with fewer than two rows to compare.
        training: the training's panels.
        ablations: one for each part of the ablation, empty without values.
    """

    results: dict[str, str]
    training: list[Panel]
    ablations: list[str]


def draw(report: Report) -> Drawings:
    """Draw everything that the record has to draw."""
    return Drawings(
        draw_results(report),
        draw_training(report.training),
        [draw_ablation(part, report.scores, f"a{index}") for index, part in enumerate(report.ablations)],
    )


def draw_results(report: Report) -> dict[str, str]:
    """A dot and an interval for each system, of each score that ranks systems."""
    drawings: dict[str, str] = {}
    for score in quality_and_description(report)[0]:
        rows = estimates(report, score)
        if len(rows) > 1:
            drawings[score] = _draw_estimates(rows, f"r{len(drawings)}")
    return drawings


def estimates(report: Report, score: str) -> list[Estimate]:
    """The rows that are drawn: means over seeds, then systems on their own. Baselines only if there is nothing else."""
    rows: list[tuple[str, float, float, float, list[float]]] = []
    for group in report.seeds:
        spread = group.spread[score]
        runs = [system.values[score].value for system in report.systems if system.name in group.names]
        rows.append((group.label, spread["mean"], spread["low"], spread["high"], list(filter(is_number, runs))))
    grouped = {name for group in report.seeds for name in group.names}
    alone = [system for system in report.systems if system.name not in grouped and not system.is_baseline]
    for system in alone or ([] if rows else report.systems):
        rows.append((system.label, *system.values[score][:3], []))
    return [Estimate(*row) for row in rows if is_number(row[1])]


def _draw_estimates(rows: Sequence[Estimate], name: str) -> str:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(3.6, 0.4 + 0.2 * len(rows))
        ax = figure.subplots()
        ax.axvline(rows[0].value, color=_LINE, linewidth=0.8, linestyle="--")
        for place, row in enumerate(rows):
            if is_number(row.low) and is_number(row.high):
                ax.plot([row.low, row.high], [place, place], color=_colour(0), linewidth=1.4, solid_capstyle="round")
            ax.scatter(row.runs, [place] * len(row.runs), s=7, color=_INK, alpha=0.55, linewidths=0, zorder=3)
            ax.scatter([row.value], [place], s=22, color=_colour(0), linewidths=0, zorder=4)
        ax.set_yticks(range(len(rows)))
        ax.set_yticklabels([_shortened(row.label) for row in rows], parse_math=False)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        _round_ticks(ax, "x")
        ax.grid(visible=False, axis="y")
        ax.margins(x=0.06)
        ax.spines["left"].set_visible(False)
        figure.set_layout_engine("constrained")
        return _markup(figure, name)


def _shortened(label: str) -> str:
    plain = _drawable(label)
    return plain if len(plain) <= LABEL else plain[: LABEL - 1] + "…"


def _round_ticks(ax: Axes, axis: Literal["x", "y"], *, whole: bool = False) -> None:
    """Few ticks, at multiples of 1, 2 or 5 times a power of ten, each written in full."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = ax.xaxis if axis == "x" else ax.yaxis
    drawn.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=whole))
    drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))


def run_groups(logs: Sequence[TrainingLog]) -> list[tuple[str, list[TrainingLog]]]:
    """What is drawn in one colour: the trainings of a group, or one on its own."""
    groups: dict[tuple[str, str], list[TrainingLog]] = {}
    for index, log in enumerate(logs):
        groups.setdefault(("group", log.group) if log.group else (str(index), log.label), []).append(log)
    return [(label, members) for (_, label), members in groups.items()]


def draw_training(logs: Sequence[TrainingLog]) -> list[Panel]:
    """Losses, their terms, matched n-grams, learning rate and speed over the steps, all runs in each.

    Joint losses of different objectives are different quantities, so each objective has a panel of its own, behind all
    others. An objective of one term has none: the term has one.
    """
    panels: list[Panel] = []
    groups, objectives = run_groups(logs), list(dict.fromkeys(log.objective for log in logs))
    joint, *subjects = _subjects(logs)
    terms = {name for log in logs for name in log.curves}
    drawn = [(joint, logs)] if len(objectives) == 1 else []
    drawn += [(subject, logs) for subject in subjects]
    for objective in objectives if len(objectives) > 1 else []:
        if objective not in terms:
            name = f"joint loss of {objective}" if objective else joint[0]
            drawn.append(((name, joint[1]), [log for log in logs if log.objective == objective]))
    for (title, parts), of in drawn:
        series = [
            curve
            for index, (_, members) in enumerate(groups)
            for curve in _series(index, [log for log in members if any(log is other for other in of)], parts)
        ]
        if series:
            panels.append(_panel(title, series, f"t{len(panels)}"))
    return panels


def draw_ablation(part: Ablation, scores: Mapping[str, Score], name: str) -> str:
    """What each row adds to the first: a dot for each score, a ring for the paper's; nothing without scores.

    Differences, because absolute scores are far apart where the paper had other data.
    """
    columns = {True: [row.here for row in part.rows], False: [row.paper for row in part.rows]}
    gains = {
        score: {filled: gains_of([row[score] for row in rows]) for filled, rows in columns.items()}
        for score in part.scores
    }
    shown = [score for score, points in gains.items() if any(points.values())][:SHOWN]
    if not shown:
        return ""
    import matplotlib

    labels = [_drawable(row.label) for row in part.rows]
    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(5.0, 0.5 + 0.19 * len(labels))
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for score, ax in zip(shown, axes, strict=True):
            _draw_gains(ax, gains[score], f"{scores[score].label}, added", len(labels))
        axes[0].set_yticks(range(len(labels)))
        axes[0].set_yticklabels(labels, parse_math=False)
        figure.set_layout_engine("constrained")
        return _markup(figure, name)


def gains_of(values: Sequence[float | None]) -> list[tuple[float, int]]:
    """Difference to the first value, and the row, of every other value that is there.

    >>> gains_of([40.0, 40.5, None, 39.0])
    [(0.5, 1), (-1.0, 3)]
    """
    if not values or values[0] is None:
        return []
    return [(value - values[0], row) for row, value in enumerate(values) if row and value is not None]


def _draw_gains(ax: Axes, gains: Mapping[bool, Sequence[tuple[float, int]]], title: str, rows: int) -> None:
    for filled, points in gains.items():
        ax.scatter(
            [value for value, _ in points],
            [row for _, row in points],
            s=16,
            linewidths=1.1,
            zorder=3,
            edgecolors=_colour(0),
            facecolors=_colour(0) if filled else "none",
        )
    ax.axvline(0, color=_INK, linewidth=0.8)
    ax.set_title(_drawable(title), fontsize=8, parse_math=False)
    ax.set_ylim(rows - 0.5, -0.5)
    _round_ticks(ax, "x")
    ax.margins(x=0.15)
    ax.spines["left"].set_visible(False)


def _subjects(logs: Sequence[TrainingLog]) -> Iterator[tuple[str, dict[str, str]]]:
    """What is drawn: a title, and the curves' names with what they are called. The second name is dashed."""
    names = list(dict.fromkeys(name for log in logs for name in log.curves))
    judged = [name.removeprefix("eval_") for name in names if name.startswith("eval_")]
    terms = [name for name in names if _is_term(name) and not name.startswith("eval_")] + judged
    for term in ["loss", *dict.fromkeys(term for term in terms if term != "loss" and term not in _CLOCKS)]:
        yield ("joint loss" if term == "loss" else term), {term: "training", f"eval_{term}": "validation"}
    lengths = {int(match[1]) for name in names if (match := re.fullmatch(r"(?:matched|placed)/(\d+)", name))}
    for n in sorted(lengths):
        yield f"{n}-grams matched", {f"matched/{n}": "anywhere", f"placed/{n}": "in their place"}
    for name in names:
        if name.startswith("weight/"):
            yield f"weight of {name.removeprefix('weight/')}", {name: ""}
    yield "learning rate", {"learning_rate": ""}
    yield "documents per second", {"docs_per_second": ""}


def _is_term(name: str) -> bool:
    """Whether a curve is a term of an objective; one from a plugin that is not here is known by its parentheses."""
    return bool(_TERM.fullmatch(name)) or name.partition(":")[0] in OBJECTIVES


def _series(run: int, logs: Sequence[TrainingLog], parts: Mapping[str, str]) -> Iterator[Series]:
    for index, (name, part) in enumerate(parts.items()):
        runs = [dict(log.curves[name]) for log in logs if name in log.curves]
        steps = [step for step in runs[0] if all(step in values for values in runs)] if runs else []
        points = _thin([(step, [values[step] for values in runs]) for step in steps])
        if points:
            mean = [float(f"{sum(values) / len(values):.4g}") for _, values in points]
            band = [[pick(values) for _, values in points] for pick in (min, max)] if len(runs) > 1 else [[], []]
            yield Series(run, part, index == 1, [step for step, _ in points], mean, *band)


def _thin(points: Sequence[tuple[float, list[float]]]) -> list[tuple[float, list[float]]]:
    stride = -(-len(points) // POINTS)
    return [*points[:: stride or 1], *(points[-1:] if stride > 1 and (len(points) - 1) % stride else [])]


def _panel(title: str, series: list[Series], name: str) -> Panel:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(4.0, 2.3)
        ax = figure.add_axes((0.125, 0.12, 0.855, 0.84))
        for curve in series:
            _draw(ax, curve)
        _round_ticks(ax, "x", whole=True)
        _round_ticks(ax, "y")
        ax.grid(visible=False, axis="x")
        ax.margins(x=0.01)
        low, high = ax.get_xlim()
        width, height = (72 * side for side in figure.get_size_inches())
        box = [0.125 * width, (1 - 0.96) * height, 0.98 * width, (1 - 0.12) * height]
        parts = list(dict.fromkeys(curve.part for curve in series if curve.part))
        return Panel(title, parts, _markup(figure, name), [round(side, 1) for side in box], [low, high], series)


def _draw(ax: Axes, curve: Series) -> None:
    style = ":" if curve.run >= COLOURS else "--" if curve.dashed else "-"
    if len(curve.x) > 1 and curve.low:
        band = ax.fill_between(curve.x, curve.low, curve.high, color=_colour(curve.run), alpha=0.18, linewidth=0)
        band.set_gid(f"run-{curve.run}-band")
    (line,) = ax.plot(curve.x, curve.y, style, color=_colour(curve.run))
    # A few validations stand out; many would be a ribbon.
    if len(curve.x) == 1 or (curve.dashed and len(curve.x) <= 30):
        line.set(marker="o", markersize=2.6, markeredgewidth=0)
    line.set_gid(f"run-{curve.run}-{curve.part}")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _colour(run: int) -> str:
    return f"#0001{run % COLOURS:02d}"


def _drawable(text: object) -> str:
    """Text without what XML cannot hold."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def _markup(figure: Figure, name: str) -> str:
    """The drawing as an element of a page: no metadata, no style of its own, names that no other drawing has."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw it
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(out.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tail = None
        element.text = element.text if element.text and element.text.strip() else None
        _make_local(element, name)
    for side in ("width", "height"):
        root.attrib.pop(side, None)
    root.set("aria-hidden", "true")
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    return ElementTree.tostring(root, encoding="unicode")


def _make_local(element: ElementTree.Element, name: str) -> None:
    own = element.attrib.pop("id", None)
    if own is not None and (run := re.match(r"run-(\d+)-", own)):
        element.set("data-run", run[1])
    elif own is not None and element.tag.rpartition("}")[2] != "g":
        element.set("id", f"{name}-{own}")
    for key, value in element.attrib.items():
        if key == f"{{{_LINK}}}href":
            element.set(key, f"#{name}-{value.removeprefix('#')}")
        elif key in ("style", "clip-path"):
            value = re.sub(r"#0000\d\d|#0001\d\d", lambda match: _PLACES[match[0]], value)
            value = re.sub(r"url\(#(\w+)\)", rf"url(#{name}-\1)", value)
            value = re.sub(r"font(-family)?: [^;]*sans[^;]*", _without_family, value)
            element.set(key, value)
        elif key == "d":
            element.set(key, re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.1f}", value))


def _without_family(match: re.Match[str]) -> str:
    """The size of a font, and the page's own family."""
    size = re.search(r"[\d.]+px", match[0])
    return f"font-size: {size[0]}" if size else "font-family: inherit"
