"""Numbers that are given beside the labels: weights of single tokens, in every way to compute a loss."""

import oracle
import pytest
import torch
from cases import CASES, GIVEN_CASES, batches
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss import OBJECTIVES, JointLoss, token_stats
from ngramloss.errors import UserError
from ngramloss.loss.stats import GIVEN, labelled, with_given

WEIGHTED = [case for case in CASES if OBJECTIVES[case.term.name].weighted]
REFUSED = ["precision(2)", "bag(2)", "bleu(1,2)", "lcs", "eisl(2)", "accept(2)", "convex"]
WINDOWS = {"matches", "rewards", "gated", "soft", "near"}
JOINT = "ce(smoothing=0.1) + matches(2,3) + 0.5*near(2) + unlikelihood + soft(1)"
each = pytest.mark.parametrize("case", WEIGHTED, ids=repr)


def test_what_can_be_weighted_is_what_the_design_says():
    assert {case.term.name for case in WEIGHTED} == WINDOWS | {
        "ce",
        "dft",
        "tailr",
        "mixce",
        "eaft",
        "unlikelihood",
        "focal",
    }
    assert not any(OBJECTIVES[name.partition("(")[0]].weighted for name in REFUSED)


@pytest.mark.parametrize("case", GIVEN_CASES, ids=repr)
def test_tokens_of_terms_that_read_given_numbers_are_weighted(case):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    labels, weights = torch.tensor([[1, 2, 0], [4, -100, -100]]), torch.tensor([[0.5, 2.0, 0.0], [3.0, 1.0, 1.0]])
    stats = with_given(token_stats(logits, labels), labels, dict.fromkeys(GIVEN, -weights - 0.1))
    (part,) = case.term.parts
    alone = [part.function(stats, labels.where(torch.arange(3) == t, -100)) for t in range(3)]
    value = part.function(with_given(stats, labels, {"weights": weights}), labels)
    torch.testing.assert_close(value, sum(one * weights[:, t] for t, one in enumerate(alone)))


def expected(case, p, labels, weights):
    """The oracle's value of one row."""
    term = case.term
    if term.name in WINDOWS:
        (n,) = term.n
        most = {"most": 3} if term.variant == "released" and n >= 3 else {}
        return oracle.weighted_windows(term.name, p, labels, weights, n, **term.options, **most)
    return oracle.weighted_tokens(case.oracle, p, labels, weights)


def drawn(data, labels):
    numbers = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=labels.numel(), max_size=labels.numel())
    return torch.tensor(data.draw(numbers), dtype=torch.float64).view_as(labels)


def with_weights(case, logits, labels, weights):
    stats = with_given(token_stats(logits, labels, needs=case.term.needs), labels, {"weights": weights})
    return case.part.function(stats, labels)


@each
@given(data=st.data(), batch=batches(longest=6, rows=2))
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_agree_with_plain_loops(case, data, batch):
    weights = drawn(data, batch.labels)
    logits = batch.logits.clone().requires_grad_()
    computed = with_weights(case, logits, batch.labels, weights)
    again = batch.logits.clone().requires_grad_()
    probabilities = [[list(row) for row in sequence.softmax(-1).unbind()] for sequence in again.unbind()]
    for row, labels in enumerate(batch.labels.tolist()):
        if any(label != -100 for label in labels):
            wanted = expected(case, probabilities[row], labels, weights[row].tolist())
            assert abs(computed[row].item() - wanted.item()) < 1e-9
            (got,) = torch.autograd.grad(computed[row], logits, retain_graph=True, allow_unused=True)
            (slope,) = torch.autograd.grad(wanted, again, retain_graph=True)
            assert ((0 if got is None else got) - slope).abs().max() < 1e-9


