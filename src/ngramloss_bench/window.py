"""the steps of a training → time of a step, time in which the GPU was busy, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ngramloss import console

NAN = float("nan")
PROFILED = 8
"""Steps in which the GPU's work is recorded: thousands of kernels each."""
TRIES = 3
"""How often these steps may begin again, because something that is left out fell into them."""
TRACED = 3
"""Steps in a trace that a person looks at."""


class Window:
    """Reads the clock at the ends of windows of steps, then profiles a few more: the profiler slows the host down.

    What is done once, such as a capture, can be left out (:meth:`without`). If that falls into the profiled steps,
    others are profiled instead; if it goes on, both shares are NaN. On a CPU nothing is profiled, except for a trace.
    """

    def __init__(
        self,
        *,
        warm_up: int,
        steps: int,
        cuda: bool,
        trace: Path | None = None,
        windows: int = 1,
        profiled: bool = True,
    ) -> None:
        self.steps, self.cuda, self.trace = steps, cuda, trace
        self.milliseconds: list[float] = []
        """The time of a step in each window."""
        self.gibibytes = self.reserved_gibibytes = self.device_milliseconds = self.idle = NAN
        self._began = self._left_out = 0.0
        self._profiler: Any = None
        ends_of_windows = [warm_up + (window + 1) * steps for window in range(windows)]
        window_ends = ends_of_windows[-1]
        busy_ends = window_ends + TRIES * PROFILED * (cuda and profiled)
        self.last_step = busy_ends + TRACED * (trace is not None)
        self._actions: list[tuple[int, Callable[[], None]]] = [(warm_up, self._begin)]
        self._actions += [(end, self._end) for end in ends_of_windows]
        if busy_ends > window_ends:
            ends = range(window_ends + PROFILED, busy_ends + 1, PROFILED)
            self._actions.append((window_ends, self._profile))
            self._actions += [(end, partial(self._read_busy, again=end < busy_ends)) for end in ends]
        if trace is not None:
            self._actions += [(busy_ends, lambda: self._profile(ProfilerActivity.CPU)), (self.last_step, self._write)]

    def after(self, number: int) -> None:
        """Do what is due after the step with this number."""
        for step, action in self._actions:
            if step == number:
                action()

    @contextmanager
    def without(self) -> Iterator[None]:
        """Leave out the time that something takes."""
        began = self._now()
        yield
        self._left_out += self._now() - began

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _begin(self) -> None:
        self._began, self._left_out = self._now(), 0.0

    def _end(self) -> None:
        now = self._now()
        self.milliseconds.append(1e3 * (now - self._began - self._left_out) / self.steps)
        self._began, self._left_out = now, 0.0
        if self.cuda:
            self.gibibytes = torch.cuda.max_memory_allocated() / 2**30
            self.reserved_gibibytes = torch.cuda.max_memory_reserved() / 2**30
        else:
            self.gibibytes = console.peak_memory(torch.device("cpu"))

    def _profile(self, *activities: ProfilerActivity) -> None:
        self._profiler = profile(activities=[*activities, *([ProfilerActivity.CUDA] if self.cuda else [])])
        self._profiler.start()
        self._begin()

    def _read_busy(self, *, again: bool) -> None:
        if self._profiler is None:  # steps before these were read
            return
        milliseconds = 1e3 * (self._now() - self._began) / PROFILED
        self._profiler.stop()
        if self._left_out:  # its work is recorded, too
            if again:
                self._profile()
            return
        recorded = self._profiler.profiler.kineto_results.events()  # a trace as JSON would take half a minute
        work = [event for event in recorded if event.device_type().name == "CUDA" and not event.is_user_annotation()]
        spans = [(event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6) for event in work]
        self.device_milliseconds = busy(spans) / PROFILED if spans else NAN
        self.idle = 1 - self.device_milliseconds / milliseconds
        self._profiler = None

    def _write(self) -> None:
        self._now()
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.trace))


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The time in which anything was done, from when each thing began and ended."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
