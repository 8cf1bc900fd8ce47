"""gradients of several processes → their mean in every process, once a step; weights of the first → of all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ngramloss.training.captured import Gradients


def average_gradients(model: Any, buffered: Gradients | None = None) -> None:
    """Replace every gradient by its mean over the processes, with one operation for each type.

    Args:
        model: whose parameters have gradients, the same ones in every process.
        buffered: the buffers that contain the gradients, if steps are captured.
    """
    if buffered is not None:
        for buffer in buffered.buffers.values():
            _average(buffer)
        return
    having = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in having]
    copies = Gradients(having)  # the same layout, so that a process with graphs and one without agree
    torch._foreach_copy_(copies.views, gradients)
    for buffer in copies.buffers.values():
        _average(buffer)
    torch._foreach_copy_(gradients, copies.views)


def share_weights(model: Any) -> None:
    """Copy parameters and buffers of the first process to all others."""
    tensors: Iterable[Tensor] = chain(model.parameters(), model.buffers())
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def _average(flat: Tensor) -> None:
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
