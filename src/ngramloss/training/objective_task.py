"""a model, rows and an objective → the task of ``ngramloss train`` and ``ng.train``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.padding import Batch, Step
from ngramloss.data.batches.planned import PlannedSteps
from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss, Loss
from ngramloss.models.adapters import has_adapters
from ngramloss.models.attached.attach import attach, attached_loss, last_call
from ngramloss.models.attached.diagnosing import diagnostics, scheduled_weights
from ngramloss.models.attached.heads import dropouts
from ngramloss.models.attached.teachers import frozen_start
from ngramloss.recipe import NOT_SHARDED
from ngramloss.training import compiling, planning
from ngramloss.training.online import FreshTexts, OwnTexts, writing_copy
from ngramloss.training.optimiser import optimiser_of
from ngramloss.training.precision import autocast
from ngramloss.training.processes import Processes
from ngramloss.training.run import Run
from ngramloss.training.sharding import shard
from ngramloss.training.task import Task
from ngramloss.training.validation import terms_on


@dataclass
class ObjectiveTask(Task):
    """A Hugging Face model that is trained on an objective, which is attached to it.

    Examples may have ``candidates`` with ``scores``, or ``lm_logp``, a number for each label; for a decoder-only model,
    ``input_ids`` are the prompt, and ``labels`` what follows it. ``score``: a model → further numbers of a validation.
    """

    model: Any
    tokenizer: Any
    examples: Any
    run: Run
    _: KW_ONLY
    validation: Any = None
    score: Callable[[Any], dict[str, float]] | None = None
    teacher: Any = None
    own_texts: OwnTexts | None = None

    def __post_init__(self) -> None:
        self.settings, self.best, self.validates = self.run.settings.train, self.run.best, self.validation is not None
        self.rows, self.compiled = planning.Rows(self.examples), False

    def begin(self, here: Processes) -> None:
        """Check and attach the objective, bring the model to its device, and lay out its rows."""
        model, settings = self.model, self.settings
        objective = self.objective = JointLoss(self.run.terms)
        self.here, self.precision = here, self.run.on(here.count, here.device)
        if objective.needs_twins and not any(dropouts(model)):
            raise UserError(
                f"this {type(model).__name__} has no dropout, so twins are equal: {str(objective)!r} would learn "
                "nothing from comparing them. Set dropout: model.dropout for a new model, model.lora_dropout for "
                "adapters, or dropout in the model's own config.json."
            )
        if settings.fsdp and has_adapters(model):
            raise UserError(NOT_SHARDED)
        # Before any checkpoint is read: a start is the model before training.
        self.teacher = frozen_start(model) if objective.compares_with_start else self.teacher
        copied = None if self.own_texts is None else writing_copy(model, self.precision)
        attach(model, objective.with_ce().terms, memory=settings.memory, teacher=self.teacher)
        self.loss_fn = attached_loss(model)
        self.loss_fn.progress = 0.0
        self.terms = [part.name for part in self.loss_fn.parts]
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.to(here.device).train()
        if self.teacher is not None and self.teacher is not model:
            self.teacher.to(here.device)  # before a graph is captured that reads it
        here.share_weights(model)
        self.why_not_captured = planning.why_not_captured(settings, here.device)
        if self.own_texts is not None:
            given = self.own_texts, model, self.tokenizer, self.examples, objective
            self.rows = FreshTexts(*given, seed=settings.seed, here=here, copied=copied)
        self.joined, self.lengths = planning.layout(self)
        self.compiled = planning.compiles(self)
        if self.compiled:
            compiling.compile_layers(model)
        if settings.fsdp:
            shard(model)

    def optimiser(self) -> torch.optim.Optimizer:
        """AdamW."""
        return optimiser_of(self.model, self.settings, self.here.device)

    def plan(self) -> PlannedSteps:
        """The steps of the training."""
        steps, self.largest = planning.plan(self)
        return steps

    def steps(self, planned: PlannedSteps, done: int) -> Iterable[Step]:
        """The steps after those that are done; with own texts, the model writes when the first of them is asked for."""
        return self.rows.steps(planned, done)

    def before_step(self, step: int, total: int) -> Mapping[str, float]:
        """Set the weights of terms. Returns those that change in the training."""
        return set_weights(self.loss_fn, step, total)

    def loss(self, batch: Batch, counts: Tensor) -> Loss:
        """The batch's share of the objective, and its terms, unweighted."""
        return attached_share(self.model, batch, counts)

    def values(self, batch: Batch, spent: float) -> dict[str, float]:
        """What else is known of a batch and the model, and of the texts that it wrote."""
        found = diagnostics(self.model, self.objective, batch, lambda: autocast(self.precision, self.here.device))
        return found | self.rows.values(spent)

    def validate(self) -> dict[str, float]:
        """The terms on the validation rows, and what else scores the model."""
        with autocast(self.precision, self.here.device):
            found = terms_on(self.model, self.validation, self.settings, self.here, planning.padder_of(self))
        if self.score is not None:  # in the precision of the weights, as `ngramloss generate`
            found |= {f"eval_{name}": value for name, value in self.score(self.model).items()}
        return found

    def saved(self, step: int) -> Mapping[str, str]:
        """The texts of the steps after this one, if they are written already."""
        return self.rows.saved(step)

    def restore(self, checkpoint: Path) -> None:
        """Take the texts of the steps after a checkpoint."""
        self.rows.restore(checkpoint)

    def end(self) -> None:
        """Let compiled layers run uncompiled again."""
        if self.compiled:
            compiling.leave(self.model)


def attached_share(model: Any, batch: Batch, counts: Tensor) -> Loss:
    """A batch's share of the loss of an attached model, and its terms, unweighted; ``counts`` are those of the step."""
    total = model(**batch, num_tokens=counts[0], num_sequences=counts[1]).loss  # []
    return Loss(total, last_call(model).parts)


def set_weights(loss_fn: JointLoss, step: int, total: int) -> dict[str, float]:
    """Give terms their weights in a step of this many. Returns those that change in the training."""
    loss_fn.progress = (step - 1) / total
    loss_fn.refresh_weights()
    return scheduled_weights(loss_fn)
