"""aligned texts and metrics' names → every figure with its signature, intervals and tests; tables of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import significance
from ngramloss.checkpoints import write_whole
from ngramloss.metrics.bertscore import bertscore
from ngramloss.metrics.factcc import factcc
from ngramloss.metrics.overlap import bleu, chrf
from ngramloss.metrics.rouge import rouge
from ngramloss.metrics.scores import Absent, Pooled, Scores
from ngramloss.metrics.shape import shape
from ngramloss.metrics.summac import summac
from ngramloss.metrics.wmd import wmd
from ngramloss.significance import Figure
from ngramloss.systems import Aligned
from ngramloss.version import __version__

METRICS: dict[str, tuple[Callable[..., Scores], tuple[str, ...]]] = {
    "rouge": (rouge, ("references", "predictions")),
    "bleu": (bleu, ("references", "predictions")),
    "chrf": (chrf, ("references", "predictions")),
    "shape": (shape, ("predictions", "documents")),
    "bertscore": (bertscore, ("references", "predictions")),
    "wmd": (wmd, ("references", "predictions")),
    "summac": (summac, ("documents", "predictions")),
    "factcc": (factcc, ("documents", "predictions")),
}
"""Name → the metric, and the texts it takes in this order. ``documents`` may be None for ``shape`` alone."""


class Result(NamedTuple):
    """All figures of all systems.

    Attributes:
        names: of the systems, the first of which the others are compared with.
        figures: figure's name → one for each system.
        documents: for each system, figure's name → the figures of its documents.
        signatures: metric → what could change its figures.
        absent: metric → why it could not run.
        audit: for each system, what is odd about its texts.
    """

    names: list[str]
    figures: dict[str, list[Figure]]
    documents: list[dict[str, list[float]]]
    signatures: dict[str, str]
    absent: dict[str, str]
    audit: list[list[str]]


def scored(
    texts: Aligned, metrics: Sequence[str] = ("rouge",), *, options: Mapping[str, Mapping[str, Any]] | None = None,
    samples: int = significance.SAMPLES, shuffles: int = significance.SHUFFLES, seed: int = significance.SEED,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Score every system with every metric, and compare each with the first.

    Args:
        texts: references, documents and the systems' texts.
        metrics: names in :data:`METRICS`. One whose model or package is absent is told of in ``absent``.
        options: metric → its own options.
        samples: of the bootstrap.
        shuffles: of the randomisation.
        seed: of both.
        progress: called with what is done next.
    """
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"unknown metric {name!r}; choose from {', '.join(METRICS)}.")
    tell = progress or (lambda _: None)
    values: list[dict[str, Sequence[float] | Pooled]] = [{} for _ in texts.names]
    documents: list[dict[str, list[float]]] = [{} for _ in texts.names]
    signatures, absent = {}, {}
    for name in metrics:
        metric, takes = METRICS[name]
        given = {"references": texts.task.references, "documents": texts.task.documents}
        if "documents" in takes and given["documents"] is None and name != "shape":
            absent[name] = "needs the documents: give them with --documents."
            continue
        chosen, lacking = _options(metric, dict((options or {}).get(name, {})))
        if lacking:
            told = ", ".join(f"--set {name}.{option}=…" for option in lacking)
            absent[name] = f"needs {told}; docs/metrics.md says what to give."
            continue
        run = partial(metric, **chosen)
        for place, system in enumerate(texts.names):
            tell(f"{name} of {system}")
            try:
                found = run(*((given | {"predictions": texts.texts[place]})[text] for text in takes))
            except Absent as reason:
                absent[name] = str(reason)
                break
            documents[place] |= found.values
            values[place] |= {**found.values, **found.pooled}
            signatures[name] = f"{found.signature}|ngramloss:{__version__}"
    tell("intervals and tests")
    figures = significance.compared(values, samples=samples, shuffles=shuffles, seed=seed)
    return Result(texts.names, figures, documents, signatures, absent, [audit(those) for those in texts.texts])


