"""arguments of ``ngramloss report`` → a page."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, add_scoring, score_from_options, verb
from ngramloss.cli.output import print_result
from ngramloss.errors import UserError

REPORT = """\
Write one page that works from disk: results with intervals and tests, training curves, ablation, every case with its
n-grams lit, distributions, and where every score comes from.

Systems are named as for ngramloss score. What has no scores yet is scored first."""

REPORT_EXAMPLES = """\
examples:
  ngramloss report runs/* -o report
  ngramloss report --references refs.jsonl --documents docs.jsonl a.jsonl b.jsonl -o report
  ngramloss report runs/* --metrics rouge,bertscore --set bertscore.model=roberta-large -o report
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its options."""
    report = verb(verbs, "report", "one page of results, training, cases", REPORT, REPORT_EXAMPLES)
    add_scoring(report, metrics="rouge,bleu,chrf,shape")
    report.add_argument("-o", "--out", default="report", metavar="DIR", help="default: %(default)s")
    report.add_argument("--title", default="ngramloss report", metavar="TEXT", help="default: %(default)s")
    report.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    from pathlib import Path

    from ngramloss.report import build, page

    if Path(options.out).is_file():
        raise UserError(f"{options.out} is a file; -o needs a folder, which will be made.")
    result, texts = score_from_options(options)
    print_result(page.write_page(build.build_record(result, texts, title=options.title), Path(options.out)))
    return 0
