"""joint loss, TokenStats and labels → loss, parts and slopes with few launches, on a GPU.

The n-gram part is about a hundred tiny operations on [B, T] tensors, so launches take nearly all of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngramloss.loss.kernels import graphs
from ngramloss.loss.stats import Packing, TokenStats, triton_is_installed

if TYPE_CHECKING:
    from ngramloss.loss.joint_loss import JointLoss
    from ngramloss.loss.terms.term import Part

MOST_GRAPHS = 32
"""Maximum number of shapes captured for one loss; others run without a graph. Capturing waits for the device once."""
MOST_NUMBERS = 2**22  # larger statistics are not captured, because a graph keeps a copy of them
Inputs = dict[str, Tensor]
Results = list[Tensor]


def suits(stats: TokenStats) -> bool:
    """Whether replaying is useful and allowed: a step with a gradient, on the current GPU, outside other graphs."""
    return (
        _on_current_gpu(stats)
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in stats)
        and not torch.cuda.is_current_stream_capturing()
    )


def _on_current_gpu(stats: TokenStats) -> bool:
    device = stats.lse.device
    return device.type == "cuda" and not torch.compiler.is_compiling() and device.index == torch.cuda.current_device()


def fastest(part: Part, stats: TokenStats) -> Callable[..., Tensor]:
    """The part's kernel, if its objective names one and it can run here; otherwise its formula."""
    if stats.weights is not None:   # kernels have no weights of tokens
        return part.function
    if not (part.kernel and _on_current_gpu(stats) and stats.lse.dtype == torch.float32 and triton_is_installed()):
        return part.function
    kernel, given = _kernel(part.kernel), part.function.keywords  # type: ignore[attr-defined]
    return partial(kernel, **given) if kernel.serves(stats, n=given["n"]) else part.function


@cache
def _kernel(path: str) -> Any:
    """The kernel at ``module:name``, imported on first use because it needs Triton."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def replayed(
    loss_fn: JointLoss, stats: TokenStats, labels: Tensor, counts: dict[str, Tensor | None], packed: Packing | None
) -> tuple[Tensor, Tensor]:
    """The loss, [], and the values of its parts, [parts]. Counts are the denominators that were passed."""
    present = {name: value for name, value in stats._asdict().items() if value is not None}
    floats = {name: value for name, value in present.items() if value.is_floating_point()}
    given = {name: value for name, value in present.items() if name not in floats} | {"labels": labels}
    given |= {name: count for name, count in counts.items() if count is not None}
    given |= {} if packed is None else {f"packed.{name}": value for name, value in packed._asdict().items()}
    return _Replayed.apply(loss_fn, given, tuple(floats), *floats.values())  # type: ignore[no-untyped-call, no-any-return]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_fn: JointLoss, given: Inputs, names: tuple[str, ...], *floats: Tensor) -> Any:
        program = _programs.get(loss_fn) or _programs.setdefault(loss_fn, _Program())
        inputs = given | {name: x.detach() for name, x in zip(names, floats, strict=True)}
        loss, values, *slopes = program(loss_fn, inputs, names)
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(values)
        return loss, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, _: Any) -> Any:
        return None, None, None, *torch._foreach_mul(ctx.saved_tensors, by_loss)   # one launch


class _Program:
    """The graphs of a joint loss and its gradient; without a reference to the loss, to which a weak dictionary maps."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, int] = {}
        self.graphs: dict[Hashable, Callable[[Inputs], Results] | None] = {}   # None: cannot be captured

    def __call__(self, loss_fn: JointLoss, inputs: Inputs, names: tuple[str, ...]) -> Results:
        shapes = tuple((name, x.shape, x.dtype, x.device) for name, x in inputs.items())
        key = shapes, _stream()
        with _lock:   # graphs of all threads share memory and inputs
            return self._results(key, loss_fn, inputs, names)

    def _results(self, key: Hashable, loss_fn: JointLoss, inputs: Inputs, names: tuple[str, ...]) -> Results:
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            large = sum(x.numel() for x in inputs.values()) > MOST_NUMBERS
            if large or self.calls[key] < 3 or len(self.graphs) >= MOST_GRAPHS:
                return self._run(loss_fn, inputs, names)
            try:
                self.graphs[key] = self._captured(loss_fn, inputs, names)
            except graphs.CannotCapture as reason:
                self.graphs[key] = None
                graphs.warn_not_captured("n-gram terms", str(reason))
        replay = self.graphs[key]
        return self._run(loss_fn, inputs, names) if replay is None else replay(inputs)

    def _run(self, loss_fn: JointLoss, inputs: Inputs, names: tuple[str, ...]) -> Results:
        """Loss, values of the parts, and slopes of the named statistics."""
        with torch.enable_grad():
            floats = {name: inputs[name].detach().requires_grad_() for name in names}
            tokens = {name: inputs[name] for name in TokenStats._fields if name in inputs and name not in floats}
            stats = TokenStats(**tokens, **floats)
            packed = {name.removeprefix("packed."): x for name, x in inputs.items() if name.startswith("packed.")}
            values = loss_fn.part_values(
                stats, inputs["labels"], num_tokens=inputs.get("num_tokens"), num_sequences=inputs.get("num_sequences"),
                packed=Packing(**packed) if packed else None,
            )                                                            # [parts]
            loss = loss_fn.weighted_sum(values)                          # []
            slopes = torch.autograd.grad(loss, list(floats.values()), materialize_grads=True)
        return [loss.detach(), values.detach(), *slopes]

    def _captured(self, loss_fn: JointLoss, inputs: Inputs, names: tuple[str, ...]) -> Callable[[Inputs], Results]:
        static = {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}
        kept = _kept.setdefault((torch.cuda.current_device(), _stream()), WeakSet())
        alive = [*kept]   # until the new graph is there
        graph, results = graphs.capture(lambda: self._run(loss_fn, static, names), pool=graphs.shared_pool(alive))
        kept.add(graph)
        integers = [name for name, x in static.items() if not x.is_floating_point()]
        floats = [name for name in static if name not in integers]

        def replay(fresh: Inputs) -> Results:
            for names_of_type in (integers, floats):
                torch._foreach_copy_([static[name] for name in names_of_type], [fresh[name] for name in names_of_type])
            graph.replay()
            # The next replay overwrites these; one launch copies them all.
            return list(torch._foreach_mul(results, 1.0))

        return replay


_programs: WeakKeyDictionary[JointLoss, _Program] = WeakKeyDictionary()
_kept: dict[tuple[int, int], WeakSet[torch.cuda.CUDAGraph]] = {}
"""Device and stream → graphs that share memory: they run one after another, and their results are copied out."""
_lock = threading.RLock()


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_initialized() else 0
