"""a Hugging Face model → its output head: weight, bias, scale and soft-cap, or the reason it is not supported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from ngramloss.errors import UnsupportedModelError, UserError
from ngramloss.loss.stats import head_logits
from ngramloss.models.attached import adapted_heads as adapted

SHARD_SIGNS = ("placements", "ds_id", "tensor_model_parallel")
"""Attributes of a DTensor, of a ZeRO-3 parameter and of Megatron's vocabulary-parallel weight."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.3}
"""How far log-probabilities of a form of a model may be from its forward's (root mean square). Rounding gives 1e-5 in
fp32; in bf16 0.01 with 12 layers and 0.1 with SmolLM2's 30. Positions wrong by one give 0.7."""


class OutputHead(NamedTuple):
    """The parameters of the output head: logits are ``softcap·tanh((scale·hidden @ weight.T + bias) / softcap)``."""

    weight: Tensor
    """[V, D]."""
    bias: Tensor | None
    """The sum of the head's own bias and the model's ``final_logits_bias``, [V]."""
    scale: float
    softcap: float | None
    low_rank: Tensor | None = None
    """Further columns of the weight, [V, r]: those of LoRA on the head, whose input then is [B, T, D + r]."""


def has_encoder(model: Any) -> bool:
    """Whether a model is an encoder-decoder. Otherwise its text follows the source in one row."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def dropouts(model: Any) -> Iterator[float]:
    """The probabilities of dropout for each row; layer drop, which is for all rows of a batch, does not count."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            yield module.p
        yield from (p for name, p in vars(module).items() if "dropout" in name and isinstance(p, float))


def adds_tokens(model: Any) -> bool:
    """Whether an adapter of PEFT puts virtual tokens before the text: prompt tuning, prefix tuning and their like."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def bare(model: Any) -> Any:
    """The Hugging Face model inside ``torch.compile``, DDP and PEFT wrappers."""
    inner = model._modules.get("_orig_mod") or model._modules.get("module")
    if inner is None and hasattr(model, "get_base_model"):
        inner = model.get_base_model()
    return model if inner is None else bare(inner)


def head_module(model: Module) -> Module:
    """The module that computes the logits. Raises if it is not supported."""
    name = type(model).__name__
    find = getattr(model, "get_output_embeddings", None)
    module = find() if callable(find) else None
    if not isinstance(module, Module):
        raise UnsupportedModelError(
            f"{name} has no output head: expected a Hugging Face model whose get_output_embeddings() is a module, "
            f"got {module!r}. Call JointLoss(...).from_hidden(hidden, head, labels) in your own forward instead: "
            "head is the module."
        )
    module = adapted.running_module(module)
    adapted.refuse_unknown_adapter(name, module)
    weight = adapted.base_weight(module)  # [V, D]
    if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        actual = f"a weight of {weight.dtype}" if isinstance(weight, Tensor) else "no weight"
        raise UnsupportedModelError(
            f"the output head of {name} must be like torch.nn.Linear, with a floating-point weight [V, D], got "
            f"{type(module).__name__} with {actual}. If it is quantised, exclude the head from quantisation "
            "(`modules_to_not_convert`, or `llm_int8_skip_modules` of bitsandbytes)."
        )
    return module


def head_of(model: Module, module: Any) -> OutputHead:
    """The head's current parameters: they may be sharded, cast or replaced between two steps."""
    weight = adapted.weight_of(module)  # [V, D]
    low_rank = adapted.low_rank_of(module, weight)  # [V, r]
    for part in (weight, low_rank):
        if part is not None:
            _refuse_partial(type(model).__name__, part)
    own = adapted.bias_of(module), getattr(model, "final_logits_bias", None)
    biases = [bias.reshape(-1) for bias in own if isinstance(bias, Tensor)]  # [V]
    softcap = _setting(getattr(model, "config", None), "final_logit_softcapping")
    return OutputHead(weight, sum(biases[1:], biases[0]) if biases else None, _scale(model), softcap, low_rank)


def raise_unless_equal(model: Module, theirs: Any, hidden: Tensor, head: OutputHead) -> None:
    """Compare the model's own logits at one position with ours. Raises if the model post-processes its logits."""
    with torch.no_grad():
        coarse = torch.finfo(F.linear(hidden[..., : head.weight.shape[1]], head.weight).dtype).eps
        ours = head_logits(hidden, **head._asdict()).float()  # [B, 1, V]
        off = torch.tensor(float("inf"))  # []
        if isinstance(theirs, Tensor) and theirs.shape == ours.shape:
            both = theirs.isfinite() & ours.isfinite()  # [B, 1, V]
            far = (theirs.float() - ours).abs().where(both, 0.0).amax()  # []
            off = far / ours.abs().where(both, 0.0).amax().clamp_min(1e-30)  # []
    if off > max(4 * coarse, 1e-4):
        raise UserError(
            f"{type(model).__name__} changes its logits after the head in an unknown way: at one position they differ "
            f"by {off:.2g} (relative to the largest) from logits of weight, bias, scale {head.scale} and soft-cap "
            f"{head.softcap}. Use compute_loss_func(...), or JointLoss on the logits."
        )


def _refuse_partial(name: str, weight: Tensor) -> None:
    if any(getattr(weight, sign, None) is not None for sign in SHARD_SIGNS):
        raise UserError(
            f"the output head of {name} is sharded ({type(weight).__name__}: tensor parallel, FSDP or ZeRO-3), but the "
            "loss needs the whole weight inside the model's forward. Attach before `fully_shard`, shard the head only "
            "with the root module, remove it from the tensor-parallel plan, or use ZeRO-2."
        )
    if type(weight) not in (Tensor, Parameter):
        raise UnsupportedModelError(
            f"the output head of {name} must have a plain tensor as its weight, got {type(weight).__name__}. "
            "If it is quantised, exclude the head from quantisation (`modules_to_not_convert`)."
        )
    if weight.ndim != 2 or weight.is_meta:
        raise UserError(
            f"the output head of {name} must have its weight [V, D] during the model's forward, got shape "
            f"{list(weight.shape)} on {weight.device}: it is sharded or offloaded. Keep the head whole on one device."
        )


def _scale(model: Module) -> float:
    """The factor on the logits: Cohere multiplies, Granite divides. T5 scales the head's input, which we capture."""
    config = getattr(model, "config", None)
    if str(getattr(config, "model_type", "")).startswith("granite"):
        return 1.0 / float(_setting(config, "logits_scaling") or 1.0)
    scale = getattr(model, "logit_scale", None)
    return float(scale) if isinstance(scale, (int, float)) else 1.0


def _setting(config: Any, name: str) -> float | None:
    """A setting of the part that generates text: the decoder's, the text model's, or the model's own."""
    for part in ("decoder", "text_config"):
        inner = getattr(config, part, None)
        if inner is not None and not isinstance(inner, dict):
            return _setting(inner, name)
    value = getattr(config, name, None)
    return None if value is None else float(value)
