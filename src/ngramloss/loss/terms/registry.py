"""name of an objective → its entry: formula, variants, options. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ngramloss.errors import UserError
from ngramloss.plugins import LazyFunction, Registry, first_doc_line, load_function
from ngramloss.settings import Setting

if TYPE_CHECKING:
    from torch import Tensor

    Formula = Callable[..., Tensor]


@dataclass(frozen=True)
class Objective:
    """One formula, and the ways to write it."""

    function: str | Formula
    """A function ``(stats, labels, *, n) → [B]``, or ``module:name``. It has no ``n`` if ``least_n`` is None. If it
    ``reads`` candidates and has no n, it is ``(stats) → [B]``. An entry turns ``module:name`` into a function that
    imports it."""
    variants: Mapping[str, str | Formula] = field(default_factory=dict)
    """Name → another function with the same arguments, written after a colon: ``bag(2):original``."""
    least_n: int | None = 1
    """The smallest n allowed; None for an objective without n."""
    why_least: str = "an n-gram has at least one token. Raise n."
    """Why a smaller n is not allowed, and what to write instead."""
    joint: bool = False
    """Whether several n give one value (``function`` takes a tuple) instead of one value each."""
    options: Mapping[str, Setting] = field(default_factory=dict)
    """Options that are numbers, such as in ``ce(smoothing=0.1)``, or words, such as in ``policy(scale=std)``."""
    option_needs: Mapping[str, str] = field(default_factory=dict)
    """Option → the optional statistic that the formula reads when the option is not its default; ``{}`` in it stands
    for the value: ``tempered_lse={}``. Of an option that is a word, ``option=word`` → the statistic that it reads."""
    needs: tuple[str, ...] = ()
    """The optional statistics that the formula always reads."""
    variant_needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variant → the optional statistics that it reads instead, where they differ."""
    per: Literal["sequence", "token"] = "sequence"
    """Whether the joint loss divides the sum over the batch by the number of sequences or of tokens."""
    by_position: bool = False
    """Whether the value is a plain sum over positions, so that it does not matter which text a position belongs to. All
    other formulas get one text a row, also where rows are packed."""
    reads: Literal["tokens", "candidates"] = "tokens"
    """Whether the formula reads TokenStats and labels, or CandidateStats. A variant reads candidates, too, if it needs
    one of ``CANDIDATE_STATISTICS``."""
    weighted: bool = False
    """Whether the formula reads ``stats.weights``, the weights of single tokens. All others refuse them."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Variant, or "" for the formula itself → ``module:name`` of a kernel that computes the same on a GPU. A kernel
    takes the arguments of the function; its ``serves(stats, n=n)`` says whether it can be used."""
    explained: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    """Variant, or "" for all others → a function, or ``module:name``, that shows what it computes for a sentence pair,
    see ``loss/explaining/blocks.py``. Without one, ``ngramloss explain`` shows the value."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Variant, or "" for the formula itself → a description; by default the first line of the function's docstring."""

    def __post_init__(self) -> None:
        if self.reads not in ("tokens", "candidates"):
            raise UserError(f"an objective reads 'tokens' or 'candidates', got {self.reads!r}.")
        if self.by_position and self.per != "token":
            raise UserError("an objective that is a sum over positions is averaged over tokens: give per='token'.")
        if self.reads == "candidates" and (self.per != "sequence" or not CANDIDATE_STATISTICS.issuperset(self.needs)):
            raise UserError("an objective that reads candidates has no statistics of tokens, and one value a sequence: "
                            f"give `needs` of {', '.join(sorted(CANDIDATE_STATISTICS))} only, and not per='token'.")
        object.__setattr__(self, "function", _callable(self.function))
        object.__setattr__(self, "variants", {name: _callable(function) for name, function in self.variants.items()})

    def variant_reads(self, variant: str | None = None) -> Literal["tokens", "candidates"]:
        """What the formula or a variant of it reads."""
        needs = self.variant_needs.get(variant or "", self.needs)
        return self.reads if CANDIDATE_STATISTICS.isdisjoint(needs) else "candidates"

    def formula(self, variant: str | None = None) -> Formula:
        """The function; imported if the entry gives ``module:name``."""
        return load_function(self.variants[variant] if variant else self.function)

    def explanation(self, variant: str | None = None) -> Callable[..., Any] | None:
        """What shows the formula or a variant of it for a sentence pair, if anything does."""
        found = self.explained.get(variant or "", self.explained.get(""))
        return load_function(found) if found else None

    def description(self, variant: str | None = None) -> str:
        """A one-line description."""
        written = self.about.get(variant or "")
        return written if written is not None else first_doc_line(self.formula(variant))


