"""rows of training logs, and ablation tables → drawings whose colours follow the page's theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from ngramloss.report.blocks import is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 7
"""Series colours that the style sheet has; an eighth run takes the first again, dotted."""
SHOWN = 4
"""Figures of an ablation that are drawn, at most."""
POINTS = 300
"""Points of a curve, at most: every k-th and the last."""

_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_INK, _LINE = "#000001", "#000002"
_SERIES = {f"#0001{run:02d}": f"var(--series-{run})" for run in range(COLOURS)}
_PLACES = {_INK: "var(--muted)", _LINE: "var(--line)", **_SERIES}
"""Colours that are drawn with, and what stands for them in the page."""
_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "ngramloss", "font.size": 8, "text.color": _INK, "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "axes.grid": True, "grid.color": _LINE, "grid.linewidth": 0.5, "xtick.color": _LINE, "ytick.color": _LINE,
    "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "xtick.major.size": 0, "ytick.major.size": 0,
    "lines.linewidth": 1.4, "path.simplify": True, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
_TERM = re.compile(r"[a-z_]+\(.*\)|ce")
_CLOCKS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Series(NamedTuple):
    """One curve of one run."""

    run: int
    part: str
    dashed: bool
    x: list[float]
    y: list[float]


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


def training(runs: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Losses, their terms, matched n-grams, learning rate and speed over the steps, all runs in each."""
    panels: list[Panel] = []
    for title, parts in _subjects(runs):
        series = [curve for index, run in enumerate(runs) for curve in _series(index, run.get("rows") or [], parts)]
        if series:
            panels.append(_panel(title, series, f"t{len(panels)}"))
    return panels


def ablation(table: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """What each row adds to the first: a dot for each figure, a ring for the paper's; nothing without figures.

    Differences, because levels lie far apart where the paper had other data.
    """
    rows = table.get("rows") or []
    names = ablation_figures(table, figures)
    drawn = [metric for metric in names if metric != "rougeLsum" or "rougeL" not in names]   # the two are often one
    shown = [metric for metric in drawn if any(_gains(rows, kind, metric) for kind in _KINDS)][:SHOWN]
    if not shown:
        return ""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(5.0, 0.5 + 0.19 * len(rows))
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for column, (metric, ax) in enumerate(zip(shown, axes, strict=True)):
            for kind, face in _KINDS.items():
                points = _gains(rows, kind, metric)
                ax.scatter(
                    [value for value, _ in points], [at for _, at in points], s=16, linewidths=1.1, zorder=3,
                    edgecolors=_colour(0), facecolors=_colour(0) if face else "none",
                )  # fmt: skip
            ax.axvline(0, color=_INK, linewidth=0.8)
            ax.set_title(_drawable(f"{figures[metric].get('label', metric)}, added"), fontsize=8, parse_math=False)
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.locator_params(axis="x", nbins=3)
            ax.margins(x=0.15)
            ax.spines["left"].set_visible(False)
            if column == 0:
                ax.set_yticks(range(len(rows)))
                ax.set_yticklabels([_drawable(row.get("label", "")) for row in rows], parse_math=False)
        figure.set_layout_engine("constrained")
        return _markup(figure, name)


def ablation_figures(table: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The figures that the paper has too, R-Lsum beside its R-L; where it has none, all that a row has."""
    rows = table.get("rows") or []
    known = {kind: [name for name in figures if any(is_number(_of(row, kind, name)) for row in rows)]
             for kind in _KINDS}
    beside = [name for name in known["scores"] if name in known["paper"] or name == "rougeLsum"]
    return [name for name in figures if name in {*beside, *known["paper"]}] if known["paper"] else known["scores"]


_KINDS = {"scores": True, "paper": False}


def _gains(rows: Sequence[Mapping[str, Any]], kind: str, figure: str) -> list[tuple[float, int]]:
    """Difference to the first row, and the row's place, of every other row that has the figure."""
    base = _of(rows[0], kind, figure) if rows else None
    if not is_number(base):
        return []
    return [(value - base, at) for at, row in enumerate(rows) if at and is_number(value := _of(row, kind, figure))]


def _of(row: Mapping[str, Any], kind: str, figure: str) -> Any:
    return (row.get(kind) or {}).get(figure)


def _subjects(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    """What is drawn: a title, and the rows' names with what they are called. The second name is dashed."""
    names = list(dict.fromkeys(name for run in runs for row in run.get("rows") or [] for name in row))
    judged = [name.removeprefix("eval_") for name in names if name.startswith("eval_")]
    terms = [name for name in names if _TERM.fullmatch(name) and not name.startswith("eval_")] + judged
    for term in ["loss", *dict.fromkeys(term for term in terms if term != "loss" and term not in _CLOCKS)]:
        yield ("joint loss" if term == "loss" else term), {term: "training", f"eval_{term}": "validation"}
    lengths = {int(match[1]) for name in names if (match := re.fullmatch(r"(?:matched|placed)/(\d+)", name))}
    for n in sorted(lengths):
        yield f"{n}-grams matched", {f"matched/{n}": "anywhere", f"placed/{n}": "in their place"}
    yield "learning rate", {"learning_rate": ""}
    yield "documents per second", {"docs_per_second": ""}


def _series(run: int, rows: Sequence[Mapping[str, Any]], parts: Mapping[str, str]) -> Iterator[Series]:
    for index, (name, part) in enumerate(parts.items()):
        pairs = [(row.get("step"), row.get(name)) for row in rows]
        points = _thin([(step, value) for step, value in pairs if is_number(step) and is_number(value)])
        if points:
            yield Series(run, part, index == 1, [x for x, _ in points], [float(f"{y:.4g}") for _, y in points])


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = -(-len(points) // POINTS)
    return [*points[:: stride or 1], *(points[-1:] if stride > 1 and (len(points) - 1) % stride else [])]


def _panel(title: str, series: list[Series], name: str) -> Panel:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(4.0, 2.3)
        ax = figure.add_axes((0.125, 0.12, 0.855, 0.84))
        for curve in series:
            _draw(ax, curve)
        ax.locator_params(axis="both", nbins=5)
        ax.grid(visible=False, axis="x")
        ax.margins(x=0.01)
        low, high = ax.get_xlim()
        width, height = (72 * side for side in figure.get_size_inches())
        box = [0.125 * width, (1 - 0.96) * height, 0.98 * width, (1 - 0.12) * height]
        parts = list(dict.fromkeys(curve.part for curve in series if curve.part))
        return Panel(title, parts, _markup(figure, name), [round(side, 1) for side in box], [low, high], series)


def _draw(ax: Axes, curve: Series) -> None:
    style = ":" if curve.run >= COLOURS else "--" if curve.dashed else "-"
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
        warnings.filterwarnings("ignore", message="Glyph .* missing")   # the reader's fonts draw it
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
