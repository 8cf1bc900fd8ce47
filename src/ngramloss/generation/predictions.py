"""a run or a model, and a data set → predictions and their settings, continued from where they stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import heartbeat, recipe
from ngramloss.data import Example, Split, columns_of, load
from ngramloss.data.languages import AUTO
from ngramloss.data.multilingual import codes
from ngramloss.data.origins import canonical
from ngramloss.data.sentences import LOOKED_AT, sentences, splitting_notes
from ngramloss.data.tokens import Shape, separator_id
from ngramloss.data.tokens import sources as source_ids
from ngramloss.errors import MissingFileError, UserError
from ngramloss.files import appended, fingerprint, read_object, whole_rows, write_whole
from ngramloss.generation.baselines import baseline_writer
from ngramloss.generation.search import Written, load_model, model_of_run, summaries
from ngramloss.recipe import TASKS, Data, Generation, Model, Recipe
from ngramloss.run_folder import NAMES, RunFolder, weight_files
from ngramloss.version import __version__, installed

SEEN = 500
"""Number of documents for which a run also saves what its objective sees."""
SEVERAL_SENTENCES = ("cnn_dailymail",)
"""Data sets whose summaries have several sentences: they are written one per line, where ROUGE-Lsum splits."""
DEFAULTS = dict(zip(TASKS, ("xsum", "translation"), strict=True))
"""Task → the recipe that completes the settings for a model that was trained elsewhere."""


class Writer(NamedTuple):
    """A model or baseline that writes summaries.

    Attributes:
        write: documents → summaries.
        look: examples → what an objective sees; None if the model does not belong to a run.
        settings: everything that could change the summaries.
    """

    write: Callable[[Sequence[Example]], list[Written]]
    look: Callable[[Sequence[Example]], Iterable[Mapping[str, Any]]] | None
    settings: dict[str, Any]


class Job(NamedTuple):
    """One generation job: model, data and settings.

    Attributes:
        model: a run folder, a model folder or hub id, or a baseline such as ``lead-3``.
        loading: how to load the model.
        data: which data, and how to tokenise them.
        split: of the data.
        generation: search settings; None means the model's own ``generation_config``.
        preset: name of the preset, if one was chosen.
        limit: maximum number of documents; 0 means all.
        batch_size: documents per batch.
        trust_remote_code: whether code that comes with the model may run.
        task: what the texts are of the documents, "summarisation" or "translation".
    """

    model: str
    loading: Model
    data: Data
    split: str
    generation: Generation | None
    preset: str | None
    limit: int
    batch_size: int
    trust_remote_code: bool = False
    task: str = TASKS[0]


def job(
    model: str, *, data: str | None = None, split: str = "test", preset: str | None = None,
    overrides: Sequence[str] = (), limit: int = 0, batch_size: int = 16, trust_remote_code: bool = False,
) -> Job:
    """Create a job for a run, with the run's settings, or for another model, with its own or a preset's settings."""
    if batch_size < 1:
        raise UserError(f"--batch-size must be 1 or more, got {batch_size}.")
    run = RunFolder(Path(model))
    own: Recipe | None = None
    if run.recipe.is_file():
        if not run.finished:
            raise MissingFileError(f"{model} has no {run.model.name}/: its training is not finished, or the model was "
                                   "deleted. The same ngramloss train command continues from its last checkpoint.")
        own = recipe.load(str(run.recipe), objective=False)
    for setting in overrides:
        if not setting.startswith(("generation.", "data.", "task=")):
            raise UserError(f"generate accepts --set only for generation.*, data.* and task, got {setting!r}.")
    if data is None and own is None and preset is None:
        raise UserError("choose the documents with --data, or a --preset.")
    if own is None:   # a model that was trained elsewhere does not expect separators before sentences
        task = recipe.load("xsum", [setting for setting in overrides if setting.startswith("task=")]).task
        base = recipe.load(preset or DEFAULTS[task], ["data.separator=none"])
    else:
        base = own
    if preset is not None:
        base = dataclasses.replace(base, generation=recipe.load(preset).generation)
    if data is not None:   # columns and a held-out part are of the run's own data
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, name=data, validation_fraction=0.0))
    settings = recipe.changed(base, overrides, objective=False)
    chosen = settings.data
    baseline_writer(model, chosen.name, split)   # raises if the baseline does not work on these data
    searched = preset is not None or any(setting.startswith("generation.") for setting in overrides)
    loading = model_of_run(run.path, own.model) if own else Model(name=model)
    search = settings.generation if searched else None
    return Job(model, loading, chosen, split, search, preset, limit, batch_size, trust_remote_code, settings.task)


def write_predictions(
    work: Job, folder: Path, *, progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write predictions, references and the settings of the job into a folder, or continue a stopped job.

    Under torchrun each process writes its share of the documents. No id is written twice: documents that are done are
    read from the files of the stopped job. A second job in the same folder at the same time is refused.

    Args:
        work: the job.
        folder: where; it is created if it does not exist.
        progress: called with the number of documents done since the last call, and the number of all.
        say: shows a message to the user; called only in the first process.

    Returns:
        The path of the predictions.
    """
    rank = int(os.environ.get("RANK", 0))
    if RunFolder(folder.parent).recipe.exists() and folder.name in NAMES:
        raise UserError(f"{folder} is a part of the run {folder.parent} and would be deleted with it. Choose another "
                        "--out.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, but --out needs a folder. It is created if it does not exist.")
    run = RunFolder(folder)
    created = rank == 0 and not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with heartbeat.heartbeat(run.beat(rank)) if rank else run.lock(option="--out"):
            return _write_share(work, run, rank, progress, (lambda _: None) if rank else say)
    except BaseException:
        if created and not any(folder.iterdir()):   # the error occurred before anything was written
            folder.rmdir()
        raise


