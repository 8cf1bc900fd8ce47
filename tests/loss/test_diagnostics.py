"""What a practitioner watches."""

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, batches
from hypothesis import given, settings

from ngramloss import JointLoss


def sure(predicted, V=10, confidence=0.9):
    other = (1 - confidence) / (V - 1)
    return torch.where(F.one_hot(predicted, V).bool(), confidence, other).log()


def test_shares_and_confidence_of_matched_windows():
    labels = torch.tensor([[1, 2, 3, 4, 5], [6, 7, -100, -100, -100]])
    predicted = torch.tensor([[2, 3, 3, 4, 9], [6, 7, 6, 7, 6]])
    watched = JointLoss("ce + matches(2)").diagnose(sure(predicted), labels)
    assert watched["matched/2"].item() == pytest.approx(3 / 5)  # 2 3, 3 4 and 6 7, of five real windows
    assert watched["placed/2"].item() == pytest.approx(2 / 5)  # 3 4 and 6 7
    assert watched["confidence/2"].item() == pytest.approx(0.81)


def test_every_n_of_the_objective_is_watched_once():
    logits, labels = torch.zeros(1, 4, 10), torch.tensor([[1, 2, 3, 4]])
    watched = JointLoss("ce + matches(2,3) + bleu(3,4)").diagnose(logits, labels)
    assert [name for name in watched if name.startswith("matched/")] == ["matched/2", "matched/3", "matched/4"]
    assert [name for name in watched if name.startswith("floor/")] == [
        "floor/matches(2)",
        "floor/matches(3)",
        "floor/bleu(3,4)",
    ]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.part.per == "sequence" and str(c.term) != "precision(1):released"], ids=repr
)
@given(batch=batches())
@settings(max_examples=15, deadline=None)
def test_no_prediction_goes_below_the_floor_and_the_certain_one_reaches_it(case, batch):
    loss_fn = JointLoss([case.term])
    name = f"floor/{case.part.name}"
    floor = loss_fn.diagnose(batch.logits, batch.labels)[name].double()
    perfect = 1e4 * F.one_hot(batch.labels.clamp_min(0), 4).double()
    torch.testing.assert_close(loss_fn(perfect, batch.labels), floor, atol=1e-6, rtol=0)
    if str(case.term) != "precision(2):released":
        assert loss_fn(batch.logits, batch.labels) >= floor - 1e-6


def test_repeats_keep_the_floor_above_zero():
    labels = torch.tensor([[7, 8, 7, 8]])
    watched = JointLoss("matches(2) + rewards(2)").diagnose(torch.zeros(1, 4, 10), labels)
    assert watched["floor/matches(2)"].item() == pytest.approx(1 / 3)
    assert watched["floor/rewards(2)"].item() == pytest.approx(1 / 3)


def test_gradient_shares_are_those_of_the_weighted_parts():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (2, 8), generator=generator)
    logits = sure(labels) + 0.1 * torch.randn(2, 8, 10, generator=generator)
    watched = JointLoss("2*ce + 0.5*matches(2) + bag(2)").diagnose(logits, labels)
    norms = {}
    for written, name in [("2*ce", "ce"), ("0.5*matches(2)", "matches(2)"), ("bag(2)", "bag(2)")]:
        leaf = logits.clone().requires_grad_()
        JointLoss(written)(leaf, labels).backward()
        norms[name] = leaf.grad.norm()
    for name, norm in norms.items():
        torch.testing.assert_close(watched[f"gradient/{name}"], norm / sum(norms.values()))


def test_diagnosing_leaves_no_gradient_and_needs_none():
    logits = torch.zeros(1, 4, 10, requires_grad=True)
    with torch.no_grad():
        watched = JointLoss("ce + matches(2)").diagnose(logits, torch.tensor([[1, 2, 3, 4]]))
    assert logits.grad is None
    assert all(value.ndim == 0 and not value.requires_grad for value in watched.values())


def test_a_batch_without_windows_is_all_zeros():
    watched = JointLoss("ce + matches(2)").diagnose(torch.zeros(1, 3, 10), torch.full((1, 3), -100))
    assert all(value == 0 for value in watched.values())
