"""this machine → what is installed, which backend is used and why, which metrics can run."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from ngramloss.metrics.nli import PUBLISHED
from ngramloss.stats import BACKENDS, chosen_backend
from ngramloss.version import __version__, installed

METRICS = {
    "rouge": ("rouge-score-rs", "score", ""), "bleu": ("sacrebleu", "score", ""), "chrf": ("sacrebleu", "score", ""),
    "shape": ("numpy", "score", ""), "wmd": ("POT", "metrics", "wmd.vectors"),
    "bertscore": ("transformers", "hf", "bertscore.model"), "summac": ("transformers", "hf", "summac.model"),
    "factcc": ("transformers", "hf", "factcc.model"),
}  # fmt: skip
"""Metric → the package it needs, the extra that brings it, and the option that names its model or vectors."""

USUAL = {"bertscore": "roberta-large", "summac": PUBLISHED["vitc"][0]}
"""Metric → the model that published figures are mostly of."""

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
    yield ""
    yield "metrics:"
    for name in METRICS:
        yield f"  {name:<11}{_readiness(name)}"


def _readiness(metric: str) -> str:
    """Whether a metric can run, or what it needs."""
    package, extra, option = METRICS[metric]
    if installed(package) is None:
        return f"needs the package {package}: pip install 'ngramloss[{extra}]'"
    if not option:
        return "ready"
    usual = USUAL.get(metric)
    if usual is None:
        return f"needs --set {option}=…, see docs/metrics.md"
    from ngramloss.metrics.pretrained import cached

    where = "is in the hub's cache" if cached(usual) else "is not in the hub's cache"
    return f"needs --set {option}=FOLDER_OR_HUB_ID; {usual} {where}"
