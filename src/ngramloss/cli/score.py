"""arguments of ``ngramloss score`` → a table of scores, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import add_scoring, describe, output_file, score_from_options, systems_given
from ngramloss.errors import UserError
from ngramloss.output.console import logger, print_result

SCORE = """\
Score the summaries or translations of one or more systems against references, with confidence intervals, and compare
each system with the first.

A system is a run's folder after `ngramloss generate`, or a file of predictions. The scores of a run's documents are
saved in its folder as scores.jsonl and reused. A file is JSONL with an id and a prediction in each line, a JSON list,
CSV, or plain text with one text per line; all may be compressed (.gz, .xz). Files of references and documents
have the same formats.

FILE:COLUMN names the column to read, so that systems, references and documents may be in one file. --group makes one
row of the runs or files that differ in their seed: mean, standard deviation and tests over seeds.

A system is named after its folder, file or column. Texts are matched by id; missing, extra or repeated ids are errors.
`ngramloss list metrics` describes all metrics and their options. If a metric lacks a model or a package, the others
still run."""

SCORE_EXAMPLES = """\
examples, from the first line on:
  echo '{"id": 1, "document": "The cat sat on the mat all day.", "reference": "the cat sat on the mat"}' > refs.jsonl
  echo '{"id": 1, "prediction": "the cat sat on a mat"}' > a.jsonl
  echo '{"id": 1, "prediction": "a dog lay on the mat"}' > b.jsonl
  ngramloss score --references refs.jsonl a.jsonl b.jsonl
  ngramloss score --references refs.jsonl --documents refs.jsonl --metrics rouge,bleu,chrf,shape a.jsonl b.jsonl
  ngramloss score --references refs.jsonl a.jsonl --set rouge.sentences=pysbd --json
  ngramloss score --references refs.jsonl a.jsonl b.jsonl --limits 5:62 --markdown
  ngramloss score --references refs.jsonl a.jsonl --set rouge.tokens=auto --latex
  ngramloss score --references refs.jsonl a.jsonl --metrics rouge,bertscore --set bertscore.model=roberta-large
  ngramloss score --references refs.jsonl:reference --group 'ours=[ab].jsonl'
runs, after ngramloss generate:
  ngramloss score runs/*
  ngramloss score --group 'ce=runs/ce-*' --group 'matches=runs/matches2-*'
"""


def add(score: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(score, SCORE, SCORE_EXAMPLES, run)
    add_scoring(score, metrics="rouge", translation_metrics="bleu,chrf")
    score.add_argument("--per-document", metavar="FILE", help="write the scores of every document as JSONL")
    form = score.add_mutually_exclusive_group()
    titles = {"json": "JSON", "latex": "a LaTeX table", "markdown": "a Markdown table"}
    for name, title in titles.items():
        form.add_argument(f"--{name}", action="store_true", help=f"print {title}")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.output import tabular
    from ngramloss.scoring import tables
    from ngramloss.scoring.scored_texts import parse_file

    others = [parse_file(text) for text in [*options.references, options.documents] if text]
    out = output_file(options.per_document, [str(given.path) for given in [*systems_given(options), *others]])
    result, _ = score_from_options(options)
    if out is not None:
        tables.write_documents(result, out)
    if result.absent and not result.scores:
        raise UserError("nothing was scored.\n" + "\n".join(f"  {name}: {why}" for name, why in result.absent.items()))
    forms = {"latex": tabular.as_latex, "markdown": tabular.as_markdown}
    form = next((forms[name] for name in forms if getattr(options, name)), None)
    for warning in result.decoded_differently if form else ():  # the others have it themselves
        logger.warning(warning)
    own = tables.as_json if options.json else tables.as_text
    print_result(form(tables.table(result)).text if form else own(result))
    return 0
