"""this machine → its packages, the backend it uses and why, and the metrics that can run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ngramloss.metrics.registry import METRICS, missing_options
from ngramloss.objectives import OBJECTIVES
from ngramloss.plugins import Registry
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
        yield "GPU: none found by torch"
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            backend, reason = chosen_backend(device, dtype)
            yield f"  {device.type:<5}{str(dtype).removeprefix('torch.'):<10}→ {backend:<9}({reason})"
    yield ""
    yield "backends:"
    for name, text in BACKENDS.items():
        yield f"  {name:<9}{text}"
    yield ""
    yield "objectives:"
    for name in OBJECTIVES:
        yield f"  {name:<11}{_state(name, OBJECTIVES, lambda name: 'ready')}"
    yield ""
    yield "metrics:"
    for name in METRICS:
        yield f"  {name:<11}{_state(name, METRICS, _readiness)}"


def _state(name: str, registry: Registry[Any], state: Callable[[str], str]) -> str:
    """Whether an entry can be used, and where it comes from if it is not built in."""
    if problem := registry.problem(name):
        return problem
    origin = registry.origin(name)
    return state(name) + (f" ({origin})" if origin else "")


def _readiness(name: str) -> str:
    """What a metric needs before it can run; ``ready`` if nothing."""
    metric = METRICS[name]
    if missing := metric.missing_packages:
        wanted = f"'ngramloss[{metric.extra}]'" if metric.extra else " ".join(missing)
        return f"needs the package {', '.join(missing)}: pip install {wanted}"
    options = list(missing_options(name, {}))
    if metric.usual and not options:
        options = ["model"]
    if not options:
        return "ready"
    if not metric.usual:
        return f"needs --set {name}.{options[0]}=…, see docs/metrics.md"
    from ngramloss.metrics.pretrained import cached

    where = "is in the hub's cache" if cached(metric.usual) else "is not in the hub's cache"
    return f"needs --set {name}.{options[0]}=FOLDER_OR_HUB_ID; {metric.usual} {where}"
