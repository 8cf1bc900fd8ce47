"""a Hugging Face model and an objective → the same model, which returns the joint loss when it gets ``labels``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from ngramloss.data.batches.joined import TEXT_NUMBERS
from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import Labelled, Packing, at_positions, labelled, packing
from ngramloss.loss.terms import Term
from ngramloss.models.attached import calls, step_loss
from ngramloss.models.attached import candidates as further
from ngramloss.models.attached.callers import Caller, find_caller
from ngramloss.models.attached.calls import HeadRows, LabelledBatch, Outputs, Ran, WatchedHead
from ngramloss.models.attached.decoder_inputs import add_decoder_inputs
from ngramloss.models.attached.heads import bare, has_encoder, head_module, head_of
from ngramloss.models.attached.routers import asks_for_router_loss, router_loss
from ngramloss.models.attached.segments import BESIDE, KEY, POSITIONS, Unit, check_unit, segments_of_batch, taken_beside
from ngramloss.models.attached.shared_prompts import call, on_the_right
from ngramloss.models.attached.step_loss import LastCall, StepLoss, step_loss_of, term_of_whole_texts
from ngramloss.models.attached.teachers import TeacherModel, teacher_model
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
    ``candidates``, label ids [B, K, T], and ``scores`` [B, K], what each candidate scores. A candidate without
    labels is absent. All tokens of a candidate count in its log-probability and its length, special ones too. The
    encoder runs once for a source. Candidates are further rows of the decoder, which is what other outputs of the
    decoder show; their logits are computed in blocks, and not kept. Inside ``torch.compile`` of the whole model they
    are. In evaluation without candidates, the loss and its parts are those of the other terms. A stock Trainer passes
    such inputs on with ``remove_unused_columns=False``. Terms of the model's own greedy text, such as
    ``precision(2):student``, need that text among the candidates, and ``greedy``, bool [B, K], which is true for it.
    All other terms leave it out. ``policy(baseline=greedy)`` needs ``baseline`` [B], what the greedy text scores.

    ``margin`` needs one more input, ``lm_logp``: a log-probability for each label, in the shape of ``labels``.
    ``accept`` reads ``anchors``, if the batch has them: 0 or 1 for each label, 1 where a block begins. ``future`` reads
    the further streams of a ProphetNet, which the model itself computes.

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
    _refuse_model(inner)
    loss_fn = JointLoss(objective, **options)
    loss_fn.refuse_terms_of_logits("attach")
    further.refuse_missing_streams(inner, loss_fn)
    decoder = further.decoder_that_repeats(inner) if loss_fn.needs_candidates and has_encoder(inner) else None
    check_unit(segments)
    state = _State(
        StepLoss(loss_fn),
        logits=logits,
        shift=_shifts(inner) if shift is None else shift,
        texts=segments,
        teacher=teacher_model(teacher, model, loss_fn),
        takes_cache="use_cache" in inspect.signature(inner.forward).parameters,
    )
    if not hasattr(type(inner), "_ngramloss_base"):
        if "forward" in vars(inner):
            raise UserError(
                f"the forward of this {type(inner).__name__} was replaced on the object itself (Accelerate does that "
                "in `prepare` and with a `device_map`, TRL in its trainers), so attach would have no effect. Attach "
                "first, then prepare; with TRL, do not attach, but train with ng.NgramSFTTrainer(..., objective=...)."
            )
        inner.__class__ = _attached_class(inner.__class__)
    if (previous := _state(inner)) is not None:
        previous.unhook()
    state.hook(module, decoder)
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
        if calls.REPLACEMENT not in vars(inner):
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
    """The labels of a batch, aligned with the positions that predict them, [B, T]; with ``label_positions``, [S, T]."""
    labels: Tensor = inputs["labels"]  # [B, T]
    given: Tensor | None = inputs.get("shift_labels")  # [B, T]
    if inputs.get(POSITIONS) is not None:
        return labels
    if given is not None:
        return given
    return step_loss.shifted(labels) if _known_state(model).shift else labels


def aligned_given(model: Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers beside the labels of a batch, aligned like these, [B, T] each."""
    return taken_beside(inputs, shift=_known_state(model).shift and inputs.get(POSITIONS) is None)


def aligned_packing(model: Module, inputs: Mapping[str, Any]) -> Packing | None:
    """Where the texts of a batch with packed rows are; None if every row is one text."""
    return _known_state(model).labelled(bare(model), inputs, aligned_labels(model, inputs)).packed


