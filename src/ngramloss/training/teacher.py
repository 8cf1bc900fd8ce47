"""``train.teacher`` of a recipe → the teacher's folder and the loaded teacher."""

from __future__ import annotations

import dataclasses
from typing import Any

from ngramloss.data.tokens import same_ids
from ngramloss.errors import UserError
from ngramloss.loss import JointLoss
from ngramloss.models import loading
from ngramloss.output.console import logger
from ngramloss.recipe import Model, Recipe
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training.claim import whole_name


def resolve_teacher(settings: Recipe, run: RunFolder) -> Recipe:
    """The recipe with the whole path of its teacher. Raises if the objective needs one and none is named."""
    named, objective = settings.train.teacher, JointLoss(settings.objective)
    if objective.compares_with_start and named:
        raise UserError(
            "train.teacher: keep compares the model with its own start, so there is no other teacher. Leave "
            "train.teacher out, or write distill instead of keep."
        )
    if objective.needs_teacher and not objective.compares_with_start and not named:
        name = next(term.names[0] for term in objective.terms if "teacher" in term.requires)
        raise UserError(
            f"{name} compares the model with a teacher, but train.teacher is empty. Name the folder of a model with "
            "the same tokenizer, or a run: --set train.teacher=FOLDER."
        )
    if not named:
        return settings
    if not objective.needs_teacher:
        logger.info(f"train.teacher is not used: no term of {settings.objective!r} compares with one.")
    whole = whole_name(named, "train.teacher", run)
    return dataclasses.replace(settings, train=dataclasses.replace(settings.train, teacher=whole))


def load_teacher(settings: Recipe, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The teacher that a recipe names; None if its objective has none, or compares with the model's start.

    Args:
        settings: the resolved recipe.
        tokenizer: of the model that is trained. The teacher must give the same ids to the same texts.
        trust_remote_code: whether code that comes with the teacher may run.
    """
    objective, name = JointLoss(settings.objective), settings.train.teacher
    if not objective.needs_teacher or objective.compares_with_start:
        return None
    named = Model(name=name)
    own, _ = loading.load_tokenizer(named, list, "", trust_remote_code=trust_remote_code)
    if not same_ids(own, tokenizer):
        raise UserError(
            f"train.teacher: {name} has another tokenizer than the model, so that the same id is another word. Train "
            "both with one tokenizer: give the model the teacher's folder as model.name, or if both are from scratch, "
            "the same data and model.vocabulary."
        )
    return loading.load(named, own, trust_remote_code=trust_remote_code).eval().requires_grad_(False)
