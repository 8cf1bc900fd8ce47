"""CandidateStats and labels → log-probability of each token of a sample, times the credit of its n-grams."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.stats import IGNORE_INDEX, CandidateStats


class Credits(NamedTuple):
    """The credit of each token of the samples."""

    credit: Tensor  # the share of the windows over the token that are credited, 0 if there is none, [B, K, T]
    mean: Tensor  # the mean over samples of the mean over their tokens, [B]
    share: Tensor  # what a token counts in such a mean: 1 / (K · T_k), 0 where there is none, [B, K, T]


def credit(stats: CandidateStats, labels: Tensor, *, n: tuple[int, ...]) -> Tensor:
    r"""Minus the log-probability of the samples' tokens, weighted by the credit of each, [B].

    .. math::
        \ell_b = -\frac{1}{K} \sum_k \frac{1}{T_k} \sum_t (a_{kt} - \bar a) \log p(y_{kt}), \qquad
        \bar a = \frac{1}{K} \sum_k \frac{1}{T_k} \sum_t a_{kt}

    over the K samples of the row, without a gradient through a. A window of n tokens of a sample is credited if its
    n-gram g is in the reference, and it is among the first C(g) windows of g in the sample, where C(g) counts g in the
    reference. :math:`a_{kt}` is the share of the windows over token t, of all n together, that are credited, and 0 if
    there is none. So a text of the reference's n-grams gets credit for each of them, and nothing for repeating one:
    the counts of BLEU, for each token of the model's own text. This is our own term, after the paper's n-grams.

    Time is K · T log T.

    Returns:
        Any numbers. 0 and no gradient for a row without samples, and where no window is credited, as if the reference
        is shorter than every n. The gradient by the log-probabilities of all tokens adds up to 0.

    Example:
        >>> reference, tokens = torch.tensor([[5, 6, 7]]), torch.tensor([[[5, 6, 5]]])
        >>> logp, score = torch.tensor([[[-1.0, -1.0, -4.0]]]), torch.zeros(1, 1)
        >>> stats = CandidateStats(logp.sum(-1), torch.tensor([[3.0]]), score, tokens=tokens, token_logp=logp)
        >>> credits(stats, reference, n=(1,)).credit                     # the reference has 5 once
        tensor([[[1., 1., 0.]]])
        >>> credit(stats, reference, n=(1,))                             # −(⅓ · −1 + ⅓ · −1 − ⅔ · −4) / 3
        tensor([-0.6667])
    """
    assert stats.token_logp is not None
    found = credits(stats, labels, n=n)
    advantage = (found.credit - found.mean[:, None, None]) * found.share   # [B, K, T]
    return -(advantage * stats.token_logp).sum((-2, -1))                 # [B]


def credits(stats: CandidateStats, labels: Tensor, *, n: tuple[int, ...]) -> Credits:
    """The credit of each token, and what it counts; without gradient."""
    assert stats.tokens is not None
    assert stats.token_logp is not None
    B, K, T = stats.tokens.shape
    sample, reference = window_counts.same_length(stats.tokens.flatten(0, 1), labels.repeat_interleave(K, 0))  # B·K, L
    credited = covering = torch.zeros_like(sample)                       # [B·K, L]
    for length in n:
        real = window_counts.real(sample, length)                               # [B·K, S]
        own, wanted = window_counts.ids(sample, reference, n=length)            # [B·K, S] each
        count = window_counts.count(own, among=wanted, where=window_counts.real(reference, length))   # [B·K, S]
        hit = real & (window_counts.earlier(own, where=real) < count)           # [B·K, S]
        credited = credited + _over_tokens(hit, length, sample)          # [B·K, L]
        covering = covering + _over_tokens(real, length, sample)         # [B·K, L]
    shares = credited.to(stats.token_logp.dtype) / covering.clamp_min(1)   # [B·K, L]
    found = shares.view(B, K, sample.shape[-1])[..., :T]                  # [B, K, T]
    counts = stats.tokens != IGNORE_INDEX                                # [B, K, T]
    number = stats.present.sum(-1)[:, None, None] * counts.sum(-1, keepdim=True)   # [B, K, 1]
    share = counts.to(found.dtype) / number.clamp_min(1)                 # [B, K, T]
    return Credits(found, (found * share).sum((-2, -1)), share)


def _over_tokens(windows: Tensor, n: int, like: Tensor) -> Tensor:
    """How many of the marked windows each token is in, in the shape of ``like``, [N, L]."""
    if windows.shape[1] == 0:
        return torch.zeros_like(like)                                    # [N, L]
    return window_counts.sums(F.pad(windows.long(), (n - 1, n - 1)), n)         # [N, L]
