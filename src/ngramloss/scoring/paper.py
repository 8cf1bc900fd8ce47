"""nothing → the scores and rows of Zhu et al., Tables 2 and 3, as printed."""

from __future__ import annotations

from typing import NamedTuple

SCORES = ("rouge1", "rouge2", "rougeL", "bertscore", "wmd", "factcc", "summac_conv")


class PrintedRow(NamedTuple):
    """A system of Table 2. ``objective`` is ours, ``system`` a name of ``ngramloss list systems``; None is a dash."""

    label: str
    objective: str
    scores: tuple[float | None, ...]
    docs_per_second: float | None = None
    ratio: float | None = None
    system: str = ""


_OURS = {
    "BART-base": "ce",
    "+ BoN": "ce + bag(2)",
    "+ P-P2": "ce + precision(2)",
    "+ 2-gram rewards": "ce + rewards(2)",
    "+ 2-gram matches": "ce + matches(2)",
    "+ (2,3,4)-gram rewards": "ce + rewards(2,3,4)",
    "+ (2,3,4)-gram matches": "ce + matches(2,3,4)",
}
"""The last rows of Table 2 → their objectives."""


def _others(label: str, *scores: float, system: str = "") -> PrintedRow:
    return PrintedRow(label, "", (*scores, *[None] * (len(SCORES) - len(scores))), system=system)


def _ours(*printed: tuple[float, ...]) -> list[PrintedRow]:
    """The rows of our objectives. Printed of each are its scores, its speed and the ratio to that of cross-entropy."""
    rows = zip(_OURS.items(), printed, strict=True)
    return [PrintedRow(label, objective, values[:-2], values[-2], values[-1]) for (label, objective), values in rows]


TABLE2 = {
    "cnn_dailymail": (
        _others("Lead-3", 40.34, 17.70, 36.57, 87.08, 4.5366, 99.83, 92.41),
        _others("Pointer + covg.", 39.53, 17.28, 36.38, system="pointer_generator"),
        _others("BertSumExtAbs", 42.13, 19.60, 39.18, 85.30, 4.6565, 5.60, 26.47, system="bertsum_abs"),
        _others("T5", 43.52, 21.55, 40.69),
        _others("ProphetNet", 44.20, 21.17, 41.30, 85.98, 4.3665, 13.04, 92.35, system="prophetnet"),
        _others("GSum", 45.95, 22.32, 42.48, system="gsum"),
        _others("SimCLS", 46.67, 22.15, 43.54, 88.44, 4.0585, 68.11, 89.17, system="simcls"),
        _others("FES", 46.91, 22.84, 43.47, system="fes"),
        _others("BART-large", 44.16, 21.28, 40.90, 87.98, 4.2653, 80.83, 87.44),
        *_ours(
            (43.26, 20.49, 40.40, 88.23, 4.3285, 78.18, 77.33, 23.45, 1.00),
            (43.27, 20.60, 40.40, 88.30, 4.3369, 77.14, 78.02, 21.48, 0.92),
            (42.63, 20.30, 39.72, 88.16, 4.3917, 78.89, 76.89, 19.91, 0.84),
            (43.46, 20.63, 40.62, 88.29, 4.3123, 78.21, 79.04, 18.97, 0.81),
            (43.33, 20.56, 40.56, 88.28, 4.3189, 76.92, 78.25, 19.50, 0.83),
            (43.65, 20.81, 40.88, 88.34, 4.2959, 78.66, 80.48, 14.81, 0.63),
            (43.65, 20.81, 40.90, 88.35, 4.2951, 78.36, 80.21, 16.53, 0.70),
        ),
    ),
    "xsum": (
        _others("Lead-3", 16.30, 1.60, 11.95, 85.61, 6.1553, 99.97, 88.95),
        _others("Pointer + covg.", 28.10, 8.02, 21.72, system="pointer_generator"),
        _others("BertSumExtAbs", 38.81, 16.50, 31.27, 87.31, 5.0256, 54.05, 26.98, system="bertsum_abs"),
        _others("GSum", 45.40, 21.89, 36.67, system="gsum"),
        _others("SimCLS", 47.61, 24.57, 39.44, 91.67, 4.1744, 48.52, 25.02, system="simcls"),
        _others("FES", 47.77, 24.95, 39.66, system="fes"),
        _others("BART-large", 45.14, 22.27, 37.25, 91.62, 4.1971, 47.89, 30.42),
        *_ours(
            (41.63, 18.75, 33.73, 91.53, 4.5206, 48.76, 24.33, 29.00, 1.00),
            (41.90, 19.00, 34.12, 91.56, 4.5074, 49.07, 24.57, 27.13, 0.94),
            (40.95, 18.31, 33.03, 91.44, 4.5213, 47.10, 24.24, 26.08, 0.90),
            (41.89, 18.97, 34.04, 91.58, 4.5147, 48.56, 24.49, 25.41, 0.88),
            (41.93, 19.00, 34.18, 91.59, 4.5228, 48.52, 24.55, 26.23, 0.90),
            (41.91, 19.01, 34.08, 91.57, 4.5205, 48.74, 24.57, 22.14, 0.76),
            (41.77, 18.97, 34.03, 91.56, 4.5309, 48.74, 24.67, 23.90, 0.82),
        ),
    ),
}
"""Data set → rows, in the paper's order."""

