"""documents and summaries → a model that writes words and copies them, also unknown ones, and the texts it writes.

The pointer-generator with coverage of See, Liu and Manning (2017). It is trained on any objective of tokens and
windows, from its log-probabilities over the extended vocabulary: those are logits whose log-sum-exp is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import ngramloss as ng
from ngramloss_systems.pointer_model import (
    END_ID,
    PADDING_ID,
    START_ID,
    UNKNOWN_ID,
    PointerGenerator,
    load_model,
    search,
)
from ngramloss_systems.pointer_words import UNKNOWN, cached_tokenizer, extended_ids, join_words, split_words

NAME = "pointer_generator"
COVERAGE = "coverage"
"""The part of the loss besides the objective's."""
TOGETHER = 32
"""Documents that are searched at a time, unless another number is asked for."""


# Rows


class Row(NamedTuple):
    """A document and its summary as ids in the extended vocabulary; ``cut`` says which of them lost their end."""

    input_ids: list[int]
    labels: list[int]
    unknown: list[str]
    cut: tuple[bool, bool]


def row_of(tokenizer: Any, vocabulary: Mapping[str, int], example: ng.data.Example, *, longest: tuple[int, int]) -> Row:
    """An example as ids. A document without words is read as one unknown word."""
    source, target = split_words(tokenizer, example.source), split_words(tokenizer, example.target)
    unknown: dict[str, int] = {}
    ids = extended_ids(source[: longest[0]], vocabulary, unknown, grow=True) or [UNKNOWN_ID]
    labels = extended_ids(target[: longest[1]], vocabulary, unknown, grow=False)
    ends = [END_ID] if len(target) < longest[1] else []
    return Row(ids, [*labels, *ends], list(unknown), (len(source) > longest[0], len(target) >= longest[1]))


def pad_rows(most_unknown: int, vocabulary: int, rows: Sequence[Mapping[str, Any]]) -> ng.padding.Batch:
    """Rows → a batch, and the unknown words of each, [B, U]; U is fixed, so that no loss depends on other rows."""
    ids, mask = ng.padding.padded([row["input_ids"] for row in rows], PADDING_ID)  # [B, S]
    labels, _ = ng.padding.padded([row["labels"] for row in rows], ng.IGNORE_INDEX)  # [B, T]
    counts = (ids.max(-1, initial=0) + 1 - vocabulary).clip(0)  # [B]
    unknown = np.arange(most_unknown) < counts[:, None]  # [B, U]
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels, "unknown": unknown}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# Training


