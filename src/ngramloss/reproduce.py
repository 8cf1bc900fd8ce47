"""a table of the paper and a scale → its trainings, generations and scores, the table next to the paper's, a report."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ngramloss import recipe
from ngramloss.data import measurement
from ngramloss.data.origins import canonical
from ngramloss.errors import UserError
from ngramloss.generation import predictions
from ngramloss.generation.job import DEFAULTS, Job, job, read_split
from ngramloss.metrics.registry import Score
from ngramloss.models import loading
from ngramloss.output import tabular
from ngramloss.output.console import logger
from ngramloss.output.tabular import Cell, Head, Row, Table
from ngramloss.recipe import TASKS
from ngramloss.report import build, page
from ngramloss.scoring import paper, provenance, results, significance, systems, tables
from ngramloss.scoring.significance import CorpusScore
from ngramloss.storage.files import read_object, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training import runner

SMALL = "newswire"
BASE = "base"
"""Folder of the model that is trained first."""
BATCH = 32
"""Number of documents in a generation batch."""

RECIPES = {"newswire": "newswire", "xsum": "xsum", "cnn_dailymail": "cnndm"}
"""Data set → the recipe that trains on it."""

TRANSLATIONS = ("multi30k",)
"""Known data sets that are translations."""

FIGURES = (
    "bleu",
    "chrf",
    "rouge1",
    "rouge2",
    "rougeL",
    "rougeLsum",
    "names_right",
    "figures_right",
    "bertscore",
    "wmd",
    "factcc",
    "summac_conv",
)
"""Columns of the table; those that were not scored are omitted, and BLEU and chrF if ROUGE was scored."""

SMALL_NOTE = (
    "This is a small-scale experiment, not the paper's: a small model is trained with cross-entropy on text built from "
    "templates, then fine-tuned with each objective for the same number of steps. Compare scores with the two "
    "baselines. Gains or losses here say nothing about real news."
)


class Training(NamedTuple):
    """One run: an objective, a seed, its settings and its folder."""

    objective: str
    seed: int
    settings: recipe.Recipe
    folder: Path


class Plan(NamedTuple):
    """Everything that a table needs.

    Attributes:
        table: name of the paper's table.
        data: the data set's name.
        folder: the folder for all runs.
        base: settings of the model that is trained first; None if a model is given.
        trainings: in the paper's order, cross-entropy first.
        baselines: systems without a model.
        metrics: the metrics to compute.
        limit: maximum number of test documents; 0 means all.
    """

    table: str
    data: str
    folder: Path
    base: recipe.Recipe | None
    trainings: list[Training]
    baselines: tuple[str, ...]
    metrics: tuple[str, ...]
    limit: int

    @property
    def note(self) -> str:
        """The first note of the report."""
        if self.base is not None:
            return SMALL_NOTE
        model = self.trainings[0].settings.model.name
        part = f"the first {self.limit} documents of " if self.limit else ""
        return f"{model} fine-tuned on {self.data}, {len(self.trainings)} runs, scored on {part}the test split."

    @property
    def task(self) -> str:
        """The task of the trainings: one of ``TASKS``."""
        return self.trainings[0].settings.task

    @property
    def figure(self) -> str:
        """The score by which objectives and cases are compared in one number."""
        return "rouge2" if self.task == TASKS[0] else "bleu"

    @property
    def paper_data(self) -> str | None:
        """The data set of the paper whose scores are shown; None on data that have nothing to do with the paper.

        The built-in corpus stands in for the paper's at a small scale, and is shown beside the ablation's data set.
        """
        if self.data not in RECIPES:
            return None
        return self.data if self.data in paper.TABLE2 and self.table != "table3" else "cnn_dailymail"


class Reproduced(NamedTuple):
    """The results of a plan."""

    result: results.Result
    texts: systems.Aligned
    page: Path


def make_plan(
    table: str,
    folder: Path,
    *,
    data: str | None = None,
    model: str | None = None,
    seeds: int = 1,
    objectives: Sequence[str] = (),
    overrides: Sequence[str] = (),
    metrics: Sequence[str] = (),
    limit: int = 0,
) -> Plan:
    """Plan the trainings and scores of a table.

    Args:
        table: ``table2``, ``table3`` or ``cases``; ``table1`` needs no training.
        folder: the folder for all runs; finished runs in it are reused.
        data: ``newswire``, ``xsum``, ``cnn_dailymail``, or your own files, trained with XSum's recipe, or with that of
            translations if ``overrides`` say that they are translations.
        model: a folder or hub id to fine-tune; by default the recipe's. On newswire a model is trained first.
        seeds: number of runs of each objective, with seeds 1, 2, ….
        objectives: only these rows.
        overrides: ``key=value`` settings of the recipe.
        metrics: metrics besides ROUGE, BLEU, chrF and the shape of the texts.
        limit: maximum number of test documents; 0 means all.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be 1 or more, got {seeds}.")
    if any(setting.partition("=")[0].strip() == "data.name" for setting in overrides):
        raise UserError("choose the data with --data, not with --set data.name.")
    name = canonical(data or chosen_data())
    base = None
    if name == SMALL and model is None:
        base = recipe.load("demo", ["objective=ce"])
        model = str(RunFolder(folder / BASE).model)
    settings = [*([f"model.name={model}"] if model else []), *overrides]
    if name not in RECIPES:
        settings.append(f"data.name={name}")
    default = DEFAULTS[_task(name, overrides)]
    rows = [
        recipe.load(RECIPES.get(name, default), [*settings, f"objective={objective}"])
        for objective in objectives or paper.objectives(table)
    ]
    trainings = [
        Training(row.objective, seed, recipe.changed(row, [f"train.seed={seed}"]), _folder(folder, row, seed))
        for row in rows
        for seed in range(1, seeds + 1)
    ]
    baselines: tuple[str, ...] = ()
    own: tuple[str, ...] = ("bleu", "chrf", "shape")
    if rows[0].task == TASKS[0]:
        baselines = ("lead-2", "random-facts") if name == SMALL else ("lead-3",)
        own = ("rouge", "bleu", "chrf", "shape", *(("facts",) if name == SMALL else ()))
    return Plan(table, name, folder, base, trainings, baselines, tuple(dict.fromkeys([*own, *metrics])), limit)


