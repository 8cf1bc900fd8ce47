"""a run or a model, and a data set → predictions and their settings, continued from where they stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data import Example, Split, columns_of, load
from ngramloss.data.languages import AUTO
from ngramloss.data.origins import canonical
from ngramloss.data.sentences import LOOKED_AT, sentences, splitting_notes
from ngramloss.data.tokens import Shape, separator_id
from ngramloss.data.tokens import sources as source_ids
from ngramloss.errors import MissingFileError, UserError
from ngramloss.generation import engines, shares
from ngramloss.generation.baselines import baseline_writer, is_baseline
from ngramloss.generation.batches import Budget, budget_for
from ngramloss.generation.decoders import DECODERS
from ngramloss.generation.engines.settings import Search, search_of
from ngramloss.generation.search import Written, decoded, load_model, model_of_run
from ngramloss.generation.shares import Output, Progress
from ngramloss.hf.candidates import NOT_CAUSAL
from ngramloss.models.languages import codes
from ngramloss.models.loading import load_config
from ngramloss.recipe import TASKS, Data, Generation, Model, Recipe
from ngramloss.storage.files import fingerprint, read_object, write_whole
from ngramloss.storage.run_folder import RunFolder, model_files, weight_files
from ngramloss.version import __version__, installed

SEEN = 500
"""Number of documents for which a run also saves what its objective sees."""
SEVERAL_SENTENCES = ("cnn_dailymail",)
"""Data sets whose summaries have several sentences: they are written one per line, where ROUGE-Lsum splits."""
RERANK = ("probability",)
"""What may order the texts of a document instead of the search."""
GROUPED = "graph"
"""The engine that has groups of beams."""
DEFAULTS = dict(zip(TASKS, ("xsum", "translation"), strict=True))
"""Task → the recipe that completes the settings for a model that was trained elsewhere."""


WITHOUT_GROUPS = "Without --groups, any engine will do."


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
    """How many texts are written of each document, whether they are sampled, and which is the best.

    Attributes:
        texts: of each document; 0 means as many as there are beams.
        sample: sample tokens instead of searching for the most probable text.
        temperature: below 1, probable tokens become more probable.
        top_p: sample only from the most probable tokens whose probabilities sum to this.
        seed: of the random numbers.
        groups: of beams that avoid each other's tokens.
        diversity: what a token's log-probability loses for each beam of an earlier group that takes it.
        rerank: what orders the texts, one of ``RERANK``; empty: the search.
    """

    texts: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    groups: int = 1
    diversity: float = 0.0
    rerank: str = ""


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
        sampling: how many texts of each document, whether they are sampled, and which is the best.
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
    model: str,
    *,
    data: str | None = None,
    like: str | None = None,
    split: str | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    limit: int = 0,
    batch_size: int = 0,
    trust_remote_code: bool = False,
    sampling: Sampling = Sampling(),  # noqa: B008
    verb: str = "generate",
) -> Job:
    """Create a job for a run, with the run's settings, or for another model, with its own or a preset's settings.

    ``like`` is a run's folder: the same documents are read as by its own job. ``split`` is ``test`` by default.
    """
    check_sampling(sampling)
    if data is not None and like is not None:
        raise UserError("choose the documents once: with --data, or with --like.")
    run = RunFolder(Path(model))
    own: Recipe | None = None
    if run.recipe.is_file():
        if not run.finished:
            raise MissingFileError(
                f"{model} has no {run.model.name}/: its training is not finished, or the model was "
                "deleted. The same ngramloss train command continues from its last checkpoint."
            )
        own = recipe.load(str(run.recipe), objective=False)
    for setting in overrides:
        if not setting.startswith(("generation.", "data.", "task=")):
            raise UserError(f"{verb} accepts --set only for generation.*, data.* and task, got {setting!r}.")
    if data is None and like is None and own is None and preset is None:
        raise UserError("choose the documents with --data, with --like RUN, or with a --preset.")
    if own is None:  # a model that was trained elsewhere does not expect separators before sentences
        task = recipe.load("xsum", [setting for setting in overrides if setting.startswith("task=")]).task
        base = recipe.load(preset or DEFAULTS[task], ["data.separator=none"])
    else:
        base = own
    if preset is not None:
        theirs = dataclasses.replace(
            recipe.load(preset).generation, engine=base.generation.engine, precision=base.generation.precision
        )
        base = dataclasses.replace(base, generation=theirs)
    if data is not None:  # columns and a held-out part are of the run's own data
        theirs_only = dataclasses.replace(base.data, name=data, validation_fraction=0.0, test_fraction=0.0)
        base = dataclasses.replace(base, data=theirs_only)
    if like is not None:
        base, of_run = _like(base, RunFolder(Path(like)))
        split, limit = split or of_run.get("split"), limit or of_run.get("documents", 0)
    split = split or "test"
    settings = recipe.changed(base, overrides, objective=False)
    chosen = settings.data
    for key in ("validation_fraction", "test_fraction") if own and data is None else ():
        if getattr(chosen, key) != getattr(base.data, key):
            raise UserError(
                f"{model} was trained with data.{key} = {getattr(base.data, key):g}: with another one, rows that it "
                f"was trained on would be held out. Train again with data.{key}, or choose other data with --data."
            )
    baseline_writer(model, chosen.name, split)  # raises if the baseline does not work on these data
    keys = [setting.partition("=")[0].strip() for setting in overrides]
    only_how = ("generation.engine", "generation.precision")
    searched = preset is not None or any(key.startswith("generation.") and key not in only_how for key in keys)
    loading = model_of_run(run.path, own.model) if own else Model(name=model)
    search = settings.generation if searched else None
    return Job(
        model,
        loading,
        chosen,
        split,
        search,
        preset,
        limit,
        batch_size,
        trust_remote_code,
        settings.task,
        settings.generation.engine,
        sampling,
        settings.generation.precision,
    )


OF_THE_MODEL = ("separator", "splitter", "prefix", "max_source", "max_target")
"""Settings of the data that say how a model reads documents; the others say which documents there are."""


def _like(base: Recipe, run: RunFolder) -> tuple[Recipe, dict[str, Any]]:
    """The settings with the data and the task of a run, and what it recorded of its own predictions, if it has some."""
    if not run.recipe.is_file():
        raise MissingFileError(f"--like takes a run's folder, and {run.path} has no {run.recipe.name}.")
    theirs = recipe.load(str(run.recipe), objective=False)
    data = dataclasses.replace(theirs.data, **{name: getattr(base.data, name) for name in OF_THE_MODEL})
    recorded = read_object(run.generation) if run.generation.is_file() else {}
    same = recorded.get("data") == theirs.data.name  # otherwise its predictions are of other documents
    return dataclasses.replace(base, data=data, task=theirs.task), recorded if same else {}


def check_model(work: Job, verb: str) -> None:
    """Raise if a command cannot use the model of a job, before any data are read."""
    if not is_baseline(work.model):
        load_config(work.loading, trust_remote_code=work.trust_remote_code, verb=verb)


def check_sampling(sampling: Sampling) -> None:
    """Raise if the options contradict each other."""
    if sampling.groups == 1 and sampling.diversity:
        raise UserError("--diversity is an option of groups of beams; add --groups N.")
    if sampling.groups > 1 and sampling.sample:
        raise UserError("--groups are groups of beams, and --sample has no beams. Leave one of them out.")
    if not (isfinite(sampling.diversity) and sampling.diversity >= 0):
        raise UserError(f"--diversity must be 0 or more, got {sampling.diversity:g}.")
    if sampling.rerank and (sampling.texts == 1 or (sampling.sample and not sampling.texts)):
        raise UserError("--rerank orders several texts of a document; add --num-return N.")
    if not sampling.sample and (sampling.temperature, sampling.top_p) != (1.0, 1.0):
        raise UserError("--temperature and --top-p are options of sampling; add --sample.")
    if not sampling.temperature > 0:
        raise UserError(f"--temperature must be above 0, got {sampling.temperature:g}.")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {sampling.top_p:g}.")


def write_predictions(
    work: Job,
    folder: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
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
    with shares.claimed(folder) as run:
        return _write_share(work, run, progress, (lambda _: None) if shares.rank() else say)


def read_split(work: Job) -> Split:
    """Read the documents of a job."""
    return load(
        work.data.name,
        work.split,
        **columns_of(work.data, work.task),
        on_bad_row=work.data.on_bad_row,
        limit=work.limit,
        validation_fraction=work.data.validation_fraction,
        test_fraction=work.data.test_fraction,
    )


def predictions_in(run: RunFolder) -> Output:
    """Where the predictions of a folder are."""
    return Output(run, "predictions", "prediction", run.predictions, run.generation)


def _write_share(work: Job, run: RunFolder, progress: Progress | None, say: Callable[[str], None]) -> Path:
    """Write this process's share. The first process also writes the common files and merges the shares."""
    split, output = read_split(work), predictions_in(run)
    examples = split.examples
    writer = _writer(work, output, say)
    settings = {**writer.settings, **facts_of(work, split), "versions": versions(writer.settings)}
    begun = shares.was_begun(output, settings, say)
    if begun and run.predictions.exists():
        return run.predictions
    if shares.rank() == 0 and (work.model.startswith("lead-") or has_several_sentences(work)):
        sources = [example.source for example in examples[:LOOKED_AT]]
        for note in splitting_notes(sources, "pysbd", work.data.language, "--set data.language"):
            say(note)
    if shares.processes() == 1:
        run.tidy()
    if shares.rank() == 0:
        if not begun:
            run.seen.unlink(missing_ok=True)  # of other predictions
        write_whole(run.generation, json.dumps(settings, indent=1))
        rows = (
            {"id": example.id, "reference": list(example.references) or example.target, "document": example.source}
            for example in examples
        )
        write_whole(run.references, "".join(map(shares.line, rows)))
    shares.write_share(output, examples, writer.ids, writer.write, _row, writer.budget, progress=progress, say=say)
    if shares.rank() == 0:
        if writer.look is not None:
            shown = examples[:SEEN]
            seen = ({"id": example.id, **forced} for example, forced in zip(shown, writer.look(shown), strict=True))
            write_whole(run.seen, "".join(map(shares.line, seen)))
        shares.finish(output, shares.collected(output, [example.id for example in examples]))
    return run.predictions


