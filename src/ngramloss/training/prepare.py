"""a recipe and its data → tokens on disk and ``prepared.json``: written by the first process, awaited by the others."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ngramloss.data import Example, Split, has_split, load_split, note_splitting
from ngramloss.data.candidate_tokens import tokenise_candidates
from ngramloss.data.candidates import Candidates, about_candidates, check_candidates, note_on_training, read_candidates
from ngramloss.data.label_weights import NAME as WEIGHTS
from ngramloss.data.label_weights import has_label_weights, prepare_weights
from ngramloss.data.messages import MESSAGES
from ngramloss.data.overview import overview
from ngramloss.data.prompts import fix_date, read_alike, template_of
from ngramloss.data.tokens import Shape, Tokens, tokenise, tokens_fingerprint
from ngramloss.errors import MissingFileError, UserError
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.registry import OBJECTIVES
from ngramloss.loss.terms.term import refuse_unweighted
from ngramloss.metrics.registry import METRICS
from ngramloss.models import loading
from ngramloss.models.languages import set_languages
from ngramloss.models.prompts import shape_of, warn_without_bos
from ngramloss.models.remote_code import remote_code_allowed
from ngramloss.output.console import logger
from ngramloss.recipe import SOURCE, Model, Recipe, Train
from ngramloss.storage.files import object_or_empty, write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training import identity
from ngramloss.training.identity import DAY, PLUGIN, raise_unless_same, record_of
from ngramloss.training.language_model import NAME as LM_LOGP
from ngramloss.training.language_model import language_model_mark, load_language_model, prepare_numbers
from ngramloss.training.precision import PRECISION, precision_of
from ngramloss.training.prepared import Machine, Prepared, PreparedCandidates, PreparedLanguageModel, PreparedSplit
from ngramloss.training.processes import Processes
from ngramloss.training.run import Run
from ngramloss.training.validation import notes_on

if TYPE_CHECKING:
    from ngramloss.training.system_task import SystemTask

T = TypeVar("T")

# Once for all processes


def prepare_once(
    folder: RunFolder, here: Processes, make: Callable[[], tuple[Prepared, T]], elsewhere: Callable[[], T | None]
) -> tuple[Prepared, T | None]:
    """``make`` in the first process, which writes ``prepared.json`` or the error; others wait, then ``elsewhere``."""
    if not here.first:
        besides = elsewhere()
        while not folder.prepared.exists():  # torchrun ends this process if the first one dies
            time.sleep(0.2)
        return Prepared.read(folder.prepared), besides
    try:
        prepared, besides = make()
    except BaseException as reason:
        if here.count > 1:
            write_whole(folder.prepared, json.dumps({"error": str(reason)}))
        raise
    write_whole(folder.prepared, prepared.to_json())
    return prepared, besides


def prepare(run: Run, folder: RunFolder, here: Processes, newest: Path | None) -> tuple[Prepared, list[Example]]:
    """Tokenise the data, and check the newest checkpoint against them; also the validation examples that get texts."""
    settings = run.settings
    candidates = _candidates(run)
    splits = read_splits(settings)
    train = splits["train"]
    judged = _judged(run, splits.get("validation"))
    if judged and train.column == MESSAGES:
        raise UserError(
            f"train.best: {settings.train.best} scores one output for each prompt, but conversations have several. "
            "Choose a term, such as ce, or use columns prompt and completion."
        )
    if run.writes and train.column == MESSAGES:
        raise UserError(
            "online: the model generates one output for each prompt, but conversations have several. Use columns "
            "prompt and completion, or leave the section online out."
        )
    tokenizer, tokenizer_folder = tokenizer_for(run, train)
    set_languages(tokenizer, settings.data.source_language, settings.data.target_language, model=settings.model.name)
    config = loading.load_config(settings.model)
    day = str(object_or_empty(newest / identity.IDENTITY).get(DAY, "")) if newest is not None else ""
    shape = shape_of(settings.data, settings.task, settings.model, config, tokenizer, column=train.column, day=day)
    warn_without_bos(config, tokenizer, shape.prompt)
    if shape.separator != "none":
        note_splitting([example.source for example in train.examples], settings.data)
    tokens = {name: tokenise(split.examples, split.fingerprint, tokenizer, shape) for name, split in splits.items()}
    weights = {
        name: {WEIGHTS: prepare_weights(split, tokens[name], tokenizer, shape).resolve()}
        for name, split in splits.items()
        if has_label_weights(split, messages=shape.prompt is not None and shape.prompt.messages)
    }
    used = [*_overview(settings, splits, tokens, shape), *_weight_sentences(settings, train, weights)]
    for sentence in used:
        logger.info(sentence)
    recommend_ce(run)
    compared = None if candidates is None else _prepare_candidates(settings, candidates, train, tokenizer, shape)
    lm, numbers = _language_model_numbers(run, tokens, tokenizer, here)
    machine = Machine(here.count, here.device_name, precision_of(settings.train, here.device))
    made_of = _made_of_files(run, splits, config, candidates) | {PRECISION: machine.precision}
    made_of |= {f"{name} tokens": tokens_fingerprint(rows.folder) for name, rows in tokens.items()}
    if compared is not None:
        made_of["candidates tokens"] = tokens_fingerprint(compared.tokens)
    if shape.prompt is not None and shape.prompt.chat_template and (day := fix_date(tokenizer)):
        made_of[DAY] = day
    prepared = Prepared(
        splits={
            name: PreparedSplit(
                len(split.examples),
                tuple(map(str, split.skipped)),
                split.fingerprint,
                tokens[name].folder.resolve(),
                weights.get(name, {}) | numbers.get(name, {}),
            )
            for name, split in splits.items()
        },
        used=tuple(used),
        candidates=compared,
        language_model=lm,
        made_of=made_of,
        tokenizer=str(tokenizer_folder or settings.model.tokenizer or settings.model.encoder or settings.model.name),
        column=train.column,
        continued_from=newest,
        trust_remote_code=remote_code_allowed(),
        machine=machine,
    )
    if newest is not None:
        online = {run.online_metric.name} if run.online_metric else set()
        may_change = {f"{PLUGIN} metric {name}" for name in online - {run.best.metric}}
        raise_unless_same(newest, record_of(made_of, settings), folder=folder.path, may_change=may_change)
    return prepared, judged


def prepare_system(run: Run, folder: RunFolder, here: Processes, newest: Path | None) -> tuple[Prepared, SystemTask]:
    """Read what a system trains on, and check that the newest checkpoint was trained on the same."""
    task = system_task(run)
    if run.system.entry.takes_objective:
        recommend_ce(run)
    for sentence in task.used:
        logger.info(sentence)
    code = {f"{PLUGIN} system {run.system.name}": run.system.code} if run.system.code else {}
    machine = Machine(here.count, here.device_name, precision_of(run.settings.train, here.device))
    made_of = {**task.made_of, **identity.objectives_made_of(run.settings.objective), **code}
    made_of |= {PRECISION: machine.precision, "train tokens": identity.rows_mark(task.examples)}
    if newest is not None:
        raise_unless_same(newest, record_of(made_of, run.settings), folder=folder.path)
    return Prepared({}, tuple(task.used), None, None, made_of, "", "", newest, remote_code_allowed(), machine), task


def system_task(run: Run) -> SystemTask:
    """What a system trains, with its first weights."""
    torch.manual_seed(run.settings.train.seed)
    task: SystemTask = run.system.entry.function("task")(run)
    return task


# Reading and tokenising


def _read(settings: Recipe, split: str, limit: int, on_bad_row: str, *, weights: bool = False) -> Split:
    data = dataclasses.replace(settings.data, on_bad_row=on_bad_row)
    return load_split(data, settings.task, split, limit=limit, leave_out=data.leave_out, weights=weights)


def read_scored(settings: Recipe, prepared: Prepared) -> list[Example]:
    """The training examples, whose references score what the model writes, in the order of the prepared rows."""
    split = _read(settings, "train", settings.data.limit, settings.data.on_bad_row, weights=True)
    if split.fingerprint != prepared.splits["train"].fingerprint:
        raise UserError("the train data have changed since they were prepared. Start the training again.")
    return split.examples


def read_splits(settings: Recipe) -> dict[str, Split]:
    """Read the training split and, if there are validations, the validation split. Skipped rows are shown."""
    data = settings.data
    splits = {"train": _read(settings, "train", data.limit, data.on_bad_row, weights=True)}
    if settings.train.eval_every:
        splits["validation"] = _read(settings, "validation", data.validation_limit, data.on_bad_row, weights=True)
        trained, column = (splits[name].column for name in ("train", "validation"))
        if not read_alike(trained, column, template=data.prompt):
            raise UserError(
                f"the training split has its sources in {trained!r}, but the validation split in {column!r}, which is "
                "read in another way. Rename the column, or choose one with data.source."
            )
    examples, messages = splits["train"].examples, splits["train"].column == MESSAGES
    if messages and data.weights and all(set(example.weights) == {1.0} for example in examples):
        raise UserError(
            f"data.weights: no answer of the training data has a {data.weights!r} other than 1. Name the key of the "
            "messages that has the weight, usually weight, or leave the setting out."
        )
    if any(has_label_weights(split, messages=messages) for split in splits.values()):
        refuse_unweighted(parse(settings.objective))
    for split in splits.values():
        for bad in split.skipped:
            logger.warning(f"skipped {bad}")
    return splits


def _judged(run: Run, validation: Split | None) -> list[Example]:
    """The validation examples for which texts are generated. Raises if their score cannot be computed."""
    settings, best = run.settings, run.best
    if best.metric and not settings.train.eval_every:
        logger.warning(
            f"train.best = {best.name} selects nothing, because train.eval_every is 0: the model will have the last "
            "weights. Set train.eval_every, or train.best=last."
        )
    if not best.metric:
        for key in ("best_limit", "best_beams", "best_options"):
            if getattr(settings.train, key) != getattr(Train(), key):
                logger.info(f"train.{key} is not used: no texts are generated for train.best = {best.name}.")
        return []
    if validation is None:
        return []
    for note in notes_on(best, validation.examples):
        logger.info(f"{best.name}: {note} In a recipe, train.best_options has such options.")
    return validation.examples[: settings.train.best_limit or None]


def tokenizer_for(run: Run, train: Any) -> tuple[Any, Path | None]:
    """The tokenizer of a run's model; one from scratch, with its folder, is trained on these examples."""
    texts = partial(loading.iterate_texts, train.examples)
    return loading.load_tokenizer(run.settings.model, texts, train.fingerprint)


