"""the layers of a decoder → the same for one token at a time on a GPU, with a third of the kernels.

A token of a small model costs mostly the number of its kernels. A norm of transformers is eight of them and rotary
positions are ten; here each is one, and what is added before a norm is part of it. Linear layers that read the same
input are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module
from torch.nn.functional import linear

ROTARY = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Attention that rotates queries and keys by position, and does nothing else in between but normalise them."""
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of such attention and a part of ``GATED``, each behind a norm and added to its input."""
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Feed-forward parts of ``down(silu(gate(x)) · up(x))``, if their activation is that."""
MOST_COPIED = 2**29
"""Bytes of weights that :class:`Joined` copies at most. The products of larger models take longer than a launch."""


class Joined:
    """Linear layers of the same input as one product, from copies of their weights.

    Layers of another class, with hooks or with a forward of somebody else stay as they are.

    Args:
        groups: of layers that read the same input.
    """

    def __init__(self, groups: Iterable[Sequence[Any]] = ()) -> None:
        self.products: dict[Module, tuple[Sequence[Any], Tensor, Tensor | None]] = {}
        left = MOST_COPIED
        for layers in groups:
            left -= sum(layer.weight.nbytes for layer in layers if _is_plain(layer))
            if left >= 0 and all(map(_is_plain, layers)) and len({layer.bias is None for layer in layers}) == 1:
                self.products[layers[0]] = layers, *_weights(layers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again, where the copies are: a model in training has changed them."""
        for layers, weight, bias in self.products.values():
            sizes = [layer.out_features for layer in layers]
            torch._foreach_copy_(weight.split(sizes), [layer.weight for layer in layers])
            if bias is not None:
                torch._foreach_copy_(bias.split(sizes), [layer.bias for layer in layers])

    def __call__(self, hidden: Tensor, *layers: Any) -> Sequence[Tensor]:
        """What each of the layers makes of the same input, [..., its width]."""
        if layers[0] not in self.products:
            return [layer(hidden) for layer in layers]
        _, weight, bias = self.products[layers[0]]
        made: Tensor = linear(hidden, weight, bias)  # [..., all widths]
        parts: Sequence[Tensor] = made.split([layer.out_features for layer in layers], -1)
        return parts


def _is_plain(layer: Module) -> bool:
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is Linear and "forward" not in vars(layer) and not hooks


@torch.no_grad()
def _weights(layers: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None


class Norm(NamedTuple):
    """A norm of rows.

    Attributes:
        weight: [D].
        bias: [D], if there is one.
        eps: added to the mean square.
        centred: whether the mean is subtracted first.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


def norm_of(module: Any) -> Norm | None:
    """What a module computes, if it is a norm that the kernel knows. Who replaced its forward has reasons."""
    if "forward" in vars(module):
        return None
    if type(module) is LayerNorm and module.weight is not None:
        return Norm(module.weight, module.bias, module.eps, centred=True)
    if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")) and hasattr(module, "variance_epsilon"):
        return Norm(module.weight, None, module.variance_epsilon, centred=False)
    return None


def normed(hidden: Tensor, module: Module, *, has_kernels: bool) -> Tensor:
    """The norm of each row, [..., D]."""
    norm = norm_of(module) if has_kernels else None
    found: Tensor = module(hidden) if norm is None or norm.weight.dtype != hidden.dtype else _normed(norm, hidden)
    return found


def added(hidden: Tensor, part: Tensor, module: Module, *, has_kernels: bool) -> tuple[Tensor, Tensor]:
    """A sum and its norm: ``hidden + part`` and ``module(hidden + part)``, [..., D] each.

    Args:
        hidden: [..., D].
        part: as many rows, or one.
        module: the norm.
        has_kernels: whether Triton may be used.
    """
    norm = norm_of(module) if has_kernels else None
    if norm is None or not norm.weight.dtype == hidden.dtype == part.dtype:
        total = hidden + part  # [..., D]
        return total, module(total)
    from ngramloss.gpu import decoding

    return decoding.added_norm(hidden, part, norm)


def fused_forwards(model: Module, joined: Joined) -> dict[Module, Callable[..., Any]]:
    """What may take the place of ``forward``, by module. Who replaced one has reasons, so it stays."""
    found: dict[Module, Callable[..., Any]] = {}
    for module in model.modules():
        name = type(module).__name__
        if "forward" in vars(module):
            continue
        if (norm := norm_of(module)) and not norm.centred:
            found[module] = partial(_normed, norm)
        elif name in ROTARY:
            found[module] = partial(_attended, module, joined)
        elif name in LAYERS and _is_gated(module.mlp) and (norm := norm_of(module.post_attention_layernorm)):
            found[module] = partial(_layer, module, norm, joined)
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


def _normed(norm: Norm, hidden: Tensor) -> Tensor:
    from ngramloss.gpu import decoding

    return decoding.norm(hidden, norm)


def _is_gated(module: Any) -> bool:
    known = type(module).__name__ in GATED and "forward" not in vars(module)
    return known and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _layer(module: Any, norm: Norm, joined: Joined, hidden_states: Tensor, **others: Any) -> Tensor:
    """A layer of ``LAYERS``, [B, K, D]."""
    from ngramloss.gpu import decoding

    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **others)  # [B, K, D]
    hidden, normed = decoding.added_norm(hidden_states, attended, norm)  # [B, K, D] each
    gated = decoding.gated(*joined(normed, module.mlp.gate_proj, module.mlp.up_proj))  # [B, K, F]
    down = module.mlp.down_proj
    if _is_plain(down) and down.bias is None:  # then the product adds to the sum
        hidden.flatten(0, 1).addmm_(gated.flatten(0, 1), down.weight.t())
        return hidden
    fed: Tensor = down(gated)  # [B, K, D]
    return hidden + fed


def _attended(
    module: Any,
    joined: Joined,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    cached: Any,
    text_position: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, [B, K, D], to the prompts and texts of ``cached``, a ``CausalDecoder``."""
    from ngramloss.gpu import decoding

    projections = module.q_proj, module.k_proj, module.v_proj
    queries, keys, values = joined(hidden_states, *projections)  # [B, K, H · d] each
    if hasattr(module, "q_norm"):
        queries, keys = (
            norm(rows.unflatten(-1, (-1, cached.width))).flatten(2)
            for norm, rows in ((module.q_norm, queries), (module.k_norm, keys))
        )
    decoding.rotate(queries, keys, *position_embeddings)
    window = getattr(module, "sliding_window", None)
    if type(module).__name__ == "MistralAttention":  # it alone reads the configuration; Llama has no window
        window = getattr(module.config, "sliding_window", None)
    found = cached.attend(module.layer_idx, queries, keys, values, text_position, scale=module.scaling, window=window)
    return module.o_proj(found), None
