"""a Hugging Face model and an objective → the same model, which returns the joint loss when it gets ``labels``."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from ngramloss.errors import UserError
from ngramloss.hf.adapted_heads import adapter_state, head_input, without_dropout
from ngramloss.hf.beside import taken_beside, without_beside
from ngramloss.hf.calls import (
    REPLACEMENT,
    AttachedForward,
    Capture,
    HeadHook,
    Ran,
    hooks_of,
    loss_made_elsewhere,
    outputs_are_read,
    refuse_predictions_of_twins,
)
from ngramloss.hf.candidates import (
    CandidateRows,
    candidate_rows,
    decoder_that_repeats,
    repeat_sources,
    without_candidates,
)
from ngramloss.hf.heads import Head, bare, has_encoder, head_module, head_of, raise_unless_equal
from ngramloss.hf.segments import KEY, POSITIONS, Unit, check_unit, segments_of_batch
from ngramloss.hf.shared_prompts import on_the_right
from ngramloss.hf.step_loss import LastCall, Outputs, StepLoss, shifted, step_loss_of
from ngramloss.hf.teachers import TeacherModel, teacher_model
from ngramloss.loss import JointLoss
from ngramloss.stats import (
    IGNORE_INDEX,
    CandidateStats,
    Labelled,
    Packing,
    Texts,
    TokenStats,
    at_positions,
    labelled,
    packing,
    token_stats,
    token_stats_from_hidden,
)
from ngramloss.steps.joined import TEXT_NUMBERS
from ngramloss.terms import Term
from ngramloss.version import warn_if_untested

ModelT = TypeVar("ModelT", bound=Module)


def attach(
    model: ModelT,
    objective: str | Iterable[Term] | Term,
    *,
    logits: bool = False,
    shift: bool | None = None,
    segments: Unit = "documents",
    teacher: Any = None,
    **options: Any,
) -> ModelT:
    """Make ``model(..., labels=...)`` return the joint loss. Without labels nothing changes.

    The model's own forward runs as before, but its head gets only one position, and the loss is computed from the
    head's whole input. So with labels, ``outputs.logits`` is ``None``, unless a Hugging Face trainer reads it. If the
    objective cannot run, because a library replaced ``model.forward`` or a trainer computes the loss itself, the call
    raises an error. Attaching again replaces the objective.

    Rows in which a trainer packs several documents are unpacked for the objective: each document counts as a text of
    its own. They are found by ``segments`` in the batch (a number for each label; equal neighbours belong together), or
    by what trainers of decoder-only models pass: ``position_ids``, ``cu_seq_lens_q``, ``seq_idx``,
    ``packed_seq_lengths``, or an ``attention_mask`` with numbers of documents. Finding them reads three numbers on the
    host for each batch.

    For a decoder-only model, only positions with a label go through the head. Finding them reads four numbers on the
    host for each batch. If the inputs have ``label_positions`` [S, T], nothing is read: then ``labels`` [S, T] are one
    text a row, already aligned, and these are the indices, among all positions of the batch, of those that predict
    them. Such a batch must be padded on the right: masks of its padding are left out, so that attention takes its
    fastest kernel. Candidates of a decoder-only model are in the same rows or in further ones, with
    ``candidate_positions`` [B, K, T]. If several texts of a row share its prompt, the inputs also have ``position_ids``
    and ``text_numbers`` [R, L]: 0 for the prompt, a number for each text, −1 for padding.

    ``weights`` in the batch, a number for each label as it is passed, weight single tokens, as ``weights`` of
    :class:`JointLoss` do; ``loss_weights`` and ``loss_scale`` are other names of them. A stock Trainer passes them on
    with ``remove_unused_columns=False``, and otherwise drops them silently.

    An objective with a term that compares candidates, such as ``rank``, needs two more inputs in training:
    ``candidates``, label ids [B, K, T], and ``gains`` [B, K], what each candidate scores. A candidate without
    labels is absent. All tokens of a candidate count in its log-probability and its length, special ones too. The
    encoder runs once for a source. Candidates are further rows of the decoder, which is what other outputs of the
    decoder show; their logits are computed in blocks, and not kept. Inside ``torch.compile`` of the whole model they
    are. In evaluation without candidates, the loss and its parts are those of the other terms. A stock Trainer passes
    such inputs on with ``remove_unused_columns=False``. Terms of the model's own greedy text, such as
    ``precision(2):student``, need that text among the candidates, and ``greedy``, bool [B, K], which is true for it.
    All other terms leave it out. ``policy(baseline=greedy)`` needs ``baseline`` [B], what the greedy text scores.

    ``margin`` needs one more input, ``lm_logp``: a log-probability for each label, in the shape of ``labels``.
    ``future`` reads the further streams of a ProphetNet, which the model itself computes.

    An objective with a term that compares twins, such as ``rdrop``, needs batches in which rows 2i and 2i + 1 are the
    same example: :func:`ngramloss.twins` makes a collator of them. In evaluation such terms are left out.

    ``distill`` and ``keep`` compare with a ``teacher``, which reads each batch too, without gradient, in training and
    evaluation. It is put into evaluation mode, and moved to the device of the model. For ``keep`` it is the model
    before training: a copy, or, if only adapters are trained, the model itself, which then runs without them.

    Args:
        model: a Hugging Face model, bare or inside ``torch.compile``, DDP or PEFT. Changed in place.
        objective: as in :class:`JointLoss`.
        logits: return ``outputs.logits`` in evaluation, computed by the model's own head. A Hugging Face trainer with
            ``compute_metrics``, or its ``predict``, gets them in any case.
        shift: whether position t predicts label t + 1. By default it is derived from the model: no for an
            encoder-decoder, yes for a decoder-only model.
        segments: what is a text: ``"documents"``, or ``"turns"``, every run of labels by itself, such as the turns of
            an assistant in one conversation.
        teacher: a Hugging Face model with the same vocabulary, for terms that compare with one.
        options: of :class:`JointLoss`.

    Returns:
        The same model.

    Raises:
        TypeError, ValueError: the model is not supported; the message gives the reason.
    """
    warn_if_untested("transformers")
    if isinstance(model, (str, Path)):
        raise TypeError(f"attach takes a model, got {str(model)!r}. Load it first, with from_pretrained.")
    inner = bare(model)
    module = head_module(inner)
    head_of(inner, module)
    _refuse_decoder_that_looks_ahead(inner)
    _refuse_z_loss(inner)
    loss_fn = JointLoss(objective, **options)
    loss_fn.refuse_terms_of_logits("attach")
    _refuse_missing_streams(inner, loss_fn)
    causal = not has_encoder(inner)
    decoder = decoder_that_repeats(inner) if loss_fn.needs_candidates and not causal else None
    check_unit(segments)
    state = _State(loss_fn, logits=logits, shift=_shifts(inner) if shift is None else shift, texts=segments)
    state.teacher = teacher_model(teacher, model, loss_fn)
    state.takes_cache = "use_cache" in inspect.signature(inner.forward).parameters
    if not hasattr(type(inner), "_ngramloss_base"):
        if "forward" in vars(inner):
            raise UserError(
                f"the forward of this {type(inner).__name__} was replaced on the object itself (Accelerate does that "
                "in `prepare` and with a `device_map`, TRL in its trainers), so attach would have no effect. Attach "
                "first, then prepare; with TRL, do not attach, but train with ng.NgramSFTTrainer(..., objective=...)."
            )
        inner.__class__ = _attached_class(inner.__class__)
    previous = _state(inner)
    if previous is not None:
        previous.unhook()
    state.watch(module)
    state.repeat(decoder)
    inner._ngramloss = state
    return model


def detach(model: ModelT) -> ModelT:
    """Restore the model's own loss. A model without an objective is left unchanged."""
    inner = bare(model)
    state = _state(inner)
    if state is not None:
        state.unhook()
        del inner._ngramloss
        # FSDP may have added its own class above ours, and Accelerate a forward that calls ours. Without a state our
        # class does nothing, so it may stay.
        if REPLACEMENT not in vars(inner):
            inner.__class__ = vars(type(inner)).get("_ngramloss_base", type(inner))
    return model


