"""logits and caches of a search → the best tokens of each row, and attention to texts and sources, in Triton kernels.

PyTorch would copy all caches at each token, because beams change places, and read the logits ten times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that one program of :func:`top` reads."""


def top(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row, their tokens, and the row's log-sum-exp.

    Args:
        logits: [N, V]; rows may be further apart than V.
        count: how many are wanted.

    Returns:
        Values and tokens [N, C], where C is at least ``count``: the best of each block of the row, so that the best of
        the row are among them; and the log-sum-exp, [N].
    """
    (N, V), device = logits.shape, logits.device
    blocks = triton.cdiv(V, BLOCK)
    values = torch.empty(N, blocks, count, device=device)                # [N, blocks, count]
    tokens = torch.empty(N, blocks, count, dtype=torch.long, device=device)      # [N, blocks, count]
    sums = torch.empty(N, blocks, device=device)                         # [N, blocks]
    _top[(N, blocks)](logits, values, tokens, sums, logits.stride(0), V, blocks, count, BLOCK=BLOCK, num_warps=8)
    return values.flatten(1), tokens.flatten(1), sums.logsumexp(-1)


@triton.jit
def _top(logits, values, tokens, sums, stride, V, blocks, count, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    token = block * BLOCK + place
    left = tl.load(logits + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    highest = tl.max(left, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)   # every token may be ruled out
    tl.store(sums + row * blocks + block, shift + tl.log(tl.sum(tl.exp(left - shift), 0)))
    out = (row * blocks + block) * count
    for number in range(count):
        best, at = tl.max(left, 0, return_indices=True)
        tl.store(values + out + number, best)
        tl.store(tokens + out + number, (block * BLOCK + at).to(tl.int64))
        left = tl.where(place == at, float("-inf"), left)


def attend_to_text(
    queries: Tensor, keys: Tensor, values: Tensor, cached: tuple[Tensor, Tensor], origin: Tensor, position: Tensor, *,
    scale: float, bias: Tensor | None = None,
) -> Tensor:
    """Attention of the newest token of each text to the text so far; its key and value are put into the caches.

    Args:
        queries, keys, values: of the newest tokens, [B, K, H · d].
        cached: keys and values of all texts, [B · K, H, L, d] each; changed in place.
        origin: the beam in whose part of the cache each position of a text is, [B, K, L].
        position: of the newest tokens, [].
        scale: multiplies the products of queries and keys.
        bias: of the newest position to each other, [H, L].
    """
    (B, K, _), (_, H, L, d) = queries.shape, cached[0].shape
    found = torch.empty_like(queries)                                    # [B, K, H · d]
    _attend_to_text[(B * K, H)](
        queries.contiguous(), keys.contiguous(), values.contiguous(), *cached, origin, position,
        queries if bias is None else bias, found, scale, K, H, L, d,
        HAS_BIAS=bias is not None, TOKENS=32, WIDTH=triton.next_power_of_2(d), num_warps=1,
    )
    return found


@triton.jit
def _attend_to_text(
    queries, keys, values, cached_keys, cached_values, origin, position, bias, found, scale, K, H, L, d,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = tl.load(position)
    across = tl.arange(0, WIDTH)
    inside = across < d
    own = row * H * d + head * d + across
    query = tl.load(queries + own, mask=inside, other=0.0).to(tl.float32) * scale
    key = tl.load(keys + own, mask=inside, other=0.0)
    value = tl.load(values + own, mask=inside, other=0.0)
    kept = ((row * H + head) * L + here) * d + across
    tl.store(cached_keys + kept, key, mask=inside)
    tl.store(cached_values + kept, value, mask=inside)
    highest = tl.sum(query * key.to(tl.float32), 0)
    if HAS_BIAS:
        highest += tl.load(bias + head * L + here).to(tl.float32)
    total = highest * 0.0 + 1.0
    mean = value.to(tl.float32)
    first = row // K * K
    for start in range(0, here, TOKENS):
        at = start + tl.arange(0, TOKENS)
        before = at < here
        beam = first + tl.load(origin + row * L + at, mask=before, other=0)
        places = ((beam * H + head) * L + at)[:, None] * d + across[None, :]
        real = before[:, None] & inside[None, :]
        scores = tl.sum(tl.load(cached_keys + places, mask=real, other=0.0).to(tl.float32) * query[None, :], 1)
        if HAS_BIAS:
            scores += tl.load(bias + head * L + at, mask=before, other=0.0).to(tl.float32)
        scores = tl.where(before, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 0))
        weights = tl.exp(scores - new)
        shrunk = tl.exp(highest - new)
        rows = tl.load(cached_values + places, mask=real, other=0.0).to(tl.float32)
        mean = mean * shrunk + tl.sum(rows * weights[:, None], 0)
        total = total * shrunk + tl.sum(weights, 0)
        highest = new
    tl.store(found + own, (mean / total).to(found.dtype.element_ty), mask=inside)


def attend_to_source(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """Attention of the newest tokens of all texts to their source, [B, K, H · d].

    Args:
        queries: [B, K, H · d].
        keys, values: of the sources, [B, H, S, d].
        lengths: tokens of each source, [B].
        scale: multiplies the products of queries and keys.
    """
    (B, K, _), (_, H, S, d) = queries.shape, keys.shape
    found = torch.empty_like(queries)                                    # [B, K, H · d]
    texts = min(max(16, triton.next_power_of_2(K)), 64)   # 16 is the least of a matrix unit
    _attend_to_source[(B, H, triton.cdiv(K, texts))](
        queries.contiguous(), keys, values, lengths, found, scale, K, H, S, d,
        TEXTS=texts, TOKENS=64, WIDTH=max(16, triton.next_power_of_2(d)), num_warps=4,
    )
    return found


@triton.jit
def _attend_to_source(
    queries, keys, values, lengths, found, scale, K, H, S, d,
    TEXTS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):
    source, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + source)
    text = part * TEXTS + tl.arange(0, TEXTS)
    across = tl.arange(0, WIDTH)
    inside = across < d
    own = ((source * K + text) * H + head)[:, None] * d + across[None, :]
    mine = (text < K)[:, None] & inside[None, :]
    query = tl.load(queries + own, mask=mine, other=0.0)
    highest = tl.full([TEXTS], float("-inf"), tl.float32)
    total = tl.zeros([TEXTS], tl.float32)
    mean = tl.zeros([TEXTS, WIDTH], tl.float32)
    base = (source * H + head) * S
    for start in range(0, length, TOKENS):
        at = start + tl.arange(0, TOKENS)
        before = at < length
        places = (base + at)[:, None] * d + across[None, :]
        real = before[:, None] & inside[None, :]
        key = tl.load(keys + places, mask=real, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(before[None, :], scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrunk = tl.exp(highest - new)
        value = tl.load(values + places, mask=real, other=0.0)
        mean = mean * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        highest = new
    tl.store(found + own, (mean / total[:, None]).to(found.dtype.element_ty), mask=mine)
