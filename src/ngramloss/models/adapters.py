"""a model and the LoRA settings of a recipe → the model with adapters; later the plain model with merged weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from ngramloss.data.rows import needed
from ngramloss.errors import UserError
from ngramloss.models.attached.heads import has_encoder
from ngramloss.output.console import quiet_loading
from ngramloss.recipe import Model

ADAPTER = "adapter"
"""The folder of the adapter alone, in that of the merged model."""


def add_lora(model: Any, settings: Model) -> Any:
    """The model, changed to train LoRA adapters of its linear layers alone; as it is if ``settings.lora`` is 0."""
    if not settings.lora:
        return model
    peft = needed("peft", "model.lora", "lora")
    targets: Any = "all-linear" if settings.lora_targets == ["all-linear"] else list(settings.lora_targets)
    config = peft.LoraConfig(
        r=settings.lora,
        lora_alpha=settings.lora_alpha or 2 * settings.lora,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        task_type="SEQ_2_SEQ_LM" if has_encoder(model) else "CAUSAL_LM",
    )
    modules = dict(model.named_modules())
    linear = sorted({name.rpartition(".")[2] for name, part in modules.items() if isinstance(part, torch.nn.Linear)})
    named = [] if targets == "all-linear" else targets
    unknown = [name for name in named if not any(f".{path}".endswith(f".{name}") for path in modules)]
    if unknown:
        raise UserError(
            f"model.lora_targets: the model has no layer {unknown[0]!r}. Its linear layers are called "
            f"{', '.join(linear)}; all-linear, alone, means all of them except the head."
        )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(
            f"model.lora_targets = {settings.lora_targets}: {' '.join(str(error).split())[:200]} The linear layers of "
            f"the model are called {', '.join(linear)}."
        ) from error
    raise_unless_mergeable(adapted)
    return adapted


def raise_unless_mergeable(model: Any) -> None:
    """Raise if adapters of a model cannot be merged into its weights here, before it is trained."""
    if not has_adapters(model):
        return
    lora = needed("peft.tuners.lora", "model.lora", "lora")
    tuners = needed("peft.tuners.tuners_utils", "model.lora", "lora")
    base = model.get_base_model()
    layers = dict(base.named_modules(remove_duplicate=False))
    uses = Counter(id(weight) for part in layers.values() for weight in part.parameters(recurse=False))
    for name, layer in layers.items():
        if hasattr(layer, "original_module"):
            raise UserError(
                f"{name} is trained whole or in single tokens (modules_to_save, trainable_token_indices), which "
                "checkpoints here do not save. Leave that out, train the whole model without adapters, or use attach "
                "with another trainer."
            )
        if not isinstance(layer, tuners.BaseTunerLayer):
            continue
        if not isinstance(layer, lora.Linear | lora.Embedding):
            raise UserError(
                f"the adapter of {name} ({type(layer).__name__}) cannot be merged here: it is not LoRA, or the weight "
                "is quantised. Use plain LoRA on a model that is not quantised, or attach with another trainer."
            )
        if layer.lora_variant or any(layer.lora_bias.values()):
            raise UserError(
                f"the adapter of {name} uses a bias, DoRA or another variant of LoRA, which are not merged here. Use "
                "plain LoRA."
            )
        if uses[id(layer.get_base_layer().weight)] > 1:
            raise UserError(
                f"{name} has an adapter, but shares its weight with another layer: embeddings and head are tied. "
                "Leave both out of model.lora_targets."
            )


@torch.no_grad()
def merged(model: Any) -> Any:
    """A new model without adapters, on the CPU, that computes the same. A plain one is returned as it is."""
    if not has_adapters(model):
        return model
    lora = needed("peft.tuners.lora", "model.lora", "lora")
    base = model.get_base_model()
    state = {  # on the CPU: a second model may not fit beside the first
        name.replace(".base_layer.", "."): tensor.cpu()
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in base.named_modules():
        if isinstance(layer, lora.LoraLayer):
            weight = layer.get_base_layer().weight
            active = [] if layer.merged or layer.disable_adapters else layer.active_adapters
            delta = sum(layer.get_delta_weight(adapter) for adapter in active if adapter in layer.scaling)
            state[f"{name}.weight"] = (weight + delta).to("cpu", weight.dtype)
    plain = type(base)._from_config(deepcopy(base.config), dtype=base.dtype)
    plain.load_state_dict(state)
    plain.generation_config = deepcopy(base.generation_config)
    return plain.eval()


def has_adapters(model: Any) -> bool:
    """Whether only adapters of the model are trained."""
    return hasattr(model, "get_base_model")


def save(model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
    """Save the merged model, with ``weights`` if its own are sharded, and its adapter alone in ``adapter``."""
    with quiet_loading():
        merged(model).save_pretrained(folder, state_dict=weights)
        if has_adapters(model):
            model.save_pretrained(folder / ADAPTER, save_embedding_layers=False)  # these are in the merged model


def restore(model: Any, folder: Path) -> None:
    """Give a model with adapters the weights of those that :func:`save` wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    peft = needed("peft", "model.lora", "lora")
    try:
        found = peft.set_peft_model_state_dict(model, load_file(folder / ADAPTER / "adapter_model.safetensors"))
    except (SafetensorError, RuntimeError) as reason:  # damaged, or other shapes
        raise UserError(f"the adapter in {folder} is not this model's: {' '.join(str(reason).split())}") from reason
    wrong = [*found.unexpected_keys, *(name for name in found.missing_keys if ".lora_" in name)]
    if wrong:
        raise UserError(f"the adapter in {folder} is another one: {wrong[0]} is in only one of them.")
