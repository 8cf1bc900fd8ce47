"""a block of logits → running statistics, or its gradient, in one deterministic Triton kernel each: rows in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ngramloss.loss.stats.head import Block, Running, Slopes, Taught
from ngramloss.loss.stats.labels import IGNORE_INDEX
from ngramloss.loss.stats.pairs import FARTHEST, Pairs
from ngramloss.loss.stats.teachers import Compared
from ngramloss.loss.stats.token_stats import FAR_BELOW, TextIds

IGNORE = tl.constexpr(IGNORE_INDEX)
FAR = tl.constexpr(FAR_BELOW)
MOST_APART = tl.constexpr(FARTHEST)
CLOSE = tl.constexpr(0.25)  # below this difference of two log-probabilities, eˣ − 1 − x is a polynomial
LOG2_E = tl.constexpr(1.4426950408889634)
"""exp2 of x times this is eˣ. On a GPU it takes a third of the operations that exp takes."""
WIDE = tl.constexpr(8)  # number of logits that a thread loads at once: 16 bytes of bf16
ABSORB, DIFFERENTIATE = (128, 4), (1024, 4)  # number of lanes or columns of a program, and of its warps


def absorb(block: Block, labels: Tensor, running: Running, pairs: Pairs | None = None) -> None:
    """Add the block to the running statistics."""
    logits = block.logits
    if len(logits) == 0:
        return
    LANES = _lanes(block)
    sizes = _sizes(block)
    options = {
        "FIRST": block.first, "LAST": block.last, "BIAS": block.bias is not None, "SOFTCAP": block.softcap is not None,
        "MEAN": running.mean_logp is not None, "ENTROPY": running.entropy is not None,
        "TEMPERED": running.tempered_lse is not None,
        "LANES": LANES, "num_warps": ABSORB[1], "sanitize_overflow": False,
    }
    if pairs is None:
        _absorb[(len(logits),)](logits, logits.stride(0), labels, block.bias, *running, *sizes, **options)
        return
    M = pairs.rows.shape[1]
    _absorb_pair[(M,)](
        logits, logits.stride(0), labels, block.bias, *running, pairs.rows, pairs.gap, pairs.kl, M, *sizes, **options
    )


def absorb_cross(block: Block, labels: Tensor, texts: TextIds, lse: Tensor, cross_logp: Tensor) -> None:
    """Write the reference tokens' logits of this block to ``cross_logp``; after the last block, turn them into logs."""
    N, U = cross_logp.shape
    if cross_logp.numel() == 0:
        return
    BLOCK = min(triton.next_power_of_2(U), 256)
    _absorb_cross[(N, triton.cdiv(U, BLOCK))](
        block.logits, block.logits.stride(0), labels, *texts, block.bias, lse, cross_logp, U, block.start, block.width,
        block.softcap or 1.0, FIRST=block.first, LAST=block.last, BIAS=block.bias is not None,
        SOFTCAP=block.softcap is not None, BLOCK=BLOCK,
    )


def absorb_teacher(block: Block, other: Block, labels: Tensor, compared: Compared, temperature: float) -> None:
    """Add the same block of the model's and of the teacher's logits to their divergences."""
    logits, given = block.logits, _in_rows(other.logits)                 # [N, columns] each
    if len(logits) == 0:
        return
    LANES = _lanes(block)
    _absorb_teacher[(len(logits),)](
        logits, logits.stride(0), given, given.stride(0), labels, block.bias, other.bias, *compared, block.width,
        logits.shape[1], given.shape[1], block.softcap or 1.0, other.softcap or 1.0, temperature,
        FIRST=block.first, LAST=block.last, BIAS=block.bias is not None, SOFTCAP=block.softcap is not None,
        GIVEN_BIAS=other.bias is not None, GIVEN_SOFTCAP=other.softcap is not None, KL=compared.kl is not None,
        REVERSE=compared.reverse_kl is not None, LANES=LANES, num_warps=ABSORB[1], sanitize_overflow=False,
    )


def differentiate(
    block: Block, labels: Tensor, stats: Running, slopes: Slopes, pairs: Pairs | None = None,
    taught: Taught | None = None,
) -> None:
    """Overwrite the block's logits with their gradient, and rows or columns that are not real with 0."""
    logits = block.logits
    if len(logits) == 0:
        return
    BLOCK = min(triton.next_power_of_2(logits.shape[1]), DIFFERENTIATE[0])
    known = stats.lse, stats.best_token, stats.tempered_lse
    given = logits, logits.stride(0), labels, block.bias, *known, *slopes, *_steps(slopes), *_teacher(taught)
    sizes = _sizes(block)
    options = {
        **_given(slopes), **_given_teacher(taught), "BIAS": block.bias is not None,
        "SOFTCAP": block.softcap is not None, "BLOCK": BLOCK, "num_warps": DIFFERENTIATE[1],
    }
    programs = triton.cdiv(logits.shape[1], BLOCK)
    if pairs is None:
        _differentiate[(len(logits), programs)](*given, *sizes, **options)
        return
    M = pairs.rows.shape[1]
    _differentiate_pair[(M, programs)](*given, pairs.rows, pairs.gap, pairs.slope, M, *sizes, **options)


