"""Triton kernels of the engine ``graph``."""
