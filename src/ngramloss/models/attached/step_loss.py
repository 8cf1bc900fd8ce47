"""outputs or hidden states of a micro-batch, and labels → its share of a step's joint loss, and the terms."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss, Loss
from ngramloss.loss.stats import GIVEN, IGNORE_INDEX, Packing, packing
from ngramloss.loss.terms import Term
from ngramloss.models.attached.callers import find_caller
from ngramloss.models.attached.calls import Outputs, is_traced
from ngramloss.models.attached.heads import bare, dropouts
from ngramloss.models.attached.segments import (
    BESIDE,
    KEY,
    Unit,
    check_unit,
    mixes_documents,
    segments_of_batch,
    taken_beside,
)


def compute_loss_func(
    objective: str | Iterable[Term] | Term,
    *,
    model: Any = None,
    shift: bool | None = None,
    segments: Unit = "documents",
    **options: Any,
) -> Callable[..., Tensor]:
    """A ``compute_loss_func=`` for a stock Trainer, which computes the joint loss from the model's logits.

    Args:
        objective: as in :class:`JointLoss`.
        model: the model that is trained. A hook on its forward sees where the documents of packed rows are, and the
            weights of tokens, as in :func:`attach`, which the trainer does not pass on. Without it rows must not be
            packed.
        shift: whether position t predicts label t + 1. By default it is derived from the type of the outputs: no for
            an encoder-decoder, yes for a causal model.
        segments: as in :func:`attach`; ``"turns"`` needs no model.
        options: of :class:`JointLoss`.

    Returns:
        A picklable ``(outputs, labels, num_items_in_batch=None) → loss``. The copy has no model. It also takes what
        ms-swift passes, ``loss_scale`` and ``trainer``.
    """
    loss_fn = JointLoss(objective, **options)
    check_unit(segments)
    if loss_fn.needs_candidates:
        raise UserError(
            f"{str(loss_fn)!r} compares candidates, but a compute_loss_func gets only the logits of the "
            "reference. Use attach(model, ...) or NgramTrainer, and batches with candidates."
        )
    if missing := sorted(loss_fn.needs & GIVEN.keys()):
        raise UserError(
            f"{str(loss_fn)!r} reads {missing[0]}, but a compute_loss_func gets only logits and labels. Use "
            "attach(model, ...) or NgramTrainer."
        )
    if loss_fn.needs_teacher:
        raise UserError(
            f"{str(loss_fn)!r} compares with a teacher, but a compute_loss_func gets only the logits of the model. Use "
            "attach(model, ..., teacher=...) or NgramTrainer(..., teacher=...)."
        )
    return functools.partial(_loss_of_outputs, StepLoss(loss_fn), shift, segments, _Inputs(model))


def step_loss_of(function: Any) -> StepLoss | None:
    """The loss of a ``compute_loss_func`` that :func:`compute_loss_func` created; None if it did not."""
    is_ours = isinstance(function, functools.partial) and function.func is _loss_of_outputs
    return function.args[0] if is_ours else None


def see_inputs(function: Any, model: Any) -> None:
    """Let a function of :func:`compute_loss_func` that has no model see the inputs of this one."""
    inputs = function.args[3]
    if not inputs.hooked:
        inputs.see(model)


def shifted(labels: Tensor) -> Tensor:
    """Labels for a decoder-only model: position t predicts token t + 1, the last position nothing, [B, T]."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


class _Inputs:
    """What a hook on a model's forward saw in the last call of each thread. A copy sees nothing."""

    def __init__(self, model: Any = None) -> None:
        self._thread = threading.local()
        self.hooked = False
        if model is not None:
            self.see(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Inputs, ())

    def see(self, model: Any) -> None:
        """Hook this model."""
        self.model = inner = bare(model)
        self._names, self.hooked = tuple(inspect.signature(inner.forward).parameters), True
        inner.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._thread.seen = dict(zip(self._names, args, strict=False)) | kwargs
        return args, {name: value for name, value in kwargs.items() if name not in (KEY, *BESIDE)}

    def take(self) -> dict[str, Any]:
        """The arguments of the last call in this thread. Raises if there was none."""
        seen: dict[str, Any] | None = vars(self._thread).pop("seen", None)
        if seen is None:
            raise UserError(
                "the model given to compute_loss_func(..., model=...) did not make these outputs, so packed rows "
                "cannot be found. Give it the model that the trainer trains."
            )
        return seen


