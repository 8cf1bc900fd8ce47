"""a trainer → a loader of whole optimiser steps, cut by tokens to fit the GPU's memory, and how such a step runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from ngramloss.errors import UserError
from ngramloss.gpu.captured import CannotCapture, CapturedStep, Gradients
from ngramloss.hf.attach import attached_loss, decoder_inputs, last_parts
from ngramloss.hf.segments import KEY
from ngramloss.stats import IGNORE_INDEX
from ngramloss.steps import reduction
from ngramloss.steps.padding import Batch, Padder, Step, Steps, ahead
from ngramloss.steps.plan import Grid, LengthGrouped, Lengths, Plan, Size, data_seed, fitted_grid

SHARE = 0.8
"""The share of the GPU's free memory that a micro-batch may take."""


class PlannedSteps:
    """The planned steps of a trainer: a loader of whole steps, and how a step runs, eagerly or as CUDA graphs.

    Args:
        trainer: an ``NgramTrainer``.
        max_tokens: the most tokens of a micro-batch; 0 takes as many as the GPU's memory allows.
        rows: sequences of a micro-batch on a CPU, if ``max_tokens`` is 0.
        capture: whether to run steps as CUDA graphs where that can be done.
        custom: whether the trainer's class has its own way to compute the loss, which a graph would not call.
        say: shows a sentence to the user.
    """

    def __init__(
        self, trainer: Any, max_tokens: int, *, rows: int, capture: bool, custom: bool, say: Callable[[str], object]
    ) -> None:
        self.trainer, self.max_tokens, self.rows, self.custom, self.say = trainer, max_tokens, rows, custom, say
        self.captured: CapturedStep | None = None
        self.not_captured = "" if capture else "it was switched off"
        """Why steps do not run as graphs, once that is known."""
        self.largest: Batch = {}
        """A blank micro-batch of the largest shape, if there is a grid of shapes."""
        self._ahead: tuple[Any, Iterator[Step]] = (None, iter(()))
        if not getattr(trainer.model.config, "is_encoder_decoder", False):
            raise UserError("max_tokens plans the steps of encoder-decoders only. Leave it out for this model.")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise UserError(
                "FSDP and DeepSpeed need as many micro-batches in every process, so steps cannot be "
                "planned. Leave out max_tokens."
            )
        if trainer.accelerator.num_processes > 1:  # no DDP: gradients are reduced here, once a step
            prepare = functools.partial(trainer.accelerator.prepare_model, evaluation_mode=True)
            trainer.accelerator.prepare_model = prepare

    def compile(self) -> None:
        """Compile encoder and decoder in place."""
        for body in (self.trainer.model.get_encoder(), self.trainer.model.get_decoder()):
            body.compile(dynamic=True)

    # Batches

    def loader(self) -> DataLoader[Step]:
        """The steps of an epoch as the trainer's arguments say, in the order of the sampler's epoch."""
        trainer = self.trainer
        args, dataset, accelerator = trainer.args, trainer.train_dataset, trainer.accelerator
        step, cuda = trainer.get_total_train_batch_size(args), args.device.type == "cuda"
        sources, targets, texts, counted = _lengths(dataset)
        grouped = args.train_sampling_strategy == "group_by_length"
        sampler = LengthGrouped(sources, step=step, seed=data_seed(args), grouped=grouped)
        batches = BatchSampler(sampler, step, args.dataloader_drop_last)
        padder = Padder(
            _pad(trainer), functools.partial(decoder_inputs, trainer.model), always_mask=cuda and not self.not_captured
        )
        rows = -(-step // accelerator.num_processes)
        if cuda:
            plan = self._plan_for_gpu(sources, targets, texts, list(batches), rows, padder)
        else:
            limit = self.max_tokens or None
            plan = Plan(sources, targets, rows if limit else self.rows, limit, texts=texts)
        steps = Steps(
            dataset,
            plan,
            padder,
            counted=counted,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        # Rows that are ids already become a batch sooner than it would arrive from another process.
        workers = 0 if _knows_lengths(dataset) else args.dataloader_num_workers
        return DataLoader(steps, batch_sampler=batches, collate_fn=_same, num_workers=workers, pin_memory=cuda)

    def next_step(self, epoch_iterator: Iterator[Step]) -> tuple[list[Step], Tensor]:
        """The next step, made in the background, if there is one; and its counts, which the plan knows, [2]."""
        device = self.trainer.args.device
        if self._ahead[0] is not epoch_iterator:
            begin = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else bool
            self._ahead = epoch_iterator, ahead(epoch_iterator, begin=begin)
        step = next(self._ahead[1], None)
        if step is None:
            return [], torch.zeros(2, device=device)
        return [step], step.counts.to(device, non_blocking=True)

    def _plan_for_gpu(
        self,
        sources: Lengths,
        targets: Lengths,
        texts: Lengths | None,
        steps: list[list[int]],
        rows: int,
        padder: Padder,
    ) -> Plan:
        positions = getattr(self.trainer.model.config, "max_position_embeddings", None)
        most = 1 if texts is None else max(int(texts.max()), 2)
        grid = fitted_grid(sources, targets, steps, longest=positions, texts=most)
        limit = self.max_tokens or _fitting_tokens(self.trainer, grid, rows, padder)
        plan = Plan(sources, targets, rows, limit, grid, texts)
        sizes, shown = plan.sizes(rows), steps[:50]
        self.largest = padder([], sizes[0])
        micro = sum(len(plan.cut(step[:: self.trainer.accelerator.num_processes])) for step in shown) / len(shown)
        self.say(
            f"a step of {len(steps[0])} sequences is {micro:.3g} micro-batch{'es' if micro != 1 else ''} of up to "
            f"{sizes[0].tokens:,} tokens, in {len(sizes)} shapes, with {plan.padding(shown):.0%} padding."
        )
        return plan

    # Running

    def run(self, model: Any, step: Step, counts: Tensor, *, eager: Callable[..., Tensor]) -> Tensor:
        """Run all micro-batches of a step and average gradients over processes. Returns the loss, [].

        Args:
            model: as the trainer prepared it.
            step: what this process does.
            counts: of the step, on the device, [2].
            eager: runs forward and backward of one micro-batch.
        """
        attached_loss(model).refresh_weights()
        device = self.trainer.args.device
        batches = [batch | {"counts": step.counts} for batch in step.batches]
        captured = self._begin_captured(model, batches)
        loss = torch.zeros((), device=device)  # []
        for batch, with_counts in zip(step.batches, batches, strict=True):
            if captured is None:
                sent = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
                loss += eager(model, sent, counts)
            else:
                values = captured(with_counts)  # [1 + parts]
                held = captured.held(with_counts)
                self.trainer.record(values[1:], {name: value for name, value in held.items() if name != "counts"})
                loss += values[0]
        if self.trainer.accelerator.num_processes > 1:
            reduction.average_gradients(model, self._gradients())
        return loss

    def clip(self) -> Tensor | None:
        """Clip captured gradients, which are a few buffers instead of hundreds of tensors. None if there are none."""
        gradients = self._gradients()
        if gradients is None:
            return None
        self.trainer.accelerator.unscale_gradients()
        return gradients.clip(self.trainer.args.max_grad_norm)

    def _gradients(self) -> Gradients | None:
        return self.captured.gradients if self.captured is not None else None

    def _begin_captured(self, model: Any, batches: list[Batch]) -> CapturedStep | None:
        """Begin a step that runs as graphs; None if it cannot. The reason is told once."""
        if self.not_captured:
            return None
        optimiser = self.trainer.optimizer
        if hasattr(optimiser, "train") and callable(optimiser.train):
            optimiser.train()
        try:
            if self.captured is None:
                self._raise_unless_capturable()
                model.train()
                self.captured = CapturedStep(model, functools.partial(self._forward_backward, model))
                if self.largest:  # the others reuse its memory
                    self.captured.begin([self.largest | {"counts": torch.zeros(2)}])
            self.captured.begin(batches)
        except CannotCapture as reason:
            self.not_captured, self.captured = str(reason), None
            model.zero_grad()
            if self.trainer.args.device.type == "cuda":
                self.say(f"steps are not captured as CUDA graphs: {reason}. Training is the same, but slower.")
        return self.captured

    def _raise_unless_capturable(self) -> None:
        trainer = self.trainer
        if trainer.args.device.type != "cuda":
            raise CannotCapture("there is no GPU")
        if self.custom:
            raise CannotCapture(f"{type(trainer).__name__} has its own compute_loss or training_step")
        if getattr(trainer.model, "is_gradient_checkpointing", False):
            raise CannotCapture("gradient checkpointing computes activations again in the backward pass")
        if trainer.args.torch_compile:
            raise CannotCapture("torch_compile wraps the whole model; use NgramTrainer(..., compile=True) instead")
        if getattr(trainer.accelerator, "has_lomo_optimizer", False):
            raise CannotCapture("this optimiser updates weights in the backward pass")

    def _forward_backward(self, model: Any, inputs: Batch) -> Tensor:
        """What a graph contains: the loss of a micro-batch, its gradients, and [1 + parts] numbers for the log."""
        batch = {name: value for name, value in inputs.items() if name != "counts"}
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.share_of_step(model, batch, inputs["counts"])["loss"]  # []
        self.trainer.accelerator.backward(loss)
        return torch.stack([loss.detach(), *last_parts(model).values()])


def one_batch_a_step(args: Any) -> Any:
    """The arguments as Hugging Face's trainer sees them if one batch of the loader is a whole optimiser step."""
    args = copy.copy(args)
    args.per_device_train_batch_size *= args.gradient_accumulation_steps
    args.gradient_accumulation_steps = 1
    return args


def _same(step: Any) -> Any:
    return step


def _knows_lengths(dataset: Any) -> bool:
    """Whether it is like :class:`Tokens`, whose rows are ids."""
    return hasattr(dataset, "lengths") and hasattr(dataset, "target_lengths")


class _Lengths(NamedTuple):
    """Numbers of each example.

    Attributes:
        sources: source tokens.
        targets: target tokens; with candidates, those of the longest text.
        texts: the reference and the candidates; None if no example has candidates.
        counted: labels of the reference that count.
    """

    sources: Lengths
    targets: Lengths
    texts: Lengths | None
    counted: Lengths


def _lengths(dataset: Any) -> _Lengths:
    if _knows_lengths(dataset):
        counted = getattr(dataset, "label_lengths", dataset.target_lengths)
        return _Lengths(dataset.lengths, dataset.target_lengths, getattr(dataset, "texts", None), counted)
    try:
        rows = [dataset[row] for row in range(len(dataset))]
        if any(KEY in row for row in rows):
            raise UserError("max_tokens plans rows of one text each, and these have `segments`. Leave max_tokens out.")
        sources = [len(row["input_ids"]) for row in rows]
        targets = [max(len(ids) for ids in (row["labels"], *row.get("candidates", ()))) for row in rows]
        texts = [1 + len(row.get("candidates", ())) for row in rows]
        counted = [int((np.asarray(row["labels"]) != IGNORE_INDEX).sum()) for row in rows]
    except (TypeError, KeyError) as reason:
        raise UserError(
            f"max_tokens needs a data set with a length, whose rows have `input_ids` and `labels` ({reason!r})."
        ) from reason
    several = np.array(texts) if any("candidates" in row for row in rows) else None
    return _Lengths(np.array(sources), np.array(targets), several, np.array(counted))


def _pad(trainer: Any) -> int:
    """The id that pads sources."""
    places = (trainer.processing_class, trainer.model.config)
    pad = next((place.pad_token_id for place in places if getattr(place, "pad_token_id", None) is not None), None)
    if pad is None:
        raise UserError("neither the tokenizer nor the model's config has a padding token. Batches need one.")
    return int(pad)


def _fitting_tokens(trainer: Any, grid: Grid, rows: int, padder: Padder) -> int:
    """The most tokens of a micro-batch that fit into the GPU's free memory, found by running one and three rows."""
    device = trainer.args.device
    longest = Size(1, grid.sources[-1], grid.targets[-1], grid.texts)
    try:
        peaks = [_peak(trainer, padder([], longest._replace(rows=count))) for count in (1, 1, 3)]
    except torch.cuda.OutOfMemoryError:
        return longest.tokens
    each = max((peaks[2] - peaks[1]) / 2, 1)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    free = torch.cuda.mem_get_info(device)[0] - 8 * trained - (peaks[1] - each)  # the optimiser keeps two numbers
    fitting = max(1, int(SHARE * free / each))
    if fitting < rows:  # a power of two, so that the split does not change with a little memory
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
