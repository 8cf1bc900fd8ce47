"""N-gram training objectives at the price of cross-entropy.

>>> import ngramloss as ng
>>> loss_fn = ng.JointLoss("ce + matches(2,3,4)")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ngramloss.version import __version__ as __version__
from ngramloss.version import lacking

if TYPE_CHECKING:
    from ngramloss.errors import UserError as UserError
    from ngramloss.generation.text_generator import TextGenerator as TextGenerator
    from ngramloss.hf.attach import attach as attach
    from ngramloss.hf.attach import attached_loss as attached_loss
    from ngramloss.hf.attach import detach as detach
    from ngramloss.hf.attach import last_parts as last_parts
    from ngramloss.hf.log_parts import LogParts as LogParts
    from ngramloss.hf.step_loss import compute_loss_func as compute_loss_func
    from ngramloss.hf.trainer import NgramTrainer as NgramTrainer
    from ngramloss.integrations import rewards as rewards
    from ngramloss.integrations.score_texts import ScoreTexts as ScoreTexts
    from ngramloss.integrations.trl import NgramSFTTrainer as NgramSFTTrainer
    from ngramloss.loss import JointLoss as JointLoss
    from ngramloss.metrics.registry import METRICS as METRICS
    from ngramloss.metrics.registry import Metric as Metric
    from ngramloss.metrics.registry import Score as Score
    from ngramloss.metrics.scores import Scores as Scores
    from ngramloss.settings import Setting as Setting
    from ngramloss.stats import IGNORE_INDEX as IGNORE_INDEX
    from ngramloss.stats import CandidateStats as CandidateStats
    from ngramloss.stats import Teacher as Teacher
    from ngramloss.stats import TokenStats as TokenStats
    from ngramloss.stats import token_stats as token_stats
    from ngramloss.stats import token_stats_from_hidden as token_stats_from_hidden
    from ngramloss.steps.twins import twins as twins
    from ngramloss.systems.registry import SYSTEMS as SYSTEMS
    from ngramloss.systems.registry import System as System
    from ngramloss.terms import OBJECTIVES as OBJECTIVES
    from ngramloss.terms import Objective as Objective
    from ngramloss.terms import Term as Term
    from ngramloss.training.python import train as train

_ROOMS = {
    "attach": "hf.attach",
    "attached_loss": "hf.attach",
    "compute_loss_func": "hf.step_loss",
    "detach": "hf.attach",
    "last_parts": "hf.attach",
    "UserError": "errors",
    "LogParts": "hf.log_parts",
    "JointLoss": "loss",
    "METRICS": "metrics.registry",
    "Metric": "metrics.registry",
    "Score": "metrics.registry",
    "Scores": "metrics.scores",
    "Setting": "settings",
    "OBJECTIVES": "terms",
    "Objective": "terms",
    "Term": "terms",
    "IGNORE_INDEX": "stats",
    "CandidateStats": "stats",
    "Teacher": "stats",
    "TokenStats": "stats",
    "token_stats": "stats",
    "token_stats_from_hidden": "stats",
    "NgramTrainer": "hf.trainer",
    "NgramSFTTrainer": "integrations.trl",
    "ScoreTexts": "integrations.score_texts",
    "TextGenerator": "generation.text_generator",
    "train": "training.python",
    "twins": "steps.twins",
    "SYSTEMS": "systems.registry",
    "System": "systems.registry",
}

_MODULES = {"rewards": "integrations.rewards"}
"""Public names that are modules."""

__all__ = ["__version__", *_ROOMS, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), so that ``ngramloss --help`` does not load torch."""
    if name not in _ROOMS and name not in _MODULES:
        raise AttributeError(f"module 'ngramloss' has no attribute {name!r}")
    try:
        if name in _MODULES:
            return import_module(f"ngramloss.{_MODULES[name]}")
        return getattr(import_module(f"ngramloss.{_ROOMS[name]}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(lacking(error), name=error.name) from None


def __dir__() -> list[str]:
    return sorted(__all__)
