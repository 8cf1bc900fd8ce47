"""model, objective and examples → a trained model, with exact optimiser steps for any split into micro-batches."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from ngramloss.errors import UserError
from ngramloss.hf import candidates
from ngramloss.hf.attach import aligned_labels, aligned_packing, attach, attached_loss, last_parts, logits_of
from ngramloss.hf.planned import PlannedSteps, one_batch_a_step
from ngramloss.hf.segments import KEY, Texts
from ngramloss.loss import JointLoss
from ngramloss.objectives import Term
from ngramloss.stats import IGNORE_INDEX
from ngramloss.steps import reduction
from ngramloss.steps.padding import Batch, Step
from ngramloss.steps.plan import LengthGrouped, data_seed

LOG = logging.getLogger("ngramloss")
DIAGNOSED_ROWS = 4
"""Number of rows used for diagnostics: they need full logits, which must not fill the memory."""


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class NgramTrainer(Seq2SeqTrainer):
    """Hugging Face's ``Seq2SeqTrainer`` with a joint objective whose denominators are counted over the whole step.

    Tokens *and* sequences are counted over the micro-batches and processes of an optimiser step, so every split of a
    batch gives the same gradient. Rows that Accelerate repeats to fill the last round of an epoch do not count, in
    training and in evaluation. The log contains every term, match rates, documents per second and memory. Evaluation
    returns ``eval_loss`` (the objective), ``eval_ce`` and every other term as exact means over the data set.

    For terms that compare candidates, such as ``rank``, training rows have ``candidates``, lists of ids, and ``gains``;
    planned steps and :class:`Padder` make batches of them. Rows for evaluation may be without; then all of this is of
    the other terms.

    Args:
        model: a Hugging Face model. The objective is attached to it.
        args: ``Seq2SeqTrainingArguments``, or ``TrainingArguments``.
        objective: as in :class:`JointLoss`.
        memory: as in :class:`JointLoss`.
        segments: as in :func:`attach`.
        max_tokens: None reads batches as the arguments and the collator say. A number plans the steps instead: each has
            ``per_device_train_batch_size × gradient_accumulation_steps`` sequences a process, cut into micro-batches of
            at most so many tokens, padding included; 0 takes as many as the GPU's memory allows. The collator is not
            used in training then. For encoder-decoders, and rows with ``input_ids`` and ``labels``.
        capture: with planned steps on a GPU: run forward and backward as one CUDA graph for each shape.
        compile: with planned steps: compile encoder and decoder.
        say: shows a sentence to the user, such as why steps are not captured.
        kwargs: of ``Seq2SeqTrainer``.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        objective: str | Iterable[Term] | Term,
        memory: str = "fast",
        segments: Texts = "documents",
        max_tokens: int | None = None,
        capture: bool = True,
        compile: bool = False,
        say: Callable[[str], object] = LOG.info,
        **kwargs: Any,
    ) -> None:
        self.loss_fn, self._texts = JointLoss(objective, memory=memory), segments
        args = _seq2seq(args)
        rows = args.per_device_train_batch_size
        if max_tokens is not None:
            args = one_batch_a_step(args)
        if kwargs.get("compute_loss_func") is not None:
            raise TypeError("NgramTrainer computes its loss from `objective`; do not pass `compute_loss_func`.")
        if args.label_smoothing_factor:
            raise UserError(
                f"label_smoothing_factor={args.label_smoothing_factor} has no effect. Write it in the objective: "
                f"ce(smoothing={args.label_smoothing_factor})."
            )
        if model is not None:
            self._attach(model)
        super().__init__(model=model, args=args, **kwargs)
        if max(self.get_tp_size(), self.get_cp_size(), self.get_sp_size()) > 1:
            raise UserError(
                "tensor, context and sequence parallelism split a sequence or the vocabulary over processes, which "
                "the joint loss does not support. Use data parallelism (DDP, FSDP)."
            )
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True  # the second for transformers before 5.20
        self.planned: PlannedSteps | None = None
        if max_tokens is not None:
            own = type(self)
            custom = own.compute_loss is not NgramTrainer.compute_loss or (
                own.training_step is not NgramTrainer.training_step
            )
            self.planned = PlannedSteps(self, max_tokens, rows=rows, capture=capture, custom=custom, say=say)
            if compile:
                self.planned.compile()
        self._evaluated = _Sums()
        self._last_batch: dict[str, Any] = {}
        self.also_saved: dict[str, str] = {}
        self.also_evaluated: Callable[[Any], dict[str, float]] | None = None
        self._count_from(0)
        self.add_callback(_Events(self))

    def call_model_init(self, trial: Any = None) -> Any:
        """The model that ``model_init`` creates, with the objective attached."""
        return self._attach(super().call_model_init(trial))

    def create_accelerator_and_postprocess(self) -> None:
        """As stock, but FSDP also works on CPU processes, where Accelerate would silently use DDP."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None and self.accelerator.distributed_type.value == "MULTI_CPU":
            from accelerate.state import PartialState
            from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
            self.is_fsdp_enabled = True

    def create_optimizer(self, model: Any = None) -> Any:
        """As stock, after sharding the model if FSDP is on.

        Accelerate puts the head and the embeddings into separate groups, which fails for an encoder-decoder with tied
        weights. Here they stay in the model's root group, so the head is complete when the loss is computed.
        """
        if self.is_fsdp_enabled and self.accelerator.is_fsdp2 and self.optimizer is None:
            _shard(self.model if model is None else model, self.accelerator.state.fsdp_plugin)
        return super().create_optimizer(model)

    # Planned steps

    def get_train_dataloader(self) -> Any:
        """As stock; with ``max_tokens``, a loader of whole steps."""
        return super().get_train_dataloader() if self.planned is None else self.planned.loader()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As stock; of a planned step, run all micro-batches."""
        eager = super().training_step
        if self.planned is None:
            return eager(model, inputs, num_items_in_batch)
        return self.planned.run(model, inputs, num_items_in_batch, eager=eager)

    def record(self, parts: Tensor, batch: Batch) -> None:
        """Add a micro-batch's terms to the sums for the log, and keep the batch for diagnostics."""
        self._trained.add(parts)
        self._last_batch = batch

    def _clip_grad_norm(self, model: Any) -> Any:
        clipped = self.planned.clip() if self.planned is not None else None
        return super()._clip_grad_norm(model) if clipped is None else clipped  # type: ignore[no-untyped-call]

    def floating_point_ops(self, inputs: Any) -> int:
        """As stock, for the micro-batches of a planned step."""
        if not isinstance(inputs, Step):
            return int(super().floating_point_ops(inputs))
        return 6 * self._trained_numbers * sum(batch["input_ids"].numel() for batch in inputs.batches)

    @functools.cached_property
    def _trained_numbers(self) -> int:
        model: Any = self.model
        return int(model.num_parameters(exclude_embeddings=True))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs.batches if isinstance(inputs, Step) else [inputs]:
            super()._track_num_input_tokens(batch)  # type: ignore[no-untyped-call]

    # Steps

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of a step, and its numbers of tokens and sequences over all processes, [2]."""
        if self.planned is not None:
            steps, counts = self.planned.next_step(epoch_iterator)
            self._trained.counts = self._trained.counts + counts
            return steps, counts
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if batches:
            self._blank_repeated_rows(batches[-1], self.train_dataset)
        counts = torch.zeros(2, device=device)  # [2]
        for batch in batches:
            counts += self._counts(batch).to(device)
        counts = self.accelerator.reduce(counts, "sum")  # [2]
        self._trained.counts = self._trained.counts + counts
        return batches, counts

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        """None: evaluation divides by a batch's own counts, and :meth:`get_batch_samples` counts for a step."""
        return None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This micro-batch's share of the step's joint loss."""
        if num_items_in_batch is None:
            outputs = model(**inputs)
            loss = outputs["loss"]
        else:
            outputs = self.share_of_step(model, inputs, num_items_in_batch)
            loss = outputs["loss"]
            self.record(torch.stack(list(last_parts(model).values())), inputs)
        return (loss, outputs) if return_outputs else loss

    def share_of_step(self, model: Any, inputs: dict[str, Any], counts: Tensor) -> Any:
        """The outputs of a micro-batch, whose loss is its share of the step's; ``counts`` as in a step, [2]."""
        outputs = model(**inputs, num_tokens=counts[0], num_sequences=counts[1])
        outputs["loss"] = outputs["loss"] * self.accelerator.num_processes  # gradients are averaged over processes
        return outputs

    def _set_signature_columns_if_needed(self) -> None:
        """As stock; the candidates and segments of a data set's rows are not unused columns."""
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        columns += [name for name in (*candidates.KEYS, KEY) if name not in columns]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not hasattr(dataset, "__len__"):
            return super()._get_train_sampler(train_dataset)
        lengths = getattr(dataset, "lengths", None)
        if lengths is None:
            lengths = [len(dataset[row]["input_ids"]) for row in range(len(dataset))]
        step = self.get_total_train_batch_size(self.args)
        return LengthGrouped(lengths, step=step, seed=data_seed(self.args))

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

    # Evaluation

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None, **settings: Any
    ) -> tuple[Any, Any, Any]:
        """As stock; also add the terms of the batch to the sums over the data set."""
        self._blank_repeated_rows(inputs, getattr(self.callback_handler.eval_dataloader, "dataset", None))
        compares = inputs.get("candidates") is not None
        arguments: Any = self.args
        if compares and arguments.predict_with_generate and not prediction_loss_only:
            raise UserError(
                "predict_with_generate cannot generate from rows with candidates. Leave them out of the "
                "rows for evaluation."
            )
        result: tuple[Any, Any, Any] = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys, **settings
        )
        if inputs.get("labels") is not None:
            parts = last_parts(model)
            whole = compares or not self._watched.needs_candidates
            before = self._evaluated.loss_fn
            if before is not None and self._watched.needs_candidates and before.needs_candidates != compares:
                raise UserError(
                    "some rows for evaluation have candidates and others have none, so the terms that "
                    "compare them have no mean. Give all rows candidates, or none."
                )
            self._evaluated.loss_fn = self._watched if whole else self._watched.without_candidates()
            packed = aligned_packing(model, inputs)
            counts = (
                self._evaluated.loss_fn.counts(self._labels(inputs), packed).to(self.args.device).float()
            )  # [parts]
            values = torch.stack([parts[part.name] for part in self._evaluated.loss_fn.parts])  # [parts]
            self._evaluated.add(values * counts)
            self._evaluated.counts = self._evaluated.counts + counts
        return result

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As stock, with every term an exact mean over the data set, and what ``also_evaluated`` returns."""
        self._evaluated = _Sums()
        self.gather_function = self.accelerator.gather_for_metrics  # drops repeated rows; stock keeps them
        output: Any = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if self._evaluated.parts is not None and self._evaluated.loss_fn is not None:
            terms = self._evaluated.loss_fn.parts
            sums, counts = self._evaluated.totals(self.accelerator, self._evaluated.loss_fn)
            means = {part.name: sums[part.name] / max(count, 1) for part, count in zip(terms, counts, strict=True)}
            loss = sum(part.weight * means[part.name] for part in terms)
            exact = {"loss": loss, **means}
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in exact.items()})
        if self.also_evaluated is not None:
            with self.compute_loss_context_manager():  # in the precision of the rest
                more = self.also_evaluated(self.model)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in more.items()})
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As stock, with ``also_saved``. Raises :class:`CheckpointError` if a file cannot be written."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            for name, text in self.also_saved.items() if self.args.should_save else ():
                (folder / name).write_text(text, encoding="utf-8")
        except (OSError, RuntimeError, SafetensorError) as reason:
            raise CheckpointError(f"cannot write {folder}: {' '.join(str(reason).split())}.") from reason

    # The log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As stock, with every term, diagnostics, documents per second and memory."""
        steps = self.state.global_step - self._trained.since
        if "loss" in logs and self._trained.parts is not None and steps > 0:
            parts, (_, sequences) = self._trained.totals(self.accelerator, self._watched, over_processes=False)
            seconds = time.perf_counter() - self._logged_at - self._paused
            watched = self._diagnostics()
            logs |= {name: value / steps for name, value in parts.items()}
            logs |= {"docs_per_second": sequences / max(seconds, 1e-9), "memory_gib": _memory(self.args.device)}
            logs |= watched
            weights = zip(self._watched.parts, self._watched.weights, strict=True)
            logs |= {f"weight/{part.name}": weight for part, weight in weights if part.schedule is not None}
            self._count_from(self.state.global_step)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As stock. Its time is excluded from documents per second."""
        began = time.perf_counter()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._paused += time.perf_counter() - max(began, self._logged_at)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As stock, but tied weights, which FSDP returns several times, are written once."""
        if state_dict is not None:
            tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
            state_dict = {name: value for name, value in state_dict.items() if tied.get(name) not in state_dict}
        super()._save(output_dir, state_dict)

    def _diagnostics(self) -> dict[str, float]:
        """``JointLoss.diagnose`` on a few rows of the last micro-batch, without dropout."""
        rows = _first_rows(self._last_batch, DIAGNOSED_ROWS)
        model: Any = self.model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                labels, packed = aligned_labels(model, rows), aligned_packing(model, rows)
                watched = self.loss_fn.diagnose(logits_of(model, rows).float(), labels, segments=packed)
        finally:
            model.train(was_training)
        return {name: value.item() for name, value in watched.items()}

    def set_progress(self, progress: float) -> None:
        """Set the share of optimiser steps done, for terms with a schedule."""
        model: Any = self.model
        attached_loss(model).progress = self.loss_fn.progress = self._watched.progress = progress

    def _count_from(self, step: int) -> None:
        """Reset the sums and the clock for the next log."""
        self._trained = _Sums(since=step)
        self._logged_at, self._paused = time.perf_counter(), 0.0

    def _counts(self, batch: Any) -> Tensor:
        """The number of labels that count, and of texts that have one, [2]."""
        model: Any = self.model
        labels, packed = self._labels(batch), aligned_packing(model, batch)  # [B, T]
        texts = labels if packed is None else packed.labels  # [B, T] or [S, U]
        return torch.stack([(labels != IGNORE_INDEX).sum(), (texts != IGNORE_INDEX).any(-1).sum()]).float()

    def _labels(self, batch: Any) -> Tensor:
        model: Any = self.model
        return aligned_labels(model, batch)

    def _attach(self, model: Any) -> Any:
        """Attach the objective, plus ``ce`` with weight 0 if it has none, so that validation always reports it."""
        self._watched = self.loss_fn
        if all(part.name != "ce" for part in self.loss_fn.parts):
            self._watched = JointLoss(f"{self.loss_fn} + 0*ce")
        attach(model, self._watched.terms, memory=self.loss_fn.memory, segments=self._texts)
        for loss_fn in (attached_loss(model), self.loss_fn, self._watched):
            loss_fn.progress = 1.0  # an evaluation without training
        return model


