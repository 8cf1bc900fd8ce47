"""a study's TOML file → ``Study``: rows, sets, seeds and decodings, checked; the recipe of each training."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data import has_split, load_split
from ngramloss.data.data_sets import origin
from ngramloss.errors import MissingFileError, UserError
from ngramloss.loss.terms.parser import parse
from ngramloss.metrics.registry import METRICS, Score, missing_options, scores_of
from ngramloss.recipe import TASKS, Recipe
from ngramloss.settings import Setting, nearest
from ngramloss.storage.files import parse_toml
from ngramloss.study.system_rows import Needed, SystemRow, is_recipe, key_of
from ngramloss.training.best import options_of
from ngramloss.training.system_registry import run_of

VALIDATION, TEST = "validation", "test"
METRICS_OF = dict(zip(TASKS, (("rouge", "shape"), ("bleu", "chrf", "shape")), strict=True))
"""Task → the metrics that every text is scored with, besides that of the primary score."""
WITHOUT_EFFECT = recipe.only_speed()
"""Settings that change no score, so that they may differ between the machines that share a study."""

SYSTEM_ROW = "system.row"  # In the facts of a result: its row is this system, not an objective

_NAME = re.compile(r"[\w][\w.+-]*", re.ASCII)
_TEXT, _LIST = Setting(kind=str), Setting([], kind=list)
_TOP = {"title": _TEXT, "recipe": Setting(""), "objectives": Setting(kind=list), "confirm": Setting(1, least=1)}
_TOP |= {"always": _LIST, "metrics": _LIST}
_SECTIONS = ("seeds", "decodings", "tune", "set")
_SET = {"name": _TEXT, "recipe": Setting(""), "primary": _TEXT, "decoding": _TEXT, "limit": Setting(0, least=0)}
_SET |= {"set": _LIST, "metrics": _LIST, "metric_options": _LIST}
_OWN_GRID, _OWN_SEEDS = "tune", "screening"
"""What a set may have instead of the study's: values to try, and some of the screening seeds."""
_ROW = {"name": Setting(""), "objective": _TEXT, "set": _LIST, "epochs": Setting(1.0, above=0)}
_TUNE = {"objectives": Setting(kind=list), "others": _TEXT, "seed": Setting(kind=int, least=0)}
_SAMPLES = {"temperature": Setting(1.0, above=0), "top_p": Setting(1.0, above=0, most=1), "seed": Setting(0, least=0)}
"""What a decoding that samples has besides ``generation.*``: options of ``ngramloss generate``."""


Rows = Mapping[str, tuple[str, ...]]  # Row → the setting that was tuned for it


class Training(NamedTuple):
    """One training of a study, and the split of which its model writes texts."""

    set: str  # the name of its set
    objective: str  # its row: an objective, the name of a system, or that of an objective with settings of its own
    setting: tuple[str, ...]  # the values that were tuned, each ``key=value``
    seed: int  # of the training
    split: str  # ``validation`` to choose by, or ``test`` to confirm

    @property
    def name(self) -> str:
        """Its name in file names: row, setting and seed."""
        tuned = (re.sub(r"[^\w.+-]", "", text.partition(".")[2]) for text in self.setting)
        return "-".join([_slug(self.objective), *tuned, f"seed{self.seed}"])

    def folder(self, runs: Path) -> Path:
        """All that is made of it."""
        return runs / self.set / self.name

    def run_folder(self, runs: Path) -> Path:
        """The run itself."""
        return self.folder(runs) / "run"

    def __str__(self) -> str:
        return ", ".join([self.set, self.objective, *self.setting, f"seed {self.seed}"])


def trainings_of(data: str, rows: Rows, seeds: Sequence[int], split: str) -> list[Training]:
    """The trainings of rows of a set, each with its setting, seed by seed."""
    return [Training(data, row, setting, seed, split) for seed in seeds for row, setting in rows.items()]