def facts_of(work: Job, split: Split) -> dict[str, Any]:
    """What is saved of a job's data."""
    facts = {
        "data": work.data.name,
        "split": work.split,
        "fingerprint": split.fingerprint,
        "documents": len(split.examples),
        "preset": work.preset,
    }
    if work.task != TASKS[0]:  # not otherwise: predictions of earlier versions do not say it
        facts["task"] = work.task
    return facts


def _writer(work: Job, output: Output, say: Callable[[str], None]) -> Writer:
    baseline = baseline_writer(work.model, work.data.name, work.split, work.data.language)
    if baseline is not None:
        return _baseline(work, baseline)
    if work.sampling.groups > 1:
        check_groups(work, WITHOUT_GROUPS)
    ready = prepare(work, say)
    model, sampling = ready.model, work.sampling
    if sampling.rerank and model.config.model_type in NOT_CAUSAL:
        raise UserError(
            f"--rerank cannot order texts of {type(model).__name__}, which gives a text another "
            "probability if padding follows it. Leave it out."
        )
    _set_search(model, work)
    search = dataclasses.replace(
        search_of(model, seed=sampling.seed if sampling.sample else None),
        groups=sampling.groups,
        diversity=sampling.diversity,
    )
    if sampling.groups > 1:
        engine = grouped_engine(model, search, WITHOUT_GROUPS, say=say)
    else:
        engine = engines.load(shares.engine_that_began(output, work.engine, say), model, search, say=say)
    by_line = has_several_sentences(work)

    def write(examples: Sequence[Example], sources: Sequence[Sequence[int]]) -> list[list[Written]]:
        hypotheses = engine.write(sources)
        if sampling.rerank:
            hypotheses = _by_probability(model, search, sources, hypotheses)
        found = written(ready.tokenizer, hypotheses)
        return [[_in_lines(one, work.data.language) for one in texts] for texts in found] if by_line else found

    def look(examples: Sequence[Example]) -> Iterable[Mapping[str, Any]]:
        from ngramloss.generation.teacher_forced import forced_predictions

        references = [example.target for example in examples]
        longest = work.data.max_target
        return forced_predictions(model, ready.tokenizer, ready.ids(examples), references, max_target=longest)

    return Writer(
        write,
        ready.ids,
        look if ready.own else None,
        {
            **ready.settings,
            "generation": search_facts(model, search) | ({"rerank": sampling.rerank} if sampling.rerank else {}),
            "engine": engine.facts,
            "sentence_a_line": by_line,
            **({"seed": sampling.seed} if sampling.sample else {}),
        },
        budget_for(model, search, work.batch_size),
    )


