"""texts of a training → a small JSON file with their scores; a folder of such files, checked, read and merged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data.prompts import TODAY
from ngramloss.errors import MissingFileError, UserError
from ngramloss.metrics.registry import METRICS, compute_scores
from ngramloss.metrics.scores import Absent, Pooled, corpus_score
from ngramloss.output import escape
from ngramloss.recipe import Recipe
from ngramloss.scoring import provenance, score_cache, scored_texts
from ngramloss.scoring.results import key_of
from ngramloss.scoring.score_cache import number
from ngramloss.storage.files import inside, object_or_empty, read_object, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.storage.typed import typed
from ngramloss.study.plan import SYSTEM_ROW, TEST, VALIDATION, DataSet, Rows, Study, Training
from ngramloss.training.precision import PRECISION
from ngramloss.version import __version__

MARKER, ALWAYS, CONFIRMED = "study.json", "always.json", "confirmed.json"
"""Whose folder it is; in a set's folder, which rows are always tested, and which are confirmed after a screening."""
ELSEWHERE = ("start again with other --results and --runs", "choose another --runs")
"""How to start again with a study of a file, and with one that grows."""
ADVICE = "Move it out of the folder. If this study wrote it, its texts are scored again."
"""What to do about a file that is not a result; it may be somebody's own."""
DECIMALS = 4  # Of the scores of documents
QUICK = {"rouge", "bleu", "chrf", "shape"}  # Metrics that need no process of their own
OF_SCORES = " of the scores"
MAY_DIFFER = {
    "train data": (*recipe.affecting("rows"), "data.weights"),
    "candidates tokens": ("data.", "model.", "task"),
    "candidates": ("data.candidates", "data.leave_out"),
    "language model": ("data.language_model",),
    "teacher": ("train.teacher",),
    "model: weights": (),
    "model": ("model.",),
    "tokenizer": ("model.",),
    "plugin": (),
    PRECISION: ("train.precision",),
    "": ("data.", "model.", "task"),
}
"""How names of what trainings are made of begin → how settings begin by which rows have different ones on purpose."""
_EARLIER = {"train": "train data", "base": "model: weights"}  # The names of earlier versions
_SAMPLE = {"ids": ["1"], "references": [["a"]], "documents": ["a"], "predictions": ["a"]}
"""Texts of one document, to try a metric on."""


@dataclass(frozen=True)
class DecodingResult:
    """What one decoding of one training scored, or why it failed."""

    training: Training  # whose model wrote the texts, and of which split
    decoding: str  # its name
    facts: dict[str, Any]  # all of the study that could change it, see ``Study.facts``
    failed: str = ""  # why there are no scores; empty if there are
    tries: int = 0  # how often it failed, if it did
    diverged: bool = False  # whether its loss became NaN or infinite; any other failure says nothing about the row
    # name of a score → its value for the corpus; None where it has none
    scores: dict[str, float | None] = field(default_factory=dict)
    count: int = 0  # the number of documents
    # of the primary decoding, the primary score of each document, or its counts where the score is pooled; else empty
    documents: list[Any] = field(default_factory=list)
    signatures: dict[str, str] = field(default_factory=dict)  # metric → how it was computed
    # metric → sentences on texts that it does not read well with its options
    notes: dict[str, list[str]] = field(default_factory=dict)
    generation: str = ""  # how the texts were written
    # what the training is made of, the split of the texts, code of metrics → fingerprints; and the training's precision
    made_of: dict[str, str] = field(default_factory=dict)
    train_seconds: float | None = None  # time of the training; None if it was stopped in between
    write_seconds: float | None = None  # time of the decoding, likewise
    docs_per_second: float | None = None  # speed of the training
    parallel: int = 1  # how many trainings and decodings ran side by side
    version: str = __version__  # of ngramloss
    attempt: str = ""  # of a failure, different for each one

    @property
    def key(self) -> tuple[Training, str]:
        """What it is the result of."""
        return self.training, self.decoding

    @cached_property
    def must_agree(self) -> list[tuple[str, str, str]]:
        """What it shares with others of its set: name, the settings of those others, and value."""
        found = [(f"signature of {name}", "", value) for name, value in self.signatures.items()]
        if self.documents:
            first = self.documents[0]
            shape = f"{len(self.documents)}" + (f" × {len(first)}" if isinstance(first, list) else "")
            found.append((f"number of {self.training.split} documents", "", shape))
        reads_rows = any(key.startswith("made.") for key in self.facts)  # of its seed
        made_of = {_EARLIER.get(name, name): value for name, value in self.made_of.items()}
        for name, value in {**made_of, **_file_names(made_of)}.items():
            settings = next(settings for start, settings in MAY_DIFFER.items() if name.startswith(start))
            own = json.dumps({key: self.facts[key] for key in sorted(self.facts) if key.startswith(settings)})
            if SYSTEM_ROW in self.facts:  # it has data and a model of its own
                seed = self.training.seed if reads_rows and not name.endswith(" data") else ""
                own = f"{self.training.objective}, {seed}"
            if name in (VALIDATION, TEST) or name.endswith(OF_SCORES):
                own = ""
            found += [(name, own, value)] if value else []
        return found


