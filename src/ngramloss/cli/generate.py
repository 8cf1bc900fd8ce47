"""arguments of ``ngramloss generate`` → a folder with predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngramloss.cli.options import add_columns, add_number, add_repeated, add_trust, describe, recipe_settings
from ngramloss.errors import UserError
from ngramloss.output.console import print_result
from ngramloss.search.registry import STANDARD, engine_choices, engines_with_groups
from ngramloss.search.search import PROBABILITY, Options, check_options

if TYPE_CHECKING:
    from ngramloss.generation.job import Job
    from ngramloss.training.system_registry import Written

GENERATE = """\
Generate a summary or a translation of every source of a split: predictions.jsonl, with references.jsonl and the
settings in generation.json.

MODEL is a run's folder, a model's folder or hub id, or a baseline such as lead-3, the first three sentences. `ngramloss
list baselines` lists all baselines. The data need no targets; without them, `ngramloss score` has no references. To
continue a stopped job, run the same command again. Under torchrun, each process generates a share. A multilingual model
needs data.source_language and data.target_language."""

GENERATE_EXAMPLES = """\
examples:
  ngramloss generate runs/demo-matches234
  ngramloss generate facebook/bart-large-cnn --data cnn_dailymail --preset cnndm --out bart-large
  ngramloss generate lead-3 --data newswire --out lead
  ngramloss generate lead-3 --like runs/mine --out lead
  ngramloss generate runs/mine --data new.jsonl --out new
  ngramloss generate runs/mine --set generation.num_beams=8 --limit 100 --out beams8
  ngramloss generate runs/mine --engine ctranslate2-int8 --out fast
  ngramloss generate runs/mine --sample --num-return 8 --top-p 0.95 --seed 1 --out samples
  ngramloss generate runs/mine --set generation.num_beams=8 --groups 4 --num-return 8 --out diverse
  ngramloss generate runs/mine --set generation.num_beams=8 --rerank probability --out reranked
  ngramloss generate facebook/m2m100_418M --data my/pairs --preset translation --out m2m100 \\
    --set data.source_language=en --set data.target_language=de