class Prepared(NamedTuple):
    """A model that is ready to write, before it is decided how.

    Attributes:
        model: on its device.
        tokenizer: the model's own.
        ids: examples → the ids of their sources.
        own: whether a run of ours trained it.
        settings: which model it is, and how it reads.
    """

    model: Any
    tokenizer: Any
    ids: Callable[[Sequence[Example]], list[list[int]]]
    own: bool
    settings: dict[str, Any]


def prepare(work: Job, say: Callable[[str], None]) -> Prepared:
    """Load the model of a job."""
    own = Path(work.loading.name).is_dir() and work.loading.name != work.model
    model, tokenizer = load_model(
        work.loading,
        work.data,
        trained_here=own,
        device=_device(),
        trust_remote_code=work.trust_remote_code,
        say=say,
        precision=work.precision,
    )
    shape = Shape.of(work.data)
    separator = separator_id(tokenizer, work.data.separator)

    def ids(examples: Sequence[Example]) -> list[list[int]]:
        return source_ids([example.source for example in examples], tokenizer, shape, separator)

    weights, others = weight_files(Path(work.loading.name)), model_files(Path(work.loading.name))
    commit = getattr(model.config, "_commit_hash", None)
    return Prepared(
        model,
        tokenizer,
        ids,
        own,
        {
            "model": work.model,
            "weights": fingerprint(weights) if weights else commit,
            **({"model_files": others} if others else {}),  # the hub's commit stands for all of its files
            "shape": dataclasses.asdict(shape),
            **({"languages": [tokenizer.src_lang, tokenizer.tgt_lang]} if codes(tokenizer) else {}),
        },
    )


