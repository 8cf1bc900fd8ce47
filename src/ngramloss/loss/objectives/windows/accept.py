"""TokenStats → how much of a drafted block a verifier would accept, and cross-entropies that stand for it."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.stats import IGNORE_INDEX, TokenStats


def accept(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""One minus the expected accepted length of a block of n tokens, as a share of the block, [B].

    .. math::
        \ell_b = 1 - \frac{1}{A} \sum_a \frac{1}{k_a} \sum_{m \le k_a} \prod_{i<m} p_{a+i}(y_{a+i})

    A verifier accepts the first m tokens of a draft if all of them are its own: the product is the probability of that
    for a sampled draft, if the labels are the verifier's text. Only label log-probabilities are read. The first places
    of a block have the largest gradient, and a place after an impossible one has none.

    A block begins at each of the A places that ``stats.anchors`` marks, and blocks may overlap. Without anchors, every
    run of labels is cut into blocks of n from its first label on. A block ends after n labels, before a label that does
    not count, and with its row or text; k_a ≤ n is its own length. A marked place whose label does not count begins no
    block.

    Returns:
        Losses in [0, 1]. A row without a block scores exactly 1, and its gradient is zero. Time and memory grow with
        T · min(n, T). A place whose probability underflows earns 0 and has no gradient.

    Example:
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 2, 3]])
        >>> half = torch.zeros(1, 3, 4).scatter(-1, labels.unsqueeze(-1), torch.tensor(3.0).log().expand(1, 3, 1))
        >>> accept(token_stats(half, labels), labels, n=2)      # 1 - (½ + ¼)/2 for two words, 1 - ½ for the third
        tensor([0.5625])
    """
    share = block_shares(stats, labels, n=n)                             # [B, T, K]
    return 1 - _sum(reached(stats, labels, n=n), share)                  # [B]


def accept_detached(stats: TokenStats, labels: Tensor, *, n: int, alpha: float = 0.5) -> Tensor:
    r"""Cross-entropy in which a place counts by the accepted length that depends on it, a mean over blocks, [B].

    .. math::
        \ell_b = -\frac{1}{A} \sum_a \frac{1}{k_a} \sum_{j \le k_a}
                 \mathrm{sg}\Big( \sum_{m=j}^{k_a} \prod_{i \le m} \tilde p_i \Big) \log p_j,
                 \qquad \tilde p = (1 - \alpha) p + \alpha

    After D-PACE (arXiv 2605.18810). Blocks, and the places i, j and m of a block, are those of :func:`accept`. With α =
    0 its gradient is that of ``accept``; with α = 1 the weights fall linearly with the place. They are not normalised.

    Args:
        alpha: keeps later places of a block from losing all weight while the first ones are improbable, from 0 to 1.

    Returns:
        Losses of 0 or more; 0 without a block. A place with weight 0 adds exactly 0, also where log p is −inf.
    """
    share = block_shares(stats, labels, n=n)                             # [B, T, K]
    weight = tails(stats, share, alpha=alpha)                            # [B, T, K]
    costs = -weight * _ahead(stats.label_logp, share.shape[-1])          # [B, T, K]
    return _sum(costs.masked_fill(weight == 0, 0.0), share)              # [B]


def accept_gated(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    r"""Cross-entropy up to the first place of a block where the best token is wrong, a mean over blocks, [B].

    .. math::
        \ell_b = -\frac{1}{A} \sum_a \frac{1}{k_a} \sum_{j \le f_a} \log p_j

    with :math:`f_a` the first place of the block where the best token is not the label, or the last place. After
    Spec-AUF (arXiv 2607.01893). Blocks are those of :func:`accept`; a sum is divided by the block's length, not by
    :math:`f_a`, so one more correct place adds a cost of its own.

    Returns:
        Losses of 0 or more; 0 without a block.
    """
    share = block_shares(stats, labels, n=n)                             # [B, T, K]
    costs = -_ahead(stats.label_logp, share.shape[-1])                   # [B, T, K]
    return _sum(costs, share.where(opened(stats, labels, n=n), 0.0))     # [B]


def block_shares(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """What place i of the block that begins at t counts: 1/(A · k_a); 0 if none begins at t or it has ended, [B, T, K].

    K is n, or T if that is less.
    """
    T, K = labels.shape[1], _width(labels, n)
    counts = labels != IGNORE_INDEX                                      # [B, T]
    if stats.anchors is None:
        here = torch.arange(1, T + 1, device=labels.device)              # [T]
        gap = here.where(~counts, 0).cummax(-1).values if T else labels   # [B, T], the last label that does not count
        begins = (here - gap - 1) % K == 0                               # [B, T]
    else:
        begins = stats.anchors > 0                                       # [B, T]
    inside = _ahead(counts.long(), K).cumprod(-1) * begins.unsqueeze(-1)   # [B, T, K]
    length = inside.sum(-1, keepdim=True)                                # [B, T, 1]
    blocks = (length > 0).sum(1, keepdim=True)                           # [B, 1, 1]
    return inside.to(stats.label_logp.dtype) / (length * blocks).clamp_min(1)   # [B, T, K]


def reached(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """The probability of the labels from t to t + i together, [B, T, K]."""
    return _running(_ahead(stats.label_logp, _width(labels, n))).exp()   # [B, T, K]


def tails(stats: TokenStats, share: Tensor, *, alpha: float) -> Tensor:
    """The weights of :func:`accept_detached`, without gradient, [B, T, K]."""
    logp = _ahead(stats.label_logp.detach(), share.shape[-1])            # [B, T, K]
    smoothed = ((1 - alpha) * logp.exp() + alpha).log()                  # [B, T, K]
    reach = _running(smoothed).exp().where(share > 0, 0.0)               # [B, T, K]
    return _running(reach.flip(-1)).flip(-1)                             # [B, T, K]


def opened(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """Whether the best tokens from t to t + i − 1 are all labels, [B, T, K]."""
    wrong = _ahead((stats.best_token != labels).long(), _width(labels, n))   # [B, T, K]
    return wrong.cumsum(-1) == wrong                                     # [B, T, K]


def _width(labels: Tensor, n: int) -> int:
    return max(min(n, labels.shape[1]), 1)


def _ahead(values: Tensor, K: int) -> Tensor:
    """The values at t, t + 1, …, t + K − 1, 0 after the end, [B, T, K]."""
    return F.pad(values, (0, K)).unfold(-1, K, 1)[:, : values.shape[1]]   # [B, T, K]


def _running(values: Tensor) -> Tensor:
    """Cumulative sums; PyTorch's own are not deterministic on a GPU, and raise where that is asked for, [B, T, K]."""
    return torch.stack([*accumulate(values.unbind(-1))], -1)             # [B, T, K]


def _sum(amount: Tensor, share: Tensor) -> Tensor:
    return (amount.where(share > 0, 0.0) * share).sum((1, 2))            # [B]
