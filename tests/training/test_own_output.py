"""The terms of the model's own output: policy, credit, and the variants :student."""

import copy

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batch, tiny
from own_logits import assert_same_gradients

import ngramloss as ng
from ngramloss import OBJECTIVES, CandidateStats, JointLoss, Objective, Term, TokenStats, UserError
from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.loss.explaining.explain import explain
from ngramloss.loss.stats import checked_candidates, triton_is_installed

STUDENTS = ["matches", "precision", "bag"]
POLICIES = [
    {"baseline": baseline, "scale": scale, "alpha": alpha}
    for baseline, scale, alpha in [
        ("mean", "none", 0.0),
        ("mean", "std", 1.0),
        ("others", "none", 0.5),
        ("others", "std", 0.0),
        ("greedy", "none", 0.0),
        ("greedy", "std", 2.0),
    ]
]
ALL = "ce + policy(baseline=others,scale=std) + policy(baseline=greedy) + credit(1,2) + matches(2):student"
ALL += " + 0.5*precision(2):student + bag(2):student + rank"


def candidates(logits, tokens, labels, score, own=None, baseline=None):
    """Statistics of texts from the logits of all their positions, [B, K, T, V]. ``own`` is the place of the greedy one."""
    B, K, T, _ = logits.shape
    real, logp = tokens != -100, logits.log_softmax(-1)
    token_logp = logp.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1).where(real, 0.0)
    greedy = torch.zeros(B, K, dtype=torch.bool)
    cross = torch.zeros(B, T, labels.shape[1], dtype=logits.dtype)
    if own is not None:
        greedy[:, own] = True
        cross = logp[:, own].gather(-1, labels.clamp_min(0).unsqueeze(1).expand(-1, T, -1))
    return CandidateStats(
        token_logp.sum(-1), real.sum(-1), score, baseline, greedy, tokens, token_logp, cross
    )  # fmt: skip


@st.composite
def drawn(draw, least=1):
    """Few ids, so that n-grams repeat; padding anywhere; texts that are absent; lengths that differ."""
    B, K = draw(st.integers(1, 2)), draw(st.integers(least, 3))
    T, U, V = draw(st.integers(1, 6)), draw(st.integers(1, 6)), 3
    ids = st.sampled_from([0, 0, 0, 1, 1, 2, -100])

    def texts(number, length):
        return [draw(st.lists(ids, min_size=length, max_size=length)) for _ in range(number)]

    tokens, labels = torch.tensor(texts(B * K, T)).view(B, K, T), torch.tensor(texts(B, U))
    score = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=B * K, max_size=B * K))).double()
    source = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = 2 * torch.randn(B, K, T, V, generator=source, dtype=torch.float64)
    own, baseline = draw(st.integers(0, K - 1)), torch.rand(B, generator=source, dtype=torch.float64)
    return logits, tokens, labels, score.view(B, K), own, baseline


def example(B=6, K=3, T=7, U=6, V=5, seed=3, dtype=torch.float64):
    """Logits, labels and candidates of which the first is the greedy text; a row has no labels, one only two candidates."""
    source = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, V, (B, K, T), generator=source), torch.randint(0, V, (B, U), generator=source)
    tokens[torch.arange(T) >= torch.randint(2, T + 1, (B, K, 1), generator=source)] = -100
    tokens[2, 1], tokens[4], labels[1], labels[0, 3:] = -100, -100, -100, -100
    own = torch.randn(B, K, T, V, generator=source, dtype=dtype, requires_grad=True)
    logits = torch.randn(B, U, V, generator=source, dtype=dtype, requires_grad=True)
    score, baseline = torch.rand(B, K, generator=source, dtype=dtype), torch.rand(B, generator=source, dtype=dtype)
    return logits, labels, own, candidates(own, tokens, labels, score, own=0, baseline=baseline)


def value_of(term, stats, labels):
    """The value of each row, from candidates that are checked as in the joint loss, [B]."""
    (part,) = term.parts
    checked = checked_candidates(stats)
    read = checked if "greedy" in part.needs else checked.samples()
    return part.function(read, labels) if part.reads_labels else part.function(read)


def assert_agrees(term, case, expected_of):
    """Value and gradient of each row are those of a plain function of (row, logits [K, T, V])."""
    logits, tokens, labels, score, own, baseline = case
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    stats = candidates(ours, tokens, labels, score, own=own if term.variant else None, baseline=baseline)
    computed = value_of(term, stats, labels)
    assert computed.shape == labels.shape[:1]
    for row in range(len(labels)):
        expected = expected_of(row, theirs[row])
        assert computed[row].item() == pytest.approx(expected.item(), abs=1e-9)
        (got,) = torch.autograd.grad(computed[row], ours, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, theirs)
        torch.testing.assert_close(got, wanted)


