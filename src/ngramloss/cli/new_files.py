"""a folder and a task → a commented recipe and made-up data that train at once."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from ngramloss.data.made_up import TASKS, made_up
from ngramloss.errors import UserError
from ngramloss.storage.files import whole_folder

ROWS = {"train": 4000, "validation": 100, "test": 100}
"""Split → its made-up rows."""
RECIPE, DATA = "small.toml", "data"
"""Not recipe.toml: a folder with a file of that name is a run."""


def write_new(folder: Path, task: str) -> Path:
    """Write a recipe and data for a task into a new folder. Returns the path of the recipe.

    Args:
        folder: it must not exist, or be empty.
        task: one of ``TASKS``.
    """
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}. Choose from {', '.join(TASKS)}.")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder. Choose the name of a new one.")
    if folder.is_dir():
        folder.rmdir()
    with whole_folder(folder) as partial:
        (partial / RECIPE).write_bytes(files("ngramloss").joinpath("cli", "starters", f"{task}.toml").read_bytes())
        (partial / DATA).mkdir()
        for split, count in ROWS.items():
            with (partial / DATA / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in made_up(task, split, count))
    return folder / RECIPE
