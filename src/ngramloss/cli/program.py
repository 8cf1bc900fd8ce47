"""arguments → the command they name, run, and an exit code: 0 success, 1 failure, 2 wrong usage, 3 divergence."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ngramloss.cli.options import choice, load_plugins
from ngramloss.cli.verbs import VERBS, in_order
from ngramloss.errors import UserError, see
from ngramloss.models.remote_code import allow_remote_code
from ngramloss.output import escape
from ngramloss.output.console import logger, print_result, show_messages
from ngramloss.plugins import LazyFunction, blame
from ngramloss.settings import nearest
from ngramloss.storage.files import FULL, cache_folder
from ngramloss.version import __version__, installed, lacking


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:  # by default threads spin and starve others
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # GNU's OpenMP reads this with torch
    show_messages()
    options = argparse.Namespace()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without ± prints ? instead of failing
        sys.stdout.reconfigure(errors="replace")
    try:
        options = parser().parse_args(arguments)
        options.arguments = sys.argv[1:] if arguments is None else [*arguments]
        with allow_remote_code(getattr(options, "trust_remote_code", False)):
            _check_counts(options)
            load_plugins(options)
            return int(options.run_verb(options))
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except UserError as mistake:
        logger.error(f"error: {mistake}" + (f"\n{see(mistake.about)}" if mistake.about else ""))
        return 2
    except KeyboardInterrupt:
        logger.error("stopped.")
        return 130
    except Exception as error:
        return _report_failure(error, has_batch_size=hasattr(options, "batch_size"))


SPINS = "1000"  # How often a waiting thread looks before it sleeps: some microseconds


LEAST = {
    **dict.fromkeys(("batch_size", "seeds", "samples", "accumulate", "warm_up", "steps"), 1),
    **dict.fromkeys(("num_return", "repeats", "beams", "groups", "parallel"), 1),
    "count": 2,
}
"""The smallest value of each integer option; 0 for options not listed."""
MOST = {
    **dict.fromkeys(("batch_size", "accumulate"), 2**16),
    **dict.fromkeys(("samples", "shuffles", "documents"), 10**6),
    **dict.fromkeys(("source", "target", "length"), 2**20),
    **dict.fromkeys(("workers", "parallel"), 2**10),
    **dict.fromkeys(("num_return", "beams", "groups", "count"), 2**12),
    "seeds": 1000,
    "repeats": 10**4,
    "longest": 2**24,
}
"""The largest value of each integer option, so that a typing error does not fill the memory; else 2³² − 1."""


def _check_counts(options: argparse.Namespace) -> None:
    """Check integer options before any work begins: `reproduce --limit -1` would otherwise train first."""
    for name, value in vars(options).items():
        if type(value) is not int:
            continue
        flag, least, most = f"--{name.replace('_', '-')}", LEAST.get(name, 0), MOST.get(name, 2**32 - 1)
        if value < least:
            raise UserError(f"{flag} must be {least} or more, got {value}.")
        if value > most:
            raise UserError(f"{flag} must be at most {most:,}, got {value:,}.")


def _report_failure(error: Exception, *, has_batch_size: bool) -> int:
    """Print why a command failed: one sentence for a missing package or a system error, a traceback for a bug."""
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    if plugin := blame(error):
        logger.error(plugin.lines)
        logger.error(f"error: {plugin.place} raised {type(error).__name__}: {error}")
    elif isinstance(error, ModuleNotFoundError) and package and not package.startswith("ngramloss"):
        logger.error(f"error: {lacking(error)}")
    elif isinstance(error, OSError):  # such as a full disk or a folder without write permission
        logger.error(f"error: {_refusal(error)}")
    elif _lacks_memory(error):
        what = (
            "--batch-size or data.max_source"
            if has_batch_size
            else "train.max_tokens, train.batch_size (and raise train.accumulate to keep the step) or data.max_source"
        )
        message, process, _ = str(error).partition(chr(10))[0].partition(" Process ")  # PyTorch lists who uses the GPU
        others = " nvidia-smi shows which other processes use the GPU." if process else ""
        logger.error(
            f"error: not enough memory: {message[:300] or type(error).__name__} Lower {what}.{others}\n{see('memory')}"
        )
    else:
        logger.error("".join(traceback.format_exception(error)).rstrip("\n"))
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        package = str(innermost.f_globals.get("__name__", "")).partition(".")[0]
        library = package if package != "ngramloss" and installed(package) else ""
        whose = (
            f"{library} raised {type(error).__name__}. If the model, the data and the versions are what they should "
            "be, this is a bug in ngramloss."
            if library
            else "unexpected error. This is probably a bug in ngramloss, not a mistake of yours."
        )
        logger.error(f"error: {whose} Please report it with the traceback above and the output of `ngramloss doctor`.")
    return 1


def _lacks_memory(error: Exception) -> bool:
    """Whether the machine or its GPU ran out of memory. Does not import torch."""
    names = {base.__name__ for base in type(error).__mro__}
    return not names.isdisjoint({"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _refusal(refused: OSError) -> str:
    if refused.strerror is None:
        return str(refused)
    sentence = f"{refused.strerror}: {refused.filename}" if refused.filename else refused.strerror
    if refused.errno not in FULL:
        return sentence
    is_cache = refused.filename and Path(refused.filename).is_relative_to(cache_folder())
    where = "name a cache on another disk with NGRAMLOSS_CACHE" if is_cache else "choose a folder on another disk"
    return f"{sentence}. Free some disk space, or {where}; then run the same command again."


class _Parser(argparse.ArgumentParser):
    fill: Callable[[], object] | None = None  # adds the options of a command, once it is given

    def error(self, message: str) -> NoReturn:
        super().error(escape.for_terminal(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as refused:
            hint = nearest(str(value), map(str, action.choices or ()), 0.6)
            refused.message = f"{refused.message}. {hint}".rstrip() if hint else refused.message
            raise

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown arguments here, with the usage of their own command; otherwise the program would."""
        if self.fill:
            fill, self.fill = self.fill, None
            fill()
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = nearest(unknown[0].partition("=")[0], self._option_string_actions, 0.6)
            takes_several = any(each.nargs in ("*", "+") for each in self._get_positional_actions())
            if takes_several and not unknown[0].startswith("-"):
                hint = "Name everything together, before or behind the options."
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}".rstrip())
        return options, unknown