def _options(metric: Callable[..., Scores], given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A metric's options with paths as paths, and those it needs and was not given."""
    known = {name: one for name, one in signature(metric).parameters.items() if one.kind is one.KEYWORD_ONLY}
    for name in given:
        if name not in known or name == "progress":
            there = ", ".join(one for one in known if one != "progress") or "none"
            raise ValueError(f"{metric.__name__} has no option {name!r}; it has {there}.")
    chosen = {name: Path(value) if "Path" in str(known[name].annotation) else value for name, value in given.items()}
    return chosen, [name for name, one in known.items() if one.default is one.empty and name not in given]


def audit(predictions: Sequence[str]) -> list[str]:
    """What is odd about a system's texts: empty ones, and the same text for several documents."""
    told = []
    empty = sum(not text.strip() for text in predictions)
    if empty:
        told.append(f"{empty} empty")
    repeated = len(predictions) - len(set(predictions))
    if repeated:
        told.append(f"{repeated} that another document has word for word")
    return told


def write_documents(result: Result, ids: Sequence[str], path: Path) -> None:
    """Write the figures of every document, a line of JSON for each document of each system."""
    lines = []
    for name, figures in zip(result.names, result.documents, strict=True):
        for place, key in enumerate(ids):
            row = {figure: those[place] for figure, those in figures.items()}
            lines.append(json.dumps({"system": name, "id": key, **row}))
    write_whole(path, "\n".join(lines) + "\n")


def as_json(result: Result) -> str:
    """The result as ``{"systems": [{"name", "scores", "intervals", "against_first", "signature", …}]}``."""
    systems = []
    for place, name in enumerate(result.names):
        each = {figure: those[place] for figure, those in result.figures.items()}
        system: dict[str, Any] = {
            "name": name,
            "scores": {figure: found.value for figure, found in each.items()},
            "intervals": {figure: [found.low, found.high] for figure, found in each.items()},
            "signature": result.signatures,
            "audit": result.audit[place],
        }
        if place:
            system["against_first"] = {
                figure: {
                    "difference": found.difference, "interval": [found.difference_low, found.difference_high],
                    "p_bootstrap": found.p_bootstrap, "p_randomisation": found.p_randomisation,
                } for figure, found in each.items()
            }  # fmt: skip
        systems.append(system)
    return json.dumps({"systems": systems, "absent": result.absent}, indent=1, allow_nan=False)


def cells(result: Result) -> list[list[str]]:
    """A table: a row for each system, a column for each figure, * and ** where both tests agree at 5% and 1%."""
    rows = [["system", *result.figures]]
    for place, name in enumerate(result.names):
        rows.append([name, *(_cell(those[place]) for those in result.figures.values())])
    return rows


def as_text(result: Result) -> str:
    """The table for a terminal, what the marks mean, signatures, and what could not be done."""
    table = cells(result)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for name, *row in table:
        figures = [cell.rjust(width) for cell, width in zip(row, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *figures]))
    lines += ["", "± half of the 95% interval over documents (bootstrap)."]
    if len(result.names) > 1:
        lines += [f"* and **: differs from {result.names[0]} at 5% and 1% in the paired bootstrap and in the paired "
                  "randomisation, not corrected for several comparisons."]
    lines += [f"{name}: {', '.join(odd)}" for name, odd in zip(result.names, result.audit, strict=True) if odd]
    lines += [f"{metric} was left out: {why}" for metric, why in result.absent.items()]
    return "\n".join([*lines, *result.signatures.values()])


def as_markdown(result: Result) -> str:
    """The table in Markdown."""
    heads, *rows = cells(result)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def as_latex(result: Result) -> str:
    """The table in LaTeX, for the package booktabs."""
    heads, *rows = [[_escaped(cell) for cell in row] for row in cells(result)]
    body = [" & ".join(row) + r" \\" for row in rows]
    frame = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", " & ".join(heads) + r" \\", r"\midrule"]
    return "\n".join([*frame, *body, r"\bottomrule", r"\end{tabular}"])


def _cell(figure: Figure) -> str:
    chances = [chance for chance in (figure.p_bootstrap, figure.p_randomisation) if chance is not None]
    mark = "" if not chances else "**" if max(chances) < 0.01 else "*" if max(chances) < 0.05 else ""
    return f"{figure.value:.2f} ±{(figure.high - figure.low) / 2:.2f}{mark}"


def _escaped(text: str) -> str:
    written = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\±~^&%$#_{}]", lambda found: written.get(found.group(), rf"\{found.group()}"), text)
