"""TokenStats → cross-entropy of a ProphetNet's further streams, summed over the tokens of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ngramloss as ng

if TYPE_CHECKING:
    from torch import Tensor


def future(stats: ng.TokenStats, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    r"""Negative log-likelihood of the reference under the further streams, summed over these and a sequence, [B].

    .. math::
        \ell_b = -\sum_{s=2}^{n} \sum_t \Big[ (1-\varepsilon) \log p^{(s)}_t(y_t)
                 + \frac{\varepsilon}{V} \sum_v \log p^{(s)}_t(v) \Big]

    A ProphetNet has n streams. The first predicts a token from all tokens before it, stream s without the last s − 1 of
    these: it looks s tokens ahead. Training on all of them, Qi et al. (2020), keeps a model from relying on the last
    words alone; texts are written with the first. ``ce + future`` is the loss of the authors' code, which adds up
    streams and averages over tokens; Hugging Face's own loss is a mean over both, so it is n times smaller.

    Args:
        smoothing: share of the target spread evenly over the vocabulary, from 0 to 1.

    Returns:
        Sums, 0 or more; 0 for a row that contains only padding.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> stats = token_stats(torch.zeros(1, 3, 4), labels)
        >>> stats = stats._replace(future_logp=2 * stats.label_logp)   # two further streams
        >>> future(stats, labels) / torch.tensor(4.0).log()
        tensor([4.])
    """
    if stats.future_logp is None:
        raise ValueError("future needs `future_logp`, which only the streams of a ProphetNet have.")
    if smoothing and stats.future_mean_logp is None:
        raise ValueError("future with smoothing needs `future_mean_logp`.")
    further = stats._replace(label_logp=stats.future_logp, mean_logp=stats.future_mean_logp)
    return ng.OBJECTIVES["ce"].formula()(further, labels, smoothing=smoothing)  # [B]


FUTURE = ng.Objective(
    future,
    about={"": "ProphetNet: cross-entropy of the streams that look further ahead. Only for a ProphetNet."},
    options={"smoothing": ng.Setting(0.0, least=0, most=1, help="amount of label smoothing")},
    option_needs={"smoothing": "future_mean_logp"},
    needs=("future_logp",),
    least_n=None,
    per="token",
    by_position=True,
    weighted=True,
)