def task(run: ng.Run) -> ng.SystemTask:
    """What ``ngramloss train pointer-generator`` trains: documents and summaries as words, and the model."""
    settings, options = run.settings, run.system.options
    _check(settings, options)
    objective = ng.JointLoss(settings.objective).with_ce()
    splits = run.read_splits()
    train, longest = splits["train"], (settings.data.max_source, settings.data.max_target)
    tokenizer = cached_tokenizer(
        lambda: ng.loading.iterate_texts(train.readable),
        2 * len(train.readable),
        train.fingerprint,
        settings.model.vocabulary,
        lowercase=options["lowercase"],
    )
    vocabulary = tokenizer.get_vocab()
    rows, used = {}, []
    for name, split in splits.items():
        made = list(_rows(tokenizer, vocabulary, split.readable, longest))
        rows[name] = [{"input_ids": np.array(row.input_ids), "labels": np.array(row.labels)} for row in made]
        used.append(_described(name, made, settings, len(vocabulary)))
    used += _coverage_remarks(settings, options)
    model = PointerGenerator(vocabulary=len(vocabulary), width=settings.model.width, embeddings=options["embeddings"])

    def loss(batch: ng.padding.Batch, counts: Tensor) -> Any:
        """The objective, and coverage as another part; before its phase coverage is measured but has no weight."""
        predicted, labels = model(batch), batch["labels"]
        found = objective.with_parts(predicted.logp, labels, num_tokens=counts[0], num_sequences=counts[1])
        penalty = predicted.penalty.where(labels != ng.IGNORE_INDEX, 0.0).sum() / counts[0]  # []
        total = found.total + options["coverage"] * penalty if model.coverage else found.total  # []
        return found._replace(total=total, parts=found.parts | {COVERAGE: penalty.detach()})

    def change(number: int, total: int, optimiser: torch.optim.Optimizer) -> dict[str, float]:
        """Set what depends on the step: whether the model has coverage."""
        first = first_step_with_coverage(options, total)
        model.coverage = number >= first
        if number == first and options["optimizer"] == "adagrad":
            for state in optimiser.state.values():
                state["sum"].fill_(options["accumulator"])
        return {f"weight/{COVERAGE}": options["coverage"] * model.coverage}

    def validate(batches: Any) -> dict[str, float]:
        """The loss with its parts on the validation split."""
        device = next(model.parameters()).device
        labels = sum(len(row["labels"]) for row in rows["validation"])
        counts = torch.tensor([labels, len(rows["validation"])], dtype=torch.float32, device=device)  # [2]
        sums = torch.zeros(1 + len(objective.parts) + 1, device=device)  # [1 + parts]
        for _, batch in batches:
            found = loss(batch, counts)
            sums += torch.stack([found.total, *found.parts.values()])  # [1 + parts]
        return dict(zip(["loss", *found.parts], sums.tolist(), strict=True))

    return ng.SystemTask(
        run,
        model,
        tokenizer,
        rows,
        partial(pad_rows, longest[0], len(vocabulary)),
        [*(part.name for part in objective.parts), COVERAGE],
        validate,
        splits=splits,
        loss_of=loss,
        made_of={"words": ng.tokens.tokenizer_fingerprint(tokenizer)},
        used=used,
        scored=settings.train.eval_batch_size or settings.train.batch_size,
        optimiser_of=(lambda model: _adagrad(model, settings, options)) if options["optimizer"] == "adagrad" else None,
        change=change,
        objective=objective,
    )


def first_step_with_coverage(options: Mapping[str, Any], total: int) -> int:
    """The number of the first step with coverage, in a training of this many; beyond the last if there is none.

    >>> first_step_with_coverage({"coverage_from": 0.75}, 8), first_step_with_coverage({"coverage_from": 1}, 8)
    (7, 9)
    """
    share: float = options["coverage_from"]
    return ceil(round(share * total, 6)) + 1