GREETING = f"""\
ngramloss {__version__}: n-gram training objectives at the price of cross-entropy.

Start with a small recipe and made-up data:
  ngramloss new mine && cd mine

Then four commands, each with --help:
  ngramloss train small.toml --run run        train a model, about a minute on a CPU
  ngramloss generate run                      write a text for every test document
  ngramloss score run                         scores with confidence intervals
  ngramloss report run -o report              one page of results

ngramloss --help lists all commands, ngramloss doctor shows what is installed. ngramloss docs prints the guide."""


def greet(_: argparse.Namespace) -> int:
    """Print the commands to begin with."""
    print_result(GREETING)
    return 0


def _about(name: str) -> str:
    origin = VERBS.origin(name)
    return VERBS[name].about + (f" ({origin})" if origin else "")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. torch is imported only when a command runs."""
    root: argparse.ArgumentParser = _Parser(
        prog="ngramloss", description="N-gram training objectives at the price of cross-entropy."
    )
    root.add_argument("--version", action="version", version=f"ngramloss {__version__}")
    verbs = choice(root, metavar="COMMAND", title="commands, the first five to start with")
    root.set_defaults(run_verb=greet)
    for name in in_order():
        problem = VERBS.problem(name)
        verb = verbs.add_parser(name, help=problem or _about(name))
        assert isinstance(verb, _Parser)
        verb.fill = partial(verb.error, problem) if problem else partial(LazyFunction(VERBS[name].add), verb)
    return root
