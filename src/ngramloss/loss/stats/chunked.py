"""a block of logits → running statistics, or its gradient, in plain PyTorch and small slices of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ngramloss.loss.stats.head import Block, Running, Slopes, Taught
from ngramloss.loss.stats.labels import IGNORE_INDEX
from ngramloss.loss.stats.pairs import FARTHEST, Pairs
from ngramloss.loss.stats.teachers import NEAR, Compared, excess, log_ratio
from ngramloss.loss.stats.token_stats import FAR_BELOW, TextIds, cross_labels

SLICE_NUMBERS = {"cpu": 2**18}
"""Approximate number of logits in a slice: on a CPU few enough to stay in its cache, elsewhere 2²⁴."""


def absorb(block: Block, labels: Tensor, running: Running, pairs: Pairs | None = None) -> None:
    """Add the block to the running statistics."""
    lse, best_logp, best_token, label_logp, mean_logp, entropy, tempered = running
    before = None if pairs is None or block.first else (lse.clone(), best_logp.clone())   # [N] each
    for rows in _slices(block):
        logits = _exact(block, rows, copy=True)                          # [R, width]
        largest, best = logits.max(-1)                                   # [R] each
        if not block.first:
            newer = largest > lse[rows]                                  # [R]
            best = (best + block.start).where(newer, best_token[rows])   # [R]
            largest = largest.maximum(lse[rows])                         # [R]
        if mean_logp is not None:
            mean_logp[rows] = logits.sum(-1) + (0 if block.first else mean_logp[rows])
        here, column = _label_column(block, labels[rows])                # [R] each
        picked = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)     # [R]
        label_logp[rows] = picked.where(here, 0.0 if block.first else label_logp[rows])
        finite = largest.where(largest > -torch.inf, 0.0)                # [R]
        below = logits.sub_(finite.unsqueeze(-1))                        # [R, width]
        if tempered is not None and block.temperature is not None:
            heat = (below / block.temperature).exp_().sum(-1)            # [R]
            if not block.first:
                heat += tempered[rows] * ((lse[rows] - finite) / block.temperature).exp_()
            tempered[rows] = heat
        powers = below.exp_() if entropy is None else below.exp()        # [R, width]
        total = powers.sum(-1)                                           # [R]
        if entropy is not None:
            spread = powers.mul_(below.clamp_min_(FAR_BELOW)).sum(-1)    # [R]
            if not block.first:
                drop = (lse[rows] - finite).clamp_min(FAR_BELOW)         # [R]
                spread += drop.exp() * (entropy[rows] + drop * best_logp[rows])
            entropy[rows] = spread
        if not block.first:
            total += best_logp[rows] * (lse[rows] - finite).exp()
        lse[rows], best_logp[rows], best_token[rows] = largest, total, best
    if pairs is not None:
        _absorb_pairs(block, running, pairs, before)
    if block.last:
        ignored = labels == IGNORE_INDEX                                 # [N]
        if pairs is not None:
            _finish_pairs(running, pairs, ignored)
        if entropy is not None:
            entropy.div_(best_logp).neg_().add_(best_logp.log()).masked_fill_(ignored, 0.0)
        if tempered is not None and block.temperature is not None:
            tempered.log_().mul_(block.temperature).add_(lse)
        best_logp.log_().neg_()
        lse.sub_(best_logp)
        best_logp.masked_fill_(ignored, 0.0)
        label_logp.sub_(lse).masked_fill_(ignored, 0.0)
        if mean_logp is not None:
            mean_logp.div_(block.vocabulary).sub_(lse).masked_fill_(ignored, 0.0)


def _absorb_pairs(block: Block, running: Running, pairs: Pairs, before: tuple[Tensor, Tensor] | None) -> None:
    """Add Σ exp(z − m)·(z − z' − c) to both rows' gap, c the difference of their maxima m; ``before``: earlier m, Σ."""
    largest = _finite(running.lse)                                       # [N]
    for index in _slices(block, of=pairs.rows.shape[1]):
        rows = pairs.rows[:, index]                                      # [2, R]
        shift = _own_less_twin(largest[rows])                            # [2, R]
        logits = [_exact(block, each, copy=True) for each in rows]       # [R, width] each
        gap = _gap(*logits).sub_(shift[0].unsqueeze(-1)).clamp_(-FARTHEST, FARTHEST)   # [R, width]
        for side, own in enumerate(logits):
            powers = own.sub_(largest[rows[side]].unsqueeze(-1)).exp_()  # [R, width]
            total = (powers.mul_(gap) if side == 0 else powers.mul_(gap).neg_()).sum(-1)   # [R]
            if before is not None:
                then = _own_less_twin(_finite(before[0])[rows])[side]    # [R]
                shrink = (before[0][rows[side]] - largest[rows[side]]).exp()   # [R]
                total += shrink * (pairs.gap[rows[side]] + (then - shift[side]) * before[1][rows[side]])
            pairs.gap[rows[side]] = total


def _finish_pairs(running: Running, pairs: Pairs, ignored: Tensor) -> None:
    """Turn the sums into half the divergence and the mean difference, [N] each."""
    assert pairs.kl is not None
    mean = pairs.gap / running.best_logp                                 # [N], of z − z' − c
    pairs.kl[pairs.rows] = mean[pairs.rows].sum(0).clamp_min_(0.0) / 2   # c cancels
    pairs.kl.masked_fill_(ignored, 0.0)
    pairs.gap[pairs.rows] = mean[pairs.rows] + _own_less_twin(_finite(running.lse)[pairs.rows])


def _own_less_twin(both: Tensor) -> Tensor:
    more = both[0] - both[1]                                             # [R]
    return torch.stack([more, -more])                                    # [2, R]


def _finite(largest: Tensor) -> Tensor:
    return largest.where(largest > -torch.inf, 0.0)                      # [N]


def _gap(own: Tensor, twin: Tensor) -> Tensor:
    return (own - twin).masked_fill_((own == -torch.inf) & (twin == -torch.inf), 0.0)   # [R, width]


def absorb_cross(block: Block, labels: Tensor, texts: TextIds, lse: Tensor, cross_logp: Tensor) -> None:
    """Write the reference tokens' logits of this block to ``cross_logp``; after the last block, turn them into logs."""
    reference = cross_labels(labels, texts)                              # [N, U]
    column = _cross_column(block, reference)                             # [N, U]
    picked = _pick(block, column, lse.dtype)                             # [N, U]
    cross_logp.copy_(picked.where(column < block.width, 0.0 if block.first else cross_logp))
    if block.last:
        cross_logp.sub_(lse.unsqueeze(-1)).masked_fill_(reference == IGNORE_INDEX, 0.0)


def differentiate(
    block: Block, labels: Tensor, stats: Running, slopes: Slopes, pairs: Pairs | None = None,
    taught: Taught | None = None,
) -> None:
    """Overwrite the block's logits with their gradient, and rows or columns that are not real with 0."""
    soft = _soft(stats, slopes)                                          # [N]

    def write(rows: slice | Tensor, logits: Tensor, *, more: Tensor | None = None) -> None:
        """Write the gradient of these rows, [R, width]. It overwrites the logits. ``more`` is that of others."""
        curb = None if block.softcap is None else 1 - (logits / block.softcap).square_()   # [R, width]
        heat = None if slopes.tempered_lse is None else _tempered(block, logits, stats, slopes, rows)   # [R, width]
        gradient = logits.sub_(stats.lse[rows].unsqueeze(-1)).exp_().mul_(soft[rows].unsqueeze(-1))   # [R, width]
        if slopes.mean_logp is not None:
            gradient += slopes.mean_logp[rows].unsqueeze(-1) / block.vocabulary
        for slope, ids in ((slopes.best_logp, stats.best_token), (slopes.label_logp, labels)):
            if slope is not None:
                here, column = _label_column(block, ids[rows])           # [R] each
                gradient.scatter_add_(-1, column.unsqueeze(-1), slope[rows].where(here, 0.0).unsqueeze(-1))
        if heat is not None:
            gradient += heat
        if more is not None:
            gradient += more
        if curb is not None:
            gradient.mul_(curb)
        gradient.masked_fill_((labels[rows] == IGNORE_INDEX).unsqueeze(-1), 0.0)
        if more is not None or gradient.dtype != block.logits.dtype:
            block.logits[rows, : block.width] = gradient.to(block.logits.dtype)

    if pairs is None:
        for rows in _slices(block):
            own = _exact(block, rows, copy=False)                        # [R, width]
            write(rows, own, more=None if taught is None else _by_teacher(own, taught, rows))
    else:
        for index in _slices(block, of=pairs.rows.shape[1]):
            both = pairs.rows[:, index]                                  # [2, R]
            logits = [_exact(block, each, copy=True) for each in both]   # [R, width] each
            more = _pair_gradients(logits, stats.lse[both], _at(pairs, index))   # [R, width] each
            for side, own in enumerate(logits):
                if taught is not None:
                    more[side].add_(_by_teacher(own, taught, both[side]))
                write(both[side], own, more=more[side])
    block.logits[:, block.width :] = 0


def _at(pairs: Pairs, index: slice) -> Pairs:
    assert pairs.slope is not None
    rows = pairs.rows[:, index]                                          # [2, R]
    return Pairs(rows, pairs.gap[rows], slope=pairs.slope[index])


def _pair_gradients(logits: list[Tensor], lse: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The divergence's gradient by both rows' logits, [R, width] each: s·((p − q) + p·(z − z' − E_p[z − z']))."""
    assert pairs.slope is not None
    gap = _gap(*logits).clamp_(-FARTHEST, FARTHEST)                      # [R, width]
    own, twin = (each.sub(level.unsqueeze(-1)).exp_() for each, level in zip(logits, lse, strict=True))   # [R, width]
    apart, slope = own - twin, pairs.slope.unsqueeze(-1)                 # [R, width], [R, 1]
    by_own = own.mul_(gap - pairs.gap[0].unsqueeze(-1)).add_(apart).mul_(slope)   # [R, width]
    by_twin = twin.mul_(gap + pairs.gap[1].unsqueeze(-1)).add_(apart).mul_(-slope)   # [R, width]
    return by_own, by_twin


def differentiate_cross(
    block: Block, labels: Tensor, texts: TextIds, stats: Running, slopes: Slopes, cross_logp: Tensor, by_cross: Tensor,
    pairs: Pairs | None = None, taught: Taught | None = None,
) -> None:
    """Overwrite the gradient of the logits that ``cross_logp`` read with their full gradient, rounded once."""
    if by_cross.numel() == 0:
        return
    reference = cross_labels(labels, texts)                              # [N, U]
    same = texts.labels.unsqueeze(2) == texts.labels.unsqueeze(1)        # [S, U, U]
    first = same.long().argmax(-1)[texts.owner.clamp_min(0)]             # [N, U], all copies of a token share one logit
    total = torch.zeros_like(by_cross).scatter_add(-1, first, by_cross).gather(-1, first)   # [N, U]
    if slopes.best_logp is not None:
        at_best = stats.best_token.unsqueeze(-1) == reference            # [N, U]
        total = total + at_best * slopes.best_logp.unsqueeze(-1)         # [N, U]
    if slopes.label_logp is not None:
        total = total + (labels.unsqueeze(-1) == reference) * slopes.label_logp.unsqueeze(-1)   # [N, U]
    if slopes.mean_logp is not None:
        total = total + slopes.mean_logp.unsqueeze(-1) / block.vocabulary   # [N, U]
    total = total + cross_logp.exp() * _soft(stats, slopes).unsqueeze(-1)   # [N, U]
    if slopes.tempered_lse is not None:
        total = total + _tempered(block, cross_logp + stats.lse.unsqueeze(-1), stats, slopes, slice(None))   # [N, U]
    if pairs is not None:   # twins have the same references
        logits = cross_logp + stats.lse.unsqueeze(-1)                    # [N, U]
        more = _pair_gradients([logits[rows] for rows in pairs.rows], stats.lse[pairs.rows], _at(pairs, slice(None)))
        total[pairs.rows] += torch.stack(more)
    if taught is not None:
        column = _cross_column(block, reference).clamp_max(block.width - 1)   # [N, U]
        given = _pick(taught.block, column, stats.lse.dtype)             # [N, U]
        total += _by_teacher(cross_logp + stats.lse.unsqueeze(-1), taught, slice(None), given=given)
    if block.softcap is not None:
        total = total * (1 - ((cross_logp + stats.lse.unsqueeze(-1)) / block.softcap) ** 2)   # [N, U]
    block.space.scatter_(-1, _cross_column(block, reference), total.to(block.space.dtype))


def absorb_teacher(block: Block, other: Block, labels: Tensor, compared: Compared, temperature: float) -> None:
    """Add a block to the divergences: the earlier ones times their share, plus that of the two parts, all ≥ 0."""
    for rows in _slices(block):
        own, given = (_exact(each, rows, copy=True).div_(temperature) for each in (block, other))   # [R, width] each
        levels = own.logsumexp(-1), given.logsumexp(-1)                  # [R] each
        before = compared.lse[rows], compared.teacher_lse[rows]          # [R] each
        if not block.first:
            levels = before[0].logaddexp(levels[0]), before[1].logaddexp(levels[1])   # [R] each
        own, given, ratio = _compare(own, given, *levels)                # [R, width] each
        sums: list[tuple[Tensor | None, Tensor, Tensor, int]] = [
            (compared.kl, given, own, 1), (compared.reverse_kl, own, given, -1)
        ]
        earlier = None
        if not block.first:
            earlier = _compare(before[0].unsqueeze(-1), before[1].unsqueeze(-1), *levels)   # [R, 1] each
        for kl, of, to, sign in sums:
            if kl is None:
                continue
            total = excess(of, to, ratio * sign).sum(-1)                 # [R]
            if earlier is not None:
                parts = earlier[:2] if sign < 0 else earlier[1::-1]      # [R, 1] each
                total += (parts[0] * kl[rows].unsqueeze(-1) + excess(*parts, earlier[2] * sign)).squeeze(-1)
            kl[rows] = total
        compared.lse[rows], compared.teacher_lse[rows] = levels
    if block.last:
        for kl in (compared.kl, compared.reverse_kl):
            if kl is not None:
                kl.clamp_min_(0.0).masked_fill_(labels == IGNORE_INDEX, 0.0)


def _by_teacher(own: Tensor, taught: Taught, rows: slice | Tensor, *, given: Tensor | None = None) -> Tensor:
    """The divergences' gradient by the model's logits, before its soft-cap, [R, width]; ``given``: the teacher's."""
    _, compared, temperature, by_kl, by_reverse = taught
    given = _exact(taught.block, rows, copy=True) if given is None else given   # [R, width]
    p, q, ratio = _compare(
        own / temperature, given / temperature, compared.lse[rows], compared.teacher_lse[rows]
    )                                                                    # [R, width] each
    gradient = torch.zeros_like(ratio)                                   # [R, width]
    if by_kl is not None:
        near = ratio.clamp(-NEAR, NEAR).expm1_().mul_(q)                 # [R, width], p − q without cancelling
        gradient += near.where(ratio.abs() < NEAR, p - q).mul_(by_kl[rows].unsqueeze(-1))
    if by_reverse is not None and compared.reverse_kl is not None:
        apart = ratio - compared.reverse_kl[rows].unsqueeze(-1)          # [R, width]
        gradient += p.mul_(apart).mul_(by_reverse[rows].unsqueeze(-1))
    return gradient.div_(temperature)                                    # [R, width]


def _compare(own: Tensor, given: Tensor, lse: Tensor, teacher_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and log p − log q, [R, width] each."""
    lse, teacher_lse = (_finite(x).unsqueeze(-1) for x in (lse, teacher_lse))   # [R, 1] each
    return (own - lse).exp(), (given - teacher_lse).exp(), log_ratio(own, given, lse, teacher_lse)


def _soft(stats: Running, slopes: Slopes) -> Tensor:
    """The slope of the whole softmax: every log-probability falls when the log-sum-exp grows, [N]."""
    soft = torch.zeros_like(stats.lse) if slopes.lse is None else slopes.lse   # [N]
    for slope in (slopes.best_logp, slopes.label_logp, slopes.mean_logp):
        soft = soft if slope is None else soft - slope                   # [N]
    return soft


def _tempered(block: Block, logits: Tensor, stats: Running, slopes: Slopes, rows: slice | Tensor) -> Tensor:
    """The gradient of ``tempered_lse``, which is the softmax at the temperature, [R, width]."""
    assert block.temperature is not None
    assert stats.tempered_lse is not None
    assert slopes.tempered_lse is not None
    below = logits - stats.tempered_lse[rows].unsqueeze(-1)              # [R, width]
    return below.div_(block.temperature).exp_().mul_(slopes.tempered_lse[rows].unsqueeze(-1))   # [R, width]


def _pick(block: Block, column: Tensor, dtype: torch.dtype) -> Tensor:
    """The real logits of these columns, [N, U]."""
    picked = block.space.gather(-1, column).to(dtype)                    # [N, U]
    if block.bias is not None:
        picked = picked + block.bias[column.clamp_max(block.width - 1)]  # [N, U]
    return picked if block.softcap is None else (picked / block.softcap).tanh() * block.softcap   # [N, U]


def _cross_column(block: Block, reference: Tensor) -> Tensor:
    """The column of each reference token in the block's memory, the last column if it is not there, [N, U]."""
    here, column = _label_column(block, reference)                       # [N, U] each
    return column.where(here, block.space.shape[1] - 1)                  # [N, U]


def _slices(block: Block, *, of: int | None = None) -> Iterator[slice]:
    """Slices of the block's rows, or of ``of`` pairs of them."""
    step = max(SLICE_NUMBERS.get(block.logits.device.type, 2**24) // block.width, 1)
    return (slice(start, start + step) for start in range(0, len(block.logits) if of is None else of, step))


def _exact(block: Block, rows: slice | Tensor, *, copy: bool) -> Tensor:
    """A slice of the real logits in fp32 or better; in the block's memory if that is precise enough and allowed."""
    stored = block.logits[rows, : block.width]                           # [R, width]
    logits = stored.to(torch.promote_types(stored.dtype, torch.float32), copy=copy)   # [R, width]
    if block.bias is not None:
        logits += block.bias
    if block.softcap is not None:
        logits.div_(block.softcap).tanh_().mul_(block.softcap)
    return logits


def _label_column(block: Block, ids: Tensor) -> tuple[Tensor, Tensor]:
    here = (ids >= block.start) & (ids < block.start + block.width)
    return here, (ids - block.start).where(here, 0)
