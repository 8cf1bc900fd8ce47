"""arguments of ``ngramloss report`` → an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ngramloss.cli.options import add_scoring, describe, score_from_options
from ngramloss.errors import UserError
from ngramloss.output.console import print_result

REPORT = """\
Write an HTML page that needs no server: results with intervals and significance tests, training curves, the ablation,
every document with its summaries and their shared n-grams, score distributions, and how each score was computed.

Systems are given as for `ngramloss score`. Systems without scores are scored first."""

REPORT_EXAMPLES = """\
examples:
  ngramloss report runs/* -o report
  ngramloss report --references refs.jsonl --documents docs.jsonl a.jsonl b.jsonl -o report
  ngramloss report runs/* --metrics rouge,bertscore --set bertscore.model=roberta-large -o report
"""


def add(report: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(report, REPORT, REPORT_EXAMPLES, run)
    add_scoring(report, metrics="rouge,bleu,chrf,shape", translation_metrics="bleu,chrf,rouge,shape")
    report.add_argument("-o", "--out", default="report", metavar="DIR", help="output folder (default: %(default)s)")
    report.add_argument(
        "--title", default="", metavar="TEXT", help="title of the page (default: the systems and the data)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.report import build, page

    if Path(options.out).is_file():
        raise UserError(f"{options.out} is a file; -o takes a folder, which is created if needed.")
    result, texts = score_from_options(options)
    print_result(page.write_page(build.build_record(result, texts, title=options.title), Path(options.out)))
    return 0
