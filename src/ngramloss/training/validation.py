"""a model in training, and the validation split → its terms, and the score of the texts that it generates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ngramloss import recipe
from ngramloss.data import Example
from ngramloss.data.batches.padding import Pad
from ngramloss.data.data_sets import has_several_sentences
from ngramloss.data.tokens import Shape
from ngramloss.errors import UserError
from ngramloss.metrics.registry import notes_on_references, scores_on
from ngramloss.metrics.scores import Absent, corpus_score
from ngramloss.models.attached.adapted_heads import evaluating
from ngramloss.models.attached.attach import aligned_labels, attached_loss, last_parts
from ngramloss.recipe import Recipe, Train
from ngramloss.search import engines
from ngramloss.search.batches import Budget
from ngramloss.search.engines.hf import search_of
from ngramloss.search.writer import Writer
from ngramloss.training.best import Best
from ngramloss.training.processes import Processes

T = TypeVar("T")
V = TypeVar("V")
TRIED = 8
"""Examples on which the metric is tried before training."""


def generated_score(
    best: Best,
    sources: Sequence[Sequence[int]],
    *,
    examples: Sequence[Example],
    process: int = 0,
    processes: int = 1,
    **how: Any,
) -> Callable[[Any], dict[str, float]]:
    """The score of generated validation texts. The first process, which has the examples, scores, so that all agree."""

    def scored(model: Any) -> dict[str, float]:
        """The score, and the seconds that it took."""
        began = time.perf_counter()
        texts = texts_of_all(lambda mine: write_texts(model, mine, **how), sources, process, processes)
        score = from_first(lambda: score_of(best, examples, texts), process, processes)
        return {best.name: score, "generation_runtime": time.perf_counter() - began}

    return scored


def texts_of_all(
    write: Callable[[Sequence[T]], list[str]], sources: Sequence[T], process: int, processes: int
) -> list[str]:
    """The texts of all sources, from all processes. Shares are equally long, because FSDP needs that."""
    count, each = len(sources), -(-len(sources) // processes)
    mine = write([sources[row % count] for row in range(process, each * processes, processes)])
    if processes == 1:
        return mine
    shares: list[Any] = [None] * processes
    torch.distributed.all_gather_object(shares, mine)
    return [shares[row % processes][row // processes] for row in range(count)]


def from_first(compute: Callable[[], V], process: int, processes: int) -> V:
    """Compute on rank 0 and broadcast."""
    found: list[Any] = [compute() if process == 0 else None]
    if processes > 1:
        torch.distributed.broadcast_object_list(found)
    value: V = found[0]
    return value


def terms_on(model: Any, rows: Any, settings: Train, here: Processes, padder: Pad) -> dict[str, float]:
    """``eval_loss``, ``eval_ce`` … over a split. Processes run equally many batches: sharded weights need that."""
    began = time.perf_counter()
    each = (settings.eval_batch_size or settings.batch_size) // here.count
    batches = -(-len(rows) // (each * here.count))
    loss_fn = attached_loss(model).without("candidates", "twins")
    sums = torch.zeros(2, len(loss_fn.parts), device=here.device)  # [2, parts]: values and what they are divided by
    # Compiled layers would be compiled again without gradients, which takes longer than it saves.
    with evaluating(model.modules()), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for batch in range(batches):
            first = (batch * here.count + here.rank) * each
            picked = [rows[row] for row in range(first, min(first + each, len(rows)))]
            inputs = {name: value.to(here.device) for name, value in padder(picked).items()}
            model(**inputs)
            parts = last_parts(model)
            counts = loss_fn.denominators(aligned_labels(model, inputs)).float()  # [parts]
            sums += torch.stack([torch.stack([parts[part.name] for part in loss_fn.parts]) * counts, counts])
    values, counts = here.total(sums).tolist()
    means = {part.name: value / max(count, 1) for part, value, count in zip(loss_fn.parts, values, counts, strict=True)}
    found = {"loss": sum(part.final_weight * means[part.name] for part in loss_fn.parts), **means}
    spent = time.perf_counter() - began
    speed = {"runtime": spent, "samples_per_second": len(rows) / spent}
    return {f"eval_{name}": value for name, value in {**found, **speed}.items()}


def notes_on(best: Best, examples: Sequence[Example]) -> list[str]:
    """Try the metric on a few references; return sentences about texts that its options do not read well."""
    tried = examples[:TRIED]
    score_of(best, tried, [example.target for example in tried])
    return notes_on_references(best.metric, tried, best.options)


def score_of(best: Best, examples: Sequence[Example], texts: Sequence[str]) -> float:
    """The score of texts that were generated for these examples."""
    try:
        scores = scores_on(best.metric, examples, texts, best.options)
    except Absent as reason:
        raise UserError(f"train.best: {reason}") from None
    if best.name not in scores.values:
        raise UserError(
            f"train.best: {best.metric} does not compute {best.name} with these options, only "
            f"{', '.join(scores.values)}. An option in train.best_options may change this: ngramloss list metrics."
        )
    return corpus_score(scores, best.name)


def write_texts(
    model: Any, sources: Sequence[Sequence[int]], *, settings: Recipe, tokenizer: Any, batch_size: int
) -> list[str]:
    """Generate a text for each source with ``train.best_beams`` beams. The model's mode and random numbers stay."""
    generation = dataclasses.replace(settings.generation, num_beams=settings.train.best_beams)
    with unchanged(model):
        search = search_of(model, generation)
        engine = engines.load_in_training(generation.engine, model, search)
        has_lines = has_several_sentences(settings.data.name)
        shape, budget = Shape.of(settings.data), Budget(documents=batch_size)
        writer = Writer(model, tokenizer, shape, search, engine, budget, has_lines=has_lines)
        return writer.best(sources, what="validating", unit=recipe.WORDS[settings.task].sources)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Let a model in training generate, and leave it as it was."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    was_training, sharded = model.training, isinstance(model, FSDPModule)
    if sharded:
        register_fsdp_forward_method(model, "generate")  # it calls the encoder before the model, which has its weights
        model.__dict__["_is_fsdp_managed_module"] = True  # each process goes on until all have finished
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Compiled code would be compiled again for every length of the cache.
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for name in ("generate", "_is_fsdp_managed_module") if sharded else ():
            del model.__dict__[name]
        model.train(was_training)
