"""results, training logs and ablations of a report → drawings whose colours follow the page's theme."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, NamedTuple

from ngramloss.loss.terms.registry import OBJECTIVES
from ngramloss.metrics.registry import Score
from ngramloss.output.console import is_number
from ngramloss.output.tabular import mark
from ngramloss.report.drawing import COLOURS, MUTED, SETTINGS, colour, drawable, markup, new_figure, round_ticks
from ngramloss.report.forest import Estimate, Forest, draw_forest
from ngramloss.report.record import Ablation, Report, ReportSystem, TrainingCurves
from ngramloss.report.tables import quality_and_description
from ngramloss.scoring.results import Seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 4  # Scores of an ablation that are drawn, at most
POINTS = 300  # Points of a curve, at most: every k-th and the last

_TERM = re.compile(r"[a-z_]+\(.*\)(:\w+)?")
_CLOCKS = ("runtime", "generation_runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Series(NamedTuple):
    """One curve: of one run, or the mean of a group of runs with its lowest and highest values."""

    run: int  # The place of the run or group in ``run_groups``
    part: str
    dashed: bool
    x: list[float]
    y: list[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Panel(NamedTuple):
    """One drawing of the training."""

    title: str  # what is drawn
    parts: list[str]  # what solid and dashed lines are
    svg: str  # the drawing
    box: list[float]  # left, top, right, bottom of the axes in the drawing's units
    steps: list[float]  # first and last step at the left and right end
    series: list[Series]  # the values, to be read off


class Drawings(NamedTuple):
    """All drawings of a report."""

    results: dict[str, Forest]  # score → its forest plot; empty with fewer than two rows to compare
    training: list[Panel]  # the training's panels
    ablations: list[str]  # one for each part of the ablation, empty without values


def draw(report: Report) -> Drawings:
    """Draw everything that the record has to draw."""
    results, training = draw_results(report), draw_training(report.training)
    parts = enumerate(report.ablations)
    return Drawings(results, training, [draw_ablation(part, report.scores, f"a{index}") for index, part in parts])


def draw_results(report: Report) -> dict[str, Forest]:
    """Each score that ranks systems → its forest plot."""
    drawings: dict[str, Forest] = {}
    for name in quality_and_description(report)[0]:
        rows = estimates(report, name)
        if len(rows) > 1:
            score = report.scores[name]
            drawings[name] = draw_forest(rows, str(len(drawings)), score=score.label, decimals=score.decimals)
    return drawings


def estimates(report: Report, score: str) -> list[Estimate]:
    """The rows that are drawn: means over seeds, or systems; baselines only if nothing else can be compared."""
    rows = [_mean(report, group, score) for group in report.seeds]
    if not rows:
        every = [_system(system, score, is_first=place == 0) for place, system in enumerate(report.systems)]
        pairs = zip(every, (system.is_baseline for system in report.systems), strict=True)
        near = [row for row, is_far in pairs if row.is_first or not is_far]
        rows = near if len(near) > 1 else every
    return [row for row in rows if is_number(row.value)]


def _mean(report: Report, group: Seeds, score: str) -> Estimate:
    spread = group.spread[score]
    runs = [system.values[score].value for system in report.systems if system.name in group.names]
    untested = dict.fromkeys(("difference", "low", "high", "p_holm"), nan)
    test = {score: untested, **group.against_first}[score]
    return Estimate(
        group.label,
        *(spread["mean"], spread["low"], spread["high"]),
        *(test["difference"], test["low"], test["high"]),
        mark=mark(test["p_holm"]),
        runs=list(filter(is_number, runs)) if len(runs) > 1 else [],
        is_first=not group.against_first,
    )


def _system(system: ReportSystem, score: str, *, is_first: bool) -> Estimate:
    """A system with its interval over documents, and the paired one of its difference to the first."""
    value = system.values[score]
    ends = (value.difference, value.difference_low, value.difference_high)
    difference, low, high = (nan if end is None else end for end in ends)
    return Estimate(system.label, *value[:3], difference, low, high, mark=mark(value.p_holm), is_first=is_first)


def run_groups(logs: Sequence[TrainingCurves]) -> list[tuple[str, list[TrainingCurves]]]:
    """What is drawn in one colour: the trainings of a group, or one on its own."""
    groups: dict[tuple[str, str], list[TrainingCurves]] = {}
    for index, log in enumerate(logs):
        groups.setdefault(("group", log.group) if log.group else (str(index), log.label), []).append(log)
    return [(label, members) for (_, label), members in groups.items()]


def draw_training(logs: Sequence[TrainingCurves], name: str = "t") -> list[Panel]:
    """All logged curves over the steps. Joint losses of objectives are different quantities: each has a panel, last."""
    panels: list[Panel] = []
    groups, objectives = run_groups(logs), list(dict.fromkeys(log.objective for log in logs))
    joint, *subjects = _subjects(logs)
    terms = {term for log in logs for term in log.curves}
    drawn = [(joint, logs)] if len(objectives) == 1 else []
    drawn += [(subject, logs) for subject in subjects]
    for objective in objectives if len(objectives) > 1 else []:
        if objective not in terms:
            title = f"joint loss of {objective}" if objective else joint[0]
            drawn.append(((title, joint[1]), [log for log in logs if log.objective == objective]))
    for (title, parts), of in drawn:
        series = list[Series]()
        for index, (_, members) in enumerate(groups):
            series += _series(index, [log for log in members if any(log is other for other in of)], parts)
        if series:
            panels.append(_panel(title, series, f"{name}{len(panels)}"))
    return panels


def draw_ablation(part: Ablation, scores: Mapping[str, Score], name: str) -> str:
    """What each row adds to the first, here (dots) and in the paper (rings), for each score; nothing without scores."""
    columns = {True: [row.here for row in part.rows], False: [row.paper for row in part.rows]}
    gains = {
        score: {here: gains_of([row[score] for row in rows]) for here, rows in columns.items()} for score in part.scores
    }
    shown = [score for score, points in gains.items() if any(points.values())][:SHOWN]
    if not shown:
        return ""
    import matplotlib

    labels = [drawable(row.label) for row in part.rows]
    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(5.0, 0.5 + 0.19 * len(labels))
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for score, ax in zip(shown, axes, strict=True):
            _draw_gains(ax, gains[score], f"{scores[score].label}, added", len(labels))
        axes[0].set_yticks(range(len(labels)))
        axes[0].set_yticklabels(labels, parse_math=False)
        figure.set_layout_engine("constrained")
        return markup(figure, name)


def gains_of(values: Sequence[float | None]) -> list[tuple[float, int]]:
    """Difference to the first value, and the row, of every other value that is there."""
    if not values or values[0] is None:
        return []
    return [(value - values[0], row) for row, value in enumerate(values) if row and value is not None]


def _draw_gains(ax: Axes, gains: Mapping[bool, Sequence[tuple[float, int]]], title: str, rows: int) -> None:
    for filled, points in gains.items():
        values, places = [value for value, _ in points], [row for _, row in points]
        face = colour(0) if filled else "none"
        ax.scatter(values, places, s=16, linewidths=1.1, zorder=3, edgecolors=colour(0), facecolors=face)
    ax.axvline(0, color=MUTED, linewidth=0.8)
    ax.set_title(drawable(title), fontsize=8, parse_math=False)
    ax.set_ylim(rows - 0.5, -0.5)
    round_ticks(ax, "x")
    ax.margins(x=0.15)
    ax.spines["left"].set_visible(False)


def _subjects(logs: Sequence[TrainingCurves]) -> Iterator[tuple[str, dict[str, str]]]:
    """What is drawn: a title, and the curves' names with what they are called. The second name is dashed."""
    names = list(dict.fromkeys(name for log in logs for name in log.curves))
    judged = [name.removeprefix("eval_") for name in names if name.startswith("eval_")]
    # A term of a plugin that is not here is known by its parentheses.
    plain = [name for name in names if not name.startswith("eval_")]
    terms = [name for name in plain if _TERM.fullmatch(name) or name.partition(":")[0] in OBJECTIVES] + judged
    for term in ["loss", *dict.fromkeys(term for term in terms if term != "loss" and term not in _CLOCKS)]:
        yield ("joint loss" if term == "loss" else term), {term: "training", f"eval_{term}": "validation"}
    lengths = {int(match[1]) for name in names if (match := re.fullmatch(r"(?:matched|placed)/(\d+)", name))}
    for n in sorted(lengths):
        yield f"{n}-grams matched", {f"matched/{n}": "anywhere", f"placed/{n}": "in their place"}
    for name in names:
        if name.startswith("weight/"):
            yield f"weight of {name.removeprefix('weight/')}", {name: ""}
    yield "learning rate", {"learning_rate": ""}