class Confirmed(NamedTuple):
    """The contents of ``confirmed.json`` and ``always.json``."""

    rows: dict[str, tuple[str, ...]]
    seeds: list[int]


Results = Mapping[tuple[Training, str], DecodingResult]  # The results of a study, by training and decoding


class ScoringError(Exception):
    """A metric failed on the texts of one training."""


def score_texts(study: Study, training: Training, decoding: str, run: RunFolder, texts: RunFolder) -> DecodingResult:
    """Score what a training's model wrote into ``texts``. Raises ``ScoringError`` if a metric fails."""
    data = study.data(training.set)
    aligned = scored_texts.align(None, [texts.path])
    given = {**aligned.task._asdict(), "predictions": aligned.texts[0]}
    about = provenance.run(texts.path)
    values: dict[str, float | None] = {}
    signatures, documents, notes = {}, list[Any](), {}
    saved = score_cache.read(texts.path, aligned.task.ids, aligned.texts[0]).metrics
    for metric in data.metrics:
        options, known = data.options(metric), saved.get(metric)
        try:
            if known is not None and not known.pooled and known.key == key_of(metric, given, options):
                scores = known.scores
            else:
                scores = compute_scores(metric, given, options, documents=len(aligned.task.ids))
            if found := METRICS[metric].notes_on(given, options):
                notes[metric] = found
        except Exception as error:
            why = f"the metric {metric} raised {type(error).__name__}: {str(error).rstrip('.')}"
            again = f"ngramloss score {texts.path} --metrics {metric}"
            raise ScoringError(f"{why}. The same happens with `{again}`.") from error
        signatures[metric] = scores.signature
        values |= {name: number(corpus_score(scores, name)) for name in scores.values}
        if metric == data.metric and decoding == data.decoding:
            pooled = scores.pooled.get(data.primary)
            documents = pooled.statistics.tolist() if pooled else scores.values[data.primary]
    prepared = object_or_empty(run.prepared)
    trained = prepared.get("made_of")
    if not isinstance(trained, dict):
        why = f"{run.path} does not say what it was trained on, so it cannot be compared: an earlier version trained it"
        raise UserError(f"{why}. Delete that run and its outputs; the same command makes them again.")
    code = {f"plugin metric {name}{OF_SCORES}": METRICS.source(name) for name in data.metrics if METRICS.origin(name)}
    made_of = {training.split: str(about.generation.get("fingerprint", "")), **trained, **code}
    return DecodingResult(
        training,
        decoding,
        study.facts(training, decoding),
        scores={name: None if value is None else round(value, 6) for name, value in values.items()},
        count=len(aligned.task.ids),
        documents=[_rounded(value) for value in documents],
        signatures=signatures,
        notes=notes,
        generation=provenance.written_by(about._replace(generation={**about.generation, "model": None})),
        made_of=made_of,
        docs_per_second=provenance.docs_per_second(run.path),
    )


