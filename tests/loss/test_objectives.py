"""What every objective must do, whichever it is."""

import math

import oracle
import pytest
import torch
from cases import CASES, GIVEN_CASES, batches
from cases import given as given_beside
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss import OBJECTIVES, JointLoss, Term, TokenStats, token_stats
from ngramloss.loss.objectives import window_counts

each = pytest.mark.parametrize("case", [*CASES, *GIVEN_CASES], ids=repr)
NEEDS = ("cross_logp", "mean_logp", "entropy", "top_entropy")


def values(case, logits, labels):
    stats = token_stats(logits, labels, needs=case.term.needs)
    return case.part.function(stats._replace(**given_beside(case.term, logits, labels)), labels)


def loss_of(case, logits, labels):
    return JointLoss([case.term])(logits, labels, **given_beside(case.term, logits, labels))


@each
@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_value_and_gradient_agree_with_the_oracle(case, batch):
    logits = batch.logits.clone().requires_grad_()
    computed = values(case, logits, batch.labels)
    again = batch.logits.clone().requires_grad_()
    probabilities = [[list(row) for row in sequence.softmax(-1).unbind()] for sequence in again.unbind()]
    for row, labels in enumerate(batch.labels.tolist()):
        if any(label != -100 for label in labels):
            expected = case.oracle(probabilities[row], labels)
            assert abs(computed[row].item() - expected.item()) < 1e-9
            (got,) = torch.autograd.grad(computed[row], logits, retain_graph=True)
            (wanted,) = torch.autograd.grad(expected, again, retain_graph=True)
            assert (got - wanted).abs().max() < 1e-9


@each
def test_gradcheck(case):
    detach, weights, entropies = torch.Tensor.detach, {}, {}

    def frozen(x):  # weights without gradient stay as they were at the first point
        stats = token_stats(x, labels, needs=case.term.needs)
        stats = stats._replace(**given_beside(case.term, x, labels))
        stats = stats._replace(
            **entropies.setdefault("first", {"entropy": stats.entropy, "top_entropy": stats.top_entropy})
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", lambda weight: weights.setdefault("first", detach(weight).clone()))
            return case.part.function(stats, labels)

    generator = torch.Generator().manual_seed(5)
    labels = torch.tensor([[0, 1, 0, 1, 2, 0], [2, 2, -100, 1, 1, 1], [1, -100, -100, -100, -100, -100]])
    right = torch.nn.functional.one_hot(labels.clamp_min(0), 3) * 2.0
    logits = (torch.randn(3, 6, 3, generator=generator, dtype=torch.float64) + right).requires_grad_()
    assert torch.autograd.gradcheck(frozen, (logits,))


@each
@given(batch=batches(), more=st.integers(1, 4), before=st.booleans())
@settings(max_examples=15, deadline=None)
def test_more_padding_changes_nothing(case, batch, more, before):
    B, _, V = batch.logits.shape
    noise, nothing = torch.full((B, more, V), 3.0).double(), torch.full((B, more), -100)
    order = -1 if before else 1
    logits = torch.cat([batch.logits, noise][::order], 1)
    labels = torch.cat([batch.labels, nothing][::order], 1)
    some = (batch.labels != -100).any(-1)
    torch.testing.assert_close(values(case, logits, labels)[some], values(case, *batch)[some])


@each
@given(batch=batches())
@settings(max_examples=15, deadline=None)
def test_a_batch_equals_its_rows_one_by_one(case, batch):
    rows = [values(case, logits[None], labels[None]) for logits, labels in zip(*batch, strict=True)]
    torch.testing.assert_close(values(case, *batch), torch.cat(rows))


@each
@given(batch=batches(longest=12))
@settings(max_examples=20, deadline=None)
def test_values_stay_in_their_stated_range(case, batch):
    for scale in (1.0, 100.0, 1e4):
        computed = values(case, batch.logits * scale, batch.labels)
        assert (computed >= case.low - 1e-12).all()
        assert (computed <= case.high + 1e-12).all()


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_as_close_to_the_truth_as_cross_entropy_is(case, dtype):
    generator = torch.Generator().manual_seed(3)
    B, T, V = 32, 24, 50
    labels = torch.randint(0, 6, (B, T), generator=generator)
    labels[:, 20:] = -100
    exact = 2 * torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    exact.scatter_add_(-1, labels.clamp_min(0)[..., None], torch.full((B, T, 1), 3.0).double())
    top = exact.topk(2).indices[..., :1]
    exact.scatter_add_(-1, top, torch.full((B, T, 1), 0.1).double())  # a margin that rounding cannot cross
    rounded = exact.to(dtype)
    assert torch.equal(rounded.argmax(-1), exact.argmax(-1))
    error = (loss_of(case, rounded, labels) - loss_of(case, exact, labels)).abs()

    def cross_entropy(logits):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    allowed = (cross_entropy(rounded).double() - cross_entropy(exact)).abs()
    assert loss_of(case, rounded, labels).dtype == torch.float32
    assert error <= allowed + 3e-6  # fp32 itself: sums of 640 numbers near 3


@each
def test_backward_works_where_there_is_no_window_and_gives_zero(case):
    for labels in ([[-100, -100, -100]], [[]]):
        labels = torch.tensor(labels, dtype=torch.long)
        logits = torch.randn(*labels.shape, 5, requires_grad=True)
        loss = loss_of(case, logits, labels)
        loss.backward()
        assert loss.item() == 0
        assert not logits.grad.any()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("matches(4)", 1),
        ("rewards(4)", 1),
        ("precision(4)", 0),
        ("precision(4):released", 0),
        ("bag(4)", 1),
        ("bag(4):original", 1),
        ("bag(4):released", 1),
        ("bleu(4)", 0),
        ("eisl(4)", 0),
        ("soft(4)", 1),
        ("soft(4,kappa=1)", 1),
        ("gated(4)", 1),
        ("near(4)", 1),
        ("near(4,power=0)", 1),
    ],
)
def test_a_reference_shorter_than_n_gives_the_stated_value_and_no_gradient(written, value):
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = JointLoss(written)(logits, torch.tensor([[1, 2, 3, -100, -100], [1, 2, -100, 3, 4]]))
    loss.backward()
    assert loss.item() == value
    assert not logits.grad.any()


