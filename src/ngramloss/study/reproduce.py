"""a table of the paper and a scale → a study of its rows, its tables beside the paper's values, and a report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data import has_split, measurement
from ngramloss.data.data_sets import canonical
from ngramloss.errors import UserError
from ngramloss.generation import predictions
from ngramloss.generation.job import DEFAULTS, Job, read_split
from ngramloss.models import loading
from ngramloss.output.console import logger
from ngramloss.output.tabular import Cell, Head, Row, Table
from ngramloss.recipe import TASKS, Model
from ngramloss.report import build, page
from ngramloss.scoring import paper, results, scored_texts
from ngramloss.storage.files import lock_folder
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study import run as running
from ngramloss.study import tables
from ngramloss.study.plan import METRICS_OF, TEST, DataSet, Study, Training, check_data
from ngramloss.study.results import ResultFolder, claim, raise_unless_same_study
from ngramloss.study.system_rows import PASSED_ON, belongs_to, key_of, system_rows, with_needed
from ngramloss.training import runner
from ngramloss.training.system_registry import SYSTEMS, run_of

SMALL = "newswire"
BASE, RESULTS = "base", "results"  # Folders of the model that is trained first, and of the study's results

RECIPES = {"newswire": "newswire", "xsum": "xsum", "cnn_dailymail": "cnndm"}  # Data set → the recipe that trains on it

TRANSLATIONS = ("multi30k",)  # Known data sets that are translations

MORE = ("names_right", "figures_right", "bertscore", "wmd", "factcc", "summac_conv")
"""Columns that the table has besides those of a study, if they were scored."""

SMALL_NOTE = (
    "This is a small-scale experiment, not the paper's: a small model is trained with cross-entropy on text built from "
    "templates, then fine-tuned with each objective for the same number of steps. Compare scores with the two "
    "baselines. Gains or losses here say nothing about real news."
)
SYSTEMS_NOTE = (
    "Systems are trained with recipes and models of their own, and write as their recipes say. A difference to the "
    "first row is one of systems, not of objectives."
)
ONE_SEED = "One run of each row says nothing about variation between runs: there is no test over seeds."


class TablePlan(NamedTuple):
    """Everything that a table needs."""

    table: str  # the name of the paper's
    data: str  # the name of the data set
    folder: Path  # for all runs
    base: recipe.Recipe | None  # settings of the model that is trained first; None if a model is given
    study: Study  # the rows, each trained with every seed, and tested without a choice
    baselines: tuple[str, ...]  # systems without a model
    metrics: tuple[str, ...]  # of the report
    systems: tuple[str, ...] = ()  # the names of the rows that are systems, after the objectives
    settings: tuple[str, ...] = ()  # what was asked to be changed, each ``key=value``

    @property
    def set(self) -> DataSet:
        """The one set of the study: data and model."""
        return self.study.sets[0]

    @property
    def trainings(self) -> list[Training]:
        """In the order of the rows, each with all its seeds."""
        rows, seeds = self.study.objectives, self.study.confirmation
        return [Training(self.set.name, row, (), seed, TEST) for row in rows for seed in seeds]

    @property
    def notes(self) -> list[str]:
        """What a reader should know first."""
        one_seed = [ONE_SEED] if len(self.study.confirmation) == 1 else []
        return [self._scale, *([SYSTEMS_NOTE, *self._not_passed_on] if self.systems else []), *one_seed]

    @property
    def _not_passed_on(self) -> list[str]:
        known = with_needed(self.systems)
        kept = [text for text in self.settings if not belongs_to(text, known) and key_of(text) not in PASSED_ON]
        one = f". For one of them: --set {self.systems[0]}.{kept[0]}" if kept else ""
        return [f"Not passed on to systems: {', '.join(kept)}{one}"] if kept else []

    @property
    def _scale(self) -> str:
        if self.base is not None:
            return SMALL_NOTE
        part = f"the first {self.set.limit} documents of " if self.set.limit else ""
        model, runs = self.set.base.model.name, len(self.trainings)
        if self.systems:
            return f"Trained on {self.data}, objectives with {model}; {runs} runs, scored on {part}the test split."
        return f"{model} fine-tuned on {self.data}, {runs} runs, scored on {part}the test split."

    @property
    def paper_data(self) -> str | None:
        """The data set of the paper whose scores are shown, if any; the built-in corpus stands in for the paper's."""
        if self.data not in RECIPES:
            return None
        return self.data if self.data in paper.TABLE2 and self.table != "table3" else "cnn_dailymail"

    @property
    def title(self) -> str:
        """Of the study and of the page."""
        if self.paper_data is None:
            return f"Objectives {'and systems ' if self.systems else ''}compared on {self.data}"
        tables = {"table2": "Results (Table 2)", "table3": "Ablation (Table 3)"}
        return f"{tables.get(self.table, 'Results and cases (Tables 4 to 6)')} on {self.data}"


