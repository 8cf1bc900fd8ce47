"""name of an objective → its entry: where its formula is, and how it may be written. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import getdoc
from typing import TYPE_CHECKING, Literal

from ngramloss.plugins import Registry, load_function
from ngramloss.settings import Setting

if TYPE_CHECKING:
    from torch import Tensor

    Formula = Callable[..., Tensor]


@dataclass(frozen=True)
class Objective:
    """One formula, and what the written form may say of it."""

    function: str | Formula
    """``(stats, labels, *, n) → [B]``, or ``module:name`` of it; without ``n`` if ``least_n`` is None."""
    variants: Mapping[str, str | Formula] = field(default_factory=dict)
    """Other functions of the same form, written after a colon."""
    least_n: int | None = 1
    """The smallest n that makes sense; None for an objective that takes none."""
    why_least: str = "an n-gram has at least one token. Raise n."
    """Why not less, and what to write instead."""
    joint: bool = False
    """Whether several n make one value (``function`` takes a tuple) and not one value each."""
    options: Mapping[str, Setting] = field(default_factory=dict)
    """Numbers that may be given by name, such as ``ce(smoothing=0.1)``."""
    option_needs: Mapping[str, str] = field(default_factory=dict)
    """Option → the optional statistic that the formula reads when the option is not 0."""
    needs: tuple[str, ...] = ()
    """The optional statistics that the formula always reads."""
    per: Literal["sequence", "token"] = "sequence"
    """What the joint loss divides the sum over the batch by."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Variant, or "" for the formula itself → ``module:name`` of a kernel that computes the same on a GPU. A kernel
    is called as the function is, and says by ``serves(stats, n=n)`` whether it can be."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Variant, or "" for the formula itself → what it is, in one line; by default the function's docstring says."""

    def formula(self, variant: str | None = None) -> Formula:
        """The function, imported now if the entry only says where it is."""
        return load_function(self.variants[variant] if variant else self.function)

    def description(self, variant: str | None = None) -> str:
        """What it is, in one line."""
        written = self.about.get(variant or "")
        return written if written is not None else (getdoc(self.formula(variant)) or "").partition("\n")[0]


MOST_N = 1024
"""The largest n: summaries and translations are shorter, and a reference shorter than n gives no gradient."""

ONE_TOKEN = "a reward for single tokens repeats what cross-entropy does. Use matches(1), or raise n."

_FORMULAS, _KERNELS = "ngramloss.objectives", "ngramloss.gpu.kernels"

_BUILTIN = {
    "ce": Objective(
        f"{_FORMULAS}.ce:ce", least_n=None, per="token",
        options={"smoothing": Setting(0.0, least=0, most=1, help="share of the label smoothing")},
        option_needs={"smoothing": "mean_logp"},
        about={"": "Cross-entropy: negative log-likelihood of the reference tokens."},
    ),
    "matches": Objective(
        f"{_FORMULAS}.matches:matches", {"released": f"{_FORMULAS}.matches:matches_released"},
        kernels={"": f"{_KERNELS}:matches", "released": f"{_KERNELS}:matches_released"},
        about={
            "": "One minus the mean probability of n-grams found anywhere in the reference.",
            "released": "As matches, but for n of 3 or more only the first three matched windows of an n-gram count.",
        },
    ),
    "rewards": Objective(
        f"{_FORMULAS}.rewards:rewards", least_n=2, why_least=ONE_TOKEN, kernels={"": f"{_KERNELS}:rewards"},
        about={"": "One minus the mean probability of n-grams at their own place in the reference."},
    ),
    "precision": Objective(
        f"{_FORMULAS}.precision:precision", {"released": f"{_FORMULAS}.precision:precision_released"},
        kernels={"": f"{_KERNELS}:precision", "released": f"{_KERNELS}:precision_released"},
        about={
            "": "P-P2: minus the share of probabilistic n-gram counts that the reference covers.",
            "released": "As precision, but an n-gram's count is its probability at its last occurrence only.",
        },
    ),
    "bag": Objective(
        f"{_FORMULAS}.bag:bag",
        {"released": f"{_FORMULAS}.bag:bag_released", "original": f"{_FORMULAS}.bag:bag_original"},
        needs=("cross_logp",),
        about={
            "": "BoN: one minus half the share of the reference's n-grams that the model expects.",
            "released": "Minus the mean over the reference's n-grams of their expected counts, each at most 1.",
            "original": "The L1 distance of the two bags of n-grams, as Shao et al. (2020) scale it.",
        },
    ),
    "bleu": Objective(
        f"{_FORMULAS}.bleu:bleu", joint=True, needs=("cross_logp",),
        about={"": "Minus the geometric mean over n of the expected clipped n-gram precision."},
    ),
    "lcs": Objective(
        f"{_FORMULAS}.lcs:lcs", least_n=None, needs=("cross_logp",),
        about={"": "Minus the log of the soft longest common subsequence, as a share of the reference."},
    ),
    "eisl": Objective(
        f"{_FORMULAS}.eisl:eisl", needs=("cross_logp",),
        about={"": "Negative log-likelihood of each reference n-gram at the place that the model prefers."},
    ),
}

OBJECTIVES: Registry[Objective] = Registry("objective", Objective, _BUILTIN)
"""All objectives by name. A new one is a file with its formula and an entry here, or in your own program."""
