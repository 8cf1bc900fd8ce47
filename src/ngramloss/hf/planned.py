"""a trainer → a loader whose batches are whole optimiser steps, cut by tokens to fit the GPU's memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from ngramloss.errors import UserError
from ngramloss.hf.attach import decoder_inputs
from ngramloss.hf.batches import Batch, Padder, Step, Steps
from ngramloss.hf.plan import Grid, LengthGrouped, Lengths, Plan, Size, fitted_grid
from ngramloss.stats import IGNORE_INDEX

SHARE = 0.8
"""The share of the GPU's free memory that a micro-batch may take."""


def planned_loader(trainer: Any) -> DataLoader[Step]:
    """The steps of an epoch as ``trainer``'s arguments and ``max_tokens`` say, in the order of the sampler's epoch."""
    args, dataset, accelerator = trainer.args, trainer.train_dataset, trainer.accelerator
    step = trainer.get_total_train_batch_size(args)
    sources, targets, counted = _lengths(dataset)
    grouped = args.train_sampling_strategy == "group_by_length"
    sampler = LengthGrouped(sources, step=step, seed=args.data_seed or args.seed, grouped=grouped)
    batches = BatchSampler(sampler, step, args.dataloader_drop_last)
    padder = Padder(_pad(trainer), functools.partial(decoder_inputs, trainer.model), always_mask=trainer.captures)
    rows = -(-step // accelerator.num_processes)
    if args.device.type == "cuda":
        plan = _plan_for_gpu(trainer, sources, targets, list(batches), rows, padder)
    else:
        limit = trainer.max_tokens or None
        plan = Plan(sources, targets, rows if limit else trainer.micro_rows, limit)
    steps = Steps(dataset, plan, padder, counted=counted, process=accelerator.process_index,
                  processes=accelerator.num_processes)
    return DataLoader(
        steps, batch_sampler=batches, collate_fn=_same, num_workers=args.dataloader_num_workers,
        pin_memory=args.device.type == "cuda",
    )


def _same(step: Any) -> Any:
    return step


def _lengths(dataset: Any) -> tuple[Lengths, Lengths, Lengths]:
    """Source tokens, target tokens and labels that count, of each example."""
    if hasattr(dataset, "lengths") and hasattr(dataset, "target_lengths"):
        return dataset.lengths, dataset.target_lengths, dataset.target_lengths
    try:
        rows = [dataset[row] for row in range(len(dataset))]
        sources, targets = ([len(row[name]) for row in rows] for name in ("input_ids", "labels"))
        counted = [int((np.asarray(row["labels"]) != IGNORE_INDEX).sum()) for row in rows]
    except (TypeError, KeyError) as reason:
        raise UserError(
            f"max_tokens needs a data set with a length, whose rows have `input_ids` and `labels` ({reason!r})."
        ) from reason
    return np.array(sources), np.array(targets), np.array(counted)


def _pad(trainer: Any) -> int:
    """The id that pads sources."""
    places = (trainer.processing_class, trainer.model.config)
    pad = next((place.pad_token_id for place in places if getattr(place, "pad_token_id", None) is not None), None)
    if pad is None:
        raise UserError("neither the tokenizer nor the model's config has a padding token. Batches need one.")
    return int(pad)


def _plan_for_gpu(
    trainer: Any, sources: Lengths, targets: Lengths, steps: list[list[int]], rows: int, padder: Padder
) -> Plan:
    grid = fitted_grid(sources, targets, steps, longest=getattr(trainer.model.config, "max_position_embeddings", None))
    limit = trainer.max_tokens or _fitting_tokens(trainer, grid, rows, padder)
    plan = Plan(sources, targets, rows, limit, grid)
    shown = steps[:50]
    micro = sum(len(plan.cut(step[:: trainer.accelerator.num_processes])) for step in shown) / len(shown)
    trainer.largest = padder([], plan.sizes(rows)[0])
    trainer.say(
        f"a step of {len(steps[0])} sequences is {micro:.3g} micro-batch{'es' if micro != 1 else ''} of up to "
        f"{plan.sizes(rows)[0].tokens:,} tokens, in {len(plan.sizes(rows))} shapes, with {plan.padding(shown):.0%} "
        "padding."
    )
    return plan


def _fitting_tokens(trainer: Any, grid: Grid, rows: int, padder: Padder) -> int:
    """The most tokens of a micro-batch that fit into the GPU's free memory, found by running one and three rows."""
    device = trainer.args.device
    longest = Size(1, grid.sources[-1], grid.targets[-1])
    try:
        peaks = [_peak(trainer, padder([], longest._replace(rows=count))) for count in (1, 1, 3)]
    except torch.cuda.OutOfMemoryError:
        return longest.tokens
    each = max((peaks[2] - peaks[1]) / 2, 1)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    free = torch.cuda.mem_get_info(device)[0] - 8 * trained - (peaks[1] - each)   # the optimiser keeps two numbers
    fitting = max(1, int(SHARE * free / each))
    if fitting < rows:   # a power of two, so that the split does not change with a little memory
        fitting = 2 ** (fitting.bit_length() - 1)
    return fitting * longest.tokens


def _peak(trainer: Any, batch: Batch) -> int:
    """Bytes that forward and backward of a batch without labels take besides what is allocated already."""
    model, device = trainer.model, trainer.args.device
    state = torch.cuda.get_rng_state(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    was_training = model.training
    model.train()
    try:
        with trainer.accelerator.autocast():
            model(**{name: value.to(device) for name, value in batch.items()}).loss.backward()
        return torch.cuda.max_memory_allocated(device) - before
    finally:
        model.zero_grad()
        model.train(was_training)
        torch.cuda.set_rng_state(state, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
