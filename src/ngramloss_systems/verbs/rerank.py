"""arguments of ``ngramloss rerank`` → a trained reranker, or its choice among candidates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import ngramloss as ng
from ngramloss import options as cli

if TYPE_CHECKING:
    from ngramloss_systems import simcls

RERANK = """\
Choose among several texts of each source, with an encoder that scores candidates by their likeness to it: SimCLS."""

TRAIN = """\
Train a reranker on candidates of one model or several, as `ngramloss candidates` writes them. To continue a stopped
training, run the same command again.

Files and folders that ngramloss wrote name their data; for other files, give --data, whose ids must match. Candidates
are best for sources that the generating model was not trained on: train two models on a half each, and let each
generate for the other half. Missing scores are computed with the task's usual metric."""

TRAIN_EXAMPLES = """\
examples:
  ngramloss rerank train runs/demo-matches234 --recipe simcls-demo
  ngramloss rerank train candidates/train --validation candidates/dev --run runs/simcls
  ngramloss rerank train half-1 half-2 --validation dev --encoder models/minilm --set train.max_steps=2000
  ngramloss rerank train others.jsonl --data my/pairs --encoder google-bert/bert-base-uncased
  ngramloss rerank train candidates --set 'system="simcls(margin=0.02,pooling=mean)"'
"""

APPLY = """\
Choose one candidate for each source, and write it to predictions.jsonl with references.jsonl beside it, as `ngramloss
generate` does. The table has mean scores: of the first candidates, the chosen ones, the best possible choice and all
candidates.

RERANKER is the folder of a trained reranker; first, the first candidate of each source; mbr, the candidate with the
highest mean score against the others (minimum Bayes risk); or best, the candidate with the highest score, an upper
bound."""

APPLY_EXAMPLES = """\
examples:
  ngramloss rerank apply runs/simcls candidates/test --out chosen
  ngramloss rerank apply first candidates/test --out first
  ngramloss rerank apply mbr candidates/test --out mbr
  ngramloss rerank apply best candidates/test --out best
  ngramloss rerank apply runs/simcls others.jsonl --data my/pairs --split test --out chosen
  ngramloss score first chosen best
"""