@each
@given(batch=batches())
@settings(max_examples=10, deadline=None)
def test_weights_of_1_change_nothing(case, batch):
    some = (batch.labels != -100).any(-1)
    ones = torch.ones_like(batch.labels)
    stats = token_stats(*batch, needs=case.term.needs)
    plain = case.part.function(stats, batch.labels)
    torch.testing.assert_close(with_weights(case, *batch, ones)[some], plain[some])


WHOLE_GRADIENT = {*WINDOWS, "ce", "focal"} - {"near"}
"""Those whose gradient goes through all factors."""


@pytest.mark.parametrize("case", [case for case in WEIGHTED if case.term.name in WHOLE_GRADIENT], ids=repr)
def test_gradcheck(case):
    generator = torch.Generator().manual_seed(5)
    labels = torch.tensor([[0, 1, 0, 1, 2, 0], [2, 2, -100, 1, 1, 1]])
    weights = torch.rand(2, 6, generator=generator)
    right = torch.nn.functional.one_hot(labels.clamp_min(0), 3) * 2.0
    logits = (torch.randn(2, 6, 3, generator=generator, dtype=torch.float64) + right).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: with_weights(case, x, labels, weights), (logits,))


def batch_of(B=3, T=7, V=11, D=8):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(B, T, D, generator=generator), torch.randn(V, D, generator=generator)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 5:], labels[1, :2] = -100, -100
    return hidden, weight, labels, torch.rand(B, T, generator=generator)


@pytest.mark.parametrize("backend", ["plain", "chunked"])
def test_from_hidden_is_the_loss_from_logits(backend):
    hidden, weight, labels, weights = batch_of()
    from_logits = JointLoss(JOINT).with_parts(hidden @ weight.T, labels, weights=weights)
    loss_fn = JointLoss(JOINT, backend=backend)
    torch.testing.assert_close(loss_fn.from_hidden(hidden, weight, labels, weights=weights), from_logits.total)
    positions = labelled(labels, torch.zeros_like(labels)).positions
    found = loss_fn.from_hidden(hidden, weight, labels, weights=weights, positions=positions)
    torch.testing.assert_close(found, from_logits.total)
    assert from_logits.total != JointLoss(JOINT)(hidden @ weight.T, labels)


def test_denominators_stay_counts():
    hidden, weight, labels, weights = batch_of()
    one, two = (JointLoss(JOINT)(hidden @ weight.T, labels, weights=each) for each in (weights, 2 * weights))
    torch.testing.assert_close(two, 2 * one)
    mask = labels != -100
    token = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
    mean = (token.view_as(labels) * weights).sum() / mask.sum()
    torch.testing.assert_close(JointLoss("ce")(hidden @ weight.T, labels, weights=weights), mean)


def test_weights_follow_their_tokens_when_packed_rows_are_unpacked():
    hidden, weight, labels, weights = batch_of()
    logits = hidden @ weight.T
    alone = [
        JointLoss(JOINT)(
            logits[row : row + 1], labels[row : row + 1], weights=weights[row : row + 1], num_tokens=1, num_sequences=1
        )
        for row in range(3)
    ]
    flat = [x.reshape(1, -1, *x.shape[2:]) for x in (logits, labels, weights)]
    segments = torch.arange(3).repeat_interleave(7)[None]
    packed = JointLoss(JOINT)(flat[0], flat[1], weights=flat[2], segments=segments, num_tokens=1, num_sequences=1)
    torch.testing.assert_close(packed, sum(alone))


def test_rows_have_their_shares():
    hidden, weight, labels, weights = batch_of()
    logits = hidden @ weight.T
    rows = JointLoss(JOINT, reduction="none")(logits, labels, weights=weights)
    torch.testing.assert_close(rows.sum(), JointLoss(JOINT)(logits, labels, weights=weights))


