"""a frozen model and texts, its own or the data's → a drafter: a small file that lets the model write the same faster.

Each training row gives several blocks, which begin at random tokens of its text. A block is a row of its own to the
objective: k places, of which a text's end may leave fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ngramloss as ng
from ngramloss_systems.parallel import with_targets

NAME = "drafter"
MOST_LOGITS = 2**27
"""Logits that are validated at a time: 0.5 GB in fp32."""


def task(run: ng.Run) -> ng.SystemTask:
    """What ``ngramloss train drafter`` trains: texts that a frozen model reads, and the drafter."""
    run, used = _as_the_model_reads(run)
    settings, options = run.settings, run.system.options
    objective = ng.JointLoss(settings.objective)
    objective.refuse_terms_of_logits(NAME)
    config = ng.loading.load_config(settings.model)
    splits = run.read_splits()
    made_of = {}
    if options["targets"]:
        splits["train"] = with_targets(splits["train"], options["targets"], settings.data.on_bad_row)
        made_of["targets"] = splits["train"].fingerprint
    tokenizer = run.tokenizer(splits["train"])
    model = ng.loading.load(settings.model, tokenizer).requires_grad_(False)
    causal = ng.loading.is_causal(config)
    if not causal:
        run.prepare(model, tokenizer)
    rows = {
        split: ng.tokens.tokenise(
            of_split.examples, of_split.fingerprint, tokenizer, run.shape(config, tokenizer, of_split)
        )
        for split, of_split in splits.items()
    }
    frozen = ng.drafters.TeacherModel(model)
    drafter = _drafter(model, tokenizer, settings.model.name, options, rows["train"])
    _warn_of_others_texts(options["targets"], drafter.sizes.weights, settings.model.name)
    padder = ng.drafters.padder(model, tokenizer.pad_token_id)

    def loss_of(batch: ng.padding.Batch, counts: Tensor) -> Any:
        return shares(drafter, frozen, objective, batch, counts, anchors=options["anchors"])

    def validate(batches: Any) -> dict[str, float]:
        return validated(drafter, frozen, objective, (batch for _, batch in batches))

    for split, of_split in rows.items():
        if not (short := int((of_split.target_lengths < 2).sum())):
            continue
        used.append(f"{split}: {short:,} texts have one token, so there is nothing to draft behind it.")
    return ng.SystemTask(
        run,
        drafter,
        tokenizer,
        rows,
        padder,
        [part.name for part in objective.parts],
        validate,
        splits=splits,
        loss_of=loss_of,
        config=config,
        made_of=made_of,
        used=used,
        scored=16,
        objective=objective,
    )


def _as_the_model_reads(run: ng.Run) -> tuple[ng.Run, list[str]]:
    """The run with the model in the folder of another run, if ``model.name`` names one, read as in its training."""
    settings = run.settings
    folder = ng.RunFolder(Path(settings.model.name))
    if settings.model.name == "scratch":
        raise ng.UserError(
            "a drafter is trained for a model that is there. Name a run, a folder or a hub id: --set model.name=RUN"
        )
    if not folder.recipe.is_file():
        return run, []
    if not folder.finished:
        raise ng.MissingFileError(
            f"{folder.path} has no {folder.model.name}/: its training is not finished. The same ngramloss train "
            "command continues it."
        )
    own = ng.recipe.load(str(folder.recipe), objective=False)
    if own.system:
        raise ng.UserError(
            f"{folder.path} is a run of {own.system}, which does not write token by token, so it verifies no drafts."
        )
    names = ng.recipe.affecting("tokens", section="data")
    data = dataclasses.replace(settings.data, **{name: getattr(own.data, name) for name in names})
    model = dataclasses.replace(settings.model, name=str(folder.model))
    changed = dataclasses.replace(settings, data=data, model=model, task=own.task)
    return dataclasses.replace(run, settings=changed), [f"sources are read as in the training of {folder.path}."]


def _warn_of_others_texts(folder: str, weights: str | None, name: str) -> None:
    """Warn if other weights wrote the targets than those that the drafts are for."""
    about = ng.files.read_object(ng.RunFolder(Path(folder)).generation) if folder else {}
    if folder and about.get("weights") != weights:
        ng.console.logger.warning(
            f"targets: the texts in {folder} were written by {about.get('model')} ({about.get('weights')}), not by "
            f"{name} ({weights}). A drafter learns more from its own model's: ngramloss generate {name} --split train."
        )


def _drafter(
    model: Any, tokenizer: Any, name: str, options: Mapping[str, Any], rows: ng.tokens.Tokens
) -> ng.drafters.Drafter:
    V, width = model.get_output_embeddings().weight.shape
    chosen = frequent(rows, V, options["shortlist"])  # [v]
    heads = next(count for count in range(max(1, width // 64), 0, -1) if width % count == 0)
    weights, ids = ng.drafters.marks(model, tokenizer, name)
    sizes = ng.drafters.Sizes(
        width=width,
        heads=heads,
        feed_forward=options["feed_forward"] or 4 * width,
        layers=options["layers"],
        places=options["places"],
        reads_source=not ng.loading.is_causal(model.config),
        shortlist=len(chosen),
        weights=weights,
        tokenizer=ids,
    )
    drafter = ng.drafters.Drafter(sizes)
    drafter.shortlist.copy_(chosen)
    return drafter


def frequent(rows: ng.tokens.Tokens, vocabulary: int, most: int) -> Tensor:
    """The most frequent tokens of the targets, of equally frequent ones the first, sorted, [v]."""
    counts = torch.zeros(vocabulary, dtype=torch.long)  # [V]
    for row in range(len(rows)):
        labels = torch.tensor(rows[row]["labels"]).long()  # [T]
        counts += torch.bincount(labels[labels >= 0], minlength=vocabulary)
    return counts.sort(descending=True, stable=True).indices[:most].sort().values


# Blocks


def following(labels: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """The labels of the block behind each token of a text, [B, T, k], and whether there is one, [B, T].

    >>> following(torch.tensor([[5, 6, 7, -100]]), 2)[0].tolist()
    [[[6, 7], [7, -100], [-100, -100], [-100, -100]]]
    """
    blocks = F.pad(labels, (0, places), value=ng.IGNORE_INDEX).unfold(1, places, 1)[:, 1:]  # [B, T, k]
    blocks = blocks.where((blocks != ng.IGNORE_INDEX).cummin(-1).values, ng.IGNORE_INDEX)  # [B, T, k]
    begins = (labels != ng.IGNORE_INDEX) & (blocks[..., 0] != ng.IGNORE_INDEX)  # [B, T]
    return blocks.masked_fill(~begins.unsqueeze(-1), ng.IGNORE_INDEX), begins


def drawn(begins: Tensor, anchors: int) -> Tensor:
    """Random places of each row, those where a block begins first, [B, T] → [B, A]."""
    uniform = torch.rand(begins.shape, device=begins.device).masked_fill(~begins, 2.0)  # [B, T]
    return uniform.topk(min(anchors, begins.shape[1]), largest=False).indices  # [B, A]


def drafts(drafter: Any, read: Any, labels: Tensor, where: Tensor) -> Tensor:
    """What the head is to read at the places behind these tokens, [B, A] → [B, A, k, D]."""
    index = where.unsqueeze(-1).expand(-1, -1, read.head.hidden.shape[-1])  # [B, A, D]
    tokens = F.embedding(labels.gather(1, where).clamp_min(0), read.head.weight)  # [B, A, D]
    found: Tensor = drafter(read.head.hidden.gather(1, index), tokens, read.states, read.mask)
    return found


def shares(
    drafter: Any, frozen: Any, objective: ng.JointLoss, batch: ng.padding.Batch, counts: Tensor, *, anchors: int
) -> Any:
    """A batch's share of the step's objective over blocks at random tokens.

    Denominators are ``anchors`` blocks for each row of the step and k tokens for each of them, whatever is drawn: so
    micro-batches add up, and where texts are short the values are lower than means.
    """
    labels, read = batch["labels"], ng.drafters.read_texts(frozen, batch)  # [B, T]
    k = drafter.sizes.places
    blocks, begins = following(labels, k)  # [B, T, k], [B, T]
    where = drawn(begins, anchors)  # [B, A]
    own = blocks.gather(1, where.unsqueeze(-1).expand(-1, -1, k)).flatten(0, 1)  # [B · A, k]
    made = drafts(drafter, read, labels, where).flatten(0, 1)  # [B · A, k, D]
    sequences = counts[1] * anchors  # []
    given = {"num_tokens": sequences * k, "num_sequences": sequences}
    return objective.from_hidden_with_parts(made, read.head.weight, own, **_head(read), **given)


def _head(read: Any) -> dict[str, Any]:
    return {name: getattr(read.head, name) for name in ("bias", "scale", "softcap")}


@torch.no_grad()
def validated(drafter: Any, frozen: Any, objective: ng.JointLoss, batches: Any) -> dict[str, float]:
    """The objective over blocks at every token, and ``accepted``: how many tokens of a greedy draft are the text's."""
    k, kept = drafter.sizes.places, 0
    sums = dict.fromkeys((part.name for part in objective.parts), 0.0)
    counted = {"token": 0, "sequence": 0}
    for batch in batches:
        labels, read = batch["labels"], ng.drafters.read_texts(frozen, batch)  # [B, T]
        blocks, begins = following(labels, k)  # [B, T, k], [B, T]
        most = max(1, MOST_LOGITS // (len(labels) * k * len(read.head.weight)))
        for where in torch.arange(labels.shape[1], device=labels.device).split(most):
            real = begins[:, where]  # [B, A]
            if not real.any():
                continue
            own = blocks[:, where][real]  # [N, k]
            made = drafts(drafter, read, labels, where.expand(len(labels), -1))[real]  # [N, k, D]
            stats = ng.token_stats_from_hidden(made, read.head.weight, own, needs=objective.needs, **_head(read))
            for name, value in objective.from_stats(stats, own, num_tokens=1, num_sequences=1).parts.items():
                sums[name] += float(value)
            counted["token"] += int((own != ng.IGNORE_INDEX).sum())
            counted["sequence"] += len(own)
            right = (stats.best_token == own) & torch.isin(own, drafter.shortlist)  # no token is IGNORE_INDEX, [N, k]
            kept += int(right.cumprod(-1).sum())
    means = {part.name: sums[part.name] / max(1, counted[part.per]) for part in objective.parts}
    loss = sum(weight * means[part.name] for part, weight in zip(objective.parts, objective.weights, strict=True))
    return {"loss": loss, **means, "accepted": kept / max(1, counted["sequence"])}


# Writing


def generate(work: ng.Job, folder: Path) -> Path:
    """Refuse: a drafter writes nothing by itself."""
    raise ng.UserError(
        f"{work.model} is a drafter, which writes nothing by itself: it makes a model write faster. Give the model, "
        f"and name the drafter: ngramloss generate MODEL --engine draft --set generation.drafter={work.model}"
    )
