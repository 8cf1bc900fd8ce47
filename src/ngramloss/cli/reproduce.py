"""arguments of ``ngramloss reproduce`` → a table of the paper reproduced, printed, and an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ngramloss.cli.options import add_number, add_repeated, add_trust, describe, metric_options, passed_on
from ngramloss.output.console import print_result

REPRODUCE = """\
Reproduce a table of the paper: train, generate and score, print the table next to the paper's values, and write an
HTML page. Finished steps are not repeated; to continue after a stop, run the same command again.

  table1  statistics of the data sets
  table2  every objective; with --systems also the systems that the paper compares with
  table3  each n alone, and several n together
  cases   every objective, and the documents where the summaries differ most

--data chooses the scale:

  cnndm, xsum     BART-base; days of GPU time
  newswire        a small model that is trained first; minutes on two CPU cores
  file or folder  your own data, with --model: the same objectives, without the paper's values; for translations add
                  --set task=translation"""

REPRODUCE_EXAMPLES = """\
examples:
  ngramloss reproduce table1 --data newswire
  ngramloss reproduce cases --data newswire --objectives ce "ce + matches(2,3,4)"
  ngramloss reproduce table3 --data newswire --seeds 1
  ngramloss reproduce table2 --data xsum --seeds 3 --runs runs/xsum
  ngramloss reproduce table2 --data newswire --objectives ce "ce + matches(2,3,4)" --systems all --seeds 2
  ngramloss reproduce table2 --data xsum --systems simcls,bertsum_abs --set simcls.train.epochs=2
  ngramloss reproduce table2 --data my/folder --model facebook/bart-base --set train.epochs=3
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(parser, REPRODUCE, REPRODUCE_EXAMPLES, run)
    parser.add_argument("table", choices=["table1", "table2", "table3", "cases"], help="what to reproduce")
    parser.add_argument(
        "--data", metavar="NAME", help="data set (default: xsum, or newswire if the hub cannot be reached)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="folder or hub id of the model to fine-tune (default: the recipe's)"
    )
    add_number(parser, "--seeds", 1, "N", "runs of each objective, with different seeds")
    parser.add_argument(
        "--objectives",
        nargs="+",
        default=[],
        metavar="OBJECTIVE",
        help="train only these objectives (default: all of the table)",
    )
    parser.add_argument(
        "--systems",
        default="",
        metavar="NAMES",
        help="for table2: also train these systems, separated by commas, or all (see ngramloss list systems). Each "
        "has its own recipe, on newswire a small one, and reads from --set only how data are read",
    )
    parser.add_argument("--runs", metavar="DIR", help="folder for the runs (default: runs/reproduce-DATA)")
    parser.add_argument(
        "-o", "--out", default="report", metavar="DIR", help="folder for the page (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="use at most N test documents")
    settings = (
        "change a setting of the recipe, METRIC.OPTION of a metric in --metrics, or SYSTEM.KEY of a system in "
        "--systems; repeatable"
    )
    add_repeated(parser, "--set", "KEY=VALUE", settings)
    parser.add_argument(
        "--metrics",
        default="",
        metavar="NAMES",
        help="metrics to add to rouge, bleu, chrf and shape, separated by commas; translations have no rouge",
    )
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.metrics.registry import METRICS
    from ngramloss.study import reproduce
    from ngramloss.study.system_rows import chosen as chosen_systems
    from ngramloss.study.tables import as_text

    systems = chosen_systems(options.systems)
    data = options.data or reproduce.chosen_data()
    if options.table == "table1" and not systems:
        names = [data] if options.data or data == reproduce.SMALL else ["cnn_dailymail", "xsum"]
        print_result(reproduce.table1(names, limit=options.limit))
        return 0
    chosen = [name.strip() for name in options.metrics.split(",") if name.strip()]
    for name in chosen:
        METRICS.entry(name)  # an unknown metric is an error before anything is trained
    of_metrics = [setting for setting in options.set if setting.partition(".")[0] in chosen]
    folder = Path(options.runs or Path("runs") / f"reproduce-{Path(data).name}")
    plan = reproduce.make_plan(
        options.table,
        folder,
        data=data,
        model=options.model,
        seeds=options.seeds,
        objectives=options.objectives,
        overrides=[setting for setting in options.set if setting not in of_metrics],
        metrics=chosen,
        limit=options.limit,
        systems=systems,
    )
    done = reproduce.reproduce(
        plan, Path(options.out), options=metric_options(of_metrics, chosen), passed_on=passed_on(options)
    )
    if done is None:
        return 130
    print_result("\n".join(plan.notes) + "\n")
    print_result(as_text(done.tables))
    if options.table == "cases":
        print_result(reproduce.cases(done.result, done.texts, plan.set.primary))
    print_result(f"\n{done.page}")
    return int(done.failed)
