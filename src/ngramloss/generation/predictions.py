"""a job and a folder → predictions and their settings, continued from where they stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ngramloss.data import Example, Split
from ngramloss.data.languages import AUTO
from ngramloss.data.sentences import LOOKED_AT, splitting_notes
from ngramloss.data.tokens import target_ids
from ngramloss.errors import UserError
from ngramloss.generation import row_file
from ngramloss.generation.baselines import Write, baseline_of, baseline_writer
from ngramloss.generation.job import Job, data_facts
from ngramloss.generation.load_job import load_model, versions, writer_facts, writer_of
from ngramloss.generation.row_file import Author, Output
from ngramloss.models.loading import own_device
from ngramloss.models.teacher_forced import forced_predictions
from ngramloss.output.console import logger
from ngramloss.recipe import WORDS
from ngramloss.search.batches import Budget
from ngramloss.search.search import Options
from ngramloss.search.writer import Text, Writer
from ngramloss.storage.files import write_whole
from ngramloss.storage.run_folder import RunFolder

SEEN = 500  # number of documents for which a run also saves what its objective sees


def write_predictions(
    work: Job,
    folder: Path,
    options: Options = Options(),  # noqa: B008
) -> Path:
    """Write predictions, references and the settings of the job into a folder, or continue a stopped job: their path.

    Under torchrun each process writes its share of the documents. No id is written twice, and a second job in the same
    folder at the same time is refused.
    """
    baseline = baseline_of(work.model)
    write = baseline_writer(work.model, work.data.name, work.split, work.data.language)
    if baseline is None or write is None:
        with row_file.claimed(folder) as run:
            return _write_by_model(work, options, work.read_sources(), run)
    if options != Options():
        raise UserError(f"{work.model} is a baseline, which writes one text of each document and samples nothing.")
    language = {} if work.data.language == AUTO else {"language": work.data.language}
    facts = {"sentences": "pysbd", **language} if baseline.splits_sentences else {}
    split = work.read_sources(reader=work.model if baseline.reads_targets else "")
    return write_texts(work, folder, write, facts, split=split, has_sentences=baseline.splits_sentences)


def write_texts(
    work: Job,
    folder: Path,
    write: Write,
    facts: dict[str, Any],
    *,
    split: Split | None = None,
    has_sentences: bool = False,
) -> Path:
    """Write the texts that a function makes as predictions, or continue a stopped job. Returns their path.

    ``write`` gets some of the documents at a time, those of the job or of ``split``, split into sentences if
    ``has_sentences``. ``facts``: what else could change the texts, besides the model's name and the data.
    """
    split = split or work.read_sources()
    author = Author(
        lambda examples: [[] for _ in examples],
        lambda examples, _: [_row([Text(text, 0)]) for text in write(examples)],
        Budget(documents=work.batch_size),
    )
    with row_file.claimed(folder) as run:
        settings = {"model": work.model, **facts}
        return _write(work, split, run, settings, split.readable, author, has_sentences=has_sentences)


def write_by_model(
    work: Job,
    folder: Path,
    split: Split,
    load: Callable[..., Any],
    facts: dict[str, Any],
    beside: Callable[[Writer], Callable[[Sequence[Example]], dict[str, Any]]],
) -> Path:
    """Write predictions with a model that reads more than the source, or continue a stopped job. Returns their path.

    ``load``: the settings of a model, and its tokenizer → the model. ``facts``: what else could change the texts.
    ``beside``: the writer → a function: examples → what else the model's ``generate`` gets of them.
    """
    model, tokenizer = load_model(work, device=own_device(), load=load)
    writer = writer_of(work, model, tokenizer, has_lines=work.has_lines, column=split.column)
    if writer.engine.note:
        logger.info(writer.engine.note)
    more = beside(writer)
    with row_file.claimed(folder) as run:
        settings, author = {**_settings(work, writer), **facts}, _author(writer, more)
        return _write(work, split, run, settings, split.examples, author, has_sentences=work.has_lines)


def predictions_in(run: RunFolder) -> Output:
    """Where the predictions of a folder are."""
    return Output(run, "predictions", "prediction", run.predictions, run.generation)


def _write_by_model(work: Job, options: Options, split: Split, run: RunFolder) -> Path:
    model, tokenizer = load_model(work, device=own_device())
    engine = row_file.engine_that_began(predictions_in(run), work.engine, options)
    writer = writer_of(work, model, tokenizer, options, engine=engine, has_lines=work.has_lines, column=split.column)
    if writer.engine.note:
        logger.info(writer.engine.note)
    settings, author = _settings(work, writer), _author(writer)
    seen = split.examples[:SEEN] if work.is_run and split.has_targets and not work.loading_system else ()
    return _write(
        work,
        split,
        run,
        settings,
        split.examples,
        author,
        has_sentences=work.has_lines,
        finish=lambda: _write_seen(writer, run, seen) if seen else None,
    )


def _author(writer: Writer, more: Callable[[Sequence[Example]], dict[str, Any]] = lambda examples: {}) -> Author:
    """A writer, and what else its model reads."""
    return Author(
        writer.ids_of,
        lambda examples, ids: [_row(texts) for texts in writer.write(ids, **more(examples))],
        writer.budget,
    )


def _settings(work: Job, writer: Writer) -> dict[str, Any]:
    seed = {"seed": writer.search.seed} if writer.search.seed is not None else {}
    return {**writer_facts(work, writer), "sentence_a_line": writer.has_lines, **seed}


def _write(
    work: Job,
    split: Split,
    run: RunFolder,
    settings: dict[str, Any],
    examples: Sequence[Example],
    author: Author,
    *,
    has_sentences: bool,
    finish: Callable[[], None] = lambda: None,
) -> Path:
    """Write settings (all but the data), references or else documents, and predictions, whose path is returned."""
    output, settings = predictions_in(run), {**settings, **data_facts(work, split), "versions": versions(settings)}
    references = "".join(
        row_file.line({"id": each.id, **_reference(each), "document": each.source}) for each in split.readable
    )
    if not row_file.begin(output, settings, references=references):
        return run.predictions
    if has_sentences:
        sources = [example.source for example in split.examples[:LOOKED_AT]]
        for note in splitting_notes(sources, "pysbd", work.data.language, "--set data.language"):
            logger.info(note)
    if row_file.rank() == 0:
        run.seen.unlink(missing_ok=True)  # of other or fewer predictions
        write_whole(run.references, references)
    row_file.write_share(output, examples, author, unit=WORDS[work.task].sources)
    if row_file.rank() == 0:
        finish()
        row_file.finish(output, row_file.collected(output, [example.id for example in split.examples]))
    return run.predictions


def _reference(example: Example) -> dict[str, Any]:
    return {"reference": list(example.references) or example.target} if example.target else {}


def _write_seen(writer: Writer, run: RunFolder, examples: Sequence[Example]) -> None:
    """Write what the objective of a run sees in these examples."""
    sources, targets = [example.source for example in examples], [example.target for example in examples]
    references = target_ids(sources, targets, writer.tokenizer, writer.shape)
    forced = forced_predictions(writer.model, writer.tokenizer, writer.ids(sources), references)
    rows = ({"id": example.id, **seen} for example, seen in zip(examples, forced, strict=True))
    write_whole(run.seen, "".join(map(row_file.line, rows)))


def _row(texts: Sequence[Text]) -> dict[str, Any]:
    """The row of a document, its best text first."""
    best = texts[0]
    tokens = {"tokens": best.tokens} if best.tokens else {}  # baselines have no tokens
    candidates = {"candidates": [text for text, _ in texts]} if len(texts) > 1 else {}
    return {"prediction": best.text, **tokens, **candidates}
