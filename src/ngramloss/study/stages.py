"""a study and its results so far → the trainings of each stage, tune, screen and confirm; what was chosen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ngramloss.study.plan import TEST, VALIDATION, DataSet, Rows, Study, Training, trainings_of
from ngramloss.study.results import DecodingResult, Results


class Stage(NamedTuple):
    """The trainings of one stage of a set."""

    name: str  # ``tune``, ``always``, ``screen`` or ``confirm``
    trainings: list[Training]  # empty as long as an earlier stage must choose them
    planned: int  # how many there are, or will be. Trainings of an earlier stage do not count again.


class Stages(NamedTuple):
    """Where a set stands."""

    data: DataSet  # the set
    all: list[Stage]  # its stages in order
    settings: Rows | None  # row → the setting that was chosen for it; None as long as it is tuned
    confirmed: Rows | None  # the tested rows with settings, the baseline first; None as long as they are screened
    always: Rows | None = None  # those tested whatever the screening says; None as long as they are tuned, or without

    @property
    def tested(self) -> Rows:
        """The confirmed rows; while others are screened, those that are always tested."""
        return (self.always or {}) if self.confirmed is None else self.confirmed


def stages(study: Study, data: DataSet, results: Results, chosen: Rows | None = None) -> Stages:
    """The stages of a set, whose rows for the test may have been ``chosen`` earlier. A failure counts as an end."""
    tuning = study.tuning
    tune, shared = list[Training](), 0
    if tuning:
        rows, seed = tuning.objectives, tuning.seed
        tune = [Training(data.name, row, setting, seed, VALIDATION) for row in rows for setting in data.grid]
        shared = len(rows) if seed in data.screening else 0
    early = [study.baseline, *study.always] if study.always else []
    settings = given = None
    always, screen, last = list[Training](), list[Training](), list[Training]()
    count = len(study.confirmation)
    in_always, in_confirm = len(early) * count, (study.confirm + (not early)) * count

    if _ended(study, tune, results):
        settings = _settings(study, data, results)
        given = _comparable(study, {row: settings[row] for row in early if row in settings})
        always = trainings_of(data.name, given or {}, study.confirmation, TEST)
        in_always = len(always)
        screen = trainings_of(data.name, settings, data.screening, VALIDATION)
        if _ended(study, screen, results):
            chosen = _comparable(study, _best(study, data, results, settings))
    if chosen is not None:
        last = trainings_of(data.name, chosen, study.confirmation, TEST)
        in_confirm = len(last) - len(always)
    in_screen = len(study.objectives) * len(data.screening) - shared
    every = [Stage("tune", tune, len(tune)), Stage("always", always, in_always)]
    every += [Stage("screen", screen, in_screen), Stage("confirm", last, in_confirm)]
    return Stages(data, every, settings, chosen, given)


def has_failed(study: Study, training: Training, results: Results) -> bool:
    """Whether a training or one of its decodings failed."""
    return any(result and result.failed for result in _decodings(study, training, results))


def unresolved(study: Study, trainings: Sequence[Training], results: Results) -> list[DecodingResult]:
    """A failure of each training that failed without diverging: it says nothing about the row."""
    every = ([result for result in _decodings(study, each, results) if result] for each in trainings)
    failed = ([result for result in known if result.failed and not result.diverged] for known in every)
    return [found[0] for found in failed if found]


def is_done(study: Study, training: Training, results: Results) -> bool:
    """Whether all decodings of a training have results, or one of them failed."""
    return has_failed(study, training, results) or all(_decodings(study, training, results))


def _decodings(study: Study, training: Training, results: Results) -> list[DecodingResult | None]:
    return [results.get((training, decoding)) for decoding in study.decodings]


def primary_scores(data: DataSet, trainings: Sequence[Training], results: Results) -> dict[int, float]:
    """Seed → primary score; only of those that have one."""
    found = ((training.seed, results.get((training, data.decoding))) for training in trainings)
    return {seed: x for seed, result in found if result and (x := result.scores.get(data.primary)) is not None}


def expected_seconds(results: Results, training: Training, decoding: str = "") -> float | None:
    """The median time of such trainings, or of such decodings; None if none is finished."""
    alike = [result for result in results.values() if result.training.set == training.set and not result.failed]
    times = [result.train_seconds for result in alike]
    if decoding:
        written = [result for result in alike if result.decoding == decoding and result.write_seconds is not None]
        same_split = [result for result in written if result.training.split == training.split]
        times = [result.write_seconds for result in same_split or written]
    known = [seconds for seconds in times if seconds is not None]
    return statistics.median(known) if known else None


def time_left(study: Study, every: Sequence[Stages], results: Results) -> tuple[float, int]:
    """Seconds of all that has no result yet, one after the other, and of how many trainings no time is known."""
    seconds, unknown = 0.0, 0
    for of_set in every:
        for stage in of_set.all:
            split = TEST if stage.name in ("always", "confirm") else VALIDATION
            left = stage.planned - sum(is_done(study, training, results) for training in new_in(of_set, stage))
            any_like = Training(of_set.data.name, "", (), 0, split)
            steps = [expected_seconds(results, any_like, decoding) for decoding in ("", *study.decodings)]
            known = [step for step in steps if step is not None]
            seconds += left * sum(known)
            unknown += left if len(known) < len(steps) else 0
    return seconds, unknown


def new_in(of_set: Stages, stage: Stage) -> list[Training]:
    """The trainings of a stage that are not those of an earlier one."""
    earlier = {training for other in of_set.all[: of_set.all.index(stage)] for training in other.trainings}
    return [training for training in stage.trainings if training not in earlier]


def _ended(study: Study, trainings: Sequence[Training], results: Results) -> bool:
    """Whether all have results or diverged. What is chosen does not depend on another failure, such as a full disk."""
    done = all(is_done(study, training, results) for training in trainings)
    return done and not unresolved(study, trainings, results)


def _settings(study: Study, data: DataSet, results: Results) -> dict[str, tuple[str, ...]]:
    """Row → its setting. A row all of whose trainings diverged while it was tuned is left out, as nothing is known."""
    tuning = study.tuning
    if tuning is None:
        return dict.fromkeys(study.objectives, ())
    best: dict[str, tuple[str, ...]] = {}
    for row in tuning.objectives:
        tried = {setting: Training(data.name, row, setting, tuning.seed, VALIDATION) for setting in data.grid}
        found = {setting: primary_scores(data, [training], results) for setting, training in tried.items()}
        if scores := {setting: score for setting, known in found.items() for score in known.values()}:
            best[row] = max(scores, key=lambda setting: _gain(data, scores[setting]))
    chosen = {row: best.get(row if row in tuning.objectives else tuning.others) for row in study.objectives}
    return {row: setting for row, setting in chosen.items() if setting is not None}


def _best(study: Study, data: DataSet, results: Results, settings: Rows) -> dict[str, tuple[str, ...]]:
    """The baseline, the rows that are always tested, and the best that never diverged; without a screening, all."""
    if not data.screening:
        return dict(settings)
    given = (study.baseline, *study.always)
    means = {}
    for row, setting in settings.items():
        scores = primary_scores(data, trainings_of(data.name, {row: setting}, data.screening, VALIDATION), results)
        if row not in given and len(scores) == len(data.screening):
            means[row] = _gain(data, statistics.mean(scores.values()))
    best = sorted(means, key=lambda row: -means[row])[: study.confirm]
    return {row: settings[row] for row in study.objectives if row in (*given, *best) and row in settings}


def _comparable(study: Study, rows: Rows) -> Rows | None:
    """The rows; None if the baseline or all others are missing because they diverged: nothing can be compared."""
    others = len(rows) > 1 or len(study.objectives) == 1
    return rows if study.baseline in rows and others else None


def why_stopped(study: Study, of_set: Stages, results: Results) -> list[str]:
    """Why nothing is chosen in a set and what to do, then the failures; empty if it is, or trainings are left."""
    first = [stage for stage in of_set.all if stage.name in ("tune", "screen")]
    trainings = [training for stage in first for training in stage.trainings]
    if of_set.confirmed is not None:
        return []
    if failed := unresolved(study, trainings, results):
        why = "No row is chosen, because trainings failed, which says nothing about their rows"
        advice = "To give a row up, remove it from the study, and move its results out of their folder"
        named = (f"{result.training}: {result.failed}" for result in failed)
        return [f"{why}. The same command tries them again. {advice}.", *named]
    if _ended(study, trainings, results):
        return [f"Nothing is tested: {study.baseline} or all other rows diverged, so there is nothing to compare."]
    return []


def _gain(data: DataSet, score: float) -> float:
    return -score if data.score.better == "lower" else score