class NamedRow(NamedTuple):
    """A row with settings of its own."""

    objective: str  # what it is trained with
    set: tuple[str, ...] = ()  # its settings, each ``key=value``
    epochs: float = 1.0  # how many times the epochs and steps of its set it is trained for

    def settings(self, base: Recipe) -> list[str]:
        """What it changes in the recipe of its set."""
        steps = [f"train.epochs={base.train.epochs * self.epochs}"]
        steps += [f"train.max_steps={round(base.train.max_steps * self.epochs)}"]
        return [f"objective={self.objective}", *(steps if self.epochs != 1 else []), *self.set]


class DataSet(NamedTuple):
    """A data set with the model that is trained on it."""

    name: str  # in tables and file names
    base: Recipe  # every setting of its trainings, with the objective of the first row
    primary: str  # the one score that is tested
    decoding: str  # the decoding whose primary score it is
    metrics: tuple[str, ...]  # all that the texts are scored with
    limit: int  # the most texts of a split; 0 means all
    # the settings that are tried when it is tuned, each a tuple of ``key=value``
    grid: tuple[tuple[str, ...], ...] = ()
    screening: tuple[int, ...] = ()  # the seeds by which its rows are chosen: those of the study, or some of them
    more_metrics: tuple[str, ...] = ()  # those of ``metrics`` that the study names besides the usual ones
    metric_options: tuple[str, ...] = ()  # options of metrics, each ``METRIC.OPTION=VALUE``

    def options(self, metric: str) -> dict[str, Any]:
        """The options of a metric. Raises if there are none of these."""
        own = [text for text in self.metric_options if text.partition(".")[0].strip() == metric]
        return options_of(metric, own, "metric_options")

    @property
    def score(self) -> Score:
        """The label and the direction of the primary score."""
        return scores_of(self.metric)[self.primary]

    @property
    def metric(self) -> str:
        """The metric that has the primary score."""
        return next(name for name in self.metrics if self.primary in scores_of(name))


class Tuning(NamedTuple):
    """What is tuned, on validation data."""

    grid: tuple[tuple[str, ...], ...]  # the settings that are tried in sets without a grid of their own
    objectives: tuple[str, ...]  # the rows for which they are
    others: str  # the row whose choice all other rows take
    seed: int  # of these trainings


