"""a task, its rows and a device → the steps of a training: which rows, in which batches, of which shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngramloss.data.batches.budget import fitting_tokens, try_batch
from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.data.batches.padding import Batch, Pad, Padder, Step
from ngramloss.data.batches.plan import MULTIPLE, Grid, Joined, Plan, fitted_grid, most_lengths
from ngramloss.data.batches.planned import Epochs, ExampleLengths, PlannedSteps, lengths_of
from ngramloss.data.batches.twins import twins
from ngramloss.loss.stats import ANCHORS, BESIDE_LABELS, WEIGHTS
from ngramloss.models.attached.attach import attached_loss
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.attached.heads import has_encoder
from ngramloss.models.attached.shared_prompts import why_not_shared
from ngramloss.models.attached.unmasked import as_if_captured
from ngramloss.models.settings import pad_id
from ngramloss.output.console import logger
from ngramloss.recipe import Train
from ngramloss.training import compiling
from ngramloss.training.precision import autocast
from ngramloss.training.running import NOT_CAPTURED

if TYPE_CHECKING:
    from ngramloss.training.objective_task import ObjectiveTask


class Rows:
    """The examples of a training as they are, and the steps that train on them."""

    writes = False
    """Whether the model writes texts of them while it is trained."""
    padded: Mapping[str, Any] = {}  # further options of what pads them

    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.examples[row]
        return found

    def lengths(self, *, joined: Joined) -> ExampleLengths:
        """Numbers of each example, if source and texts stand so in a row."""
        return lengths_of(self.examples, joined=joined)

    def grid(
        self, known: ExampleLengths, first: Sequence[Sequence[int]], *, most: tuple[int, int], **shape: Any
    ) -> Grid:
        """The shapes of micro-batches on a GPU, fitted to the steps of the first epoch."""
        texts = 1 if known.texts is None else max(int(known.texts.max()), 2)
        return fitted_grid(known.sources, known.targets, first, texts=texts, most=most, **shape)

    def steps(self, planned: PlannedSteps, done: int) -> Iterable[Step]:
        """The steps after those that are done, made ahead of their use."""
        return planned.from_(done)

    def saved(self, step: int) -> Mapping[str, str]:
        """File name → text for a checkpoint. Every process calls this."""
        return {}

    def restore(self, checkpoint: Path) -> None:
        """Take what a checkpoint has of the steps after it."""

    def values(self, spent: float) -> dict[str, float]:
        """More values for a line of the log; ``spent`` is the time since the last line, in seconds."""
        return {}


def total_steps(settings: Train, examples: int) -> int:
    """How many steps a training on this number of examples has."""
    epoch = math.ceil(examples / (settings.batch_size * settings.accumulate))
    return (settings.max_steps or math.ceil(settings.epochs * epoch)) if epoch else 0


def why_not_captured(settings: Train, device: torch.device, why: str = "") -> str:
    """Why steps cannot run as CUDA graphs; empty if they can. Logs it if they were to."""
    if device.type != "cuda":
        return "there is no NVIDIA GPU"
    if not settings.capture:
        return "train.capture is off"
    if settings.fsdp:
        why = "train.fsdp gathers parameters in the middle of a step"
    elif settings.gradient_checkpointing:
        why = "gradient checkpointing computes activations again in the backward pass"
    if why:
        logger.info(NOT_CAPTURED.format(why))
    return why


def compiles(task: ObjectiveTask) -> bool:
    """Whether the layers are compiled. Decided by the whole training, so that a continued one does the same."""
    settings, lengths, seconds = task.settings, task.lengths, 0.0
    if len(lengths.sources) and not task.why_not_captured:
        rows = settings.batch_size * settings.accumulate * (2 if settings.twins else 1) / task.here.count
        steps = total_steps(settings, len(lengths.sources))
        seconds = compiling.seconds_saved(task.model, lengths, rows=rows, steps=steps)
    facts = {"why_not_captured": task.why_not_captured, "writes": task.rows.writes, "seconds": seconds}
    return compiling.decide(task.model, settings, task.here.device, **facts)


def layout(task: ObjectiveTask) -> tuple[Joined, ExampleLengths]:
    """How a source and its texts stand in rows, and how long these are. Logs if prompts are computed for each text."""
    model, rows = task.model, task.rows
    if has_encoder(model):
        return "", rows.lengths(joined="")
    if not attached_loss(model).needs_candidates:
        return "turns", rows.lengths(joined="turns")
    shared = rows.lengths(joined="shared")
    if not len(shared.sources):
        return "shared", shared
    longest = {"longest_row": int(shared.sources.max()), "longest_text": int(shared.targets.max())}
    models = {"the model": model} | ({} if task.teacher in (None, model) else {"the teacher": task.teacher})
    reasons = {name: why_not_shared(each, **longest) for name, each in models.items()}
    if not task.here.any(any(reasons.values())):
        return "shared", shared
    repeated = rows.lengths(joined="repeated")
    texts = 1 if repeated.texts is None else repeated.texts  # [rows]
    name, why = next(((name, why) for name, why in reasons.items() if why), ("another process", "see its log"))
    logger.info(
        f"candidates do not share their prompt, because {name} cannot do that: {why}. The prompt is computed before "
        f"each text, so steps have {(repeated.sources * texts).sum() / max(shared.sources.sum(), 1):.1f} times as many "
        "tokens."
    )
    return "repeated", repeated


def padder_of(task: ObjectiveTask, *, joined: Joined = "turns", always_mask: bool = False, **more: Any) -> Pad:
    """What makes batches of a task's rows; ``more`` are further options of texts that the model writes."""
    model, multiple = task.model, MULTIPLE if task.here.device.type == "cuda" else 1
    beside = [name for name in BESIDE_LABELS if name in attached_loss(model).needs]
    # Blank batches have them, too: one graph for each shape.
    beside += [name for name in (WEIGHTS, ANCHORS) if len(task.examples) and name in task.examples[0]]
    if not has_encoder(model):  # padding follows the text, so any id will do
        routed, shared = hasattr(model.config, "output_router_logits"), joined == "shared"
        pad = getattr(task.tokenizer, "pad_token_id", None) or getattr(model.config, "pad_token_id", None) or 0
        own = more.get("own", ())
        return JoinedPadder(int(pad), multiple=multiple, always_mask=routed, beside=beside, own=own, shared=shared)
    return Padder(
        pad_id("the tokenizer and the model's config have", task.tokenizer, model.config),
        lambda labels: decoder_inputs(model, labels),
        multiple=multiple,
        always_mask=always_mask,
        beside=beside,
        **more,
    )


