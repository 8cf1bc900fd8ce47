"""documents, guidance and summaries → a BART that reads both (GSum, Dou et al. 2021), and the summaries it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

import ngramloss as ng
from ngramloss_systems.bertsum_ext import load_extraction, oracle_places
from ngramloss_systems.guided_bart import load_guided

NAME = "gsum"
ORACLE = "oracle"
"""In place of a column: the guidance is what the greedy oracle takes, which reads the reference."""


# Guidance


class Guidance(NamedTuple):
    """A text that guides each document, and where they are from, for ``generation.json`` and in words."""

    texts: list[str]
    facts: dict[str, Any]
    about: str


def make_guidance(split: ng.data.Split, source: ng.recipe.Data, task: str, options: Mapping[str, Any]) -> Guidance:
    """The guidance of the documents of a split: the oracle's, or that of a column."""
    column = options["guidance"]
    if column != ORACLE:
        texts = read_column(split, source, task, column)
        return Guidance(texts, {"column": column}, f"the column {column!r}")
    most = options["sentences"]
    texts = oracle_guidance(split.examples, source, most=most)
    facts = {ORACLE: "reads the references, so the scores are an upper bound", "sentences": most}
    return Guidance(texts, facts, f"the oracle's, at most {most} sentences")


def oracle_guidance(examples: Sequence[ng.data.Example], source: ng.recipe.Data, *, most: int) -> list[str]:
    """The sentences of each document that the greedy oracle takes; empty if none shares a word with the target."""
    texts = [example.source for example in examples]
    ng.data.note_splitting(texts, source)
    documents = ng.data.split_documents(texts, source)
    chosen = oracle_places(documents, examples, most=most)
    return [" ".join(document[place] for place in places) for document, places in zip(documents, chosen, strict=True)]


def read_column(split: ng.data.Split, source: ng.recipe.Data, task: str, column: str) -> list[str]:
    """The texts of a column of the data; a list of texts is one text. Raises unless every document has one."""
    held_out = {"validation": source.validation_fraction, "test": source.test_fraction}
    is_part = any(held_out.values()) and (split.split == "train" or bool(held_out.get(split.split)))
    is_part = is_part or (split.split == "train" and bool(source.leave_out))
    options = ng.data.columns_of(source, task)
    options["source"], options["target"] = split.column, column
    try:
        found = ng.data.load(
            source.name,
            "train" if is_part else split.split,
            **options,
            on_bad_row="skip",
            limit=0 if is_part or split.skipped else len(split.examples),
        )
    except ng.UserError as reason:
        raise ng.UserError(
            f"the guidance of the split {split.split!r} is read from the column {column!r}. {reason} {MAKE}"
        ) from reason
    texts = {example.id: " ".join(example.references or [example.target]) for example in found.examples}
    if missing := [example.id for example in split.examples if example.id not in texts]:
        shown = ", ".join(missing[: ng.data.SHOWN]) + (", …" if len(missing) > ng.data.SHOWN else "")
        raise ng.UserError(
            f"{len(missing):,} of {len(split.examples):,} rows of the split {split.split!r} of {source.name} have no "
            f"guidance: the column {column!r} has no text in the rows with the ids {shown}. Every row needs one. {MAKE}"
        )
    if all(texts[example.id] == example.target for example in split.examples):
        raise ng.UserError(
            f"the guidance of the split {split.split!r} of {source.name} equals the target in every row: the column "
            f"{column!r} has the text to generate. Name another column. {MAKE}"
        )
    return [texts[example.id] for example in split.examples]


MAKE = (
    f"Name the column with {NAME}(guidance=COLUMN). Or let it be made: {NAME}(guidance={ORACLE}) in training, "
    f"{NAME}(extractor=RUN) in generate, with a run of bertsum_ext."
)


# Rows


class Guided(Dataset[dict[str, Any]]):
    """Tokenised examples and their guidance: rows have ``input_ids``, ``labels`` and ``guidance_ids``."""

    def __init__(self, tokens: ng.tokens.Tokens, guidance: ng.tokens.Tokens) -> None:
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


