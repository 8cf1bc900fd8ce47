"""Recording a graph where another one may be destroyed, and after a recording that failed."""

import gc

import pytest
import torch

from ngramloss.loss.kernels import graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Cycle:
    def __init__(self, content):
        self.me, self.content = self, content


def product():
    rows = torch.ones(64, 64, device="cuda")
    return rows @ rows


def test_a_graph_that_only_the_collector_can_free_does_not_end_a_recording():
    """CUDA ends a recording in which another graph is destroyed."""
    old = [graphs.capture(product)[0]]

    def drops_a_graph():
        rows = product()
        Cycle(old.pop())
        assert [[index] for index in range(2_000)]  # the collector would have run
        return rows + product()

    graphs.warm_up(product)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graph, result = graphs.record(drops_a_graph)
    finally:
        gc.set_threshold(*before)
    graph.replay()
    assert result.eq(128).all()


def test_after_a_recording_that_failed_others_succeed_and_memory_comes_back():
    graphs.capture(product)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(graphs.CannotCapture, match=r"captur.*test_recording\.py"):
            graphs.record(lambda: product().sum().item())
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    graph, result = graphs.capture(product)
    graph.replay()
    assert result.eq(64).all()


def test_recordings_share_two_streams_so_that_cublas_keeps_two_workspaces():
    graphs.capture(product)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(8):
        graphs.capture(product)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**20