def logits_of(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The logits of the model's own head for a batch with labels, [B, T, V]."""
    labels, positions = inputs["labels"], inputs.get(POSITIONS)  # [B, T]
    inputs = {name: value for name, value in inputs.items() if name not in {*OURS, *further.KEYS}}
    if has_encoder(bare(model)):
        add_decoder_inputs(bare(model), inputs, labels)
    else:
        inputs.setdefault("use_cache", False)
    run = call if positions is None else on_the_right(call)
    logits: Tensor = run(model, **inputs, return_dict=True).logits  # [B, T, V]
    return logits if positions is None else at_positions(logits, positions)


COUNTS = ("num_items_in_batch", "num_tokens", "num_sequences")  # The denominators of a step, which a trainer may know
OURS = ("labels", "shift_labels", POSITIONS, KEY, *BESIDE, *COUNTS, "return_dict")
"""Inputs of an attached model that its own forward does not get."""


@dataclass(eq=False)
class _State:
    """The state of an attached model, in one attribute that is not a module, parameter or buffer."""

    loss: StepLoss
    _: KW_ONLY
    logits: bool
    shift: bool
    texts: Unit
    teacher: TeacherModel | None
    takes_cache: bool
    ran: Ran = field(default_factory=Ran)
    head: WatchedHead = field(default_factory=WatchedHead)
    repeating: Any = None

    def hook(self, head: Module, decoder: Module | None) -> None:
        """Hook the head, and a decoder that gets candidates, so that it gets each source as often as it needs it."""
        self.head.watch(head)
        if decoder is not None:
            self.repeating = decoder.register_forward_pre_hook(further.repeat_sources, with_kwargs=True)

    def unhook(self) -> None:
        """Remove all hooks."""
        self.head.watch(None)
        if self.repeating is not None:
            self.repeating.remove()

    def caller(self, *, labels: bool) -> Caller:
        """What the calling trainer does. Raises if it computes the loss itself."""
        caller = find_caller(self.ran.token, labels, torch.compiler.is_compiling(), step_loss_of)
        if caller.own_loss:
            name, _, factor = caller.own_loss.partition("=")
            instead = (
                f"and write it in the objective: ce(smoothing={factor})"
                if factor
                else "or detach(model) and use compute_loss_func=ng.compute_loss_func(...)"
            )
            raise UserError(
                f"the trainer's {name} computes the loss from the logits, so the attached objective "
                f"{str(self.loss.loss_fn)!r} would not run. Remove {name}, {instead}."
            )
        return caller

    def forward(self, model: Any, forward: Callable[..., Outputs], inputs: dict[str, Any]) -> Outputs:
        """Run the model's own forward, with the joint loss instead of its own."""
        caller = self.caller(labels=True)
        step_loss.refuse_lost_boundaries(self.loss.loss_fn, caller.lost_boundaries)
        caller.refuse_predictions_of_twins()
        loss_fn = self.loss.objective(model, has_candidates=inputs.get("candidates") is not None)
        candidates = further.candidate_rows(model, inputs)
        _refuse_inputs(model, inputs)
        wants_dict, aligned = inputs.get("return_dict"), aligned_labels(model, inputs)  # [B, T]
        where = self.labelled(model, inputs, aligned)
        batch = LabelledBatch(inputs["labels"], aligned, inputs.get(POSITIONS), where)
        given: dict[str, Any] = {**aligned_given(model, inputs)}  # [B, T] each
        counts = {name: inputs.get(name) for name in COUNTS}
        inputs = {name: value for name, value in inputs.items() if name not in OURS}
        self.loss.warn_of_padding(model, batch.labels)
        with_router = asks_for_router_loss(model, inputs)
        self.keep_apart(model, inputs, batch)
        if self.teacher is not None:
            given["teacher"] = self.teacher.predictions(inputs, batch.labels, batch.places)
        if has_encoder(model):
            add_decoder_inputs(model, inputs, batch.labels, candidates)
        forward = forward if batch.places is None else on_the_right(forward)
        made = self.made(model, forward, inputs, caller)
        made, more = further.further_stats(loss_fn, made, candidates, batch)
        labels, packed = batch.aligned.to(made.rows.device), batch.where.packed  # [B, T]
        if packed is not None:
            packed = Packing(*(part.to(labels.device) for part in packed))
        score = _score(loss_fn, made, batch.where.positions, given | more)
        loss = self.loss(score, labels, packed, **counts)  # []
        if with_router:
            loss = loss + router_loss(model, made.outputs, labels, counts)
        self.ran.note(loss)
        return _outputs(model, made, loss, wants_dict)

    def keep_apart(self, model: Any, inputs: dict[str, Any], batch: LabelledBatch) -> None:
        """Let the model see where documents of packed rows begin, or warn that it does not."""
        if self.takes_cache and inputs.get("use_cache") is None:
            inputs["use_cache"] = False  # with a cache, transformers does not look for packed documents
        if batch.where.packed is not None and not has_encoder(model):
            cached = bool(inputs.get("use_cache")) or inputs.get("past_key_values") is not None
            self.loss.warn_of_mixed_documents(model, inputs, batch.aligned, cached=cached)

    def labelled(self, model: Any, inputs: Mapping[str, Any], labels: Tensor) -> Labelled:
        """Labelled positions and their texts; without ``label_positions`` the host reads four numbers to find them."""
        if inputs.get(POSITIONS) is not None:
            return Labelled(None, None)
        causal = not has_encoder(model)
        segments = None  # [B, T]
        if term_of_whole_texts(self.loss.loss_fn):  # otherwise texts would not matter
            segments = segments_of_batch(inputs, labels, causal=causal, shift=self.shift, texts=self.texts)
        if causal and labels.numel() and not calls.is_traced(labels):
            return labelled(labels, segments)
        return Labelled(None, None if segments is None else packing(labels, segments))

    def made(self, model: Any, forward: Callable[..., Outputs], inputs: dict[str, Any], caller: Caller) -> HeadRows:
        """What the model makes of its inputs: logits if somebody reads them, and otherwise the input of its head."""
        if (self.logits and not model.training) or caller.reads_outputs:
            outputs = forward(model, **inputs, return_dict=True)
            return HeadRows(outputs, outputs.logits, outputs.get("logits_ngram"), None)
        return self.head.run(model, forward, inputs, streams=further.reads_streams(self.loss.loss_fn))


def _score(loss_fn: JointLoss, made: HeadRows, positions: Tensor | None, given: dict[str, Any]) -> Callable[..., Any]:
    if made.head is None:
        return functools.partial(loss_fn.with_parts, made.rows, **given)
    if positions is not None:
        positions = positions.to(made.rows.device)  # [N]
    settings: dict[str, Any] = {**made.head._asdict(), "positions": positions, **given}
    return functools.partial(loss_fn.from_hidden_with_parts, made.rows, settings.pop("weight"), **settings)


def _outputs(model: Any, made: HeadRows, loss: Tensor, wants_dict: bool | None) -> Outputs:
    """The model's own outputs with this loss, and without logits of one position."""
    fields = {name: value for name, value in made.outputs.items() if made.head is None or not name.startswith("logits")}
    if made.head is None:
        fields["logits"] = made.rows
    replaced = type(made.outputs)(**{**fields, "loss": loss})
    if wants_dict is None:
        wants_dict = getattr(model.config, "return_dict", True)
    return replaced if wants_dict else replaced.to_tuple()


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
        inputs = named(args, kwargs)
        if inputs.get("labels") is None:
            state.caller(labels=False)
            return base.forward(self, *args, **kwargs)
        return state.forward(self, base.forward, inputs)

    # Not functools.wraps: Accelerate follows __wrapped__ to unwrap a model, and would find the original forward.
    forward.__name__, forward.__qualname__, forward.__doc__ = "forward", base.forward.__qualname__, base.forward.__doc__
    forward.__module__ = base.forward.__module__
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]

    def reduce(self: Module, protocol: Any) -> tuple[Any, ...]:
        _, (_, *arguments), *state = base.__reduce_ex__(self, 2)
        return (_unpickled, (base, *arguments), *state)

    own = {"forward": calls.AttachedForward(forward, expected), "__reduce_ex__": reduce, "_ngramloss_base": base}
    return type(base.__name__, (base,), own | {"__module__": base.__module__, "__qualname__": base.__qualname__})


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


