"""names and numbers → a picture with bars, ngramloss in another colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ngramloss.errors import UserError
from ngramloss.storage.files import writing


class Panel(NamedTuple):
    """One set of bars, from top to bottom."""

    title: str
    axis: str
    """What the numbers are."""
    bars: Sequence[tuple[str, float, str]]
    """What was measured, its number, and the number as it is written beside the bar."""


def raise_unless_drawable(path: Path | None) -> None:
    """Raise before the work begins if matplotlib is missing or cannot write such a file."""
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise UserError(f"cannot draw {path}: its name must end with one of {', '.join(f'.{kind}' for kind in known)}.")


def draw(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw the panels side by side. Names that contain ``ngramloss`` have another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tallest = max(len(panel.bars) for panel in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), min(6, 1.5 + 0.45 * tallest)), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        names, numbers, labels = zip(*reversed(panel.bars), strict=True) if panel.bars else ((), (), ())
        colours = ["#c8541f" if "ngramloss" in name else "#8a8f98" for name in names]
        bars = axis.barh(names, numbers, color=colours)
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.axis)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize=8)
        axis.margins(x=0.15)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=110)
