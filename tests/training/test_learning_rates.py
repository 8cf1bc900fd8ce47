"""Learning rates: each schedule is that of Transformers, whatever the warm-up."""

import pytest
import torch
import transformers

from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.training.learning_rates import SCHEDULES, learning_rate, warmup_steps


def theirs(name, warmup, total, rate):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduler = transformers.get_scheduler(name, optimiser, warmup, total)
    rates = []
    for _ in range(total + 1):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


def warmup_of(train, total):
    return warmup_steps(train.schedule, train.warmup_steps, total)


@pytest.mark.parametrize("rate", [3e-5, 1.0])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 50), (1, 50), (7, 50), (49, 50), (10, 1000)])
@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"noam"}))
def test_rates_are_those_of_transformers(name, warmup, total, rate):
    ours = [learning_rate(name, done, warmup=warmup, total=total, rate=rate) for done in range(total + 1)]
    assert ours == pytest.approx(theirs(name, warmup, total, rate), rel=1e-12, abs=1e-12 * rate)


@pytest.mark.parametrize(("warmup", "total"), [(0, 20), (7, 50), (100, 20), (10_000, 12_000)])
def test_noam_is_the_formula_of_brio_from_the_first_update_on(warmup, total):
    """As in its main.py, where steps count from 1; a warm-up that does not end stays as long as it is."""
    train = recipe.load("brio-cnndm", [f"train.warmup_steps={warmup}"]).train
    assert (train.schedule, train.learning_rate, warmup_of(train, total)) == ("noam", 2e-3, warmup)
    for step in (1, 2, 7, 8, total // 2, total):
        theirs = 2e-3 * min(step ** (-0.5), step * warmup ** (-1.5) if warmup else 1.0)
        ours = learning_rate("noam", step - 1, warmup=warmup_of(train, total), total=total, rate=train.learning_rate)
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_rate_of_0_stays_0(name):
    assert [learning_rate(name, done, warmup=2, total=5, rate=0.0) for done in range(6)] == [0.0] * 6


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_recipe_takes_it(name):
    assert recipe.load("demo", [f"train.schedule={name}"]).train.schedule == name


def test_a_recipe_takes_no_other():
    with pytest.raises(UserError, match=r"train\.schedule") as refused:
        recipe.load("demo", ["train.schedule=constant"])
    assert all(name in str(refused.value) for name in SCHEDULES)
