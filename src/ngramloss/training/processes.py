"""the environment that torchrun sets → this process, its device, and what all processes do together."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among those of a training."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the first process, which alone logs and writes files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in the same tensor."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def share_weights(self, model: Any) -> None:
        """Copy the model's parameters and buffers in the first process to all others."""
        for tensor in (*model.parameters(), *model.buffers()) if self.count > 1 else ():
            dist.broadcast(tensor.detach(), src=0)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. On a GPU this waits for the work given to it."""
        if self.count == 1:
            return flag
        return bool(self.total(torch.tensor(float(flag), device=self.device)).item())

    @property
    def device_name(self) -> str:
        """The device as a person calls it."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type.upper()}, {platform.machine()}"


def start_processes() -> Processes:
    """Join the other processes that torchrun started, if there are any, and choose this one's device."""
    variables = ("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)
    count, rank, local = (int(os.environ.get(name, default)) for name, default in variables)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        kind, number = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        assert kind is not None
        device = torch.device(kind.type, local % number)
        torch.accelerator.set_device_index(device.index)
    if count > 1 and not dist.is_initialized():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        share = here > torch.accelerator.device_count()  # several processes on one GPU, which NCCL refuses
        backend = "gloo" if device.type == "cpu" or share else dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, device_id=None if backend == "gloo" else device)
    return Processes(rank, count, device)
