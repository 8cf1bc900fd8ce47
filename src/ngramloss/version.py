"""The version, and those of other packages, in a file so small that reading it costs nothing."""

__version__ = "0.1.0"


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


EXTRAS = {
    "torch": "torch", "triton": "kernels", "transformers": "hf", "tokenizers": "hf", "accelerate": "hf",
    "datasets": "hf", "safetensors": "hf", "rouge_score_rs": "score", "sacrebleu": "score", "numpy": "score",
    "scipy": "score", "pysbd": "score", "tqdm": "score", "ot": "metrics", "jinja2": "report", "matplotlib": "report",
}  # fmt: skip
"""Package → the extra that brings it."""


def lacking(error: ModuleNotFoundError) -> str:
    """What is not installed and how to get it, as a sentence.

    >>> lacking(ModuleNotFoundError(name="torch"))
    "this needs the package torch: pip install 'ngramloss[torch]'"
    """
    package = (error.name or "").partition(".")[0]
    extra = f"'ngramloss[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"this needs the package {package}: pip install {extra}"
