"""the name of an engine and a model → a function from source ids to ids of texts, and which engine it is.

``hf`` is the specification. Another engine is one file and one line in ``ENGINES``. The file has these functions:

* ``load(model, search, *, precision, say) → write``, where ``write`` returns for each source the ids of its texts, best
  first, from the start token to the end token. Raises ``UserError`` if it cannot.
* ``unsupported(model, search)``: what it cannot do at all, as clauses.
* ``differences(model, search, *, precision)``: why texts may differ from those of ``hf``, as clauses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.generation.engines.settings import Search
from ngramloss.settings import nearest
from ngramloss.version import EXTRAS, installed

AUTO = "auto"
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of ``generation.precision``, and what torch calls them."""
Write = Callable[[Sequence[Sequence[int]]], list[list[list[int]]]]


class Engine(NamedTuple):
    """A way to search for texts.

    Attributes:
        about: a description.
        module: its file, in this folder.
        package: the package that it needs; its version is saved with the predictions.
        precision: of the matrix products; empty: that of the model.
        automatic: the type of device on which ``auto`` may choose it where texts are those of ``hf``; empty: nowhere.
    """

    about: str
    module: str
    package: str
    precision: str = ""
    automatic: str = ""

    @property
    def version(self) -> str | None:
        """The version of its package; None if it is not installed."""
        return installed(self.package)

    @property
    def needs(self) -> str:
        """What must be installed first; empty if nothing."""
        for package in ("torch", "transformers", self.package):
            if installed(package) is None:
                return f"needs the package {package}: pip install 'ngramloss[{EXTRAS[package]}]'"
        return ""

    def function(self, name: str) -> Callable[..., Any]:
        """A function of its file."""
        loaded: Callable[..., Any] = getattr(import_module(f"{__name__}.{self.module}"), name)
        return loaded


ENGINES = {
    "hf": Engine("the model's own generate, by Hugging Face: the specification", "hf", "transformers"),
    "graph": Engine(
        "a beam search wholly on the GPU: several times faster there, the same texts as hf; also groups of beams",
        "graph",
        "torch",
        automatic="cuda",
    ),
    "ctranslate2": Engine(
        "CTranslate2 in fp32: faster on a CPU, the same texts as hf with most settings",
        "ct2",
        "ctranslate2",
        precision="fp32",
        automatic="cpu",
    ),
    "ctranslate2-int8": Engine(
        "CTranslate2 with weights in 8 bits: faster still, texts differ slightly",
        "ct2",
        "ctranslate2",
        precision="int8",
    ),
}
"""All engines by name. ``auto`` tries those that are ``automatic``, in this order."""


class Loaded(NamedTuple):
    """An engine with its model."""

    name: str
    precision: str
    write: Write

    @property
    def facts(self) -> dict[str, str]:
        """What is saved with the predictions. They are not continued with another engine or precision."""
        return {"name": self.name, "precision": self.precision}


def raise_if_unknown(name: str) -> None:
    """Raise unless there is an engine of this name, or it is ``auto``."""
    if name not in (AUTO, *ENGINES):
        raise UserError(f"unknown engine {name!r}. {nearest(name, ENGINES)}Choose from {', '.join([AUTO, *ENGINES])}.")


def load(name: str, model: Any, search: Search, *, say: Callable[[str], None]) -> Loaded:
    """Load an engine by name, or for ``auto`` the first whose texts are those of ``hf``, and say which one and why.

    Args:
        name: a name in ``ENGINES``, or ``auto``.
        model: a Hugging Face encoder-decoder, on its device.
        search: its search settings.
        say: shows a message to the user.

    Raises:
        UserError: the named engine cannot run here, or cannot search with these settings.
    """
    raise_if_unknown(name)
    return _automatic(model, search, say) if name == AUTO else _named(name, model, search, say)


def _named(name: str, model: Any, search: Search, say: Callable[[str], None]) -> Loaded:
    engine = ENGINES[name]
    if engine.needs:
        raise UserError(f"the engine {name} {engine.needs}.")
    if reasons := list(engine.function("unsupported")(model, search)):
        instead = "" if name == "hf" else " Use --engine hf."
        raise UserError(f"the engine {name} cannot be used: {_joined(reasons)}.{instead}")
    precision = _precision(engine, model)
    write = engine.function("load")(model, search, precision=precision, say=say)
    reasons = list(engine.function("differences")(model, search, precision=precision))
    if reasons:
        say(f"engine {name}: texts may differ from those of hf, because {_joined(reasons)}.")
    return Loaded(name, precision, write)


def _automatic(model: Any, search: Search, say: Callable[[str], None]) -> Loaded:
    problems: list[str] = []
    for name, engine in ENGINES.items():
        if engine.automatic != model.device.type:
            continue
        reasons, precision = _reasons_against(engine, model, search), _precision(engine, model)
        if not reasons:
            try:
                write = engine.function("load")(model, search, precision=precision, say=say)
            except UserError as problem:
                reasons = [str(problem).rstrip(".")]
            else:
                same = "with these settings" if precision == "fp32" else f"but for rounding in {precision}"
                say(
                    f"engine {name} {engine.version}, {precision}: on {DEVICES[engine.automatic]} it is faster than "
                    f"hf, and its texts are the same {same}."
                )
                return Loaded(name, precision, write)
        problems.append(f"{name} is not used: {_joined(reasons)}")
    if problems:
        say(f"engine hf; {'; '.join(problems)}.")
    return _named("hf", model, search, say)


def _reasons_against(engine: Engine, model: Any, search: Search) -> list[str]:
    """Why ``auto`` does not choose an engine, as clauses."""
    if engine.needs:
        return [f"it {engine.needs}"]
    differences = engine.function("differences")(model, search, precision=_precision(engine, model))
    return [*engine.function("unsupported")(model, search), *differences]


def _precision(engine: Engine, model: Any) -> str:
    """The precision in which an engine computes with a model."""
    if engine.precision:
        return engine.precision
    dtype = str(model.dtype).removeprefix("torch.")
    return next((name for name, known in PRECISIONS.items() if known == dtype), dtype)


def _joined(reasons: Sequence[str]) -> str:
    return reasons[0] if len(reasons) == 1 else f"{', '.join(reasons[:-1])} and {reasons[-1]}"


def engine_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The engine that wrote predictions, from their saved settings. Earlier versions, which saved none, had ``hf``."""
    saved = settings.get("engine")
    return saved if isinstance(saved, dict) else {"name": "hf", "precision": "fp32"}
