"""numbers of K candidates a source → CandidateStats, which the objectives that compare candidates read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ngramloss.loss.stats.labels import IGNORE_INDEX


class CandidateStats(NamedTuple):
    """Everything that an objective may know about the candidates of each source: texts that a model has generated.

    A row may have fewer than K candidates. A ``length`` of 0 says that there is no such candidate; its other numbers
    do not count then, whatever they are. Absent candidates may be at any place.
    """

    logp: Tensor
    """Log-probability of each candidate, the sum over its tokens, with gradient, [B, K]."""
    length: Tensor
    """Number of tokens of each candidate, 0 where there is none, [B, K]."""
    score: Tensor
    """What each candidate scores against the reference, from 0 to 1, [B, K]."""
    baseline: Tensor | None = None
    """What the greedy text scores, for self-critical training, [B]."""
    greedy: Tensor | None = None
    """Whether a candidate is the model's own greedy text, bool [B, K]. At most one of a row is; of several, the first
    counts. Only terms of the own text read it: for all others it is absent, see :meth:`samples`."""
    tokens: Tensor | None = None
    """Ids of each candidate, ``IGNORE_INDEX`` where they do not count, [B, K, T]."""
    token_logp: Tensor | None = None
    """Log-probability of each of them, with gradient, [B, K, T]."""
    greedy_cross_logp: Tensor | None = None
    """At each position of the greedy text, the log-probability of each token of the reference, [B, T, U]."""

    @property
    def present(self) -> Tensor:
        """Whether there is such a candidate, [B, K]."""
        return self.length != 0

    def samples(self) -> CandidateStats:
        """The candidates without the greedy text, which is absent here."""
        if self.greedy is None:
            return self
        return _without(self, self.greedy)._replace(greedy=None)

    def own_text(self) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of the greedy text, ``IGNORE_INDEX`` and 0 where there is none, [B, T] each."""
        assert self.greedy is not None
        assert self.tokens is not None
        assert self.token_logp is not None
        B, K, T = self.tokens.shape
        if K == 0:
            return self.tokens.new_full((B, T), IGNORE_INDEX), self.token_logp.new_zeros(B, T)
        own = self.greedy & self.present                                 # [B, K]
        row = own_rows(own)                                              # [B]
        some = own.any(-1, keepdim=True)                                 # [B, 1]
        tokens, logp = (x.flatten(0, 1).index_select(0, row) for x in (self.tokens, self.token_logp))   # [B, T] each
        return tokens.where(some, IGNORE_INDEX), logp.where(some, 0.0)


def own_rows(own: Tensor) -> Tensor:
    """The row of each source's first marked candidate among all B·K; where none is marked, some row of it, [B].

    >>> own_rows(torch.tensor([[True, False], [False, True], [False, False]]))
    tensor([0, 3, 4])
    """
    B, K = own.shape
    return torch.arange(B, device=own.device) * K + own.long().argmax(-1)   # [B]


def checked_candidates(stats: CandidateStats) -> CandidateStats:
    """The candidates with ``logp`` in fp32 or better, the rest alike, and 0 where there is none.

    ``score`` keeps its own floating-point precision, because rounding could tie. Raises for shapes and dtypes, not
    for values, which would have to wait for the device.

    >>> logp = torch.tensor([[-3.0, float("nan")]], dtype=torch.bfloat16)
    >>> stats = checked_candidates(CandidateStats(logp, torch.tensor([[4, 0]]), torch.tensor([[1, 1]])))
    >>> stats.logp, stats.length, stats.score
    (tensor([[-3.,  0.]]), tensor([[4., 0.]]), tensor([[1., 0.]]))
    """
    if not isinstance(stats, CandidateStats):
        raise TypeError(f"candidates must be CandidateStats(logp, length, score), got {type(stats).__name__}.")
    _check_shapes(stats)
    present = stats.present                                              # [B, K]
    dtype = torch.promote_types(stats.logp.dtype, torch.float32)
    score = stats.score if stats.score.is_floating_point() else stats.score.to(dtype)   # [B, K]
    baseline = None if stats.baseline is None else stats.baseline.to(score.dtype)   # [B]
    checked = stats._replace(logp=stats.logp.to(dtype), length=stats.length.to(dtype), score=score, baseline=baseline)
    if stats.tokens is not None and stats.token_logp is not None:
        tokens = stats.tokens.long()                                     # [B, K, T]
        token_logp = stats.token_logp.to(dtype).where(tokens != IGNORE_INDEX, 0.0)   # [B, K, T]
        checked = checked._replace(tokens=tokens, token_logp=token_logp)
    if stats.greedy_cross_logp is not None:
        checked = checked._replace(greedy_cross_logp=stats.greedy_cross_logp.to(dtype))
    return _without(checked, ~present)


