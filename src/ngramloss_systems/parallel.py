"""sources and targets → a model that predicts all tokens of a text at once, on any objective of tokens and n-grams."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

import ngramloss as ng
from ngramloss_systems.parallel_model import ParallelModel, hf, load_parallel, lowest, parallel

NAME = "parallel"
SCORES = {"translation": ("bleu", "bleu"), "summarisation": ("rouge", "rouge2")}
"""Task → the metric, and its score, of the texts that a validation writes."""
COLLAPSED = 0.05
"""Texts are called collapsed if fewer of their pairs of neighbouring tokens are in the references. In trials they had
0% to 4% where ``bag`` or ``precision`` had collapsed, and 29% where it had not."""


# Rows


class BareTokens(Dataset[dict[str, Any]]):
    """Tokenised examples whose labels have no special tokens at their ends."""

    def __init__(self, tokens: ng.tokens.Tokens, before: int, after: int) -> None:
        self.tokens, self.before, self.after = tokens, before, after

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = self.tokens[row]
        return {**found, "labels": found["labels"][self.before : len(found["labels"]) - self.after]}

    @property
    def lengths(self) -> NDArray[Any]:
        """Source tokens of each row."""
        return self.tokens.lengths

    @property
    def target_lengths(self) -> NDArray[Any]:
        """Target tokens of each row."""
        return self.tokens.target_lengths - self.before - self.after


def pad_rows(rows: Sequence[Mapping[str, Any]], pad: int, size: Any = None) -> ng.padding.Batch:
    """Rows → ids, their mask and labels, padded; to this size, with rows of one source token and no labels."""
    S, T = (None, None) if size is None else (size.source, size.target)
    count = len(rows) if size is None else size.rows
    ids, mask = ng.padding.padded([row["input_ids"] for row in rows], pad, count, S)
    labels, _ = ng.padding.padded([row["labels"] for row in rows], ng.IGNORE_INDEX, count, T)
    mask[len(rows) :, 0] = 1
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# Training


def task(run: ng.Run) -> ng.SystemTask:
    """What ``ngramloss train parallel`` trains: sources, the places of their targets, and the model."""
    settings, options = run.settings, run.system.options
    ng.JointLoss(settings.objective).refuse_terms_of_logits(NAME)
    known = ng.loading.saved_type(settings.model.name) == ng.loading.PARALLEL
    config = None if known else ng.loading.load_config(settings.model)
    if config is not None and not config.is_encoder_decoder:
        raise ng.UserError(
            f"{NAME} needs an encoder-decoder, such as BART, mBART, Marian or T5, and {settings.model.name} is "
            f"decoder-only ({config.model_type}). Train it as it is, without system, with "
            'objective = "ce + matches(2,3,4)".'
        )
    splits = run.read_splits()
    tokenizer = run.tokenizer(splits["train"])  # the same with and without the texts of a teacher
    made_of = {}
    if options["targets"]:
        splits["train"] = with_targets(splits["train"], options["targets"], settings.data.on_bad_row)
        made_of["targets"] = splits["train"].fingerprint
    base = load_parallel(settings.model.name) if known else ng.loading.load(settings.model, tokenizer)
    longest = max(settings.data.max_source, settings.data.max_target)
    ng.encoders.raise_unless_it_fits(base, tokenizer, settings.model.name, longest=longest)
    run.prepare(base.base if known else base, tokenizer)
    before, after = ng.tokens.special_tokens(tokenizer, "text_target")
    rows = {}
    for split, of_split in splits.items():
        shape = run.shape(base.config, tokenizer, of_split)
        tokens = ng.tokens.tokenise(of_split.examples, of_split.fingerprint, tokenizer, shape)
        rows[split] = BareTokens(tokens, len(before), len(after))
        if len(empty := np.flatnonzero(rows[split].target_lengths < 1)):
            ids = ", ".join(of_split.examples[row].id for row in empty[: ng.data.SHOWN])
            raise ng.UserError(
                f"{len(empty):,} targets of the {split} split have no tokens, so there is nothing to predict: the rows "
                f"with the ids {ids}. Correct or remove them."
            )
    model = _model(base, tokenizer, rows["train"], run)
    used = [sentence for split in rows for sentence in _used(split, rows[split], model, settings)]
    set_search(model, options)
    ng.attach(model, settings.objective)
    objective = ng.attached_loss(model)
    progress = [0.0]

    def loss_of(batch: ng.padding.Batch, counts: Tensor) -> Any:
        return shares(model, batch, counts, weight=options["length_weight"])

    def validate(batches: Any) -> dict[str, float]:
        return _validated(
            model, tokenizer, batches, loss_of, splits["validation"], rows["validation"], run, progress[0]
        )

    def change(step: int, total: int, _: Any) -> dict[str, float]:
        progress[0] = step / total
        return {}

    return ng.SystemTask(
        run,
        model,
        tokenizer,
        rows,
        lambda batch, size=None: pad_rows(batch, model.config.pad_token_id, size),
        [*(part.name for part in objective.parts), "length"],
        validate,
        splits=splits,
        loss_of=loss_of,
        config=None if settings.model.name == "scratch" else config,
        scored=64,
        made_of=made_of,
        used=used,
        change=change,
        objective=objective,
        fixed=True,
    )


def _model(base: Any, tokenizer: Any, rows: BareTokens, run: ng.Run) -> ParallelModel:
    """The model that is trained: one of an earlier run, or one whose lengths are those of these rows."""
    options, name = run.system.options, run.settings.model.name
    most = run.settings.data.max_target - rows.before - rows.after
    if not isinstance(base, ParallelModel):
        around = sum(map(len, ng.tokens.special_tokens(tokenizer)))
        ratio = float((rows.target_lengths / np.maximum(rows.lengths - around, 1)).mean())
        asked = {"inputs": options["inputs"], "spread": options["spread"]}
        return parallel(base, tokenizer, most=most, ratio=ratio, name=name, **asked)
    if (base.config.inputs, base.config.spread) != (options["inputs"], options["spread"]):
        raise ng.UserError(
            f"{name} was trained with inputs={base.config.inputs} and spread={base.config.spread}. Use the same."
        )
    base.write_at_most(most)
    return base


def _used(split: str, rows: BareTokens, model: ParallelModel, settings: Any) -> list[str]:
    """What is used of a split, in sentences."""
    config, count, mean = model.config, len(rows), rows.target_lengths.mean()
    sentences = [
        f"{split}: {count:,} targets of {mean:.1f} tokens on average, {config.ratio:.2f} for each source token."
    ]
    for lost, noun, key in zip(rows.tokens.cut, ("sources", "targets"), ("max_source", "max_target"), strict=True):
        cut = ng.data.lost_ends(lost, count, noun, getattr(settings.data, key), key=key)
        sentences += [f"{split}: {cut}"] if lost else []
    apart = abs(rows.target_lengths - model.usual_lengths(torch.tensor(rows.lengths)).numpy())
    if beyond := int((apart > config.spread).sum()):
        sentences.append(
            f"{split}: {beyond:,} of {count:,} targets are longer or shorter than the length head knows "
            f"(±{config.spread} tokens): it learns its longest or shortest length for them. Raise spread: "
            f'system = "{NAME}(spread={int(apart.max())})".'
        )
    return sentences


def shares(model: ParallelModel, batch: ng.padding.Batch, counts: Tensor, *, weight: float) -> Any:
    """A batch's share of the objective and of the length head's cross-entropy; ``counts`` are those of the step."""
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]  # [B, S], [B, S], [B, T]
    states = model.encode(ids, mask)  # [B, S, D]
    lengths = (labels != ng.IGNORE_INDEX).sum(1)  # [B]
    # A row without labels, which fills a batch up, has one place: attention to none is NaN.
    read, real = model.places(ids, mask, lengths.clamp_min(1), labels.shape[1])  # [B, T] each
    if model.config.inputs == "random" and model.training:
        hidden = drawn(lengths, real)  # [B, T]
        read = labels.where(~hidden & (labels != ng.IGNORE_INDEX), read)  # [B, T]
        labels = labels.masked_fill(~hidden, ng.IGNORE_INDEX)  # [B, T]
    inputs: dict[str, Any] = {
        "attention_mask": mask,
        "encoder_outputs": hf.modeling_outputs.BaseModelOutput(last_hidden_state=states),
        "decoder_input_ids": read,
        "decoder_attention_mask": real,
        "labels": labels,
    }
    found = ng.attached_share(model, inputs, counts)
    classes = model.length_classes(lengths, mask).masked_fill(lengths == 0, ng.IGNORE_INDEX)  # [B]
    logits = model.length_logits(states, mask).float()  # [B, 2 · spread + 1]
    length = F.cross_entropy(logits, classes, reduction="sum") / counts[1]  # []
    return found._replace(total=found.total + weight * length, parts={**found.parts, "length": length.detach()})


def drawn(lengths: Tensor, real: Tensor) -> Tensor:
    """Which places of each row are hidden, bool [B, T]: a number from 1 to its length, all numbers equally likely."""
    uniform = torch.rand(len(lengths), 1 + real.shape[1], device=real.device)  # [B, 1 + T]
    count = (uniform[:, 0] * lengths).long().clamp_max(lengths - 1) + 1  # [B]
    return lowest(uniform[:, 1:].masked_fill(~real, torch.inf), count)


def _validated(
    model: ParallelModel,
    tokenizer: Any,
    batches: Any,
    loss_of: Any,
    split: ng.data.Split,
    rows: BareTokens,
    run: ng.Run,
    progress: float,
) -> dict[str, float]:
    """The loss on validation data, and what the texts score that are written in as many passes as the run asks for."""
    counts = torch.tensor([float(rows.target_lengths.sum()), float(len(rows))])
    total, repeated, places, shared, pairs = 0.0, 0, 0, 0, 0
    texts = [""] * len(rows)
    for numbers, batch in batches:
        total += float(loss_of(batch, counts.to(batch["labels"].device)).total)
        for number, (best, *_) in zip(numbers, model.write(batch["input_ids"], batch["attention_mask"]), strict=True):
            tokens, gold = best.tokens, rows[number]["labels"].tolist()
            repeated += sum(one == other for one, other in pairwise(tokens))
            places += len(tokens)
            final = model.final(tokens)
            shared += (Counter(pairwise(final)) & Counter(pairwise(gold))).total()
            pairs += max(len(final), len(gold)) - 1
            texts[number] = tokenizer.decode(final, skip_special_tokens=True).strip()
    metric, score = SCORES[run.settings.task]
    references = [list(example.references) or [example.target] for example in split.examples]
    found = ng.METRICS[metric].load()(references, texts)
    pooled = found.pooled.get(score)
    value = float(pooled.combine(sum(pooled.statistics))) if pooled else fmean(found.values[score])
    if progress > 0.5 and shared < COLLAPSED * pairs:
        ng.console.logger.warning(
            f"the texts share {shared / pairs:.1%} of their pairs of tokens with the references: the training has "
            f"collapsed, or has only begun to learn. If {run.settings.objective} has no cross-entropy at first, or "
            "ends with precision alone, use another objective, such as ce@until(0.67) + bag(2)@from(0.67)."
        )
    return {"loss": total, "score": 0.0 if math.isnan(value) else value, "repeats": repeated / max(1, places)}


# Targets that another model wrote


def with_targets(split: ng.data.Split, folder: str, on_bad_row: str) -> ng.data.Split:
    """The training split with the texts of a folder of ``ngramloss generate`` as its targets."""
    run = ng.RunFolder(Path(folder))
    make = "Make them with: ngramloss generate TEACHER --split train --out FOLDER."
    if not run.predictions.is_file() or not run.generation.is_file():
        raise ng.MissingFileError(f"targets: {folder} has no finished predictions with their settings. {make}")
    about = ng.files.read_object(run.generation)
    if about.get("split") != "train" or about.get("fingerprint") != split.fingerprint:
        raise ng.UserError(
            f"targets: the texts in {folder} were written for {about.get('documents', 0):,} rows of the split "
            f"{about.get('split')!r} of {about.get('data')} ({about.get('fingerprint')}), and the training has "
            f"{len(split.examples):,} rows of {split.name} ({split.fingerprint}). Write texts of the same rows, with "
            "the same data.* and --limit. " + make
        )
    texts = {str(row["id"]): str(row["prediction"]) for row in ng.files.whole_rows(run.predictions)}
    if missing := [example.id for example in split.examples if example.id not in texts]:
        raise ng.UserError(f"targets: {folder} has no text for {len(missing):,} rows, such as {missing[0]}. {make}")
    blank = [example.id for example in split.examples if not texts[example.id].strip()]
    if blank and on_bad_row != "skip":
        raise ng.UserError(
            f"targets: {len(blank):,} texts in {folder} are blank, such as that of {blank[0]}. Leave these rows "
            "out with data.on_bad_row=skip, or write them again."
        )
    if blank:
        ng.console.logger.warning(f"skipped {len(blank):,} rows whose text in {folder} is blank.")
    examples = [
        example._replace(target=texts[example.id], references=())
        for example in split.examples
        if texts[example.id].strip()
    ]
    return split._replace(examples=examples, fingerprint=ng.data.fingerprint(examples))


# Writing


def set_search(model: ParallelModel, options: Mapping[str, Any]) -> None:
    """Let a model write as these options say. Raises if it cannot."""
    if options["passes"] > 1 and model.config.inputs != "random":
        raise ng.UserError(
            f"passes={options['passes']} fills places again that were predicted before, which only a model learns that "
            f"was trained with inputs=random; this one was trained with inputs={model.config.inputs}. Use passes=1."
        )
    for name in ("lengths", "passes", "remove_repeats", "length_offset"):
        setattr(model, name, options[name])


def load(settings: ng.recipe.Model, tokenizer: Any, options: Mapping[str, Any]) -> ParallelModel:
    """The model of a run, which writes as its options say."""
    model = load_parallel(settings.name)
    set_search(model, options)
    return model
