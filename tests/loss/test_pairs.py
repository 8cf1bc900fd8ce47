"""Rows that answer each other: the divergence of twins and the terms that read them."""

import oracle
import pytest
import torch
from cases import batches
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import packed_rows
from sweeps import DEVICE, NEEDS, every_sweep

from ngramloss import JointLoss, UserError, token_stats, token_stats_from_hidden
from ngramloss.loss.explaining.compare_gradients import pushes
from ngramloss.loss.explaining.explain import explain
from ngramloss.loss.kernels import replay
from ngramloss.loss.stats import head, labelled
from ngramloss.loss.terms.term import Term

CASES = {
    "rdrop": (Term("rdrop"), oracle.rdrop),
    **{f"rewards({n}):twin": (Term("rewards", (n,), 1.0, "twin"), oracle.rewards_twin) for n in (2, 3)},
    **{f"gated({n}):twin": (Term("gated", (n,), 1.0, "twin"), oracle.gated_twin) for n in (1, 2)},
}
each = pytest.mark.parametrize("written", CASES)
ALL = "ce(smoothing=0.1) + 0.5*ce(temperature=2) + 2*rdrop + rewards(2):twin + gated(1):twin + bag(2) + eaft + unlikelihood"
HEADS = [{}, {"softcap": 2.0}, {"bias": True, "softcap": 3.0, "scale": 2.0}]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that a short vocabulary has several, the last one ragged."""
    monkeypatch.setattr(head, "LEAN_BYTES", 1)


def twice(rows):
    return rows.repeat_interleave(2, 0)


@st.composite
def twins(draw):
    """Batches in which rows 2i and 2i + 1 have the same labels, and logits that differ a little or a lot."""
    logits, labels = draw(batches(longest=5, rows=2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    noise = torch.randn(2 * len(logits), *logits.shape[1:], generator=generator, dtype=torch.float64)
    return twice(logits) + draw(st.sampled_from([0.0, 0.1, 2.0])) * noise, twice(labels)


def expected(written, logits, labels):
    """The oracle's value of each row, [B]; the twin is a constant for gates."""
    term, function = CASES[written]
    options = {"n": term.n[0]} if term.n else {}
    p = logits.softmax(-1)
    rows = [function(p[b], p[b ^ 1], labels[b].tolist(), **options) for b in range(len(labels))]
    return torch.stack([row.reshape(()) for row in rows])


@each
@given(batch=twins())
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_are_the_oracles(written, batch):
    logits, labels = batch[0].requires_grad_(), batch[1]
    (part,) = CASES[written][0].parts
    value = part.function(token_stats(logits, labels, needs=CASES[written][0].needs), labels)
    truth = expected(written, logits, labels)
    torch.testing.assert_close(value, truth)
    pull = torch.linspace(0.5, 2.0, len(labels), dtype=torch.float64)
    for one, two in zip(*(torch.autograd.grad(x, logits, pull) for x in (value, truth)), strict=True):
        torch.testing.assert_close(one, two)


@each
def test_gradcheck(written):
    generator = torch.Generator().manual_seed(3)
    labels = twice(torch.tensor([[0, 1, 2, 0], [2, 2, -100, -100]]))
    logits = torch.randn(4, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss_fn = JointLoss(f"ce + {written}")
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, labels), logits)


def example(B=2, T=4, V=300, D=16, dtype=torch.float32, apart=0.5):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[:, 2] = labels[:, 0]
    labels[0, T - max(T // 3, 1) :] = -100
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) / D**0.5
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64) + 3 * weight[labels.clamp_min(0)]
    hidden = twice(hidden) + apart * torch.randn(2 * B, T, D, generator=generator, dtype=torch.float64)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), twice(labels).to(DEVICE)


