"""a run or a model, data and settings → a ``Job``: which model writes texts of which documents, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data import Split, load_split
from ngramloss.data.columns import NO_TARGET, listed
from ngramloss.data.data_sets import Files, has_several_sentences, missing, origin
from ngramloss.data.prompts import read_alike
from ngramloss.errors import MissingFileError, UserError
from ngramloss.generation.baselines import baseline_writer, is_baseline
from ngramloss.output.console import logger
from ngramloss.recipe import AUTO, TASKS, Data, Generation, Model, Recipe
from ngramloss.storage.files import read_object
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training.system_registry import Written, read_system, system_of

DEFAULTS = dict(zip(TASKS, ("xsum", "translation"), strict=True))
"""Task → the recipe that completes the settings for a model that was trained elsewhere."""


class Job(NamedTuple):
    """One generation job: model, data and settings."""

    model: str  # A run folder, a model folder or hub id, or a baseline such as ``lead-3``
    loading: Model
    data: Data
    split: str
    generation: Generation | None  # none means the model's own ``generation_config``
    preset: str | None  # the name of the preset, if one was chosen
    limit: int  # maximum number of documents; 0 means all
    batch_size: int  # documents per batch; 0 means as many as the memory allows
    task: str = TASKS[0]
    engine: str = AUTO
    precision: str = "fp32"
    drafter: str = ""  # the folder of what drafts for the engine ``draft``
    system: str = ""  # the written form of a system, if ``--set system=…`` gave one; empty: the run's own
    only: tuple[str, ...] = ()
    """The search settings that were given for a model that was trained elsewhere; the others are its own. Empty: all of
    ``generation`` counts."""
    need_target: bool = False
    """Whether the target column was named for this job, so that it must be there. One that a run was trained with need
    not be in other data."""

    @property
    def is_run(self) -> bool:
        """Whether a run trained the model."""
        return self.loading.name != self.model

    @property
    def has_lines(self) -> bool:
        """Whether texts of this data set, or of the preset's, are written one sentence per line."""
        return has_several_sentences(self.data.name) or has_several_sentences(self.preset or "")

    @property
    def asked_system(self) -> Written | None:
        """The run's system with the options that were asked for, or those of its training; None if it has no system."""
        own = system_of(self.model) if self.is_run else None
        if own is None or not self.system:
            return own
        asked = read_system(self.system)
        if asked.name != own.name:
            raise UserError(f"system: {self.model} is a run of {own.name}, not of {asked.name}.")
        may = own.entry.options_in_generate
        if kept := [name for name in asked.given if name not in may]:
            kept = kept if may else ["options"]
            what = f"Only {', '.join(may)} can be changed." if may else "Leave --set system out."
            raise UserError(
                f"{self.model} is a run of {own.name}, which keeps the {', '.join(kept)} of its training. {what}"
            )
        before = own.options if own.entry.loads else {}
        return asked._replace(options=asked.options | before | {name: asked.options[name] for name in asked.given})

    @property
    def loading_system(self) -> Written | None:
        """The run's system, if it provides the model that the standard search uses."""
        asked = self.asked_system
        return asked if asked is not None and asked.entry.loads else None

    def read_sources(self, *, reader: str = "") -> Split:
        """The documents, and their targets if there are any; says so if there are none.

        ``reader`` is what reads the targets and so needs them, such as ``ext-oracle``; empty: nothing does.
        """
        split = load_split(self.data, self.task, self.split, limit=self.limit, need_target=self.need_target)
        if split.has_targets:
            return split
        where, unread = f"{split.name} ({split.split}) has no targets", ""
        if split.unread:
            names = listed(split.unread)
            unread = f" Columns that are not read: {names}. If one has the targets, name it with --target."
        if reader:
            raise UserError(f"{reader} reads the targets, and {where}.{unread}")
        logger.info(
            f"{where}: outputs are generated from its sources ({split.column}), but `ngramloss score` will have no "
            f"references.{unread}"
        )
        return split