def written(tokenizer: Any, hypotheses: Sequence[Sequence[Sequence[int]]]) -> list[list[Written]]:
    """The texts of each source, from their ids."""
    texts = iter(decoded(tokenizer, [row for rows in hypotheses for row in rows]))
    return [[Written(next(texts), len(row)) for row in rows] for rows in hypotheses]


def search_facts(model: Any, search: Search) -> dict[str, Any]:
    """The search settings that are saved with the texts."""
    facts: dict[str, Any] = model.generation_config.to_diff_dict()
    facts.pop("transformers_version", None)
    groups = {"num_beam_groups": search.groups, "diversity_penalty": search.diversity}
    return facts | (groups if search.groups > 1 else {})


def check_groups(work: Job, instead: str) -> None:
    """Raise if groups of beams are not possible, as far as can be known before the model is loaded.

    Args:
        work: the job.
        instead: what to do, as a sentence.
    """
    if work.engine not in (engines.AUTO, GROUPED):
        raise UserError(f"groups of beams need the engine {GROUPED}, not {work.engine}. Leave --engine out. {instead}")
    try:
        kind = read_object(Path(work.loading.name) / "config.json").get("model_type")
    except (OSError, UserError):  # a model of the hub; a damaged file is reported when it is loaded
        return
    if kind not in DECODERS:
        raise UserError(
            f"groups of beams need the engine {GROUPED}, which serves {', '.join(DECODERS)}, not {kind}. {instead}"
        )


