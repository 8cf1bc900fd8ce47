"""one call of an attached model → the head's input, whether its loss is the objective's, what the trainer above wants.

All of it belongs to the call and its thread, nothing to the model: threads that share a model do not see each other.
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


class _Thread(threading.local):
    capture: Capture | None = None

    def __init__(self) -> None:
        self.watched: dict[str, list[Tensor | None]] = {}
        """Token of an objective → the loss it gave, once for each call that is being checked: they may be nested."""


_thread = _Thread()

# The head's input


class Capture:
    """What one call wants of the head: its whole input. The head itself is handed one position of it."""

    def __init__(self, head: Module) -> None:
        self.head = head
        self.hidden: Tensor | None = None


class HeadHook:
    """The forward pre-hook on a head: it serves the capture of this thread, if there is one for this head.

    What torch.compile writes to a thread's own variables is lost where its graph breaks, so there the capture is kept
    in the hook itself. A compiled model is for one thread at a time.
    """

    def __init__(self) -> None:
        self.traced: Capture | None = None

    def begin(self, capture: Capture | None) -> Capture | None:
        """Serve this capture; the one that was served before."""
        if torch.compiler.is_compiling():
            before, self.traced = self.traced, capture
        else:
            before, _thread.capture = _thread.capture, capture
        return before

    def __call__(self, module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the head's whole input, and hand on one position of it."""
        capture = _thread.capture if self.traced is None else self.traced
        if capture is None or capture.head is not module or capture.hidden is not None or not args:
            return None   # two models may share a head, and then it has two hooks
        capture.hidden = args[0]                                         # [B, T, D], ProphetNet's [B, n, T, D]
        return (args[0][..., :1, :], *args[1:])


def hooks_of(head: Module) -> tuple[object, ...]:
    """Everything besides its weight that decides what a head makes of its input. It changes when a hook comes or goes.

    The last entry says whether something may change the head's output at every call anew.
    """
    own, everywhere = head._forward_hooks, torch_module._global_forward_hooks
    before = (*head._forward_pre_hooks, *torch_module._global_forward_pre_hooks)
    forwards = id(type(head).forward), id(vars(head).get("forward"))
    return id(head), before, (*own, *everywhere), forwards, bool(own or everywhere)


# Whether the loss is the objective's


class Ran:
    """Whether an objective made the loss of a call. A copy, also by pickle, is of an objective of its own.

    Where torch.compile traces it only says whether the objective ran, in any thread.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.traced = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Ran, ())

    def watch(self) -> None:
        """Begin a call that is checked."""
        self.traced = False
        if not torch.compiler.is_compiling():
            _thread.watched.setdefault(self.token, []).append(None)

    def note(self, loss: Tensor) -> None:
        """The objective gave this loss. It is kept only while a call is checked: it holds the whole graph."""
        if torch.compiler.is_compiling():
            self.traced = True
        elif self.token in _thread.watched:
            _thread.watched[self.token] = [loss] * len(_thread.watched[self.token])

    def made(self, outputs: Any) -> bool:
        """Whether the loss in these outputs is the objective's, or computed from it. Ends the check."""
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
    """Whether one node of the autograd graph leads to the other. Ours lies at most a few operations below a loss."""
    todo, seen = [node], {node}
    for node in todo:   # nearest first
        if node is wanted:
            return True
        for below, _ in node.next_functions if node is not None else ():
            if below not in seen:
                seen.add(below)
                todo.append(below)
    return False


REPLACEMENT = "_ngramloss_forward"
"""Where a model keeps the forward that was set on it. Not "forward": torch.compile would ask for it in a circle."""