def _adagrad(model: PointerGenerator, settings: ng.recipe.Recipe, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adagrad(
        trained, lr=settings.train.learning_rate, initial_accumulator_value=options["accumulator"]
    )


def _check(settings: ng.recipe.Recipe, options: Mapping[str, Any]) -> None:
    """Raise if settings ask for what the system does not have, all mistakes at once."""
    mistakes: list[str] = []
    if settings.model.name != "scratch":
        mistakes.append(f'model.name: {NAME} is trained from scratch. Set model.name = "scratch".')
    if settings.data.separator not in ("auto", "none"):
        mistakes.append(f"data.separator: {NAME} puts nothing between sentences. Leave it out.")
    if options["optimizer"] == "adagrad":
        allowed = dataclasses.replace(ng.recipe.Train(), weight_decay=0.0)
        mistakes += [
            f"train.{key}: is a setting of AdamW, and {NAME} trains with Adagrad. "
            f"{'Set it to 0' if key == 'weight_decay' else 'Leave it out'}, or choose optimizer=adamw."
            for key in ("weight_decay", "beta1", "beta2", "epsilon")
            if getattr(settings.train, key) != getattr(allowed, key)
        ]
    if any(part.name == COVERAGE for part in ng.JointLoss(settings.objective).parts):
        mistakes.append(f"objective: a term is called {COVERAGE}, which is the name of a part of {NAME}. Rename it.")
    if mistakes:
        raise ng.UserError(f"recipe {settings.name}:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))


def _rows(
    tokenizer: Any, vocabulary: Mapping[str, int], examples: Sequence[ng.data.Example], longest: tuple[int, int]
) -> Iterator[Row]:
    with ng.Progress("splitting words", total=len(examples), unit="examples") as progress:
        for example in examples:
            yield row_of(tokenizer, vocabulary, example, longest=longest)
            progress.update(1)


def _described(name: str, rows: Sequence[Row], settings: ng.recipe.Recipe, vocabulary: int) -> str:
    """What is used of a split, as a sentence. Raises if the model would know none of its words."""
    labels = [label for row in rows for label in row.labels if label != END_ID]
    copied, lost = sum(label >= vocabulary for label in labels), sum(label == UNKNOWN_ID for label in labels)
    words = sum(len(row.input_ids) for row in rows)
    unknown = sum(token >= vocabulary for row in rows for token in row.input_ids)
    sentence = (
        f"{name}: {len(rows):,} documents of {words / len(rows):.1f} words. Beyond the vocabulary of {vocabulary:,} "
        f"are {unknown / words:.1%} of their words and {(copied + lost) / max(len(labels), 1):.1%} of those of their "
        f"targets, of which {copied:,} can be copied and {lost:,} are {UNKNOWN}."
    )
    longest = {"max_source": settings.data.max_source, "max_target": settings.data.max_target}
    for place, (what, key) in enumerate((("documents", "max_source"), ("targets", "max_target"))):
        if cut := sum(row.cut[place] for row in rows):
            sentence += f" {cut:,} {what} are longer than data.{key} = {longest[key]} and lost their end."
    return sentence


def _coverage_remarks(settings: ng.recipe.Recipe, options: Mapping[str, Any]) -> list[str]:
    """What could keep coverage from the model, in sentences."""
    remarks = []
    if options["coverage_from"] < 1 and settings.train.best != ng.recipe.LAST and settings.train.eval_every:
        remarks.append(
            f"train.best = {settings.train.best} may choose weights from before coverage begins, and the model then "
            f"has none. {ng.recipe.LAST} takes the last ones."
        )
    if options["coverage_from"] < 1 and settings.train.early_stopping:
        remarks.append("train.early_stopping may end the training before coverage begins.")
    return remarks


# Writing


def generate(work: ng.Job, folder: Path) -> Path:
    """Write the texts of a run's model, as ``ngramloss generate`` writes predictions."""
    run = ng.saved_run(work.model, NAME, command="ngramloss train pointer-generator")
    tokenizer, device, how = run.tokenizer, run.device, work.generation or run.settings.generation
    model = load_model(run.model, tokenizer).to(device).eval()
    found = {"num_beams": how.num_beams, "min_length": how.min_length, "max_length": how.max_length}
    vocabulary, longest = tokenizer.get_vocab(), (work.data.max_source, 1)
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    count = cut = unknown = 0

    def write(examples: Sequence[ng.data.Example]) -> list[str]:
        nonlocal count, cut, unknown
        rows = [row_of(tokenizer, vocabulary, example._replace(target=""), longest=longest) for example in examples]
        batch = pad_rows(longest[0], len(vocabulary), [row._asdict() for row in rows])
        batch = {name: value.to(device) for name, value in batch.items()}
        texts = search(model, batch, beams=how.num_beams, least=how.min_length, most=how.max_length)
        count, cut = count + len(rows), cut + sum(row.cut[0] for row in rows)
        unknown += sum(UNKNOWN_ID in text for text in texts)
        return [_text(tokenizer, [*words, *row.unknown], text, work) for row, text in zip(rows, texts, strict=True)]

    facts = {
        **run.facts,
        "max_source": work.data.max_source,
        "generation": found,
        "sentence_a_line": work.has_lines,
        **({"language": work.data.language} if work.has_lines else {}),
    }
    together = work._replace(batch_size=work.batch_size or TOGETHER)
    path = ng.predictions.write_texts(together, folder, write, facts, has_sentences=work.has_lines)
    if cut:
        ng.console.logger.info(ng.data.lost_ends(cut, count, "documents", work.data.max_source, "words"))
    if unknown:
        ng.console.logger.info(
            f"{unknown:,} of {count:,} texts have {UNKNOWN}: a word that the model neither knew nor copied."
        )
    return path


def _text(tokenizer: Any, words: Sequence[str], ids: Sequence[int], work: ng.Job) -> str:
    """The text of ids, without start and padding; one sentence per line where that is usual for the data."""
    text = join_words(tokenizer, [words[token] for token in ids if token not in (START_ID, PADDING_ID)])
    return "\n".join(ng.data.split_many([text], language=work.data.language)[0]) if work.has_lines else text
