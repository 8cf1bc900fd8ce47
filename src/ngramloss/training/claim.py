"""a recipe and a folder → the folder locked and ready for this run, and the checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.recipe import Recipe
from ngramloss.storage.files import write_whole
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training import checkpoints
from ngramloss.training.identity import changes, error_of_changes, read_record


@contextmanager
def locked(run: RunFolder, rank: int, processes: int = 1) -> Iterator[None]:
    """Create and lock the folder in the first process. A failed start leaves nothing, unless others may read why."""
    if rank:
        yield
        return
    if run.path.is_file():
        raise UserError(f"{run.path} is a file, but --run needs a folder. It is created if it does not exist.")
    made, new = not run.path.exists(), not run.recipe.exists()
    run.path.mkdir(parents=True, exist_ok=True)
    with run.lock(option="--run"):
        try:
            yield
        except BaseException:
            if new and processes == 1 and {*run.content()} <= {run.recipe.name, run.prepared.name}:
                run.clear()
                if made:
                    run.path.rmdir()
            raise


def claim(
    settings: Recipe,
    run: RunFolder,
    *,
    fresh: bool,
    check: Callable[[], object] = lambda: None,
    made_of: Callable[[Recipe], Mapping[str, str]] = lambda saved: {},
) -> Path | None:
    """Check that the folder can be used, write ``recipe.toml`` first of all, and return the newest complete checkpoint.

    ``check`` raises before anything is deleted. ``made_of`` is asked if settings differ, for an error that names all.
    """
    if not run.recipe.exists() and (content := run.content()):
        what = "has predictions but no run" if run.has_predictions else "is not a run folder"
        raise UserError(
            f"{run.path} {what} (it contains {', '.join(content[:3])}); nothing was changed. Choose another --run."
        )
    if fresh and run.recipe.exists():
        try:
            check()
        except Exception:
            logger.info(f"nothing was deleted in {run.path}.")
            raise
        logger.info(f"deleting the run in {run.path}" + (", with its predictions." if run.has_predictions else "."))
        run.clear()
    saved = checkpoints.find(run.checkpoints)
    if run.recipe.exists() and (run.finished or saved.newest or run.has_predictions):  # else nothing can be lost
        started = recipe.load(str(run.recipe))
        record = read_record(saved.newest) if saved.newest is not None and not run.finished else {}
        changed = recipe.changed_settings(started, settings)
        if changed and record:
            with suppress(UserError, OSError):  # what cannot be read any more is said when the settings are right
                now = made_of(started)
                changed |= changes({name: record[name] for name in now if name in record}, now)
        if changed:
            raise error_of_changes(run.path, changed)
        for line in recipe.differences(started, settings) if record else ():
            logger.info(f"{line}, from now on.")
    if run.finished:
        return saved.newest
    run.tidy()
    for checkpoint, why in saved.broken.items():
        logger.info(f"skipping {checkpoint.name}, which is incomplete ({why}).")
        checkpoints.delete(checkpoint)
    write_whole(run.recipe, recipe.dump(settings))
    run.checkpoints.mkdir(exist_ok=True)
    run.prepared.unlink(missing_ok=True)
    return saved.newest
