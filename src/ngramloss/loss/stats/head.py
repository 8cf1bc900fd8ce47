"""hidden states and a head → TokenStats, with three matrix products and one copy of the logits, or a slice of it.

For each block of the vocabulary a product computes the logits, and ``absorb`` adds them to the running statistics. In
the backward pass ``differentiate`` overwrites them with their gradient, and two products turn that into the gradients
of hidden states and weight. With ``memory="fast"`` one block is kept; with ``"lean"`` each is computed again.

The kernels are a module: :mod:`chunked` or :mod:`fused`. Labels and the texts' owner are [N], ``cross_logp`` is [N, U].
A token that occurs twice in a reference is written twice, with the same number, so no atomics are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngramloss.loss.stats.pairs import Pairs, twin_tokens
from ngramloss.loss.stats.teachers import Compared, Teacher
from ngramloss.loss.stats.token_stats import TextIds, TokenStats, rows_as_texts
from ngramloss.loss.terms.registry import TEMPERED, temperature_of

ALIGNMENT = 128
"""Columns of a block are rounded up to a multiple of this: matrix units are several times slower on odd lengths."""
SPARE = ALIGNMENT  # extra columns after the block's, for scattered values that belong to another block or to padding
LEAN_BYTES = 2**27  # approximate maximum size of a block of logits with ``memory="lean"``


class Running(NamedTuple):
    """Statistics of the columns read so far, [N] each; the last block turns them into those of the whole row."""

    lse: Tensor  # the largest logit, then the log-sum-exp
    best_logp: Tensor  # the sum of exp(logit − largest), then the log-probability of the best token
    best_token: Tensor
    label_logp: Tensor  # the label's logit, then its log-probability
    mean_logp: Tensor | None  # the sum of all logits, then the mean log-probability
    entropy: Tensor | None  # the sum of exp(logit − largest)·(logit − largest), then the entropy
    tempered_lse: Tensor | None
    """The sum of exp((logit − largest) / temperature), then its log times the temperature, plus the largest."""


class Slopes(NamedTuple):
    """Gradients of the loss with respect to the statistics, [N] each, None if there is none."""

    lse: Tensor | None
    best_logp: Tensor | None
    label_logp: Tensor | None
    mean_logp: Tensor | None
    tempered_lse: Tensor | None


class Block(NamedTuple):
    """The logits of the ids from ``start``, before bias and soft-cap, and the values needed to apply both."""

    logits: Tensor  # [N, columns], of which the first ``width`` are real
    space: Tensor  # their memory, [N, columns + SPARE] if ``cross_logp`` is needed
    start: int
    width: int
    vocabulary: int
    bias: Tensor | None  # of this block's ids, [width]
    softcap: float | None
    temperature: float | None = None  # of ``tempered_lse``, after the soft-cap

    @property
    def first(self) -> bool:
        """Whether this is the first block."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether this is the last block."""
        return self.start + self.width == self.vocabulary


class Taught(NamedTuple):
    """The teacher's logits beside a block of the model's, and the slopes of their divergences."""

    block: Block
    compared: Compared
    temperature: float
    by_kl: Tensor | None  # [N], None if there is none
    by_reverse: Tensor | None  # [N], None if there is none


class SweepSettings(NamedTuple):
    """The settings of one pass over the vocabulary."""

    kernels: ModuleType
    lean: bool
    differentiable: bool
    needs: frozenset[str]
    scale: float
    softcap: float | None
    temperature: float | None


