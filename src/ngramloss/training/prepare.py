"""a recipe and its data → tokens on disk and ``prepared.json``: written by the first process, awaited by the others."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ngramloss.data import Example, Split, has_split, load_split
from ngramloss.data.candidate_tokens import tokenise_candidates
from ngramloss.data.candidates import Candidates, about_candidates, check_candidates, note_on_training, read_candidates
from ngramloss.data.messages import MESSAGES
from ngramloss.data.overview import overview
from ngramloss.data.sentences import LOOKED_AT, splitting_notes
from ngramloss.data.tokens import Shape, Tokens, tokenise, tokens_fingerprint
from ngramloss.errors import MissingFileError, UserError
from ngramloss.metrics.registry import METRICS
from ngramloss.models import loading
from ngramloss.models.languages import set_languages
from ngramloss.models.prompts import shape_of
from ngramloss.output.console import logger
from ngramloss.recipe import Model, Recipe
from ngramloss.storage import heartbeat as heart
from ngramloss.storage.files import write_whole
from ngramloss.storage.heartbeat import Listener, heartbeat
from ngramloss.storage.run_folder import RunFolder, model_files
from ngramloss.terms.parser import parse
from ngramloss.terms.registry import OBJECTIVES
from ngramloss.terms.term import plugin_sources
from ngramloss.training.best import best_of
from ngramloss.training.identity import raise_unless_same
from ngramloss.training.language_model import NAME as LM_LOGP
from ngramloss.training.language_model import load_language_model, prepare_numbers, terms_of_language_model
from ngramloss.training.loop import precision_of
from ngramloss.training.prepared import Machine, Prepared, PreparedCandidates, PreparedLanguageModel, PreparedSplit
from ngramloss.training.processes import Processes
from ngramloss.training.validation import notes_on


def resolve_candidates(settings: Recipe, run: RunFolder) -> Recipe:
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
        logger.info(f"data.candidates is not used: no term of {settings.objective!r} compares candidates.")
    return dataclasses.replace(settings, data=dataclasses.replace(settings.data, candidates=str(path)))


def _terms_of_candidates(settings: Recipe) -> list[str]:
    """The names of the terms that compare candidates."""
    return [name for term in parse(settings.objective) if term.reads == "candidates" for name in term.names]


# Once for all processes


def prepare_once(
    settings: Recipe, run: RunFolder, here: Processes, newest: Path | None, *, trust_remote_code: bool
) -> tuple[Prepared, Sequence[Example]]:
    """Prepare in the first process, and write ``prepared.json`` or the error; wait for it in the others.

    Returns:
        What is prepared, and the validation examples for which texts are generated: only the first process has them.
    """
    if not here.first:
        return wait_for_prepared(run), ()
    with heartbeat(run.beat(0)) if here.count > 1 else nullcontext():
        try:
            prepared, judged = prepare(settings, run, here, newest, trust_remote_code=trust_remote_code)
        except BaseException as reason:
            if here.count > 1:
                write_whole(run.prepared, json.dumps({"error": str(reason)}))
            raise
        write_whole(run.prepared, prepared.to_json())
    return prepared, judged


def wait_for_prepared(run: RunFolder) -> Prepared:
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
    return Prepared.read(run.prepared)


def prepare(
    settings: Recipe, run: RunFolder, here: Processes, newest: Path | None, *, trust_remote_code: bool
) -> tuple[Prepared, list[Example]]:
    """Read and tokenise the data, and check that the newest checkpoint was trained on the same.

    Returns:
        What is prepared, and the validation examples for which texts are generated.
    """
    candidates = read_candidates(Path(settings.data.candidates)) if _terms_of_candidates(settings) else None
    splits = read_splits(settings)
    judged = _judged(settings, splits.get("validation"))
    if judged and splits["train"].column == MESSAGES:
        raise UserError(
            f"train.best: {settings.train.best} would be the score of a text behind a prompt, and conversations have "
            "several texts. Choose a term, such as ce, or use columns prompt and completion."
        )
    train = splits["train"]
    tokenizer, tokenizer_folder = loading.load_tokenizer(
        settings.model,
        lambda: loading.iterate_texts(train.examples),
        train.fingerprint,
        trust_remote_code=trust_remote_code,
    )
    set_languages(tokenizer, settings.data.source_language, settings.data.target_language, model=settings.model.name)
    config = loading.load_config(settings.model, trust_remote_code=trust_remote_code)
    shape = shape_of(settings.data, settings.task, settings.model, config, tokenizer, column=train.column)
    tokens = _tokenise(settings, splits, tokenizer, shape)
    used = _overview(settings, splits, tokens, shape)
    recommend_ce(settings)
    compared = None if candidates is None else _compare(settings, candidates, train, tokenizer, shape)
    lm, beside = _ask_language_model(settings, tokens, tokenizer, here, trust_remote_code=trust_remote_code)
    folders = {name: rows.folder for name, rows in tokens.items()}
    if compared is not None:
        folders["candidates"] = compared.tokens
    prepared = Prepared(
        splits={name: _described(splits[name], rows, beside.get(name, {})) for name, rows in tokens.items()},
        used=tuple(used),
        candidates=compared,
        language_model=lm,
        model_files=model_identity(settings.model, config),
        tokens={name: tokens_fingerprint(folder) for name, folder in folders.items()},
        plugins=plugin_sources(parse(settings.objective)),
        metrics=_metric_source(settings),
        tokenizer=str(tokenizer_folder or settings.model.tokenizer or settings.model.encoder or settings.model.name),
        column=train.column,
        continued_from=newest,
        trust_remote_code=trust_remote_code,
        machine=Machine(here.count, here.device_name, precision_of(settings.train, here.device)),
    )
    if newest is not None:
        raise_unless_same(run.path, newest, prepared)
    return prepared, judged


# Reading and tokenising


def _read(settings: Recipe, split: str, limit: int, on_bad_row: str) -> Split:
    data = dataclasses.replace(settings.data, on_bad_row=on_bad_row)
    return load_split(data, settings.task, split, limit=limit, leave_out=data.leave_out)


def read_splits(settings: Recipe) -> dict[str, Split]:
    """Read the training split and, if there are validations, the validation split. Skipped rows are shown."""
    data = settings.data
    splits = {"train": _read(settings, "train", data.limit, data.on_bad_row)}
    if settings.train.eval_every:
        splits["validation"] = _read(settings, "validation", data.validation_limit, data.on_bad_row)
    for split in splits.values():
        for bad in split.skipped:
            logger.warning(f"skipped {bad}")
    return splits


def _judged(settings: Recipe, validation: Split | None) -> list[Example]:
    """The validation examples for which texts are generated. Raises if their score cannot be computed."""
    best = best_of(settings)
    if not best.metric or validation is None:
        return []
    for note in notes_on(best, validation.examples):
        logger.info(f"{best.name}: {note} In a recipe, train.best_options has such options.")
    return validation.examples[: settings.train.best_limit or None]


def _tokenise(settings: Recipe, splits: Mapping[str, Split], tokenizer: Any, shape: Shape) -> dict[str, Tokens]:
    data = settings.data
    if shape.separator != "none":
        first = [example.source for example in splits["train"].examples[:LOOKED_AT]]
        for note in splitting_notes(first, data.splitter, data.language, "--set data.language"):
            logger.info(note)
    return {name: tokenise(split.examples, split.fingerprint, tokenizer, shape) for name, split in splits.items()}


def _described(split: Split, tokens: Tokens, beside: Mapping[str, Path]) -> PreparedSplit:
    skipped = tuple(str(bad) for bad in split.skipped)
    return PreparedSplit(len(split.examples), skipped, split.fingerprint, tokens.folder.resolve(), beside)


def _overview(settings: Recipe, splits: Mapping[str, Split], tokens: Mapping[str, Tokens], shape: Shape) -> list[str]:
    """What is used of the data, in sentences, which are also shown."""
    test = {}
    if has_split(settings.data, "test"):
        try:
            test["test"] = _read(settings, "test", 0, "skip")
        except (UserError, MissingFileError) as reason:  # generate will need it, training does not
            logger.info(f"the test split was not compared with the training data: {reason}")
    nouns = ("source", "target") if shape.prompt is None else ("prompt", "completion")
    sentences = overview({**splits, **test}, {name: rows.cut for name, rows in tokens.items()}, settings.data, nouns)
    for sentence in sentences:
        logger.info(sentence)
    return sentences


def recommend_ce(settings: Recipe) -> None:
    """Say so if an objective has no term for each token."""
    if not any(OBJECTIVES.entry(term.name).per == "token" for term in parse(settings.objective)):
        logger.info(
            f"{settings.objective} has no term for each token, such as ce. Terms of n-grams are meant to be added to "
            f"ce: alone, they teach little that the model does not write yet. Train on ce + {settings.objective}, or "
            f"on 0*ce + {settings.objective}, which is the same as now, without this warning."
        )


def _compare(
    settings: Recipe, candidates: Candidates, train: Split, tokenizer: Any, shape: Shape
) -> PreparedCandidates:
    """Check and tokenise the candidates of the training split."""
    path = Path(settings.data.candidates)
    about = about_candidates(path)
    doubt = check_candidates(candidates, about, train.examples, path=path)
    for note in filter(None, (doubt, note_on_training(candidates, train.examples, path=path))):
        logger.info(note)
    rows = tokenise_candidates(train.examples, train.fingerprint, candidates, tokenizer, shape)
    return PreparedCandidates(
        file=path,
        fingerprint=candidates.fingerprint,
        examples=int((rows.counts > 0).sum()),
        texts=int(rows.counts.sum()),
        cut=rows.cut,
        tokens=rows.folder.resolve(),
        metric=_metric_of_candidates(about),
    )


def _ask_language_model(
    settings: Recipe, tokens: Mapping[str, Tokens], tokenizer: Any, here: Processes, *, trust_remote_code: bool
) -> tuple[PreparedLanguageModel | None, dict[str, dict[str, Path]]]:
    """The language model, if a term reads one, and the numbers beside the labels of each split."""
    if not terms_of_language_model(settings):
        return None, {}
    name = settings.data.language_model
    lm = load_language_model(name, tokenizer, here.device, trust_remote_code=trust_remote_code)
    files, perplexity = prepare_numbers(lm, tokens)
    logger.info(f"the language model {name} has a perplexity of {perplexity:.4g} on the training targets.")
    described = PreparedLanguageModel(name, lm.fingerprint, perplexity)
    return described, {split: {LM_LOGP: file.resolve()} for split, file in files.items()}


def _metric_of_candidates(about: Mapping[str, Any]) -> str:
    """The scores that the gains are, if the file that ``ngramloss candidates`` writes beside candidates says it."""
    metric = about.get("metric")
    scores = metric.get("scores") if isinstance(metric, dict) else None
    return ", ".join(map(str, scores)) if isinstance(scores, list) else ""


# What the run is recognised by


def model_identity(model: Model, config: Any) -> dict[str, str]:
    """Hashes of the files that model and tokenizer are loaded from; of a model on the hub, its commit."""
    if model.name == "scratch" and not model.encoder:
        return model_files(Path(model.tokenizer)) if model.tokenizer else {}
    if files := model_files(Path(model.encoder or model.name)):
        return files
    return {"commit": str(config._commit_hash)}


def _metric_source(settings: Recipe) -> dict[str, str]:
    """The metric that selects the best checkpoint, if it comes from a plugin → a hash of its code."""
    name = best_of(settings).metric
    return {name: METRICS.source(name)} if name and METRICS.origin(name) else {}