class Reproduced(NamedTuple):
    """The results of a plan."""

    tables: list[tables.SetTables]  # of the study, with the paper's values beside them
    result: results.Result  # scores of every run and baseline, as in the report
    texts: scored_texts.Aligned  # what they wrote
    page: Path  # the report
    failed: bool  # whether a training failed


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
    systems: Sequence[str] = (),
) -> TablePlan:
    """Plan ``table2``, ``table3`` or ``cases``, with all runs in ``folder``. Newswire trains a ``model`` by default.

    ``overrides`` are ``key=value`` of the recipe, and ``SYSTEM.key=value`` of a system's.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be 1 or more, got {seeds}.")
    if any(key_of(setting) == "data.name" for setting in overrides):
        raise UserError("choose the data with --data, not with --set data.name.")
    if systems and table != "table2":
        raise UserError(f"--systems adds rows only to table2, not to {table}. Use table2, or leave --systems out.")
    asked, known = tuple(overrides), with_needed(systems)
    if stray := [text for text in asked if belongs_to(text, SYSTEMS) and not belongs_to(text, known)]:
        raise UserError(f"--set {stray[0]}: {belongs_to(stray[0], SYSTEMS)} is not one of --systems.")
    overrides = [setting for setting in asked if not belongs_to(setting, known)]
    name = canonical(data or chosen_data())
    base = recipe.load("demo", ["objective=ce"]) if name == SMALL and model is None else None
    model = str(RunFolder(folder / BASE).model) if base else model
    settings = [*([f"model.name={model}"] if model else []), *overrides]
    settings += [f"data.name={name}"] if name not in RECIPES else []
    task = [text for text in overrides if key_of(text) == "task"] or [f"task={TASKS[name in TRANSLATIONS]}"]
    own = RECIPES.get(name, DEFAULTS[recipe.load("xsum", task).task])
    asked_for = objectives or paper.objectives(table)
    rows = [recipe.load(own, [*settings, f"objective={objective}"]) for objective in asked_for]
    first, is_summary = rows[0], rows[0].task == TASKS[0]
    beams = first.generation.num_beams
    decoding = f"beam{beams}" if beams > 1 else "greedy"
    called = re.sub(r"[^\w.+-]", "-", Path(name).name, flags=re.ASCII)
    called += "-data" if called in (BASE, RESULTS) else ""
    compared = DataSet(called, first, "rouge2" if is_summary else "bleu", decoding, METRICS_OF[first.task], limit)
    names = (*dict.fromkeys(row.objective for row in rows), *systems)
    held_out, small = not systems or has_split(first.data, "validation"), name == SMALL
    others = system_rows(systems, folder, name, first.task, overrides=asked, small=small, validation=held_out)
    title, tested = f"{table} on {name}", {"confirmation": tuple(range(1, seeds + 1)), "confirm": len(names) - 1}
    rows_of: dict[str, Any] = {"objectives": names, "systems": others, "grows": True, **tested}
    study = Study(f"reproduce-{called}", title, sets=(compared,), decodings={decoding: ()}, **rows_of)
    ruled = ("lead-2", "random-facts") if name == SMALL else ("lead-3",)
    baselines = (*ruled, *(["ext-oracle"] if systems else [])) if is_summary else ()
    shown = (*(["rouge"] if is_summary else []), "bleu", "chrf", "shape", *(["facts"] if name == SMALL else []))
    scored = tuple(dict.fromkeys([*shown, *metrics]))
    return TablePlan(table, name, folder, base, study, baselines, scored, tuple(systems), asked)


def chosen_data() -> str:
    """XSum if the hub can be reached, otherwise the built-in corpus."""
    return "xsum" if loading.hub_answers() else SMALL


def reproduce(
    plan: TablePlan,
    page_folder: Path,
    *,
    options: dict[str, dict[str, object]] | None = None,
    passed_on: Sequence[str] = (),
) -> Reproduced | None:
    """Train and generate what is missing, score, and write the report. Returns None if something is left to do."""
    study, folder = plan.study, ResultFolder(plan.folder / RESULTS, plan.study)
    raise_unless_same_study(plan.folder, study)
    folder.read()  # raises if they were made with other settings
    _check(plan, page_folder, options)
    if plan.base is not None:
        base = RunFolder(plan.folder / BASE)
        running.raise_unless_same_settings(study, plan.base, base)
        if not base.finished and not runner.train(run_of(plan.base), base.path).finished:
            return None
    claim(folder.path, study)
    claim(plan.folder, study)
    outcome = running.run(folder, running.Ways(plan.folder, options=tuple(passed_on)))
    for why in outcome.why:
        logger.info(f"not finished: {why}")
    if not outcome.finished:
        return None
    with lock_folder(plan.folder, wait=True):  # another command may have waited for the same trainings
        return _report(plan, folder, page_folder, options)


def _report(
    plan: TablePlan, folder: ResultFolder, page_folder: Path, options: dict[str, dict[str, object]] | None
) -> Reproduced:
    """Write the baselines, score them and all runs together, and write the page."""
    study, known = plan.study, folder.read()
    written = [training for training in plan.trainings if not known[training, plan.set.decoding].failed]
    if not written:
        raise UserError("\n".join(["every training failed:", *dict.fromkeys(each.failed for each in known.values())]))
    folders = [study.text_folder(training, plan.set.decoding, plan.folder) for training in written]
    if lost := [str(path) for path in folders if not RunFolder(path).predictions.exists()]:
        raise UserError(f"{', '.join(lost)} has lost its outputs. Delete {folder.path} to generate them again.")
    for baseline in plan.baselines:
        predictions.write_predictions(_baseline(plan, baseline), plan.folder / baseline)
    groups = [training.objective if plan.systems else "" for training in written]
    given = [scored_texts.Given(path, group=group) for path, group in zip(folders, groups, strict=True)]
    texts = scored_texts.align(None, [*given, *(plan.folder / baseline for baseline in plan.baselines)])
    result = results.score_systems(texts, plan.metrics, options=options)
    # The recipe of a system names only its objective.
    runs = [run._replace(label=group) if run and group else run for run, group in zip_longest(result.runs, groups)]
    result = result._replace(runs=runs)
    for warning in result.cache_warnings:
        logger.warning(f"warning: {warning}")
    about = {"notes": plan.notes, "deviations": deviations(plan)}
    shown = build.build_record(result, texts, title=plan.title, paper_of=plan.paper_data, **about)
    (of_set,) = tables.set_tables(study, running.stages_of_sets(folder, known), known)
    others = [each._replace(table=beside_the_paper(each.table, result, plan)) for each in of_set.others]
    failed = len(written) < len(plan.trainings)
    return Reproduced([of_set._replace(others=others)], result, texts, page.write_page(shown, page_folder), failed)


def deviations(plan: TablePlan) -> list[str]:
    """The settings that differ from the paper's for this data set, for XSum on the built-in corpus, and else none."""
    if plan.paper_data is None:
        return []
    theirs = "cnndm" if plan.data == "cnn_dailymail" else "xsum"
    first = plan.set.base
    printed = recipe.changed(recipe.load(theirs), [f"objective={first.objective}", f"train.seed={first.train.seed}"])
    every = recipe.differences(printed, first)
    changed = [line for line in every if not line.startswith("model.") or line.startswith("model.name")]
    sentences = [f"settings: the paper's for {theirs} → used here", *changed] if changed else []
    for system in plan.systems:
        published, *small = SYSTEMS[system].recipes
        if plan.data == SMALL and small:
            sentences.append(f"{system}: the recipe {small[-1]}, not {published}, with the objective of {published}")
    sentences += [f"{text.strip()}, not its recipe's" for text in plan.settings if belongs_to(text, plan.study.systems)]
    candidates = "simcls: candidates of the row ce, which has read their documents; the authors' are BART-large's"
    sentences += [candidates] if "simcls" in plan.systems else []
    return sentences + ([f"scored on the first {plan.set.limit} test documents"] if plan.set.limit else [])


