"""public names and the registry → pages of the API reference, filled from docstrings."""

from __future__ import annotations

import inspect
import re

import ngramloss
from ngramloss import OBJECTIVES, Objective

CHAPTERS = {
    "losses": ("Losses", "The joint loss, how objectives are written.", {"loss.joint_loss", "loss.terms", "settings"}),
    "statistics": ("Statistics", "What objectives read of a model's predictions.", {"loss.stats"}),
    "models": ("Models and trainers", "Objectives in your models and trainers.", {"models", "trainers", "data"}),
    "runs": ("Training and generation", "Our loop, texts, other systems.", {"training", "generation", "storage"}),
    "scores": ("Scores", "Metrics of generated texts.", {"metrics"}),
    "commands": ("Commands", "Verbs of your own, and what they show.", {"cli", "output"}),
    "errors": ("Errors", "What a mistake of the user raises.", {"errors", "version"}),
}  # fmt: skip
"""File → title, what is there, and which modules of the package it covers."""


def chapter(module: str) -> str:
    """The page of a module's public names."""
    for file, (*_, rooms) in CHAPTERS.items():
        if any(f"{module}.".startswith(f"{room}.") for room in rooms):
            return file
    raise SystemExit(f"no page of the reference has {module}: add it to CHAPTERS, {__file__}.")


def pages() -> dict[str, str]:
    """Path of a page → its Markdown."""
    rooms = {name: chapter(module) for name, module in ngramloss._ROOMS.items()}
    written = {}
    for file, (title, about, _) in CHAPTERS.items():
        names = sorted((name for name, room in rooms.items() if room == file), key=str.lower)
        written[f"api/{file}.md"] = f"# {title}\n\n{about}\n\n" + "\n".join(f"::: ngramloss.{name}\n" for name in names)
    return {"api/index.md": _contents(rooms), **written, "api/modules.md": _modules(), "api/formulas.md": _formulas()}


def _modules() -> str:
    """The public modules: what each is for, and its functions and classes."""
    lines = ["# Modules", "", "Public names that are modules: `ng.data.load` is `load` of the module `data`.", ""]
    for name in sorted(ngramloss._MODULES):
        module = getattr(ngramloss, name)
        own = getattr(module, "__all__", None) or [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        lines += [f"## {name}", "", (module.__doc__ or "").strip(), ""]
        for key in own:
            about = inspect.getdoc(getattr(module, key)) if callable(getattr(module, key)) else ""
            if about:
                lines.append(f"* `{name}.{key}`: {about.splitlines()[0]}")
        lines.append("")
    return re.sub(r":\w+:(?=`)", "", "\n".join(lines))


def _contents(rooms: dict[str, str]) -> str:
    """A table of all public names."""
    lines = [
        "# API reference",
        "",
        "What `import ngramloss as ng` gives. Names are imported when they are first used.",
        "",
    ]
    for file, (title, about, _) in CHAPTERS.items():
        names = sorted((name for name, room in rooms.items() if room == file), key=str.lower)
        links = ", ".join(f"[`{name}`]({file}.md#ngramloss.{name})" for name in names)
        lines += [f"**[{title}]({file}.md)**. {about}", "", f"{links}", ""]
    lines += ["**[Modules](modules.md)**. " + ", ".join(f"`{name}`" for name in sorted(ngramloss._MODULES)), ""]
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