class _Events(TrainerCallback):
    """Passes the first step to the trainer and the epoch to the sampler: Accelerate does not when it skips batches."""

    def __init__(self, trainer: NgramTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._count_from(state.global_step)
        if self.trainer.planned is not None and self.trainer.accelerator.num_processes > 1:
            reduction.share_weights(self.trainer.model)  # DDP, which is not used, would do this

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the progress, which weights with a schedule depend on."""
        self.trainer.set_progress(state.global_step / max(state.max_steps, 1))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs.get("train_dataloader")
        sampler = getattr(loader, "batch_sampler", None)
        while sampler is not None:
            if isinstance(sampler, LengthGrouped):
                sampler.set_epoch(int(state.epoch or 0))
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


class _Sums:
    """Sums of terms, tokens and sequences, kept on the device until they are read."""

    def __init__(self, since: int = 0) -> None:
        self.since = since
        self.parts: Tensor | None = None  # [parts]
        self.loss_fn: JointLoss | None = None
        self.counts: Any = 0  # [2]

    def add(self, parts: Tensor) -> None:
        self.parts = parts.clone() if self.parts is None else self.parts + parts  # [parts]

    def totals(
        self, accelerator: Any, loss_fn: JointLoss, over_processes: bool = True
    ) -> tuple[dict[str, float], list[float]]:
        """The sums as numbers: terms always over all processes, counts only if they are not summed already."""
        parts = accelerator.reduce(self.parts, "sum")  # [parts]
        counts = accelerator.reduce(self.counts, "sum") if over_processes else self.counts  # [2]
        return dict(zip((part.name for part in loss_fn.parts), parts.tolist(), strict=True)), counts.tolist()


def _seq2seq(args: Any) -> Any:
    """Add the attributes that ``Seq2SeqTrainer`` needs to arguments of any class."""
    if args is None:
        return Seq2SeqTrainingArguments(output_dir="tmp_trainer")
    for name in ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"):
        if not hasattr(args, name):
            setattr(args, name, None if name != "predict_with_generate" else False)
    return args


def _shard(model: Any, plugin: Any) -> None:
    """Shard each layer, and everything else with the root module."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if isinstance(model, FSDPModule):
        return
    options = {
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
        "reshard_after_forward": plugin.reshard_after_forward,
    }
    layers = set(plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or ())
    for module in reversed(list(model.modules())):  # inner ones first, as fully_shard requires
        if type(module).__name__ in layers:
            fully_shard(module, **options)
    fully_shard(model, **options)
    plugin.auto_wrap_policy = None  # Accelerate must not shard again: it would look for the layers by name


def _first_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """The first rows of a batch. What has no row for each row of the labels, such as lengths of documents, stays."""
    if not batch or len(batch["labels"]) <= rows:
        return batch
    size = len(batch["labels"])
    return {
        name: value[:rows] if isinstance(value, Tensor) and len(value) == size else value
        for name, value in batch.items()
    }


def _memory(device: torch.device) -> float:
    """Peak memory of this process in GiB: on the GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
