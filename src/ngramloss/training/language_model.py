"""a language model of the targets, and tokens → the log-probability of every label, computed once and cached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ngramloss.data.prompts import start_of_text
from ngramloss.data.tokens import Tokens, cached_at, tokens_fingerprint
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.teacher_forced import joined_label_logp
from ngramloss.output.progress import Progress
from ngramloss.recipe import Model
from ngramloss.storage.checksums import cached_folder
from ngramloss.storage.files import fingerprint
from ngramloss.storage.run_folder import weight_files

NAME = "lm_logp"
FORMAT = 1
"""Part of the cache key: increased when the same language model gives other numbers."""
CHUNK = 256
"""Rows that are computed at a time, or fewer if they are long."""


class LanguageModel(NamedTuple):
    """A decoder-only model that has not read any source."""

    name: str
    model: Any
    start: list[int]  # the ids that it begins with
    pad: int
    fingerprint: str  # of its configuration and weights


def load_language_model(name: str, tokenizer: Any, device: torch.device) -> LanguageModel:
    """Load a language model for the labels of a tokenizer. Raises unless both have the same tokens."""
    config = loading.load_config(Model(name=name))
    if not loading.is_causal(config):
        raise UserError(
            f"data.language_model: {name} is an encoder-decoder, but a language model of the targets must be "
            "decoder-only. Train one with ngramloss train lm."
        )
    otherwise = (
        f"data.language_model: {name} has another tokenizer than the model, so its token ids mean other words. Train "
        "one with the model's tokenizer: ngramloss train lm --set model.tokenizer=MODEL. If both are from scratch, "
        "their data and their model.vocabulary must be the same."
    )
    model, own = loading.load_frozen(name, tokenizer, otherwise)
    mark = language_model_mark(name, config)
    return LanguageModel(name, model.to(device), start_of_text(own), int(own.pad_token_id), mark)


def language_model_mark(name: str, config: Any) -> str:
    """A hash of the configuration and weights of a folder; of a model on the hub, its commit."""
    files = [*weight_files(Path(name)), *Path(name).glob("config.json")]
    return fingerprint(files) if files else str(config._commit_hash)


def prepare_numbers(lm: LanguageModel, tokens: Mapping[str, Tokens]) -> tuple[dict[str, Path], float]:
    """The file of numbers of each split, one for each label, cached; and the perplexity of the training split."""
    files = {}
    for split, rows in tokens.items():
        if rows.has_turns:
            raise UserError(
                "a language model of the targets reads one text, but these rows have several turns. Leave out "
                "margin, or use columns prompt and completion."
            )
        folder = cached_at("language_models", [FORMAT, tokens_fingerprint(rows.folder), lm.fingerprint, lm.start])
        fill = partial(_write_numbers, lm, rows)
        files[split] = cached_folder(folder, fill, what="cache of a language model") / f"{NAME}.npy"
    numbers = np.load(files["train"])
    mean = float(numbers[numbers != 0].mean(dtype=np.float64))  # without start tokens
    return files, math.exp(min(-mean, 700.0))


def _write_numbers(lm: LanguageModel, rows: Tokens, folder: Path) -> None:
    lengths = rows.target_lengths
    ends = np.cumsum(lengths)
    numbers = np.zeros(int(lengths.sum()), np.float32)
    order = np.argsort(lengths, kind="stable")[::-1]  # rows of one length need the least padding
    with Progress("language model", total=len(order), unit="examples") as progress:
        for first in range(0, len(order), CHUNK):
            chunk = order[first : first + CHUNK].tolist()
            labels = [rows[row]["labels"].tolist() for row in chunk]
            for row, own in zip(chunk, label_logp(lm, labels), strict=True):
                numbers[ends[row] - lengths[row] : ends[row]] = own
            progress.update(len(chunk))
    np.save(folder / f"{NAME}.npy", numbers)


def label_logp(lm: LanguageModel, labels: list[list[int]]) -> list[list[float]]:
    """The log-probability of every label of each text. A start token at its beginning is not predicted: it has 0."""
    begins = [len(lm.start) if ids[: len(lm.start)] == lm.start else 0 for ids in labels]
    rows = [{"input_ids": lm.start, "labels": ids[skipped:]} for ids, skipped in zip(labels, begins, strict=True)]
    found = joined_label_logp(lm.model, rows, pad=lm.pad)
    return [[0.0] * skipped + own for skipped, own in zip(begins, found, strict=True)]