@dataclass(frozen=True)
class Study:
    """A question and all that answers it."""

    name: str  # of the file, without its ending
    title: str  # the question
    objectives: tuple[str, ...]  # the rows; the first is the baseline
    sets: tuple[DataSet, ...]  # data sets and models
    decodings: Mapping[str, tuple[str, ...]]  # name → settings of ``generation`` with which texts are written
    confirmation: tuple[int, ...]  # seeds with which the chosen rows are tested
    confirm: int  # how many rows are confirmed besides the baseline and those of ``always``
    tuning: Tuning | None = None  # None if nothing is tuned
    screening: tuple[int, ...] = ()  # other seeds, by whose trainings rows are chosen; none: all rows are confirmed
    always: tuple[str, ...] = ()  # rows that are tested whatever the screening says, as the question is about them
    # whether rows and seeds may change after a look at the test set, as nothing was chosen; others are left alone
    grows: bool = False
    # row → what it is, if it is a system and not an objective; also of what they need
    systems: Mapping[str, SystemRow] = field(default_factory=dict)
    # row → what it is, if it is an objective with settings of its own
    named: Mapping[str, NamedRow] = field(default_factory=dict)
    _recipes: dict[Training, Recipe] = field(default_factory=dict, compare=False, repr=False)

    @property
    def baseline(self) -> str:
        """The first row, with which the others are compared."""
        return self.objectives[0]

    @property
    def comparisons(self) -> int:
        """How many rows are tested against the baseline, in all sets."""
        return (self.confirm + len(self.always)) * len(self.sets)

    @property
    def chooses(self) -> bool:
        """Whether something is chosen on validation data."""
        return bool(self.tuning or self.screening)

    def data(self, name: str) -> DataSet:
        """The set of a name."""
        return next(data for data in self.sets if data.name == name)

    def recipe(self, training: Training) -> Recipe:
        """Every setting of a training."""
        if training not in self._recipes:
            base = self.data(training.set).base
            own = self.named.get(training.objective, NamedRow(training.objective)).settings(base)
            if row := self.systems.get(training.objective):
                base, own = row.base, row.settings(lambda made: self.made_folder(training, made, row.runs))
            self._recipes[training] = recipe.changed(base, [*own, *training.setting, f"train.seed={training.seed}"])
        return self._recipes[training]

    def first(self, training: Training) -> list[tuple[Training, str]]:
        """What is made before a training: others, and the split of which their models write candidates, or none."""
        row = self.systems.get(training.objective)
        return [(training._replace(objective=made.row), made.split) for made in (row.made if row else ())]

    def made_folder(self, training: Training, made: Needed, runs: Path) -> Path:
        """The folder of something that is made before a training."""
        other = training._replace(objective=made.row)
        return other.folder(runs) / f"candidates-{made.split}" if made.split else other.run_folder(runs)

    def text_folder(self, training: Training, decoding: str, runs: Path) -> Path:
        """Where a training's texts are: beside its run, or in it if they are written as its recipe says."""
        beside = training.folder(runs) / f"{training.split}-{decoding}"
        return beside if self.decodings[decoding] else training.run_folder(runs)

    def facts(self, training: Training, decoding: str) -> dict[str, Any]:
        """All of the study that could change the result of a decoding: setting → value."""
        data = self.data(training.set)
        return {
            **{key: value for key, value in recipe.flat(self.recipe(training)) if key not in WITHOUT_EFFECT},
            **self._made_facts(training),
            f"decodings.{decoding}": list(self.decodings[decoding]),
            "set.primary": data.primary,
            "set.decoding": data.decoding,
            "set.limit": data.limit,
            "metrics": list(data.more_metrics),
            "set.metric_options": list(data.metric_options),
        }

    def _made_facts(self, training: Training) -> dict[str, Any]:
        """Of a system: which one it is, and all that could change what is made before it."""
        row, usual = self.systems.get(training.objective), dict(recipe.flat(Recipe("")))
        if row is None:
            return {}
        facts: dict[str, Any] = {SYSTEM_ROW: training.objective}
        for other, split in self.first(training):
            known = {**dict(recipe.flat(self.recipe(other))), **self._made_facts(other)}
            facts[f"made.{other.objective}"] = {
                key: value
                for key, value in known.items()
                if key not in WITHOUT_EFFECT and usual.get(key) != value  # one that later versions add is the usual one
            }
            facts |= {f"made.{split}": row.candidate_options(split)} if split else {}
        return facts


def read(path: Path) -> Study:
    """Read a study's file. All mistakes are reported at once."""
    if not path.is_file():
        raise MissingFileError(f"there is no study {path}. Give a TOML file; ngramloss docs study shows one.")
    content = parse_toml(path.read_bytes(), str(path))
    mistakes: list[str] = []
    study = _study(path, content, mistakes)
    if mistakes or study is None:
        count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise UserError("\n  ".join([f"study {path} has {count}:", *mistakes]))
    return study


def check_data(study: Study, sets: Iterable[DataSet]) -> None:
    """Raise if a data set is not there, or a split for training, for the test, or to choose by cannot be used."""
    needed = ("train", *([VALIDATION] if study.chooses else []), TEST)
    for data in sets:
        name = data.base.data.name
        try:
            origin(name)
        except UserError as mistake:
            raise UserError(f"set {data.name}: {mistake}") from None
        missing = [split for split in needed if not has_split(data.base.data, split)]
        if missing:
            what = f"set {data.name}: the data {name!r} have no {' and no '.join(missing)} split, or cannot be read"
            advice = "hold them out with data.validation_fraction=0.1 and data.test_fraction=0.1"
            raise UserError(f"{what}. A study chooses on validation data and confirms on test data: {advice}.")
        for split in needed[1:]:  # a row that cannot be used would stop a study after its trainings
            try:
                load_split(data.base.data, data.base.task, split, limit=data.limit)
            except UserError as mistake:
                raise UserError(f"set {data.name}: {mistake}").on_page(mistake.about) from None


