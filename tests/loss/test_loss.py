"""The joint loss: its written form, its denominators, its parts and its checks."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, EVERYTHING, batches
from hypothesis import given, settings
from hypothesis import strategies as st

import ngramloss as ng
from ngramloss import JointLoss, Term


def example(B=4, T=9, V=6, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 3:], labels[1, :4] = -100, -100
    logits = torch.randn(B, T, V, generator=generator, dtype=dtype)
    return logits + 2 * F.one_hot(labels.clamp_min(0), V), labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@given(batch=batches())
@settings(max_examples=50, deadline=None)
def test_cross_entropy_alone_is_pytorchs(smoothing, batch):
    ours, theirs = batch.logits.clone().requires_grad_(), batch.logits.clone().requires_grad_()
    loss = JointLoss(f"ce(smoothing={smoothing})")(ours, batch.labels)
    loss.backward()
    if (batch.labels == -100).all():
        assert loss.item() == 0
        return
    expected = F.cross_entropy(theirs.flatten(0, 1), batch.labels.flatten(), label_smoothing=smoothing)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


@given(batch=batches(longest=7, rows=6), size=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_micro_batches_add_up_to_the_whole_batch(batch, size):
    loss_fn = JointLoss(EVERYTHING)
    whole, pieces = batch.logits.clone().requires_grad_(), batch.logits.clone().requires_grad_()
    loss = loss_fn(whole, batch.labels)
    loss.backward()
    real = batch.labels != -100
    counts = {"num_tokens": real.sum(), "num_sequences": int(real.any(-1).sum())}
    split = zip(pieces.split(size), batch.labels.split(size), strict=True)
    total = sum(loss_fn(logits, labels, **counts) for logits, labels in split)
    total.backward()
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(pieces.grad, whole.grad)


def test_a_row_of_padding_counts_in_no_denominator():
    logits, labels = example()
    padded = torch.cat([labels, torch.full((2, 9), -100)])
    more = torch.cat([logits, torch.zeros(2, 9, 6)])
    torch.testing.assert_close(JointLoss(EVERYTHING)(more, padded), JointLoss(EVERYTHING)(logits, labels))


def test_the_loss_is_the_weighted_sum_of_its_parts():
    logits, labels = example()
    loss_fn = JointLoss("ce + 0.5*matches(2,3) + 0*bag(2)")
    loss, parts = loss_fn.with_parts(logits.requires_grad_(), labels)
    assert list(parts) == ["ce", "matches(2)", "matches(3)", "bag(2)"]
    assert all(part.ndim == 0 and not part.requires_grad for part in parts.values())
    torch.testing.assert_close(loss, parts["ce"] + 0.5 * parts["matches(2)"] + 0.5 * parts["matches(3)"])
    assert torch.equal(loss, loss_fn(logits, labels))


def test_matches_of_several_n_is_the_sum_over_n():
    logits, labels = example()
    together = JointLoss("matches(2,3,4)")(logits, labels)
    torch.testing.assert_close(together, sum(JointLoss(f"matches({n})")(logits, labels) for n in (2, 3, 4)))


@pytest.mark.parametrize(
    "head", [{}, {"bias": True}, {"scale": 0.3}, {"softcap": 2.0}, {"bias": True, "scale": 2.0, "softcap": 5.0}]
)
def test_from_hidden_equals_the_loss_of_the_heads_logits(head):
    generator = torch.Generator().manual_seed(2)
    _, labels = example()
    hidden = torch.randn(4, 9, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 6, generator=generator, dtype=torch.float64) if head.get("bias") else None
    scale, softcap = head.get("scale", 1.0), head.get("softcap")
    loss_fn = JointLoss(EVERYTHING)
    loss, parts = loss_fn.from_hidden_with_parts(hidden, weight, labels, bias=bias, scale=scale, softcap=softcap)
    logits = scale * hidden @ weight.T + (bias if bias is not None else 0)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    expected = loss_fn(logits, labels)
    torch.testing.assert_close(loss, expected)
    assert set(parts) == {part.name for part in loss_fn.parts}
    got, wanted = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected))
    torch.testing.assert_close(got, wanted)
    assert torch.equal(loss_fn.from_hidden(hidden, weight, labels, bias=bias, scale=scale, softcap=softcap), loss)


@pytest.mark.parametrize("backend", ["plain", "chunked"])
def test_from_hidden_takes_the_head_with_its_bias_and_trains_both(backend):
    torch.manual_seed(2)
    head, hidden, labels = torch.nn.Linear(5, 6).double(), torch.randn(4, 9, 5).double(), example()[1]
    loss_fn = JointLoss(EVERYTHING, backend=backend)
    losses = loss_fn.from_hidden(hidden, head, labels), loss_fn(head(hidden), labels)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [*head.parameters()]) for loss in losses))
    if backend == "plain":
        compiled = torch.compile(lambda: loss_fn.from_hidden(hidden, head, labels), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(), losses[0])


def test_a_head_that_is_more_than_a_weight_and_a_bias_is_refused():
    hooked, replaced = torch.nn.Linear(5, 6), torch.nn.Linear(5, 6)
    hooked.register_forward_hook(lambda *given: None)
    replaced.forward = lambda rows: rows
    other = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(5, 6))
    for head, error, message in (
        (other, TypeError, r"takes the output head, a torch\.nn\.Linear, or its weight, got Sequential"),
        (replaced, TypeError, r"got Linear, which may compute its logits"),
        (hooked, ng.UserError, r"the head has hooks, which from_hidden would not call"),
    ):
        with pytest.raises(error, match=message):
            JointLoss("ce").from_hidden(torch.zeros(2, 3, 5), head, GOOD[1])
    with pytest.raises(ng.UserError, match=r"the head has a bias of its own, so `bias` is only for a weight"):
        JointLoss("ce").from_hidden(torch.zeros(2, 3, 5), torch.nn.Linear(5, 6), GOOD[1], bias=torch.zeros(6))


def test_from_hidden_follows_autocast():
    generator = torch.Generator().manual_seed(2)
    _, labels = example()
    hidden, weight = torch.randn(4, 9, 5, generator=generator), torch.randn(6, 5, generator=generator)
    loss_fn = JointLoss("ce + matches(2)")
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn.from_hidden(hidden, weight, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, loss_fn((hidden.bfloat16() @ weight.bfloat16().T), labels))
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_fn.from_hidden(hidden.bfloat16(), weight, labels) == loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 50.0, 1e3])  # fp16 overflows beyond
def test_log_probabilities_never_exceed_zero(dtype, scale):
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 500, (8, 16), generator=generator)
    logits = (scale * torch.randn(8, 16, 500, generator=generator)).to(dtype)
    hidden = torch.randn(8, 16, 12, generator=generator).to(dtype)
    weight = (scale * torch.randn(500, 12, generator=generator)).to(dtype)
    needs = ("cross_logp", "mean_logp")
    for stats in (
        ng.token_stats(logits, labels, needs=needs),
        ng.token_stats_from_hidden(hidden, weight, labels, needs=needs),
    ):
        for name in ("best_logp", "label_logp", *needs):
            assert (getattr(stats, name) <= 0).all(), name
        assert stats.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 3, 1000)
    logits[0, 1, [400, 600, 999]] = 1
    assert ng.token_stats(logits, torch.zeros(1, 3, dtype=torch.long)).best_token.tolist() == [[0, 400, 0]]


def test_optional_statistics_are_computed_only_when_asked():
    logits, labels = example()
    assert ng.token_stats(logits, labels).cross_logp is None
    assert ng.token_stats(logits, labels).mean_logp is None
    assert ng.token_stats(logits, labels).entropy is None
    assert ng.token_stats(logits, labels).top_entropy is None
    assert JointLoss("ce + matches(2)").needs == frozenset()
    assert JointLoss("ce(smoothing=0.1) + bag(2)").needs == {"cross_logp", "mean_logp"}


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_a_term_that_needs_all_logits_is_refused_from_hidden_states(backend):
    hidden, weight, labels = torch.zeros(1, 2, 3), torch.zeros(30, 3), torch.tensor([[1, 2]])
    message = r"from_hidden cannot compute eaft:released: it needs the 20 largest logits of each position, and from hidden states the logits are computed in blocks\. Compute the loss from logits"
    with pytest.raises(ng.UserError, match=message):
        JointLoss("ce + eaft:released", backend=backend).from_hidden(hidden, weight, labels)
    with pytest.raises(
        ValueError, match=r"`top_entropy` needs all logits of a position at once, .* Use token_stats\(logits"
    ):
        ng.token_stats_from_hidden(hidden, weight, labels, needs=("top_entropy",), backend=backend)


def test_the_options_of_eaft_are_numbers_with_bounds():
    assert str(JointLoss("eaft(alpha=2.5) + ce")) == "eaft(alpha=2.5) + ce"
    assert JointLoss("eaft").needs == {"entropy"}
    assert JointLoss("eaft:released").needs == {"top_entropy"}
    for written, message in [
        ("eaft(alpha=-1)", r"eaft\(alpha\): must be at least 0, got -1"),
        ("eaft(alpha=11)", r"eaft\(alpha\): must be at most 10, got 11"),
        ("eaft(beta=1)", r"eaft has no option 'beta'\. .*It takes alpha"),
        ("eaft(2)", r"eaft takes no n, got 2"),
    ]:
        with pytest.raises(ng.UserError, match=message):
            JointLoss(written)


def test_diagnose_reads_entropies():
    logits, labels = example()
    for written in ("ce + eaft", "eaft:released + bag(2)"):
        watched = JointLoss(written).diagnose(logits, labels)
        assert sum(value for name, value in watched.items() if name.startswith("gradient/")) == pytest.approx(1)


def test_cross_logp_is_the_log_probability_of_each_reference_token_at_each_position():
    logits, labels = example()
    logp, ids = logits.log_softmax(-1), labels.clamp_min(0)
    stats = ng.token_stats(logits, labels, needs=("cross_logp", "mean_logp"))
    for t in range(9):
        for u in range(9):
            torch.testing.assert_close(stats.cross_logp[2, t, u], logp[2, t, ids[2, u]])
    torch.testing.assert_close(stats.mean_logp[2], logp[2].mean(-1))
    torch.testing.assert_close(stats.lse[2], logits[2].logsumexp(-1))


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("ce", "ce"),
        ("ce+matches(2,3,4)", "ce + matches(2,3,4)"),
        (" 1.0*ce +  .5 * matches( 2 ,3 )", "ce + 0.5*matches(2,3)"),
        ("ce(smoothing=0.1) + bag(2):original", "ce(smoothing=0.1) + bag(2):original"),
        ("2*lcs + 1e-3*eisl(4) + bleu(1,2,3,4)", "2*lcs + 0.001*eisl(4) + bleu(1,2,3,4)"),
        ("0*rewards(2)", "0*rewards(2)"),
        (EVERYTHING, EVERYTHING),
    ],
)
def test_text_and_repr_give_the_written_form_back(written, canonical):
    assert str(JointLoss(written)) == canonical
    assert repr(JointLoss(written)) == f'JointLoss("{canonical}")'
    assert eval(repr(JointLoss(written))).terms == JointLoss(written).terms
    assert str(JointLoss(canonical)) == canonical
    assert JointLoss(canonical).terms == JointLoss(written).terms


@given(st.lists(st.sampled_from(CASES), min_size=1, max_size=4, unique_by=repr), st.just(0.0) | st.floats(1e-37, 1e38))
@settings(max_examples=60, deadline=None)
def test_every_list_of_terms_survives_being_written_and_read(cases, weight):
    terms = tuple(Term(c.term.name, c.term.n, weight, c.term.variant, c.term.options) for c in cases)
    assert JointLoss(str(JointLoss(terms))).terms == terms


def test_terms_and_text_build_the_same_loss():
    logits, labels = example()
    built = JointLoss([Term("ce"), Term("matches", (2, 3), weight=0.5), Term("bag", 2, variant="original")])
    written = JointLoss("ce + 0.5*matches(2,3) + bag(2):original")
    assert str(built) == str(written)
    assert torch.equal(built(logits, labels), written(logits, labels))
    assert str(JointLoss(Term("ce"))) == "ce"


def test_copies_and_pickles():
    logits, labels = example()
    loss_fn = JointLoss(EVERYTHING)
    for other in (copy.deepcopy(loss_fn), pickle.loads(pickle.dumps(loss_fn))):
        assert torch.equal(other(logits, labels), loss_fn(logits, labels))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("cee", r"unknown objective 'cee'\. Did you mean 'ce'\? Choose from ce, matches"),
        (
            "ce + matchs(2)",
            r"unknown objective 'matchs'\. Did you mean 'matches'\?(.|\n)*\n  ce \+ matchs\(2\)\n {7}\^",
        ),
        (
            "rewards(1)",
            r"rewards needs n of at least 2, got 1: a reward for single tokens repeats .* Use matches\(1\), or raise n",
        ),
        ("matches(0)", r"matches needs n of at least 1, got 0: an n-gram has at least one token\. Raise n"),
        ("matches(-2)", r"matches needs n of at least 1, got -2"),
        ("matches", r"matches needs the length of its n-grams\. Write matches\(2\), for example"),
        ("matches(2,2)", r"matches\(2,2\) has an n twice\. Write each n once"),
        ("matches(n=2)", r"matches has no option 'n'\. Write matches\(2\)\."),
        ("-ce", r"the weight of ce must be finite and not negative, got -1\.0"),
        ("-inf*ce", r"the weight of ce must be finite and not negative, got -inf"),
        ("NaN*ce", r"the weight of ce must be finite and not negative, got nan"),
        ("ce*0.5", r"expected '\+' or the end \(a weight goes before its term, as in 0\.5\*ce\), got '\*'"),
        ("0.5*(ce+lcs)", r"expected an objective \(write a weight before each single term\), got '\('"),
        ("ce(smoothing=0.1,smoothing=0.2)", r"expected each option once, got 'smoothing'"),
        ("ce(smoothing=-0.1)", r"ce\(smoothing\): must be at least 0, got -0\.1"),
        ("matches(²)", r"expected a whole number for n, got '²'"),
        ("ce +\n$", r"expected an objective, got '\$':\n  ce \+ \$\n {7}\^"),
        ("matches(2.5)", r"expected a whole number for n, got '2\.5':\n  matches\(2\.5\)\n {10}\^"),
        ("ce(2)", r"ce takes no n, got 2\. Write ce alone"),
        ("-1*ce", r"the weight of ce must be finite and not negative, got -1\.0(.|\n)*give it a positive weight"),
        ("nan*ce", r"the weight of ce must be finite and not negative, got nan"),
        ("inf*ce", r"the weight of ce must be finite and not negative, got inf"),
        ("1e999*ce", r"the weight of ce must be finite and not negative, got inf"),
        (
            "1e39*ce",
            r"the weight of ce must be 0 or from 1\.18e-38 to 3\.4e\+38, got 1e\+39: in fp32, in which losses are added, it becomes infinite",
        ),
        (
            "ce + 1e-50*matches(2)",
            r"the weight of matches must be 0 or from .*, got 1e-50: in fp32, in which losses are added, it loses its digits or becomes 0\. Give",
        ),
        ("ce(smoothing=1e-50)", r"ce\(smoothing\): must be 0 or at least 1\.18e-38, got 1e-50, too little for fp32"),
        (
            "matches(1025)",
            r"matches takes n of at most 1,024, got 1,025: so long an n-gram is never predicted completely .* Lower n; the paper",
        ),
        (f"bag({10**30})", r"bag takes n of at most 1,024, got a number of 31 digits"),
        ("ce + bleu(1,300000)", r"bleu takes n of at most 1,024, got 300,000"),
        (f"matches({'9' * 5000})", r"expected n of at most 1,024, got '999"),
        ("matches(2):relased", r"matches has no variant 'relased'\. Did you mean 'released'\? Choose from released"),
        ("soft(2):released", r"soft has no variant 'released'\. Leave it out: it has none"),
        ("ce(smoothin=0.1)", r"ce has no option 'smoothin'\. Did you mean 'smoothing'\? It takes smoothing"),
        ("matches(2,smoothing=1)", r"matches has no option 'smoothing'\. It takes n\."),
        ("lcs(x=1)", r"lcs has no option 'x'\. It takes none\."),
        ("ce(smoothing=2)", r"ce\(smoothing\): must be at most 1, got 2\.0"),
        ("ce(smoothing 1)", r"expected '=' after an option, got '1'"),
        ("ce(smoothing=x)", r"ce\(smoothing\): must be a number, got 'x'"),
        (
            "ce + matches(2) + matches(3,2)",
            r"matches\(2\) is given twice in .*Write it once, with the sum of the weights",
        ),
        ("", r"expected an objective, got the end of the text"),
        ("ce +", r"expected an objective, got the end of the text:\n  ce \+\n {6}\^"),
        ("ce ce", r"expected '\+' or the end, got 'ce':\n  ce ce\n {5}\^"),
        ("ce - matches(2)", r"expected '\+' or the end, got '-':\n  ce - matches\(2\)\n {5}\^"),
        ("2 ce", r"expected '\*' after a weight, got 'ce'"),
        ("matches(2", r"expected ',' or '\)', got the end of the text"),
        ("bag(2):", r"expected a variant, got the end of the text"),
        ("ce + $", r"expected an objective, got '\$':\n  ce \+ \$\n {7}\^"),
    ],
)
def test_a_mistake_in_the_written_form_is_explained(written, message):
    with pytest.raises(ValueError, match=message):
        JointLoss(written)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: JointLoss([]),
            TypeError,
            r"objective must be a string such as 'ce \+ matches\(2\)' or Terms, got \[\]",
        ),
        (lambda: JointLoss(["ce"]), TypeError, r"objective must be a string .* got \['ce'\]"),
        (lambda: JointLoss(3), TypeError, r"objective must be a string .* got 3"),
        (lambda: Term("ce", weight="1"), TypeError, r"the weight of ce must be a number, got '1'"),
        (lambda: Term("ce", weight=True), TypeError, r"the weight of ce must be a number, got True"),
        (lambda: Term("matches", True), TypeError, r"matches needs a whole number for n, got True"),
        (
            lambda: Term("ce", options={"smoothing": "0.1"}),
            ValueError,
            r"ce\(smoothing\): must be a number, got '0\.1'",
        ),
        (
            lambda: Term("ce", weight=10**400),
            ValueError,
            r"the weight of ce must be 0 or from .* to 3\.4e\+38, got 1000",
        ),
        (lambda: Term("matches", (2.0,)), TypeError, r"matches needs a whole number for n, got 2\.0"),
    ],
)
def test_a_mistake_in_terms_is_explained(build, error, message):
    with pytest.raises(error, match=message):
        build()


GOOD = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (
            GOOD[0],
            GOOD[1][:, :2],
            ValueError,
            r"labels must have shape \[B, T\] = \[2, 3\] .* got \[2, 2\]\. Give one label for each position",
        ),
        (GOOD[0], GOOD[1].flatten(), ValueError, r"labels must have shape \[B, T\] = \[2, 3\] .* got \[6\]"),
        (GOOD[0], GOOD[1].float(), TypeError, r"labels must be integer ids, got torch\.float32\. Convert them with"),
        (GOOD[0], GOOD[1].bool(), TypeError, r"labels must be integer ids, got torch\.bool"),
        (
            GOOD[0],
            GOOD[1] + 5,
            ValueError,
            r"labels must be -100 or an id from 0 to 4, got 5 at row 0, position 0\. Mark",
        ),
        (GOOD[0], GOOD[1] - 1, ValueError, r"labels must be -100 or an id from 0 to 4, got -1 at row 0, position 0"),
        (GOOD[0][0], GOOD[1], ValueError, r"logits must be \[B, T, V\] with V of at least 1, got \[3, 5\]"),
        (GOOD[0][..., :0], GOOD[1], ValueError, r"logits must be \[B, T, V\] with V of at least 1, got \[2, 3, 0\]"),
        (GOOD[0].long(), GOOD[1], TypeError, r"logits must be floating point, got torch\.int64"),
        (
            torch.zeros(1).expand(1, 1, 2**31 + 1),
            torch.zeros(1, 1).long(),
            ValueError,
            r"a vocabulary may have at most 2147483648 ids",
        ),
    ],
)
def test_bad_logits_or_labels_are_explained(logits, labels, error, message):
    with pytest.raises(error, match=message):
        JointLoss("ce")(logits, labels)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 4)}, ValueError, r"hidden must be \[B, T, D\], got \[3, 4\]"),
        (
            {"weight": torch.zeros(4, 5)},
            ValueError,
            r"weight must be \[V, D\] with D = 4 .* got \[4, 5\]\. .* not its transpose",
        ),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must have V = 5 numbers, got \[4\]"),
        (
            {"weight": torch.zeros(5, 4).double()},
            TypeError,
            r"hidden is torch.float32 and weight is torch.float64\. Run under",
        ),
        ({"scale": float("nan")}, ValueError, r"scale must be a finite number, got nan"),
        ({"softcap": 0.0}, ValueError, r"softcap must be a positive finite number or None, got 0\.0"),
        ({"softcap": float("inf")}, ValueError, r"softcap must be a positive finite number or None, got inf"),
        ({"num_tokens": -1}, ValueError, r"num_tokens must be a count of 0 or more, got -1"),
        ({"num_sequences": float("nan")}, ValueError, r"num_sequences must be a count of 0 or more, got nan"),
        ({"num_tokens": torch.tensor(-1)}, ValueError, r"num_tokens must be a count of 0 or more, got -1"),
        ({"num_sequences": torch.tensor([-0.5])}, ValueError, r"num_sequences must be a count of 0 or more, got -0\.5"),
        ({"num_tokens": torch.tensor(float("nan"))}, ValueError, r"num_tokens must be a count of 0 or more, got nan"),
        ({"num_tokens": torch.tensor(float("inf"))}, ValueError, r"num_tokens must be a count of 0 or more, got inf"),
        ({"num_tokens": torch.ones(2)}, ValueError, r"num_tokens must be one number, got a tensor of shape \[2\]"),
    ],
)
def test_a_bad_head_or_count_is_explained(change, error, message):
    given = {"hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(5, 4), "labels": GOOD[1]} | change
    with pytest.raises(error, match=message):
        JointLoss("ce").from_hidden(given.pop("hidden"), given.pop("weight"), **given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_kind_are_taken(dtype):
    logits, labels = torch.randn(2, 3, 200), torch.tensor([[156, 3, 4], [3, 4, 3]])
    if dtype == torch.int16:
        labels[1, 2] = -100
    for loss_fn in (JointLoss(EVERYTHING), JointLoss("ce")):
        assert torch.equal(loss_fn(logits, labels.to(dtype)), loss_fn(logits, labels))
        watched = loss_fn.diagnose(logits, labels.to(dtype))
        assert all(torch.equal(watched[name], value) for name, value in loss_fn.diagnose(logits, labels).items())


def test_a_negative_count_is_refused_inside_compiled_code():
    loss_fn = JointLoss("ce")
    loss = torch.compile(lambda count: loss_fn(*GOOD, num_tokens=count), backend="eager", fullgraph=True)
    assert loss(torch.tensor(6)) > 0
    with pytest.raises(RuntimeError, match="num_tokens must be a count of 0 or more"):
        loss(torch.tensor(-6))


def test_the_least_and_the_largest_weight_that_fp32_has_are_taken():
    tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    assert [Term("ce", weight=weight).weight for weight in (0, tiny, most)] == [0, tiny, most]
    assert Term("matches", (1024,)).n == (1024,)


def test_counts_may_be_fractions():
    logits, labels = example()
    whole = JointLoss("ce + matches(2)")(logits, labels, num_tokens=1, num_sequences=1)
    for half in (0.5, torch.tensor([0.5])):
        loss = JointLoss("ce + matches(2)")(logits, labels, num_tokens=half, num_sequences=half)
        torch.testing.assert_close(loss, 2 * whole)
        assert loss.ndim == 0


def test_a_part_of_weight_zero_is_watched_and_adds_nothing_even_if_infinite():
    logits = torch.zeros(1, 2, 5)
    logits[..., 3] = -torch.inf
    loss, parts = JointLoss("matches(1) + 0*ce").with_parts(logits.requires_grad_(), torch.tensor([[3, 1]]))
    assert parts["ce"].isinf()
    assert loss == parts["matches(1)"]


def test_smoothing_of_zero_needs_no_mean():
    assert JointLoss("ce(smoothing=0)").needs == frozenset()


def test_terms_compare_and_hash_by_what_they_say():
    assert Term("matches", [2, 3]) == Term("matches", (2, 3))
    assert len({Term("ce"), Term("ce"), Term("lcs")}) == 2


def test_training_after_an_evaluation_in_inference_mode():
    logits, labels = example()
    loss_fn = JointLoss("0.25*ce + 0.75*matches(2)")
    with torch.inference_mode():
        first = loss_fn(logits, labels)
        loss_fn.diagnose(logits, labels)
    leaf = logits.clone().requires_grad_()
    loss_fn(leaf, labels).backward()
    assert leaf.grad.any()
    torch.testing.assert_close(loss_fn(logits, labels), first.clone())


def test_check_names_the_place_of_a_nan():
    logits = torch.zeros(2, 3, 5)
    logits[1, 2, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"the logits at row 1, position 2 contain NaN or infinity .*Look for an overflow"
    ):
        JointLoss("matches(2)", check=True)(logits, GOOD[1])
    assert JointLoss("matches(2)", check=True)(logits, torch.tensor([[0, 0, 0], [0, 0, -100]])).isfinite()


def test_check_names_the_part_that_a_masked_label_makes_infinite():
    logits = torch.zeros(1, 2, 5)
    logits[..., 3] = -torch.inf
    with pytest.raises(
        ValueError, match=r"^ce is inf although .* some logit is -inf\. Do not mask out tokens that may be labels"
    ):
        JointLoss("matches(2) + ce", check=True)(logits, torch.tensor([[3, 1]]))


def test_counts_of_zero_give_zero_not_nan():
    logits, labels = example()
    nothing = torch.full_like(labels, -100)
    for zero in (0, torch.tensor(0)):
        assert JointLoss(EVERYTHING)(logits, nothing, num_tokens=zero, num_sequences=zero) == 0


@pytest.mark.parametrize("case", CASES, ids=repr)
@given(batch=batches(), tokens=st.none() | st.integers(1, 9), sequences=st.none() | st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_each_row_has_its_share_of_the_loss(case, batch, tokens, sequences):
    """A row's value as the oracle computes it, over the denominator of the whole batch; 0 without labels."""
    counts = {"num_tokens": tokens, "num_sequences": sequences}
    loss, parts = JointLoss([case.term], reduction="none").with_parts(batch.logits, batch.labels, **counts)
    real = batch.labels != -100
    batchs_own = real.sum() if case.part.per == "token" else real.any(-1).sum()
    divisor = (tokens if case.part.per == "token" else sequences) or batchs_own.item() or 1
    probabilities = batch.logits.softmax(-1)
    expected = [
        case.oracle(row, labels.tolist()).item() / divisor if (labels != -100).any() else 0.0
        for row, labels in zip(probabilities, batch.labels, strict=True)
    ]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(parts[case.part.name], loss)


