"""names of systems, data and settings → rows of a study: the recipe of each, and what is made before it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.recipe import Recipe
from ngramloss.training.system_registry import SYSTEMS, System, run_of

ALL = "all"
PASSED_ON = frozenset(recipe.affecting("documents", "rows", "sentences")) - {"data.name"}
"""Settings of other rows that systems take, too: which data, and how they are read."""

SMALL_LIMITS = {"train": 400, "validation": 100}
"""Split → the most sources of it that get candidates, for the small rows of the built-in corpus."""

_MADE = re.compile(r"\{(\w+)(?::(\w+))?\}")
_OPTION = "system."


class Needed(NamedTuple):
    """What a training reads of another row."""

    row: str  # a system, a recipe such as ``lm``, or an objective
    split: str = ""  # of which its model writes candidates; empty: the run itself


class SystemRow(NamedTuple):
    """A row that is a system, not an objective."""

    base: Recipe  # every setting of its training, but for those of ``first``
    first: Mapping[str, str]  # setting → its value, as in :class:`ngramloss.training.system_registry.System`
    runs: Path  # the folder of all trainings, which these values name
    small: bool  # whether it is one for the built-in corpus

    @property
    def made(self) -> list[Needed]:
        """What is made before its training, in this order."""
        return _made(self.first)

    def candidate_options(self, split: str) -> list[str]:
        """Options of ``ngramloss candidates``: of as many sources as the data settings say, or fewer if it is small."""
        limit = self.base.data.limit if split == "train" else self.base.data.validation_limit
        count, most = (8, SMALL_LIMITS.get(split, 0)) if self.small else (16, 0)
        limit = limit or most
        return ["--split", split, "--count", str(count), *(["--limit", str(limit)] if limit else [])]

    def settings(self, folder: Callable[[Needed], Path]) -> list[str]:
        """The settings of ``first``, each ``key=value``, if this is where things are made."""
        given = []
        for key, value in self.first.items():
            text = _MADE.sub(lambda match: str(folder(Needed(match[1], match[2] or ""))), value)
            if key.startswith(_OPTION):
                key, text = "system", _with_option(self.base.system, key.removeprefix(_OPTION), text)
            given.append(f"{key}={json.dumps(text, ensure_ascii=False)}")
        return given


def system_rows(
    names: Sequence[str], runs: Path, data: str, task: str, *, overrides: Sequence[str], small: bool, validation: bool
) -> dict[str, SystemRow]:
    """The rows of systems, and others that they need. ``overrides``: ``key=value`` for all, or ``ROW.key=value``."""
    rows: dict[str, SystemRow] = {}
    for name in with_needed(names):
        entry = SYSTEMS[name] if name in SYSTEMS else System("", (name, f"{name}-demo"))
        first = dict(entry.first)
        if not validation:  # files of candidates, such as train={ce:train}, without those of that split
            parts = {key: value.split(",") for key, value in first.items()}
            first = {key: ",".join(x for x in own if not x.startswith("validation=")) for key, own in parts.items()}
        base = _load(name, entry, data=data, task=task, overrides=overrides, small=small)
        rows[name] = SystemRow(base, first, runs, small)
    _check(rows, names, task, runs)
    return rows


def chosen(text: str) -> list[str]:
    """The systems that ``--systems`` names, with commas, or all. Raises if one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == [ALL]:
        return [name for name in SYSTEMS if SYSTEMS[name].writes]
    for name in names:
        if name == ALL:
            raise UserError(f"--systems: give {ALL}, or names, not both.")
        if not SYSTEMS.entry(name).writes:
            raise UserError(
                f"--systems: {name} writes no texts of its own, so there is nothing to compare. Leave it out."
            )
    return list(dict.fromkeys(names))


def belongs_to(setting: str, rows: Iterable[str]) -> str:
    """The row that a setting ``ROW.key=value`` is for; empty if it is for none of them."""
    name = setting.partition("=")[0].partition(".")[0].strip()
    return name if name in [*rows] else ""


def with_needed(names: Sequence[str]) -> list[str]:
    """Systems, and those rows that are trained before them and have settings of their own."""
    found = list(names)
    for name in found:  # grows
        needed = _made(SYSTEMS[name].first) if name in SYSTEMS else []
        found += [row for row in dict.fromkeys(made.row for made in needed) if is_recipe(row) and row not in found]
    return found


def _made(first: Mapping[str, str]) -> list[Needed]:
    found = (Needed(match[1], match[2] or "") for value in first.values() for match in _MADE.finditer(value))
    return list(dict.fromkeys(found))


def is_recipe(row: str) -> bool:
    """Whether a row is a system or a recipe; otherwise it is an objective."""
    return row in SYSTEMS or row in recipe.builtin()


def _load(name: str, entry: System, *, data: str, task: str, overrides: Sequence[str], small: bool) -> Recipe:
    """The recipe of a row on some data. Its objective is the published one."""
    published = recipe.load(entry.recipes[0])
    own = [setting.partition(".")[2] for setting in overrides if belongs_to(setting, [name])]
    if fixed := [setting for setting in own if key_of(setting) in ("train.seed", "data.name", *entry.first)]:
        raise UserError(f"--set {name}.{fixed[0]}: reproduce chooses it. Leave it out.")
    given = [
        f"objective={published.objective}",
        *(entry.beyond_cnndm if not small and data != "cnn_dailymail" else ()),
        f"task={task}",
        f"data.name={json.dumps(data, ensure_ascii=False)}",
        *(setting for setting in overrides if key_of(setting) in PASSED_ON),
        *own,
    ]
    try:
        return recipe.load(entry.recipes[-1 if small else 0], given)
    except UserError as mistake:
        raise UserError(f"{name}: {mistake}") from None


def _check(rows: Mapping[str, SystemRow], names: Sequence[str], task: str, runs: Path) -> None:
    """Raise if a row is for another task, or cannot be trained with its settings."""
    if unfit := [name for name in names if not _is_for(task, name)]:
        fit = ", ".join(sorted(name for name in chosen(ALL) if _is_for(task, name)))
        wrong = f"{', '.join(unfit)} {'is' if len(unfit) == 1 else 'are'}"
        raise UserError(f"--systems: {wrong} not for {task}. Choose from {fit}.")
    if "," in str(runs) and any(row.first for row in rows.values()):
        raise UserError(f"--runs {runs}: with --systems it must not have a comma, which separates files of candidates.")
    for row in rows.values():
        run_of(recipe.changed(row.base, row.settings(lambda made: runs / made.row)))


def _is_for(task: str, name: str) -> bool:
    return all(row not in SYSTEMS or SYSTEMS[row].task in ("", task) for row in with_needed([name]))


def key_of(setting: str) -> str:
    """The key of ``key=value``."""
    return setting.partition("=")[0].strip()


def _with_option(system: str, option: str, value: str) -> str:
    """The written form of a system with another option.

    >>> _with_option("gsum(sentences=2)", "extractor", "runs/ext"), _with_option("gsum", "extractor", "runs/ext")
    ('gsum(sentences=2,extractor=runs/ext)', 'gsum(extractor=runs/ext)')
    """
    head = f"{system.rstrip().removesuffix(')')}," if "(" in system else f"{system}("
    return f"{head}{option}={value})"
