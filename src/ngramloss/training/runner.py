"""what a recipe asks for and a folder → a trained run in it, continued from where it stopped."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ngramloss.data import Example
from ngramloss.data.candidate_tokens import CandidateTokens, WithCandidates
from ngramloss.data.tokens import Tokens
from ngramloss.errors import MissingFileError, UserError
from ngramloss.models import adapters, loading
from ngramloss.models.encoders import raise_unless_it_fits
from ngramloss.models.first_tokens import align_start
from ngramloss.models.languages import codes, set_languages
from ngramloss.models.prompts import align_stop, shape_of
from ngramloss.models.settings import pad_id
from ngramloss.output.console import logger
from ngramloss.output.progress import Progress
from ngramloss.recipe import Recipe
from ngramloss.storage.checksums import damage
from ngramloss.storage.files import inside, whole_folder, whole_rows, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training import card, checkpoints, loop, prepare
from ngramloss.training.best import better_average, loss_note, tie_note, weights_text
from ngramloss.training.claim import claim, locked
from ngramloss.training.identity import DAY, IDENTITY, record_of
from ngramloss.training.log import LogFile, show_lines
from ngramloss.training.objective_task import ObjectiveTask
from ngramloss.training.online import own_texts
from ngramloss.training.planning import total_steps
from ngramloss.training.prepared import Prepared
from ngramloss.training.processes import Processes, start_processes
from ngramloss.training.run import Run, in_folder, run_of
from ngramloss.training.task import Task
from ngramloss.training.trackers import check_trackers, start_trackers
from ngramloss.training.validation import generated_score


class RunOutcome(NamedTuple):
    """How a run ended."""

    folder: Path
    finished: bool
    step: int
    continued_from: int


def train(run: Run, folder: Path, *, fresh: bool = False) -> RunOutcome:
    """Train, or continue from the last complete checkpoint unless ``fresh``. Every process calls this."""
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run_folder = RunFolder(folder)
    run = run if run.system else in_folder(run, run_folder)
    settings = run.settings
    run.on(processes, torch.accelerator.current_accelerator() or torch.device("cpu"))
    check_trackers(settings.train.report_to)
    known = not run.system and (settings.model.name != "scratch" or bool(settings.model.encoder))
    if rank == 0 and known and (fresh or not run_folder.finished):  # a mistake is found before data are read
        loading.load_config(settings.model)

    def now(saved: Recipe) -> Mapping[str, str]:
        if run.system:  # only its task knows
            return {}
        return prepare.made_of_now(dataclasses.replace(run_of(saved), settings=saved))

    with locked(run_folder, rank, processes):
        check = partial(prepare.read_splits, settings)
        newest = claim(settings, run_folder, fresh=fresh, check=check, made_of=now) if rank == 0 else None
        here = start_processes()
        here.wait()
        if run_folder.finished:
            logger.info(f"{folder} is already finished. Start over with --fresh, or choose another --run.")
            return RunOutcome(folder, True, 0, 0)
        make = partial(prepare.prepare_system if run.system else prepare.prepare, run, run_folder, here, newest)
        elsewhere = partial(prepare.system_task, run) if run.system else lambda: None
        prepared, besides = prepare.prepare_once(run_folder, here, make, elsewhere)
        outcome = _run(run, run_folder, here, prepared, besides)
        if outcome.finished and rank == 0:
            why = _finish(run, run_folder, prepared)
            logger.info(f"finished at step {outcome.step}: {run_folder.model}{why}")
        here.wait()
        return outcome


def _run(run: Run, run_folder: RunFolder, here: Processes, prepared: Prepared, besides: Any) -> RunOutcome:
    """Run the loop. ``besides``: a system's task; else, in the first process, validation examples that get texts."""
    settings, newest = run.settings, prepared.continued_from
    began = checkpoints.step(newest) if newest else 0
    if newest is not None and checkpoints.facts(newest)["finished"]:
        return RunOutcome(run_folder.path, True, began, began)
    if run.system:
        task: Task = besides
        shown = dict.fromkeys([*task.terms, *run.system.entry.bests])
    else:
        task = _objective_task(run, here, prepared, besides or ())
        shown = dict.fromkeys([*(name for term in run.terms for name in term.names), *["score"] * bool(run.writes)])
    if newest is not None:
        logger.info(f"continuing {run_folder.path} from step {began}.")
    elif run_folder.log.exists() and run_folder.log.stat().st_size:
        logger.info(
            f"{run_folder.path} was stopped before its first checkpoint, so it starts from step 0. Lower "
            "train.save_every to save earlier."
        )
    steps = total_steps(settings.train, len(task.examples))
    saved_with = {IDENTITY: record_of(prepared.made_of, settings)}
    with open_logs(run, run_folder, here, terms=[*shown], steps=steps, since=began) as logs:
        around = loop.Around(run_folder.checkpoints, saved_with, newest, **logs)
        try:
            outcome = loop.run(task, settings.train, here, around)
        except checkpoints.CheckpointError as reason:
            raise OSError(f"{reason} {after_full_disk(run_folder, here)}") from reason
    if not outcome.finished:
        logger.info(f"stopped at step {outcome.step} of {outcome.total}; the same command continues it.")
    return RunOutcome(run_folder.path, outcome.finished, outcome.step, began)


