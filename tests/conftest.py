"""Without a GPU, Triton kernels run in Triton's own interpreter. It must be told before the kernels are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
