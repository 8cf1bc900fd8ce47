"""The objectives that compare candidates: rank, risk and prefer."""

import copy
import pickle
from functools import partial

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ngramloss as ng
from ngramloss import OBJECTIVES, CandidateStats, JointLoss, Objective, Term, TokenStats, UserError
from ngramloss.loss.objectives.candidates.by_score import ranked
from ngramloss.loss.stats import checked_candidates

NAMES = ["rank", "risk", "prefer"]
WRITTEN = [
    ("rank", {}),
    ("rank", {"margin": 0.5, "alpha": 0.6}),
    ("rank", {"margin": 0.0, "alpha": 0.0}),
    ("risk", {}),
    ("risk", {"sharpness": 0.7}),
    ("risk", {"sharpness": 0.0}),
    ("prefer", {}),
    ("prefer", {"beta": 2.0, "alpha": 1.0, "margin": 0.5}),
]
each = pytest.mark.parametrize(("name", "options"), WRITTEN)
ALL = "ce + matches(2,3,4) + 10*rank(margin=0.001,alpha=2) + risk(sharpness=0.1) + 0.5*prefer(beta=0.1,alpha=1,margin=0.5)"


def candidates(logp, length, score, **more):
    return CandidateStats(
        torch.tensor(logp, dtype=torch.float64), torch.tensor(length), torch.tensor(score, dtype=torch.float64), **more
    )


@st.composite
def drawn(draw, rows=3, most=6):
    """Few scores, so that they tie; absent candidates at any place, with numbers that must not count."""
    B, K = draw(st.integers(1, rows)), draw(st.integers(1, most))

    def table(values):
        return [draw(st.lists(values, min_size=K, max_size=K)) for _ in range(B)]

    logp = torch.tensor(table(st.integers(-60, 0)), dtype=torch.float64) / 4
    logp += 1e-3 * torch.rand(
        B, K, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))), dtype=torch.float64
    )
    length = torch.tensor(table(st.sampled_from([0, 1, 2, 3, 7])))
    score = torch.tensor(table(st.sampled_from([0.0, 0.25, 0.5, 1.0])), dtype=torch.float64)
    return CandidateStats(logp, length, score)


def example(B=8, K=5, T=7, V=6, seed=0, dtype=torch.float64):
    """Logits, labels and candidates; one row has no labels, one no candidates, one a single one, and scores tie."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[1], labels[0, 3:] = -100, -100
    logits = torch.randn(B, T, V, generator=generator, dtype=dtype) + 2 * F.one_hot(labels.clamp_min(0), V)
    length = torch.randint(1, 9, (B, K), generator=generator)
    length[2], length[3, 1:], length[4, 2] = 0, 0, 0
    score = torch.randint(0, 4, (B, K), generator=generator).to(dtype) / 4
    logp = -5 * torch.rand(B, K, generator=generator, dtype=dtype)
    return logits.requires_grad_(), labels, CandidateStats(logp.requires_grad_(), length, score)


# Formulas


def value_of(name, stats, **options):
    """An objective's value of each row, from candidates that are checked as in the joint loss, [B]."""
    return OBJECTIVES[name].function(checked_candidates(stats), **options)


@each
@given(stats=drawn())
@settings(max_examples=80, deadline=None)
def test_value_and_gradient_agree_with_the_oracle(name, options, stats):
    logp, again = stats.logp.clone().requires_grad_(), stats.logp.clone().requires_grad_()
    computed = value_of(name, stats._replace(logp=logp), **options)
    assert computed.shape == stats.logp.shape[:1]
    for row in range(len(logp)):
        expected = getattr(oracle, name)(
            list(again[row]), stats.length[row].tolist(), stats.score[row].tolist(), **options
        )
        assert computed[row].item() == pytest.approx(expected.item(), abs=1e-10)
        (got,) = torch.autograd.grad(computed[row], logp, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, again, retain_graph=True)
        torch.testing.assert_close(got, wanted)


