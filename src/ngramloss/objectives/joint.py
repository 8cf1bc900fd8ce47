"""terms, with logits, hidden states or TokenStats, and labels → one differentiable scalar, and its parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, overload

import torch
from torch import Tensor

from ngramloss.objectives import diagnostics
from ngramloss.objectives.parser import parse
from ngramloss.objectives.term import Part, Term
from ngramloss.stats import IGNORE_INDEX, TokenStats, token_stats, token_stats_from_hidden

Count = int | float | Tensor


class JointLoss(torch.nn.Module):
    """A weighted sum of objectives, as it is written.

    ``ce`` is averaged over tokens and every other term over sequences. Both denominators are arguments: they
    default to this batch's own counts, and a trainer passes those of the whole optimiser step, so that
    micro-batches and processes add up to the loss of the whole. A row of padding alone is no sequence: it
    counts in no denominator and adds nothing. NaN goes through to the loss, as in ``F.cross_entropy``.

    Args:
        objective: the written form, such as ``"ce + 0.5*matches(2,3,4)"``, or :class:`Term` objects.
        check: raise where a logit is not finite or a label out of range, on any device, at the price of a
            synchronisation. For debugging, in eager mode.

    Example:
        >>> loss_fn = JointLoss("ce + matches(2,3,4)")
        >>> logits, labels = torch.zeros(1, 5, 10, requires_grad=True), torch.tensor([[3, 1, 4, 1, 5]])
        >>> loss, parts = loss_fn(logits, labels, return_parts=True)
        >>> loss.backward()
        >>> {name: round(value.item(), 4) for name, value in parts.items()}
        {'ce': 2.3026, 'matches(2)': 1.0, 'matches(3)': 1.0, 'matches(4)': 1.0}
        >>> loss_fn
        ce + matches(2,3,4)
    """

    def __init__(self, objective: str | Iterable[Term] | Term, *, check: bool = False) -> None:
        super().__init__()
        self.terms = _terms(objective)
        self.check = check
        self.parts: tuple[Part, ...] = tuple(part for term in self.terms for part in term.parts)
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice in {str(self)!r}. Write it once, with the sum of the weights.")
        self.needs = frozenset(need for term in self.terms for need in term.needs)

    def __repr__(self) -> str:
        return " + ".join(str(term) for term in self.terms)

    __str__ = __repr__

    @overload
    def forward(
        self, logits: Tensor, labels: Tensor, *,
        num_tokens: Count | None = ..., num_sequences: Count | None = ..., return_parts: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self, logits: Tensor, labels: Tensor, *,
        num_tokens: Count | None = ..., num_sequences: Count | None = ..., return_parts: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self, logits: Tensor, labels: Tensor, *,
        num_tokens: Count | None = None, num_sequences: Count | None = None, return_parts: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The loss of logits [B, T, V] under labels [B, T].

        Args:
            logits: scores before the softmax.
            labels: reference ids, −100 where they do not count. Not shifted here.
            num_tokens: what ``ce`` is divided by; this batch's labels that count, by default.
            num_sequences: what the other terms are divided by; this batch's rows with such a label, by default.
            return_parts: also return each part, unweighted and detached, by name.
        """
        stats = token_stats(logits, labels, needs=self.needs, check=self.check)
        loss, parts = self.from_stats(stats, labels, num_tokens=num_tokens, num_sequences=num_sequences)
        return (loss, parts) if return_parts else loss

    @overload
    def from_hidden(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *,
        bias: Tensor | None = ..., scale: float = ..., softcap: float | None = ...,
        num_tokens: Count | None = ..., num_sequences: Count | None = ..., return_parts: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def from_hidden(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *,
        bias: Tensor | None = ..., scale: float = ..., softcap: float | None = ...,
        num_tokens: Count | None = ..., num_sequences: Count | None = ..., return_parts: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def from_hidden(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *,
        bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
        num_tokens: Count | None = None, num_sequences: Count | None = None, return_parts: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The loss of hidden states [B, T, D] under a head of weight [V, D]: same value as from its logits.

        Args:
            hidden: the head's input.
            weight: the head's weight.
            labels: as in :meth:`forward`.
            bias: added to the logits, V numbers.
            scale: multiplies the hidden states.
            softcap: bounds the logits by ``softcap·tanh(logits / softcap)``.
            num_tokens: as in :meth:`forward`.
            num_sequences: as in :meth:`forward`.
            return_parts: as in :meth:`forward`.
        """
        stats = token_stats_from_hidden(
            hidden, weight, labels, bias=bias, scale=scale, softcap=softcap, needs=self.needs, check=self.check
        )
        loss, parts = self.from_stats(stats, labels, num_tokens=num_tokens, num_sequences=num_sequences)
        return (loss, parts) if return_parts else loss

    def from_stats(
        self, stats: TokenStats, labels: Tensor, *, num_tokens: Count | None = None, num_sequences: Count | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts, unweighted and detached, of statistics made elsewhere."""
        values = self.values(stats, labels, num_tokens=num_tokens, num_sequences=num_sequences)
        loss = torch.stack([part.weight * value for part, value in zip(self.parts, values, strict=True)]).sum()   # []
        return loss, {part.name: value.detach() for part, value in zip(self.parts, values, strict=True)}

    def values(
        self, stats: TokenStats, labels: Tensor, *, num_tokens: Count | None = None, num_sequences: Count | None = None
    ) -> list[Tensor]:
        """Each part's value, unweighted, with its gradient, [] each."""
        real = labels != IGNORE_INDEX                                    # [B, T]
        sequence = real.any(-1)                                          # [B]
        divisors = {
            "token": _divisor("num_tokens", num_tokens, real),
            "sequence": _divisor("num_sequences", num_sequences, sequence),
        }
        # Zero, but an objective that looks at matched windows alone would hide a NaN elsewhere, and a gradient scaler
        # must see it; and one that looks at no position at all would leave nothing for backward() to walk.
        zero = (stats.lse.detach() * 0).where(real, 0.0).sum() + stats.lse[:0].sum()   # []
        values = []
        for part in self.parts:
            each = part.function(stats, labels).where(sequence, 0.0)     # [B]
            values.append(each.sum() / divisors[part.per] + zero)        # []
        if self.check:
            diagnostics.raise_unless_finite(stats, labels, {p.name: v for p, v in zip(self.parts, values, strict=True)})
        return values

    def diagnose(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """What a practitioner watches, without touching any gradient: see :func:`diagnostics.diagnose`."""
        return diagnostics.diagnose(self, logits, labels)


def _terms(objective: str | Iterable[Term] | Term) -> tuple[Term, ...]:
    if isinstance(objective, str):
        return tuple(parse(objective))
    if isinstance(objective, Term):
        return (objective,)
    terms = tuple(objective) if isinstance(objective, Iterable) else ()
    if not terms or not all(isinstance(term, Term) for term in terms):
        raise TypeError(f"objective must be text such as 'ce + matches(2)' or Terms, got {objective!r}.")
    return terms


def _divisor(name: str, given: Count | None, counted: Tensor) -> Count | Tensor:
    if given is None:
        return counted.sum().clamp_min(1)
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {list(given.shape)}.")
        return given.reshape(()).to(counted.device).clamp_min(1)
    if not 0 <= given < float("inf"):
        raise ValueError(f"{name} must be a count of 0 or more, got {given!r}.")
    return max(given, 1)
