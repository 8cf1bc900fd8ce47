"""model, objective and rows → TRL's ``SFTTrainer`` with that objective: one forward pass, exact optimiser steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import TokenStats
from ngramloss.loss.terms import Term
from ngramloss.loss.terms.term import Part
from ngramloss.models.attached.attach import attached_loss
from ngramloss.models.attached.callers import lost_boundaries
from ngramloss.models.attached.heads import bare
from ngramloss.models.attached.segments import BESIDE, KEY, Unit
from ngramloss.models.attached.step_loss import refuse_lost_boundaries
from ngramloss.trainers.exact_steps import ExactSteps
from ngramloss.version import warn_if_untested


class NgramSFTTrainer(ExactSteps, SFTTrainer):
    """TRL's ``SFTTrainer`` with a joint objective, computed from one forward pass without keeping the logits.

    Tokens *and* texts are counted over the micro-batches and processes of an optimiser step. In packed and padding-free
    rows every document is a text of its own. The log has what TRL logs, and every term, unweighted; a term with a
    schedule such as ``matches(2)@from(0.5)`` also its weight. ``mean_token_accuracy`` and ``entropy`` are means over
    tokens, where TRL averages the means of micro-batches.

    Args:
        model: as in ``SFTTrainer``: a model, also one of PEFT, or its name. The objective is attached to it.
        args: an ``SFTConfig``. Its ``loss_type`` has no effect, and ``"dft"`` is refused: it is an objective here.
        objective: as in :class:`JointLoss`.
        memory: as in :class:`JointLoss`.
        segments: as in :func:`attach`: ``"turns"`` makes each answer of a conversation a text of its own.
        kwargs: of ``SFTTrainer``, such as ``train_dataset`` and ``peft_config``.

    Raises:
        UserError: rows are packed in a way that does not show where a text begins, and a term reads whole texts.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        objective: str | Iterable[Term] | Term,
        memory: str = "fast",
        segments: Unit = "documents",
        **kwargs: Any,
    ) -> None:
        warn_if_untested("trl")
        if not isinstance(args, SFTConfig):
            raise TypeError(f"NgramSFTTrainer needs args=trl.SFTConfig(...), got {type(args).__name__}.")
        if args.loss_type == "dft":
            raise UserError("loss_type='dft' has no effect. Write it in the objective: objective='dft'.")
        refuse_lost_boundaries(JointLoss(objective), lost_boundaries(args))
        for rows in _data_sets(kwargs.get("train_dataset"), kwargs.get("eval_dataset")):
            if named := [name for name in (*BESIDE, KEY) if name in _columns(rows)]:
                raise UserError(
                    f"the rows have {named[0]}, and TRL's collator would drop them. Leave them out, or use "
                    "NgramTrainer with a collator that pads them."
                )
        args = copy.copy(args)
        args.loss_type = "nll"  # before TRL 1.15 the default replaces the model's forward
        super().__init__(model=model, args=args, objective=objective, memory=memory, segments=segments, **kwargs)
        # Rows that say how long their documents are, which TRL passes on only with `padding_free`.
        packed = ("seq_lengths" in _columns(rows) for rows in _data_sets(self.train_dataset, self.eval_dataset))
        if not self.padding_free and any(packed):
            refuse_lost_boundaries(self.loss_fn, "padding_free=False")
        inner = bare(self.model)
        if hasattr(inner, "router_aux_loss_coef"):  # TRL sets it in the configuration only
            inner.router_aux_loss_coef = self.router_aux_loss_coef

    def attach_objective(self, model: Any) -> Any:
        """Attach the objective, and watch what TRL logs of the predictions."""
        if self.loss_fn.needs_candidates:
            raise UserError(
                f"{str(self.loss_fn)!r} compares candidates, and rows of SFTTrainer have none. Use NgramTrainer, or "
                "leave these terms out."
            )
        super().attach_objective(model)
        attached_loss(model).watch(*WATCHED, needs=["entropy"])
        return model

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """As in ``ExactSteps``; also counts the tokens that were read, as TRL does."""
        batches, counts = super().get_batch_samples(epoch_iterator, num_batches, device)
        read = sum((_tokens_read(batch).to(device) for batch in batches), torch.zeros((), device=device))  # []
        self._total_train_tokens += int(self.accelerator.reduce(read, "sum"))
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return batches, counts

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As in ``ExactSteps``, with the inputs that TRL adds."""
        inputs = {name: value for name, value in inputs.items() if name != "_prediction_loss_only"}  # before TRL 1.15
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        outputs = self.outputs_of(model, inputs, num_items_in_batch)
        if self.aux_loss_enabled:
            router = self.accelerator.gather_for_metrics(outputs["aux_loss"].detach()).mean().item()
            self._metrics["train" if model.training else "eval"]["aux_loss"].append(router)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``ExactSteps``; also logs the tokens read so far, as TRL does."""
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        return super().evaluation_loop(*args, **kwargs)


def _data_sets(trained: Any, evaluated: Any) -> list[Any]:
    return [trained, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]


def _columns(dataset: Any) -> Iterable[str]:
    """The columns of a data set; of a stream that does not know them, those of its first row."""
    names: Iterable[str] | None = getattr(dataset, "column_names", None)
    if names is None and hasattr(dataset, "take"):  # reading it later starts with this row again
        names = next(iter(dataset.take(1)), {})
    return names or ()


def _tokens_read(batch: dict[str, Any]) -> Tensor:
    mask: Tensor | None = batch.get("attention_mask")  # [B, T]
    return torch.tensor(batch["input_ids"].numel()) if mask is None else mask.sum()


def _right(stats: TokenStats, labels: Tensor) -> Tensor:
    """How many labels of each row are the most probable token, [B]."""
    return (stats.best_token == labels).to(stats.lse.dtype).sum(-1)


def _entropy(stats: TokenStats, labels: Tensor) -> Tensor:
    """The sum of the entropies of each row, [B]."""
    assert stats.entropy is not None
    return stats.entropy.sum(-1)


WATCHED = (
    Part("mean_token_accuracy", _right, 0.0, "token", by_position=True),
    Part("entropy", _entropy, 0.0, "token", by_position=True),
)
"""What TRL logs of the predictions."""
