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
    from ngramloss import data as data
    from ngramloss import recipe as recipe
    from ngramloss.cli import options as options
    from ngramloss.cli.train import train_run as train_run
    from ngramloss.cli.verbs import VERBS as VERBS
    from ngramloss.cli.verbs import Verb as Verb
    from ngramloss.data import candidates as candidates
    from ngramloss.data import tokens as tokens
    from ngramloss.data.batches import padding as padding
    from ngramloss.data.batches.twins import twins as twins
    from ngramloss.errors import MissingFileError as MissingFileError
    from ngramloss.errors import UserError as UserError
    from ngramloss.generation import predictions as predictions
    from ngramloss.generation.candidates import write_candidates_like as write_candidates_like
    from ngramloss.generation.job import Job as Job
    from ngramloss.generation.text_generator import TextGenerator as TextGenerator
    from ngramloss.loss.joint_loss import JointLoss as JointLoss
    from ngramloss.loss.stats import IGNORE_INDEX as IGNORE_INDEX
    from ngramloss.loss.stats import CandidateStats as CandidateStats
    from ngramloss.loss.stats import Teacher as Teacher
    from ngramloss.loss.stats import TokenStats as TokenStats
    from ngramloss.loss.stats import token_stats as token_stats
    from ngramloss.loss.stats import token_stats_from_hidden as token_stats_from_hidden
    from ngramloss.loss.terms import OBJECTIVES as OBJECTIVES
    from ngramloss.loss.terms import Objective as Objective
    from ngramloss.loss.terms import Term as Term
    from ngramloss.metrics import candidate_scores as candidate_scores
    from ngramloss.metrics import oracle as oracle
    from ngramloss.metrics.registry import METRICS as METRICS
    from ngramloss.metrics.registry import Metric as Metric
    from ngramloss.metrics.registry import Score as Score
    from ngramloss.metrics.scores import Scores as Scores
    from ngramloss.models import drafter as drafters  # noqa: F401
    from ngramloss.models import encoders as encoders
    from ngramloss.models import loading as loading
    from ngramloss.models.attached.attach import attach as attach
    from ngramloss.models.attached.attach import attached_loss as attached_loss
    from ngramloss.models.attached.attach import detach as detach
    from ngramloss.models.attached.attach import last_parts as last_parts
    from ngramloss.models.attached.step_loss import compute_loss_func as compute_loss_func
    from ngramloss.output import console as console
    from ngramloss.output.progress import Progress as Progress
    from ngramloss.scoring import texts as texts
    from ngramloss.search import registry as engines  # noqa: F401
    from ngramloss.settings import Setting as Setting
    from ngramloss.storage import files as files
    from ngramloss.storage.run_folder import RunFolder as RunFolder
    from ngramloss.trainers import rewards as rewards
    from ngramloss.trainers.log_parts import LogParts as LogParts
    from ngramloss.trainers.score_texts import ScoreTexts as ScoreTexts
    from ngramloss.trainers.trainer import NgramTrainer as NgramTrainer
    from ngramloss.trainers.trl import NgramSFTTrainer as NgramSFTTrainer
    from ngramloss.training.objective_task import attached_share as attached_share
    from ngramloss.training.online import OwnTexts as OwnTexts
    from ngramloss.training.python import train as train
    from ngramloss.training.run import Run as Run
    from ngramloss.training.system_registry import SYSTEMS as SYSTEMS
    from ngramloss.training.system_registry import System as System
    from ngramloss.training.system_task import SystemTask as SystemTask
    from ngramloss.training.system_task import saved_run as saved_run

_NAMES = {
    "cli.train": ("train_run",),
    "cli.verbs": ("VERBS", "Verb"),
    "data.batches.twins": ("twins",),
    "errors": ("MissingFileError", "UserError"),
    "generation.candidates": ("write_candidates_like",),
    "generation.job": ("Job",),
    "generation.text_generator": ("TextGenerator",),
    "loss.joint_loss": ("JointLoss",),
    "loss.stats": ("CandidateStats", "IGNORE_INDEX", "Teacher", "TokenStats", "token_stats", "token_stats_from_hidden"),
    "loss.terms": ("OBJECTIVES", "Objective", "Term"),
    "metrics.registry": ("METRICS", "Metric", "Score"),
    "metrics.scores": ("Scores",),
    "models.attached.attach": ("attach", "attached_loss", "detach", "last_parts"),
    "models.attached.step_loss": ("compute_loss_func",),
    "output.progress": ("Progress",),
    "settings": ("Setting",),
    "storage.run_folder": ("RunFolder",),
    "trainers.log_parts": ("LogParts",),
    "trainers.score_texts": ("ScoreTexts",),
    "trainers.trainer": ("NgramTrainer",),
    "trainers.trl": ("NgramSFTTrainer",),
    "training.objective_task": ("attached_share",),
    "training.online": ("OwnTexts",),
    "training.python": ("train",),
    "training.run": ("Run",),
    "training.system_registry": ("SYSTEMS", "System"),
    "training.system_task": ("SystemTask", "saved_run"),
}
_ROOMS = {name: room for room, names in _NAMES.items() for name in names}
"""Public name → the module that has it."""
_MODULES = {
    "candidates": "data.candidates",
    "console": "output.console",
    "data": "data",
    "drafters": "models.drafter",
    "encoders": "models.encoders",
    "engines": "search.registry",
    "files": "storage.files",
    "candidate_scores": "metrics.candidate_scores",
    "loading": "models.loading",
    "options": "cli.options",
    "oracle": "metrics.oracle",
    "padding": "data.batches.padding",
    "predictions": "generation.predictions",
    "recipe": "recipe",
    "rewards": "trainers.rewards",
    "texts": "scoring.texts",
    "tokens": "data.tokens",
}
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
