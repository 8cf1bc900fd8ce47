"""arguments of ``ngramloss import`` → summaries that others released, as JSONL."""

from __future__ import annotations

import argparse
from pathlib import Path

from ngramloss import UserError, console
from ngramloss import options as cli

IMPORT = """\
Convert summaries that others released to JSONL: give each the id of its reference, and put each sentence on its own
line.

FILE is a text file with one summary per line, a JSONL file (both also as .gz or .xz), or a folder with one numbered
file per document and one sentence per line (decoded/000000_decoded.txt). These sentence separators are recognised: <q>,
<t> </t>, <n>, <S_SEP>, [X_SEP], [SEP], and a backslash followed by n.

Use --ptb if the summaries have Penn Treebank tokens (-lrb-, `` '', do n't) and the references are plain text. ROUGE's
default tokenizer ignores quotes, but -lrb- and n't change its scores, and metrics that read characters or case see
every difference."""

IMPORT_EXAMPLES = """\
examples:
  ngramloss import bertsum.candidate --gold bertsum.gold --references refs.jsonl -o bertsum.jsonl
  ngramloss import pointer-gen/decoded --order ids.txt --references refs.jsonl -o pointer.jsonl
  ngramloss import test.xsum.ours --ptb --references refs.jsonl -o simcls.jsonl
  ngramloss import system.txt --sentences "||" --references refs.jsonl -o system.jsonl
"""


def add(bring: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    cli.describe(bring, IMPORT, IMPORT_EXAMPLES, run)
    bring.add_argument("file", metavar="FILE", help="summaries: a file, or a folder of numbered files")
    bring.add_argument("--references", required=True, metavar="FILE", help="references whose ids the summaries get")
    bring.add_argument("-o", "--out", required=True, metavar="FILE", help="JSONL file to write")
    bring.add_argument(
        "--sentences",
        action="append",
        metavar="MARK",
        help="sentence separator; repeatable; none: do not split (default: the known separators that occur)",
    )
    bring.add_argument("--ptb", action="store_true", help="turn Penn Treebank tokens back into plain text")
    whose = bring.add_mutually_exclusive_group()
    whose.add_argument(
        "--order",
        metavar="FILE",
        help="ids in the order of the summaries, one per line (default: order of the references)",
    )
    whose.add_argument(
        "--gold",
        metavar="FILE",
        help="references released with the summaries, with the same ids or in the same order; ids of the references "
        "are found by their texts",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss_systems import import_summaries

    out = cli.output_file(options.out, [options.file, options.references, options.order, options.gold])
    if out is None:
        raise UserError("give an output file with --out FILE.")
    order, gold = (Path(given) if given else None for given in (options.order, options.gold))
    marks = [] if options.sentences == ["none"] else options.sentences
    imported = import_summaries.read_summaries(
        Path(options.file), Path(options.references), marks=marks, ptb=options.ptb, order=order, gold=gold
    )
    import_summaries.write_summaries(imported, out)
    for mark, count in imported.marks.items():
        console.logger.info(f"note: split sentences at {mark}, which occurs {count} times.")
    for note in imported.notes:
        console.logger.info(f"note: {note}")
    console.print_result(options.out)
    return 0
