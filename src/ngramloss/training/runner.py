"""a recipe and a folder → a trained run in it, continued from where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import heartbeat as heart
from ngramloss import recipe
from ngramloss.data import Example, Split, columns_of, has_split, load
from ngramloss.data.candidate_tokens import CandidateTokens, WithCandidates, tokenise_candidates
from ngramloss.data.candidates import about_candidates, check_candidates, read_candidates
from ngramloss.data.multilingual import codes, set_languages
from ngramloss.data.overview import overview
from ngramloss.data.sentences import LOOKED_AT, splitting_notes
from ngramloss.data.tokens import Shape, Tokens, tokenise, tokens_fingerprint
from ngramloss.errors import MissingFileError, UserError
from ngramloss.files import read_object, whole_folder, whole_rows, write_whole
from ngramloss.heartbeat import Listener, heartbeat
from ngramloss.metrics.registry import METRICS
from ngramloss.models import loading
from ngramloss.objectives.parser import parse
from ngramloss.objectives.registry import OBJECTIVES
from ngramloss.objectives.term import check_names, plugin_sources
from ngramloss.recipe import Recipe
from ngramloss.run_folder import RunFolder, model_files
from ngramloss.training import card, checkpoints, loop
from ngramloss.training.best import best_of, tie_note
from ngramloss.training.loop import precision_of, total_steps
from ngramloss.training.processes import Processes, start_processes
from ngramloss.training.sharding import raise_unless_shardable
from ngramloss.training.trackers import check_trackers, start_trackers

Say = Callable[[str], None]


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    finished: bool
    step: int
    continued_from: int


class Prepared(NamedTuple):
    """What is prepared once for all processes.

    Attributes:
        record: the contents of ``prepared.json``.
        judged: the validation examples for which texts are generated; only the first process has them.
    """

    record: dict[str, Any]
    judged: Sequence[Example] = ()


class Stopped(Exception):
    """Another process of this run reported an error."""


def train(
    settings: Recipe, folder: Path, *, fresh: bool = False, say: Say = print, trust_remote_code: bool = False
) -> Outcome:
    """Train, or continue from the last complete checkpoint. Under torchrun every process calls this.

    Args:
        settings: the resolved recipe.
        folder: the run folder.
        fresh: delete an earlier run in this folder and start over.
        say: shows a message to the user; called only in the first process.
        trust_remote_code: whether code that comes with the model may run.
    """
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    say = say if rank == 0 else lambda _: None
    run = RunFolder(folder)
    settings = _with_candidates(settings, run, say)
    if rank == 0 and settings.model.name != "scratch" and not run.finished:  # a mistake is found before data are read
        loading.load_config(settings.model, trust_remote_code=trust_remote_code)
    with _locked(run, rank):
        saved = _claim(settings, run, fresh=fresh, say=say) if rank == 0 else checkpoints.Found(None, {})
        _check(settings, processes)
        here = start_processes()
        here.wait()
        if run.finished:
            say(f"{folder} is already finished. Start over with --fresh, or choose another --run.")
            return Outcome(folder, True, 0, 0)
        judged: Sequence[Example] = ()
        if rank == 0:
            with heartbeat(run.beat(0)) if processes > 1 else nullcontext():
                judged = _report_to_others(
                    run, lambda: _prepare(settings, here, run, saved, say, trust_remote_code), single=processes == 1
                )
        prepared = Prepared(_wait_for_prepared(run), judged)
        outcome = _run(settings, run, here, prepared, say, trust_remote_code)
        if outcome.finished and rank == 0:
            why = _finish(settings, run, prepared.record, say)
            say(f"finished at step {outcome.step}: {run.model}{why}")
        here.wait()
        return outcome


# Before training


def _with_candidates(settings: Recipe, run: RunFolder, say: Say) -> Recipe:
    """The recipe with the whole path of its candidates. Raises if the objective needs candidates and has none."""
    named, terms = settings.data.candidates, _terms_of_candidates(settings)
    if terms and not named:
        raise UserError(
            f"{terms[0]} compares candidates, but data.candidates is empty. Make candidates of the training split with "
            "ngramloss candidates, then name the file or its folder: --set data.candidates=FOLDER."
        )
    if not named:
        return settings
    path = Path(named).expanduser().resolve()
    if path.is_relative_to(run.path.resolve()):
        raise UserError(
            f"data.candidates is in the run's own folder {run.path}, where --fresh would delete it. Choose "
            "another --run."
        )
    if not terms:
        say(f"data.candidates is not used: no term of {settings.objective!r} compares candidates.")
    return dataclasses.replace(settings, data=dataclasses.replace(settings.data, candidates=str(path)))


def _terms_of_candidates(settings: Recipe) -> list[str]:
    """The names of the terms that compare candidates."""
    return [name for term in parse(settings.objective) if term.reads == "candidates" for name in term.names]


@contextmanager
def _locked(run: RunFolder, rank: int) -> Iterator[None]:
    """Create the folder and keep it locked; only the first process does this."""
    if rank:
        yield
        return
    if run.path.is_file():
        raise UserError(f"{run.path} is a file, but --run needs a folder. It is created if it does not exist.")
    run.path.mkdir(parents=True, exist_ok=True)
    with run.lock(option="--run"):
        yield


def _claim(settings: Recipe, run: RunFolder, *, fresh: bool, say: Say) -> checkpoints.Found:
    """Check that the folder can be used for this run and write ``recipe.toml``. Returns its checkpoints.

    ``recipe.toml`` is the first file that is written, so a folder with files but without it is not a run folder.
    """
    if not run.recipe.exists() and (content := run.content()):
        what = "has predictions but no run" if run.has_predictions else "is not a run folder"
        raise UserError(
            f"{run.path} {what} (it contains {', '.join(content[:3])}); nothing was changed. Choose another --run."
        )
    if fresh and run.recipe.exists():
        say(f"deleting the run in {run.path}" + (", with its predictions." if run.has_predictions else "."))
        run.clear()
    saved = checkpoints.find(run.checkpoints)
    if run.recipe.exists() and (run.finished or saved.newest or run.has_predictions):  # else nothing can be lost
        changed = recipe.differences(recipe.load(str(run.recipe)), settings)
        if changed:
            raise UserError(
                f"{run.path} was started with other settings:\n"
                + "\n".join(f"  {line}" for line in changed)
                + "\nUse the same settings to continue it, choose another --run, or start over with --fresh."
            )
    if run.finished:
        return saved
    run.tidy()
    write_whole(run.recipe, recipe.dump(settings))
    run.checkpoints.mkdir(exist_ok=True)
    run.prepared.unlink(missing_ok=True)
    return saved


def _prepare(
    settings: Recipe, here: Processes, run: RunFolder, saved: checkpoints.Found, say: Say, trust_remote_code: bool
) -> Prepared:
    """Read and tokenise the data once for all processes, and find the checkpoint to continue from."""
    from tqdm.auto import tqdm

    data = settings.data
    path = Path(data.candidates)
    candidates = read_candidates(path) if _terms_of_candidates(settings) else None

    progress_bar = partial(tqdm, unit=f" {recipe.WORDS[settings.task].sources}", leave=False)

    def read(split: str, limit: int, on_bad_row: str = data.on_bad_row) -> Split:
        with progress_bar(total=limit or None, desc=f"reading {split}") as bar:
            return load(
                data.name,
                split,
                **columns_of(data, settings.task),
                on_bad_row=on_bad_row,
                limit=limit,
                validation_fraction=data.validation_fraction,
                test_fraction=data.test_fraction,
                progress=bar.update,
            )

    train_split = read("train", data.limit)
    splits = {"train": train_split}
    if settings.train.eval_every:
        splits["validation"] = read("validation", data.validation_limit)
    for split in splits.values():
        for bad in split.skipped:
            say(f"skipped {bad}")
    judged = _judged(settings, splits.get("validation"), say)
    tokenizer, tokenizer_folder = loading.load_tokenizer(
        settings.model,
        lambda: loading.iterate_texts(train_split.examples),
        train_split.fingerprint,
        trust_remote_code=trust_remote_code,
        say=say,
    )
    set_languages(tokenizer, data.source_language, data.target_language, model=settings.model.name)
    shape = Shape.of(data)
    if data.separator != "none":
        first = [example.source for example in train_split.examples[:LOOKED_AT]]
        for note in splitting_notes(first, data.splitter, data.language, "--set data.language"):
            say(note)
    described, cut = {}, {}
    for name, split in splits.items():
        with progress_bar(total=len(split.examples), desc=f"tokenising {name}") as bar:
            tokens = tokenise(split.examples, split.fingerprint, tokenizer, shape, progress=bar.update, say=say)
        described[name] = {
            "examples": len(split.examples),
            "skipped": [str(bad) for bad in split.skipped],
            "fingerprint": split.fingerprint,
            "tokens": str(tokens.folder.resolve()),
        }
        cut[name] = tokens.cut
    if has_split(data, "test"):
        try:
            splits["test"] = read("test", 0, "skip")
        except (UserError, MissingFileError) as reason:  # generate will need it, training does not
            say(f"the test split was not compared with the training data: {reason}")
    used = overview(splits, cut, data)
    for sentence in used:
        say(sentence)
    if not any(OBJECTIVES.entry(term.name).per == "token" for term in parse(settings.objective)):
        say(
            f"{settings.objective} has no term for each token, such as ce. Terms of n-grams are meant to be added to "
            f"ce: alone, they teach little that the model does not write yet. Train on ce + {settings.objective}, or "
            f"on 0*ce + {settings.objective}, which is the same as now, without this remark."
        )
    compared = None
    if candidates is not None:
        about = about_candidates(path)
        if doubt := check_candidates(candidates, about, train_split.examples, path=path):
            say(doubt)
        with progress_bar(total=len(train_split.examples), desc="tokenising candidates") as bar:
            rows = tokenise_candidates(
                train_split.examples,
                train_split.fingerprint,
                candidates,
                tokenizer,
                shape,
                progress=bar.update,
                say=say,
            )
        compared = {
            "file": str(path),
            "fingerprint": candidates.fingerprint,
            "examples": int((rows.counts > 0).sum()),
            "texts": int(rows.counts.sum()),
            "cut": rows.cut,
            "tokens": str(rows.folder.resolve()),
            "metric": _metric_of_candidates(about),
        }
    code = {"plugins": plugin_sources(parse(settings.objective)), "metrics": _metric_source(settings)}
    tokens_of: dict[str, Any] = {**described, **({"candidates": compared} if compared else {})}
    model = {
        "model_files": _model_files(settings, trust_remote_code),
        "tokens": {name: tokens_fingerprint(Path(content["tokens"])) for name, content in tokens_of.items()},
    }
    for checkpoint, why in saved.broken.items():
        say(f"skipping {checkpoint.name}, which is incomplete ({why}).")
        checkpoints.delete(checkpoint)
    if saved.newest is not None:
        _raise_unless_same_data(run.path, saved.newest, _fingerprints(described, compared))
        _raise_unless_same_model(run.path, saved.newest, model)
        _raise_unless_same_code(run.path, saved.newest, code)
    record = {
        "splits": described,
        "used": used,
        "candidates": compared,
        **model,
        **code,
        "tokenizer": str(tokenizer_folder or settings.model.name),
        "continue": str(saved.newest) if saved.newest else None,
        "trust_remote_code": trust_remote_code,
        "machine": {
            "processes": here.count,
            "device": here.device_name,
            "precision": precision_of(settings.train, here.device),
        },
    }
    return Prepared(record, judged)


def _metric_of_candidates(about: dict[str, Any]) -> str:
    """The scores that the gains are, if the file that ``ngramloss candidates`` writes beside candidates says it."""
    metric = about.get("metric")
    scores = metric.get("scores") if isinstance(metric, dict) else None
    return ", ".join(map(str, scores)) if isinstance(scores, list) else ""


def _judged(settings: Recipe, validation: Split | None, say: Say) -> list[Example]:
    """The validation examples for which texts are generated. Raises if their score cannot be computed."""
    from ngramloss.training.validation import notes_on

    best = best_of(settings)
    if not best.metric or validation is None:
        return []
    for note in notes_on(best, validation.examples):
        say(f"{best.name}: {note} In a recipe, train.best_options has such options.")
    return validation.examples[: settings.train.best_limit or None]


def _metric_source(settings: Recipe) -> dict[str, str]:
    """The metric that selects the best checkpoint, if it comes from a plugin → a hash of its code."""
    name = best_of(settings).metric
    return {name: METRICS.source(name)} if name and METRICS.origin(name) else {}


def _fingerprints(splits: dict[str, Any], candidates: dict[str, Any] | None) -> dict[str, str]:
    """What a run was trained on → its fingerprint, as each checkpoint has it."""
    described = splits if candidates is None else {**splits, "candidates": candidates}
    return {name: content["fingerprint"] for name, content in described.items()}


def _raise_unless_same_data(folder: Path, checkpoint: Path, fingerprints: dict[str, str]) -> None:
    before = _saved_with(checkpoint, "data.json")
    for name, fingerprint in fingerprints.items():
        if before.get(name) != fingerprint:
            what = name if name == "candidates" else f"{name} data"
            raise UserError(
                f"the {what} have changed since {folder} was started (fingerprint {fingerprint}, not "
                f"{before.get(name)}). Restore them to continue, or start over with --fresh."
            )


def _model_files(settings: Recipe, trust_remote_code: bool) -> dict[str, str]:
    """Hashes of the files that model and tokenizer are loaded from; of a model on the hub, its commit."""
    if settings.model.name == "scratch":
        return {}
    if files := model_files(Path(settings.model.name)):
        return files
    return {"commit": str(loading.load_config(settings.model, trust_remote_code=trust_remote_code)._commit_hash)}


def _raise_unless_same_model(folder: Path, checkpoint: Path, model: dict[str, dict[str, str]]) -> None:
    """Raise if the model has another configuration or tokenizer than when the run was started.

    Its weights may be others: they are read from the checkpoint. Checkpoints of earlier versions do not say it.
    """
    saved = _saved_with(checkpoint, "data.json")
    for kind, now in model.items():
        before = saved.get(kind)
        if not isinstance(before, dict):
            continue
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if names and kind == "tokens":
            raise UserError(
                f"the tokens ({', '.join(names)}) are not those with which {folder} was started, although the texts "
                "are: the tokenizer has changed, or the version of the package that splits sentences. Restore it to "
                "continue, or start over with --fresh."
            )
        if names:
            raise UserError(
                f"files of the model have changed since {folder} was started ({', '.join(names)}). Restore them to "
                "continue, or start over with --fresh."
            )


def _raise_unless_same_code(folder: Path, checkpoint: Path, code: dict[str, dict[str, str]]) -> None:
    """Raise if an objective or a metric of a plugin is not the one that the run was started with."""
    saved = _saved_with(checkpoint, "data.json")
    for kind, noun in (("plugins", "objective"), ("metrics", "metric")):
        before = saved.get(kind)
        before = before if isinstance(before, dict) else {}
        for name, source in code[kind].items():
            if before.get(name, source) != source:
                raise UserError(
                    f"the code of the {noun} {name!r} has changed since {folder} was started (fingerprint {source}, "
                    f"not {before[name]}). Restore the old plugin to continue, or start over with --fresh."
                )


def _saved_with(checkpoint: Path, name: str) -> dict[str, Any]:
    return read_object(checkpoint / name, f"Delete {checkpoint} to continue from the previous checkpoint.")


def _report_to_others(run: RunFolder, prepare: Callable[[], Prepared], *, single: bool) -> Sequence[Example]:
    """Write ``prepared.json``, or the error, for the other processes. Returns the rest of what was prepared."""
    try:
        prepared = prepare()
    except BaseException as reason:
        if not single:
            write_whole(run.prepared, json.dumps({"error": str(reason)}))
        raise
    write_whole(run.prepared, json.dumps(prepared.record, indent=1))
    return prepared.judged


def _wait_for_prepared(run: RunFolder) -> dict[str, Any]:
    """Wait for the first process, which may read and tokenise for longer than a collective operation waits.

    Raises:
        TimeoutError: the first process gives no sign of life.
    """
    first = Listener(run.beat(0))
    while not run.prepared.exists():
        if first.is_dead and not run.prepared.exists():
            raise TimeoutError(
                f"the first process (rank 0) gave no sign of life for {heart.SILENCE:g} seconds before the data were "
                "prepared: it ended, or works in another folder. Start all processes again."
            )
        time.sleep(0.2)
    prepared = read_object(run.prepared, "Start the training again.")
    if "error" in prepared:
        raise Stopped(prepared["error"])
    return prepared


# Training


def _run(
    settings: Recipe, run: RunFolder, here: Processes, everything: Prepared, say: Say, trust_remote_code: bool
) -> Outcome:
    """Load model and data, and run the loop."""
    import torch
    from transformers.utils import logging as hf_logging

    from ngramloss.models.first_tokens import align_start
    from ngramloss.training.log import LogFile, ProgressBar

    prepared, judged = everything
    quiet: Any = hf_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    newest = Path(prepared["continue"]) if prepared["continue"] else None
    began = checkpoints.step(newest) if newest else 0
    if newest is not None and checkpoints.facts(newest)["finished"]:
        return Outcome(run.path, True, began, began)

    tokenizer, _ = loading.load_tokenizer(
        dataclasses.replace(settings.model, name=prepared["tokenizer"]),
        lambda: (),
        "",
        trust_remote_code=trust_remote_code,
    )
    data = settings.data
    set_languages(tokenizer, data.source_language, data.target_language, model=settings.model.name)
    torch.manual_seed(settings.train.seed)
    model = loading.load(settings.model, tokenizer, trust_remote_code=trust_remote_code)
    _raise_unless_it_fits(model, tokenizer, settings)
    loading.prepare_generation(model, settings.generation)
    align_start(model, tokenizer, name=settings.model.name, training=True, say=say)
    splits = {name: Tokens(_present(Path(split["tokens"]))) for name, split in prepared["splits"].items()}
    compared = prepared["candidates"]
    examples: Any = splits["train"]
    if compared is not None:
        examples = WithCandidates(examples, CandidateTokens(_present(Path(compared["tokens"]))))
    best, train = best_of(settings), settings.train
    fingerprints = _fingerprints(prepared["splits"], compared)
    saved_with = {kind: prepared[kind] for kind in ("plugins", "metrics", "model_files", "tokens")}
    if newest is not None:
        say(f"continuing {run.path} from step {began}.")
    logs: list[Any] = []
    trackers, bar = [], None
    if here.first:
        terms, score = check_names(parse(settings.objective)), best.name if best.metric else ""
        bar = ProgressBar(terms, total=total_steps(train, len(examples)), since=began, score=score)
        trackers = start_trackers(
            train.report_to, run_name=settings.slug, folder=run.tensorboard, settings=dataclasses.asdict(train)
        )
        logs = [LogFile(run.log, began), bar, *(tracker.log for tracker in trackers)]
    job = loop.Job(
        model,
        tokenizer,
        examples,
        train,
        settings.objective,
        validation=splits.get("validation"),
        best=best,
        score=_generated_score(settings, here, splits, tokenizer, judged),
        folder=run.checkpoints,
        saved_with={"data.json": json.dumps({**fingerprints, **saved_with})},
        continued_from=newest,
        logs=logs,
        on_step=(lambda number, values: None) if bar is None else bar.on_step,
        say=say,
    )
    try:
        outcome = loop.run(job, here)
    except checkpoints.CheckpointError as reason:
        if here.first:
            for path in checkpoints.find(run.checkpoints).broken:
                checkpoints.delete(path)
        last = checkpoints.find(run.checkpoints).newest
        rest = f"continue from step {checkpoints.step(last)}" if last else "start again: no checkpoint was saved yet"
        raise OSError(f"{reason} Free some disk space; the same command will then {rest}.") from reason
    finally:
        for tracker in trackers:
            tracker.end()
    if not outcome.finished:
        say(f"stopped at step {outcome.step} of {outcome.total}; the same command continues it.")
    return Outcome(run.path, outcome.finished, outcome.step, began)


def _generated_score(
    settings: Recipe, here: Processes, splits: dict[str, Tokens], tokenizer: Any, judged: Sequence[Example]
) -> Any:
    """What validation computes from generated texts; None if the best checkpoint is selected by a term."""
    from ngramloss.training.validation import GeneratedScore

    best = best_of(settings)
    if not best.metric or "validation" not in splits:
        return None
    rows = splits["validation"]
    return GeneratedScore(
        best,
        [rows[row]["input_ids"].tolist() for row in range(min(settings.train.best_limit or len(rows), len(rows)))],
        examples=judged,
        settings=settings,
        tokenizer=tokenizer,
        batch_size=(settings.train.eval_batch_size or settings.train.batch_size) // here.count,
        process=here.rank,
        processes=here.count,
    )


def _present(folder: Path) -> Path:
    if not folder.exists():
        raise MissingFileError(
            f"no prepared data in {folder} on this machine. Set NGRAMLOSS_CACHE to a folder that all machines share."
        )
    return folder


def _raise_unless_it_fits(model: Any, tokenizer: Any, settings: Recipe) -> None:
    if tokenizer.pad_token_id is None:
        raise UserError(f"the tokenizer of {settings.model.name} has no padding token. Batches need one.")
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = max(settings.data.max_source, settings.data.max_target, settings.generation.max_length)
    if positions is not None and positions < longest:
        raise UserError(
            f"{settings.model.name} supports {positions} positions, but the recipe asks for {longest} tokens. Lower "
            "data.max_source, data.max_target and generation.max_length."
        )
    rows = model.get_input_embeddings().num_embeddings
    tokens = max(len(tokenizer), *(token + 1 for token in (0, *codes(tokenizer).values())))  # M2M100 leaves them out
    if tokens > rows:
        raise UserError(f"the tokenizer has {tokens} tokens but the model has {rows} embeddings: they do not match.")


def _check(settings: Recipe, processes: int) -> None:
    """Raise if this training cannot run here, before any data are read."""
    import torch

    train = settings.train
    for key, rows in (("train.batch_size", train.batch_size), ("train.eval_batch_size", train.eval_batch_size)):
        if rows % processes:
            raise UserError(f"{key} counts rows over all processes: {rows} cannot be divided by {processes} processes.")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    precision = precision_of(train, device)
    if train.fsdp:
        raise_unless_shardable(processes, precision)
    check_trackers(train.report_to)


# After training


def _finish(settings: Recipe, run: RunFolder, prepared: dict[str, Any], say: Say) -> str:
    """Write the card, then the model folder, which marks the run as finished. Returns why it is this model."""
    newest = checkpoints.find(run.checkpoints).newest
    assert newest is not None, "a finished run has a checkpoint"
    facts = checkpoints.facts(newest)
    chosen, note = newest, ""
    if facts["best_step"] is not None:
        best = run.checkpoints / f"checkpoint-{facts['best_step']}"
        damage = checkpoints.fault(best) if best.exists() else "it is missing"
        if damage:
            say(f"the best checkpoint, {best.name}, is incomplete ({damage}); using the last weights as the model.")
        chosen = newest if damage else best
        note = "" if damage else tie_note(best_of(settings), whole_rows(run.log))
    if note:
        say(note)
    write_whole(run.card, card.card_text(settings, prepared, facts, chosen, note=note))
    with whole_folder(run.model) as partial_folder:
        checkpoints.copy_model(chosen, partial_folder)
        run.record_weights(partial_folder)
    if checkpoints.step(chosen) != facts["best_step"]:
        return ""
    return f", the weights of step {facts['best_step']} ({best_of(settings).described(facts['best'])})"
