"""token ids → which n-gram windows are real, which are equal, and how often each occurs.

Nothing is hashed: two windows are equal only if their tokens are. Shapes depend only on shapes, and no value is copied
to the host, so everything runs inside ``torch.compile(fullgraph=True)``. S = max(T − n + 1, 0); an n above T costs
nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.stats import IGNORE_INDEX, TokenStats


def sums(values: Tensor, n: int) -> Tensor:
    """Sum over each window of n positions along dimension 1, [B, S]."""
    S = max(values.shape[1] - n + 1, 0)
    if S == 0:
        return values[:, :0]                                             # [B, 0]
    return torch.stack([values[:, i : i + S] for i in range(n)]).sum(0)  # [B, S]


def diagonal_sums(values: Tensor, n: int) -> Tensor:
    """Sum of ``values[:, t+i, u+i]`` over i < n, for each pair of windows t and u, [B, S, R]. Values are [B, T, U]."""
    S, R = (max(length - n + 1, 0) for length in values.shape[1:])
    total = values[:, :S, :R]                                            # [B, S, R]
    for i in range(1, n if S and R else 0):
        total = total + values[:, i : i + S, i : i + R]                  # [B, S, R]
    return total


def same_length(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two batches of token ids, the shorter one padded to the length of the longer, [B, L] each."""
    L = max(one.shape[-1], other.shape[-1])
    padded = [F.pad(ids, (0, L - ids.shape[-1]), value=IGNORE_INDEX) for ids in (one, other)]   # [B, L] each
    return padded[0], padded[1]


def real(labels: Tensor, n: int) -> Tensor:
    """Whether all n labels of a window count, for padding at any position, [B, S]."""
    if n > labels.shape[1]:
        return labels[:, :0] != IGNORE_INDEX                             # [B, 0]
    return sums((labels != IGNORE_INDEX).long(), n) == n                 # [B, S]


def missed(stats: TokenStats, labels: Tensor, amount: Tensor, *, n: int) -> Tensor:
    """One minus the sum of ``amount``, what each window earned divided by their number W, [B, S]; 1 without windows,
    [B].

    If tokens have weights, it is the sum over windows of their tokens' mean weight times (1/W − amount), and the mean
    weight of a row's tokens without windows.
    """
    if stats.weights is None:
        return 1 - amount.sum(-1)                                        # [B]
    whole = real(labels, n)                                              # [B, S]
    windows, tokens = whole.sum(-1), (labels != IGNORE_INDEX).sum(-1)    # [B] each
    weight = (sums(stats.weights, n) / n).where(whole, 0.0)              # [B, S]
    share = windows.clamp_min(1).to(amount.dtype).reciprocal().unsqueeze(-1)   # [B, 1]
    value = (weight * (share - amount)).sum(-1)                          # [B]
    return value.where(windows > 0, stats.weights.sum(-1) / tokens.clamp_min(1))   # [B]


def ids(*sequences: Tensor, n: int) -> tuple[Tensor, ...]:
    """An n-gram id for each window of several sequences, [B, S] each: equal in a row exactly if the windows are.

    The id of a window of a + b tokens is made from the ids of its first a and of its last b tokens, so the length at
    most doubles in each round: log₂ n rounds, each O(T log T). Token ids must be below 2³¹ in size, ids are below the
    number of windows in a row. Windows over padding get one too: mask them with :func:`real`.
    """
    keys = torch.stack(sequences, dim=1)                                 # [B, sequences, T]
    if n > keys.shape[-1]:
        return keys[..., :0].unbind(1)
    length = 1
    if n == 1:
        return _numbered(keys).unbind(1)
    while length < n:
        step = min(length, n - length)
        keys = _numbered(keys[..., :-step] * 2**32 + keys[..., step:])   # [B, sequences, T - length - step + 1]
        length += step
    return keys.unbind(1)


def count(ids: Tensor, *, among: Tensor, where: Tensor) -> Tensor:
    """For each window, the number of windows in ``among``, marked by ``where``, with the same n-gram id, [B, S]."""
    if _compares_pairs(ids):
        return ((ids.unsqueeze(2) == among.unsqueeze(1)) & where.unsqueeze(1)).sum(-1)   # [B, S]
    return pooled(where.long(), ids=among).gather(-1, ids)               # [B, S]


def pooled(amounts: Tensor, *, ids: Tensor) -> Tensor:
    """Sum of amounts for each n-gram id, [B, 2S], for ids of at most two sequences.

    On a GPU floating-point amounts are added with atomics, in no fixed order unless PyTorch is in deterministic mode.
    """
    empty = amounts.new_zeros(ids.shape[0], 2 * ids.shape[1])            # [B, 2S]
    return empty.scatter_add(-1, ids, amounts)                           # [B, 2S]


def earlier(ids: Tensor, *, where: Tensor) -> Tensor:
    """For each window, the number of earlier windows, marked by ``where``, with the same n-gram id, [B, S]."""
    ordered, order = ids.sort(dim=-1, stable=True)                       # [B, S] each
    marked = where.long().gather(-1, order)                              # [B, S]
    before = marked.cumsum(-1) - marked                                  # [B, S]
    first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)[:, : ids.shape[1]]   # [B, S]
    base = before.where(first, 0).cummax(-1).values if ids.shape[1] else before   # [B, S]
    return torch.zeros_like(ids).scatter(-1, order, before - base)       # [B, S]


def _numbered(keys: Tensor) -> Tensor:
    """A number below N for each of the N keys of a row; numbers are equal exactly if the keys are."""
    flat = keys.flatten(1)                                               # [B, N]
    N = flat.shape[1]
    if _compares_pairs(flat):
        equal = flat.unsqueeze(2) == flat.unsqueeze(1)                   # [B, N, N]
        return torch.arange(N, device=keys.device).where(equal, N).amin(-1).view_as(keys)
    ordered, order = flat.sort(dim=-1)                                   # [B, N] each
    fresh = F.pad((ordered[:, 1:] != ordered[:, :-1]).long(), (1, 0))[:, :N]   # [B, N]
    return torch.zeros_like(flat).scatter(-1, order, fresh.cumsum(-1)).view_as(keys)


MOST_KEYS_IN_PAIRS, MOST_PAIRS = 1024, 2**26


def _compares_pairs(keys: Tensor) -> bool:
    """Whether comparing all pairs of a row beats sorting it, as on a GPU, and fits into memory (docs/dev/log.md)."""
    short = 0 < keys.shape[1] <= MOST_KEYS_IN_PAIRS and keys.numel() * keys.shape[1] <= MOST_PAIRS
    return keys.device.type != "cpu" and short
