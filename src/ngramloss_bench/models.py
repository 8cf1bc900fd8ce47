"""a name, lengths → a model with random weights or a loaded one, a batch for it, and a training of it."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import ngramloss as ng


def _bart(V: int, D: int, layers: int, heads: int) -> Any:
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * D}
    parts: dict[str, Any] = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    return transformers.BartConfig(vocab_size=V, d_model=D, max_position_embeddings=1_024, **parts)


def _llama(V: int, D: int, layers: int, heads: int, key_value_heads: int, mlp: int, positions: int) -> Any:
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


SHAPES = {
    "bart-base": partial(_bart, 50_265, 768, 6, 12),
    "small": partial(_bart, 8_000, 256, 3, 4),
    "bart-tiny": partial(_bart, 1_000, 32, 1, 2),
    "smollm2-135m": partial(_llama, 49_152, 576, 30, 9, 3, 1_536, 8_192),
    "llama-tiny": partial(_llama, 1_000, 32, 2, 4, 2, 64, 1_024),
}
"""The models that are created here: name → configuration."""


def built(name: str, device: str = "cpu") -> Any:
    """Create one of ``SHAPES`` with random weights, or load any other name from a folder or the hub."""
    config = configuration(name)
    if name not in SHAPES:
        return ng.loading.load(ng.recipe.Model(name=name), None).to(device)
    torch.manual_seed(0)
    with torch.device(device):  # random numbers of a model take seconds on a CPU
        return empty(config)


def empty(config: Any) -> Any:
    """A model of this configuration with random weights."""
    kind: Any = transformers.AutoModelForCausalLM if is_decoder_only(config) else transformers.AutoModelForSeq2SeqLM
    return kind.from_config(config)


def configuration(name: str) -> Any:
    """The configuration of the model that :func:`built` returns."""
    if name == "scratch":
        names = ", ".join(SHAPES)
        raise ng.UserError(f"bench cannot use scratch, which has no size. Use {names}, a folder or a hub id.")
    if name not in SHAPES:
        return ng.loading.load_config(ng.recipe.Model(name=name))
    return SHAPES[name]()


def is_decoder_only(config: Any) -> bool:
    """Whether the model is decoder-only."""
    return not getattr(config, "is_encoder_decoder", False)


def most_positions(config: Any) -> int:
    """The length that the model's positions allow; very many if they have no limit."""
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def example(model: Any, batch: int, source: int, target: int, device: str) -> dict[str, Tensor]:
    """A batch of random ids with full length. For a decoder-only model, the target follows the source in one row."""
    generator = torch.Generator().manual_seed(0)
    V = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(4, V, (batch, source), generator=generator).to(device)
    labels = torch.randint(4, V, (batch, target), generator=generator).to(device)
    if is_decoder_only(model.config):
        ids, labels = torch.cat([ids, labels], 1), torch.cat([torch.full_like(ids, ng.IGNORE_INDEX), labels], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def head_inputs(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the head of a BART or a Llama gets for a batch, [B, T, D], and the labels that it predicts there, [B, T]."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"]  # [B, T]
    if is_decoder_only(model.config):
        labels = F.pad(labels, (0, 1), value=ng.IGNORE_INDEX)[:, 1:]  # [B, T]
    else:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)  # [B, T]
    return model.base_model(**inputs, use_cache=False).last_hidden_state, labels


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the matrix products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision.removesuffix("-pure")]


def autocast(device: str, precision: str) -> torch.autocast:
    """A context of mixed precision, where the precision is that."""
    return torch.autocast(device, dtype_of(precision), enabled=precision in ("bf16", "fp16"))


def prepare(options: Namespace) -> None:
    """In a process that trains: no messages of other libraries, and the plugins."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    ng.options.load_plugins(options)


def train(options: Namespace, model: Any, rows: Any, on_step: Callable[..., object], **more: Any) -> Any:
    """Train as ``ngramloss train`` does, on the objective of the options; ``more`` goes to :func:`ngramloss.train`."""
    common: dict[str, Any] = {"tokenizer": None, "objective": options.objective, "precision": options.precision}
    common |= {"warmup_steps": 0, "log_every": 10**9, "eval_every": 0}
    return ng.train(model, examples=rows, on_step=on_step, **common | more)
