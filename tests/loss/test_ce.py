"""Cross-entropy at a temperature, and the statistic that it needs, against PyTorch and in every backend."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import few
from sweeps import DEVICE, every_sweep

from ngramloss import JointLoss, token_stats, token_stats_from_hidden
from ngramloss.errors import UserError
from ngramloss.loss.explaining.explain import explain
from ngramloss.loss.stats import chunked, head, labelled
from ngramloss.loss.terms.registry import temperature_of

every_temperature = pytest.mark.parametrize("temperature", few([0.05, 3.0], [0.05, 0.5, 3.0, 100.0]))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that a short vocabulary has several, the last one ragged."""
    monkeypatch.setattr(head, "LEAN_BYTES", 1)


def example(B=2, T=5, V=300, D=16, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64) * size
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 1] = labels[1, -1] = -100
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)


def torchs(logits, labels, temperature, smoothing=0.0):
    flat = (logits / temperature).flatten(0, 1)
    return temperature * F.cross_entropy(flat, labels.flatten(), label_smoothing=smoothing)


@given(st.floats(0.05, 50), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([1e-3, 1.0, 30.0]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_it_is_torchs_cross_entropy_of_the_divided_logits_times_the_temperature(temperature, smoothing, size, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 4, 7, generator=generator, dtype=torch.float64) * size).requires_grad_()
    labels = torch.randint(0, 7, (2, 4), generator=generator)
    labels[0, 2] = -100
    loss = JointLoss(f"ce(smoothing={smoothing},temperature={temperature!r})")(logits, labels)
    expected = torchs(logits, labels, temperature, smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


@every_sweep
@every_temperature
@pytest.mark.parametrize("options", [{}, {"bias": True, "softcap": 3.0, "scale": 2.0}], ids=str)
def test_the_statistic_and_its_gradient_equal_the_plain_ones(backend, memory, temperature, options):
    hidden, weight, labels = example()
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(300, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    pull = torch.arange(1.0, 11.0, device=DEVICE).view(2, 5).masked_fill(labels == -100, 0.0)
    found = []
    for name in ("plain", backend):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        stats = token_stats_from_hidden(
            *leaves, labels, needs=(f"tempered_lse={temperature}",), backend=name, memory=memory, **options
        )
        slopes = torch.autograd.grad((stats.tempered_lse * pull).sum(), leaves)
        found.append([stats.tempered_lse[labels != -100].detach(), *slopes])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)  # sums in another order


@every_sweep
@pytest.mark.parametrize("dtype", few([torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("temperature", few([0.5], [0.5, 3.0]))
def test_the_loss_is_no_further_from_the_truth_than_the_plain_one(backend, memory, dtype, temperature):
    hidden, weight, labels = example(B=3, T=8, V=517, D=32, dtype=dtype)
    written, found = f"ce(smoothing=0.1,temperature={temperature})", {}
    for name in ("truth", "plain", backend):
        leaf = (hidden.double() if name == "truth" else hidden).clone().requires_grad_()
        own = weight.double() if name == "truth" else weight
        loss = JointLoss(written, backend="plain" if name == "truth" else name, memory=memory).from_hidden(
            leaf, own, labels
        )
        found[name] = loss.double(), torch.autograd.grad(loss, leaf)[0].double()
    # Half a unit in the last place, for a rounding that fell the other way. Triton's interpreter does not round, it cuts.
    units = 1.0 if backend == "fused" and DEVICE == "cpu" else 0.5
    for truth, plain, other in zip(found["truth"], found["plain"], found[backend], strict=True):
        tolerance = units * torch.finfo(dtype).eps * truth.abs().max() + 1e-6
        assert (other - truth).abs().max() <= (plain - truth).abs().max() + tolerance


@every_sweep
def test_a_vocabulary_that_begins_with_impossible_tokens_and_logits_that_differ_by_thousands(backend, memory):
    hidden, weight, labels = example()
    bias = torch.zeros(300, device=DEVICE)
    bias[:200] = -torch.inf
    labels = labels.where(labels < 0, labels.clamp_min(200))
    for scale in (1.0, 1000.0):
        losses = [
            JointLoss("ce(temperature=2)", backend=name, memory=memory).from_hidden(
                hidden, weight, labels, bias=bias, scale=scale
            )
            for name in ("plain", backend)
        ]
        assert losses[0].isfinite()
        torch.testing.assert_close(*losses)


@every_sweep
def test_twins_teachers_weights_and_positions_go_beside_it(backend, memory):
    hidden, weight, labels = example(B=4, T=6)
    labels[1::2], labels[:, :3] = labels[::2], -100
    weights = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    written = "ce(temperature=2,smoothing=0.1) + rdrop + bag(1) + distill(temperature=3)"
    teacher = (hidden * 0.5) @ weight.T
    found = []
    for name in ("plain", backend):
        leaf = hidden.clone().requires_grad_()
        for positions in (None, labelled(labels).positions):
            loss_fn = JointLoss(written, backend=name, memory=memory)
            loss = loss_fn.from_hidden(leaf, weight, labels, positions=positions, teacher=teacher)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaf)])
        loss_fn = JointLoss("ce(temperature=2) + rdrop", backend=name, memory=memory)
        weighted = loss_fn.from_hidden(leaf, weight, labels, weights=weights.repeat_interleave(2, 0)[:4])
        found[-1].append(weighted.detach())
        found[-2].append(weighted.detach())
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@every_sweep
def test_a_sure_token_costs_nothing_and_never_less(backend, memory):
    weight = torch.zeros(300, 4, device=DEVICE)
    weight[7] = 1
    hidden = 100 + torch.rand(1, 20, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels = torch.full((1, 20), 7, device=DEVICE)
    for name in (backend, "plain"):
        stats = token_stats_from_hidden(hidden, weight, labels, needs=("tempered_lse=10",), backend=name, memory=memory)
        assert torch.equal(stats.tempered_lse, stats.lse)
        assert JointLoss("ce(temperature=10)").from_stats(stats, labels).total == 0


def test_a_temperature_of_1_needs_nothing_and_changes_no_bit():
    hidden, weight, labels = example()
    assert JointLoss("ce(temperature=1)").needs == frozenset()
    assert JointLoss("ce(temperature=2)").needs == {"tempered_lse=2.0"}
    assert token_stats(hidden @ weight.T, labels).tempered_lse is None
    for backend in ("plain", "chunked"):
        losses = [
            JointLoss(name, backend=backend).from_hidden(hidden, weight, labels) for name in ("ce", "ce(temperature=1)")
        ]
        assert torch.equal(*losses)


def test_without_a_temperature_no_second_power_is_computed(monkeypatch):
    hidden, weight, labels = example()
    running = []
    absorb = chunked.absorb
    monkeypatch.setattr(chunked, "absorb", lambda *given: running.append(given[2]) or absorb(*given))
    JointLoss("ce", backend="chunked").from_hidden(hidden, weight, labels)
    JointLoss("ce(temperature=2)", backend="chunked").from_hidden(hidden, weight, labels)
    assert [each.tempered_lse is None for each in running] == [True] * 3 + [False] * 3


def test_one_temperature_beside_1():
    logits, labels = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[1, 2, 0]])
    both = JointLoss("ce + ce(temperature=2) + 0.5*ce(smoothing=0.2,temperature=2)")(logits, labels)
    expected = F.cross_entropy(logits[0], labels[0]) + torchs(logits, labels, 2)
    torch.testing.assert_close(both, expected + 0.5 * torchs(logits, labels, 2, 0.2))
    with pytest.raises(UserError, match=r"ce at 2 temperatures, 0.5 and 2: only one besides 1 is possible"):
        JointLoss("ce(temperature=2) + ce(temperature=0.5)")


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("ce(temperature=0)", r"ce\(temperature\): must be above 0"),
        ("ce(temperature=-1)", r"ce\(temperature\): must be above 0"),
        ("ce(temperature=1e4)", r"ce\(temperature\): must be at most 1,000"),
        ("ce(temprature=2)", "Did you mean 'temperature'"),
    ],
)
def test_temperatures_that_cannot_be_are_refused(written, sentence):
    with pytest.raises(UserError, match=sentence):
        JointLoss(written)