def sweep(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, scale: float, softcap: float | None,
    needs: Collection[str], kernels: ModuleType, lean: bool, texts: TextIds | None = None,
    low_rank: Tensor | None = None, twins: Tensor | None = None, teacher: Teacher | None = None,
) -> TokenStats:
    """Compute the statistics, with their gradient, in one pass over the vocabulary. ``twins``: of twin_rows."""
    # Read is_grad_enabled here: inside forward() it is always off, and every parameter seems to need a gradient.
    plan = SweepSettings(
        kernels, lean, torch.is_grad_enabled(), frozenset(needs), scale, softcap, temperature_of(needs)
    )
    flat_bias = None if bias is None else bias.reshape(-1)               # [V]
    labels = labels.contiguous()                                         # [B, T]
    if "cross_logp" in needs:
        texts = texts or rows_as_texts(labels)
        texts = TextIds(texts.labels.contiguous(), texts.owner.reshape(-1).contiguous())   # [S, U], [N]
    found = _Sweep.apply(  # type: ignore[no-untyped-call]
        hidden, weight, low_rank, flat_bias, labels, plan, texts, twins, teacher
    )
    names = ("twin_kl", "teacher_kl", "teacher_reverse_kl", TEMPERED)
    stats = TokenStats(*found[:-4])._replace(**dict(zip(names, found[-4:], strict=True)))
    if "twin_token" in needs and twins is not None:
        stats = stats._replace(twin_token=twin_tokens(stats.best_token, twins))
    return stats


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, low_rank: Tensor | None, bias: Tensor | None, labels: Tensor,
        plan: SweepSettings, texts: TextIds | None, twins: Tensor | None, teacher: Teacher | None,
    ) -> tuple[Tensor | None, ...]:
        device = hidden.device.type
        casts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64   # autocast does not cast fp64
        dtype = torch.get_autocast_dtype(device) if casts else hidden.dtype
        B, T, _ = hidden.shape
        rows = _rows(hidden, plan.scale, dtype)                          # [N, D], with low rank [N, D + r]
        flat = labels.reshape(-1)                                        # [N]
        running = _fresh(flat, dtype, plan)
        pairs = None
        if twins is not None and "twin_kl" in plan.needs:
            pairs = Pairs(twins, torch.empty_like(running.lse), torch.empty_like(running.lse))
        if teacher is not None and teacher.hidden is not None:
            precision = dtype if casts else teacher.hidden.dtype
            scaled = _rows(teacher.hidden, teacher.scale, precision).view_as(teacher.hidden)   # [B, T, D']
            teacher = teacher._replace(hidden=scaled, scale=1.0)
        compared = None if teacher is None else _fresh_comparison(running.lse, plan.needs)
        texts = texts if "cross_logp" in plan.needs else None
        cross = None if texts is None else running.lse.new_empty(B * T, texts.labels.shape[1])   # [N, U]
        differentiable = plan.differentiable and any(ctx.needs_input_grad)
        keep = differentiable and not plan.lean
        # Triton launches on the current device, which may not be the tensors' device.
        here = torch.cuda.device(hidden.device) if device == "cuda" else nullcontext()
        with here:
            most = _columns(rows, weight, whole=keep)
            others = _teacher_blocks(teacher, plan, most)
            for made, other in zip(_blocks(rows, weight, low_rank, bias, plan, most), others, strict=False):
                plan.kernels.absorb(made[0], flat, running, pairs)
                if compared is not None and other is not None and teacher is not None:
                    plan.kernels.absorb_teacher(made[0], other, flat, compared, teacher.temperature)
                if texts is not None and cross is not None:
                    plan.kernels.absorb_cross(made[0], flat, texts, running.lse, cross)
        if differentiable:
            own = (None, None) if texts is None else texts
            twin_gap = (None, None) if pairs is None else pairs[:2]
            ctx.save_for_backward(
                hidden, weight, low_rank, bias, flat, cross, *own, *twin_gap, *running._replace(entropy=None)
            )
            ctx.plan, ctx.dtype, ctx.kept = plan, dtype, (made, other) if keep else None
            ctx.teacher, ctx.compared = teacher, compared
        ctx.set_materialize_grads(False)
        lse, best_logp, best_token, label_logp = (x.view(B, T) for x in running[:4])
        mean_logp, entropy, tempered = (None if x is None else x.view(B, T) for x in running[4:])
        ctx.mark_non_differentiable(best_token, *(() if entropy is None else (entropy,)))
        cross_logp = None if cross is None else cross.view(B, T, cross.shape[-1])   # [B, T, U]
        twin_kl = None if pairs is None or pairs.kl is None else pairs.kl.view(B, T)   # [B, T]
        kl, reverse_kl = (None if x is None else x.view(B, T) for x in (compared or (None,) * 4)[2:])   # [B, T] each
        return lse, best_token, best_logp, label_logp, cross_logp, mean_logp, entropy, twin_kl, kl, reverse_kl, tempered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, low_rank, bias, flat, cross, reference, owner, twins, gap, *saved = ctx.saved_tensors
        plan, stats, texts = ctx.plan, Running(*saved), TextIds(reference, owner)
        if not plan.lean and ctx.kept is None:
            raise RuntimeError(
                "cannot run backward twice through the same loss: the first one overwrote the logits with their "
                'gradient. Build the loss with memory="lean" or backend="plain", which allow it.'
            )
        by_lse, _, by_best, by_label, by_cross, by_mean, _, by_twin, *by_kls, by_tempered = slopes
        by_kl, by_reverse = (None if x is None else x.reshape(-1) for x in by_kls)   # [N] each
        teacher = None if by_kl is None and by_reverse is None else ctx.teacher
        pairs = None
        if by_twin is not None:
            slope = by_twin.reshape(-1)[twins].sum(0) / 2                # [M], half the divergence is in both rows
            pairs = Pairs(twins, gap, slope=slope)
        if by_cross is not None:
            by_lse = -by_cross.sum(-1) if by_lse is None else by_lse - by_cross.sum(-1)   # [B, T]
            by_cross = by_cross.flatten(0, 1).contiguous()               # [N, U]
        by_row = (None if x is None else x.reshape(-1) for x in (by_lse, by_best, by_label, by_mean, by_tempered))
        rowwise = Slopes(*by_row)
        wants_hidden, wants_weight, wants_low_rank, wants_bias = ctx.needs_input_grad[:4]
        rows = _rows(hidden, plan.scale, ctx.dtype)                      # [N, D], with low rank [N, D + r]
        D = weight.shape[1]
        d_rows: Tensor | None = None
        d_weight = torch.empty_like(weight) if plan.lean and wants_weight else None   # [V, D]
        d_low_rank = torch.empty_like(low_rank) if plan.lean and wants_low_rank else None   # [V, r]
        d_bias = torch.empty_like(bias) if wants_bias and bias is not None else None   # [V]
        with torch.autocast(hidden.device.type, enabled=False):
            blocks: Iterable[Any] = [ctx.kept]
            if plan.lean:
                most = _columns(rows, weight, whole=False)
                others = _teacher_blocks(teacher, plan, most)
                blocks = zip(_blocks(rows, weight, low_rank, bias, plan, most), others, strict=False)
            for (block, part, low_rank_part), other in blocks:
                taught = None
                if teacher is not None:
                    taught = Taught(other, ctx.compared, teacher.temperature, by_kl, by_reverse)
                plan.kernels.differentiate(block, flat, stats, rowwise, pairs, taught)
                if by_cross is not None:
                    plan.kernels.differentiate_cross(
                        block, flat, texts, stats, rowwise, cross, by_cross, pairs, taught
                    )
                gradient = block.logits                                  # [N, columns]
                if wants_hidden:
                    product = gradient @ part                            # [N, D]
                    if low_rank_part is not None:
                        product = torch.cat([product, gradient @ low_rank_part], -1)   # [N, D + r]
                    if d_rows is None:
                        d_rows = product if block.last else _exact(product)   # [N, D]
                    else:
                        d_rows += product
                if wants_weight:
                    d_weight = _weight_gradient(gradient, rows[:, :D], block, d_weight, weight.dtype)   # [V, D]
                if wants_low_rank:
                    d_low_rank = _weight_gradient(gradient, rows[:, D:], block, d_low_rank, low_rank.dtype)   # [V, r]
                if d_bias is not None:
                    d_bias[block.start : block.start + block.width] = gradient.sum(0)[: block.width]
        ctx.kept = None
        if d_rows is not None:
            d_rows = d_rows if plan.scale == 1.0 else d_rows * plan.scale   # [N, D]
            d_rows = d_rows.to(hidden.dtype).view_as(hidden)             # [B, T, D]
        return d_rows, d_weight, d_low_rank, d_bias, None, None, None, None, None


