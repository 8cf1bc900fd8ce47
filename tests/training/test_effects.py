"""What each setting affects: said where it is defined, and read by all who ask."""

from dataclasses import replace

import pytest

from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.generation.job import job
from ngramloss.settings import EFFECTS, Setting, Switch
from ngramloss.study.plan import WITHOUT_EFFECT
from ngramloss.training.system_registry import check_recipe

KEYS = recipe.every_setting()


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_says_what_it_affects(key):
    assert KEYS[key].affects
    assert KEYS[key].affects <= {*EFFECTS}


def test_an_effect_that_does_not_exist_is_a_mistake_of_the_program():
    with pytest.raises(TypeError, match=r"affects some of documents, .*, not colour"):
        Setting(1, affects=frozenset({"colour"}))


def test_what_a_training_in_python_must_agree_on_and_what_machines_of_a_study_need_not():
    assert {*recipe.affecting(*{*EFFECTS} - {"weights", "scores"}, section="train")} - {
        *recipe.affecting("weights", "scores", section="train")
    } == {
        *("epochs", "max_steps", "eval_every", "save_every", "early_stopping"),
        *(key.partition(".")[2] for key in WITHOUT_EFFECT if key.startswith("train.")),
    }


def test_only_settings_of_the_data_choose_documents():
    assert {key.partition(".")[0] for key in recipe.affecting("documents", "rows", "sentences")} == {"task", "data"}


@pytest.mark.parametrize("key", recipe.affecting("rows", "weights", section="data"))
def test_generate_refuses_what_only_training_reads(key):
    with pytest.raises(UserError, match=rf"data\.{key} is a setting of train"):
        job("lead-3", data="newswire", overrides=[f"data.{key}=1"])


@pytest.mark.parametrize("key", [key for key in KEYS if not KEYS[key].systems])
def test_a_system_refuses_what_systems_do_not_have(key):
    other = {bool: True, int: 2, float: 0.5, str: "x", list: ["x"], Switch: True}[KEYS[key].kind]
    section, name = key.split(".")
    plain = recipe.load("bertsum-ext-demo")
    changed = replace(plain, **{section: replace(getattr(plain, section), **{name: other})})
    with pytest.raises(UserError, match=rf"{key}: is not a setting of bertsum_ext\. Leave it out\."):
        check_recipe(changed)