# Formulas


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: "-".join(map(str, options.values())))
@given(case=drawn())
@settings(max_examples=40, deadline=None)
def test_policy_agrees_with_the_oracle(options, case):
    _, tokens, _, score, _, baseline = case

    def expected(row, logits):
        real = tokens[row] != -100
        logp = logits.log_softmax(-1).gather(-1, tokens[row].clamp_min(0).unsqueeze(-1)).squeeze(-1).where(real, 0.0)
        length, scores = real.sum(-1).tolist(), score[row].tolist()
        return oracle.policy(list(logp.sum(-1)), length, scores, **options, greedy=baseline[row].item())

    assert_agrees(Term("policy", options=options), case, expected)


@pytest.mark.parametrize("n", [(1,), (2,), (1, 2, 3), (3, 8)])
@given(case=drawn())
@settings(max_examples=40, deadline=None)
def test_credit_agrees_with_the_oracle(n, case):
    _, tokens, labels, *_ = case

    def expected(row, logits):
        logp = logits.log_softmax(-1).gather(-1, tokens[row].clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return oracle.credit(tokens[row].tolist(), [list(text) for text in logp], labels[row].tolist(), n)

    assert_agrees(Term("credit", n), case, expected)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", STUDENTS)
@given(case=drawn())
@settings(max_examples=40, deadline=None)
def test_terms_of_the_own_text_agree_with_the_oracle(name, n, case):
    _, tokens, labels, _, own, _ = case
    function = getattr(oracle, f"{name}_student")

    def expected(row, logits):
        p = [list(row) for row in logits[own].softmax(-1)]
        return function(tokens[row, own].tolist(), p, labels[row].tolist(), n)

    assert_agrees(Term(name, (n,), variant="student"), case, expected)


WRITTEN = [
    *(str(Term("policy", options=options)) for options in POLICIES),
    "credit(1,2)",
    *(f"{name}(2):student" for name in STUDENTS),
]
each = pytest.mark.parametrize("written", WRITTEN)


@each
def test_gradcheck(written):
    (term,) = JointLoss(written).terms
    _, labels, own, stats = example(B=5)

    def value(logits):
        again = candidates(logits, stats.tokens, labels, stats.score, own=0, baseline=stats.baseline)
        return value_of(term, again, labels)

    assert torch.autograd.gradcheck(value, own)


@each
@given(case=drawn())
@settings(max_examples=15, deadline=None)
def test_padding_and_other_rows_change_nothing(written, case):
    logits, tokens, labels, score, own, baseline = case
    (term,) = JointLoss(written).terms
    stats = candidates(logits, tokens, labels, score, own=own, baseline=baseline)
    expected = value_of(term, stats, labels)
    longer = torch.nn.functional.pad(labels, (0, 2), value=-100)
    wider = torch.nn.functional.pad(tokens, (2, 1), value=-100)
    more = torch.nn.functional.pad(logits, (0, 0, 2, 1))
    padded = candidates(more, wider, longer, score, own=own, baseline=baseline)
    torch.testing.assert_close(value_of(term, padded, longer), expected)
    for row in range(len(labels)):
        alone = CandidateStats(*(None if x is None else x[row, None] for x in stats))
        torch.testing.assert_close(value_of(term, alone, labels[row, None]), expected[row, None])


@each
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -7.0])
def test_what_is_written_at_padding_and_in_absent_candidates_counts_for_nothing(written, number):
    (term,) = JointLoss(written).terms
    _, labels, own, stats = example()
    absent = (stats.tokens == -100).all(-1)
    strange = stats._replace(
        logp=stats.logp.masked_fill(absent, number),
        score=stats.score.masked_fill(absent, number),
        token_logp=stats.token_logp.masked_fill(stats.tokens == -100, number),
        greedy_cross_logp=stats.greedy_cross_logp.masked_fill((labels == -100).unsqueeze(1), number).masked_fill(
            (stats.tokens[:, 0] == -100).unsqueeze(2), number
        ),
    )
    one, two = value_of(term, stats, labels), value_of(term, strange, labels)
    assert torch.equal(one, two)
    gradients = [torch.autograd.grad(value.sum(), own, retain_graph=True)[0] for value in (one, two)]
    assert torch.equal(*gradients)
    assert gradients[0].isfinite().all()


# Policy


