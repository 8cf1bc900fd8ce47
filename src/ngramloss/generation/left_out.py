"""runs that left out parts of their training rows → of which part each writes; which sources a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngramloss import recipe
from ngramloss.data import Example, Split, fingerprint, in_part, load_split
from ngramloss.data.candidates import source_hash
from ngramloss.errors import UserError
from ngramloss.generation.job import Job
from ngramloss.output.console import logger
from ngramloss.recipe import Recipe
from ngramloss.settings import part_of
from ngramloss.storage.files import object_or_empty
from ngramloss.storage.run_folder import RunFolder

LEAVE_OUT = "data.leave_out"


def parts_of(works: Sequence[Job]) -> list[str]:
    """The part of the training rows that each run left out, ``K/N``, or none; raises unless all are covered once."""
    if len(works) == 1:
        return [works[0].data.leave_out if works[0].split == "train" else ""]
    if works[0].split != "train":
        raise UserError(f"several runs need --split train, of which each left out a part, got {works[0].split!r}.")
    for work in works:
        if not work.data.leave_out:
            raise UserError(
                f"{work.model} left out no part of its training rows ({LEAVE_OUT}), or --data chooses other data. "
                "Several runs generate for the training rows, each for the part that it has not seen. Leave --data "
                f"out, train each run with another part, such as --set {LEAVE_OUT}=1/{len(works)}, or give one model."
            )
    parts = {work.model: work.data.leave_out for work in works}
    listed = ", ".join(f"{work.model} {work.data.leave_out}" for work in works)
    if len(parts) < len(works) or len({*parts.values()}) < len(works):
        raise UserError(f"several runs left out the same part of the training rows ({listed}). Give one for each.")
    counts = {count for _, count in map(part_of, parts.values())}  # type: ignore[misc]
    if len(counts) > 1:
        raise UserError(f"runs left out parts of different sizes ({listed}). Train them with the same N in K/N.")
    (count,) = counts
    needed = [f"{number}/{count}" for number in range(1, count + 1)]
    if missing := [part for part in needed if part not in parts.values()]:
        raise UserError(
            f"no run left out part {' and '.join(missing)} of the training rows ({listed}), so they would get no "
            f"candidates. Train a run with --set {LEAVE_OUT}={missing[0]}, or give one run, for its part alone."
        )
    first, *others = (_recipe(RunFolder(Path(work.model))) for work in works)
    for work, other in zip(works[1:], others, strict=True):
        changes = [
            change
            for change in recipe.differences(first, other)
            if change.startswith(("data.", "generation.", "task:")) and not change.startswith(f"{LEAVE_OUT}:")
        ]
        if changes:
            raise UserError(
                f"{work.model} and {works[0].model} have different settings ({'; '.join(changes)}), so their "
                f"candidates cannot be combined. Train both with the same settings, except {LEAVE_OUT}."
            )
    return list(parts.values())


def only_part(split: Split, part: str, model: str) -> Split:
    """The rows that a run left out, of which alone it writes."""
    kept = [example for example in split.examples if in_part(example.id, part)]
    number, count = part_of(part) or (1, 2)
    others = ", ".join(f"{other}/{count}" for other in range(1, count + 1) if other != number)
    if not kept:
        raise UserError(f"none of the {len(split.examples):,} rows is in part {part}, which {model} left out.")
    logger.info(
        f"{model} was trained without part {part} of the training rows, so it generates for these {len(kept):,} of "
        f"{len(split.examples):,} rows. For the others, also give runs with {LEAVE_OUT}={others}; with --data NAME it "
        "generates for all rows, and marks those that it was trained on."
    )
    return split._replace(examples=kept, fingerprint=fingerprint(kept))


def trained_sources(model: str, split: Split) -> set[str] | None:
    """Hashes of the sources that a run's folder, and the runs it began with, were trained on; None if not known."""
    run = _run(model)
    if run is None:
        return None
    settings, prepared = _recipe(run), object_or_empty(run.prepared)
    examples = _trained_examples(prepared, settings, split)
    if examples is None:
        return None
    found = {source_hash(example) for example in examples}
    base = settings.model.encoder or settings.model.name
    if _run(base) is not None:
        earlier = trained_sources(base, split)
        return None if earlier is None else found | earlier
    was_folder = "model: commit" not in prepared.get("made_of", {"model: commit": ""}) and base != "scratch"
    return None if was_folder and not Path(base).expanduser().is_dir() else found  # None: it may have been a run's


def check_left_out(
    examples: Sequence[Example], works: Sequence[Job], parts: Sequence[str], seen: Sequence[set[str] | None]
) -> None:
    """Warn of sources that a run left out, yet was trained on (``seen``); raises if left-out ones are not known."""
    for work, part, sources in zip(works, parts, seen, strict=True):
        if not part:
            continue
        if sources is None:
            raise UserError(
                f"cannot check that {work.model} was trained without part {part}: its training data, or the data of "
                "the run that it started from, have changed or cannot be read. Restore them, or train it again."
            )
        own = [example for example in examples if in_part(example.id, part)]
        if again := [example.id for example in own if source_hash(example) in sources]:
            logger.warning(
                f"{work.model} left out part {part}, but was trained on the sources of {len(again):,} of the "
                f"{len(own):,} rows of this part, such as {again[0]!r}: another row has the same source, or the run "
                "started from a model trained on it. The key trained_on of the candidates marks these rows."
            )


def mark(example: Example, seen: set[str] | None) -> dict[str, bool]:
    """What a row of candidates says of its writer: whether it was trained on this source; nothing if not known."""
    return {} if seen is None else {"trained_on": source_hash(example) in seen}


def _run(model: str) -> RunFolder | None:
    """The run of a folder, or of the folder of a run's model or checkpoint; None if it is none of them."""
    path = Path(model).expanduser().resolve()
    for run in map(RunFolder, (path, *path.parents[:2]) if model else ()):
        if run.recipe.is_file() and (path in (run.path, run.model) or path.parent == run.checkpoints):
            return run
    return None


def _recipe(run: RunFolder) -> Recipe:
    return recipe.load(str(run.recipe), objective=False)


def _trained_examples(prepared: Mapping[str, Any], settings: Recipe, split: Split) -> Sequence[Example] | None:
    """The training rows of a run; None if they are not there any more as it read them."""
    part = settings.data.leave_out
    try:
        expected = prepared["splits"]["train"]["fingerprint"]
        kept = [example for example in split.examples if not part or not in_part(example.id, part)]
        if fingerprint(kept) == expected:
            return kept
        found = load_split(
            settings.data, settings.task, "train", limit=settings.data.limit, leave_out=part, weights=True
        )
    except (UserError, OSError, KeyError, TypeError):
        return None
    return found.examples if found.fingerprint == expected else None