def check_metrics(sets: Iterable[DataSet]) -> None:
    """Raise if a metric cannot run here, before anything is trained."""
    for data in sets:
        for name in data.metrics:
            try:
                compute_scores(name, _SAMPLE, data.options(name), documents=1)
            except Absent as reason:
                raise UserError(f"nothing was trained, because the metric {name} cannot run: {reason}") from None


def documents_of(data: DataSet, each: Sequence[DecodingResult]) -> list[float] | Pooled:
    """The documents' primary scores of several runs together: means over runs, or sums of counts for a pooled score."""
    import numpy as np

    rows = [[nan if value is None else value for value in result.documents] for result in each]
    if not isinstance(each[0].documents[0], list):
        return [float(value) for value in np.mean(rows, axis=0)]
    # A sample knows how to make one score of counts.
    sample = compute_scores(data.metric, _SAMPLE, data.options(data.metric), documents=1)
    return Pooled(np.sum(rows, axis=0, dtype=np.float64), sample.pooled[data.primary].combine)


class ResultFolder:
    """The results of a study in a folder: ``SET/ROW-SEED.SPLIT.DECODING.json``."""

    def __init__(self, path: Path, study: Study) -> None:
        self.path, self.study = path, study
        self._read: dict[Path, tuple[int, DecodingResult | None]] = {}

    @property
    def day(self) -> str:
        """The day on which the study began. Prompts whose chat templates write the date have this one in all rows."""
        return str(read_object(inside(self.path, MARKER)).get("day", ""))

    def read(self) -> dict[tuple[Training, str], DecodingResult]:
        """All results. Raises if one was made by another study, another version of this one, or from other data."""
        results: dict[tuple[Training, str], DecodingResult] = {}
        paths: dict[tuple[Training, str], Path] = {}
        for path in sorted(path for path in self.path.glob("*/*.json") if path.name not in (ALWAYS, CONFIRMED)):
            stamp = path.stat().st_mtime_ns
            if self._read.get(path, (0, None))[0] != stamp:
                self._read[path] = stamp, _checked(path, self.study)
            if result := self._read[path][1]:
                if result.key in results:
                    both = f"{path} and {paths[result.key]}"
                    raise UserError(f"{both} are results of the same texts. Delete one of them.")
                results[result.key], paths[result.key] = result, path
        _raise_unless_alike(results, paths)
        return results

    def write(self, result: DecodingResult) -> None:
        """Write a result, in place of an earlier failure. Raises if it cannot be compared with the others."""
        training = result.training
        _raise_unless_alike({**self.read(), result.key: result}, {})
        path = inside(self.path, training.set, f"{training.name}.{training.split}.{result.decoding}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _as_json(result))

    def confirmed(self, data: DataSet, file: str = CONFIRMED) -> dict[str, tuple[str, ...]] | None:
        """The rows that were chosen for the test set; None if none were. Raises if the confirmation seeds changed."""
        path = inside(self.path, data.name, file)
        if not path.exists():
            return None
        advice = "Restore it: it says which rows the test set was used for."
        saved: Confirmed = typed(Confirmed, read_object(path, advice), path, advice)
        if saved.seeds != list(self.study.confirmation):
            seeds = (
                f"the confirmation seeds of {data.name} were {saved.seeds} and are {list(self.study.confirmation)} now"
            )
            why = "More seeds after a look at the test scores make p too small: put them back"
            raise UserError(f"{seeds}. {why}, or start again with other --results and --runs. ({path})")
        return saved.rows

    def raise_if_others_confirmed(self, data: DataSet, rows: Rows | None, file: str = CONFIRMED) -> None:
        """Raise if the test set was used for other rows than these."""
        before = self.confirmed(data, file)
        if None not in (before, rows) and before != rows:
            raise UserError(
                f"the test set of {data.name} was used for {_listed(before)}, but the study would now choose "
                f"{_listed(rows)}: its rows, its screening or the number of confirmed rows changed. Put them back, or "
                "start again with other confirmation seeds, --results and --runs."
            )

    def confirm(self, data: DataSet, rows: Rows, file: str = CONFIRMED) -> None:
        """Save which rows are tested, before the first of them is. Raises if others were chosen earlier."""
        if self.study.grows:
            return
        self.raise_if_others_confirmed(data, rows, file)
        if self.confirmed(data, file) is None:
            path, content = inside(self.path, data.name, file), {"rows": rows, "seeds": self.study.confirmation}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(content, indent=1) + "\n")

    def merge(self, other: Path) -> int:
        """Copy results of another folder that are not here, or failed, and would be the same. Returns their number."""
        if not other.is_dir():
            raise MissingFileError(f"there is no folder {other} to merge.")
        raise_unless_same_study(other, self.study)
        theirs = ResultFolder(other, self.study)
        here, found = self.read(), theirs.read()
        new = [each for key, each in found.items() if key not in here or (here[key].failed and not each.failed)]
        _raise_unless_alike({**here, **{result.key: result for result in new}}, {})
        for data, file in itertools.product(self.study.sets, (ALWAYS, CONFIRMED)):
            if (rows := theirs.confirmed(data, file)) is not None:
                self.confirm(data, rows, file)
        for result in new:
            self.write(result)
        return len(new)


