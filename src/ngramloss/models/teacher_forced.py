"""a model, sources and texts → probabilities by teacher forcing: what an objective sees, log-probabilities of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.data.batches.padding import Pad, Padder, padded
from ngramloss.loss.stats import IGNORE_INDEX, token_stats
from ngramloss.models.attached.attach import logits_of
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.loading import is_causal

MOST_LOGITS = 2**28  # Logits that are computed at a time: 1 GB in fp32


@torch.inference_mode()
def forced_predictions(
    model: Any, tokenizer: Any, sources: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> Iterator[dict[str, list[Any]]]:
    """Teacher forcing: for each reference ``tokens`` and ``best`` as text, ``confidence`` and ``label_probability``."""
    model.eval()
    pad: Pad = Padder(tokenizer.pad_token_id, partial(decoder_inputs, model))
    batch_size = 16
    rows = [{"input_ids": list(source), "labels": target} for source, target in zip(sources, references, strict=True)]
    if is_causal(model.config):
        pad, batch_size = JoinedPadder(tokenizer.pad_token_id), min(batch_size, _joined_at_once(model, rows))
    for start in range(0, len(rows), batch_size):
        batch = {name: tensor.to(model.device) for name, tensor in pad(rows[start : start + batch_size]).items()}
        labels = batch["labels"]  # [B, T]
        stats = token_stats(logits_of(model, {**batch, "use_cache": False}), labels)
        for index, row in enumerate(labels):
            real = row != IGNORE_INDEX  # [T]
            yield {
                "tokens": _pieces(tokenizer, row[real]),
                "best": _pieces(tokenizer, stats.best_token[index][real]),
                "confidence": _probabilities(stats.best_logp[index][real]),
                "label_probability": _probabilities(stats.label_logp[index][real]),
            }


@torch.inference_mode()
def text_logp(
    model: Any, sources: Sequence[Sequence[int]], texts: Sequence[Sequence[Sequence[int]]], *, pad: int
) -> list[list[float]]:
    """The log-probability of each text of each source after its start token; the encoder runs once a source."""
    model.eval()
    if is_causal(model.config):
        pairs = [(source, row) for source, own in zip(sources, texts, strict=True) for row in own]
        joined = [{"input_ids": list(source), "labels": row[1:]} for source, row in pairs]  # a prompt before each text
        whole = iter(joined_label_logp(model, joined, pad=pad))
        return [[sum(next(whole)) for _ in own] for own in texts]
    ids, mask = (each.to(model.device) for each in _tensors(sources, pad))  # [B, S] each
    hidden = model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True).last_hidden_state  # [B, S, D]
    flat = [(owner, row) for owner, rows in enumerate(texts) for row in rows]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    count = max(1, MOST_LOGITS // (vocabulary * max(len(row) for _, row in flat)))
    found: list[float] = []
    for start in range(0, len(flat), count):
        rows = flat[start : start + count]
        owners = torch.tensor([owner for owner, _ in rows], device=model.device)  # [N]
        inputs = _tensors([row[:-1] for _, row in rows], pad)[0].to(model.device)  # [N, T]
        labels = _tensors([row[1:] for _, row in rows], IGNORE_INDEX)[0].to(model.device)  # [N, T]
        logits = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden[owners]),
            attention_mask=mask[owners],
            decoder_input_ids=inputs,
            use_cache=False,
        ).logits  # [N, T, V]
        found += token_stats(logits, labels).label_logp.sum(-1).tolist()  # 0 where there is no label
    sums = iter(found)
    return [[next(sums) for _ in rows] for rows in texts]


@torch.inference_mode()
def joined_label_logp(model: Any, rows: Sequence[dict[str, Any]], *, pad: int) -> list[list[float]]:
    """The log-probability of every label of a decoder-only model's rows: ``input_ids``, not empty, and ``labels``."""
    model.eval()
    count = _joined_at_once(model, rows)
    found: list[list[float]] = []
    for start in range(0, len(rows), count):
        chunk = rows[start : start + count]
        sent: dict[str, Any] = {name: tensor.to(model.device) for name, tensor in JoinedPadder(pad)(chunk).items()}
        logp = token_stats(logits_of(model, {**sent, "use_cache": False}), sent["labels"]).label_logp  # [B, T]
        found += [own[: len(row["labels"])] for row, own in zip(chunk, logp.tolist(), strict=True)]
    return found


def _joined_at_once(model: Any, rows: Sequence[dict[str, Any]]) -> int:
    """How many of these rows of a decoder-only model have no more logits than are computed at a time."""
    longest = max((len(row["input_ids"]) + len(row["labels"]) for row in rows), default=1)
    return max(1, int(MOST_LOGITS // (model.get_output_embeddings().weight.shape[0] * longest)))


def _tensors(rows: Sequence[Sequence[int]], fill: int) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in padded(rows, fill)]


def _pieces(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    return [tokenizer.decode([token]) for token in ids.tolist()]


def _probabilities(logp: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in logp.exp().tolist()]
