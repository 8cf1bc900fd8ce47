"""model, objective and rows → Hugging Face's ``Seq2SeqTrainer``, with exact optimiser steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from ngramloss.data.batches.plan import LengthGrouped, data_seed
from ngramloss.errors import UserError
from ngramloss.loss.terms import Term
from ngramloss.models.attached import candidates
from ngramloss.models.attached.heads import bare, has_encoder
from ngramloss.models.attached.segments import BESIDE, Unit
from ngramloss.trainers.exact_steps import ExactSteps


class NgramTrainer(ExactSteps, Seq2SeqTrainer):
    """Hugging Face's ``Seq2SeqTrainer`` with a joint objective whose denominators are counted over the whole step.

    Tokens *and* sequences are counted over the micro-batches and processes of an optimiser step, so every split of a
    batch gives the same gradient. Rows that Accelerate repeats to fill the last round of an epoch do not count, in
    training and in evaluation. The log contains every term, match rates, documents per second and memory. Evaluation
    returns ``eval_loss`` (the objective), ``eval_ce`` and every other term as exact means over the data set.

    For terms that compare candidates, such as ``rank``, rows have ``candidates``, lists of ids, and ``scores``;
    :class:`Padder` makes batches of them. Rows for evaluation may have none; then only the other terms are evaluated.

    Args:
        model: a Hugging Face model. The objective is attached to it.
        args: ``Seq2SeqTrainingArguments``, or ``TrainingArguments``.
        objective: as in :class:`JointLoss`.
        memory: as in :class:`JointLoss`.
        segments: as in :func:`attach`.
        kwargs: of ``Seq2SeqTrainer``, and ``teacher`` as in :func:`attach`.
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
        super().__init__(
            model=model, args=_seq2seq(args), objective=objective, memory=memory, segments=segments, **kwargs
        )
        columns: Any = self._signature_columns
        columns += candidates.KEYS  # not unused, although `forward` does not name them
        self._has_candidates: bool | None = None

    def call_model_init(self, trial: Any = None) -> Any:
        """The model that ``model_init`` creates, with the objective attached."""
        return self.attach_objective(super().call_model_init(trial))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """As stock, but ``group_by_length`` groups by whole steps: the split does not change which rows share one."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            step = self.get_total_train_batch_size(self.args)
            sampler = LengthGrouped(sampler.lengths, step=step, seed=data_seed(self.args))
            self.add_callback(_Epochs(sampler))
        return sampler

    def outputs_of(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """What the model returns for a micro-batch, which is kept for diagnostics."""
        if num_items_in_batch is not None and model.training:
            self._training_log.last_batch = inputs
        return super().outputs_of(model, inputs, num_items_in_batch)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None, **settings: Any
    ) -> Any:
        """As stock, without the labels of repeated rows."""
        has_candidates = inputs.get("candidates") is not None
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if generates and not has_encoder(bare(model)):
            raise UserError(
                "predict_with_generate would show a decoder-only model the reference, which is in the same row. "
                "Remove it, and add callbacks=[ng.ScoreTexts(examples)], which generates from the prompts."
            )
        if generates and has_candidates:
            raise UserError(
                "predict_with_generate cannot generate from rows with candidates. Leave them out of the "
                "rows for evaluation."
            )
        if generates and (beside := next((name for name in BESIDE if name in inputs), "")):
            raise UserError(
                f"predict_with_generate cannot generate from rows with {beside}. Remove it, and add "
                "callbacks=[ng.ScoreTexts(examples)], which generates from the sources alone."
            )
        if self.loss_fn.needs_candidates and self._has_candidates not in (None, has_candidates):
            raise UserError(
                "some rows for evaluation have candidates and others have none, so the terms that "
                "compare them have no mean. Give all rows candidates, or none."
            )
        self._has_candidates = has_candidates
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **settings)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, with the loss and every term an exact mean over the data set."""
        self._has_candidates = None
        return super().evaluation_loop(*args, **kwargs)


class _Epochs(TrainerCallback):
    """Passes the epoch to the sampler, which Accelerate does not where several processes skip batches."""

    def __init__(self, sampler: LengthGrouped) -> None:
        self._sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._sampler.set_epoch(int(state.epoch or 0))


def _seq2seq(args: Any) -> Any:
    """Add the attributes that ``Seq2SeqTrainer`` needs to arguments of any class."""
    if args is None:
        return Seq2SeqTrainingArguments(output_dir="tmp_trainer")
    for name in ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"):
        if not hasattr(args, name):
            setattr(args, name, None if name != "predict_with_generate" else False)
    return args
