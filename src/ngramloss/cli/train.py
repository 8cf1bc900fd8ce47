"""arguments of ``ngramloss train`` → a trained run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ngramloss.cli.options import add_columns, add_repeated, add_run, add_trust, describe, recipe_settings
from ngramloss.errors import DIVERGED
from ngramloss.output import escape
from ngramloss.output.console import first_process, logger, print_result

if TYPE_CHECKING:
    from ngramloss.recipe import Recipe
    from ngramloss.training.run import Run

TRAIN = """\
Train a model with the settings of a recipe. To continue a stopped run, run the same command again.

RECIPE is demo (a small model from scratch on the built-in corpus), newswire (fine-tune such a model), cnndm or xsum
(the paper's settings), brio-cnndm or brio-xsum (training on candidates), online-demo (training on outputs that the
model of demo samples meanwhile), translation (a small model from scratch), sft or sft-lora (a decoder-only model, whole
or with adapters), drafter (what lets a trained model write faster), parallel (a model that predicts all tokens at
once), simcls, bertsum-ext, bertsum-abs, pointer-generator, gsum, fes or prophetnet (other systems; with -demo, small
ones: drafter-demo, parallel-demo, simcls-demo, bertsum-ext-demo, bertsum-abs-demo, pointer-generator-demo, gsum-demo,
fes-demo, prophetnet-demo), lm or lm-demo (a language model of the targets, which fes reads), or a TOML file of your
own. Your file may begin with base = "xsum" and contain only the settings that differ. ngramloss docs settings
describes all settings."""

TRAIN_EXAMPLES = """\
examples:
  ngramloss train demo
  ngramloss train xsum --set objective="ce + matches(2)" --set train.batch_size=8
  ngramloss train demo --run runs/mine --set train.max_steps=200 --set train.eval_every=100
  ngramloss train translation --set data.name=my/pairs --source en --target de
  ngramloss train demo --show                                 # the recipe as it would be run
  torchrun --nproc_per_node 2 -m -- ngramloss train xsum      # two processes, the same batch, the same result
"""


def add(train: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(train, TRAIN, TRAIN_EXAMPLES, run)
    train.add_argument("recipe", metavar="RECIPE", help="a recipe (see ngramloss list recipes), or a TOML file")
    add_run(train, "runs/RECIPE-OBJECTIVE")
    add_repeated(train, "--set", "KEY=VALUE", "change a setting; repeatable")
    train.add_argument("--fresh", action="store_true", help="delete an earlier run in this folder and start over")
    train.add_argument("--on-bad-row", choices=["error", "skip"], help="same as --set data.on_bad_row=...")
    train.add_argument("--show", action="store_true", help="print the recipe with all its settings and exit")
    add_columns(train, source="of the sources; several with commas are joined", target="of the targets")
    add_trust(train)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss import recipe
    from ngramloss.training.system_registry import run_of

    settings = recipe.load(options.recipe, recipe_settings(options))
    if options.show:
        print_result(escape.in_json(recipe.dump(run_of(settings).settings)).rstrip("\n"))
        return 0
    return train_run(settings, options.run, fresh=options.fresh)


def train_run(settings: Recipe, run: str | None, *, fresh: bool = False) -> int:
    """Train what a recipe asks for, as ``ngramloss train`` does.

    Args:
        settings: the recipe.
        run: the folder; by default one with the recipe's name.
        fresh: delete an earlier run in this folder.

    Returns:
        The exit code.
    """
    from ngramloss.models.remote_code import remote_code_allowed
    from ngramloss.training import runner
    from ngramloss.training.loop import Diverged
    from ngramloss.training.prepared import Stopped
    from ngramloss.training.system_registry import run_of, with_whole_paths

    asked = run_of(settings)
    folder = Path(run or Path("runs") / asked.settings.slug)
    try:
        asked = with_whole_paths(asked) if asked.system else asked
        outcome = runner.train(asked, folder, fresh=fresh)
    except Stopped:
        return 1
    except Diverged as reason:
        logger.error(f"error: {reason}")
        return DIVERGED
    if not outcome.finished:
        return 130
    if first_process():
        _recommend_next(asked, str(folder), " --trust-remote-code" if remote_code_allowed() else "")
    return 0


def _recommend_next(asked: Run, folder: str, trust: str) -> None:
    import shlex

    from ngramloss.data import has_split

    run = shlex.quote(folder)
    command = asked.system.entry.after.format(run=run) if asked.system else ""
    if not command:
        split = next(part for part in ("test", "validation", "train") if has_split(asked.settings.data, part))
        if split == "train":
            logger.info(
                "the data have no test split, so the next command generates for the training split. Hold a part of "
                "it out with data.test_fraction=0.1, or choose other data with --data."
            )
        extra = {"test": "", "validation": " --split validation", "train": " --split train --limit 20"}[split]
        command = f"ngramloss generate {run}{extra}"
    logger.info(f"next: {command}{trust}")
