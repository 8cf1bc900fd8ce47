"""the name of an engine and a model → a function from source ids to ids of texts, and which engine it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.recipe import AUTO, PRECISIONS
from ngramloss.search.registry import ENGINES, STANDARD, Engine, engines_with_groups, raise_if_unknown
from ngramloss.search.search import Search

DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
NO_GROUPS = "Without groups of beams, any engine will do; for candidates use --search sample or --search beams."
Write = Callable[..., list[list[list[int]]]]
"""Sources → the ids of their texts. That of ``hf`` also takes tensors of what else a model reads, by name."""


class Loaded(NamedTuple):
    """An engine with its model."""

    name: str  # of the engine
    precision: str  # in which it computes
    write: Write  # sources → the ids of the texts of each, best first
    note: str = ""
    """Which engine it is and why, or how its texts differ from those of ``hf``; empty if there is nothing to say."""

    @property
    def facts(self) -> dict[str, str]:
        """What is saved with the predictions. They are not continued with another engine or precision."""
        return {"name": self.name, "precision": self.precision}


def load(name: str, model: Any, search: Search) -> Loaded:
    """An engine by name, or for ``auto`` the first that writes the texts of ``hf``. Raises if it cannot run here."""
    raise_if_unknown(name)
    if search.groups > 1:
        check_groups(name)
        (name, *_) = engines_with_groups() if name == AUTO else [name]
    return _automatic(model, search, list(ENGINES)) if name == AUTO else _named(name, model, search)


def load_in_training(name: str, model: Any, search: Search) -> Loaded:
    """``hf``, or a faster engine that reads weights in place: others would convert them at each validation."""
    from torch.distributed.fsdp import FSDPModule

    sharded = isinstance(model, FSDPModule)
    names = [key for key, engine in ENGINES.items() if engine.in_torch and name in (AUTO, key) and not sharded]
    return _automatic(model, search, names)


def check_groups(name: str, model_type: str | None = None) -> None:
    """Raise if an engine, or for ``auto`` every engine, has no groups of beams for this kind of model."""
    able = engines_with_groups()
    if name != AUTO and name not in able:
        raise UserError(
            f"groups of beams need the engine {' or '.join(able)}, not {name}. Leave --engine out. {NO_GROUPS}"
        )
    for key in able if name == AUTO else [name]:
        families = ENGINES[key].families
        if model_type is not None and families is not None and model_type not in families:
            raise UserError(
                f"groups of beams need the engine {key}, which serves {', '.join(families)}, not {model_type}. "
                f"{NO_GROUPS}"
            )


def _named(name: str, model: Any, search: Search) -> Loaded:
    engine = ENGINES[name]
    if engine.needs:
        raise UserError(f"the engine {name} {engine.needs}.")
    if reasons := list(engine.function("unsupported")(model, search)):
        if search.groups > 1:
            raise UserError(
                f"groups of beams need the engine {name}, which cannot be used: {'; '.join(reasons)}. {NO_GROUPS}"
            )
        instead = "" if name == STANDARD else f" Use --engine {STANDARD}."
        raise UserError(f"the engine {name} cannot be used: {_joined(reasons)}.{instead}")
    precision = _precision(engine, model)
    write = engine.function("load")(model, search, precision=precision)
    reasons = list(engine.function("differences")(model, search, precision=precision))
    note = f"engine {name}: outputs may differ from {STANDARD}'s, because {_joined(reasons)}." if reasons else ""
    return Loaded(name, precision, write, note)


def _automatic(model: Any, search: Search, names: Sequence[str]) -> Loaded:
    """The first of these engines that is faster here than ``hf`` and writes the same texts; otherwise ``hf``."""
    problems: list[str] = []
    for name in names:
        engine = ENGINES[name]
        if engine.automatic != model.device.type:
            continue
        reasons, precision = _reasons_against(engine, model, search), _precision(engine, model)
        if not reasons:
            try:
                write = engine.function("load")(model, search, precision=precision)
            except UserError as problem:
                reasons = [str(problem).rstrip(".")]
            else:
                same = "with these settings" if precision == "fp32" else f"except for rounding in {precision}"
                return Loaded(
                    name,
                    precision,
                    write,
                    f"engine {name} {engine.version}, {precision}: on {DEVICES[engine.automatic]} it is faster than "
                    f"{STANDARD}, and its texts are the same {same}.",
                )
        problems.append(f"{name} is not used: {_joined(reasons)}")
    note = f"engine {STANDARD}; {'; '.join(problems)}." if problems else ""
    return _named(STANDARD, model, search)._replace(note=note)


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