# What the loop needs


def _objective_task(run: Run, here: Processes, prepared: Prepared, judged: Sequence[Example]) -> ObjectiveTask:
    """The model, its rows, and what its objective compares with."""
    settings = run.settings
    model, tokenizer = _load_model(run, prepared)
    examples, validation = _load_rows(prepared)
    score = None
    if run.best.metric and validation is not None:
        count = min(settings.train.best_limit or len(validation), len(validation))
        score = generated_score(
            run.best,
            [validation[row]["input_ids"].tolist() for row in range(count)],
            examples=judged,
            settings=settings,
            tokenizer=tokenizer,
            batch_size=(settings.train.eval_batch_size or settings.train.batch_size) // here.count,
            process=here.rank,
            processes=here.count,
        )
    teacher = None
    if run.loads_teacher:
        name = settings.train.teacher
        otherwise = (
            f"train.teacher: {name} has another tokenizer than the model, so its token ids mean other words. Set "
            "model.name to the teacher's folder; from scratch, train both with the same data and model.vocabulary."
        )
        teacher, _ = loading.load_frozen(name, tokenizer, otherwise)
    return ObjectiveTask(
        model,
        tokenizer,
        examples,
        run,
        validation=validation,
        score=score,
        teacher=teacher,
        own_texts=own_texts(settings, run.online_metric, prepare.read_scored(settings, prepared))
        if run.online_metric
        else None,
    )


def _load_model(run: Run, prepared: Prepared) -> tuple[Any, Any]:
    settings, data = run.settings, run.settings.data
    named = dataclasses.replace(settings.model, name=prepared.tokenizer, encoder="", tokenizer="")
    tokenizer, _ = loading.load_tokenizer(named, lambda: (), "")
    set_languages(tokenizer, data.source_language, data.target_language, model=settings.model.name)
    torch.manual_seed(settings.train.seed)
    model = loading.load(settings.model, tokenizer)
    _raise_unless_it_fits(model, tokenizer, settings)
    loading.prepare_generation(model, settings.generation)
    given = {"column": prepared.column, "day": prepared.made_of.get(DAY, "")}
    shape = shape_of(data, settings.task, settings.model, model.config, tokenizer, **given)
    if shape.prompt is None:
        align_start(model, tokenizer, name=settings.model.name, training=True)
    else:
        align_stop(model, shape.prompt)
    return adapters.add_lora(model, settings.model), tokenizer


def _raise_unless_it_fits(model: Any, tokenizer: Any, settings: Recipe) -> None:
    pad_id(f"the tokenizer of {settings.model.name} has", tokenizer)
    if settings.model.encoder:
        name, longest = settings.model.encoder, settings.data.max_source
        raise_unless_it_fits(model.get_encoder(), tokenizer, name, longest=longest)
    positions = getattr(model.config, "max_position_embeddings", None)
    lengths = settings.data.max_source, max(settings.data.max_target, settings.generation.max_length)
    longest = sum(lengths) if loading.is_causal(model.config) else max(lengths)
    if positions is not None and positions < longest:
        raise UserError(
            f"{settings.model.name} supports {positions} positions, but the recipe asks for {longest} tokens. Lower "
            "data.max_source, data.max_target and generation.max_length."
        )
    rows = model.get_input_embeddings().num_embeddings
    tokens = max(len(tokenizer), *(token + 1 for token in (0, *codes(tokenizer).values())))  # M2M100 leaves them out
    if tokens > rows:
        raise UserError(f"the tokenizer has {tokens} tokens but the model has {rows} embeddings: they do not match.")