def claim(folder: Path, study: Study) -> None:
    """Mark a folder as this study's. Raises if it is another's."""
    raise_unless_same_study(folder, study)
    folder.mkdir(parents=True, exist_ok=True)
    if "day" not in object_or_empty(folder / MARKER):
        about = {"study": study.name, "day": os.environ.get(TODAY, f"{date.today()}")}
        write_whole(folder / MARKER, json.dumps(about) + "\n")


def raise_unless_same_study(folder: Path, study: Study) -> None:
    """Raise if a folder has the results or runs of another study."""
    path = inside(folder, MARKER)
    name = read_object(path).get("study") if path.exists() else None
    if name not in (None, study.name):
        why = f"{folder} belongs to the study {name!r}, and this is {study.name!r}. Choose another --results or --runs"
        raise UserError(f"{why}. If you renamed the study's file, write its new name into {path}.")


def _file_names(made_of: Mapping[str, str]) -> dict[str, str]:
    """The names of the files of each model: one that is added or deleted is noticed, too."""
    found: dict[str, list[str]] = {}
    for name in sorted(made_of):
        what, colon, file = name.partition(": ")
        if colon:
            found.setdefault(f"{what}: files", []).append(file)
    return {name: ", ".join(files) for name, files in found.items() if files != ["weights"]}  # all that was kept once


def _read(path: Path) -> DecodingResult:
    import numpy as np

    content = read_object(inside(path.parent.parent, path.parent.name, path.name), ADVICE)
    what = f"{path} is not a result of a study"
    training = typed(Training, {name: content.pop(name) for name in Training._fields if name in content}, what, ADVICE)
    result: DecodingResult = typed(DecodingResult, {"training": training, **content}, what, ADVICE)
    try:
        documents = np.array([nan if value is None else value for value in result.documents])
        whole = documents.dtype.kind in "if" and len(documents) in (0, result.count) and not np.isinf(documents).any()
    except ValueError:  # rows of several lengths
        whole = False
    attempt = re.fullmatch(r"[0-9]{0,19}", result.attempt)
    right = {"split": training.split in (VALIDATION, TEST), "attempt": attempt, "documents": whole}
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise UserError(f"{what}: {wrong[0]} has a value that no study writes. {ADVICE}")
    return replace(
        result,
        failed=escape.name(result.failed),
        generation=escape.name(result.generation),
        version=escape.name(result.version),
        signatures={metric: escape.name(text) for metric, text in result.signatures.items()},
        made_of={escape.name(name): escape.name(text) for name, text in result.made_of.items()},
    )