def _rows(hidden: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (hidden if scale == 1.0 else hidden * scale).reshape(-1, hidden.shape[-1]).to(dtype)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weight_gradient(
    gradient: Tensor, rows: Tensor, block: Block, whole: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The weight's gradient for the block's rows, on its own or written into the whole gradient."""
    if whole is None:
        return (gradient.t() @ rows)[: block.width].to(dtype)            # [width, D]
    own = whole[block.start : block.start + block.width]                 # [width, D]
    if own.dtype == rows.dtype:
        torch.mm(gradient[:, : block.width].t(), rows, out=own)
    else:
        own.copy_((gradient.t() @ rows)[: block.width])
    return whole


def _fresh(labels: Tensor, dtype: torch.dtype, plan: SweepSettings) -> Running:
    float_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    optional: list[str] = [name for name in ("mean_logp", "entropy") if name in plan.needs]
    optional += [] if plan.temperature is None else [TEMPERED]
    needed = 3 + len(optional)
    floats = torch.empty(needed, *labels.shape, dtype=float_dtype, device=labels.device).unbind()   # [N] each
    more = dict(zip(optional, floats[3:], strict=True))
    return Running(
        floats[0], floats[1], torch.empty_like(labels), floats[2], more.get("mean_logp"), more.get("entropy"),
        more.get(TEMPERED),
    )


def _fresh_comparison(like: Tensor, needs: frozenset[str]) -> Compared:
    lse, teacher_lse, kl, reverse_kl = like.new_empty(4, len(like)).unbind()   # [N] each
    return Compared(
        lse, teacher_lse, kl if "teacher_kl" in needs else None, reverse_kl if "teacher_reverse_kl" in needs else None
    )


def _columns(rows: Tensor, weight: Tensor, *, whole: bool) -> int:
    if whole:
        return weight.shape[0]
    return max(LEAN_BYTES // (rows.element_size() * max(len(rows), 1)) // ALIGNMENT, 1) * ALIGNMENT


def _teacher_blocks(teacher: Teacher | None, plan: SweepSettings, most: int) -> Iterator[Block | None]:
    """Each block of the teacher's logits, as wide as the model's; nothing forever without a teacher."""
    if teacher is None:
        yield from itertools.repeat(None)
    elif teacher.logits is not None:
        logits = teacher.logits.flatten(0, 1)                            # [N, V]
        for start in range(0, logits.shape[1], most):
            part = logits[:, start : start + most]                       # [N, width]
            yield Block(part, part, start, part.shape[1], logits.shape[1], None, None)
    else:
        assert teacher.hidden is not None
        assert teacher.weight is not None
        rows = _rows(teacher.hidden, 1.0, teacher.hidden.dtype)          # [N, D'], with low rank [N, D' + r]
        bias = None if teacher.bias is None else teacher.bias.reshape(-1)   # [V]
        alone = plan._replace(needs=frozenset(), softcap=teacher.softcap, temperature=None)
        for block, _, _ in _blocks(rows, teacher.weight, teacher.low_rank, bias, alone, most):
            yield block


def _blocks(
    rows: Tensor, weight: Tensor, low_rank: Tensor | None, bias: Tensor | None, plan: SweepSettings, most: int
) -> Iterator[tuple[Block, Tensor, Tensor | None]]:
    """Each block of logits, and the parts of weight and low rank it was computed from, padded like the block."""
    V, D = weight.shape
    spare = SPARE if "cross_logp" in plan.needs else 0
    space: Tensor | None = None
    for start in range(0, V, most):
        width = min(most, V - start)
        part = _padded(weight[start : start + width], rows.dtype)        # [columns, D]
        if space is None or space.shape[1] != len(part) + spare:
            space = rows.new_empty(len(rows), len(part) + spare)         # [N, columns + spare]
        logits = space[:, : len(part)]                                   # [N, columns]
        torch.mm(rows[:, :D], part.t(), out=logits)
        low_rank_part = None
        if low_rank is not None:
            low_rank_part = _padded(low_rank[start : start + width], rows.dtype)   # [columns, r]
            logits.addmm_(rows[:, D:], low_rank_part.t())
        own = None if bias is None else _exact(bias.detach()[start : start + width])   # [width]
        yield Block(logits, space, start, width, V, own, plan.softcap, plan.temperature), part, low_rank_part


def _padded(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight's rows in the products' precision, padded with zero rows if their number is not a multiple of 8."""
    part = part.detach()
    width, D = part.shape
    if width % 8 == 0 or part.device.type == "cpu":
        return part.to(dtype)
    padded = part.new_empty(-(-width // ALIGNMENT) * ALIGNMENT, D, dtype=dtype)   # [columns, D]
    padded[:width].copy_(part)
    padded[width:].zero_()
    return padded