@each
def test_gradcheck(name, options):
    stats = candidates(
        [[-3.1, -5.2, -4.3, -1.4], [-2.0, -3.3, 0.0, -9.0]],
        [[3, 4, 2, 5], [2, 6, 0, 1]],
        [[0.5, 0.9, 0.5, 0.1], [0.2, 0.3, 0.9, 0.2]],
    )
    assert torch.autograd.gradcheck(
        lambda logp: value_of(name, stats._replace(logp=logp), **options), stats.logp.requires_grad_()
    )


@each
@given(stats=drawn(), number=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e300, 0.0]))
@settings(max_examples=40, deadline=None)
def test_the_numbers_of_an_absent_candidate_count_for_nothing(name, options, stats, number):
    absent = stats.length == 0
    logp, other = stats.logp.clone().requires_grad_(), stats.logp.masked_fill(absent, number).requires_grad_()
    strange = CandidateStats(other, stats.length.double(), stats.score.masked_fill(absent, number))
    one, two = (value_of(name, stats._replace(logp=logp), **options), value_of(name, strange, **options))
    assert torch.equal(one, two)
    one.sum().backward()
    two.sum().backward()
    assert torch.equal(logp.grad, other.grad)
    assert not other.grad[absent].any()
    labels = torch.zeros(len(logp), 1, dtype=torch.long)
    assert JointLoss([Term(name, options=options)])(torch.zeros(len(logp), 1, 3), labels, candidates=strange).isfinite()


@each
@given(stats=drawn())
@settings(max_examples=25, deadline=None)
def test_absent_candidates_and_other_rows_change_nothing(name, options, stats):
    function = partial(value_of, name)
    wider = CandidateStats(*(torch.cat([torch.zeros(len(x), 2, dtype=x.dtype), x], 1) for x in stats[:3]))
    torch.testing.assert_close(function(wider, **options), function(stats, **options))
    rows = [function(CandidateStats(*(x[row, None] for x in stats[:3])), **options) for row in range(len(stats.logp))]
    torch.testing.assert_close(torch.cat(rows), function(stats, **options))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(("length", "rank", "risk"), [([0, 0], 0, 0), ([4, 0], 0, 0.75), ([0, 4], 0, 0.5)])
def test_one_candidate_or_none_gives_the_stated_value_and_no_gradient(length, rank, risk):
    stats = candidates([[-3.0, -4.0]], [length], [[0.25, 0.5]])
    stats.logp.requires_grad_()
    for name, value in (("rank", rank), ("prefer", rank), ("risk", risk)):
        computed = value_of(name, stats)
        assert computed.item() == value
        with torch.autograd.detect_anomaly(check_nan=True):  # raises if a step of the backward pass gives NaN
            assert not torch.autograd.grad(value_of(name, stats).sum(), stats.logp)[0].any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_room_for_candidates_are_rows_without_candidates(name):
    empty = torch.zeros(3, 0)
    assert value_of(name, CandidateStats(empty, empty, empty)).tolist() == [0, 0, 0]


@each
@given(stats=drawn())
@settings(max_examples=40, deadline=None)
def test_values_stay_in_their_stated_range(name, options, stats):
    computed = value_of(name, stats, **options)
    assert (computed >= 0).all()
    assert name != "risk" or (computed <= 1 + 1e-12).all()  # shares add up to 1 within rounding


def test_rank_is_the_ranking_loss_of_brios_code():
    """Worked out by hand. BRIO adds, for each i from 1, the mean of max(0, f[i:] − f[:-i] + i·margin).

    f = −0.5, −0.2, −0.9, −0.1, the best candidate first, and a margin of 0.25:
    i = 1: 0.3 + 0.25, −0.7 + 0.25, 0.8 + 0.25 → (0.55 + 0 + 1.05) / 3
    i = 2: −0.4 + 0.5, 0.1 + 0.5               → (0.1 + 0.6) / 2
    i = 3: 0.4 + 0.75                          → 1.15
    """
    stats = candidates([[-0.2 * 4, -0.1 * 9, -0.5 * 4, -0.9 * 1]], [[2, 3, 2, 1]], [[0.5, 0.1, 0.9, 0.3]])
    expected = 1.6 / 3 + 0.7 / 2 + 1.15
    assert value_of("rank", stats, margin=0.25, alpha=2).item() == pytest.approx(expected, abs=1e-12)


