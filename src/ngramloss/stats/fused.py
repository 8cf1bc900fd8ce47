"""a block of logits → running statistics, or its gradient, in one Triton kernel each.

Each row is read once and in order, so results do not depend on scheduling: both kernels are deterministic.
Memory traffic limits the speed: forward reads the block once, backward reads and writes it once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ngramloss.stats.head import Block, Running, Slopes
from ngramloss.stats.labels import IGNORE_INDEX
from ngramloss.stats.token_stats import FAR_BELOW, Texts

IGNORE = tl.constexpr(IGNORE_INDEX)
FAR = tl.constexpr(FAR_BELOW)
WIDE = tl.constexpr(8)
"""Number of logits that a thread loads at once: 16 bytes of bf16."""
ABSORB, DIFFERENTIATE = (128, 4), (1024, 4)
"""Number of lanes or columns of a program, and of its warps."""


def absorb(block: Block, labels: Tensor, running: Running) -> None:
    """Add the block to the running statistics."""
    logits = block.logits
    if len(logits) == 0:
        return
    LANES = min(triton.next_power_of_2(triton.cdiv(block.width, WIDE.value)), ABSORB[0])
    _absorb[(len(logits),)](
        logits, logits.stride(0), labels, block.bias, *running,
        block.start, block.width, logits.shape[1], block.vocabulary, block.softcap or 1.0,
        FIRST=block.first, LAST=block.last, BIAS=block.bias is not None, SOFTCAP=block.softcap is not None,
        MEAN=running.mean_logp is not None, ENTROPY=running.entropy is not None,
        LANES=LANES, num_warps=ABSORB[1], sanitize_overflow=False,
    )


def absorb_cross(block: Block, labels: Tensor, texts: Texts, lse: Tensor, cross_logp: Tensor) -> None:
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


def differentiate(block: Block, labels: Tensor, stats: Running, slopes: Slopes) -> None:
    """Overwrite the block's logits with their gradient, and rows or columns that are not real with 0."""
    logits = block.logits
    if len(logits) == 0:
        return
    BLOCK = min(triton.next_power_of_2(logits.shape[1]), DIFFERENTIATE[0])
    _differentiate[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits, logits.stride(0), labels, block.bias, stats.lse, stats.best_token, *slopes,
        *_steps(slopes), block.start, block.width, logits.shape[1], block.vocabulary, block.softcap or 1.0,
        **_given(slopes), BIAS=block.bias is not None, SOFTCAP=block.softcap is not None,
        BLOCK=BLOCK, num_warps=DIFFERENTIATE[1],
    )


def differentiate_cross(
    block: Block, labels: Tensor, texts: Texts, stats: Running, slopes: Slopes, cross_logp: Tensor, by_cross: Tensor
) -> None:
    """Overwrite the gradient of the logits that ``cross_logp`` read with their full gradient, rounded once."""
    N, U = cross_logp.shape
    if cross_logp.numel() == 0:
        return
    BLOCK = min(triton.next_power_of_2(U), 256)
    _differentiate_cross[(N, triton.cdiv(U, BLOCK))](
        block.logits, block.logits.stride(0), labels, *texts, stats.lse, stats.best_token, cross_logp, by_cross,
        *slopes, *_steps(slopes), U, block.start, block.width, block.vocabulary, block.softcap or 1.0,
        **_given(slopes), SOFTCAP=block.softcap is not None, BLOCK=BLOCK,
    )


def _given(slopes: Slopes) -> dict[str, bool]:
    names = ("BY_LSE", "BY_BEST", "BY_LABEL", "BY_MEAN")
    return {name: slope is not None for name, slope in zip(names, slopes, strict=True)}


def _steps(slopes: Slopes) -> list[int]:
    """Stride from one row's slope to the next; 0 if all rows share one number."""
    return [0 if slope is None else slope.stride(0) for slope in slopes]


