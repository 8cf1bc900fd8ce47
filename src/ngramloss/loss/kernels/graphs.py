"""a function of tensors that stay where they are → a CUDA graph, which launches all of its kernels at once."""

from __future__ import annotations

import gc
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ngramloss.output.console import logger

Result = TypeVar("Result")
_recording = threading.RLock()


class CannotCapture(RuntimeError):
    """Why a function cannot be captured as a CUDA graph."""


def capture(function: Callable[[], Result], *, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Warm a function up, which must not wait for the device, and record it: the graph, and what it overwrites."""
    warm_up(function)
    return record(function, pool=pool)


@cache
def warn_not_captured(what: str, reason: str) -> None:
    """Log, one time, what runs without graphs."""
    logger.warning(f"warning: {what} run without CUDA graphs: slower, the same results. Capturing failed: {reason}")


def shared_pool(kept: Iterable[torch.cuda.CUDAGraph]) -> Any:
    """The memory of the kept graphs, as PyTorch refuses memory whose graphs are all gone; else new memory."""
    return next((graph.pool() for graph in kept), None) or torch.cuda.graph_pool_handle()


def warm_up(function: Callable[[], object], *, times: int = 1, stream: Any = None) -> None:
    """Run a function on a side stream, for what libraries set up at a first use; what it changes stays changed."""
    side = stream or _side_stream(torch.cuda.current_device())
    current = torch.cuda.current_stream(side.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(times):
            function()
    current.wait_stream(side)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all warm-ups: cuBLAS keeps a workspace for each stream that it has seen, 32 MiB on an H200."""
    return torch.cuda.Stream(device)


def record(
    function: Callable[[], Result], *, pool: Any = None, stream: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record a warm function, computing nothing, while other threads may use the device; or raise CannotCapture."""
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        with _nothing_collected(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
    except torch.cuda.OutOfMemoryError:
        _abandon(pool)
        raise
    except RuntimeError as error:
        _abandon(pool)
        raise CannotCapture(_first_cause(error)) from error
    return graph, result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Switch off garbage collection: in any thread it may destroy a graph in a cycle, which ends a recording."""
    with _recording:   # else the first thread to finish would switch it on for the others
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def _abandon(pool: Any) -> None:
    """Stop directing memory to the pool of a recording that failed, which PyTorch before 2.12 goes on doing."""
    with suppress(AttributeError, RuntimeError):   # it has stopped already
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    torch.cuda.synchronize()


def _first_cause(error: BaseException) -> str:
    """The error that came first, and the line that raised it. The last one only says that the recording failed."""
    while error.__context__ is not None:
        error = error.__context__
    said = " ".join(str(error).split())[:200]
    lines = traceback.extract_tb(error.__traceback__)
    return f"{said} ({lines[-1].filename}:{lines[-1].lineno})" if lines else said


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give the tensors their values back at the end."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


@contextmanager
def restored_random_numbers(device: torch.device) -> Iterator[None]:
    """Give the generators of the device and of the host their states back at the end."""
    on_device, on_host = torch.cuda.get_rng_state(device), torch.get_rng_state()
    numpy = sys.modules.get("numpy")  # if nobody has imported it, nobody draws numbers with it
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.cuda.set_rng_state(on_device, device)
        torch.set_rng_state(on_host)
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


@contextmanager
def memory_from(pool: Any, device: torch.device, *, until: ExitStack) -> Iterator[None]:
    """Take memory from a pool of graphs until ``until`` closes, or a warm-up would need as much again.

    PyTorch's public function for it covers one thread, but a backward pass runs in another.
    """
    names = ("_cuda_beginAllocateCurrentStreamToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
    begin, end, release = (getattr(torch._C, name, None) for name in names)
    if begin is None or end is None or release is None:   # another version of PyTorch: more memory, the same results
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    begin(index, pool)
    until.callback(release, index, pool)
    try:
        yield
    finally:
        end(index, pool)