@given(stats=drawn(rows=4), margin=st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=40, deadline=None)
def test_the_mean_of_rank_over_full_rows_is_pytorchs_margin_loss_summed_over_distances(stats, margin):
    score, order = stats.score.sort(dim=-1, descending=True, stable=True)
    score = stats.logp.gather(1, order)
    expected = sum(
        (
            F.margin_ranking_loss(score[:, :-d], score[:, d:], torch.ones_like(score[:, d:]), margin=d * margin)
            for d in range(1, score.shape[1])
        ),
        torch.zeros((), dtype=torch.float64),
    )
    full = stats._replace(length=torch.ones_like(stats.length))
    torch.testing.assert_close(value_of("rank", full, margin=margin, alpha=0).mean(), expected)


def test_candidates_with_the_same_score_are_compared_in_the_order_in_which_they_are_given():
    stats = candidates([[-3.0, -1.0], [-1.0, -3.0]], [[1, 1], [1, 1]], [[0.5, 0.5], [0.5, 0.5]])
    assert value_of("rank", stats, margin=0.5, alpha=1).tolist() == [2.5, 0]
    assert value_of("prefer", stats, beta=1).tolist() == pytest.approx([2.126928, 0.126928], abs=1e-6)


def test_ties_keep_their_order_among_many_candidates():
    score = torch.randint(0, 3, (2, 400), generator=torch.Generator().manual_seed(4)) / 2
    order = ranked(CandidateStats(torch.zeros(2, 400), torch.ones(2, 400), score), alpha=0).order
    assert order.tolist() == [oracle.by_score(row, [1] * 400) for row in score.tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_no_number_is_read_on_the_host(name):
    """Tensors of the meta device have shapes and no numbers: a formula that waits for one fails."""
    stats = CandidateStats(*(torch.zeros(3, 5, device="meta") for _ in range(3)))
    assert value_of(name, stats).shape == (3,)
    logits, labels = torch.zeros(3, 4, 6, device="meta"), torch.zeros(3, 4, dtype=torch.long, device="meta")
    token_stats = TokenStats(logits[..., 0], labels, logits[..., 0], logits[..., 0])
    assert JointLoss(f"ce + {name}").part_values(token_stats, labels, candidates=stats).shape == (2,)


def test_far_pairs_of_rank_weigh_more_than_near_ones():
    stats = candidates([[-9.0, -9.0, -9.0, -1.0]], [[1, 1, 1, 1]], [[0.9, 0.7, 0.5, 0.1]])
    stats.logp.requires_grad_()
    value_of("rank", stats, margin=0.0).sum().backward()
    assert stats.logp.grad.tolist() == [pytest.approx([-1, -1 / 2, -1 / 3, 11 / 6])]


@given(stats=drawn())
@settings(max_examples=40, deadline=None)
def test_prefer_is_the_contrast_of_cpo_and_risk_without_sharpness_the_mean(stats):
    full = stats._replace(length=torch.ones_like(stats.length))
    torch.testing.assert_close(value_of("risk", full, sharpness=0), (1 - full.score).mean(-1))
    pair = CandidateStats(
        full.logp[:, :1].repeat(1, 2),
        full.length[:, :1].repeat(1, 2),
        torch.tensor([[0.1, 0.8]]).repeat(len(full.score), 1),
    )
    pair.logp[:, 1] -= 3
    chosen, rejected = pair.logp[:, 1], pair.logp[:, 0]
    torch.testing.assert_close(
        value_of("prefer", pair, beta=0.1, alpha=0, margin=0), -F.logsigmoid(0.1 * (chosen - rejected))
    )


def test_prefer_with_alpha_one_is_the_contrast_of_simpo():
    stats = candidates([[-6.0, -8.0]], [[3, 2]], [[0.9, 0.1]])
    expected = -F.logsigmoid(torch.tensor(2.0 * (-6 / 3 - -8 / 2) - 1.5, dtype=torch.float64))
    assert value_of("prefer", stats, beta=2, alpha=1, margin=1.5).item() == pytest.approx(expected.item())


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_candidates_are_computed_in_fp32_or_better(name, options, dtype):
    _, _, stats = example()
    rounded = stats._replace(logp=stats.logp.detach().to(dtype))
    computed = value_of(name, rounded, **options)
    exact = value_of(name, rounded._replace(logp=rounded.logp.double()), **options)
    assert computed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(computed.double(), exact, rtol=1e-6, atol=1e-6)  # that of fp32


def test_the_margin_is_exact_in_fp64():
    assert value_of("rank", candidates([[0.0, 0.0]], [[1, 1]], [[0.9, 0.1]]), margin=0.1).item() == 0.1


def test_scores_that_differ_only_in_fp64_are_not_ties():
    stats = CandidateStats(
        torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), torch.tensor([[0.5, 0.5 + 1e-12]], dtype=torch.float64)
    )
    assert value_of("rank", stats, margin=0, alpha=0).item() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logp": torch.zeros(2)},
            r"`logp` must be \[B, K\], one row of candidates for each source, got a tensor of shape \[2\]",
        ),
        ({"logp": torch.zeros(2, 3, dtype=torch.long)}, "`logp` must be floating point, got torch.int64"),
        ({"length": torch.zeros(2, 4)}, r"`length` must be \[B, K\] like `logp`, \[2, 3\], got \[2, 4\]"),
        ({"score": torch.zeros(3, 3)}, r"`score` must be \[B, K\] like `logp`, \[2, 3\], got \[3, 3\]"),
        ({"baseline": torch.zeros(3)}, r"`baseline` must be \[B\], \[2\], got \[3\]"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_are_named(name, change, message):
    stats = CandidateStats(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3))._replace(**change)
    with pytest.raises((ValueError, TypeError), match=message):
        value_of(name, stats)
    with pytest.raises((ValueError, TypeError), match=message):
        JointLoss(name)(torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.long), candidates=stats)