def test_policy_is_worked_out_by_hand():
    """Scores 0.9, 0.5, 0.1: advantages 0.4, 0, −0.4, leave-one-out 0.6, 0, −0.6, and √(0.32 / 3) divides them."""
    logp = torch.tensor([[-2.0, -8.0, -4.0]], dtype=torch.float64)
    stats = CandidateStats(logp, torch.tensor([[2, 4, 4]]), torch.tensor([[0.9, 0.5, 0.1]], dtype=torch.float64))
    value = {written: value_of(*JointLoss(written).terms, stats, None).item() for written in WRITTEN[:4]}
    assert value["policy(baseline=mean,scale=none,alpha=0)"] == pytest.approx(-(0.4 * -2 + 0.4 * 4) / 3)
    assert value["policy(baseline=others,scale=none,alpha=0.5)"] == pytest.approx(-(0.6 * -(2**0.5) + 0.6 * 2) / 3)
    divided = 0.4 / ((0.32 / 3) ** 0.5 + 1e-6)
    assert value["policy(baseline=mean,scale=std,alpha=1)"] == pytest.approx(-divided * (-1 + 1) / 3, abs=1e-12)
    assert value["policy(baseline=others,scale=std,alpha=0)"] == pytest.approx(-1.5 * divided * (-2 + 4) / 3)


@given(case=drawn(least=2))
@settings(max_examples=40, deadline=None)
def test_leaving_one_out_multiplies_the_advantage_by_k_over_k_minus_one(case):
    logits, tokens, labels, score, *_ = case
    tokens = tokens.masked_fill(tokens == -100, 0)
    stats = candidates(logits, tokens, labels, score)
    written = ("policy(alpha=0.5)", "policy(baseline=others,alpha=0.5)")
    mean, others = (value_of(*JointLoss(each).terms, stats, labels) for each in written)
    torch.testing.assert_close(others, mean * score.shape[1] / (score.shape[1] - 1))


@pytest.mark.parametrize("written", WRITTEN[:6])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_no_gradient_unless_they_differ_from_the_greedy_text(written, score, dtype):
    """Their rounded mean may differ from them, and 1e-6 would make that a large number."""
    for K in (1, 3, 7, 11):
        logp = torch.full((1, K), -5.0, dtype=dtype, requires_grad=True)
        stats = CandidateStats(logp, torch.ones(1, K), torch.full((1, K), score, dtype=dtype), torch.tensor([0.9]))
        (slope,) = torch.autograd.grad(value_of(*JointLoss(written).terms, stats, None).sum(), logp)
        assert slope.any() == (written == "policy(baseline=greedy,scale=none,alpha=0)")


def test_one_sample_and_the_greedy_baseline_are_self_critical_training():
    logp = torch.tensor([[-6.0], [-2.0]], requires_grad=True)
    stats = CandidateStats(logp, torch.tensor([[3], [2]]), torch.tensor([[0.75], [0.25]]), torch.tensor([0.5, 0.5]))
    value = value_of(*JointLoss("policy(baseline=greedy)").terms, stats, None)
    assert value.tolist() == [1.5, -0.5]  # −(r(sample) − r(greedy)) · log p
    assert torch.autograd.grad(value.sum(), logp)[0].tolist() == [[-0.25], [0.25]]


# Credit


def test_credit_goes_to_the_first_copies_of_an_ngram_only():
    from ngramloss.loss.objectives.candidates.credit import credits

    tokens, labels = torch.tensor([[[1, 2, 1, 2, 1, 2, 3]]]), torch.tensor([[1, 2, 9, 1, 2, 3]])
    logp = torch.zeros(1, 1, 7)
    stats = CandidateStats(logp.sum(-1), torch.tensor([[7]]), torch.zeros(1, 1), tokens=tokens, token_logp=logp)
    found = credits(checked_candidates(stats), labels, n=(2,)).credit[0, 0]  # 1 2 is there twice, 2 3 once, 2 1 never
    assert found.tolist() == [1, 0.5, 0.5, 0.5, 0, 0.5, 1]
    pooled = credits(checked_candidates(stats), labels, n=(1, 2)).credit[0, 0]
    assert pooled.tolist() == pytest.approx([1, 2 / 3, 2 / 3, 2 / 3, 0, 1 / 3, 1])


def test_the_gradient_of_credit_adds_up_to_nothing_and_moves_towards_what_is_credited():
    _, labels, _, stats = example()
    logp = stats.token_logp.detach().requires_grad_()
    value_of(*JointLoss("credit(1,2)").terms, stats._replace(token_logp=logp), labels).sum().backward()
    torch.testing.assert_close(logp.grad.sum((-2, -1)), torch.zeros(6, dtype=torch.float64))
    assert not logp.grad[:, 0].any(), "the greedy text is not a sample"


