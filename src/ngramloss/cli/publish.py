"""arguments of ``ngramloss publish`` → a folder that can be uploaded to a hub."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ngramloss.cli.options import describe
from ngramloss.output.console import logger, print_result

PUBLISH = """\
Write a folder that is ready for the Hugging Face hub: the weights as safetensors, the tokenizer, the settings of
generation, and a card with data, objective, how to use the model, and the scores of `ngramloss score` with their
intervals and signatures, also in the form that the hub shows beside the model.

Nothing is uploaded; the last line shows the command that uploads. Read README.md first."""

PUBLISH_EXAMPLES = """\
examples:
  ngramloss publish runs/mine
  ngramloss publish runs/mine --repo me/summariser --license apache-2.0 -o summariser
"""


def add(publish: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(publish, PUBLISH, PUBLISH_EXAMPLES, run)
    publish.add_argument("run", metavar="RUN", help="the folder of a finished run")
    publish.add_argument("-o", "--out", metavar="DIR", help="folder to write (default: published/NAME of the run)")
    publish.add_argument("--repo", default="", metavar="OWNER/NAME", help="name on the hub (default: the run's)")
    publish.add_argument(
        "--license", default="", metavar="ID", help="licence of the model as the hub spells it, such as apache-2.0"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.report.publish import CARD, publish

    folder = Path(options.run)
    out = Path(options.out or Path("published") / folder.resolve().name)
    repo = publish(folder, out, repo=options.repo, license=options.license)
    if not options.license:
        logger.info("no licence is named: write one into the card, or name it with --license.")
    print_result(out)
    logger.info(f"read {out / CARD}, then upload the folder with: hf upload {repo} {shlex.quote(str(out))} .")
    return 0
