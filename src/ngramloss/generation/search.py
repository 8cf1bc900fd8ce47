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
from ngramloss.generation.engines import PRECISIONS, Write
from ngramloss.generation.engines.hf import generated
from ngramloss.models import loading
from ngramloss.models.first_tokens import align_start
from ngramloss.models.languages import codes, set_languages
from ngramloss.recipe import Data, Model
from ngramloss.storage.run_folder import RunFolder


class Written(NamedTuple):
    """A summary and its number of tokens, including the start and end tokens but not padding."""

    text: str
    tokens: int


def load_model(
    settings: Model,
    data: Data,
    *,
    trained_here: bool,
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda _: None,
    precision: str = "fp32",
) -> tuple[Any, Any]:
    """Load a trained model onto its device, and its tokenizer, both set to the languages of the data.

    Args:
        settings: the model section of a recipe.
        data: the data section, for the languages.
        trained_here: whether a run trained it. Then generation begins as its training did. Of other models only
            multilingual ones are changed; their settings cannot know the target language.
        device: by default the GPU if there is one.
        trust_remote_code: whether code that comes with the model may run.
        say: called with a line for each setting of the model that is changed.
        precision: of the weights: a name in ``PRECISIONS``.
    """
    tokenizer, _ = loading.load_tokenizer(settings, lambda: (), "", trust_remote_code=trust_remote_code)
    model = loading.load(settings, tokenizer, trust_remote_code=trust_remote_code)
    set_languages(tokenizer, data.source_language, data.target_language, model=settings.name)
    if trained_here or codes(tokenizer):
        align_start(model, tokenizer, name=settings.name, training=False, say=say)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, PRECISIONS[precision]))
    return model, tokenizer


def model_of_run(folder: Path, settings: Model) -> Model:
    """The settings to load a finished run's model."""
    return dataclasses.replace(settings, name=str(RunFolder(folder).model), revision="main")


def of_run(
    folder: Path,
    texts: Sequence[str],
    *,
    device: str | None = None,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Generate a summary of each text with a finished run's model. Texts are prepared like its training data."""
    run = RunFolder(folder)
    if not run.finished:
        raise MissingFileError(f"no model in {run.model}. Train it with: ngramloss train RECIPE --run {folder}")
    settings = recipe.load(str(run.recipe), objective=False)
    data = settings.data
    own = model_of_run(folder, settings.model)
    model, tokenizer = load_model(own, data, trained_here=True, device=device, trust_remote_code=trust_remote_code)
    ids = source_ids(texts, tokenizer, Shape.of(data), separator_id(tokenizer, data.separator))
    return [summary.text for summary in summaries(model, tokenizer, ids, batch_size=batch_size, progress=progress)]


def summaries(
    model: Any,
    tokenizer: Any,
    sources: Sequence[Sequence[int]],
    *,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    write: Write | None = None,
) -> list[Written]:
    """Generate a summary of each source, in order. Sources of similar length are batched together.

    Args:
        model: a Hugging Face encoder-decoder with its ``generation_config``.
        tokenizer: the model's tokenizer.
        sources: ids with their special tokens.
        batch_size: sources per batch.
        progress: called with the number of sources done since the last call.
        write: an engine's function; by default the model's own ``generate``.
    """
    model.eval()
    written = [Written("", 0)] * len(sources)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = [sources[index] for index in indices]
        rows = generated(model, batch, tokenizer.pad_token_id) if write is None else [best for best, *_ in write(batch)]
        for index, text, row in zip(indices, decoded(tokenizer, rows), rows, strict=True):
            written[index] = Written(text, _length(row, tokenizer.pad_token_id))
        if progress is not None:
            progress(len(indices))
    return written


def decoded(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """The texts of rows of ids, without special tokens and codes of languages."""
    languages = set(codes(tokenizer).values())  # to M2M100 these are not special tokens
    bare = [[token for token in row if token not in languages] for row in rows]
    return [text.strip() for text in tokenizer.batch_decode(bare, skip_special_tokens=True)]


def _length(ids: Sequence[int], pad: int) -> int:
    """Number of tokens before the padding at the end."""
    return next((length for length in range(len(ids), 0, -1) if ids[length - 1] != pad), 0)
