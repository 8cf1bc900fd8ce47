"""arguments of ``ngramloss data stats`` → statistics of a data set, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import add_columns, choice, describe
from ngramloss.output import escape
from ngramloss.output.console import logger, print_result

DATA = "Inspect data sets."

STATS = """\
Count the words, sentences and novel bigrams of a data set, as in the paper's Table 1.

NAME is newswire, xsum, cnn_dailymail, another hub id, a file (.jsonl, .csv or .parquet, also compressed as .gz or .xz),
or a folder with one file per split."""

STATS_EXAMPLES = """\
examples:
  ngramloss data stats newswire --split test
  ngramloss data stats newswire --split test --rules released
  ngramloss data stats xsum
  ngramloss data stats my/folder --source article --target headline --on-bad-row skip --json
"""


def add(data: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    data.description = DATA
    looks = choice(data, metavar="WHAT", title="what to inspect")
    stats = looks.add_parser("stats", help="count words, sentences and novel bigrams")
    describe(stats, STATS, STATS_EXAMPLES, run)
    stats.add_argument("name", metavar="NAME", help="name of the data set")
    stats.add_argument("--split", nargs="+", default=[], metavar="SPLIT", help="splits to count (default: all)")
    stats.add_argument(
        "--rules",
        choices=["standard", "released"],
        default="standard",
        help="how to count: our rules, or the rules of the paper's released code (default: %(default)s)",
    )
    add_columns(stats, source="of the sources; several with commas are joined", target="of the targets")
    stats.add_argument(
        "--on-bad-row",
        choices=["error", "skip"],
        default="error",
        help="stop at an invalid row, or skip it (default: %(default)s)",
    )
    stats.add_argument(
        "--language",
        default="auto",
        metavar="CODE",
        help="language for splitting sentences, such as de (default: chosen by script)",
    )
    stats.add_argument("--limit", type=int, default=0, metavar="N", help="use at most N examples of each split")
    stats.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import json

    from ngramloss.data import measurement

    result = measurement(
        options.name,
        splits=options.split,
        rules=options.rules,
        source=options.source or None,
        target=options.target or None,
        id=options.id or None,
        on_bad_row=options.on_bad_row,
        limit=options.limit,
        language=options.language,
    )
    for split in result.splits.values():
        for bad in split.skipped:
            logger.warning(f"skipped {bad}")
    for note in dict.fromkeys(note for notes in result.notes.values() for note in notes):
        logger.info(note)
    print_result(escape.in_json(json.dumps(result.record(), indent=1, ensure_ascii=False)) if options.json else result)
    return 0
