"""arguments of ``ngramloss new`` → a folder with a recipe and data to start from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ngramloss.cli.options import describe
from ngramloss.output.console import logger, print_result

NEW = """\
Write a folder to start from: a small recipe that explains its settings, and made-up data for it. It trains at once, in
about a minute on a CPU. Then put your own data in place of data/, and a pretrained model into the recipe."""

NEW_EXAMPLES = """\
examples:
  ngramloss new mine
  ngramloss new mine --task translation
"""
CHOICES = ("summarisation", "translation", "language-model")


def add(new: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(new, NEW, NEW_EXAMPLES, run)
    new.add_argument("folder", metavar="FOLDER", help="folder to write")
    new.add_argument("--task", choices=CHOICES, default=CHOICES[0], help="what the model writes (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.cli.new_files import write_new

    recipe = write_new(Path(options.folder), options.task)
    print_result(recipe)
    logger.info(f"next: cd {shlex.quote(options.folder)} && ngramloss train {recipe.name} --run run")
    return 0