def test_a_statistic_without_its_temperature_is_refused():
    logits, labels = torch.zeros(1, 2, 3), torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=r"write tempered_lse=2.0 in needs"):
        token_stats(logits, labels, needs=("tempered_lse",))
    (part,) = JointLoss("ce(temperature=2)").parts
    with pytest.raises(ValueError, match=r"needs=\('tempered_lse=2.0',\)"):
        part.function(token_stats(logits, labels), labels)
    assert temperature_of(("mean_logp", "twin_kl")) is None


def test_it_is_explained_at_its_temperature():
    shown = explain("a b", "a c", "ce(temperature=2)", [0.5])
    assert "ce(temperature=2) = 2 times the mean of −log p over the words of the reference, at temperature 2" in shown
    logits = torch.tensor([[[0.5, 1 / 6, 1 / 6, 1 / 6], [1 / 6, 1 / 6, 0.5, 1 / 6]]]).log()
    value = torchs(logits, torch.tensor([[0, 1]]), 2)
    assert shown.splitlines()[-1] == f"ce(temperature=2) = {value:.4f}"
    probability = (logits / 2).softmax(-1)[0, 0, 0]
    assert f"{probability:.4f}" in shown


def test_diagnostics_and_their_floors_know_it():
    labels = torch.tensor([[7, 8, 7, 8]])
    logits = F.one_hot(labels, 9) * 3.0
    watched = JointLoss("ce(temperature=2) + matches(2)").diagnose(logits, labels)
    assert 0 < watched["gradient/ce(temperature=2)"] < 1
    assert round(watched["floor/matches(2)"].item(), 3) == 0.333
