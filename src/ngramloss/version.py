"""name of a package → its version, and the extra of ngramloss that installs it. Imports nothing else."""

__version__ = "0.1.0"


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


EXTRAS = {
    "torch": "torch",
    "triton": "kernels",
    "transformers": "hf",
    "tokenizers": "hf",
    "accelerate": "hf",
    "datasets": "hf",
    "safetensors": "hf",
    "sentencex": "hf",
    "rouge_score_rs": "score",
    "sacrebleu": "score",
    "numpy": "score",
    "scipy": "score",
    "pysbd": "score",
    "tqdm": "score",
    "ot": "metrics",
    "jinja2": "report",
    "matplotlib": "report",
    "ctranslate2": "fast",
}
"""Package → the extra that installs it."""


def lacking(error: ModuleNotFoundError) -> str:
    """Which package is missing and how to install it.

    >>> lacking(ModuleNotFoundError(name="torch"))
    "this needs the package torch: pip install 'ngramloss[torch]'"
    """
    package = (error.name or "").partition(".")[0]
    extra = f"'ngramloss[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"this needs the package {package}: pip install {extra}"