def beside_the_paper(table: Table, result: results.Result, plan: TablePlan) -> Table:
    """A study's table of all scores with baselines, further metrics, and what the paper printed for its rows."""
    known = {head.name for head in table.heads}
    more = {name: result.described[name] for name in MORE if name in result.scores and name not in known}
    heads = [*table.heads, *(Head(name, score.label, score.better == "lower") for name, score in more.items())]
    systems = [_row(row, [*row.cells, *_scores(result, row.label, list(more))], plan) for row in table.systems]
    names = [head.name for head in heads]
    baselines = [_row(Row(name, name, (), "baseline"), _scores(result, name, names), plan) for name in plan.baselines]
    if plan.paper_data is not None:
        heads.append(Head(paper.title(plan.paper_data, systems=bool(plan.systems))))
        heads += [Head(f"paper {name}", name) for name in ("R-1", "R-2", "R-L")]
    return Table(heads, systems, baselines, corner=table.corner, intervals=True)


def _row(row: Row, cells: Sequence[Cell], plan: TablePlan) -> Row:
    label, printed = _printed(plan).get(row.label, ("", (None, None, None)))
    beside = [Cell(label), *(Cell("" if value is None else f"{value:.2f}", value) for value in printed)]
    return Row(row.name, row.label, [*cells, *(beside if plan.paper_data else [])], row.kind)


