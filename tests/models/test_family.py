"""The sharpening and weighted objectives: how they contain each other, their edges and their options."""

import pytest
import torch
from cases import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss import JointLoss, token_stats, token_stats_from_hidden
from ngramloss.errors import UserError

FAMILY = ["soft(2)", "soft(2,kappa=1)", "gated(2)", "near(2)", "convex", "dft", "tailr", "mixce", "unlikelihood"]


def loss_and_gradient(written, logits, labels):
    logits = logits.clone().requires_grad_()
    loss = JointLoss(written)(logits, labels)
    return loss, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tailr(gamma=1,min_weight=0)", "dft"),
        ("mixce(eta=0)", "dft"),
        ("tailr(gamma=0)", "ce"),
        ("mixce(eta=1)", "ce"),
        ("tailr(min_weight=1)", "ce"),
        ("near(2,power=0)", "soft(2)"),
        ("near(1,power=0)", "soft(1)"),
        ("soft(3,kappa=3)", "soft(3)"),
    ],
)
@given(batch=batches(), scale=st.sampled_from([1.0, 30.0, 1000.0]))
@settings(max_examples=40, deadline=None)
def test_two_ways_to_write_one_objective_agree(one, other, batch, scale):
    logits = batch.logits * scale
    torch.testing.assert_close(
        loss_and_gradient(one, logits, batch.labels), loss_and_gradient(other, logits, batch.labels)
    )


@given(batch=batches(), n=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_gated_without_its_gate_is_soft(batch, n):
    stats = token_stats(*batch)
    open_gate = stats._replace(best_token=batch.labels, best_logp=stats.label_logp)
    for written, given_stats in ((f"soft({n})", stats), (f"near({n})", open_gate)):
        value, _ = JointLoss(written).from_stats(given_stats, batch.labels)
        torch.testing.assert_close(value, JointLoss(f"gated({n})").from_stats(open_gate, batch.labels)[0])


@given(
    logits=st.integers(0, 2**31).map(lambda seed: torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(seed)))
)
@settings(max_examples=40, deadline=None)
def test_without_repeats_gated_is_rewards_and_ungated_rewards_is_soft(logits):
    labels = torch.stack([torch.arange(6), torch.arange(6).flip(0)])
    logits = logits + 2 * torch.nn.functional.one_hot(labels, 6)
    torch.testing.assert_close(*(loss_and_gradient(written, logits, labels) for written in ("gated(2)", "rewards(2)")))
    stats = token_stats(logits, labels)
    ungated = stats._replace(best_token=labels, best_logp=stats.label_logp)
    rewards, _ = JointLoss("rewards(2)").from_stats(ungated, labels)
    torch.testing.assert_close(rewards, JointLoss("soft(2,kappa=2)").from_stats(stats, labels)[0])


def test_gated_rewards_every_copy_of_a_repeated_ngram():
    labels = torch.tensor([[5, 6, 5, 6, 7, 5, 6]])
    sure = 1e4 * torch.nn.functional.one_hot(labels, 8).float()
    assert JointLoss("gated(2)")(sure, labels) == 0
    assert JointLoss("rewards(2)")(sure, labels) == pytest.approx(1 - 4 / 6)


def test_near_with_a_high_power_is_gated():
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 5, (8, 9), generator=generator)
    logits = torch.randn(8, 9, 5, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 5)
    logits = logits.round() + 0.1 * torch.arange(
        5
    )  # no ties: a token is the most probable one or clearly less probable
    torch.testing.assert_close(
        *(loss_and_gradient(written, logits, labels) for written in ("near(2,power=1024)", "gated(2)"))
    )


def test_convex_is_weighted_by_length():
    labels = torch.tensor([[1, 2, -100, 3], [2, -100, -100, -100], [-100, -100, -100, -100]])
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logp = logits.log_softmax(-1)
    first = (logp[0, 0, 1] + logp[0, 1, 2] + logp[0, 3, 3]) / 3
    expected = -(3 * (2 * first).exp() + (2 * logp[1, 0, 2]).exp()) / 4
    torch.testing.assert_close(JointLoss("convex(order=2)")(logits, labels), expected)


def impossible(value):
    """A batch whose second label has almost no probability, or none."""
    logits = torch.zeros(1, 3, 5)
    logits[0, 1, 3] = value
    return logits, torch.tensor([[1, 3, 2]])


@pytest.mark.parametrize("value", [-120.0, -1e4, -torch.inf])
@pytest.mark.parametrize(
    "written", ["dft", "mixce(eta=0)", "tailr(min_weight=0)", "soft(2)", "near(2)", "near(2,power=0)", "convex"]
)
def test_a_label_whose_probability_underflows_has_no_gradient(written, value):
    loss, gradient = loss_and_gradient(written, *impossible(value))
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 1].abs().max() < 1e-6


@pytest.mark.parametrize("value", [-120.0, -1e4, -torch.inf])
@pytest.mark.parametrize(
    ("written", "weight"),
    [("tailr(gamma=0)", 1), ("tailr(gamma=0,min_weight=0)", 1), ("tailr", 0.2), ("mixce(eta=0.3)", 0.3)],
)
def test_a_weight_keeps_its_least_value_where_p_underflows(written, weight, value):
    logits, labels = impossible(value)
    labels[0, 0] = labels[0, 2] = -100
    for computed, expected in zip(
        loss_and_gradient(written, logits, labels), loss_and_gradient("ce", logits, labels), strict=True
    ):
        torch.testing.assert_close(computed, weight * expected)


