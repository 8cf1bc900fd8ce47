"""terms, with logits, hidden states or TokenStats, labels, and candidates → a differentiable loss, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, Never

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss import diagnostics
from ngramloss.loss.kernels import replay
from ngramloss.loss.stats import (
    ANCHORS,
    GIVEN,
    IGNORE_INDEX,
    LOGITS_ONLY,
    WEIGHTS,
    CandidateStats,
    Packing,
    Teacher,
    TokenStats,
    check_segments,
    checked_candidates,
    packing,
    token_stats,
    token_stats_from_hidden,
    unpack,
    with_given,
)
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.registry import CANDIDATE_STATISTICS, START, TEACHER_STATISTICS, TWIN_STATISTICS
from ngramloss.loss.terms.term import Part, Term, check_names, check_schedules, refuse_unweighted, teacher_temperature
from ngramloss.loss.weights import refresh_weights, share_now, weights_on_device
from ngramloss.settings import nearest

Count = int | float | Tensor
Segments = Tensor | Packing | None  # the text of each position of packed rows, [B, T], or where the texts are


class Loss(NamedTuple):
    """A joint loss with its parts."""

    total: Tensor  # the weighted sum of the parts, with gradient: [], or [B] with ``reduction="none"``
    parts: dict[str, Tensor]  # each part by name, unweighted and detached, in the shape of the total


class JointLoss(torch.nn.Module):
    """A weighted sum of objectives.

    ``ce`` and other terms of tokens (``convex``, ``dft``, ``tailr``, ``mixce``, ``focal``, ``eaft``, ``unlikelihood``,
    ``margin``, ``future``, ``rdrop``, ``distill``, ``keep``) are averaged over tokens, every other term over sequences.
    Both denominators are arguments, and default to the counts of this batch. A trainer passes those of the whole
    optimiser step, so that the losses of micro-batches and processes add up to the loss of the whole step. A row
    that contains only padding is not a sequence: it is not counted in any denominator and adds nothing. NaN in the
    logits makes the loss NaN, as in ``F.cross_entropy``, and so does NaN in a candidate.

    ``rank``, ``risk``, ``prefer``, ``policy``, ``credit`` and the variants ``:student`` read the candidates of each
    row, which are passed as ``candidates``. ``margin`` reads what a language model says of each label,
    which is passed as ``lm_logp``. ``rdrop``, ``rewards:twin`` and ``gated:twin`` compare twins: rows 2i and 2i + 1 are
    one example, each with its own dropout. ``distill`` and ``keep`` compare with a teacher, which is passed as
    ``teacher``.

    If a row contains several texts, as trainers of decoder-only models pack them, ``segments`` says which position
    belongs to which. Then every text is a sequence of its own, as if it had a row to itself.

    Args:
        objective: the written form, such as ``"ce + 0.5*matches(2,3,4)"``, or :class:`Term` objects.
        check: raise if a logit is NaN or infinite or a label is out of range. This works on any device but
            synchronises with it. For debugging, in eager mode.
        backend: how :meth:`from_hidden` computes the statistics: ``"auto"`` or one of ``loss.stats.BACKENDS``.
        memory: ``"fast"``, or ``"lean"`` for less memory and one more matrix product; used by :meth:`from_hidden`.
        reduction: ``"none"`` returns each row's share of the loss, [B]; ``"mean"`` returns the loss, []. A share is the
            row's value of each term, divided by the same denominator and weighted. The shares add up to the loss; parts
            are shares too. A row that contains only padding has 0, a packed row the sum over its texts.

    Example:
        >>> loss_fn = JointLoss("ce + matches(2,3,4)")
        >>> logits, labels = torch.zeros(1, 5, 10, requires_grad=True), torch.tensor([[3, 1, 4, 1, 5]])
        >>> loss_fn(logits, labels).backward()
        >>> loss, parts = loss_fn.with_parts(logits, labels)
        >>> {name: round(value.item(), 4) for name, value in parts.items()}
        {'ce': 2.3026, 'matches(2)': 1.0, 'matches(3)': 1.0, 'matches(4)': 1.0}
        >>> loss_fn
        JointLoss("ce + matches(2,3,4)")
        >>> print(loss_fn)
        ce + matches(2,3,4)
    """

    def __init__(
        self, objective: str | Iterable[Term] | Term, *, check: bool = False, backend: str = "auto",
        memory: str = "fast", reduction: str = "mean", **unknown: Never,
    ) -> None:
        super().__init__()
        for name in unknown:
            raise TypeError(f"JointLoss has no argument {name!r}. {INSTEAD.get(name, '')}".rstrip())
        if reduction not in ("mean", "none"):
            raise UserError(f"reduction must be 'mean' or 'none', got {reduction!r}. For a sum over tokens and "
                            "sequences, pass num_tokens=1 and num_sequences=1.")
        self.check, self.backend, self.memory, self.reduction = check, backend, memory, reduction
        self.progress: float | None = None
        """The share of optimiser steps done, from 0 to 1. Terms with a schedule read it; a trainer sets it."""
        self._take(_terms(objective))

    def _take(self, terms: tuple[Term, ...]) -> None:
        self.terms = terms
        self.parts: tuple[Part, ...] = tuple(part for term in self.terms for part in term.parts)
        check_names(self.terms)
        self.needs = frozenset(need for term in self.terms for need in term.needs) - CANDIDATE_STATISTICS
        self.temperature = teacher_temperature(self.terms)
        """What the logits of model and teacher are divided by before they are compared."""

    def __str__(self) -> str:
        return " + ".join(str(term) for term in self.terms)

    def __repr__(self) -> str:
        return f'JointLoss("{self}")'

    def forward(
        self, logits: Tensor, labels: Tensor, *, num_tokens: Count | None = None, num_sequences: Count | None = None,
        candidates: CandidateStats | None = None, segments: Segments = None, teacher: Teacher | Tensor | None = None,
        **given: Tensor | None,
    ) -> Tensor:
        """Compute the loss from logits [B, T, V] and labels [B, T].

        Args:
            logits: scores before the softmax.
            labels: reference ids, −100 where they do not count. They are not shifted here.
            num_tokens: the denominator of ``ce`` and other terms per token; by default the number of labels that count.
            num_sequences: the denominator of the other terms; by default the number of rows, or of texts in packed
                rows, with such a label.
            candidates: texts of the model itself, which ``rank``, ``policy`` and others read, a row for each row of
                the labels.
            segments: the text of each label in packed rows: integers [B, T], equal neighbours belong together. Labels
                with a negative segment belong to no text: only terms that are plain sums over positions (``ce``,
                ``dft``, ``tailr``, ``mixce``, ``focal``, ``eaft``, ``rdrop``) count them. Finding the texts reads two
                numbers on the host; compiled or captured code takes them ready made, from
                ``ngramloss.loss.stats.packing(labels, segments)``.
            teacher: what ``distill`` and ``keep`` compare with: another model's logits at the same positions, or
                ``Teacher(hidden=..., weight=...)``. It gets no gradient.
            given: numbers of each label that the logits do not have, [B, T]: ``lm_logp``, which ``margin`` reads, and
                ``weights``, 0 or more. A token's value is multiplied by its weight; an n-gram has the mean weight of
                its tokens. Denominators stay counts. Terms that cannot weight tokens raise an error. ``anchors``, 0 or
                1, mark the labels with which a block of ``accept`` begins.
        """
        return self.with_parts(
            logits, labels, num_tokens=num_tokens, num_sequences=num_sequences, candidates=candidates,
            segments=segments, teacher=teacher, **given,
        ).total

    def with_parts(
        self, logits: Tensor, labels: Tensor, *, num_tokens: Count | None = None, num_sequences: Count | None = None,
        candidates: CandidateStats | None = None, segments: Segments = None, teacher: Teacher | Tensor | None = None,
        **given: Tensor | None,
    ) -> Loss:
        """Compute the loss from logits, with its parts. Arguments are those of :meth:`forward`."""
        packed = packing_of(labels, segments)
        stats = token_stats(
            logits, labels, needs=self.needs, check=self.check, texts=packed and packed.texts,
            teacher=self._checked_teacher(teacher),
        )
        counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
        stats = self._with_given(stats, labels, given)
        return self.from_stats(stats, labels, **counts, candidates=candidates, packed=packed)

    def from_hidden(
        self, hidden: Tensor, head: torch.nn.Linear | Tensor, labels: Tensor, *,
        bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
        num_tokens: Count | None = None, num_sequences: Count | None = None, candidates: CandidateStats | None = None,
        segments: Segments = None, positions: Tensor | None = None, low_rank: Tensor | None = None,
        teacher: Teacher | Tensor | None = None, **given: Tensor | None,
    ) -> Tensor:
        """Compute the loss from hidden states [B, T, D] and the output head: the same value as from its logits.

        Args:
            hidden: the head's input.
            head: the module, whose bias is used too, or a weight [V, D].
            labels: as in :meth:`forward`, like all arguments that are not named here.
            bias: added to the logits, V numbers; only for a weight.
            scale: multiplies the hidden states.
            softcap: bounds the logits by ``softcap·tanh(logits / softcap)``.
            positions: compute the head only there, as found by ``loss.stats.labelled(labels, segments)``, which
                also finds the segments. In fine-tuning a decoder-only model most positions have no label.
            low_rank: further columns of the weight, [V, r], as in ``token_stats_from_hidden``.
        """
        return self.from_hidden_with_parts(
            hidden, head, labels, bias=bias, scale=scale, softcap=softcap, num_tokens=num_tokens,
            num_sequences=num_sequences, candidates=candidates, segments=segments, positions=positions,
            low_rank=low_rank, teacher=teacher, **given,
        ).total

    def from_hidden_with_parts(
        self, hidden: Tensor, head: torch.nn.Linear | Tensor, labels: Tensor, *,
        bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
        num_tokens: Count | None = None, num_sequences: Count | None = None, candidates: CandidateStats | None = None,
        segments: Segments = None, positions: Tensor | None = None, low_rank: Tensor | None = None,
        teacher: Teacher | Tensor | None = None, **given: Tensor | None,
    ) -> Loss:
        """Compute the loss from hidden states, with its parts. Arguments are those of :meth:`from_hidden`."""
        self.refuse_terms_of_logits("from_hidden")
        weight, bias = _weight_and_bias(head, bias)                      # [V, D], [V]
        packed = packing_of(labels, segments)
        stats = token_stats_from_hidden(
            hidden, weight, labels, bias=bias, scale=scale, softcap=softcap, needs=self.needs, check=self.check,
            backend=self.backend, memory=self.memory, texts=packed and packed.texts, positions=positions,
            low_rank=low_rank, teacher=self._checked_teacher(teacher),
        )
        counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
        stats = self._with_given(stats, labels, given)
        return self.from_stats(stats, labels, **counts, candidates=candidates, packed=packed)

    def from_stats(
        self, stats: TokenStats, labels: Tensor, *,
        num_tokens: Count | None = None, num_sequences: Count | None = None, candidates: CandidateStats | None = None,
        packed: Packing | None = None,
    ) -> Loss:
        """Compute the loss from existing statistics, with its parts.

        Statistics of packed rows have the ``cross_logp`` of their texts. Weights of tokens are a field of them.
        """
        for name in GIVEN:
            if name in self.needs and getattr(stats, name) is None:
                term = next(term for term in self.terms if name in term.needs)
                raise UserError(f"{term.names[0]} reads {GIVEN[name]}.")
        if stats.weights is not None:
            refuse_unweighted(self.terms)
        labels = labels.long()                                           # [B, T]
        if not torch.compiler.is_compiling():
            self.refresh_weights()
        given = {
            "num_tokens": _denominator("num_tokens", num_tokens, stats.lse),
            "num_sequences": _denominator("num_sequences", num_sequences, stats.lse),
        }
        by_row = self.reduction == "none"
        reads_candidates = self.needs_candidates or candidates is not None
        if not by_row and not self.check and not reads_candidates and replay.suits(stats):
            total, values = replay.replayed(self, stats, labels, given, packed)   # [], [parts]
        else:
            values = self.part_values(stats, labels, candidates=candidates, packed=packed, by_row=by_row, **given)
            total = self.weighted_sum(values)                            # [] or [B]
        parts = zip(self.parts, values.detach().unbind(), strict=True)
        return Loss(total, {part.name: value for part, value in parts})

    def part_values(
        self, stats: TokenStats, labels: Tensor, *,
        num_tokens: Tensor | None = None, num_sequences: Tensor | None = None, candidates: CandidateStats | None = None,
        packed: Packing | None = None, by_row: bool = False,
    ) -> Tensor:
        """Each part's value, unweighted, with its gradient, [parts]; ``by_row`` each row's share of it, [parts, B].

        Denominators are tensors on the same device, [].
        """
        candidates = self._checked_candidates(candidates, labels, packed)
        groups: dict[bool, list[int]] = {}
        for number, part in enumerate(self.parts):
            groups.setdefault(packed is None or part.by_position, []).append(number)
        found: dict[int, Tensor] = {}
        for by_position, numbers in groups.items():   # parts of the same rows are added up together: fewer launches
            own = (stats, labels)                                        # [B, T]
            if not by_position and packed is not None:
                own = unpack(stats, packed), packed.labels               # [S, U]
            value = torch.stack([_row_values(self.parts[number], *own, candidates) for number in numbers])   # [some, B]
            value = value.where((own[1] != IGNORE_INDEX).any(-1), 0.0)   # [some, B], or [some, S] of packed rows
            if not by_row:
                value = value.sum(-1)                                    # [some]
            elif not by_position and packed is not None:
                value = value.new_zeros(len(numbers), len(labels)).index_add(1, packed.row, value)   # [some, B]
            found.update(zip(numbers, value.unbind(), strict=True))
        values = value if len(groups) == 1 else torch.stack([found[number] for number in range(len(found))])
        divisor = self.denominators(labels, packed, num_tokens=num_tokens, num_sequences=num_sequences)   # [parts]
        divisor = divisor.to(stats.lse.dtype).where(divisor != 0, 1.0)   # [parts]
        # An objective that reads only matched windows would hide a NaN elsewhere, and a gradient scaler must see it.
        zero_or_nan = (stats.lse.detach() * 0).where(labels != IGNORE_INDEX, 0.0)   # [B, T]
        if by_row:
            values = values / divisor.unsqueeze(-1) + zero_or_nan.sum(-1)   # [parts, B]
        else:
            values = values / divisor + zero_or_nan.sum()                # [parts]
        if not values.requires_grad or all(part.reads == "candidates" for part in self.parts):
            values = values + stats.lse[:0].sum()                        # for backward(), if no position was read
        if self.check:
            diagnostics.raise_unless_finite(stats, labels, self.parts, values)
        return values

    def denominators(
        self, labels: Tensor, packed: Packing | None = None, *,
        num_tokens: Tensor | None = None, num_sequences: Tensor | None = None,
    ) -> Tensor:
        """What each part is divided by: the given number, or the tokens or sequences that it counts, [parts]."""
        given = {"token": num_tokens, "sequence": num_sequences}
        counted: dict[tuple[str, bool], Tensor] = {}
        for part in self.parts:
            key = part.per, part.by_position or packed is None
            if key not in counted:
                count = given[part.per]
                own = labels if packed is None or part.by_position else packed.labels   # [B, T] or [S, U]
                counted[key] = _count_labels(own, part.per) if count is None else count
        return torch.stack([counted[part.per, part.by_position or packed is None] for part in self.parts])

    def weighted_sum(self, values: Tensor) -> Tensor:
        """The weighted sum of the parts' values, [] or [B]. A part with weight 0 adds nothing, not even NaN."""
        weight = weights_on_device(self, values.dtype, values.device)    # [parts]
        weight = weight if values.ndim == 1 else weight.unsqueeze(-1)    # [parts] or [parts, 1]
        return (values * weight).masked_fill(weight == 0, 0.0).sum(0)

    def watch(self, *parts: Part, needs: Iterable[str] = ()) -> None:
        """Compute more parts, for a log: they have weight 0. ``needs`` are the optional statistics that they read."""
        self.parts, self.needs = (*self.parts, *parts), self.needs.union(needs)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each part now. Those with a schedule depend on :attr:`progress`."""
        return tuple(part.weight * share_now(part, self.progress) for part in self.parts)

    def refresh_weights(self) -> None:
        """Send the weights of the parts again if they have changed. A trainer calls this before it replays a graph."""
        refresh_weights(self)

    @property
    def needs_candidates(self) -> bool:
        """Whether a term reads candidates."""
        return any(part.reads == "candidates" for part in self.parts)

    @property
    def candidate_needs(self) -> frozenset[str]:
        """The optional statistics of candidates that a term reads."""
        return frozenset(need for part in self.parts for need in part.needs if need in CANDIDATE_STATISTICS)

    @property
    def needs_samples(self) -> bool:
        """Whether a term reads candidates other than the model's own greedy text."""
        return any(part.reads == "candidates" and "greedy" not in part.needs for part in self.parts)

    @property
    def needs_own_text(self) -> bool:
        """Whether a term reads the model's own greedy text, such as ``precision(2):student``."""
        return "greedy" in self.candidate_needs

    @property
    def needs_twins(self) -> bool:
        """Whether a term compares each row with its twin, so that rows 2i and 2i + 1 must be one example."""
        return not self.needs.isdisjoint(TWIN_STATISTICS)

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with a teacher."""
        return not self.needs.isdisjoint(TEACHER_STATISTICS)

    @property
    def compares_with_start(self) -> bool:
        """Whether the teacher is the model itself before training."""
        return any(term.name == START for term in self.terms)

    def without(self, *missing: Literal["candidates", "twins", "teacher"]) -> JointLoss:
        """The terms that can be computed without these, with the same options; ``0*ce`` if none is left.

        Validation has neither candidates nor twins. Returns this loss if no term requires them.
        """
        return self.only(lambda term: term.requires.isdisjoint(missing))

    def only(self, keeps: Callable[[Term], bool]) -> JointLoss:
        """Some of the terms, with the same options; ``0*ce`` if none is left, and this loss if all are."""
        terms = [term for term in self.terms if keeps(term)]
        if len(terms) == len(self.terms):
            return self
        rest = JointLoss("0*ce", check=self.check, backend=self.backend, memory=self.memory, reduction=self.reduction)
        if terms:  # they may have moments without an active term
            rest._take(tuple(terms))
        rest.progress = self.progress
        return rest

    def with_ce(self) -> JointLoss:
        """The terms, plus ``ce`` with weight 0 if it is not among them, so that validation always reports it."""
        return self if any(part.name == "ce" for part in self.parts) else JointLoss(f"{self} + 0*ce")

    def _with_given(self, stats: TokenStats, labels: Tensor, given: Mapping[str, Tensor | None]) -> TokenStats:
        """The statistics with those that were given. Raises if no term reads one of them."""
        for name, value in given.items():
            known = (*GIVEN, WEIGHTS, ANCHORS)
            if name not in known:
                raise TypeError(f"JointLoss takes no argument {name!r}. {nearest(name, known)}".rstrip())
            anchored = name == ANCHORS and any(term.anchored for term in self.terms)
            if value is not None and name not in (*self.needs, WEIGHTS) and not anchored:
                raise UserError(f"{name} was given, but no term of {str(self)!r} reads it: leave it out, or add a term "
                                "that does, such as margin for lm_logp, or accept for anchors.")
        return with_given(stats, labels, given)

    def _checked_teacher(self, teacher: Teacher | Tensor | None) -> Teacher | None:
        """The teacher at the objective's temperature. Raises if it is missing or unwanted."""
        if teacher is None and self.needs_teacher:
            name = next(term.names[0] for term in self.terms if "teacher" in term.requires)
            raise UserError(f"{name} needs a teacher: set train.teacher, attach(model, ..., teacher=model), or pass "
                            "teacher=logits or teacher=ngramloss.Teacher(...) to the loss. To leave such terms out: "
                            "loss_fn.without('teacher').")
        if teacher is not None and not self.needs_teacher:
            raise UserError(f"a teacher was given, but no term of {str(self)!r} uses it: add distill or keep to the "
                            "objective, or leave the teacher out.")
        if isinstance(teacher, Tensor):
            teacher = Teacher(teacher)
        return teacher._replace(temperature=self.temperature) if isinstance(teacher, Teacher) else teacher

    def _checked_candidates(
        self, candidates: CandidateStats | None, labels: Tensor, packed: Packing | None
    ) -> CandidateStats | None:
        """The candidates, if a term reads them. Raises if they are missing, unwanted or of a wrong shape."""
        if candidates is None and not self.needs_candidates:
            return None
        if candidates is None:
            name = next(part.name for part in self.parts if part.reads == "candidates")
            raise UserError(f"{name} needs candidates. Make them with `ngramloss candidates` and set data.candidates; "
                            "in Python, give rows or batches `candidates` and `scores`, or pass "
                            "candidates=CandidateStats(...) to the loss.")
        if not self.needs_candidates:
            raise UserError(f"candidates were given, but no term of {str(self)!r} reads them: add rank, risk or "
                            "prefer to the objective, or leave the candidates out.")
        candidates = checked_candidates(candidates)
        for part in self.parts:
            for need in sorted(part.needs & CANDIDATE_STATISTICS):
                if getattr(candidates, need) is None:
                    raise UserError(f"{part.name} reads {MISSING[need]}")
        cross = candidates.greedy_cross_logp                             # [B, T, U]
        if cross is not None and cross.shape[-1] != labels.shape[-1]:
            raise ValueError(f"candidates: `greedy_cross_logp` must be [B, T, U] with the U of the labels, "
                             f"{labels.shape[-1]}, got {list(cross.shape)}.")
        if len(candidates.logp) != len(labels):
            raise UserError(f"candidates must have one row for each row of the labels: got {len(candidates.logp)} rows "
                            f"of candidates and {len(labels)} of labels.")
        if packed is not None:
            raise UserError(f"{str(self)!r} compares the candidates of a row, but packed rows have several texts. Put "
                            "one text into each row, without segments, or leave these terms out.")
        return candidates

    def refuse_terms_of_logits(self, by: str) -> None:
        """Raise if a term needs all logits of a position at once; ``by`` names what has only the hidden states."""
        if self.needs.isdisjoint(LOGITS_ONLY):
            return
        term = next(term for term in self.terms if term.needs & LOGITS_ONLY)
        raise UserError(
            f"{by} cannot compute {term.names[0]}: it needs the 20 largest logits of each position, and from hidden "
            "states the logits are computed in blocks. Compute the loss from logits, with JointLoss(...)(logits, "
            f"labels) or compute_loss_func(...), or write {term.name} without its variant."
        )

    def diagnose(
        self, logits: Tensor, labels: Tensor, *, segments: Segments = None, **given: Tensor | None
    ) -> dict[str, Tensor]:
        """Numbers to log during training; gradients are not changed. See :func:`diagnostics.diagnose`."""
        return diagnostics.diagnose(self, logits, labels, packing_of(labels, segments), given)


