"""forward and backward of a model → a CUDA graph for each shape, replayed in one launch.

It reads inputs from tensors that stay, and adds gradients into buffers that stay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ngramloss.loss.kernels import graphs
from ngramloss.loss.kernels.graphs import CannotCapture

Inputs = dict[str, Tensor]
MOST_SHAPES = 72
"""Most shapes that are captured for one model: those of the finest grid."""
SMALL = 2**20
"""Gradients of fewer numbers than this take longer to launch than to add, so they are added all at once."""


class CapturedStep:
    """Forward and backward, by ``function``, which must not use the host's random numbers or read values of tensors."""

    def __init__(self, model: Module, function: Callable[[Inputs], Tensor]) -> None:
        self.model, self.function = model, function
        self._reset()

    def _reset(self) -> None:
        self.gradients: Gradients | None = None
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Inputs, Tensor]] = {}
        self.modules = list(self.model.modules())
        self.state = _state(self.modules)
        self.stream: Any = None

    def begin(self, batches: list[Inputs]) -> None:
        """Begin a step with zero gradients; capture new shapes, or raise ``CannotCapture`` and leave all as it is."""
        if self.state != _state(self.modules):
            self.model.train()
            if self.state != _state(self.modules):   # weights moved or frozen, or modules replaced
                self._reset()
        largest_first = sorted(batches, key=lambda batch: -sum(x.numel() for x in batch.values()))
        tries = 0
        while (new := next((batch for batch in largest_first if _key(batch) not in self.graphs), None)) is not None:
            if (tries := tries + 1) > 4 * len(batches):
                raise CannotCapture("the model keeps more memory each time it runs")
            self._capture(_key(new), new)
        assert self.gradients is not None, "a step has a micro-batch"
        self.gradients.begin()

    def __call__(self, batch: Inputs) -> Tensor:
        """Run a micro-batch. The result is overwritten by the next one of its shape."""
        graph, held, result = self.graphs[_key(batch)]
        for name, value in batch.items():
            held[name].copy_(value, non_blocking=True)
        graph.replay()
        return result

    def held(self, batch: Inputs) -> Inputs:
        """The tensors on the device into which this micro-batch is copied."""
        return self.graphs[_key(batch)][1]

    def _capture(self, key: Hashable, batch: Inputs) -> None:
        if any(getattr(module, "layerdrop", 0) for module in self.model.modules()):
            raise CannotCapture("layer drop chooses layers on the host")
        if len(self.graphs) >= MOST_SHAPES:
            raise CannotCapture(f"micro-batches have more than {MOST_SHAPES} shapes")
        device = next(self.model.parameters()).device
        held = {name: value.to(device, copy=True) for name, value in batch.items()}
        with graphs.restored(self.model.buffers()), graphs.restored_random_numbers(device):   # BART draws on the host
            try:
                graph, result = self._record(held, device)
            except (torch.cuda.OutOfMemoryError, CannotCapture):
                raise
            except RuntimeError as reason:
                torch.cuda.synchronize(device)
                raise CannotCapture(" ".join(str(reason).split())[:200]) from reason
        self.graphs[key] = graph, held, result

    def _record(self, held: Inputs, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.stream = self.stream or torch.cuda.Stream(device)
        before = torch.cuda.memory_allocated(device)
        kept = [graph for graph, _, _ in self.graphs.values()]   # and their memory, until the new graph is there
        pool = graphs.shared_pool(kept)
        with ExitStack() as recorded:

            def run() -> None:
                with graphs.memory_from(pool, device, until=recorded):   # the graph reuses the warm-up's memory
                    self._warm_up(held)

            graphs.warm_up(run, stream=self.stream)
            if self.graphs and _grown(before, device):   # the model kept a tensor, where an earlier graph may write
                self.graphs.clear()
            return graphs.record(lambda: self._run(held), pool=pool, stream=self.stream)

    def _run(self, held: Inputs) -> Tensor:
        assert self.gradients is not None, "a warm-up comes first"
        with self.gradients.small_at_once():
            return self.function(held)

    def _warm_up(self, held: Inputs) -> None:
        """Run once outside a graph, for what libraries set up at the first use of a shape."""
        if self.gradients is None:
            self.model.zero_grad(set_to_none=True)
            self.function(held)
            self.gradients = Gradients([p for p in self.model.parameters() if p.grad is not None])
        self.gradients.begin()
        self._run(held)
        own = {id(parameter) for parameter in self.gradients.parameters}
        if any(p.grad is not None and id(p) not in own for p in self.model.parameters()):
            raise CannotCapture("parameters that get a gradient differ from batch to batch")


class Gradients:
    """One buffer for all gradients of a type; each parameter's gradient is a part of it."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        sizes: dict[torch.dtype, int] = {}
        starts = []
        for parameter in parameters:
            start = sizes.get(parameter.dtype, 0)
            starts.append(start)
            sizes[parameter.dtype] = start + -(-parameter.numel() // 64) * 64   # aligned for wide loads
        device = parameters[0].device
        self.buffers = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.views = [
            self.buffers[p.dtype][start : start + p.numel()].view(p.shape)
            for p, start in zip(parameters, starts, strict=True)
        ]
        parts = zip(parameters, self.views, strict=True)
        self.small = [(parameter, view) for parameter, view in parts if parameter.numel() < SMALL]

    def begin(self) -> None:
        """Make the parts of the buffer the parameters' gradients, all zero."""
        for buffer in self.buffers.values():
            buffer.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    @contextmanager
    def small_at_once(self) -> Iterator[None]:
        """Add the gradients of small parameters to the buffer at the end, in a few launches instead of hundreds."""
        for parameter, _ in self.small:
            parameter.grad = None
        try:
            yield
            found = [(view, parameter.grad) for parameter, view in self.small if parameter.grad is not None]
            if found:
                torch._foreach_add_(*map(list, zip(*found, strict=True)))
        finally:
            for parameter, view in self.small:
                parameter.grad = view

    def clip(self, most: float) -> Tensor:
        """Scale all gradients such that their norm is at most this. Returns the norm before, []."""
        norms = [torch.linalg.vector_norm(buffer, dtype=torch.float32) for buffer in self.buffers.values()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))      # []
        factor = (most / (norm + 1e-6)).clamp(max=1.0)                   # []
        torch._foreach_mul_(list(self.buffers.values()), factor)         # buffer *= factor would load number by number
        return norm


def _grown(before: int, device: torch.device) -> bool:
    """Whether more memory is in use than before, not counting what waits for the garbage collector."""
    if torch.cuda.memory_allocated(device) <= before:
        return False
    gc.collect()
    return torch.cuda.memory_allocated(device) > before


def _key(batch: Inputs) -> Hashable:
    return tuple((name, value.shape) for name, value in sorted(batch.items()))


def _state(modules: Iterable[Module]) -> list[Any]:
    """What a graph was captured with besides its inputs. The modules are found once, because a walk takes too long."""
    return [
        (module.training, tuple(module._modules.values()),
         [(p.data_ptr(), p.requires_grad) for p in module._parameters.values() if p is not None])
        for module in modules
    ]
