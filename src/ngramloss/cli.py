"""arguments → the verbs, and an exit code: 0 done, 1 failed, 2 misused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ngramloss.version import __version__

EXPLAIN = """\
Show an objective at work on a sentence pair: its windows, which of them match, how often, what each earns.

Words are split at white space; a model predicts one word for each position of the reference."""

EXPLAIN_EXAMPLES = """\
examples:
  ngramloss explain --reference "the cat sat on the mat" --candidate "the cat lay on the mat"
  ngramloss explain --reference "a b a b" --candidate "a b a c" --confidence 0.9 0.8 0.7 0.6
  ngramloss explain --reference "a b c" --candidate "b c a" --objective "ce + 0.5*matches(2) + bag(2):original"
"""

BENCH = "Time the n-gram part of an objective from T = 128 to 32,768: it grows like T log T, not T²."

BENCH_EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch 16 --device cuda
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except (ValueError, TypeError, FileNotFoundError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """All verbs and their options. Importing torch waits until a verb runs."""
    root = argparse.ArgumentParser(
        prog="ngramloss", description="N-gram training objectives at the price of cross-entropy."
    )
    root.add_argument("--version", action="version", version=f"ngramloss {__version__}")
    verbs = root.add_subparsers(required=True, metavar="COMMAND", title="commands")

    explain = _verb(verbs, "explain", "show an objective at work on a sentence pair", EXPLAIN, EXPLAIN_EXAMPLES)
    explain.add_argument("--reference", required=True, metavar="TEXT", help="what should be said")
    explain.add_argument("--candidate", required=True, metavar="TEXT", help="the most probable word at each position")
    explain.add_argument("--objective", default="matches(2)", metavar="WRITTEN", help="default: %(default)s")
    explain.add_argument(
        "--confidence", type=float, nargs="+", default=[0.9], metavar="P",
        help="probability of the candidate's words: one for all, or one for each (default: 0.9)",
    )
    explain.set_defaults(run=_explain)

    bench = _verb(verbs, "bench", "measure what things cost here", BENCH, BENCH_EXAMPLES)
    bench.add_argument("what", choices=["ngrams"], help="what to measure")
    bench.add_argument("--objective", default="matches(2,3,4)", metavar="WRITTEN", help="default: %(default)s")
    bench.add_argument("--batch", type=int, default=4, metavar="B", help="sequences in a batch (default: %(default)s)")
    bench.add_argument("--longest", type=int, default=32768, metavar="T", help="default: %(default)s")
    bench.add_argument("--device", default="cpu", help="default: %(default)s")
    bench.set_defaults(run=_bench)
    return root


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, text: str, examples: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name, help=summary, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _explain(options: argparse.Namespace) -> int:
    from ngramloss.explain import explain

    print(explain(options.reference, options.candidate, options.objective, options.confidence))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from ngramloss.bench import ngram_part

    for line in ngram_part(options.objective, batch=options.batch, longest=options.longest, device=options.device):
        print(line, flush=True)
    return 0