_DATA = {"cnn_dailymail": "CNN/DailyMail", "xsum": "XSum"}

_BASE = (43.26, 20.49, 40.40)

# CNN/DailyMail: label, objective, R-1, R-2, R-L.
TABLE3 = {
    "N-gram rewards": (
        ("BART-base", "ce", _BASE),
        ("+ 2-gram", "ce + rewards(2)", (43.46, 20.63, 40.62)),
        ("+ 3-gram", "ce + rewards(3)", (43.38, 20.60, 40.57)),
        ("+ 4-gram", "ce + rewards(4)", (43.40, 20.69, 40.61)),
        ("+ 5-gram", "ce + rewards(5)", (43.26, 20.47, 40.45)),
        ("+ 2,3-gram", "ce + rewards(2,3)", (43.63, 20.76, 40.84)),
        ("+ 2,3,4-gram", "ce + rewards(2,3,4)", (43.65, 20.81, 40.88)),
        ("+ 2,3,4,5-gram", "ce + rewards(2,3,4,5)", (43.43, 20.64, 40.65)),
    ),
    "N-gram matches": (
        ("BART-base", "ce", _BASE),
        ("+ 1-gram", "ce + matches(1)", (43.24, 20.52, 40.44)),
        ("+ 2-gram", "ce + matches(2)", (43.33, 20.56, 40.56)),
        ("+ 3-gram", "ce + matches(3)", (43.34, 20.52, 40.50)),
        ("+ 4-gram", "ce + matches(4)", (43.36, 20.58, 40.52)),
        ("+ 5-gram", "ce + matches(5)", (43.34, 20.55, 40.54)),
        ("+ 1,2-gram", "ce + matches(1,2)", (43.45, 20.64, 40.63)),
        ("+ 1,2,3-gram", "ce + matches(1,2,3)", (43.54, 20.76, 40.79)),
        ("+ 1,2,3,4-gram", "ce + matches(1,2,3,4)", (43.58, 20.78, 40.85)),
        ("+ 1,2,3,4,5-gram", "ce + matches(1,2,3,4,5)", (43.50, 20.73, 40.77)),
        ("+ 2,3-gram", "ce + matches(2,3)", (43.29, 20.58, 40.52)),
        ("+ 2,3,4-gram", "ce + matches(2,3,4)", (43.65, 20.81, 40.90)),
        ("+ 2,3,4,5-gram", "ce + matches(2,3,4,5)", (43.53, 20.71, 40.76)),
    ),
}
"""Part of the table → rows of label, objective and (R-1, R-2, R-L)."""


def title(data: str, *, systems: bool = False) -> str:
    """What is above the paper's scores on a data set; ``systems``: whether other models than BART-base are among them.

    >>> title("xsum"), title("xsum", systems=True)
    ('the paper, BART-base on XSum', 'the paper, on XSum')
    """
    return f"the paper, {'' if systems else 'BART-base '}on {_DATA[data]}"


def score_names(data: str) -> tuple[str, ...]:
    """Our names of the columns. The paper's R-L on CNN/DailyMail is Lsum in rouge-score: see docs/results.md.

    >>> score_names("xsum")[2], score_names("cnn_dailymail")[2]
    ('rougeL', 'rougeLsum')
    """
    return tuple("rougeLsum" if name == "rougeL" and data == "cnn_dailymail" else name for name in SCORES)


def objectives(table: str) -> list[str]:
    """The objectives of a table, in its order, cross-entropy first."""
    if table == "table3":
        return list(dict.fromkeys(objective for rows in TABLE3.values() for _, objective, _ in rows))
    return [row.objective for row in TABLE2["xsum"] if row.objective]