def gradients(loss_fn, hidden, weight, labels, **options):
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    loss = loss_fn.from_hidden(*inputs, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@every_sweep
@pytest.mark.parametrize("options", HEADS, ids=str)
def test_sweeps_give_the_plain_statistics_and_gradients(backend, memory, options):
    hidden, weight, labels = example()
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(300, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    needs = (*NEEDS, "twin_kl", "twin_token")
    plain = token_stats_from_hidden(hidden, weight, labels, needs=needs, backend="plain", **options)
    other = token_stats_from_hidden(hidden, weight, labels, needs=needs, backend=backend, memory=memory, **options)
    real = labels != -100
    assert torch.equal(plain.twin_token[real], other.twin_token[real])
    for name in ("best_logp", "label_logp", "twin_kl", *NEEDS):
        torch.testing.assert_close(getattr(other, name), getattr(plain, name))
    assert not other.twin_kl[~real].any()
    truth = gradients(JointLoss(ALL, backend="plain"), hidden, weight, labels, **options)
    got = gradients(JointLoss(ALL, backend=backend, memory=memory), hidden, weight, labels, **options)
    for one, two in zip(got, truth, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)  # sums in another order


@every_sweep
def test_the_slope_of_either_row_counts(backend, memory):
    hidden, weight, labels = example()
    pull = torch.arange(1.0, 17.0, device=DEVICE).view(4, 4)
    by_hidden = []
    for name in (backend, "plain"):
        leaf = hidden.clone().requires_grad_()
        stats = token_stats_from_hidden(leaf, weight, labels, needs=("twin_kl",), backend=name, memory=memory)
        by_hidden += torch.autograd.grad((stats.twin_kl * pull).sum(), leaf)
    torch.testing.assert_close(*by_hidden, atol=2e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("written", [name for name in CASES if name != "rdrop"])
def test_kernels_of_gates_agree_with_the_formulas(written):
    hidden, weight, labels = example(T=7, V=5)
    (part,) = CASES[written][0].parts
    right = 4 * torch.nn.functional.one_hot(labels.clamp_min(0), 5)
    stats = token_stats((hidden @ weight.t() + right).requires_grad_(), labels, needs=("twin_token",))
    slow, fast = part.function(stats, labels), replay._kernel(part.kernel)(stats, labels, **part.function.keywords)
    torch.testing.assert_close(fast, slow)
    assert (slow < 1).any()
    pull = torch.linspace(0.5, 2.0, 4, device=DEVICE)
    by_slow, by_fast = (torch.autograd.grad(x, stats.label_logp, pull, retain_graph=True)[0] for x in (slow, fast))
    torch.testing.assert_close(by_fast, by_slow)


@every_sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_further_from_the_truth_than_the_plain_sweep(backend, memory, dtype):
    hidden, weight, labels = example(T=8, V=517, D=32, dtype=dtype)
    written = "ce + rdrop"
    truth = gradients(JointLoss(written, backend="plain"), hidden.double(), weight.double(), labels)
    plain = gradients(JointLoss(written, backend="plain"), hidden, weight, labels)
    other = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels)
    for got, reference, exact in zip(other, plain, truth, strict=True):
        tolerance = 0.5 * torch.finfo(dtype).eps * exact.abs().max() + 1e-6
        assert (got - exact).abs().max() <= (reference - exact).abs().max() + tolerance


def close_pairs(V, dtype):
    """Heads whose products are exact, with logits of twins that nearly agree; names of the rows → how they differ."""
    generator = torch.Generator().manual_seed(5)
    base, noise = (torch.randn(V, generator=generator, dtype=torch.float64) for _ in range(2))
    sure = base.clone()
    sure[V // 2] += 22  # certain, so that the difference of the other tokens hardly counts
    late = base.clone()
    late[-1] += 18  # the largest logit comes last
    pairs = {
        "start of training": (3 * base, 3 * base + 2e-3 * noise),
        "constant added": (3 * base, 3 * base + 2e-3 * noise + 4),
        "far from 0": (2 * base + 60, 2 * base + 60 + 3e-3 * noise),
        "certain": (sure, sure + 0.3 * noise),
        "certain of the last": (late, late + 0.05 * noise - 2),
        "growing": (base.sort().values * 4, base.sort().values * 4 + 0.01 * noise),
        "different": (base, 4 * noise),
        "equal": (base, base.clone()),
    }
    rows = torch.stack([row for pair in pairs.values() for row in pair]).to(DEVICE, dtype)  # [2P, V]
    hidden = torch.eye(len(rows), dtype=dtype, device=DEVICE).unsqueeze(1)  # [2P, 1, 2P]
    p, q = rows.double().softmax(-1).view(-1, 2, V).unbind(1)
    truth = ((p - q) * (p.log() - q.log())).sum(-1) / 2  # [P]
    return hidden, rows.t().contiguous(), truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["plain", "chunked", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_small_divergences_are_exact(backend, memory, dtype, monkeypatch):
    monkeypatch.setattr(head, "LEAN_BYTES", 2**18)
    V = 50_265 if backend != "fused" or DEVICE == "cuda" else 5_001
    hidden, weight, truth = close_pairs(V, dtype)
    labels = torch.zeros(len(hidden), 1, dtype=torch.long, device=DEVICE)
    stats = token_stats_from_hidden(hidden, weight, labels, needs=("twin_kl",), backend=backend, memory=memory)
    found = stats.twin_kl.view(-1, 2).double()
    assert torch.equal(found[:, 0], found[:, 1])
    assert (found >= 0).all()
    counts = truth >= 1e-6
    assert counts.sum() >= 5
    assert ((found[:, 0] - truth).abs() / truth)[counts].max() <= 5e-3
    assert (found[:, 0] - truth).abs()[~counts].max() <= 5e-9


@every_sweep
def test_twins_that_agree_have_neither_divergence_nor_gradient(backend, memory):
    hidden, weight, labels = example(apart=0.0)
    for name in (backend, "plain"):
        loss, by_hidden, by_weight = gradients(JointLoss("rdrop", backend=name, memory=memory), hidden, weight, labels)
        assert loss == 0
        assert by_hidden.abs().max() < 1e-6
        assert by_weight.abs().max() < 1e-6


@every_sweep
def test_tokens_that_both_exclude_add_nothing_and_nan_is_never_hidden(backend, memory):
    hidden, weight, labels = example()
    bias = torch.zeros(300, device=DEVICE)
    bias[:200] = -torch.inf
    labels = labels.where(labels == -100, labels.clamp_min(200))
    options = {"needs": ("twin_kl",), "memory": memory}
    alone = token_stats_from_hidden(
        hidden, weight[200:], labels.where(labels == -100, labels - 200), needs=("twin_kl",), backend="plain"
    )
    for name in (backend, "plain"):
        got = token_stats_from_hidden(hidden, weight, labels, bias=bias, backend=name, **options).twin_kl
        torch.testing.assert_close(got, alone.twin_kl)
    got = gradients(JointLoss("ce + rdrop", backend=backend, memory=memory), hidden, weight, labels, bias=bias)
    assert all(x.isfinite().all() for x in got)
    hidden[2, 3] = torch.inf
    for name in (backend, "plain"):
        broken = token_stats_from_hidden(hidden, weight, labels, backend=name, **options).twin_kl.isnan()
        assert broken.nonzero().tolist() == [[2, 3], [3, 3]]


def test_half_precision_logits_are_compared_in_fp32():
    hidden, weight, labels = example(dtype=torch.bfloat16)
    logits = hidden @ weight.t()
    exact = token_stats(logits.double(), labels, needs=("twin_kl",)).twin_kl
    torch.testing.assert_close(token_stats(logits, labels, needs=("twin_kl",)).twin_kl.double(), exact)


@pytest.mark.parametrize("written", ["rdrop", "ce + rewards(2):twin", "ce + gated(1):twin"])
def test_rows_that_are_no_twins_are_refused(written):
    loss_fn, logits = JointLoss(written), torch.zeros(4, 3, 5)
    labels = twice(torch.tensor([[1, 2, 3], [1, 2, -100]]))
    with pytest.raises(ValueError, match=r"an odd number of rows, 3, cannot be twins. .* ng.twins\(collator\)"):
        loss_fn(logits[:3], labels[:3])
    labels[3, 1] = 4
    for call in (loss_fn, lambda x, y: loss_fn.from_hidden(x, torch.zeros(5, 5), y)):
        with pytest.raises(ValueError, match=r"rows 2 and 3 are no twins: their labels differ. .* train.twins=true"):
            call(logits, labels)
    rest = loss_fn.without("twins")
    assert rest(logits[:3], labels[:3]).isfinite()
    assert not rest.needs_twins
    assert rest.without("twins", "candidates") is rest


@pytest.mark.parametrize("segments", [[[0, 0, 1], [0, 1, 1]], [[0, 0, -1], [0, 0, 1]]], ids=["ends", "padding"])
def test_twins_whose_texts_differ_are_refused(segments):
    labels, segments = twice(torch.tensor([[1, 2, 3]])), torch.tensor(segments)
    with pytest.raises(ValueError, match=r"rows 0 and 1 are no twins: their texts differ"):
        JointLoss("rdrop + rewards(2)")(torch.zeros(2, 3, 5), labels, segments=segments)


def test_a_row_counts_the_same_whichever_twin_it_is_and_blank_pairs_count_nothing():
    hidden, weight, labels = example()
    loss_fn = JointLoss("ce + rdrop + rewards(2):twin", reduction="none")
    shares, parts = loss_fn.with_parts(hidden @ weight.t(), labels)
    assert torch.equal(parts["rdrop"][0::2], parts["rdrop"][1::2])
    blank = torch.cat([hidden, hidden[:2]]), torch.cat([labels, torch.full_like(labels[:2], -100)])
    more = loss_fn(blank[0] @ weight.t(), blank[1])
    torch.testing.assert_close(more, torch.cat([shares, torch.zeros(2, device=DEVICE)]))


def test_micro_batches_of_pairs_add_up_to_the_step():
    hidden, weight, labels = example(B=3)
    loss_fn, logits = JointLoss("ce + rdrop + gated(2):twin"), hidden @ weight.t()
    counts = {"num_tokens": (labels != -100).sum(), "num_sequences": len(labels)}
    pieces = [loss_fn(logits[i : i + 2], labels[i : i + 2], **counts) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(pieces), loss_fn(logits, labels))
    pairs = torch.stack([loss_fn.with_parts(logits[i : i + 2], labels[i : i + 2]).parts["rdrop"] for i in (0, 2, 4)])
    tokens = torch.tensor([3.0, 4.0, 4.0], device=DEVICE)
    torch.testing.assert_close((pairs * tokens).sum() / tokens.sum(), loss_fn.with_parts(logits, labels).parts["rdrop"])


@given(rows=packed_rows(boundary_labels=True), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_packed_twins_are_their_documents_apart(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    labels, segments = twice(rows.labels), twice(rows.segments)
    logits = torch.randn(*labels.shape, 4, generator=generator, dtype=torch.float64) + twice(rows.logits)
    written = "rewards(2):twin + gated(1):twin"
    got = JointLoss(written).with_parts(logits, labels, segments=segments).parts
    own = [rows._replace(logits=logits[side::2]) for side in (0, 1)]
    apart = [
        torch.stack([each.apart(getattr(each, name)) for each in own], 1).flatten(0, 1) for name in ("logits", "labels")
    ]
    whole = JointLoss(written).with_parts(*apart).parts
    for name in got:
        torch.testing.assert_close(got[name], whole[name])
    flat = JointLoss("rdrop").with_parts(logits, labels).parts  # a plain sum over positions, wherever texts begin
    torch.testing.assert_close(JointLoss("rdrop").with_parts(logits, labels, segments=segments).parts, flat)


@every_sweep
def test_only_labelled_positions_of_twins_go_through_the_head(backend, memory):
    hidden, weight, labels = example(T=20)
    labels[:2, :15], labels[2:, 1:9] = -100, -100
    segments = twice(torch.arange(20).div(5, rounding_mode="floor").repeat(2, 1)).to(DEVICE)
    loss_fn = JointLoss("ce + rdrop + rewards(2):twin + bag(1)", backend=backend, memory=memory)
    for given_segments in (None, segments):
        positions, packed = labelled(labels, given_segments)
        assert positions is not None
        truth = gradients(JointLoss(str(loss_fn), backend="plain"), hidden, weight, labels, segments=given_segments)
        for name in (backend, "plain"):
            few = JointLoss(str(loss_fn), backend=name, memory=memory)
            got = gradients(few, hidden, weight, labels, segments=packed, positions=positions)
            for one, two in zip(got, truth, strict=True):
                torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


def test_a_replayed_loss_reads_the_twins_tokens():
    hidden, weight, labels = example()
    loss_fn = JointLoss("ce + rdrop + rewards(2):twin")
    stats = token_stats((hidden @ weight.t()).requires_grad_(), labels, needs=loss_fn.needs)
    counts = {"num_tokens": None, "num_sequences": None}
    total, values = replay.replayed(loss_fn, stats, labels, counts, None)
    torch.testing.assert_close(total, loss_fn.from_stats(stats, labels).total)
    torch.testing.assert_close(values, loss_fn.part_values(stats, labels))


def test_formulas_say_which_statistic_is_missing():
    stats = token_stats(torch.zeros(2, 2, 3), labels := torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"rdrop needs `twin_kl`"):
        JointLoss("rdrop").from_stats(stats, labels)
    with pytest.raises(ValueError, match=r"a twin's gate needs `twin_token`"):
        JointLoss("gated(1):twin").from_stats(stats, labels)
    with pytest.raises(UserError, match=r"rdrop takes no n"):
        JointLoss("rdrop(2)")


def test_what_has_no_twins_says_so():
    for show in (explain, lambda *given: pushes(*given[:2], [given[2]])):
        with pytest.raises(UserError, match=r"rdrop compares two predictions of a model .* Explain the other terms"):
            show("we met in may", "we met on may", "ce + rdrop")
    watched = JointLoss("ce + rdrop").diagnose(torch.zeros(3, 2, 5), torch.ones(3, 2, dtype=torch.long))
    assert "gradient/rdrop" not in watched