def _scores(result: results.Result, label: str, names: Sequence[str]) -> list[Cell]:
    """The scores of a row, means over its runs; empty for a column that is not a score."""
    runs, cells = [index for index, run in enumerate(result.runs) if run is not None and run.label == label], []
    for name in names:
        values = [result.scores[name][index].value for index in runs] if name in result.scores else []
        cells.append(tables.mean_cell(values, result.described[name]) if name in result.scores else Cell(""))
    return cells


def _printed(plan: TablePlan) -> dict[str, tuple[str, tuple[float | None, ...]]]:
    if plan.paper_data is None:
        return {}
    if plan.table != "table3":
        rows = paper.TABLE2[plan.paper_data]
        return {row.objective or row.system: (row.label, row.scores[:3]) for row in rows if row.objective or row.system}
    printed = [(f" {part.split()[1]}", row) for part, rows in paper.TABLE3.items() for row in rows]
    return {row: (label if row == "ce" else label + part, scores) for part, (label, row, scores) in printed}


def table1(names: Sequence[str], *, limit: int = 0) -> str:
    """The statistics of the paper's Table 1 for each data set."""
    return "\n\n".join(str(measurement(name, limit=limit)) for name in names)


def cases(result: results.Result, texts: scored_texts.Aligned, score: str, *, count: int = 3) -> str:
    """The documents on which the systems differ most in one score, with the reference and every system's text."""
    assert texts.task.references is not None, "its data are read with their targets first"
    trained = {index: run for index, run in enumerate(result.runs) if run is not None and not run.is_baseline}
    scores = [result.documents[index][score] for index in trained]
    differences = [max(each) - min(each) for each in zip(*scores, strict=True)]
    lines = []
    for case in sorted(range(len(differences)), key=lambda case: -differences[case])[:count]:
        lines += ["", texts.task.ids[case], f"  reference: {texts.task.references[case][0]}"]
        for (index, run), each in zip(trained.items(), scores, strict=True):
            lines.append(f"  {run.label}, seed {run.seed} ({each[case]:.0f}): {texts.texts[index][case]}")
    return "\n".join(lines)


def _check(plan: TablePlan, page_folder: Path, options: dict[str, dict[str, object]] | None) -> None:
    """Raise if something would fail after the trainings. A study checks the model and its data by itself."""
    page.check(page_folder, "--out")
    if fixed := [name for name in options or {} if any(name in data.metrics for data in plan.study.sets)]:
        why = f"the rows of the table are scored with the usual options of {fixed[0]}, and baselines would have others"
        advice = f"Leave it out, and score afterwards: ngramloss score RUNS --set {fixed[0]}.…"
        raise UserError(f"--set {fixed[0]}.…: {why}. {advice}")
    if all(RunFolder(training.run_folder(plan.folder)).finished for training in plan.trainings):
        return
    first = read_split(_baseline(plan, "lead-1")).examples[0]
    check_data(plan.study, plan.study.sets)
    task = scored_texts.DocumentSet([first.id], [list(first.references) or [first.target]], [first.source])
    sample = scored_texts.Aligned(task, ["sample"], [[first.target]], [None], [])
    absent = results.score_systems(sample, plan.metrics, options=options, samples=1, shuffles=0).absent
    if absent:
        reasons = "; ".join(f"{name} {reason}" for name, reason in absent.items())
        raise UserError(f"nothing was trained, because a metric cannot run: {reasons}")


def _baseline(plan: TablePlan, name: str) -> Job:
    settings = plan.set.base
    return Job(name, Model(name=name), settings.data, TEST, None, None, plan.set.limit, 0, task=settings.task)
