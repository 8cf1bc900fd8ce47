"""an objective → a loss of ms-swift by name, and a callback that logs its terms.

In a file of yours write ``register("ce + matches(2,3,4)")``, and call ``swift sft --external_plugins FILE
--loss_type ngram --callbacks ngram --use_logits_to_keep false``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.terms import Term
from ngramloss.models.attached.step_loss import compute_loss_func
from ngramloss.trainers.log_parts import LogParts
from ngramloss.version import warn_if_untested


def register(objective: str | Iterable[Term] | Term, *, name: str = "ngram", **options: Any) -> None:
    """Add an objective to ms-swift's losses, and a callback that logs terms, follows schedules and finds documents."""
    from swift.callbacks import callbacks_map
    from swift.loss import loss_map

    warn_if_untested("ms-swift")
    terms = JointLoss(objective).terms  # raises if it is misspelled
    loss_map[name] = lambda args, trainer: compute_loss_func(terms, **options)
    callbacks_map[name] = lambda args, trainer: LogParts()
