"""CandidateStats and labels → n-gram objectives of the model's own greedy text instead of the forced path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ngramloss.loss.objectives import window_counts
from ngramloss.loss.objectives.windows.matches import Earned
from ngramloss.loss.objectives.windows.precision import clipped_shares
from ngramloss.loss.stats import IGNORE_INDEX, CandidateStats


def matches_student(stats: CandidateStats, labels: Tensor, *, n: int) -> Tensor:
    r"""One minus the mean probability of the own text's n-grams found in the reference, [B].

    .. math::
        \ell_b = 1 - \frac{1}{\max(W_o, W_r)} \sum_{t:\, c_{t:t+n} \in y} \frac{1}{K_t} \prod_{i<n} p_{t+i}(c_{t+i})

    with c the model's own greedy text, of :math:`W_o` windows, and y the reference, of :math:`W_r`; :math:`K_t` is
    the number of windows of c equal to window t. The longer one of both divides: a text that stops early cannot score
    well by its first words, and one that goes on earns no more. This is our own term, after Zhu et al.'s ``matches``.

    Returns:
        Losses in [0, 1]. 1 and no gradient if the text or the reference is shorter than n, or if there is no own text.

    Example:
        >>> from ngramloss.loss.stats import CandidateStats
        >>> tokens, greedy = torch.tensor([[[6, 7, 5]]]), torch.tensor([[True]])
        >>> sure = CandidateStats(torch.zeros(1, 1), torch.tensor([[3]]), torch.zeros(1, 1), greedy=greedy,
        ...                       tokens=tokens, token_logp=torch.zeros(1, 1, 3))
        >>> matches_student(sure, torch.tensor([[5, 6, 7, 8]]), n=2)     # 6 7 matches, 7 5 does not; three windows
        tensor([0.6667])
    """
    return 1 - matched(stats, labels, n=n).amount.sum(-1)                # [B]


def precision_student(stats: CandidateStats, labels: Tensor, *, n: int) -> Tensor:
    r"""Minus the share of the own text's probabilistic n-gram counts that the reference covers, [B].

    .. math::
        \ell_b = -\frac{\sum_g \min(\tilde C(g), C(g))}{\sum_g \tilde C(g)}, \qquad
        \tilde C(g) = \sum_{t:\, c_{t:t+n} = g} \prod_{i<n} p_{t+i}(c_{t+i})

    over the distinct n-grams g of the model's own greedy text c; C(g) is the count in the reference. Shao et al.
    (2018), *Greedy Search with Probabilistic N-gram Matching*, whose P-P2 is n = 2.

    Their code, GS4NMT, writes a text in the pass that is trained, and takes for c the most probable tokens after
    dropout, which may be others than those of the text. Here c is the text, written without dropout, maybe some steps
    before: its tokens need not be the most probable ones any more. Their mask also counts one position after the end
    token; ours ends with it.

    Returns:
        Losses in [−1, 0]. 0 and no gradient if the text or the reference is shorter than n, or if there is no own text.
    """
    return -covered(stats, labels, n=n).sum(-1)                          # [B]


def bag_student(stats: CandidateStats, labels: Tensor, *, n: int) -> Tensor:
    r"""L1 distance between the reference's bag of n-grams and the one expected along the own text, scaled, [B].

    .. math::
        \ell_b = \frac{W_o + W_r - 2 \sum_g \min(B(g), C(g))}{W_o + W_r}, \qquad B(g) = \sum_t \prod_{i<n} p_{t+i}(g_i)

    over the distinct n-grams g of the reference, which has :math:`W_r` windows and g C(g) times; t over the
    :math:`W_o` windows of the model's own greedy text. All tokens of the reference have a gradient at every position,
    also those that the text does not have.

    Shao et al. (2020), BoN-NAT, whose model predicts all tokens at once, and in training has the length of the
    reference: then W_o = W_r, and this is their 1 − Σ min(B, C)/W. In a model that writes token by token, p depends on
    the text before it: B(g) is the count expected along the own text, and not the mean over all texts.

    Time and memory grow with T · U.

    Returns:
        Losses in [0, 1]. 1 and no gradient if the text or the reference is shorter than n, or if there is no own text.
    """
    return 1 - found(stats, labels, n=n)[1].sum(-1)                      # [B]


def matched(stats: CandidateStats, labels: Tensor, *, n: int) -> Earned:
    """What the windows of the own text earn in :func:`matches_student`, [B, S] each."""
    tokens, logp, reference = _aligned(stats, labels)                    # [B, L] each
    real, of_reference = window_counts.real(tokens, n), window_counts.real(reference, n)   # [B, S] each
    own, wanted = window_counts.ids(tokens, reference, n=n)                     # [B, S] each
    hit = real & (window_counts.count(own, among=wanted, where=of_reference) > 0)   # [B, S]
    copies = window_counts.count(own, among=own, where=real)                    # [B, S]
    windows = torch.maximum(real.sum(-1), of_reference.sum(-1)).clamp_min(1).unsqueeze(-1)   # [B, 1]
    amount = (window_counts.sums(logp, n).exp() / (copies.clamp_min(1) * windows)).where(hit, 0.0)   # [B, S]
    return Earned(hit, copies, amount)


def covered(stats: CandidateStats, labels: Tensor, *, n: int) -> Tensor:
    """What the windows of the own text add to the precision of :func:`precision_student`, [B, S]."""
    tokens, logp, reference = _aligned(stats, labels)                    # [B, L] each
    real, of_reference = window_counts.real(tokens, n), window_counts.real(reference, n)   # [B, S] each
    return clipped_shares(tokens, logp, reference, real=real, of_reference=of_reference, n=n)   # [B, S]


def found(stats: CandidateStats, labels: Tensor, *, n: int) -> tuple[Tensor, Tensor]:
    """B(g) of each window of the reference, and what it earns in :func:`bag_student`, its share of its n-gram's."""
    assert stats.greedy_cross_logp is not None
    tokens, _ = stats.own_text()                                         # [B, T]
    counts = (tokens != IGNORE_INDEX).unsqueeze(2) & (labels != IGNORE_INDEX).unsqueeze(1)   # [B, T, U]
    logp = stats.greedy_cross_logp.where(counts, 0.0)                    # [B, T, U]
    real, of_reference = window_counts.real(tokens, n), window_counts.real(labels, n)  # [B, S'], [B, S]
    (reference,) = window_counts.ids(labels, n=n)                               # [B, S]
    copies = window_counts.count(reference, among=reference, where=of_reference).clamp_min(1)   # [B, S]
    probability = window_counts.diagonal_sums(logp, n).exp()                    # [B, S', S]
    expected = probability.where(real.unsqueeze(2) & of_reference.unsqueeze(1), 0.0).sum(1)   # [B, S]
    windows = (real.sum(-1) + of_reference.sum(-1)).clamp_min(1).unsqueeze(-1)   # [B, 1]
    bounded = torch.minimum(expected, copies.to(expected.dtype))         # [B, S]
    return expected, (2 * bounded / (copies * windows)).where(of_reference, 0.0)


def _aligned(stats: CandidateStats, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and log-probabilities of the own text, and the reference, all of the length of the longer, [B, L] each."""
    tokens, logp = stats.own_text()                                      # [B, T] each
    padded, reference = window_counts.same_length(tokens, labels)               # [B, L] each
    return padded, F.pad(logp, (0, padded.shape[-1] - logp.shape[-1])), reference