_ONLINE = "Sample during training, with a section [online] in the recipe, or give "
MISSING = {
    "token_logp": "the tokens of each candidate: pass `tokens` and `token_logp` [B, K, T] to CandidateStats.",
    "greedy": "the model's own greedy text, but the candidates do not mark it. " + _ONLINE
    + "`greedy` [B, K], which is true for it.",
    "baseline": "the score of the model's greedy text, which the candidates lack. " + _ONLINE
    + "`baseline` [B] beside `scores`.",
    "greedy_cross_logp": "the probabilities of the reference's tokens along the model's own greedy text: pass "
    "`greedy_cross_logp` [B, T, U] to CandidateStats.",
}
"""Statistics of candidates → the end of the error if they are missing."""
INSTEAD = {
    "label_smoothing": "Write the smoothing in the objective: JointLoss('ce(smoothing=0.1) + matches(2)').",
    "ignore_index": "Labels of -100 do not count; for padding write labels.masked_fill(labels == pad_token_id, -100).",
    "weight": "Ids of the vocabulary have no weights; tokens have, JointLoss(...)(logits, labels, weights=[B, T]), and "
    "so have terms: JointLoss('ce + 0.5*matches(2)').",
}
"""Arguments of ``torch.nn.CrossEntropyLoss`` → what to write here."""


