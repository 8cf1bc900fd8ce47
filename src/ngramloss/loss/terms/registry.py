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
    option_variants: Mapping[str, str] = field(default_factory=dict)
    """Option → the variant that alone reads it. Without the variant the option is refused."""
    weighted: bool = False
    """Whether the formula reads ``stats.weights``, the weights of single tokens. All others refuse them."""
    anchored: bool = False
    """Whether the formula reads ``stats.anchors``, the places where blocks begin. They are refused if no term does."""
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
            raise UserError("an objective that reads candidates has one value per sequence and no token statistics: "
                            f"give `needs` of {', '.join(sorted(CANDIDATE_STATISTICS))} only, without per='token'.")
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
"""Optional statistics of candidates; only formulas that need ``greedy`` read the model's own greedy text."""
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


def _entry(
    module: str, about: str | Mapping[str, str], *, shown: str | None = None, kernels: Iterable[str] = (), **more: Any
) -> Objective:
    """An entry of our own, its variants named formula_variant; ``shown``: what explains it, by default its name."""
    about = {"": about} if isinstance(about, str) else about
    module, _, name = module.partition(":")
    name = name or module.rpartition(".")[2]
    paths = {"student": f"{_FORMULAS}.candidates.student:{name}_student"}
    variants = {variant: paths.get(variant, f"{_FORMULAS}.{module}:{name}_{variant}") for variant in about if variant}
    explained = {"": f"{_SHOWN}:{name if shown is None else shown}"} if shown != "" else {}
    explained |= {variant: f"{_SHOWN}:{name}_{variant}" for variant in paths.keys() & variants.keys()}
    own = {variant: f"{_KERNELS}:{'_'.join(filter(None, (name, variant)))}" for variant in kernels}
    return Objective(
        f"{_FORMULAS}.{module}:{name}", variants, about=about, kernels=own, explained=explained, **more
    )


