"""Packed rows: several texts in a row give what each gives in a row of its own."""

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, EVERYTHING
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import V, packed_rows

from ngramloss import JointLoss, token_stats
from ngramloss.loss.stats import IGNORE_INDEX, packing
from ngramloss.loss.stats.segments import turns, unpack

ALL = " + ".join(f"{1 + i / 8}*{case.term}" for i, case in enumerate(CASES))
HEAD = [{}, {"bias": True}, {"softcap": 3.0, "scale": 0.5}]


def texts_apart(labels, segments):
    """The definition in plain Python: each run of equal segments that are not negative, row by row."""
    found = []
    for row, numbers in enumerate(segments.tolist()):
        for t, number in enumerate(numbers):
            if number >= 0 and (t == 0 or numbers[t - 1] != number):
                found.append([])
            if number >= 0:
                found[-1].append((row, t))
    return [text for text in found if any(labels[place] != IGNORE_INDEX for place in text)]


@pytest.mark.parametrize("each", CASES, ids=str)
@given(batch=packed_rows())
@settings(max_examples=12, deadline=None)
def test_texts_packed_into_rows_have_the_loss_and_gradient_that_they_have_apart(each, batch):
    loss_fn = JointLoss(each.term)
    packed, apart = batch.logits.clone().requires_grad_(), batch.logits.clone().requires_grad_()
    loss, parts = loss_fn.with_parts(packed, batch.labels, segments=batch.segments)
    expected, expected_parts = loss_fn.with_parts(batch.apart(apart), batch.apart(batch.labels))
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(parts, expected_parts, atol=1e-12, rtol=1e-12)
    got, wanted = (torch.autograd.grad(value, of)[0] for value, of in ((loss, packed), (expected, apart)))
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
@given(batch=packed_rows(boundary_labels=True), cast=st.sampled_from([torch.int64, torch.int32, torch.int16]))
@settings(max_examples=50, deadline=None)
def test_a_label_between_texts_counts_in_sums_over_positions_only(batch, cast):
    everything = JointLoss(EVERYTHING)
    _, parts = everything.with_parts(batch.logits, batch.labels, segments=batch.segments.to(cast))
    _, whole = everything.with_parts(batch.logits, batch.labels)
    _, apart = everything.with_parts(batch.apart(batch.logits), batch.apart(batch.labels))
    for part in everything.parts:
        expected = whole if part.by_position else apart
        torch.testing.assert_close(parts[part.name], expected[part.name], atol=1e-12, rtol=1e-12)
    assert {part.name.split("(")[0] for part in everything.parts if part.by_position} == {
        "ce",
        "dft",
        "tailr",
        "focal",
        "mixce",
        "eaft",
    }