def last_parts(model: Module) -> dict[str, Tensor]:
    """Each term of the last loss, unweighted and detached, as ``{"ce": ..., "matches(2)": ...}``, for logging.

    The values belong to the last call in this thread. They are means over the tokens or sequences of this batch, also
    where the loss is divided by those of a step of several batches, as a Trainer does.
    """
    return _known_state(model).loss.means()


def attached_loss(model: Module) -> JointLoss:
    """The objective of an attached model."""
    return _known_state(model).loss.loss_fn


def last_call(model: Module) -> LastCall:
    """The record of the last loss that this thread computed with the model."""
    return _known_state(model).loss.last


def attached_step_loss(model: Module) -> StepLoss | None:
    """The objective of a model with the record of its last call; None if none is attached."""
    state = _state(bare(model))
    return None if state is None else state.loss


def aligned_labels(model: Module, inputs: Mapping[str, Any]) -> Tensor:
    """The labels of a batch, aligned with the positions that predict them, [B, T]."""
    if inputs.get(POSITIONS) is not None:
        labels: Tensor = inputs["labels"]  # [S, T]
        return labels
    given: Tensor | None = inputs.get("shift_labels")  # [B, T]
    return _known_state(model).aligned(inputs["labels"]) if given is None else given


def aligned_given(model: Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers beside the labels of a batch, aligned like these, [B, T] each."""
    return taken_beside(inputs, shift=_known_state(model).shift and inputs.get(POSITIONS) is None)


def aligned_packing(model: Module, inputs: Mapping[str, Any]) -> Packing | None:
    """Where the texts of a batch with packed rows are; None if every row is one text."""
    if inputs.get(POSITIONS) is not None:
        return None
    return _known_state(model).labelled(bare(model), inputs, aligned_labels(model, inputs)).packed


def logits_of(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The logits of the model's own head for a batch with labels, [B, T, V]."""
    inputs = without_beside(without_candidates(inputs))
    inputs = {name: value for name, value in inputs.items() if name not in ("shift_labels", KEY)}
    labels, positions = inputs.pop("labels"), inputs.pop(POSITIONS, None)  # [B, T]
    if has_encoder(bare(model)):
        _add_decoder_inputs(bare(model), inputs, labels)
    else:
        inputs.setdefault("use_cache", False)
    run = _call if positions is None else on_the_right(_call)
    logits: Tensor = run(model, **inputs, return_dict=True).logits  # [B, T, V]
    return logits if positions is None else at_positions(logits, positions)


class _State:
    """The state of an attached model, in one attribute that is not a module, parameter or buffer."""

    def __init__(self, loss_fn: JointLoss, *, logits: bool, shift: bool, texts: Unit) -> None:
        self.loss = StepLoss(loss_fn)
        self.texts = texts
        self.evaluated = {True: loss_fn.without("twins"), False: loss_fn.without("candidates", "twins")}
        self.logits = logits
        self.shift = shift
        self.checked: tuple[object, ...] = ()
        self.ran, self.hook = Ran(), HeadHook()
        self.head: Module | None = None
        self.handle: Any = None
        self.repeating: Any = None
        self.teacher: TeacherModel | None = None
        self.looked_for_padding = False
        self.takes_cache = False

    def warn_of_padding(self, model: Any, labels: Tensor) -> None:
        """Warn if the first batch has labels that are padding: a model would learn to write it."""
        if self.looked_for_padding or _is_traced(labels):
            return
        self.looked_for_padding = True
        config = model.config
        pad, ends = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
        own = [getattr(config, "bos_token_id", None), *(ends if isinstance(ends, list) else [ends])]
        if pad is None or pad in own:  # then it is a token of texts, too
            return
        if count := int((labels == pad).sum()):
            warnings.warn(
                f"{count:,} of {labels.numel():,} labels of this batch are the padding token, {pad}, and are learnt. "
                f"Labels of -100 do not count: labels.masked_fill(labels == {pad}, -100).",
                stacklevel=4,
            )

    def aligned(self, labels: Tensor) -> Tensor:
        """The labels, aligned with the positions that predict them, [B, T]."""
        return shifted(labels) if self.shift else labels

    def labelled(self, model: Any, inputs: Mapping[str, Any], labels: Tensor) -> Labelled:
        """Which positions have labels, and the texts that these form.

        Prompts have no labels, so for a decoder-only model only positions with a label go through the head. Finding
        them reads four numbers on the host, which compiled or captured code cannot do.

        Args:
            model: the bare model.
            inputs: the arguments of its forward.
            labels: aligned with the positions that predict them, [B, T].
        """
        causal = not has_encoder(model)
        segments = None  # [B, T]
        if not all(part.by_position for part in self.loss.loss_fn.parts):  # otherwise texts would not matter
            segments = segments_of_batch(inputs, labels, causal=causal, shift=self.shift, texts=self.texts)
        if causal and labels.numel() and not _is_traced(labels):
            return labelled(labels, segments)
        return Labelled(None, None if segments is None else packing(labels, segments))

    def watch(self, head: Module | None) -> None:
        """Hook this head instead of the previous one. Our hook runs last, so it captures what the head really gets."""
        # While torch.compile traces, leave the hooks alone: it does not see hooks added later either.
        if head is self.head and (head is None or torch.compiler.is_compiling() or self._is_last_hook(head)):
            return
        if self.handle is not None:
            self.handle.remove()
        self.head, self.handle = head, head and head.register_forward_pre_hook(self.hook)

    def _is_last_hook(self, head: Module) -> bool:
        return bool(next(reversed(head._forward_pre_hooks), None) == self.handle.id)

    def repeat(self, decoder: Module | None) -> None:
        """Give a decoder that gets candidates each source as often as it needs it."""
        if decoder is not None:
            self.repeating = decoder.register_forward_pre_hook(repeat_sources, with_kwargs=True)

    def unhook(self) -> None:
        """Remove all hooks."""
        self.watch(None)
        if self.repeating is not None:
            self.repeating.remove()

    def objective(self, model: Module, inputs: Mapping[str, Any]) -> JointLoss:
        """What this call computes: in evaluation, the terms that need no twins, and without candidates none of them."""
        loss_fn, given = self.loss.loss_fn, inputs.get("candidates") is not None
        if given and not loss_fn.needs_candidates:
            raise UserError(
                f"the inputs have candidates, but no term of {str(loss_fn)!r} compares them. Leave them "
                "out, or add a term such as rank."
            )
        if model.training:
            if loss_fn.needs_twins:
                self.loss.warn_without_dropout(model)
            return loss_fn
        self.evaluated[given].progress = loss_fn.progress
        return self.evaluated[given]

    def forward(self, model: Any, forward: Callable[..., Outputs], inputs: dict[str, Any]) -> Outputs:
        """Run the model's own forward, with the joint loss instead of its own."""
        _refuse_loss_made_elsewhere(self, labels=True)
        self.loss.refuse_untraced_packing()
        refuse_predictions_of_twins()
        _refuse_cut_logits(inputs)
        given = aligned_given(model, inputs)  # [B, T] each
        inputs = without_beside(inputs)
        labels, aligned = inputs.pop("labels"), inputs.pop("shift_labels", None)  # [B, T]
        self.warn_of_padding(model, labels)
        counts = {name: inputs.pop(name, None) for name in ("num_items_in_batch", "num_tokens", "num_sequences")}
        wants_dict = inputs.pop("return_dict", None)
        loss_fn = self.objective(model, inputs)
        candidates = candidate_rows(model, inputs, labels, decoder_inputs)
        places = inputs.pop(POSITIONS, None)  # [S, T]
        _refuse_router_loss(model, inputs)
        asks_for_router_loss = _asks_for_router_loss(model, inputs)
        if places is not None:
            positions, packed, aligned = None, None, labels  # [S, T]
            forward = on_the_right(forward)
        else:
            _refuse_shared_prompts(inputs)
            _refuse_other_lengths(model, inputs, labels)
            aligned = self.aligned(labels) if aligned is None else aligned  # [B, T]
            positions, packed = self.labelled(model, inputs, aligned)
        inputs.pop(KEY, None)
        if self.takes_cache and inputs.get("use_cache") is None:
            inputs["use_cache"] = False  # with a cache, transformers does not look for packed documents
        if packed is not None and not has_encoder(model):
            cached = bool(inputs.get("use_cache")) or inputs.get("past_key_values") is not None
            self.loss.warn_of_mixed_documents(model, inputs, aligned, cached=cached)
        compared_with = self._teachers(model, inputs, labels, places)
        if has_encoder(model):
            _add_decoder_inputs(model, inputs, labels, candidates)
        if (self.logits and not model.training) or outputs_are_read(torch.compiler.is_compiling()):
            outputs = forward(model, **inputs, return_dict=True)
            fields, made, head = dict(outputs), outputs.logits, None  # [B, T, V]
            streams = outputs.get("logits_ngram")  # [B, n − 1, T, V]
        else:
            outputs, made, streams, head = self._captured(model, forward, inputs)  # [B, T, D], [B, n − 1, T, D]
            fields = {name: value for name, value in outputs.items() if not name.startswith("logits")}
        compared: CandidateStats | None = None
        if candidates is not None:
            made, others = candidates.split(made, labels.shape[-1], places)  # [B, T, …], [B·K, T', …]
            compared = _candidate_stats(loss_fn, candidates, others, labels, head)
        elif places is not None:
            made = at_positions(made, places)  # [S, T, …]
        given |= _stream_stats(loss_fn, streams, aligned, head)
        if head is None:
            fields["logits"] = made
            more: dict[str, Any] = {**given, **compared_with}
            score = functools.partial(loss_fn.with_parts, made, candidates=compared, **more)
        else:
            if positions is not None:
                positions = positions.to(made.device)  # [N]
            settings: dict[str, Any] = {**head._asdict(), "candidates": compared, "positions": positions}
            settings |= {**given, **compared_with}
            score = functools.partial(loss_fn.from_hidden_with_parts, made, settings.pop("weight"), **settings)
        if packed is not None:
            packed = Packing(*(part.to(made.device) for part in packed))
        aligned = aligned.to(made.device)  # [B, T]
        loss = self.loss(score, aligned, packed, **counts)  # []
        if asks_for_router_loss:
            counted = next(
                (counts[name] for name in ("num_tokens", "num_items_in_batch") if counts[name] is not None), None
            )
            loss = loss + _router_loss(model, outputs, aligned, counted)
        self.ran.note(loss)
        replaced = type(outputs)(**{**fields, "loss": loss})
        if wants_dict is None:
            wants_dict = getattr(model.config, "return_dict", True)
        return replaced if wants_dict else replaced.to_tuple()

    def _teachers(self, model: Any, inputs: dict[str, Any], labels: Tensor, places: Tensor | None) -> dict[str, Any]:
        """What the teacher predicts for a batch, as an argument of the loss; nothing without a teacher.

        Args:
            model: the bare model.
            inputs: of the model's forward, without candidates.
            labels: [B, T].
            places: the positions that are read, if not all, [S, T].
        """
        if self.teacher is None:
            return {}
        given, run = dict(inputs), _call
        if has_encoder(bare(self.teacher.model)):
            _add_decoder_inputs(bare(self.teacher.model), given, labels)
        elif places is not None:
            run = on_the_right(_call)
        return {"teacher": self.teacher.predictions(given, places, run, labels.device)}

    def _captured(
        self, model: Module, forward: Callable[..., Outputs], inputs: dict[str, Any]
    ) -> tuple[Outputs, Tensor, Tensor | None, Head]:
        """The model's outputs, with logits of only one position; the head's whole input, [B, T, D]; that of the further
        streams of a ProphetNet if the objective reads them, [B, n − 1, T, D]; the head."""
        if getattr(model, "_is_replica", False):
            raise UserError(
                "attach does not support torch.nn.DataParallel, which runs copies of the model in threads. Start one "
                "process for each GPU with torchrun, or use one GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        module = head_module(model)
        self.watch(module)
        capture = Capture(module)
        before = self.hook.begin(capture)
        # A hook on the output may behave differently at every call.
        now = hooks_of(module), adapter_state(module)
        checks = not torch.compiler.is_compiling() and (now != self.checked or now[0][-1])
        try:
            with without_dropout(module) if checks else nullcontext():
                outputs = forward(model, **inputs, return_dict=True)
        finally:
            self.hook.begin(before)
        hidden = capture.hidden  # [B, T, D], ProphetNet's [B, n, T, D]
        if hidden is None:
            raise UserError(
                f"{type(model).__name__} did not call its output head, {type(module).__name__}, in its forward, so "
                "attach cannot read the head's input. Use compute_loss_func(...), or JointLoss on the logits."
            )
        head = head_of(model, module)
        device, streams = head.weight.device, None
        if hidden.ndim == 4 and not self.loss.loss_fn.needs.isdisjoint(STREAM_STATS):
            streams = head_input(module, hidden[:, 1:].to(device))  # [B, n − 1, T, D]
        hidden = hidden[:, 0] if hidden.ndim == 4 else hidden  # [B, T, D], ProphetNet's first stream
        if checks:
            with without_dropout(module):
                raise_unless_equal(model, outputs.get("logits"), head_input(module, hidden[:, :1]), head)
            self.checked = now
        return outputs, head_input(module, hidden.to(device)), streams, head


def _call(model: Any, **inputs: Any) -> Outputs:
    return model(**inputs)


def _is_traced(tensor: Tensor) -> bool:
    """Whether this code is compiled or captured, so that nothing can be read on the host."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _known_state(model: Module) -> _State:
    state = _state(bare(model))
    if state is None:
        raise UserError(f"this {type(bare(model)).__name__} has no objective. Call attach(model, ...) first.")
    return state


def _state(model: Module) -> _State | None:
    state = getattr(model, "_ngramloss", None)
    return state if isinstance(state, _State) else None


@functools.cache
def _attached_class(base: Any) -> Any:
    """A subclass that looks like the model's own class: same name, same signature of forward, same checkpoints."""
    names = tuple(inspect.signature(base.forward).parameters)[1:]

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(names[: len(args)], args, strict=True)) | kwargs

    def expected(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran | None:
        state = _state(model)
        return state.ran if state is not None and named(args, kwargs).get("labels") is not None else None

    def forward(self: Module, *args: Any, **kwargs: Any) -> Outputs:
        state = _state(self)
        if state is None:
            return base.forward(self, *args, **kwargs)
        if expected(self, args, kwargs) is None:
            _refuse_loss_made_elsewhere(state, labels=False)
            return base.forward(self, *args, **kwargs)
        return state.forward(self, base.forward, named(args, kwargs))

    # Not functools.wraps: Accelerate follows __wrapped__ to unwrap a model, and would find the original forward.
    forward.__name__, forward.__qualname__, forward.__doc__ = "forward", base.forward.__qualname__, base.forward.__doc__
    forward.__module__ = base.forward.__module__
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]

    def reduce(self: Module, protocol: Any) -> tuple[Any, ...]:
        _, (_, *arguments), *state = base.__reduce_ex__(self, 2)
        return (_unpickled, (base, *arguments), *state)

    return type(
        base.__name__,
        (base,),
        {
            "forward": AttachedForward(forward, expected),
            "__reduce_ex__": reduce,
            "_ngramloss_base": base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
        },
    )


def _unpickled(base: Any, *arguments: Any) -> Module:
    """Create an empty attached model for pickle and deepcopy, which cannot find its class by name."""
    attached = _attached_class(base)
    empty: Module = attached.__new__(attached, *arguments)
    return empty


def _shifts(model: Any) -> bool:
    """Whether the model's own loss compares position t with label t + 1."""
    if has_encoder(model):
        return False
    forwards = [
        inspect.unwrap(vars(parent)["forward"])
        for parent in type(model).__mro__
        if isinstance(vars(parent).get("forward"), FunctionType)
    ]
    usual = any("loss_function" in forward.__code__.co_names for forward in forwards)
    if usual and model.loss_type in (None, "ForCausalLM", "ForConditionalGeneration"):
        return True
    raise UserError(
        f"cannot tell whether position t of {type(model).__name__} predicts label t or t + 1: it is neither an "
        "encoder-decoder nor a causal model with the usual loss. Use attach(..., shift=True) if the labels are the "
        "input ids, or shift=False if they are already aligned with the predictions."
    )


def _refuse_loss_made_elsewhere(state: _State, *, labels: bool) -> None:
    setting = loss_made_elsewhere(state.ran.token, labels, step_loss_of)
    if setting:
        name, _, factor = setting.partition("=")
        instead = (
            f"and write it in the objective: ce(smoothing={factor})"
            if factor
            else ("or detach(model) and use compute_loss_func=ng.compute_loss_func(...)")
        )
        raise UserError(
            f"the trainer's {name} computes the loss from the logits, so the attached objective "
            f"{str(state.loss.loss_fn)!r} would not run. Remove {name}, {instead}."
        )


def _refuse_decoder_that_looks_ahead(model: Any) -> None:
    """Refuse UMT5 of some versions of transformers: every position sees the label that it should predict."""
    if getattr(model.config, "model_type", "") != "umt5" or not model.config.is_encoder_decoder:
        return
    if not getattr(model.get_decoder().block[0].layer[0].SelfAttention, "is_causal", True):
        raise UserError(
            "this version of transformers lets the decoder of UMT5 see later tokens, so it would learn to "
            "copy its labels. Update transformers to 5.18 or newer."
        )


def _refuse_cut_logits(inputs: dict[str, Any]) -> None:
    limit = inputs.get("logits_to_keep")
    if isinstance(limit, Tensor) or limit:
        raise UserError("logits_to_keep removes positions before the loss. Do not pass it together with labels.")


def _refuse_shared_prompts(inputs: dict[str, Any]) -> None:
    if inputs.get(TEXT_NUMBERS) is not None:
        raise UserError(f"the inputs have `{TEXT_NUMBERS}`, but `{POSITIONS}` are missing: where texts are predicted.")


def _refuse_other_lengths(model: Any, inputs: dict[str, Any], labels: Tensor) -> None:
    """Refuse labels of a decoder-only model that are not beside its inputs."""
    ids = inputs.get("input_ids")  # [B, T]
    if ids is not None and not has_encoder(model) and labels.shape != ids.shape:
        raise UserError(
            f"labels must have the shape of input_ids, {list(ids.shape)}, got {list(labels.shape)}: one for each "
            "token, and -100 where nothing is learnt, such as at the prompt. Do not shift them: the model does."
        )


def _refuse_z_loss(model: Any) -> None:
    """Refuse a loss that a model adds from its logits, as Bamba may."""
    if getattr(model, "z_loss_coefficient", 0):
        raise UserError(
            f"{type(model).__name__} adds a loss of its own, z_loss_coefficient = {model.z_loss_coefficient}, and "
            "attach would drop it. Set model.z_loss_coefficient = 0 first."
        )


def _refuse_router_loss(model: Any, inputs: dict[str, Any]) -> None:
    """Refuse a router's loss if the model does not return it, as encoder-decoders of experts do not."""
    if _asks_for_router_loss(model, inputs) and _router_weight(model) is None:
        raise UserError(
            f"{type(model).__name__} adds the loss of its router if `output_router_logits` is on, and attach would "
            "drop it. Turn it off, or compute both: JointLoss on the logits, plus the model's `aux_loss`."
        )


def _asks_for_router_loss(model: Any, inputs: Mapping[str, Any]) -> bool:
    asked = inputs.get("output_router_logits")
    return bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)


