"""a folder with predictions → the system that wrote them: label, seed, search settings, log, speed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.engine_registry import engine_packages
from ngramloss.errors import UserError
from ngramloss.generation.baselines import is_baseline
from ngramloss.metrics.scores import signature
from ngramloss.output import escape
from ngramloss.recipe import TASKS
from ngramloss.storage.files import parse_toml, read_json, whole_rows
from ngramloss.storage.run_folder import RunFolder

SEARCH = (
    "num_beams",
    "length_penalty",
    "min_length",
    "max_length",
    "min_new_tokens",
    "max_new_tokens",
    "early_stopping",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "num_beam_groups",
    "diversity_penalty",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "min_p",
    "renormalize_logits",
    "num_return_sequences",
    "rerank",
)
"""Settings of a generation_config that change the output."""


class Run(NamedTuple):
    """What is known about the system in a folder. Fields that another tool did not write are empty.

    Attributes:
        folder: the folder.
        label: the objective, if the model trained in this folder wrote the predictions; otherwise the name of the model
            that wrote them, or of the folder.
        seed: the seed of the training.
        setup: all settings but the seed, equal for runs that differ only in the seed; empty without a recipe.
        recipe: the training settings of the model that wrote the predictions.
        generation: the settings of ``ngramloss generate``.
        own: false if another model than the one trained in this folder wrote the predictions.
    """

    folder: Path
    label: str
    seed: int | None
    setup: str
    recipe: dict[str, Any]
    generation: dict[str, Any]
    own: bool = True

    @property
    def is_baseline(self) -> bool:
        """Whether a baseline, and no model, wrote the predictions."""
        return is_baseline(str(self.generation.get("model", "")))

    @property
    def task(self) -> str:
        """What the texts are, such as summaries: one of ``TASKS``."""
        return _task(self.generation)

    @property
    def search(self) -> dict[str, Any]:
        """The search settings: beams, length limits, penalties."""
        return _section(self.generation, "generation")


def run(folder: Path) -> Run:
    """Read a folder's settings."""
    about = RunFolder(folder)
    recipe = _toml(about.recipe)  # first: a new training deletes the predictions before it writes its recipe
    generation = _json(about.generation)
    own = not recipe or about.wrote_predictions
    recipe = recipe if own else {}
    train = _section(recipe, "train")
    seed = train.get("seed")
    label = recipe.get("objective") or Path(str(generation.get("model", ""))).name or folder.resolve().name
    shared = {name: generation.get(name) for name in ("generation", "data", "split", "fingerprint")}
    trained = {
        **recipe,
        "task": _task(recipe),
        "generation": {key: value for key, value in _section(recipe, "generation").items() if key != "engine"},
        "train": {key: value for key, value in train.items() if key != "seed"},
    }
    setup = json.dumps([trained, shared], sort_keys=True, default=str) if recipe else ""  # default=str for TOML's dates
    name = escape.name(str(label))
    return Run(folder, name, seed if isinstance(seed, int) else None, setup, recipe, generation, own)


def task(folder: Path) -> str:
    """The task of a folder's predictions, which ``generate`` takes from the recipe; summarisation if none is named."""
    return _task(_json(RunFolder(folder).generation))


def _task(settings: dict[str, Any]) -> str:
    given = settings.get("task")
    return given if given in TASKS else TASKS[0]


def log(folder: Path) -> list[dict[str, Any]]:
    """All lines of the training log."""
    return whole_rows(RunFolder(folder).log)


def used(folder: Path) -> list[str]:
    """What a training used of its data, in sentences; none if the run does not say."""
    try:
        sentences = _json(RunFolder(folder).prepared).get("used")
    except UserError:  # damaged, and not needed for anything else
        return []
    return [sentence for sentence in sentences if isinstance(sentence, str)] if isinstance(sentences, list) else []


def docs_per_second(folder: Path) -> float | None:
    """Training speed in documents per second: the median of the log."""
    speeds = [row["docs_per_second"] for row in log(folder) if isinstance(row.get("docs_per_second"), float)]
    return statistics.median(speeds) if speeds else None


def token_counts(folder: Path) -> dict[str, int]:
    """The number of generated tokens by id, where predictions.jsonl has it."""
    rows = whole_rows(RunFolder(folder).predictions)
    return {str(row["id"]): row["tokens"] for row in rows if "id" in row and isinstance(row.get("tokens"), int)}


def written_by(run: Run) -> str:
    """The signature of a generation: model, data, search settings and versions; empty if unknown.

    Example:
        >>> settings = {"model": "m", "weights": "3f2a91c", "generation": {"num_beams": 6, "eos_token_id": 2}}
        >>> written_by(Run(Path("m"), "m", None, "", {}, settings))
        'generation|model:m|weights:3f2a91c|num_beams:6'
    """
    known = run.generation
    if not known:
        return ""
    facts = {
        "model": known.get("model"),
        "weights": known.get("weights"),
        "data": known.get("data"),
        "split": known.get("split"),
        "documents": known.get("documents"),
        "fingerprint": known.get("fingerprint"),
    }
    engine = _section(known, "engine")
    facts |= {"engine": engine.get("name"), "precision": engine.get("precision"), "seed": known.get("seed")}
    search = {key: run.search[key] for key in SEARCH if run.search.get(key) is not None}
    if scores := _section(known, "utility").get("scores"):
        search["utility"] = "+".join(map(str, scores))
    versions = _section(known, "versions")
    fields = (
        {name: value for name, value in facts.items() if value is not None}
        | search
        | {name: versions[name] for name in (*engine_packages(), "transformers", "ngramloss") if name in versions}
    )
    return escape.name(signature("generation", **fields))


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    """A table within a table; empty if there is none, as in files of other tools."""
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    return parse_toml(path.read_bytes(), str(path)) if path.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}
