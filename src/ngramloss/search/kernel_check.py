"""the settings of a search, and a GPU → whether its kernels choose the tokens that PyTorch's operations choose.

A kernel that is wrong on a new GPU or compiler would write other texts without an error. So a short search over random
logits runs on both before the first text is written; it takes less than a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ngramloss.search.beams import NEVER, Beams, Limits, advance_groups, greedy, has_kernels, limits, rule_out
from ngramloss.search.sampling import sampled
from ngramloss.search.search import Search

SOURCES, TOKENS = 2, 6  # of the search that is compared
MOST = 2**24  # logits of a token, above which only two tokens are compared: drawing more would take seconds
Advance = Callable[[Sequence[Beams], Tensor, Limits], Tensor]


def kernels_agree(search: Search, vocabulary: int, device: torch.device, *, advance: Advance = advance_groups) -> bool:
    """Whether the kernels, by ``advance``, choose what PyTorch's operations choose."""
    generator = torch.Generator().manual_seed(0)
    places = torch.device("cpu"), device
    rules = [limits(search, place) for place in places]
    if search.sample or search.num_beams == 1:
        return _best_agree(search, vocabulary, rules, places, generator)
    each = search.num_beams // search.groups
    groups = [[Beams.begin(SOURCES, each, search, place) for _ in range(search.groups)] for place in places]
    tokens = TOKENS if SOURCES * search.num_beams * vocabulary <= MOST else 2
    for _ in range(min(tokens, search.max_length - 1)):
        logits = _logits(generator, SOURCES, search.num_beams, vocabulary, ends=search.ends)  # [B, K, V]
        advance_groups(groups[0], logits.clone(), rules[0])
        advance(groups[1], logits.to(device, copy=True), rules[1])
        if not all(map(_alike, *groups)):
            return False
    return True


def _best_agree(
    search: Search, vocabulary: int, rules: Sequence[Limits], places: Sequence[torch.device], generator: torch.Generator
) -> bool:
    """The same for texts that go on alone: what is ruled out, and the token that is drawn or most probable."""
    length = min(TOKENS, search.max_length - 1)
    ids = torch.randint(3, (SOURCES, search.max_length), generator=generator)  # [B, L]: n-grams repeat
    logits = _logits(generator, SOURCES, vocabulary, ends=search.ends)  # [B, V]
    seeds = torch.randint(-(2**63), 2**63 - 1, (SOURCES,), generator=generator)  # [B]
    found = []
    for place, given in zip(places, rules, strict=True):
        rows = logits.to(place, copy=True)
        here = torch.tensor(length, device=place)
        rule_out(rows, ids.to(place), here, given)
        if search.sample:
            chosen = sampled(rows, seeds.to(place), here, search, has_kernels=has_kernels(place))  # [B]
        else:
            chosen = greedy(rows)  # [B]
        found.append((rows.cpu(), chosen.cpu()))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _logits(generator: torch.Generator, *shape: int, ends: Sequence[int]) -> Tensor:
    logits = 3 * torch.randn(*shape, generator=generator)
    logits[..., list(ends)] += 6
    return logits


def _alike(one: Beams, other: Beams) -> bool:
    """Whether two states are the same but for rounding. Beams that do not count, and ties among them, may differ."""
    for texts, scores in (("ids", "scores"), ("ended_ids", "ended_scores")):
        values, theirs = getattr(one, scores).cpu(), getattr(other, scores).cpu()  # [B, K] each
        counts = values > NEVER / 2  # [B, K]
        if not torch.equal(counts, theirs > NEVER / 2):
            return False
        ids = [getattr(each, texts).cpu()[counts] for each in (one, other)]  # [texts, L] each
        if not torch.equal(*ids) or not torch.allclose(values[counts], theirs[counts], atol=1e-3):
            return False
    return torch.equal(one.can_improve.cpu(), other.can_improve.cpu())
