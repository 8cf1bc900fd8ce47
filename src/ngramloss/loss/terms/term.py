"""name, n, weight, variant, options of one objective → a checked Term and the parts it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ngramloss.errors import UserError
from ngramloss.loss.terms.registry import (
    MOST_N,
    OBJECTIVES,
    START,
    TEACHER_STATISTICS,
    TWIN_STATISTICS,
    Objective,
    temperature_of,
)
from ngramloss.loss.terms.weight_schedule import Schedule
from ngramloss.plugins import call
from ngramloss.settings import nearest

if TYPE_CHECKING:
    from torch import Tensor

FP32_MAX, FP32_TINY = (2 - 2**-23) * 2.0**127, 2.0**-126  # the largest and the smallest normal number of fp32


@dataclass(frozen=True)
class Part:
    """One value of a joint loss, with its name in the log."""

    name: str
    function: Callable[..., Tensor]
    """``(stats, labels) → [B]``; of candidates ``(candidates) → [B]``, or ``(candidates, labels) → [B]`` with n."""
    weight: float
    per: Literal["sequence", "token"]
    kernel: str = ""  # ``module:name`` of a kernel that computes the same on a GPU, if there is one
    schedule: Schedule | None = None  # how the weight depends on the progress of training, if it does
    reads: Literal["tokens", "candidates"] = "tokens"
    """Whether the function takes TokenStats and labels, or CandidateStats."""
    by_position: bool = False
    """Whether it is a plain sum over positions, also of packed rows. Other functions get one text a row."""
    needs: frozenset[str] = frozenset()  # the optional statistics that it reads
    reads_labels: bool = True  # whether the function takes the labels. Functions of candidates without n do not

    @property
    def final_weight(self) -> float:
        """The weight at the end of the training, which validation uses."""
        return self.weight * (self.schedule.share(1.0) if self.schedule else 1.0)


def checked_value(name: str, formula: Callable[..., Tensor], stats: Any, *labels: Tensor, **options: Any) -> Tensor:
    """What a formula that is not ours returns, [B]. Raises for a shape that could be broadcast to a wrong loss."""
    from torch import Tensor

    found = call("objective", name, formula, stats, *labels, **options)
    like = labels[0] if labels else stats.logp                           # [B, T] or [B, K]
    got = type(found).__name__
    if isinstance(found, Tensor):
        if found.is_floating_point() and (found.shape, found.device) == (like.shape[:1], like.device):
            return found
        got = f"{found.dtype} of shape {list(found.shape)} on {found.device}"
    raise UserError(
        f"the objective {name!r} must return a floating-point number for each row, a tensor of shape "
        f"[{len(like)}] on {like.device}, got {got}. ngramloss docs add_objective has an example."
    )


@dataclass(frozen=True)
class Term:
    """One term of a joint objective: ``0.5*matches(2,3):released`` is ``Term("matches", (2, 3), 0.5, "released")``.

    Example:
        >>> print(Term("matches", (2, 3), weight=0.5))
        0.5*matches(2,3)
        >>> Term("rewards", (1,))
        Traceback (most recent call last):
        ...
        ngramloss.errors.UserError: rewards needs n of at least 2, got 1: a reward for single tokens repeats what ...
    """

    name: str
    n: tuple[int, ...] = ()
    weight: float = 1.0
    variant: str | None = None
    options: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", (self.n,) if isinstance(self.n, int) else tuple(self.n))
        spec = OBJECTIVES.entry(self.name)
        self._check_weight()
        self._check_options(spec)
        self._check_n(spec)
        if self.variant is not None and self.variant not in spec.variants:
            known = ", ".join(spec.variants)
            raise UserError(
                f"{self.name} has no variant {self.variant!r}. {nearest(self.variant, spec.variants)}"
                + (f"Choose from {known}, or leave it out." if known else "Leave it out: it has none.")
            )

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"{_number(self.weight)}*"
        return weight + self._unweighted(self.n) + (str(self.schedule) if self.schedule else "")

    @property
    def needs(self) -> set[str]:
        """The optional statistics it reads."""
        spec = OBJECTIVES.entry(self.name)
        always = spec.variant_needs.get(self.variant or "", spec.needs)
        chosen = [(name, value) for name, value in self.options.items() if value != spec.options[name].default]
        chosen += [(f"{name}={value}", value) for name, value in self.options.items()]
        return {*always, *(spec.option_needs[key].format(value) for key, value in chosen if key in spec.option_needs)}

    @property
    def reads(self) -> Literal["tokens", "candidates"]:
        """Whether its formula reads TokenStats and labels, or CandidateStats."""
        return OBJECTIVES.entry(self.name).variant_reads(self.variant)

    @property
    def reads_labels(self) -> bool:
        """Whether its formula reads the labels of the reference. Of candidates, only those with n do."""
        return self.reads == "tokens" or bool(self.n)

    @property
    def weighted(self) -> bool:
        """Whether its formula reads the weights of single tokens. No formula of candidates does."""
        return OBJECTIVES.entry(self.name).weighted and self.reads == "tokens"

    @property
    def anchored(self) -> bool:
        """Whether its formula reads the places where blocks begin."""
        return OBJECTIVES.entry(self.name).anchored

    @property
    def requires(self) -> set[str]:
        """What there must be besides inputs and labels: ``"candidates"``, ``"twins"``, ``"teacher"``.

        Validation has neither of the first two.
        """
        found = {"candidates"} if self.reads == "candidates" else set()
        statistics = {"twins": TWIN_STATISTICS, "teacher": TEACHER_STATISTICS}
        return found | {name for name, needs in statistics.items() if not self.needs.isdisjoint(needs)}

    @property
    def names(self) -> list[str]:
        """The names of its parts."""
        spec = OBJECTIVES.entry(self.name)
        return [self._unweighted(n) for n in ([self.n] if spec.joint or spec.least_n is None else zip(self.n))]

    @property
    def parts(self) -> list[Part]:
        """The values it computes: one for each n, or a single one."""
        spec = OBJECTIVES.entry(self.name)
        formula = spec.formula(self.variant)
        checked = partial(checked_value, self.name, formula) if OBJECTIVES.origin(self.name) else formula
        function = partial(checked, **self.options)
        part = partial(
            Part, weight=self.weight, per=spec.per, kernel=spec.kernels.get(self.variant or "", ""),
            schedule=self.schedule, reads=self.reads, by_position=spec.by_position, needs=frozenset(self.needs),
            reads_labels=self.reads_labels,
        )
        if spec.least_n is None:
            return [part(self._unweighted(()), function)]
        if spec.joint:
            return [part(self._unweighted(self.n), partial(function, n=self.n))]
        return [part(self._unweighted((n,)), partial(function, n=n)) for n in self.n]

    def _unweighted(self, n: tuple[int, ...]) -> str:
        inside = [str(length) for length in n] + [f"{name}={_number(value)}" for name, value in self.options.items()]
        return self.name + (f"({','.join(inside)})" if inside else "") + (f":{self.variant}" if self.variant else "")

    def _check_weight(self) -> None:
        if not isinstance(self.weight, (int, float)) or isinstance(self.weight, bool):
            raise TypeError(f"the weight of {self.name} must be a number, got {self.weight!r}.")
        if not 0 <= self.weight < float("inf"):
            raise UserError(
                f"the weight of {self.name} must be finite and not negative, got {self.weight!r}: "
                "every objective is minimised. Leave the term out, or give it a positive weight."
            )
        if self.weight > FP32_MAX or 0 < self.weight < FP32_TINY:
            becomes = "becomes infinite" if self.weight > 1 else "loses its digits or becomes 0"
            raise UserError(
                f"the weight of {self.name} must be 0 or from {FP32_TINY:.3g} to {FP32_MAX:.3g}, got {self.weight!r}: "
                f"in fp32, in which losses are added, it {becomes}. Give the terms weights of similar size."
            )

    def _check_n(self, spec: Objective) -> None:
        if spec.least_n is None:
            if self.n:
                raise UserError(f"{self.name} takes no n, got {_listed(self.n)}. Write {self.name} alone.")
            return
        if not self.n:
            example = max(2, spec.least_n)
            raise UserError(f"{self.name} needs the length of its n-grams. Write {self.name}({example}), for example.")
        for length in self.n:
            if not isinstance(length, int) or isinstance(length, bool):
                raise TypeError(f"{self.name} needs a whole number for n, got {length!r}. Write {self.name}(2).")
            if length < spec.least_n:
                raise UserError(f"{self.name} needs n of at least {spec.least_n}, got {length}: {spec.why_least}")
            if length > MOST_N:
                got = f"{length:,}" if length < 10**12 else f"a number of {len(str(length))} digits"
                raise UserError(
                    f"{self.name} takes n of at most {MOST_N:,}, got {got}: so long an n-gram is never "
                    "predicted completely and gives no gradient. Lower n; the paper uses 2, 3 and 4."
                )
        if len(set(self.n)) < len(self.n):
            raise UserError(f"{self.name}({_listed(self.n)}) has an n twice. Write each n once.")

    def _check_options(self, spec: Objective) -> None:
        checked: dict[str, float | str] = {}
        for name, value in self.options.items():
            if name not in spec.options:
                hint = f"Write {self.name}(2). " if name == "n" else nearest(name, spec.options)
                raise UserError(
                    f"{self.name} has no option {name!r}. {hint}"
                    f"It takes {', '.join([*spec.options, *(['n'] if spec.least_n else [])]) or 'none'}."
                )
            key, only = f"{self.name}({name})", spec.option_variants.get(name, self.variant)
            if only != self.variant:
                raise UserError(f"{key}: only {self.name}:{only} reads it. Write the variant :{only}, or leave {name} "
                                "out.")
            checked[name] = value = spec.options[name].check(key, value)
            if not isinstance(value, str) and 0 < abs(value) < FP32_TINY:
                raise UserError(f"{key}: must be 0 or at least {FP32_TINY:.3g}, got {value!r}, too little for fp32.")
        object.__setattr__(self, "options", checked)


def check_names(terms: Sequence[Term]) -> list[str]:
    """The names of all parts. Raises if a name occurs twice, or if the terms cannot be computed together."""
    names = [name for term in terms for name in term.names]
    for name in names:
        if names.count(name) > 1:
            written = " + ".join(map(str, terms))
            raise UserError(f"{name} is given twice in {written!r}. Write it once, with the sum of the weights.")
    teacher_temperature(terms)
    temperature_of({need for term in terms for need in term.needs})
    return names


def check_schedules(terms: Sequence[Term]) -> None:
    """Raise if the schedules leave a moment of the training in which no term has a weight."""
    scheduled = [(term.schedule, term.weight) for term in terms if term.schedule]
    if not scheduled or any(term.weight for term in terms if not term.schedule):
        return
    # Weights only grow, except where a term ends: there, or at the beginning, the fewest are active.
    moment = max((schedule.end for schedule, weight in scheduled if schedule.until and weight), default=0.0)
    if not any(weight * schedule.share(moment) for schedule, weight in scheduled):
        when = {0.0: "at the beginning of the training", 1.0: "at the end of the training"}
        raise UserError(f"no term of {' + '.join(map(str, terms))!r} has a weight "
                        f"{when.get(moment, f'when {moment:.12g} of all steps are done')}. Let another term begin by "
                        "then, or leave a schedule out.")


def teacher_temperature(terms: Sequence[Term]) -> float:
    """The temperature of all terms that compare with a teacher. Raises if they differ, or ask for two teachers."""
    compared = [term for term in terms if "teacher" in term.requires]
    if len({term.name == START for term in compared}) > 1:
        raise UserError(f"{' + '.join(map(str, compared))} would need two teachers, but a loss has one: keep compares "
                        "with the model before training, distill with train.teacher. Write distill or keep.")
    found = {float(term.options.get("temperature", 1.0)) for term in compared}
    if len(found) > 1:
        raise UserError(f"{' + '.join(map(str, compared))} has several temperatures, but the teacher is compared at "
                        "one. Write distill once.")
    return found.pop() if found else 1.0


def refuse_unweighted(terms: Sequence[Term]) -> None:
    """Raise if a term cannot weight single tokens. Some terms of candidates do not read labels."""
    for term in terms:
        if term.reads_labels and not term.weighted:
            raise UserError(f"{term.names[0]} cannot weight single tokens, because it is not a sum over tokens or "
                            "windows of the reference. Leave the weights or this term out.")


def plugin_sources(terms: Sequence[Term]) -> dict[str, str]:
    """Objectives that come from a plugin → a hash of their code."""
    return {term.name: OBJECTIVES.source(term.name) for term in terms if OBJECTIVES.origin(term.name)}


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if value == int(value) and abs(value) < 1e16 else repr(float(value))


def _listed(n: tuple[int, ...]) -> str:
    return ",".join(str(length) for length in n)
