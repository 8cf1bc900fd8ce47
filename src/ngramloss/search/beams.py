"""logits of the next tokens → the beams of a search, one token longer, all in tensors.

The search is that of Hugging Face's ``generate``, score for score. It never asks the device for a value, tensors keep
their shapes, and results are written in place: so one token can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ngramloss.loss.stats import triton_is_installed
from ngramloss.search.search import Search

NEVER = -1e9  # A score below all others, as in ``generate``


class Limits(NamedTuple):
    """The settings of a search, with those that depend on the length or on tokens as tensors on its device."""

    search: Search  # the settings
    penalties: Tensor
    """A text's score is its log-probability divided by this, by its tokens after the start token, [L + 1]."""
    ends: Tensor  # the end tokens, [ends]
    banned: Tensor  # tokens that are never written, [banned]
    before: int  # tokens at the beginning of a text that belong to its prompt. Their n-grams may repeat


def limits(search: Search, device: torch.device) -> Limits:
    """Make the tensors of a search."""
    penalties = [float(max(length, 1)) ** search.length_penalty for length in range(search.max_length + 1)]
    ends, banned = (torch.tensor(each, dtype=torch.long, device=device) for each in (search.ends, search.banned))
    return Limits(search, torch.tensor(penalties, device=device), ends, banned, before=int(search.start is None))


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of ``gpu/selection.py`` and ``gpu/decoding.py`` run there."""
    return device.type == "cuda" and triton_is_installed()


class Choices(NamedTuple):
    """The best tokens that may follow each text, in any order, [B, K, C], and their log-probabilities, [B, K, C]."""

    tokens: Tensor
    logp: Tensor


def options(logits: Tensor, ids: Tensor, length: Tensor, given: Limits, *, count: int, less: Tensor | None) -> Choices:
    """The best tokens after each text, [B, K, L], by logits [B, K, V], changed in place; ``less`` [B, n] lose some.

    Without ``renormalize``, probabilities are those before any token was ruled out, as in ``generate``.
    """
    search, rows = given.search, logits.flatten(0, 1)                    # [B · K, V]
    changed = search.limits_tokens or less is not None
    total = _top(rows, 0)[2] if changed and not search.renormalize else None     # [B · K]
    if less is not None:
        where = less.repeat_interleave(logits.shape[1], 0)               # [B · K, n]
        rows.scatter_add_(1, where, torch.full_like(where, -search.diversity, dtype=rows.dtype))
    rule_out(rows, ids.flatten(0, 1), length, given)
    values, tokens, left = _top(rows, min(count, rows.shape[1]))         # [B · K, C] twice, [B · K]
    logp = values - (left if total is None else total).unsqueeze(-1)     # [B · K, C]
    logp = logp.where(values > -torch.inf, -torch.inf)
    for token, is_here in forced(length, search):
        only = torch.full_like(logp, -torch.inf)                         # [B · K, C]
        only[:, 0] = 0.0
        logp, tokens = only.where(is_here, logp), tokens.masked_fill(is_here, token)
    return Choices(*(each.view(*logits.shape[:2], -1) for each in (tokens, logp)))


def forced(length: Tensor, search: Search) -> Iterator[tuple[int, Tensor]]:
    """Tokens that must be written at some length, and whether it is this one, in the shape of ``length``."""
    for token, at in ((search.first, 1), (search.last, search.max_length - 1)):
        if token is not None:
            yield token, length == at


def _top(rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row and their tokens, [N, count] each, and the row's log-sum-exp, [N]."""
    if has_kernels(rows.device):
        from ngramloss.search.kernels import selection

        return selection.Sweep(rows).top(count)
    scores = rows.float()                                                # [N, V]
    return *scores.topk(count), scores.logsumexp(-1)


def rule_out(scores: Tensor, ids: Tensor, length: Tensor, given: Limits) -> None:
    """Set the scores, [N, V], of tokens that may not follow the first ``length`` ids, [N, L], to −∞, in place.

    ``length`` is one for all rows, [], or one for each, [N, 1], for which there is no kernel.
    """
    search = given.search
    if has_kernels(scores.device) and not length.dim():
        from ngramloss.search.kernels import selection

        selection.rule_out(scores, ids, length, given)
        return
    if search.no_repeat_ngram_size:
        _rule_out_repeats(scores, ids[:, given.before :], length - given.before, search.no_repeat_ngram_size)
    if search.banned:
        scores.index_fill_(1, given.banned, -torch.inf)
    if search.min_length > 1 and search.ends:
        ends = scores.index_select(1, given.ends)                        # [N, ends]
        scores.index_copy_(1, given.ends, ends.masked_fill(length < search.min_length, -torch.inf))


