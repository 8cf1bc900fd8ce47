"""a model, lengths of documents → floating-point operations of training on one of them, and a GPU's peak."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ngramloss_bench import models
from ngramloss_bench.benchmark import NAN
from ngramloss_bench.lengths import Lengths

PEAK = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
}
"""Dense products in bf16 or fp16 per second, by the name of the device: datasheets."""
QUERY = re.compile(r"\.(q|q_proj)$")
OF_SOURCE = re.compile(r"(^|\.)encoder\.|\.(encoder_attn|EncDecAttention)\.(k|v|k_proj|v_proj)$")
"""Layers that read the source: the encoder, and keys and values of the decoder's attention to it."""
ACROSS = re.compile(r"\.(encoder_attn|EncDecAttention)\.")


def per_document(config: Any, sources: Lengths, targets: Lengths) -> float:
    r"""The mean number of operations of a forward and backward pass; NaN for a model whose layers are not known here.

    A weight of a linear layer costs 6 operations for each token that it reads: 2 forward, 4 backward. An
    encoder-decoder with source S and target T, and a decoder-only model with a row of L = S + T tokens:

    .. math::
        6 \cdot (N_{enc} S + N_{dec} T + V D T) + 12 D (l_{enc} S^2 + l_{dec} (S T + T(T+1)/2)) \quad
        6 \cdot (N L + V D T) + 12 D l \cdot L(L+1)/2

    where N are the weights of linear layers without the head, which counts only at the T positions with a label.
    Keys and values of the attention to the source are in N_enc. D in the attention is the width of all its heads, and
    a causal position sees only itself and those before. Padding, embeddings, norms, softmax, what is computed
    again, and the objective count nothing.
    """
    S, T = sources.astype(float), targets.astype(float)  # [N] each
    with torch.device("meta"):
        model = models.empty(config)
    head, joined = model.get_output_embeddings(), models.is_decoder_only(config)
    read = S + T if joined else T  # what the decoder reads
    causal = read * (read + 1) / 2
    total, known, queries = 6 * head.weight.numel() * T, {id(head.weight)}, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            known.add(id(module.weight))
        if not isinstance(module, nn.Linear) or module is head:
            continue
        known.add(id(module.weight))
        of_source = not joined and OF_SOURCE.search(name) is not None
        total = total + 6 * module.weight.numel() * (S if of_source else read)
        if QUERY.search(name):
            pairs = S * T if ACROSS.search(name) else S * S if of_source else causal
            total, queries = total + 12 * module.out_features * pairs, queries + 1
    strange = [each for each in model.parameters() if each.ndim > 1 and id(each) not in known]
    return NAN if strange or not queries else float(total.mean())


def peak(device: str, precision: str) -> float:
    """The operations per second that the device can do at most; NaN where that is not known here."""
    if device != "cuda" or not precision.startswith(("bf16", "fp16")):
        return NAN
    return PEAK.get(torch.cuda.get_device_name(), NAN)