ABOVE_EVERY_T = [
    Term("matches", (2,)),
    Term("matches", (3,), variant="released"),
    Term("rewards", (2,)),
    Term("precision", (2,)),
    Term("precision", (2,), variant="released"),
    Term("bag", (2,)),
    Term("bag", (2,), variant="original"),
    Term("bag", (2,), variant="released"),
    Term("bleu", (2, 3)),
    Term("eisl", (2,)),
    Term("soft", (2,)),
    Term("gated", (2,)),
    Term("near", (2,)),
]


@pytest.mark.parametrize("term", ABOVE_EVERY_T, ids=str)
@given(batch=batches(), more=st.sampled_from([1, 2, 300_000, 10**9, 10**30]))
@settings(max_examples=20)  # n of 10³⁰ would not end at all, so no deadline is needed
def test_n_above_t_costs_nothing_and_is_as_a_reference_without_windows(term, batch, more):
    n = batch.labels.shape[1] + more
    (part,) = term.parts
    given_n = (n, n + 1) if term.name == "bleu" else n
    logits = batch.logits.clone().requires_grad_()
    stats = token_stats(logits, batch.labels, needs=term.needs)
    computed = part.function.func(stats, batch.labels, n=given_n)
    p = [[list(row) for row in sequence.softmax(-1).unbind()] for sequence in batch.logits.unbind()]
    variant = f"{term.name}_{term.variant}" if term.variant else term.name
    smallest = (
        (len(p[0]) + 1,) if term.name == "bleu" else len(p[0]) + 1
    )  # the oracle's loops end sooner, with as many windows
    for value, row, labels in zip(computed, p, batch.labels.tolist(), strict=True):
        assert value == float(getattr(oracle, variant)(row, labels, smallest))
    (computed.sum() + stats.lse.sum() * 0).backward()
    assert not logits.grad.any()