def test_unlikelihood_counts_an_earlier_token_once_and_never_the_label_itself():
    logits = torch.zeros(1, 6, 4)
    loss = JointLoss("unlikelihood")(logits, torch.tensor([[1, 1, 2, -100, 2, 3]]))  # 0 0 1 – 1 2 tokens before
    assert loss == pytest.approx(-4 * torch.tensor(0.75).log().item() / 5)
    assert JointLoss("unlikelihood")(logits, torch.tensor([[2, 2, 2, -100, 2, 2]])) == 0


def test_unlikelihood_of_a_certain_repetition_stops_at_its_limit():
    labels = torch.tensor([[1, 2]])
    logits = 100.0 * torch.nn.functional.one_hot(torch.tensor([[1, 1]]), 4)
    loss, gradient = loss_and_gradient("unlikelihood", logits, labels)
    assert loss.item() == pytest.approx(11.5129 / 2, abs=2e-3)  # 1 − 1e-5 is rounded in fp32
    assert not gradient.any()


def test_unlikelihood_pushes_small_probabilities_down_in_proportion():
    logits = torch.zeros(1, 2, 4)
    logits[0, 1, 1] = -25.0  # p near 5e-12, lost in 1 − p in fp32
    _, gradient = loss_and_gradient("unlikelihood", logits, torch.tensor([[1, 2]]))
    assert gradient[0, 1, 1].item() == pytest.approx(torch.tensor(-25.0).exp().item() / 3 / 2, rel=1e-3, abs=0)


@pytest.mark.parametrize("written", FAMILY)
def test_smoothed_cross_entropy_combines_with_each(written):
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 5, (3, 7), generator=generator)
    labels[0, 4:] = -100
    logits = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64)
    joint = loss_and_gradient(f"ce(smoothing=0.1) + 0.5*{written}", logits, labels)
    smoothed, alone = (loss_and_gradient(one, logits, labels) for one in ("ce(smoothing=0.1)", written))
    for both, ce, term in zip(joint, smoothed, alone, strict=True):
        torch.testing.assert_close(both, ce + 0.5 * term)


@pytest.mark.parametrize("written", FAMILY)
def test_labels_masked_after_the_statistics_are_left_out(written):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (3, 8), generator=generator)
    inner = labels.masked_fill(torch.rand(3, 8, generator=generator) < 0.3, -100)
    logits = torch.randn(3, 8, 4, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 4)
    loss_fn = JointLoss(written)
    stats = token_stats(logits, labels, needs=loss_fn.needs)
    torch.testing.assert_close(loss_fn.from_stats(stats, inner)[0], loss_fn(logits, inner))


@pytest.mark.parametrize("backend", ["plain", "chunked"])
def test_from_hidden_states_the_family_has_the_value_and_gradient_of_logits(backend):
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(2, 6, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 4, (2, 6), generator=generator)
    labels[1, 3] = -100
    loss_fn = JointLoss(" + ".join(FAMILY))
    stats = token_stats_from_hidden(hidden, weight, labels, needs=loss_fn.needs, backend=backend)
    loss, _ = loss_fn.from_stats(stats, labels)
    expected = loss_fn(hidden @ weight.T, labels)
    torch.testing.assert_close(loss, expected)
    for computed, wanted in zip(*(torch.autograd.grad(one, (hidden, weight)) for one in (loss, expected)), strict=True):
        torch.testing.assert_close(computed, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("tailr( gamma = .8 , min_weight=0.20)", "tailr(gamma=0.8,min_weight=0.2)"),
        ("soft(2,3, kappa=1.0)", "soft(2,3,kappa=1)"),
        ("soft(kappa=0.5,2)", "soft(2,kappa=0.5)"),
        ("near(2,power=0) + convex(order=2.5)", "near(2,power=0) + convex(order=2.5)"),
        ("0.5*mixce(eta=1e-3)", "0.5*mixce(eta=0.001)"),
    ],
)
def test_options_are_printed_back_as_they_are_read(written, canonical):
    assert str(JointLoss(written)) == canonical
    assert str(JointLoss(canonical)) == canonical


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("soft(2,kappa=0)", r"soft\(kappa\): must be above 0, got 0\.0\."),
        ("soft(2,kappa=-1)", r"soft\(kappa\): must be above 0, got -1\.0\."),
        ("soft(2,kappa=2000)", r"soft\(kappa\): must be at most 1,024, got 2,000\.0\."),
        ("near(2,power=-1)", r"near\(power\): must be at least 0, got -1\.0\."),
        ("convex(order=0)", r"convex\(order\): must be above 0, got 0\.0\."),
        ("tailr(gamma=1.5)", r"tailr\(gamma\): must be at most 1, got 1\.5\."),
        ("tailr(min_weight=2)", r"tailr\(min_weight\): must be at most 1, got 2\.0\."),
        ("mixce(eta=-0.1)", r"mixce\(eta\): must be at least 0, got -0\.1\."),
        ("tailr(gama=1)", r"tailr has no option 'gama'\. Did you mean 'gamma'\? It takes gamma, min_weight\."),
        ("soft(2,kapa=1)", r"soft has no option 'kapa'\. Did you mean 'kappa'\? It takes kappa, n\."),
        ("dft(2)", r"dft takes no n, got 2\. Write dft alone\."),
        ("soft", r"soft needs the length of its n-grams\. Write soft\(2\), for example\."),
    ],
)
def test_an_option_that_is_not_allowed_is_named_with_its_bound(written, message):
    with pytest.raises(UserError, match=message):
        JointLoss(written)