def _overview(settings: Recipe, splits: Mapping[str, Split], tokens: Mapping[str, Tokens], shape: Shape) -> list[str]:
    test = {}
    if has_split(settings.data, "test"):
        try:
            test["test"] = _read(settings, "test", 0, "skip")
        except (UserError, MissingFileError) as reason:  # generate will need it, training does not
            logger.info(f"the test split was not compared with the training data: {reason}")
    nouns = ("source", "target") if shape.prompt is None else ("prompt", "completion")
    sentences = overview({**splits, **test}, {name: rows.cut for name, rows in tokens.items()}, settings.data, nouns)
    if shape.prompt is not None and not (settings.data.prompt or shape.prompt.messages):
        template = template_of(settings.data, settings.task, splits["train"].column)
        sentences += [f"prompts: {json.dumps(template, ensure_ascii=False)} (data.prompt)."] * (template != SOURCE)
    return sentences


def _weight_sentences(settings: Recipe, train: Split, weights: Mapping[str, Mapping[str, Path]]) -> list[str]:
    sentences = []
    if train.column == MESSAGES and (none := sum(example.weights.count(0) for example in train.examples)):
        sentences.append(f"{none:,} answers of the training data have the weight 0: they are read, but not learnt.")
    if "train" in weights:
        numbers = np.load(weights["train"][WEIGHTS])
        if not numbers.any():
            raise UserError("data.weights: all weights of the training data are 0, so that nothing would be learnt.")
        sentences.append(
            f"the tokens of the training targets weigh from {numbers.min():g} to {numbers.max():g}, on average "
            f"{numbers.mean(dtype=np.float64):.3g} (data.weights = {settings.data.weights}). Losses are divided by the "
            "number of tokens or texts, not by the sum of the weights."
        )
    return sentences


