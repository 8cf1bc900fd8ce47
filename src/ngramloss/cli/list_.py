"""arguments of ``ngramloss list`` → the names that can be written in other commands, printed."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable

from ngramloss.cli.options import Verbs, verb
from ngramloss.cli.output import print_result

LIST = "List the names that other commands take, each with a line that says what it is."

EXAMPLES = """\
examples:
  ngramloss list objectives
  ngramloss list metrics
  ngramloss list recipes
  ngramloss list baselines
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its options."""
    parser = verb(verbs, "list", "names of objectives, metrics, recipes, baselines", LIST, EXAMPLES)
    parser.add_argument("what", choices=list(LISTS), help="what to list")
    parser.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    rows = LISTS[options.what]()
    width = max(len(name) for name in rows)
    for name, about in rows.items():
        print_result(f"{name:<{width}}  {about}")
    return 0


def _objectives() -> dict[str, str]:
    from ngramloss.objectives import OBJECTIVES

    rows = {}
    for name, objective in OBJECTIVES.items():
        written = name if objective.least_n is None else f"{name}({max(2, objective.least_n)})"
        rows[written] = _first_line(objective.function).removesuffix(", [B].") + "."
        rows |= {f"{written}:{variant}": _first_line(function).removesuffix(", [B].").removesuffix(".") + "."
                 for variant, function in objective.variants.items()}
    return rows


def _metrics() -> dict[str, str]:
    from ngramloss.scoring.results import METRICS

    return {name: _first_line(metric) for name, (metric, _) in METRICS.items()}


def _recipes() -> dict[str, str]:
    from ngramloss import recipe

    return {name: recipe.about(name) for name in recipe.builtin()}


def _baselines() -> dict[str, str]:
    from ngramloss.generation.baselines import BASELINES

    return {name: baseline.about + (f" (of {baseline.data} only)" if baseline.data else "")
            for name, baseline in BASELINES.items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "objectives": _objectives, "metrics": _metrics, "recipes": _recipes, "baselines": _baselines,
}  # fmt: skip


def _first_line(function: Callable[..., object]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].replace("``", "").replace(":func:", "").replace("`", "")
