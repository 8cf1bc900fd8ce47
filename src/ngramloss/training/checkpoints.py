"""a model in training → a sealed checkpoint, and back; a folder of checkpoints → the newest complete one."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.storage import checksums
from ngramloss.storage.checksums import SEAL, damage, seal
from ngramloss.storage.files import inside, read_object, remove

if TYPE_CHECKING:
    from ngramloss.training.loop import State
    from ngramloss.training.processes import Processes

STATE, OPTIMISER, EMA = "state.json", "optimizer.pt", "ema.pt"
FOREIGN_STATE = "trainer_state.json"
"""What Hugging Face's trainer saves in place of ``state.json``."""

_NOT_MODEL = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|trainer_state|training_args|pytorch_model_fsdp|whole|data|state|ema|online)(\.|_\d)"
)


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def save(
    folder: Path,
    model: Any,
    tokenizer: Any,
    optimiser: Any,
    state: State,
    here: Processes,
    *,
    more: Mapping[str, str],
    finished: bool,
    keep: int,
    sharded: bool,
    average: int = 0,
    every: int = 1,
    ema: Sequence[Any] | None = None,
) -> None:
    """Write a checkpoint, seal it when it is complete, and delete old ones. Every process calls this.

    Args:
        folder: of all checkpoints.
        model: its weights and configuration are saved.
        tokenizer: saved beside it, so that the checkpoint is a model.
        optimiser: its state is saved.
        state: what else a continued training needs.
        here: this process; the first one writes.
        more: file name → text.
        finished: whether the training ends here.
        keep: how many checkpoints to keep besides the best.
        sharded: whether weights must be gathered from all processes.
        average: how many checkpoints of ``every`` steps to keep in any case, because their mean will be taken.
        every: steps between the checkpoints that are saved regularly.
        ema: the moving average of the weights, if there is one.
    """
    import torch
    from safetensors import SafetensorError

    from ngramloss.models import adapters
    from ngramloss.training.sharding import whole_optimiser, whole_weights

    weights = whole_weights(model) if sharded else None
    moments = whole_optimiser(model, optimiser) if sharded else optimiser.state_dict()
    if here.first:
        checkpoint = folder / f"checkpoint-{state.step}"
        try:
            remove(checkpoint)  # one that was not completed
            adapters.save(model, checkpoint, weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(checkpoint)
            torch.save(moments, checkpoint / OPTIMISER)
            if ema is not None:
                torch.save(list(ema), checkpoint / EMA)
            for name, text in {STATE: json.dumps(dataclasses.asdict(state)), **more}.items():
                (checkpoint / name).write_text(text, encoding="utf-8")
            facts = {"step": state.step, "best_step": state.best_step, "best": state.best, "finished": finished}
            seal(checkpoint, **facts, **({"averages": state.averages} if state.averages else {}))
        except (OSError, RuntimeError, SafetensorError) as reason:
            raise CheckpointError(f"cannot write {checkpoint}: {' '.join(str(reason).split())}.") from reason
        needed = {step(path) for path in regular(folder, every)[:average]}
        prune(folder, keep=keep, best=state.best_step, besides=needed)
    here.wait()


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model that is no checkpoint, such as a mean of several, and seal it when it is complete."""
    from ngramloss.models import adapters

    try:
        if folder.exists():
            delete(folder)
        adapters.save(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        seal(folder)
    except OSError as reason:
        raise CheckpointError(f"cannot write {folder}: {' '.join(str(reason).split())}.") from reason


def restore(checkpoint: Path, model: Any, optimiser: Any, *, sharded: bool) -> dict[str, Any]:
    """Load weights and optimiser of a checkpoint. Returns the saved state. Nothing that is read can run code."""
    import torch

    from ngramloss.training.sharding import restore_whole

    again = f"Delete {checkpoint} to continue from the previous checkpoint."
    saved = read_object(checkpoint / STATE, again)
    try:
        moments = torch.load(checkpoint / OPTIMISER, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as reason:  # torch refuses to unpickle anything but tensors and plain numbers
        raise UserError(
            f"the optimiser's state in {checkpoint} contains more than tensors and plain numbers, so it was not "
            "loaded. Delete the checkpoint to continue from the previous one, or start over with --fresh."
        ) from reason
    if sharded:
        restore_whole(model, optimiser, read_weights(checkpoint, model), moments)
    else:
        load_weights(checkpoint, model)
        optimiser.load_state_dict(moments)
    return saved


def load_weights(checkpoint: Path, model: Any) -> None:
    """Give a model, which is not sharded, the weights of a checkpoint; of one with adapters, those of the adapters."""
    from ngramloss.models import adapters

    if adapters.has_adapters(model):
        adapters.restore(model, checkpoint)
    else:
        model.load_state_dict(read_weights(checkpoint, model), strict=False)


def read_weights(checkpoint: Path, model: Any) -> dict[str, Any]:
    """The weights of a checkpoint, on the CPU. Raises if they are not those of this model."""
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        weights |= load_file(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved_ids = {id(parameters[name]) for name in weights if name in parameters}  # tied weights are saved once
    for name, parameter in parameters.items():
        if parameter.requires_grad and id(parameter) not in saved_ids:
            raise UserError(f"the weights in {checkpoint} are not those of {type(model).__name__}: {name} is missing.")
    return weights


class Found(NamedTuple):
    """The newest complete checkpoint, and what is wrong with newer ones."""

    newest: Path | None
    broken: dict[Path, str]


def find(folder: Path) -> Found:
    """Find the newest complete checkpoint in a folder."""
    broken: dict[Path, str] = {}
    for checkpoint in sorted(_all(folder), key=step, reverse=True):
        why = fault(checkpoint)
        if not why:
            return Found(checkpoint, broken)
        broken[checkpoint] = why
    return Found(None, broken)


def fault(checkpoint: Path) -> str:
    """The reason why a checkpoint is incomplete or damaged; empty if it is fine."""
    try:
        why = damage(inside(checkpoint.parent, checkpoint.name))
    except UserError as reason:
        return str(reason).rstrip(".")
    if why:
        return why
    known = facts(checkpoint)
    best = known["best_step"] is None or (type(known["best_step"]) is int and type(known["best"]) in (int, float))
    return "" if best and isinstance(known["finished"], bool) else f"its {SEAL} cannot be read"


def facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's seal says of it. By default the training is not finished and has no best step."""
    plain: dict[str, Any] = {
        "step": step(checkpoint),
        "best_step": None,
        "best": None,
        "finished": False,
        "averages": {},
    }
    return {**plain, **checksums.facts(checkpoint)}


def step(checkpoint: Path) -> int:
    """The optimiser step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def regular(folder: Path, every: int) -> list[Path]:
    """The checkpoints whose steps are multiples of ``every``, newest first; not those of stops and good validations."""
    return sorted((path for path in _all(folder) if step(path) % every == 0), key=step, reverse=True)


def prune(folder: Path, *, keep: int, best: int | None, besides: Collection[int] = ()) -> None:
    """Delete all but the newest, the best, and those of some steps besides."""
    for checkpoint in sorted(_all(folder), key=step, reverse=True)[keep:]:
        if step(checkpoint) not in (best, *besides):
            delete(checkpoint)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, its seal first, so a half-deleted one is not used. Of a link, only the link is deleted."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    (checkpoint / SEAL).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Copy what ``from_pretrained`` reads, and nothing that only training needs."""
    from ngramloss.models import adapters

    for path in [*checkpoint.iterdir(), *(checkpoint / adapters.ADAPTER).glob("*")]:
        name = path.relative_to(checkpoint)
        if path.is_file() and not _NOT_MODEL.match(path.name):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy2(inside(checkpoint, *name.parts), folder / name)


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name.rpartition("-")[2].isdecimal()]