def recommend_ce(run: Run) -> None:
    """Say so if an objective has no term for each token."""
    objective = run.settings.objective
    if not any(OBJECTIVES.entry(term.name).per == "token" for term in run.terms):
        logger.info(
            f"{objective} has no term for each token, such as ce. N-gram terms are meant to be added to ce: alone, "
            f"they teach little that the model cannot do already. Train on ce + {objective}. To silence this warning, "
            f"write 0*ce + {objective}."
        )


def _prepare_candidates(
    settings: Recipe, candidates: Candidates, train: Split, tokenizer: Any, shape: Shape
) -> PreparedCandidates:
    path = Path(settings.data.candidates)
    about = about_candidates(path)
    doubt = check_candidates(candidates, about, train.examples, path=path)
    for note in filter(None, (doubt, note_on_training(candidates, train.examples, path=path))):
        logger.info(note)
    rows = tokenise_candidates(train.examples, train.fingerprint, candidates, tokenizer, shape)
    metric = about.get("metric")
    scores = metric.get("scores") if isinstance(metric, dict) else None
    return PreparedCandidates(
        file=path,
        fingerprint=candidates.fingerprint,
        examples=int((rows.counts > 0).sum()),
        texts=int(rows.counts.sum()),
        cut=rows.cut,
        tokens=rows.folder.resolve(),
        metric=", ".join(map(str, scores)) if isinstance(scores, list) else "",
    )


