"""what a recipe of a system asks for and a folder → a trained run in it, continued from where it stopped."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from ngramloss.output.console import logger
from ngramloss.output.escape import as_code, in_markdown
from ngramloss.recipe import Recipe
from ngramloss.storage.files import whole_folder, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.systems import loop
from ngramloss.systems.candidate_sets import whole_paths
from ngramloss.systems.loop import Task
from ngramloss.systems.registry import SYSTEMS, Written, run_of
from ngramloss.training import checkpoints
from ngramloss.training.card import PACKAGES, title
from ngramloss.training.claim import claim, locked
from ngramloss.training.identity import IDENTITY, PLUGIN, objectives_made_of, raise_unless_same, record_of
from ngramloss.training.loop import total_steps
from ngramloss.training.prepare import made_of_now, read_splits
from ngramloss.training.processes import start_processes
from ngramloss.training.run import Run
from ngramloss.training.runner import Outcome, after_full_disk, best_checkpoint, open_logs
from ngramloss.training.trackers import check_trackers
from ngramloss.version import __version__, installed


def train(run: Run, folder: Path, *, fresh: bool = False, trust_remote_code: bool = False) -> Outcome:
    """Train a system, or continue from the last complete checkpoint.

    Args:
        run: what is trained.
        folder: the run folder.
        fresh: delete an earlier run in this folder and start over.
        trust_remote_code: whether code that comes with the model may run.
    """
    settings, system = run.settings, run.system
    check_trackers(settings.train.report_to)
    candidates = whole_paths(settings.data.candidates)
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, candidates=candidates))
    run_folder = RunFolder(folder)

    def now(saved: Recipe) -> Mapping[str, str]:
        return made_of_now(run_of(saved), trust_remote_code=trust_remote_code)

    with locked(run_folder, 0):
        newest = claim(settings, run_folder, fresh=fresh, check=lambda: read_splits(settings), made_of=now)
        if run_folder.finished:
            logger.info(f"{folder} is already finished. Start over with --fresh, or choose another --run.")
            return Outcome(folder, True, 0, 0)
        began = checkpoints.step(newest) if newest else 0
        torch.manual_seed(settings.train.seed)
        task: Task = system.entry.function("task")(settings, system.options, trust_remote_code=trust_remote_code)
        for sentence in task.used:
            logger.info(sentence)
        made_of = {**task.made_of, **_code_made_of(settings, system)}
        record = record_of(made_of, settings)
        if newest is not None:
            raise_unless_same(newest, record, folder=folder)
        write_whole(run_folder.prepared, json.dumps({"made_of": made_of}, indent=1))
        step, finished = began, newest is not None and checkpoints.facts(newest)["finished"]
        if not finished:
            step, finished = _run(run, run_folder, task, record, newest)
        if finished:
            why = _finish(run, run_folder, task)
            logger.info(f"finished at step {step}: {run_folder.model}{why}")
        else:
            logger.info(f"stopped at step {step}; the same command continues it.")
    return Outcome(folder, finished, step, began)


def _code_made_of(settings: Recipe, system: Written) -> dict[str, str]:
    """Fingerprints of the code of plugins that compute the loss."""
    objectives = objectives_made_of(settings.objective) if system.entry.takes_objective else {}
    own = {f"{PLUGIN} system {system.name}": SYSTEMS.source(system.name)} if SYSTEMS.origin(system.name) else {}
    return objectives | own


def _run(run: Run, run_folder: RunFolder, task: Task, record: str, newest: Path | None) -> tuple[int, bool]:
    """Run the loop. Returns the last step, and whether the training is finished."""
    settings = run.settings
    here, steps = start_processes(), total_steps(settings.train, len(task.examples))
    began = checkpoints.step(newest) if newest else 0
    if newest is not None:
        logger.info(f"continuing {run_folder.path} from step {began}.")
    shown = list(dict.fromkeys([*task.terms, *run.system.entry.bests]))
    with open_logs(settings, run_folder, here, terms=shown, score="", steps=steps, since=began) as logs:
        job = loop.Job(
            task,
            settings.train,
            higher=run.best.higher,
            folder=run_folder.checkpoints,
            saved_with={IDENTITY: record},
            continued_from=newest,
            **logs,
        )
        try:
            state = loop.run(job, here)
        except checkpoints.CheckpointError as reason:
            raise OSError(f"{reason} {after_full_disk(run_folder, here)}") from reason
    return state.step, state.step >= steps or state.ended_early


def _finish(run: Run, run_folder: RunFolder, task: Task) -> str:
    """Write the card, then the model folder, which marks the run as finished. Returns why it is this model."""
    newest = checkpoints.find(run_folder.checkpoints).newest
    assert newest is not None, "a finished run has a checkpoint"
    facts = checkpoints.facts(newest)
    chosen = best_checkpoint(run_folder, newest, facts["best_step"])
    why = ""
    if checkpoints.step(chosen) == facts["best_step"]:
        why = f", the weights of step {facts['best_step']} ({run.best.described(facts['best'])})"
    write_whole(run_folder.card, _card(run.settings, run.system, task.used, why or ", the last weights"))
    with whole_folder(run_folder.model) as partial_folder:
        checkpoints.copy_model(chosen, partial_folder)
        run_folder.record_weights(partial_folder)
    return why


def _card(settings: Recipe, system: Written, used: Sequence[str], why: str) -> str:
    """The card as Markdown: what was trained, on what, with which settings and versions."""
    versions = {"ngramloss": __version__, **{name: installed(name) for name in PACKAGES}}
    train_settings = dataclasses.asdict(settings.train)
    lines = [
        f"# {in_markdown(title(settings))}",
        "",
        f"{in_markdown(system.entry.about)}. Model: {as_code(settings.model.name)}{why}.",
        "",
        *(f"* {in_markdown(sentence)}" for sentence in used),
        *([f"* objective = {as_code(settings.objective)}"] if system.entry.takes_objective else []),
        *(f"* {name} = {as_code(str(value))}" for name, value in system.options.items() if value != ""),
        *(
            f"* {name} = {as_code(str(train_settings[name]))}"
            for name in ("batch_size", "accumulate", "learning_rate", "schedule", "warmup_steps", "seed")
        ),
        "",
        *(f"* {name} {version}" for name, version in versions.items() if version),
        f"* Python {platform.python_version()}",
        "",
        f"Finished {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Every setting is in recipe.toml, every step in log.jsonl.",
    ]
    return "\n".join(lines) + "\n"
