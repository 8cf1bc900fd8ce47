"""a study and its folders → trainings, decodings and results, several at a time, until all or time is used."""

from __future__ import annotations

import json
import math
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from ngramloss import recipe
from ngramloss.data.prompts import TODAY
from ngramloss.errors import DIVERGED, UserError
from ngramloss.output.console import fixed, logger
from ngramloss.output.progress import Progress
from ngramloss.storage.files import lock_folder, remove, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study.plan import TEST, DataSet, Study, Training, check_data, generate_options
from ngramloss.study.processes import start_process
from ngramloss.study.results import (
    ALWAYS,
    CONFIRMED,
    QUICK,
    DecodingResult,
    ResultFolder,
    Results,
    ScoringError,
    check_metrics,
    score_texts,
    settings_changed,
)
from ngramloss.study.stages import Stages, expected_seconds, is_done, new_in, stages
from ngramloss.study.system_rows import Needed
from ngramloss.study.tables import unread

POLL = 0.1  # Seconds between two looks at the processes
WAIT = 2.0  # Seconds between two looks at what other loops have done
TRIES = 2  # How often a training is tried before its failure counts as its end
PAUSE = 30.0  # Seconds between a failure and the next try
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)  # Exit codes of a process that was asked to stop
PATIENCE = 60.0  # Seconds that a process gets to save its work and end
TRAIN_LOG = "train.log"
SCORE = "score"
_AGAIN = "run the same command again."


class ProcessStep(NamedTuple):
    """One process of a job."""

    what: str  # ``train``, the name of a decoding, ``score``, or what is made before a system
    arguments: list[str]  # of ``ngramloss``
    folder: Path  # the folder that the process writes to, and locks
    continued: bool  # whether it continues work that was stopped
    log: Path  # the file of what it prints, in the folder of a training, this one or one that is made before it


class TrainingJob(NamedTuple):
    """A training in work."""

    training: Training  # the training
    lock: ExitStack  # of its folder
    seconds: dict[Path, float | None]  # the log of an ended step → its time; None if it was stopped in between
    step: ProcessStep  # the present one
    process: BaseProcess  # of the step
    step_lock: ExitStack  # of the folder of the step's log, if that is not the job's
    began: float  # when the step began


class Ways(NamedTuple):
    """How a study is run here."""

    runs: Path  # the folder of the trainings
    parallel: int = 1  # jobs at a time
    only: tuple[str, ...] = ()  # the sets that are worked on; empty: all
    # number of this share, from 1, and of all; machines that do not share a folder divide the trainings so
    share: tuple[int, int] = (1, 1)
    minutes: float = 0.0  # end after this time; 0: no limit
    delete_models: bool = False  # delete a model once its texts are scored
    options: tuple[str, ...] = ()  # passed on to ``train`` and ``generate``


@dataclass
class StudyOutcome:
    """How a study ended."""

    finished: bool = False  # whether every training has a result or failed
    why: list[str] = field(default_factory=list)  # why it ended earlier, a sentence each
    halted: bool = False  # whether somebody else stopped a process, so that no other one is started

    def stopped(self, why: str) -> None:
        """Note a reason once."""
        if why not in self.why:
            self.why.append(why)


def run(folder: ResultFolder, ways: Ways) -> StudyOutcome:
    """Do what is left of a study. A failed training is tried again once, later: a GPU may fail for a while."""
    return Loop(folder, ways).run()


def stages_of_sets(folder: ResultFolder, results: Results) -> list[Stages]:
    """The stages of every set. Raises if the test set was used for other rows than those that would be chosen now."""
    study = folder.study
    every = [stages(study, data, results, folder.confirmed(data)) for data in study.sets]
    for of_set in every:
        folder.raise_if_others_confirmed(of_set.data, of_set.confirmed)
        folder.raise_if_others_confirmed(of_set.data, of_set.always, ALWAYS)
    return every


