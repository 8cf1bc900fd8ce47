"""an output head, plain or wrapped by PEFT → its weight, bias, and what LoRA adds to both weight and input.

LoRA computes ``W h + s B A drop(h)``: the product of the weight [W, B] with the input [h, s A drop(h)]. So the loss
needs no copy of W, nor its gradient if W is not trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict

from ngramloss.errors import UserError

ADAPTER_SIGNS = ("base_layer", "lora_A", "modules_to_save", "original_module")
"""Attributes of PEFT's layers and wrappers."""


def running_module(module: Any) -> Module:
    """What runs inside PEFT's wrapper for ``modules_to_save``: the active adapter's copy, or the original module."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, ModuleDict):
        return cast(Module, module)
    active = [] if module.disable_adapters else module.active_adapters
    has_copy = active and all(name in copies for name in active)
    return cast(Module, copies[active[0]] if has_copy else module.original_module)


def refuse_unknown_adapter(name: str, module: Any) -> None:
    """Raise if an adapter on the head computes anything but plain LoRA or single tokens."""
    if _token_layer(module) is not None or not any(hasattr(module, sign) for sign in ADAPTER_SIGNS):
        return
    kind = type(module).__name__
    if hasattr(module, "lora_A") and kind == "Linear":
        variants, biases = getattr(module, "lora_variant", {}), getattr(module, "lora_bias", {})
        unusual = [adapter for adapter in _active(module) if adapter in variants or biases.get(adapter)]
        if not unusual:
            return
        kind = f"{unusual[0]!r}: LoRA with a bias, DoRA or another variant"
    raise UserError(
        f"the output head of {name} is wrapped by an adapter ({kind}) that attach does not support. Use plain LoRA "
        "there, remove the head from `target_modules`, or merge the adapter. To train the whole head, name it in "
        "`modules_to_save` instead."
    )


def base_weight(module: Any) -> Any:
    """The head's weight without any adapter, [V, D]; None if it has none."""
    tokens = _token_layer(module)
    return getattr(module if tokens is None else tokens.base_layer, "weight", None)


def weight_of(module: Any) -> Any:
    """The head's weight without LoRA; with ``trainable_token_indices``, the trained rows are in place, [V, D]."""
    tokens = _token_layer(module)
    active = _active(tokens)
    return tokens.get_merged_weights(active) if active else base_weight(module)


def bias_of(module: Any) -> Tensor | None:
    """The head's own bias, [V]. PEFT leaves it out where single tokens are trained."""
    tokens = _token_layer(module)
    if tokens is not None:
        module = None if _active(tokens) else tokens.base_layer
    bias: Tensor | None = getattr(module, "bias", None)
    return bias


def low_rank_of(module: Any, weight: Tensor) -> Tensor | None:
    """The columns that LoRA adds to the head's weight: B of every active adapter, [V, r]; None without any."""
    columns = [module.lora_B[adapter].weight for adapter in _lora(module)]  # [V, r] each
    return torch.cat(columns, -1).to(weight.dtype) if columns else None


def head_input(module: Any, hidden: Tensor) -> Tensor:
    """Hidden states as the weight and :func:`low_rank_of` need them, [B, T, D + r]; [B, T, D] without LoRA."""
    parts = [hidden]
    for adapter in _lora(module):
        given = hidden.to(module.lora_A[adapter].weight.dtype)  # [B, T, D]
        low = module.lora_A[adapter](module.lora_dropout[adapter](given))  # [B, T, r]
        parts.append((low * module.scaling[adapter]).to(hidden.dtype))
    return torch.cat(parts, -1) if len(parts) > 1 else hidden


def without_dropout(module: Any) -> AbstractContextManager[None]:
    """Turn off LoRA's dropout of the head, so that two computations can be compared."""
    return evaluating([part for adapter in _lora(module) for part in module.lora_dropout[adapter].modules()])


@contextmanager
def evaluating(modules: Iterable[Module]) -> Iterator[None]:
    """Put modules, without those inside them, into evaluation mode for a while."""
    training = [part for part in modules if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def adapter_state(module: Any) -> tuple[object, ...]:
    """Changes whenever other adapters of the head become active."""
    return (*_lora(module), *_active(_token_layer(module)))


def _token_layer(module: Any) -> Any:
    layer = getattr(module, "token_adapter", module)
    return layer if hasattr(layer, "trainable_tokens_delta") else None


def _lora(module: Any) -> list[str]:
    return [name for name in _active(module) if name in module.lora_A] if hasattr(module, "lora_A") else []


def _active(layer: Any) -> list[str]:
    """The adapters that a layer of PEFT applies itself: none if they are disabled, or merged into the weight."""
    return [] if layer is None or layer.disable_adapters or layer.merged else list(layer.active_adapters)