def _study(path: Path, content: Mapping[str, Any], mistakes: list[str]) -> Study | None:
    """The study that a file describes; None if mistakes keep it from being read."""
    own = {key: value for key, value in content.items() if key not in _SECTIONS}
    every = own.get("objectives", [])
    if isinstance(every, list):  # some may be tables
        own |= {"objectives": [row for row in every if not isinstance(row, dict)]} if "objectives" in own else {}
    top = _section("", own, _TOP, mistakes)
    every = every if "objectives" in top else []
    screening, confirmation = _seeds(content.get("seeds", {}), mistakes)
    decodings = _decodings(content.get("decodings", {}), mistakes)
    named = _named_rows(every, mistakes)
    objectives = _objectives("objectives", every, mistakes, named)
    tuning = _tuning(content["tune"], objectives, named, mistakes) if "tune" in content else None
    if tuning is not None and tuning.seed in confirmation:
        mistakes.append(f"tune.seed: {tuning.seed} is a confirmation seed. Choose another one.")
    if twice := sorted({*screening} & {*confirmation}):
        both = f"seeds: {', '.join(map(str, twice))} are screening and confirmation seeds"
        mistakes.append(f"{both}. A seed cannot choose a row and confirm it: choose other confirmation seeds.")
    always = _objectives("always", top.get("always", []), mistakes, named)
    stray = [row for row in always if row not in objectives[1:]]
    mistakes += [f"always: {row!r} is not one of the objectives after the first." for row in stray]
    mistakes += _unknown_metrics("metrics", top.get("metrics", []))
    left = len(objectives) - 1 - len(always)
    if not screening:
        named_in_vain = [key for key in ("confirm", "always") if key in content]
        why = "without screening seeds all rows are confirmed. Leave it out, or name some."
        mistakes += [f"{key}: {why}" for key in named_in_vain]
    elif objectives and top.get("confirm", 1) > left:
        mistakes.append(f"confirm: at most {left} rows are left to choose from, got {top['confirm']}.")
    given = content.get("set", [])
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        mistakes.append('set: give one or more sets, each as [[set]] with name = "…" and primary = "…".')
        given = []
    if mistakes:
        return None
    confirm = top["confirm"] if screening else left
    rows: dict[str, Any] = {"objectives": objectives, "confirm": confirm, "always": always, "named": named}
    seeds: dict[str, Any] = {"screening": screening, "confirmation": confirmation}
    study = Study(path.stem, top["title"], sets=(), decodings=decodings, tuning=tuning, **rows, **seeds)
    sets = [_data_set(entry, study, top, path, mistakes) for entry in given]
    names = [data.name for data in sets if data]
    mistakes += [f"set: two sets are called {name!r}." for name in sorted({*names}) if names.count(name) > 1]
    tested = dict.fromkeys(data.decoding for data in sets if data)
    if len(tested) > 1:
        both = f"set: the primary scores are of {' and '.join(tested)}, but Holm's correction is for one question"
        mistakes.append(f"{both}. Give all sets the same decoding, or make a study of each.")
    return replace(study, sets=tuple(data for data in sets if data))


