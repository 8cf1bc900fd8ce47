"""a study and its folders → trainings, writings and results, several processes at a time, until all or time is used.

Each training is a job of several processes, one after the other: ``ngramloss train``, then ``ngramloss generate`` for
each writing. A job's folder is locked, so several of these loops, on one machine or on several that share the folders,
do not do the same work. Everything that is done is a file, so a killed study continues with the same command.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data.prompts import TODAY
from ngramloss.errors import DIVERGED, UserError
from ngramloss.output.console import logger
from ngramloss.output.progress import Progress
from ngramloss.output.tabular import fixed
from ngramloss.storage.files import lock_folder, remove, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study.plan import TEST, Study, Training, check_data
from ngramloss.study.processes import Process
from ngramloss.study.results import (
    ALWAYS,
    ELSEWHERE,
    Result,
    ResultFolder,
    Results,
    ScoringError,
    check_metrics,
    score_texts,
)
from ngramloss.study.stages import Stages, expected_seconds, is_done, new_in, seconds_spent, stages
from ngramloss.study.tables import unread
from ngramloss.systems.rows import Made

POLL = 0.1
"""Seconds between two looks at the processes."""
WAIT = 2.0
"""Seconds between two looks at what other loops have done."""
TRIES = 2
"""How often a training is tried before its failure counts as its end."""
PAUSE = 30.0
"""Seconds between a failure and the next try."""
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a process that was asked to stop."""
PATIENCE = 60.0
"""Seconds that a process gets to save its work and end."""


class Step(NamedTuple):
    """One process of a job.

    Attributes:
        what: ``train``, the name of a writing, or what is made before a system.
        arguments: of ``ngramloss``.
        folder: the folder that the process writes to, and locks.
        continued: whether it continues work that was stopped.
        place: the folder of a training, with the log; of another one than the job's if it is made before it.
        log: the name of the log.
    """

    what: str
    arguments: list[str]
    folder: Path
    continued: bool
    place: Path
    log: str = ""

    @property
    def log_file(self) -> Path:
        """What the process prints."""
        return self.place / f"{self.log or self.what}.log"


Steps = Generator[Step, float | None, None]
"""The steps of a job; each gets the seconds that the one before took, None if it was stopped in between."""


@dataclass
class Job:
    """A training in work: its lock, its steps, and the process of the present one with the lock of its place."""

    training: Training
    lock: ExitStack
    steps: Steps
    step: Step
    process: Process
    step_lock: ExitStack
    began: float

    def free(self) -> None:
        """Let others have its folders."""
        self.step_lock.close()
        self.lock.close()