COLUMNS = ("first", "chosen", "best", "mean")
"""What the table has of a choice, besides the number of sources."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    cli.describe(parser, RERANK, "")
    whats = cli.choice(parser, metavar="WHAT", title="what to do")
    train = cli.describe(
        whats.add_parser("train", help="train a reranker on candidates"), TRAIN, TRAIN_EXAMPLES, run_train
    )
    train.add_argument("candidates", nargs="+", metavar="CANDIDATES", help="files of candidates, or folders with one")
    validation = "candidates that select the best weights (default: use the last weights); repeatable"
    cli.add_repeated(train, "--validation", "CANDIDATES", validation)
    train.add_argument("--recipe", default="simcls", metavar="NAME", help="recipe, or a file (default: %(default)s)")
    train.add_argument("--encoder", metavar="NAME", help="same as --set model.name=...: a hub id, a folder or scratch")
    cli.add_run(train, "runs/RECIPE")
    cli.add_repeated(train, "--set", "KEY=VALUE", "change a setting; repeatable")
    train.add_argument("--fresh", action="store_true", help="delete an earlier run in this folder and start over")
    _add_data(train)
    apply = cli.describe(whats.add_parser("apply", help="choose among candidates"), APPLY, APPLY_EXAMPLES, run_apply)
    apply.add_argument("reranker", metavar="RERANKER", help="a trained reranker's folder, first, mbr or best")
    apply.add_argument("candidates", nargs="+", metavar="CANDIDATES", help="files of candidates, or folders with one")
    apply.add_argument("--split", metavar="SPLIT", help="split of a file that does not name it (default: test)")
    apply.add_argument("-o", "--out", required=True, metavar="DIR", help="output folder")
    apply.add_argument(
        "--metric",
        metavar="NAME",
        default="",
        help=f"metric of mbr, or one of its scores: {cli.ALL_METRICS} (default: the metric of the candidates' scores)",
    )
    apply.add_argument("--json", action="store_true", help="print JSON")
    cli.add_repeated(apply, "--set", "KEY=VALUE", "change a setting of data.*, or task")
    _add_data(apply)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="NAME", help="data set of the candidates (default: the one that they name)")
    parser.add_argument("--on-bad-row", choices=["error", "skip"], help="same as --set data.on_bad_row=...")
    cli.add_columns(parser, source="of the sources; several with commas are joined", target="of the references")
    cli.add_trust(parser)


def _data_settings(options: argparse.Namespace) -> list[str]:
    """The settings that name the data: what was given, or what the first candidates say."""
    given = cli.recipe_settings(options)
    for name in (*options.candidates, *getattr(options, "validation", ())):
        if not Path(name).exists():
            raise ng.MissingFileError(f"there is no file or folder {name}. {ng.candidates.ADVICE}")
    if options.data:
        return [f"data.name={json.dumps(options.data)}", *given]
    if any(setting.startswith("data.name=") for setting in given):
        return given
    if name := str(ng.candidates.about_of(Path(options.candidates[0])).get("data", "")):
        return [f"data.name={json.dumps(name)}", *given]
    raise ng.UserError(
        f"{options.candidates[0]} does not name the data of its candidates. Name the data set or file with the "
        "sources and references: --data NAME."
    )


def _load(name: str, settings: list[str], task: str) -> ng.recipe.Recipe:
    """A recipe of this task, if that is known. Raises if the settings name another."""
    loaded = ng.recipe.load(name, [*([f"task={json.dumps(task)}"] if task else []), *settings])
    if task and loaded.task != task:
        raise ng.UserError(f"task: the reranker or the candidates are for {task}, got {loaded.task}. Leave task out.")
    return loaded


def run_train(options: argparse.Namespace) -> int:
    """Train a reranker."""
    from ngramloss_systems.candidate_sets import task_of

    given = [Path(name) for name in (*options.candidates, *options.validation)]
    for path in given:
        ng.candidates.raise_if_comma(path)
    files = [*(f"train={path}" for path in options.candidates), *(f"validation={path}" for path in options.validation)]
    settings = _load(
        options.recipe,
        [
            f"data.candidates={json.dumps(','.join(files))}",
            *([f"model.name={json.dumps(options.encoder)}"] if options.encoder else []),
            *_data_settings(options),
        ],
        task_of(given),
    )
    if not settings.system:
        raise ng.UserError(f"the recipe {options.recipe} is for a model that generates text. Use simcls.")
    return ng.train_run(settings, options.run, fresh=options.fresh)


def run_apply(options: argparse.Namespace) -> int:
    """Choose among candidates."""
    from ngramloss_systems.candidate_sets import OF_THE_DATA, check_asked, read_set, task_of
    from ngramloss_systems.simcls import choose

    accepted = ["task", "data.name", *(f"data.{name}" for name in OF_THE_DATA)]
    keys = [setting.partition("=")[0].strip() for setting in cli.recipe_settings(options)]
    if others := [key for key in keys if key not in accepted]:
        raise ng.UserError(
            f"rerank apply does not read {', '.join(others)}. It accepts --set for {', '.join(accepted)}; lengths "
            "come from the reranker."
        )
    paths, of_reranker = [Path(name) for name in options.candidates], ng.RunFolder(Path(options.reranker)).recipe
    asked = _data_settings(options)
    own = ng.recipe.load(str(of_reranker), objective=False).task if of_reranker.is_file() else ""
    theirs = task_of(paths)
    if own and theirs and own != theirs:
        raise ng.UserError(
            f"{options.reranker} was trained for {own}, but these candidates are for {theirs}. Give others."
        )
    settings = _load("simcls", asked, own or theirs)
    names = [key.removeprefix("data.") for key in keys if key != "task"]
    split = check_asked(paths, settings.data, options.split, [*names, *(["name"] if options.data else [])])
    of_split = read_set(paths, settings.data, settings.task, split)
    found = choose(options.reranker, of_split, Path(options.out), task=settings.task, metric=options.metric)
    ng.console.logger.info(
        f"another text than the first was chosen for {found.changed:,} of {found.sources:,} sources."
    )
    as_json = json.dumps(found._asdict(), indent=1, default=str)  # str for the path
    ng.console.print_result(as_json if options.json else f"{found.path}\n{_table(found)}")
    return 0


def _table(found: simcls.Chosen) -> str:
    cells = [f"{found.sources:,}", *(f"{getattr(found, name):.4f}" for name in COLUMNS)]
    return "\n".join([*ng.console.aligned([["sources", *COLUMNS], cells], left=()), f"scores: {found.metric}"])
