"""a folder with predictions → what it says of the system that wrote them: label, seed, search, log, speed."""

from __future__ import annotations

import json
import statistics
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import escape
from ngramloss.errors import UserError
from ngramloss.files import whole_rows
from ngramloss.generation.baselines import is_baseline
from ngramloss.metrics.scores import signature
from ngramloss.run_folder import RunFolder

SEARCH = (
    "num_beams", "length_penalty", "min_length", "max_length", "min_new_tokens", "max_new_tokens", "early_stopping",
    "no_repeat_ngram_size", "repetition_penalty", "num_beam_groups", "diversity_penalty", "do_sample", "temperature",
    "top_k", "top_p", "typical_p", "min_p",
)  # fmt: skip
"""Settings of a generation_config that change what is written."""


class Run(NamedTuple):
    """What a folder says of itself. A folder of another tool says less: then fields are empty.

    Attributes:
        folder: where it is.
        label: the objective, where the model that was trained here wrote the predictions; else the name of the model
            that did, else the folder's.
        seed: of the training.
        kind: everything but the seed, equal for the seeds of one system; empty where there is no recipe.
        recipe: the settings of the training of what wrote the predictions.
        generation: the settings of the writing.
        own: whether the training in this folder, if there was one, is that of what wrote the predictions.
    """

    folder: Path
    label: str
    seed: int | None
    kind: str
    recipe: dict[str, Any]
    generation: dict[str, Any]
    own: bool = True

    @property
    def is_baseline(self) -> bool:
        """Whether a system without a model wrote this."""
        return is_baseline(str(self.generation.get("model", "")))

    @property
    def search(self) -> dict[str, Any]:
        """How was searched: beams, limits, penalties."""
        return _section(self.generation, "generation")


def run(folder: Path) -> Run:
    """Read what there is."""
    about = RunFolder(folder)
    recipe = _toml(about.recipe)   # first: a new training deletes the predictions before it writes its recipe
    generation = _json(about.generation)
    own = not recipe or about.wrote_predictions
    recipe = recipe if own else {}
    train = _section(recipe, "train")
    seed = train.get("seed")
    label = recipe.get("objective") or Path(str(generation.get("model", ""))).name or folder.resolve().name
    shared = {name: generation.get(name) for name in ("generation", "data", "split", "fingerprint")}
    model = {key: value for key, value in _section(recipe, "model").items() if key != "trust_remote_code"}   # not now
    trained = {**recipe, "model": model, "train": {key: value for key, value in train.items() if key != "seed"}}
    kind = json.dumps([trained, shared], sort_keys=True, default=str) if recipe else ""   # TOML has dates
    name = escape.name(str(label))
    return Run(folder, name, seed if isinstance(seed, int) else None, kind, recipe, generation, own)


def log(folder: Path) -> list[dict[str, Any]]:
    """Every line of the training's log."""
    return whole_rows(RunFolder(folder).log)


def docs_per_second(folder: Path) -> float | None:
    """Documents a second of the training, the median of its log."""
    speeds = [row["docs_per_second"] for row in log(folder) if isinstance(row.get("docs_per_second"), float)]
    return statistics.median(speeds) if speeds else None


def token_counts(folder: Path) -> dict[str, int]:
    """How many tokens were written for each id, where the writer said so."""
    rows = whole_rows(RunFolder(folder).predictions)
    return {str(row["id"]): row["tokens"] for row in rows if "id" in row and isinstance(row.get("tokens"), int)}


def written_by(run: Run) -> str:
    """What wrote the predictions and how, for a paper; empty where nothing is known.

    Example:
        >>> settings = {"model": "m", "weights": "3f2a91c", "generation": {"num_beams": 6, "eos_token_id": 2}}
        >>> written_by(Run(Path("m"), "m", None, "", {}, settings))
        'generation|model:m|weights:3f2a91c|num_beams:6'
    """
    known = run.generation
    if not known:
        return ""
    facts = {"model": known.get("model"), "weights": known.get("weights"), "data": known.get("data"),
             "split": known.get("split"), "documents": known.get("documents"), "fingerprint": known.get("fingerprint")}
    search = {key: run.search[key] for key in SEARCH if run.search.get(key) is not None}
    versions = _section(known, "versions")
    fields = {name: value for name, value in facts.items() if value is not None} | search | {
        name: versions[name] for name in ("transformers", "ngramloss") if name in versions}
    return escape.name(signature("generation", **fields))


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    """A table within a table; empty where a file of another tool has something else there."""
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as mistake:
        raise UserError(f"{path} is not TOML: {str(mistake).rstrip('.')}.") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as mistake:
        raise UserError(f"{path} is not JSON: {mistake}.") from None
    return content if isinstance(content, dict) else {}