@pytest.mark.parametrize("backend", ["plain", "chunked", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("head", HEAD, ids=str)
def test_every_backend_agrees_with_texts_apart(backend, memory, head, monkeypatch):
    if backend == "fused":
        pytest.importorskip("triton")
    loss_fn = JointLoss(EVERYTHING, backend=backend, memory=memory)
    dtype = torch.float32 if backend == "fused" else torch.float64
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12

    @given(batch=packed_rows(boundary_labels=False))
    @settings(max_examples=4 if backend == "fused" else 8, deadline=None, database=None)
    def agrees(batch):
        weight = torch.randn(V, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
        hidden = batch.logits[..., :3].to(dtype)
        bias = torch.arange(V).to(dtype) / 3 if head.get("bias") else None
        options = {"bias": bias, "scale": head.get("scale", 1.0), "softcap": head.get("softcap")}
        results = []
        for apart in (False, True):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            rows, labels = (batch.apart(leaves[0]), batch.apart(batch.labels)) if apart else (leaves[0], batch.labels)
            own = JointLoss(EVERYTHING) if apart else loss_fn
            segments = {} if apart else {"segments": batch.segments}
            loss = own.from_hidden(rows, leaves[1], labels, **options, **segments)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(*results, atol=tolerance, rtol=10 * tolerance)

    agrees()


@given(batch=packed_rows(boundary_labels=True))
@settings(max_examples=60, deadline=None)
def test_the_packing_holds_the_labels_of_each_text_in_order_with_one_gap_where_some_do_not_count(batch):
    packed = packing(batch.labels, batch.segments)
    if packed is None:
        assert all(len(set(row)) == 1 and row[0] >= 0 for row in batch.segments.tolist())
        return
    texts = texts_apart(batch.labels, batch.segments)
    for text, own, position in zip(texts, packed.labels.tolist(), packed.position.tolist(), strict=False):
        expected, places, gap = [], [], False
        for row, t in text:
            label = batch.labels[row, t].item()
            if label == IGNORE_INDEX:
                gap = bool(expected)
                continue
            expected += [IGNORE_INDEX] * gap + [label]
            places += [0] * gap + [row * batch.labels.shape[1] + t]
            gap = False
        assert own == expected + [IGNORE_INDEX] * (len(own) - len(expected))
        assert position == places + [0] * (len(own) - len(places))
    assert (packed.labels[len(texts) :] == IGNORE_INDEX).all()
    assert packed.labels.shape[0] % 8 == 0
    assert packed.labels.shape[1] % 32 == 0
    owner = torch.full_like(batch.labels, -1)
    for number, text in enumerate(texts):
        for place in text:
            owner[place] = number if batch.labels[place] != IGNORE_INDEX else -1
    torch.testing.assert_close(packed.owner, owner)


def test_a_row_that_belongs_to_no_text_is_none():
    labels = torch.tensor([[1, 2, 3], [1, 2, 3]])
    segments = torch.tensor([[-1, -1, -1], [0, 0, 0]])
    packed = packing(labels, segments)
    assert packed.owner.tolist() == [[-1] * 3, [0] * 3]
    assert (packed.labels != IGNORE_INDEX).any(-1).sum() == 1


def test_statistics_are_zero_where_a_text_has_no_label():
    labels, segments = torch.tensor([[1, 2, -100, 3, 0, 1]]), torch.tensor([[0, 0, 0, 0, -1, 1]])
    packed = packing(labels, segments)
    logits = torch.randn(1, 6, V, generator=torch.Generator().manual_seed(0))
    stats = token_stats(logits, labels, needs=("cross_logp", "entropy"), texts=packed.texts)
    for value in unpack(stats, packed):
        assert value is None or not value[packed.labels == IGNORE_INDEX].any()
    assert stats.cross_logp.any(-1).tolist() == [[True, True, False, True, False, True]], "0 if it belongs to none"


def test_a_batch_without_a_label_is_no_text_and_costs_nothing():
    logits = torch.randn(2, 5, V, requires_grad=True)
    labels = torch.full((2, 5), -100)
    loss = JointLoss(EVERYTHING)(logits, labels, segments=torch.zeros_like(labels))
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()
    empty = JointLoss("ce + bag(2)")(torch.zeros(1, 0, V), torch.zeros(1, 0).long(), segments=torch.zeros(1, 0).long())
    assert empty == 0


@pytest.mark.slow
@given(batch=packed_rows(boundary_labels=True))
@settings(max_examples=20, deadline=None)
def test_shares_of_packed_rows_add_up_to_the_loss(batch):
    shares = JointLoss(ALL, reduction="none")(batch.logits, batch.labels, segments=batch.segments)
    assert shares.shape == (len(batch.labels),)
    torch.testing.assert_close(shares.sum(), JointLoss(ALL)(batch.logits, batch.labels, segments=batch.segments))
    # A row's share is what its texts give with the denominators of the batch.
    packed = packing(batch.labels, batch.segments)
    texts = (packed.labels != IGNORE_INDEX).any(-1)
    alone = JointLoss("matches(2)", reduction="none")(batch.logits, batch.labels, segments=batch.segments)
    for row, share in enumerate(alone):
        own = JointLoss("matches(2)")(
            batch.logits[row : row + 1],
            batch.labels[row : row + 1],
            segments=batch.segments[row : row + 1],
            num_sequences=texts.sum(),
        )
        torch.testing.assert_close(share, own)


def test_denominators_that_are_given_divide_the_terms_of_packed_rows():
    logits, labels = torch.randn(1, 6, V), torch.tensor([[0, 1, 2, 3, 1, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    _, own = JointLoss("ce + matches(2) + convex").with_parts(logits, labels, segments=segments)
    counts = {"num_tokens": 12, "num_sequences": 6}
    _, given_ = JointLoss("ce + matches(2) + convex").with_parts(logits, labels, segments=segments, **counts)
    torch.testing.assert_close(given_["ce"] * 2, own["ce"])
    torch.testing.assert_close(given_["convex"] * 2, own["convex"])
    torch.testing.assert_close(given_["matches(2)"] * 3, own["matches(2)"])


def test_ngrams_of_one_text_are_not_rewarded_for_occurring_in_another():
    labels = torch.tensor([[0, 1, 2, 3]])
    logits = 50.0 * F.one_hot(torch.tensor([[2, 3, 0, 1]]), V)  # each text predicts the other one
    assert JointLoss("matches(2)")(logits, labels) == pytest.approx(1 / 3)
    assert JointLoss("matches(2)")(logits, labels, segments=torch.tensor([[4, 4, 9, 9]])) == 1


def test_every_run_of_labels_is_a_turn():
    labels = torch.tensor([[-100, 5, 6, -100, -100, 7, 8, 9], [1, 2, -100, 3, 4, -100, -100, -100]])
    packed = packing(labels, turns(labels))
    assert packed.labels[:5, :4].tolist() == [
        [5, 6, -100, -100],
        [7, 8, 9, -100],
        [1, 2, -100, -100],
        [3, 4, -100, -100],
        [-100] * 4,
    ]
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, -1, 2, 2, 2]])
    packed = packing(labels, turns(labels, documents))
    assert packed.labels[:6, :3].tolist() == [
        [5, -100, -100],
        [6, -100, -100],
        [7, 8, 9],
        [1, 2, -100],
        [3, -100, -100],
        [-100] * 3,
    ]


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        (torch.zeros(1, 4), TypeError, "segments must be integers.*got torch.float32.*segments.long"),
        (torch.zeros(1, 4).bool(), TypeError, "got torch.bool"),
        (torch.zeros(1, 3).long(), ValueError, r"shape of the labels, \[B, T\] = \[1, 4\], got \[1, 3\]"),
        (torch.zeros(4).long(), ValueError, r"got \[4\]"),
    ],
)
def test_segments_of_a_wrong_kind_are_refused(segments, error, message):
    with pytest.raises(error, match=message):
        JointLoss("ce")(torch.zeros(1, 4, V), torch.zeros(1, 4).long(), segments=segments)


def test_candidates_are_refused_beside_segments():
    from ngramloss import CandidateStats

    candidates = CandidateStats(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[0.0, 1.0]]))
    labels = torch.zeros(1, 4).long()
    with pytest.raises(ValueError, match="compares the candidates of a row, but packed rows have several texts"):
        JointLoss("ce + rank")(
            torch.zeros(1, 4, V), labels, segments=torch.tensor([[0, 0, 1, 1]]), candidates=candidates
        )


