"""one call of an attached model → the head's input, whether the objective made the loss, what the trainer wants.

All of this belongs to the call and its thread, not to the model, so threads can share a model.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module

from ngramloss.errors import UserError
from ngramloss.hf.heads import bare
from ngramloss.steps.twins import Twins


class _Thread(threading.local):
    capture: Capture | None = None

    def __init__(self) -> None:
        self.watched: dict[str, list[Tensor | None]] = {}
        """Token of an objective → its loss, one entry for each call that is being checked; calls may be nested."""


_thread = _Thread()

# The head's input


class Capture:
    """The head's whole input in one call. The head itself gets only one position of it."""

    def __init__(self, head: Module) -> None:
        self.head = head
        self.hidden: Tensor | None = None


class HeadHook:
    """The forward pre-hook on a head: fills this thread's capture, if there is one for this head.

    At a graph break, torch.compile loses what it wrote to thread-local variables, so a compiled model keeps the capture
    in the hook itself. Use a compiled model from one thread at a time.
    """

    def __init__(self) -> None:
        self.traced: Capture | None = None

    def begin(self, capture: Capture | None) -> Capture | None:
        """Set the capture to fill. Returns the previous one."""
        if torch.compiler.is_compiling():
            before, self.traced = self.traced, capture
        else:
            before, _thread.capture = _thread.capture, capture
        return before

    def __call__(self, module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Save the head's whole input, and pass on one position of it."""
        capture = _thread.capture if self.traced is None else self.traced
        if capture is None or capture.head is not module or capture.hidden is not None or not args:
            return None  # two models may share a head, which then has two hooks
        capture.hidden = args[0]  # [B, T, D], ProphetNet's [B, n, T, D]
        return (args[0][..., :1, :], *args[1:])


def hooks_of(head: Module) -> tuple[object, ...]:
    """Everything besides the weight that may affect the head's output. It changes when a hook is added or removed.

    The last entry says whether a hook may change the head's output at every call.
    """
    own, everywhere = head._forward_hooks, torch_module._global_forward_hooks
    before = (*head._forward_pre_hooks, *torch_module._global_forward_pre_hooks)
    forwards = id(type(head).forward), id(vars(head).get("forward"))
    return id(head), before, (*own, *everywhere), forwards, bool(own or everywhere)


# Whether the loss comes from the objective


class Ran:
    """Records whether an objective made the loss of a call. A copy or unpickled object is independent.

    While torch.compile traces, it only records whether the objective ran, in any thread.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.traced = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Ran, ())

    def watch(self) -> None:
        """Start checking a call."""
        self.traced = False
        if not torch.compiler.is_compiling():
            _thread.watched.setdefault(self.token, []).append(None)

    def note(self, loss: Tensor) -> None:
        """Record the objective's loss. It is kept only while a call is checked, because it holds the whole graph."""
        if torch.compiler.is_compiling():
            self.traced = True
        elif self.token in _thread.watched:
            _thread.watched[self.token] = [loss] * len(_thread.watched[self.token])

    def made(self, outputs: Any) -> bool:
        """Whether the loss in these outputs is the objective's, or computed from it. Stops checking the call."""
        if torch.compiler.is_compiling():
            return self.traced
        losses = _thread.watched[self.token]
        ours = losses.pop()
        if not losses:
            del _thread.watched[self.token]
        if ours is None:
            return self.traced
        theirs = _loss_in(outputs)
        if theirs is None or not torch.is_grad_enabled():
            return True
        return _reaches(theirs.grad_fn, ours.grad_fn) if ours.requires_grad else not theirs.requires_grad


def _loss_in(outputs: Any) -> Tensor | None:
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else None
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", first)
    return loss if isinstance(loss, Tensor) else None


def _reaches(node: Any, wanted: Any) -> bool:
    """Whether one node of the autograd graph leads to another. Our node is at most a few operations below a loss."""
    todo, seen = [node], {node}
    for node in todo:  # nearest first
        if node is wanted:
            return True
        for below, _ in node.next_functions if node is not None else ():
            if below not in seen:
                seen.add(below)
                todo.append(below)
    return False


REPLACEMENT = "_ngramloss_forward"
"""The attribute with a replaced forward. It is not called "forward", or torch.compile would recurse without end."""


class AttachedForward:
    """The ``forward`` of an attached class, which detects when it is replaced.

    A library may set ``model.forward`` on the object later: Accelerate wraps ours, and TRL replaces it. The replacement
    runs. If the call has labels, and the returned loss is neither the objective's nor computed from it, the call raises
    an error.
    """

    def __init__(self, function: Callable[..., Any], expected: Callable[..., Any]) -> None:
        self.function, self.expected = function, expected
        """``expected(model, args, kwargs)`` is the :class:`Ran` of a call in which the objective must run, or None."""

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        if model is None:
            return self.function
        replacement = getattr(model, REPLACEMENT, None)
        function = self.function if replacement is None else self._checked(replacement)
        # torch.compile cannot trace methods that are created here.
        return functools.partial(function, model) if torch.compiler.is_compiling() else MethodType(function, model)

    def __set__(self, model: Any, replacement: Any) -> None:
        vars(model)[REPLACEMENT] = replacement

    def __delete__(self, model: Any) -> None:
        if vars(model).pop(REPLACEMENT, None) is None:
            raise AttributeError("forward")

    def _checked(self, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the replacement in a function of the model that raises if the objective did not run."""

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            # In a deep copy it may still be bound to the original model, because Accelerate wraps this very function.
            owner = getattr(replacement, "__self__", model)
            is_copied = owner is not model and type(owner) is type(model)
            run = functools.partial(_function(replacement), model) if is_copied else replacement
            ran: Ran | None = self.expected(model, args, kwargs)
            if ran is None:
                return run(*args, **kwargs)
            ran.watch()
            try:
                outputs = run(*args, **kwargs)
            except BaseException:
                ran.made(None)
                raise
            if not ran.made(outputs):
                raise UserError(_replaced(model, replacement))
            return outputs

        # Accelerate reads __wrapped__, and Trainer the signature; torch.compile does not support wraps.
        return forward if torch.compiler.is_compiling() else functools.wraps(_function(replacement))(forward)


def _function(callable: Any) -> Any:
    """The function of a bound method; anything else unchanged."""
    return getattr(callable, "__func__", callable)


def _replaced(model: Module, replacement: Any) -> str:
    while isinstance(replacement, functools.partial):
        replacement = replacement.func
    code = getattr(_function(replacement), "__code__", None)
    # Not __module__: functools.wraps copies that of the forward that was replaced.
    by = next(
        (
            name
            for name, module in list(sys.modules.items())
            if code and getattr(module, "__file__", None) == code.co_filename
        ),
        "",
    )
    who = f" (by {by})" if by and not by.startswith("transformers") else ""
    return (
        f"the loss does not come from the objective attached to this {type(model).__name__}: after attach, "
        f"`model.forward` was replaced{who} by a function that computes its own loss. With TRL, do not attach; train "
        "with ng.NgramSFTTrainer(..., objective=...). With other libraries, turn off what replaces it: a fused or "
        "chunked loss, a Liger kernel."
    )


# What the calling trainer wants


def loss_made_elsewhere(token: str, labels: bool, is_ours: Callable[[Any], object]) -> str:
    """The setting that makes the calling Hugging Face trainer compute the loss itself; empty if there is none.

    Only the trainer's own methods are checked. A user's own ``compute_loss`` may do what its author wants.

    Args:
        token: of the called model's objective. A model that is not the trainer's, such as a teacher, may be called
            without labels. Not the model itself: while torch.compile traces, arguments must be constants.
        labels: whether this call has labels. ``Trainer`` removes them when it computes the loss itself.
        is_ours: whether a ``compute_loss_func`` comes from this library.

    Returns:
        ``label_smoothing_factor=…`` or ``compute_loss_func``.
    """
    frame = next(_trainer_frames(), None)
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] not in ("transformers", "trl"):
        return ""
    trained = frame.f_locals.get("model")
    if isinstance(trained, Module) and _token(bare(trained)) != token:
        return ""
    trainer = frame.f_locals["self"]
    smoothing = trainer.label_smoother is not None and f"label_smoothing_factor={trainer.args.label_smoothing_factor}"
    if frame.f_code.co_name == "prediction_step":  # Seq2SeqTrainer, besides its generate
        return smoothing or "" if labels else ""
    if labels:
        return ""
    custom = trainer.compute_loss_func
    return smoothing or ("compute_loss_func" if custom and not is_ours(custom) else "")


def ignored_smoothing() -> float:
    """The ``label_smoothing_factor`` of the calling Hugging Face trainer, which a ``compute_loss_func`` replaces."""
    frame = next(_trainer_frames(), None)
    arguments = None if frame is None else getattr(frame.f_locals["self"], "args", None)
    return float(getattr(arguments, "label_smoothing_factor", 0.0) or 0.0)


def packs_without_trace() -> str:
    """How the calling trainer packs rows so that no input of the model shows it, as in :func:`lost_boundaries`."""
    frame = next(_trainer_frames(), None)
    return "" if frame is None else lost_boundaries(getattr(frame.f_locals["self"], "args", None))


def lost_boundaries(args: Any) -> str:
    """The setting of TRL by which rows are packed without saying where a document begins; empty if none is."""
    packs = bool(getattr(args, "packing", False))
    packs_evaluation = bool(getattr(args, "eval_packing", False))
    if (packs or packs_evaluation) and getattr(args, "packing_strategy", "") == "wrapped":
        return "packing_strategy='wrapped'"
    return "eval_packing=True" if packs_evaluation and not packs and not getattr(args, "padding_free", False) else ""


def calling_trainers(name: str) -> Any:
    """An attribute of the Hugging Face trainer that calls, in whatever method; None if it has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if hasattr(trainer, "callback_handler") or hasattr(trainer, "compute_loss_func"):
            return getattr(trainer, name, None)
        frame = frame.f_back
    return None


def put_first(callback: Any) -> None:
    """Move a callback before those that report, so that they see what it logs: Trainer puts a user's callbacks last."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list) and callback in callbacks:
            callbacks.remove(callback)
            callbacks.insert(0, callback)
            return
        frame = frame.f_back


def _token(model: Any) -> str | None:
    state = getattr(model, "_ngramloss", None)
    return getattr(getattr(state, "ran", None), "token", None)


def outputs_are_read(compiling: bool) -> bool:
    """Whether the calling Hugging Face trainer reads more of the outputs than the loss.

    Args:
        compiling: a graph is being traced. It is used for every later call, so assume that everything may be read.
    """
    innermost = None
    for frame in _trainer_frames():
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


def refuse_predictions_of_twins() -> None:
    """Raise if the calling trainer returns predictions of rows that a collator put into the batch twice."""
    for frame in _trainer_frames():
        if frame.f_code.co_name != "prediction_step" or _argument(frame, "prediction_loss_only", 3):
            continue
        trainer = frame.f_locals["self"]
        collator: Any = getattr(trainer.callback_handler.eval_dataloader, "collate_fn", None)
        while hasattr(collator, "data_collator"):  # transformers' own that removes columns
            collator = collator.data_collator
        if isinstance(collator, Twins):
            raise UserError(
                "the collator of ng.twins(...) puts every example into a batch twice, so there would be two "
                "predictions for each. For an evaluation with predictions set trainer.data_collator to the collator "
                "inside, trainer.data_collator.collator; NgramTrainer and NgramSFTTrainer do that themselves."
            )


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


# While torch.compile traces, these run as plain Python and their result is a constant of the graph. This is what
# torch.compiler.assume_constant_result does, but that would import the whole compiler here.
for _constant in (
    loss_made_elsewhere,
    outputs_are_read,
    ignored_smoothing,
    packs_without_trace,
    refuse_predictions_of_twins,
):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


def _trainer_frames() -> Iterator[FrameType]:
    """Each ``compute_loss`` and ``prediction_step`` of a Hugging Face trainer in the call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("compute_loss", "prediction_step"):
            trainer = frame.f_locals.get("self")
            if hasattr(trainer, "label_smoother") and hasattr(trainer, "compute_loss_func"):
                yield frame
        frame = frame.f_back
