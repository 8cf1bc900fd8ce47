"""``train.teacher`` of a recipe → the loaded teacher."""

from __future__ import annotations

from typing import Any

from ngramloss.data.tokens import same_ids
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.recipe import Model
from ngramloss.training.run import Run


def load_teacher(run: Run, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The teacher that a recipe names; None if its objective has none, or compares with the model's start.

    Args:
        run: what is trained.
        tokenizer: of the model that is trained. The teacher must give the same ids to the same texts.
        trust_remote_code: whether code that comes with the teacher may run.
    """
    if not run.loads_teacher:
        return None
    name = run.settings.train.teacher
    named = Model(name=name)
    own, _ = loading.load_tokenizer(named, list, "", trust_remote_code=trust_remote_code)
    if not same_ids(own, tokenizer):
        raise UserError(
            f"train.teacher: {name} has another tokenizer than the model, so that the same id is another word. Train "
            "both with one tokenizer: give the model the teacher's folder as model.name, or if both are from scratch, "
            "the same data and model.vocabulary."
        )
    return loading.load(named, own, trust_remote_code=trust_remote_code).eval().requires_grad_(False)
