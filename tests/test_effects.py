"""What each setting affects: said where it is defined, and read by all who ask."""

import pytest

from ngramloss import recipe
from ngramloss.generation import job, like
from ngramloss.settings import EFFECTS, Setting
from ngramloss.study import plan, run
from ngramloss.systems import candidate_sets, registry, rows, simcls
from ngramloss.training import identity

KEYS = recipe.every_setting()


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_says_what_it_affects(key):
    assert KEYS[key].affects
    assert KEYS[key].affects <= {*EFFECTS}


def test_an_effect_that_does_not_exist_is_a_mistake_of_the_program():
    with pytest.raises(TypeError, match=r"affects some of documents, .*, not colour"):
        Setting(1, affects=frozenset({"colour"}))


def test_effects_are_those_of_the_lists():
    train = recipe.affecting(*EFFECTS, section="train")
    weights = recipe.affecting("weights", "scores", section="train")
    assert {*identity.MAY_CHANGE} - {"best_limit", "best_beams", "best_options"} == {*train} - {*weights}
    assert {*plan.WITHOUT_EFFECT, "train.gradient_checkpointing", "train.fsdp"} == {
        key for key in KEYS if KEYS[key].affects == {"speed"}
    }
    assert {*run.PLACES} < {*recipe.affecting("place")}
    documents = {*recipe.affecting("documents")}
    fractions = {"data.validation_fraction", "data.test_fraction"}
    assert {*registry._WHICH_DATA} == documents - fractions
    assert {f"data.{name}" for name in candidate_sets.OF_THE_DATA} == documents - {"task", "data.name"}
    assert {f"data.{name}" for name in simcls.PASSED_ON} == documents - {"task", "data.name"} - fractions
    assert {*rows.PASSED_ON} == {*recipe.affecting("documents", "rows", "sentences")} - {"data.name"}
    assert {*job.OF_TRAINING} == {*recipe.affecting("rows", "weights")} & {
        key for key in KEYS if key.startswith("data.")
    } - {"data.leave_out"}
    assert recipe.affecting("tokens", section="data") == like.OF_THE_MODEL
    assert {f"train.{name}" for name in registry.NOT_USED} == {
        key for key in KEYS if not KEYS[key].systems and key.startswith("train.")
    }