def _task(data: str, overrides: Sequence[str]) -> str:
    """The task that the settings name, or else that of a known data set."""
    given = [setting for setting in overrides if setting.partition("=")[0].strip() == "task"]
    return recipe.load("xsum", given or [f"task={TASKS[data in TRANSLATIONS]}"]).task


def chosen_data() -> str:
    """XSum if the hub can be reached, otherwise the built-in corpus."""
    return "xsum" if loading.hub_answers() else SMALL


def reproduce(
    plan: Plan,
    page_folder: Path,
    *,
    options: dict[str, dict[str, object]] | None = None,
    trust_remote_code: bool = False,
) -> Reproduced | None:
    """Train and generate what is missing, score, and write the report. Returns None if a training was stopped.

    Args:
        plan: from :func:`make_plan`.
        page_folder: folder for the report.
        options: metric → its options.
        trust_remote_code: whether code that comes with the model may run.
    """
    _raise_if_another_plan(plan)
    baselines = [_baseline_job(plan, baseline) for baseline in plan.baselines]
    _check(plan, page_folder, options, _baseline_job(plan, "lead-1"))
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_whole(_plan_file(plan), json.dumps(_fixed_settings(plan), indent=1))
    steps = len(plan.trainings) + len(plan.baselines) + 2 + (plan.base is not None)
    at = 0

    def begin(what: str) -> None:
        nonlocal at
        at += 1
        logger.info(f"[{at}/{steps}] {what}")

    if plan.base is not None:
        begin("base model, trained with ce")
        if not _train(plan.base, plan.folder / BASE):
            return None
    for training in plan.trainings:
        begin(f"{training.objective}, seed {training.seed}")
        if not _train(training.settings, training.folder, trust_remote_code):
            return None
        work = job(str(training.folder), limit=plan.limit, batch_size=BATCH, trust_remote_code=trust_remote_code)
        _write_predictions(work, training.folder)
    for work in baselines:
        begin(f"{work.model}, a baseline without training")
        _write_predictions(work, plan.folder / work.model)
    begin("scores, intervals and tests")
    folders = [training.folder for training in plan.trainings] + [plan.folder / baseline for baseline in plan.baselines]
    texts = systems.align(None, folders)
    result = results.score_systems(texts, plan.metrics, options=options)
    for warning in result.cache_warnings:
        logger.warning(f"warning: {warning}")
    begin("report")
    shown = build.build_record(
        result,
        texts,
        title=_title(plan),
        notes=[plan.note, differences_sentence(result, plan.figure)],
        deviations=deviations(plan),
        paper_of=plan.paper_data,
    )
    return Reproduced(result, texts, page.write_page(shown, page_folder))


def deviations(plan: Plan) -> list[str]:
    """The settings that differ from the paper's for this data set, for XSum on the built-in corpus, and else none."""
    if plan.paper_data is None:
        return []
    theirs = "cnndm" if plan.data == "cnn_dailymail" else "xsum"
    first = plan.trainings[0].settings
    printed = recipe.changed(recipe.load(theirs), [f"objective={first.objective}", f"train.seed={first.train.seed}"])
    sentences = [
        line
        for line in recipe.differences(printed, first)
        if not line.startswith("model.") or line.startswith("model.name")
    ]
    if sentences:
        sentences.insert(0, f"settings: the paper's for {theirs} → used here")
    if plan.limit:
        sentences.append(f"scored on the first {plan.limit} test documents")
    return sentences