class Loop:
    """The jobs of a study, as many side by side as it may have."""

    def __init__(self, folder: ResultFolder, ways: Ways) -> None:
        self.folder, self.study, self.ways = folder, folder.study, ways
        self.outcome, self.jobs = StudyOutcome(), list[TrainingJob]()
        self.deadline = time.monotonic() + 60 * ways.minutes if ways.minutes else math.inf
        failed = [result for result in folder.read().values() if result.failed]
        self.earlier = {result.attempt for result in failed if result.tries >= TRIES}
        self.noticed = dict.fromkeys((result.attempt for result in failed), -math.inf)  # attempt → when it was seen

    def run(self) -> StudyOutcome:
        """Work until all is done, or what is left is for others."""
        look, waits = 0.0, False
        before, ways = self._results(), self.ways
        total = sum(stage.planned for of_set in stages_of_sets(self.folder, before) for stage in of_set.all)
        done = sum(is_done(self.study, training, before) for training in {training for training, _ in before})
        self._check(self._left())
        with _interrupted_by_terminate(), Progress("study", total, unit="trainings", done=done) as progress:
            try:
                while True:
                    for job in [job for job in self.jobs if job.process.exitcode is not None]:
                        look = 0.0
                        self.jobs.remove(job)
                        if going := self._advance(job):
                            self.jobs.append(going)
                        else:
                            ended = is_done(self.study, job.training, self._results())
                            progress.update(int(ended), note=self._note(job.training))
                    if time.monotonic() >= self.deadline:
                        self.outcome.stopped(f"the time is up: --minutes {ways.minutes:g}.")
                        break
                    if len(self.jobs) < ways.parallel and time.monotonic() >= look:
                        look = time.monotonic() + WAIT
                        left = self._left()
                        busy = self._begin_some(left)
                        if not self.jobs and (not left or self.outcome.why):
                            break
                        if busy and busy == len(left) and not waits:
                            waits = True
                            logger.info("other processes are at the trainings that are left; waiting for them.")
                    time.sleep(POLL)
            finally:
                self._stop()
        self.outcome.finished = not self._left(whole=True)
        if not self.outcome.finished and not self.outcome.why:
            number, count = ways.share
            part = f"--only {' '.join(ways.only)} is" if ways.only else f"share {number} of {count} is"
            self.outcome.stopped(f"{part} done as far as the results allow; the rest is left to others.")
        return self.outcome

    def _check(self, left: Sequence[Training]) -> None:
        """Raise before anything is trained, if data, a metric or a model are not there."""
        study = self.study
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
                from ngramloss.training.system_registry import read_system

                reads_only = base.system and not read_system(base.system).entry.takes_objective
                check = load_encoder_config if reads_only else load_config
                check(base.model)

    def _results(self) -> Results:
        """The results, without first failures and those of earlier calls, which are tried again.

        Failures before the rows of a set were chosen stay: another try could not be used any more.
        """
        chosen = {data.name for data in self.study.sets if self.folder.confirmed(data) is not None}
        return {
            key: result
            for key, result in self.folder.read().items()
            if not result.failed
            or (result.tries >= TRIES and result.attempt not in self.earlier)
            or (result.training.set in chosen and result.training.split != TEST)
        }

    def _left(self, *, whole: bool = False) -> list[Training]:
        """The trainings of this share, or of the whole study, that can be done now, stage by stage."""
        results, (number, count) = self._results(), (1, 1) if whole else self.ways.share
        only = () if whole else self.ways.only
        every = stages_of_sets(self.folder, results)
        for of_set in every:  # before the first text of the test set is written
            for rows, file in ((of_set.always, ALWAYS), (of_set.confirmed, CONFIRMED)):
                if rows is not None:
                    self.folder.confirm(of_set.data, rows, file)
        return [
            training
            for of_set in every
            if not only or of_set.data.name in only
            for stage in of_set.all
            for index, training in enumerate(new_in(of_set, stage))
            if index % count == number - 1 and not is_done(self.study, training, results)
        ]

    def _begin_some(self, left: Sequence[Training]) -> int:
        """Start as many jobs as there is room for, failed ones last. Returns how many are in work elsewhere."""
        failures = {each.training: each.attempt for each in self.folder.read().values() if each.failed}
        for attempt in failures.values():
            self.noticed.setdefault(attempt, time.monotonic())
        ready = {each for each, attempt in failures.items() if time.monotonic() >= self.noticed[attempt] + PAUSE}
        fresh, again = [each for each in left if each not in failures], [each for each in left if each in ready]
        busy = 0
        for training in [*fresh, *again]:
            is_free = len(self.jobs) < self.ways.parallel and not self.outcome.halted
            if is_free and not any(job.training == training for job in self.jobs):
                try:
                    started = self._begin(training)
                    self.jobs += [started] if started else []
                except BlockingIOError:
                    busy += 1
        return busy

    def _begin(self, training: Training) -> TrainingJob | None:
        """Start a job; none if only scores were left, or no time. Raises ``BlockingIOError`` if it is elsewhere."""
        place = training.folder(self.ways.runs)
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            lock.enter_context(lock_folder(place, wait=False))
            results = {key: result for key, result in self.folder.read().items() if not result.failed}
            if is_done(self.study, training, results):
                return None  # another loop was faster
            return self._start_next(training, lock, {})

    def _advance(self, job: TrainingJob) -> TrainingJob | None:
        """Go on after a process has ended: the job with its next one; None, with its folder free, if it ends."""
        with job.lock, job.step_lock:
            code = job.process.exitcode
            if code in STOPPED:
                self.outcome.stopped(f"{job.training}: {job.step.what} was stopped.")
                self.outcome.halted = True
                return None
            if code and job.step.what != SCORE:  # a metric that fails fails again below, with its reason
                why = _reason(job.step.log, code)
                self._record_failure(job.training, job.step.what, why, diverged=code == DIVERGED)
                return None
            job.step_lock.close()
            took = None if job.step.continued else time.monotonic() - job.began
            try:
                return self._start_next(job.training, job.lock, job.seconds | {job.step.log: took})
            except BlockingIOError:
                return None

    def _start_next(self, training: Training, lock: ExitStack, seconds: dict[Path, float | None]) -> TrainingJob | None:
        """Start the next process of a training, if there is one and time. ``BlockingIOError``: its folder is taken."""
        step = self._next_step(training, seconds)
        if step is None or not self._may_start(step, training):
            return None
        if step.log in seconds:
            self._record_failure(training, step.what, f"it ended without its files, see {step.log}.")
            return None
        with ExitStack() as step_lock:
            if step.log.parent != training.folder(self.ways.runs):
                step_lock.enter_context(lock_folder(step.log.parent, wait=False))
            if step.folder.is_dir():
                with lock_folder(step.folder, wait=False):
                    pass
            process = start_process(step.arguments, step.log, {TODAY: self.folder.day})
            return TrainingJob(training, lock.pop_all(), seconds, step, process, step_lock.pop_all(), time.monotonic())

    def _next_step(self, training: Training, seconds: Mapping[Path, float | None]) -> ProcessStep | None:
        """The first process of a training whose files are not there; None if all are. Texts are scored on the way."""
        study, ways, place = self.study, self.ways, training.folder(self.ways.runs)
        run, trained = RunFolder(training.run_folder(ways.runs)), place / TRAIN_LOG
        # By this job: the models that it needed may be deleted by then.
        for other, split in () if trained in seconds else study.first(training):
            step = self._train(other, f"train {other.objective}")
            if step := step or (self._candidates(training, other, split) if split else None):
                return step
        if step := self._train(training, "train"):
            return step
        limit = study.data(training.set).limit
        for decoding, changes in study.decodings.items():
            known = self.folder.read().get((training, decoding))
            if known is not None and not known.failed:
                continue
            texts = RunFolder(study.text_folder(training, decoding, ways.runs))
            options = [
                *generate_options(changes),
                "--split",
                training.split,
                *(["--limit", str(limit)] if limit else []),
            ]
            file, log = place / f"{training.split}-{decoding}.json", place / f"{decoding}.log"
            if texts.has_predictions:
                texts.raise_unless_written_by(run, texts.generation, texts.predictions, _AGAIN)
            if not texts.predictions.exists():
                write_whole(file, json.dumps(options))
                arguments = ["generate", str(run.path), "--out", str(texts.path), *options, *ways.options]
                return ProcessStep(decoding, arguments, texts.path, texts.has_predictions, log)
            _raise_unless_written_with(options, file, texts.predictions)
            slow = [metric for metric in study.data(training.set).metrics if metric not in QUICK]
            scoring = place / f"{training.split}-{decoding}-{SCORE}.log"
            if slow and scoring not in seconds:
                return self._score(study.data(training.set), slow, texts, scoring)
            try:
                result = score_texts(study, training, decoding, run, texts)
            except ScoringError as why:
                self._record_failure(training, "score", str(why))
                return None
            if not any(other.notes for other in self.folder.read().values() if other.training.set == training.set):
                for note in unread([result], training.split):
                    logger.warning(f"warning: {training.set}: {note}")
            result = replace(result, train_seconds=seconds.get(trained), write_seconds=seconds.get(log))
            self.folder.write(replace(result, parallel=ways.parallel))
        if ways.delete_models:
            remove(run.model)
        return None

    def _score(self, data: DataSet, metrics: Sequence[str], texts: RunFolder, log: Path) -> ProcessStep:
        """The process that saves the scores of metrics that take long, so that other trainings do not wait for them."""
        own = [text for text in data.metric_options if text.partition(".")[0].strip() in metrics]
        given = [part for text in own for part in ("--set", text)]
        plugins = [option for option in self.ways.options if option != "--trust-remote-code"]
        arguments = ["score", str(texts.path), "--metrics", ",".join(metrics), *given, *plugins]
        return ProcessStep(SCORE, arguments, texts.path, False, log)

    def _train(self, training: Training, what: str) -> ProcessStep | None:
        place, settings = training.folder(self.ways.runs), self.study.recipe(training)
        run = RunFolder(training.run_folder(self.ways.runs))
        raise_unless_same_settings(self.study, settings, run)
        if run.finished:
            remove(run.checkpoints)  # the model is beside them
            return None
        place.mkdir(parents=True, exist_ok=True)
        file = place / "settings.toml"
        write_whole(file, recipe.dump(settings))
        arguments = ["train", str(file), "--run", str(run.path), *self.ways.options]
        return ProcessStep(what, arguments, run.path, _has_checkpoints(run), place / TRAIN_LOG)

    def _candidates(self, training: Training, writer: Training, split: str) -> ProcessStep | None:
        """The process in which the model of another training writes candidates for this one, unless they are there."""
        runs = self.ways.runs
        folder = RunFolder(self.study.made_folder(training, Needed(writer.objective, split), runs))
        run, file = RunFolder(writer.run_folder(runs)), writer.folder(runs) / f"candidates-{split}.json"
        options = self.study.systems[training.objective].candidate_options(split)
        if folder.candidates.exists():
            _raise_unless_written_with(options, file, folder.candidates)
            folder.raise_unless_written_by(run, folder.about_candidates, folder.candidates, _AGAIN)
            return None
        write_whole(file, json.dumps(options))
        arguments = ["candidates", str(run.path), "--out", str(folder.path), *options, *self.ways.options]
        what = f"candidates of {writer.objective}"
        return ProcessStep(what, arguments, folder.path, False, file.with_suffix(".log"))

    def _may_start(self, step: ProcessStep, training: Training) -> bool:
        """Whether the time allows another process, as far as is known; for a training, with its decodings."""
        results = self.folder.read()
        parts = ["", *self.study.decodings] if step.what == "train" else [step.what]
        expected = sum(expected_seconds(results, training, part) or 0.0 for part in parts)
        if time.monotonic() + expected <= self.deadline:
            return True
        self.outcome.stopped("what is left does not fit into --minutes.")
        return False

    def _record_failure(self, training: Training, what: str, why: str, *, diverged: bool = False) -> None:
        known = self.folder.read()
        before_each = {decoding: known.get((training, decoding)) for decoding in self.study.decodings}
        tries = 1 + max((result.tries for result in before_each.values() if result is not None), default=0)
        for decoding, before in before_each.items():
            if before is None or before.failed:
                facts, attempt = self.study.facts(training, decoding), str(secrets.randbits(60))
                said = f"{what}: {why}"
                self.folder.write(DecodingResult(training, decoding, facts, said, tries, diverged, attempt=attempt))
        again = " It is tried again, once, after the others." if tries < TRIES else ""
        logger.warning(f"warning: {training}: {what} failed: {why.rstrip('.')}.{again}")

    def _note(self, training: Training) -> str:
        data = self.study.data(training.set)
        result = self.folder.read().get((training, data.decoding))
        if result is None or result.failed:
            return f"{training}: {'failed' if result else 'not finished'}"
        return f"{training}: {data.score.label} {fixed(result.scores.get(data.primary), data.score.decimals)}"

    def _stop(self) -> None:
        for job in self.jobs:
            if job.process.exitcode is None:
                job.process.terminate()
        until = time.monotonic() + PATIENCE
        for job in self.jobs:
            while job.process.exitcode is None and time.monotonic() < until:
                time.sleep(POLL)
            if job.process.exitcode is None:
                job.process.kill()
            job.step_lock.close()
            job.lock.close()


