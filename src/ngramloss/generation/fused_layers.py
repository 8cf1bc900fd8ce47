"""the layers of a decoder-only model → the same for one token at a time on a GPU, with a third of the kernels.

A token of a small model costs mostly the number of its kernels. A norm of transformers is eight of them and rotary
positions are ten; here each is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

ROTARY = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Attention that rotates queries and keys by position, and does nothing else in between but normalise them."""


def fused_forwards(model: Module) -> dict[Module, Callable[..., Any]]:
    """What may take the place of ``forward``, by module. Who replaced one has reasons, so it stays."""
    found: dict[Module, Callable[..., Any]] = {}
    for module in model.modules():
        name = type(module).__name__
        if "forward" in vars(module):
            continue
        if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            found[module] = partial(_normed, module)
        elif name in ROTARY:
            found[module] = partial(_attended, module)
    return found


@contextmanager
def replaced(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules have these forwards for a while."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def _normed(module: Any, hidden: Tensor) -> Tensor:
    from ngramloss.gpu import decoding

    return decoding.rms_norm(hidden, module.weight, module.variance_epsilon)


def _attended(
    module: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    cached: Any,
    text_position: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, [B, K, D], to the prompts and texts of ``cached``, a ``CausalDecoder``."""
    from ngramloss.gpu import decoding

    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)  # [B, K, H · d] each
    if hasattr(module, "q_norm"):
        queries, keys = (
            norm(rows.unflatten(-1, (-1, cached.width))).flatten(2)
            for norm, rows in ((module.q_norm, queries), (module.k_norm, keys))
        )
    decoding.rotate(queries, keys, *position_embeddings)
    window = getattr(module, "sliding_window", None)
    if type(module).__name__ == "MistralAttention":  # it alone reads the configuration; Llama has no window
        window = getattr(module.config, "sliding_window", None)
    values = module.v_proj(hidden_states)  # [B, K, H · d]
    found = cached.attend(module.layer_idx, queries, keys, values, text_position, scale=module.scaling, window=window)
    return module.o_proj(found), None
