"""Batches: padded and filled up to any size, and a model trains alike on them."""

from functools import partial

import models
import numpy as np
import pytest
import torch
from trainings import moved, rows, tiny

from ngramloss.data.batches.padding import Padder, ahead, padded
from ngramloss.data.batches.plan import Size
from ngramloss.models.attached.attach import attach
from ngramloss.models.attached.decoder_inputs import decoder_inputs

ROWS = [
    {"input_ids": np.array([5, 6, 7], np.int32), "labels": [8, 9]},
    {"input_ids": [4], "labels": np.array([3, 2, 8, 9, 1])},
]


def test_a_batch_is_padded_and_always_has_decoder_inputs():
    made = Padder(1, moved)(ROWS)
    assert {name: value.tolist() for name, value in made.items()} == {
        "input_ids": [[5, 6, 7], [4, 1, 1]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[8, 9, -100, -100, -100], [3, 2, 8, 9, 1]],
        "decoder_input_ids": [[99, 8, 9, 1, 1], [99, 3, 2, 8, 9]],
    }
    assert all(value.dtype == torch.int64 for value in made.values())


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_rows_of_any_kind_are_padded(kind):
    ids, mask = padded([kind([5, -100, 2**40]), kind([7]), kind([])], 1, 4, 4)
    assert ids.tolist() == [[5, -100, 2**40, 1], [7, 1, 1, 1], [1] * 4, [1] * 4]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert ids.dtype == mask.dtype == np.int64


@pytest.mark.parametrize(("multiple", "source", "target"), [(1, 3, 5), (3, 3, 6), (4, 4, 8), (8, 8, 8)])
def test_lengths_are_rounded_up_to_a_multiple(multiple, source, target):
    made = Padder(1, moved, multiple=multiple)(ROWS)
    assert made["input_ids"].shape == made["attention_mask"].shape == (2, source)
    assert made["labels"].shape == made["decoder_input_ids"].shape == (2, target)


@pytest.mark.parametrize("size", [Size(2, 3, 5), Size(2, 8, 8), Size(4, 3, 6)])
def test_a_batch_is_filled_up_with_rows_that_count_for_nothing(size):
    made = Padder(1, moved)(ROWS, size)
    assert made["input_ids"].shape == made["attention_mask"].shape == (size.rows, size.source)
    assert made["labels"].shape == made["decoder_input_ids"].shape == (size.rows, size.target)
    assert made["attention_mask"].sum(1).tolist() == [3, 1] + [1] * (size.rows - 2)  # one token to attend to
    assert (made["labels"] != -100).sum(1).tolist() == [2, 5] + [0] * (size.rows - 2)


def test_a_padding_id_in_the_text_is_attended_to():
    made = Padder(1, moved)([{"input_ids": [5, 1, 6], "labels": [2]}, {"input_ids": [5], "labels": [2]}])
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_batch_without_padding_has_no_mask():
    assert "attention_mask" not in Padder(1, moved)([{"input_ids": [5, 1, 6], "labels": [2]}])
    assert "attention_mask" not in Padder(1, moved)(ROWS[:1], Size(1, 3, 9))  # padding of labels needs none
    assert "attention_mask" in Padder(1, moved)(ROWS[:1], Size(1, 4, 9))
    assert Padder(1, moved, always_mask=True)(ROWS[:1])["attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("family", ["bart", "t5", "pegasus", "led"])
def test_a_model_reads_the_batch_as_its_own_shift_would_have_it(family):
    model = models.tiny(family)
    made = Padder(models.PAD, partial(decoder_inputs, model))(
        [{"input_ids": [5, 6, 7, 8], "labels": [4, 5]}, {"input_ids": [9], "labels": [6, 7, 2]}]
    )
    assert made["decoder_input_ids"].tolist() == [[models.START, 4, 5], [models.START, 6, 7]]
    mine = model(**made).loss
    theirs = model(**{name: value for name, value in made.items() if name != "decoder_input_ids"}).loss
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("family", sorted(models.ENCODER_DECODER))
def test_blank_rows_change_no_loss_and_no_gradient(family):
    """What fills a size up must count for nothing in any model."""
    model = attach(tiny(family).eval(), "ce + matches(2) + bag(2)")
    padder, some = Padder(models.PAD, partial(decoder_inputs, model)), rows(3, seed=4)
    results = []
    for size in (Size(3, 24, 16), Size(6, 24, 16)):
        model.zero_grad()
        loss = model(**padder(some, size)).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)


def test_items_made_ahead_are_the_same_in_order_and_an_error_arrives():
    assert list(ahead(iter(range(50)), by=3)) == list(range(50))
    assert list(ahead(iter(()))) == []

    def failing():
        yield 1
        raise ValueError("the disk is gone")

    made = ahead(failing())
    assert next(made) == 1
    with pytest.raises(ValueError, match="the disk is gone"):
        next(made)
