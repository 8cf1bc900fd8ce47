"""Recording a graph, around a stand-in for CUDA's: nothing is collected inside, and what fails runs without a graph."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from searches import SOURCES, tiny, with_settings, written

from ngramloss import JointLoss
from ngramloss.loss.kernels import graphs, replay
from ngramloss.search.engines import graph, hf


@pytest.fixture
def recorded(monkeypatch):
    """Functions run once where CUDA would record them. Contains the pools of recordings that failed."""
    abandoned = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: abandoned.append(given), raising=False)
    graphs.warn_not_captured.cache_clear()
    return abandoned


class Cycle:
    def __init__(self):
        self.me = self


def test_nothing_is_collected_inside_a_recording(recorded):
    def drops_a_graph():
        old = weakref.ref(Cycle())
        assert [[index] for index in range(2_000)]  # the collector would have run
        assert old() is not None
        return old

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        _, old = graphs.record(drops_a_graph)
        assert gc.isenabled()
        assert [[index] for index in range(2_000)]
    finally:
        gc.set_threshold(*before)
    assert old() is None


def test_collection_stays_off_for_whoever_had_switched_it_off(recorded):
    gc.disable()
    try:
        graphs.record(list)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_thread_records_at_a_time(recorded):
    inside, others = threading.Event(), []

    def first():
        inside.set()
        thread.join(0.2)
        assert others == []
        assert not gc.isenabled()

    thread = threading.Thread(target=lambda: (inside.wait(), graphs.record(lambda: others.append(gc.isenabled()))))
    thread.start()
    graphs.record(first)
    thread.join()
    assert others == [False]
    assert gc.isenabled()


def test_a_failure_names_what_failed_first_and_where(recorded, monkeypatch):
    @contextlib.contextmanager
    def invalidated(*_, **__):
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", invalidated)

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    line = waits.__code__.co_firstlineno + 1
    with pytest.raises(graphs.CannotCapture) as failure:
        graphs.record(waits)
    assert str(failure.value) == f"operation not permitted when stream is capturing and more ({__file__}:{line})"
    assert recorded == [(0, "a pool")]
    assert gc.isenabled()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, KeyError])
def test_an_error_that_is_none_of_cuda_is_not_hidden(recorded, error):
    def fail():
        raise error("more memory")

    with pytest.raises(error):
        graphs.record(fail)
    assert recorded == ([(0, "a pool")] if error is torch.cuda.OutOfMemoryError else [])


def failing(*_, **__):
    raise graphs.CannotCapture("operation not permitted (model.py:3)")


@pytest.mark.parametrize("changes", [{"num_beams": 3}, {}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", ["bart", "grouped"])
def test_texts_are_the_same_if_a_token_cannot_be_captured(recorded, monkeypatch, messages, family, changes):
    model = tiny(family)
    search = with_settings(model, max_length=10, **changes)
    expected = written(graph if search.sample else hf, model, search)
    monkeypatch.setattr(graphs, "capture", failing)
    made = graph.Searcher.__init__

    def on_a_gpu(self, *given, **more):
        made(self, *given, **more)
        self.captures = True

    monkeypatch.setattr(graph.Searcher, "__init__", on_a_gpu)
    assert written(graph, model, search, SOURCES) == expected
    assert messages == [
        "warning: tokens of generation run without CUDA graphs: slower, the same results. Capturing failed: "
        "operation not permitted (model.py:3)"
    ]


def test_the_loss_is_the_same_if_its_terms_cannot_be_captured(recorded, monkeypatch, messages):
    loss_fn, labels = JointLoss("ce + matches(2)"), torch.tensor([[1, 2, 3, 1]])
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = torch.autograd.grad(loss_fn(logits, labels), logits)[0]
    monkeypatch.setattr(replay, "suits", lambda stats: True)
    monkeypatch.setattr(replay._Program, "_captured", failing)
    for _ in range(5):
        loss = loss_fn(logits, labels)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)
    assert len(messages) == 1
    assert messages[0].startswith("warning: n-gram terms run without CUDA graphs")
