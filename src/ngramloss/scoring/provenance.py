"""a folder with predictions → the system that wrote them: label, seed, search settings, log, speed."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.generation.baselines import is_baseline
from ngramloss.metrics.scores import signature
from ngramloss.output import escape
from ngramloss.recipe import TASKS
from ngramloss.search.registry import engine_packages
from ngramloss.search.search import BEAMS, BESIDE, SAMPLING, USUAL, effective
from ngramloss.storage.files import object_or_empty, parse_toml, read_json, whole_rows
from ngramloss.storage.run_folder import RunFolder

READING = ("max_source", "prefix", "prompt")
"""How a model reads sources; beside the settings of the search, that is how outputs are decoded."""
DECODING = (*READING, "precision", *USUAL, *BESIDE, "utility", "system")
"""What is compared of two systems, by its name in a signature."""
SHOWN = 3  # Systems that a difference names, at most
LONGEST = 40  # Characters of a prompt in a signature


class Provenance(NamedTuple):
    """What is known about the system in a folder. Fields that another tool did not write are empty."""

    folder: Path  # the folder
    label: str  # the objective, if the model trained here wrote the predictions; else the name of model or folder
    seed: int | None  # the seed of the training
    setup: str  # all settings but the seed, equal for runs that differ only in the seed; empty without a recipe
    recipe: dict[str, Any]  # the training settings of the model that wrote the predictions
    generation: dict[str, Any]  # the settings of ``ngramloss generate``
    own: bool = True  # false if another model than the one trained in this folder wrote the predictions

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


def run(folder: Path) -> Provenance:
    """Read a folder's settings."""
    about = RunFolder(folder)
    file = about.recipe  # read first: a new training deletes the predictions before it writes its recipe
    recipe = parse_toml(file.read_bytes(), str(file)) if file.is_file() else {}
    generation = _json(about.generation)
    if "engine" in generation:  # earlier versions did not save defaults
        generation["generation"] = effective(_section(generation, "generation"))
    own = not recipe or about.wrote_predictions
    recipe = recipe if own else {}
    train = _section(recipe, "train")
    seed = train.get("seed")
    label = recipe.get("objective") or Path(str(generation.get("model", ""))).name or folder.resolve().name
    shared = {name: generation.get(name) for name in ("generation", "data", "split", "fingerprint")}
    searched = {key: value for key, value in _section(recipe, "generation").items() if key not in ("engine", "drafter")}
    seedless = {key: value for key, value in train.items() if key != "seed"}
    trained = {**recipe, "task": _task(recipe), "generation": searched, "train": seedless}
    setup = json.dumps([trained, shared], sort_keys=True, default=str) if recipe else ""  # default=str for TOML's dates
    name = escape.name(str(label))
    return Provenance(folder, name, seed if isinstance(seed, int) else None, setup, recipe, generation, own)


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
    sentences = object_or_empty(RunFolder(folder).prepared).get("used")  # damaged, it is not needed for anything else
    return [sentence for sentence in sentences if isinstance(sentence, str)] if isinstance(sentences, list) else []


def docs_per_second(folder: Path) -> float | None:
    """Training speed in documents per second: the median of the log."""
    speeds = [row["docs_per_second"] for row in log(folder) if isinstance(row.get("docs_per_second"), float)]
    return statistics.median(speeds) if speeds else None


def token_counts(folder: Path) -> dict[str, int]:
    """The number of generated tokens by id, where predictions.jsonl has it."""
    rows = whole_rows(RunFolder(folder).predictions)
    return {str(row["id"]): row["tokens"] for row in rows if "id" in row and isinstance(row.get("tokens"), int)}


