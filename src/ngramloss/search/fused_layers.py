"""the layers of a model → the same with a third of the kernels on a GPU, for one token at a time and for whole sources.

A token of a small model costs mostly the number of its kernels, a source the memory that they read and write again. A
norm of transformers is eight kernels and rotary positions are ten; here each is one.
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

_ROTARY = ("Llama", "Mistral", "Qwen2", "Qwen3")
ROTARY, LAYERS, GATED = ([name + part for name in _ROTARY] for part in ("Attention", "DecoderLayer", "MLP"))
"""Attention that only rotates by position and normalises; layers of it and a part of ``GATED``, each behind a norm;
feed-forward parts ``down(silu(gate(x)) · up(x))``."""
_ENCODERS = {"Bart": False, "Marian": False, "MBart": True, "Pegasus": True, "M2M100": True}
ENCODER_LAYERS = {f"{name}EncoderLayer": norms_first for name, norms_first in _ENCODERS.items()}
"""Layers of an encoder, and whether norms stand before their parts; otherwise each stands behind a sum."""
ENCODER_ATTENTION = [f"{name}Attention" for name in _ENCODERS]  # the attention of these layers
MOST_COPIED = 2**29
"""Bytes of weights that :class:`Joined` copies at most. The products of larger models take longer than a launch."""


class Joined:
    """Linear layers of the same input as one product, from copies of weights; replaced or hooked ones stay."""

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
        copies: list[Tensor] = []
        weights: list[Tensor] = []
        for layers, weight, bias in self.products.values():
            sizes = [layer.out_features for layer in layers]
            copies += weight.split(sizes)
            weights += [layer.weight for layer in layers]
            if bias is not None:
                copies += bias.split(sizes)
                weights += [layer.bias for layer in layers]
        if copies:
            torch._foreach_copy_(copies, weights)

    def __call__(self, hidden: Tensor, *layers: Any) -> Sequence[Tensor]:
        """What each of the layers makes of the same input, [..., its width]."""
        if layers[0] not in self.products:
            return [layer(hidden) for layer in layers]
        _, weight, bias = self.products[layers[0]]
        made: Tensor = linear(hidden, weight, bias)  # [..., all widths]
        parts: Sequence[Tensor] = made.split([layer.out_features for layer in layers], -1)
        return parts


def _is_plain(layer: Module) -> bool:
    return type(layer) is Linear and _is_own(layer)


def _is_own(module: Module) -> bool:
    """Whether a module does what its class does: nobody has replaced its forward or added hooks."""
    return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


@torch.no_grad()
def _weights(layers: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None


class Norm(NamedTuple):
    """A norm of rows."""

    weight: Tensor  # [D]
    bias: Tensor | None  # [D], if there is one
    eps: float  # added to the mean square
    centred: bool  # whether the mean is subtracted first


def norm_of(module: Any) -> Norm | None:
    """What a module computes, if it is a norm that the kernel knows. Who replaced or hooked it has reasons."""
    if not _is_own(module):
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
    """A sum and its norm, [..., D] each: ``hidden + part`` and ``module(hidden + part)``; ``part`` may have one row."""
    norm = norm_of(module) if has_kernels else None
    if norm is None or not norm.weight.dtype == hidden.dtype == part.dtype:
        total = hidden + part  # [..., D]
        return total, module(total)
    from ngramloss.search.kernels import attention as decoding

    return decoding.added_norm(hidden, part, norm)


def fused_forwards(model: Any, joined: Joined, *, reads_sources: bool = False) -> dict[Module, Callable[..., Any]]:
    """What may take the place of ``forward``, by module, unless replaced; ``reads_sources``: whole ones, not tokens."""
    found: dict[Module, Callable[..., Any]] = {}
    attended: Callable[..., Any] = _attended_by_sources if reads_sources else _attended
    attentions = ROTARY
    if reads_sources:
        attentions = [*ROTARY, *ENCODER_ATTENTION] if model.config._attn_implementation == "sdpa" else []
    for module in model.modules():
        name = type(module).__name__
        if "forward" in vars(module):
            continue
        if (norm := norm_of(module)) and (reads_sources or not norm.centred):
            found[module] = partial(_norm_forward, module, norm)
        elif name in attentions:
            found[module] = partial(attended, module, joined)
        elif name in LAYERS and _is_gated(module.mlp) and (norm := norm_of(module.post_attention_layernorm)):
            found[module] = partial(_layer, module, norm, joined)
        elif name in ENCODER_LAYERS:
            first, last = norm_of(module.self_attn_layer_norm), norm_of(module.final_layer_norm)
            if first and last:
                found[module] = partial(_encoder_layer, module, first, last, ENCODER_LAYERS[name])
    return found


@contextmanager
def replaced(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules have these forwards for a while, but those that have one from somebody else by now."""
    own = [module for module in forwards if "forward" not in vars(module)]
    try:
        for module in own:
            vars(module)["forward"] = forwards[module]  # an assignment would look for parameters first
        yield
    finally:
        for module in own:
            vars(module).pop("forward", None)


