"""a model → its weights sharded over the processes (FSDP 2), and gathered again for a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ngramloss.errors import UserError


def raise_unless_shardable(processes: int, precision: str) -> None:
    """Raise if this training cannot be sharded."""
    if processes == 1:
        raise UserError("train.fsdp needs several processes: start with torchrun --nproc_per_node N -m -- ngramloss")
    if precision == "fp16":
        raise UserError("train.fsdp does not work with fp16. Use train.precision=bf16 or fp32.")


def shard(model: Any) -> None:
    """Shard each layer, and the rest with the root, where the head, tied to embeddings, is whole for the loss."""
    from torch.distributed.fsdp import fully_shard

    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in reversed(list(model.modules())):  # inner ones first, as fully_shard requires
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model)


def whole_weights(model: Any) -> dict[str, Tensor]:
    """All weights on the CPU, in the first process; tied ones once."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: value for name, value in weights.items() if tied.get(name) not in weights}


def whole_optimiser(model: Any, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's state by the names of parameters, on the CPU, in the first process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimiser, options=options)


def restore_whole(model: Any, optimiser: Any, weights: dict[str, Any], state: dict[str, Any]) -> None:
    """Shard whole weights and a whole optimiser's state again. Every process passes both."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))
    set_optimizer_state_dict(model, optimiser, state, options=StateDictOptions(full_state_dict=True))
