"""a sentence pair and an objective → an SVG of what one step of training does to each word."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ngramloss.loss.explaining.compare_gradients import Push

STEP, LEFT, HEIGHT, LABELS = 54, 60, 120, 40
"""Pixels: the width of a word, of the scale's numbers, the height of the bars and that of the words below them."""


def bars(rows: Sequence[Push], objective: int, *, title: str, most: float | None = None) -> str:
    """A bar for each word: up where its logit rises. Colours come from the page, so that it can be dark.

    Args:
        rows: what :func:`pushes` returns.
        objective: which of its objectives.
        title: what a reader without eyes gets.
        most: the end of the scale; by default the largest value.
    """
    values = [push.by[objective] for push in rows]
    end = most or max(map(abs, values)) or 1.0
    below = HEIGHT * _share_below(values, end)
    zero, width = HEIGHT - below, LEFT + STEP * len(rows)
    parts = [f'<line class="zero" x1="{LEFT}" x2="{width}" y1="{zero:.1f}" y2="{zero:.1f}"/>']
    for value in (end, 0.0, -end):
        y = zero - value / end * (HEIGHT - below if below < HEIGHT / 2 else below)
        if 0 <= y <= HEIGHT:
            parts.append(f'<text class="scale" x="{LEFT - 6}" y="{y + 4:.1f}">{_number(value)}</text>')
    scale = max(zero, below) / end
    for place, (push, value) in enumerate(zip(rows, values, strict=True)):
        x, height = LEFT + STEP * place + 9, abs(value) * scale
        top = zero - height if value > 0 else zero
        parts.append(
            f'<rect class="{push.role}" x="{x}" y="{top:.1f}" width="{STEP - 18}" height="{max(height, 0.5):.1f}"/>'
        )
        middle, line = LEFT + STEP * (place + 0.5), HEIGHT + (34 if push.role == "predicted" else 18)
        parts.append(f'<text class="{push.role}" x="{middle:.1f}" y="{line}">{escape(push.word)}</text>')
    box = f"0 -6 {width} {HEIGHT + LABELS + 6}"
    return (
        f'<div class="pushes" tabindex="0" data-search-exclude><svg viewBox="{box}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg></div>'
    )


def _share_below(values: Sequence[float], end: float) -> float:
    """How much of the height is for bars that point down."""
    up, down = max(0.0, *values), -min(0.0, *values)
    up, down = (max(up, end), down) if up >= down else (up, max(down, end))
    return down / (up + down)


def _number(value: float) -> str:
    sign = "+" if value > 0 else "−" if value < 0 else ""
    return f"{sign}{abs(value):.2g}"
