"""public names and the registry → pages of the API reference, filled from docstrings."""

from __future__ import annotations

import ngramloss
from ngramloss import OBJECTIVES, Objective

CHAPTERS = {
    "losses": ("Losses", "The joint loss, and how objectives are written.", {"loss", "settings"}),
    "statistics": ("Statistics", "What objectives read of a model's predictions.", {"loss.stats"}),
    "models": ("Models and trainers", "Objectives in your models and trainers.", {"models", "trainers", "data"}),
    "runs": ("Training and generation", "Our loop, texts, other systems.", {"training", "generation", "cli"}),
    "scores": ("Scores", "Metrics of generated texts.", {"metrics"}),
    "errors": ("Errors", "What a mistake of the user raises.", {"errors"}),
}  # fmt: skip
"""File → title, what is there, and which modules of the package it covers."""


def pages() -> dict[str, str]:
    """Path of a page → its Markdown."""
    rooms = {name: _room(module) for name, module in ngramloss._ROOMS.items()}
    homeless = {name for name, room in rooms.items() if not any(room in those for *_, those in CHAPTERS.values())}
    if homeless:
        raise SystemExit(f"no page of the reference has {sorted(homeless)}: add their module to CHAPTERS, {__file__}.")
    written = {}
    for file, (title, about, those) in CHAPTERS.items():
        names = sorted((name for name, room in rooms.items() if room in those), key=str.lower)
        written[f"api/{file}.md"] = f"# {title}\n\n{about}\n\n" + "\n".join(f"::: ngramloss.{name}\n" for name in names)
    return {"api/index.md": _contents(rooms), **written, "api/formulas.md": _formulas()}


def _room(module: str) -> str:
    """``loss.stats``, or the first part of another module's name."""
    return "loss.stats" if module.startswith("loss.stats") else module.split(".")[0]


def _contents(rooms: dict[str, str]) -> str:
    """A table of all public names."""
    lines = [
        "# API reference",
        "",
        "What `import ngramloss as ng` gives. Names are imported when they are first used.",
        "",
    ]
    for file, (title, about, those) in CHAPTERS.items():
        names = sorted((name for name, room in rooms.items() if room in those), key=str.lower)
        links = ", ".join(f"[`{name}`]({file}.md#ngramloss.{name})" for name in names)
        lines += [f"**[{title}]({file}.md)**. {about}", "", f"{links}", ""]
    lines += ["**[Formulas](formulas.md)**. The function behind each objective, with its formula.", ""]
    return "\n".join(lines)


def _formulas() -> str:
    """The functions of the registry, each once."""
    lines = [
        "# Formulas",
        "",
        "The functions behind the objectives, `(stats, labels, *, n) → [B]`. [Objectives](../objectives.md) explains "
        "them, the [gallery](../gallery.md) draws them.",
        "",
    ]
    for objective in OBJECTIVES.values():
        for variant in (None, *objective.variants):
            level = 3 if variant else 2
            lines += [f"::: {path(objective, variant)}", "    options:", f"      heading_level: {level}", ""]
    return "\n".join(lines)


def path(objective: Objective, variant: str | None = None) -> str:
    """The whole name of a formula's function, which is its place in the page of formulas."""
    formula = objective.formula(variant)
    return f"{formula.__module__}.{formula.__name__}"