def _without(stats: CandidateStats, absent: Tensor) -> CandidateStats:
    """The candidates without those marked, [B, K]: their numbers are 0, and they have no tokens."""
    zeros = {"logp": stats.logp, "length": stats.length, "score": stats.score}
    left = stats._replace(**{name: value.masked_fill(absent, 0.0) for name, value in zeros.items()})
    if stats.tokens is None or stats.token_logp is None:
        return left
    of_tokens = absent.unsqueeze(-1)                                     # [B, K, 1]
    return left._replace(
        tokens=stats.tokens.masked_fill(of_tokens, IGNORE_INDEX),
        token_logp=stats.token_logp.masked_fill(of_tokens, 0.0),
    )


def _check_shapes(stats: CandidateStats) -> None:
    if stats.logp.ndim != 2:
        raise ValueError(f"candidates: `logp` must be [B, K], one row of candidates for each source, got a tensor of "
                         f"shape {list(stats.logp.shape)}.")
    if not stats.logp.is_floating_point():
        raise TypeError(f"candidates: `logp` must be floating point, got {stats.logp.dtype}. It has log-probabilities.")
    for name, given in (("length", stats.length), ("score", stats.score)):
        if given.shape != stats.logp.shape:
            raise ValueError(f"candidates: `{name}` must be [B, K] like `logp`, {list(stats.logp.shape)}, got "
                             f"{list(given.shape)}.")
    if stats.baseline is not None and stats.baseline.shape != stats.logp.shape[:1]:
        raise ValueError(f"candidates: `baseline` must be [B], {list(stats.logp.shape[:1])}, got "
                         f"{list(stats.baseline.shape)}.")
    if stats.greedy is not None and (stats.greedy.shape != stats.logp.shape or stats.greedy.dtype != torch.bool):
        raise ValueError(f"candidates: `greedy` must be true or false for each candidate, {list(stats.logp.shape)}, "
                         f"got {stats.greedy.dtype} of shape {list(stats.greedy.shape)}.")
    _check_tokens(stats)


def _check_tokens(stats: CandidateStats) -> None:
    tokens, logp, cross = stats.tokens, stats.token_logp, stats.greedy_cross_logp
    if (tokens is None) != (logp is None):
        raise ValueError("candidates: `tokens` and `token_logp` belong together. Give both, or neither.")
    if tokens is not None and logp is not None:
        if tokens.is_floating_point() or tokens.ndim != 3 or tokens.shape[:2] != stats.logp.shape:
            raise ValueError(f"candidates: `tokens` must be ids [B, K, T] with [B, K] = {list(stats.logp.shape)}, "
                             f"-100 where they do not count, got {tokens.dtype} of shape {list(tokens.shape)}.")
        if not logp.is_floating_point() or logp.shape != tokens.shape:
            raise ValueError(f"candidates: `token_logp` must be a log-probability of each token, {list(tokens.shape)}, "
                             f"got {logp.dtype} of shape {list(logp.shape)}.")
    if cross is not None:
        length = None if tokens is None else tokens.shape[-1]
        if cross.ndim != 3 or len(cross) != len(stats.logp) or length not in (None, cross.shape[1]):
            raise ValueError(f"candidates: `greedy_cross_logp` must be [B, T, U] with B = {len(stats.logp)} and the T "
                             f"of `tokens`, {length}, got {list(cross.shape)}.")
