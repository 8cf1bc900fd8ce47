"""a system's task and settings → a trained system, one step after the other, continued from where it stopped.

Most systems have losses of their own, which are not terms of an objective. Steps, schedules, checkpoints, logs and
Ctrl-C are those of ``ngramloss train`` (:mod:`ngramloss.training.loop`), and so is what they promise: random numbers
are drawn from seed and step, so a continued training has the losses of one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss import JointLoss, Loss
from ngramloss.recipe import Train
from ngramloss.steps.padding import Batch, Pad
from ngramloss.steps.plan import Plan
from ngramloss.steps.planned import Epochs, PlannedSteps, lengths_of
from ngramloss.steps.running import StepRunner
from ngramloss.training import checkpoints
from ngramloss.training.log import Log
from ngramloss.training.loop import (
    State,
    learning_rates,
    optimiser_of,
    raise_if_diverged,
    restored,
    scheduled_weights,
    seed_step,
    total_steps,
    warmups_of,
)
from ngramloss.training.processes import Processes
from ngramloss.training.run import precision_of
from ngramloss.training.stopping import Stopping

TOKENS = 2**15
"""The most tokens of a micro-batch on a GPU, unless ``train.max_tokens`` says another number."""
MOST_ROWS = 512
"""Rows that are scored at a time outside of training, however short they are."""


class Task(NamedTuple):
    """What a system trains.

    Attributes:
        model: a module with ``save_pretrained``.
        tokenizer: saved with each checkpoint.
        examples: rows with ``input_ids``, ``labels`` and what else ``pad`` reads.
        pad: rows → a batch.
        terms: the names of the parts of the loss.
        loss: a batch on the device, and the labels and rows of the whole step, [2] → the batch's share of each part of
            the step's loss, weighted, [parts]; or the share of the loss, and of its parts without their weights.
        validate: → the loss and scores on validation data, in the model's evaluation mode; None if there are none.
        made_of: what the training is made of → its fingerprint: what it may only be continued with.
        used: what is used of the data, in sentences.
        optimiser: the model → its optimiser; None: AdamW.
        before_step: called before each step with its number, the number of all steps and the optimiser → what else the
            log has. What changes in the course of a training must be a function of these, so that a training that is
            continued changes at the same step.
        objective: the joint loss that ``loss`` computes, if it does; the loop tells it the progress.
    """

    model: Any
    tokenizer: Any
    examples: Any
    pad: Pad
    terms: Sequence[str]
    loss: Callable[[Batch, Tensor], Tensor | Loss]
    validate: Callable[[], dict[str, float]] | None
    made_of: Mapping[str, str]
    used: Sequence[str] = ()
    optimiser: Callable[[Any], torch.optim.Optimizer] | None = None
    before_step: Callable[[int, int, torch.optim.Optimizer], Mapping[str, float]] = lambda number, total, optimiser: {}
    objective: JointLoss | None = None


class Job(NamedTuple):
    """A task, and what happens around it; ``logs`` and ``on_step`` as in :class:`ngramloss.training.loop.Job`."""

    task: Task
    settings: Train
    higher: bool
    folder: Path
    saved_with: Mapping[str, str]
    continued_from: Path | None = None
    logs: Sequence[Callable[[Mapping[str, float], int], object]] = ()
    on_step: Callable[[int, Mapping[str, float]], object] = lambda number, values: None


def run(job: Job, here: Processes) -> State:
    """Train. ``job.higher`` says whether higher values of ``train.best`` are better. Returns how far it came."""
    task, settings = job.task, job.settings
    model = task.model.to(here.device).train()
    optimiser = task.optimiser(model) if task.optimiser else optimiser_of(model, settings, here.device)
    autocast = autocast_of(settings, here.device)

    def share(batch: Batch, counts: Tensor) -> Tensor:
        """Run forward and backward of a micro-batch's share of the step. Returns its loss and terms, [1 + parts]."""
        with autocast():
            found = task.loss(batch, counts)
        if isinstance(found, Loss):
            loss, parts = found.total, torch.stack([*found.parts.values()])  # [], [parts]
        else:
            loss, parts = found.sum(), found  # [], [parts]
        loss.backward()
        return torch.cat([loss.detach()[None], parts.detach()])

    steps = planned_steps(task, settings, here)
    if not steps.total:
        raise UserError("there are no examples to train on.")
    state = State()
    if job.continued_from is not None:
        state = restored(job.continued_from, model, optimiser, sharded=False)
    warmups = warmups_of(settings, steps.total)
    runner = StepRunner(model, share, device=here.device, why_not_captured="systems run eagerly")
    log = Log(job.logs, task.terms, steps, here, since=state.step)

    remaining = () if state.ended_early else steps.from_(state.step)
    with Stopping(here) as stop:
        for step in remaining:
            seed_step(settings.seed, step.number, here.rank)
            rate, _ = learning_rates(settings, state.updates, warmups, steps.total)
            for group in optimiser.param_groups:
                group["lr"] = rate
            more: dict[str, float] = {}
            if task.objective is not None:
                task.objective.progress = state.step / steps.total
                task.objective.refresh_weights()
                more = scheduled_weights(task.objective)
            more |= task.before_step(step.number, steps.total, optimiser)
            values = runner.run(step)  # [1 + parts]: gradients are now those of the whole step
            norm = runner.clip(settings.clip)  # []
            optimiser.step()
            model.zero_grad()
            state.step = step.number
            state.updates += 1
            log.add(values, step)

            stops, last = stop.asked(step.number), step.number == steps.total
            evaluates = task.validate is not None and (step.ends(settings.eval_every) or last)
            saves = step.ends(settings.save_every) or last or stops
            line: dict[str, float] = {}
            if step.number == 1 or step.ends(settings.log_every) or saves or evaluates:
                with log.paused():
                    line = log.write(step.number, norm=norm, rate=rate, more=more)
                    raise_if_diverged(line["loss"], step.number, log, fp16=False)
            if evaluates and task.validate is not None:
                with log.paused(), torch.no_grad(), autocast():
                    model.eval()
                    validation = {f"eval_{name}": value for name, value in task.validate().items()}
                    model.train()
                    log.write_validation(step.number, validation)
                value = validation.get(f"eval_{settings.best}", float("nan"))
                saves |= state.judge(value, settings, higher=job.higher)
                line |= validation
            if saves:
                with log.paused():
                    checkpoints.save(
                        job.folder,
                        model,
                        task.tokenizer,
                        optimiser,
                        state,
                        here,
                        more=job.saved_with,
                        finished=last or state.ended_early,
                        keep=settings.keep,
                        sharded=False,
                    )
            job.on_step(step.number, line)
            if stops or state.ended_early:
                break
    return state