def test_a_token_without_weight_adds_nothing_even_if_it_is_impossible():
    logits = torch.zeros(1, 3, 4)
    logits[0, 1, 2] = -torch.inf
    logits.requires_grad_()
    labels, weights = torch.tensor([[1, 2, 3]]), torch.tensor([[1.0, 0.0, 1.0]])
    loss = JointLoss("ce + focal")(logits, labels, weights=weights)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad[0, [0, 2]].isfinite().all()


def test_weights_have_no_gradient_and_padding_is_not_read():
    hidden, weight, labels, weights = batch_of()
    given = weights.masked_fill(labels == -100, float("nan")).requires_grad_()
    logits = (hidden @ weight.T).requires_grad_()
    loss = JointLoss(JOINT)(logits, labels, weights=given)
    loss.backward()
    assert given.grad is None
    torch.testing.assert_close(loss, JointLoss(JOINT)(logits, labels, weights=weights))


def test_kernels_step_aside_for_weights():
    from ngramloss.loss.kernels import replay

    hidden, weight, labels, weights = batch_of()
    stats = with_given(token_stats(hidden @ weight.T, labels), labels, {"weights": weights})
    (part,) = JointLoss("matches(2)").parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_on_current_gpu", lambda _: True)
        patch.setattr(replay, "triton_is_installed", lambda: 1 / 0)
        assert replay.fastest(part, stats) is part.function


# Focal loss where its slope is 0 times infinity


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 1.0, 2.0, 7.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 1.0, 10.0, 50.0, 100.0, 1e4, -50.0, -1e4, float("-inf")])
def test_the_gradient_of_focal_is_finite_wherever_that_of_ce_is(gamma, dtype, margin):
    logits = torch.zeros(1, 1, 5, dtype=dtype)
    logits[..., 2] = margin
    logits.requires_grad_()
    labels = torch.tensor([[2]])
    stats = token_stats(logits, labels)
    logp = stats.label_logp.detach().requires_grad_()
    (part,) = JointLoss(f"focal(gamma={gamma})").parts
    value = part.function(stats._replace(label_logp=logp), labels)
    (slope,) = torch.autograd.grad(value, logp)
    assert slope.isfinite().all()
    assert value.isfinite().all() or margin == float("-inf")
    assert -1 - 2.5 * gamma <= slope.item() <= 0, "the loss falls as the probability grows"


# Bad input


@pytest.mark.parametrize("name", REFUSED)
def test_terms_that_are_no_sums_refuse_weights(name):
    hidden, weight, labels, weights = batch_of()
    term = JointLoss(name).parts[0].name
    with pytest.raises(UserError, match=r"cannot weight single tokens, because it is not a sum") as stop:
        JointLoss(f"ce + {name}")(hidden @ weight.T, labels, weights=weights)
    assert str(stop.value).startswith(term)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w[:, :-1], r"weights must have a number for each label, \[B, T\] = \[3, 7\], got \[3, 6\]"),
        (lambda w: w[0], r"got \[7\]"),
        (lambda w: w - 2, r"weights must be finite and 0 or more, got -\d.* at row 0, position 0\. To leave a token"),
        (lambda w: w / 0, "got inf at row 0, position 0"),
        (lambda w: w.index_fill(1, torch.tensor([3]), float("nan")), "got nan at row 0, position 3"),
    ],
)
def test_weights_that_cannot_be_are_refused(change, sentence):
    hidden, weight, labels, weights = batch_of()
    with pytest.raises(UserError, match=sentence):
        JointLoss("ce")(hidden @ weight.T, labels, weights=change(weights))


def test_weights_are_a_tensor():
    hidden, weight, labels, _ = batch_of()
    with pytest.raises(TypeError, match=r"weights must be numbers, a tensor \[B, T\], got list"):
        JointLoss("ce")(hidden @ weight.T, labels, weights=[[1.0]])


def test_weights_of_ids_are_pointed_to_weights_of_tokens():
    with pytest.raises(TypeError, match=r"Ids of the vocabulary have no weights; tokens have"):
        JointLoss("ce", weight=torch.ones(3))
