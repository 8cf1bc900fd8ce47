"""a job → its model, loaded, and the writer that generates with it; what is saved of both."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ngramloss.data.tokens import Shape
from ngramloss.errors import UserError
from ngramloss.generation.job import Job, source_column
from ngramloss.models import loading
from ngramloss.models.attached.candidates import NOT_CAUSAL
from ngramloss.models.first_tokens import align_start
from ngramloss.models.languages import codes, set_languages
from ngramloss.models.precision import to_precision
from ngramloss.models.prompts import align_stop, shape_of, warn_without_bos
from ngramloss.output.console import logger
from ngramloss.recipe import PRECISIONS
from ngramloss.search import engines
from ngramloss.search.batches import budget_for
from ngramloss.search.engines.hf import search_facts, search_of
from ngramloss.search.registry import ENGINES
from ngramloss.search.search import PROBABILITY, Options, Search
from ngramloss.search.writer import Writer
from ngramloss.storage.run_folder import model_files, weights_mark
from ngramloss.training.system_registry import Written
from ngramloss.version import __version__, installed


def load_model(work: Job, *, device: str | None = None, load: Callable[..., Any] = loading.load) -> tuple[Any, Any]:
    """The model of a job on its device, by default the GPU if there is one, and its tokenizer; both know its languages.

    Of models trained elsewhere only multilingual ones are changed; their settings cannot know the target language.
    """
    import torch

    settings, system = work.loading, work.loading_system
    if system is not None:  # before its tokenizer, whose class the type of its model may decide
        load = partial(system.entry.function("load"), options=system.options)
    tokenizer, _ = loading.load_tokenizer(settings, lambda: (), "")
    model = load(settings, tokenizer)
    set_languages(tokenizer, work.data.source_language, work.data.target_language, model=settings.name)
    if system is None and (work.is_run or codes(tokenizer)) and not loading.is_causal(model.config):
        align_start(model, tokenizer, name=settings.name, training=False)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return to_precision(model, getattr(torch, PRECISIONS[work.precision]), place), tokenizer


def writer_of(
    work: Job,
    model: Any,
    tokenizer: Any,
    options: Options = Options(),  # noqa: B008
    *,
    engine: str = "",
    has_lines: bool = False,
    column: str = "",
) -> Writer:
    """The writer of a job, with what :func:`load_model` returned; ``has_lines``: each sentence becomes a line."""
    column = source_column(work, column)
    shape = shape_of(work.data, work.task, work.loading, model.config, tokenizer, column=column)
    if shape.prompt is not None:
        align_stop(model, shape.prompt)
    if not work.is_run:  # a run generates with the prompts that it was trained on
        warn_without_bos(model.config, tokenizer, shape.prompt)
    if options.rerank == PROBABILITY and model.config.model_type in NOT_CAUSAL:
        raise UserError(
            f"--rerank probability cannot order texts of {type(model).__name__}, whose probabilities change with "
            "padding. Leave --rerank out."
        )
    search = search_of(model, work.generation, options, only=work.only)
    if work.drafter and (engine or work.engine) in ENGINES and ENGINES[engine or work.engine].needs_drafter:
        from ngramloss.models.drafter import load_drafter

        drafter = load_drafter(work.drafter, model, tokenizer, work.loading.name)
        search = dataclasses.replace(search, drafter=drafter)
    if search.sample and search.seed is None:
        logger.warning(
            "the model's generation_config.json sets do_sample, without a seed: running this command again gives "
            "other outputs. Use --sample --seed N, or beam search: --set generation.num_beams=4."
        )
    _raise_unless_it_fits(model, shape, search)
    loaded = engines.load(engine or work.engine, model, search)
    return Writer(model, tokenizer, shape, search, loaded, budget_for(model, [search], work.batch_size), has_lines)


def _raise_unless_it_fits(model: Any, shape: Shape, search: Search) -> None:
    """Raise if the longest prompt and the longest text behind it have more positions than a decoder-only model."""
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = shape.max_source + search.max_length - 1
    if shape.prompt is not None and positions is not None and longest > positions:
        raise UserError(
            f"a prompt of {shape.max_source} tokens (data.max_source) and a text of {search.max_length - 1} need "
            f"{longest} positions, and the model has {positions}. Lower data.max_source or generation.max_length."
        )


def writer_facts(work: Job, writer: Writer) -> dict[str, Any]:
    """What is saved with texts: which model wrote them, how it reads, and how it searches."""
    folder, tokenizer = Path(work.loading.name), writer.tokenizer
    others, system = model_files(folder), work.loading_system
    return {
        "model": work.model,
        "weights": weights_mark(folder, writer.model.config),
        **({"model_files": others} if others else {}),  # the hub's commit stands for all of its files
        "shape": dataclasses.asdict(writer.shape),
        **({"languages": [tokenizer.src_lang, tokenizer.tgt_lang]} if codes(tokenizer) else {}),
        **({"system": {"name": system.name, **_in_generate(system)}} if system is not None else {}),
        "generation": search_facts(writer.model, writer.search),
        "engine": writer.engine.facts,
    }


def _in_generate(system: Written) -> dict[str, Any]:
    """The options of a system that could change its texts."""
    return {name: system.options[name] for name in system.entry.options_in_generate}


def versions(settings: Mapping[str, Any]) -> dict[str, str]:
    """The versions of what a job's texts depend on."""
    engine = [ENGINES[settings["engine"]["name"]].package] if "engine" in settings else []
    others = {name: installed(name) for name in ("torch", "transformers", "tokenizers", *engine)}
    own = {"ngramloss": __version__, "python": platform.python_version()}
    return own | {name: number for name, number in others.items() if number is not None}
