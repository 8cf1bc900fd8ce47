"""arguments of ``ngramloss explain`` → the n-grams of a sentence pair and what they earn, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import describe
from ngramloss.errors import UserError
from ngramloss.output.console import logger, print_result

EXPLAIN = """\
Show how an objective scores a sentence pair: its n-grams, which of them match, how often, and what each one earns.

Words are split at white space. The candidate is what a model would predict, one word per position of the reference."""

EXAMPLE = "the cat sat on the mat", "the cat lay on the mat"  # What is explained without --reference and --candidate
EXPLAIN_EXAMPLES = """\
examples:
  ngramloss explain
  ngramloss explain --reference "the cat sat on the mat" --candidate "the cat lay on the mat"
  ngramloss explain --reference "a b a b" --candidate "a b a c" --confidence 0.9 0.8 0.7 0.6
  ngramloss explain --reference "a b c" --candidate "b c a" --objective "ce + 0.5*matches(2) + bag(2):original"
  ngramloss explain --reference "we met in may" --candidate "we met on may" --others "we met" "in june" --objective rank
  ngramloss explain --reference "a b c" "b c d" --candidate "b c c" "b c d" --objective "ce + matches(2)"
  ngramloss explain --reference "the cat sat" --candidate "the cat lay" --compare "ce" "ce + matches(2)"
"""


def add(explain: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(explain, EXPLAIN, EXPLAIN_EXAMPLES, run)
    explain.add_argument(
        "--reference",
        nargs="+",
        metavar="TEXT",
        help="reference sentence; several are documents that a trainer packs into one row",
    )
    explain.add_argument(
        "--candidate",
        nargs="+",
        metavar="TEXT",
        help="predicted sentence, one for each reference: the most probable word at each position",
    )
    explain.add_argument(
        "--others",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="other outputs of the model, for objectives that compare them: rank, risk, prefer, policy and credit",
    )
    what = explain.add_mutually_exclusive_group()
    what.add_argument(
        "--objective", default="matches(2)", metavar="OBJECTIVE", help="objective to explain (default: %(default)s)"
    )
    what.add_argument(
        "--compare",
        nargs="+",
        metavar="OBJECTIVE",
        help="show the gradient that each of these objectives puts on every word, side by side",
    )
    explain.add_argument(
        "--confidence",
        type=float,
        nargs="+",
        default=[0.9],
        metavar="P",
        help="probability of the candidate's words: one value for all words, or one per word (default: 0.9)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if not options.reference and not options.candidate:
        options.reference, options.candidate = ([text] for text in EXAMPLE)
        logger.info('this pair is an example; give your own with --reference "…" --candidate "…"')
    if not options.reference or not options.candidate:
        raise UserError("--reference and --candidate belong together. Give both, or none for an example.")
    if options.compare:
        return _compare(options)
    from ngramloss.loss.explaining.explain import explain

    print_result(explain(options.reference, options.candidate, options.objective, options.confidence, options.others))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from ngramloss.loss.explaining import compare_gradients

    if len(options.reference) > 1 or len(options.candidate) > 1:
        raise UserError("--compare takes one reference and one candidate. Quote each of them.")
    rows, notes = compare_gradients.pushes(
        options.reference[0], options.candidate[0], options.compare, options.confidence, options.others
    )
    print_result(compare_gradients.as_text(rows, options.compare, notes))
    return 0
