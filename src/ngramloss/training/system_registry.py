"""the written form of a system, such as ``simcls(margin=0.01)`` → its entry and options, checked. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.data.candidates import named_files, raise_if_comma
from ngramloss.errors import UserError
from ngramloss.loss.terms.parser import parse
from ngramloss.plugins import Registry
from ngramloss.recipe import LAST, Generation, Recipe, every_setting, flat, load
from ngramloss.settings import Setting
from ngramloss.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from ngramloss.training.run import Run


@dataclass(frozen=True)
class System:
    """A way to make texts that is trained in its own way.

    Attributes:
        about: a description.
        recipes: with its authors' settings, and a small one.
        module: its file, as it is imported; empty if ``train`` and ``generate`` need nothing else.
        options: name → what it may be.
        after: the command after training, with {run} for its folder; empty: ``generate``.
        not_used: settings that it does not read, besides those that no system has (:class:`Setting`).
        bests: what may select the best checkpoint → whether higher is better; the first is the usual one.
        settable: what ``generate --set`` may change; empty: every setting of ``data``, and the task.
        takes_objective: whether it trains on the recipe's objective; otherwise it has one of its own.
        search: the settings of ``generation`` that its search reads, which ``generate --set`` may change; empty: it has
            no search.
        first: what ``reproduce`` makes before it: setting → its value, with {ROW} for the run of another system or
            objective, and {ROW:SPLIT} for candidates that this run writes; ``system.OPTION`` is one of its options.
        beyond_cnndm: settings of its first recipe on other data than CNN/DailyMail, as published for XSum.
        task: the only task that it is for; empty: any.
        options_in_generate: the options that ``generate --set system=…`` may change.
        loads: whether the standard commands write texts with a model that its function ``load(settings, tokenizer,
            options)`` returns; otherwise its function ``generate`` writes them. What ``--set system=…`` does not name
            is then as in its training.
        writes: whether it writes texts, which a table can compare; a part of another model does not.
    """

    about: str
    recipes: tuple[str, ...]
    module: str = ""
    options: Mapping[str, Setting] = field(default_factory=dict)
    after: str = ""
    not_used: tuple[str, ...] = ()
    bests: Mapping[str, bool] = field(default_factory=dict)
    settable: tuple[str, ...] = ()
    takes_objective: bool = False
    search: tuple[str, ...] = ()
    first: Mapping[str, str] = field(default_factory=dict)
    beyond_cnndm: tuple[str, ...] = ()
    task: str = ""
    options_in_generate: tuple[str, ...] = ()
    loads: bool = False
    writes: bool = True

    @property
    def searches_freely(self) -> bool:
        """Whether its search reads every setting of ``generation``."""
        return self.search == tuple(key.name for key in dataclasses.fields(Generation))

    def function(self, name: str) -> Callable[..., Any]:
        """A function of its file."""
        loaded: Callable[..., Any] = getattr(import_module(self.module), name)
        return loaded


SYSTEMS: Registry[System] = Registry("system", System)

_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", re.DOTALL)


class Written(NamedTuple):
    """A system with its options; of one that comes from a plugin, with a hash of its code."""

    name: str
    entry: System
    options: dict[str, Any]
    code: str
    given: tuple[str, ...] = ()
    """The options that were written; the others have their defaults."""


def read_system(text: str) -> Written:
    """The entry and all options, those not given with their defaults, of a written system."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"system: expected a name and options, such as simcls(margin=0.01), got {text!r}.")
    name, inner = match[1], match[2] or ""
    entry = SYSTEMS.entry(name)
    if not entry.module:
        raise UserError(
            f"system: {name} is trained like any model. Leave system out, and use the recipe {entry.recipes[0]}."
        )
    options, given = {option: described.default for option, described in entry.options.items()}, []
    for pair in filter(None, map(str.strip, inner.split(","))):
        option, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or option not in entry.options:
            raise UserError(
                f"system: {name} takes OPTION=VALUE with the options {', '.join(entry.options)}, got {pair!r}."
            )
        described = entry.options[option]
        options[option] = described.check(f"system: {option}", described.read(value))
        given.append(option)
    return Written(name, entry, options, SYSTEMS.source(name) if SYSTEMS.origin(name) else "", tuple(given))


def system_of(model: str) -> Written | None:
    """The system that a run's folder has, or None: it has none, or this is not a run."""
    run = RunFolder(Path(model))
    text = load(str(run.recipe), objective=False).system if run.recipe.is_file() else ""
    return read_system(text) if text else None


def run_of(settings: Recipe) -> Run:
    """What a recipe of a system or a model asks for. Raises if its settings ask for what is not there."""
    from ngramloss.training import run
    from ngramloss.training.best import Best

    if not settings.system:
        return run.run_of(settings)
    system, best = check_recipe(settings), settings.train.best
    higher = system.entry.bests.get(best, False)
    return run.Run(settings, tuple(parse(settings.objective)), Best(best, higher=higher), system=system)


LACKING = {
    "candidates": "candidates",
    "twins": "twins",
    "teacher": "a teacher",
    "lm_logp": "a language model of the targets",
    "future_logp": "the streams of a ProphetNet",
}
"""What terms may need that no system has."""


def check_recipe(settings: Recipe) -> Written:
    """The system of a recipe. Raises if its settings ask for what it does not have, all mistakes at once."""
    system = read_system(settings.system)
    name, known = system.name, every_setting()
    absent = {key for key, described in known.items() if not described.systems} | {*system.entry.not_used}
    changed = [key for key, value in flat(settings) if value != known[key].default]
    mistakes = [f"{key}: is not a setting of {name}. Leave it out." for key in changed if key in absent]
    if settings.objective != "ce" and not system.entry.takes_objective:
        mistakes.append(f"objective: {name} has an objective of its own. Leave it out.")
    try:
        needs = {term.names[0]: term.requires | term.needs for term in parse(settings.objective)}
        lacking = {term: what for term, own in needs.items() for need, what in LACKING.items() if need in own}
        mistakes += [
            f"objective: {term} needs {what}, which {name} does not have. Leave it out; terms of tokens and n-grams, "
            "such as ce and matches, can be used."
            for term, what in lacking.items()
        ]
    except UserError as mistake:
        mistakes.append(f"objective: {mistake}")
    if read := system.entry.search:
        mistakes += [
            f"{key}: is not a setting of {name}, whose search reads {', '.join(read)}."
            for key in changed
            if key.startswith("generation.") and key.removeprefix("generation.") not in read
        ]
    if settings.train.best not in (*system.entry.bests, LAST):
        mistakes.append(f"train.best: must be one of {', '.join([*system.entry.bests, LAST])} for {name}.")
    if settings.train.precision == "fp16":
        mistakes.append("train.precision: systems train in bf16 or fp32, not in fp16.")
    if mistakes:
        raise UserError(f"recipe {settings.name}:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))
    return system


def with_whole_paths(run: Run) -> Run:
    """A run with whole paths in ``data.candidates``, so that it does not depend on the working directory."""
    settings, data = run.settings, run.settings.data
    found = [
        (split, path.expanduser().resolve()) for split, paths in named_files(data.candidates).items() for path in paths
    ]
    for _, path in found:
        raise_if_comma(path)
    data = dataclasses.replace(data, candidates=",".join(f"{split}={path}" for split, path in found))
    return dataclasses.replace(run, settings=dataclasses.replace(settings, data=data))
