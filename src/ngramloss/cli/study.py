"""arguments of ``ngramloss study`` → a study's trainings, texts and results, and its tables, printed."""

from __future__ import annotations

import argparse
from pathlib import Path

from ngramloss.cli.options import add_number, add_repeated, add_trust, describe, passed_on
from ngramloss.errors import UserError
from ngramloss.output.console import logger, print_result
from ngramloss.settings import part_of

STUDY = """\
Answer a question with many trainings: tune, screen rows on validation data, confirm the best with other seeds on test
data, and print tables over seeds with paired tests.

FILE is a TOML file with the rows, sets, seeds, decodings and the primary score of each set; ngramloss docs study
describes it. Results are small JSON files in a folder beside it. The same command continues a stopped study.
Several commands may share the folders of one study, on one machine or on several. A failed training is tried
again once, and again by the next command. The exit code is 1 if one failed twice, and 130 if trainings are left."""

STUDY_EXAMPLES = """\
examples:
  ngramloss study studies/mine.toml --show                     # the plan, an estimate, and the tables so far
  ngramloss study studies/mine.toml --show --page report       # the same, and a page with plots
  ngramloss study studies/mine.toml --parallel 4               # four trainings at a time, on one GPU or CPU
  ngramloss study studies/mine.toml --parallel 4 --minutes 9   # end before a deadline; the same command goes on
  ngramloss study studies/mine.toml --share 1/2                # one of two machines without a common folder
  ngramloss study studies/mine.toml --resume from-the-other    # merge the results of another folder, and go on
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(parser, STUDY, STUDY_EXAMPLES, run)
    parser.add_argument("study", metavar="FILE", help="the study, a TOML file")
    parser.add_argument("--show", action="store_true", help="print plan and tables from the results alone, and exit")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument("--page", metavar="DIR", help="write a page of the results, DIR/index.html")
    parser.add_argument("--results", metavar="DIR", help="folder of the results (default: FILE without its ending)")
    parser.add_argument("--runs", metavar="DIR", help="folder of the trainings (default: runs/NAME of the study)")
    add_repeated(parser, "--resume", "DIR", "first merge the results of this folder; repeatable")
    add_number(parser, "--parallel", 1, "N", "trainings at a time")
    add_repeated(parser, "--only", "SET", "work on this set; repeatable")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="do only the K-th of N shares of the trainings")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="end after M minutes, and start nothing that is estimated to take longer",
    )
    parser.add_argument("--delete-models", action="store_true", help="delete each model once its texts are scored")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.report import page
    from ngramloss.study import plan
    from ngramloss.study import run as running
    from ngramloss.study.page import write_page
    from ngramloss.study.results import ResultFolder, claim, raise_unless_same_study
    from ngramloss.study.tables import as_text, plan_text, set_tables, texts_lines

    if (share := part_of(options.share)) is None:
        raise UserError(f"--share takes K/N, such as 1/4 for the first of four shares, got {options.share!r}.")
    if options.minutes < 0:
        raise UserError(f"--minutes must be 0 or more, got {options.minutes:g}.")
    file = Path(options.study)
    study = plan.read(file)
    sets = [data.name for data in study.sets]
    for name in options.only:
        if name not in sets:
            raise UserError(f"--only takes a set of the study, {', '.join(sets)}; got {name!r}.")
    folder = ResultFolder(Path(options.results or file.with_suffix("")), study)
    runs = Path(options.runs or Path("runs") / study.name)
    if options.page is not None:
        page.check(Path(options.page), "--page")
    raise_unless_same_study(folder.path, study)
    for other in options.resume:
        claim(folder.path, study)
        logger.info(f"{folder.merge(Path(other))} results of {other} were merged into {folder.path}.")
    results = folder.read()
    stages = running.stages_of_sets(folder, results)
    print_result(plan_text(study, stages, results, parallel=options.parallel) + "\n")
    outcome = running.StudyOutcome(finished=True)
    if not options.show:
        claim(folder.path, study)
        claim(runs, study)
        ways = running.Ways(
            runs,
            options.parallel,
            tuple(options.only),
            share,
            options.minutes,
            options.delete_models,
            passed_on(options),
        )
        outcome = running.run(folder, ways)
        results = folder.read()
        stages = running.stages_of_sets(folder, results)
    shown = set_tables(study, stages, results)
    print_result(as_text(shown, markdown=options.markdown))
    for line in texts_lines(study, stages, runs):
        logger.info(line)
    if options.page is not None:
        print_result(f"\n{write_page(study, stages, results, shown, runs, Path(options.page))}")
    if options.show and not results:  # tables need no data, but a study that begins does
        plan.check_data(study, study.sets)
    if not outcome.finished:
        print_result("\n" + plan_text(study, stages, results, parallel=options.parallel))
        for why in outcome.why:
            logger.info(f"not finished: {why}")
        return 130
    return int(not options.show and any(result.failed for result in results.values()))
