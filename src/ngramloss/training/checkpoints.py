"""a model in training → a sealed checkpoint, and back; a folder of checkpoints → the newest complete one."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ngramloss.errors import UserError
from ngramloss.models import adapters
from ngramloss.storage import checksums
from ngramloss.storage.checksums import SEAL, damage, seal
from ngramloss.storage.files import inside, read_object, remove
from ngramloss.storage.typed import typed
from ngramloss.training import sharding

if TYPE_CHECKING:
    from ngramloss.recipe import Train
    from ngramloss.training.averaging import MovingAverage
    from ngramloss.training.loop import State
    from ngramloss.training.processes import Processes
    from ngramloss.training.task import Task

STATE, OPTIMISER, EMA = "state.json", "optimizer.pt", "ema.pt"
FOREIGN_STATE = "trainer_state.json"
"""What Hugging Face's trainer saves in place of ``state.json``."""

_NOT_MODEL = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|trainer_state|training_args|pytorch_model_fsdp|whole|data|state|ema|online)(\.|_\d)"
)


AGAIN = "Delete the checkpoint to continue from the previous one, or start over with --fresh."


class Facts(TypedDict):
    """What a checkpoint's seal says of the training."""

    step: int
    best_step: int | None
    best: float | None
    finished: bool
    averages: dict[str, float | None]  # name → what selects the best of a validation


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def save(
    folder: Path,
    task: Task,
    optimiser: Any,
    state: State,
    here: Processes,
    settings: Train,
    more: Mapping[str, str],
    ema: MovingAverage | None = None,
    *,
    finished: bool,
) -> None:
    """Write a checkpoint with its tokenizer, seal it, and delete old ones. Every process calls this."""
    model, tokenizer = task.model, task.tokenizer
    weights = sharding.whole_weights(model) if settings.fsdp else None
    moments = sharding.whole_optimiser(model, optimiser) if settings.fsdp else optimiser.state_dict()
    if here.first:
        checkpoint = folder / f"checkpoint-{state.step}"
        with _writing(checkpoint):
            remove(checkpoint)  # one that was not completed
            adapters.save(model, checkpoint, weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(checkpoint)
            torch.save(moments, checkpoint / OPTIMISER)
            if ema is not None:
                torch.save(list(ema.values), checkpoint / EMA)
            for name, text in {STATE: json.dumps(dataclasses.asdict(state)), **more}.items():
                (checkpoint / name).write_text(text, encoding="utf-8")
            facts = {"step": state.step, "best_step": state.best_step, "best": state.best, "finished": finished}
            seal(checkpoint, **facts, **({"averages": state.averages} if state.averages else {}))
        prune(folder, keep=settings.keep, best=state.best_step)
    here.wait()


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model that is no checkpoint, but a mean, and seal it when it is complete."""
    with _writing(folder):
        if folder.exists():
            delete(folder)
        adapters.save(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        seal(folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as reason:
        raise CheckpointError(f"cannot write {path}: {' '.join(str(reason).split())}.") from reason


def restore(checkpoint: Path, model: Any, optimiser: Any, *, sharded: bool) -> dict[str, Any]:
    """Load weights and optimiser of a checkpoint. Returns the saved state. Nothing that is read can run code."""
    saved, moments = read_object(checkpoint / STATE, AGAIN), read_tensors(checkpoint / OPTIMISER)
    if sharded:
        _raise_unless_moments(moments, optimiser, dict(model.named_parameters()), checkpoint)
        sharding.restore_whole(model, optimiser, read_weights(checkpoint, model), moments)
    else:
        load_weights(checkpoint, model)
        own = optimiser.state_dict()["param_groups"]
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        _raise_unless_moments(moments, optimiser, dict(enumerate(parameters)), checkpoint)
        optimiser.load_state_dict({"state": moments["state"], "param_groups": own})
    return saved


def read_tensors(path: Path) -> Any:
    """What torch saved in a file of a checkpoint, on the CPU. Nothing that is read can run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as reason:  # torch refuses more than tensors and plain numbers; a damaged file may raise anything
        raise UserError(
            f"{path} is damaged or contains more than tensors and plain numbers, so it was not loaded. {AGAIN}"
        ) from reason


def _raise_unless_moments(moments: Any, optimiser: Any, parameters: Mapping[Any, Any], checkpoint: Path) -> None:
    """Raise unless an optimiser's saved state has what it keeps of each of these parameters, in their shapes."""
    first = next(iter(parameters.values()))
    trial = torch.nn.Parameter(torch.zeros(2, 3, device=first.device, dtype=first.dtype))
    trial.grad = torch.zeros_like(trial)
    same = copy.copy(optimiser)
    same.state, same.param_groups = defaultdict(dict), [{**optimiser.param_groups[0], "params": [trial]}]
    same.step()
    kept = same.state[trial]
    states = moments.get("state") if isinstance(moments, dict) else None
    wrong = "it has no state" if not isinstance(states, dict) else ""
    for key, state in (states or {}).items() if not wrong else ():
        if key not in parameters or not isinstance(state, dict) or state.keys() != kept.keys():
            wrong = f"parameter {key!r} should have {', '.join(kept)}"
        for name, value in () if wrong else state.items():
            shape = parameters[key].shape if getattr(kept[name], "shape", None) == trial.shape else ()
            if torch.is_tensor(kept[name]) and not is_dense(value, shape):
                wrong = f"{name} of parameter {key!r} should be a tensor of the shape {list(shape)}"
    if wrong:
        raise UserError(f"{checkpoint / OPTIMISER} does not fit this optimiser: {wrong}. {AGAIN}")


def is_dense(value: Any, shape: Sequence[int]) -> bool:
    """Whether a value is a dense tensor of real numbers of this shape."""
    is_real = torch.is_tensor(value) and value.layout == torch.strided and value.is_floating_point()
    return is_real and value.shape == torch.Size(shape)


def load_weights(checkpoint: Path, model: Any) -> None:
    """Give a model, which is not sharded, the weights of a checkpoint; of one with adapters, those of the adapters."""
    if adapters.has_adapters(model):
        adapters.restore(model, checkpoint)
    else:
        model.load_state_dict(read_weights(checkpoint, model), strict=False)


def read_weights(checkpoint: Path, model: Any) -> dict[str, Any]:
    """The weights of a checkpoint, on the CPU. Raises if they are not those of this model."""
    weights: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            weights |= load_file(path)
        except SafetensorError as reason:
            raise UserError(f"{path} is damaged: {reason}. {AGAIN}") from reason
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved_ids = {id(parameters[name]) for name in weights if name in parameters}  # tied weights are saved once
    for name, parameter in parameters.items():
        if parameter.requires_grad and id(parameter) not in saved_ids:
            raise UserError(f"the weights in {checkpoint} do not fit {type(model).__name__}: {name} is missing.")
    for name, value in model.state_dict().items():
        if name in weights and weights[name].shape != value.shape:
            shape = f"{name} should have the shape {list(value.shape)}"
            raise UserError(f"the weights in {checkpoint} do not fit {type(model).__name__}: {shape}.")
    return weights


class SavedCheckpoints(NamedTuple):
    """The newest complete checkpoint, and what is wrong with newer ones."""

    newest: Path | None
    broken: dict[Path, str]


def find(folder: Path) -> SavedCheckpoints:
    """Find the newest complete checkpoint in a folder."""
    broken: dict[Path, str] = {}
    for checkpoint in _newest_first(folder):
        if not (why := fault(checkpoint)):
            return SavedCheckpoints(checkpoint, broken)
        broken[checkpoint] = why
    return SavedCheckpoints(None, broken)


def fault(checkpoint: Path) -> str:
    """The reason why a checkpoint is incomplete or damaged; empty if it is fine."""
    try:
        if why := damage(inside(checkpoint.parent, checkpoint.name)):
            return why
        known = facts(checkpoint)
        typed(Facts, {name: known[name] for name in Facts.__annotations__}, f"its {SEAL} cannot be read")
    except UserError as reason:
        return str(reason).rstrip(".")
    return f"its {SEAL} cannot be read: best has no value" if None is known["best"] != known["best_step"] else ""


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


def _newest_first(folder: Path) -> list[Path]:
    named = [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[-1].isdecimal()]
    return sorted(named, key=step, reverse=True)


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Delete all but the newest and the best."""
    for checkpoint in _newest_first(folder)[keep:]:
        if step(checkpoint) != best:
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
    for path in [*checkpoint.iterdir(), *(checkpoint / adapters.ADAPTER).glob("*")]:
        name = path.relative_to(checkpoint)
        if path.is_file() and not _NOT_MODEL.match(path.name):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy2(inside(checkpoint, *name.parts), folder / name)