def job(
    model: str,
    *,
    data: str | None = None,
    like: str | None = None,
    split: str | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    limit: int = 0,
    batch_size: int = 0,
    verb: str = "generate",
) -> Job:
    """A job of a run, by its settings and ``like`` a run's documents, or of another model, by its own or a preset's."""
    if data is not None and like is not None:
        raise UserError("give --data or --like, not both: each chooses the documents.")
    run = RunFolder(Path(model))
    own: Recipe | None = None
    if run.recipe.is_file():
        if not run.finished:
            raise MissingFileError(
                f"{model} has no {run.model.name}/: its training is not finished, or the model was "
                "deleted. The same ngramloss train command continues from its last checkpoint."
            )
        own = recipe.load(str(run.recipe), objective=False)
    accepted = ("generation.", "data.", "task=", *(("system=",) if own and own.system else ()))
    for setting in overrides:
        if not setting.startswith(accepted):
            raise UserError(f"{verb} accepts --set only for generation.*, data.* and task, got {setting!r}.")
        key = setting.partition("=")[0].strip()
        if key == "data.leave_out":
            raise UserError(f"data.leave_out is a setting of train: {verb} reads it from the run. Remove it.")
        if key.startswith("data.") and key in recipe.affecting("rows", "weights"):
            instead = "Use --limit." if key in recipe.affecting("rows") else "Leave it out."
            raise UserError(f"{key} is a setting of train, and {verb} does not read it. {instead}")
    if data is None and like is None and own is None and preset is None:
        if not (Path(model).exists() or is_baseline(model)):
            may_be_on_hub = len(Path(model).parts) == 2  # owner/name
            hint = " For a model of the hub, choose the documents with --data." if may_be_on_hub else ""
            raise MissingFileError(missing(Path(model)) + hint)
        raise UserError(
            f"{model} is not a run, so it names no data. Choose the documents with --data, --like RUN or --preset."
        )
    base = own
    if base is None:  # a model that was trained elsewhere does not expect separators before sentences
        task = recipe.load("xsum", [setting for setting in overrides if setting.startswith("task=")]).task
        base = recipe.load(preset or DEFAULTS[task], ["data.separator=none"])
    if preset is not None:
        how = {name: getattr(base.generation, name) for name in ("engine", "precision")}
        base = dataclasses.replace(base, generation=dataclasses.replace(recipe.load(preset).generation, **how))
    elif own is None:  # of the search, only what is given counts
        base = dataclasses.replace(base, generation=Generation())
    keys = [setting.partition("=")[0].strip() for setting in overrides]
    cut = {"data.validation_fraction", "data.test_fraction"} & {*keys}
    if data is not None and split is None and not cut and _is_file(data):  # all of its rows, and of no split but this
        if own is not None and _is_file(own.data.name) and Path(data).resolve() == Path(own.data.name).resolve():
            logger.warning(f"{model} was trained on rows of {data}. Without --data, its held-out rows are used.")
        data = f"test={data}"
    if data is not None:  # columns and a held-out part are of the run's own data
        whole: dict[str, Any] = {"validation_fraction": 0.0, "test_fraction": 0.0, "leave_out": ""}
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, name=data, **whole))
    if like is not None:
        compared, recorded = _run(Path(like))
        read = {name: getattr(base.data, name) for name in recipe.affecting("tokens", section="data")}
        base = dataclasses.replace(base, data=dataclasses.replace(compared.data, **read), task=compared.task)
        if recorded.get("data") == compared.data.name:  # otherwise its predictions are of other documents
            split, limit = split or recorded.get("split"), limit or recorded.get("documents", 0)
    split = split or "test"
    settings = recipe.changed(base, overrides, objective=False)
    chosen = settings.data
    trained = own.data if own and (data is None or cut) and chosen.name == own.data.name else chosen
    for key in ("validation_fraction", "test_fraction"):
        if getattr(chosen, key) != getattr(trained, key):
            raise UserError(
                f"{model} was trained with data.{key} = {getattr(trained, key):g}. With another value, some held-out "
                f"rows would be rows that it was trained on. Leave data.{key} out, or choose other data with --data."
            )
    baseline_writer(model, chosen.name, split)  # raises if the baseline does not work on these data
    only_how = recipe.affecting("speed")
    asked = [key.partition(".")[2] for key in keys if key.startswith("generation.") and key not in only_how]
    searched = preset is not None or bool(asked)
    loads = own is not None and bool(own.system) and read_system(own.system).entry.loads
    own_model = dataclasses.replace(own.model, name=str(run.model), encoder="", revision="main") if own else None
    return Job(
        model,
        own_model or Model(name=model),
        chosen,
        split,
        settings.generation if searched else None,
        preset,
        limit,
        batch_size,
        settings.task,
        settings.generation.engine,
        settings.generation.precision,
        settings.generation.drafter,
        settings.system if "system" in keys else "",
        () if preset or (own and not loads) else tuple(asked),
        "data.target" in keys and chosen.target not in ("", NO_TARGET),
    )


def _run(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The settings of a run, and what it recorded of its own predictions, if it has some."""
    run = RunFolder(folder)
    if not run.path.exists():
        raise MissingFileError(missing(run.path))
    if not run.recipe.is_file():
        raise MissingFileError(f"--like takes a run's folder, and {run.path} has no {run.recipe.name}.")
    recorded = read_object(run.generation) if run.generation.is_file() else {}
    return recipe.load(str(run.recipe), objective=False), recorded


def _is_file(data: str) -> bool:
    """Whether data are a single file or standard input, whose rows no name of a split divides."""
    return data == "-" or (Path(data).is_file() and isinstance(origin(data), Files) and not {*",="} & {*data})


def source_column(work: Job, column: str) -> str:
    """The column that decides how a model reads sources, that of its training if any; raises for another kind."""
    prepared = RunFolder(Path(work.model)).prepared
    trained = str(read_object(prepared).get("column", "")) if work.is_run and prepared.is_file() else ""
    if not trained or not column:
        return trained or column
    if not read_alike(trained, column, template=work.data.prompt):
        raise UserError(
            f"{work.model} was trained on sources in the column {trained!r}, but these are in {column!r}, which is "
            "read in another way. Rename the column as in training, or choose one with --source; a template with "
            "--set data.prompt=…"
        )
    return trained


def check_model(work: Job, verb: str, *, groups: int = 1) -> None:
    """Raise if a command cannot use the model of a job, before any data are read."""
    from ngramloss.models.loading import load_config
    from ngramloss.search import engines

    if is_baseline(work.model):
        return
    config = load_config(work.loading, verb=verb)
    if groups > 1:
        engines.check_groups(work.engine, config.model_type)


def read_split(work: Job) -> Split:
    """Read the documents of a job and their targets."""
    return load_split(work.data, work.task, work.split, limit=work.limit)


def data_facts(work: Job, split: Split) -> dict[str, Any]:
    """What is saved of a job's data with the texts."""
    facts = {
        "data": work.data.name,
        "split": work.split,
        "fingerprint": split.fingerprint,
        "documents": len(split.examples),
        "preset": work.preset,
    }
    if work.task != TASKS[0]:  # not otherwise: predictions of earlier versions do not say it
        facts["task"] = work.task
    return facts