def pad_rows(padder: ng.padding.Padder, rows: Sequence[dict[str, Any]]) -> ng.padding.Batch:
    """Rows → a batch as ``padder`` makes it, with ids and mask of the guidance."""
    batch = padder(rows)
    return batch | pad_guidance([row["guidance_ids"] for row in rows], padder.pad)


def pad_guidance(ids: Sequence[Any], pad: int) -> ng.padding.Batch:
    """Ids of the guidance and their mask, [B, G] each."""
    padded_ids, mask = ng.padding.padded(ids, pad)
    return {"guidance_input_ids": torch.from_numpy(padded_ids), "guidance_attention_mask": torch.from_numpy(mask)}


# Training


def task(run: ng.Run) -> ng.SystemTask:
    """What ``ngramloss train gsum`` trains: documents with their guidance, and the model."""
    settings, options = run.settings, run.system.options
    ng.JointLoss(settings.objective).refuse_terms_of_logits(NAME)
    config = None
    if (
        settings.model.name != "scratch" and ng.loading.saved_type(settings.model.name) != ng.loading.GUIDED
    ):  # a mistake is found early
        config = ng.loading.load_config(settings.model)
    if options["extractor"]:  # it is needed after training only, which is too late to find that it cannot be used
        load_extraction(options["extractor"])
    splits = run.read_splits()
    tokenizer = run.tokenizer(splits["train"])
    longest = max(settings.data.max_source, settings.data.max_target)
    model = load_guided(settings.model, tokenizer)
    ng.encoders.raise_unless_it_fits(model, tokenizer, settings.model.name, longest=longest)
    run.prepare(model, tokenizer)
    ng.attach(model, settings.objective)
    rows, used, made_of = {}, [], {}
    for split, of_split in splits.items():
        shape = run.shape(model.config, tokenizer, of_split)
        made = make_guidance(of_split, settings.data, settings.task, options)
        rows[split], made_of[f"{split} guidance"] = _tokenised(of_split, made, tokenizer, shape)
        used += _used(split, rows[split], made, settings)
    padder = ng.padding.Padder(tokenizer.pad_token_id, model.prepare_decoder_input_ids_from_labels)
    objective = ng.attached_loss(model)

    def validate(batches: Any) -> dict[str, float]:
        """The objective on validation data."""
        counts = {"num_tokens": int(rows["validation"].target_lengths.sum()), "num_sequences": len(rows["validation"])}
        found = [float(model(**batch, **counts).loss) for _, batch in batches]
        return {"loss": sum(found)}

    return ng.SystemTask(
        run,
        model,
        tokenizer,
        rows,
        partial(pad_rows, padder),
        [part.name for part in objective.parts],
        validate,
        splits=splits,
        config=config,
        made_of=made_of,
        used=used,
        objective=objective,
    )


def _tokenised(split: ng.data.Split, guidance: Guidance, tokenizer: Any, shape: ng.tokens.Shape) -> tuple[Guided, str]:
    """The tokens of a split and of its guidance, and the fingerprint of the guidance."""
    pairs = zip(split.examples, guidance.texts, strict=True)
    guides = [example._replace(source=text) for example, text in pairs]  # tokenised as sources are
    key = ng.data.fingerprint(guides)
    read = ng.tokens.tokenise(split.examples, split.fingerprint, tokenizer, shape)
    return Guided(read, ng.tokens.tokenise(guides, key, tokenizer, shape)), key


