"""``ngramloss doctor`` → the packages, the backend and why, and the engines and metrics that can run, printed."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any

from ngramloss.cli.options import describe
from ngramloss.loss.terms import OBJECTIVES
from ngramloss.metrics.registry import METRICS, missing_options
from ngramloss.output import escape
from ngramloss.output.console import print_result
from ngramloss.plugins import Registry
from ngramloss.search.registry import ENGINES, engine_packages
from ngramloss.version import __version__, installed, lacking

DOCTOR = "Show which packages are installed, which backend is used, and why."

DOCTOR_EXAMPLES = """\
examples:
  ngramloss doctor
  ngramloss doctor --json
"""

PACKAGES = [
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "safetensors",
    "peft",
    "trl",
    *engine_packages(),
]


def add(doctor: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(doctor, DOCTOR, DOCTOR_EXAMPLES, run)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    known = facts()
    if options.json:
        print_result(escape.in_json(json.dumps(known, indent=1, ensure_ascii=False)))
    else:
        for line in lines(known):
            print_result(line)
    return 0


def facts() -> dict[str, Any]:
    """Everything that ``ngramloss doctor`` shows, as JSON has it. Works without any other package."""
    problem = _problem_of_torch()
    return {
        "ngramloss": __version__,
        "python": platform.python_version(),
        "packages": {package: installed(package) for package in PACKAGES},
        "torch": problem or "ready",
        **({"gpu": None, "chosen": [], "backends": {}} if problem else _devices()),
        "engines": {
            name: {
                "ready": not (needs := problem or engine.needs),
                "state": needs or "ready",
                "version": engine.version,
                "precision": engine.precision or "fp32, bf16 or fp16",
            }
            for name, engine in ENGINES.items()
        },
        "objectives": {name: _entry(name, OBJECTIVES, lambda name: problem or "ready") for name in OBJECTIVES},
        "metrics": {name: _entry(name, METRICS, _readiness) for name in METRICS},
    }


def _problem_of_torch() -> str:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        return lacking(error).replace("this needs", "needs", 1)
    except Exception as error:  # a damaged installation may raise anything, such as OSError for a missing library
        return f"needs torch, which cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _devices() -> dict[str, Any]:
    import torch

    from ngramloss.loss.stats import BACKENDS, chosen_backend

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    chosen = [(device, dtype, chosen_backend(torch.device(device), dtype)) for device in devices for dtype in dtypes]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "chosen": [
            {"device": device, "dtype": str(dtype).removeprefix("torch."), **choice._asdict()}
            for device, dtype, choice in chosen
        ],
        "backends": dict(BACKENDS),
    }


def lines(known: dict[str, Any]) -> Iterator[str]:
    """The facts as lines to print."""
    yield f"ngramloss {known['ngramloss']}, Python {known['python']}"
    for package, version in known["packages"].items():
        yield f"  {package:<14}{version or 'not installed'}"
    yield ""
    if known["backends"]:
        yield f"GPU: {known['gpu'] or 'none found by torch'}"
        for row in known["chosen"]:
            yield f"  {row['device']:<5}{row['dtype']:<10}→ {row['backend']:<9}({row['reason']})"
        yield ""
        yield "backends:"
        for name, text in known["backends"].items():
            yield f"  {name:<9}{text}"
    else:
        yield f"training and generation: {known['torch']}"
    yield ""
    yield "engines:"
    for name, engine in known["engines"].items():
        ready = f"ready, {engine['precision']}" if engine["ready"] else engine["state"]
        yield f"  {name:<18}{ready}"
    for kind in ("objectives", "metrics"):
        yield ""
        yield f"{kind}:"
        width = max(map(len, known[kind])) + 1
        for name, entry in known[kind].items():
            yield f"  {name:<{width}}{entry['state']}" + (f" ({entry['origin']})" if entry["origin"] else "")


def _entry(name: str, registry: Registry[Any], state: Callable[[str], str]) -> dict[str, Any]:
    """Whether an entry can be used, in words too, and where it comes from if it is not built in."""
    problem = registry.problem(name)
    words = problem or state(name)
    return {"ready": words == "ready", "state": words, "origin": None if problem else registry.origin(name) or None}


def _readiness(name: str) -> str:
    metric = METRICS[name]
    if needed := metric.packages_needed:
        return needed
    options = list(missing_options(name, {}))
    if metric.usual and not options:
        options = ["model"]
    if not options:
        return "ready"
    if not metric.usual:
        return f"needs --set {name}.{options[0]}=…, see: ngramloss docs metrics"
    from ngramloss.metrics.pretrained import cached

    where = "is in the hub's cache" if cached(metric.usual) else "is not in the hub's cache"
    return f"needs --set {name}.{options[0]}=FOLDER_OR_HUB_ID; {metric.usual} {where}"
