"""a run or a model, and a data set → predictions.jsonl, with the settings that made it, continued where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import corpus, recipe
from ngramloss.batch import Shape, separator_id
from ngramloss.batch import sources as source_ids
from ngramloss.checkpoints import whole_rows, write_whole
from ngramloss.corpus.sentences import sentences
from ngramloss.generate import summaries
from ngramloss.metrics.scores import fingerprint
from ngramloss.recipe import Data, Generation, Recipe
from ngramloss.version import __version__, installed

LEAD = "lead-3"
SEVERAL_SENTENCES = ("cnndm",)
"""Presets whose data set has summaries of several sentences: one is written a line, where ROUGE-Lsum splits."""

Write = Callable[[Sequence[str]], list[str]]


class Job(NamedTuple):
    """What is written by what.

    Attributes:
        model: a run's folder, a model's folder or hub id, or ``lead-3``.
        data: which data, and how they become tokens.
        split: of the data.
        generation: how to search; None takes the model's own ``generation_config``.
        preset: whose settings they are.
        limit: at most so many documents.
        batch_size: documents at a time.
    """

    model: str
    data: Data
    split: str
    generation: Generation | None
    preset: str | None
    limit: int
    batch_size: int


def job(
    model: str, *, data: str | None = None, split: str = "test", preset: str | None = None,
    overrides: Sequence[str] = (), limit: int = 0, batch_size: int = 16,
) -> Job:
    """The job of a run with its own settings, or of another model with a preset's or its own."""
    run = Path(model)
    own: Recipe | None = None
    if (run / "recipe.toml").is_file():
        if not (run / "model").is_dir():
            raise FileNotFoundError(f"{run} is not finished: the same ngramloss train command continues it.")
        own = recipe.load(str(run / "recipe.toml"))
    for setting in overrides:
        if not setting.startswith(("generation.", "data.")):
            raise ValueError(f"--set takes generation.* and data.* here, got {setting!r}.")
    if data is None and own is None and preset is None:
        raise ValueError("say which documents with --data, or choose a --preset.")
    # A model that was trained elsewhere knows no separators before sentences.
    base = own or recipe.load(preset or "xsum", ["data.separator=none"])
    if preset is not None:
        base = dataclasses.replace(base, generation=recipe.load(preset).generation)
    settings = recipe.changed(base, overrides)
    chosen = settings.data if data is None else dataclasses.replace(settings.data, name=data)
    searched = preset is not None or any(setting.startswith("generation.") for setting in overrides)
    return Job(model, chosen, split, settings.generation if searched else None, preset, limit, batch_size)


def write_predictions(work: Job, folder: Path, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write ``predictions.jsonl``, ``references.jsonl`` and ``generation.json``, or go on where this was stopped.

    Under torchrun each process takes its share of the documents. No id is ever written twice: documents that are done
    are read from the files of the stopped job.

    Returns:
        The path of the predictions.
    """
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    finished = folder / "predictions.jsonl"
    split = corpus.load(
        work.data.name, work.split, source=work.data.source or None, target=work.data.target or None,
        on_bad_row=work.data.on_bad_row, limit=work.limit,
    )
    write, described = _writer(work)
    settings = {**described, "data": work.data.name, "split": work.split, "fingerprint": split.fingerprint,
                "documents": len(split.examples), "preset": work.preset, "versions": _versions()}
    folder.mkdir(parents=True, exist_ok=True)
    if _begun(folder, settings) and finished.exists():
        return finished
    if rank == 0:
        write_whole(folder / "generation.json", json.dumps(settings, indent=1))
        rows = ({"id": one.id, "reference": one.target, "document": one.source} for one in split.examples)
        write_whole(folder / "references.jsonl", "".join(_line(row) for row in rows))
    partial = folder / f"predictions.partial-{rank}.jsonl"
    if partial.exists():   # a line that a kill cut short is cut off
        write_whole(partial, "".join(_line(row) for row in whole_rows(partial)))
    done = _done(folder)
    mine = [example for example in split.examples[rank::processes] if example.id not in done]
    mine.sort(key=lambda example: len(example.source), reverse=True)   # like lengths together, a lack of memory first
    with partial.open("a", encoding="utf-8") as file:
        for start in range(0, len(mine), work.batch_size):
            batch = mine[start : start + work.batch_size]
            texts = write([example.source for example in batch])
            pairs = zip(batch, texts, strict=True)
            file.write("".join(_line({"id": one.id, "prediction": text}) for one, text in pairs))
            file.flush()
            if progress is not None:
                progress(len(batch), len(mine))
    if rank == 0:
        _merge(folder, [example.id for example in split.examples])
    return finished


def _merge(folder: Path, ids: Sequence[str]) -> None:
    """Wait until every document is done, then write them in their order."""
    while len(done := _done(folder)) < len(ids):
        time.sleep(0.5)
    write_whole(folder / "predictions.jsonl", "".join(_line({"id": key, "prediction": done[key]}) for key in ids))
    for path in folder.glob("predictions.partial-*.jsonl"):
        path.unlink()


def _begun(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether this job was begun here. Another one's files are not mixed with it."""
    path = folder / "generation.json"
    begun = list(folder.glob("predictions*.jsonl"))
    if not path.exists() or not begun:
        return False
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [key for key in settings if before.get(key) != settings[key] and key != "versions"]
    if changed:
        told = "; ".join(f"{key}: {before.get(key)!r}, now {settings[key]!r}" for key in changed)
        raise ValueError(f"{folder} holds predictions made otherwise ({told}). Choose another --out, or delete them.")
    return True


def _done(folder: Path) -> dict[str, str]:
    """What is written already, by id."""
    paths = sorted(folder.glob("predictions.partial-*.jsonl"))
    return {row["id"]: row["prediction"] for path in paths for row in whole_rows(path)}


def _writer(work: Job) -> tuple[Write, dict[str, Any]]:
    """Documents → summaries, and what could change them."""
    if work.model == LEAD:
        return (lambda texts: ["\n".join(sentences(text)[:3]) for text in texts]), {"model": LEAD, "sentences": "pysbd"}
    import torch

    run = Path(work.model) / "model"
    name = str(run) if run.is_dir() else work.model
    model, tokenizer = _loaded(name)
    if work.generation is not None:
        from ngramloss.models import prepare_generation

        prepare_generation(model, work.generation)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device)
    data = work.data
    shape = Shape.of(data)
    separator = separator_id(tokenizer, data.separator)
    by_line = work.preset in SEVERAL_SENTENCES

    def write(texts: Sequence[str]) -> list[str]:
        written = summaries(model, tokenizer, source_ids(texts, tokenizer, shape, separator), batch_size=len(texts))
        return ["\n".join(sentences(text)) for text in written] if by_line else written

    weights = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    search = model.generation_config.to_diff_dict()
    search.pop("transformers_version", None)
    commit = getattr(model.config, "_commit_hash", None)
    return write, {
        "model": work.model, "weights": fingerprint(weights) if weights else commit, "generation": search,
        "shape": dataclasses.asdict(shape), "sentence_a_line": by_line,
    }  # fmt: skip


def _loaded(name: str) -> tuple[Any, Any]:
    from ngramloss import models
    from ngramloss.recipe import Model

    tokenizer, _ = models.load_tokenizer(Model(name=name), lambda: (), "")
    return models.load(Model(name=name), tokenizer), tokenizer


def _line(row: Mapping[str, str]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _versions() -> dict[str, str]:
    others = {name: installed(name) for name in ("torch", "transformers", "tokenizers")}
    own = {"ngramloss": __version__, "python": platform.python_version()}
    return own | {name: number for name, number in others.items() if number is not None}