def test_something_else_than_candidates_is_refused():
    with pytest.raises(TypeError, match="candidates must be CandidateStats"):
        checked_candidates((torch.zeros(1, 1),) * 3)
    good = CandidateStats(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2))
    assert checked_candidates(good).baseline is good.baseline


@pytest.mark.slow
def test_the_terms_compile_into_one_graph():
    torch._dynamo.reset()
    logits, labels, stats = example(dtype=torch.float32)
    loss_fn = JointLoss(ALL)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    one, two = loss_fn(logits, labels, candidates=stats), compiled(logits, labels, candidates=stats)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [logits, stats.logp]) for loss in (one, two)))


# The written form


@pytest.mark.parametrize(
    "written",
    [
        "rank",
        "10*rank(margin=0.001,alpha=2)",
        "risk(sharpness=0.005)",
        "prefer(beta=0.1,alpha=1,margin=0.5)",
        "0.1*ce(smoothing=0.1) + 0.1*rank(margin=0.1,alpha=0.6)",
        "ce + rank@from(0.5) + risk@ramp(0.1,0.3)",
        "policy",
        "ce + policy(baseline=others,scale=std)",
        "ce@until(0.5) + policy(baseline=greedy,alpha=1)@from(0.5)",
        "0.5*credit(1,2,3,4)",
        "precision(2):student",
        "0.1*ce + 0.9*bag(2):student@ramp(0.1,0.3)",
        "ce + matches(2,3,4):student",
        "policy(baseline=others,scale=std) + policy(baseline=greedy) + credit(1,2) + 0.5*precision(2):student + rank",
        ALL,
    ],
)
def test_the_written_form_is_read_and_written_back(written):
    loss_fn = JointLoss(written)
    assert str(loss_fn) == str(JointLoss(str(loss_fn))) == written
    assert str(copy.deepcopy(loss_fn)) == str(pickle.loads(pickle.dumps(loss_fn))) == written


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("rank(2)", "rank takes no n, got 2. Write rank alone."),
        ("rank(margin=-1)", "rank(margin): must be at least 0, got -1.0."),
        ("rank(alpha=5)", "rank(alpha): must be at most 4, got 5.0."),
        ("risk(sharpness=-0.1)", "risk(sharpness): must be at least 0, got -0.1."),
        ("prefer(beta=0)", "prefer(beta): must be above 0, got 0.0."),
        ("prefer(marign=1)", "prefer has no option 'marign'. Did you mean 'margin'? It takes beta, alpha, margin."),
        ("rank:released", "rank has no variant 'released'. Leave it out: it has none."),
        ("rnk", "unknown objective 'rnk'. Did you mean 'rank'?"),
        ("policy(baseline=median)", "policy(baseline): must be one of mean, others, greedy, got 'median'."),
        ("policy(baseline=1)", "policy(baseline): must be one of mean, others, greedy, got 1."),
        ("policy(scale=)", "expected a number, got ')':"),
        ("policy(scale=-std)", "expected a number, got 'std':"),
        ("policy(alpha=mean)", "policy(alpha): must be a number, got 'mean'."),
        ("policy(2)", "policy takes no n, got 2. Write policy alone."),
        ("credit", "credit needs the length of its n-grams. Write credit(2), for example."),
        ("credit(2):student", "credit has no variant 'student'. Leave it out: it has none."),
        ("rewards(2):student", "rewards has no variant 'student'."),
        ("policy + policy", "policy is given twice"),
    ],
)
def test_a_mistake_in_the_written_form_is_named(written, message):
    with pytest.raises(UserError) as raised:
        JointLoss(written)
    assert str(raised.value).startswith(message)


