"""arguments of ``ngramloss candidates`` → a file of candidates, and a table of what they score."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngramloss.cli.generate import DIVERSITY, add_job, job_of, output_folder, settings
from ngramloss.cli.options import ALL_METRICS, add_number, describe, metric_options
from ngramloss.errors import UserError
from ngramloss.output.console import aligned, logger, print_result
from ngramloss.search.search import HOW

if TYPE_CHECKING:
    from ngramloss.generation.job import Job
    from ngramloss.metrics.candidate_scores import CandidateMetric

CANDIDATES = """\
Generate several distinct outputs for every source of a split, and score them: candidates.jsonl, with the settings in
candidates.json. Training can learn from them which of its own outputs are better.

The search prefers the first output of a source. Equal outputs are replaced by samples. A score compares an output with
the reference, from 0 to 1. To continue a stopped job, run the same command again. Under torchrun, each process
generates a share.

A run that was trained without a part of the training rows (data.leave_out) generates for this part, which it has not
seen. Several such runs generate for all rows, into one folder."""

EXAMPLES = """\
examples:
  ngramloss candidates runs/demo-matches234 --limit 100
  ngramloss candidates facebook/bart-large-cnn --preset cnndm --data cnn_dailymail --out candidates/cnndm
  ngramloss candidates google/pegasus-xsum --data xsum --beams 128 --groups 16 --diversity 0.1 --out candidates/xsum
  ngramloss candidates runs/half-1 runs/half-2 --out candidates/unseen
  ngramloss candidates runs/mine --search sample --top-p 0.95 --seed 1 --out samples
  ngramloss candidates runs/mine --search beams --count 8 --beams 16 --metric rouge2 --out beams
  ngramloss candidates runs/mine --split validation --metric chrf --set chrf.word_order=2 --out chrf --json
"""

COLUMNS = ("first", "mean", "best", "worst")
"""What the table has of a summary, besides how many texts there are."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(parser, CANDIDATES, EXAMPLES, run)
    add_job(parser, "RUN_OR_MODEL", split="train")
    parser.add_argument(
        "others",
        nargs="*",
        metavar="RUN",
        help="further runs; each left out another part of the training rows (data.leave_out), for which it generates",
    )
    add_number(parser, "--count", 16, "N", "candidates of each source")
    parser.add_argument("--search", dest="how", choices=HOW, help=f"{'; '.join(HOW.values())} (default: groups)")
    parser.add_argument(
        "--beams",
        type=int,
        metavar="N",
        help="beams of the search; if groups have more beams than candidates, they are ranked, and kept at equal "
        "steps (default: as many as candidates)",
    )
    parser.add_argument("--groups", type=int, metavar="N", help="groups of beams (default: as many as candidates)")
    parser.add_argument("--diversity", type=float, metavar="X", help=f"{DIVERSITY} (default: 1.0)")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help=f"metric that scores the texts, or one of its scores: {ALL_METRICS} (default: rouge, the mean of "
        "ROUGE-1, 2 and Lsum; for translation bleu, sentence BLEU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.generation import candidates, left_out
    from ngramloss.generation.job import check_model
    from ngramloss.storage.run_folder import RunFolder

    given = settings(options)
    own = [setting for setting in given if not setting.startswith(("generation.", "data.", "task=", "system="))]
    others = [setting for setting in given if setting not in own]
    works = [job_of(options, model, others, verb="candidates") for model in (options.model, *options.others)]
    for work in works:
        system = work.asked_system
        if system and not system.entry.loads:
            raise UserError(
                f"{work.model} is a run of {system.name}, which generates one output for each source. Give a model, "
                "or a run without a system."
            )
        searches = (options.how, options.beams, options.groups, options.diversity)
        if system and (searches != (None,) * 4 or (options.temperature, options.top_p) != (1.0, 1.0)):
            raise UserError(
                f"{work.model} is a run of {system.name}, whose search has neither beams nor samples. Leave --search "
                "and its options out."
            )
    parts, work = left_out.parts_of(works), works[0]
    if options.others and options.out is None:
        raise UserError("several runs need one output folder: give it with --out DIR.")
    chosen = candidates.plan(
        work,
        how=options.how or ("beams" if work.loading_system else "groups"),
        count=options.count,
        beams=options.beams or 0,
        groups=options.groups or 0,
        diversity=options.diversity,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    for each in works:
        if not each.loading_system:
            check_model(each, "candidates", groups=chosen.search.groups)
    metric = _metric(work, options.metric, own)
    folder = output_folder(options)
    found = candidates.write_candidates(works, chosen, metric, folder, parts)
    if found is None:
        return 0
    if found.fewer:
        logger.warning(
            f"{found.fewer:,} of {found.sources:,} sources have fewer than {options.count} candidates, "
            f"{found.missing:,} too few in all: the search found no others."
            f"{'' if work.loading_system else ' A higher --temperature finds more.'}"
        )
    if 2 * found.ties > found.sources:
        logger.warning(
            f"{found.ties:,} of {found.sources:,} sources have candidates with equal scores, so there is no order to "
            "learn. Another --metric, or another option of it, may show a difference."
        )
    path = RunFolder(folder).candidates
    cells = [f"{found.sources:,}", f"{found.candidates:.1f}", *(f"{getattr(found, name):.4f}" for name in COLUMNS)]
    table = aligned([["sources", "a source", *COLUMNS], cells], left=())
    as_json = json.dumps({"file": str(path), **found._asdict()}, indent=1)
    print_result(as_json if options.json else "\n".join([str(path), *table]))
    return 0


def _metric(work: Job, name: str | None, own: Sequence[str]) -> CandidateMetric:
    """What scores texts, from the name of a metric, or the task's usual one, and ``--set METRIC.OPTION=VALUE``."""
    from ngramloss.metrics import candidate_scores

    name = name or candidate_scores.BY_TASK[work.task]
    metric = candidate_scores.metric_of(name)
    for setting in own:
        if not setting.startswith(f"{metric}."):
            raise UserError(
                "candidates accepts --set only for generation.*, data.*, task and options of the metric, "
                f"{metric}.*, got {setting!r}."
            )
    chosen: dict[str, Any] = metric_options(own, [metric]).get(metric, {})
    return candidate_scores.candidate_metric(name, chosen, lines=work.data.language if work.has_lines else None)