def _used(split: str, rows: Guided, guidance: Guidance, settings: ng.recipe.Recipe) -> list[str]:
    empty, count = sum(not text.strip() for text in guidance.texts), len(rows)
    mean = float(rows.guidance.lengths.mean())
    sentences = [f"{split}: {count:,} documents. The guidance is {guidance.about}, {mean:.1f} tokens on average."]
    if empty == count:
        raise ng.UserError(
            f"the guidance of every document of the {split} split is empty: no sentence shares a word with its target. "
            "Is data.target the column with the summaries?"
        )
    if empty:
        sentences.append(f"{split}: {empty:,} documents have an empty guidance.")
    cut = {"documents": rows.tokens.cut[0], "guidance texts": rows.guidance.cut[0]}
    longest = settings.data.max_source
    return sentences + [
        f"{split}: {ng.data.lost_ends(lost, count, what, longest)}" for what, lost in cut.items() if lost
    ]


# Writing


def generate(work: ng.Job, folder: Path) -> Path:
    """Write the summaries of a run's model, as ``ngramloss generate`` writes predictions."""
    asked = work.asked_system
    assert asked is not None, "only runs of it come here"
    if asked.options["guidance"] == ORACLE and not asked.options["extractor"] and not work.system:
        raise ng.UserError(
            f"{work.model} was trained with the guidance of the oracle, which reads the references. Choose the "
            f"guidance for generation: --set 'system=\"{NAME}(extractor=RUN)\"' with a run of bertsum_ext, --set "
            f"'system=\"{NAME}(guidance=COLUMN)\"' with a column of the data, or, for an upper bound, --set "
            f"'system=\"{NAME}(guidance={ORACLE})\"'."
        )
    from_oracle = asked.options["guidance"] == ORACLE and not asked.options["extractor"]
    split = work.read_sources(reader="the guidance of the oracle" if from_oracle else "")
    guidance = _guidance(work, split, asked.options)

    def load(settings: ng.recipe.Model, tokenizer: Any) -> Any:
        model = load_guided(settings, tokenizer)
        ng.encoders.raise_unless_it_fits(model, tokenizer, work.model, longest=work.data.max_source)
        return model

    def beside(writer: Any) -> Callable[[Sequence[ng.data.Example]], ng.padding.Batch]:
        lost: list[bool] = []
        ids = ng.tokens.prompt_ids(guidance.texts, writer.tokenizer, writer.shape, cut=lost)
        by_id = dict(zip((example.id for example in split.examples), ids, strict=True))
        if any(lost):
            ng.console.logger.info(ng.data.lost_ends(sum(lost), len(lost), "guidance texts", work.data.max_source))
        pad = writer.tokenizer.pad_token_id
        return lambda examples: pad_guidance([by_id[example.id] for example in examples], pad)

    return ng.predictions.write_by_model(work, folder, split, load, {"guidance": guidance.facts}, beside)


def _guidance(work: ng.Job, split: ng.data.Split, options: Mapping[str, Any]) -> Guidance:
    """What guides the documents of a job: an extractor, if one is named; otherwise a column, or the oracle."""
    if run := options["extractor"]:
        taken = load_extraction(run)
        ng.console.logger.info(f"the guidance is what {run} takes of each document.")
        texts = [" ".join(text.split("\n")) for text in taken.write(split.examples)]
        if lost := sum(taken.lost):
            ng.console.logger.info(
                f"{lost:,} of {len(taken.lost):,} documents are longer than the {taken.facts['max_source']} tokens "
                f"that {run} reads; it took none of their last sentences."
            )
        guidance = Guidance(texts, {"extractor": run, **taken.facts}, run)
    else:
        guidance = make_guidance(split, work.data, work.task, options)
        if options["guidance"] == ORACLE:
            ng.console.logger.warning(
                "the oracle's guidance reads the references, so these outputs are an upper bound. For documents "
                "without references the model has no such guidance."
            )
    if empty := sum(not text.strip() for text in guidance.texts):
        ng.console.logger.info(f"{empty:,} of {len(guidance.texts):,} documents have an empty guidance.")
    pairs = zip(split.examples, guidance.texts, strict=True)
    key = ng.data.fingerprint(example._replace(source=text) for example, text in pairs)
    return guidance._replace(facts={**guidance.facts, "fingerprint": key})
