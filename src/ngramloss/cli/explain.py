"""arguments of ``ngramloss explain`` → windows of a sentence pair, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, verb
from ngramloss.cli.output import print_result

EXPLAIN = """\
Show an objective at work on a sentence pair: its windows, which of them match, how often, what each earns.

Words are split at white space; a model predicts one word for each position of the reference."""

EXPLAIN_EXAMPLES = """\
examples:
  ngramloss explain --reference "the cat sat on the mat" --candidate "the cat lay on the mat"
  ngramloss explain --reference "a b a b" --candidate "a b a c" --confidence 0.9 0.8 0.7 0.6
  ngramloss explain --reference "a b c" --candidate "b c a" --objective "ce + 0.5*matches(2) + bag(2):original"
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its options."""
    explain = verb(verbs, "explain", "show an objective at work on a sentence pair", EXPLAIN, EXPLAIN_EXAMPLES)
    explain.add_argument("--reference", required=True, metavar="TEXT", help="what should be said")
    explain.add_argument("--candidate", required=True, metavar="TEXT", help="the most probable word at each position")
    explain.add_argument("--objective", default="matches(2)", metavar="WRITTEN", help="default: %(default)s")
    explain.add_argument(
        "--confidence", type=float, nargs="+", default=[0.9], metavar="P",
        help="probability of the candidate's words: one for all, or one for each (default: 0.9)",
    )
    explain.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    from ngramloss.explain import explain

    print_result(explain(options.reference, options.candidate, options.objective, options.confidence))
    return 0
