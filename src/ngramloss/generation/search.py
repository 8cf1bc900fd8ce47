"""a model and source ids → summaries, with the model's own generation settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ngramloss import recipe
from ngramloss.data.tokens import Shape, separator_id
from ngramloss.data.tokens import sources as source_ids
from ngramloss.errors import MissingFileError
from ngramloss.recipe import Model
from ngramloss.run_folder import RunFolder
from ngramloss.training import models


class Written(NamedTuple):
    """A summary and its number of tokens, including the start and end tokens but not padding."""

    text: str
    tokens: int


def load_model(settings: Model, *, device: str | None = None, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a trained model onto its device, and its tokenizer."""
    tokenizer, _ = models.load_tokenizer(settings, lambda: (), "", trust_remote_code=trust_remote_code)
    model = models.load(settings, tokenizer, trust_remote_code=trust_remote_code)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model, tokenizer


def model_of_run(folder: Path, settings: Model) -> Model:
    """The settings to load a finished run's model."""
    return dataclasses.replace(settings, name=str(RunFolder(folder).model), revision="main")


def of_run(
    folder: Path, texts: Sequence[str], *, device: str | None = None, batch_size: int = 32,
    progress: Callable[[int], None] | None = None, trust_remote_code: bool = False,
) -> list[str]:
    """Generate a summary of each text with a finished run's model. Texts are prepared like its training data."""
    run = RunFolder(folder)
    if not run.finished:
        raise MissingFileError(f"no model in {run.model}. Train it with: ngramloss train RECIPE --run {folder}")
    settings = recipe.load(str(run.recipe), objective=False)
    loading = model_of_run(folder, settings.model)
    model, tokenizer = load_model(loading, device=device, trust_remote_code=trust_remote_code)
    data = settings.data
    ids = source_ids(texts, tokenizer, Shape.of(data), separator_id(tokenizer, data.separator))
    return [summary.text for summary in summaries(model, tokenizer, ids, batch_size=batch_size, progress=progress)]


@torch.inference_mode()
def summaries(
    model: Any, tokenizer: Any, sources: Sequence[Sequence[int]], *,
    batch_size: int = 32, progress: Callable[[int], None] | None = None,
) -> list[Written]:
    """Generate a summary of each source, in order. Sources of similar length are batched together.

    Args:
        model: a Hugging Face encoder-decoder with its ``generation_config``.
        tokenizer: the model's tokenizer.
        sources: ids with their special tokens.
        batch_size: sources per batch.
        progress: called with the number of sources done since the last call.
    """
    model.eval()
    written = [Written("", 0)] * len(sources)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        # Always pad on the right: on the left, padding would shift the encoder's positions.
        batch = tokenizer.pad(
            {"input_ids": [list(sources[index]) for index in indices]}, padding_side="right", return_tensors="pt"
        )
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}   # [B, S]
        ids = model.generate(**inputs)                                   # [B, T]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for index, text, row in zip(indices, texts, ids.tolist(), strict=True):
            written[index] = Written(text.strip(), _length(row, tokenizer.pad_token_id))
        if progress is not None:
            progress(len(indices))
    return written


def _length(ids: Sequence[int], pad: int) -> int:
    """Number of tokens before the padding at the end."""
    return next((length for length in range(len(ids), 0, -1) if ids[length - 1] != pad), 0)
