"""arguments of ``ngramloss reproduce`` → a table of the paper done again, printed, and a page."""

from __future__ import annotations

import argparse
import sys

from ngramloss import escape
from ngramloss.cli.options import Verbs, add_trust, metric_options, verb
from ngramloss.cli.output import print_result
from ngramloss.metrics.registry import METRICS

REPRODUCE = """\
Do again what a table of the paper shows: train, generate, score, and write the table beside the paper's values, and a
page. What is done already is not done again: the same command continues what was stopped.

table1: statistics of the data sets. table2: every objective. table3: single and accumulated n. cases: every objective,
and the cases where they differ most. --data chooses the scale: cnndm or xsum with BART-base, days of GPU time; newswire
with a small model that is trained first, minutes of two CPU cores, and the default where no hub can be reached; or a
file or folder of your own, with --model."""

REPRODUCE_EXAMPLES = """\
examples:
  ngramloss reproduce table1 --data newswire
  ngramloss reproduce cases --data newswire --objectives ce "ce + matches(2,3,4)"
  ngramloss reproduce table3 --data newswire --seeds 1
  ngramloss reproduce table2 --data xsum --seeds 3 --runs runs/xsum
  ngramloss reproduce table2 --data my/folder --model facebook/bart-base --set train.epochs=3
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its options."""
    again = verb(verbs, "reproduce", "do again what a table of the paper shows", REPRODUCE, REPRODUCE_EXAMPLES)
    again.add_argument("table", choices=["table1", "table2", "table3", "cases"], help="of the paper")
    again.add_argument("--data", metavar="NAME", help="default: xsum, or newswire where no hub can be reached")
    again.add_argument("--model", metavar="NAME", help="a folder or hub id to fine-tune (default: the recipe's)")
    again.add_argument("--seeds", type=int, default=1, metavar="N", help="of each objective (default: %(default)s)")
    again.add_argument("--objectives", nargs="+", default=[], metavar="WRITTEN", help="only these rows")
    again.add_argument("--runs", metavar="DIR", help="where runs are kept (default: runs/reproduce-DATA)")
    again.add_argument("-o", "--out", default="report", metavar="DIR", help="for the page (default: %(default)s)")
    again.add_argument("--limit", type=int, default=0, metavar="N", help="at most N test documents")
    again.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the recipe, or METRIC.OPTION of a metric in --metrics; repeatable",
    )
    again.add_argument("--metrics", default="", metavar="NAMES", help="besides rouge, bleu, chrf and shape")
    add_trust(again)
    again.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    from pathlib import Path

    from tqdm import tqdm

    from ngramloss import reproduce, tabular

    data = options.data or reproduce.chosen_data()
    if options.table == "table1":
        names = [data] if options.data or data == reproduce.SMALL else ["cnn_dailymail", "xsum"]
        print_result(reproduce.table1(names, limit=options.limit))
        return 0
    chosen = [name.strip() for name in options.metrics.split(",") if name.strip()]
    for name in chosen:
        METRICS.entry(name)   # an unknown metric is an error before anything is trained
    of_metrics = [setting for setting in options.set if setting.partition(".")[0] in chosen]
    folder = Path(options.runs or Path("runs") / f"reproduce-{Path(data).name}")
    plan = reproduce.make_plan(
        options.table, folder, data=data, model=options.model, seeds=options.seeds, objectives=options.objectives,
        overrides=[setting for setting in options.set if setting not in of_metrics], metrics=chosen,
        limit=options.limit,
    )  # fmt: skip
    with tqdm(unit=" documents", desc="writing", leave=False, disable=not sys.stderr.isatty()) as bar:
        done = reproduce.reproduce(
            plan, Path(options.out), options=metric_options(of_metrics, chosen),
            say=lambda text: bar.write(escape.for_terminal(text), file=sys.stderr),
            progress=lambda count, _: bar.update(count), trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    if done is None:
        return 130
    print_result(f"{plan.note}\n{reproduce.differences_sentence(done.result)}\n")
    print_result(tabular.as_text(reproduce.table(done.result, plan)))
    if options.table == "cases":
        print_result(reproduce.cases(done.result, done.texts))
    spread = "; over seeds, their spread" if options.seeds > 1 else ""
    print_result(f"\n± half of the 95% interval over test documents{spread}. "
                 f"* and **: differs from {done.result.names[0]} at 5% and 1% (both paired tests, Holm).")
    print_result(done.page)
    return 0