def _rule_out_repeats(scores: Tensor, ids: Tensor, length: Tensor, n: int) -> None:
    """Rule out the tokens that would repeat an n-gram of a text."""
    if n > ids.shape[1]:
        return
    offsets = torch.arange(n - 1, device=ids.device)                     # [n - 1]
    newest = (length - (n - 1) + offsets).clamp_min(0)                   # [n - 1] or [N, n - 1]
    newest = ids.gather(1, newest.expand(len(ids), -1))                  # [N, n - 1]
    windows = ids.unfold(1, n, 1)                                        # [N, W, n]
    starts = torch.arange(windows.shape[1], device=ids.device)           # [W]
    same = (windows[..., :-1] == newest[:, None]).all(-1) & (starts + n <= length)   # [N, W]
    lost = torch.zeros_like(same, dtype=scores.dtype).masked_fill(same, -torch.inf)      # [N, W]
    scores.scatter_add_(1, windows[..., -1], lost)


@dataclass
class Beams:
    """The state of a search over B sources with K beams each."""

    ids: Tensor  # texts that go on, [B, K, L]
    scores: Tensor  # their log-probabilities, [B, K]
    ended_ids: Tensor  # the best texts that ended, best first, [B, K, L]
    ended_scores: Tensor  # their log-probabilities by length, [B, K]
    has_ended: Tensor  # whether there is such a text, [B, K]
    can_improve: Tensor  # whether a text that goes on may still be better than those that ended, [B, 1]
    length: Tensor  # tokens of the texts that go on, []

    @classmethod
    def begin(cls, sources: int, beams: int, search: Search, device: torch.device) -> Beams:
        """The state after a start token, which is padding: there may be fewer sources than there is room for."""
        ids = torch.empty(sources, beams, search.max_length, dtype=torch.long, device=device)        # [B, K, L]
        scores = torch.empty(sources, beams, device=device)              # [B, K]
        made = cls(
            ids, scores, ids.clone(), scores.clone(), torch.empty_like(scores, dtype=torch.bool),
            torch.empty(sources, 1, dtype=torch.bool, device=device), torch.empty((), dtype=torch.long, device=device),
        )
        made.restart(search, torch.full_like(ids[:, 0, 0], search.pad))
        return made

    def restart(self, search: Search, starts: Tensor) -> None:
        """Become the state after the start token of each source, [B], in place."""
        self.ids.fill_(search.pad or (search.ends[0] if search.ends else 0))
        self.ids[:, :, 0] = starts.unsqueeze(-1)
        self.ended_ids.copy_(self.ids)
        self.scores.fill_(NEVER)
        self.scores[:, 0] = 0.0   # all beams are equal at first, so only one counts
        self.ended_scores.fill_(NEVER)
        self.has_ended.fill_(False)
        self.can_improve.fill_(True)
        self.length.fill_(1)

    def take(self, other: Beams, sources: Tensor) -> None:
        """Become the state of these sources of another search, [n]. What there is room for besides stays as it is."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            if mine.dim():
                mine[: len(sources)].copy_(theirs.index_select(0, sources))
            else:
                mine.copy_(theirs)

    @property
    def newest(self) -> Tensor:
        """The last token of each text that goes on, [B, K]."""
        return self.ids.index_select(-1, (self.length - 1).view(1)).squeeze(-1)


def is_done(beams: Beams, search: Search) -> Tensor:
    """Which sources are done: their texts will not change, [B]."""
    done = ~beams.can_improve.squeeze(-1) | (beams.length >= search.max_length)
    return done | beams.has_ended.all(-1) if search.early_stopping is True else done


def write_on(beams: Beams, tokens: Tensor, given: Limits) -> None:
    """Add a token to each text, [B, K]. Beams are texts of their own: greedy search, or samples."""
    for token, is_here in forced(beams.length, given.search):
        tokens = tokens.masked_fill(is_here, token)
    tokens = tokens.where(~beams.has_ended, given.search.pad)            # [B, K]
    here = torch.arange(beams.ids.shape[-1], device=tokens.device) == beams.length   # [L]
    beams.ids.copy_(tokens.unsqueeze(-1).where(here, beams.ids))
    beams.length += 1
    beams.has_ended |= torch.isin(tokens, given.ends) | (beams.length >= given.search.max_length)
    beams.can_improve.copy_(~beams.has_ended.all(-1, keepdim=True))


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row: logits [N, V] → [N]."""
    return _top(logits, 1)[1].squeeze(-1)


