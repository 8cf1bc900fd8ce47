"""arguments of ``ngramloss list`` → the names that other commands accept, printed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ngramloss.cli.options import describe
from ngramloss.output.console import aligned, logger, print_result
from ngramloss.plugins import Entry, Registry
from ngramloss.settings import Setting

if TYPE_CHECKING:
    from ngramloss.loss.terms import Objective
    from ngramloss.metrics.registry import Metric
    from ngramloss.training.system_registry import System

LIST = """\
List the names that other commands accept, with a one-line description of each. For objectives and recipes,
these are the ones to start with and all of plugins; --all lists every one."""

EXAMPLES = """\
examples:
  ngramloss list objectives
  ngramloss list objectives --all                     # with variants and options
  ngramloss list metrics
  ngramloss list recipes
  ngramloss list baselines
  ngramloss list engines
  ngramloss list systems
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(parser, LIST, EXAMPLES, run)
    parser.add_argument("what", nargs="?", choices=list(LISTS), help="what to list (default: show what there is)")
    parser.add_argument("--all", action="store_true", help="list everything, with variants and options")


def run(options: argparse.Namespace) -> int:
    """Run the command."""

    rows = (
        LISTS[options.what].rows() if options.what else {f"ngramloss list {name}": LISTS[name].about for name in LISTS}
    )
    first = rows if options.all else _to_start_with(options.what, rows)
    for line in aligned(list(first.items()), left=(0, 1)):
        print_result(line)
    if len(first) < len(rows):
        logger.info(f"ngramloss list {options.what} --all lists {len(rows) - len(first)} more.")
    return 0


def _to_start_with(what: str | None, rows: dict[str, str]) -> dict[str, str]:
    """The rows of names in ``FIRST``, without variants and options, and those of plugins."""
    if what not in FIRST:
        return rows
    from ngramloss.loss.terms import OBJECTIVES

    added = {name for name in OBJECTIVES if OBJECTIVES.origin(name)} if what == "objectives" else set()
    names = {row: re.split(r"[(:]", row.strip())[0] for row in rows}
    return {
        row: text
        for row, text in rows.items()
        if names[row] in added or (names[row] in FIRST[what] and not row.startswith(" ") and ":" not in row)
    }


def _objectives() -> dict[str, str]:
    from ngramloss.loss.terms import OBJECTIVES

    return _entries(OBJECTIVES, _objective)


def _metrics() -> dict[str, str]:
    from ngramloss.metrics.registry import METRICS

    return _entries(METRICS, _metric)


def _entries(registry: Registry[Entry], rows_of: Callable[[str, Entry, str], dict[str, str]]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for name in registry:
        if problem := registry.problem(name):
            rows[name] = problem
        else:
            origin = registry.origin(name)
            rows |= rows_of(name, registry[name], f" ({origin})" if origin else "")
    return rows


def _objective(name: str, objective: Objective, origin: str) -> dict[str, str]:
    n = "" if objective.least_n is None else str(max(2, objective.least_n))
    written, before = (f"{name}({n})", f"{n},") if n else (name, "")
    return {
        written: objective.description() + origin,
        **{f"{written}:{variant}": objective.description(variant) for variant in objective.variants},
        **{f"  {name}({before}{option}=…)": _option(described) for option, described in objective.options.items()},
    }


def _metric(name: str, metric: Metric, origin: str) -> dict[str, str]:
    options = {f"  {name}.{option}": _option(described) for option, described in metric.options.items()}
    return {name: metric.description + origin, **options}


def _option(described: Setting) -> str:
    choices = f"; one of {', '.join(described.allowed)}" if described.allowed else ""
    default = described.default
    shown = {True: "true", False: "false"}.get(default, default) if isinstance(default, bool) else default
    state = "required" if described.required else "" if default in (None, "") else f"default {shown}"
    return f"{described.help}{choices}" + (f" ({state})" if state else "")


def _recipes() -> dict[str, str]:
    from ngramloss import recipe

    return {name: recipe.about(name) for name in recipe.builtin()}


def _baselines() -> dict[str, str]:
    from ngramloss.generation.baselines import BASELINES

    return {
        name: baseline.about + (f" (for {baseline.data} only)" if baseline.data else "")
        for name, baseline in BASELINES.items()
    }


def _engines() -> dict[str, str]:
    from ngramloss.search.registry import ENGINES

    return {name: engine.about + (f" ({engine.needs})" if engine.needs else "") for name, engine in ENGINES.items()}


def _systems() -> dict[str, str]:
    from ngramloss.training.system_registry import SYSTEMS

    return _entries(SYSTEMS, _system)


def _system(name: str, system: System, origin: str) -> dict[str, str]:
    options = {f"  {name}({option}=…)": _option(described) for option, described in system.options.items()}
    recipes = f" (recipes {', '.join(system.recipes)})" if system.recipes else ""
    return {name: system.about + recipes + origin, **options}


class List(NamedTuple):
    """What can be listed."""

    about: str
    rows: Callable[[], dict[str, str]]  # returns name → description


LISTS = {
    "objectives": List("terms of an objective, for train and explain", _objectives),
    "metrics": List("scores, for score, report and candidates", _metrics),
    "recipes": List("settings of a training, for train", _recipes),
    "baselines": List("outputs without a model, for generate", _baselines),
    "engines": List("search engines, for generate and candidates", _engines),
    "systems": List("other systems to train, by their recipes", _systems),
}
FIRST = {
    "objectives": ("ce", "matches", "rewards", "bag", "bleu"),
    "recipes": ("demo", "xsum", "cnndm", "translation", "sft"),
}
"""Long lists → the names to start with."""
