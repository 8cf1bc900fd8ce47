"""log-probabilities of the next tokens → the beams of a search, one token longer, all in tensors.

The search is that of Hugging Face's ``generate``, score for score. It never asks the device for a value: the length is
a tensor, every tensor keeps its shape, and results are written in place. So one token can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ngramloss.generation.engines.settings import Search

NEVER = -1e9
"""A score below all others, as in ``generate``."""


class Limits(NamedTuple):
    """The settings of a search that depend on the length, as tensors on its device.

    Attributes:
        search: the settings.
        penalties: a text's score is its log-probability divided by this, by its tokens after the start token, [L + 1].
        ends: the end tokens, [ends].
        banned: 0, or −∞ for tokens that are never written, [V].
        before_end: 0, or −∞ for end tokens, [V].
        first, last: 0 for the forced token, −∞ for others, [V]; None if no token is forced.
    """

    search: Search
    penalties: Tensor
    ends: Tensor
    banned: Tensor | None
    before_end: Tensor
    first: Tensor | None
    last: Tensor | None


def limits(search: Search, vocabulary: int, device: torch.device) -> Limits:
    """Make the tensors of a search."""

    def only(token: int | None) -> Tensor | None:
        return None if token is None else _at([token], vocabulary, device, inside=0.0, outside=-torch.inf)

    lengths = range(search.max_length + 1)
    penalties = [float(max(length, 1)) ** search.length_penalty for length in lengths]
    return Limits(
        search, torch.tensor(penalties, device=device), torch.tensor(search.ends, device=device),
        _at(search.banned, vocabulary, device, inside=-torch.inf, outside=0.0) if search.banned else None,
        _at(search.ends, vocabulary, device, inside=-torch.inf, outside=0.0), only(search.first), only(search.last),
    )  # fmt: skip


def _at(
    tokens: Sequence[int], vocabulary: int, device: torch.device, *, inside: float, outside: float
) -> Tensor:
    """One number for some tokens, another for all others, [V]."""
    row = torch.full((vocabulary,), outside, device=device)              # [V]
    row[list(tokens)] = inside
    return row


def allowed(scores: Tensor, ids: Tensor, length: Tensor, given: Limits) -> Tensor:
    """The scores with −∞ for tokens that may not follow, in the order in which ``generate`` rules them out, [N, V].

    Args:
        scores: of the next tokens, [N, V].
        ids: the texts so far, [N, L].
        length: how many tokens of each count, [].
        given: the rules.
    """
    search = given.search
    if search.no_repeat_ngram_size:
        scores = _without_repeats(scores, ids, length, search.no_repeat_ngram_size)
    if given.banned is not None:
        scores = scores + given.banned
    if search.min_length > 1:
        scores = scores + given.before_end.where(length < search.min_length, 0.0)
    for forced, at in ((given.first, 1), (given.last, search.max_length - 1)):
        if forced is not None:
            scores = torch.where(length == at, forced, scores)
    return scores.log_softmax(-1) if search.renormalize else scores


def _without_repeats(scores: Tensor, ids: Tensor, length: Tensor, n: int) -> Tensor:
    """Rule out the tokens that would repeat an n-gram of a text."""
    if n > ids.shape[1]:
        return scores
    offsets = torch.arange(n - 1, device=ids.device)                     # [n - 1]
    newest = ids.index_select(1, (length - (n - 1) + offsets).clamp_min(0))      # [N, n - 1]
    windows = ids.unfold(1, n, 1)                                        # [N, W, n]
    starts = torch.arange(windows.shape[1], device=ids.device)           # [W]
    same = (windows[..., :-1] == newest[:, None]).all(-1) & (starts + n <= length)   # [N, W]
    lost = torch.zeros_like(same, dtype=scores.dtype).masked_fill(same, -torch.inf)      # [N, W]
    return scores.scatter_add(1, windows[..., -1], lost)


def sampled(scores: Tensor, seeds: Tensor, length: Tensor, search: Search) -> Tensor:
    """Scores whose largest entry is a sample of the next token, [N, V].

    The token with the largest sum of log-probability and Gumbel noise is a sample. The noise is a function of the seed,
    the length and the token, so a text does not depend on its batch or its device.

    Args:
        scores: that :func:`allowed` returned, [N, V].
        seeds: of each text, [N].
        length: tokens so far, [].
        search: temperature, top_k and top_p.
    """
    scores = scores / search.temperature
    if 0 < search.top_k < scores.shape[-1]:
        least = scores.topk(search.top_k)[0][:, -1:]                     # [N, 1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if search.top_p < 1:
        ascending, order = scores.sort(-1)                               # [N, V] each
        out = ascending.softmax(-1).cumsum(-1) <= 1 - search.top_p       # [N, V]
        out[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
    return scores + _gumbel(seeds, length, scores.shape[-1]).to(scores)


def _gumbel(seeds: Tensor, length: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise, [N, V]."""
    tokens = torch.arange(vocabulary, device=seeds.device)               # [V]
    mixed = _mixed(_mixed(seeds.unsqueeze(-1) + 0x632BE59BD9B4E019 * length) + 0x1F123BB5159A55E5 * tokens)   # [N, V]
    uniform = ((mixed >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)         # [N, V]
    return -(-uniform.log()).log()


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits, well mixed: the last steps of SplitMix64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * factor
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


@dataclass
class Beams:
    """The state of a search over B sources with K beams each."""

    ids: Tensor
    """Texts that go on, [B, K, L]."""
    scores: Tensor
    """Their log-probabilities, [B, K]."""
    ended_ids: Tensor
    """The best texts that ended, best first, [B, K, L]."""
    ended_scores: Tensor
    """Their log-probabilities by length, [B, K]."""
    has_ended: Tensor
    """Whether there is such a text, [B, K]."""
    can_improve: Tensor
    """Whether a text that goes on may still be better than those that ended, [B, 1]."""
    length: Tensor
    """Tokens of the texts that go on, []."""

    @classmethod
    def begin(cls, sources: int, beams: int, search: Search, device: torch.device) -> Beams:
        """The state after the start token."""
        ids = torch.empty(sources, beams, search.max_length, dtype=torch.long, device=device)        # [B, K, L]
        scores = torch.empty(sources, beams, device=device)              # [B, K]
        made = cls(
            ids, scores, ids.clone(), scores.clone(), torch.empty_like(scores, dtype=torch.bool),
            torch.empty(sources, 1, dtype=torch.bool, device=device), torch.empty((), dtype=torch.long, device=device),
        )  # fmt: skip
        made.restart(search)
        return made

    def restart(self, search: Search) -> None:
        """Go back to the state after the start token, in place."""
        self.ids.fill_(search.pad or (search.ends[0] if search.ends else 0))
        self.ids[:, :, 0] = search.start
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


def write_on(beams: Beams, scores: Tensor, given: Limits) -> None:
    """Add to each text its token with the largest score: greedy search, or a sample. Beams are texts of their own.

    Args:
        beams: the state; changed in place.
        scores: of the next tokens, [B, K, V].
        given: the rules.
    """
    tokens = scores.argmax(-1).where(~beams.has_ended, given.search.pad)         # [B, K]
    here = torch.arange(beams.ids.shape[-1], device=scores.device) == beams.length   # [L]
    beams.ids.copy_(tokens.unsqueeze(-1).where(here, beams.ids))
    beams.length += 1
    beams.has_ended |= torch.isin(tokens, given.ends) | (beams.length >= given.search.max_length)
    beams.can_improve.copy_(~beams.has_ended.all(-1, keepdim=True))


def advance(beams: Beams, logp: Tensor, given: Limits) -> Tensor:
    """Add a token to each beam. Returns the beam that each of the new ones continues, [B, K].

    Args:
        beams: the state; changed in place.
        logp: log-probabilities of the next token that :func:`allowed` returned, [B, K, V].
        given: the rules.
    """
    search = given.search
    _, K, V = logp.shape
    kept = max(2, 1 + len(search.ends)) * K                              # enough to go on if K of them end
    best, index = (logp + beams.scores.unsqueeze(-1)).flatten(1).topk(kept)      # [B, C] each
    parents, tokens = index // V, index % V                              # [B, C] each
    here = torch.arange(beams.ids.shape[-1], device=logp.device) == beams.length   # [L]
    ids = tokens.unsqueeze(-1).where(here, _rows(beams.ids, parents))    # [B, C, L]
    stops = torch.isin(tokens, given.ends)                               # [B, C]
    scores = best + stops.float() * NEVER                                # [B, C]
    chosen = scores.topk(K)[1]                                           # [B, K]
    _add_ended(beams, ids, best, stops | (beams.length + 1 >= search.max_length), given)
    beams.ids.copy_(_rows(ids, chosen))
    beams.scores.copy_(scores.gather(1, chosen))
    beams.length += 1
    _look_ahead(beams, given)
    return parents.gather(1, chosen)


def advance_groups(groups: Sequence[Beams], logp: Tensor, given: Limits) -> Tensor:
    """Add a token to each beam of each group, one group after another.

    A group is a search of its own. A token loses ``diversity`` of its log-probability for each beam of the groups
    before that has just taken it: Vijayakumar et al. (2018), *Diverse Beam Search*. One group is plain beam search.

    Args:
        groups: the states of G groups; changed in place.
        logp: log-probabilities of the next token, before any rule, [B, K, V], with K/G beams of each group in turn.
        given: the rules.

    Returns:
        The beam that each of the new ones continues, [B, K].
    """
    parents, first = [], 0
    taken = logp.new_zeros(logp.shape[0], logp.shape[-1])                # [B, V]
    for number, group in enumerate(groups):
        count = group.scores.shape[1]
        own = logp[:, first : first + count]                             # [B, K/G, V]
        if number:
            own = own - given.search.diversity * taken.unsqueeze(1)
        own = allowed(own.flatten(0, 1), group.ids.flatten(0, 1), group.length, given).view_as(own)
        parents.append(advance(group, own, given) + first)               # [B, K/G]
        taken.scatter_add_(1, group.newest, torch.ones_like(group.scores))
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