def _series(run: int, logs: Sequence[TrainingCurves], parts: Mapping[str, str]) -> Iterator[Series]:
    for index, (name, part) in enumerate(parts.items()):
        runs = [dict(log.curves[name]) for log in logs if name in log.curves]
        steps = [step for step in runs[0] if all(step in values for values in runs)] if runs else []
        stride = -(-len(steps) // POINTS) or 1
        thin = [*steps[::stride], *(steps[-1:] if (len(steps) - 1) % stride else [])]
        if points := [(step, [values[step] for values in runs]) for step in thin]:
            mean = [float(f"{sum(values) / len(values):.4g}") for _, values in points]
            band = [[pick(values) for _, values in points] for pick in (min, max)] if len(runs) > 1 else [[], []]
            yield Series(run, part, index == 1, [step for step, _ in points], mean, *band)


def _panel(title: str, series: list[Series], name: str) -> Panel:
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(4.0, 2.3)
        ax = figure.add_axes((0.125, 0.12, 0.855, 0.84))
        for curve in series:
            _draw(ax, curve)
        round_ticks(ax, "x", whole=True)
        round_ticks(ax, "y")
        ax.grid(visible=False, axis="x")
        ax.margins(x=0.01)
        low, high = ax.get_xlim()
        width, height = (72 * side for side in figure.get_size_inches())
        box = [0.125 * width, (1 - 0.96) * height, 0.98 * width, (1 - 0.12) * height]
        parts = list(dict.fromkeys(curve.part for curve in series if curve.part))
        return Panel(title, parts, markup(figure, name), [round(side, 1) for side in box], [low, high], series)


def _draw(ax: Axes, curve: Series) -> None:
    style = ":" if curve.run >= COLOURS else "--" if curve.dashed else "-"
    if len(curve.x) > 1 and curve.low:
        band = ax.fill_between(curve.x, curve.low, curve.high, color=colour(curve.run), alpha=0.18, linewidth=0)
        band.set_gid(f"run-{curve.run}-band")
    (line,) = ax.plot(curve.x, curve.y, style, color=colour(curve.run))
    # A few validations stand out; many would be a ribbon.
    if len(curve.x) == 1 or (curve.dashed and len(curve.x) <= 30):
        line.set(marker="o", markersize=2.6, markeredgewidth=0)
    line.set_gid(f"run-{curve.run}-{curve.part}")