def test_an_objective_with_n_beyond_the_batch_trains_as_without_that_n():
    logits, labels = torch.randn(2, 6, 9, requires_grad=True), torch.randint(0, 9, (2, 6))
    gradients = [
        torch.autograd.grad(JointLoss(written)(logits, labels), logits)[0]
        for written in ("ce + matches(2)", "ce + matches(2,1024) + bag(1000) + rewards(7) + eisl(1024) + bleu(1024)")
    ]
    torch.testing.assert_close(*gradients)


@each
def test_a_label_of_probability_zero_gives_no_nan(case):
    logits = torch.zeros(1, 4, 5)
    logits[..., 3] = -torch.inf
    logits.requires_grad_()
    loss = loss_of(case, logits, torch.tensor([[1, 3, 1, 2]]))
    loss.backward()
    assert not loss.isnan()
    if case.term.name not in ("ce", "future"):
        assert logits.grad.isfinite().all()


@each
def test_nan_goes_through_to_the_loss(case):
    logits = torch.zeros(2, 4, 5)
    logits[1, 2, 0] = torch.nan
    assert loss_of(case, logits, torch.tensor([[1, 3, 1, 2], [0, 4, 4, 3]])).isnan()
    ignored = torch.tensor([[1, 3, 1, 2], [0, 4, -100, 3]])
    assert loss_of(case, logits, ignored).isfinite()


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if "cross_logp" in objective.needs])
def test_missing_cross_logp_is_named(name):
    labels = torch.tensor([[1, 2]])
    stats = token_stats(torch.zeros(1, 2, 3), labels)
    given = {"lcs": {}, "unlikelihood": {}, "bleu": {"n": (1,)}}.get(name, {"n": 1})
    with pytest.raises(ValueError, match=r"need.* `cross_logp`: compute the stats with needs="):
        OBJECTIVES[name].formula()(stats, labels, **given)


def test_missing_mean_logp_is_named():
    labels = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="ce with smoothing needs `mean_logp`"):
        OBJECTIVES["ce"].formula()(token_stats(torch.zeros(1, 2, 3), labels), labels, smoothing=0.1)


@pytest.mark.parametrize(
    ("variant", "missing"), [(None, "eaft needs `entropy`"), ("released", "eaft:released needs `top_entropy`")]
)
def test_missing_entropy_is_named(variant, missing):
    labels = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=missing):
        OBJECTIVES["eaft"].formula(variant)(token_stats(torch.zeros(1, 2, 3), labels), labels)


@pytest.mark.parametrize("variant", [None, "released"])
def test_eaft_on_a_vocabulary_of_more_than_twenty_words(variant):
    generator = torch.Generator().manual_seed(9)
    logits = (3 * torch.randn(2, 5, 60, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.tensor([[1, 59, 3, 20, 21], [0, -100, 30, 2, 2]])
    term = Term("eaft", variant=variant, options={"alpha": 1.5})
    computed = token_stats(logits, labels, needs=term.needs)
    p = [[list(row) for row in sequence.softmax(-1).unbind()] for sequence in logits.unbind()]
    expected = torch.stack(
        [
            getattr(oracle, "eaft_released" if variant else "eaft")(row, ids, 1.5)
            for row, ids in zip(p, labels.tolist(), strict=True)
        ]
    )
    got = term.parts[0].function(computed, labels)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (got, expected)))


def test_eaft_is_cross_entropy_with_alpha_zero_and_may_weigh_more_than_it():
    logits, labels = torch.zeros(1, 3, 400, dtype=torch.float64), torch.tensor([[1, 2, 3]])
    logits[0, 0, 1] = 5.0
    torch.testing.assert_close(JointLoss("eaft(alpha=0)")(logits, labels), JointLoss("ce")(logits, labels))
    even = torch.zeros(1, 3, 400, dtype=torch.float64)
    assert JointLoss("eaft")(even, labels) == pytest.approx(2 * math.log(20) * 2)  # 400 is the square of 20
    assert JointLoss("eaft:released")(even, labels) == pytest.approx(math.log(20) / 3 * math.log(400))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("written", ["eaft", "eaft(alpha=0)", "eaft(alpha=0.5):released"])