def write_product(layer: Any, hidden: Tensor, rows: Tensor) -> None:
    """Write what a linear layer makes of ``hidden``, [B, S, D], into ``rows``, [B, S, width], which are contiguous."""
    if not _is_plain(layer) or not layer.weight.dtype == hidden.dtype == rows.dtype:
        rows.copy_(layer(hidden))
        return
    given, weight, made = hidden.flatten(0, 1), layer.weight.t(), rows.flatten(0, 1)
    if layer.bias is None:
        torch.mm(given, weight, out=made)
    else:
        torch.addmm(layer.bias, given, weight, out=made)


def _norm_forward(module: Any, norm: Norm, hidden: Tensor) -> Tensor:
    """What the module's own forward makes. T5 in fp16 has norms that read fp32."""
    own: Callable[..., Tensor] = type(module).forward
    return _normed(norm, hidden) if norm.weight.dtype == hidden.dtype else own(module, hidden)


def _normed(norm: Norm, hidden: Tensor) -> Tensor:
    from ngramloss.search.kernels import attention as decoding

    return decoding.norm(hidden, norm)


def _is_gated(module: Any) -> bool:
    known = type(module).__name__ in GATED and _is_own(module) and _is_own(module.act_fn)
    return known and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _layer(module: Any, norm: Norm, joined: Joined, hidden_states: Tensor, **others: Any) -> Tensor:
    """A layer of ``LAYERS``, [B, K, D]."""
    from ngramloss.search.kernels import attention as decoding

    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **others)  # [B, K, D]
    hidden, normed = decoding.added_norm(hidden_states, attended, norm)  # [B, K, D] each
    gated = decoding.gated(*joined(normed, module.mlp.gate_proj, module.mlp.up_proj))  # [B, K, F]
    down = module.mlp.down_proj
    if _is_plain(down) and down.bias is None:  # then the product adds to the sum
        hidden.flatten(0, 1).addmm_(gated.flatten(0, 1), down.weight.t())
        return hidden
    fed: Tensor = down(gated)  # [B, K, D]
    return hidden + fed


def _encoder_layer(
    module: Any,
    first: Norm,
    last: Norm,
    norms_first: bool,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """A layer of ``ENCODER_LAYERS``, [B, S, D]."""
    from ngramloss.search.kernels import attention as decoding

    given = module.self_attn_layer_norm(hidden_states) if norms_first else hidden_states  # [B, S, D]
    attended = module.self_attn(hidden_states=given, attention_mask=attention_mask, **others)[0]  # [B, S, D]
    if norms_first:
        hidden, normed = decoding.added_norm(hidden_states, attended, last)  # [B, S, D] each
    else:
        hidden = normed = decoding.norm(hidden_states, first, part=attended)  # [B, S, D]
    fed = module.fc2(module.activation_fn(module.fc1(normed)))  # [B, S, D]
    made: Tensor = hidden + fed if norms_first else decoding.norm(hidden, last, part=fed)  # [B, S, D]
    if made.dtype == torch.float16:  # as transformers does
        most = torch.finfo(made.dtype).max - 1000
        made.clamp_(-most, most)
    return made


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
    queries, keys, values = _projected(module, joined, hidden_states, position_embeddings)  # [B, K, H · d] each
    window = getattr(module, "sliding_window", None)
    if type(module).__name__ == "MistralAttention":  # it alone reads the configuration; Llama has no window
        window = getattr(module.config, "sliding_window", None)
    found = cached.attend(module.layer_idx, queries, keys, values, text_position, scale=module.scaling, window=window)
    return module.o_proj(found), None


def _attended_by_sources(
    module: Any,
    joined: Joined,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer to whole sources, [B, S, D], as transformers has PyTorch compute it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows = _projected(module, joined, hidden_states, position_embeddings)  # [B, S, H · d] each
    queries, keys, values = (each.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for each in rows)
    if past_key_values is not None:
        keys, values = past_key_values.update(keys, values, module.layer_idx)  # [B, H, S, d] each
    found = sdpa_attention_forward(module, queries, keys, values, attention_mask, scaling=module.scaling)[0]
    output = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    return output(found.flatten(2)), None  # [B, S, D]


def _projected(module: Any, joined: Joined, hidden: Tensor, angles: tuple[Tensor, Tensor] | None) -> Sequence[Tensor]:
    """Queries, keys and values, [B, T, H · d] each, rotated by these angles if there are any."""
    from ngramloss.search.kernels import attention as decoding

    queries, keys, values = joined(hidden, module.q_proj, module.k_proj, module.v_proj)  # [B, T, H · d] each
    if hasattr(module, "q_norm"):
        queries, keys = (
            norm(rows.unflatten(-1, (-1, module.head_dim))).flatten(2)
            for norm, rows in ((module.q_norm, queries), (module.k_norm, keys))
        )
    if angles is not None:
        decoding.rotate(queries, keys, *angles)
    return queries, keys, values