def _changes(result: DecodingResult, now: Mapping[str, Any]) -> list[str]:
    """The settings of a result that differ now. One that later versions added had its default."""
    before = {**dict(recipe.flat(Recipe(""))), "metrics": [], "set.metric_options": [], **result.facts}
    return [f"{key}: {before.get(key)!r} → {value!r}" for key, value in now.items() if before.get(key) != value]


def settings_changed(when: str, changed: Sequence[str], study: Study, rest: str) -> UserError:
    """The error that names settings of a study that are other ones now."""
    advice = f"Put them back, {ELSEWHERE[study.grows]}, or {rest}."
    return UserError("\n  ".join([f"settings changed after {when}:", *changed]) + f"\n{advice}")


def _checked(path: Path, study: Study) -> DecodingResult | None:
    """A result from its file, or None if it does not matter. Raises unless the study would make it the same way."""
    result = _read(path)
    training = result.training
    known = any(data.name == training.set for data in study.sets)
    is_row = training.objective in study.objectives
    if not known or not (is_row or study.grows) or result.decoding not in study.decodings:
        what = f"the set {training.set!r}" if not known else f"{training.objective!r}, {result.decoding}"
        why = f"{path} is a result of {what}, which the study no longer has"
        raise UserError(f"{why}. Put it back, or move the file out of the folder.")
    if not (result.failed or result.documents) and result.decoding == study.data(training.set).decoding:
        raise UserError(f"{path} has no scores of documents. {ADVICE}")
    if not is_row and SYSTEM_ROW in result.facts:
        return None
    alike = training if is_row else training._replace(objective=study.baseline)
    try:
        now = study.facts(alike, result.decoding) | ({} if is_row else {"objective": training.objective})
    except UserError as reason:
        raise UserError(f"{path} is not a result of this study: {reason}") from None
    changed = _changes(result, now)
    if changed and result.failed:
        return None
    if changed:
        rest = "move the results that they change out of the folder, and delete their runs"
        raise settings_changed(f"{path} was made", changed, study, rest)
    return result if is_row and (not study.grows or training.seed in study.confirmation) else None


def _raise_unless_alike(results: Results, paths: Mapping[tuple[Training, str], Path]) -> None:
    """Raise if two results of a set, whose rows do not differ on purpose, are made of different things."""
    first: dict[tuple[str, ...], tuple[str, DecodingResult]] = {}
    for key, result in results.items():
        changed = []
        for *name, value in result.must_agree:
            before, other = first.setdefault((result.training.set, *name), (value, result))
            if before != value:
                changed.append((f"  {name[0]}: {before} → {value}", other))
        if changed:
            other = changed[0][1]
            there, here = (paths.get(each, f"{each[0]}, {each[1]}") for each in (other.key, key))
            raise UserError(
                f"{there} and {here} were made from different inputs, so they cannot be compared:\n"
                + "\n".join(line for line, of in changed if of is other)
                + "\nUndo the change, and delete the result and the run made after it; or start again with other "
                "--results and --runs."
            )


def _as_json(result: DecodingResult) -> str:
    content = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    content = {**content.pop("training")._asdict(), **content}
    content = {key: round(value, 3) if isinstance(value, float) else value for key, value in content.items()}
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    known = number(value)
    return known if known is None else int(known) if known == int(known) else round(known, DECIMALS)


def _listed(rows: Rows | None) -> str:
    return ", ".join(" ".join([row, *setting]) for row, setting in (rows or {}).items()) or "no rows"
