"""Blocks of accept: where they begin and end, anchors in every way to compute a loss, and what the variants share."""

import models
import oracle
import pytest
import torch
from cases import batches
from hypothesis import given, settings
from hypothesis import strategies as st
from trainings import padded, rows, tiny

import ngramloss as ng
from ngramloss import JointLoss, attach, token_stats
from ngramloss.errors import UserError
from ngramloss.loss.kernels import replay
from ngramloss.loss.stats import with_given
from ngramloss.models.attached.segments import predicted
from ngramloss.models.attached.step_loss import shifted
from ngramloss.recipe import Train

WRITTEN = {
    "accept({})": oracle.accept,
    "accept({}):detached": oracle.accept_detached,
    "accept({},alpha=0.2):detached": lambda *given, **more: oracle.accept_detached(*given, alpha=0.2, **more),
    "accept({}):gated": oracle.accept_gated,
}
JOINT = "ce + accept(3) + 0.5*accept(2):detached + accept(4):gated"
each = pytest.mark.parametrize("written", WRITTEN)


@st.composite
def anchored(draw, longest=8):
    """A batch with gaps among its labels, and anchors."""
    logits, labels = draw(batches(longest=longest))
    flags = st.lists(st.booleans(), min_size=labels.numel(), max_size=labels.numel())
    gaps, more, anchors = (torch.tensor(draw(flags)).view_as(labels) for _ in range(3))
    return logits, labels.masked_fill(gaps & more, -100), anchors


def example(B=4, T=9, V=5, seed=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 6:], labels[1, 3] = -100, -100
    logits = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    logits = logits + 2 * torch.nn.functional.one_hot(labels.clamp_min(0), V)
    return logits, labels, torch.rand(B, T, generator=generator) < 0.4