def differentiate_cross(
    block: Block, labels: Tensor, texts: TextIds, stats: Running, slopes: Slopes, cross_logp: Tensor, by_cross: Tensor,
    pairs: Pairs | None = None, taught: Taught | None = None,
) -> None:
    """Overwrite the gradient of the logits that ``cross_logp`` read with their full gradient, rounded once."""
    N, U = cross_logp.shape
    if cross_logp.numel() == 0:
        return
    BLOCK = min(triton.next_power_of_2(U), 256)
    twin = gap = by_twin = None
    if pairs is not None:
        assert pairs.slope is not None
        flat = pairs.rows.flatten()                                      # [N]
        twin = torch.empty_like(flat).index_copy(0, flat, pairs.rows.flip(0).flatten())   # [N]
        gap = pairs.gap                                                  # [N]
        by_twin = torch.empty_like(gap).index_copy(0, flat, pairs.slope.repeat(2))   # [N]
    _differentiate_cross[(N, triton.cdiv(U, BLOCK))](
        block.logits, block.logits.stride(0), labels, *texts, stats.lse, stats.best_token, stats.tempered_lse,
        cross_logp, by_cross, *slopes, *_steps(slopes), *_teacher(taught), twin, gap, by_twin, U, *_sizes(block),
        **_given(slopes), **_given_teacher(taught), BY_TWIN=pairs is not None, SOFTCAP=block.softcap is not None,
        BLOCK=BLOCK,
    )


def _lanes(block: Block) -> int:
    return int(min(triton.next_power_of_2(triton.cdiv(block.width, WIDE.value)), ABSORB[0]))


def _sizes(block: Block) -> tuple[int | float, ...]:
    return (block.start, block.width, block.logits.shape[1], block.vocabulary, block.softcap or 1.0,
            block.temperature or 1.0)


def _given(slopes: Slopes) -> dict[str, bool]:
    names = ("BY_LSE", "BY_BEST", "BY_LABEL", "BY_MEAN", "BY_TEMPERED")
    return {name: slope is not None for name, slope in zip(names, slopes, strict=True)}


def _steps(slopes: Slopes) -> list[int]:
    return [0 if slope is None else slope.stride(0) for slope in slopes]


def _teacher(taught: Taught | None) -> tuple[Tensor | int | float | None, ...]:
    """What kernels read of a teacher."""
    if taught is None:
        return None, 0, None, None, None, None, None, None, 0, 0, 0, 1.0, 1.0
    other, compared, temperature, by_kl, by_reverse = taught
    given = _in_rows(other.logits)                                       # [N, columns]
    steps = (0 if slope is None else slope.stride(0) for slope in (by_kl, by_reverse))
    return (given, given.stride(0), other.bias, compared.lse, compared.teacher_lse, compared.reverse_kl, by_kl,
            by_reverse, *steps, given.shape[1], other.softcap or 1.0, temperature)


def _given_teacher(taught: Taught | None) -> dict[str, bool]:
    if taught is None:
        return dict.fromkeys(("BY_KL", "BY_REVERSE", "GIVEN_BIAS", "GIVEN_SOFTCAP"), False)
    return {
        "BY_KL": taught.by_kl is not None, "BY_REVERSE": taught.by_reverse is not None,
        "GIVEN_BIAS": taught.block.bias is not None, "GIVEN_SOFTCAP": taught.block.softcap is not None,
    }


def _in_rows(logits: Tensor) -> Tensor:
    """The logits, copied if those of a row are not neighbours, as logits that were given may not be, [N, columns]."""
    return logits if logits.stride(1) == 1 else logits.contiguous()      # [N, columns]