def test_terms_and_parts_say_what_they_read():
    loss_fn = JointLoss("ce + matches(2) + rank + risk + prefer")
    reads = ["tokens", "tokens", "candidates", "candidates", "candidates"]
    assert [term.reads for term in loss_fn.terms] == [part.reads for part in loss_fn.parts] == reads
    assert [OBJECTIVES[name].reads for name in ("ce", *NAMES)] == ["tokens", *["candidates"] * 3]
    assert loss_fn.needs_candidates
    assert not JointLoss("ce + matches(2)").needs_candidates


def test_an_objective_of_ones_own_may_read_candidates(monkeypatch):
    monkeypatch.setitem(
        OBJECTIVES, "unsure", Objective(lambda stats: stats.logp.sum(-1), least_n=None, reads="candidates")
    )
    logits, labels, stats = example()
    counted = stats.logp.where(stats.present, 0.0)[(labels != -100).any(-1)]
    torch.testing.assert_close(JointLoss("unsure")(logits, labels, candidates=stats), counted.sum() / 7)
    for options in ({"least_n": None, "per": "token"}, {"least_n": None, "needs": ("entropy",)}):
        with pytest.raises(
            UserError, match="an objective that reads candidates has one value per sequence and no token statistics"
        ):
            Objective(len, reads="candidates", **options)
    with pytest.raises(UserError, match="an objective reads 'tokens' or 'candidates', got 'rows'"):
        Objective(len, reads="rows")


# In a joint loss


