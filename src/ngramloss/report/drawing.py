"""a drawing of matplotlib → an SVG element of a page, whose colours follow the page's theme."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 7  # Series colours that the style sheet has; an eighth run takes the first again, dotted

_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
INK, MUTED, LINE = "#000003", "#000001", "#000002"
_SERIES = {f"#0001{run:02d}": f"var(--series-{run})" for run in range(COLOURS)}
_PLACES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", **_SERIES}
"""Colours that are drawn with, and what stands for them in the page."""
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ngramloss",
    "font.size": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), LINE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("axes.grid", "path.simplify"), True),
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty drawing; width and height are inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def colour(run: int) -> str:
    """The colour of a series."""
    return f"#0001{run % COLOURS:02d}"


def drawable(text: object) -> str:
    """Text without what XML cannot hold."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def markup(figure: Figure, name: str, title: str = "", description: str = "") -> str:
    """The drawing as an element of a page: no metadata, no style, names of its own. With a title it is read out."""
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
    if title:
        root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
        for place, (tag, said) in enumerate({"title": title, "desc": description}.items()):
            element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
            element.text = drawable(said)
            root.insert(place, element)
    else:
        root.set("aria-hidden", "true")
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    return ElementTree.tostring(root, encoding="unicode")


def round_ticks(ax: Axes, axis: Literal["x", "y"], *, whole: bool = False) -> None:
    """Few ticks, at multiples of 1, 2 or 5 times a power of ten, each written in full."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = ax.xaxis if axis == "x" else ax.yaxis
    drawn.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole))
    drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))


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
    size = re.search(r"[\d.]+px", match[0])
    return f"font-size: {size[0]}" if size else "font-family: inherit"