def differences_sentence(result: results.Result, name: str) -> str:
    """A one-sentence summary of the differences between the objectives in one score."""
    label = result.described[name].label
    if result.seeds:
        first, *others = result.seeds
        each = [
            f"{seeds.label} {seeds.against_first[name]['difference']:+.2f}"
            f"{tabular.mark(seeds.against_first[name]['p_holm'])}"
            for seeds in others
        ]
        return f"Difference in {label} to {first.label}, means over {len(first.names)} seeds: {_listed(each)}."
    each = []
    for system, run in enumerate(result.runs):
        score = result.scores[name][system]
        if run is not None and not run.is_baseline and score.difference is not None:
            each.append(f"{run.label} {score.difference:+.2f}{tabular.mark(score.p_holm)}")
    return (
        f"Difference in {label} to {_label(result, 0)}, one run of each: {_listed(each)}. One run says nothing "
        "about variation between runs."
    )


def _listed(differences: Sequence[str]) -> str:
    return ", ".join(differences) or "nothing to compare"


def table(result: results.Result, plan: Plan) -> Table:
    """The table in the paper's layout; next to the paper's values, unless the data have nothing to do with it."""
    omitted = ("bleu", "chrf") if "rouge1" in result.scores else ()
    scores = {name: result.described[name] for name in FIGURES if name in result.scores and name not in omitted}
    speeds = _speeds(result)
    heads = [Head(name, score.label, score.better == "lower") for name, score in scores.items()]
    heads.append(Head("Docs/s"))
    if plan.paper_data is not None:
        heads.append(Head(paper.TITLES[plan.paper_data]))
        heads += [Head(f"paper {name}", name) for name in ("R-1", "R-2", "R-L")]
    rows = []
    for label, objective, printed in _layout(plan):
        indices = [index for index, run in enumerate(result.runs) if run is not None and run.label == objective]
        cells = [_cell(result.scores[name], indices, score) for name, score in scores.items()]
        speed = Cell(f"{speeds[objective]:.0f}", speeds[objective]) if objective in speeds else Cell("")
        beside = [Cell(label), *(Cell("" if value is None else f"{value:.2f}", value) for value in printed)]
        rows.append(Row(objective, objective, [*cells, speed, *(beside if plan.paper_data else [])]))
    return Table(heads, rows, intervals=True)


def table1(names: Sequence[str], *, limit: int = 0) -> str:
    """The statistics of the paper's Table 1 for each data set."""
    return "\n\n".join(str(measurement(name, limit=limit)) for name in names)


def cases(result: results.Result, texts: systems.Aligned, figure: str, *, count: int = 3) -> str:
    """The documents on which the systems differ most in one score, with the reference and every system's text."""
    trained = [system for system, run in enumerate(result.runs) if run is not None and not run.is_baseline]
    scores = [result.documents[system][figure] for system in trained]
    differences = [max(each) - min(each) for each in zip(*scores, strict=True)]
    lines = []
    for case in sorted(range(len(differences)), key=lambda case: -differences[case])[:count]:
        lines += ["", texts.task.ids[case], f"  reference: {texts.task.references[case][0]}"]
        for system, each in zip(trained, scores, strict=True):
            lines.append(f"  {_label(result, system)} ({each[case]:.0f}): {texts.texts[system][case]}")
    return "\n".join(lines)


def _label(result: results.Result, system: int) -> str:
    run = result.runs[system]
    return result.names[system] if run is None else f"{run.label}, seed {run.seed}"


def _layout(plan: Plan) -> list[tuple[str, str, tuple[float | None, ...]]]:
    """Label, objective and the paper's R-1, R-2 and R-L of each row; rows that the paper does not have come last."""
    trained = list(dict.fromkeys(training.objective for training in plan.trainings))
    lines: list[tuple[str, str, tuple[float | None, ...]]]
    if plan.table == "table3":
        lines = [
            (f"{label} {part.split()[1]}" if objective != "ce" else label, objective, printed)
            for part, part_rows in paper.TABLE3.items()
            for label, objective, printed in part_rows
        ]
    else:
        theirs = paper.TABLE2[plan.paper_data or "xsum"]
        lines = [(row.label, row.objective, row.scores[:3]) for row in theirs if row.objective]
    known = [objective for _, objective, _ in lines]
    nothing = (None, None, None)
    return [
        *(("", baseline, nothing) for baseline in plan.baselines),
        *(line for line in lines if line[1] in trained),
        *(("", objective, nothing) for objective in trained if objective not in known),
    ]


