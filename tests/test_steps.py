"""Planned steps: any cut of a step into micro-batches, filled up to any size, trains alike."""

from functools import partial

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainings import moved, rows, tiny

from ngramloss.gpu.captured import Gradients
from ngramloss.hf.attach import attach, decoder_inputs
from ngramloss.steps.padding import Padder, ahead
from ngramloss.steps.plan import Grid, LengthGrouped, Plan, Size, bounds, fitted_grid
from ngramloss.steps.planned import Epochs, ExampleLengths, PlannedSteps

lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=40)


def columns(pairs):
    return tuple(np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))


# Plans


@given(lengths, st.integers(1, 50), st.one_of(st.none(), st.integers(1, 400)), st.booleans())
def test_every_row_is_in_one_micro_batch_that_holds_it(pairs, most_rows, max_tokens, on_grid):
    sources, targets = columns(pairs)
    numbers = list(range(len(pairs)))
    grid = fitted_grid(sources, targets, [numbers]) if on_grid else None
    cut = Plan(sources, targets, most_rows, max_tokens, grid).cut(numbers)
    assert sorted(row for batch in cut for row in batch.rows) == numbers
    for batch in cut:
        assert batch.rows
        if grid is None:
            assert batch.size is None
            size = Size(len(batch.rows), sources[batch.rows].max(), targets[batch.rows].max())
        else:
            size = batch.size
            assert size.rows >= len(batch.rows)
            assert size.source >= sources[batch.rows].max()
            assert size.target >= targets[batch.rows].max()
            assert size in Plan(sources, targets, most_rows, max_tokens, grid).sizes(len(pairs))
        if max_tokens is not None:
            assert size.tokens <= max_tokens or len(batch.rows) == 1
        elif grid is None:
            assert len(batch.rows) <= most_rows


def test_without_limits_a_step_is_cut_where_it_always_was():
    sources = targets = np.arange(1, 11)
    assert [batch.rows for batch in Plan(sources, targets, 4).cut([7, 1, 9, 3, 0])] == [[7, 1, 9, 3], [0]]


def test_a_process_without_rows_still_has_a_micro_batch():
    sources = targets = np.array([5, 6])
    assert [batch.rows for batch in Plan(sources, targets, 4).cut([])] == [[]]
    (batch,) = Plan(sources, targets, 4, 100, Grid((8,), (8,))).cut([])
    assert batch == ([], Size(4, 8, 8))


def test_the_micro_batches_of_a_step_have_equal_numbers_of_rows():
    sources, targets = np.full(32, 100), np.full(32, 20)
    plan = Plan(sources, targets, 32, 12 * 128, Grid((104,), (24,)))
    assert [batch.size.rows for batch in plan.cut(range(32))] == [11, 11, 11]  # not 12, 12, 8 and 4 blank


@given(st.lists(st.integers(1, 64), min_size=1, max_size=25), st.integers(1, 4))
def test_no_other_bounds_waste_less(values, most):
    from itertools import combinations

    def waste(chosen):
        return sum(min(bound for bound in chosen if bound >= value) - value for value in rounded)

    rounded = [-(-value // 8) * 8 for value in values]
    made = bounds(np.array(values), most)
    assert made == sorted(set(made))
    assert len(made) <= most
    assert made[-1] == max(rounded)
    kinds = sorted(set(rounded))
    others = [(*some, kinds[-1]) for count in range(most) for some in combinations(kinds[:-1], count)]
    assert waste(made) == min(map(waste, others))


def test_a_grid_holds_every_example_and_respects_the_models_positions():
    sources, targets = np.array([3, 1001, 20]), np.array([5, 9, 40])
    grid = fitted_grid(sources, targets, [[0, 2]], longest=1001)
    assert grid.sources[-1] == 1001
    assert grid.targets[-1] == 40
    assert fitted_grid(sources, targets, [[0, 2]]).sources[-1] == 1008


def test_rows_of_a_step_are_of_like_length_and_the_order_is_the_epochs_own():
    lengths = torch.randint(1, 1000, (1003,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGrouped(lengths, step=16, seed=5)
    first = list(sampler)
    assert sorted(first) == list(range(1003))
    assert list(sampler) == first
    spread = [
        max(part) - min(part) for part in ([lengths[row] for row in first[at : at + 16]] for at in range(0, 992, 16))
    ]
    assert sum(spread) / len(spread) < 60  # of 1,000 if they were not grouped
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(LengthGrouped(lengths, step=16, seed=6)) != first
    assert list(LengthGrouped([], step=16, seed=6)) == []


def test_rows_of_similar_length_waste_little():
    generator = np.random.default_rng(0)
    sources, targets = generator.integers(100, 1025, 6400), generator.integers(18, 41, 6400)
    order = list(LengthGrouped(sources, step=32, seed=1))
    steps = [order[start : start + 32] for start in range(0, len(order), 32)]
    plan = Plan(sources, targets, 32, None, fitted_grid(sources, targets, steps))
    assert plan.padding(steps) < 0.1
    assert plan.padding(steps) == pytest.approx(
        1 - (sources.sum() + targets.sum()) / sum(batch.size.tokens for step in steps for batch in plan.cut(step))
    )


# Batches

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


def test_a_step_knows_the_counts_of_all_processes():
    sources, targets = np.array([3, 3, 3, 3]), np.array([2, 2, 2, 2])
    examples = [{"input_ids": [5, 6, 7], "labels": [8, 9]}] * 3 + [{"input_ids": [5, 6, 7], "labels": [-100, -100]}]
    counted = np.array([2, 2, 2, 0])
    epochs, plan = Epochs(sources, step=4, seed=0, grouped=False), Plan(sources, targets, 4)
    lengths = ExampleLengths(sources, targets, None, counted, (counted > 0).astype(int))
    options = {"lengths": lengths, "total": 1, "processes": 3}
    made = [PlannedSteps(examples, epochs, plan, Padder(1, moved), process=process, **options) for process in range(3)]
    steps = [steps.step([0, 1, 2, 3]) for steps in made]
    assert [step.counts.tolist() for step in steps] == [[6, 3]] * 3
    assert [len(step.batches[0]["labels"]) for step in steps] == [2, 1, 1]


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


# Gradients


@pytest.mark.parametrize("most", [0.01, 1.0, 1e6])
def test_gradients_in_a_buffer_are_clipped_like_separate_ones(most):
    one, other = tiny(), tiny()
    kept = Gradients([p for p in one.parameters() if p.requires_grad])
    kept.begin()
    for model in (one, other):
        batch = Padder(models.PAD, partial(decoder_inputs, model))(rows(3))
        model(**batch).loss.backward()
    assert kept.clip(most).item() == pytest.approx(
        torch.nn.utils.clip_grad_norm_(other.parameters(), most).item(), rel=1e-5
    )
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, atol=1e-7, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