class AttachedForward:
    """The ``forward`` of an attached class, which cannot be replaced without a word.

    A library may set ``model.forward`` on the object later: Accelerate does, around ours, and TRL does, in place of it.
    What it set is run. If the call has labels and the loss that comes back is not the objective's, or computed from it,
    the call is an error.
    """

    def __init__(self, function: Callable[..., Any], expected: Callable[..., Any]) -> None:
        self.function, self.expected = function, expected
        """``expected(model, args, kwargs)`` is the :class:`Ran` of a call in which the objective must run, or None."""

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        if model is None:
            return self.function
        replacement = getattr(model, REPLACEMENT, None)
        function = self.function if replacement is None else self._checked(replacement)
        # torch.compile traces no methods that are made here.
        return functools.partial(function, model) if torch.compiler.is_compiling() else MethodType(function, model)

    def __set__(self, model: Any, replacement: Any) -> None:
        vars(model)[REPLACEMENT] = replacement

    def __delete__(self, model: Any) -> None:
        if vars(model).pop(REPLACEMENT, None) is None:
            raise AttributeError("forward")

    def _checked(self, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement as a function of the model, which raises if the objective did not run."""

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            # In a deep copy it may be bound to the model that was copied: what Accelerate wraps is this very function.
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

        # Accelerate reads __wrapped__, Trainer the signature; torch.compile knows no wraps.
        return forward if torch.compiler.is_compiling() else functools.wraps(_function(replacement))(forward)


def _function(callable: Any) -> Any:
    """What a bound method binds; anything else as it is."""
    return getattr(callable, "__func__", callable)


def _replaced(model: Module, replacement: Any) -> str:
    while isinstance(replacement, functools.partial):
        replacement = replacement.func
    code = getattr(_function(replacement), "__code__", None)
    # Not __module__: functools.wraps copies that of the forward that was replaced.
    by = next((name for name, module in list(sys.modules.items())
               if code and getattr(module, "__file__", None) == code.co_filename), "")
    who = f" (by {by})" if by and not by.startswith("transformers") else ""
    return (
        f"the loss is not that of the objective attached to this {type(model).__name__}: after attach, `model.forward` "
        f"was replaced{who} by one that computes a loss of its own. With TRL, leave attach out and pass "
        "SFTTrainer(..., compute_loss_func=ng.compute_loss_func(...)); with TRL older than 1.15, keep attach and set "
        "loss_type=\"nll\". Elsewhere, turn off what replaces it: a fused or chunked loss, a Liger kernel."
    )


# What the trainer above wants


def loss_made_elsewhere(token: str, labels: bool, is_ours: Callable[[Any], bool]) -> str:
    """The setting by which a Hugging Face trainer above this call makes the loss itself; empty where none does.

    Only the trainer's own methods are looked at: a ``compute_loss`` of the user's does what its writer wants.

    Args:
        token: of the called model's objective. A model that is not the trainer's, such as a teacher, may do without
            labels. Not the model itself: while torch.compile traces, arguments must be constants.
        labels: whether this call was given labels. ``Trainer`` takes them away where it makes the loss itself.
        is_ours: whether a ``compute_loss_func`` is one of this library.

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
    if frame.f_code.co_name == "prediction_step":   # Seq2SeqTrainer, beside its generate
        return smoothing or "" if labels else ""
    if labels:
        return ""
    custom = trainer.compute_loss_func
    return smoothing or ("compute_loss_func" if custom and not is_ours(custom) else "")


def _token(model: Any) -> str | None:
    state = getattr(model, "_ngramloss", None)
    return getattr(getattr(state, "ran", None), "token", None)


def outputs_are_read(compiling: bool) -> bool:
    """Whether a Hugging Face trainer above this call reads more of the outputs than the loss.

    Args:
        compiling: while a graph is traced, which then serves every later call: whatever might be read is.
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
    above = innermost.f_back   # Trainer's prediction_step asks for them always, and was heard already
    return above is None or above.f_code.co_name != "prediction_step"


def _argument(frame: FrameType, name: str, place: int) -> Any:
    """An argument of a method by name, or by its place, self counted, where the method takes ``*args, **kwargs``."""
    code, found = frame.f_code, frame.f_locals
    if name in found:
        return found[name]
    named = code.co_argcount + code.co_kwonlyargcount
    others = code.co_varnames[named:]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        keywords = found.get(others[bool(code.co_flags & inspect.CO_VARARGS)], {})
        if name in keywords:
            return keywords[name]
    rest = found.get(others[0], ()) if code.co_flags & inspect.CO_VARARGS else ()
    return rest[place - code.co_argcount] if 0 <= place - code.co_argcount < len(rest) else None


# While torch.compile traces, these run as plain Python and their result is a constant of the graph, as after
# torch.compiler.assume_constant_result, which would import all of the compiler here.
for _asked in (loss_made_elsewhere, outputs_are_read):
    setattr(_asked, "_dynamo_marked_constant", True)  # noqa: B010


def _trainer_frames() -> Iterator[FrameType]:
    """Each ``compute_loss`` and ``prediction_step`` of a Hugging Face trainer above this call, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("compute_loss", "prediction_step"):
            trainer = frame.f_locals.get("self")
            if hasattr(trainer, "label_smoother") and hasattr(trainer, "compute_loss_func"):
                yield frame
        frame = frame.f_back