def packing_of(labels: Tensor, segments: Segments) -> Packing | None:
    """Where the texts of packed rows are; None without segments, or without positions."""
    if segments is None or isinstance(segments, Packing):
        return segments
    check_segments(segments, labels)
    return packing(labels, segments) if labels.numel() else None


def _count_labels(labels: Tensor, per: str) -> Tensor:
    """The number of labels that count, or of rows that have one, []."""
    real = labels != IGNORE_INDEX                                        # [S, U]
    return (real if per == "token" else real.any(-1)).sum()              # []


def _row_values(part: Part, stats: TokenStats, labels: Tensor, candidates: CandidateStats | None) -> Tensor:
    """The part's value of each row, [B]. A part that reads candidates is NaN if any number of one of them is."""
    if part.reads == "tokens":
        return replay.fastest(part, stats)(stats, labels)
    assert candidates is not None
    broken = candidates.logp.isnan() | candidates.length.isnan() | candidates.score.isnan()   # [B, K]
    read = candidates if "greedy" in part.needs else candidates.samples()
    value = part.function(read, labels) if part.reads_labels else part.function(read)   # [B]
    return (value + torch.where(broken.any(-1), float("nan"), 0.0)).to(stats.lse.dtype)


def _terms(objective: str | Iterable[Term] | Term) -> tuple[Term, ...]:
    if isinstance(objective, str):
        return tuple(parse(objective))
    terms = (objective,) if isinstance(objective, Term) else tuple(objective) if isinstance(objective, Iterable) else ()
    if not terms or not all(isinstance(term, Term) for term in terms):
        raise TypeError(f"objective must be a string such as 'ce + matches(2)' or Terms, got {objective!r}.")
    check_schedules(terms)
    return terms