@each
@given(batch=anchored(), n=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_blocks_begin_at_the_anchors_and_may_overlap(written, batch, n):
    logits, labels, anchors = batch
    logits, again = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (part,) = JointLoss(written.format(n)).parts
    computed = part.function(with_given(token_stats(logits, labels), labels, {"anchors": anchors}), labels)
    for value, row, ids, marks in zip(computed, again, labels.tolist(), anchors.tolist(), strict=True):
        p = [list(x) for x in row.softmax(-1).unbind()]
        expected = WRITTEN[written](p, ids, n, anchors=marks)
        assert abs(value.item() - expected.item()) < 1e-9
        (got,) = torch.autograd.grad(value, logits, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, again, retain_graph=True)
        assert (got - wanted).abs().max() < 1e-9


@each
def test_gradcheck_with_anchors(written):
    logits, labels, anchors = example(B=2, T=6)
    (part,) = JointLoss(written.format(3)).parts
    detach, first = torch.Tensor.detach, {}

    def frozen(x):  # weights without gradient stay as they were at the first point
        stats = with_given(token_stats(x, labels), labels, {"anchors": anchors})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", lambda logp: first.setdefault("", detach(logp).clone()))
            return part.function(stats, labels)

    assert torch.autograd.gradcheck(frozen, (logits.requires_grad_(),))


def test_a_block_ends_before_a_label_that_does_not_count_and_is_divided_by_its_own_length():
    half = token_stats(torch.zeros(1, 7, 2), torch.zeros(1, 7, dtype=torch.long))
    labels = torch.tensor([[0, 0, 0, 0, -100, 0, 0]])  # blocks of 3, 1 and 2
    (part,) = JointLoss("accept(3)").parts
    means = [(0.5 + 0.25 + 0.125) / 3, 0.5, (0.5 + 0.25) / 2]
    assert part.function(half, labels).item() == pytest.approx(1 - sum(means) / 3)
    marks = torch.tensor([[0, 0, 1, 0, 1, 0, 1]])  # blocks of 2 and 1: the one in the middle does not count
    given_ = with_given(half, labels, {"anchors": marks})
    assert part.function(given_, labels).item() == pytest.approx(1 - (0.375 + 0.5) / 2)


@each
@given(batch=anchored(), n=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_without_anchors_blocks_are_those_that_follow_each_other(written, batch, n):
    logits, labels, _ = batch
    starts = [{places[0] for places in oracle.blocks(ids, n)} for ids in labels.tolist()]
    anchors = torch.tensor([[t in row for t in range(labels.shape[1])] for row in starts])
    loss_fn = JointLoss(written.format(n))
    torch.testing.assert_close(loss_fn(logits, labels, anchors=anchors), loss_fn(logits, labels))


@given(batch=anchored(), more=st.integers(1, 3), before=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_order_of_rows_padding_and_micro_batches_change_nothing(batch, more, before, seed):
    logits, labels, anchors = (x.clone() for x in batch)
    labels[0, 0] = 0  # so that there is a row
    logits.requires_grad_()
    loss = JointLoss(JOINT)(logits, labels, anchors=anchors)
    (whole,) = torch.autograd.grad(loss, logits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(JointLoss(JOINT)(logits[order], labels[order], anchors=anchors[order]), loss)
    ends = [torch.full((len(labels), more, *x.shape[2:]), fill) for x, fill in ((logits, 3.0), (labels, -100))]
    marks = torch.ones(len(labels), more, dtype=torch.bool)
    sides = zip((logits, labels, anchors), (*ends, marks), strict=True)
    wide, ids, where = (torch.cat([b, a] if before else [a, b], 1) for a, b in sides)
    torch.testing.assert_close(JointLoss(JOINT)(wide, ids, anchors=where), loss)
    counts = {"num_tokens": (labels != -100).sum(), "num_sequences": (labels != -100).any(-1).sum()}
    pieces = [
        JointLoss(JOINT)(*(x[row : row + 1] for x in (logits, labels)), anchors=anchors[row : row + 1], **counts)
        for row in range(len(labels))
    ]
    torch.testing.assert_close(sum(pieces), loss)
    torch.testing.assert_close(torch.autograd.grad(sum(pieces), logits)[0], whole)


def test_the_variants_contain_what_they_are_named_after():
    logits, labels, anchors = example()
    logits.requires_grad_()

    def gradient(written):
        return torch.autograd.grad(JointLoss(written)(logits, labels, anchors=anchors), logits)[0]

    torch.testing.assert_close(gradient("accept(4,alpha=0):detached"), gradient("accept(4)"))
    torch.testing.assert_close(gradient("accept(1,alpha=1):detached"), gradient("accept(1):gated"))
    torch.testing.assert_close(JointLoss("accept(1)")(logits, labels), JointLoss("soft(1)")(logits, labels))
    sure = 1e4 * torch.nn.functional.one_hot(labels.clamp_min(0), 5).double()
    for variant in ("", ":detached", ":gated"):
        assert JointLoss(f"accept(4){variant}")(sure, labels, anchors=anchors) == pytest.approx(0, abs=1e-12)


def test_a_row_without_a_block_is_one_or_costs_nothing_and_has_no_gradient():
    logits, labels, anchors = example()
    logits.requires_grad_()
    for written, value in (("accept(3)", 1), ("accept(3):detached", 0), ("accept(3):gated", 0)):
        loss = JointLoss(written)(logits, labels, anchors=torch.zeros_like(anchors))
        assert loss == value
        assert not torch.autograd.grad(loss, logits)[0].any()


@each
def test_n_beyond_the_row_costs_nothing_more(written):
    logits, labels, anchors = example()
    expected = JointLoss(written.format(9))(logits, labels, anchors=anchors)
    (part,) = JointLoss(written.format(2)).parts
    stats = with_given(token_stats(logits, labels), labels, {"anchors": anchors})
    torch.testing.assert_close(
        part.function.func(stats, labels, **{**part.function.keywords, "n": 10**30}).mean(),
        part.function.func(stats, labels, **{**part.function.keywords, "n": 9}).mean(),
    )
    torch.testing.assert_close(JointLoss(written.format(1024))(logits, labels, anchors=anchors), expected)


@each
@pytest.mark.parametrize("value", [-120.0, -1e4, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_an_impossible_label_gives_no_nan(written, value, place):
    labels = torch.tensor([[3, 3, 3, 3, 3]])
    logits = torch.zeros(1, 5, 5)
    logits[0, place, 3] = value
    logits.requires_grad_()
    loss = JointLoss(written.format(2))(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    assert not loss.isnan()
    if written == "accept({})":
        assert loss.isfinite()
        assert gradient[0, place].abs().max() < 1e-6


# Anchors in every way to compute a loss


def test_anchors_travel_with_packed_rows_hidden_states_and_captured_steps(monkeypatch):
    logits, labels, anchors = example()
    alone = JointLoss(JOINT)(logits, labels, anchors=anchors, num_tokens=1, num_sequences=1)
    flat = [x.reshape(1, -1, *x.shape[2:]) for x in (logits, labels, anchors)]
    segments = torch.arange(4).repeat_interleave(9)[None]
    counts = {"num_tokens": 1, "num_sequences": 1}
    torch.testing.assert_close(JointLoss(JOINT)(flat[0], flat[1], anchors=flat[2], segments=segments, **counts), alone)
    weight = torch.eye(5, dtype=torch.float64)
    for backend in ("plain", "chunked"):
        loss_fn = JointLoss(JOINT, backend=backend)
        torch.testing.assert_close(loss_fn.from_hidden(logits, weight, labels, anchors=anchors, **counts), alone)
    shares = JointLoss(JOINT, reduction="none")(logits, labels, anchors=anchors, **counts)
    torch.testing.assert_close(shares.sum(), alone)
    one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    JointLoss(JOINT)(one, labels, anchors=anchors).backward()
    monkeypatch.setattr(replay, "suits", lambda stats: True)
    JointLoss(JOINT)(two, labels, anchors=anchors).backward()
    torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.slow
def test_compiles_into_one_graph_with_anchors():
    torch._dynamo.reset()
    logits, labels, anchors = example()
    compiled = torch.compile(JointLoss(JOINT), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(logits, labels, anchors=anchors), JointLoss(JOINT)(logits, labels, anchors=anchors)
    )


def test_an_attached_model_takes_anchors_from_its_batch_and_shifts_them_with_its_labels():
    generator = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(4, models.V, (3, length), generator=generator) for length in (6, 7))
    labels[1, 4:], anchors = -100, torch.rand(3, 7, generator=generator) < 0.5
    model = tiny().eval()
    expected = JointLoss(JOINT)(model(input_ids=ids, labels=labels).logits, labels, anchors=anchors)
    found = attach(model, JOINT)(input_ids=ids, labels=labels, anchors=anchors).loss
    torch.testing.assert_close(found, expected)
    assert found != model(input_ids=ids, labels=labels).loss
    causal = models.tiny("llama").eval()
    text = labels.masked_fill(torch.arange(7) < 2, -100)
    segments = torch.tensor([[0] * 5 + [1] * 2]).expand(3, 7)
    read = labels.clamp_min(4)
    expected = JointLoss(JOINT)(
        causal(input_ids=read).logits,
        shifted(text),
        anchors=torch.nn.functional.pad(anchors, (0, 1))[:, 1:],
        segments=predicted(segments),
    )
    found = attach(causal, JOINT)(input_ids=read, labels=text, anchors=anchors, segments=segments).loss
    torch.testing.assert_close(found, expected)


SETTINGS = Train(batch_size=8, accumulate=1, max_steps=1, warmup_steps=0, log_every=1, eval_every=0, seed=3)


def test_our_loop_reads_anchors_beside_the_labels_of_rows():
    model = tiny()
    data = [row | {"anchors": [place % 3 == 1 for place in range(len(row["labels"]))]} for row in rows(8)]
    batch = padded(model)(rows(8))
    labels = batch.pop("labels")
    anchors = (torch.arange(labels.shape[1]) % 3 == 1).expand(labels.shape)
    expected = JointLoss(JOINT)(model(**batch).logits, labels, anchors=anchors).item()

    def first_loss(given_rows, objective=JOINT):
        found = []
        ng.train(tiny(), None, given_rows, SETTINGS, objective=objective, on_step=lambda _, line: found.append(line))
        return found[0]["loss"]

    assert first_loss(data) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match=r"some rows have anchors, and the first row has none\. Give them"):
        first_loss([rows(8)[0], *data[1:]])
    with pytest.raises(UserError, match="a row has no anchors"):
        first_loss([*data[:-1], rows(8)[-1]])
    with pytest.raises(UserError, match="anchors was given, but no term of 'ce' reads it"):
        first_loss(data, "ce")


def test_diagnosing_knows_the_anchors():
    logits, labels, anchors = example()
    anchors[2:] = False
    found = JointLoss("ce + accept(3)").diagnose(logits, labels, anchors=anchors)
    assert found["floor/accept(3)"] == 0.5  # two rows have no block
    assert JointLoss("ce + accept(3)").diagnose(logits, labels)["floor/accept(3)"] == 0


# Bad input


@pytest.mark.parametrize(
    ("written", "anchors", "message"),
    [
        ("accept(2)", torch.tensor([[0, 3]]), r"anchors must have a number .* got \[1, 2\]\. They are not positions"),
        ("accept(2)", torch.tensor([[0, 0, 7, 0]]), r"anchors must be 0 or 1, got 7 at row 0, position 2\. They are"),
        ("ce", torch.ones(1, 4), "anchors was given, but no term of 'ce' reads it.* or accept for anchors"),
    ],
)
def test_anchors_that_cannot_be_are_refused(written, anchors, message):
    with pytest.raises(UserError, match=message):
        JointLoss(written)(torch.zeros(1, 4, 3), torch.ones(1, 4, dtype=torch.long), anchors=anchors)


def test_alpha_is_refused_where_it_would_not_be_read():
    for written in ("accept(8,alpha=0.5)", "accept(8,alpha=0.5):gated"):
        with pytest.raises(UserError, match=r"accept\(alpha\): only accept:detached reads it\. Write the variant"):
            JointLoss(written)
    with pytest.raises(UserError, match=r"accept\(alpha\): must be at most 1, got 2\.0"):
        JointLoss("accept(8,alpha=2):detached")
