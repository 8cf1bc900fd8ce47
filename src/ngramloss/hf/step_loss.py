"""outputs or hidden states of a micro-batch, and labels → its share of a step's joint loss, and the terms."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss import JointLoss
from ngramloss.objectives import Term
from ngramloss.stats import IGNORE_INDEX

Outputs = Any
"""A ``transformers.utils.ModelOutput``, a dictionary with attributes. This module does not import transformers."""


def compute_loss_func(
    objective: str | Iterable[Term] | Term, *, shift: bool | None = None, **options: Any
) -> Callable[..., Tensor]:
    """A ``compute_loss_func=`` for a stock Trainer, which computes the joint loss from the model's logits.

    Args:
        objective: as in :class:`JointLoss`.
        shift: whether position t predicts label t + 1. By default it is derived from the type of the outputs: no for
            an encoder-decoder, yes for a causal model.
        options: of :class:`JointLoss`.

    Returns:
        A picklable ``(outputs, labels, num_items_in_batch=None) → loss``.
    """
    loss_fn = JointLoss(objective, **options)
    if loss_fn.needs_candidates:
        raise UserError(
            f"{str(loss_fn)!r} compares candidates, but a compute_loss_func gets only the logits of the "
            "reference. Use attach(model, ...) or NgramTrainer, and batches with candidates."
        )
    return functools.partial(_loss_of_outputs, StepLoss(loss_fn), shift)


def is_compute_loss_func(function: Any) -> bool:
    """Whether a ``compute_loss_func`` was created by :func:`compute_loss_func`."""
    return isinstance(function, functools.partial) and function.func is _loss_of_outputs


def shifted(labels: Tensor) -> Tensor:
    """Labels for a decoder-only model: position t predicts token t + 1, the last position nothing, [B, T]."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


class LastCall(NamedTuple):
    """The record of one loss.

    Attributes:
        parts: each term, unweighted and detached.
        labels: its labels, aligned with the positions that predict them, [B, T].
        num_tokens: the denominator of token terms, if it was passed; then parts add up over a step's micro-batches.
        num_sequences: the denominator of the other terms, if it was passed.
    """

    parts: dict[str, Tensor]
    labels: Tensor | None = None
    num_tokens: Any = None
    num_sequences: Any = None


class _ThreadsCall(threading.local):
    """The last call of each thread. A copy or unpickled object starts empty."""

    call: LastCall | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ThreadsCall, ())


class StepLoss:
    """A joint loss for a trainer that counts the tokens of a step, and possibly its sequences."""

    def __init__(self, loss_fn: JointLoss) -> None:
        if loss_fn.reduction != "mean":
            raise UserError(
                f"a trainer needs one loss, so reduction must be 'mean', got {loss_fn.reduction!r}. For "
                "the loss of each row, call JointLoss(..., reduction='none') in your own loop."
            )
        self.loss_fn = loss_fn
        self.warned = all(part.per == "token" for part in loss_fn.parts)
        self._thread = _ThreadsCall()
        self._newest, self._newest_was_traced = LastCall({}), False

    @property
    def last(self) -> LastCall:
        """The last call in this thread; in compiled code, of any thread: it cannot write thread-local values."""
        return self._newest if self._newest_was_traced or self._thread.call is None else self._thread.call

    def _remember(self, call: LastCall) -> None:
        self._newest, self._newest_was_traced = call, torch.compiler.is_compiling()
        if not torch.compiler.is_compiling():
            self._thread.call = call

    def __call__(
        self,
        score: Callable[..., tuple[Tensor, dict[str, Tensor]]],
        labels: Tensor,
        *,
        num_items_in_batch: Any = None,
        num_tokens: Any = None,
        num_sequences: Any = None,
    ) -> Tensor:
        """Compute the loss with the step's denominators, and record its parts.

        Denominators that are passed are used unchanged. Otherwise, with N tokens in the step, ``ce`` is divided by N,
        and the other terms by (sequences in this micro-batch · N / tokens in this micro-batch): they are scaled by the
        micro-batch's share of the tokens.
        """
        if num_items_in_batch is not None and num_sequences is None:
            self._warn()
            real = labels != IGNORE_INDEX  # [B, T]
            step = num_items_in_batch
            items = step.to(labels.device) if isinstance(step, Tensor) else step  # []
            num_sequences = real.any(-1).sum() * items / real.sum().clamp_min(1)  # []
        num_tokens = num_items_in_batch if num_tokens is None else num_tokens
        loss, parts = score(labels=labels, num_tokens=num_tokens, num_sequences=num_sequences, return_parts=True)
        self._remember(LastCall(parts, labels, num_tokens, num_sequences))
        return loss

    def _warn(self) -> None:
        if self.warned or torch.compiler.is_compiling():
            return
        self.warned = True
        warnings.warn(
            "a stock Trainer counts the tokens of a step but not its sequences, so the sequence terms of "
            f"{str(self.loss_fn)!r} are scaled by each micro-batch's share of the tokens. This is exact only if all "
            "micro-batches have the same mean length. NgramTrainer counts both and is always exact; your own loop "
            "can pass num_tokens and num_sequences to the model. Silence this warning with "
            "warnings.filterwarnings('ignore', message='a stock Trainer').",
            stacklevel=2,
        )


def _loss_of_outputs(
    loss: StepLoss, shift: bool | None, outputs: Outputs, labels: Tensor | None, num_items_in_batch: Any = None
) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits  # [B, T, V]
    if labels is None or logits.shape[:2] != labels.shape:
        actual = "no labels" if labels is None else f"labels {list(labels.shape)}"
        raise UserError(
            f"expected one label for each position, got logits {list(logits.shape)} and {actual}. Trainer removes the "
            "labels before the model's forward, so the batch must contain `decoder_input_ids`: use "
            "DataCollatorForSeq2Seq(tokenizer, model=model)."
        )
    output_type = type(outputs).__name__
    if shift is None and "Seq2Seq" not in output_type and "Causal" not in output_type:
        raise UserError(
            f"cannot tell from outputs of type {output_type} whether position t predicts label t or t + 1. "
            "Use compute_loss_func(..., shift=False) or shift=True."
        )
    aligned = shifted(labels) if shift or (shift is None and "Causal" in output_type) else labels  # [B, T]
    score: Any = functools.partial(loss.loss_fn, logits)
    return loss(score, aligned.to(logits.device), num_items_in_batch=num_items_in_batch)
