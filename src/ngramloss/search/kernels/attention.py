"""caches of a search → attention to texts and sources, in Triton kernels; PyTorch would copy caches as beams move."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ngramloss.search.fused_layers import Norm


class PromptAttention(NamedTuple):
    """Attention to a prompt alone, to be joined with attention to the text behind it."""

    means: Tensor  # of the values, [B, K, H · d], in fp32; 0 if nothing is attended to
    sums: Tensor  # the log-sum-exp of the scores, [B, K, H]


def attend_to_text(
    queries: Tensor, keys: Tensor, values: Tensor, cached: tuple[Tensor, Tensor], origin: Tensor, position: Tensor, *,
    scale: float, bias: Tensor | None = None, prompt: PromptAttention | None = None, softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of each text's newest token, [B, K, H · G · d] with G queries a key, to the text so far and a prompt.

    ``cached``: keys and values of all texts, [B · K, H, L, d] each, changed in place. ``origin``: the beam in whose
    part of the cache each position is, [B, K, L]. ``bias``: [H · G, L]. ``window``: positions, with its own; None: all.
    """
    (B, K, _), (_, H, L, d) = queries.shape, cached[0].shape
    found = queries.new_empty(queries.shape)                             # [B, K, H · G · d]
    G, wide = queries.shape[2] // (H * d), triton.next_power_of_2(d)
    (queries, query_stride), (keys, key_stride), (values, value_stride) = map(_spaced, (queries, keys, values))
    _attend_to_text[(B * K, H * G)](
        queries, keys, values, *cached, origin, position, queries if bias is None else bias,
        *(prompt or (queries, queries)), found, scale, softcap or 0.0, window or 0, query_stride, key_stride,
        value_stride, K, H, L, d, G=G, HAS_BIAS=bias is not None, HAS_PROMPT=prompt is not None,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, TOKENS=32, WIDTH=wide, num_warps=max(1, wide // 64),
    )
    return found


def _spaced(rows: Tensor) -> tuple[Tensor, int]:
    """Rows [B, K, width], which may be parts of longer ones, and how far they are from each other."""
    if rows.stride(2) != 1 or rows.stride(0) != rows.shape[1] * rows.stride(1):
        rows = rows.contiguous()
    return rows, rows.stride(1)


@triton.jit
def _attend_to_text(
    queries, keys, values, cached_keys, cached_values, origin, position, bias, prompt_means, prompt_sums, found, scale,
    softcap, window, query_stride, key_stride, value_stride, K, H, L, d, G: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PROMPT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, query_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = query_head // G
    here = tl.load(position)
    across = tl.arange(0, WIDTH)
    inside = across < d
    own = (row * H * G + query_head) * d + across
    query = tl.load(queries + row * query_stride + query_head * d + across, mask=inside, other=0.0)
    query = query.to(tl.float32) * scale
    key = tl.load(keys + row * key_stride + head * d + across, mask=inside, other=0.0)
    value = tl.load(values + row * value_stride + head * d + across, mask=inside, other=0.0)
    kept = ((row * H + head) * L + here) * d + across
    if query_head % G == 0:   # one of those that share them
        tl.store(cached_keys + kept, key, mask=inside)
        tl.store(cached_values + kept, value, mask=inside)
    highest = tl.sum(query * key.to(tl.float32), 0)
    if HAS_CAP:
        highest = _capped(highest, softcap)
    if HAS_BIAS:
        highest += tl.load(bias + query_head * L + here).to(tl.float32)
    total = highest * 0.0 + 1.0
    mean = value.to(tl.float32)
    beams = row // K * K
    first = here * 0
    if HAS_WINDOW:
        first = tl.maximum(here - window + 1, 0)
    for start in range(first, here, TOKENS):
        at = start + tl.arange(0, TOKENS)
        before = at < here
        beam = beams + tl.load(origin + row * L + at, mask=before, other=0)
        places = ((beam * H + head) * L + at)[:, None] * d + across[None, :]
        real = before[:, None] & inside[None, :]
        stored = tl.load(cached_keys + places, mask=real, other=0.0)
        rows = tl.load(cached_values + places, mask=real, other=0.0).to(tl.float32)   # early: it takes a while
        scores = tl.sum(stored.to(tl.float32) * query[None, :], 1)
        if HAS_CAP:
            scores = _capped(scores, softcap)
        if HAS_BIAS:
            scores += tl.load(bias + query_head * L + at, mask=before, other=0.0).to(tl.float32)
        scores = tl.where(before, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 0))
        weights = tl.exp(scores - new)
        shrunk = tl.exp(highest - new)
        mean = mean * shrunk + tl.sum(rows * weights[:, None], 0)
        total = total * shrunk + tl.sum(weights, 0)
        highest = new
    if HAS_PROMPT:
        other = tl.load(prompt_sums + row * H * G + query_head)
        new = tl.maximum(highest, other)
        shrunk = tl.exp(highest - new)
        weight = tl.exp(other - new)
        mean = mean * shrunk + tl.load(prompt_means + own, mask=inside, other=0.0) * weight
        total = total * shrunk + weight
    tl.store(found + own, (mean / total).to(found.dtype.element_ty), mask=inside)


@triton.jit
def _capped(scores, softcap):
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


def attend_to_source(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """Attention of the newest tokens, [B, K, H · d], to their source's keys and values, [B, H, S, d], any strides."""
    found = queries.new_empty(queries.shape)                             # [B, K, H · d]
    _launch_to_source(queries, keys, values, lengths, found, scale=scale)
    return found


def attend_to_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, position: Tensor, *, scale: float,
    softcap: float | None = None, window: int | None = None,
) -> PromptAttention:
    """As :func:`attend_to_text`, to the prompt before the texts, whose keys and values are [B, H, S, d]."""
    B, K, width = queries.shape
    heads = width // keys.shape[3]                                       # H · G
    found = PromptAttention(*(torch.empty(B, K, size, device=queries.device) for size in (width, heads)))
    _launch_to_source(
        queries, keys, values, lengths, found.means, sums=found.sums, position=position, scale=scale, softcap=softcap,
        window=window,
    )
    return found


def _launch_to_source(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, found: Tensor, *, scale: float,
    sums: Tensor | None = None, position: Tensor | None = None, softcap: float | None = None, window: int | None = None,
) -> None:
    (B, K, _), (_, H, _, d) = queries.shape, keys.shape
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    G = queries.shape[2] // (H * d)
    rows = min(max(16, triton.next_power_of_2(K * G)), 64)   # 16 is the least of a matrix unit
    wide = max(16, triton.next_power_of_2(d))
    tokens = min(max(16, 2**14 // (wide * keys.element_size())), 64)   # keys that fit into the memory of a program
    queries, stride = _spaced(queries)
    # Heads come first: programs that run at the same time read the rows of a source that lie side by side.
    _attend_to_source[(H, B, triton.cdiv(K * G, rows))](
        queries, keys, values, lengths, lengths if position is None else position, found,
        found if sums is None else sums, scale, softcap or 0.0, window or 0, stride, *keys.stride()[:3], K, H, d, G=G,
        HAS_SUMS=sums is not None, HAS_CAP=softcap is not None, HAS_WINDOW=window is not None,
        ROWS=rows, TOKENS=tokens, WIDTH=wide, num_warps=4,
    )


@triton.jit
def _attend_to_source(
    queries, keys, values, lengths, position, found, sums, scale, softcap, window, stride, source_stride, head_stride,
    token_stride, K, H, d, G: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):
    head, source, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + source)
    row = part * ROWS + tl.arange(0, ROWS)   # the queries of all texts that share this head's keys
    text, query_head = source * K + row // G, head * G + row % G
    across = tl.arange(0, WIDTH)
    inside = across < d
    given = (text * stride + query_head * d)[:, None] + across[None, :]
    query_head += text * H * G
    own = query_head[:, None] * d + across[None, :]
    mine = (row < K * G)[:, None] & inside[None, :]
    query = tl.load(queries + given, mask=mine, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    base = source * source_stride + head * head_stride
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length + tl.load(position) - window + 1, 0)
    for start in range(first, length, TOKENS):
        at = start + tl.arange(0, TOKENS)
        before = at < length
        places = (base + at * token_stride)[:, None] + across[None, :]
        real = before[:, None] & inside[None, :]
        key = tl.load(keys + places, mask=real, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if HAS_CAP:
            scores = _capped(scores, softcap)
        scores = tl.where(before[None, :], scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrunk = tl.exp(highest - new)
        value = tl.load(values + places, mask=real, other=0.0)
        mean = mean * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        highest = new
    if HAS_SUMS:
        tl.store(sums + query_head, highest + tl.log(total), mask=row < K * G)
        total = tl.where(total > 0, total, 1.0)   # a prompt may have one token, or be outside of the window
    tl.store(found + own, (mean / total[:, None]).to(found.dtype.element_ty), mask=mine)


def reorder(origin: Tensor, parents: Tensor, position: Tensor) -> None:
    """Let beam k continue what beam ``parents[b, k]`` was up to this position, in place: [B, K, L], [B, K] and []."""
    B, K, L = origin.shape
    _reorder[(B,)](origin, parents, position, K, L, BEAMS=triton.next_power_of_2(K), TOKENS=64, num_warps=4)


@triton.jit
def _reorder(origin, parents, position, K, L, BEAMS: tl.constexpr, TOKENS: tl.constexpr):
    source = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BEAMS)
    parent = tl.load(parents + source * K + beam, mask=beam < K, other=0)
    here = tl.load(position)
    for start in range(0, here + 1, TOKENS):
        at = start + tl.arange(0, TOKENS)[None, :]
        real = (beam < K)[:, None] & (at <= here)
        continued = tl.load(origin + (source * K + parent)[:, None] * L + at, mask=real, other=0)
        tl.debug_barrier()   # other threads of the program read what is overwritten
        tl.store(origin + (source * K + beam)[:, None] * L + at, continued, mask=real)


def norm(hidden: Tensor, given: Norm, *, part: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """The norm of each row, or of its sum with ``part``, which has as many rows, or one; ``total`` becomes the sum."""
    hidden, part = hidden.contiguous(), None if part is None else part.contiguous()
    normed, D = torch.empty_like(hidden), hidden.shape[-1]               # [..., D]
    stride = D if part is not None and part.numel() == hidden.numel() else 0
    _norm[(hidden.numel() // D,)](
        hidden, hidden if part is None else part, given.weight, given.weight if given.bias is None else given.bias,
        normed if total is None else total, normed, given.eps, stride, D, HAS_PART=part is not None,
        HAS_TOTAL=total is not None, HAS_BIAS=given.bias is not None, CENTRED=given.centred,
        WIDTH=triton.next_power_of_2(D), num_warps=4,
    )
    return normed


def added_norm(hidden: Tensor, part: Tensor, given: Norm) -> tuple[Tensor, Tensor]:
    """``hidden + part`` and its norm, [..., D] each. ``part`` has as many rows, or one."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)      # [..., D]
    return total, norm(hidden, given, part=part, total=total)


@triton.jit
def _norm(
    hidden, part, weight, bias, total, normed, eps, stride, D, HAS_PART: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    across = tl.arange(0, WIDTH)
    inside = across < D
    own = row * D + across
    given = tl.load(hidden + own, mask=inside, other=0.0)
    if HAS_PART:
        other = tl.load(part + row * stride + across, mask=inside, other=0.0)
        given = (given.to(tl.float32) + other.to(tl.float32)).to(given.dtype)
    if HAS_TOTAL:
        tl.store(total + own, given, mask=inside)
    value = given.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / D, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    if not CENTRED:
        value = value.to(given.dtype).to(tl.float32)   # as transformers rounds
    value = value * tl.load(weight + across, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + across, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + own, value.to(given.dtype), mask=inside)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``, [B, K, F] each."""
    found = gate.new_empty(gate.shape)                                   # [B, K, F]
    (gate, gate_stride), (up, up_stride) = _spaced(gate), _spaced(up)
    B, K, F = found.shape
    _gated[(B * K, triton.cdiv(F, 1024))](gate, up, found, gate_stride, up_stride, F, WIDTH=1024, num_warps=4)
    return found


@triton.jit
def _gated(gate, up, found, gate_stride, up_stride, F, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    across = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = across < F
    value = tl.load(gate + row * gate_stride + across, mask=inside, other=0.0).to(tl.float32)
    value = (value * tl.sigmoid(value)).to(found.dtype.element_ty).to(tl.float32)   # as PyTorch rounds
    value = value * tl.load(up + row * up_stride + across, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + row * F + across, value.to(found.dtype.element_ty), mask=inside)


def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate queries and keys in place, each head's first half with the second; ``cos``, ``sin``: [B or 1, K, d]."""
    (B, K, _), (_, _, d) = queries.shape, cos.shape
    heads = queries.shape[2] // d, keys.shape[2] // d
    _rotate[(B * K,)](
        queries, keys, cos.contiguous(), sin.contiguous(), queries.stride(1), keys.stride(1), *heads, d,
        cos.shape[0] * K, HEADS=triton.next_power_of_2(max(heads)), HALF=triton.next_power_of_2(d // 2), num_warps=4,
    )


@triton.jit
def _rotate(
    queries, keys, cos, sin, query_stride, key_stride, query_heads, key_heads, d, angles,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    across = tl.arange(0, HALF)
    inside = across < d // 2
    angle = row % angles * d + across
    cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + d // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + d // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, HEADS)
    queries += row * query_stride
    keys += row * key_stride
    _rotate_heads(queries, head, query_heads, across, inside, d, cos_low, sin_low, cos_high, sin_high)
    _rotate_heads(keys, head, key_heads, across, inside, d, cos_low, sin_low, cos_high, sin_high)


@triton.jit
def _rotate_heads(rows, head, heads, across, inside, d, cos_low, sin_low, cos_high, sin_high):
    place = rows + head[:, None] * d + across[None, :]
    real = (head < heads)[:, None] & inside[None, :]
    low = tl.load(place, mask=real, other=0.0).to(tl.float32)
    high = tl.load(place + d // 2, mask=real, other=0.0).to(tl.float32)
    tl.store(place, (low * cos_low - high * sin_low).to(rows.dtype.element_ty), mask=real)
    tl.store(place + d // 2, (high * cos_high + low * sin_high).to(rows.dtype.element_ty), mask=real)