# Own text


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("name", "forced"), [("matches", ""), ("precision", ""), ("bag", ":original")])
def test_a_text_as_long_as_the_reference_has_the_values_of_the_forced_path(name, forced, n):
    """Where the own text is what the model predicts on the forced path, only what is read differs."""
    source = torch.Generator().manual_seed(n)
    labels = torch.randint(0, 3, (5, 8), generator=source)
    labels[1, 5:] = -100
    logits = torch.randn(5, 8, 3, generator=source, dtype=torch.float64)
    tokens = logits.argmax(-1).where(labels != -100, -100)
    stats = candidates(logits.unsqueeze(1), tokens.unsqueeze(1), labels, torch.zeros(5, 1), own=0)
    one = JointLoss(f"{name}({n}):student")(logits, labels, candidates=stats)
    torch.testing.assert_close(one, JointLoss(f"{name}({n}){forced}")(logits, labels))


@pytest.mark.parametrize(
    ("own", "reference", "expected"),
    [
        ([], [5, 6, 7], (1, 0, 1)),
        ([5], [5, 6, 7], (1, 0, 1)),
        ([5, 6], [5], (1, 0, 1)),
        ([5], [5], (1, 0, 1)),
        ([5, 6], [5, 6], (0, -1, 0)),
        ([5, 6], [5, 6, 7], (1 / 2, -1, 1 / 3)),
        ([5, 6, 7, 8], [5, 6], (2 / 3, -1 / 3, 1 / 2)),
        ([5, 6, 5, 6], [5, 6, 9, 9], (2 / 3, -1 / 3, 2 / 3)),
    ],
)
def test_texts_of_other_lengths_have_the_stated_values(own, reference, expected):
    """A certain model and n = 2. A text or reference shorter than n: 1, 0 and 1, without a gradient."""
    tokens = torch.tensor([[own + [-100] * (4 - len(own))]])
    labels = torch.tensor([reference + [-100] * (4 - len(reference))])
    logits = (1e4 * torch.nn.functional.one_hot(tokens.clamp_min(0), 10)).double().requires_grad_()
    stats = candidates(logits, tokens, labels, torch.zeros(1, 1), own=0)
    for name, value in zip(STUDENTS, expected, strict=True):
        computed = value_of(Term(name, (2,), variant="student"), stats, labels)
        assert computed.item() == pytest.approx(value)
        if min(len(own), len(reference)) < 2:
            assert not torch.autograd.grad(computed.sum(), logits, retain_graph=True)[0].any()


def test_only_the_greedy_text_is_read_and_no_other_term_reads_it():
    logits, labels, own, stats = example()
    for written in ("matches(2):student", "precision(2):student", "bag(2):student"):
        slope = torch.autograd.grad(JointLoss(written)(logits, labels, candidates=stats), own, retain_graph=True)[0]
        assert slope[:, 0].any()
        assert not slope[:, 1:].any()
    samples = CandidateStats(*(x[:, 1:] for x in stats[:3]), stats.baseline, None, *(x[:, 1:] for x in stats[5:7]))
    for written in ("rank", "risk", "prefer", *WRITTEN[:6], "credit(1,2)"):
        computed = JointLoss(written)(logits, labels, candidates=stats)
        torch.testing.assert_close(computed, JointLoss(written)(logits, labels, candidates=samples))
        assert not torch.autograd.grad(computed, own, retain_graph=True)[0][:, 0].any()


def test_an_objective_of_ones_own_does_not_get_the_greedy_text_unless_it_asks(monkeypatch):
    seen = []

    def look(stats):
        seen.append(stats)
        return stats.length.sum(-1)

    def own(stats, labels, *, n):
        seen.append(stats)
        return stats.own_text()[1].sum(-1) * n + labels.sum(-1) * 0

    monkeypatch.setitem(OBJECTIVES, "look", Objective(look, least_n=None, reads="candidates"))
    monkeypatch.setitem(OBJECTIVES, "own", Objective(own, reads="candidates", needs=("greedy", "token_logp")))
    logits, labels, _, stats = example()
    JointLoss("look + own(2)")(logits, labels, candidates=stats)
    assert not seen[0].length[:, 0].any()
    assert seen[0].greedy is None
    assert seen[1].length[:, 0].any()
    with pytest.raises(UserError, match="reads candidates has one value per sequence"):
        Objective(look, reads="candidates", needs=("entropy",))


def test_of_several_greedy_texts_the_first_that_is_there_counts():
    *_, stats = example()
    both = stats._replace(greedy=torch.ones(6, 3, dtype=torch.bool), length=stats.length.clone())
    both.length[3, 0] = 0
    tokens, logp = checked_candidates(both).own_text()
    assert torch.equal(tokens[[0, 5]], stats.tokens[[0, 5], 0])
    assert torch.equal(tokens[3], stats.tokens[3, 1])
    assert torch.equal(logp[3], stats.token_logp[3, 1])
    none = checked_candidates(stats._replace(greedy=torch.zeros(6, 3, dtype=torch.bool))).own_text()
    assert (none[0] == -100).all()
    assert not none[1].any()


