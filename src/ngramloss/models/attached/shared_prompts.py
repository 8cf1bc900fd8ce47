"""rows in which several texts follow one prompt → attention in which no text sees another; whether a model is right so.

Position ids of each text continue those of the prompt, and a mask lets a token see the prompt and the earlier tokens of
its own text: each is computed as if alone, the prompt once. transformers asks a registered function for the mask of
each kind of layer: ours evaluates its rule, such as a sliding window, at position ids instead of indices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.joined import TEXT_NUMBERS, JoinedPadder
from ngramloss.errors import UserError
from ngramloss.loss.stats import at_positions, head_logits
from ngramloss.models.attached.adapted_heads import evaluating, head_input
from ngramloss.models.attached.calls import capturing
from ngramloss.models.attached.heads import TOLERANCES, bare, head_module, head_of
from ngramloss.models.attached.unmasked import attention_named, takes_other_attention, unmasked

NAMES = {"sdpa": "ngramloss_shared_sdpa", "eager": "ngramloss_shared_eager"}
"""Attention of transformers → the same with a mask of shared prompts. Flash attention takes no such mask."""
SHORT = 8
"""Tokens of the prompt and of the texts that :func:`why_not_shared` compares."""


_rows: ContextVar[tuple[Tensor, Tensor]] = ContextVar("rows")
"""Of a batch: position ids, and which text each position belongs to, as in :class:`JoinedPadder`, [R, L] each."""


def call(model: Any, **inputs: Any) -> Any:
    """What a model returns, hooks and wrappers included."""
    return model(**inputs)


def on_the_right(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward for right-padded rows, without their masks and without a cache; ``text_numbers`` share prompts."""

    def run(model: Any, **inputs: Any) -> Any:
        numbers = inputs.pop(TEXT_NUMBERS, None)  # [R, L]
        if inputs.get("attention_mask") is None and isinstance(ids := inputs.get("input_ids"), Tensor):
            inputs["attention_mask"] = torch.ones_like(ids)  # or transformers would look for packed documents, [R, L]
        inner = bare(model)
        with unmasked(inner) if numbers is None else _shared(inner, numbers, inputs.get("position_ids")):
            return forward(model, **{"use_cache": False, **inputs})

    return run


@contextmanager
def _shared(model: Any, numbers: Tensor, positions: Tensor | None) -> Iterator[None]:
    """Let a model's attention keep the texts of a row apart."""
    implementation = model.config._attn_implementation
    if implementation not in NAMES or positions is None:
        raise UserError(
            f"the inputs have `{TEXT_NUMBERS}`: the texts of a row share its prompt. This needs `position_ids` and "
            f"{' or '.join(NAMES)} attention, but the model has {implementation}. Put the prompt before each text, in "
            "a row of its own."
        )
    _register()
    token = _rows.set((positions, numbers))
    try:
        with attention_named(model.config, NAMES[implementation]):
            yield
    finally:
        _rows.reset(token)


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name, attend in (("sdpa", sdpa_attention_forward), ("eager", _eager)):
        AttentionInterface.register(NAMES[name], attend)
        AttentionMaskInterface.register(NAMES[name], _mask)


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The attention of a model's own file, which ``eager`` stands for."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    attend = next(own for file in files if (own := getattr(file, "eager_attention_forward", None)) is not None)
    return attend(module, *args, **kwargs)


def _mask(*, mask_function: Callable[..., Tensor], dtype: torch.dtype, use_vmap: bool = False, **others: Any) -> Tensor:
    """What is added to attention scores: 0 where a token may be seen, and the least number elsewhere, [R, 1, L, L].

    PyTorch would make it of bools in every layer, and keep each for the backward pass; so all layers of a kind share
    it. ``use_vmap``: the rule may take single numbers.
    """
    if use_vmap:
        raise UserError("the attention mask of this model cannot be computed from position ids.")
    positions, numbers = _rows.get()
    device = positions.device
    row, head = torch.arange(len(positions), device=device).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, device=device)
    seen = mask_function(row, head.long(), positions[:, None, :, None], positions[:, None, None, :])  # [R, 1, L, L]
    reader, read = numbers[:, None, :, None], numbers[:, None, None, :]  # [R, 1, L, 1], [R, 1, 1, L]
    seen = seen & ((read == reader) | (read == 0))  # of padding, padding
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)


# Whether a model is right with it


@torch.no_grad()
def why_not_shared(model: Any, *, longest_row: int, longest_text: int) -> str:
    """Why texts of this model cannot share a prompt; empty if they can.

    Two short texts must get the log-probabilities that they have behind a prompt of their own. Other texts between them
    fill the row up: so a window or a limit that counts indices, not position ids, shows. Weights of 16 bits are
    compared as fp32, because rounding would hide a small fault. No random number is drawn from PyTorch's generators.
    """
    inner = bare(model)
    if inner.config._attn_implementation not in NAMES:
        return f"{inner.config._attn_implementation} takes no mask of its own"
    if inner.is_gradient_checkpointing and not takes_other_attention(inner.__class__):
        # The backward pass computes layers again under the model's own name of attention, perhaps in another way.
        return "it may look at the name of its attention, which is another one when layers are computed again"
    generator = torch.Generator().manual_seed(0)
    V = head_of(inner, head_module(inner)).weight.shape[0]
    most = getattr(inner.config, "max_position_embeddings", None) or 2**62
    each = max(1, min(longest_text, most - SHORT))

    def ids(length: int) -> list[int]:
        return torch.randint(V, (length,), generator=generator).tolist()

    count, rest = divmod(max(0, longest_row - 3 * SHORT), each)
    between = [ids(length) for length in [each] * count + [rest] * (rest > 0)]
    row = {"input_ids": ids(SHORT), "labels": ids(SHORT)}
    last = ids(SHORT)
    try:
        with evaluating(model.modules()), _whole_precision(inner):
            found, expected = (
                _logp(
                    model, JoinedPadder(0, shared=shared)([row | {"candidates": texts, "scores": [0.0] * len(texts)}])
                )
                for shared, texts in ((True, [*between, last]), (False, [last]))
            )  # [2, SHORT, V] each
    except Exception as reason:  # a model may fail in any way with inputs that it does not expect
        return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
    apart = float((found - expected).square().mean().sqrt())
    if apart <= TOLERANCES[torch.float32]:
        return ""
    return f"log-probabilities of a text then differ by {apart:.2g}"  # also if it is NaN


@contextmanager
def _whole_precision(model: Any) -> Iterator[None]:
    """Let weights and buffers of 16 bits be fp32 for a while. Afterwards they are the same memory as before."""
    tensors = [*model.parameters(), *model.buffers()]
    own = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    try:
        for tensor, data in own:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def _logp(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Log-probabilities where the first and the last text of a batch are predicted, [2, SHORT, V]."""
    inner = bare(model)
    module = head_module(inner)
    batch = {name: value.to(inner.device) for name, value in batch.items()}
    places = torch.stack([batch["label_positions"][0, :SHORT], batch["candidate_positions"][0, -1, :SHORT]])
    names = ("input_ids", "position_ids", TEXT_NUMBERS)
    with capturing(module) as capture:
        on_the_right(call)(model, **{name: batch[name] for name in names if name in batch})
    assert capture.hidden is not None, "attach has found the head"
    hidden = head_input(module, at_positions(capture.hidden, places))  # [2, SHORT, D]
    logits = head_logits(hidden, **head_of(inner, module)._asdict())  # [2, SHORT, V]
    return logits.float().log_softmax(-1)