@pytest.mark.parametrize("counts", [{}, {"num_tokens": 50, "num_sequences": torch.tensor(7)}])
def test_rows_add_up_to_the_loss_from_logits_hidden_states_and_statistics(counts):
    generator = torch.Generator().manual_seed(2)
    labels = torch.cat([example()[1], torch.full((1, 9), -100)])
    hidden = torch.randn(5, 9, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    whole, rows = JointLoss(EVERYTHING), JointLoss(EVERYTHING, reduction="none")

    def ways(loss_fn):
        yield loss_fn.with_parts(hidden @ weight.T, labels, **counts)
        yield loss_fn.from_hidden_with_parts(hidden, weight, labels, **counts)
        stats = ng.token_stats(hidden @ weight.T, labels, needs=loss_fn.needs)
        yield loss_fn.from_stats(stats, labels, **counts)

    for (loss, parts), (shares, row_parts) in zip(ways(whole), ways(rows), strict=True):
        assert shares.shape == (5,)
        assert shares[4] == 0
        torch.testing.assert_close(shares.sum(), loss)
        torch.testing.assert_close({name: part.sum() for name, part in row_parts.items()}, parts)
        assert all(part.shape == (5,) and not part.requires_grad for part in row_parts.values())
        got, wanted = (torch.autograd.grad(value, (hidden, weight)) for value in (shares.sum(), loss))
        torch.testing.assert_close(got, wanted)


def test_a_rows_share_depends_on_that_row_alone():
    logits, labels = example()
    rows = JointLoss("ce + matches(2)", reduction="none")
    counts = {"num_tokens": 30, "num_sequences": 4}
    together = rows(logits, labels, **counts)
    torch.testing.assert_close(
        together, torch.cat([rows(logits[row : row + 1], labels[row : row + 1], **counts) for row in range(4)])
    )
    leaf = logits.clone().requires_grad_()
    rows(leaf, labels)[2].backward()
    assert [bool(row.any()) for row in leaf.grad] == [False, False, True, False]


def test_the_gradient_of_each_row_is_right():
    logits, labels = example(B=2, T=5, V=4)
    rows = JointLoss("ce(smoothing=0.1) + 0.5*matches(2) + bag(2) + precision(2)", reduction="none")
    assert torch.autograd.gradcheck(lambda leaf: rows(leaf, labels), logits.clone().requires_grad_())


def test_nan_stays_in_its_row_and_check_names_its_place():
    logits, labels = example()
    logits[2, 4, 0] = torch.nan
    assert JointLoss("matches(2)", reduction="none")(logits, labels).isnan().tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="the logits at row 2, position 4 contain NaN"):
        JointLoss("matches(2)", reduction="none", check=True)(logits, labels)
    logits[2, 4, 0] = -torch.inf
    labels[2, 4] = 0
    with pytest.raises(ValueError, match=r"^ce is inf although"):
        JointLoss("ce", reduction="none", check=True)(logits, labels)
    assert not JointLoss("matches(2) + 0*ce", reduction="none")(logits, labels).isinf().any()