@triton.jit
def _real_logit(stored, bias, column, mask, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    logit = stored.to(tl.float32)
    if BIAS:
        logit += tl.load(bias + column, mask=mask, other=0.0)
    if SOFTCAP:
        # tanh computed with exp of a negative number, which cannot overflow.
        small = tl.exp(-2.0 * tl.abs(logit) / softcap)
        size = softcap * (1.0 - small) / (1.0 + small)
        logit = tl.where(logit < 0, -size, size)
    return logit


@triton.jit
def _take(
    logits, bias, first, end, columns, softcap, tops, totals, places, sums, spreads,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, MEAN: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the next LANES × WIDE logits of a row, lane by lane, so that threads need not synchronise."""
    column = first + tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    # Masked by the padded width, not by the vocabulary size: otherwise loads would not be 16 bytes wide.
    stored = tl.load(logits + column, mask=column < columns, other=0.0) if MASKED else tl.load(logits + column)
    logit = _real_logit(stored, bias, column, column < end, softcap, BIAS, SOFTCAP)
    if MASKED:
        logit = tl.where(column < end, logit, -float("inf"))
    if MEAN:
        sums += tl.sum(tl.where(column < end, logit, 0.0), 1)
    top = tl.max(logit, 1)
    places = tl.where(top > tops, first, places)
    newest = tl.maximum(tops, top)
    finite = tl.where(newest == -float("inf"), 0.0, newest)   # −inf alone adds 0, not NaN
    below, drop = logit - finite[:, None], tops - finite
    powers, shrink = tl.exp(below), tl.exp(drop)
    if ENTROPY:
        spreads = _moved(spreads, totals, drop, shrink) + tl.sum(powers * tl.maximum(below, FAR), 1)
    totals = totals * shrink + tl.sum(powers, 1)
    return newest, totals, places, sums, spreads


@triton.jit
def _moved(spread, total, drop, shrink):
    """Σ exp(x)·x, where each x of the old sum grew by ``drop``; ``total`` is the old Σ exp(x), ``shrink`` exp(drop)."""
    return shrink * (spread + tl.maximum(drop, FAR) * total)


# debug=True keeps the assertion on the labels: the device refuses them without making the host wait.
@triton.jit(debug=True)
def _absorb(
    logits, stride, labels, bias, lse, best_logp, best_token, label_logp,
    mean_logp, entropy, start, width, columns, vocabulary, softcap, FIRST: tl.constexpr, LAST: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, MEAN: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr,
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
    whole = end // (LANES * WIDE) * (LANES * WIDE)
    for first in range(0, whole, LANES * WIDE):
        tops, totals, places, sums, spreads = _take(
            logits, bias, first, end, columns, softcap, tops, totals, places, sums, spreads,
            BIAS, SOFTCAP, MEAN, ENTROPY, LANES, False,
        )
    if whole < end:
        tops, totals, places, sums, spreads = _take(
            logits, bias, whole, end, columns, softcap, tops, totals, places, sums, spreads,
            BIAS, SOFTCAP, MEAN, ENTROPY, LANES, True,
        )
    largest = tl.max(tops, 0)
    finite = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(totals * tl.exp(tops - finite), 0)
    spread = 0.0
    if ENTROPY:
        spread = tl.sum(_moved(spreads, totals, tops - finite, tl.exp(tops - finite)), 0)
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
        finite = tl.where(newest == -float("inf"), 0.0, newest)
        if ENTROPY:
            spread = _moved(spread, total, largest - finite, tl.exp(largest - finite))
            earlier, drop = tl.load(best_logp + row), before - finite
            spread += _moved(tl.load(entropy + row), earlier, drop, tl.exp(drop))
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


@triton.jit
def _differentiate(
    logits, stride, labels, bias, lse, best_token, by_lse, by_best,
    by_label, by_mean, lse_step, best_step, label_step, mean_step,
    start, width, columns, vocabulary, softcap,
    BY_LSE: tl.constexpr, BY_BEST: tl.constexpr, BY_LABEL: tl.constexpr, BY_MEAN: tl.constexpr,
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
        gradient = tl.exp(logit - tl.load(lse + row)) * soft
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
        if SOFTCAP:
            gradient *= 1.0 - (logit / softcap) * (logit / softcap)
        tl.store(logits + column, tl.where(column < width, gradient, 0.0), mask=column < columns)


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
    logits, stride, labels, texts, owner, lse, best_token, cross_logp, by_cross, by_lse, by_best, by_label, by_mean,
    lse_step, best_step, label_step, mean_step, U, start, width, vocabulary, softcap,
    BY_LSE: tl.constexpr, BY_BEST: tl.constexpr, BY_LABEL: tl.constexpr, BY_MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
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
    if SOFTCAP:
        capped = (logp + tl.load(lse + row)) / softcap
        total *= 1.0 - capped * capped
    end = tl.where(own == IGNORE, 0, width)
    tl.store(logits + column, total, mask=(column >= 0) & (column < end))
