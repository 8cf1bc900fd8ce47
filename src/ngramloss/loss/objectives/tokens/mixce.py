"""TokenStats → a mixture of forward and reverse cross-entropy (MixCE)."""

from __future__ import annotations

from torch import Tensor

from ngramloss.loss.objectives.tokens.weighted import weighted_ce
from ngramloss.loss.stats import TokenStats


def mixce(stats: TokenStats, labels: Tensor, *, eta: float = 0.5) -> Tensor:
    r"""Forward and approximate reverse cross-entropy of the reference tokens, mixed, summed over a sequence, [B].

    .. math::
        \ell_b = -\sum_t \big( \eta + (1-\eta)\, \mathrm{sg}(p_t(y_t)) \big) \log p_t(y_t)

    where sg stops the gradient, after Zhang et al. (2023): η of cross-entropy, which spreads probability over all that
    the data contain, and 1 − η of the reverse direction, which takes it from what the data do not contain. η = 1 is
    ``ce``, η = 0 is ``dft``. The weight of a token is never below η.

    Args:
        eta: share of cross-entropy, from 0 to 1.

    Returns:
        Sums of 0 or more; 0 for a row that contains only padding. A token of probability 0 adds infinity, as in ``ce``,
        except with η = 0, where it adds 0.

    Example:
        >>> import torch
        >>> from ngramloss import token_stats
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> stats = token_stats(torch.zeros(1, 3, 4), labels)
        >>> mixce(stats, labels, eta=0.2) / torch.tensor(4.0).log()     # 2 · (0.2 + 0.8 · ¼)
        tensor([0.8000])
    """
    return weighted_ce(stats, labels, eta + (1 - eta) * stats.label_logp.exp())   # [B]
