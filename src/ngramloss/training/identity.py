"""what a training is made of → a fingerprint of each thing, and a sentence if it would continue with another one."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ngramloss import recipe
from ngramloss.data.tokens import tokenizer_fingerprint
from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.term import plugin_sources
from ngramloss.models.adapters import has_adapters
from ngramloss.models.attached.heads import bare, dropouts
from ngramloss.output.console import logger
from ngramloss.recipe import Model, Recipe, Train
from ngramloss.storage.files import fingerprint, read_object
from ngramloss.storage.run_folder import model_files, weight_files
from ngramloss.training.precision import PRECISION

if TYPE_CHECKING:
    from ngramloss.training.online import OwnTexts

IDENTITY = "data.json"
"""The file of a checkpoint that has what the training is made of: name → fingerprint."""
PLUGIN, COMMIT, DAY = "plugin", "commit", "date in prompts"
"""How the names of plugins begin; what stands for all files of a model on the hub; what a chat template writes."""

VERSION = 1
ELSEWHERE = "choose another --run, or start over with --fresh"
"""What else to do with a run."""
ADVICE = {
    " data": "Restore the rows of this split.",
    "rows": "Give the same rows.",
    " tokens": "Use the same tokenizer, in the same version.",
    "candidates": "Restore the file of candidates.",
    " guidance": "Restore the column of guidance.",
    "language model": "Restore the folder of data.language_model.",
    "teacher": "Use the same teacher.",
    "model: ": "Restore the folder of the base model.",
    "tokenizer: ": "Restore the folder of model.tokenizer.",
    "tokenizer": "Use the same tokenizer, in the same version.",
    PRECISION: "Continue on a device with the old precision.",
    "generation_config.": "Give the model with the same settings of generation.",
    "config.": "Give the model with the same configuration.",
    "weights before training": "Give the model as it was before training.",
    "trained weights": "Train the same weights.",
    "adapters": "Use the same adapters.",
    "dropout": "Give the model with the same dropout.",
    PLUGIN: "Restore the code of the plugin.",
    DAY: "The chat template writes the date: set NGRAMLOSS_TODAY to the old one, left of the arrow.",
    "scores": "Pass the same function, with the same values bound to it.",
    "metric": "Score the candidates with the same metric.",
    "sentencex": "Install the old version, left of the arrow.",
    "words": "Use the same tokenizer, in the same version.",
}
"""How names of what a training is made of begin or end → what to do if it has changed."""
_OF_SAVING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
"""What saving, loading and gradient checkpointing change in a configuration."""

_OF_ADAPTERS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


def record_of(made_of: Mapping[str, Any], settings: Recipe | None = None) -> str:
    """The text of ``data.json``; it records settings except those of speed, and the content of files and folders."""
    left_out = {*recipe.only_speed(), *recipe.affecting("place")}
    kept = {key: value for key, value in (recipe.flat(settings) if settings else ()) if key not in left_out}
    return json.dumps({"version": VERSION, **kept, **made_of})


def raise_unless_same(
    checkpoint: Path, record: str, *, folder: Path, otherwise: str = ELSEWHERE, may_change: Collection[str] = ()
) -> None:
    """Raise unless a checkpoint was trained with what the training would continue with (``record``)."""
    saved, now = read_record(checkpoint, otherwise), json.loads(record)
    changed = changes(saved, now)
    for name in [name for name in changed if name in may_change]:
        logger.warning(
            f"warning: the {name} has changed since {folder} was started. The new one is used from this step on."
        )
        del changed[name]
    if changed:
        raise error_of_changes(folder, changed, otherwise)


def read_record(checkpoint: Path, otherwise: str = ELSEWHERE) -> dict[str, Any]:
    """What a checkpoint was trained with. Raises if another version of ngramloss wrote it."""
    saved = read_object(checkpoint / IDENTITY, f"Delete {checkpoint} to continue from the previous checkpoint.")
    if saved.get("version") != VERSION:
        raise UserError(
            f"{checkpoint} cannot be continued: another version of ngramloss saved it, with another record. Continue "
            f"it with that version, or {otherwise}."
        )
    return saved


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two records: name → before and now."""
    return {
        name: (saved.get(name, "none"), now.get(name, "none"))
        for name in {**now, **saved}
        if name not in saved or name not in now or saved[name] != now[name]
    }