"""

DIVERSITY = "penalty on a token's log-probability for each beam of an earlier group that chose it"


def add(generate: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(generate, GENERATE, GENERATE_EXAMPLES, run)
    add_job(generate, "MODEL", split="test")
    generate.set_defaults(split=None)  # with --like, that of the run
    generate.add_argument(
        "--like",
        metavar="RUN",
        help="read the documents of this run: its data set, columns and languages, and the split and the number of "
        "documents of its predictions",
    )
    generate.add_argument(
        "--num-return",
        type=int,
        metavar="N",
        help="outputs for each document: the best beams, or samples (default: 1; with --rerank all beams)",
    )
    add_number(generate, "--groups", 1, "N", "divide the beams into N groups that avoid each other's tokens")
    generate.add_argument("--diversity", type=float, metavar="X", help=f"{DIVERSITY} (default: 1.0 with --groups)")
    generate.add_argument(
        "--rerank",
        choices=[PROBABILITY],
        help="order a document's outputs by log-probability, divided by length to the power of "
        "generation.length_penalty; the first is its prediction",
    )
    generate.add_argument("--sample", action="store_true", help="sample tokens instead of searching with beams")


def add_job(verb: argparse.ArgumentParser, model: str, *, split: str) -> None:
    """Add the options of the commands that generate: model, data, engine, samples, folder."""
    verb.add_argument(
        "model",
        metavar=model,
        help="a run's folder, a model's folder or hub id" + (", or a baseline" if model == "MODEL" else ""),
    )
    verb.add_argument("--data", metavar="NAME", help="data set (default: the run's or the preset's)")
    one_file = "; of a single file all rows" if model == "MODEL" else ""
    verb.add_argument("--split", default=split, metavar="SPLIT", help=f"split to read (default: {split}{one_file})")
    verb.add_argument(
        "--preset",
        choices=["cnndm", "xsum", "translation", "brio-cnndm", "brio-xsum"],
        help="use the search settings of this recipe; those of cnndm and xsum are the paper's",
    )
    of_metric = "" if model == "MODEL" else ", or an option of the metric"
    settings = "change a setting in generation.* or data.*, or task; for a run of gsum or parallel also system"
    add_repeated(verb, "--set", "KEY=VALUE", f"{settings}{of_metric}; repeatable")
    verb.add_argument("--on-bad-row", choices=["error", "skip"], help="same as --set data.on_bad_row=...")
    verb.add_argument("--limit", type=int, default=0, metavar="N", help="read at most N sources")
    choices = engine_choices()
    verb.add_argument(
        "--engine",
        metavar="NAME",
        help=f"search engine: {', '.join(choices[:-1])} or {choices[-1]}; same as --set generation.engine=... "
        f"(default: auto, the fastest with the same outputs as {STANDARD}; for groups of beams "
        f"{' or '.join(engines_with_groups())})",
    )
    verb.add_argument(
        "--batch-size", type=int, metavar="N", help="documents per batch (default: as many as the memory allows)"
    )
    add_number(verb, "--temperature", 1.0, "X", "sampling temperature; below 1 sharpens")
    add_number(verb, "--top-p", 1.0, "P", "nucleus sampling: the most probable tokens that sum to P")
    add_number(verb, "--seed", 0, "N", "random seed of sampling")
    verb.add_argument("-o", "--out", metavar="DIR", help="output folder (default: the run's folder)")
    targets = "of the targets" + ("; none: read no targets" if model == "MODEL" else "")
    add_columns(verb, source="of the sources; several with commas are joined", target=targets)
    add_trust(verb)


def output_folder(options: argparse.Namespace) -> Path:
    """Where to write: the folder that was given, or the run's."""
    from ngramloss.storage.run_folder import RunFolder

    if options.out is None and not RunFolder(Path(options.model)).recipe.exists():
        raise UserError(f"{options.model} is not a run's folder, so give an output folder: --out DIR.")
    return Path(options.out or options.model)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.generation import predictions
    from ngramloss.generation.job import check_model

    diversity = options.diversity if options.diversity is not None else float(options.groups > 1)
    asked = Options(
        options.num_return or (0 if options.rerank else 1),
        options.sample,
        options.temperature,
        options.top_p,
        options.seed,
        options.groups,
        diversity,
        options.rerank or "",
    )
    check_options(asked)
    given = settings(options)
    work = job_of(options, options.model, given, like=options.like)
    folder = output_folder(options)
    if system := work.asked_system:
        if why := _beyond(system, options, asked, given, work):
            raise UserError(f"{work.model} is a run of {system.name}, {why}")
        if not system.entry.loads:
            print_result(system.entry.function("generate")(work, folder))
            return 0
    else:
        check_model(work, "generate", groups=options.groups)
    print_result(predictions.write_predictions(work, folder, asked))
    return 0


def _beyond(system: Written, options: argparse.Namespace, asked: Options, given: Sequence[str], work: Job) -> str:
    """What the options ask for and a system does not have, as the end of a sentence; empty if there is nothing."""
    entry, keys = system.entry, [setting.partition("=")[0].strip() for setting in given]
    searched = [f"generation.{key}" for key in entry.search]
    searches = [key for key in keys if key.startswith("generation.") and key not in searched]
    if searches or (not entry.searches_freely and (asked != Options() or options.preset)):
        has = f"whose search has only {', '.join(searched)}" if searched else "which has no search of its own"
        return f"{has}: leave {'other ' * bool(searched)}options of a search out."
    if asked != Options():
        return "which generates the best output for each document. Leave samples, groups and --num-return out."
    settable = [*entry.settable, *searched]
    if entry.settable and (others := [key for key in keys if key not in settable]):
        return f"which keeps the {', '.join(others)} of its training. It accepts --set for {', '.join(settable)}."
    return ""


def settings(options: argparse.Namespace) -> list[str]:
    """The ``--set`` settings, and the options that are short forms of them."""
    return [*recipe_settings(options), *([f"generation.engine={options.engine}"] if options.engine else [])]


def job_of(options: argparse.Namespace, model: str, overrides: Sequence[str], **more: Any) -> Job:
    """What the options of :func:`add_job` ask of a model; ``more`` are further arguments of a job."""
    from ngramloss.generation.job import job

    return job(
        model,
        data=options.data,
        split=options.split,
        preset=options.preset,
        overrides=overrides,
        limit=options.limit,
        batch_size=options.batch_size or 0,
        **more,
    )