@each
def test_rows_without_room_for_candidates_have_the_values_of_no_text(written):
    empty, texts, labels = torch.zeros(2, 0), torch.zeros(2, 0, 3, dtype=torch.long), torch.tensor([[5, 6], [6, 7]])
    stats = CandidateStats(
        empty, empty, empty, torch.zeros(2), empty.bool(), texts, texts.double(), torch.zeros(2, 3, 2)
    )
    value = value_of(*JointLoss(written).terms, stats, labels)
    assert value.tolist() == [1.0 if written.startswith(("matches", "bag")) else 0.0] * 2


# In a joint loss


def test_the_loss_says_what_it_needs():
    facts = {
        "ce + matches(2)": (False, False, False, False),
        "rank": (True, True, False, False),
        "policy": (True, True, False, False),
        "policy(baseline=greedy)": (True, True, False, True),
        "credit(2)": (True, True, False, False),
        "ce + bag(2):student": (True, False, True, False),
        "ce + policy(baseline=greedy,scale=std) + precision(2):student": (True, True, True, True),
    }
    for written, expected in facts.items():
        loss_fn = JointLoss(written)
        needs = (
            loss_fn.needs_candidates,
            loss_fn.needs_samples,
            loss_fn.needs_own_text,
            "baseline" in loss_fn.candidate_needs,
        )
        assert needs == expected, written
    assert JointLoss("bag(2):student").needs == frozenset()
    assert JointLoss("bag(2):student + bag(2)").needs == {"cross_logp"}
    assert str(JointLoss(ALL).without("candidates")) == "ce"


def test_micro_batches_add_up_and_rows_have_their_shares():
    logits, labels, own, stats = example()
    loss_fn = JointLoss(ALL)
    counts = {"num_tokens": int((labels != -100).sum()), "num_sequences": int((labels != -100).any(-1).sum())}
    whole = loss_fn(logits, labels, candidates=stats)
    pieces = zip(logits.split(2), labels.split(2), *(x.split(2) for x in stats), strict=True)
    total = sum(loss_fn(x, y, candidates=CandidateStats(*rest), **counts) for x, y, *rest in pieces)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, [logits, own], retain_graph=True) for loss in (total, whole))
    )
    shares = JointLoss(ALL, reduction="none")(logits, labels, candidates=stats)
    torch.testing.assert_close(shares.sum(), whole)
    assert shares[1] == 0


