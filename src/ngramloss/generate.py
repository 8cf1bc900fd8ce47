"""a model and source ids → summaries, by the model's own generation settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ngramloss import recipe
from ngramloss.batch import Shape, separator_id
from ngramloss.batch import sources as source_ids


def of_run(
    folder: Path, texts: Sequence[str], *, device: str | None = None, batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """What a finished run's model writes for each text, prepared as its training data were."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    if not (folder / "model").is_dir():
        raise FileNotFoundError(f"there is no {folder / 'model'}. Make it with: ngramloss train RECIPE --run {folder}")
    data = recipe.load(str(folder / "recipe.toml")).data
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / "model", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = source_ids(texts, tokenizer, Shape.of(data), separator_id(tokenizer, data.separator))
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return summaries(model, tokenizer, ids, batch_size=batch_size, progress=progress)


@torch.inference_mode()
def summaries(
    model: Any, tokenizer: Any, sources: Sequence[Sequence[int]], *,
    batch_size: int = 32, progress: Callable[[int], None] | None = None,
) -> list[str]:
    """What the model writes for each source, in their order. Sources of like length go together.

    Args:
        model: of Hugging Face, an encoder-decoder with its ``generation_config``.
        tokenizer: of the model.
        sources: ids with their special tokens.
        batch_size: sources at a time.
        progress: called with the number of sources done since the last call.
    """
    model.eval()
    texts = [""] * len(sources)
    order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        # After the text, whatever side the tokenizer prefers: before it, padding would move the encoder's positions.
        batch = tokenizer.pad(
            {"input_ids": [list(sources[place]) for place in places]}, padding_side="right", return_tensors="pt"
        )
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}   # [B, S]
        ids = model.generate(**inputs)                                   # [B, T]
        for place, text in zip(places, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
            texts[place] = text.strip()
        if progress is not None:
            progress(len(places))
    return texts
