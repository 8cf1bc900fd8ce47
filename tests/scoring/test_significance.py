"""Intervals and paired tests, against slow loops and against cases whose answer is known."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss.metrics.overlap import bleu
from ngramloss.metrics.scores import Pooled
from ngramloss.scoring import significance
from ngramloss.scoring.significance import between_seeds, compare, holm, over_seeds


def figures(*systems, **options):
    return compare([{"x": system} for system in systems], **options)["x"]


def noise(count=200, seed=0):
    return np.random.default_rng(seed).normal(50, 10, count)


def test_values_are_means_and_differences_are_to_the_first():
    one, two = figures([1.0, 2.0, 3.0], [2.0, 2.0, 5.0])
    assert (one.value, two.value, two.difference) == (2.0, 3.0, 1.0)
    assert one.difference is None
    assert one.p_bootstrap is None


def test_the_bootstrap_is_the_one_a_loop_draws():
    """The same generator, document by document, in plain Python."""
    first, other, samples, seed = noise(40).tolist(), (noise(40) + noise(40, 1) / 10 - 4).tolist(), 100, 7
    _, found = figures(first, other, samples=samples, shuffles=0, seed=seed)
    rng = np.random.default_rng(seed)
    means, gaps = [], []
    for _ in range(samples):
        drawn = rng.integers(0, 40, 40).tolist()
        here, there = sum(other[place] for place in drawn) / 40, sum(first[place] for place in drawn) / 40
        means.append(here)
        gaps.append(here - there)
    middle = sum(gaps) / samples
    beyond = sum(abs(gap - middle) >= abs(found.difference) for gap in gaps)
    assert found.p_bootstrap == (beyond + 1) / (samples + 1)
    assert (found.low, found.high) == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist())
    assert (found.difference_low, found.difference_high) == pytest.approx(np.percentile(gaps, [2.5, 97.5]).tolist())


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=7))
def test_the_randomisation_nears_the_share_of_all_swaps(pairs):
    first, other = [a / 7 for a, _ in pairs], [b / 7 for _, b in pairs]  # rounding makes no tie a difference
    _, found = figures(first, other, samples=2, shuffles=20_000)
    gaps = [b - a for a, b in pairs]
    observed, every = abs(sum(gaps)), 2 ** len(gaps)
    exact = (
        sum(
            abs(sum(gap * (1 if swap >> place & 1 else -1) for place, gap in enumerate(gaps))) >= observed
            for swap in range(every)
        )
        / every
    )
    assert found.p_randomisation == pytest.approx(exact, abs=0.015)


def test_equal_systems_never_differ_and_clearly_better_ones_do():
    base = noise()
    same, better = figures(base, base, base + 1 + noise(seed=2) / 50)[1:]
    assert same.p_bootstrap == same.p_randomisation == 1.0
    assert better.p_bootstrap < 0.002
    assert better.p_randomisation < 0.0002
    assert better.difference_low > 0


def test_under_no_difference_few_are_called_significant():
    """About one in twenty at 5%."""
    called = [0, 0]
    for trial in range(100):
        rng = np.random.default_rng(trial)
        _, found = figures(rng.normal(0, 1, 60), rng.normal(0, 1, 60), samples=200, shuffles=200, seed=trial)
        called[0] += found.p_bootstrap < 0.05
        called[1] += found.p_randomisation < 0.05
    assert all(1 <= count <= 13 for count in called), called


def test_the_seed_decides_and_figures_share_their_draws():
    one, two = noise(), noise(seed=1)
    assert figures(one, two, seed=3) == figures(one, two, seed=3)
    (_, here), (_, there) = (figures(one, two, seed=seed) for seed in (3, 4))
    assert (here.low, here.difference_low) != (there.low, there.difference_low), "other documents are drawn"
    assert here.p_randomisation != there.p_randomisation, "and others are swapped"
    both = compare([{"x": one, "y": two}, {"x": two, "y": one}])
    assert both["x"][1].difference == -both["y"][1].difference
    assert both["x"][1].p_bootstrap == both["y"][1].p_bootstrap
    for here, there in zip(
        both["x"], figures(one, two), strict=True
    ):  # to rounding: a product's order follows its size
        assert here == pytest.approx(there)


def test_a_figure_among_others_is_what_it_is_alone():
    rng = np.random.default_rng(0)
    systems = [
        {
            "x": rng.normal(k, 1, 30),
            "pooled": Pooled(rng.random((30, 3)), lambda sums: sums[..., 0] / sums[..., 1:].sum(-1)),
            "y": rng.normal(3 * k, 2, 30),
        }
        for k in range(3)
    ]
    whole = compare(systems, samples=300, shuffles=300)
    for name in systems[0]:
        alone = compare([{name: system[name]} for system in systems], samples=300, shuffles=300)[name]
        for here, there in zip(whole[name], alone, strict=True):
            assert here == pytest.approx(there, abs=1e-9)


def test_documents_without_a_figure_are_left_out_for_all():
    one, two = [1.0, float("nan"), 3.0, 8.0], [2.0, 5.0, float("nan"), 6.0]
    first, second = figures(one, two, samples=10)
    assert (first.value, second.value) == (4.5, 4.0)


def test_samples_that_drew_no_figure_do_not_make_a_difference_significant():
    nan = float("nan")
    _, found = figures([1.0, nan, nan], [2.0, nan, nan], samples=50, shuffles=50)
    assert found.difference == 1.0
    assert found.p_holm > 0.9
    _, found = figures([1.0, 2.0, nan, nan], [2.0, 1.5, nan, nan], samples=200, shuffles=50)
    assert found.p_bootstrap > 0.3
    _, none, some = figures([nan, nan], [nan, nan], [1.0, 1.0], samples=50, shuffles=50)
    assert all(
        math.isnan(one.p_bootstrap) and math.isnan(one.p_randomisation) and math.isnan(one.p_holm)
        for one in (none, some)
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"samples": 0}, "samples must be 1 or more, got 0"),
        ({"shuffles": -1}, "shuffles must be 0 or more, got -1"),
        ({"seed": -3}, "seed must be 0 or more, got -3"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        figures([1.0, 2.0], **options)


def test_only_figures_that_all_systems_have_are_compared():
    assert list(compare([{"x": [1.0], "y": [1.0]}, {"y": [2.0]}], samples=5, shuffles=5)) == ["y"]
    assert compare([{"x": [1.0]}, {"y": [2.0]}]) == {}


def test_a_pooled_figure_is_resampled_by_what_documents_add():
    references = [
        ["the cat sat on the mat today"],
        ["a dog ran over the green hill"],
        ["it rained all day in the old town"],
    ] * 4
    texts = ["the cat sat on a mat today", "a dog ran over the hill", "it rained in the old town"] * 4
    other = ["the cat sat on the mat", "a dog ran over the green hill", "all day it rained in the old town"] * 4
    scores = [bleu(references, those) for those in (texts, other)]
    first, second = compare([one.pooled for one in scores], samples=50, shuffles=50)["bleu"]
    import sacrebleu

    for found, those in ((first, texts), (second, other)):
        assert found.value == pytest.approx(sacrebleu.corpus_bleu(those, [[one for (one,) in references]]).score)
        assert found.low <= found.value <= found.high
    assert second.difference == pytest.approx(second.value - first.value)


def test_a_mean_as_a_pooled_figure_is_the_mean():
    one, two = noise(30), noise(30, 1)
    pooled = [
        Pooled(np.stack([those, np.ones(30)], 1), lambda sums: sums[..., 0] / sums[..., 1]) for those in (one, two)
    ]
    assert figures(*pooled) == figures(one, two)


def test_holm_corrects_for_several_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.01, 0.04, float("nan")]) == pytest.approx([0.02, 0.04, float("nan")], nan_ok=True)


def test_the_spread_over_seeds_is_students():
    found = over_seeds([1.0, 2.0, 3.0])
    assert (found["mean"], found["spread"]) == (2.0, 1.0)
    assert found["high"] - 2 == pytest.approx(4.3027 / 3**0.5, abs=1e-3)
    assert all(map(math.isnan, over_seeds([1.0, float("nan")]).values()))
    single = over_seeds([1.0])
    assert single.pop("mean") == 1.0
    assert all(map(math.isnan, single.values()))


@pytest.mark.filterwarnings("error")
def test_runs_that_do_not_vary_are_not_tested():
    for one, other in (
        ({1: 1.1, 2: 2.1, 3: 3.1}, {1: 0.0, 2: 1.0, 3: 2.0}),
        ({1: 1.1, 2: 1.1}, {3: 0.0, 4: 0.0}),
        ({1: 1.1, 2: 2.1}, {1: 0.0, 2: 1.0}),
    ):
        found = between_seeds(one, other)
        assert [found[name] for name in ("difference", "low", "high")] == pytest.approx([1.1] * 3)
        assert math.isnan(found["p"])


def test_blocks_of_samples_bound_the_memory_and_change_nothing(monkeypatch):
    systems = [{"x": noise(20_000, seed), "y": noise(20_000, seed + 5)} for seed in (0, 1)]
    whole = compare(systems, samples=260, shuffles=260)
    monkeypatch.setattr(significance, "_CELLS", 20_000 * 32)  # 5 MB; a whole chunk has 40
    tracemalloc.start()
    try:
        found = compare(systems, samples=260, shuffles=260)
        assert tracemalloc.get_traced_memory()[1] < 25e6
    finally:
        tracemalloc.stop()
    for name, scores in whole.items():
        for here, there in zip(found[name], scores, strict=True):  # to rounding: a product's order follows its size
            assert here == pytest.approx(there, abs=1e-9)
            assert (here.p_bootstrap, here.p_randomisation) == (there.p_bootstrap, there.p_randomisation)


def test_a_document_too_many_for_a_block_is_a_block_of_one_sample(monkeypatch):
    monkeypatch.setattr(significance, "_CELLS", 3)
    here, there = figures([1.0, 2.0, 4.0, 3.0], [2.0, 2.0, 5.0, 1.0], samples=30, shuffles=30)
    monkeypatch.undo()
    first, second = figures([1.0, 2.0, 4.0, 3.0], [2.0, 2.0, 5.0, 1.0], samples=30, shuffles=30)
    assert here == pytest.approx(first)
    assert there == pytest.approx(second)
