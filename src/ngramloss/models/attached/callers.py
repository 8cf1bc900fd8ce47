"""the call stack → what the Hugging Face trainer that calls does with losses, outputs and rows, found in one walk."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch.nn import Module

from ngramloss.data.batches.twins import Twins
from ngramloss.errors import UserError
from ngramloss.models.attached.heads import bare


class Caller(NamedTuple):
    """What the Hugging Face trainer that makes a call does. The defaults hold where none calls."""

    own_loss: str = ""
    """The setting by which it computes the loss itself: ``label_smoothing_factor=…`` or ``compute_loss_func``."""
    label_smoothing: float = 0.0
    """Its ``label_smoothing_factor``, which a ``compute_loss_func`` replaces."""
    lost_boundaries: str = ""
    """The setting by which it packs rows so that no input of the model shows it, as in :func:`lost_boundaries`."""
    reads_outputs: bool = False
    """Whether it reads more of the outputs than the loss."""
    predicts_twins: bool = False
    """Whether it returns predictions of rows that a collator put into the batch twice."""

    def refuse_predictions_of_twins(self) -> None:
        """Raise if there would be two predictions for each example."""
        if self.predicts_twins:
            raise UserError(
                "the collator of ng.twins(...) puts every example into a batch twice, so there would be two "
                "predictions for each. For an evaluation with predictions set trainer.data_collator to the collator "
                "inside, trainer.data_collator.collator; NgramTrainer and NgramSFTTrainer do that themselves."
            )


def find_caller(
    token: str = "", labels: bool = True, compiling: bool = False, is_ours: Callable[[Any], object] = bool
) -> Caller:
    """Walk the call stack once; ``token``: of the called model's objective, as torch.compile needs constant arguments.

    ``labels``: whether this call has any: ``Trainer`` removes them when it computes the loss itself. ``compiling``: the
    graph serves every later call, so assume that everything may be read.
    """
    frames = []  # each compute_loss and prediction_step of a Hugging Face trainer, innermost first
    for frame in _frames():
        if frame.f_code.co_name in ("compute_loss", "prediction_step"):
            trainer = frame.f_locals.get("self")
            if hasattr(trainer, "label_smoother") and hasattr(trainer, "compute_loss_func"):
                frames.append(frame)
    if not frames:
        return Caller()
    args = getattr(frames[0].f_locals["self"], "args", None)
    return Caller(
        own_loss=_own_loss(frames[0], token, labels, is_ours),
        label_smoothing=float(getattr(args, "label_smoothing_factor", 0.0) or 0.0),
        lost_boundaries=lost_boundaries(args),
        reads_outputs=_reads_outputs(frames, compiling),
        predicts_twins=any(map(_predicts_twins, frames)),
    )


# While torch.compile traces, this runs as plain Python and its result is a constant of the graph. This is what
# torch.compiler.assume_constant_result does, but that would import the whole compiler here.
find_caller._dynamo_marked_constant = True  # type: ignore[attr-defined]


def lost_boundaries(args: Any) -> str:
    """The setting of TRL by which rows are packed without saying where a document begins; empty if none is."""
    packs = bool(getattr(args, "packing", False))
    packs_evaluation = bool(getattr(args, "eval_packing", False))
    if (packs or packs_evaluation) and getattr(args, "packing_strategy", "") == "wrapped":
        return "packing_strategy='wrapped'"
    return "eval_packing=True" if packs_evaluation and not packs and not getattr(args, "padding_free", False) else ""


def calling_loss_func() -> Any:
    """The ``compute_loss_func`` of the Hugging Face trainer that calls, in whatever method; None if it has none."""
    for owner in (frame.f_locals.get("self") for frame in _frames()):
        if hasattr(owner, "callback_handler") or hasattr(owner, "compute_loss_func"):
            return getattr(owner, "compute_loss_func", None)
    return None


def put_first(callback: Any) -> None:
    """Move a callback before those that report, so that they see what it logs: Trainer puts a user's callbacks last."""
    for callbacks in (getattr(frame.f_locals.get("self"), "callbacks", None) for frame in _frames()):
        if isinstance(callbacks, list) and callback in callbacks:
            callbacks.remove(callback)
            callbacks.insert(0, callback)
            return


def _frames() -> Iterator[FrameType]:
    """The call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _own_loss(frame: FrameType, token: str, labels: bool, is_ours: Callable[[Any], object]) -> str:
    """The setting by which a trainer's own ``compute_loss`` computes the loss itself; empty if there is none."""
    if frame.f_globals.get("__name__", "").partition(".")[0] not in ("transformers", "trl"):
        return ""
    trainer, trained = frame.f_locals["self"], frame.f_locals.get("model")
    if isinstance(trained, Module) and _token(bare(trained)) != token:
        return ""
    # Seq2SeqTrainer's prediction_step calls the model with labels besides its generate, compute_loss without them.
    if labels != (frame.f_code.co_name == "prediction_step"):
        return ""
    if trainer.label_smoother is not None:
        return f"label_smoothing_factor={trainer.args.label_smoothing_factor}"
    custom = None if labels else trainer.compute_loss_func
    return "compute_loss_func" if custom and not is_ours(custom) else ""


def _token(model: Any) -> str | None:
    return getattr(getattr(getattr(model, "_ngramloss", None), "ran", None), "token", None)


def _reads_outputs(frames: list[FrameType], compiling: bool) -> bool:
    innermost = None
    for frame in frames:
        if frame.f_code.co_name == "prediction_step":
            only_loss = bool(_argument(frame, "prediction_loss_only", 3)) and not compiling
            generates = getattr(frame.f_locals["self"].args, "predict_with_generate", False)
            if not only_loss and not generates:
                return True
        elif innermost is None:
            innermost = frame
    if innermost is None or not _argument(innermost, "return_outputs", 3):
        return False
    above = innermost.f_back  # Trainer's prediction_step always asks for outputs, and is handled above
    return above is None or above.f_code.co_name != "prediction_step"


def _predicts_twins(frame: FrameType) -> bool:
    if frame.f_code.co_name != "prediction_step" or _argument(frame, "prediction_loss_only", 3):
        return False
    collator: Any = getattr(frame.f_locals["self"].callback_handler.eval_dataloader, "collate_fn", None)
    while hasattr(collator, "data_collator"):  # transformers' own that removes columns
        collator = collator.data_collator
    return isinstance(collator, Twins)


def _argument(frame: FrameType, name: str, position: int) -> Any:
    """An argument of a method by name, or by its position (including self) if the method takes ``*args, **kwargs``."""
    code, variables = frame.f_code, frame.f_locals
    if name in variables:
        return variables[name]
    named = code.co_argcount + code.co_kwonlyargcount
    others = code.co_varnames[named:]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        keywords = variables.get(others[bool(code.co_flags & inspect.CO_VARARGS)], {})
        if name in keywords:
            return keywords[name]
    rest = variables.get(others[0], ()) if code.co_flags & inspect.CO_VARARGS else ()
    return rest[position - code.co_argcount] if 0 <= position - code.co_argcount < len(rest) else None