@pytest.mark.parametrize(
    ("written", "missing", "message"),
    [
        ("precision(2):student", "greedy", r"precision\(2\):student reads the model's own greedy text, .*\[online\]"),
        ("matches(2,3):student", "greedy", r"matches\(2\):student reads the model's own .* or give `greedy` \[B, K\]"),
        ("policy(baseline=greedy)", "baseline", r"greedy text, which .*section \[online\].* `baseline` \[B\]"),
        ("credit(2)", "token_logp", r"credit\(2\) reads the tokens of each candidate: pass `tokens` and `token_logp`"),
        ("bag(2):student", "greedy_cross_logp", r"pass `greedy_cross_logp` \[B, T, U\] to CandidateStats"),
    ],
)
def test_what_candidates_lack_is_named(written, missing, message):
    logits, labels, _, stats = example()
    absent = {missing: None} | ({"tokens": None} if missing == "token_logp" else {})
    with pytest.raises(UserError, match=message):
        JointLoss(written)(logits, labels, candidates=stats._replace(**absent))
    with pytest.raises(UserError, match=r"needs candidates"):
        JointLoss(written)(logits, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"greedy": torch.zeros(6, 3)},
            r"`greedy` must be true or false for each candidate, \[6, 3\], got torch.float32",
        ),
        ({"greedy": torch.zeros(6, 2).bool()}, r"got torch.bool of shape \[6, 2\]"),
        ({"tokens": None}, "`tokens` and `token_logp` belong together"),
        ({"tokens": torch.zeros(6, 3, 7)}, r"`tokens` must be ids \[B, K, T\] with \[B, K\] = \[6, 3\].*torch.float32"),
        ({"token_logp": torch.zeros(6, 3, 8)}, r"`token_logp` must be a log-probability of each token, \[6, 3, 7\]"),
        ({"greedy_cross_logp": torch.zeros(6, 8, 6)}, r"the T of `tokens`, 7, got \[6, 8, 6\]"),
        ({"greedy_cross_logp": torch.zeros(6, 7, 4)}, r"with the U of the labels, 6, got \[6, 7, 4\]"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    logits, labels, _, stats = example()
    with pytest.raises((ValueError, TypeError), match=message):
        JointLoss("bag(2):student")(logits, labels, candidates=stats._replace(**change))


def test_weights_of_tokens_are_refused_where_the_reference_is_read():
    logits, labels, _, stats = example()
    weights = torch.ones(labels.shape)
    for written in ("credit(2)", "matches(2):student", "precision(2):student", "bag(2):student"):
        with pytest.raises(UserError, match="cannot weight single tokens"):
            JointLoss(f"ce + {written}")(logits, labels, candidates=stats, weights=weights)
    JointLoss("ce + policy + rank")(logits, labels, candidates=stats, weights=weights)


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("place", [0, 2])
def test_nan_in_a_candidate_goes_through_to_the_loss(written, place):
    logits, labels, _, stats = example()
    broken = stats._replace(logp=stats.logp.detach().clone())
    broken.logp[0, place] = torch.nan
    assert JointLoss(written)(logits, labels, candidates=broken).isnan()


@each
def test_no_number_is_read_on_the_host(written):
    """Tensors of the meta device have shapes and no numbers: a formula that waits for one fails."""
    logits, labels, _, stats = example()
    stats = CandidateStats(*(x.detach().to("meta") for x in stats))
    logits, labels = logits.detach().to("meta"), labels.to("meta")
    token_stats = TokenStats(logits[..., 0], labels, logits[..., 0], logits[..., 0])
    assert JointLoss(f"ce + {written}").part_values(token_stats, labels, candidates=stats).shape == (2,)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_texts_are_computed_in_fp32_or_better(written, dtype):
    (term,) = JointLoss(written).terms
    _, labels, _, stats = example()
    names = ("logp", "token_logp", "greedy_cross_logp")
    rounded = stats._replace(**{name: getattr(stats, name).detach().to(dtype) for name in names})
    exact = rounded._replace(**{name: getattr(rounded, name).double() for name in names})
    computed = value_of(term, rounded, labels)
    assert computed.dtype == torch.float32
    torch.testing.assert_close(computed.double(), value_of(term, exact, labels), rtol=1e-5, atol=1e-5)


def test_sorting_and_comparing_pairs_agree(monkeypatch):
    """On a GPU short rows are compared in pairs; with many samples they are sorted, which takes less memory."""
    _, labels, _, stats = example()
    stats = CandidateStats(*(x.detach() for x in stats))
    terms = [JointLoss(written).terms[0] for written in WRITTEN[6:]]
    expected = [value_of(term, stats, labels) for term in terms]
    monkeypatch.setattr("ngramloss.loss.objectives.window_counts._compares_pairs", lambda keys: keys.shape[1] > 0)
    for term, value in zip(terms, expected, strict=True):
        torch.testing.assert_close(value_of(term, stats, labels), value)


def test_many_rows_are_not_compared_in_pairs():
    from ngramloss.loss.objectives.window_counts import _compares_pairs

    assert _compares_pairs(torch.empty(64, 1024, device="meta"))
    assert not _compares_pairs(torch.empty(65, 1024, device="meta"))
    assert not _compares_pairs(torch.empty(64, 1024))


@pytest.mark.slow
def test_the_terms_compile_into_one_graph():
    torch._dynamo.reset()
    logits, labels, own, stats = example(dtype=torch.float32)
    loss_fn = JointLoss(ALL)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    one, two = loss_fn(logits, labels, candidates=stats), compiled(logits, labels, candidates=stats)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [logits, own], retain_graph=True) for loss in (one, two)))


# The written form


def test_several_n_are_parts_of_their_own_except_in_credit():
    assert [part.name for part in JointLoss("matches(2,3):student").parts] == [
        "matches(2):student",
        "matches(3):student",
    ]
    assert [part.name for part in JointLoss("credit(2,3)").parts] == ["credit(2,3)"]


# The model


def with_candidates(B=3, K=3, T=7, seed=5):
    """Inputs of an attached model: a greedy text, in front in one row and last in another, and samples of several lengths."""
    source = torch.Generator().manual_seed(seed)
    texts = torch.randint(4, 8, (B, K, T), generator=source)
    texts[torch.arange(T) >= torch.randint(2, T + 1, (B, K, 1), generator=source)] = -100
    texts[1, 0] = -100
    greedy = torch.zeros(B, K, dtype=torch.bool)
    greedy[0, 0] = greedy[1, K - 1] = True
    return {
        "candidates": texts,
        "scores": torch.rand(B, K, generator=source),
        "greedy": greedy,
        "baseline": torch.rand(B, generator=source),
    }


