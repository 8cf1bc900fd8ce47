"""a function → its median time and its peak memory on a device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch


class Cost(NamedTuple):
    """The cost of one call."""

    milliseconds: float
    gibibytes: float
    """Peak memory minus what was allocated before the call. On a CPU it is sampled resident memory: a lower bound."""


def cost(
    run: Callable[[], object], device: str, *, clear: Callable[[], object] = bool, repeats: int = 30, warm_up: int = 8
) -> Cost:
    """Warm up, then take the median time: device events on a GPU, else the clock. Slow calls run fewer times."""
    milliseconds = median_milliseconds(run, device, repeats=repeats, warm_up=warm_up)
    clear()  # memory that the last call left must not count as allocated before the next
    return Cost(milliseconds, _peak(run, device))


def median_milliseconds(run: Callable[[], object], device: str, *, repeats: int, warm_up: int) -> float:
    """Measure only the time."""
    start = time.perf_counter()
    run()
    _finish(device)
    slow = time.perf_counter() - start > 2
    for _ in range(1 if slow else warm_up):
        run()
    return median(_milliseconds(run, device) for _ in range(3 if slow else repeats))


def _finish(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def _milliseconds(run: Callable[[], object], device: str) -> float:
    if device != "cuda":
        _finish(device)
        start = time.perf_counter()
        run()
        _finish(device)
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after))


def _peak(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    if not os.path.exists("/proc/self/statm"):
        return float("nan")
    before = _resident()
    with _sampled() as samples:
        run()
    return (max(samples) - before) / 2**30


def seconds(run: Callable[[], object], device: str, *, repeats: int) -> float:
    """The median time of calls that take long; there is no warm-up."""
    return median(_milliseconds(run, device) for _ in range(repeats)) / 1e3


@contextmanager
def peak_resident(device: str) -> Iterator[Callable[[], float]]:
    """Watch the memory. Yields a function that returns the peak in GiB: of the process, on a GPU of its tensors."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() / 2**30
    elif not os.path.exists("/proc/self/statm"):
        yield lambda: float("nan")
    else:
        with _sampled() as samples:
            yield lambda: max(samples) / 2**30


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """Sample the resident memory of the process, every 2 milliseconds."""
    samples, done = [_resident()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