def _weight_and_bias(head: torch.nn.Linear | Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The parameters of an output head: of a plain ``Linear``, or the weight and bias that were given."""
    if isinstance(head, Tensor):
        return head, bias
    name = type(head).__name__
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward or "forward" in vars(head):
        raise TypeError(f"from_hidden takes the output head, a torch.nn.Linear, or its weight, got {name}, which may "
                        "compute its logits differently. Compute the logits, and call JointLoss(...)(logits, "
                        "labels). A head with LoRA is supported by attach(model, ...).")
    if head._forward_hooks or head._forward_pre_hooks:
        raise UserError("the head has hooks, which from_hidden would not call. Remove them, or compute the logits and "
                        "call JointLoss(...)(logits, labels).")
    if bias is not None:
        raise UserError("the head has a bias of its own, so `bias` is only for a weight. Leave it out.")
    return head.weight, head.bias


def _denominator(name: str, given: Count | None, like: Tensor) -> Tensor | None:
    """A number that a caller passed, checked, on the device of the statistics, []."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        if not isinstance(given, (int, float)) or isinstance(given, bool):
            raise TypeError(f"{name} must be a number or a tensor of one number, got {given!r}.")
        if not (given == 0 or 1e-6 <= given < 2**63):
            raise ValueError(f"{name} must be a count of 0 or more, got {given!r}.")
        return torch.full((), float(given), dtype=like.dtype, device=like.device)   # a launch, not a copy that waits
    if given.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {list(given.shape)}.")
    if torch.compiler.is_compiling() or given.device.type != "cpu":   # reading the value would wait for the device
        torch._assert_async(given.detach().reshape(()) >= 0, f"{name} must be a count of 0 or more")
    elif not 0 <= given.item() < float("inf"):
        raise ValueError(f"{name} must be a count of 0 or more, got {given.item()!r}.")
    to_gpu = like.device.type != "cpu"   # a copy to a CPU must be waited for
    return given.detach().reshape(()).to(like.device, like.dtype, non_blocking=to_gpu)
