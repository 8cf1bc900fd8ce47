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


NEWEST = {"transformers": "5.22.2", "trl": "1.16.0", "axolotl": "0.19.0", "ms-swift": "4.6.0"}
"""Package → the newest version that the tests run with."""
OLDEST = {"trl": "1.14.2", "axolotl": "0.19.0", "ms-swift": "4.6.0"}
"""Package → the oldest version that the tests run with, if `pyproject.toml` does not require it."""


@cache
def warn_if_untested(package: str) -> None:
    """Warn once if a package is newer, or older, than the versions that the tests run with."""
    found, newest, oldest = installed(package), NEWEST[package], OLDEST.get(package, "0")
    if found is None or _numbers(oldest) <= _numbers(found) <= _numbers(newest):
        return
    is_newer = _numbers(found) > _numbers(newest)
    compared, last, known = ("newer", "newest", newest) if is_newer else ("older", "oldest", oldest)
    warnings.warn(
        f"{package} {found} is {compared} than {known}, the {last} version that ngramloss is tested with. Losses are "
        f"checked against the model's own logits; if something fails, install {package}=={known}. Silence this "
        f"warning with warnings.filterwarnings('ignore', message='.*is {compared} than').",
        stacklevel=3,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing.

    >>> _numbers("5.22.2") < _numbers("5.23.0rc1")
    True
    """
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])


_PACKAGES = {
    "torch": "torch",
    "kernels": "triton",
    "hf": "transformers tokenizers accelerate datasets safetensors sentencex",
    "score": "rouge_score_rs sacrebleu numpy scipy pysbd tqdm",
    "metrics": "ot",
    "report": "jinja2 matplotlib",
    "fast": "ctranslate2",
}
EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages.split()}
"""Package → the extra that installs it."""


def lacking(error: ModuleNotFoundError) -> str:
    """Which package is missing and how to install it."""
    package = (error.name or "").partition(".")[0]
    extra = f"'ngramloss[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"this needs the package {package}: pip install {extra}"
