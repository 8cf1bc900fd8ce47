"""the backends that read the vocabulary in blocks → a parametrisation of tests over them."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWEEPS = [(backend, memory) for backend in ("chunked", "fused") for memory in ("fast", "lean")]
every_sweep = pytest.mark.parametrize(
    ("backend", "memory"),
    [
        pytest.param(*sweep, id="-".join(sweep), marks=[pytest.mark.slow] * (sweep[0] == "fused" and DEVICE == "cpu"))
        for sweep in SWEEPS
    ],
)
LOGS = ("cross_logp", "mean_logp")
NEEDS = (*LOGS, "entropy")
