"""arguments of ``ngramloss new`` → a folder with a commented recipe and made-up data, which trains at once."""

from __future__ import annotations

import argparse
import json
import shlex
from importlib.resources import files
from itertools import islice, product
from pathlib import Path
from random import Random

from ngramloss.cli.options import describe
from ngramloss.data import newswire
from ngramloss.errors import UserError
from ngramloss.output.console import logger, print_result
from ngramloss.storage.files import whole_folder

NEW = """\
Write a folder to start from: a small recipe that explains its settings, and made-up data for it. It trains at once, in
about a minute on a CPU. Then put your own data in place of data/, and a pretrained model into the recipe."""

NEW_EXAMPLES = """\
examples:
  ngramloss new mine
  ngramloss new mine --task translation
"""

ROWS = {"train": 4000, "validation": 100, "test": 100}
"""Split → its made-up rows."""
RECIPE, DATA = "small.toml", "data"
"""Not recipe.toml: a folder with a file of that name is a run."""
TASKS = ("summarisation", "translation", "language-model")

# English, German: the article in the nominative, the noun; adjectives take -e after it.
NOUNS = {
    "dog": "der Hund", "cat": "die Katze", "horse": "das Pferd", "teacher": "der Lehrer", "girl": "das Mädchen",
    "doctor": "die Ärztin", "boy": "der Junge", "singer": "die Sängerin", "child": "das Kind", "baker": "der Bäcker",
    "duck": "die Ente", "farmer": "der Bauer", "painter": "die Malerin", "king": "der König",
}  # fmt: skip
ADJECTIVES = {
    "small": "klein", "old": "alt", "young": "jung", "happy": "glücklich", "tired": "müd", "strong": "stark",
    "quiet": "leis", "big": "groß", "clever": "klug", "friendly": "freundlich",
}  # fmt: skip
VERBS = {
    "sleeps": "schläft", "waits": "wartet", "sings": "singt", "sits": "sitzt", "dances": "tanzt", "laughs": "lacht",
    "stands": "steht", "plays": "spielt",
}  # fmt: skip
PLACES = {
    "in the garden": "im Garten", "behind the house": "hinter dem Haus", "on the roof": "auf dem Dach",
    "at the station": "am Bahnhof", "under the bridge": "unter der Brücke", "beside the lake": "neben dem See",
    "in front of the school": "vor der Schule", "in the kitchen": "in der Küche",
}  # fmt: skip
NAMES = ("Ada", "Ben", "Carla", "Deniz", "Emil", "Farah", "Greta", "Hugo", "Ines", "Jonas", "Kaya", "Lena")
THINGS = ("a cake", "a lamp", "two tickets", "a bicycle", "an old map", "three pens", "a coat", "a guitar", "some tea")
SHOPS = ("the market", "the station", "a small shop", "the museum", "the bakery", "the harbour", "the old bridge")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DEEDS = ("bought", "found", "lost", "sold", "painted")


def add(new: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(new, NEW, NEW_EXAMPLES, run)
    new.add_argument("folder", metavar="FOLDER", help="folder to write")
    new.add_argument("--task", choices=TASKS, default=TASKS[0], help="what the model writes (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    recipe = write_new(Path(options.folder), options.task)
    print_result(recipe)
    logger.info(f"next: cd {shlex.quote(options.folder)} && ngramloss train {recipe.name} --run run")
    return 0


def write_new(folder: Path, task: str) -> Path:
    """Write a recipe and data for a task into a new or empty folder. Returns the path of the recipe."""
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}. Choose from {', '.join(TASKS)}.")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder. Choose another name.")
    if folder.is_dir():
        folder.rmdir()
    with whole_folder(folder) as partial:
        (partial / RECIPE).write_bytes(files("ngramloss").joinpath("cli", "starters", f"{task}.toml").read_bytes())
        (partial / DATA).mkdir()
        for split, rows in made_up_rows(task).items():
            with (partial / DATA / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return folder / RECIPE


def made_up_rows(task: str) -> dict[str, list[dict[str, str]]]:
    """Split → the rows of a task. No two splits share a row.

    >>> made_up_rows("language-model")["test"][0]["completion"]
    'On Tuesday, Farah bought a lamp at a small shop.'
    """
    if task == "summarisation":
        texts = {
            split: [{"document": item.document, "summary": item.summary} for item in newswire.items(split, count)]
            for split, count in ROWS.items()
        }
    else:
        pools = (NOUNS, ADJECTIVES, VERBS, PLACES) if task == "translation" else (NAMES, THINGS, SHOPS, DAYS, DEEDS)
        drawn = list(product(*pools))
        Random(0).shuffle(drawn)
        left = map(_translation if task == "translation" else _completion, drawn)
        texts = {split: list(islice(left, count)) for split, count in ROWS.items()}
    return {
        split: [{"id": f"{split}-{index}", **row} for index, row in enumerate(rows)] for split, rows in texts.items()
    }


def _translation(words: tuple[str, ...]) -> dict[str, str]:
    noun, adjective, verb, place = words
    article, german = NOUNS[noun].split()
    return {
        "en": f"The {adjective} {noun} {verb} {place}.",
        "de": f"{article.capitalize()} {ADJECTIVES[adjective]}e {german} {VERBS[verb]} {PLACES[place]}.",
    }


def _completion(words: tuple[str, ...]) -> dict[str, str]:
    name, thing, shop, day, deed = words
    prompt = f"who: {name}; did: {deed}; what: {thing}; where: {shop}; when: {day} =>"
    return {"prompt": prompt, "completion": f"On {day}, {name} {deed} {thing} at {shop}."}
