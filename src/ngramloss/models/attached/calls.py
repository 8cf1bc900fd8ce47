"""one call of an attached model, in its own thread → what the model made, and whether the loss is ours."""

from __future__ import annotations

import functools
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module

from ngramloss.errors import UserError
from ngramloss.loss.stats import Labelled
from ngramloss.models.attached.adapted_heads import adapter_state, head_input, without_dropout
from ngramloss.models.attached.heads import OutputHead, head_module, head_of, raise_unless_equal

Outputs = Any
"""A ``transformers.utils.ModelOutput``, a dictionary with attributes. This module does not import transformers."""


class _Thread(threading.local):
    capture: Capture | None = None

    def __init__(self) -> None:
        self.watched: dict[str, list[Tensor | None]] = {}
        """Token of an objective → its loss, one entry for each call that is being checked; calls may be nested."""


_thread = _Thread()


def is_traced(tensor: Tensor) -> bool:
    """Whether this code is compiled or captured, so that nothing can be read on the host."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# What the model made


class Capture:
    """The head's whole input in one call. The head itself gets only one position of it."""

    def __init__(self, head: Module) -> None:
        self.head = head
        self.hidden: Tensor | None = None  # [B, T, D], ProphetNet's first stream
        self.streams: Tensor | None = None  # its further ones, [B, n − 1, T, D]


class LabelledBatch(NamedTuple):
    """The labels of a call, and where they are predicted."""

    labels: Tensor  # as they are passed, [B, T]
    aligned: Tensor  # with the positions that predict them, [B, T] or [S, T]
    places: Tensor | None  # these positions, if the batch names them, [S, T]
    where: Labelled


class HeadRows(NamedTuple):
    """What a model made of a batch."""

    outputs: Outputs
    rows: Tensor  # the head's whole input, or logits if there is no head, [B, T, …]
    streams: Tensor | None  # that of the further streams of a ProphetNet, [B, n − 1, T, …]
    head: OutputHead | None


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
        hidden = args[0]  # [B, T, D], ProphetNet's [B, n, T, D]
        if hidden.ndim == 4:
            capture.hidden, capture.streams = hidden[:, 0], hidden[:, 1:]  # [B, T, D], [B, n − 1, T, D]
        else:
            capture.hidden = hidden
        return (hidden[..., :1, :], *args[1:])


@contextmanager
def capturing(head: Module) -> Iterator[Capture]:
    """The head's input in a call inside, by a hook that is removed afterwards."""
    capture, hook = Capture(head), HeadHook()
    handle = head.register_forward_pre_hook(hook)
    before = hook.begin(capture)
    try:
        yield capture
    finally:
        hook.begin(before)
        handle.remove()


class WatchedHead:
    """The head of an attached model, with a hook that stays: torch.compile does not see hooks that are added later."""

    def __init__(self) -> None:
        self.hook = HeadHook()
        self.head: Module | None = None
        self.handle: Any = None
        self.compared: tuple[object, ...] = ()
        """What could change the logits when they were last compared with ours."""

    def watch(self, head: Module | None) -> None:
        """Hook this head instead of the previous one. Our hook runs last, so it captures what the head really gets."""
        # While torch.compile traces, leave the hooks alone: it does not see hooks added later either.
        if head is self.head:
            last = None if head is None else next(reversed(head._forward_pre_hooks), None)
            if head is None or torch.compiler.is_compiling() or last == self.handle.id:
                return
        if self.handle is not None:
            self.handle.remove()
        self.head, self.handle = head, head and head.register_forward_pre_hook(self.hook)

    def run(self, model: Any, forward: Callable[..., Outputs], inputs: dict[str, Any], *, streams: bool) -> HeadRows:
        """What the model makes of these inputs, with logits of only one position."""
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
        checks = not torch.compiler.is_compiling() and (now != self.compared or now[0][-1])
        try:
            with without_dropout(module) if checks else nullcontext():
                outputs = forward(model, **inputs, return_dict=True)
        finally:
            self.hook.begin(before)
        hidden, further = capture.hidden, None  # [B, T, D], [B, n − 1, T, D]
        if hidden is None:
            raise UserError(
                f"{type(model).__name__} did not call its output head, {type(module).__name__}, in its forward, so "
                "attach cannot read the head's input. Use compute_loss_func(...), or JointLoss on the logits."
            )
        head = head_of(model, module)
        device = head.weight.device
        if streams and capture.streams is not None:
            further = head_input(module, capture.streams.to(device))  # [B, n − 1, T, D + r]
        if checks:
            with without_dropout(module):
                raise_unless_equal(model, outputs.get("logits"), head_input(module, hidden[:, :1]), head)
            self.compared = now
        return HeadRows(outputs, head_input(module, hidden.to(device)), further, head)


def hooks_of(head: Module) -> tuple[object, ...]:
    """What besides the weight may affect the head's output; last, whether a hook may change it at every call."""
    own, everywhere = head._forward_hooks, torch_module._global_forward_hooks
    before = (*head._forward_pre_hooks, *torch_module._global_forward_pre_hooks)
    forwards = id(type(head).forward), id(vars(head).get("forward"))
    return id(head), before, (*own, *everywhere), forwards, bool(own or everywhere)


# Whether the loss comes from the objective


class Ran:
    """Whether an objective made the loss of a call, of any thread in torch.compile. A copy is independent."""

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
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else None
        theirs = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", first)
        if not isinstance(theirs, Tensor) or not torch.is_grad_enabled():
            return True
        return _reaches(theirs.grad_fn, ours.grad_fn) if ours.requires_grad else not theirs.requires_grad


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

    Accelerate wraps ours, and TRL replaces it. The replacement runs; a call with labels whose loss is neither the
    objective's nor computed from it raises an error.
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
    return getattr(callable, "__func__", callable)


def _replaced(model: Module, replacement: Any) -> str:
    while isinstance(replacement, functools.partial):
        replacement = replacement.func
    code = getattr(_function(replacement), "__code__", None)
    # Not __module__: functools.wraps copies that of the forward that was replaced.
    files = {getattr(module, "__file__", None): name for name, module in reversed([*sys.modules.items()])}
    by = files.get(code.co_filename, "") if code else ""
    who = f" (by {by})" if by and not by.startswith("transformers") else ""
    return (
        f"the loss does not come from the objective attached to this {type(model).__name__}: after attach, "
        f"`model.forward` was replaced{who} by a function that computes its own loss. With TRL, train with "
        "ng.NgramSFTTrainer(..., objective=...). Elsewhere turn off what replaces it: a fused loss, a Liger kernel."
    )
