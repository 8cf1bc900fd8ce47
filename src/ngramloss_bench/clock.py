"""a function → the times of its calls and its peak memory on a device, there also as a CUDA graph."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ngramloss.loss.kernels import graphs
from ngramloss_bench import benchmark

SLOW = 2.0
"""Seconds. A call that takes longer is timed 3 times, if no number is asked for."""
WARM_UP = 3
"""Calls before a capture: libraries then have chosen their kernels, and nothing waits for the device any more."""


def cost(
    run: Callable[[], object],
    device: str,
    *,
    repeats: int | None = None,
    usual: int = 30,
    warm_up: int = 8,
    clear: Callable[[], object] = bool,
) -> dict[str, list[float]]:
    """The times of calls, ``ms``, and the peak memory of one more, ``GiB``, minus what was allocated before.

    On a CPU resident memory is sampled: a lower bound. ``clear`` drops what a call leaves in memory. A slow call is
    timed 3 times, others ``usual`` times.
    """
    spent = milliseconds(run, device, repeats=repeats, usual=usual, warm_up=warm_up)
    clear()
    if device == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else _resident()
    with peak_memory(device) as peak:
        run()
    return {"ms": spent, "GiB": [peak() - before]}


def milliseconds(
    run: Callable[[], object], device: str, *, repeats: int | None = None, usual: int = 30, warm_up: int = 8
) -> list[float]:
    """The times of calls after a warm-up: device events on a GPU, else the clock. See :func:`cost`."""
    slow = once(run, device) > 1e3 * SLOW
    for _ in range(1 if slow else warm_up):
        run()
    return [once(run, device) for _ in range(repeats or (3 if slow else usual))]


def once(run: Callable[[], object], device: str) -> float:
    """The milliseconds of one call."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after))


def per_second(cost: dict[str, list[float]], documents: int) -> dict[str, list[float]]:
    """A cost, after the documents per second at these times."""
    return {"docs/s": [1e3 * documents / spent for spent in cost["ms"]], **cost}


@contextmanager
def peak_memory(device: str) -> Iterator[Callable[[], float]]:
    """Watch the memory. Yields a function that returns the peak in GiB: of the process, on a GPU of its tensors."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() / 2**30
        return
    samples, done = [_resident()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: max(samples)
    finally:
        done.set()
        watcher.join()


def _resident() -> float:
    if not os.path.exists(benchmark.STATM):
        return benchmark.NAN
    with open(benchmark.STATM) as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def captured(run: Callable[[], object], clear: Callable[[], object]) -> tuple[Callable[[], object], float]:
    """Capture a function, which must first drop its gradients. Returns the replay, and the peak GiB of the graph."""
    graphs.warm_up(run, times=WARM_UP)
    clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph, _ = graphs.record(run)
    return graph.replay, (torch.cuda.max_memory_allocated() - before) / 2**30


def captured_cost(
    run: Callable[[], object], device: str, *, clear: Callable[[], object], repeats: int | None = None
) -> dict[str, list[float]]:
    """As :func:`cost`, of the captured function. The gradients are dropped at the end."""
    clear()
    replay, gibibytes = captured(run, clear)
    spent = milliseconds(replay, device, repeats=repeats)
    clear()
    return {"ms": spent, "GiB": [gibibytes]}
