"""arguments of ``ngramloss list`` → the names that other commands accept, printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ngramloss.cli.options import Verbs, verb
from ngramloss.cli.output import print_result
from ngramloss.settings import Setting

LIST = "List the names that other commands accept, with a one-line description of each."

EXAMPLES = """\
examples:
  ngramloss list objectives
  ngramloss list metrics
  ngramloss list recipes
  ngramloss list baselines
"""


def add(verbs: Verbs) -> None:
    """Add the command and its options."""
    parser = verb(verbs, "list", "list objectives, metrics, recipes or baselines", LIST, EXAMPLES)
    parser.add_argument("what", choices=list(LISTS), help="what to list")
    parser.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    rows = LISTS[options.what]()
    width = max(len(name) for name in rows)
    for name, about in rows.items():
        print_result(f"{name:<{width}}  {about}")
    return 0


def _objectives() -> dict[str, str]:
    from ngramloss.objectives import OBJECTIVES

    rows = {}
    for name in OBJECTIVES:
        if problem := OBJECTIVES.problem(name):
            rows[name] = problem
            continue
        objective = OBJECTIVES[name]
        written = name if objective.least_n is None else f"{name}({max(2, objective.least_n)})"
        rows[written] = objective.description() + _origin(OBJECTIVES.origin(name))
        rows |= {f"{written}:{variant}": objective.description(variant) for variant in objective.variants}
        rows |= {f"  {name}({option}=…)": _option(described) for option, described in objective.options.items()}
    return rows


def _metrics() -> dict[str, str]:
    from ngramloss.metrics.registry import METRICS

    rows = {}
    for name in METRICS:
        if problem := METRICS.problem(name):
            rows[name] = problem
            continue
        rows[name] = METRICS[name].description + _origin(METRICS.origin(name))
        rows |= {f"  {name}.{option}": _option(described) for option, described in METRICS[name].options.items()}
    return rows


def _option(described: Setting) -> str:
    choices = f"; one of {', '.join(described.choices)}" if described.choices else ""
    default = described.default
    shown = {True: "true", False: "false"}.get(default, default) if isinstance(default, bool) else default
    state = "required" if described.required else "" if default is None else f"default {shown}"
    return f"{described.help}{choices}" + (f" ({state})" if state else "")


def _origin(origin: str) -> str:
    return f" ({origin})" if origin else ""


def _recipes() -> dict[str, str]:
    from ngramloss import recipe

    return {name: recipe.about(name) for name in recipe.builtin()}


def _baselines() -> dict[str, str]:
    from ngramloss.generation.baselines import BASELINES

    return {name: baseline.about + (f" (for {baseline.data} only)" if baseline.data else "")
            for name, baseline in BASELINES.items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "objectives": _objectives, "metrics": _metrics, "recipes": _recipes, "baselines": _baselines,
}  # fmt: skip