@triton.jit
def _real_logit(stored, bias, column, mask, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    logit = stored.to(tl.float32)
    if BIAS:
        logit += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if SOFTCAP:
        # tanh computed with exp of a negative number, which cannot overflow.
        small = tl.exp(-2.0 * tl.abs(logit) / softcap)
        size = softcap * (1.0 - small) / (1.0 + small)
        logit = tl.where(logit < 0, -size, size)
    return logit


@triton.jit
def _read(
    logits, bias, first, end, columns, softcap,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr,
):
    """The next LANES × WIDE logits of a row, −inf behind its end."""
    column = first + tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    # Masked by the padded width, not by the vocabulary size: otherwise loads would not be 16 bytes wide.
    stored = tl.load(logits + column, mask=column < columns, other=0.0) if MASKED else tl.load(logits + column)
    logit = _real_logit(stored, bias, column, column < end, softcap, BIAS, SOFTCAP)
    if MASKED:
        logit = tl.where(column < end, logit, -float("inf"))
    return logit


@triton.jit
def _take(
    logit, first, end, tops, totals, places, sums, spreads, heats, temperature,
    MEAN: tl.constexpr, ENTROPY: tl.constexpr, TEMPERED: tl.constexpr, LANES: tl.constexpr,
):
    """Add LANES × WIDE logits, lane by lane, so that threads need not synchronise. Also returns their exponentials."""
    if MEAN:
        column = first + tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        sums += tl.sum(tl.where(column < end, logit, 0.0), 1)
    top = tl.max(logit, 1)
    places = tl.where(top > tops, first, places)
    newest = tl.maximum(tops, top)
    finite = _finite(newest)
    below, drop = logit - finite[:, None], tops - finite
    powers, shrink = tl.exp(below), tl.exp(drop)
    if ENTROPY:
        spreads = _moved(spreads, totals, drop, shrink) + tl.sum(powers * tl.maximum(below, FAR), 1)
    if TEMPERED:
        heats = heats * tl.exp(drop / temperature) + tl.sum(tl.exp(below / temperature), 1)
    totals = totals * shrink + tl.sum(powers, 1)
    return newest, totals, places, sums, spreads, heats, powers


@triton.jit
def _finite(top):
    return tl.where(top == -float("inf"), 0.0, top)   # −inf alone adds 0, not NaN


@triton.jit
def _moved(spread, total, drop, shrink):
    """Σ exp(x)·x, where each x of the old sum grew by ``drop``; ``total`` is the old Σ exp(x), ``shrink`` exp(drop)."""
    return shrink * (spread + tl.maximum(drop, FAR) * total)


# debug=True keeps the assertion on the labels: the device refuses them without making the host wait.
@triton.jit(debug=True)
def _absorb(
    logits, stride, labels, bias, lse, best_logp, best_token, label_logp,
    mean_logp, entropy, tempered_lse, start, width, columns, vocabulary, softcap, temperature,
    FIRST: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    MEAN: tl.constexpr, ENTROPY: tl.constexpr, TEMPERED: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)   # rows times stride soon exceeds 2³¹
    logits += row * stride
    label = tl.load(labels + row)
    tl.device_assert((label == IGNORE) | ((label >= 0) & (label < vocabulary)), "labels must be -100 or an id")
    end = width
    if label == IGNORE:
        end = 0   # a position that does not count is not read
    tops = tl.full((LANES,), -float("inf"), tl.float32)
    totals = tl.zeros((LANES,), tl.float32)
    places = tl.zeros((LANES,), tl.int32)
    sums = tl.zeros((LANES,), tl.float32)
    spreads = tl.zeros((LANES,), tl.float32)
    heats = tl.zeros((LANES,), tl.float32)
    whole = end // (LANES * WIDE) * (LANES * WIDE)
    for first in range(0, whole, LANES * WIDE):
        logit = _read(logits, bias, first, end, columns, softcap, BIAS, SOFTCAP, LANES, False)
        tops, totals, places, sums, spreads, heats, _ = _take(
            logit, first, end, tops, totals, places, sums, spreads, heats, temperature, MEAN, ENTROPY, TEMPERED, LANES
        )
    if whole < end:
        logit = _read(logits, bias, whole, end, columns, softcap, BIAS, SOFTCAP, LANES, True)
        tops, totals, places, sums, spreads, heats, _ = _take(
            logit, whole, end, tops, totals, places, sums, spreads, heats, temperature, MEAN, ENTROPY, TEMPERED, LANES
        )
    _finish(
        logits, row, label, end, tops, totals, places, sums, spreads, heats, bias, lse, best_logp, best_token,
        label_logp, mean_logp, entropy, tempered_lse, start, vocabulary, softcap, temperature, FIRST, LAST, BIAS,
        SOFTCAP, MEAN, ENTROPY, TEMPERED, LANES,
    )


@triton.jit
def _finish(
    logits, row, label, end, tops, totals, places, sums, spreads, heats, bias, lse, best_logp, best_token, label_logp,
    mean_logp, entropy, tempered_lse, start, vocabulary, softcap, temperature,
    FIRST: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    MEAN: tl.constexpr, ENTROPY: tl.constexpr, TEMPERED: tl.constexpr, LANES: tl.constexpr,
):
    """Join the lanes of a row with each other and with the blocks before, and store its statistics."""
    largest = tl.max(tops, 0)
    finite = _finite(largest)
    total = tl.sum(totals * tl.exp(tops - finite), 0)
    spread = 0.0
    if ENTROPY:
        spread = tl.sum(_moved(spreads, totals, tops - finite, tl.exp(tops - finite)), 0)
    heat = 0.0
    if TEMPERED:
        heat = tl.sum(heats * tl.exp((tops - finite) / temperature), 0)
    # Ties go to the lowest id: the first lane that reached the maximum, then the first column in it.
    place = tl.min(tl.where(tops == largest, places + tl.arange(0, LANES) * WIDE, 2147483647), 0)
    column = place + tl.arange(0, WIDE)
    mask = column < end
    again = _real_logit(tl.load(logits + column, mask=mask, other=0.0), bias, column, mask, softcap, BIAS, SOFTCAP)
    found = tl.min(tl.where(mask, tl.where(again == largest, column, 2147483647), 2147483647), 0)
    found = tl.where(found == 2147483647, place, found)   # the recomputed logit differed
    best = start + tl.where(found == 2147483647, 0, found).to(tl.int64)   # all are NaN
    wanted, summed = 0.0, tl.sum(sums, 0)
    if not FIRST:
        before = tl.load(lse + row)
        best = tl.where(largest > before, best, tl.load(best_token + row))
        newest = tl.maximum(largest, before)
        finite = _finite(newest)
        if ENTROPY:
            spread = _moved(spread, total, largest - finite, tl.exp(largest - finite))
            earlier, drop = tl.load(best_logp + row), before - finite
            spread += _moved(tl.load(entropy + row), earlier, drop, tl.exp(drop))
        if TEMPERED:
            heat *= tl.exp((largest - finite) / temperature)
            heat += tl.load(tempered_lse + row) * tl.exp((before - finite) / temperature)
        total = total * tl.exp(largest - finite) + tl.load(best_logp + row) * tl.exp(before - finite)
        largest = newest
        wanted = tl.load(label_logp + row)
        if MEAN:
            summed += tl.load(mean_logp + row)
    column = label - start
    if (column >= 0) & (column < end):
        wanted = _real_logit(tl.load(logits + column), bias, column, True, softcap, BIAS, SOFTCAP)
    if LAST:
        # The log of a number of at least 1. NaN stays NaN, and rounding cannot give a log-probability above 0.
        extra = tl.where(total <= 1.0, 0.0, tl.log(total))
        if ENTROPY:
            spread = tl.where(label == IGNORE, 0.0, extra - spread / tl.where(label == IGNORE, 1.0, total))
        if TEMPERED:
            heat = largest + temperature * tl.where(heat <= 1.0, 0.0, tl.log(heat))
            heat = tl.where(label == IGNORE, 0.0, heat)
        largest = tl.where(label == IGNORE, 0.0, largest + extra)
        total = -extra
        wanted -= largest
        summed = summed / vocabulary - largest
    tl.store(lse + row, largest)
    tl.store(best_logp + row, total)
    tl.store(best_token + row, best)
    tl.store(label_logp + row, wanted)
    if MEAN:
        tl.store(mean_logp + row, summed)
    if ENTROPY:
        tl.store(entropy + row, spread)
    if TEMPERED:
        tl.store(tempered_lse + row, heat)


@triton.jit(debug=True)
def _absorb_pair(
    logits, stride, labels, bias, lse, best_logp, best_token, label_logp, mean_logp, entropy, tempered_lse,
    rows, gap, kl, M, start, width, columns, vocabulary, softcap, temperature,
    FIRST: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    MEAN: tl.constexpr, ENTROPY: tl.constexpr, TEMPERED: tl.constexpr, LANES: tl.constexpr,
):
    """As _absorb for two rows that are read together, with Σ exp(z − m)·(z − z' − c), c the maxima's difference."""
    row, twin = tl.load(rows + tl.program_id(0)), tl.load(rows + M + tl.program_id(0))
    own, other = logits + row * stride, logits + twin * stride
    label = tl.load(labels + row)
    tl.device_assert((label == IGNORE) | ((label >= 0) & (label < vocabulary)), "labels must be -100 or an id")
    end = width
    if label == IGNORE:
        end = 0
    tops = tl.full((LANES,), -float("inf"), tl.float32)
    other_tops = tl.full((LANES,), -float("inf"), tl.float32)
    totals, other_totals = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    places, other_places = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    sums, other_sums = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    spreads, other_spreads = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    heats, other_heats = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    gaps, other_gaps = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    whole = end // (LANES * WIDE) * (LANES * WIDE)
    for first in range(0, whole, LANES * WIDE):
        logit = _read(own, bias, first, end, columns, softcap, BIAS, SOFTCAP, LANES, False)
        beside = _read(other, bias, first, end, columns, softcap, BIAS, SOFTCAP, LANES, False)
        before, other_before, was, other_was = tops, other_tops, totals, other_totals
        tops, totals, places, sums, spreads, heats, powers = _take(
            logit, first, end, tops, totals, places, sums, spreads, heats, temperature, MEAN, ENTROPY, TEMPERED, LANES
        )
        other_tops, other_totals, other_places, other_sums, other_spreads, other_heats, other_powers = _take(
            beside, first, end, other_tops, other_totals, other_places, other_sums, other_spreads, other_heats,
            temperature, MEAN, ENTROPY, TEMPERED, LANES,
        )
        gaps, other_gaps = _add_gaps(
            logit, beside, powers, other_powers, before, other_before, was, other_was, tops, other_tops, gaps,
            other_gaps,
        )
    if whole < end:
        logit = _read(own, bias, whole, end, columns, softcap, BIAS, SOFTCAP, LANES, True)
        beside = _read(other, bias, whole, end, columns, softcap, BIAS, SOFTCAP, LANES, True)
        before, other_before, was, other_was = tops, other_tops, totals, other_totals
        tops, totals, places, sums, spreads, heats, powers = _take(
            logit, whole, end, tops, totals, places, sums, spreads, heats, temperature, MEAN, ENTROPY, TEMPERED, LANES
        )
        other_tops, other_totals, other_places, other_sums, other_spreads, other_heats, other_powers = _take(
            beside, whole, end, other_tops, other_totals, other_places, other_sums, other_spreads, other_heats,
            temperature, MEAN, ENTROPY, TEMPERED, LANES,
        )
        gaps, other_gaps = _add_gaps(
            logit, beside, powers, other_powers, before, other_before, was, other_was, tops, other_tops, gaps,
            other_gaps,
        )
    # Join the lanes: each has maxima, and so a c, of its own.
    largest, other_largest = tl.max(tops, 0), tl.max(other_tops, 0)
    finite, other_finite = _finite(largest), _finite(other_largest)
    lane, shift = _finite(tops) - _finite(other_tops), finite - other_finite
    total = tl.sum(totals * tl.exp(tops - finite), 0)
    other_total = tl.sum(other_totals * tl.exp(other_tops - other_finite), 0)
    summed = tl.sum(_shifted(gaps, totals, lane - shift, tops - finite), 0)
    other_summed = tl.sum(_shifted(other_gaps, other_totals, shift - lane, other_tops - other_finite), 0)
    if not FIRST:
        then, other_then = tl.load(lse + row), tl.load(lse + twin)
        then_total, other_then_total = tl.load(best_logp + row), tl.load(best_logp + twin)
        then_shift = _finite(then) - _finite(other_then)
        finite, other_finite = _finite(tl.maximum(largest, then)), _finite(tl.maximum(other_largest, other_then))
        moved = finite - other_finite
        summed = _shifted(summed, total, shift - moved, largest - finite) + _shifted(
            tl.load(gap + row), then_total, then_shift - moved, then - finite
        )
        other_summed = _shifted(other_summed, other_total, moved - shift, other_largest - other_finite) + _shifted(
            tl.load(gap + twin), other_then_total, moved - then_shift, other_then - other_finite
        )
        total = total * tl.exp(largest - finite) + then_total * tl.exp(then - finite)
        other_total = other_total * tl.exp(other_largest - other_finite) + other_then_total * tl.exp(
            other_then - other_finite
        )
        shift = moved
    if LAST:
        counted = label != IGNORE
        summed /= tl.where(counted, total, 1.0)
        other_summed /= tl.where(counted, other_total, 1.0)
        apart = summed + other_summed   # c cancels
        apart = tl.where(counted, tl.where(apart < 0, 0.0, apart) / 2, 0.0)   # NaN stays NaN
        tl.store(kl + row, apart)
        tl.store(kl + twin, apart)
        summed += shift
        other_summed -= shift
    tl.store(gap + row, summed)
    tl.store(gap + twin, other_summed)
    _finish(
        own, row, label, end, tops, totals, places, sums, spreads, heats, bias, lse, best_logp, best_token, label_logp,
        mean_logp, entropy, tempered_lse, start, vocabulary, softcap, temperature, FIRST, LAST, BIAS, SOFTCAP, MEAN,
        ENTROPY, TEMPERED, LANES,
    )
    _finish(
        other, twin, label, end, other_tops, other_totals, other_places, other_sums, other_spreads, other_heats, bias,
        lse, best_logp, best_token, label_logp, mean_logp, entropy, tempered_lse, start, vocabulary, softcap,
        temperature, FIRST, LAST, BIAS, SOFTCAP, MEAN, ENTROPY, TEMPERED, LANES,
    )


@triton.jit
def _add_gaps(
    logit, beside, powers, other_powers, before, other_before, was, other_was, tops, other_tops, gaps, other_gaps
):
    """Add Σ exp(z − m)·(z − z' − c) of the next logits to both rows' sums, lane by lane."""
    finite, other_finite = _finite(tops), _finite(other_tops)
    shift = finite - other_finite
    more = _finite(before) - _finite(other_before) - shift
    apart = _apart(logit, beside) - shift[:, None]
    gaps = _shifted(gaps, was, more, before - finite) + tl.sum(powers * apart, 1)
    other_gaps = _shifted(other_gaps, other_was, -more, other_before - other_finite) - tl.sum(other_powers * apart, 1)
    return gaps, other_gaps


@triton.jit
def _apart(logit, beside):
    apart = tl.where((logit == -float("inf")) & (beside == -float("inf")), 0.0, logit - beside)
    return tl.minimum(tl.maximum(apart, -MOST_APART), MOST_APART)


@triton.jit
def _shifted(gap, total, more, drop):
    """Σ exp(x)·d, where each d of the old sum grew by ``more``, each x by ``drop``; ``total`` is the old Σ exp(x)."""
    return tl.exp(drop) * (gap + more * total)


@triton.jit
def _absorb_teacher(
    logits, stride, given, given_stride, labels, bias, given_bias, lse, given_lse, kl, reverse_kl,
    width, columns, given_columns, softcap, given_softcap, temperature,
    FIRST: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, GIVEN_BIAS: tl.constexpr,
    GIVEN_SOFTCAP: tl.constexpr, KL: tl.constexpr, REVERSE: tl.constexpr, LANES: tl.constexpr,
):
    """Compare a row with the teacher's; columns that were read count as one token, so all addends are ≥ 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    given += row * given_stride
    label = tl.load(labels + row)
    end = width
    if label == IGNORE:
        end = 0
    cool = 1.0 / temperature
    tops, given_tops = tl.full((LANES,), -MOST_APART, tl.float32), tl.full((LANES,), -MOST_APART, tl.float32)
    totals, given_totals = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    logs = tl.zeros((LANES,), tl.float32)
    kls, reverses = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    whole = end // (LANES * WIDE) * (LANES * WIDE)
    for first in range(0, whole, LANES * WIDE):
        logit = _read(logits, bias, first, end, columns, softcap, BIAS, SOFTCAP, LANES, False)
        beside = _read(
            given, given_bias, first, end, given_columns, given_softcap, GIVEN_BIAS, GIVEN_SOFTCAP, LANES, False
        )
        tops, given_tops, totals, given_totals, logs, kls, reverses = _take_both(
            logit, beside, tops, given_tops, totals, given_totals, logs, kls, reverses, cool, KL, REVERSE
        )
    if whole < end:
        logit = _read(logits, bias, whole, end, columns, softcap, BIAS, SOFTCAP, LANES, True)
        beside = _read(
            given, given_bias, whole, end, given_columns, given_softcap, GIVEN_BIAS, GIVEN_SOFTCAP, LANES, True
        )
        tops, given_tops, totals, given_totals, logs, kls, reverses = _take_both(
            logit, beside, tops, given_tops, totals, given_totals, logs, kls, reverses, cool, KL, REVERSE
        )
    # Join the lanes.
    top, given_top = tl.max(tops, 0), tl.max(given_tops, 0)
    p, q = totals * tl.exp((tops - top) * cool), given_totals * tl.exp((given_tops - given_top) * cool)
    total, given_total = tl.sum(p, 0), tl.sum(q, 0)
    p, q = p / total, q / given_total
    log = tl.log(tl.div_rn(total, given_total))
    ratio = (tops - given_tops - (top - given_top)) * cool + (logs - log)
    found, reverse = tl.sum(_add_group(q, p, ratio, kls), 0), tl.sum(_add_group(p, q, -ratio, reverses), 0)
    level, given_level = top * cool + tl.log(total), given_top * cool + tl.log(given_total)
    if not FIRST:
        before, given_before = tl.load(lse + row), tl.load(given_lse + row)
        both, given_both = _log_of_both(before, level), _log_of_both(given_before, given_level)
        p, q, ratio = _shares(level, given_level, both, given_both)
        earlier, given_earlier, then = _shares(before, given_before, both, given_both)
        if KL:
            found = _add_group(q, p, ratio, found)
            found += _add_group(given_earlier, earlier, then, tl.load(kl + row))
        if REVERSE:
            reverse = _add_group(p, q, -ratio, reverse)
            reverse += _add_group(earlier, given_earlier, -then, tl.load(reverse_kl + row))
        level, given_level = both, given_both
    if LAST:
        counted = label != IGNORE
        level, given_level = tl.where(counted, level, 0.0), tl.where(counted, given_level, 0.0)
        nothing = tl.minimum(level, given_level) * temperature < -MOST_APART / 2   # one of both excludes all tokens
        found = tl.where(nothing, float("nan"), tl.where(found < 0, 0.0, found))   # NaN stays NaN
        found = tl.where(counted, found, 0.0)
        reverse = tl.where(nothing, float("nan"), tl.where(reverse < 0, 0.0, reverse))
        reverse = tl.where(counted, reverse, 0.0)
    tl.store(lse + row, level)
    tl.store(given_lse + row, given_level)
    if KL:
        tl.store(kl + row, found)
    if REVERSE:
        tl.store(reverse_kl + row, reverse)


@triton.jit
def _take_both(
    logit, beside, tops, given_tops, totals, given_totals, logs, kls, reverses, cool,
    KL: tl.constexpr, REVERSE: tl.constexpr,
):
    """Add LANES × WIDE logits of both rows, lane by lane. ``logs`` are log Σ exp(z − m) − log Σ exp(z' − m')."""
    logit, beside = tl.maximum(logit, -MOST_APART), tl.maximum(beside, -MOST_APART)   # −inf − −inf would be NaN
    top, given_top = tl.maximum(tops, tl.max(logit, 1)), tl.maximum(given_tops, tl.max(beside, 1))
    rate = cool * LOG2_E
    p, q = tl.exp2((logit - top[:, None]) * rate), tl.exp2((beside - given_top[:, None]) * rate)
    earlier = totals * tl.exp2((tops - top) * rate)
    given_earlier = given_totals * tl.exp2((given_tops - given_top) * rate)
    totals, given_totals = earlier + tl.sum(p, 1), given_earlier + tl.sum(q, 1)
    share, given_share = 1.0 / totals, 1.0 / given_totals
    more, shift = tl.div_rn(totals, given_totals), top - given_top   # 1 if both are equal
    log = tl.log(more)
    ratio = (logit - beside - shift[:, None]) * cool - log[:, None]
    then = (tops - given_tops - shift) * cool + (logs - log)
    earlier, given_earlier = earlier * share, given_earlier * given_share
    # p and q are divided by their sums after adding up, which takes fewer operations.
    if KL:
        less = given_totals * share
        kls = _add_group(given_earlier, earlier, then, kls)
        kls += tl.sum(_excess(q, p * less[:, None], ratio), 1) * given_share
    if REVERSE:
        reverses = _add_group(earlier, given_earlier, -then, reverses)
        reverses += tl.sum(_excess(p, q * more[:, None], -ratio), 1) * share
    return top, given_top, totals, given_totals, log, kls, reverses


@triton.jit
def _add_group(of, to, ratio, within):
    """What columns add to KL(a‖b) that count as one token, with the divergence ``within`` them."""
    return of * within + _excess(of, to, ratio)


@triton.jit
def _excess(of, to, ratio):
    """What each token adds to KL(a‖b): a·(eˣ − 1 − x), with x = log b − log a."""
    return tl.where(tl.abs(ratio) < CLOSE, of * _beyond(ratio), to - of - of * ratio)


@triton.jit
def _beyond(x):
    """eˣ − 1 − x for small x, to 1e-5 of itself: computed from eˣ, it would cancel."""
    return x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120))))


@triton.jit
def _shares(level, given_level, both, given_both):
    """p, q and log p − log q of columns that count as one token."""
    p, q = tl.exp(level - both), tl.exp(given_level - given_both)
    return p, q, level - given_level - (both - given_both)


@triton.jit
def _log_of_both(level, other):
    top = tl.maximum(level, other)
    return top + tl.log(tl.exp(level - top) + tl.exp(other - top))


@triton.jit
def _differentiate(
    logits, stride, labels, bias, lse, best_token, tempered_lse, by_lse, by_best, by_label, by_mean, by_tempered,
    lse_step, best_step, label_step, mean_step, tempered_step,
    given, given_stride, given_bias, own_lse, given_lse, reverse_kl, by_kl, by_reverse, kl_step, reverse_step,
    given_columns, given_softcap, common_temperature, start, width, columns, vocabulary, softcap, temperature,
    BY_LSE: tl.constexpr, BY_BEST: tl.constexpr, BY_LABEL: tl.constexpr, BY_MEAN: tl.constexpr,
    BY_TEMPERED: tl.constexpr,
    BY_KL: tl.constexpr, BY_REVERSE: tl.constexpr, GIVEN_BIAS: tl.constexpr, GIVEN_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    if label == IGNORE:
        tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < columns)
    else:
        stored = tl.load(logits + column, mask=column < columns, other=0.0)
        logit = _real_logit(stored, bias, column, column < width, softcap, BIAS, SOFTCAP)
        power = tl.exp(logit - tl.load(lse + row))
        gradient = _by_logit(
            power, row, column, label, best_token, by_lse, by_best, by_label, by_mean, lse_step, best_step, label_step,
            mean_step, start, vocabulary, BY_LSE, BY_BEST, BY_LABEL, BY_MEAN, BLOCK,
        )
        if BY_TEMPERED:
            gradient += _by_tempered(logit, row, tempered_lse, by_tempered, tempered_step, temperature)
        if BY_KL or BY_REVERSE:
            gradient += _by_teacher(
                logit, row, column, column < width, given, given_stride, given_bias, own_lse, given_lse, reverse_kl,
                by_kl, by_reverse, kl_step, reverse_step, given_columns, given_softcap, common_temperature, BY_KL,
                BY_REVERSE, GIVEN_BIAS, GIVEN_SOFTCAP,
            )
        if SOFTCAP:
            gradient *= 1.0 - (logit / softcap) * (logit / softcap)
        tl.store(logits + column, tl.where(column < width, gradient, 0.0), mask=column < columns)


@triton.jit
def _by_logit(
    power, row, column, label, best_token, by_lse, by_best, by_label, by_mean, lse_step, best_step, label_step,
    mean_step, start, vocabulary,
    BY_LSE: tl.constexpr, BY_BEST: tl.constexpr, BY_LABEL: tl.constexpr, BY_MEAN: tl.constexpr, BLOCK: tl.constexpr,
):
    """The gradient by logits with these probabilities, before the soft-cap."""
    soft, even = 0.0, 0.0
    if BY_LSE:
        soft += tl.load(by_lse + row * lse_step)
    if BY_BEST:
        best_slope = tl.load(by_best + row * best_step)
        soft -= best_slope
    if BY_LABEL:
        label_slope = tl.load(by_label + row * label_step)
        soft -= label_slope
    if BY_MEAN:
        even = tl.load(by_mean + row * mean_step)
        soft -= even
    gradient = power * soft
    if BY_MEAN:
        gradient += even / vocabulary
    # Only one program has the best token or the label: the others need not compare.
    if BY_BEST:
        at = tl.load(best_token + row) - start
        if at // BLOCK == tl.program_id(1):
            gradient += tl.where(column == at, best_slope, 0.0)
    if BY_LABEL:
        at = label - start
        if at // BLOCK == tl.program_id(1):
            gradient += tl.where(column == at, label_slope, 0.0)
    return gradient


@triton.jit
def _by_tempered(logit, row, tempered_lse, by_tempered, tempered_step, temperature):
    slope = tl.load(by_tempered + row * tempered_step)
    return slope * tl.exp((logit - tl.load(tempered_lse + row)) / temperature)


@triton.jit
def _by_teacher(
    logit, row, column, real, given, given_stride, given_bias, own_lse, given_lse, reverse_kl, by_kl, by_reverse,
    kl_step, reverse_step, given_columns, given_softcap, common_temperature,
    BY_KL: tl.constexpr, BY_REVERSE: tl.constexpr, GIVEN_BIAS: tl.constexpr, GIVEN_SOFTCAP: tl.constexpr,
):
    """The gradient of the divergences from a teacher by these logits, before the soft-cap."""
    stored = tl.load(given + row * given_stride + column, mask=(column >= 0) & (column < given_columns), other=0.0)
    beside = _real_logit(stored, given_bias, column, real, given_softcap, GIVEN_BIAS, GIVEN_SOFTCAP)
    level, given_level = tl.load(own_lse + row), tl.load(given_lse + row)
    cool = 1.0 / common_temperature
    p, q = tl.exp2((logit * cool - level) * LOG2_E), tl.exp2((beside * cool - given_level) * LOG2_E)
    ratio = (tl.maximum(logit, -MOST_APART) - tl.maximum(beside, -MOST_APART)) * cool - (level - given_level)
    gradient = tl.zeros_like(p)
    if BY_KL:
        # p − q, which would cancel where both nearly agree.
        apart = tl.where(tl.abs(ratio) < CLOSE, q * (ratio + _beyond(ratio)), p - q)
        gradient += tl.load(by_kl + row * kl_step) * apart
    if BY_REVERSE:
        gradient += tl.load(by_reverse + row * reverse_step) * p * (ratio - tl.load(reverse_kl + row))
    return gradient * cool


@triton.jit
def _differentiate_pair(
    logits, stride, labels, bias, lse, best_token, tempered_lse, by_lse, by_best, by_label, by_mean, by_tempered,
    lse_step, best_step, label_step, mean_step, tempered_step,
    given, given_stride, given_bias, own_lse, given_lse, reverse_kl, by_kl, by_reverse, kl_step, reverse_step,
    given_columns, given_softcap, common_temperature,
    rows, gap, slopes, M, start, width, columns, vocabulary, softcap, temperature,
    BY_LSE: tl.constexpr, BY_BEST: tl.constexpr, BY_LABEL: tl.constexpr, BY_MEAN: tl.constexpr,
    BY_TEMPERED: tl.constexpr,
    BY_KL: tl.constexpr, BY_REVERSE: tl.constexpr, GIVEN_BIAS: tl.constexpr, GIVEN_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):
    """As _differentiate for two rows: both are read before either is overwritten."""
    row, twin = tl.load(rows + tl.program_id(0)), tl.load(rows + M + tl.program_id(0))
    own, other = logits + row * stride, logits + twin * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    if label == IGNORE:
        nothing = tl.zeros((BLOCK,), logits.dtype.element_ty)
        tl.store(own + column, nothing, mask=column < columns)
        tl.store(other + column, nothing, mask=column < columns)
    else:
        stored = tl.load(own + column, mask=column < columns, other=0.0)
        beside = tl.load(other + column, mask=column < columns, other=0.0)
        logit = _real_logit(stored, bias, column, column < width, softcap, BIAS, SOFTCAP)
        beside = _real_logit(beside, bias, column, column < width, softcap, BIAS, SOFTCAP)
        power, other_power = tl.exp(logit - tl.load(lse + row)), tl.exp(beside - tl.load(lse + twin))
        gradient = _by_logit(
            power, row, column, label, best_token, by_lse, by_best, by_label, by_mean, lse_step, best_step, label_step,
            mean_step, start, vocabulary, BY_LSE, BY_BEST, BY_LABEL, BY_MEAN, BLOCK,
        )
        if BY_TEMPERED:
            gradient += _by_tempered(logit, row, tempered_lse, by_tempered, tempered_step, temperature)
        by_other = _by_logit(
            other_power, twin, column, label, best_token, by_lse, by_best, by_label, by_mean, lse_step, best_step,
            label_step, mean_step, start, vocabulary, BY_LSE, BY_BEST, BY_LABEL, BY_MEAN, BLOCK,
        )
        if BY_TEMPERED:
            by_other += _by_tempered(beside, twin, tempered_lse, by_tempered, tempered_step, temperature)
        slope, apart = tl.load(slopes + tl.program_id(0)), _apart(logit, beside)
        gradient += slope * (power - other_power + power * (apart - tl.load(gap + row)))
        by_other += slope * (other_power - power - other_power * (apart + tl.load(gap + twin)))
        if BY_KL or BY_REVERSE:
            gradient += _by_teacher(
                logit, row, column, column < width, given, given_stride, given_bias, own_lse, given_lse, reverse_kl,
                by_kl, by_reverse, kl_step, reverse_step, given_columns, given_softcap, common_temperature, BY_KL,
                BY_REVERSE, GIVEN_BIAS, GIVEN_SOFTCAP,
            )
            by_other += _by_teacher(
                beside, twin, column, column < width, given, given_stride, given_bias, own_lse, given_lse, reverse_kl,
                by_kl, by_reverse, kl_step, reverse_step, given_columns, given_softcap, common_temperature, BY_KL,
                BY_REVERSE, GIVEN_BIAS, GIVEN_SOFTCAP,
            )
        if SOFTCAP:
            gradient *= 1.0 - (logit / softcap) * (logit / softcap)
            by_other *= 1.0 - (beside / softcap) * (beside / softcap)
        tl.store(own + column, tl.where(column < width, gradient, 0.0), mask=column < columns)
        tl.store(other + column, tl.where(column < width, by_other, 0.0), mask=column < columns)


@triton.jit
def _absorb_cross(
    logits, stride, labels, texts, owner, bias, lse, cross_logp, U, start, width, softcap,
    FIRST: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    cross_logp += row * U
    text = tl.load(owner + row)
    own = tl.where(text < 0, IGNORE, tl.load(labels + row))
    u = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(texts + tl.maximum(text, 0) * U + u, mask=u < U, other=IGNORE)
    column = label - start
    here = (column >= 0) & (column < width)
    picked = _real_logit(tl.load(logits + column, mask=here, other=0.0), bias, column, here, softcap, BIAS, SOFTCAP)
    if not FIRST:
        picked = tl.where(here, picked, tl.load(cross_logp + u, mask=u < U, other=0.0))
    if LAST:
        logp = tl.where(label == IGNORE, 0.0, picked - tl.load(lse + row))
        picked = tl.where(own == IGNORE, 0.0, logp)
    tl.store(cross_logp + u, picked, mask=u < U)


@triton.jit
def _differentiate_cross(
    logits, stride, labels, texts, owner, lse, best_token, tempered_lse, cross_logp, by_cross, by_lse, by_best,
    by_label, by_mean, by_tempered, lse_step, best_step, label_step, mean_step, tempered_step,
    given, given_stride, given_bias, own_lse, given_lse, reverse_kl, by_kl, by_reverse, kl_step, reverse_step,
    given_columns, given_softcap, common_temperature,
    twin, gap, by_twin, U, start, width, columns, vocabulary, softcap, temperature,
    BY_LSE: tl.constexpr, BY_BEST: tl.constexpr, BY_LABEL: tl.constexpr, BY_MEAN: tl.constexpr,
    BY_TEMPERED: tl.constexpr,
    BY_KL: tl.constexpr, BY_REVERSE: tl.constexpr, GIVEN_BIAS: tl.constexpr, GIVEN_SOFTCAP: tl.constexpr,
    BY_TWIN: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    cross_logp += row * U
    by_cross += row * U
    text = tl.load(owner + row)
    reference = texts + tl.maximum(text, 0) * U
    own = tl.where(text < 0, IGNORE, tl.load(labels + row))
    u = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(reference + u, mask=u < U, other=IGNORE)
    column = label - start
    total = tl.zeros((BLOCK,), tl.float32)
    for w in range(0, U):   # all copies of a token share one logit
        total += tl.where(label == tl.load(reference + w), tl.load(by_cross + w), 0.0)
    soft = 0.0
    if BY_LSE:
        soft += tl.load(by_lse + row * lse_step)
    if BY_BEST:
        slope = tl.load(by_best + row * best_step)
        soft -= slope
        total += tl.where(label == tl.load(best_token + row), slope, 0.0)
    if BY_LABEL:
        slope = tl.load(by_label + row * label_step)
        soft -= slope
        total += tl.where(label == own, slope, 0.0)
    if BY_MEAN:
        slope = tl.load(by_mean + row * mean_step)
        soft -= slope
        total += slope / vocabulary
    logp = tl.load(cross_logp + u, mask=u < U, other=0.0)
    total += tl.exp(logp) * soft
    if BY_TEMPERED:
        total += _by_tempered(
            logp + tl.load(lse + row), row, tempered_lse, by_tempered, tempered_step, temperature
        )
    if BY_TWIN:   # twins have the same references
        other = tl.load(twin + row)
        beside = tl.load(cross_logp + (other - row) * U + u, mask=u < U, other=0.0)
        apart = _apart(logp + tl.load(lse + row), beside + tl.load(lse + other))
        power = tl.exp(logp)
        total += tl.load(by_twin + row) * (power - tl.exp(beside) + power * (apart - tl.load(gap + row)))
    if BY_KL or BY_REVERSE:
        total += _by_teacher(
            logp + tl.load(lse + row), row, column, (column >= 0) & (column < width), given, given_stride, given_bias,
            own_lse, given_lse, reverse_kl, by_kl, by_reverse, kl_step, reverse_step, given_columns, given_softcap,
            common_temperature, BY_KL, BY_REVERSE, GIVEN_BIAS, GIVEN_SOFTCAP,
        )
    if SOFTCAP:
        capped = (logp + tl.load(lse + row)) / softcap
        total *= 1.0 - capped * capped
    end = tl.where(own == IGNORE, 0, width)
    tl.store(logits + column, total, mask=(column >= 0) & (column < end))