def _language_model_numbers(
    run: Run, tokens: Mapping[str, Tokens], tokenizer: Any, here: Processes
) -> tuple[PreparedLanguageModel | None, dict[str, dict[str, Path]]]:
    """The language model, if a term reads one, and the numbers beside the labels of each split."""
    if not run.names(LM_LOGP):
        return None, {}
    name = run.settings.data.language_model
    lm = load_language_model(name, tokenizer, here.device)
    files, perplexity = prepare_numbers(lm, tokens)
    logger.info(f"the language model {name} has a perplexity of {perplexity:.4g} on the training targets.")
    described = PreparedLanguageModel(name, lm.fingerprint, perplexity)
    return described, {split: {LM_LOGP: file.resolve()} for split, file in files.items()}


# What the run is recognised by


def made_of_now(run: Run) -> dict[str, str]:
    """What a training would be made of now, as far as that is known before anything is tokenised."""
    config = loading.load_config(run.settings.model)
    return _made_of_files(run, read_splits(run.settings), config, _candidates(run))


def _candidates(run: Run) -> Candidates | None:
    return read_candidates(Path(run.settings.data.candidates)) if run.reads_candidates else None


def _made_of_files(run: Run, splits: Mapping[str, Split], config: Any, candidates: Candidates | None) -> dict[str, str]:
    """Fingerprints of data, candidates, models and the code of plugins."""
    settings = run.settings
    found = identity.data_made_of(splits) | identity.base_made_of(settings.model, config)
    if run.loads_teacher:
        teacher = settings.train.teacher
        found |= identity.files_made_of("teacher", teacher, loading.load_config(Model(name=teacher)))
    if candidates is not None:
        found["candidates"] = candidates.fingerprint
    if run.names(LM_LOGP):
        name = settings.data.language_model
        found["language model"] = language_model_mark(name, loading.load_config(Model(name=name)))
    metrics = [run.best.metric, *([run.online_metric.name] if run.online_metric else [])]
    found |= {f"{PLUGIN} metric {name}": METRICS.source(name) for name in metrics if name and METRICS.origin(name)}
    return found | identity.objectives_made_of(settings.objective)
