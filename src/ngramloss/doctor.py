"""this machine → what is installed, which backend is used, and why."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from ngramloss.stats import BACKENDS, chosen_backend
from ngramloss.version import __version__, installed

PACKAGES = ["torch", "triton", "transformers", "tokenizers", "accelerate", "datasets", "safetensors"]


def report() -> Iterator[str]:
    """The lines to print."""
    yield f"ngramloss {__version__}, Python {platform.python_version()}"
    for package in PACKAGES:
        yield f"  {package:<14}{installed(package) or 'not installed'}"
    yield ""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
        yield f"GPU: {torch.cuda.get_device_name()}"
    else:
        yield "GPU: none that torch can use"
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            backend, reason = chosen_backend(device, dtype)
            yield f"  {device.type:<5}{str(dtype).removeprefix('torch.'):<10}→ {backend:<9}({reason})"
    yield ""
    yield "backends:"
    for name, text in BACKENDS.items():
        yield f"  {name:<9}{text}"
