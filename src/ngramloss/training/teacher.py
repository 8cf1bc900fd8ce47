"""names of models that are read and not trained, a teacher or a language model → the loaded models."""

from __future__ import annotations

from typing import Any

from ngramloss.data.tokens import same_ids
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.recipe import Model
from ngramloss.training.run import Run


def load_teacher(run: Run, tokenizer: Any) -> Any:
    """The teacher that a recipe names; None if its objective has none, or compares with the model's start.

    Args:
        tokenizer: of the model that is trained. The teacher must give the same ids to the same texts.
    """
    if not run.loads_teacher:
        return None
    name = run.settings.train.teacher
    otherwise = (
        f"train.teacher: {name} has another tokenizer than the model, so that the same id is another word. Train "
        "both with one tokenizer: give the model the teacher's folder as model.name, or if both are from scratch, "
        "the same data and model.vocabulary."
    )
    return load_frozen(name, tokenizer, otherwise)[0]


def load_frozen(name: str, tokenizer: Any, otherwise: str) -> tuple[Any, Any]:
    """A model that is not trained, and its tokenizer."""
    named = Model(name=name)
    own, _ = loading.load_tokenizer(named, list, "")
    if not same_ids(own, tokenizer):
        raise UserError(otherwise)
    return loading.load(named, own).eval().requires_grad_(False), own