_of_tokens = partial(_entry, least_n=None, per="token", by_position=True, weighted=True)
_of_candidates = partial(_entry, least_n=None, reads="candidates")
_BUILTIN = {
    "ce": _of_tokens(
        "tokens.ce", "Cross-entropy: negative log-likelihood of the reference tokens.",
        options={
            "smoothing": Setting(0.0, least=0, most=1, help="amount of label smoothing"),
            "temperature": Setting(1.0, above=0, most=1000, help="divides the logits; the loss is multiplied by it"),
        },
        option_needs={"smoothing": "mean_logp", "temperature": f"{TEMPERED}={{}}"},
    ),
    "matches": _entry(
        "windows.matches",
        {
            "": "One minus the mean probability of n-grams found anywhere in the reference.",
            "released": "As matches, but for n of 3 or more only the first three matched windows of an n-gram count.",
            "student": "As matches, on the model's own greedy text instead of the forced path. Reads candidates.",
        },
        variant_needs={"student": OWN_TEXT}, kernels=("", "released"), weighted=True,
    ),
    "rewards": _entry(
        "windows.rewards",
        {
            "": "One minus the mean probability of n-grams at their own position in the reference.",
            "twin": "As rewards, where the twin with another dropout predicts the n-gram. Needs twins.",
        },
        least_n=2, why_least=ONE_TOKEN, variant_needs={"twin": ("twin_token",)}, kernels=("", "twin"), weighted=True,
    ),
    "precision": _entry(
        "windows.precision",
        {
            "": "P-P2: minus the share of the predicted n-grams, counted by probability, that the reference covers.",
            "released": "As precision, but an n-gram's count is its probability at its last occurrence only.",
            "student": "GS4NMT: as precision, on the model's own greedy text. Reads candidates.",
        },
        variant_needs={"student": OWN_TEXT}, kernels=("", "released"),
    ),
    "bag": _entry(
        "windows.bag",
        {
            "": "BoN: one minus half the share of the reference's n-grams that the model expects.",
            "released": "Minus the mean over the reference's n-grams of their expected counts, each at most 1.",
            "original": "The L1 distance of the two bags of n-grams, as Shao et al. (2020) scale it.",
            "student": "BoN-NAT: the same distance at the positions of the model's own greedy text. Reads candidates.",
        },
        needs=("cross_logp",), variant_needs={"student": (*OWN_TEXT, "greedy_cross_logp")},
    ),
    "bleu": _entry(
        "windows.bleu", "Minus the geometric mean over n of the expected clipped n-gram precision.",
        joint=True, needs=("cross_logp",),
    ),
    "lcs": _entry(
        "windows.lcs", "Minus the log of the soft longest common subsequence, as a share of the reference.",
        least_n=None, needs=("cross_logp",),
    ),
    "eisl": _entry(
        "windows.eisl", "Negative log-likelihood of each reference n-gram at the position that the model prefers.",
        needs=("cross_logp",),
    ),
    "soft": _entry(
        "windows.soft", "One minus the mean probability of the reference's n-grams, predicted or not.",
        kernels=("",), weighted=True,
        options={
            "kappa": Setting(
                None, float, above=0, most=MOST_N, help="exponent of a window's mean probability; n if not given"
            ),
        },
    ),
    "gated": _entry(
        "windows.gated",
        {
            "": "One minus the mean probability of n-grams at their own position, each copy counted.",
            "twin": "As gated, where the twin with another dropout predicts the n-gram. Needs twins.",
        },
        variant_needs={"twin": ("twin_token",)}, kernels=("", "twin"), weighted=True,
    ),
    "near": _entry(
        "windows.near", "As soft, but each n-gram is weighted by how nearly it is predicted.",
        kernels=("",), weighted=True,
        options={"power": Setting(4.0, least=0, most=MOST_N, help="discount of n-grams not predicted; 0 is soft")},
    ),
    "accept": _entry(
        "windows.accept",
        {
            "": "One minus the share of a drafted block of n tokens that a verifier is expected to accept.",
            "detached": "D-PACE: cross-entropy in which a place counts by the accepted length that depends on it.",
            "gated": "Spec-AUF: cross-entropy up to the first place of a block where the best token is wrong.",
        },
        options={"alpha": Setting(0.5, least=0, most=1, help="of :detached, how much improbable places pass on")},
        option_variants={"alpha": "detached"}, anchored=True,
    ),
    "convex": _entry(
        "tokens.convex", "Convex learning: minus a power of the sequence's mean probability, weighted by length.",
        least_n=None, per="token",
        options={"order": Setting(1.0, above=0, most=MOST_N, help="exponent of the sequence's mean probability")},
    ),
    "dft": _of_tokens(
        "tokens.dft", "Dynamic fine-tuning: cross-entropy with each token weighted by its probability.",
        shown="weighted",
    ),
    "tailr": _of_tokens(
        "tokens.tailr", "TaiLr: cross-entropy with unlikely tokens discounted, after the total variation distance.",
        options={
            "gamma": Setting(0.8, least=0, most=1, help="discount of unlikely tokens; 0 is cross-entropy"),
            "min_weight": Setting(0.2, least=0, most=1, help="smallest weight of a token"),
        },
        shown="weighted",
    ),
    "mixce": _of_tokens(
        "tokens.mixce", "MixCE: a mixture of cross-entropy and approximate reverse cross-entropy.",
        options={"eta": Setting(0.5, least=0, most=1, help="share of cross-entropy; the rest is its reverse")},
        shown="weighted",
    ),
    "unlikelihood": _entry(
        "tokens.unlikelihood", "Penalty for the probability of tokens that occurred earlier in the reference.",
        least_n=None, per="token", needs=("cross_logp",), weighted=True,
    ),
    "focal": _of_tokens(
        "tokens.focal", "Focal loss: cross-entropy that counts less where the reference token is probable already.",
        options={"gamma": Setting(2.0, least=0, most=100, help="how much less a probable token counts; 0 is ce")},
        shown="weighted",
    ),
    "eaft": _of_tokens(
        "tokens.eaft",
        {
            "": "Cross-entropy in which a position counts more the less certain the model is there.",
            "released": "As eaft, but with the entropy of the 20 most probable tokens. Only from logits.",
        },
        options={"alpha": Setting(1.0, least=0, most=10, help="exponent of the weight")},
        needs=("entropy",), variant_needs={"released": ("top_entropy",)},
    ),
    "rdrop": _of_tokens(
        "pairs.rdrop", "R-Drop: divergence of two predictions with different dropout. Needs twins.",
        needs=("twin_kl",), shown="",
    ),
    "distill": _of_tokens(
        "pairs.distill", "Distillation: divergence of the model from a teacher's predictions. Needs a teacher.",
        options={"temperature": Setting(1.0, above=0, most=1000, help="divides the logits of model and teacher")},
        needs=("teacher_kl",), shown="",
    ),
    START: _of_tokens(
        "pairs.distill:keep",
        {
            "": "Divergence of the model from what it predicted before training, KL(start‖model).",
            "reverse": "As keep, in the other direction, KL(model‖start).",
        },
        needs=("teacher_kl",), variant_needs={"reverse": ("teacher_reverse_kl",)}, shown="",
    ),
    "rank": _of_candidates(
        "candidates.rank", "BRIO: penalty where a worse candidate is as probable as a better one. Reads candidates.",
        options={
            "margin": Setting(0.001, least=0, most=1000, help="least difference of neighbours in log p / length^alpha"),
            "alpha": _length_exponent(2.0),
        },
    ),
    "risk": _of_candidates(
        "candidates.risk", "Minimum risk training: one minus the expected score of the candidates. Reads candidates.",
        options={"sharpness": Setting(0.005, least=0, most=1000, help="exponent of the candidates' probabilities")},
    ),
    "prefer": _of_candidates(
        "candidates.prefer", "CPO, SimPO: contrast of the best candidate with the worst one. Reads candidates.",
        options={
            "beta": Setting(0.1, above=0, most=1000, help="how much a difference of log p / length^alpha counts"),
            "alpha": _length_exponent(0.0),
            "margin": Setting(0.0, least=0, most=1000, help="by how much beta times the difference should exceed 0"),
        },
    ),
    "policy": _of_candidates(
        "candidates.policy", "Policy gradient: log-probability of each sample times its advantage. Reads candidates.",
        options={
            "baseline": Setting("mean", choices=("mean", "others", "greedy"), help="what a score is compared with"),
            "scale": Setting("none", choices=("none", "std"), help="what divides the difference"),
            "alpha": _length_exponent(0.0),
        },
        option_needs={"baseline=greedy": "baseline"},
    ),
    "credit": _entry(
        "candidates.credit",
        "Policy gradient with credit for each token: its n-grams found in the reference. Reads candidates.",
        joint=True, reads="candidates", needs=("token_logp",),
    ),
}


def temperature_of(needs: Iterable[str]) -> float | None:
    """The temperature of ``tempered_lse``, None if it is not needed. Raises if there are several."""
    found = sorted({float(need.partition("=")[2] or "nan") for need in needs if need.partition("=")[0] == TEMPERED})
    if len(found) > 1:
        raise UserError(f"ce at {len(found)} temperatures, {' and '.join(f'{each:g}' for each in found)}: only one "
                        "besides 1 is possible. Write ce with one temperature, or ce + ce(temperature=...).")
    if found and not found[0] > 0:
        raise ValueError(f"{TEMPERED} needs its temperature: write {TEMPERED}=2.0 in needs.")
    return found[0] if found else None


OBJECTIVES: Registry[Objective] = Registry("objective", Objective, _BUILTIN)
"""All objectives by name. To add one, write its formula and an entry, here or in your own program."""