def advance(beams: Beams, logits: Tensor, given: Limits, *, less: Tensor | None = None) -> Tensor:
    """Add a token to each beam by logits [B, K, V], both in place; the beam that each new one continues, [B, K]."""
    search, K = given.search, logits.shape[1]
    kept = max(2, 1 + len(search.ends)) * K                              # enough to go on if K of them end
    found = options(logits, beams.ids, beams.length, given, count=kept, less=less)   # [B, K, C] each
    best, index = (found.logp + beams.scores.unsqueeze(-1)).flatten(1).topk(kept)    # [B, 2 · K] each
    parents, tokens = index // found.logp.shape[2], found.tokens.flatten(1).gather(1, index)   # [B, 2 · K] each
    here = torch.arange(beams.ids.shape[-1], device=logits.device) == beams.length   # [L]
    ids = tokens.unsqueeze(-1).where(here, _rows(beams.ids, parents))    # [B, 2 · K, L]
    stops = torch.isin(tokens, given.ends)                               # [B, 2 · K]
    scores = best + stops.float() * NEVER                                # [B, 2 · K]
    chosen = scores.topk(K)[1]                                           # [B, K]
    _add_ended(beams, ids, best, stops | (beams.length + 1 >= search.max_length), given)
    beams.ids.copy_(_rows(ids, chosen))
    beams.scores.copy_(scores.gather(1, chosen))
    beams.length += 1
    _look_ahead(beams, given)
    return parents.gather(1, chosen)


def advance_groups(groups: Sequence[Beams], logits: Tensor, given: Limits) -> Tensor:
    """Add a token to each beam of each group, in place, by logits [B, K, V]; the beam that each continues, [B, K].

    A token loses ``diversity`` for each beam of the groups before that has just taken it: Vijayakumar et al. (2018),
    *Diverse Beam Search*. A group that is done goes on, and its tokens still count.
    """
    if has_kernels(logits.device) and (len(groups) == 1 or not given.search.renormalize):
        from ngramloss.search.kernels import selection

        return selection.advance_groups(groups, logits, given)
    parents: list[Tensor] = []
    taken: list[Tensor] = []
    first = 0
    logits = logits.float() if len(groups) > 1 else logits   # a small diversity would be rounded away
    for group in groups:
        count = group.scores.shape[1]
        less = torch.cat(taken, 1) if taken else None                    # [B, first]
        parents.append(advance(group, logits[:, first : first + count], given, less=less) + first)   # [B, K/G]
        taken.append(group.newest)
        first += count
    return torch.cat(parents, 1)


def best_ended(groups: Sequence[Beams], texts: int) -> tuple[Tensor, Tensor]:
    """The best texts that ended in any group, [B, texts, L], and their scores, [B, texts]."""
    scores = torch.cat([group.ended_scores for group in groups], 1)      # [B, K]
    best, chosen = scores.topk(texts)                                    # [B, texts] each
    return _rows(torch.cat([group.ended_ids for group in groups], 1), chosen), best


def _add_ended(beams: Beams, ids: Tensor, best: Tensor, ends: Tensor, given: Limits) -> None:
    """Keep the K best of the texts that ended before and those that end now, if they are among the K most probable."""
    K, search = beams.scores.shape[1], given.search
    ends = ends & (torch.arange(ends.shape[1], device=ends.device) < K)  # [B, C]
    scores = best / given.penalties.index_select(0, beams.length.view(1))   # [B, C]
    if search.early_stopping is True:
        scores = scores + beams.has_ended.all(-1, keepdim=True).float() * NEVER
    scores = scores + (~beams.can_improve).float() * NEVER
    scores = scores + (~ends).float() * NEVER
    every = torch.cat([beams.ended_scores, scores], 1)                   # [B, K + C]
    chosen = every.topk(K)[1]                                            # [B, K]
    beams.ended_ids.copy_(_rows(torch.cat([beams.ended_ids, ids], 1), chosen))
    beams.has_ended.copy_(torch.cat([beams.has_ended, ends], 1).gather(1, chosen))
    beams.ended_scores.copy_(every.gather(1, chosen))


def _look_ahead(beams: Beams, given: Limits) -> None:
    """Decide whether the most probable text that goes on may become better than the worst that ended."""
    search = given.search
    at_most = search.early_stopping == "never" and search.length_penalty > 0
    length = torch.full_like(beams.length, search.max_length - 1) if at_most else beams.length - 1   # []
    reachable = beams.scores[:, :1] / given.penalties.index_select(0, length.view(1))   # [B, 1]
    worst = beams.ended_scores.amin(1, keepdim=True).where(beams.has_ended, NEVER)      # [B, K]
    beams.can_improve &= (reachable > worst).any(-1, keepdim=True)


def _rows(ids: Tensor, chosen: Tensor) -> Tensor:
    """The chosen texts of each source: ids [B, K, L] and numbers [B, C] → [B, C, L]."""
    return ids.gather(1, chosen.unsqueeze(-1).expand(-1, -1, ids.shape[-1]))