def read_split(work: Job) -> Split:
    """Read the documents of a job."""
    return load(
        work.data.name, work.split, **columns_of(work.data, work.task), on_bad_row=work.data.on_bad_row,
        limit=work.limit,
        validation_fraction=work.data.validation_fraction if work.split == "validation" else 0.0,
    )


def _write_share(
    work: Job, run: RunFolder, rank: int, progress: Callable[[int, int], None] | None, say: Callable[[str], None]
) -> Path:
    """Write this process's share. The first process also writes the common files and merges the shares."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    split = read_split(work)
    examples = split.examples
    writer = _writer(work, say)
    settings = {**writer.settings, "data": work.data.name, "split": work.split, "fingerprint": split.fingerprint,
                "documents": len(examples), "preset": work.preset, "versions": _versions()}
    if work.task != TASKS[0]:   # not otherwise: predictions of earlier versions do not say it
        settings["task"] = work.task
    begun = _was_begun(run, settings)
    if begun and run.predictions.exists():
        return run.predictions
    if rank == 0 and (work.model.startswith("lead-") or has_several_sentences(work)):
        sources = [example.source for example in examples[:LOOKED_AT]]
        for note in splitting_notes(sources, "pysbd", work.data.language, "--set data.language"):
            say(note)
    if processes == 1:
        run.tidy()
    if rank == 0:
        if not begun:
            run.seen.unlink(missing_ok=True)   # of other predictions
        write_whole(run.generation, json.dumps(settings, indent=1))
        rows = ({"id": example.id, "reference": list(example.references) or example.target, "document": example.source}
                for example in examples)
        write_whole(run.references, "".join(_line(row) for row in rows))
    share = run.share(rank)
    write_whole(share, "".join(_line(row) for row in whole_rows(share)))   # removes a line that a kill truncated
    done = _done_rows(run)
    mine = [example for example in examples[rank::processes] if example.id not in done]
    mine.sort(key=lambda example: len(example.source), reverse=True)   # similar lengths together, longest first
    with appended(share) as file:
        for start in range(0, len(mine), work.batch_size):
            batch = mine[start : start + work.batch_size]
            pairs = zip(batch, writer.write(batch), strict=True)
            file.write("".join(_line(_row(example.id, written)) for example, written in pairs))
            file.flush()
            if progress is not None:
                progress(len(batch), len(mine))
    if rank == 0:
        if writer.look is not None:
            shown = examples[:SEEN]
            rows = ({"id": example.id, **forced} for example, forced in zip(shown, writer.look(shown), strict=True))
            write_whole(run.seen, "".join(_line(row) for row in rows))
        _merge(run, [example.id for example in examples], processes)
    return run.predictions


def _merge(run: RunFolder, ids: Sequence[str], processes: int) -> None:
    """Wait until every document is done, then write all predictions in order.

    Raises:
        TimeoutError: another process with documents left gives no sign of life.
    """
    listeners = {rank: heartbeat.Listener(run.beat(rank)) for rank in range(1, processes)}
    while len(done := _done_rows(run)) < len(ids):
        left = Counter(index % processes for index, key in enumerate(ids) if key not in done)
        dead = [rank for rank, listener in listeners.items() if listener.is_dead and left[rank]]
        if dead and len(_done_rows(run)) < len(ids):   # not done since they were counted
            count = sum(left[rank] for rank in dead)
            raise TimeoutError(
                f"process {', '.join(map(str, dead))} of 0 to {processes - 1} gave no sign of life for "
                f"{heartbeat.SILENCE:g} seconds and has {count} documents left: it ended, or was never started. Run "
                "the same command again with all processes; documents that are done are kept."
            )
        time.sleep(0.5)
    write_whole(run.predictions, "".join(_line(done[key]) for key in ids))
    for path in run.shares():
        path.unlink()


def _was_begun(run: RunFolder, settings: Mapping[str, Any]) -> bool:
    """Whether this job was started in this folder. Raises if another job's files are there."""
    if not run.has_predictions:
        return False
    if not run.generation.exists() and not run.predictions.exists():
        return False   # another process started before the first one, which writes the settings
    try:
        before = read_object(run.generation)
    except (OSError, UserError):
        before = {}
    if "model" not in before:
        raise UserError(f"{run.path} has predictions but no valid {run.generation.name} with their settings. Choose "
                        "another --out, or delete them.")
    # Weights identify the model; a folder's name can be spelled in several ways, and folders are moved.
    same_weights = settings.get("weights") is not None and before.get("weights") == settings["weights"]
    left_out = {"versions", "model"} if same_weights else {"versions"}
    changes = [change for key in settings if key not in left_out
               for change in _differences(key, before.get(key), settings[key])]
    if changes:
        raise UserError(f"{run.path} has predictions made with other settings ({'; '.join(changes)}). Choose another "
                        "--out, or delete them.")
    return True


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """What differs in a setting, as ``generation.num_beams: 4 → 8``; of nested settings only those that differ."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        written = ["not set" if value is None else repr(value) for value in (before, now)]
        yield f"{name}: {written[0]} → {written[1]}"


def _done_rows(run: RunFolder) -> dict[str, dict[str, Any]]:
    """The rows that are already written, by id."""
    rows = (row for path in run.shares() for row in whole_rows(path))
    return {row["id"]: row for row in rows if "id" in row and "prediction" in row}


def _writer(work: Job, say: Callable[[str], None]) -> Writer:
    baseline = baseline_writer(work.model, work.data.name, work.split, work.data.language)
    if baseline is not None:
        named = {} if work.data.language == AUTO else {"language": work.data.language}
        splits = {"sentences": "pysbd", **named} if work.model.startswith("lead-") else {}
        return Writer(lambda examples: [Written(text, 0) for text in baseline(examples)], None,
                      {"model": work.model, **splits})
    own = Path(work.loading.name).is_dir() and work.loading.name != work.model
    model, tokenizer = load_model(
        work.loading, work.data, trained_here=own, device=_device(), trust_remote_code=work.trust_remote_code, say=say
    )  # fmt: skip
    if work.generation is not None:
        from ngramloss.training.models import prepare_generation

        prepare_generation(model, work.generation)
    data = work.data
    shape = Shape.of(data)
    separator = separator_id(tokenizer, data.separator)
    by_line = has_several_sentences(work)

    def ids(examples: Sequence[Example]) -> list[list[int]]:
        return source_ids([example.source for example in examples], tokenizer, shape, separator)

    def write(examples: Sequence[Example]) -> list[Written]:
        written = summaries(model, tokenizer, ids(examples), batch_size=len(examples))
        if not by_line:
            return written
        split = [sentences(summary.text, language=data.language) for summary in written]
        return [summary._replace(text="\n".join(parts)) for summary, parts in zip(written, split, strict=True)]

    def look(examples: Sequence[Example]) -> Iterable[Mapping[str, Any]]:
        from ngramloss.generation.teacher_forced import forced_predictions

        references = [example.target for example in examples]
        return forced_predictions(model, tokenizer, ids(examples), references, max_target=shape.max_target)

    weights = weight_files(Path(work.loading.name))
    search = model.generation_config.to_diff_dict()
    search.pop("transformers_version", None)
    commit = getattr(model.config, "_commit_hash", None)
    return Writer(write, look if own else None, {
        "model": work.model, "weights": fingerprint(weights) if weights else commit, "generation": search,
        "shape": dataclasses.asdict(shape), "sentence_a_line": by_line,
        **({"languages": [tokenizer.src_lang, tokenizer.tgt_lang]} if codes(tokenizer) else {}),
    })  # fmt: skip


def has_several_sentences(work: Job) -> bool:
    """Whether summaries of this data set, or of the preset's, are written one sentence per line."""
    return not {canonical(name) for name in (work.data.name, work.preset or "")}.isdisjoint(SEVERAL_SENTENCES)


def _device() -> str | None:
    """This process's own GPU under torchrun; otherwise None, for the default device."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None


def _row(key: str, written: Written) -> dict[str, Any]:
    tokens = {"tokens": written.tokens} if written.tokens else {}   # baselines have no tokens
    return {"id": key, "prediction": written.text, **tokens}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _versions() -> dict[str, str]:
    others = {name: installed(name) for name in ("torch", "transformers", "tokenizers")}
    own = {"ngramloss": __version__, "python": platform.python_version()}
    return own | {name: number for name, number in others.items() if number is not None}
