"""An objective as it is written → one scalar and its parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngramloss.loss.joint_loss import JointLoss as JointLoss


def __getattr__(name: str) -> Any:
    """``ngramloss.loss.JointLoss``, loaded on first use: reading a recipe imports this package and no torch."""
    if name != "JointLoss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("ngramloss.loss.joint_loss").JointLoss
