"""What a recipe asks for, for `ngramloss train` and in Python."""

import pytest
import torch
from trainings import rows, tiny

import ngramloss as ng
from ngramloss import recipe
from ngramloss.cli import main
from ngramloss.errors import UserError
from ngramloss.training.run import run_of

MISTAKES = {
    "ce + rdrop": {},
    "ce + policy(baseline=greedy)": {},
    "ce + rank + bag(2):student": {},
    "ce + bag(2):student": {"fsdp": True},
    "ce + distill + keep": {},
    "rdrop": {"twins": True, "best": "loss"},
    "ce": {"ema": 1.0},
    "ce + bag(2)": {"early_stopping": 2, "eval_every": 0},
    "ce + bag(3)": {"precision": "fp15"},
    "ce + bag(4)": {"warmup_steps": 1.5},
}


@pytest.mark.parametrize(("objective", "settings"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_has_the_same_sentence_in_a_recipe_and_in_python(objective, settings):
    written = [f"objective={objective}", *(f"train.{key}={value}" for key, value in settings.items())]
    with pytest.raises(UserError) as of_a_recipe:
        run_of(recipe.load("demo", [text.replace("True", "true") for text in written]))
    with pytest.raises(UserError) as in_python:
        ng.train(tiny(), None, rows(4), objective=objective, **settings)
    assert str(in_python.value).splitlines()[-1] in str(of_a_recipe.value)


def test_a_shown_recipe_is_checked_too(capsys):
    assert main(["train", "demo", "--show", "--set", "objective=ce + rdrop"]) == 2
    assert "rdrop compares each row with its twin" in capsys.readouterr().err


def test_the_same_recipe_may_run_on_one_device_and_not_on_another():
    run = run_of(recipe.load("demo", ["train.precision=fp16"]))
    assert run.on(1, torch.device("cuda")) == "fp16"
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        run.on(1, torch.device("cpu"))


def test_what_is_made_before_a_training_is_read_only_where_a_term_needs_it():
    def reads(objective, *settings):
        run = run_of(recipe.load("demo", [f"objective={objective}", *settings]))
        return run.reads_candidates, run.writes is not None, run.loads_teacher

    assert reads("ce") == (False, False, False)
    assert reads("ce + rank") == (True, False, False)
    assert reads("ce + rank", "online.samples=2") == (False, True, False)
    assert reads("ce", "online.samples=2") == (False, False, False)
    assert reads("ce + bag(2):student") == (False, True, False)
    assert reads("ce + distill") == (False, False, True)
    assert reads("ce + keep") == (False, False, False)
