"""a function → its median time and its peak memory on a device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
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
    clear()   # memory that the last call left must not count as allocated before the next
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
    samples, done = [_resident()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return (max(samples) - samples[0]) / 2**30


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