def _refuse_model(model: Any) -> None:
    """Refuse UMT5 whose positions see the label that they should predict, and a loss added from logits, as Bamba's."""
    is_umt5 = getattr(model.config, "model_type", "") == "umt5" and model.config.is_encoder_decoder
    if is_umt5 and not getattr(model.get_decoder().block[0].layer[0].SelfAttention, "is_causal", True):
        raise UserError(
            "this version of transformers lets the decoder of UMT5 see later tokens, so it would learn to "
            "copy its labels. Update transformers to 5.18 or newer."
        )
    if getattr(model, "z_loss_coefficient", 0):
        raise UserError(
            f"{type(model).__name__} adds a loss of its own, z_loss_coefficient = {model.z_loss_coefficient}, and "
            "attach would drop it. Set model.z_loss_coefficient = 0 first."
        )


def _refuse_inputs(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse inputs of a call with labels in which these do not say what each position predicts."""
    limit, ids, labels = inputs.get("logits_to_keep"), inputs.get("input_ids"), inputs["labels"]  # [B, T] each
    if isinstance(limit, Tensor) or limit:
        raise UserError("logits_to_keep removes positions before the loss. Do not pass it together with labels.")
    if inputs.get(POSITIONS) is not None:
        return
    if inputs.get(TEXT_NUMBERS) is not None:
        raise UserError(f"the inputs have `{TEXT_NUMBERS}`, but no `{POSITIONS}`, which say where texts are predicted.")
    if ids is not None and not has_encoder(model) and labels.shape != ids.shape:
        raise UserError(
            f"labels must have the shape of input_ids, {list(ids.shape)}, got {list(labels.shape)}: one for each "
            "token, and -100 where nothing is learnt, such as at the prompt. Do not shift them: the model does."
        )
