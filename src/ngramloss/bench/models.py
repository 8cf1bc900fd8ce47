"""a name, lengths → a model with random weights or a loaded one, and a batch for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.hf.heads import has_encoder
from ngramloss.models import loading
from ngramloss.recipe import Model
from ngramloss.stats import IGNORE_INDEX


class Shape(NamedTuple):
    """The sizes of a model that is created here, with random weights."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int = 0
    """Of a Llama; a BART has none of its own."""
    mlp: int = 0
    positions: int = 1_024


SHAPES = {
    "bart-base": Shape(50_265, 768, 6, 12),
    "small": Shape(8_000, 256, 3, 4),
    "bart-tiny": Shape(1_000, 32, 1, 2),
    "smollm2-135m": Shape(49_152, 576, 30, 9, key_value_heads=3, mlp=1_536, positions=8_192),
    "llama-tiny": Shape(1_000, 32, 2, 4, key_value_heads=2, mlp=64),
}
"""The models that are created here, by name."""


def built(name: str, *, trust_remote_code: bool = False) -> Any:
    """Create one of ``SHAPES`` with random weights, or load any other name from a folder or the hub."""
    if name not in SHAPES:
        _raise_if_scratch(name)
        return loading.load(Model(name=name), None, trust_remote_code=trust_remote_code)
    torch.manual_seed(0)
    config = configuration(name)
    if config.is_encoder_decoder:
        return transformers.BartForConditionalGeneration(config)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def configuration(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model that :func:`built` returns."""
    if name not in SHAPES:
        _raise_if_scratch(name)
        return loading.load_config(Model(name=name), trust_remote_code=trust_remote_code)
    V, D, layers, heads, key_value_heads, mlp, positions = SHAPES[name]
    if key_value_heads:
        return transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            intermediate_size=mlp,
            max_position_embeddings=positions,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    return transformers.BartConfig(
        vocab_size=V,
        d_model=D,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * D,
        decoder_ffn_dim=4 * D,
        max_position_embeddings=positions,
    )


def _raise_if_scratch(name: str) -> None:
    if name == "scratch":
        names = ", ".join(SHAPES)
        raise UserError(f"bench cannot use scratch, which has no size. Use {names}, a folder or a hub id.")


def example(model: Any, batch: int, source: int, target: int, device: str) -> dict[str, Tensor]:
    """A batch of random ids with full length. For a decoder-only model, the target follows the source in one row."""
    generator = torch.Generator().manual_seed(0)
    V = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(4, V, (batch, source), generator=generator).to(device)
    labels = torch.randint(4, V, (batch, target), generator=generator).to(device)
    if not has_encoder(model):
        ids, labels = torch.cat([ids, labels], 1), torch.cat([torch.full_like(ids, IGNORE_INDEX), labels], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the matrix products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision.removesuffix("-pure")]
