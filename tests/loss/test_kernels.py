"""The kernels of windows against the same oracle as the formulas."""

import pytest
import torch
from cases import CASES, batches
from hypothesis import given, settings

from ngramloss import token_stats
from ngramloss.loss.kernels import replay
from ngramloss.loss.kernels import windows as kernels

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITH_KERNEL = [case for case in CASES if case.part.kernel]


def both(case, logits, labels):
    logits, labels = logits.float().to(DEVICE).requires_grad_(), labels.to(DEVICE)
    formula = case.part.function
    stats = token_stats(logits, labels)
    slow = formula(stats, labels)
    fast = replay._kernel(case.part.kernel)(stats, labels, **formula.keywords)
    pull = torch.linspace(0.5, 2.0, len(labels), device=DEVICE)
    gradients = [torch.autograd.grad(value, logits, pull, retain_graph=True)[0] for value in (fast, slow)]
    return fast, slow, *gradients


def test_every_objective_of_windows_and_variant_has_a_kernel():
    windows = {"matches", "rewards", "precision", "gated", "soft", "near"}
    assert {case.term.name for case in WITH_KERNEL} == windows
    without = {repr(case) for case in CASES if case.term.name in windows} - {repr(case) for case in WITH_KERNEL}
    assert not without


@pytest.mark.parametrize("case", WITH_KERNEL, ids=repr)
@given(batch=batches(longest=9))
@settings(max_examples=12, deadline=None)
def test_kernel_and_formula_agree_in_value_and_gradient(case, batch):
    fast, slow, by_fast, by_slow = both(case, *batch)
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(by_fast, by_slow, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", WITH_KERNEL, ids=repr)
def test_n_above_t_launches_nothing(case, monkeypatch):
    monkeypatch.setattr(kernels, "_windows", None)
    monkeypatch.setattr(kernels, "_label_windows", None)
    logits = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 3, (2, 4), device=DEVICE)
    stats = token_stats(logits, labels)
    kernel = replay._kernel(case.part.kernel)
    for n in (5, 300_000, 10**30):
        fast = kernel(stats, labels, n=n)
        assert torch.equal(fast, case.part.function.func(stats, labels, n=n))
        assert not torch.autograd.grad(fast.sum(), logits, retain_graph=True)[0].any()


@pytest.mark.parametrize("case", WITH_KERNEL, ids=repr)
@pytest.mark.parametrize("T", [33, 70])
def test_rows_longer_than_one_block_of_pairs(case, T):
    generator = torch.Generator().manual_seed(T)
    labels = torch.randint(0, 3, (2, T), generator=generator)
    labels[0, 20:23], labels[1, 50:] = -100, -100
    logits = torch.randn(2, T, 3, generator=generator) + 2 * torch.nn.functional.one_hot(labels.clamp_min(0), 3)
    fast, slow, by_fast, by_slow = both(case, logits, labels)
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(by_fast, by_slow, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in WITH_KERNEL if case.term.name in ("soft", "near")], ids=repr)
def test_an_impossible_label_earns_nothing(case):
    labels = torch.tensor([[0, 1, 2, 0, 1]])
    logits = torch.zeros(1, 5, 3)
    logits[0, 2, 2] = -torch.inf
    for value in both(case, logits, labels):
        assert value.isfinite().all()
    fast, slow, *_ = both(case, logits, labels)
    torch.testing.assert_close(fast, slow)
