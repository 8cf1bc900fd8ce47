"""logits of the next tokens → the best of each row, ties by beam and token, and the beams: ``search/beams.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ngramloss.search.beams import Beams, Limits

BLOCK, SPAN = 4096, 64
"""Logits that one program reads in the sweep over the vocabulary, and those of which it keeps only the largest."""
NOISY = 1024  # logits of which one program draws the noise: each takes two logarithms in fp64
LOWEST = tl.constexpr(-(2**63))  # the key of what is not there


class Sweep:
    """What one sweep over logits, [N, V], leaves: enough to find the best tokens without another one."""

    def __init__(self, logits: Tensor) -> None:
        N, V = logits.shape
        self.logits, self.blocks = logits, triton.cdiv(V, BLOCK)
        # With a mask that ends at any number, logits would be loaded one by one.
        end, room = logits.storage_offset() + (N - 1) * logits.stride(0), -(-V // 16) * 16
        room = room if (end + room) * logits.element_size() <= logits.untyped_storage().nbytes() else V
        self.maxima = torch.empty(N, self.blocks * BLOCK // SPAN, device=logits.device)      # [N, spans]
        self.sums = torch.empty(N, self.blocks, device=logits.device)    # [N, blocks]
        _sweep[(N, self.blocks)](
            logits, self.maxima, self.sums, logits.stride(0), V, room, self.blocks, BLOCK=BLOCK, SPAN=SPAN, num_warps=4
        )

    def top(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The largest logits and tokens, best first, [N, count] each, and the log-sum-exp of the sweep, [N]."""
        (N, V), spans, device = self.logits.shape, self.maxima.shape[1], self.logits.device
        values = torch.empty(N, count, device=device)                    # [N, count]
        tokens = torch.empty(N, count, dtype=torch.long, device=device)  # [N, count]
        totals = torch.empty(N, device=device)                           # [N]
        wide, many = triton.next_power_of_2(spans), triton.next_power_of_2(max(count, 1))
        _best[(N,)](
            self.logits, self.maxima, self.sums, values, tokens, totals, self.logits.stride(0), V, spans, self.blocks,
            count, SPANS=wide, BLOCKS=triton.next_power_of_2(self.blocks), COUNT=many, SPAN=SPAN,
            num_warps=min(max(1, max(wide, many * SPAN) // 512), 8),
        )
        return values, tokens, totals


@triton.jit
def _key(value, index):
    """A number that is larger if the value is, and among equal values if the index is smaller."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) + (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _largest(keys, count, COUNT: tl.constexpr):
    """The largest keys in descending order, [COUNT], of which ``count`` are there."""
    slot = tl.arange(0, COUNT)
    largest = tl.full([COUNT], LOWEST, tl.int64)
    for number in range(count):
        best = tl.max(keys, 0)
        largest = tl.where(slot == number, best, largest)
        keys = tl.where(keys == best, LOWEST, keys)
    return largest


@triton.jit
def _sweep(logits, maxima, sums, stride, V, room, blocks, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    span = block * (BLOCK // SPAN) + tl.arange(0, BLOCK // SPAN)
    token = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    left = tl.load(logits + row * stride + token, mask=token < room, other=float("-inf")).to(tl.float32)
    left = tl.where(token < V, left, float("-inf"))
    largest = tl.max(left, 1)
    tl.store(maxima + row * blocks * (BLOCK // SPAN) + span, largest)
    highest = tl.max(largest, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)   # every token may be ruled out
    tl.store(sums + row * blocks + block, shift + tl.log(tl.sum(tl.sum(tl.exp(left - shift), 1), 0)))


@triton.jit
def _best(
    logits, maxima, sums, values, tokens, totals, stride, V, spans, blocks, count, SPANS: tl.constexpr,
    BLOCKS: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    part = tl.load(sums + row * blocks + block, mask=block < blocks, other=float("-inf"))
    highest = tl.max(part, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(totals + row, shift + tl.log(tl.sum(tl.exp(part - shift), 0)))
    span = tl.arange(0, SPANS)
    largest = tl.load(maxima + row * spans + span, mask=span < spans, other=float("-inf"))
    chosen = _index(_largest(_key(largest, span), tl.minimum(count, spans), COUNT))   # the best are in these spans
    slot = tl.arange(0, COUNT)
    token = chosen[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    real = (slot < tl.minimum(count, spans))[:, None] & (token < V)
    left = tl.load(logits + row * stride + token, mask=real, other=float("-inf")).to(tl.float32)
    keys = tl.where(real, _key(left, token), LOWEST)
    best = _largest(tl.reshape(keys, [COUNT * SPAN]), count, COUNT)
    tl.store(values + row * count + slot, _value(best), mask=slot < count)
    tl.store(tokens + row * count + slot, _index(best), mask=slot < count)


def sample(logits: Tensor, seeds: Tensor, length: Tensor, *, temperature: float) -> Tensor:
    """A sample for each text, [N], of logits, [N, V], as :func:`ngramloss.search.sampling.sampled` without limits."""
    (N, V), blocks = logits.shape, triton.cdiv(logits.shape[1], NOISY)
    best = torch.empty(N, blocks, dtype=torch.long, device=logits.device)    # [N, blocks]
    _sample[(N, blocks)](
        logits, seeds, length, best, logits.stride(0), V, blocks, temperature, BLOCK=NOISY, num_warps=4,
        sanitize_overflow=False,
    )
    return 0x7FFFFFFF - (best.amax(-1) & 0x7FFFFFFF)                     # the index in a key


@triton.jit
def _mixed(number):
    """64 bits, well mixed, as in search/sampling.py."""
    number = (number ^ ((number >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    number = (number ^ ((number >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return number ^ ((number >> 31) & 0x1FFFFFFFF)


@triton.jit
def _sample(logits, seeds, length, best, stride, V, blocks, temperature, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    text = _mixed(tl.load(seeds + row) + 0x632BE59BD9B4E019 * tl.load(length).to(tl.int64))
    mixed = _mixed(text + 0x1F123BB5159A55E5 * token.to(tl.int64))
    uniform = (((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)   # 2⁵³
    noise = -tl.log(-tl.log(uniform))
    found = _key(tl.div_rn(score, temperature) + noise.to(tl.float32), token)
    tl.store(best + row * blocks + block, tl.max(tl.where(token < V, found, LOWEST), 0))


def rule_out(logits: Tensor, ids: Tensor, length: Tensor, given: Limits, *, sweep: Sweep | None = None) -> None:
    """As :func:`ngramloss.search.beams.rule_out`; a ``sweep`` over these logits is kept up to date but for sums."""
    search, (N, V) = given.search, logits.shape
    if not search.limits_tokens:
        return
    _rule_out[(N,)](
        logits, logits if sweep is None else sweep.maxima, ids, length, given.banned, given.ends, logits.stride(0),
        ids.stride(0), V, 0 if sweep is None else sweep.maxima.shape[1], given.before, len(search.banned),
        len(search.ends), search.min_length, N_GRAM=search.no_repeat_ngram_size, HAS_MAXIMA=sweep is not None, MANY=32,
        SPAN=SPAN, num_warps=4,
    )


@triton.jit
def _rule_out(
    logits, maxima, ids, length, banned, ends, stride, id_stride, V, spans, before, bans, end_count, min_length,
    N_GRAM: tl.constexpr, HAS_MAXIMA: tl.constexpr, MANY: tl.constexpr, SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    here = tl.load(length)
    logits += row * stride
    maxima += row * spans
    if N_GRAM > 0:
        text = ids + row * id_stride + before
        for first in range(0, here - before - N_GRAM + 1, MANY):
            start = first + tl.arange(0, MANY)
            same = start + N_GRAM <= here - before
            token = tl.load(text + start + N_GRAM - 1, mask=same, other=0)
            for offset in range(N_GRAM - 1):
                newest = tl.load(text + here - before - N_GRAM + 1 + offset)
                same = same & (tl.load(text + start + offset, mask=same, other=0) == newest)
            _lose(logits, maxima, token, same, V, HAS_MAXIMA, SPAN)
    for first in range(0, bans, MANY):
        number = first + tl.arange(0, MANY)
        token = tl.load(banned + number, mask=number < bans, other=0)
        _lose(logits, maxima, token, number < bans, V, HAS_MAXIMA, SPAN)
    if here < min_length:
        for first in range(0, end_count, MANY):
            number = first + tl.arange(0, MANY)
            token = tl.load(ends + number, mask=number < end_count, other=0)
            _lose(logits, maxima, token, number < end_count, V, HAS_MAXIMA, SPAN)


@triton.jit
def _lose(logits, maxima, token, lost, V, HAS_MAXIMA: tl.constexpr, SPAN: tl.constexpr):
    """Set the logits of these tokens to −∞, and the maxima of their spans to what is left."""
    tl.store(logits + token, float("-inf"), mask=lost)
    if HAS_MAXIMA:
        tl.debug_barrier()   # other threads of the program read what was stored
        span = token // SPAN
        others = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        left = tl.load(logits + others, mask=lost[:, None] & (others < V), other=float("-inf")).to(tl.float32)
        tl.store(maxima + span, tl.max(left, 1), mask=lost)
        tl.debug_barrier()


def advance_groups(groups: Sequence[Beams], logits: Tensor, given: Limits) -> Tensor:
    """As :func:`ngramloss.search.beams.advance_groups`; with ``renormalize`` one group: others change its sums."""
    (B, K, _), search = logits.shape, given.search
    rows, length, ids = logits.flatten(0, 1), groups[0].length, groups[0].ids    # [B · K, V], [], [B, K/G, L]
    if len(groups) > 1 and search.limits_tokens:
        ids = torch.cat([group.ids for group in groups], 1)              # [B, K, L]
    ids = ids.flatten(0, 1)                                              # [B · K, L]
    if search.renormalize:
        rule_out(rows, ids, length, given)
    sweep = Sweep(rows)
    if not search.renormalize:
        rule_out(rows, ids, length, given, sweep=sweep)
    count = K // len(groups)
    kept = max(2, 1 + len(search.ends)) * count
    # A token that is not among this many can only be overtaken by those that earlier groups took.
    found = [each.view(B, K, -1) for each in sweep.top(min(kept + K - count, rows.shape[1]))]
    parents, taken = (torch.empty(B, K, dtype=torch.long, device=logits.device) for _ in range(2))
    for number, group in enumerate(groups):
        _launch_advance(group, found, parents, taken, number * count, kept, given)
    torch._foreach_add_([group.length for group in groups], 1)
    return parents


def _launch_advance(
    beams: Beams, found: list[Tensor], parents: Tensor, taken: Tensor, first: int, kept: int, given: Limits
) -> None:
    search, (B, K, C), (_, count, L) = given.search, found[0].shape, beams.ids.shape
    at_most = search.early_stopping == "never" and search.length_penalty > 0
    many = triton.next_power_of_2(count * C)
    _advance[(B,)](
        *found, *vars(beams).values(), given.penalties, given.ends, parents, taken, first, K, C, count, kept, L,
        len(search.ends), search.diversity, search.max_length,
        -1 if search.first is None else search.first, -1 if search.last is None else search.last,
        EARLY=search.early_stopping is True, AT_MOST=at_most, FOUND=many, KEPT=triton.next_power_of_2(kept),
        BEAMS=triton.next_power_of_2(count), TOKENS=32, num_warps=min(max(1, many // 256), 8),
    )


@triton.jit
def _picked(vector, chosen, slot):
    """``vector[chosen]``, of what the program has in its registers: [C] and [K] → [K]."""
    return tl.sum(tl.where(chosen[:, None] == slot[None, :], vector[None, :], 0), 1)


@triton.jit
def _advance(
    values, tokens, totals, ids, scores, ended_ids, ended_scores, has_ended, can_improve, length, penalties, ends,
    parents, taken, first, K, C, count, kept, L, end_count, diversity, max_length, first_token, last_token,
    EARLY: tl.constexpr, AT_MOST: tl.constexpr, FOUND: tl.constexpr, KEPT: tl.constexpr, BEAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    NEVER: tl.constexpr = -1e9
    source = tl.program_id(0).to(tl.int64)
    here = tl.load(length)
    forced = tl.where(here == 1, first_token, -1)
    forced = tl.where((here == max_length - 1) & (last_token >= 0), last_token, forced)

    # The best continuations of all beams: [FOUND] → [KEPT].
    place = tl.arange(0, FOUND)
    real = place < count * C
    rows = source * K + first   # the first of this group
    value = tl.load(values + rows * C + place, mask=real, other=float("-inf"))
    token = tl.load(tokens + rows * C + place, mask=real, other=0)
    for number in range(first):
        value = tl.where(token == tl.load(taken + source * K + number), value - diversity, value)
    logp = value - tl.load(totals + rows + place // C, mask=real, other=0.0)
    logp = tl.where(value > float("-inf"), logp, float("-inf"))
    logp = tl.where(forced < 0, logp, tl.where(place % C == 0, 0.0, float("-inf")))
    score = logp + tl.load(scores + source * count + place // C, mask=real, other=0.0)
    best = _largest(tl.where(real, _key(score, place), LOWEST), kept, KEPT)
    slot = tl.arange(0, KEPT)
    is_kept = slot < kept
    place = tl.where(is_kept, _index(best), 0)
    score = tl.where(is_kept, _value(best), float("-inf"))
    parent = place // C
    token = tl.load(tokens + rows * C + place)
    token = tl.where(forced < 0, token, forced)
    stops = token < 0
    for number in range(end_count):
        stops = stops | (token == tl.load(ends + number))

    # The beams that go on: [BEAMS].
    going = score + tl.where(stops, NEVER, 0.0)
    chosen = _largest(tl.where(is_kept, _key(going, slot), LOWEST), count, BEAMS)
    beam = tl.arange(0, BEAMS)
    is_beam = beam < count
    going = _value(chosen)
    went_on = _index(chosen)
    new_parent = _picked(parent, went_on, slot)
    new_token = _picked(token, went_on, slot)

    # The best texts that ended, before or now: [BEAMS].
    old_scores = tl.load(ended_scores + source * count + beam, mask=is_beam, other=NEVER)
    had_ended = tl.load(has_ended + source * count + beam, mask=is_beam, other=1).to(tl.int32)
    could_improve = tl.load(can_improve + source).to(tl.int32)
    end = (stops | (here + 1 >= max_length)) & (slot < count)
    ended = tl.div_rn(score, tl.load(penalties + here))
    if EARLY:
        ended += tl.where(tl.min(had_ended, 0) > 0, NEVER, 0.0)
    ended += tl.where(could_improve > 0, 0.0, NEVER)
    ended += tl.where(end, 0.0, NEVER)
    old_keys = tl.where(is_beam, _key(old_scores, beam), LOWEST)
    new_keys = tl.where(is_kept, _key(ended, count + slot), LOWEST)
    chosen = tl.full([BEAMS], LOWEST, tl.int64)
    for number in range(count):
        largest = tl.maximum(tl.max(old_keys, 0), tl.max(new_keys, 0))
        chosen = tl.where(beam == number, largest, chosen)
        old_keys = tl.where(old_keys == largest, LOWEST, old_keys)
        new_keys = tl.where(new_keys == largest, LOWEST, new_keys)
    ended = _value(chosen)
    place = _index(chosen)
    is_old = is_beam & (place < count)
    is_new = is_beam & (place >= count)
    ended_parent = _picked(parent, place - count, slot)
    ended_token = _picked(token, place - count, slot)
    was_old = tl.load(has_ended + source * count + place, mask=is_old, other=0).to(tl.int32)
    has = tl.where(is_old, was_old, _picked(end.to(tl.int32), place - count, slot))

    # Whether the most probable text that goes on may become better than the worst that ended.
    most = tl.load(penalties + (max_length - 1 if AT_MOST else here))
    reachable = tl.div_rn(tl.max(tl.where(beam == 0, going, float("-inf")), 0), most)
    worst = tl.min(tl.where(is_beam, ended, float("inf")), 0)
    better = is_beam & (reachable > tl.where(has > 0, worst, NEVER))
    could_improve = could_improve & tl.max(better.to(tl.int32), 0)

    # All is read before anything is written: other threads of the program read the same places.
    for start in range(0, here + 1, TOKENS):
        at = start + tl.arange(0, TOKENS)[None, :]
        inside = at <= here
        text = tl.load(ids + (source * count + new_parent)[:, None] * L + at, mask=is_beam[:, None] & inside, other=0)
        kept_text = tl.load(ended_ids + (source * count + place)[:, None] * L + at, mask=is_old[:, None] & inside)
        new_text = tl.load(ids + (source * count + ended_parent)[:, None] * L + at, mask=is_new[:, None] & inside)
        text = tl.where(at == here, new_token[:, None], text)
        new_text = tl.where(at == here, ended_token[:, None], new_text)
        tl.debug_barrier()
        own = (source * count + beam)[:, None] * L + at
        tl.store(ids + own, text, mask=is_beam[:, None] & inside)
        tl.store(ended_ids + own, tl.where(is_old[:, None], kept_text, new_text), mask=is_beam[:, None] & inside)
    tl.store(scores + source * count + beam, going, mask=is_beam)
    tl.store(ended_scores + source * count + beam, ended, mask=is_beam)
    tl.store(has_ended + source * count + beam, has.to(tl.int1), mask=is_beam)
    tl.store(can_improve + source, could_improve.to(tl.int1))
    tl.store(parents + rows + beam, new_parent + first, mask=is_beam)
    tl.store(taken + rows + beam, new_token, mask=is_beam)