def _router_weight(model: Any) -> float | None:
    """The weight of the ``aux_loss`` of a decoder-only mixture of experts."""
    if has_encoder(model):
        return None
    weights = (getattr(model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    return next((float(weight) for weight in weights if weight is not None), None)


def _router_loss(model: Any, outputs: Outputs, labels: Tensor, num_tokens: Any) -> Tensor | float:
    """What a router adds to the loss: in a step of several micro-batches, weighted by its share of the labels."""
    loss: Tensor | None = outputs.get("aux_loss")  # []
    if loss is None:
        return 0.0
    if num_tokens is not None:
        counted = (labels != IGNORE_INDEX).sum()  # []
        loss = loss * (counted / num_tokens).to(loss.device)
    return loss * float(_router_weight(model) or 0.0)


def _candidate_stats(
    loss_fn: JointLoss, candidates: CandidateRows, rows: Tensor, references: Tensor, head: Head | None
) -> CandidateStats:
    """The statistics of the candidates that the objective reads.

    Args:
        loss_fn: the objective.
        candidates: of the batch.
        rows: hidden states of the candidates, or logits if there is no head, [B·K, T', …].
        references: labels, [B, T].
        head: the output head.
    """
    labels, needs = candidates.labels.flatten(0, 1).to(rows.device), loss_fn.candidate_needs  # [B·K, T']
    every = functools.partial(_row_stats, loss_fn, head=head, memory="lean")
    if "greedy_cross_logp" not in needs or candidates.greedy is None:
        return candidates.stats(every(rows, labels).label_logp, needs)
    row = torch.arange(len(references), device=rows.device)  # [B]
    texts = Texts(references.to(rows.device), row.unsqueeze(-1).expand(-1, labels.shape[-1]))  # [B, T], [B, T']
    own = every(candidates.own(rows), candidates.own(labels), needs=("cross_logp",), texts=texts)
    # Only greedy texts need `cross_logp`, which is large. If there are samples, too, the head runs twice for them.
    of_all = own if candidates.labels.shape[1] == 1 else every(rows, labels)
    return candidates.stats(of_all.label_logp, needs)._replace(greedy_cross_logp=own.cross_logp)


def _row_stats(
    loss_fn: JointLoss,
    rows: Tensor,
    labels: Tensor,
    head: Head | None,
    *,
    memory: str,
    needs: Collection[str] = (),
    texts: Texts | None = None,
) -> TokenStats:
    """Statistics of further rows: candidates, or streams; from hidden states without ever having all logits.

    Args:
        loss_fn: has the settings of the head's computation.
        rows: hidden states, or logits if there is no head, [N, T, …].
        labels: ids, −100 where they do not count, [N, T].
        head: the output head.
        memory: as in :class:`JointLoss`.
        needs: optional statistics.
        texts: whose tokens ``cross_logp`` has, if not those of the rows themselves.
    """
    labels = labels.to(rows.device)  # [N, T]
    if head is None:
        return token_stats(rows, labels, needs=needs, check=loss_fn.check, texts=texts)
    settings: dict[str, Any] = {"check": loss_fn.check, "backend": loss_fn.backend, "memory": memory, "texts": texts}
    return token_stats_from_hidden(rows, labels=labels, **head._asdict(), needs=needs, **settings)


STREAM_STATS = {"future_logp": "label_logp", "future_mean_logp": "mean_logp"}
"""What objectives read of a ProphetNet's further streams → the statistic of each stream that it is the sum of."""


def _stream_stats(loss_fn: JointLoss, streams: Tensor | None, labels: Tensor, head: Head | None) -> dict[str, Tensor]:
    """What the objective reads of the further streams, summed over them, [B, T] each; nothing if it reads none.

    Args:
        loss_fn: the objective.
        streams: hidden states, or logits if there is no head, [B, n − 1, T, …].
        labels: ids, −100 where they do not count, [B, T].
        head: the output head.
    """
    wanted = {name: own for name, own in STREAM_STATS.items() if name in loss_fn.needs}
    if not wanted or streams is None:
        return {}
    further = streams.shape[1]
    repeated = labels.repeat_interleave(further, 0)  # [B·(n − 1), T]
    stats = _row_stats(
        loss_fn, streams.flatten(0, 1), repeated, head, memory=loss_fn.memory, needs=[*wanted.values()]
    )  # [B·(n − 1), T]
    return {name: getattr(stats, own).unflatten(0, (-1, further)).sum(1) for name, own in wanted.items()}


def _refuse_missing_streams(model: Any, loss_fn: JointLoss) -> None:
    """Raise if the objective reads further streams, and the model has none."""
    if loss_fn.needs.isdisjoint(STREAM_STATS):
        return
    config = model.config
    if not ("prophetnet" in config.model_type and has_encoder(model) and config.ngram > 1):
        raise UserError(
            f"{str(loss_fn)!r} reads streams that look further ahead, which this {type(model).__name__} does not have. "
            "future is for an encoder-decoder ProphetNet with an ngram of 2 or more, such as "
            "microsoft/prophetnet-large-uncased. Leave it out for other models."
        )


def decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    """The ``decoder_input_ids`` that an encoder-decoder derives from labels, [B, T]."""
    model = bare(model)
    labels = _with_a_label(labels, _pad(model))  # [B, T]
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", getattr(model, "_shift_right", None))
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    ids: Tensor
    if prepare is not None:
        ids = prepare(labels)  # [B, T]
    elif shift is not None and shift.__code__.co_argcount == 3:
        ids = shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)  # [B, T]
    else:
        raise UserError(
            f"{type(model).__name__} has no function that derives `decoder_input_ids` from labels. Pass them: the "
            "labels shifted right by one, with the start token first and padding instead of -100."
        )
    return ids


def _with_a_label(labels: Tensor, pad: int) -> Tensor:
    """The same labels, with some id first in rows that have none: mBART's function fails for them, [B, T]."""
    blank = (labels == IGNORE_INDEX).all(-1)  # [B]
    first = labels[:, 0].masked_fill(blank, int(pad == 0))  # [B]
    return torch.cat([first.unsqueeze(-1), labels[:, 1:]], -1)


def _pad(model: Any) -> int:
    """The id that pads the decoder's input."""
    return int(getattr(model.config, "pad_token_id", None) or 0)


def _add_decoder_inputs(
    model: Any, inputs: dict[str, Any], labels: Tensor, candidates: CandidateRows | None = None
) -> None:
    """Add the inputs that an encoder-decoder derives from labels, because the labels are not passed to it."""
    if inputs.get("use_cache") is None:
        inputs["use_cache"] = False
    if inputs.get("decoder_inputs_embeds") is not None:
        return
    given = inputs.get("decoder_input_ids")  # [B, T]
    if given is not None and candidates is None:
        return
    ids = decoder_inputs(model, labels) if given is None else given  # [B, T]
    if candidates is not None:
        ids = candidates.beside(ids, _pad(model))  # [B·(1 + K), T'']
    inputs["decoder_input_ids"] = ids  # [B, T], or with candidates
    if model.config.model_type == "encoder-decoder" and inputs.get("decoder_attention_mask") is None:
        inputs["decoder_attention_mask"] = (ids != model.config.pad_token_id).to(ids.dtype)  # [B, T]