def _section(where: str, given: Any, known: Mapping[str, Setting], mistakes: list[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        mistakes.append(f"{where.rstrip('.')}: must be a table of settings, got {given!r}.")
        return {}
    for key in given:
        if key not in known:
            hint = nearest(key, [*known, *(_SECTIONS if not where else ())], 0.5)
            mistakes.append(f"{where}{key}: unknown key. {hint}".rstrip())
    values = {}
    for key, described in known.items():
        if key not in given and described.required:
            mistakes.append(f"{where}{key}: is missing.")
            continue
        try:
            values[key] = described.check(f"{where}{key}", given[key]) if key in given else described.default
        except UserError as mistake:
            mistakes.append(str(mistake))
    return values


def _seeds(given: Any, mistakes: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(given, dict) or not {"confirmation"} <= {*given} <= {"screening", "confirmation"}:
        mistakes.append("seeds: give screening and confirmation, such as [seeds] screening = [1, 2].")
        return (), ()
    for key, seeds in given.items():
        whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
        if not whole or not seeds or len({*seeds}) < len(seeds):
            mistakes.append(f"seeds.{key}: must be a list of different whole numbers, got {seeds!r}.")
            return (), ()
    return tuple(given.get("screening", ())), tuple(given["confirmation"])


def _decodings(given: Any, mistakes: list[str]) -> dict[str, tuple[str, ...]]:
    if not isinstance(given, dict) or not given:
        mistakes.append('decodings: name one or more, such as [decodings] beam4 = ["generation.num_beams=4"].')
        return {}
    decodings = {}
    for name, settings in given.items():
        listed = isinstance(settings, list) and all(isinstance(text, str) for text in settings)
        if name == "train" or not _NAME.fullmatch(name):
            mistakes.append(f"decodings.{name}: must be a name of letters, digits, '.', '+' and '-', and not train.")
            continue
        if not listed or not all(text in searched(settings) or key_of(text) in _SAMPLES for text in settings):
            kinds = f"settings in generation.*, system, and of samples {', '.join(_SAMPLES)}"
            mistakes.append(f"decodings.{name}: must be a list of {kinds}, got {settings!r}.")
            continue
        sampled = "\n".join(text for text in settings if key_of(text) in _SAMPLES)
        try:
            for key, value in parse_toml(sampled.encode(), f"decodings.{name}").items():
                _SAMPLES[key].check(f"decodings.{name}.{key}", value)
        except UserError as mistake:
            mistakes.append(str(mistake))
            continue
        decodings[name] = tuple(settings)
    return decodings


def searched(decoding: Sequence[str]) -> list[str]:
    """The settings of a decoding in ``generation.*``, and ``system``."""
    return [text for text in decoding if text.startswith("generation.") or key_of(text) == "system"]


def generate_options(decoding: Sequence[str]) -> list[str]:
    """The options of ``ngramloss generate`` for a decoding.

    >>> generate_options(["generation.num_beams=1", "top_p=0.9"])
    ['--set', 'generation.num_beams=1', '--sample', '--top-p', '0.9']
    """
    sampled = [text.partition("=") for text in decoding if key_of(text) in _SAMPLES]
    words = [word for text in searched(decoding) for word in ("--set", text)] + ["--sample"] * bool(sampled)
    return words + [word for key, _, value in sampled for word in (f"--{key.strip().replace('_', '-')}", value.strip())]


def _named_rows(given: Sequence[Any], mistakes: list[str]) -> dict[str, NamedRow]:
    rows: dict[str, NamedRow] = {}
    for entry in (each for each in given if isinstance(each, dict)):
        values = _section("objectives: ", entry, _ROW, mistakes)
        if not {*_ROW} <= {*values}:
            continue
        name, own = values["name"], [str(text) for text in values["set"]]
        spelled = _objectives(f"row {name or values['objective']!r}", [values["objective"]], mistakes, {})
        called = name or next(iter(spelled), values["objective"])
        if name and (is_recipe(name) or not _slug(name) or _is_objective(name)):
            mistakes.append(f"objectives: {name!r} must be a name of its own, which is no objective and no recipe.")
        if fixed := [text for text in own if key_of(text) in ("objective", "train.seed")]:
            mistakes.append(f"row {called!r}: set: the study chooses objectives and seeds, not {fixed[0]!r}.")
        rows |= {called: NamedRow(spelled[0], tuple(own), values["epochs"])} if spelled else {}
    return rows


def _is_objective(text: str) -> bool:
    try:
        return bool(parse(text))
    except UserError:
        return False


def _slug(row: str) -> str:
    if is_recipe(row) or not _is_objective(row):
        return re.sub(r"[^\w.+-]+", "_", row).strip("_")
    return Recipe("", objective=row).slug.strip("-")


def _objectives(where: str, given: list[Any], mistakes: list[str], named: Mapping[str, NamedRow]) -> tuple[str, ...]:
    rows = []
    for entry in given:
        text = (entry.get("name") or entry.get("objective", "")) if isinstance(entry, dict) else entry
        if text in named:
            rows.append(text)
            continue
        try:
            rows.append(" + ".join(map(str, parse(text))))
        except UserError as mistake:
            mistakes += [] if isinstance(entry, dict) else [f"{where}: {mistake}"]  # of a row, named already
    slugs = [_slug(row) for row in rows]
    twice = sorted({row for row, slug in zip(rows, slugs, strict=True) if slugs.count(slug) > 1})
    mistakes += [f"{where}: {row!r} is there twice." for row in twice]
    if where == "objectives" and 0 < len(given) < 2:
        mistakes.append("objectives: give two or more; the first is the baseline.")
    return tuple(rows)


def _tuning(given: Any, rows: Sequence[str], named: Mapping[str, NamedRow], mistakes: list[str]) -> Tuning | None:
    if not isinstance(given, dict):
        mistakes.append(f"tune: must be a table of settings, got {given!r}.")
        return None
    own = _section("tune.", {key: value for key, value in given.items() if key in _TUNE}, _TUNE, mistakes)
    grid = _grid("tune", {key: value for key, value in given.items() if key not in _TUNE}, mistakes)
    tuned = _objectives("tune.objectives", own.get("objectives", []), mistakes, named)
    others = next(iter(_objectives("tune.others", [own.get("others", "ce")], mistakes, named)), "")
    mistakes += [f"tune.objectives: {row!r} is not one of the objectives." for row in tuned if rows and row not in rows]
    if rows and rows[0] not in tuned:
        mistakes.append(f"tune.objectives: must contain the baseline, {rows[0]!r}: else it is compared untuned.")
    if tuned and others not in tuned:
        mistakes.append(f"tune.others: must be one of tune.objectives, got {others!r}.")
    if mistakes:
        return None
    return Tuning(grid, tuned, others, own["seed"])


def _grid(where: str, given: Mapping[str, Any], mistakes: list[str]) -> tuple[tuple[str, ...], ...]:
    tried: dict[str, Any] = {}
    for key, value in given.items():  # train.learning_rate without quotes is a table in TOML
        tried |= {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    before = len(mistakes)
    for key, values in tried.items():
        if key in ("train.seed", "objective"):
            mistakes.append(f"{where}.{key}: cannot be tuned.")
        elif not isinstance(values, list) or not values:
            mistakes.append(f"{where}.{key}: must be a list of the values to try, got {values!r}.")
    if not tried:
        mistakes.append(f'{where}: name what is tuned, such as "train.learning_rate" = [1e-4, 2e-4].')
    if len(mistakes) > before:
        return ()
    pairs = [[f"{key}={json.dumps(value)}" for value in values] for key, values in tried.items()]
    return tuple(itertools.product(*pairs))


def _data_set(
    given: Mapping[str, Any], study: Study, top: Mapping[str, Any], path: Path, mistakes: list[str]
) -> DataSet | None:
    """One set, with its recipe resolved. Each row, tuned value and decoding is tried: none may be a mistake later."""
    before, tuning, decodings, screening = len(mistakes), study.tuning, study.decodings, study.screening
    where = f"set {given['name']}: " if isinstance(given.get("name"), str) else "set: "
    entry = _section(where, {key: given[key] for key in given if key not in (_OWN_GRID, _OWN_SEEDS)}, _SET, mistakes)
    grid = tuning.grid if tuning else ()
    if _OWN_GRID in given and not tuning:
        mistakes.append(f"{where}tune: the study has no [tune] that says which rows are tuned.")
    elif not isinstance(own_grid := given.get(_OWN_GRID, {}), dict):
        mistakes.append(f"{where}tune: must be a table of settings, got {own_grid!r}.")
    elif _OWN_GRID in given:
        grid = _grid(f"{where}tune", own_grid, mistakes)
    if len(mistakes) > before:
        return None
    if not _NAME.fullmatch(entry["name"]):
        mistakes.append(f"{where}name: must be letters, digits, '.', '+' and '-', as it names a folder.")
    own_seeds = given.get(_OWN_SEEDS, list(screening))
    known_seeds = isinstance(own_seeds, list) and all(seed in screening for seed in own_seeds)
    if not known_seeds or len(own_seeds) < bool(screening):
        mistakes.append(f"{where}screening: must be a list of some of the seeds in seeds.screening, got {own_seeds!r}.")
    mistakes += _unknown_metrics(f"{where}metrics", entry["metrics"])
    if entry["decoding"] not in decodings:
        mistakes.append(f"{where}decoding: must be one of {', '.join(decodings)}, got {entry['decoding']!r}.")
    owner = next((name for name in METRICS if entry["primary"] in scores_of(name)), "")
    if not owner or scores_of(owner)[entry["primary"]].better == "neither":
        every = [score for name in METRICS for score, about in scores_of(name).items() if about.better != "neither"]
        hint = nearest(entry["primary"], every, 0.5)
        mistakes.append(f"{where}primary: there is no such score, {entry['primary']!r}. {hint}".rstrip())
    if fixed := [text for text in entry["set"] if key_of(text) in ("objective", "train.seed")]:
        mistakes.append(f"{where}set: the study chooses objectives and seeds, so {fixed[0]!r} cannot be set.")
    try:
        rows = [study.named.get(row, NamedRow(row)) for row in study.objectives]
        own = entry["recipe"] or top["recipe"]
        if not own:
            raise UserError("recipe: is missing, in the study and in the set.")
        beside = path.parent / own
        own = str(beside) if own not in recipe.builtin() and beside.is_file() else own
        base = recipe.load(own, [*entry["set"], f"objective={rows[0].objective}"])
        tried = [row.settings(base) for row in rows] + [[*point] for point in grid]
        for settings in [*tried, *(searched(decoding) for decoding in decodings.values())]:
            run_of(recipe.changed(base, settings))
    except UserError as mistake:
        mistakes.append(f"{where}{mistake}")
        return None
    if len(mistakes) > before:
        return None
    more_metrics = (*top["metrics"], *entry["metrics"])
    metrics = dict.fromkeys([owner, *METRICS_OF[base.task], *more_metrics])
    screened = tuple(seed for seed in screening if seed in own_seeds)
    written = entry["primary"], entry["decoding"], tuple(metrics), entry["limit"]
    data = DataSet(entry["name"], base, *written, grid, screened, more_metrics, tuple(entry["metric_options"]))
    mistakes += [f"{where}{mistake}" for mistake in _wrong_options(data)]
    return None if len(mistakes) > before else data


def _unknown_metrics(where: str, names: Sequence[Any]) -> Iterator[str]:
    for name in names:
        if name not in METRICS:
            hint = nearest(str(name), METRICS, 0.5)
            yield f"{where}: there is no metric {name!r}. {hint}See ngramloss list metrics."


def _wrong_options(data: DataSet) -> Iterator[str]:
    expected = f"metric_options: takes METRIC.OPTION=VALUE for a metric of the set, {', '.join(data.metrics)}"
    for text in data.metric_options:
        if text.partition(".")[0].strip() not in data.metrics:
            yield f"{expected}, got {text!r}."
    for metric in data.metrics:
        try:
            lacking = missing_options(metric, data.options(metric))
        except UserError as mistake:
            yield str(mistake)
        else:
            for option in lacking:
                yield f'metric_options: {metric} needs {option}. Give it: metric_options = ["{metric}.{option}=…"].'
