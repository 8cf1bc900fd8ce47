"""hidden states and a head → TokenStats, with the best backend for the machine or a given one."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ngramloss.loss.stats import head
from ngramloss.loss.stats.labels import IGNORE_INDEX, NOT_FLATTENED, legal_labels
from ngramloss.loss.stats.pairs import twin_rows
from ngramloss.loss.stats.segments import at_positions
from ngramloss.loss.stats.teachers import Teacher, needed_teacher
from ngramloss.loss.stats.token_stats import LOGITS_ONLY, TextIds, TokenStats, head_logits, rows_as_texts, token_stats
from ngramloss.loss.terms.registry import TEACHER_STATISTICS, TWIN_STATISTICS

BACKENDS = {
    "plain": "plain PyTorch, the specification: all logits in fp32, kept by autograd",
    "chunked": "PyTorch in slices, on any device: the logits in the model's precision, whole or in blocks",
    "fused": "Triton kernels on a GPU: like chunked, with one kernel per pass",
}
MEMORY = {
    "fast": "the logits are kept from forward to backward and overwritten with their gradient",
    "lean": "the logits are computed in blocks of the vocabulary, and again in the backward pass",
}


class Choice(NamedTuple):
    """A backend, and why it was chosen."""

    backend: str
    reason: str


def token_stats_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    needs: Collection[str] = (),
    check: bool = False,
    backend: str = "auto",
    memory: str = "fast",
    texts: TextIds | None = None,
    positions: Tensor | None = None,
    low_rank: Tensor | None = None,
    teacher: Teacher | Tensor | None = None,
) -> TokenStats:
    """Summarise the logits of a head: ``softcap·tanh((scale·hidden @ weight.T + bias) / softcap)``.

    Products run in the precision of ``hidden``, or of autocast if it is active; statistics are fp32 or better.

    Args:
        hidden: the head's input, [B, T, D].
        weight: the head's weight, [V, D].
        labels: reference ids, [B, T], ``IGNORE_INDEX`` where they do not count.
        bias: added to the logits, V numbers in any shape.
        scale: multiplies the hidden states.
        softcap: limits the logits smoothly to plus and minus this.
        needs: as in :func:`token_stats`, except ``"top_entropy"``.
        check: as in :func:`token_stats`.
        backend: ``"plain"``, ``"chunked"``, ``"fused"``, or ``"auto"`` for :func:`chosen_backend`.
        memory: ``"fast"`` or ``"lean"``; plain ignores it.
        texts: as in :func:`token_stats`.
        positions: indices into the B·T positions, −1 where there is none, [N]: only these are computed, and all others
            must have no label. See :func:`ngramloss.loss.stats.labelled`.
        low_rank: further columns of the weight, [V, r], for hidden states [B, T, D + r]: LoRA's B, for hidden states
            beside LoRA's A times them. Kept apart, they can be trained without a gradient of the weight.
        teacher: as in :func:`token_stats`. Its logits, too, are computed only at ``positions``, and in blocks.

    Example:
        >>> hidden, weight, labels = torch.eye(2).unsqueeze(0), torch.eye(3, 2), torch.tensor([[0, 1]])
        >>> token_stats_from_hidden(hidden, weight, labels).best_token
        tensor([[0, 1]])
    """
    _check_head(hidden, weight, low_rank, bias, scale, softcap)
    if missing := LOGITS_ONLY & set(needs):
        raise ValueError(
            f"`{min(missing)}` needs all logits of a position at once, but here they are computed in blocks. Use "
            "token_stats(logits, labels, ...)."
        )
    name = chosen_backend(hidden.device, hidden.dtype, backend).backend
    guarded = name == "fused" and hidden.device.type != "cpu"   # its kernel asserts the range itself
    labels = legal_labels(labels, hidden, weight.shape[0], check=check, guarded=guarded)
    if memory not in MEMORY:
        raise ValueError(f"memory must be one of {', '.join(MEMORY)}, got {memory!r}.")
    twins = None
    if not TWIN_STATISTICS.isdisjoint(needs):
        twins = twin_rows(labels, positions=positions, owner=texts and texts.owner, check=check)   # [2, M]
    compared = None
    if not TEACHER_STATISTICS.isdisjoint(needs):
        compared = needed_teacher(teacher, labels.shape, weight.shape[0], hidden.device)
    if positions is not None:
        texts = texts or rows_as_texts(labels)
        shape = labels.shape
        compared = compared and _gather_teacher(positions, compared)
        hidden, labels, texts = _gather(positions, hidden, labels, texts)   # [1, N, D], [1, N]
    if name == "plain":
        logits = head_logits(hidden, weight, bias=bias, scale=scale, softcap=softcap, low_rank=low_rank)   # [B, T, V]
        stats = token_stats(logits, labels, needs=needs, texts=texts, twins=twins, teacher=compared)
    else:
        stats = head.sweep(
            hidden, weight, labels, bias=bias, scale=scale, softcap=softcap, needs=needs, lean=memory == "lean",
            kernels=import_module(f"ngramloss.loss.stats.{name}"), texts=texts, low_rank=low_rank, twins=twins,
            teacher=compared,
        )
    return stats if positions is None else _spread(positions, stats, shape)


def _gather(positions: Tensor, hidden: Tensor, labels: Tensor, texts: TextIds) -> tuple[Tensor, Tensor, TextIds]:
    """Hidden states, labels and texts of these positions alone, [1, N, …]."""
    index, none = positions.clamp_min(0), positions < 0                  # [N]
    own = labels.flatten()[index].masked_fill(none, IGNORE_INDEX)        # [N]
    owner = texts.owner.flatten()[index].masked_fill(none, -1)           # [N]
    return at_positions(hidden, index).unsqueeze(0), own.unsqueeze(0), TextIds(texts.labels, owner.unsqueeze(0))


def _gather_teacher(positions: Tensor, teacher: Teacher) -> Teacher:
    index = positions.clamp_min(0)                                       # [N]
    logits, hidden = (None if x is None else at_positions(x, index).unsqueeze(0) for x in teacher[:2])
    return teacher._replace(logits=logits, hidden=hidden)


def _spread(positions: Tensor, stats: TokenStats, shape: torch.Size) -> TokenStats:
    """Statistics of these positions, [1, N], where they belong, [B, T]; 0 elsewhere."""
    place = positions.where(positions >= 0, shape.numel())               # [N], the last one is thrown away

    def spread(statistic: Tensor) -> Tensor:
        empty = statistic.new_zeros(shape.numel() + 1, *statistic.shape[2:])   # [B·T + 1, …]
        return empty.index_copy(0, place, statistic[0])[:-1].view(*shape, *statistic.shape[2:])   # [B, T, …]

    return TokenStats(**{name: spread(value) for name, value in stats._asdict().items() if value is not None})


def chosen_backend(device: torch.device, dtype: torch.dtype, backend: str = "auto") -> Choice:
    """The backend for hidden states on this device and of this dtype, and the reason."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {backend!r}.")
        if backend == "fused" and (why_not := _why_not_fused(device, dtype, by_name=True)):
            raise ValueError(f"backend='fused' cannot run here: {why_not}. Use backend='auto'.")
        return Choice(backend, "requested by name")
    if torch.compiler.is_compiling():
        return Choice("plain", "inside torch.compile the compiler fuses the plain operations itself")
    if why_not := _why_not_fused(device, dtype):
        return Choice("chunked", f"{why_not}: PyTorch in slices")
    return Choice("fused", f"{device.type} and Triton are available")


