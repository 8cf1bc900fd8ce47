"""options that several commands share → their parsers and checked values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ngramloss.errors import MissingFileError, UserError
from ngramloss.output.console import logger
from ngramloss.plugins import load_file

if TYPE_CHECKING:
    from ngramloss.scoring import results, scored_texts

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The commands that a parser chooses from."""
Run: TypeAlias = "Callable[[argparse.Namespace], int]"
ALL_METRICS = "{metrics}"
"""Stands for the names of all metrics in the help of an option."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Names the metrics only when help is shown: finding those of installed packages takes time."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        if not text or ALL_METRICS not in text:
            return text
        from ngramloss.metrics.registry import METRICS

        return text.replace(ALL_METRICS, ", ".join(METRICS))


def describe(
    parser: argparse.ArgumentParser, text: str, examples: str, run: Run | None = None
) -> argparse.ArgumentParser:
    """Give a command's parser its description, examples, and the function that runs it and returns the exit code."""
    parser.description, parser.epilog, parser.formatter_class = text, examples, _Formatter
    add_repeated(parser, "--plugin", "FILE", "run a Python file that adds objectives or metrics; repeatable")
    parser.set_defaults(run_verb=run)
    return parser


def load_plugins(options: argparse.Namespace) -> None:
    """Run the plugin files of a command, which add objectives and metrics."""
    for plugin in options.plugin:
        load_file(Path(plugin))


def choice(parser: argparse.ArgumentParser, *, metavar: str, title: str) -> Verbs:
    """Let a parser choose a command. Without one, it shows them all on standard error; the exit code is 2."""

    def show(_: argparse.Namespace) -> int:
        logger.error(parser.format_help().rstrip("\n"))
        return 2

    parser.set_defaults(run_verb=show, plugin=[])
    return parser.add_subparsers(metavar=metavar, title=title)


def recipe_settings(options: argparse.Namespace) -> list[str]:
    """The ``--set KEY=VALUE`` settings. ``--on-bad-row`` is a short form of one of them."""
    columns = {name: getattr(options, name) for name in ("source", "target", "id")}
    named = [f"data.{name}={json.dumps(column)}" for name, column in columns.items() if column]
    return [*options.set, *named, *([f'data.on_bad_row="{options.on_bad_row}"'] if options.on_bad_row else [])]


def add_scoring(verb: argparse.ArgumentParser, *, metrics: str, translation_metrics: str) -> None:
    """Add the options of the commands that score, with the metrics that are computed unless others are chosen."""
    verb.add_argument(
        "predictions",
        nargs="*",
        metavar="RUN_OR_FILE",
        help="one per system, or FILE:COLUMN; the others are compared with the first",
    )
    group = (
        "runs or files of one system that differ in their seed, such as 'ce=ce-*.jsonl'; its row has mean and spread; "
        "repeatable; groups come before other systems"
    )
    add_repeated(verb, "--group", "NAME=FILES", group)
    references = (
        "reference texts, FILE or FILE:COLUMN (default: those in the runs' folders); repeat it for several references "
        "of each document"
    )
    add_repeated(verb, "--references", "FILE", references)
    verb.add_argument("--documents", metavar="FILE", help="source documents, for the metrics that read them")
    verb.add_argument(
        "--prediction", metavar="COLUMN", default="", help="column of the predictions (default: detected)"
    )
    add_columns(verb, source="of the documents", target="of the references; several with commas")
    verb.add_argument(
        "--metrics",
        metavar="NAMES",
        help=f"metrics to compute, separated by commas: {ALL_METRICS} (default: {metrics}; if a run's task is "
        f"translation: {translation_metrics})",
    )
    verb.set_defaults(metrics_by_task={"summarisation": metrics, "translation": translation_metrics})
    add_repeated(verb, "--set", "METRIC.OPTION=VALUE", "set a metric's option; repeatable")
    verb.add_argument(
        "--limits", metavar="MIN:MAX", help="report texts with fewer or more tokens, or else words (default: the run's)"
    )
    add_number(verb, "--samples", 1000, "N", "bootstrap samples")
    shuffles = "shuffles of the paired randomisation test; 0 leaves the test out"
    add_number(verb, "--shuffles", 10000, "N", shuffles)
    add_number(verb, "--seed", 12345, "N", "random seed of bootstrap and randomisation")


def add_number(verb: argparse.ArgumentParser, name: str, default: float, metavar: str, help: str) -> None:
    """Add an option that takes a number, a whole one if the default is; its help ends with the default."""
    verb.add_argument(name, type=type(default), default=default, metavar=metavar, help=f"{help} (default: %(default)s)")


def add_repeated(verb: argparse.ArgumentParser, name: str, metavar: str, help: str) -> None:
    """Add an option that may be given several times: a list of texts."""
    verb.add_argument(name, action="append", default=[], metavar=metavar, help=help)


