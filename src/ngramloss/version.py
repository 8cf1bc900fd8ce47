"""name of a package → its version, and the extra of ngramloss that installs it. Imports nothing else."""

import warnings
from functools import cache

__version__ = "0.1.0"


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


NEWEST = {"transformers": "5.22.2"}
"""Package → the newest version that the tests run with."""


@cache
def warn_if_untested(package: str) -> None:
    """Warn once if a package is newer than the tests know."""
    found, known = installed(package), NEWEST[package]
    if found is not None and _numbers(found) > _numbers(known):
        warnings.warn(
            f"{package} {found} is newer than {known}, the newest version that ngramloss is tested with. Losses are "
            f"checked against the model's own logits; if something fails, install {package}=={known}. Silence this "
            "warning with warnings.filterwarnings('ignore', message='.*is newer than').",
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing.

    >>> _numbers("5.22.2") < _numbers("5.23.0rc1")
    True
    """
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])


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
