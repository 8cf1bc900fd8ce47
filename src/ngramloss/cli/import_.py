"""arguments of ``ngramloss import`` → others' summaries as JSONL."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, output_file, verb
from ngramloss.cli.output import print_result, tell
from ngramloss.errors import UserError

IMPORT = """\
Bring in summaries that others released: give each the id of its reference, and put one sentence a line.

FILE has a summary a line (also .gz, .xz), or is JSONL, or a folder with a numbered file for each document and a
sentence a line (decoded/000000_decoded.txt). Known marks between sentences are found: <q>, <t> </t>, <n>, <S_SEP>,
[X_SEP], [SEP], and a backslash with an n. ROUGE's default tokenizer does not see quotes; it does see -lrb- and n't, and
metrics that know case or characters see all of it. --ptb undoes them; do so where the references are plain text."""

IMPORT_EXAMPLES = """\
examples:
  ngramloss import bertsum.candidate --gold bertsum.gold --references refs.jsonl -o bertsum.jsonl
  ngramloss import pointer-gen/decoded --order ids.txt --references refs.jsonl -o pointer.jsonl
  ngramloss import test.xsum.ours --ptb --references refs.jsonl -o simcls.jsonl
  ngramloss import system.txt --sentences "||" --references refs.jsonl -o system.jsonl
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its options."""
    bring = verb(verbs, "import", "bring in summaries that others released", IMPORT, IMPORT_EXAMPLES)
    bring.add_argument("file", metavar="FILE", help="the summaries: a file, or a folder of numbered files")
    bring.add_argument("--references", required=True, metavar="FILE", help="whose ids they get")
    bring.add_argument("-o", "--out", required=True, metavar="FILE", help="where to write them, as JSONL")
    bring.add_argument(
        "--sentences", action="append", metavar="MARK",
        help="what parts sentences; repeatable (default: the known marks that are there; none: no mark)",
    )
    bring.add_argument("--ptb", action="store_true", help="undo the Penn Treebank's brackets, quotes and spaces")
    whose = bring.add_mutually_exclusive_group()
    whose.add_argument("--order", metavar="FILE", help="ids in the order of the summaries (default: the references')")
    whose.add_argument("--gold", metavar="FILE", help="references released beside them; ids are found by their texts")
    bring.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    from pathlib import Path

    from ngramloss.scoring import import_summaries

    out = output_file(options.out, [options.file, options.references, options.order, options.gold])
    if out is None:
        raise UserError("name a file to write with --out.")
    order, gold = (Path(given) if given else None for given in (options.order, options.gold))
    marks = [] if options.sentences == ["none"] else options.sentences
    imported = import_summaries.read_summaries(
        Path(options.file), Path(options.references), marks=marks, ptb=options.ptb, order=order, gold=gold
    )
    import_summaries.write_summaries(imported, out)
    for mark, count in imported.marks.items():
        tell(f"note: {mark} parts sentences; it was seen {count} times.")
    for note in imported.notes:
        tell(f"note: {note}")
    print_result(options.out)
    return 0