def _callable(function: str | Formula) -> Formula:
    return LazyFunction(function) if isinstance(function, str) else function


TWIN_STATISTICS = frozenset({"twin_kl", "twin_token"})
"""Optional statistics that compare a row with its twin. A formula that needs one of them needs twins."""

TEACHER_STATISTICS = frozenset({"teacher_kl", "teacher_reverse_kl"})
"""Optional statistics that compare with a teacher. A formula that needs one of them needs a teacher."""

CANDIDATE_STATISTICS = frozenset({"token_logp", "greedy", "greedy_cross_logp", "baseline"})
"""Optional statistics of candidates. A formula that needs one of them reads candidates; one that needs ``greedy`` reads
the model's own greedy text, and no other does."""

OWN_TEXT = ("greedy", "token_logp")  # what the variants ``:student`` need: the greedy text and its log-probabilities

TEMPERED = "tempered_lse"
"""The optional statistic at a temperature, which is a part of what a formula needs: ``tempered_lse=2.0``."""

START = "keep"  # the objective whose teacher is the model itself before training

MOST_N = 1024  # the largest n: summaries and translations are shorter, and a reference shorter than n gives no gradient

ONE_TOKEN = "a reward for single tokens repeats what cross-entropy does. Use matches(1), or raise n."

_length_exponent = partial(
    Setting, kind=float, least=0, most=4, help="exponent of the length that divides a log-probability"
)

_FORMULAS, _KERNELS = "ngramloss.loss.objectives", "ngramloss.loss.kernels.windows"
_SHOWN = "ngramloss.loss.explaining.blocks"