def test_a_joint_loss_is_the_sum_of_its_parts():
    logits, labels, stats = example()
    loss, parts = JointLoss("ce + matches(2,3,4) + 10*rank(margin=0.001,alpha=2)").with_parts(
        logits, labels, candidates=stats
    )
    sequence = (labels != -100).any(-1)
    rank = value_of("rank", stats, margin=0.001, alpha=2)[sequence].sum() / sequence.sum()
    tokens = JointLoss("ce + matches(2,3,4)")(logits, labels)
    torch.testing.assert_close(parts["rank(margin=0.001,alpha=2)"], rank.detach())
    torch.testing.assert_close(loss, tokens + 10 * rank)
    gradients = torch.autograd.grad(loss, [logits, stats.logp])
    torch.testing.assert_close(
        gradients, (*torch.autograd.grad(tokens, logits), *torch.autograd.grad(10 * rank, stats.logp))
    )
    assert not gradients[1][~sequence].any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole_batch(size):
    logits, labels, stats = example()
    loss_fn = JointLoss(ALL)
    counts = {"num_tokens": int((labels != -100).sum()), "num_sequences": int((labels != -100).any(-1).sum())}
    whole = loss_fn(logits, labels, candidates=stats)
    pieces = zip(logits.split(size), labels.split(size), *(x.split(size) for x in stats[:3]), strict=True)
    total = sum(loss_fn(x, y, candidates=CandidateStats(*rest), **counts) for x, y, *rest in pieces)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [logits, stats.logp]) for loss in (total, whole)))


def test_without_reduction_each_row_has_its_share():
    logits, labels, stats = example()
    shares, parts = JointLoss(ALL, reduction="none").with_parts(logits, labels, candidates=stats)
    loss = JointLoss(ALL)(logits, labels, candidates=stats)
    torch.testing.assert_close(shares.sum(), loss)
    assert shares[1] == 0
    values = value_of("risk", stats, sharpness=0.1) / 7
    torch.testing.assert_close(parts["risk(sharpness=0.1)"], values.detach().where((labels != -100).any(-1), 0.0))


@pytest.mark.parametrize("written", NAMES)
def test_an_objective_of_candidates_alone_trains_the_candidates(written):
    logits, labels, stats = example()
    loss = JointLoss(written)(logits, labels, candidates=stats)
    by_logits, by_logp = torch.autograd.grad(loss, [logits, stats.logp])
    assert not by_logits.any()
    assert by_logp.any()
    assert by_logp.isfinite().all()


def test_every_way_to_the_loss_takes_candidates():
    logits, labels, stats = example()
    loss_fn, identity = JointLoss(ALL), torch.eye(6, dtype=torch.float64)
    expected = loss_fn(logits, labels, candidates=stats)
    torch.testing.assert_close(loss_fn.from_hidden(logits, identity, labels, candidates=stats), expected)
    token_stats = ng.token_stats(logits, labels, needs=loss_fn.needs)
    torch.testing.assert_close(loss_fn.from_stats(token_stats, labels, candidates=stats)[0], expected)
    torch.testing.assert_close(
        loss_fn.weighted_sum(loss_fn.part_values(token_stats, labels, candidates=stats)), expected
    )
    torch.testing.assert_close(
        loss_fn.weighted_sum(loss_fn.part_values(token_stats, labels, candidates=stats, by_row=True)).sum(), expected
    )


def test_without_candidates_a_sentence_says_where_they_come_from():
    logits, labels, _ = example()
    loss_fn, token_stats = JointLoss("ce + 2*rank(alpha=1)"), ng.token_stats(logits, labels)
    for attempt in (
        lambda: loss_fn(logits, labels),
        lambda: loss_fn.from_hidden(logits, torch.eye(6).double(), labels),
        lambda: loss_fn.from_stats(token_stats, labels),
        lambda: loss_fn.part_values(token_stats, labels),
        lambda: loss_fn.part_values(token_stats, labels, by_row=True),
    ):
        with pytest.raises(
            UserError,
            match=r"rank\(alpha=1\) needs candidates\. Make them with `ngramloss candidates` and set data.candidates; in "
            r"Python, give rows or batches `candidates` and `scores`",
        ):
            attempt()


