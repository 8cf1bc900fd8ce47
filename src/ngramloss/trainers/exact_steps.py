"""a trainer of Hugging Face and an objective → optimiser steps that are exact for any split into micro-batches."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from ngramloss.data.batches.twins import Twins
from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import IGNORE_INDEX
from ngramloss.loss.terms import Term
from ngramloss.models.attached.attach import aligned_labels, aligned_packing, attach, attached_loss
from ngramloss.models.attached.diagnosing import diagnostics, scheduled_weights
from ngramloss.models.attached.heads import adds_tokens, has_encoder
from ngramloss.models.attached.segments import BESIDE, KEY, Unit
from ngramloss.output.console import peak_memory
from ngramloss.trainers.log_parts import LogParts, lower_is_better


class ExactSteps(Trainer):
    """What ``NgramTrainer`` and ``NgramSFTTrainer`` add to the trainer that they are; see :class:`NgramTrainer`."""

    def __init__(
        self,
        *,
        objective: str | Iterable[Term] | Term,
        memory: str,
        segments: Unit,
        args: Any,
        teacher: Any = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> None:
        self._refuse_arguments(args, kwargs)
        self.loss_fn, self._texts, self._teacher = JointLoss(objective, memory=memory), segments, teacher
        self._training_log = StepLog(self)
        super().__init__(args=args, callbacks=[*(callbacks or ()), self._training_log], **kwargs)
        lower_is_better(self.args, self.loss_fn)
        self._refuse_sharding()
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True  # the second for transformers before 5.20
        self._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        columns += [KEY, *BESIDE]  # not unused, although `forward` does not name them

    def attach_objective(self, model: Any) -> Any:
        """Attach the objective, plus ``ce`` with weight 0 if it has none, so that validation always reports it."""
        if adds_tokens(model):
            raise UserError(
                "adapters that add virtual tokens (prompt tuning, prefix tuning) shift the labels, so token counts "
                "would be wrong. Use LoRA, or another adapter of layers."
            )
        settings: dict[str, Any] = {"segments": self._texts, "teacher": self._teacher}
        attach(model, self.loss_fn.with_ce().terms, memory=self.loss_fn.memory, **settings)
        attached_loss(model).progress = 1.0  # for an evaluation without training
        return model

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, with every example once."""
        with self._without_twins():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, with every example once."""
        with self._without_twins():
            return super().get_test_dataloader(*args, **kwargs)

    @contextmanager
    def _without_twins(self) -> Iterator[None]:
        before: Any = self.data_collator
        if isinstance(before, Twins):
            self.data_collator = before.collator
        try:
            yield
        finally:
            self.data_collator = before

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of a step, and its numbers of tokens and sequences over all processes, [2]."""
        self._training_log.begin_step()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if batches:
            copies = 2 if isinstance(self.data_collator, Twins) else 1
            self._blank_repeated_rows(batches[-1], self.train_dataset, self._train_batch_size, copies)
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
        outputs = self.outputs_of(model, inputs, num_items_in_batch)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def outputs_of(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """What the model returns for a micro-batch; in training its loss is a share of the step's."""
        if num_items_in_batch is None or not model.training:
            return model(**inputs)
        tokens, sequences = num_items_in_batch  # []
        outputs = model(**inputs, num_tokens=tokens, num_sequences=sequences)
        outputs["loss"] = outputs["loss"] * self.accelerator.num_processes  # gradients are averaged over processes
        return outputs

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **settings: Any) -> Any:
        """As stock, without the labels of repeated rows."""
        dataset = getattr(self.callback_handler.eval_dataloader, "dataset", None)
        self._blank_repeated_rows(inputs, dataset, self.args.eval_batch_size)
        return super().prediction_step(model, inputs, *args, **settings)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **settings: Any) -> Any:
        """As stock, with the loss and every term an exact mean over the data set."""
        self.gather_function = self.accelerator.gather_for_metrics  # drops repeated rows; stock keeps them
        settings["metric_key_prefix"] = metric_key_prefix
        output: Any = super().evaluation_loop(*args, **settings)
        if means := self._training_log.take_evaluation():
            loss = sum(part.final_weight * means[part.name] for part in self.loss_fn.parts if part.name in means)
            exact = {"loss": loss} | means
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in exact.items()})
        return output

    def _counts(self, batch: Any) -> Tensor:
        """The number of labels that count, and of texts that have one, [2]."""
        model: Any = self.model
        labels, packed = aligned_labels(model, batch), aligned_packing(model, batch)  # [B, T]
        texts = labels if packed is None else packed.labels  # [B, T] or [S, U]
        return torch.stack([(labels != IGNORE_INDEX).sum(), (texts != IGNORE_INDEX).any(-1).sum()]).float()

    def _blank_repeated_rows(self, batch: dict[str, Any], dataset: Any, size: int, copies: int = 1) -> None:
        """Remove labels of rows that Accelerate repeats for a full last batch of ``size`` rows, maybe in one row."""
        state, labels, processes = self.accelerator.gradient_state, batch.get("labels"), self.accelerator.num_processes
        if labels is None or processes == 1 or not state.end_of_dataloader or self.args.dataloader_drop_last:
            return
        rows = size if len(labels) == 1 else len(labels)
        # Accelerate's own `remainder` is unknown in a continued epoch.
        own = copies * (len(dataset) % (rows * processes // copies) if hasattr(dataset, "__len__") else state.remainder)
        if own <= 0:
            return
        first = max(0, own - self.accelerator.process_index * rows)
        if len(labels) < rows and 0 < first < rows:
            warnings.warn(
                "Accelerate repeats rows to fill the last batch of an epoch. The collator packs a batch into one "
                "row, so repeated rows cannot be removed and count twice. Use dataloader_drop_last=True, or a number "
                "of rows that is a multiple of the batch size over all processes. Silence this warning with "
                "warnings.filterwarnings('ignore', message='Accelerate repeats').",
                stacklevel=2,
            )
            return
        for name in ("labels", "shift_labels"):
            if name in batch:
                batch[name] = batch[name].clone()
                batch[name][min(first, len(labels)) :] = IGNORE_INDEX

    def _refuse_arguments(self, args: Any, kwargs: dict[str, Any]) -> None:
        name = type(self).__name__
        if kwargs.get("compute_loss_func") is not None:
            raise TypeError(f"{name} computes its loss from `objective`; do not pass `compute_loss_func`.")
        if gone := [f"`{option}`" for option in ("max_tokens", "capture", "compile") if option in kwargs]:
            raise TypeError(
                f"{name} does not take {', '.join(gone)}: it takes its batches from Hugging Face's Trainer. For steps "
                "planned by tokens, compiled layers and CUDA graphs, use ng.train(model, tokenizer, examples, "
                "settings) or `ngramloss train`."
            )
        if args.label_smoothing_factor:
            raise UserError(
                f"label_smoothing_factor={args.label_smoothing_factor} has no effect. Write it in the objective: "
                f"ce(smoothing={args.label_smoothing_factor})."
            )

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


class StepLog(LogParts):
    """Logs what ``LogParts`` does, and what only a trainer that counts its steps knows."""

    def __init__(self, trainer: ExactSteps) -> None:
        super().__init__()
        self._trainer = trainer
        self._began = self._step_ended = 0.0
        self._sequences: Any = 0
        self.last_batch: dict[str, Any] = {}
        """The last micro-batch, for diagnostics, which run the model once more. Without one there are none."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the objective. A trainer may load its model itself, and replace its forward later."""
        self._trainer.attach_objective(kwargs["model"])
        super().on_init_end(args, state, control, **kwargs)

    def begin_step(self) -> None:
        """Leave the time since the last step, or since a later log, out of documents per second."""
        self._began += time.perf_counter() - max(self._step_ended, self._began)

    def count(self, sequences: Tensor) -> None:
        """Add the sequences of a step over all processes, []."""
        self._sequences = self._sequences + sequences

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As ``LogParts``. Evaluations and checkpoints come after this."""
        super().on_step_end(args, state, control, **kwargs)
        self._step_ended = time.perf_counter()

    def _of_training(self, model: Any, device: torch.device) -> dict[str, float]:
        """As ``LogParts``, with the rest."""
        trainer, loss_fn = self._trainer, self._trainer.loss_fn
        speed = float(self._sequences) / max(time.perf_counter() - self._began, 1e-9)
        more = {"docs_per_second": speed, "memory_gib": peak_memory(device)}
        if self.last_batch:
            more |= diagnostics(model, loss_fn, self.last_batch, trainer.compute_loss_context_manager)
        loss_fn.progress = attached_loss(model).progress
        self._sequences, self._began = 0, time.perf_counter()
        return more | scheduled_weights(loss_fn) | super()._of_training(model, device)
