"""documents, guidance and summaries → a BART that reads both (GSum), and the summaries it writes.

After Dou et al. (2021), "GSum: A General Framework for Guided Neural Abstractive Summarization", and their BART:
``guided_bart.py`` is the model. The guidance is a column of the data, or sentences of the document: in
training those that the greedy oracle takes, which reads the reference, afterwards those that BertSumExt takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ngramloss import recipe
from ngramloss.data import Example, Split, columns_of, load
from ngramloss.data.batches.padding import Batch, Padder, padded
from ngramloss.data.batches.plan import Size
from ngramloss.data.examples import fingerprint as examples_fingerprint
from ngramloss.data.rows import SHOWN
from ngramloss.data.tokens import Shape, Tokens, separator_id, sources, tokenise
from ngramloss.errors import UserError
from ngramloss.generation.job import Job, read_sources
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.generation.predictions import write_by_writer
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.models import loading
from ngramloss.models.attached.attach import attach, attached_loss
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.encoders import raise_unless_it_fits
from ngramloss.models.first_tokens import align_start
from ngramloss.models.languages import set_languages
from ngramloss.models.prompts import shape_of
from ngramloss.output.console import logger
from ngramloss.recipe import Data, Recipe
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training.identity import base_made_of, data_made_of
from ngramloss.training.objective_task import attached_share
from ngramloss.training.prepare import note_splitting, read_splits, tokenizer_for
from ngramloss.training.run import Run
from ngramloss.training.system_task import SystemTask, batches, lost_ends
from ngramloss.training.systems import read_system
from ngramloss_systems.bertsum_ext import load_extraction, oracle_places, split_documents
from ngramloss_systems.guided_bart import load_guided

NAME = "gsum"
ORACLE = "oracle"
"""In place of a column: the guidance is what the greedy oracle takes, which reads the reference."""


# Guidance


class Guidance(NamedTuple):
    """A guidance of each document.

    Attributes:
        texts: in the order of the documents.
        facts: where they are from, for ``generation.json``.
        about: the same in words.
    """

    texts: list[str]
    facts: dict[str, Any]
    about: str


def make_guidance(split: Split, data: Data, task: str, options: Mapping[str, Any]) -> Guidance:
    """The guidance of the documents of a split: the oracle's, or that of a column.

    Args:
        split: the documents.
        data: where they are from, and how sentences are split.
        task: of the recipe.
        options: of the system.
    """
    column = options["guidance"]
    if column != ORACLE:
        texts = read_column(split, data, task, column)
        return Guidance(texts, {"column": column}, f"the column {column!r}")
    most = options["sentences"]
    texts = oracle_guidance(split.examples, data, most=most)
    facts = {ORACLE: "reads the references, so the scores are an upper bound", "sentences": most}
    return Guidance(texts, facts, f"the oracle's, at most {most} sentences")


def oracle_guidance(examples: Sequence[Example], data: Data, *, most: int) -> list[str]:
    """The sentences of each document that the greedy oracle takes; empty if none shares a word with the target."""
    note_splitting(examples, data)
    documents = split_documents([example.source for example in examples], data)
    chosen = oracle_places(documents, examples, most=most)
    return [" ".join(document[place] for place in places) for document, places in zip(documents, chosen, strict=True)]


def read_column(split: Split, data: Data, task: str, column: str) -> list[str]:
    """The texts of a column of the data; a list of texts is one text. Raises unless every document has one."""
    held_out = {"validation": data.validation_fraction, "test": data.test_fraction}
    is_part = any(held_out.values()) and (split.split == "train" or bool(held_out.get(split.split)))
    is_part = is_part or (split.split == "train" and bool(data.leave_out))
    options = columns_of(data, task)
    options["source"], options["target"] = split.column, column
    try:
        found = load(
            data.name,
            "train" if is_part else split.split,
            **options,
            on_bad_row="skip",
            limit=0 if is_part or split.skipped else len(split.examples),
        )
    except UserError as reason:
        raise UserError(
            f"the guidance of the split {split.split!r} is read from the column {column!r}. {reason} {MAKE}"
        ) from reason
    texts = {example.id: " ".join(example.references or [example.target]) for example in found.examples}
    if missing := [example.id for example in split.examples if example.id not in texts]:
        shown = ", ".join(missing[:SHOWN]) + (", …" if len(missing) > SHOWN else "")
        raise UserError(
            f"{len(missing):,} of {len(split.examples):,} rows of the split {split.split!r} of {data.name} have no "
            f"guidance: the column {column!r} has no text in the rows with the ids {shown}. Every row needs one. {MAKE}"
        )
    if all(texts[example.id] == example.target for example in split.examples):
        raise UserError(
            f"the guidance of every row of the split {split.split!r} of {data.name} is its target: the column "
            f"{column!r} has what should be written. Name another column. {MAKE}"
        )
    return [texts[example.id] for example in split.examples]


MAKE = (
    f"Name the column with {NAME}(guidance=COLUMN). Or let it be made: {NAME}(guidance={ORACLE}) in training, "
    f"{NAME}(extractor=RUN) in generate, with a run of bertsum_ext."
)


# Rows


class Guided(Dataset[dict[str, Any]]):
    """Tokenised examples and their guidance: rows have ``input_ids``, ``labels`` and ``guidance_ids``."""

    def __init__(self, tokens: Tokens, guidance: Tokens) -> None:
        self.tokens, self.guidance = tokens, guidance

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**self.tokens[row], "guidance_ids": self.guidance[row]["input_ids"]}

    @property
    def lengths(self) -> NDArray[Any]:
        """Source tokens of each row, without those of the guidance."""
        return self.tokens.lengths

    @property
    def target_lengths(self) -> NDArray[Any]:
        """Target tokens of each row."""
        return self.tokens.target_lengths


def pad_rows(padder: Padder, rows: Sequence[dict[str, Any]], size: Size | None = None) -> Batch:
    """Rows → a batch as ``padder`` makes it, with ids and mask of the guidance."""
    batch = padder(rows, size)
    guidance = pad_guidance([row["guidance_ids"] for row in rows], len(batch["labels"]), padder.pad)
    return batch | guidance


def pad_guidance(ids: Sequence[Any], count: int, pad: int) -> Batch:
    """Ids of the guidance and their mask, [count, G] each. Rows that fill a batch up have one token, as of a source."""
    padded_ids, mask = padded(ids, count, max(map(len, ids), default=1), pad)
    mask[len(ids) :, 0] = 1
    return {"guidance_input_ids": torch.from_numpy(padded_ids), "guidance_attention_mask": torch.from_numpy(mask)}


# Training


def task(run: Run) -> SystemTask:
    """What ``ngramloss train gsum`` trains: documents with their guidance, and the model."""
    settings, options = run.settings, run.system.options
    JointLoss(settings.objective).refuse_terms_of_logits(NAME)
    config = None
    if settings.model.name != "scratch" and not loading.is_guided(settings.model.name):  # a mistake is found early
        config = loading.load_config(settings.model)
    if options["extractor"]:  # it is needed after training only, which is too late to find that it cannot be used
        load_extraction(options["extractor"])
    splits = read_splits(settings)
    tokenizer, _ = tokenizer_for(run, splits["train"])
    model = _ready(run, tokenizer)
    rows, used, made_of = {}, [], {}
    for split, of_split in splits.items():
        shape = shape_of(settings.data, settings.task, settings.model, model.config, tokenizer, column=of_split.column)
        made = make_guidance(of_split, settings.data, settings.task, options)
        rows[split], made_of[f"{split} guidance"] = _tokenised(of_split, made, tokenizer, shape)
        used += _used(split, rows[split], made, settings)
    padder = Padder(tokenizer.pad_token_id, partial(decoder_inputs, model))
    pad = partial(pad_rows, padder)
    objective = attached_loss(model)

    def validate() -> dict[str, float]:
        """The objective on validation data, with the weights that its terms have at the end: one measure for all."""
        before, objective.progress = objective.progress, 1.0
        counts = {"num_tokens": int(rows["validation"].target_lengths.sum()), "num_sequences": len(rows["validation"])}
        found = [float(model(**batch, **counts).loss) for _, batch in batches(rows["validation"], pad, model)]
        objective.progress = before
        return {"loss": sum(found)}

    return SystemTask(
        run,
        model,
        tokenizer,
        rows["train"],
        pad,
        terms=[part.name for part in objective.parts],
        loss_of=partial(attached_share, model),
        scores=validate if "validation" in splits else None,
        made_of=made_of | data_made_of(splits) | base_made_of(settings.model, config),
        used=used,
        objective=objective,
    )


def _ready(run: Run, tokenizer: Any) -> Any:
    """The model with its first weights, its objective and its settings of generation."""
    settings, name, data = run.settings, run.settings.model.name, run.settings.data
    set_languages(tokenizer, data.source_language, data.target_language, model=name)
    model = load_guided(settings.model, tokenizer)
    raise_unless_it_fits(model, tokenizer, name, longest=max(data.max_source, data.max_target))
    align_start(model, tokenizer, name=name, training=True)
    loading.prepare_generation(model, settings.generation)
    return attach(model, settings.objective)


def _tokenised(split: Split, guidance: Guidance, tokenizer: Any, shape: Shape) -> tuple[Guided, str]:
    """The tokens of a split and of its guidance, and the fingerprint of the guidance."""
    pairs = zip(split.examples, guidance.texts, strict=True)
    guides = [example._replace(source=text) for example, text in pairs]  # tokenised as sources are
    key = examples_fingerprint(guides)
    tokens = tokenise(split.examples, split.fingerprint, tokenizer, shape)
    return Guided(tokens, tokenise(guides, key, tokenizer, shape)), key


def _used(split: str, rows: Guided, guidance: Guidance, settings: Recipe) -> list[str]:
    """What is used of a split, in sentences."""
    empty, count = sum(not text.strip() for text in guidance.texts), len(rows)
    mean = float(rows.guidance.lengths.mean())
    sentences = [f"{split}: {count:,} documents. The guidance is {guidance.about}, {mean:.1f} tokens on average."]
    if empty == count:
        raise UserError(
            f"the guidance of every document of the {split} split is empty: no sentence shares a word with its target. "
            "Is data.target the column with the summaries?"
        )
    if empty:
        sentences.append(f"{split}: {empty:,} documents have an empty guidance.")
    cut = {"documents": rows.tokens.cut[0], "guidance texts": rows.guidance.cut[0]}
    longest = settings.data.max_source
    return sentences + [f"{split}: {lost_ends(lost, count, what, longest)}" for what, lost in cut.items() if lost]


# Writing


def generate(work: Job, folder: Path) -> Path:
    """Write the summaries of a run's model, as ``ngramloss generate`` writes predictions.

    Args:
        work: a job whose model is a run of this system.
        folder: where the predictions go.
    """
    own = read_system(recipe.load(str(RunFolder(Path(work.model)).recipe), objective=False).system)
    asked = read_system(work.system) if work.system else own
    if asked.name != NAME:
        raise UserError(f"system: {work.model} is a run of {NAME}, not of {asked.name}.")
    if asked.options["guidance"] == ORACLE and not asked.options["extractor"] and not work.system:
        raise UserError(
            f"{work.model} was trained with the guidance of the oracle, which reads the references. Say what guides it "
            f"now: --set 'system=\"{NAME}(extractor=RUN)\"' with a run of bertsum_ext, --set 'system=\"{NAME}("
            f"guidance=COLUMN)\"' with a column of the data, or, for an upper bound, --set 'system=\"{NAME}("
            f"guidance={ORACLE})\"'."
        )
    from_oracle = asked.options["guidance"] == ORACLE and not asked.options["extractor"]
    split = read_sources(work, reader="the guidance of the oracle" if from_oracle else "")
    guidance = _guidance(work, split, asked.options)
    model, tokenizer = load_model(work, device=loading.own_device(), load=load_guided)
    raise_unless_it_fits(model, tokenizer, work.model, longest=work.data.max_source)
    writer = writer_of(work, model, tokenizer, has_lines=work.has_lines, column=split.column)
    if writer.engine.note:
        logger.info(writer.engine.note)
    lost: list[bool] = []
    ids = sources(guidance.texts, tokenizer, writer.shape, separator_id(tokenizer, writer.shape.separator), None, lost)
    by_id = dict(zip((example.id for example in split.examples), ids, strict=True))
    if any(lost):
        logger.info(lost_ends(sum(lost), len(lost), "guidance texts", work.data.max_source))

    def more(examples: Sequence[Example]) -> Batch:
        return pad_guidance([by_id[example.id] for example in examples], len(examples), tokenizer.pad_token_id)

    return write_by_writer(work, folder, split, writer, {"guidance": guidance.facts}, more)


def _guidance(work: Job, split: Split, options: Mapping[str, Any]) -> Guidance:
    """What guides the documents of a job: an extractor, if one is named; otherwise a column, or the oracle."""
    if run := options["extractor"]:
        taken = load_extraction(run)
        logger.info(f"the guidance is what {run} takes of each document.")
        texts = [" ".join(text.split("\n")) for text in taken.write(split.examples)]
        if lost := sum(taken.lost):
            logger.info(
                f"{lost:,} of {len(taken.lost):,} documents are longer than the {taken.facts['max_source']} tokens "
                f"that {run} reads; it took none of their last sentences."
            )
        guidance = Guidance(texts, {"extractor": run, **taken.facts}, run)
    else:
        guidance = make_guidance(split, work.data, work.task, options)
        if options["guidance"] == ORACLE:
            logger.warning(
                "the guidance is the oracle's, which reads the references: these texts are an upper bound, not what "
                "the model writes of documents without a reference."
            )
    if empty := sum(not text.strip() for text in guidance.texts):
        logger.info(f"{empty:,} of {len(guidance.texts):,} documents have an empty guidance.")
    pairs = zip(split.examples, guidance.texts, strict=True)
    key = examples_fingerprint(example._replace(source=text) for example, text in pairs)
    return guidance._replace(facts={**guidance.facts, "fingerprint": key})
