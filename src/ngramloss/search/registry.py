"""the name of an engine → what it is, what it needs, what it can do, and the file with its functions.

``hf`` is the specification. Another engine is one file and one entry in ``ENGINES``: recipes, commands, ``auto``,
validation and ``bench generate`` ask the entry. The file has these functions:

* ``load(model, search, *, precision) → write``, where ``write`` returns for each source the ids of its texts, best
  first, from the start token to the end token. Raises ``UserError`` if it cannot.
* ``unsupported(model, search)``: what it cannot do at all, as clauses.
* ``differences(model, search, *, precision)``: why texts may differ from those of ``hf``, as clauses.

If it serves only some types of models, ``FAMILIES`` contains their ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.recipe import AUTO
from ngramloss.settings import nearest
from ngramloss.version import EXTRAS, installed

STANDARD = "hf"  # the engine that all others are compared with
COMMON = ("torch", "transformers")  # packages that every engine needs


class Engine(NamedTuple):
    """A way to search for texts."""

    about: str  # a description
    module: str  # its file, as it is imported
    package: str  # the package that it needs; its version is saved with the predictions
    precision: str = ""  # of the matrix products; empty: that of the model
    automatic: str = ""
    """The type of device on which ``auto`` may choose it where texts are those of ``hf``; empty: nowhere."""
    has_groups: bool = False  # whether it can search with groups of beams
    in_torch: bool = True
    """Whether it computes with the torch model's weights: so validation can use it, and torch knows its memory."""
    needs_drafter: bool = False  # whether it writes only with a drafter that was trained for the model

    @property
    def version(self) -> str | None:
        """The version of its package; None if it is not installed."""
        return installed(self.package)

    @property
    def needs(self) -> str:
        """What must be installed first; empty if nothing."""
        for package in (*COMMON, self.package):
            if installed(package) is None:
                return f"needs the package {package}: pip install 'ngramloss[{EXTRAS[package]}]'"
        return ""

    @property
    def families(self) -> Collection[str] | None:
        """The types of models that it serves, by their ``model_type``; None if all."""
        families: Collection[str] | None = getattr(import_module(self.module), "FAMILIES", None)
        return families

    def function(self, name: str) -> Callable[..., Any]:
        """A function of its file."""
        loaded: Callable[..., Any] = getattr(import_module(self.module), name)
        return loaded


ENGINES = {
    "hf": Engine(
        "the model's own generate, by Hugging Face: the specification", "ngramloss.search.engines.hf", "transformers"
    ),
    "graph": Engine(
        "a beam search wholly on the GPU: several times faster there, the same texts as hf; also groups of beams",
        "ngramloss.search.engines.graph",
        "torch",
        automatic="cuda",
        has_groups=True,
    ),
    "draft": Engine(
        "greedy search in fewer passes, with a drafter that was trained for the model: the same texts as hf",
        "ngramloss.search.engines.draft",
        "torch",
        needs_drafter=True,
    ),
    "ctranslate2": Engine(
        "CTranslate2 in fp32: faster on a CPU, the same texts as hf with most settings",
        "ngramloss.search.engines.ct2",
        "ctranslate2",
        precision="fp32",
        automatic="cpu",
        in_torch=False,
    ),
    "ctranslate2-int8": Engine(
        "CTranslate2 with weights in 8 bits: faster still, texts differ slightly",
        "ngramloss.search.engines.ct2",
        "ctranslate2",
        precision="int8",
        in_torch=False,
    ),
}
"""All engines by name. ``auto`` tries those that are ``automatic``, in this order."""


def engine_choices() -> tuple[str, ...]:
    """What ``generation.engine`` may be."""
    return (AUTO, *ENGINES)


def engines_with_groups() -> list[str]:
    """The engines that can search with groups of beams."""
    return [name for name, engine in ENGINES.items() if engine.has_groups]


def engine_packages() -> list[str]:
    """The packages of engines, besides those that every engine needs."""
    packages = dict.fromkeys(engine.package for engine in ENGINES.values())
    return [package for package in packages if package not in COMMON]


def load_engine(name: str, model: Any, **changes: Any) -> Callable[..., list[list[list[int]]]]:
    """A function: ids of sources → ids of the texts of each, best first, from the start to the end token."""
    from ngramloss.search import engines
    from ngramloss.search.engines.hf import search_of

    return engines.load(name, model, search_of(model, **changes)).write


def raise_if_unknown(name: str) -> None:
    """Raise unless there is an engine of this name, or it is ``auto``."""
    choices = engine_choices()
    if name not in choices:
        raise UserError(f"unknown engine {name!r}. {nearest(name, ENGINES)}Choose from {', '.join(choices)}.")