def test_eaft_itself_is_not_finite_where_a_logit_is_not(written, broken):
    logits, labels = torch.zeros(2, 3, 30), torch.tensor([[1, 2, 3], [1, -100, 3]])
    logits[:, 1, 7] = broken
    (term,) = JointLoss(written).terms
    value = term.parts[0].function(token_stats(logits, labels, needs=term.needs), labels)
    assert value.isfinite().tolist() == [False, True]


@pytest.mark.parametrize(("written", "name"), [("eaft", "entropy"), ("eaft:released", "top_entropy")])
def test_the_weight_of_eaft_has_no_gradient_even_if_the_statistics_do(written, name):
    logp, entropy = torch.full((1, 3), -1.0, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    labels = torch.tensor([[1, 2, 3]])
    (part,) = JointLoss(written).parts
    part.function(TokenStats(logp, labels, logp, logp, **{name: entropy}), labels).sum().backward()
    assert entropy.grad is None
    assert (logp.grad < 0).all()


def test_a_certain_model_adds_nothing_to_eaft_even_where_the_label_is_impossible():
    logits = torch.full((1, 2, 5), -torch.inf).masked_fill(torch.arange(5) == 2, 0.0).requires_grad_()
    for written in ("eaft", "eaft:released", "eaft(alpha=0.5)"):
        loss = JointLoss(written)(logits, torch.tensor([[2, 3]]))
        assert loss == 0
        assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "written",
    [
        "ce + matches(2,3,4)",
        "rewards(2) + precision(2)",
        "matches(3):released",
        "soft(2,kappa=1) + gated(2) + near(2)",
        "convex + dft + tailr + mixce + unlikelihood",
        "accept(4) + accept(3):detached + accept(20):gated",
        "eaft + eaft:released",
    ],
)
def test_compiles_into_one_graph(written):
    torch._dynamo.reset()
    loss_fn = JointLoss(written)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (3, 9), generator=generator)
    labels[0, 5:] = -100
    eager = torch.randn(3, 9, 4, generator=generator).requires_grad_()
    compiled = eager.detach().clone().requires_grad_()
    loss = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")(compiled, labels)
    loss.backward()
    expected = loss_fn(eager, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(compiled.grad, eager.grad)


@pytest.mark.parametrize("case", [c for c in CASES if c.term.variant == "released"], ids=repr)
def test_released_variants_on_many_copies_of_one_ngram(case):
    labels = torch.tensor([[0] * 9, [0, 0, 0, 0, 0, -100, 0, 0, 0], [0, 1] * 4 + [0]])
    generator = torch.Generator().manual_seed(3)
    right = 3.0 * torch.nn.functional.one_hot(labels.clamp_min(0), 2)
    logits = torch.randn(3, 9, 2, generator=generator, dtype=torch.float64) / 4 + right
    computed = values(case, logits, labels)
    for row in range(3):
        p = [list(x) for x in logits[row].softmax(-1).unbind()]
        assert computed[row].item() == pytest.approx(case.oracle(p, labels[row].tolist()).item(), abs=1e-12)


def test_an_impossible_reference_stops_at_the_stated_floor():
    logits, labels = torch.zeros(1, 3, 5, dtype=torch.float64), torch.tensor([[3, 3, 3]])
    logits[..., 3] = -torch.inf
    needs = ("cross_logp",)
    stats = token_stats(logits, labels, needs=needs)
    assert OBJECTIVES["bleu"].formula()(stats, labels, n=(1,)).item() == pytest.approx(-1e-12)
    assert OBJECTIVES["lcs"].formula()(stats, labels).item() == pytest.approx(69.0776, abs=1e-3)
    assert OBJECTIVES["eisl"].formula()(stats, labels, n=2).item() == pytest.approx(1e30)


def test_log_probabilities_are_zero_without_gradient_where_a_label_does_not_count():
    labels = torch.tensor([[1, -100, 2]])
    logits = torch.randn(1, 3, 4)
    logits[0, 1] = torch.nan
    logits.requires_grad_()
    stats = token_stats(logits, labels, needs=NEEDS)
    assert stats.best_logp[0, 1] == stats.label_logp[0, 1] == stats.mean_logp[0, 1] == 0
    assert stats.entropy[0, 1] == stats.top_entropy[0, 1] == 0
    assert not stats.cross_logp[0, 1].any()
    assert not stats.cross_logp[0, :, 1].any()
    for written in ("matches(1)", "bag(1)", "ce", "eaft"):
        (gradient,) = torch.autograd.grad(JointLoss(written)(logits, labels), logits)
        assert gradient[0, [0, 2]].isfinite().all()


def test_a_bad_label_is_refused_inside_compiled_code():
    torch._dynamo.reset()
    loss_fn = torch.compile(JointLoss("ce"), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="labels must be -100 or an id below the vocabulary size"):
        loss_fn(torch.zeros(1, 2, 5), torch.tensor([[1, 9]]))


def test_repeated_ngram_is_rewarded_once():
    labels = torch.tensor([[5, 6, 5, 6, 7, 5, 6]])
    logp = torch.full((1, 7), 0.9).double().log()
    stats = TokenStats(logp, labels, logp, logp)
    for written in ("matches(2)", "rewards(2)"):
        (part,) = JointLoss(written).parts
        assert part.function(stats, labels).item() == pytest.approx(1 - 4 * 0.81 / 6)  # 5 6, 6 5, 6 7 and 7 5


def test_one_more_match_below_its_types_mean_raises_matches():
    labels = torch.tensor([[5, 6, 9, 5, 6]])
    sure = torch.tensor([[0.9, 0.9, 0.9, 0.4, 0.4]]).double().log()
    once, twice = torch.tensor([[5, 6, 1, 1, 1]]), torch.tensor([[5, 6, 1, 5, 6]])
    (part,) = JointLoss("matches(2)").parts
    fewer, more = (part.function(TokenStats(sure, best, sure, sure), labels) for best in (once, twice))
    assert more > fewer


@given(batch=batches(longest=10), n=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_windows_have_one_id_if_and_only_if_they_are_equal(batch, n):
    candidate = batch.logits.argmax(-1)
    both = window_counts.ids(candidate, batch.labels, n=n)
    for row in range(len(candidate)):
        spans = [tuple(s[row, t : t + n].tolist()) for s in (candidate, batch.labels) for t in range(both[0].shape[1])]
        numbers = [int(found[row, t]) for found in both for t in range(both[0].shape[1])]
        assert all(
            (a == b) == (x == y)
            for a, x in zip(spans, numbers, strict=True)
            for b, y in zip(spans, numbers, strict=True)
        )
        assert all(0 <= number < len(numbers) for number in numbers)


@given(batch=batches(longest=10), n=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_comparing_pairs_and_sorting_find_the_same_ids(batch, n):
    ranked = window_counts.ids(batch.labels, n=n)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_counts, "_compares_pairs", lambda keys: keys.shape[1] > 0)
        paired = window_counts.ids(batch.labels, n=n)[0]
    assert torch.equal(ranked[:, :, None] == ranked[:, None], paired[:, :, None] == paired[:, None])
    assert (paired < max(paired.shape[1], 1)).all()


def test_ids_at_the_edge_of_the_packing_are_told_apart():
    top = 2**31 - 1
    tokens = torch.tensor([[0, top, 1, 0, top, top, 0, 0, top, -100, top, 1, 0, 2**16, 0, 2**31 - 2**16]])
    for n in (1, 2, 3, 4, 7):
        (found,) = window_counts.ids(tokens, n=n)
        spans = [tuple(tokens[0, t : t + n].tolist()) for t in range(16 - n + 1)]
        assert len(set(spans)) == len(found.unique())


@given(batch=batches(longest=10))
@settings(max_examples=60, deadline=None)
def test_earlier_counts_the_marked_windows_before(batch):
    (found,) = window_counts.ids(batch.labels, n=1)
    marked = window_counts.real(batch.labels, 1)
    got = window_counts.earlier(found, where=marked)
    for row in range(len(found)):
        for t in range(found.shape[1]):
            before = [s for s in range(t) if marked[row, s] and found[row, s] == found[row, t]]
            assert got[row, t] == len(before)