_BUILTIN = {
    "ce": Objective(
        f"{_FORMULAS}.tokens.ce:ce", least_n=None, per="token", by_position=True,
        options={
            "smoothing": Setting(0.0, least=0, most=1, help="amount of label smoothing"),
            "temperature": Setting(1.0, above=0, most=1000, help="divides the logits; the loss is multiplied by it"),
        },
        option_needs={"smoothing": "mean_logp", "temperature": f"{TEMPERED}={{}}"},
        weighted=True,
        explained={"": f"{_SHOWN}:ce"},
        about={"": "Cross-entropy: negative log-likelihood of the reference tokens."},
    ),
    "matches": Objective(
        f"{_FORMULAS}.windows.matches:matches",
        {
            "released": f"{_FORMULAS}.windows.matches:matches_released",
            "student": f"{_FORMULAS}.candidates.student:matches_student",
        },
        variant_needs={"student": OWN_TEXT},
        kernels={"": f"{_KERNELS}:matches", "released": f"{_KERNELS}:matches_released"},
        weighted=True,
        explained={"": f"{_SHOWN}:matches", "student": f"{_SHOWN}:matches_student"},
        about={
            "": "One minus the mean probability of n-grams found anywhere in the reference.",
            "released": "As matches, but for n of 3 or more only the first three matched windows of an n-gram count.",
            "student": "As matches, on the model's own greedy text instead of the forced path. Reads candidates.",
        },
    ),
    "rewards": Objective(
        f"{_FORMULAS}.windows.rewards:rewards", {"twin": f"{_FORMULAS}.windows.rewards:rewards_twin"},
        least_n=2, why_least=ONE_TOKEN, variant_needs={"twin": ("twin_token",)},
        kernels={"": f"{_KERNELS}:rewards", "twin": f"{_KERNELS}:rewards_twin"},
        explained={"": f"{_SHOWN}:rewards"},
        about={
            "": "One minus the mean probability of n-grams at their own position in the reference.",
            "twin": "As rewards, where the twin with another dropout predicts the n-gram. Needs twins.",
        },
        weighted=True,
    ),
    "precision": Objective(
        f"{_FORMULAS}.windows.precision:precision",
        {
            "released": f"{_FORMULAS}.windows.precision:precision_released",
            "student": f"{_FORMULAS}.candidates.student:precision_student",
        },
        variant_needs={"student": OWN_TEXT},
        kernels={"": f"{_KERNELS}:precision", "released": f"{_KERNELS}:precision_released"},
        explained={"": f"{_SHOWN}:precision", "student": f"{_SHOWN}:precision_student"},
        about={
            "": "P-P2: minus the share of the predicted n-grams, counted by probability, that the reference covers.",
            "released": "As precision, but an n-gram's count is its probability at its last occurrence only.",
            "student": "GS4NMT: as precision, on the model's own greedy text. Reads candidates.",
        },
    ),
    "bag": Objective(
        f"{_FORMULAS}.windows.bag:bag",
        {
            "released": f"{_FORMULAS}.windows.bag:bag_released",
            "original": f"{_FORMULAS}.windows.bag:bag_original",
            "student": f"{_FORMULAS}.candidates.student:bag_student",
        },
        needs=("cross_logp",), variant_needs={"student": (*OWN_TEXT, "greedy_cross_logp")},
        explained={"": f"{_SHOWN}:bag", "student": f"{_SHOWN}:bag_student"},
        about={
            "": "BoN: one minus half the share of the reference's n-grams that the model expects.",
            "released": "Minus the mean over the reference's n-grams of their expected counts, each at most 1.",
            "original": "The L1 distance of the two bags of n-grams, as Shao et al. (2020) scale it.",
            "student": "BoN-NAT: the same distance at the positions of the model's own greedy text. Reads candidates.",
        },
    ),
    "bleu": Objective(
        f"{_FORMULAS}.windows.bleu:bleu", joint=True, needs=("cross_logp",),
        explained={"": f"{_SHOWN}:bleu"},
        about={"": "Minus the geometric mean over n of the expected clipped n-gram precision."},
    ),
    "lcs": Objective(
        f"{_FORMULAS}.windows.lcs:lcs", least_n=None, needs=("cross_logp",),
        explained={"": f"{_SHOWN}:lcs"},
        about={"": "Minus the log of the soft longest common subsequence, as a share of the reference."},
    ),
    "eisl": Objective(
        f"{_FORMULAS}.windows.eisl:eisl", needs=("cross_logp",),
        explained={"": f"{_SHOWN}:eisl"},
        about={"": "Negative log-likelihood of each reference n-gram at the position that the model prefers."},
    ),
    "soft": Objective(
        f"{_FORMULAS}.windows.soft:soft", kernels={"": f"{_KERNELS}:soft"},
        options={
            "kappa": Setting(
                None, float, above=0, most=MOST_N, help="exponent of a window's mean probability; n if not given"
            ),
        },
        weighted=True,
        explained={"": f"{_SHOWN}:soft"},
        about={"": "One minus the mean probability of the reference's n-grams, predicted or not."},
    ),
    "gated": Objective(
        f"{_FORMULAS}.windows.gated:gated", {"twin": f"{_FORMULAS}.windows.gated:gated_twin"},
        variant_needs={"twin": ("twin_token",)},
        kernels={"": f"{_KERNELS}:gated", "twin": f"{_KERNELS}:gated_twin"},
        explained={"": f"{_SHOWN}:gated"},
        about={
            "": "One minus the mean probability of n-grams at their own position, each copy counted.",
            "twin": "As gated, where the twin with another dropout predicts the n-gram. Needs twins.",
        },
        weighted=True,
    ),
    "near": Objective(
        f"{_FORMULAS}.windows.near:near", kernels={"": f"{_KERNELS}:near"},
        options={"power": Setting(4.0, least=0, most=MOST_N, help="discount of n-grams not predicted; 0 is soft")},
        weighted=True,
        explained={"": f"{_SHOWN}:near"},
        about={"": "As soft, but each n-gram is weighted by how nearly it is predicted."},
    ),
    "convex": Objective(
        f"{_FORMULAS}.tokens.convex:convex", least_n=None, per="token",
        options={"order": Setting(1.0, above=0, most=MOST_N, help="exponent of the sequence's mean probability")},
        explained={"": f"{_SHOWN}:convex"},
        about={"": "Convex learning: minus a power of the sequence's mean probability, weighted by length."},
    ),
    "dft": Objective(
        f"{_FORMULAS}.tokens.dft:dft", least_n=None, per="token", by_position=True,
        weighted=True,
        explained={"": f"{_SHOWN}:weighted"},
        about={"": "Dynamic fine-tuning: cross-entropy with each token weighted by its probability."},
    ),
    "tailr": Objective(
        f"{_FORMULAS}.tokens.tailr:tailr", least_n=None, per="token", by_position=True,
        options={
            "gamma": Setting(0.8, least=0, most=1, help="discount of unlikely tokens; 0 is cross-entropy"),
            "min_weight": Setting(0.2, least=0, most=1, help="smallest weight of a token"),
        },
        weighted=True,
        explained={"": f"{_SHOWN}:weighted"},
        about={"": "TaiLr: cross-entropy with unlikely tokens discounted, after the total variation distance."},
    ),
    "mixce": Objective(
        f"{_FORMULAS}.tokens.mixce:mixce", least_n=None, per="token", by_position=True,
        options={"eta": Setting(0.5, least=0, most=1, help="share of cross-entropy; the rest is its reverse")},
        weighted=True,
        explained={"": f"{_SHOWN}:weighted"},
        about={"": "MixCE: a mixture of cross-entropy and approximate reverse cross-entropy."},
    ),
    "unlikelihood": Objective(
        f"{_FORMULAS}.tokens.unlikelihood:unlikelihood", least_n=None, per="token", needs=("cross_logp",),
        weighted=True,
        explained={"": f"{_SHOWN}:unlikelihood"},
        about={"": "Penalty for the probability of tokens that occurred earlier in the reference."},
    ),
    "focal": Objective(
        f"{_FORMULAS}.tokens.focal:focal", least_n=None, per="token", by_position=True, weighted=True,
        options={"gamma": Setting(2.0, least=0, most=100, help="how much less a probable token counts; 0 is ce")},
        explained={"": f"{_SHOWN}:weighted"},
        about={"": "Focal loss: cross-entropy that counts less where the reference token is probable already."},
    ),
    "eaft": Objective(
        f"{_FORMULAS}.tokens.eaft:eaft", {"released": f"{_FORMULAS}.tokens.eaft:eaft_released"},
        least_n=None, per="token", by_position=True,
        options={"alpha": Setting(1.0, least=0, most=10, help="exponent of the weight")},
        needs=("entropy",), variant_needs={"released": ("top_entropy",)},
        weighted=True,
        explained={"": f"{_SHOWN}:eaft"},
        about={
            "": "Cross-entropy in which a position counts more the less certain the model is there.",
            "released": "As eaft, but with the entropy of the 20 most probable tokens. Only from logits.",
        },
    ),
    "margin": Objective(
        f"{_FORMULAS}.tokens.margin:margin", least_n=None, per="token", by_position=True, needs=("lm_logp",),
        weighted=True,
        options={"power": Setting(5, least=1, most=MOST_N, help="exponent of the margin, which keeps its sign")},
        about={"": "FES: penalty for tokens that a language model of the targets finds as likely. Reads one."},
    ),
    "future": Objective(
        f"{_FORMULAS}.tokens.future:future", least_n=None, per="token", by_position=True, needs=("future_logp",),
        weighted=True,
        options={"smoothing": Setting(0.0, least=0, most=1, help="amount of label smoothing")},
        option_needs={"smoothing": "future_mean_logp"},
        about={"": "ProphetNet: cross-entropy of the streams that look further ahead. Only for a ProphetNet."},
    ),
    "rdrop": Objective(
        f"{_FORMULAS}.pairs.rdrop:rdrop", least_n=None, per="token", by_position=True, needs=("twin_kl",),
        weighted=True,
        about={"": "R-Drop: divergence of two predictions with different dropout. Needs twins."},
    ),
    "distill": Objective(
        f"{_FORMULAS}.pairs.distill:distill", least_n=None, per="token", by_position=True, needs=("teacher_kl",),
        weighted=True,
        options={"temperature": Setting(1.0, above=0, most=1000, help="divides the logits of model and teacher")},
        about={"": "Distillation: divergence of the model from a teacher's predictions. Needs a teacher."},
    ),
    START: Objective(
        f"{_FORMULAS}.pairs.distill:keep", {"reverse": f"{_FORMULAS}.pairs.distill:keep_reverse"}, least_n=None,
        per="token", by_position=True, needs=("teacher_kl",), variant_needs={"reverse": ("teacher_reverse_kl",)},
        weighted=True,
        about={
            "": "Divergence of the model from what it predicted before training, KL(start‖model).",
            "reverse": "As keep, in the other direction, KL(model‖start).",
        },
    ),
    "rank": Objective(
        f"{_FORMULAS}.candidates.rank:rank", least_n=None, reads="candidates",
        options={
            "margin": Setting(0.001, least=0, most=1000, help="how much higher a candidate should score than the next"),
            "alpha": _length_exponent(2.0),
        },
        explained={"": f"{_SHOWN}:rank"},
        about={"": "BRIO: penalty where a worse candidate scores as high as a better one. Reads candidates."},
    ),
    "risk": Objective(
        f"{_FORMULAS}.candidates.risk:risk", least_n=None, reads="candidates",
        options={"sharpness": Setting(0.005, least=0, most=1000, help="exponent of the candidates' probabilities")},
        explained={"": f"{_SHOWN}:risk"},
        about={"": "Minimum risk training: one minus the expected gain of the candidates. Reads candidates."},
    ),
    "prefer": Objective(
        f"{_FORMULAS}.candidates.prefer:prefer", least_n=None, reads="candidates",
        options={
            "beta": Setting(0.1, above=0, most=1000, help="how much a difference of scores counts"),
            "alpha": _length_exponent(0.0),
            "margin": Setting(0.0, least=0, most=1000, help="by how much beta times the difference should exceed 0"),
        },
        explained={"": f"{_SHOWN}:prefer"},
        about={"": "CPO, SimPO: contrast of the best candidate with the worst one. Reads candidates."},
    ),
    "policy": Objective(
        f"{_FORMULAS}.candidates.policy:policy", least_n=None, reads="candidates",
        options={
            "baseline": Setting("mean", choices=("mean", "others", "greedy"), help="what a gain is compared with"),
            "scale": Setting("none", choices=("none", "std"), help="what divides the difference"),
            "alpha": _length_exponent(0.0),
        },
        option_needs={"baseline=greedy": "baseline"},
        explained={"": f"{_SHOWN}:policy"},
        about={"": "Policy gradient: log-probability of each sample times its advantage. Reads candidates."},
    ),
    "credit": Objective(
        f"{_FORMULAS}.candidates.credit:credit", joint=True, reads="candidates", needs=("token_logp",),
        explained={"": f"{_SHOWN}:credit"},
        about={"": "Policy gradient with credit for each token: its n-grams found in the reference. Reads candidates."},
    ),
}


def temperature_of(needs: Iterable[str]) -> float | None:
    """The temperature of ``tempered_lse``, None if it is not needed. Raises if there are several.

    Example:
        >>> temperature_of({"mean_logp", "tempered_lse=2.0"})
        2.0
    """
    found = sorted({float(need.partition("=")[2] or "nan") for need in needs if need.partition("=")[0] == TEMPERED})
    if len(found) > 1:
        raise UserError(f"ce at {len(found)} temperatures, {' and '.join(f'{each:g}' for each in found)}: one sweep of "
                        "the vocabulary has one beside 1. Write ce with one temperature, or ce + ce(temperature=...).")
    if found and not found[0] > 0:
        raise ValueError(f"{TEMPERED} needs its temperature: write {TEMPERED}=2.0 in needs.")
    return found[0] if found else None


OBJECTIVES: Registry[Objective] = Registry("objective", Objective, _BUILTIN)
"""All objectives by name. To add one, write its formula and an entry, here or in your own program."""
