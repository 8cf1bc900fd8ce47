"""``ng.train``: a model and rows in Python → a trained model, by the loop of ``ngramloss train``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.recipe import Train
from ngramloss.settings import nearest
from ngramloss.training import checkpoints
from ngramloss.training.identity import IDENTITY, python_made_of, raise_unless_same, record_of
from ngramloss.training.loop import Around, TrainingOutcome, run
from ngramloss.training.objective_task import ObjectiveTask
from ngramloss.training.online import OwnTexts
from ngramloss.training.processes import start_processes
from ngramloss.training.run import python_run, warn_unless_exact


def train(
    model: Any,
    tokenizer: Any,
    examples: Any,
    settings: Train | None = None,
    *,
    objective: str = "ce",
    validation: Any = None,
    folder: str | Path | None = None,
    teacher: Any = None,
    own_texts: OwnTexts | None = None,
    on_step: Callable[[int, Mapping[str, float]], object] = lambda number, values: None,
    **changes: Any,
) -> TrainingOutcome:
    """Train a model in Python with the loop of ``ngramloss train``: planned, and on a GPU captured, steps.

    Args:
        model: a Hugging Face encoder-decoder or decoder-only model. The objective is attached to it.
        tokenizer: the model's tokenizer; it pads, and is saved with checkpoints.
        examples: rows with ``input_ids`` and ``labels``. For a decoder-only model, ``input_ids`` are the prompt alone,
            and ``labels`` the ids that follow it, with the end token; an id there that is read but not learnt, such as
            of a question between two answers, is written ``~id``. Rows may also have ``weights``, one for each label,
            and all may have ``anchors``, 1 for each label with which a block of ``accept`` begins, otherwise 0.
        settings: how to train, as in the section ``train`` of a recipe.
        objective: as in :class:`JointLoss`.
        validation: rows to validate on every ``eval_every`` steps.
        folder: where to save checkpoints; a training in a folder with checkpoints continues from the last, if all that
            it is made of is the same. Only ``epochs``, ``max_steps`` and what does not change steps may differ.
        teacher: the model that ``distill`` compares with, as in :func:`attach`. ``keep`` takes none: it compares with
            ``model`` as it is passed here, so a continued training must be given that model again.
        own_texts: what the model writes while it is trained, as in the section ``online`` of a recipe.
        on_step: called after every step with its number and, if the step is logged, the values.
        changes: settings to change: ``train(..., max_steps=1000, learning_rate=1e-4)``.

    Returns:
        How it ended. The model has the last weights; ``ema`` is a model in ``folder``.
    """
    known = [field.name for field in dataclasses.fields(Train)]
    if unknown := [name for name in changes if name not in known]:
        raise TypeError(f"train has no setting {unknown[0]!r}. {nearest(unknown[0], known, 0.6)}".rstrip())
    settings = dataclasses.replace(settings or Train(), **changes)
    asked = python_run(objective, settings, own_texts)
    if folder is None and settings.ema:
        raise UserError("ema is written beside the checkpoints. Give a folder for these: folder=….")
    if settings.teacher or (teacher is not None and asked.compares_with_start):
        raise UserError(
            "train.teacher is read by ngramloss train. Here, pass the loaded model: train(..., teacher=model). keep "
            "needs none: it compares with the model before training."
        )
    if own_texts is not None:
        warn_unless_exact(asked)
    here = start_processes()
    checkpoint_folder = None if folder is None else Path(folder)
    newest, record = None, ""
    if checkpoint_folder is not None:
        saved = checkpoints.find(checkpoint_folder)
        for checkpoint in saved.broken:
            if (checkpoint / checkpoints.FOREIGN_STATE).exists():
                raise UserError(f"{checkpoint} was saved by a Hugging Face trainer. Choose another folder.")
        here.wait()
        if here.first:
            checkpoint_folder.mkdir(parents=True, exist_ok=True)
            for checkpoint in saved.broken:  # it would count among those that are kept
                checkpoints.delete(checkpoint)
        here.wait()
        newest = saved.newest
        given = {"validation": validation, "teacher": teacher, "own_texts": own_texts, "tokenizer": tokenizer}
        precision = asked.on(here.count, here.device)
        record = record_of(python_made_of(model, examples, settings, objective, precision=precision, **given))
    if newest is not None:
        raise_unless_same(newest, record, folder=newest.parent, otherwise="choose another folder")
        logger.info(f"continuing {folder} from step {checkpoints.step(newest)}.")
    validated = validation if settings.eval_every else None
    task = ObjectiveTask(model, tokenizer, examples, asked, validation=validated, teacher=teacher, own_texts=own_texts)
    around = Around(checkpoint_folder, {IDENTITY: record} if record else {}, newest, on_step=on_step)
    return run(task, settings, here, around)