def mean_over_rows(parts: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Each part of the loss for each row, [B], and the counts of the step → the share of each part, [parts]."""
    return torch.stack([part.sum() for part in parts]) / counts[1]


def autocast_of(settings: Train, device: torch.device) -> Callable[[], Any]:
    """What runs a forward pass in bf16, if that is the precision; weights stay in fp32. There is no fp16 here."""
    low = precision_of(settings, device) == "bf16"
    return (lambda: torch.autocast(device.type, torch.bfloat16)) if low else nullcontext


def planned_steps(task: Task, settings: Train, here: Processes) -> PlannedSteps:
    """The steps of a training. On a GPU, a step is cut by tokens, which does not change it."""
    lengths = lengths_of(task.examples)
    rows = settings.batch_size * settings.accumulate
    cuda = here.device.type == "cuda"
    most = settings.max_tokens or (TOKENS if cuda else None)
    plan = Plan(
        lengths.sources, lengths.targets, rows if most else settings.batch_size, most or None, texts=lengths.texts
    )
    epochs = Epochs(lengths.sources, step=rows, seed=settings.seed, grouped=settings.group_by_length)
    total = total_steps(settings, len(lengths.sources))
    return PlannedSteps(task.examples, epochs, plan, task.pad, lengths=lengths, total=total, pin=cuda)


def batches(rows: Any, pad: Pad, device: torch.device, *, most: int = MOST_ROWS) -> Iterator[tuple[list[int], Batch]]:
    """All rows in batches of similar length, of at most this many rows, on a device, with their numbers."""
    lengths = lengths_of(rows)
    plan = Plan(lengths.sources, lengths.targets, most, TOKENS, texts=lengths.texts)
    for piece in plan.cut(range(len(rows))):
        batch = pad([rows[row] for row in piece.rows], piece.size)
        yield piece.rows, {name: value.to(device, non_blocking=True) for name, value in batch.items()}