def written_by(run: Provenance) -> str:
    """The signature of a generation: model, data, search settings and versions; empty if unknown.

    Example:
        >>> settings = {"model": "m", "weights": "3f2a91c", "generation": {"num_beams": 6, "eos_token_id": 2}}
        >>> written_by(Provenance(Path("m"), "m", None, "", {}, settings))
        'generation|model:m|weights:3f2a91c|num_beams:6'
    """
    known = run.generation
    if not known:
        return ""
    facts = {name: known.get(name) for name in ("model", "weights", "data", "split", "documents", "fingerprint")}
    engine = _section(known, "engine")
    facts |= {"engine": engine.get("name"), "precision": engine.get("precision"), "seed": known.get("seed")}
    facts |= {name: text for name, text in _reading(_section(known, "shape")).items() if text}
    search = {key: run.search[key] for key in (*USUAL, *BESIDE) if run.search.get(key) is not None}
    search = {key: value for key, value in search.items() if key in USUAL or value != BESIDE[key]}
    if scores := _section(known, "utility").get("scores"):
        search["utility"] = "+".join(map(str, scores))
    if options := _section(known, "system"):
        search["system"] = ",".join(f"{key}={value}" for key, value in options.items())
    versions = _section(known, "versions")
    used = {name: versions[name] for name in (*engine_packages(), "transformers", "ngramloss") if name in versions}
    facts = {name: value for name, value in facts.items() if value is not None}
    return escape.name(signature("generation", **facts | search | used))


def _reading(shape: dict[str, Any]) -> dict[str, str]:
    """How a model reads sources, as short texts without the signs of a signature."""
    prompt = _section(shape, "prompt")
    whole = "messages" if prompt.get("messages") else f"{prompt.get('before')}{{source}}{prompt.get('after')}"
    texts = {**shape, "prompt": whole + str(prompt.get("lead") or "") if prompt else ""}
    return {name: _short(str(texts.get(name) or "")) for name in READING}


def _short(text: str) -> str:
    """The text with line ends as ``\\n``; the end of a long one is a hash."""
    plain = json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "¦")
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}… {hashlib.sha256(text.encode()).hexdigest()[:7]}"


def decoded_differently(signatures: Iterable[tuple[str, str]]) -> list[str]:
    """A warning that names every difference in how outputs were decoded; none if there is no difference.

    What a signature of :func:`written_by` does not name has its default. Texts that no search wrote are not compared.

    >>> signatures = [("a", "generation|num_beams:4"), ("b", "generation|num_beams:1"), ("c", "generation|model:m")]
    >>> decoded_differently(signatures)
    ['warning: decoded differently, which may change scores by itself: num_beams 4 (a) against 1 (b).']
    """
    systems = [(name, _decoding(text)) for name, text in signatures]
    found = []
    for key in DECODING:
        values: dict[str, dict[str, None]] = {}
        for name, known in systems:
            if key in known:
                values.setdefault(known[key], {})[name] = None
        if len(values) > 1:
            named = {value: ", ".join(n) if len(n) <= SHOWN else f"{len(n)} systems" for value, n in values.items()}
            found.append(f"{key} {' against '.join(f'{value} ({names})' for value, names in named.items())}")
    return [f"warning: decoded differently, which may change scores by itself: {'; '.join(found)}."] if found else []


def _decoding(text: str) -> dict[str, str]:
    """What a signature says of decoding, with defaults, without what has no effect; empty without a search."""
    parts = _parts(text)
    if "num_beams" not in parts and "engine" not in parts:
        return {}
    known = {name: value for name, value in parts.items() if name in DECODING}
    if "engine" in parts:  # a search of our own has no other settings than those that it names
        known = _parts(signature("", **USUAL, **BESIDE)) | known
    if "max_source" in parts:
        known = {"prefix": "none", "prompt": "none"} | known
    for length in ("min", "max"):
        tokens = known.pop(f"{length}_new_tokens", "None")
        known |= {f"{length}_length": tokens} if tokens != "None" else {}
    without = [*(BEAMS if known.get("num_beams") == "1" else ())]
    without += SAMPLING if known.get("do_sample") != "yes" else ()
    return {name: value for name, value in known.items() if name not in without}


def _parts(text: str) -> dict[str, str]:
    parts = dict(part.partition(":")[::2] for part in text.split("|")[1:])
    return {name: value.removesuffix(".0") for name, value in parts.items()}


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}