def error_of_changes(folder: Path, changed: Mapping[str, tuple[Any, Any]], otherwise: str = ELSEWHERE) -> UserError:
    """The error that names everything that has changed, and what to do about each."""
    shown = {name: map(repr if name in recipe.every_setting() else str, pair) for name, pair in changed.items()}
    lines = (f"  {name}: {' → '.join(pair)}. {_advice(name, changed)}" for name, pair in shown.items())
    listed = "\n".join(map(str.rstrip, lines))
    return UserError(
        f"settings, data or code of {folder} have changed since it was started:\n{listed}\nTo train with the new "
        f"ones, {otherwise}."
    ).on_page("continue")


def _advice(name: str, changed: Collection[str]) -> str:
    if name in recipe.every_setting():
        return "Set it back."
    source, _, made = name.rpartition(" ")
    of_settings = name == PRECISION and "train.precision" in changed
    if of_settings or (made in ("tokens", "guidance") and {source, f"{source} data"} & {*changed}):
        return "This is made from what has changed."
    return next((advice for part, advice in ADVICE.items() if name.startswith(part) or name.endswith(part)), "")


def data_made_of(splits: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the splits that a training reads."""
    return {f"{name} data": split.fingerprint for name, split in splits.items()}


def base_made_of(model: Model, config: Any) -> dict[str, str]:
    """Fingerprints of the files that a recipe's model and its tokenizer are loaded from."""
    base = model.encoder or model.name
    found = {} if base == "scratch" else files_made_of("model", base, config)
    own = model_files(Path(model.tokenizer)) if model.tokenizer else {}
    return found | {f"tokenizer: {name}": mark for name, mark in own.items()}


def files_made_of(what: str, name: str, config: Any) -> dict[str, str]:
    """Fingerprints of the files of a model's folder, with its weights; of a model on the hub, its commit."""
    folder = Path(name)
    weights = weight_files(folder)
    found = model_files(folder) | ({"weights": fingerprint(weights)} if weights else {})
    return {f"{what}: {part}": mark for part, mark in (found or {COMMIT: str(config._commit_hash)}).items()}


def objectives_made_of(objective: str) -> dict[str, str]:
    """Fingerprints of the code of an objective's terms that come from plugins."""
    return {f"{PLUGIN} objective {name}": source for name, source in plugin_sources(parse(objective)).items()}


def python_made_of(
    model: Any,
    examples: Any,
    settings: Train,
    objective: str,
    *,
    precision: str,
    tokenizer: Any = None,
    validation: Any = None,
    teacher: Any = None,
    own_texts: OwnTexts | None = None,
) -> dict[str, Any]:
    """What a training in Python is made of, as :func:`ngramloss.train` gets it → its value or fingerprint."""
    loss_fn = JointLoss(objective)
    found: dict[str, Any] = {"objective": objective} | objectives_made_of(objective)
    settled = recipe.affecting("weights", "scores", section="train")
    found |= {f"train.{name}": getattr(settings, name) for name in settled}
    found |= {"rows": rows_mark(examples), "validation rows": rows_mark(validation)}
    found |= {f"config.{name}": value for name, value in _config_of(model).items()}
    found["dropout"] = {str(p): count for p, count in sorted(Counter(dropouts(model)).items())}
    trained = {name: weight.numel() for name, weight in bare(model).named_parameters() if weight.requires_grad}
    found[PRECISION] = precision
    found["trained weights"] = f"{sum(trained.values()):,} ({_mark(trained)})"
    if has_adapters(model):
        kinds = {name: config.to_dict() for name, config in model.peft_config.items()}
        found["adapters"] = {name: {key: each.get(key) for key in _OF_ADAPTERS} for name, each in kinds.items()}
    if has_adapters(model) or loss_fn.compares_with_start:  # checkpoints do not have these weights
        found["weights before training"] = _weights_mark(model)
    if teacher is not None:
        found["teacher"] = {"config": _mark(_config_of(teacher)), "weights": _weights_mark(teacher)}
    if own_texts is not None:
        found |= {f"online.{name}": value for name, value in dataclasses.asdict(own_texts.settings).items()}
        found |= {f"generation.{name}": value for name, value in dataclasses.asdict(own_texts.generation).items()}
        own = bare(model).generation_config.to_dict()  # without what changes when it is saved and loaded
        kept = [name for name in own if name not in (*_OF_SAVING, "_from_model_config")]
        found |= {f"generation_config.{name}": own[name] for name in kept}
        found["scores"] = _source_mark(own_texts.scores)
        try:
            found["tokenizer"] = tokenizer_fingerprint(tokenizer)
        except (AttributeError, TypeError):  # it is not Hugging Face's
            found["tokenizer"] = _source_mark(tokenizer)
    return found


def rows_mark(rows: Any) -> str:
    """The number of rows, and a hash of every column of every row."""
    if rows is None:
        return "none"
    digest = hashlib.sha256()
    try:
        for row in range(len(rows)):
            for name, value in sorted(rows[row].items()):
                digest.update(f"{name}:".encode())
                _add(digest, value)
    except (TypeError, KeyError, AttributeError):
        return "unreadable"  # the loop says what is wrong
    return f"{len(rows):,} ({digest.hexdigest()[:12]})"


def _add(digest: Any, value: Any) -> None:
    """Add a value of a row to a hash: numbers, texts, or lists of them. A list counts as the same array."""
    array, first = np.empty(0, object), value
    while isinstance(first, list | tuple) and first:  # in lists of lists
        first = first[0]
    if not isinstance(first, str):  # an array of texts would be as wide as the longest
        with suppress(ValueError):  # rows of different lengths
            array = np.asarray(value.tolist() if isinstance(value, torch.Tensor) else value)
    if array.dtype.kind in "biuf":
        number = np.float64 if array.dtype.kind == "f" else np.int64
        digest.update(f"{list(array.shape)}".encode() + array.astype(number).tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for each in value:
            _add(digest, each)
    else:
        digest.update(f"{value!r},".encode())


def _source_mark(thing: Any) -> str:
    """A hash of a function's source with the values that are bound to it, or of the source of a thing's class.

    Values without a text of their own do not count, nor what the function finds in its module.
    """
    bound: list[Any] = []
    while isinstance(thing, partial):
        bound += [thing.args, thing.keywords]
        thing = thing.func
    thing = thing if inspect.isroutine(thing) else type(thing)
    if inspect.isfunction(thing):
        bound += [thing.__defaults__, thing.__kwdefaults__]
        for cell in thing.__closure__ or ():
            with suppress(ValueError):  # nothing was assigned to it yet
                bound.append(cell.cell_contents)
    try:
        source = inspect.getsource(thing)
    except (TypeError, OSError):
        source = thing.__qualname__
    if thing.__name__ == "<lambda>":  # whose line has more than it, such as a variable
        source = thing.__code__.co_code.hex()
        bound += [thing.__code__.co_names, *(each for each in thing.__code__.co_consts if isinstance(each, _PLAIN))]
    texts = [str(sorted(map(repr, each))) if isinstance(each, set | frozenset) else repr(each) for each in bound]
    return _mark([source, [text for text in texts if " at 0x" not in text]])


_PLAIN = (bool, int, float, str, tuple, frozenset)


def _config_of(model: Any) -> dict[str, Any]:
    settings = json.loads(json.dumps(bare(model).config.to_dict(), default=str))
    kept = {name: value for name, value in settings.items() if name not in _OF_SAVING}
    return kept | {"dtype of the weights": str(next(model.parameters()).dtype)}


def _weights_mark(model: Any) -> str:
    """A hash of all weights and buffers, without those of adapters: a start is the model without them."""
    digest, adapted = hashlib.sha256(), has_adapters(model)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if not (adapted and weight.requires_grad):
            digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def _mark(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