def _load_rows(prepared: Prepared) -> tuple[Any, Tokens | None]:
    splits = {
        name: Tokens(_present(split.tokens), {beside: _present(file) for beside, file in split.beside.items()})
        for name, split in prepared.splits.items()
    }
    train, validation = splits["train"], splits.get("validation")
    if prepared.candidates is None:
        return train, validation
    return WithCandidates(train, CandidateTokens(_present(prepared.candidates.tokens))), validation


def _present(folder: Path) -> Path:
    if not folder.exists():
        raise MissingFileError(
            f"no prepared data in {folder} on this machine. Set NGRAMLOSS_CACHE to a folder that all machines share."
        )
    return folder


@contextmanager
def open_logs(
    run: Run, folder: RunFolder, here: Processes, *, terms: Sequence[str], steps: int, since: int
) -> Iterator[dict[str, Any]]:
    """``logs`` and ``on_step`` of a training: ``log.jsonl``, progress and trackers; only in the first process."""
    if not here.first:
        yield {}
        return
    train = run.settings.train
    trackers = start_trackers(
        train.report_to, run_name=run.settings.slug, folder=folder.tensorboard, settings=dataclasses.asdict(train)
    )
    try:
        with Progress("training", total=steps, unit="steps", done=since) as progress:
            show = show_lines(progress, terms, score=run.best.name if run.best.metric else "")
            logs = [LogFile(folder.log, since), show, *(tracker.log for tracker in trackers)]
            yield {"logs": logs, "on_step": lambda step, line: progress.update(step - progress.done)}
    finally:
        for tracker in trackers:
            tracker.end()


def after_full_disk(run: RunFolder, here: Processes) -> str:
    """Delete the incomplete checkpoint; say where the run will continue."""
    if here.first:
        for path in checkpoints.find(run.checkpoints).broken:
            checkpoints.delete(path)
    last = checkpoints.find(run.checkpoints).newest
    rest = f"continue from step {checkpoints.step(last)}" if last else "start again: no checkpoint was saved yet"
    return f"Free some disk space; the same command will then {rest}."


# After training


def _finish(run: Run, run_folder: RunFolder, prepared: Prepared) -> str:
    """Write the card, then the model folder, which marks the run as finished. Returns why it is this model."""
    newest = checkpoints.find(run_folder.checkpoints).newest
    assert newest is not None, "a finished run has a checkpoint"
    facts = checkpoints.facts(newest)
    chosen = best_checkpoint(run_folder, newest, facts["best_step"])
    is_best = checkpoints.step(chosen) == facts["best_step"]
    history = list(whole_rows(run_folder.log)) if is_best else []
    note = tie_note(run.best, history) or loss_note(run.best, checkpoints.step(chosen), history)
    if note:
        logger.info(note)
    average = better_average(run.best, facts)
    if average and (fault := damage(inside(run_folder.checkpoints, average))):
        logger.warning(
            f"{run_folder.checkpoints / average} is incomplete ({fault}), so {chosen.name} becomes the model."
        )
    elif average:
        chosen = run_folder.checkpoints / average
    write_whole(run_folder.card, card.card_text(run, prepared, facts, chosen, note=note))
    with whole_folder(run_folder.model) as partial_folder:
        checkpoints.copy_model(chosen, partial_folder)
        run_folder.record_weights(partial_folder)
    return f", {weights_text(run.best, facts, chosen)}" if is_best or facts["averages"] else ""


def best_checkpoint(run: RunFolder, newest: Path, best_step: int | None) -> Path:
    """The checkpoint that becomes the model: the newest, if nothing was validated or the best is damaged."""
    if best_step is None:
        return newest
    best = run.checkpoints / f"checkpoint-{best_step}"
    damage = checkpoints.fault(best) if best.exists() else "it is missing"
    if damage:
        logger.warning(
            f"the best checkpoint, {best.name}, is incomplete ({damage}); using the last weights as the model."
        )
    return newest if damage else best