class LastCall(NamedTuple):
    """The record of one loss: its labels, [B, T]; with denominators that were passed, parts add up over a step."""

    parts: dict[str, Tensor]
    labels: Tensor | None = None
    packed: Packing | None = None
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
        self._evaluated = {True: loss_fn.without("twins"), False: loss_fn.without("candidates", "twins")}
        self._warned: set[str] = set()
        self._looked_at: set[tuple[frozenset[str], bool]] = set()
        self._drops: bool | None = None
        self._looked_for_padding = False
        self._thread = _ThreadsCall()
        self._newest, self._newest_was_traced = LastCall({}), False

    @property
    def last(self) -> LastCall:
        """The last call in this thread; in compiled code, of any thread: it cannot write thread-local values."""
        return self._newest if self._newest_was_traced or self._thread.call is None else self._thread.call

    def objective(self, model: Module, *, has_candidates: bool) -> JointLoss:
        """What a call computes: in evaluation, the terms that need no twins, and without candidates none of them."""
        if has_candidates and not self.loss_fn.needs_candidates:
            raise UserError(
                f"the inputs have candidates, but no term of {str(self.loss_fn)!r} compares them. Leave them "
                "out, or add a term such as rank."
            )
        if model.training:
            if self.loss_fn.needs_twins and self._drops is None:
                self._drops = any(dropouts(model))
            if self.loss_fn.needs_twins and not self._drops:
                self.warn_once(
                    f"this {type(model).__name__} has no dropout, so unless something else adds noise, such as "
                    f"NEFTune, twins are equal and {str(self.loss_fn)!r} learns nothing from comparing them. Set "
                    "dropout in the model's config, or that of its adapters. Silence this warning with "
                    "warnings.filterwarnings('ignore', message='this .* has no dropout')."
                )
            return self.loss_fn
        self._evaluated[has_candidates].progress = self.loss_fn.progress
        return self._evaluated[has_candidates]

    def sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each part of the last call as a sum over its tokens or sequences, and how many these are, [] each."""
        call, loss_fn = self.last, self.loss_fn
        if call.labels is None:
            return {}
        if call.parts.keys() != {part.name for part in loss_fn.parts}:
            evaluated = self._evaluated.values()
            loss_fn = next(each for each in evaluated if call.parts.keys() == {part.name for part in each.parts})
        counts = loss_fn.denominators(call.labels, call.packed).float()  # [parts]
        denominators, sums = {"token": call.num_tokens, "sequence": call.num_sequences}, {}
        for part, count in zip(loss_fn.parts, counts.unbind(), strict=True):
            given = denominators[part.per]
            sums[part.name] = call.parts[part.name] * (count if given is None else given), count
        return sums

    def means(self) -> dict[str, Tensor]:
        """Each part of the last call as a mean over its own tokens or sequences, whatever the loss is divided by."""
        if self.last.num_tokens is None and self.last.num_sequences is None:
            return self.last.parts
        return {name: value / count.clamp_min(1) for name, (value, count) in self.sums().items()}

    def __call__(
        self,
        score: Callable[..., Loss],
        labels: Tensor,
        packed: Packing | None = None,
        *,
        num_items_in_batch: Any = None,
        num_tokens: Any = None,
        num_sequences: Any = None,
    ) -> Tensor:
        """Compute the loss with the step's denominators, unchanged if passed, and record its parts.

        Otherwise, with N tokens in the step, ``ce`` is divided by N, other terms by (sequences in this micro-batch · N
        / tokens in this micro-batch): they are scaled by its share of the tokens.
        """
        if num_items_in_batch is not None and num_sequences is None:
            if any(part.per != "token" for part in self.loss_fn.parts):
                self.warn_once(
                    "a stock Trainer counts the tokens of a step but not its sequences, so the sequence terms of "
                    f"{str(self.loss_fn)!r} are scaled by each micro-batch's share of the tokens. This is exact only "
                    "if all micro-batches have the same mean length. NgramTrainer counts both and is exact; your own "
                    "loop can pass num_tokens and num_sequences to the model. Silence this warning with "
                    "warnings.filterwarnings('ignore', message='a stock Trainer')."
                )
            real = (labels if packed is None else packed.labels) != IGNORE_INDEX  # [B, T] or [S, U]
            tokens = (labels != IGNORE_INDEX).sum().clamp_min(1)  # []
            step = num_items_in_batch
            items = step.to(labels.device) if isinstance(step, Tensor) else step  # []
            num_sequences = real.any(-1).sum() * items / tokens  # []
        num_tokens = num_items_in_batch if num_tokens is None else num_tokens
        counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
        loss, parts = score(labels=labels, segments=packed, **counts)
        self._newest, self._newest_was_traced = LastCall(parts, labels, packed, **counts), torch.compiler.is_compiling()
        if not self._newest_was_traced:
            self._thread.call = self._newest
        return loss

    def warn_of_mixed_documents(self, model: Any, inputs: Mapping[str, Any], labels: Tensor, *, cached: bool) -> None:
        """Warn once if the model does not keep packed documents apart; values are read once for the same names."""
        if torch.compiler.is_compiling() or (names := (frozenset(inputs), cached)) in self._looked_at:
            return
        self._looked_at.add(names)
        if mixes_documents(model, inputs, labels, cached=cached):
            self.warn_once(
                f"the attention of this {type(model).__name__} ({model.config._attn_implementation}) sees all "
                "documents of a packed row. It keeps them apart only if the batch has `position_ids` that begin again "
                "at 0, no `attention_mask`, and use_cache=False. Silence this warning with "
                "warnings.filterwarnings('ignore', message='the attention of this')."
            )

    def warn_of_padding(self, model: Any, labels: Tensor) -> None:
        """Warn if the first batch has labels that are padding: a model would learn to write it."""
        if self._looked_for_padding or is_traced(labels):
            return
        self._looked_for_padding = True
        config = model.config
        pad, ends = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
        own = [getattr(config, "bos_token_id", None), *(ends if isinstance(ends, list) else [ends])]
        if pad is None or pad in own:  # then it is a token of texts, too
            return
        if count := int((labels == pad).sum()):
            self.warn_once(
                f"{count:,} of {labels.numel():,} labels of this batch are the padding token, {pad}, and count in the "
                f"loss. Mask them: labels.masked_fill(labels == {pad}, -100)."
            )

    def warn_once(self, message: str) -> None:
        """Warn, unless the same was said before or this code is compiled."""
        if message not in self._warned and not torch.compiler.is_compiling():
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)


def term_of_whole_texts(loss_fn: JointLoss) -> str:
    """A term for which it matters where a text begins and ends; empty if there is none."""
    return next((part.name for part in loss_fn.parts if not part.by_position), "")


def refuse_lost_boundaries(loss_fn: JointLoss, setting: str) -> None:
    """Raise if a setting of the trainer loses where documents begin in packed rows, and a term reads whole texts."""
    whole = term_of_whole_texts(loss_fn)
    if whole and setting:
        instead = {"packing_strategy='wrapped'": "'bfd'", "eval_packing=True": "eval_packing=False"}
        raise UserError(
            f"the trainer's {setting} puts documents into rows without saying where they begin, and {whole} reads "
            f"whole texts. Use {instead.get(setting, 'padding_free=True')}, or only terms per token such as ce."
        )


def _loss_of_outputs(
    loss: StepLoss,
    shift: bool | None,
    texts: Unit,
    inputs: _Inputs,
    outputs: Outputs,
    labels: Tensor | None,
    num_items_in_batch: Any = None,
    *,
    loss_scale: Tensor | None = None,
    trainer: Any = None,
) -> Tensor:
    caller = find_caller()
    if factor := caller.label_smoothing:
        raise UserError(
            f"label_smoothing_factor={factor} has no effect beside compute_loss_func. Remove it, and write it in the "
            f"objective: ce(smoothing={factor})."
        )
    refuse_lost_boundaries(loss.loss_fn, caller.lost_boundaries)
    caller.refuse_predictions_of_twins()
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
    causal = "Seq2Seq" not in output_type
    shift = causal if shift is None else shift
    aligned = (shifted(labels) if shift else labels).to(logits.device)  # [B, T]
    given = inputs.take() if inputs.hooked else {}
    if causal and not inputs.hooked and term_of_whole_texts(loss.loss_fn):
        loss.warn_once(
            "compute_loss_func sees only logits and labels. If the trainer packs several documents into a row, the "
            f"terms of {str(loss.loss_fn)!r} would take them for one text. Pass the model, "
            "compute_loss_func(..., model=model), and packed rows are found. Silence this warning with "
            "warnings.filterwarnings('ignore', message='compute_loss_func sees')."
        )
    beside = taken_beside(given, shift=shift)  # [B, T] each
    if loss_scale is not None:  # ms-swift has aligned and flattened it
        beside = {"weights": loss_scale.reshape(aligned.shape)}  # [B, T]
    packed = None
    if term_of_whole_texts(loss.loss_fn):
        if given.get("logits_to_keep") is not None or getattr(
            getattr(trainer, "args", None), "use_logits_to_keep", False
        ):
            raise UserError(
                f"logits_to_keep removes positions before the loss, and {str(loss.loss_fn)!r} reads whole texts. With "
                "ms-swift, set --use_logits_to_keep false."
            )
        segments = segments_of_batch(given, aligned, causal=causal, shift=shift, texts=texts)  # [B, T]
        packed = None if segments is None else packing(aligned, segments)
        if causal and packed is not None and inputs.hooked:
            cached = getattr(outputs, "past_key_values", None) is not None
            loss.warn_of_mixed_documents(inputs.model, given, aligned, cached=cached)
    score = functools.partial(loss.loss_fn.with_parts, logits, **beside)
    return loss(score, aligned, packed, num_items_in_batch=num_items_in_batch)