def _cell(values: Sequence[CorpusScore], indices: Sequence[int], score: Score) -> Cell:
    """One run with its interval and mark, or the mean of several with their standard deviation."""
    if not indices:
        return Cell("–")
    if len(indices) == 1:
        return tables.cell(values[indices[0]], score)
    spread = significance.over_seeds([values[index].value for index in indices])
    return tables.seed_cell(results.Seeds("", [], {"": spread}, {}), "", score)


def _speeds(result: results.Result) -> dict[str, float]:
    """Objective → documents per second, the mean over its runs."""
    each: dict[str, list[float]] = {}
    for run in result.runs:
        speed = provenance.docs_per_second(run.folder) if run is not None and run.own else None
        if run is not None and speed is not None:
            each.setdefault(run.label, []).append(speed)
    return {objective: sum(speeds) / len(speeds) for objective, speeds in each.items()}


def _train(settings: recipe.Recipe, folder: Path, trust_remote_code: bool = False) -> bool:
    """Train, or continue. Returns whether training is finished. Raises if the run has other settings."""
    run = RunFolder(folder)
    if run.finished:
        known = run.recipe.exists()  # otherwise a model was copied here
        changed = recipe.differences(recipe.load(str(run.recipe)), settings) if known else []
        if changed:
            raise UserError(
                f"{folder} was trained with other settings ({'; '.join(changed)}). Choose another --runs, or delete it."
            )
        return True
    done = runner.train(settings, folder, trust_remote_code=trust_remote_code)
    return done.finished


def _check(plan: Plan, page_folder: Path, options: dict[str, dict[str, object]] | None, work: Job) -> None:
    """Raise if something would fail after the trainings. The first training itself checks the model and its data.

    The test split is read as the generations will read it, each metric scores one document, and the page's folder must
    be writable.
    """
    if all(RunFolder(training.folder).finished for training in plan.trainings):
        return
    page.check_packages()
    _raise_unless_writable(page_folder)
    first = read_split(work).examples[0]
    task = systems.Task([first.id], [list(first.references) or [first.target]], [first.source])
    sample = systems.Aligned(task, ["sample"], [[first.target]], [None], [])
    absent = results.score_systems(sample, plan.metrics, options=options, samples=1, shuffles=0).absent
    if absent:
        reasons = "; ".join(f"{name} {reason}" for name, reason in absent.items())
        raise UserError(f"nothing was trained, because a metric cannot run: {reasons}")


def _raise_unless_writable(folder: Path) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"cannot write the page to {folder}: {existing} is a file. Choose another --out.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write the page to {folder}: no permission to write to {existing}. Choose another --out."
        )


def _baseline_job(plan: Plan, baseline: str) -> Job:
    """The job of a baseline, which reads the data as the trainings do."""
    data = plan.trainings[0].settings.data
    same = [
        f"data.{name}={json.dumps(getattr(data, name), ensure_ascii=False)}"
        for name in ("source", "target", "id", "source_language", "target_language", "on_bad_row")
    ]
    return job(baseline, data=data.name, overrides=[*same, f"task={plan.task}"], limit=plan.limit, batch_size=BATCH)


def _write_predictions(work: Job, folder: Path) -> None:
    if not RunFolder(folder).predictions.exists():  # of this plan: see _raise_if_another_plan
        predictions.write_predictions(work, folder)


def _plan_file(plan: Plan) -> Path:
    return plan.folder / "plan.json"


def _fixed_settings(plan: Plan) -> dict[str, object]:
    """What all runs of a folder have in common. Tables, seeds and objectives may be added."""
    first = plan.trainings[0].settings
    return {"recipe": recipe.dump(recipe.changed(first, ["objective=ce", "train.seed=1"])), "limit": plan.limit}


def _raise_if_another_plan(plan: Plan) -> None:
    """Raise if the folder has runs with other settings."""
    path = _plan_file(plan)
    if not path.exists() or not any(_has_begun(run) for run in plan.folder.iterdir() if run.is_dir()):
        return
    if read_object(path, "Choose another --runs, or delete the file.") != _fixed_settings(plan):
        raise UserError(f"{plan.folder} was started with other settings. Choose another --runs, or delete it.")


def _has_begun(folder: Path) -> bool:
    """Whether a run would be lost; the base model is the same for all settings."""
    run = RunFolder(folder)
    saved = run.checkpoints.is_dir() and any(run.checkpoints.iterdir())
    return folder.name != BASE and (run.finished or run.has_predictions or saved)


def _folder(folder: Path, settings: recipe.Recipe, seed: int) -> Path:
    return folder / f"{settings.slug.removeprefix(settings.name).strip('-')}-{seed}"


def _title(plan: Plan) -> str:
    if plan.paper_data is None:
        return f"Objectives compared on {plan.data}"
    what = {"table2": "Results (Table 2)", "table3": "Ablation (Table 3)", "cases": "Results and cases (Tables 4 to 6)"}
    return f"{what[plan.table]} on {plan.data}"
