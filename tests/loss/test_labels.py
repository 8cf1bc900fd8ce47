"""Only positions with a label go through the head, and nothing else changes."""

import pytest
import torch
from cases import EVERYTHING
from hypothesis import given, settings
from hypothesis import strategies as st
from models import V as VOCABULARY
from models import tiny
from packed import V, packed_rows

import ngramloss as ng
from ngramloss import JointLoss
from ngramloss.loss.stats import IGNORE_INDEX, head, labelled, segments


@pytest.fixture
def finest(monkeypatch):
    """Little is rounded up, so that small batches are gathered too."""
    for name, size in {"TEXTS": 1, "LENGTH": 1, "POSITIONS": 3}.items():
        monkeypatch.setattr(segments, name, size)


def with_prompt(rows, filler, length):
    return torch.cat([rows.new_full((len(rows), length, *rows.shape[2:]), filler), rows], 1)


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("backend", ["plain", "chunked", pytest.param("fused", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_all_positions(backend, memory, finest):
    if backend == "fused":
        pytest.importorskip("triton")
    loss_fn = JointLoss(EVERYTHING, backend=backend, memory=memory)
    dtype = torch.float32 if backend == "fused" else torch.float64
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12

    @given(batch=packed_rows(boundary_labels=True), prompt=st.integers(0, 20), packed=st.booleans())
    @settings(max_examples=4 if backend == "fused" else 25, deadline=None, database=None)
    def agrees(batch, prompt, packed):
        labels = with_prompt(batch.labels, IGNORE_INDEX, prompt)
        own = with_prompt(batch.segments, -1, prompt) if packed else None
        hidden = with_prompt(batch.logits[..., :3].to(dtype), 0.5, prompt)
        weight = torch.randn(V, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
        positions, found = labelled(labels, own)
        results = []
        for more in ({"segments": own}, {"segments": found if found is not None else own, "positions": positions}):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            loss, parts = loss_fn.from_hidden_with_parts(*leaves, labels, **more)
            results.append((loss, parts, torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(*results, atol=tolerance, rtol=10 * tolerance)

    agrees()


@given(rows=st.lists(st.lists(st.sampled_from([5, 6, -100]), min_size=7, max_size=7), min_size=1, max_size=4))
@settings(deadline=None)
def test_the_positions_are_those_with_a_label_in_order(rows):
    labels = with_prompt(torch.tensor(rows), IGNORE_INDEX, 300)
    positions = labelled(labels).positions
    expected = (labels.flatten() != IGNORE_INDEX).nonzero().flatten().tolist()
    assert positions.tolist() == expected + [-1] * (len(positions) - len(expected))
    assert len(positions) % 64 == 0


def test_rows_of_labels_are_left_as_they_are():
    assert labelled(torch.randint(9, (2, 32))) == (None, None)


@pytest.fixture
def through_the_head(monkeypatch):
    """The number of positions of every pass through a head."""
    seen = []
    sweep = head.sweep
    monkeypatch.setattr(
        "ngramloss.loss.stats.backends.head.sweep",
        lambda hidden, *rest, **more: (seen.append(hidden.shape[:2].numel()), sweep(hidden, *rest, **more))[1],
    )
    return seen


@pytest.mark.parametrize("objective", ["ce", "ce + matches(2) + bag(2) + lcs"])
def test_an_attached_model_computes_logits_of_labelled_positions_only(objective, through_the_head):
    torch.manual_seed(0)
    model = tiny("llama").train()
    ids = torch.randint(3, VOCABULARY, (4, 100))
    labels = ids.clone()
    labels[:, :90] = IGNORE_INDEX
    logits = model(input_ids=ids).logits
    expected = JointLoss(objective)(logits[:, :-1], labels[:, 1:])
    loss = ng.attach(model, objective)(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    assert through_the_head == [64]  # 40 have a label
    assert set(ng.last_parts(model)) == set(JointLoss(objective).with_parts(logits, ids).parts)


def test_a_batch_without_labels_has_a_loss_of_zero():
    model = ng.attach(tiny("llama"), "ce + matches(2)")
    loss = model(input_ids=torch.randint(3, VOCABULARY, (2, 80)), labels=torch.full((2, 80), IGNORE_INDEX)).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.slow
def test_compiled_code_reads_nothing_on_the_host():
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, 70))
    labels = ids.clone()
    labels[:, :60] = IGNORE_INDEX
    model = ng.attach(tiny("llama"), "ce")
    expected = model(input_ids=ids, labels=labels).loss
    compiled = torch.compile(model, backend="eager", fullgraph=False)
    torch.testing.assert_close(compiled(input_ids=ids, labels=labels).loss, expected)