def _why_not_fused(device: torch.device, dtype: torch.dtype, *, by_name: bool = False) -> str | None:
    if device.type == "cpu" and not (by_name and os.environ.get("TRITON_INTERPRET") == "1"):
        return "a cpu has no Triton"
    if not triton_is_installed():
        return "Triton is not installed (pip install 'ngramloss[kernels]')"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels support fp32, bf16 and fp16, not {dtype}"
    return None


@cache
def triton_is_installed() -> bool:
    """Whether Triton is installed. Checked once, because it searches the file system."""
    return find_spec("triton") is not None


def _check_head(
    hidden: Tensor, weight: Tensor, low_rank: Tensor | None, bias: Tensor | None, scale: float, softcap: float | None
) -> None:
    if hidden.ndim != 3:
        hint = NOT_FLATTENED.format("hidden") if hidden.ndim == 2 else ""
        raise ValueError(f"hidden must be [B, T, D], got {list(hidden.shape)}.{hint}")
    more = 0 if low_rank is None else low_rank.shape[-1]
    if weight.ndim != 2 or weight.shape[1] + more != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [V, D] with D = {hidden.shape[-1] - more} as in hidden, got {list(weight.shape)}. "
            "Pass the head's own weight, as in torch.nn.Linear, not its transpose."
        )
    if low_rank is not None and (low_rank.shape[:-1] != weight.shape[:1] or low_rank.dtype != weight.dtype):
        raise ValueError(
            f"low_rank must be [V, r] with V = {weight.shape[0]} and {weight.dtype} as in weight, got "
            f"{list(low_rank.shape)} and {low_rank.dtype}."
        )
    if bias is not None and bias.numel() != weight.shape[0]:
        raise ValueError(f"bias must have V = {weight.shape[0]} numbers, got {list(bias.shape)}.")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}. Run under torch.autocast, or cast one of them."
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}.")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive finite number or None, got {softcap!r}.")
