"""the configuration of axolotl → its trainer with a joint objective, by a plugin.

Its file has ``plugins: [ngramloss.trainers.axolotl.NgramPlugin]`` and ``ngram_objective: ce + matches(2,3,4)``.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.models.attached.attach import attach
from ngramloss.models.attached.segments import Unit
from ngramloss.trainers.log_parts import LogParts
from ngramloss.version import warn_if_untested


class NgramArgs(BaseModel):
    """The settings that the plugin adds to axolotl's file."""

    ngram_objective: str = Field(description="The objective, such as 'ce + matches(2,3,4)'.")
    ngram_segments: Unit = Field("documents", description="What is a text: 'documents', or 'turns' of an assistant.")
    ngram_memory: str = Field("fast", description="'fast', or 'lean' for less memory.")


class NgramPlugin(BasePlugin):  # type: ignore[misc]
    """Attaches the objective to the model that axolotl loads, and logs every term."""

    def get_input_args(self) -> str:
        """Where the settings are."""
        return f"{NgramArgs.__module__}.{NgramArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Refuse what cannot work before a model is loaded."""
        warn_if_untested("axolotl")
        JointLoss(cfg.ngram_objective)  # raises if it is misspelled
        if cfg.rl:
            raise UserError(
                f"rl: {cfg.rl} computes a loss of its own, so the objective {cfg.ngram_objective!r} would not run. "
                "Leave one of them out."
            )

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Attach the objective. Adapters are on the model already."""
        attach(
            model, cfg.ngram_objective, segments=cfg.ngram_segments or "documents", memory=cfg.ngram_memory or "fast"
        )

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Log every term, and tell terms with a schedule the progress."""
        return [LogParts()]
