"""the written form of a system, such as ``simcls(margin=0.01)`` → its entry and options, checked. Needs no torch.

A new system is one file and one entry here. ``train``, ``generate`` and ``list`` look it up. The file has

* ``task(settings, options, *, trust_remote_code) → Task``: what :mod:`ngramloss.systems.loop` trains;
* ``generate(work, folder) → path``: a job whose model is a run of the system → predictions in a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.plugins import Registry
from ngramloss.recipe import LAST, Model, Recipe, Train, load
from ngramloss.settings import Setting
from ngramloss.storage.run_folder import RunFolder


@dataclass(frozen=True)
class System:
    """A way to make texts that is trained in its own way.

    Attributes:
        about: a description.
        recipes: with its authors' settings, and a small one.
        module: its file, as it is imported; empty if ``train`` and ``generate`` need nothing else.
        options: name → what it may be.
        after: the command after training, with {run} for its folder; empty: ``generate``.
        not_used: settings of ``data`` that it does not read.
        bests: what may select the best checkpoint → whether higher is better; the first is the usual one.
        settable: what ``generate --set`` may change; empty: every setting of ``data``, and the task.
        takes_objective: whether it trains on the recipe's objective; otherwise it has one of its own.
    """

    about: str
    recipes: tuple[str, ...]
    module: str = ""
    options: Mapping[str, Setting] = field(default_factory=dict)
    after: str = ""
    not_used: tuple[str, ...] = ("prompt", "instruction")
    bests: Mapping[str, bool] = field(default_factory=dict)
    settable: tuple[str, ...] = ()
    takes_objective: bool = False

    def function(self, name: str) -> Callable[..., Any]:
        """A function of its file."""
        loaded: Callable[..., Any] = getattr(import_module(self.module), name)
        return loaded


_BUILTIN = {
    "simcls": System(
        "SimCLS (Liu and Liu 2021): chooses among candidates of any writer; ngramloss rerank trains and applies it",
        ("simcls", "simcls-demo"),
        "ngramloss.systems.simcls",
        options={
            "margin": Setting(0.01, least=0, most=2, help="how much higher a candidate should score than the next"),
            "gold_margin": Setting(0.0, least=0, most=2, help="how much higher the reference should score than any"),
            "gold_weight": Setting(1.0, least=0, most=1000, help="weight of the reference's margin"),
            "pooling": Setting("first", choices=("first", "mean"), help="what stands for a text: its first token"),
        },
        after="ngramloss rerank apply {run} CANDIDATES --out DIR",
        bests={"gain": True, "loss": False},
        settable=(
            "task",
            "data.name",
            "data.source",
            "data.target",
            "data.id",
            "data.source_language",
            "data.target_language",
            "data.on_bad_row",
        ),
    ),
    "bertsum_ext": System(
        "BertSumExt (Liu and Lapata 2019): takes sentences of the document that an encoder marks",
        ("bertsum-ext", "bertsum-ext-demo"),
        "ngramloss.systems.bertsum_ext",
        options={
            "layers": Setting(2, least=0, most=2**8, help="layers over the sentences"),
            "heads": Setting(8, least=1, most=2**12, help="heads of these layers"),
            "feed_forward": Setting(2048, least=1, most=2**20, help="width inside these layers"),
            "dropout": Setting(0.1, least=0, below=1, help="dropout of these layers"),
            "oracle": Setting(3, least=1, most=1000, help="most sentences that the oracle marks in training"),
            "sentences": Setting(3, least=1, most=1000, help="most sentences of a summary"),
            "blocking": Setting(True, help="leave out a sentence that shares three words in a row with another"),
            "min_words": Setting(6, least=0, most=1000, help="words of the shortest sentence that may be taken"),
        },
        not_used=("prompt", "instruction", "prefix", "candidates"),
        bests={"loss": False, "gain": True},
    ),
    "bertsum_abs": System(
        "BertSumAbs, and with the encoder of a bertsum_ext run BertSumExtAbs (Liu and Lapata 2019): an encoder, a new "
        "decoder and two learning rates; any objective",
        ("bertsum-abs", "bertsum-abs-demo"),
    ),
}

SYSTEMS: Registry[System] = Registry("system", System, _BUILTIN)
"""All systems by name."""

_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", re.DOTALL)


class Written(NamedTuple):
    """A system with its options."""

    name: str
    entry: System
    options: dict[str, Any]


def read_system(text: str) -> Written:
    """Read the written form of a system. All options are there, those that are not given with their defaults.

    >>> read_system("simcls(margin=0.02)").options["margin"]
    0.02
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"system: expected a name and options, such as simcls(margin=0.01), got {text!r}.")
    name, inner = match[1], match[2] or ""
    entry = SYSTEMS.entry(name)
    if not entry.module:
        raise UserError(
            f"system: {name} is trained as any model is: leave system out, and use the recipe {entry.recipes[0]}."
        )
    options = {option: described.default for option, described in entry.options.items()}
    for pair in filter(None, map(str.strip, inner.split(","))):
        option, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or option not in entry.options:
            raise UserError(
                f"system: {name} takes OPTION=VALUE with the options {', '.join(entry.options)}, got {pair!r}."
            )
        described = entry.options[option]
        options[option] = described.check(f"system: {option}", described.read(value))
    return Written(name, entry, options)


def system_of(model: str) -> Written | None:
    """The system that a run's folder has, or None: it has none, or this is not a run."""
    run = RunFolder(Path(model))
    text = load(str(run.recipe), objective=False).system if run.recipe.is_file() else ""
    return read_system(text) if text else None


NOT_USED = (
    "encoder_learning_rate",
    "encoder_warmup_steps",
    "best_limit",
    "best_beams",
    "best_options",
    "gradient_checkpointing",
    "twins",
    "teacher",
    "compile",
    "fsdp",
    "memory",
)
"""Settings of ``train`` that a system does not have."""


def check_recipe(settings: Recipe) -> Written:
    """The system of a recipe. Raises if its settings ask for what it does not have, all mistakes at once."""
    system = read_system(settings.system)
    plain, name = Train(), system.name
    mistakes = [
        f"train.{key}: is not a setting of {name}."
        for key in NOT_USED
        if getattr(settings.train, key) != getattr(plain, key)
    ]
    mistakes += [
        f"data.{key}: is not read by {name}. Leave it out."
        for key in system.entry.not_used
        if getattr(settings.data, key)
    ]
    if settings.model.encoder:
        mistakes.append(f"model.encoder: {name} has no decoder. Give the encoder as model.name.")
    if settings.model.lora != Model().lora:
        mistakes.append(f"model.lora: is not a setting of {name}, which trains the whole encoder.")
    if settings.objective != "ce" and not system.entry.takes_objective:
        mistakes.append(f"objective: {name} has an objective of its own. Leave it out.")
    if settings.train.best not in (*system.entry.bests, LAST):
        mistakes.append(f"train.best: must be one of {', '.join([*system.entry.bests, LAST])} for {name}.")
    if settings.train.precision == "fp16":
        mistakes.append("train.precision: systems train in bf16 or fp32, not in fp16.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        mistakes.append(f"{name} trains in one process; start it without torchrun.")
    if mistakes:
        raise UserError(f"recipe {settings.name}:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))
    return system