def plan(task: ObjectiveTask) -> tuple[PlannedSteps, Batch | None]:
    """The steps of a training, and a micro-batch of the largest shape on a GPU."""
    settings, here, rows, lengths, joined = task.settings, task.here, task.rows, task.lengths, task.joined
    cuda, copies = here.device.type == "cuda", 2 if settings.twins else 1
    step = settings.batch_size * settings.accumulate
    epochs = Epochs(lengths.order, step=step, seed=settings.seed, grouped=settings.group_by_length)
    total = total_steps(settings, len(lengths.sources))
    padder = padder_of(task, joined=joined, always_mask=cuda and not task.why_not_captured, **rows.padded)
    padder = twins(padder) if settings.twins else padder
    limit = settings.max_tokens // copies or None
    largest: Batch | None = None
    if cuda:
        each, first = -(-step // here.count), epochs[0]
        # Position ids of texts that share a prompt begin again, so such a row may be longer.
        positions = None if joined == "shared" else getattr(task.model.config, "max_position_embeddings", None)
        most = most_lengths(0 if task.why_not_captured else total)
        grid = rows.grid(lengths, first, most=most, longest=positions, joined=joined)
        limit = _tokens(task, grid, each, padder, asked=limit)
        cut = Plan(lengths.sources, lengths.targets, each, limit, grid, lengths.texts, joined)
        largest = padder([], cut.sizes(each)[0])
        _describe(task, cut, each, first[:50], copies)
    else:
        each = -(-(step if limit else settings.batch_size) // here.count)
        cut = Plan(lengths.sources, lengths.targets, each, limit, texts=lengths.texts, joined=joined)
    steps = PlannedSteps(
        rows,
        epochs,
        cut,
        padder,
        lengths=lengths,
        total=total,
        process=here.rank,
        processes=here.count,
        equally_many=settings.fsdp,
        copies=copies,
        device=here.device,
    )
    return steps, largest


def _tokens(task: ObjectiveTask, grid: Grid, rows: int, padder: Pad, *, asked: int | None) -> int:
    """How many tokens of a micro-batch fit into the GPU, unless it is asked for. Compiled layers first run here."""
    model, device = task.model, task.here.device

    def loss(batch: Batch) -> Tensor:
        with autocast(task.precision, device), nullcontext() if task.why_not_captured else as_if_captured():
            value: Tensor = model(**batch).loss  # []
        return value

    if task.compiled:
        asked_for = task.settings.compile is True
        task.compiled = compiling.run_compiled(
            model, lambda: try_batch(model, loss, grid, padder, device), asked=asked_for
        )
    # Of a single row, the compiler would make code of its own.
    return asked or fitting_tokens(model, loss, grid, rows, padder, device, fewest=2 if task.compiled else 1)


def _describe(task: ObjectiveTask, cut: Plan, rows: int, shown: Sequence[Sequence[int]], copies: int) -> None:
    sizes, most = cut.sizes(rows), "up to " * task.rows.writes
    micro = sum(len(cut.cut(piece[:: task.here.count])) for piece in shown) / len(shown)
    padding = "" if task.rows.writes else f", with {cut.padding(shown):.0%} padding"
    logger.info(
        f"a step of {copies * len(shown[0])} sequences is {most}{micro:.3g} micro-batch{'es' if micro != 1 else ''} of "
        f"up to {copies * sizes[0].tokens:,} tokens, in {len(sizes)} shapes{padding}."
    )
