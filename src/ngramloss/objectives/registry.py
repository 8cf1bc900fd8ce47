"""name of an objective → its function and how it may be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.objectives.bag import bag, bag_original, bag_released
from ngramloss.objectives.bleu import bleu
from ngramloss.objectives.ce import ce
from ngramloss.objectives.eisl import eisl
from ngramloss.objectives.lcs import lcs
from ngramloss.objectives.matches import matches, matches_released
from ngramloss.objectives.precision import precision, precision_released
from ngramloss.objectives.rewards import rewards


@dataclass(frozen=True)
class Objective:
    """One formula, and what the written form may say of it."""

    function: Callable[..., Tensor]
    """``(stats, labels, *, n) → [B]``; without ``n`` if ``least_n`` is None."""
    variants: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    """Other functions of the same kind, written after a colon."""
    least_n: int | None = 1
    """The smallest n that makes sense; None for an objective that takes none."""
    why_least: str = "an n-gram has at least one token. Raise n."
    """Why not less, and what to write instead."""
    joint: bool = False
    """Whether several n make one value (``function`` takes a tuple) and not one value each."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Shares from 0 to 1 that may be given by name, each with the statistic it needs when not 0."""
    needs: tuple[str, ...] = ()
    """The optional statistics it reads."""
    per: Literal["sequence", "token"] = "sequence"
    """What the joint loss divides the sum over the batch by."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Variant, or "" for the formula itself → ``module:name`` of a kernel that computes the same on a GPU. A kernel
    is called as the function is, and says by ``serves(stats, n=n)`` whether it can be."""


MOST_N = 1024
"""The largest n: summaries and translations are shorter, and a reference shorter than n gives no gradient."""

ONE_TOKEN = "a reward for single tokens repeats what cross-entropy does. Use matches(1), or raise n."

_KERNELS = "ngramloss.gpu.kernels"

OBJECTIVES: dict[str, Objective] = {
    "ce": Objective(ce, least_n=None, options={"smoothing": "mean_logp"}, per="token"),
    "matches": Objective(
        matches, {"released": matches_released},
        kernels={"": f"{_KERNELS}:matches", "released": f"{_KERNELS}:matches_released"},
    ),
    "rewards": Objective(rewards, least_n=2, why_least=ONE_TOKEN, kernels={"": f"{_KERNELS}:rewards"}),
    "precision": Objective(
        precision, {"released": precision_released},
        kernels={"": f"{_KERNELS}:precision", "released": f"{_KERNELS}:precision_released"},
    ),
    "bag": Objective(bag, {"released": bag_released, "original": bag_original}, needs=("cross_logp",)),
    "bleu": Objective(bleu, joint=True, needs=("cross_logp",)),
    "lcs": Objective(lcs, least_n=None, needs=("cross_logp",)),
    "eisl": Objective(eisl, needs=("cross_logp",)),
}
"""All objectives by name. A new one is a file with its formula and a line here, or in your own program."""


def objective(name: str) -> Objective:
    """The objective of that name, or an error that names the nearest one."""
    if name not in OBJECTIVES:
        raise UserError(f"unknown objective {name!r}. {nearest(name, OBJECTIVES)}Choose from {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def nearest(word: str, choices: Mapping[str, object]) -> str:
    """A sentence for an error: the closest choice, if there is any."""
    from difflib import get_close_matches

    close = get_close_matches(word.lower(), choices, n=1, cutoff=0.0)
    return f"Did you mean {close[0]!r}? " if close else ""
