"""a function that computes gradients → the same work as a CUDA graph, without the time that launches take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ngramloss.bench.clock import Cost, median_milliseconds
from ngramloss.gpu import graphs

WARM_UP = 3
"""Calls before the capture: libraries then have chosen their kernels, and nothing waits for the device any more."""


class Graph(NamedTuple):
    """A captured function."""

    replay: Callable[[], object]
    gibibytes: float
    """Peak memory that the graph needs in addition to what was allocated before."""


def captured(run: Callable[[], object], clear: Callable[[], object]) -> Graph:
    """Capture a function once. It must begin by dropping its gradients: the graph then has gradients of its own.

    Each replay writes the same buffers, which stay for as long as the graph does.

    Args:
        run: the function. It may not wait for the device.
        clear: drops the gradients, so that they do not count as allocated before.
    """
    graphs.warm_up(run, times=WARM_UP)
    clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph, _ = graphs.record(run)
    return Graph(graph.replay, (torch.cuda.max_memory_allocated() - before) / 2**30)


def captured_cost(run: Callable[[], object], device: str, *, clear: Callable[[], object]) -> Cost:
    """As :func:`ngramloss.bench.clock.cost`, of the captured function. The gradients are dropped at the end."""
    clear()
    graph = captured(run, clear)
    milliseconds = median_milliseconds(graph.replay, device, repeats=30, warm_up=8)
    clear()
    return Cost(milliseconds, graph.gibibytes)
