"""a model and a precision → the same model in it, but for numbers that need more."""

from __future__ import annotations

from typing import Any

import torch

FREQUENCIES = "inv_freq"  # How names of buffers end that contain the frequencies of rotary positions


def to_precision(model: Any, dtype: torch.dtype, device: Any = None) -> Any:
    """The same model with its weights in this precision, as ``from_pretrained`` would have loaded it.

    Rotary frequencies stay in their own: 16 bits would turn a far position by another angle, in bf16 by half a radian
    at position 300. So do weights that the model's class wants in fp32, such as some of T5 in fp16.
    """
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith(FREQUENCIES)
    ]
    exact = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        exact |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    wide = [(p, p.detach().clone()) for name, p in model.named_parameters() if exact & {*name.split(".")}]
    model.to(device=device or model.device, dtype=dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer.to(model.device))
    for parameter, values in wide:
        parameter.data = values.to(model.device)
    return model
