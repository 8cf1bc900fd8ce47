"""logits of the next tokens, a seed for each text → a sample of each, the same in every batch and on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ngramloss.search.search import Search


def text_seeds(search: Search, sources: Sequence[Sequence[int]], *, seeds: Sequence[int] | None = None) -> Tensor:
    """A seed for each text, [B, texts], from the source, its number and the seed of the search, or its source's own."""
    tails = [repr([0, *source])[2:-1] for source in sources]  # ", 5, 6": to write a source takes longer than to hash it
    digests = [
        [hashlib.sha256(f"({seed}, {number}{tail})".encode()).digest() for number in range(search.texts)]
        for seed, tail in zip([search.seed] * len(tails) if seeds is None else seeds, tails, strict=True)
    ]
    return torch.tensor([[int.from_bytes(digest[:8], "big", signed=True) for digest in row] for row in digests])


def sampled(scores: Tensor, seeds: Tensor, length: Tensor, search: Search, *, has_kernels: bool = False) -> Tensor:
    """A sample of the next token of each text, [N], by scores, [N, V], that are −∞ for tokens that may not follow.

    The token with the largest sum of log-probability and Gumbel noise, a function of seed, length and token: so a text
    does not depend on its batch, engine or device. Kernels serve neither top_k nor top_p.
    """
    has_most = 0 < search.top_k < scores.shape[-1]
    if has_kernels and not has_most and search.top_p >= 1:
        from ngramloss.search.kernels import selection

        return selection.sample(scores, seeds, length, temperature=search.temperature)
    scores = scores.float() / search.temperature
    if has_most:
        least = scores.topk(search.top_k)[0][:, -1:]  # [N, 1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if search.top_p < 1:
        ascending, order = scores.sort(-1)  # [N, V] each
        out = ascending.softmax(-1).cumsum(-1) <= 1 - search.top_p  # [N, V]
        out[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
    return (scores + _gumbel(seeds, length, scores.shape[-1]).to(scores)).argmax(-1)


def _gumbel(seeds: Tensor, length: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise, [N, V]."""
    tokens = torch.arange(vocabulary, device=seeds.device)  # [V]
    texts = _mixed(seeds.unsqueeze(-1) + 0x632BE59BD9B4E019 * length)  # [N, 1]
    mixed = _mixed(texts + 0x1F123BB5159A55E5 * tokens)  # [N, V]
    uniform = ((mixed >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)  # [N, V]
    return -(-uniform.log()).log()


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits, well mixed: the last steps of SplitMix64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * factor
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