def all_logits(model, inputs, compared):
    """The loss from all logits, each text in a forward of its own; gradients stay in a copy."""
    model, labels = ng.detach(copy.deepcopy(model)), inputs["labels"]
    source = {name: value for name, value in inputs.items() if name != "labels"}
    texts, greedy = compared["candidates"], compared["greedy"]
    B, K, T = texts.shape
    token_logp, cross = torch.zeros(B, K, T).double(), torch.zeros(B, T, labels.shape[1]).double()
    for b in range(B):
        for k in range(K):
            length = int((texts[b, k] != -100).sum())
            if length:
                own = texts[b, k, :length].unsqueeze(0)
                logp = model(**{name: x[b : b + 1] for name, x in source.items()}, labels=own).logits.log_softmax(-1)[0]
                token_logp[b, k, :length] = logp.gather(-1, own[0].unsqueeze(-1)).squeeze(-1)
                if greedy[b, k]:
                    cross[b, :length] = logp[:, labels[b].clamp_min(0)]
    stats = CandidateStats(
        token_logp.sum(-1), (texts != -100).sum(-1), compared["scores"], compared["baseline"], greedy, texts, token_logp, cross
    )  # fmt: skip
    loss = JointLoss(ALL)(model(**inputs).logits, labels, candidates=stats)
    loss.backward()
    return loss, model


FUSED = pytest.param("fused", marks=pytest.mark.skipif(not triton_is_installed(), reason="needs Triton"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("backend", ["plain", "chunked", FUSED])
def test_an_attached_model_has_the_loss_of_all_its_logits(family, backend):
    model, inputs, compared = tiny(family, dtype=torch.float64), batch(family), with_candidates()
    expected, other = all_logits(model, inputs, compared)
    attached = ng.attach(model.float() if backend == "fused" else model, ALL, backend=backend)
    loss = attached(**inputs, **compared).loss
    loss.backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if backend == "fused" else {}  # that of fp32
    torch.testing.assert_close(loss.double(), expected, **tolerance)
    assert_same_gradients(model.double(), other, **tolerance)


def test_a_greedy_text_alone_needs_one_pass_over_the_head():
    objective = "ce + bag(2):student + precision(2):student"
    inputs, compared = batch("bart"), with_candidates(K=1)
    compared["greedy"][:] = True
    one = ng.attach(tiny("bart", dtype=torch.float64), objective)(**inputs, **compared).loss
    wider = {name: torch.cat([x, x], 1) if x.ndim > 1 else x for name, x in compared.items()}
    wider["greedy"][:, 1] = False
    torch.testing.assert_close(ng.attach(tiny("bart", dtype=torch.float64), objective)(**inputs, **wider).loss, one)


def statistics(model, inputs):
    """The candidates that the loss of an attached model gets."""
    seen, loss_fn = [], ng.attached_loss(model)
    compute = loss_fn.from_hidden_with_parts
    loss_fn.from_hidden_with_parts = lambda *args, **more: (seen.append(more["candidates"]), compute(*args, **more))[1]
    model(**inputs).loss.backward()
    (stats,) = seen
    return stats


@pytest.mark.parametrize(
    ("objective", "fields"),
    [
        ("ce + rank + policy(baseline=greedy)", set()),
        ("ce + credit(2)", {"tokens", "token_logp"}),
        ("ce + matches(2):student", {"tokens", "token_logp"}),
        ("ce + bag(2):student", {"tokens", "token_logp", "greedy_cross_logp"}),
    ],
)
def test_numbers_of_single_tokens_are_kept_only_for_terms_that_read_them(objective, fields):
    stats = statistics(ng.attach(tiny("bart"), objective), batch("bart") | with_candidates())
    optional = {"tokens", "token_logp", "greedy_cross_logp"}
    assert {name for name in optional if getattr(stats, name) is not None} == fields


def test_candidates_of_a_decoder_only_model_have_their_tokens_and_the_reference_of_their_own_row():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [8, 9, 2], "candidates": [[8, 2], [9, 9, 9, 2]], "scores": [0.7, 0.1]},
        {"input_ids": [4], "labels": [3, 2], "candidates": [[6, 3, 2]], "scores": [0.4]},
    ]
    model = tiny("llama", dtype=torch.float64)
    logp = model(input_ids=torch.tensor([[4, 6, 3, 2]])).logits.log_softmax(-1)[0]
    ng.attach(model, "ce + bag(1):student + credit(1)").train()
    stats = statistics(model, JoinedPadder(1)(rows) | {"greedy": torch.tensor([[True, False], [True, False]])})
    assert stats.tokens[1, 0].tolist() == [6, 3, 2, -100]
    torch.testing.assert_close(stats.token_logp[1, 0, :3], logp[torch.arange(3), [6, 3, 2]])
    torch.testing.assert_close(stats.greedy_cross_logp[1, :3, :2], logp[:3][:, [3, 2]])


