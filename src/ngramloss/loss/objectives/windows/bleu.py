"""TokenStats → estimate of expected BLEU."""

from __future__ import annotations

import torch
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.objectives.windows.bag import placements
from ngramloss.loss.stats import TokenStats

FLOOR = 1e-12  # lower limit of the clipped share of each n in the geometric mean


def bleu(stats: TokenStats, labels: Tensor, *, n: tuple[int, ...]) -> Tensor:
    r"""Minus the geometric mean over n of the expected clipped n-gram precision, [B].

    .. math::
        O_n = \sum_t \sum_g P_t(g) \min\Big(1, \frac{C(g)}{1 + \sum_{s \ne t} P_s(g)}\Big), \qquad
        P_t(g) = \prod_{i<n} p_{t+i}(g_i)

    over the distinct n-grams g of the reference, after Zhukov and Kretov (2017); a lower bound of the expected
    count only if C(g) = 1 and g cannot overlap itself. There is no brevity penalty: under teacher forcing lengths
    are equal. Time and memory grow with T²; memory is about 25 times ``cross_logp`` for n = 1, 2, 3, 4.

    Returns:
        Losses in [−1, 0]. An n longer than the reference is ignored; if all are, the loss is 0 without a gradient.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> reference = torch.tensor([[5, 6, 7]])
        >>> sure = 1e4 * torch.nn.functional.one_hot(reference, 8).float()
        >>> bleu(token_stats(sure, reference, needs=("cross_logp",)), reference, n=(1, 2))
        tensor([-1.])
    """
    shares = torch.stack([clipped_share(stats, labels, n=order) for order in n])   # [orders, B]
    present = torch.stack([window_counts.real(labels, order).any(-1) for order in n])     # [orders, B]
    logs = shares.clamp_min(FLOOR).log().where(present, 0.0)             # [orders, B]
    mean = (logs.sum(0) / present.sum(0).clamp_min(1)).exp()             # [B]
    return -mean.where(present.any(0), 0.0)                              # [B]


def clipped_share(stats: TokenStats, labels: Tensor, *, n: int) -> Tensor:
    """O_n / W, [B]."""
    real = window_counts.real(labels, n)                                        # [B, S]
    (reference,) = window_counts.ids(labels, n=n)                               # [B, S]
    copies = window_counts.count(reference, among=reference, where=real).clamp_min(1).unsqueeze(1)   # [B, 1, S]
    probability = placements(stats, labels, n=n)                         # [B, S, S]
    elsewhere = probability.sum(1, keepdim=True) - probability           # [B, S, S]
    clipped = probability * (copies / (1 + elsewhere)).clamp_max(1)      # [B, S, S]
    windows = real.sum(-1).clamp_min(1)                                  # [B]
    return (clipped / copies).sum((1, 2)) / windows                      # [B]