def raise_unless_same_settings(study: Study, settings: recipe.Recipe, run: RunFolder) -> None:
    """Raise if a training was started, or even finished, by another version of the study."""
    if not run.recipe.exists() or not (run.finished or _has_checkpoints(run)):
        return
    changed = recipe.changed_settings(recipe.load(str(run.recipe)), settings)
    if lines := [f"{key}: {before!r} → {value!r}" for key, (before, value) in changed.items()]:
        raise settings_changed(f"{run.path} was started", lines, study, "delete that run and its outputs")


def _raise_unless_written_with(options: list[str], file: Path, texts: Path) -> None:
    if not file.exists() or json.loads(file.read_text(encoding="utf-8")) != options:
        said = f"the texts in {texts.parent} were not generated with {' '.join(options)}, which the study now asks for"
        raise UserError(f"{said}. Delete {texts} to generate them again.")


def _has_checkpoints(run: RunFolder) -> bool:
    return run.checkpoints.is_dir() and any(run.checkpoints.iterdir())


def _reason(log: Path, code: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if re.match(r"error: |\w*Error: ", line)]
    if errors and code > 0:
        return errors[-1].removeprefix("error: ")
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    memory = " Perhaps the memory was full: lower --parallel." if code == -signal.SIGKILL else ""
    printed = f", see {log}" if lines else " and printed nothing"
    return f"it ended with {name}{printed}.{memory}"


@contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """Make SIGTERM, with which job arrays end a process, stop a study as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