def test_rows_of_nothing_have_a_gradient_of_zero():
    logits = torch.zeros(2, 3, 5, requires_grad=True)
    loss = JointLoss(EVERYTHING, reduction="none")(logits, torch.full((2, 3), -100))
    assert loss.tolist() == [0, 0]
    loss.sum().backward()
    assert not logits.grad.any()
    short = torch.zeros(2, 1, 5, requires_grad=True)
    JointLoss("matches(2)", reduction="none")(short, torch.zeros(2, 1).long()).sum().backward()  # no window is read
    assert not short.grad.any()


def test_another_reduction_is_explained():
    with pytest.raises(
        ValueError,
        match=r"reduction must be 'mean' or 'none', got 'sum'\. For a sum .* num_tokens=1 and num_sequences=1",
    ):
        JointLoss("ce", reduction="sum")


def test_a_loss_with_parts_is_a_loss_and_its_parts():
    logits, labels = example()
    loss_fn, identity = JointLoss("ce + matches(2)"), torch.eye(6, dtype=torch.float64)
    for made in (loss_fn.with_parts(logits, labels), loss_fn.from_hidden_with_parts(logits, identity, labels)):
        total, parts = made
        assert (total, parts) == (made.total, made.parts)
        torch.testing.assert_close(total, loss_fn(logits, labels))
        torch.testing.assert_close(total, parts["ce"] + parts["matches(2)"])


