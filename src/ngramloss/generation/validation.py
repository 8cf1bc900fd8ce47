"""a model in training and source ids → the texts that validation scores, written as ``ngramloss generate`` does."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ngramloss import recipe
from ngramloss.data.origins import canonical
from ngramloss.data.sentences import sentences
from ngramloss.generation import engines
from ngramloss.generation.engines.settings import search_of
from ngramloss.generation.predictions import SEVERAL_SENTENCES
from ngramloss.generation.search import summaries
from ngramloss.models.loading import prepare_generation
from ngramloss.recipe import Generation, Recipe

DELAY = 2.0
"""Seconds after which a progress line appears."""


def write_texts(
    model: Any,
    sources: Sequence[Sequence[int]],
    *,
    settings: Recipe,
    tokenizer: Any,
    batch_size: int,
    shows_progress: bool = True,
) -> list[str]:
    """Generate a text for each source, by the recipe's generation settings with ``train.best_beams`` beams.

    The model's mode, its generation settings and the random numbers that training draws next stay as they are.

    Args:
        model: the model in training.
        sources: ids with their special tokens.
        settings: the resolved recipe.
        tokenizer: the model's tokenizer.
        batch_size: sources per batch.
        shows_progress: whether to show a progress line if it takes long.
    """
    from tqdm.auto import tqdm

    search = dataclasses.replace(settings.generation, num_beams=settings.train.best_beams)
    words = recipe.WORDS[settings.task]
    with (
        _unchanged(model),
        tqdm(
            total=len(sources),
            desc="validating",
            unit=f" {words.sources}",
            leave=False,
            delay=DELAY,
            disable=not shows_progress,
        ) as bar,
    ):
        prepare_generation(model, search)
        written = summaries(
            model, tokenizer, sources, batch_size=batch_size, progress=bar.update, write=_engine(model, search)
        )
    if canonical(settings.data.name) not in SEVERAL_SENTENCES:
        return [summary.text for summary in written]
    return ["\n".join(sentences(summary.text, language=settings.data.language)) for summary in written]


def _engine(model: Any, search: Generation) -> engines.Write | None:
    """The engine ``graph`` on a GPU, if it can; otherwise none, which is the model's own ``generate``.

    CTranslate2 would convert and keep the weights of each validation.
    """
    from torch.distributed.fsdp import FSDPModule

    if search.engine not in (engines.AUTO, "graph") or model.device.type != "cuda" or isinstance(model, FSDPModule):
        return None
    loaded = engines.load(engines.AUTO, model, search_of(model), say=lambda _: None)
    return loaded.write if loaded.name == "graph" else None


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Let a model in training generate, and leave it as it was."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    own, was_training, sharded = model.generation_config, model.training, isinstance(model, FSDPModule)
    model.generation_config = copy.deepcopy(own)
    if sharded:
        register_fsdp_forward_method(model, "generate")  # it calls the encoder before the model, which has its weights
        model.__dict__["_is_fsdp_managed_module"] = True  # each process goes on until all have finished
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Compiled code would be compiled again for every length of the cache.
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.generation_config = own
        for name in ("generate", "_is_fsdp_managed_module") if sharded else ():
            del model.__dict__[name]
        model.train(was_training)
