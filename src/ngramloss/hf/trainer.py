"""model, objective and rows → Hugging Face's trainer, with exact optimiser steps for any split into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from ngramloss.errors import UserError
from ngramloss.hf import candidates
from ngramloss.hf.attach import aligned_labels, aligned_packing, attach, attached_loss
from ngramloss.hf.heads import has_encoder
from ngramloss.hf.segments import KEY, Unit
from ngramloss.hf.training_log import TrainingLog
from ngramloss.loss import JointLoss
from ngramloss.stats import IGNORE_INDEX
from ngramloss.steps.plan import LengthGrouped, data_seed
from ngramloss.terms import Term


class NgramTrainer(Seq2SeqTrainer):
    """Hugging Face's ``Seq2SeqTrainer`` with a joint objective whose denominators are counted over the whole step.

    Tokens *and* sequences are counted over the micro-batches and processes of an optimiser step, so every split of a
    batch gives the same gradient. Rows that Accelerate repeats to fill the last round of an epoch do not count, in
    training and in evaluation. The log contains every term, match rates, documents per second and memory. Evaluation
    returns ``eval_loss`` (the objective), ``eval_ce`` and every other term as exact means over the data set.

    For terms that compare candidates, such as ``rank``, training rows have ``candidates``, lists of ids, and ``gains``;
    :class:`Padder` makes batches of them. Rows for evaluation may have none; then only the other terms are evaluated.

    Args:
        model: a Hugging Face model. The objective is attached to it.
        args: ``Seq2SeqTrainingArguments``, or ``TrainingArguments``.
        objective: as in :class:`JointLoss`.
        memory: as in :class:`JointLoss`.
        segments: as in :func:`attach`.
        kwargs: of ``Seq2SeqTrainer``.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        objective: str | Iterable[Term] | Term,
        memory: str = "fast",
        segments: Unit = "documents",
        **kwargs: Any,
    ) -> None:
        args = _seq2seq(args)
        _refuse_arguments(args, kwargs)
        self.loss_fn, self._texts = JointLoss(objective, memory=memory), segments
        if model is not None:
            self._attach(model)
        self._training_log = TrainingLog(self, self.loss_fn)
        callbacks = [*(kwargs.pop("callbacks", None) or ()), self._training_log]
        super().__init__(model=model, args=args, callbacks=callbacks, **kwargs)
        self._refuse_sharding()
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True  # the second for transformers before 5.20
        self._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        columns += [*candidates.KEYS, KEY]  # not unused, although `forward` does not name them
        self._has_candidates: bool | None = None

    def call_model_init(self, trial: Any = None) -> Any:
        """The model that ``model_init`` creates, with the objective attached."""
        return self._attach(super().call_model_init(trial))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """As stock, but ``group_by_length`` groups by whole steps: the split does not change which rows share one."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            step = self.get_total_train_batch_size(self.args)
            sampler = LengthGrouped(sampler.lengths, step=step, seed=data_seed(self.args))
            self.add_callback(_Epochs(sampler))
        return sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of a step, and its numbers of tokens and sequences over all processes, [2]."""
        self._training_log.begin_step()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if batches:
            self._blank_repeated_rows(batches[-1], self.train_dataset)
        counts = torch.zeros(2, device=device)  # [2]
        for batch in batches:
            counts += self._counts(batch).to(device)
        counts = self.accelerator.reduce(counts, "sum")  # [2]
        self._training_log.count(counts[1])
        return batches, counts

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This micro-batch's share of the step's joint loss; in evaluation, the batch's own loss."""
        if num_items_in_batch is None or not model.training:
            outputs = model(**inputs)
        else:
            tokens, sequences = num_items_in_batch  # []
            outputs = model(**inputs, num_tokens=tokens, num_sequences=sequences)
            outputs["loss"] = outputs["loss"] * self.accelerator.num_processes  # gradients are averaged over processes
            self._training_log.last_batch = inputs
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None, **settings: Any
    ) -> tuple[Any, Any, Any]:
        """As stock, without the labels of repeated rows."""
        self._blank_repeated_rows(inputs, getattr(self.callback_handler.eval_dataloader, "dataset", None))
        has_candidates, args = inputs.get("candidates") is not None, self.args
        if has_candidates and getattr(args, "predict_with_generate", False) and not prediction_loss_only:
            raise UserError(
                "predict_with_generate cannot generate from rows with candidates. Leave them out of the "
                "rows for evaluation."
            )
        if self.loss_fn.needs_candidates and self._has_candidates not in (None, has_candidates):
            raise UserError(
                "some rows for evaluation have candidates and others have none, so the terms that "
                "compare them have no mean. Give all rows candidates, or none."
            )
        self._has_candidates = has_candidates
        result: tuple[Any, Any, Any] = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys, **settings
        )
        return result

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As stock, with the loss and every term an exact mean over the data set."""
        self._has_candidates = None
        self.gather_function = self.accelerator.gather_for_metrics  # drops repeated rows; stock keeps them
        output: Any = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if means := self._training_log.take_evaluation():
            loss = sum(part.weight * means[part.name] for part in self.loss_fn.parts if part.name in means)
            exact = {"loss": loss} | means
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in exact.items()})
        return output

    def _attach(self, model: Any) -> Any:
        """Attach the objective, plus ``ce`` with weight 0 if it has none, so that validation always reports it."""
        attach(model, self.loss_fn.with_ce().terms, memory=self.loss_fn.memory, segments=self._texts)
        attached_loss(model).progress = 1.0  # for an evaluation without training
        return model

    def _counts(self, batch: Any) -> Tensor:
        """The number of labels that count, and of texts that have one, [2]."""
        model: Any = self.model
        labels, packed = aligned_labels(model, batch), aligned_packing(model, batch)  # [B, T]
        texts = labels if packed is None else packed.labels  # [B, T] or [S, U]
        return torch.stack([(labels != IGNORE_INDEX).sum(), (texts != IGNORE_INDEX).any(-1).sum()]).float()

    def _blank_repeated_rows(self, batch: dict[str, Any], dataset: Any) -> None:
        """Remove the labels of rows that Accelerate repeats to give every process a full last batch."""
        state, labels, processes = self.accelerator.gradient_state, batch.get("labels"), self.accelerator.num_processes
        if labels is None or processes == 1 or not state.end_of_dataloader or self.args.dataloader_drop_last:
            return
        # Accelerate's own `remainder` is unknown in a continued epoch.
        own = len(dataset) % (len(labels) * processes) if hasattr(dataset, "__len__") else state.remainder
        if own <= 0:
            return
        first = max(0, own - self.accelerator.process_index * len(labels))
        for name in ("labels", "shift_labels"):
            if name in batch:
                batch[name] = batch[name].clone()
                batch[name][first:] = IGNORE_INDEX

    def _refuse_sharding(self) -> None:
        if max(self.get_tp_size(), self.get_cp_size(), self.get_sp_size()) > 1:
            raise UserError(
                "tensor, context and sequence parallelism split a sequence or the vocabulary over processes, which "
                "the joint loss does not support. Use data parallelism (DDP, FSDP)."
            )
        model: Any = self.accelerator.unwrap_model(self.model)
        tied = has_encoder(model) and getattr(model, "all_tied_weights_keys", None)
        if tied and self.is_fsdp_enabled and self.accelerator.is_fsdp2:
            raise UserError(
                f"Accelerate's FSDP cannot shard this {type(model).__name__}: its encoder, decoder and head share one "
                "weight, which would be in several groups. Use DDP, or `ngramloss train` with train.fsdp=true "
                "(from Python: ng.train), which keeps it in one."
            )


class _Epochs(TrainerCallback):
    """Passes the epoch to the sampler, which Accelerate does not where several processes skip batches."""

    def __init__(self, sampler: LengthGrouped) -> None:
        self._sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._sampler.set_epoch(int(state.epoch or 0))


def _refuse_arguments(args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("compute_loss_func") is not None:
        raise TypeError("NgramTrainer computes its loss from `objective`; do not pass `compute_loss_func`.")
    if gone := [f"`{name}`" for name in ("max_tokens", "capture", "compile") if name in kwargs]:
        raise TypeError(
            f"NgramTrainer does not take {', '.join(gone)}: its batches are those of Hugging Face's trainer. For steps "
            "that are planned by tokens, compiled and captured as CUDA graphs, use ng.train(model, tokenizer, "
            "examples, settings) or `ngramloss train`."
        )
    if args.label_smoothing_factor:
        raise UserError(
            f"label_smoothing_factor={args.label_smoothing_factor} has no effect. Write it in the objective: "
            f"ce(smoothing={args.label_smoothing_factor})."
        )


def _seq2seq(args: Any) -> Any:
    """Add the attributes that ``Seq2SeqTrainer`` needs to arguments of any class."""
    if args is None:
        return Seq2SeqTrainingArguments(output_dir="tmp_trainer")
    for name in ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"):
        if not hasattr(args, name):
            setattr(args, name, None if name != "predict_with_generate" else False)
    return args
