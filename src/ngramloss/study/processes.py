"""arguments of ``ngramloss`` → a process that runs it, forked from one that has imported torch and transformers.

A study starts hundreds of processes, each with imports of five seconds. The fork server never touches a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

IMPORTED = (
    "ngramloss.training.runner",
    "ngramloss.generation.predictions",
    "ngramloss.search.engines.graph",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""What the fork server imports: most of what ``train`` and ``generate`` need."""
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # Elsewhere libraries do not survive a fork


def start_process(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> BaseProcess:
    """A process of ``ngramloss``. Its ``exitcode`` is None while it runs, or the negative number of a signal."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # an import that looks for GPUs must not start CUDA
    context: Any = multiprocessing.get_context(_METHOD)
    context.set_forkserver_preload(list(IMPORTED))
    process: BaseProcess = context.Process(target=_run, args=(list(arguments), str(log), dict(environment or {})))
    process.start()
    return process


def _run(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """Be ``python -m ngramloss`` with these arguments. All that it prints is appended to the log."""
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.environ.update(environment)
    sys.argv = ["ngramloss", *arguments]
    runpy.run_module("ngramloss", run_name="__main__", alter_sys=True)