def add_columns(verb: argparse.ArgumentParser, *, source: str, target: str) -> None:
    """Add the options that name columns."""
    verb.add_argument("--source", metavar="COLUMN", default="", help=f"column {source} (default: detected)")
    verb.add_argument("--target", metavar="COLUMN", default="", help=f"column {target} (default: detected)")
    verb.add_argument(
        "--id", metavar="COLUMN", default="", help="column of ids; none: use row numbers (default: detected)"
    )


def add_run(verb: argparse.ArgumentParser, default: str) -> None:
    """Add the option that names the folder of a training. What other commands write is ``-o``; it works here, too."""
    verb.add_argument("--run", metavar="DIR", help=f"the run's folder (default: {default})")
    verb.add_argument("-o", "--out", dest="run", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_trust(verb: argparse.ArgumentParser) -> None:
    """Add the option that allows a model's own code to run."""
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow this command to run code that comes with the model; a recipe cannot allow it",
    )


def passed_on(options: argparse.Namespace) -> tuple[str, ...]:
    """The options that a command passes on to those that it starts: plugins, and the trust in a model's code."""
    plugins = [word for plugin in options.plugin for word in ("--plugin", plugin)]
    return (*plugins, *(["--trust-remote-code"] if options.trust_remote_code else []))


def systems_given(options: argparse.Namespace) -> list[scored_texts.Given]:
    """The systems named on the command line, groups first: a shell splits ``--group ce={a,b}.jsonl`` into words."""
    from ngramloss.scoring.scored_texts import parse_file, parse_groups

    names = {text.partition("=")[0].strip() for text in options.group}
    more = [text for text in options.predictions if text.partition("=")[0] in names and not Path(text).exists()]
    return [
        *parse_groups([*options.group, *more]),
        *(parse_file(text) for text in options.predictions if text not in more),
    ]


def score_from_options(options: argparse.Namespace) -> tuple[results.Result, scored_texts.Aligned]:
    """Score the systems named on the command line."""
    from ngramloss.metrics.registry import METRICS
    from ngramloss.scoring import audit, results, scored_texts
    from ngramloss.scoring.texts import Named

    given = _default_metrics(options) if options.metrics is None else options.metrics
    chosen = [name.strip() for name in given.split(",") if name.strip()]
    settings = metric_options(options.set, chosen)
    for name in chosen:
        METRICS.entry(name)  # an unknown metric is an error before any file is read
    limits = audit.limits(options.limits) if options.limits else None
    named = Named(options.prediction, options.target, options.source, options.id)
    texts = scored_texts.align(
        [scored_texts.parse_file(text) for text in options.references],
        systems_given(options),
        scored_texts.parse_file(options.documents) if options.documents else None,
        named=named,
    )
    for warning in texts.warnings:
        logger.warning(f"warning: {warning}")
    result = results.score_systems(
        texts,
        chosen,
        options=settings,
        samples=options.samples,
        shuffles=options.shuffles,
        seed=options.seed,
        limits=limits,
    )
    for warning in result.cache_warnings:
        logger.warning(f"warning: {warning}")
    return result, texts


def _default_metrics(options: argparse.Namespace) -> str:
    from ngramloss.scoring import provenance

    tasks = {provenance.task(given.path) for given in systems_given(options) if given.path.is_dir()}
    metrics: dict[str, str] = options.metrics_by_task
    return metrics["translation" if "translation" in tasks else "summarisation"]


def output_file(given: str | None, inputs: Sequence[str | None] = ()) -> Path | None:
    """The path of an output file. Raise before the work begins if it cannot be written or would overwrite an input."""
    import os

    if not given:
        return None
    path = Path(given)
    if path.is_dir():
        raise UserError(f"{given} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise MissingFileError(f"cannot write {given}: there is no folder {path.parent}. Create it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {given}: permission denied. Choose another name.")
    read = [Path(name) for name in inputs if name and Path(name).exists()]
    if path.exists() and any(
        file.samefile(path) or file.samefile(path.parent)  # or a file in a run's folder
        for file in read
    ):
        raise UserError(f"{given} is an input and would be overwritten. Choose another name.")
    return path


def metric_options(settings: Sequence[str], chosen: Sequence[str]) -> dict[str, dict[str, object]]:
    """``--set METRIC.OPTION=VALUE`` as metric → option → value, checked."""
    from ngramloss.metrics.registry import METRICS, checked_options
    from ngramloss.settings import toml_value

    options: dict[str, dict[str, object]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        metric, dot, name = key.strip().partition(".")
        if not equals or not dot or metric not in chosen:
            raise UserError(f"--set takes METRIC.OPTION=VALUE for a metric in --metrics, got {setting!r}.")
        described = METRICS.entry(metric).options.get(name)
        options.setdefault(metric, {})[name] = described.read(text) if described else toml_value(text)
    return {metric: checked_options(metric, given) for metric, given in options.items()}
