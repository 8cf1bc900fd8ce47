"""What replaying does before anything is captured; tests/gpu has the rest."""

import gc
import itertools
import weakref

import pytest
import torch
from cases import CASES, GIVEN_CASES, given

from ngramloss import JointLoss, token_stats
from ngramloss.loss.kernels import replay


def example(seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (3, 8), generator=generator)
    labels[0, 5:] = -100
    logits = torch.randn(3, 8, 4, generator=generator) + 2 * torch.nn.functional.one_hot(labels.clamp_min(0), 4)
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("case", [*CASES, *GIVEN_CASES], ids=repr)
def test_value_and_gradient_together_are_those_of_the_loss(case, monkeypatch):
    loss_fn, (logits, labels) = JointLoss([case.term]), example()
    beside = given(case.term, logits, labels)
    for counts in ({**beside}, {"num_tokens": 9, "num_sequences": torch.tensor(4), **beside}):
        expected, parts = loss_fn.with_parts(logits, labels, **counts)
        with monkeypatch.context() as patch:
            patch.setattr(replay, "suits", lambda stats: True)
            got, replayed = loss_fn.with_parts(logits, labels, **counts)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(replayed, parts)
        one, two = (torch.autograd.grad(3 * loss, logits, retain_graph=True)[0] for loss in (got, expected))
        torch.testing.assert_close(one, two)


def test_a_loss_is_let_go_with_its_graphs(monkeypatch):
    monkeypatch.setattr(replay, "suits", lambda stats: True)
    loss_fn, (logits, labels) = JointLoss("ce + matches(2)"), example()
    loss_fn(logits, labels).backward()
    watched = weakref.ref(loss_fn)
    assert loss_fn in replay._programs
    del loss_fn
    gc.collect()
    assert watched() is None


def test_a_new_loss_shares_the_memory_of_graphs_that_are_there_and_never_of_those_that_are_gone(monkeypatch):
    class Graph:
        def __init__(self, pool):
            self.pool = lambda: pool

        def replay(self):
            pass

    handles, pools = itertools.count(), []

    def capture(function, *, pool):
        pools.append(pool)
        return Graph(pool), function()

    monkeypatch.setattr(replay, "suits", lambda stats: True)
    monkeypatch.setattr(replay, "_kept", {})
    monkeypatch.setattr(replay.graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"memory {next(handles)}")
    logits, labels = example()

    def captured():
        loss_fn = JointLoss("ce + matches(2)")
        for _ in range(3):
            loss_fn(logits, labels)
        return loss_fn

    first, second = captured(), captured()
    assert pools == ["memory 0", "memory 0"]
    del first, second
    gc.collect()
    captured()
    assert pools == ["memory 0", "memory 0", "memory 1"]


def test_counts_are_checked_before_they_go_to_the_device(monkeypatch):
    monkeypatch.setattr(replay, "suits", lambda stats: True)
    logits, labels = example()
    with pytest.raises(ValueError, match="num_tokens must be a count of 0 or more, got -1"):
        JointLoss("ce")(logits, labels, num_tokens=-1)


def test_a_cpu_or_a_step_without_gradient_is_not_replayed():
    logits, labels = example()
    assert not replay.suits(token_stats(logits, labels))
    (part,) = JointLoss("matches(2)").parts
    assert replay.fastest(part, token_stats(logits, labels)) is part.function


def test_the_loss_of_each_row_is_not_replayed(monkeypatch):
    monkeypatch.setattr(replay, "suits", lambda stats: True)
    logits, labels = example()
    loss_fn = JointLoss("ce + matches(2)", reduction="none")
    loss_fn(logits, labels).sum().backward()
    assert loss_fn not in replay._programs
