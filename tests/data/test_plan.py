"""Plans of steps: each row is in one micro-batch that holds it, and little is padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainings import moved

from ngramloss.data.batches.padding import Padder
from ngramloss.data.batches.plan import FINE, OPEN, Grid, LengthGrouped, Plan, Size, bounds, fitted_grid, open_grid
from ngramloss.data.batches.planned import Epochs, ExampleLengths, PlannedSteps
from ngramloss.training.captured import MOST_SHAPES

lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=40)


def columns(pairs):
    return tuple(np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))


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
    finer = Plan(sources, targets, 32, None, fitted_grid(sources, targets, steps, most=FINE))
    assert finer.padding(steps) < plan.padding(steps) - 0.02
    assert len(finer.sizes(32)) <= MOST_SHAPES
    assert plan.padding(steps) < 0.1
    assert plan.padding(steps) == pytest.approx(
        1 - (sources.sum() + targets.sum()) / sum(batch.size.tokens for step in steps for batch in plan.cut(step))
    )


def test_a_step_knows_the_counts_of_all_processes():
    sources, targets = np.array([3, 3, 3, 3]), np.array([2, 2, 2, 2])
    examples = [{"input_ids": [5, 6, 7], "labels": [8, 9]}] * 3 + [{"input_ids": [5, 6, 7], "labels": [-100, -100]}]
    counted = np.array([2, 2, 2, 0])
    epochs, plan = Epochs(sources, step=4, seed=0, grouped=False), Plan(sources, targets, 4)
    lengths = ExampleLengths(sources, targets, None, counted, (counted > 0).astype(int), sources)
    options = {"lengths": lengths, "total": 1, "processes": 3}
    made = [PlannedSteps(examples, epochs, plan, Padder(1, moved), process=process, **options) for process in range(3)]
    steps = [steps.step([0, 1, 2, 3]) for steps in made]
    assert [step.counts.tolist() for step in steps] == [[6, 3]] * 3
    assert [len(step.batches[0]["labels"]) for step in steps] == [2, 1, 1]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(60, 200),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.sampled_from(["", "repeated", "shared"]),
)
def test_a_grid_of_texts_that_come_later_holds_them(examples, most, max_tokens, joined):
    prompts, drawn = (np.array(column) for column in zip(*examples, strict=True))
    grid, numbers = open_grid(prompts, most, texts=3, joined=joined), list(range(len(examples)))
    assert max(len(grid.sources), len(grid.targets)) <= OPEN
    behind = {"": 0, "repeated": 1, "shared": 3}[joined]  # of three texts
    sources = prompts + behind * most
    plan = Plan(sources, np.full(len(prompts), most), 20, max_tokens, grid, np.full(len(prompts), 3), joined)
    later = plan.with_lengths(numbers, prompts + behind * drawn, drawn)
    for each, lengths in ((plan, np.full(len(prompts), most)), (later, drawn)):
        cut = each.cut(numbers)
        assert sorted(row for micro in cut for row in micro.rows) == numbers
        for micro in cut:
            assert len(micro.rows) <= micro.size.rows
            assert micro.size in each.sizes(len(numbers))
            assert max_tokens is None or micro.size.tokens <= max_tokens or micro.size.rows == 1
            for row in micro.rows:
                assert lengths[row] <= micro.size.target
                assert prompts[row] + behind * lengths[row] <= micro.size.source
    tokens = [sum(micro.size.tokens for micro in each.cut(numbers)) for each in (later, plan)]
    assert tokens[0] <= tokens[1] or max_tokens is not None
    assert plan.sources.max() == sources.max()  # the other plan stays as it is


def test_texts_that_were_written_short_take_few_tokens():
    prompts, drawn = np.full(64, 20), np.array([12] * 31 + [60] + [12] * 31 + [60])
    grid = open_grid(prompts, 127, texts=9)
    plan = Plan(prompts, np.full(64, 127), 64, 9000, grid, np.full(64, 9))
    whole, known = (
        sum(micro.size.tokens for micro in each.cut(range(64)))
        for each in (plan, plan.with_lengths(range(64), prompts, drawn))
    )
    assert known < whole / 3
    assert open_grid(prompts, 127, longest=100, texts=9).targets[-1] == 127  # the longest text is not cut
    assert open_grid(np.array([90]), 99, longest=100, texts=2).targets[-1] == 100
