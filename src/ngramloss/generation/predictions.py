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
from ngramloss.generation import engines
from ngramloss.generation.baselines import baseline_writer
from ngramloss.generation.batches import Budget, batches, budget_for
from ngramloss.generation.engines.settings import search_of
from ngramloss.generation.search import Written, decoded, load_model, model_of_run
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
        write: documents and their ids → the summaries of each, the best first.
        ids: documents → the ids of their tokens; None if the writer reads texts.
        look: examples → what an objective sees; None if the model does not belong to a run.
        settings: everything that could change the summaries.
        budget: how much one batch may contain.
    """

    write: Callable[[Sequence[Example], Sequence[Sequence[int]]], list[list[Written]]]
    ids: Callable[[Sequence[Example]], list[list[int]]]
    look: Callable[[Sequence[Example]], Iterable[Mapping[str, Any]]] | None
    settings: dict[str, Any]
    budget: Budget


class Sampling(NamedTuple):
    """How many texts are written of each document, and whether they are sampled.

    Attributes:
        texts: of each document.
        sample: sample tokens instead of searching for the most probable text.
        temperature: below 1, probable tokens become more probable.
        top_p: sample only from the most probable tokens whose probabilities sum to this.
        seed: of the random numbers.
    """

    texts: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


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
        batch_size: documents per batch; 0 means as many as the memory allows.
        trust_remote_code: whether code that comes with the model may run.
        task: what the texts are of the documents, "summarisation" or "translation".
        engine: what searches: a name in ``ENGINES``, or ``auto``.
        sampling: how many texts of each document, and whether they are sampled.
        precision: of the weights.
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
    engine: str = engines.AUTO
    sampling: Sampling = Sampling()
    precision: str = "fp32"


def job(
    model: str, *, data: str | None = None, split: str = "test", preset: str | None = None,
    overrides: Sequence[str] = (), limit: int = 0, batch_size: int = 0, trust_remote_code: bool = False,
    sampling: Sampling = Sampling(),   # noqa: B008
) -> Job:
    """Create a job for a run, with the run's settings, or for another model, with its own or a preset's settings."""
    _check_sampling(sampling)
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
        theirs = dataclasses.replace(recipe.load(preset).generation, engine=base.generation.engine,
                                     precision=base.generation.precision)
        base = dataclasses.replace(base, generation=theirs)
    if data is not None:   # columns and a held-out part are of the run's own data
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, name=data, validation_fraction=0.0))
    settings = recipe.changed(base, overrides, objective=False)
    chosen = settings.data
    baseline_writer(model, chosen.name, split)   # raises if the baseline does not work on these data
    keys = [setting.partition("=")[0].strip() for setting in overrides]
    only_how = ("generation.engine", "generation.precision")
    searched = preset is not None or any(key.startswith("generation.") and key not in only_how for key in keys)
    loading = model_of_run(run.path, own.model) if own else Model(name=model)
    search = settings.generation if searched else None
    return Job(model, loading, chosen, split, search, preset, limit, batch_size, trust_remote_code, settings.task,
               settings.generation.engine, sampling, settings.generation.precision)


def _check_sampling(sampling: Sampling) -> None:
    """Raise if the options contradict each other."""
    if not sampling.sample and (sampling.temperature, sampling.top_p) != (1.0, 1.0):
        raise UserError("--temperature and --top-p are options of sampling; add --sample.")
    if not sampling.temperature > 0:
        raise UserError(f"--temperature must be above 0, got {sampling.temperature:g}.")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {sampling.top_p:g}.")


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
    writer = _writer(work, run, say)
    settings = {**writer.settings, "data": work.data.name, "split": work.split, "fingerprint": split.fingerprint,
                "documents": len(examples), "preset": work.preset,
                "versions": _versions(writer.settings)}
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
        for batch, texts in batches(mine, writer.ids, writer.write, writer.budget, say=say):
            pairs = zip(batch, texts, strict=True)
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
    if "generation" in before:
        before["engine"] = engines.engine_of(before)
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


def _writer(work: Job, run: RunFolder, say: Callable[[str], None]) -> Writer:
    baseline = baseline_writer(work.model, work.data.name, work.split, work.data.language)
    if baseline is not None:
        return _baseline(work, baseline)
    own = Path(work.loading.name).is_dir() and work.loading.name != work.model
    model, tokenizer = load_model(
        work.loading, work.data, trained_here=own, device=_device(), trust_remote_code=work.trust_remote_code, say=say,
        precision=work.precision,
    )  # fmt: skip
    _set_search(model, work)
    search = search_of(model, seed=work.sampling.seed if work.sampling.sample else None)
    engine = engines.load(_engine(work, run, say), model, search, say=say)
    data = work.data
    shape = Shape.of(data)
    separator = separator_id(tokenizer, data.separator)
    by_line = has_several_sentences(work)

    def ids(examples: Sequence[Example]) -> list[list[int]]:
        return source_ids([example.source for example in examples], tokenizer, shape, separator)

    def write(examples: Sequence[Example], sources: Sequence[Sequence[int]]) -> list[list[Written]]:
        hypotheses = engine.write(sources)
        texts = iter(decoded(tokenizer, [row for rows in hypotheses for row in rows]))
        return [[Written(_lines(next(texts), data.language) if by_line else next(texts), len(row)) for row in rows]
                for rows in hypotheses]

    def look(examples: Sequence[Example]) -> Iterable[Mapping[str, Any]]:
        from ngramloss.generation.teacher_forced import forced_predictions

        references = [example.target for example in examples]
        return forced_predictions(model, tokenizer, ids(examples), references, max_target=shape.max_target)

    weights = weight_files(Path(work.loading.name))
    named = model.generation_config.to_diff_dict()
    named.pop("transformers_version", None)
    commit = getattr(model.config, "_commit_hash", None)
    return Writer(write, ids, look if own else None, {
        "model": work.model, "weights": fingerprint(weights) if weights else commit, "generation": named,
        "engine": engine.facts, "shape": dataclasses.asdict(shape), "sentence_a_line": by_line,
        **({"seed": work.sampling.seed} if work.sampling.sample else {}),
        **({"languages": [tokenizer.src_lang, tokenizer.tgt_lang]} if codes(tokenizer) else {}),
    }, budget_for(model, search, work.batch_size))  # fmt: skip


def _baseline(work: Job, write: Callable[[Sequence[Example]], list[str]]) -> Writer:
    if work.sampling != Sampling():
        raise UserError(f"{work.model} is a baseline, which writes one text of each document and samples nothing.")
    named = {} if work.data.language == AUTO else {"language": work.data.language}
    splits = {"sentences": "pysbd", **named} if work.model.startswith("lead-") else {}
    return Writer(lambda examples, _: [[Written(text, 0)] for text in write(examples)],
                  lambda examples: [[] for _ in examples], None, {"model": work.model, **splits},
                  Budget(documents=work.batch_size))


def _set_search(model: Any, work: Job) -> None:
    """Put the job's search settings into the model's ``generation_config``."""
    from ngramloss.training.models import prepare_generation

    if work.generation is not None:
        prepare_generation(model, work.generation)
    sampling, config = work.sampling, model.generation_config
    if sampling.sample:
        config.update(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0, num_beams=1,
                      early_stopping=False)
    if sampling.texts > 1:
        beams = config.num_beams or 1
        if not sampling.sample and sampling.texts > beams:
            raise UserError(f"--num-return {sampling.texts} needs as many beams, but the search has {beams}. Use --set "
                            f"generation.num_beams={sampling.texts}, or --sample.")
        config.update(num_return_sequences=sampling.texts)


def _engine(work: Job, run: RunFolder, say: Callable[[str], None]) -> str:
    """The name of the engine; for ``auto``, the one that began the predictions that are in the folder."""
    if work.engine != engines.AUTO or not run.has_predictions or not run.generation.exists():
        return work.engine
    try:
        before = read_object(run.generation)
    except UserError:   # is reported when the settings are compared
        return work.engine
    name = engines.engine_of(before)["name"]
    if name in engines.ENGINES:
        say(f"engine {name}, which began the predictions in {run.path}.")
        return name
    return work.engine


def _lines(text: str, language: str) -> str:
    """A text with one sentence per line."""
    return "\n".join(sentences(text, language=language))


def has_several_sentences(work: Job) -> bool:
    """Whether summaries of this data set, or of the preset's, are written one sentence per line."""
    return not {canonical(name) for name in (work.data.name, work.preset or "")}.isdisjoint(SEVERAL_SENTENCES)


def _device() -> str | None:
    """This process's own GPU under torchrun; otherwise None, for the default device."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None


def _row(key: str, written: Sequence[Written]) -> dict[str, Any]:
    best = written[0]
    tokens = {"tokens": best.tokens} if best.tokens else {}   # baselines have no tokens
    candidates = {"candidates": [text for text, _ in written]} if len(written) > 1 else {}
    return {"id": key, "prediction": best.text, **tokens, **candidates}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _versions(settings: Mapping[str, Any]) -> dict[str, str]:
    engine = [engines.ENGINES[settings["engine"]["name"]].package] if "engine" in settings else []
    others = {name: installed(name) for name in ("torch", "transformers", "tokenizers", *engine)}
    own = {"ngramloss": __version__, "python": platform.python_version()}
    return own | {name: number for name, number in others.items() if number is not None}