def test_candidates_of_a_file_are_refused_with_what_to_do():
    compared = {name: x for name, x in with_candidates().items() if name in ("candidates", "scores")}
    for objective, message in {
        "ce + precision(2):student": r"own greedy text, but the candidates do not mark it.*\[online\]",
        "ce + bag(2):student": r"own greedy text, but the candidates do not mark it.*\[online\]",
        "ce + policy(baseline=greedy)": r"score of the model's greedy text, which the candidates lack.*\[online\]",
    }.items():
        with pytest.raises(UserError, match=message):
            ng.attach(tiny("bart"), objective)(**batch("bart"), **compared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"greedy": torch.zeros(3, 3)},
            r"`greedy` must be true or false for each candidate, \[3, 3\], got torch.float32",
        ),
        ({"greedy": torch.zeros(3, 2).bool()}, r"got torch.bool of shape \[3, 2\]"),
        ({"baseline": torch.zeros(3, 3)}, r"`baseline` must be what the greedy text of each source scores, \[3\]"),
        ({"candidates": None, "scores": None}, "but `candidates` are missing"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ng.attach(tiny("bart"), "ce + matches(2):student")(**batch("bart") | with_candidates() | changes)


def test_in_evaluation_without_candidates_the_other_terms_are_left():
    model = ng.attach(tiny("bart"), ALL).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(**batch("bart")).loss, ng.attach(tiny("bart"), "ce").eval()(**batch("bart")).loss
        )


@pytest.mark.parametrize(
    "written", ["policy", "policy(baseline=others,scale=std)", "policy(baseline=greedy)", "credit(1,2)", *WRITTEN[-3:]]
)
def test_a_model_trained_with_a_term_alone_writes_more_of_the_reference(written):
    """A table of logits for each position is the model. A wrong sign would make its texts worse."""
    source, labels = torch.Generator().manual_seed(1), torch.tensor([[0, 1, 2, 3, 0, 4]])
    table = torch.randn(1, 6, 6, generator=source).requires_grad_()
    optimiser, loss_fn = torch.optim.Adam([table], lr=0.1), JointLoss(written)

    def common(tokens):  # the share of the reference's pairs of neighbours that a text has
        pairs = [{tuple(text[t : t + 2]) for t in range(5)} for text in (tokens.tolist(), labels[0].tolist())]
        return len(pairs[0] & pairs[1]) / 5

    def expected():
        drawn = torch.multinomial(table.detach()[0].softmax(-1), 400, True, generator=source).T
        return (
            sum(common(text) + (text.unsqueeze(-1) == labels[0]).any(-1).float().mean().item() for text in drawn) / 400
        )

    before = expected()
    for _ in range(80):
        samples = torch.multinomial(table.detach()[0].softmax(-1), 8, True, generator=source).T  # [8, 6]
        tokens = torch.cat([table.detach().argmax(-1), samples]).unsqueeze(0)  # [1, 9, 6]
        score = torch.tensor([[common(text) for text in tokens[0]]])
        stats = candidates(table.expand(9, -1, -1).unsqueeze(0), tokens, labels, score, own=0, baseline=score[:, 0])
        optimiser.zero_grad()
        loss_fn(table, labels, candidates=stats).backward()
        optimiser.step()
    assert expected() > before + 0.1


# Explained


@pytest.mark.parametrize("written", [*WRITTEN, "precision(2):student + rank", "credit(3)", "bag(3):student"])
def test_the_rows_of_an_explanation_add_up_to_the_value(written):
    others = ["b a", "c b a b", "a b c d"]
    text = explain("a b a b", "a b b", written, [0.6], others if JointLoss(written).needs_samples else [])
    block = text.split("\n\n")[1].splitlines()
    costs, first = block[1].split()[-1], {"earns": 1.0}.get(block[1].split()[-1], 0.0)
    numbers = [float(line.split()[-1]) for line in block[2:-1] if line.split()[-1] != "–"]
    total = sum(numbers) if costs == "costs" else first - sum(numbers)
    assert float(block[-1].split()[-1]) == pytest.approx(total, abs=3e-4)


def test_an_explanation_of_own_texts_needs_no_others_but_one_of_samples_does():
    with pytest.raises(UserError, match=r"there is only one candidate\. Give more with --others"):
        explain("a b", "a b", "credit(1)")
    assert "the own text is shorter than n" in explain("a b c", "a b", "matches(3):student")
