"""the folder of a run → its documents and its decoding, for another model that is compared with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ngramloss import recipe
from ngramloss.data.data_sets import missing
from ngramloss.errors import MissingFileError
from ngramloss.output.console import logger
from ngramloss.recipe import PRECISIONS, Model, Recipe
from ngramloss.search.search import BESIDE, SAMPLING, effective
from ngramloss.storage.files import read_object
from ngramloss.storage.run_folder import RunFolder

LENGTHS = {"min_length": "min_new_tokens", "max_length": "max_new_tokens"}
"""A length → its name where it does not count a prompt."""


def read_like(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The settings of a run, and what it recorded of its own predictions, if it has some."""
    run = RunFolder(folder)
    if not run.path.exists():
        raise MissingFileError(missing(run.path))
    if not run.recipe.is_file():
        raise MissingFileError(f"--like takes a run's folder, and {run.path} has no {run.recipe.name}.")
    recorded = read_object(run.generation) if run.generation.is_file() else {}
    return recipe.load(str(run.recipe), objective=False), recorded


def like_documents(base: Recipe, theirs: Recipe) -> Recipe:
    """The settings with the data and the task of a run."""
    data = dataclasses.replace(
        theirs.data, **{name: getattr(base.data, name) for name in recipe.affecting("tokens", section="data")}
    )
    return dataclasses.replace(base, data=data, task=theirs.task)


def like_decoding(
    base: Recipe, theirs: Recipe, recorded: dict[str, Any], *, given: Collection[str], loading: Model | None
) -> Recipe:
    """The settings with a run's search, precision, source limit and prompt, all logged; settings that were given win.

    ``recorded`` is of its predictions, by default its recipe's; ``loading`` is None for a run, which reads as trained.
    """
    search, others = _search(theirs, recorded)
    data = {"max_source": recorded.get("shape", {}).get("max_source", theirs.data.max_source)}
    prompts = {name: getattr(theirs.data, name) for name in ("prompt", "instruction", "prefix")}
    if loading is not None and any(prompts.values()):
        from ngramloss.models.loading import is_causal, load_config

        causal = is_causal(load_config(loading, verb="generate"))
        data |= {name: value for name, value in prompts.items() if value and causal == (name != "prefix")}
    found = dataclasses.replace(
        base, data=dataclasses.replace(base.data, **data), generation=dataclasses.replace(base.generation, **search)
    )
    taken = {f"generation.{name}": value for name, value in search.items()}
    taken |= {f"data.{name}": value for name, value in data.items()}
    said = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in taken.items() if key not in given)
    others += [f"data.{name} {value!r}" for name, value in prompts.items() if getattr(found.data, name) != value]
    logger.info(f"decoded like the run: {said}." + (f" Not taken: {', '.join(others)}." if others else ""))
    return found


def _search(theirs: Recipe, recorded: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The search of a run by the names of a recipe, and what else it has, which ``--set`` cannot give."""
    usual = {name: value for name, value in dataclasses.asdict(theirs.generation).items() if name != "engine"}
    if not recorded and not theirs.system:
        return usual, []
    if not {"engine", "generation"} <= recorded.keys():
        return {}, [f"its search, which {theirs.system or recorded.get('model')} has by itself"]
    saved = effective(recorded["generation"])
    saved |= {name: saved[other] for name, other in LENGTHS.items() if saved.get(other)}
    saved |= {"length_penalty": float(saved["length_penalty"]), "precision": recorded["engine"].get("precision")}
    saved["renormalize"] = saved.get("renormalize_logits", False)
    search = {name: saved[name] for name in usual if type(saved[name]) is type(usual[name])}
    if search.get("precision") not in PRECISIONS:
        search.pop("precision", None)
    hidden = (*LENGTHS.values(), "renormalize_logits", *(SAMPLING if not saved.get("do_sample") else ()))
    others = {name: saved[name] for name in usual if name not in search}
    others |= {
        name: saved[name]
        for name, default in BESIDE.items()
        if name not in hidden and saved.get(name, default) != default
    }
    return search, [f"{name} {value}" for name, value in others.items()]