@pytest.mark.slow
def test_compiled_code_takes_a_packing_made_before():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 12, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (2, 12), generator=generator)
    segments = torch.arange(12).expand(2, -1) // 5
    loss_fn = JointLoss("ce + matches(2,3) + bag(2) + unlikelihood")
    compiled = torch.compile(
        lambda logits, packed: loss_fn(logits, labels, segments=packed), backend="aot_eager", fullgraph=True
    )
    results = []
    for run in (lambda x: compiled(x, packing(labels, segments)), lambda x: loss_fn(x, labels, segments=segments)):
        leaf = logits.clone().requires_grad_()
        loss = run(leaf)
        results.append((loss, torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
def test_segments_inside_compiled_code_break_the_graph_and_agree():
    logits = torch.randn(1, 8, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, segments = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 1]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    loss_fn = JointLoss("ce + matches(2) + bag(2)")
    compiled = torch.compile(loss_fn, backend="aot_eager")
    torch.testing.assert_close(
        compiled(logits, labels, segments=segments), loss_fn(logits, labels, segments=segments), atol=1e-12, rtol=1e-12
    )


@given(batch=packed_rows())
@settings(max_examples=10, deadline=None)
def test_diagnostics_of_packed_rows_are_those_of_the_texts(batch):
    loss_fn = JointLoss("ce + matches(2) + rewards(3) + bag(2)")
    packed = loss_fn.diagnose(batch.logits, batch.labels, segments=batch.segments)
    apart = loss_fn.diagnose(batch.apart(batch.logits), batch.apart(batch.labels))
    torch.testing.assert_close(packed, apart)
