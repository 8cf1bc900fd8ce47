"""a model and the length of its training → its layers compiled by ``torch.compile``, or why they are not.

Layers are compiled one by one, for any lengths: they share one piece of code, so this takes seconds instead of minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ngramloss.data.batches.planned import ExampleLengths
from ngramloss.models.adapters import has_adapters
from ngramloss.models.attached.heads import has_encoder
from ngramloss.output.console import logger
from ngramloss.recipe import Train
from ngramloss.settings import Switch
from ngramloss.storage.files import user_cache


class Earns(NamedTuple):
    """What compiling saves on an H200: ``saved`` seconds for each position, layer and unit of width."""

    saved: float
    takes: float


DECODER_ONLY = Earns(1.4e-10, 10.0)
"""30 layers of width 576 and 8,900 positions (SmolLM2 on DialogSum's lengths): 21.7 ms less a step."""
ENCODER_DECODER = Earns(7.5e-11, 45.0)
"""6 + 6 layers of width 768, 32 sources of 479 and targets of 31 tokens (BART-base on XSum's lengths): 5.6 ms less."""
EARNED = 2.0  # ``auto`` compiles if that saves this many times what it takes, as the saving is a guess
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where ``torch.compile`` keeps compiled code; without it, in a folder that a restart of the machine deletes."""


def layers(model: Any) -> list[torch.nn.Module]:
    """The layers of a model's encoder and decoder."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    inner = {id(part) for each in lists for layer in each for part in layer.modules()}
    return [layer for each in lists if id(each) not in inner for layer in each]


def earns(model: Any) -> Earns:
    """What compiling the layers of a model saves and costs."""
    return ENCODER_DECODER if has_encoder(model) else DECODER_ONLY


def seconds_saved(model: Any, lengths: ExampleLengths, *, rows: float, steps: int) -> float:
    """About how many seconds of a training compiled layers save on a GPU."""
    parts = [(model, lengths.sources)]
    if has_encoder(model):
        parts = [(model.get_encoder(), lengths.sources), (model.get_decoder(), lengths.targets)]
    positions = sum(len(layers(part)) * float(length.mean()) for part, length in parts)  # of all layers
    width = int(model.get_input_embeddings().weight.shape[-1])
    return earns(model).saved * steps * rows * positions * width


def why_not_compiled(model: Any, device: torch.device, *, why_not_captured: str, writes: bool, seconds: float) -> str:
    """Why ``auto`` does not compile; empty if it does."""
    if device.type != "cuda":
        return "there is no NVIDIA GPU"
    if why_not_captured:
        return f"steps do not run as CUDA graphs, as {why_not_captured}"
    if find_spec("triton") is None:
        return "Triton is not installed (the extra kernels)"
    if has_adapters(model):
        return "this was not tried with adapters"
    if writes:
        return "the model generates during training, which was not tried with compiled layers"
    takes = earns(model).takes
    if seconds < EARNED * takes:
        return f"this training is short: compiling takes about {takes:.0f} s, and would save {_duration(seconds)}"
    return ""


def decide(model: Any, settings: Train, device: torch.device, **facts: Any) -> bool:
    """Whether layers are compiled. On a GPU this is logged."""
    if settings.compile != Switch.AUTO:
        return bool(settings.compile)
    why = why_not_compiled(model, device, **facts)
    if why and device.type == "cuda":
        logger.info(f"layers are not compiled: {why}. train.compile=true compiles them.")
    elif not why:
        logger.info(
            f"layers are compiled before the first step, which takes about {earns(model).takes:.0f} s and saves about "
            f"{_duration(facts['seconds'])} in this training. train.compile=false leaves it out."
        )
    return not why


def compile_layers(model: Any) -> None:
    """Compile each layer when it first runs. Compiled code is kept for later trainings, in :func:`code_folder`."""
    if CACHE not in os.environ:
        folder = code_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ[CACHE] = str(folder)
        except OSError:  # then it is where PyTorch puts it
            pass
    for layer in layers(model):
        layer.compile(dynamic=True)


def leave(model: Any) -> None:
    """Let layers run uncompiled again: generation would compile them again for every length of its cache."""
    for layer in layers(model):
        layer._compiled_call_impl = None


def code_folder() -> Path:
    """Where compiled code is kept: in the user's own cache. In one that is shared, it could be somebody else's."""
    return user_cache() / "compiled"


def run_compiled(model: Any, run: Callable[[], object], *, asked: bool) -> bool:
    """Run compiled layers for the first time, uncompiled if that fails and they were not asked for. Returns which."""
    try:
        run()
    except Exception as reason:  # of the compiler, Triton or the C compiler that it calls: any class; or no memory
        if asked:
            raise
        leave(model)
        torch._dynamo.reset()
        message = " ".join(str(reason).split())[:200]
        logger.warning(
            f"layers are not compiled: {type(reason).__name__}: {message}. Training is the same, but slower."
        )
        return False
    return True


def _duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> _duration(3.2), _duration(200), _duration(9000)
    ('3 s', '3 minutes', '2.5 hours')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
