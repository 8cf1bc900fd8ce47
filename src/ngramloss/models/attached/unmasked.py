"""a decoder-only model whose rows are padded on the right → a context in which its attention builds no masks for them.

No token sees what comes after it, so padding on the right needs no mask. transformers looks at the padding to find out,
which a CUDA graph cannot do: there it builds a mask of all pairs, and attention takes a slower kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

NAME = "ngramloss_sdpa"
"""PyTorch's attention, as transformers calls it, with masks only where rows padded on the right need one."""


@contextmanager
def unmasked(model: Any) -> Iterator[None]:
    """Let PyTorch's attention leave out masks that only say where the padding is. Other attention stays as it is."""
    if model.config._attn_implementation != "sdpa" or not takes_other_attention(model.__class__):
        yield
        return
    _register()
    with attention_named(model.config, NAME):
        yield


@contextmanager
def attention_named(config: Any, name: str) -> Iterator[None]:
    """Let a model use another attention function, registered under this name, for a while."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def as_if_captured() -> Iterator[None]:
    """Let transformers build the masks of a capture, or compiled layers would be compiled again in its middle."""
    from transformers.utils import import_utils

    name = "is_cuda_stream_capturing"
    before = getattr(import_utils, name, None)
    if before is None:  # another version of transformers
        yield
        return
    setattr(import_utils, name, lambda: True)
    try:
        yield
    finally:
        setattr(import_utils, name, before)


@cache
def takes_other_attention(kind: Any) -> bool:
    """Whether models of this class call registered attentions; Falcon's tokens would see later ones without a mask."""
    return bool(kind._can_set_attn_implementation())


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(**given: Any) -> Tensor | None:
    """None if attention sees everything that comes before a token; otherwise transformers' own mask."""
    kv_length, local_size = given["kv_length"], given.get("local_size")
    sees_all = local_size is None or kv_length < local_size
    # Not if a token sees other tokens than all before it, such as those of an image.
    if given.get("allow_is_causal_skip", True) and given["q_length"] == kv_length and sees_all:
        return None
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(**given)  # [B, 1, T, T]
    return mask