def test_loss_and_loss_with_parts_take_the_same_arguments():
    for one, other in (("forward", "with_parts"), ("from_hidden", "from_hidden_with_parts")):
        first, second = (inspect.signature(getattr(JointLoss, name)).parameters for name in (one, other))
        assert list(first.values()) == list(second.values())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"label_smoothing": 0.1}, r"no argument 'label_smoothing'\. Write .*JointLoss\('ce\(smoothing=0\.1\)"),
        ({"ignore_index": 0}, r"no argument 'ignore_index'\. Labels of -100 do not count; .*masked_fill\("),
        (
            {"weight": torch.ones(5)},
            r"no argument 'weight'\. .* so have terms: JointLoss\('ce \+ 0\.5\*matches\(2\)'\)",
        ),
        ({"colour": 1}, r"^JointLoss has no argument 'colour'\.$"),
    ],
)
def test_arguments_of_pytorchs_cross_entropy_are_answered(argument, message):
    with pytest.raises(TypeError, match=message):
        JointLoss("ce", **argument)


def test_flattened_rows_are_refused_with_what_to_write():
    logits, labels = example()
    said = (
        r"got \[36, 6\]\. N-grams are read along rows, so do not flatten them: .* pass {0}\[None\] and labels\[None\]"
    )
    with pytest.raises(ValueError, match=r"logits must be \[B, T, V\] .*" + said.format("logits")):
        JointLoss("ce")(logits.flatten(0, 1), labels.flatten())
    with pytest.raises(ValueError, match=r"hidden must be \[B, T, D\].*" + said.format("hidden")):
        JointLoss("ce").from_hidden(logits.flatten(0, 1), torch.eye(6).double(), labels.flatten())
    with pytest.raises(ValueError, match=r"labels must have shape .*pass logits\.transpose\(1, 2\) here"):
        JointLoss("ce")(logits.transpose(1, 2), labels)
