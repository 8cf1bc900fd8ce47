"""a model, sources and references → what an objective sees: the most probable token per position, its probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ngramloss.hf.attach import decoder_inputs
from ngramloss.hf.batches import Padder
from ngramloss.stats import IGNORE_INDEX, token_stats


@torch.inference_mode()
def forced_predictions(
    model: Any, tokenizer: Any, sources: Sequence[Sequence[int]], references: Sequence[str], *,
    max_target: int, batch_size: int = 16,
) -> Iterator[dict[str, list[Any]]]:
    """Run the model on each reference (teacher forcing), and return its tokens, the best tokens and probabilities.

    Args:
        model: a Hugging Face encoder-decoder.
        tokenizer: the model's tokenizer.
        sources: ids with their special tokens.
        references: one for each source.
        max_target: maximum reference length in tokens.
        batch_size: references per batch.

    Yields:
        ``tokens`` and ``best``, as text; ``confidence``, the best token's probability; ``label_probability``.
    """
    model.eval()
    padder = Padder(tokenizer.pad_token_id, partial(decoder_inputs, model))
    targets = tokenizer(text_target=list(references), truncation=True, max_length=max_target)["input_ids"]
    rows = [{"input_ids": list(source), "labels": target} for source, target in zip(sources, targets, strict=True)]
    for start in range(0, len(rows), batch_size):
        batch = {name: tensor.to(model.device) for name, tensor in padder(rows[start : start + batch_size]).items()}
        labels = batch.pop("labels")                                     # [B, T]
        stats = token_stats(model(**batch, use_cache=False).logits, labels)
        for index, row in enumerate(labels):
            real = row != IGNORE_INDEX                                   # [T]
            yield {
                "tokens": _pieces(tokenizer, row[real]), "best": _pieces(tokenizer, stats.best_token[index][real]),
                "confidence": _probabilities(stats.best_logp[index][real]),
                "label_probability": _probabilities(stats.label_logp[index][real]),
            }


def _pieces(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    return [tokenizer.decode([token]) for token in ids.tolist()]


def _probabilities(logp: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in logp.exp().tolist()]
