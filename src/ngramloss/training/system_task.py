"""a system's model, rows and loss → ``SystemTask``, which the loop of ``ngramloss train`` trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss import recipe
from ngramloss.data.batches.padding import Batch
from ngramloss.data.batches.plan import Plan, Size, fitted_grid, most_lengths
from ngramloss.data.batches.planned import Epochs, PlannedSteps, lengths_of
from ngramloss.errors import MissingFileError, UserError
from ngramloss.loss.joint_loss import JointLoss, Loss
from ngramloss.models import loading
from ngramloss.recipe import Model, Recipe
from ngramloss.storage.run_folder import RunFolder, model_files, weights_mark
from ngramloss.training.identity import base_made_of, data_made_of
from ngramloss.training.objective_task import attached_share, set_weights
from ngramloss.training.optimiser import optimiser_of
from ngramloss.training.planning import total_steps, why_not_captured
from ngramloss.training.precision import autocast, precision_of
from ngramloss.training.processes import Processes
from ngramloss.training.run import Run
from ngramloss.training.system_registry import system_of
from ngramloss.training.task import Task
from ngramloss.training.validation import from_first

TOKENS = 2**15
"""The most tokens of a micro-batch on a GPU, unless ``train.max_tokens`` says another number."""
NOT_FIXED = "the batches of this system have no fixed shapes"
BLANK = "blank"  # What a batch has besides if its row does not count
MOST_ROWS = 512  # Rows that are scored at a time outside of training, however short they are
Batches = Iterator[tuple[list[int], Batch]]
"""Row numbers, and their batch."""


@dataclass
class SystemTask(Task):
    """What a system trains, which its function ``task(run)`` returns.

    Attributes:
        run: the recipe, checked.
        model: a module with ``save_pretrained``.
        tokenizer: saved with each checkpoint.
        rows: ``train`` and perhaps ``validation`` → rows with ``input_ids``, ``labels`` and what else ``pad`` reads.
        pad: rows → a batch, a dictionary of tensors.
        terms: the names of the parts of the loss.
        scores: the validation rows in batches, with their numbers → the loss and scores, in the model's evaluation
            mode.
        splits: what the rows were made of; a training may only be continued with the same.
        loss_of: a batch on the device, and the labels and rows of the whole step, [2] → the parts of the loss for each
            row, [B], or the batch's share of the loss. None: the objective that is attached to the model.
        config: of the base model, if it was loaded.
        made_of: what else the training may only be continued with → its fingerprint.
        used: what is used of the data, in sentences.
        scored: the most rows of a batch that is validated on.
        optimiser_of: the model → its optimiser; None: AdamW.
        change: called before each step with its number, the number of all steps and the optimiser → what the log has of
            it. It must depend on these numbers alone, so that a continued training changes at the same step.
        objective: the joint loss that ``loss_of`` computes, if it does.
        fixed: whether steps can run as CUDA graphs: ``pad`` also takes a size to fill up to, with rows that add nothing
            to the loss, and ``loss_of`` reads no value of a tensor.
    """

    run: Run
    model: Any
    tokenizer: Any
    rows: Mapping[str, Any]
    pad: Callable[..., Batch]
    terms: Sequence[str]
    scores: Callable[[Batches], dict[str, float]]
    _: KW_ONLY
    splits: Mapping[str, Any]
    loss_of: Callable[[Batch, Tensor], Loss | Mapping[str, Tensor]] | None = None
    config: Any = None
    made_of: Mapping[str, str] = field(default_factory=dict)
    used: Sequence[str] = ()
    scored: int = MOST_ROWS
    optimiser_of: Callable[[Any], torch.optim.Optimizer] | None = None
    change: Callable[[int, int, torch.optim.Optimizer], Mapping[str, float]] = lambda step, total, optimiser: {}
    objective: JointLoss | None = None
    fixed: bool = False

    def __post_init__(self) -> None:
        self.settings, self.best, self.validates = self.run.settings.train, self.run.best, "validation" in self.rows
        self.examples = self.rows["train"]
        base = base_made_of(self.run.settings.model, self.config)
        self.made_of = {**data_made_of(self.splits), **self.made_of, **base}

    def begin(self, here: Processes) -> None:
        """Bring the model to its device, with the same weights in all processes."""
        self.here, self.precision = here, precision_of(self.settings, here.device)
        self.why_not_captured = why_not_captured(self.settings, here.device, "" if self.fixed else NOT_FIXED)
        self.model.to(here.device).train()
        here.share_weights(self.model)

    def optimiser(self) -> torch.optim.Optimizer:
        """The system's own, or AdamW."""
        own = self.optimiser_of
        self._optimiser = own(self.model) if own else optimiser_of(self.model, self.settings, self.here.device)
        return self._optimiser

    def plan(self) -> PlannedSteps:
        """The steps of the training. On a GPU, a step is cut by tokens, which does not change it."""
        settings, here, lengths = self.settings, self.here, lengths_of(self.examples)
        rows = settings.batch_size * settings.accumulate
        most = settings.max_tokens or (TOKENS if here.device.type == "cuda" else None)
        each = -(-(rows if most else settings.batch_size) // here.count)
        epochs = Epochs(lengths.sources, step=rows, seed=settings.seed, grouped=settings.group_by_length)
        total, grid = total_steps(settings, len(lengths.sources)), None
        if not self.why_not_captured:
            positions = getattr(self.model.config, "max_position_embeddings", None)
            most_of = most_lengths(total)
            grid = fitted_grid(lengths.sources, lengths.targets, epochs[0], longest=positions, most=most_of)
        plan = Plan(lengths.sources, lengths.targets, each, most, grid, lengths.texts)
        if grid is not None:
            self.largest = self.pad([], plan.sizes(each)[0])
        return PlannedSteps(
            self.examples,
            epochs,
            plan,
            self._padded,
            lengths=lengths,
            total=total,
            process=here.rank,
            processes=here.count,
            device=here.device,
        )

    def _padded(self, rows: Sequence[dict[str, Any]], size: Size | None = None) -> Batch:
        """A batch of these rows. Of none, as a process may have in a short step, one row that does not count."""
        if size is not None:
            return self.pad(rows, size)
        return self.pad(rows) if rows else {**self.pad([self.examples[0]]), BLANK: torch.ones(())}

    def before_step(self, step: int, total: int) -> Mapping[str, float]:
        """Set the weights of terms, and what the system changes."""
        weights = {} if self.objective is None else set_weights(self.objective, step, total)
        return {**weights, **self.change(step, total, self._optimiser)}

    def loss(self, batch: Batch, counts: Tensor) -> Loss:
        """The batch's share of the step's loss."""
        read = {name: value for name, value in batch.items() if name != BLANK}
        found = self.loss_of(read, counts) if self.loss_of else attached_share(self.model, read, counts)
        if not isinstance(found, Loss):
            shares = torch.stack([part.sum() for part in found.values()]) / counts[1]  # [parts]
            found = Loss(shares.sum(), dict(zip(found, shares.detach(), strict=True)))
        if BLANK in batch:
            return Loss(found.total * 0, {name: value * 0 for name, value in found.parts.items()})
        return found

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The loss and scores on validation data, computed by the first process for all."""
        self.model.eval()
        with autocast(self.precision, self.here.device):
            found = from_first(self.score, self.here.rank, self.here.count)
        self.model.train()
        return {f"eval_{name}": value for name, value in found.items()}

    def score(self) -> dict[str, float]:
        """The loss and scores on the validation rows, with the weights that terms have at the end of the training."""
        device, objective = next(self.model.parameters()).device, self.objective
        if objective is not None:
            before, objective.progress = objective.progress, 1.0
        found = self.scores(batches(self.rows["validation"], self.pad, device, most=self.scored))
        if objective is not None:
            objective.progress = before
        return found


def batches(
    rows: Any, pad: Callable[[Sequence[Any]], Batch], device: torch.device, *, most: int = MOST_ROWS
) -> Batches:
    """All rows in batches of similar length, of at most this many rows, on the device, with their numbers."""
    lengths = lengths_of(rows)
    plan = Plan(lengths.sources, lengths.targets, most, TOKENS, texts=lengths.texts)
    for piece in plan.cut(range(len(rows))):
        batch = pad([rows[row] for row in piece.rows])
        yield piece.rows, {name: value.to(device, non_blocking=True) for name, value in batch.items()}


class SavedRun(NamedTuple):
    """A run of a system whose training is finished."""

    model: Path
    settings: Recipe
    options: Mapping[str, Any]
    tokenizer: Any
    device: torch.device

    def batches(self, rows: Any, pad: Callable[[Sequence[Any]], Batch]) -> Batches:
        """All rows in batches of similar length, on the device, with their numbers."""
        return batches(rows, pad, self.device)

    @property
    def facts(self) -> dict[str, Any]:
        """What ``generation.json`` has of it: the system with its options, and what its model's files contain."""
        return {
            "system": self.settings.system,
            "weights": weights_mark(self.model, None),
            "model_files": model_files(self.model),
        }


def saved_run(folder: str | Path, name: str, *, command: str, noun: str = "") -> SavedRun:
    """What a run of a system was trained with: its recipe, options and tokenizer, and the folder of its model.

    Raises unless it is one, and finished.

    Args:
        folder: of the run.
        name: of the system.
        command: trains one; its last word is the recipe, or the data.
        noun: what such a run is, for the message.
    """
    run, system = RunFolder(Path(folder)), system_of(str(folder))
    if system is None or system.name != name:
        raise UserError(f"{folder} is not {noun or f'a run of {name}'}. Train one with: {command}")
    if not run.finished:
        raise MissingFileError(
            f"{folder} has no {run.model.name}/: its training is not finished. The same {command.rpartition(' ')[0]} "
            "command continues it."
        )
    tokenizer, _ = loading.load_tokenizer(Model(name=str(run.model)), lambda: (), "")
    device = torch.device(loading.own_device() or ("cuda" if torch.cuda.is_available() else "cpu"))
    return SavedRun(run.model, recipe.load(str(run.recipe), objective=False), system.options, tokenizer, device)
