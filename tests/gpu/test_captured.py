"""Captured steps train like eager ones: gradients, random numbers, memory."""

from functools import partial

import models
import pytest
import torch
from captures import OBJECTIVE, bart, rows
from cases import FROM_HIDDEN

from ngramloss.data.batches.padding import Padder
from ngramloss.data.batches.plan import Size
from ngramloss.models.attached.attach import attach, last_parts
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.training.captured import CapturedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# One step

PIECES = {1: [range(16)], 2: [range(10), range(10, 16)], 4: [range(4), range(4, 8), range(8, 13), range(13, 16)]}


def gradients(model, precision, pieces, captured):
    """Gradients of a step of 16 rows, cut into these pieces."""
    padder, data = Padder(models.PAD, partial(decoder_inputs, model)), rows(16, seed=5)
    counts = torch.tensor([float(sum(len(row["labels"]) for row in data)), 16.0])

    def run(inputs):
        batch = {name: value for name, value in inputs.items() if name != "counts"}
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch, num_tokens=inputs["counts"][0], num_sequences=inputs["counts"][1]).loss
        loss.backward()
        return torch.stack([loss.detach(), *last_parts(model).values()])

    batches = [padder([data[row] for row in piece], Size(16, 40, 24)) | {"counts": counts} for piece in pieces]
    model.train()
    model.zero_grad()
    if captured:
        step = CapturedStep(model, run)
        step.begin(batches)
        values = sum(step(batch).clone() for batch in batches)
    else:
        values = sum(run({name: value.cuda() for name, value in batch.items()}) for batch in batches)
    return torch.cat([p.grad.flatten().double().clone() for p in model.parameters()]), values


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", FROM_HIDDEN, ids=repr)
def test_a_captured_step_has_the_gradients_of_an_eager_one(case, precision):
    """They differ by no more than twice what eager ones under another split do, plus the last digit of a sum."""
    model = attach(bart().cuda(), [case.term])
    eager = {count: gradients(model, precision, pieces, captured=False) for count, pieces in PIECES.items()}
    spread = max((eager[1][0] - eager[count][0]).norm() for count in (2, 4))
    for count, pieces in PIECES.items():
        got, values = gradients(model, precision, pieces, captured=True)
        assert (got - eager[count][0]).norm() <= 2 * spread + 1e-7 * eager[count][0].norm(), count
        torch.testing.assert_close(values, eager[count][1], atol=2e-3, rtol=2e-2 if precision == "bf16" else 1e-4)


def test_capturing_leaves_gradients_weights_and_random_numbers_as_they_were():
    model = attach(bart(dropout=0.1).cuda(), OBJECTIVE)
    before = torch.cuda.get_rng_state(), torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    got, _ = gradients(model, "fp32", PIECES[1], captured=True)
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.cuda.set_rng_state(before[0])
    expected, _ = gradients(model, "fp32", PIECES[1], captured=False)  # the same dropout, so the same gradients
    assert all(torch.equal(one, other) for one, other in zip(before[2], model.parameters(), strict=True))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-3)


def test_a_smaller_shape_needs_no_memory_besides_that_of_a_larger_one():
    model = attach(bart(vocab_size=20_001).cuda(), OBJECTIVE)

    def run(inputs):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()[None]

    def batch(length):
        return {name: torch.full((64, length), 5) for name in ("input_ids", "labels", "decoder_input_ids")}

    step = CapturedStep(model.train(), run)
    step.begin([batch(60)])
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for length in (58, 56, 54):
        step.begin([batch(length)])
    assert torch.cuda.max_memory_reserved() <= 1.1 * held


def test_what_a_model_keeps_from_one_shape_is_not_overwritten_by_the_graph_of_another():
    layer, tables = torch.nn.Linear(256, 256, device="cuda"), {}

    def run(inputs):
        values = inputs["values"]  # [L, 256]
        if len(values) not in tables:  # as a model keeps positions
            tables[len(values)] = torch.full((len(values), 256), 2.0, device="cuda")
        loss = (layer(layer(values)).tanh() * tables[len(values)]).sum()
        loss.backward()
        return loss.detach()[None]

    step, batches = CapturedStep(layer, run), [{"values": torch.randn(length, 256)} for length in (4096, 2048)]
    expected = [run({"values": batch["values"].cuda()}) for batch in batches]
    tables.clear()
    for index in (0, 1, 0, 1):
        step.begin([batches[index]])
        torch.testing.assert_close(step(batches[index]), expected[index])
    step.begin(batches)
    for batch, value in zip(batches, expected, strict=True):
        torch.testing.assert_close(step(batch), value)
    assert len(step.graphs) == 2