def test_candidates_that_no_term_reads_are_refused():
    logits, labels, stats = example()
    with pytest.raises(UserError, match=r"no term of 'ce \+ matches\(2\)' reads them: add rank, risk or prefer"):
        JointLoss("ce + matches(2)")(logits, labels, candidates=stats)
    with pytest.raises(UserError, match="got 8 rows of candidates and 2 of labels"):
        JointLoss("rank")(logits[:2], labels[:2], candidates=stats)


def test_candidates_are_not_replayed(monkeypatch):
    logits, labels, stats = example()
    monkeypatch.setattr("ngramloss.loss.kernels.replay.suits", lambda stats: True)
    monkeypatch.setattr("ngramloss.loss.kernels.replay.replayed", lambda *_: pytest.fail("replayed"))
    JointLoss("ce + rank")(logits, labels, candidates=stats)
    with pytest.raises(UserError, match="needs candidates"):
        JointLoss("ce + rank")(logits, labels)
    with pytest.raises(UserError, match="candidates were given"):
        JointLoss("ce")(logits, labels, candidates=stats)


@pytest.mark.parametrize("field", ["logp", "score", "length"])
@pytest.mark.parametrize("written", [*NAMES, "ce + rank"])
def test_nan_in_a_candidate_goes_through_to_the_loss(written, field):
    _, labels, stats = example()
    stats = CandidateStats(*(x.detach().double() for x in stats[:3]))
    stats._asdict()[field][6, 2] = torch.nan  # neither the best nor the worst
    logits = torch.zeros(8, 7, 6)
    assert JointLoss(written)(logits, labels, candidates=stats).isnan()
    with pytest.raises(ValueError, match="although every log-sum-exp is finite: a candidate's log-probability"):
        JointLoss(written, check=True)(logits, labels, candidates=stats)
    labels[6] = -100
    assert JointLoss(written, check=True)(logits, labels, candidates=stats).isfinite()


def test_a_candidate_that_is_impossible_costs_infinity_or_nothing_but_is_not_hidden():
    stats = candidates([[-1.0, float("-inf")], [float("-inf"), -1.0]], [[2, 2], [2, 2]], [[0.9, 0.1], [0.9, 0.1]])
    assert value_of("rank", stats).tolist() == [0, float("inf")]
    assert value_of("prefer", stats).tolist() == [0, float("inf")]
    assert value_of("risk", stats).tolist() == pytest.approx([0.1, 0.9])


def test_a_schedule_holds_the_weight_of_a_candidate_term():
    logits, labels, stats = example()
    loss_fn, tokens = JointLoss("ce + rank@from(0.5)"), JointLoss("ce")(logits, labels)
    with pytest.raises(UserError, match="depends on the progress of training"):
        loss_fn(logits, labels, candidates=stats)
    loss_fn.progress = 0.4
    torch.testing.assert_close(loss_fn(logits, labels, candidates=stats), tokens)
    loss_fn.progress = 0.6
    assert loss_fn(logits, labels, candidates=stats) > tokens


def test_without_candidates_the_rest_of_the_objective_is_left():
    loss_fn = JointLoss(
        "ce(smoothing=0.1) + 2*rank + bag(2)@from(0.5)", check=True, backend="chunked", memory="lean", reduction="none"
    )
    loss_fn.progress = 0.7
    rest = loss_fn.without("candidates")
    assert str(rest) == "ce(smoothing=0.1) + bag(2)@from(0.5)"
    assert (rest.check, rest.backend, rest.memory, rest.reduction, rest.progress) == (
        True,
        "chunked",
        "lean",
        "none",
        0.7,
    )
    assert str(JointLoss("rank + risk").without("candidates")) == "0*ce"


def test_diagnostics_leave_candidate_terms_out():
    logits, labels, _ = example()
    watched = JointLoss("ce + matches(2) + rank").diagnose(logits, labels)
    expected = JointLoss("ce + matches(2)").diagnose(logits, labels)
    assert watched == expected