def grouped_engine(model: Any, search: Search, instead: str, *, say: Callable[[str], None]) -> engines.Loaded:
    """The engine that has groups of beams. Raises if it cannot search with this model and these settings."""
    if reasons := list(engines.ENGINES[GROUPED].function("unsupported")(model, search)):
        raise UserError(
            f"groups of beams need the engine {GROUPED}, which cannot be used: {'; '.join(reasons)}. {instead}"
        )
    return engines.load(GROUPED, model, search, say=say)


def _by_probability(
    model: Any, search: Search, sources: Sequence[Sequence[int]], hypotheses: Sequence[list[list[int]]]
) -> list[list[list[int]]]:
    """The texts of each source, that with the highest log-probability by length first."""
    from ngramloss.generation.teacher_forced import text_logp

    logp = text_logp(model, sources, hypotheses, pad=search.pad)

    ordered = []
    for rows, sums in zip(hypotheses, logp, strict=True):
        scores = [
            value / float(max(len(row) - 1, 1)) ** search.length_penalty for row, value in zip(rows, sums, strict=True)
        ]
        ordered.append([rows[number] for number in sorted(range(len(rows)), key=lambda number: -scores[number])])
    return ordered


def _baseline(work: Job, write: Callable[[Sequence[Example]], list[str]]) -> Writer:
    if work.sampling != Sampling():
        raise UserError(f"{work.model} is a baseline, which writes one text of each document and samples nothing.")
    named = {} if work.data.language == AUTO else {"language": work.data.language}
    splits = {"sentences": "pysbd", **named} if work.model.startswith("lead-") else {}
    return Writer(
        lambda examples, _: [[Written(text, 0)] for text in write(examples)],
        lambda examples: [[] for _ in examples],
        None,
        {"model": work.model, **splits},
        Budget(documents=work.batch_size),
    )


def set_generation(model: Any, work: Job) -> None:
    """Put the job's generation settings into the model's ``generation_config``, if it has any of its own."""
    from ngramloss.models.loading import prepare_generation

    if work.generation is not None:
        prepare_generation(model, work.generation)


def _set_search(model: Any, work: Job) -> None:
    """Put the job's search settings into the model's ``generation_config``."""
    set_generation(model, work)
    sampling, config = work.sampling, model.generation_config
    if sampling.sample:
        config.update(
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            num_beams=1,
            early_stopping=False,
        )
    beams = config.num_beams or 1
    if beams % sampling.groups:
        raise UserError(
            f"--groups {sampling.groups} needs a multiple of as many beams, but the search has {beams}. "
            f"Use --set generation.num_beams={sampling.groups}."
        )
    texts = sampling.texts or beams
    if sampling.rerank and texts == 1:
        raise UserError(
            "--rerank orders several texts of a document, but the search has 1 beam. Use --set "
            "generation.num_beams=4, or --sample --num-return 4."
        )
    if texts > 1:
        if not sampling.sample and texts > beams:
            raise UserError(
                f"--num-return {texts} needs as many beams, but the search has {beams}. Use --set "
                f"generation.num_beams={texts}, or --sample."
            )
        config.update(num_return_sequences=texts)


def _in_lines(summary: Written, language: str) -> Written:
    """A summary with one sentence per line."""
    return summary._replace(text="\n".join(sentences(summary.text, language=language)))


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
    tokens = {"tokens": best.tokens} if best.tokens else {}  # baselines have no tokens
    candidates = {"candidates": [text for text, _ in written]} if len(written) > 1 else {}
    return {"id": key, "prediction": best.text, **tokens, **candidates}


def versions(settings: Mapping[str, Any]) -> dict[str, str]:
    """The versions of what a job's texts depend on."""
    engine = [engines.ENGINES[settings["engine"]["name"]].package] if "engine" in settings else []
    others = {name: installed(name) for name in ("torch", "transformers", "tokenizers", *engine)}
    own = {"ngramloss": __version__, "python": platform.python_version()}
    return own | {name: number for name, number in others.items() if number is not None}
