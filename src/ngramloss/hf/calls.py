"""one call of an attached model → the head's input, whether the objective ran, and what the trainer above wants of it.

All of it belongs to the call and its thread, nothing to the model: threads that share a model do not see each other.
"""

from __future__ import annotations

import functools
import secrets
import sys
import threading
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module

from ngramloss.errors import UserError


class _Thread(threading.local):
    capture: Capture | None = None
    ran: object = None


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
        if capture is None or capture.head is not module or not args:
            return None
        capture.hidden = args[0]                                         # [B, T, D], ProphetNet's [B, n, T, D]
        return (args[0][..., :1, :], *args[1:])


def hooks_of(head: Module) -> tuple[object, ...]:
    """Everything besides its weight that decides what a head makes of its input. It changes when a hook comes or goes.

    The last entry says whether something may change the head's output at every call anew.
    """
    own, everywhere = head._forward_hooks, torch_module._global_forward_hooks
    before = (*head._forward_pre_hooks, *torch_module._global_forward_pre_hooks)
    return id(head), before, (*own, *everywhere), id(vars(head).get("forward")), bool(own or everywhere)


# Whether the objective ran


class Ran:
    """Whether an objective ran in this thread since the last :meth:`forget`; where torch.compile traces, in any."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.traced = False

    def note(self) -> None:
        """It ran."""
        if torch.compiler.is_compiling():
            self.traced = True
        else:
            _thread.ran = self.token

    def forget(self) -> None:
        """Begin anew."""
        self.traced = False
        if not torch.compiler.is_compiling():
            _thread.ran = None

    def __bool__(self) -> bool:
        return self.traced or (not torch.compiler.is_compiling() and _thread.ran == self.token)


REPLACEMENT = "_ngramloss_forward"
"""Where a model keeps the forward that was set on it. Not "forward": torch.compile would ask for it in a circle."""


class AttachedForward:
    """The ``forward`` of an attached class, which cannot be replaced without a word.

    A library may set ``model.forward`` on the object later: Accelerate does, around ours, and TRL does, in place of it.
    What it set is run. If the call has labels and the objective did not run in it, the call is an error.
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
            ran: Ran | None = self.expected(model, args, kwargs)
            if ran is None:
                return replacement(*args, **kwargs)
            ran.forget()
            outputs = replacement(*args, **kwargs)
            if not ran:
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
               if code and getattr(module, "__file__", None) == code.co_filename), None)
    return (
        f"the objective attached to this {type(model).__name__} did not run: after attach, `model.forward` was "
        f"replaced (by {by or type(replacement).__name__}) by one that computes a loss of its own. With TRL, leave "
        "attach out and pass SFTTrainer(..., compute_loss_func=ng.compute_loss_func(...)), or set loss_type=\"nll\" "
        "before TRL 1.15. Elsewhere, turn off what replaces it: a fused or chunked loss, a Liger kernel."
    )


# What the trainer above wants


def loss_made_elsewhere(labels: bool, is_ours: Callable[[Any], bool]) -> str:
    """The setting by which a Hugging Face trainer above this call makes the loss itself; empty where none does.

    Args:
        labels: whether this call was given labels. ``Trainer`` takes them away where it makes the loss itself.
        is_ours: whether a ``compute_loss_func`` is one of this library.
    """
    frame = _trainer_frame()
    if frame is None:
        return ""
    trainer = frame.f_locals["self"]
    smooths = trainer.label_smoother is not None
    if frame.f_code.co_name == "prediction_step":   # Seq2SeqTrainer, beside its generate
        return "label_smoothing_factor" if labels and smooths else ""
    if labels:
        return ""
    custom = trainer.compute_loss_func
    return "label_smoothing_factor" if smooths else "compute_loss_func" if custom and not is_ours(custom) else ""


def outputs_are_read(compiling: bool) -> bool:
    """Whether a Hugging Face trainer above this call reads more of the outputs than the loss.

    Args:
        compiling: while a graph is traced, which then serves every later call: whatever might be read is.
    """
    frame = _trainer_frame()
    if frame is None or frame.f_code.co_name == "prediction_step" or not frame.f_locals.get("return_outputs"):
        return False
    above = frame.f_back
    only_loss = above is not None and above.f_code.co_name == "prediction_step" and bool(
        above.f_locals.get("prediction_loss_only"))
    return compiling or not only_loss


# While torch.compile traces, these run as plain Python and their result is a constant of the graph, as after
# torch.compiler.assume_constant_result, which would import all of the compiler here.
for _asked in (loss_made_elsewhere, outputs_are_read):
    setattr(_asked, "_dynamo_marked_constant", True)  # noqa: B010


def _trainer_frame() -> FrameType | None:
    """The innermost ``compute_loss`` or ``prediction_step`` of a Hugging Face trainer that this call is made from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("compute_loss", "prediction_step"):
            trainer = frame.f_locals.get("self")
            if hasattr(trainer, "label_smoother") and hasattr(trainer, "compute_loss_func"):
                return frame
        frame = frame.f_back
    return None