class Ways(NamedTuple):
    """How a study is run here.

    Attributes:
        runs: the folder of the trainings.
        parallel: jobs at a time.
        only: the sets that are worked on; empty: all.
        share: number of this share, from 1, and of all; machines that do not share a folder divide the trainings so.
        minutes: end after this time; 0: no limit.
        delete_models: delete a model once its texts are scored.
        options: passed on to ``train`` and ``generate``.
    """

    runs: Path
    parallel: int = 1
    only: tuple[str, ...] = ()
    share: tuple[int, int] = (1, 1)
    minutes: float = 0.0
    delete_models: bool = False
    options: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How a study ended.

    Attributes:
        finished: whether every training has a result or failed.
        why: why it ended earlier, a sentence each.
        halted: whether somebody else stopped a process, so that no other one is started.
    """

    finished: bool = False
    why: list[str] = field(default_factory=list)
    halted: bool = False

    def stopped(self, why: str) -> None:
        """Note a reason once."""
        if why not in self.why:
            self.why.append(why)


def run(study: Study, folder: ResultFolder, ways: Ways) -> Outcome:
    """Do what is left of a study. A training that fails is tried again, once, after a while and after the others.

    So a GPU that fails for a while does not decide which rows are tested.
    """
    outcome, jobs, look = Outcome(), list[Job](), 0.0
    deadline = time.monotonic() + 60 * ways.minutes if ways.minutes else float("inf")
    found = [result for result in folder.read().values() if result.failed]
    earlier = {result.attempt for result in found if result.tries >= TRIES}
    noticed = dict.fromkeys((result.attempt for result in found), -math.inf)
    before, others = _to_be_done(study, folder, earlier), False
    total = sum(stage.planned for of_set in stages_of_sets(study, folder, before) for stage in of_set.all)
    done = sum(is_done(study, training, before) for training in {training for training, _ in before})
    _check(study, _left(study, folder, before, ways), ways)
    with _interrupted_by_terminate(), Progress("study", total, unit="trainings", done=done) as progress:
        try:
            while True:
                for job in [job for job in jobs if job.process.poll() is not None]:
                    look = 0.0
                    if not _advance(job, study, folder, ways, deadline, outcome):
                        jobs.remove(job)
                        ended = is_done(study, job.training, _to_be_done(study, folder, earlier))
                        progress.update(int(ended), note=_note(study, job, folder))
                if time.monotonic() >= deadline:
                    outcome.stopped(f"the time is up: --minutes {ways.minutes:g}.")
                    break
                if len(jobs) < ways.parallel and time.monotonic() >= look:
                    look = time.monotonic() + WAIT
                    results = _to_be_done(study, folder, earlier)
                    left = _left(study, folder, results, ways)
                    failures = {each.training: each.attempt for each in folder.read().values() if each.failed}
                    for attempt in failures.values():
                        noticed.setdefault(attempt, time.monotonic())
                    ready = {each for each, attempt in failures.items() if time.monotonic() >= noticed[attempt] + PAUSE}
                    fresh = [each for each in left if each not in failures]
                    again = [each for each in left if each in ready]
                    busy = 0
                    for training in [*fresh, *again]:
                        is_free = len(jobs) < ways.parallel and not outcome.halted
                        if is_free and not any(job.training == training for job in jobs):
                            try:
                                jobs += _begin(training, study, folder, ways, deadline, outcome, len(jobs))
                            except BlockingIOError:
                                busy += 1
                    if not jobs and (not left or outcome.why):
                        break
                    if busy and busy == len(left) and not others:
                        others = True
                        logger.info("other processes are at the trainings that are left; waiting for them.")
                time.sleep(POLL)
        finally:
            _stop(jobs)
    outcome.finished = not _left(study, folder, _to_be_done(study, folder, earlier), Ways(ways.runs))
    if not outcome.finished and not outcome.why:
        number, count = ways.share
        part = f"--only {' '.join(ways.only)} is" if ways.only else f"share {number} of {count} is"
        outcome.stopped(f"{part} done as far as the results allow; the rest is left to others.")
    return outcome


def stages_of_sets(study: Study, folder: ResultFolder, results: Results) -> list[Stages]:
    """The stages of every set. Raises if the test set was used for other rows than those that would be chosen now."""
    every = [stages(study, data, results, folder.confirmed(data)) for data in study.sets]
    for data, of_set in zip(study.sets, every, strict=True):
        folder.raise_if_others_confirmed(data, of_set.confirmed)
        folder.raise_if_others_confirmed(data, of_set.always, ALWAYS)
    return every


def _check(study: Study, left: Sequence[Training], ways: Ways) -> None:
    """Raise before anything is trained, if data, a metric or a model are not there."""
    sets = [study.data(name) for name in dict.fromkeys(training.set for training in left)]
    check_data(study, sets)
    check_metrics(sets)
    every = [each for training in left for each in (training, *(other for other, _ in study.first(training)))]
    systems = [study.systems.get(name) for name in dict.fromkeys(training.objective for training in every)]
    loaded = [row.base for row in systems if row and "model.encoder" not in row.first]
    for base in [*(data.base for data in sets), *loaded]:
        if base.model.name != "scratch" or base.model.encoder:
            from ngramloss.models.encoders import load_encoder_config
            from ngramloss.models.loading import load_config
            from ngramloss.systems.registry import read_system

            reads_only = base.system and not read_system(base.system).entry.takes_objective
            check = load_encoder_config if reads_only else load_config
            check(base.model, trust_remote_code="--trust-remote-code" in ways.options)


# What is left


def _to_be_done(study: Study, folder: ResultFolder, earlier: set[str]) -> Results:
    """The results, without first failures and those of earlier calls, which are tried again.

    Failures before the rows of a set were chosen stay: another try could not be used any more.
    """
    chosen = {data.name for data in study.sets if folder.confirmed(data) is not None}
    return {
        key: result
        for key, result in folder.read().items()
        if not result.failed
        or (result.tries >= TRIES and result.attempt not in earlier)
        or (result.training.set in chosen and result.training.split != TEST)
    }


def _left(study: Study, folder: ResultFolder, results: Results, ways: Ways) -> list[Training]:
    """The trainings of this share that can be done now, stage by stage."""
    number, count = ways.share
    every = stages_of_sets(study, folder, results)
    for data, of_set in zip(study.sets, every, strict=True):
        # Before the first text of the test set is written.
        if of_set.always is not None:
            folder.confirm(data, of_set.always, ALWAYS)
        if of_set.confirmed is not None:
            folder.confirm(data, of_set.confirmed)
    return [
        training
        for data, of_set in zip(study.sets, every, strict=True)
        if not ways.only or data.name in ways.only
        for stage in of_set.all
        for index, training in enumerate(new_in(of_set, stage))
        if index % count == number - 1 and not is_done(study, training, results)
    ]


# A job


def _begin(
    training: Training, study: Study, folder: ResultFolder, ways: Ways, deadline: float, outcome: Outcome, running: int
) -> list[Job]:
    """Start a job. Nothing is started if only scores were left, or if no time is left.

    Raises:
        BlockingIOError: another loop has it, or what it needs.
    """
    place = training.folder(ways.runs)
    place.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(lock_folder(place, wait=False))
        results = folder.read()
        if is_done(study, training, {key: result for key, result in results.items() if not result.failed}):
            return []  # another loop was faster
        steps = _steps(study, training, place, folder, ways)
        step = next(steps, None)
        if step is None or not _may_start(step, training, study, results, deadline, outcome, running):
            return []
        started = _start(step, place, folder.day)
        if started is None:
            raise BlockingIOError
        return [Job(training, stack.pop_all(), steps, step, *started, time.monotonic())]


def _advance(job: Job, study: Study, folder: ResultFolder, ways: Ways, deadline: float, outcome: Outcome) -> bool:
    """Go on after a process has ended. Returns whether the job has another one; otherwise its folder is free again."""
    place = job.training.folder(ways.runs)
    code = job.process.poll()
    if code in STOPPED:
        outcome.stopped(f"{job.training}: {job.step.what} was stopped.")
        outcome.halted = True
        job.free()
        return False
    if code:
        why = _reason(job.step.log_file, code)
        _record_failure(study, job.training, folder, job.step.what, why, diverged=code == DIVERGED)
        job.free()
        return False
    job.step_lock.close()
    took = None if job.step.continued else time.monotonic() - job.began
    try:
        job.step = job.steps.send(took)
    except StopIteration:
        job.free()
        return False
    if _may_start(job.step, job.training, study, folder.read(), deadline, outcome, 0):
        started = _start(job.step, place, folder.day)
        if started is not None:
            job.process, job.step_lock = started
            job.began = time.monotonic()
            return True
    job.free()
    return False


def _steps(study: Study, training: Training, place: Path, folder: ResultFolder, ways: Ways) -> Steps:
    """The processes of a training, and what is done after each."""
    run = RunFolder(training.run_folder(ways.runs))
    for other, split in study.first(training):
        yield from _train(study, other, ways, f"train {other.objective}")
        if split:
            yield from _candidates(study, training, other, split, ways)
    train_seconds = yield from _train(study, training, ways, "train")
    limit = study.data(training.set).limit
    for writing, changes in study.writings.items():
        known = folder.read().get((training, writing))
        if known is not None and not known.failed:
            continue
        texts = RunFolder(study.text_folder(training, writing, ways.runs))
        options = [word for change in changes for word in ("--set", change)]
        options += ["--split", training.split, *(["--limit", str(limit)] if limit else [])]
        file = place / f"{training.split}-{writing}.json"
        write_seconds = None
        if texts.has_predictions:
            texts.raise_unless_written_by(run, texts.generation, texts.predictions, _AGAIN)
        if not texts.predictions.exists():
            write_whole(file, json.dumps(options))
            arguments = ["generate", str(run.path), "--out", str(texts.path), *options, *ways.options]
            write_seconds = yield Step(writing, arguments, texts.path, texts.has_predictions, place)
        else:
            _raise_unless_written_with(options, file, texts.predictions)
        try:
            result = score_texts(study, training, writing, run, texts)
        except ScoringError as why:
            _record_failure(study, training, folder, "score", str(why))
            return
        if not any(other.notes for other in folder.read().values() if other.training.set == training.set):
            for note in unread([result], training.split):
                logger.warning(f"warning: {training.set}: {note}")
        folder.write(replace(result, train_seconds=train_seconds, write_seconds=write_seconds, parallel=ways.parallel))
    if ways.delete_models:
        remove(run.model)


def _train(study: Study, training: Training, ways: Ways, what: str) -> Generator[Step, float | None, float | None]:
    """The process of a training, unless it is finished. Returns its seconds, None if they are not known."""
    settings, run, place = study.recipe(training), RunFolder(training.run_folder(ways.runs)), training.folder(ways.runs)
    seconds = None
    raise_unless_same_settings(study, settings, run)
    if not run.finished:
        place.mkdir(parents=True, exist_ok=True)
        file = place / "settings.toml"
        write_whole(file, recipe.dump(settings))
        continued = run.checkpoints.is_dir() and any(run.checkpoints.iterdir())
        arguments = ["train", str(file), "--run", str(run.path), *ways.options]
        seconds = yield Step(what, arguments, run.path, continued, place, "train")
    remove(run.checkpoints)  # of the finished training: the model is beside them
    return seconds


def _candidates(study: Study, training: Training, writer: Training, split: str, ways: Ways) -> Steps:
    """The process in which the model of another training writes candidates for this one, unless they are there."""
    folder = RunFolder(study.made_folder(training, Made(writer.objective, split), ways.runs))
    run = RunFolder(writer.run_folder(ways.runs))
    options, place = study.systems[training.objective].candidate_options(split), writer.folder(ways.runs)
    file = place / f"candidates-{split}.json"
    if folder.candidates.exists():
        _raise_unless_written_with(options, file, folder.candidates)
        folder.raise_unless_written_by(run, folder.about_candidates, folder.candidates, _AGAIN)
        return
    write_whole(file, json.dumps(options))
    arguments = ["candidates", str(run.path), "--out", str(folder.path), *options, *ways.options]
    yield Step(f"candidates of {writer.objective}", arguments, folder.path, False, place, f"candidates-{split}")


def _raise_unless_written_with(options: list[str], file: Path, texts: Path) -> None:
    """Raise if texts were written with other options than those of the study."""
    if not file.exists() or json.loads(file.read_text(encoding="utf-8")) != options:
        raise UserError(
            f"the texts in {texts.parent} were not written with {' '.join(options)}, as the study says now. Delete "
            f"{texts}: they are written again then."
        )


_AGAIN = "run the same command again."


def raise_unless_same_settings(study: Study, settings: recipe.Recipe, run: RunFolder) -> None:
    """Raise if a training was started, or even finished, by another version of the study."""
    begun = run.finished or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))
    if not run.recipe.exists() or not begun:
        return
    changed = recipe.changed_settings(recipe.load(str(run.recipe)), settings)
    if changed:
        raise UserError(
            f"settings changed after {run.path} was started:\n"
            + "\n".join(f"  {key}: {before!r} → {value!r}" for key, (before, value) in changed.items())
            + f"\nPut them back, {ELSEWHERE[study.grows]}, or delete that run and all that its model wrote."
        )


def _may_start(
    step: Step, training: Training, study: Study, results: Results, deadline: float, outcome: Outcome, running: int
) -> bool:
    """Whether time and budget allow another process; for a training, with its writings: without, it could be lost.

    What is not known yet is taken to be short enough.
    """
    parts = ["", *study.writings] if step.what == "train" else [step.what]
    expected = sum(expected_seconds(results, training, part) or 0.0 for part in parts)
    if time.monotonic() + expected > deadline:
        outcome.stopped("what is left does not fit into --minutes.")
        return False
    if study.minutes and seconds_spent(results) + expected > 60 * study.minutes:
        outcome.stopped(f"the budget of {study.minutes:g} minutes is used up.")
        return False
    trained = {of for of, _ in results}
    if study.trainings and training not in trained and len(trained) + running >= study.trainings:
        outcome.stopped(f"the budget of {study.trainings} trainings is used up.")
        return False
    return True


def _start(step: Step, own: Path, day: str) -> tuple[Process, ExitStack] | None:
    """Start a step, and lock its place if it is not the job's own.

    None if another loop has that place, or if a process of a killed study is still at it.
    """
    with ExitStack() as stack:
        try:
            if step.place != own:
                stack.enter_context(lock_folder(step.place, wait=False))
            if step.folder.is_dir():
                with lock_folder(step.folder, wait=False):
                    pass
        except BlockingIOError:
            return None
        return Process(step.arguments, step.log_file, {TODAY: day}), stack.pop_all()


def _record_failure(
    study: Study, training: Training, folder: ResultFolder, what: str, why: str, *, diverged: bool = False
) -> None:
    """Record and report that a step failed."""
    known = folder.read()
    before_each = {writing: known.get((training, writing)) for writing in study.writings}
    tries = 1 + max((result.tries for result in before_each.values() if result is not None), default=0)
    for writing, before in before_each.items():
        if before is None or before.failed:
            facts, attempt = study.facts(training, writing), str(secrets.randbits(60))
            folder.write(
                Result(training, writing, facts, f"{what}: {why}", tries=tries, diverged=diverged, attempt=attempt)
            )
    again = " It is tried again, once, after the others." if tries < TRIES else ""
    logger.warning(f"warning: {training}: {what} failed: {why.rstrip('.')}.{again}")


def _reason(log: Path, code: int) -> str:
    """The last error in a log, or else the exit code."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if re.match(r"error: |\w*Error: ", line)]
    if errors and code > 0:
        return errors[-1].removeprefix("error: ")
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    memory = " Perhaps the memory was full: lower --parallel." if code == -signal.SIGKILL else ""
    printed = f", see {log}" if lines else " and printed nothing"
    return f"it ended with {name}{printed}.{memory}"


def _note(study: Study, job: Job, folder: ResultFolder) -> str:
    training = job.training
    data = study.data(training.set)
    result = folder.read().get((training, data.writing))
    if result is None or result.failed:
        return f"{training}: {'failed' if result else 'not finished'}"
    return f"{training}: {data.score.label} {fixed(result.scores.get(data.primary), data.score.decimals)}"


# Stopping


def _stop(jobs: Sequence[Job]) -> None:
    """Ask all processes to save their work, wait for them, and free the folders."""
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
    until = time.monotonic() + PATIENCE
    for job in jobs:
        while job.process.poll() is None and time.monotonic() < until:
            time.sleep(POLL)
        if job.process.poll() is None:
            job.process.kill()
        job.free()


@contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """Make SIGTERM, with which job arrays end a process, stop a study as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = None
    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
