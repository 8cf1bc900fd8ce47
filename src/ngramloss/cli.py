"""arguments → the verbs, and an exit code: 0 done, 1 failed, 2 misused."""

from __future__ import annotations

import argparse
import io
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ngramloss import escape
from ngramloss.errors import MissingFileError, UserError
from ngramloss.version import __version__, lacking

if TYPE_CHECKING:
    from pathlib import Path

    from ngramloss import recipe
    from ngramloss.scoring import results, systems

EXPLAIN = """\
Show an objective at work on a sentence pair: its windows, which of them match, how often, what each earns.

Words are split at white space; a model predicts one word for each position of the reference."""

EXPLAIN_EXAMPLES = """\
examples:
  ngramloss explain --reference "the cat sat on the mat" --candidate "the cat lay on the mat"
  ngramloss explain --reference "a b a b" --candidate "a b a c" --confidence 0.9 0.8 0.7 0.6
  ngramloss explain --reference "a b c" --candidate "b c a" --objective "ce + 0.5*matches(2) + bag(2):original"
"""

TRAIN = """\
Train by a recipe: its settings, a folder for the run, and from there on the same command continues what was stopped.

RECIPE is demo (a small model from scratch on the built-in corpus), newswire (such a model fine-tuned), cnndm or xsum
(the paper's settings), or a TOML file of your own, which may begin with base = "xsum" and say only what differs. See
docs/train.md."""

TRAIN_EXAMPLES = """\
examples:
  ngramloss train demo
  ngramloss train xsum --set objective="ce + matches(2)" --set train.batch_size=8
  ngramloss train demo --run runs/mine --set train.max_steps=200 --set train.eval_every=100
  ngramloss train demo --show                                 # the recipe as it would be run
  torchrun --nproc_per_node 2 -m -- ngramloss train xsum      # two processes, the same batch, the same result
"""

GENERATE = """\
Write a summary for every document of a split: predictions.jsonl, references.jsonl, and the settings in generation.json.

MODEL is a run's folder, a model's folder or hub id, or lead-3 (the first three sentences). The same command continues a
stopped job; no id is written twice. Under torchrun each process takes its share."""

GENERATE_EXAMPLES = """\
examples:
  ngramloss generate runs/demo-matches234
  ngramloss generate facebook/bart-large-cnn --data cnn_dailymail --preset cnndm --out bart-large
  ngramloss generate lead-3 --data newswire --out lead
  ngramloss generate runs/mine --set generation.num_beams=8 --limit 100 --out beams8
"""

SCORE = """\
Score one or more systems' summaries against references, with intervals, and test each against the first.

A system is a run's folder (after ngramloss generate), whose documents' figures are kept in its scores.jsonl, or a file:
JSONL with an id, and a prediction, reference or document in each line (also .gz, .xz), or plain text, one a line. A
system's name is its folder's, or its file's stem. Systems are aligned by id; missing, extra or repeated ids are errors.
Metrics: rouge (1, 2, L, Lsum), bleu, chrf, shape (length, novelty, repetition, copying), facts (of newswire alone);
with a model or vectors given by --set, bertscore, wmd, summac, factcc. One whose model is absent says what it needs;
the others still run."""

SCORE_EXAMPLES = """\
examples, from the first line on:
  echo '{"id": 1, "document": "The cat sat on the mat all day.", "reference": "the cat sat on the mat"}' > refs.jsonl
  echo '{"id": 1, "prediction": "the cat sat on a mat"}' > a.jsonl
  echo '{"id": 1, "prediction": "a dog lay on the mat"}' > b.jsonl
  ngramloss score --references refs.jsonl a.jsonl b.jsonl
  ngramloss score --references refs.jsonl --documents refs.jsonl --metrics rouge,bleu,chrf,shape a.jsonl b.jsonl
  ngramloss score --references refs.jsonl a.jsonl --sentences pysbd --json
  ngramloss score --references refs.jsonl a.jsonl b.jsonl --limits 5:62 --markdown
  ngramloss score --references refs.jsonl a.jsonl --set rouge.tokenizer=characters --latex
  ngramloss score --references refs.jsonl a.jsonl --metrics rouge,bertscore --set bertscore.model=roberta-large
runs, after ngramloss generate:
  ngramloss score runs/*
"""

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

REPORT = """\
Write one page that works from disk: results with intervals and tests, training curves, ablation, every case with its
n-grams lit, distributions, and where every figure comes from.

Systems are named as for ngramloss score. What has no scores yet is scored first."""

REPORT_EXAMPLES = """\
examples:
  ngramloss report runs/* -o report
  ngramloss report --references refs.jsonl --documents docs.jsonl a.jsonl b.jsonl -o report
  ngramloss report runs/* --metrics rouge,bertscore --set bertscore.model=roberta-large -o report
"""

REPRODUCE = """\
Do again what a table of the paper shows: train, generate, score, and write the table beside the paper's values, and a
page. What is done already is not done again: the same command continues what was stopped.

table1: statistics of the data sets. table2: every objective. table3: single and accumulated n. cases: every objective,
and the cases where they differ most. --data chooses the scale: cnndm or xsum with BART-base, days of GPU time; newswire
with a small model that is trained first, minutes of two CPU cores, and the default where no hub can be reached; or a
file or folder of your own, with --model."""

REPRODUCE_EXAMPLES = """\
examples:
  ngramloss reproduce table1 --data newswire
  ngramloss reproduce cases --data newswire --objectives ce "ce + matches(2,3,4)"
  ngramloss reproduce table3 --data newswire --seeds 1
  ngramloss reproduce table2 --data xsum --seeds 3 --runs runs/xsum
  ngramloss reproduce table2 --data my/folder --model facebook/bart-base --set train.epochs=3
"""

DATA = "Look at data sets."

STATS = """\
Count words, sentences and novel bigrams of a data set: the paper's Table 1.

NAME is newswire, xsum, cnn_dailymail, a hub id, a file (.jsonl .csv .parquet, also .gz .xz) or a folder of splits."""

STATS_EXAMPLES = """\
examples:
  ngramloss data stats newswire --split test
  ngramloss data stats newswire --split test --rules released
  ngramloss data stats xsum
  ngramloss data stats my/folder --source article --target headline --on-bad-row skip --json
"""

BENCH = "Measure what things cost on this machine, beside their peers in the same run."

HEAD = "Time hidden states → loss → gradients for each objective and backend, beside stock cross-entropy and its peers."

HEAD_EXAMPLES = """\
examples:
  ngramloss bench head
  ngramloss bench head --sizes bart-16 bart-64 --json head.json --plot head.png
  ngramloss bench head --sizes bart-16 --loops        # the paper's own loops too: slow
"""

STEP = "Count documents a second of whole training steps, with the model's own loss and with each objective attached."

STEP_EXAMPLES = """\
examples:
  ngramloss bench step --batch 64
  ngramloss bench step --model path/or/hub-id --objective "ce + rewards(2,3,4)" --source 512 --target 64
"""

NGRAMS = "Time the n-gram part of an objective from T = 128 to 32,768: it grows like T log T, not T²."

NGRAMS_EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch 16 --device cuda
"""

DOCTOR = "Say what is installed here, which backend is used and why."

DOCTOR_EXAMPLES = """\
examples:
  ngramloss doctor
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):   # a terminal that has no ± shows ? and keeps the figures
        sys.stdout.reconfigure(errors="replace")
    try:
        _check_counts(options)
        return int(options.run_verb(options))
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except UserError as mistake:
        _tell(f"error: {mistake}")
        return 2
    except KeyboardInterrupt:
        _tell("stopped.")
        return 130
    except Exception as error:
        return _failed(error)


LEAST = {"batch_size": 1, "seeds": 1, "samples": 1}
"""The smallest value of whole numbers on the command line; 0 where nothing is said."""
MOST = {"batch_size": 2**16, "batch": 2**16, "seeds": 1000, "samples": 10**6, "shuffles": 10**6, "source": 2**20,
        "target": 2**20, "longest": 2**24}   # fmt: skip
"""The largest, so that a slip of the finger does not fill the memory; 2³² − 1 where nothing is said."""


def _check_counts(options: argparse.Namespace) -> None:
    """Raise before any work begins: `reproduce --limit -1` would else train first."""
    for name, value in vars(options).items():
        if type(value) is not int:
            continue
        flag, least, most = f"--{name.replace('_', '-')}", LEAST.get(name, 0), MOST.get(name, 2**32 - 1)
        if value < least:
            raise UserError(f"{flag} must be {least} or more, got {value}.")
        if value > most:
            raise UserError(f"{flag} must be at most {most:,}, got {value:,}.")


def _failed(error: Exception) -> int:
    """Say what failed: a package or the system in a sentence, anything else as the bug of ours that it is."""
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    if isinstance(error, ModuleNotFoundError) and package and not package.startswith("ngramloss"):
        _tell(f"error: {lacking(error)}")
    elif isinstance(error, OSError):   # a full disk, a folder that cannot be written
        _tell(f"error: {_refusal(error)}")
    else:
        _tell("".join(traceback.format_exception(error)).rstrip("\n"))
        _tell("error: this is a bug in ngramloss, not a mistake of yours. Please report it with the lines above and "
              "what `ngramloss doctor` prints.")
    return 1


# Everything that is printed goes through these two: names from files of strangers stay text in the terminal.


def _print(result: object) -> None:
    print(escape.for_terminal(str(result)), flush=True)


def _tell(sentence: object) -> None:
    print(escape.for_terminal(str(sentence)), file=sys.stderr)


def _show_progress(what: str) -> None:
    """Put this in the place of the terminal's last line."""
    print(f"\r\033[K{escape.name(what)}", end="", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(escape.for_terminal(message))


def parser() -> argparse.ArgumentParser:
    """All verbs and their options. Importing torch waits until a verb runs."""
    root: argparse.ArgumentParser = _Parser(
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
    explain.set_defaults(run_verb=_explain)

    doctor = _verb(verbs, "doctor", "say what is installed and which backend is used", DOCTOR, DOCTOR_EXAMPLES)
    doctor.set_defaults(run_verb=_doctor)

    train = _verb(verbs, "train", "train by a recipe, or continue", TRAIN, TRAIN_EXAMPLES)
    train.add_argument("recipe", metavar="RECIPE", help="demo, cnndm, xsum, or a TOML file")
    train.add_argument("--run", metavar="DIR", help="the run's folder (default: runs/RECIPE-OBJECTIVE)")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    train.add_argument("--fresh", action="store_true", help="delete an earlier run in this folder and start over")
    train.add_argument("--on-bad-row", choices=["error", "skip"], help="the same as --set data.on_bad_row=...")
    train.add_argument("--show", action="store_true", help="print the recipe with all its settings, and stop")
    _add_trust(train)
    train.set_defaults(run_verb=_train)

    generate = _verb(verbs, "generate", "write summaries of a split", GENERATE, GENERATE_EXAMPLES)
    generate.add_argument(
        "model", nargs="?", metavar="MODEL", help="a run's folder, a model's folder or hub id, or lead-3"
    )
    generate.add_argument("--model", dest="named", metavar="MODEL", help="the same")
    generate.add_argument("--data", metavar="NAME", help="default: the run's own, or the preset's")
    generate.add_argument("--split", default="test", metavar="SPLIT", help="default: %(default)s")
    generate.add_argument("--preset", choices=["cnndm", "xsum"], help="the paper's settings for beam search")
    generate.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of generation.* or data.*; repeatable"
    )
    generate.add_argument("--on-bad-row", choices=["error", "skip"], help="the same as --set data.on_bad_row=...")
    generate.add_argument("--limit", type=int, default=0, metavar="N", help="at most N documents")
    generate.add_argument("--batch-size", type=int, default=16, metavar="N", help="default: %(default)s")
    generate.add_argument("--out", metavar="DIR", help="default: the run's folder")
    _add_trust(generate)
    generate.set_defaults(run_verb=_generate)

    score = _verb(verbs, "score", "score summaries and compare systems", SCORE, SCORE_EXAMPLES)
    _add_scoring(score, metrics="rouge")
    score.add_argument("--per-document", metavar="FILE", help="write every document's figures as JSONL")
    form = score.add_mutually_exclusive_group()
    for name in ("json", "latex", "markdown"):
        form.add_argument(f"--{name}", action="store_true", help=f"print {name} instead of a table")
    score.set_defaults(run_verb=_score)

    report = _verb(verbs, "report", "one page of results, training, cases", REPORT, REPORT_EXAMPLES)
    _add_scoring(report, metrics="rouge,bleu,chrf,shape")
    report.add_argument("-o", "--out", default="report", metavar="DIR", help="default: %(default)s")
    report.add_argument("--title", default="ngramloss report", metavar="TEXT", help="default: %(default)s")
    report.set_defaults(run_verb=_report)

    again = _verb(verbs, "reproduce", "do again what a table of the paper shows", REPRODUCE, REPRODUCE_EXAMPLES)
    again.add_argument("table", choices=["table1", "table2", "table3", "cases"], help="of the paper")
    again.add_argument("--data", metavar="NAME", help="default: xsum, or newswire where no hub can be reached")
    again.add_argument("--model", metavar="NAME", help="a folder or hub id to fine-tune (default: the recipe's)")
    again.add_argument("--seeds", type=int, default=1, metavar="N", help="of each objective (default: %(default)s)")
    again.add_argument("--objectives", nargs="+", default=[], metavar="WRITTEN", help="only these rows")
    again.add_argument("--runs", metavar="DIR", help="where runs are kept (default: runs/reproduce-DATA)")
    again.add_argument("-o", "--out", default="report", metavar="DIR", help="for the page (default: %(default)s)")
    again.add_argument("--limit", type=int, default=0, metavar="N", help="at most N test documents")
    again.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the recipe, or METRIC.OPTION of a metric in --metrics; repeatable",
    )
    again.add_argument("--metrics", default="", metavar="NAMES", help="besides rouge, bleu, chrf and shape")
    _add_trust(again)
    again.set_defaults(run_verb=_reproduce)

    bring = _verb(verbs, "import", "bring in summaries that others released", IMPORT, IMPORT_EXAMPLES)
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
    bring.set_defaults(run_verb=_import)

    data = verbs.add_parser("data", help="look at data sets", description=DATA)
    looks = data.add_subparsers(required=True, metavar="WHAT", title="what to look at")
    stats = _verb(looks, "stats", "words, sentences, novel bigrams", STATS, STATS_EXAMPLES)
    stats.add_argument("name", metavar="NAME", help="of the data set")
    stats.add_argument("--split", nargs="+", default=[], metavar="SPLIT", help="default: all there are")
    stats.add_argument("--rules", choices=["standard", "released"], default="standard",
                       help="how to count: ours, or as the paper's authors did (default: %(default)s)")
    stats.add_argument("--source", metavar="COLUMN", help="of documents (default: found)")
    stats.add_argument("--target", metavar="COLUMN", help="of summaries (default: found)")
    stats.add_argument("--on-bad-row", choices=["error", "skip"], default="error", help="default: %(default)s")
    stats.add_argument("--limit", type=int, default=0, metavar="N", help="at most N examples of a split")
    stats.add_argument("--json", action="store_true", help="print JSON")
    stats.set_defaults(run_verb=_data_stats)

    bench = verbs.add_parser("bench", help="measure what things cost here", description=BENCH)
    benches = bench.add_subparsers(required=True, metavar="WHAT", title="what to measure")

    head = _verb(benches, "head", "hidden states → loss → gradients", HEAD, HEAD_EXAMPLES)
    head.add_argument("--sizes", nargs="+", metavar="SIZE", help="default: bart-16 bart-64 llama, or cpu without a GPU")
    head.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU")
    head.add_argument("--loops", action="store_true", help="the paper's own loops as well")
    head.add_argument("--json", metavar="FILE", help="write every figure")
    head.add_argument("--plot", metavar="FILE", help="draw the bars")
    _add_device(head)
    head.set_defaults(run_verb=_bench_head)

    step = _verb(benches, "step", "documents a second of whole training steps", STEP, STEP_EXAMPLES)
    step.add_argument(
        "--model", default="bart-base", metavar="NAME",
        help="bart-base or bart-tiny with random weights, a folder or a hub id (default: %(default)s)",
    )
    objectives = ["ce", "ce + matches(2,3,4)"]
    step.add_argument("--objective", nargs="+", default=objectives, metavar="WRITTEN", help=f"default: {objectives}")
    step.add_argument("--batch", type=int, default=16, metavar="B", help="default: %(default)s")
    step.add_argument("--source", type=int, default=1024, metavar="T", help="of a document (default: %(default)s)")
    step.add_argument("--target", type=int, default=128, metavar="T", help="of a summary (default: %(default)s)")
    choices = ["bf16", "fp16", "fp32", "bf16-pure"]
    step.add_argument("--precision", choices=choices, help="mixed, or pure (default: bf16 on a GPU)")
    step.add_argument("--loops", action="store_true", help="the paper's own loops as well")
    step.add_argument("--json", metavar="FILE", help="write every figure")
    _add_trust(step)
    _add_device(step)
    step.set_defaults(run_verb=_bench_step)

    ngrams = _verb(benches, "ngrams", "the n-gram part as T grows", NGRAMS, NGRAMS_EXAMPLES)
    ngrams.add_argument("--objective", default="matches(2,3,4)", metavar="WRITTEN", help="default: %(default)s")
    ngrams.add_argument("--batch", type=int, default=4, metavar="B", help="sequences in a batch (default: %(default)s)")
    ngrams.add_argument("--longest", type=int, default=32768, metavar="T", help="default: %(default)s")
    _add_device(ngrams)
    ngrams.set_defaults(run_verb=_bench_ngrams)
    return root


def _add_scoring(verb: argparse.ArgumentParser, *, metrics: str) -> None:
    verb.add_argument(
        "predictions", nargs="+", metavar="RUN_OR_FILE", help="one for each system; the first is compared with"
    )
    verb.add_argument("--references", metavar="FILE", help="what should have been written (default: the runs' own)")
    verb.add_argument("--documents", metavar="FILE", help="what was summarised, for the metrics that read it")
    verb.add_argument("--metrics", default=metrics, metavar="NAMES", help="with commas between (default: %(default)s)")
    verb.add_argument(
        "--set", action="append", default=[], metavar="METRIC.OPTION=VALUE", help="an option of a metric; repeatable"
    )
    verb.add_argument("--sentences", metavar="SPLITTER", help="the same as --set rouge.sentences=… (default: newline)")
    verb.add_argument("--limits", metavar="MIN:MAX", help="flag texts outside; default: what a run states")
    verb.add_argument("--tokenizer", metavar="NAME", help="count tokens for --limits with this (default: words)")
    verb.add_argument("--samples", type=int, default=1000, metavar="N", help="of the bootstrap (default: %(default)s)")
    verb.add_argument("--shuffles", type=int, default=10000, metavar="N", help="default: %(default)s")
    verb.add_argument("--seed", type=int, default=12345, metavar="N", help="of both (default: %(default)s)")


def _add_trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model, this time; no file can give this consent",
    )


def _add_device(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, text: str, examples: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name, help=summary, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _explain(options: argparse.Namespace) -> int:
    from ngramloss.explain import explain

    _print(explain(options.reference, options.candidate, options.objective, options.confidence))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ngramloss.doctor import report

    for line in report():
        _print(line)
    return 0


def _train(options: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from ngramloss import recipe

    overrides = options.set + ([f'data.on_bad_row="{options.on_bad_row}"'] if options.on_bad_row else [])
    settings = recipe.load(options.recipe, overrides)
    if options.show:
        _print(escape.in_json(recipe.dump(settings)).rstrip("\n"))
        return 0
    from ngramloss.training import runner

    folder = Path(options.run or Path("runs") / settings.slug)
    try:
        outcome = runner.train(
            settings, folder, fresh=options.fresh, say=_tell,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    except runner.Stopped:
        return 1
    except runner.Diverged as reason:
        _tell(f"error: {reason}")
        return 1
    if not outcome.finished:
        return 130
    if settings.data.name == "newswire" and os.environ.get("RANK", "0") == "0":
        _print_floors(settings, folder, options.trust_remote_code)
    return 0


def _print_floors(settings: recipe.Recipe, folder: Path, trust_remote_code: bool) -> None:
    from tqdm import tqdm

    from ngramloss import floors

    with tqdm(total=floors.ITEMS, desc="writing summaries of test items", unit=" items", leave=False) as bar:
        items, predictions = floors.looked_at(folder, progress=bar.update, trust_remote_code=trust_remote_code)
    _print(f"{floors.ITEMS} test items of newswire; on text made of templates read ROUGE against the floors:")
    for line in floors.table(floors.rows(items, predictions, settings.objective)):
        _print(line)


def _data_stats(options: argparse.Namespace) -> int:
    import json

    from tqdm import tqdm

    from ngramloss.data import measurement

    bars: dict[str, tqdm[object]] = {}

    def show(split: str, done: int, total: int) -> None:
        if split not in bars:
            bars[split] = tqdm(total=total, desc=f"counting {escape.name(split)}", unit=" texts", leave=False)
        bars[split].update(done - bars[split].n)

    found = measurement(
        options.name, splits=options.split, rules=options.rules, source=options.source, target=options.target,
        on_bad_row=options.on_bad_row, limit=options.limit, progress=show,
    )  # fmt: skip
    for bar in bars.values():
        bar.close()
    for rows in found.skipped.values():
        for bad in rows:
            _tell(f"skipped {bad}")
    _print(escape.in_json(json.dumps(found.record(), indent=1, ensure_ascii=False)) if options.json else found)
    return 0


def _generate(options: argparse.Namespace) -> int:
    from pathlib import Path

    from tqdm import tqdm

    from ngramloss.generation import predictions
    from ngramloss.run_folder import RunFolder

    if (options.model is None) == (options.named is None):
        raise UserError("say once who writes: ngramloss generate MODEL, or --model MODEL.")
    model = options.model or options.named
    overrides = options.set + ([f'data.on_bad_row="{options.on_bad_row}"'] if options.on_bad_row else [])
    work = predictions.job(
        model, data=options.data, split=options.split, preset=options.preset, overrides=overrides,
        limit=options.limit, batch_size=options.batch_size, trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if options.out is None and not RunFolder(Path(model)).recipe.exists():
        raise UserError("say where to write with --out DIR; only a run's folder is its own place.")
    bars: list[tqdm[object]] = []   # none until something is written, so that an error has a line of its own

    def show(done: int, total: int) -> None:
        bars.extend([] if bars else [tqdm(unit=" documents", desc="writing", total=total)])
        bars[0].update(done)

    try:
        path = predictions.write_predictions(work, Path(options.out or model), progress=show)
    finally:
        for bar in bars:
            bar.close()
    _print(path)
    return 0


def _score(options: argparse.Namespace) -> int:
    from ngramloss.scoring import tables

    kept = _output(options.per_document, [*options.predictions, options.references, options.documents])
    result, _ = _scored(options)
    if kept is not None:
        tables.write_documents(result, kept)
    forms = {"json": tables.as_json, "latex": tables.as_latex, "markdown": tables.as_markdown}
    form = next((forms[name] for name in forms if getattr(options, name)), tables.as_text)
    _print(form(result))
    return 1 if result.absent and not result.figures else 0


def _report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from ngramloss.report import page, record

    if Path(options.out).is_file():
        raise UserError(f"{options.out} is a file; -o needs a folder, which will be made.")
    result, texts = _scored(options)
    _print(page.written(record.gathered(result, texts, title=options.title), Path(options.out)))
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from pathlib import Path

    from tqdm import tqdm

    from ngramloss import reproduce
    from ngramloss.scoring import tables

    data = options.data or reproduce.chosen_data()
    if options.table == "table1":
        names = [data] if options.data or data == reproduce.SMALL else ["cnn_dailymail", "xsum"]
        _print(reproduce.table1(names, limit=options.limit))
        return 0
    chosen = [name for name in options.metrics.split(",") if name]
    of_metrics = [setting for setting in options.set if setting.partition(".")[0] in chosen]
    folder = Path(options.runs or Path("runs") / f"reproduce-{Path(data).name}")
    plan = reproduce.planned(
        options.table, folder, data=data, model=options.model, seeds=options.seeds, objectives=options.objectives,
        overrides=[setting for setting in options.set if setting not in of_metrics], metrics=chosen,
        limit=options.limit,
    )  # fmt: skip
    with tqdm(unit=" documents", desc="writing", leave=False, disable=not sys.stderr.isatty()) as bar:
        done = reproduce.reproduced(
            plan, Path(options.out), options=_metric_options(of_metrics, chosen),
            say=lambda text: bar.write(escape.for_terminal(text), file=sys.stderr),
            progress=lambda count, _: bar.update(count), trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    if done is None:
        return 130
    _print(f"{plan.note}\n{reproduce.seen(done.result)}\n")
    for line in tables.columns(reproduce.rows(done.result, plan)):
        _print(line)
    if options.table == "cases":
        _print(reproduce.cases(done.result, done.texts))
    _print(f"\n± half of the 95% interval over test documents{'; over seeds, their spread' * (options.seeds > 1)}. "
          f"* and **: differs from {done.result.names[0]} at 5% and 1% (both paired tests, Holm).")
    _print(done.page)
    return 0


def _scored(options: argparse.Namespace) -> tuple[results.Result, systems.Aligned]:
    """What the options of score and report ask for, with a line that tells what is being done."""
    from pathlib import Path

    from ngramloss.scoring import audit, results, systems

    chosen = [name.strip() for name in options.metrics.split(",") if name.strip()]
    settings = _metric_options(options.set, chosen)
    if options.sentences:
        settings.setdefault("rouge", {})["sentences"] = options.sentences
    limits = audit.limits(options.limits) if options.limits else None
    count = audit.counter(options.tokenizer) if options.tokenizer else None
    references, documents = (Path(given) if given else None for given in (options.references, options.documents))
    texts = systems.aligned(references, [Path(path) for path in options.predictions], documents)
    for warning in texts.warnings:
        _tell(f"warning: {warning}")
    show = sys.stderr.isatty()
    result = results.scored(
        texts, chosen, options=settings, samples=options.samples, shuffles=options.shuffles, seed=options.seed,
        limits=limits, count=count,
        progress=_show_progress if show else None,
    )  # fmt: skip
    if show:
        _show_progress("")
    for sentence in result.unkept:
        _tell(f"warning: {sentence}")
    return result, texts


def _output(given: str | None, inputs: Sequence[str | None]) -> Path | None:
    """Where a file is to be written; told before the work begins if it cannot, or would take the place of an input."""
    from pathlib import Path

    if not given:
        return None
    path = Path(given)
    if path.is_dir():
        raise UserError(f"{given} is a folder; name a file to write.")
    if not path.parent.is_dir():
        raise MissingFileError(f"there is no folder {path.parent} to write {path.name} into. Make it first.")
    read = [Path(name) for name in inputs if name and Path(name).exists()]
    if path.exists() and any(one.samefile(path) or one.samefile(path.parent) for one in read):   # or in a run's folder
        raise UserError(f"{given} is read here, and would be written over. Choose another name.")
    return path


def _import(options: argparse.Namespace) -> int:
    from pathlib import Path

    from ngramloss.scoring import import_summaries

    out = _output(options.out, [options.file, options.references, options.order, options.gold])
    if out is None:
        raise UserError("name a file to write with --out.")
    order, gold = (Path(given) if given else None for given in (options.order, options.gold))
    marks = [] if options.sentences == ["none"] else options.sentences
    found = import_summaries.imported(
        Path(options.file), Path(options.references), marks=marks, ptb=options.ptb, order=order, gold=gold
    )
    import_summaries.write(found, out)
    for mark, count in found.marks.items():
        _tell(f"note: {mark} parts sentences; it was seen {count} times.")
    for note in found.notes:
        _tell(f"note: {note}")
    _print(options.out)
    return 0


def _metric_options(settings: Sequence[str], chosen: Sequence[str]) -> dict[str, dict[str, object]]:
    from ngramloss.recipe import toml_value

    options: dict[str, dict[str, object]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        metric, dot, name = key.partition(".")
        if not equals or not dot or metric not in chosen:
            raise UserError(f"--set takes METRIC.OPTION=VALUE of a metric in --metrics, got {setting!r}.")
        options.setdefault(metric, {})[name] = toml_value(text)
    return options


def _bench_head(options: argparse.Namespace) -> int:
    import torch

    from ngramloss.bench import head

    device = _device(options)
    sizes = options.sizes or (["bart-16", "bart-64", "llama"] if device == "cuda" else ["cpu"])
    for size in sizes:
        if size not in head.SIZES:
            raise UserError(f"unknown size {size!r}. Choose from {', '.join(head.SIZES)}.")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    title = f"{head.machine(device)}, {str(dtype).removeprefix('torch.')}"
    _print(title)
    rows: list[head.Row] = []
    for row in head.measured(sizes, device, dtype, loops=options.loops):
        if not rows or row.size != rows[-1].size:
            _print(f"\n{row.size}: {head.SIZES[row.size]}\n{'':<46}{'ms':>9}{'GiB':>8}{'/stock':>9}{'/floor':>9}")
        rows.append(row)
        figures = f"{row.milliseconds:>9.2f}{row.gibibytes:>8.2f}{row.to_stock:>9.2f}{row.to_floor:>9.2f}"
        _print(f"{row.what:<46}{row.why_not or figures}")
    if options.json:
        _write_json(options.json, {"machine": title, "rows": [row._asdict() for row in rows]})
    if options.plot:
        head.plot(rows, options.plot, title)
    return 0


def _bench_step(options: argparse.Namespace) -> int:
    from ngramloss.bench import head, step

    device = _device(options)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    settings = f"{options.model}, {options.source} → {options.target} tokens, batch {options.batch}, {precision}"
    title = f"{settings}, {head.machine(device)}"
    _print(f"{title}\n{'':<46}{'docs/s':>9}{'× stock':>9}{'ms':>9}{'GiB':>8}")
    rows = []
    for row in step.measured(
        options.model, options.objective, batch=options.batch, source=options.source, target=options.target,
        precision=precision, device=device, loops=options.loops, trust_remote_code=options.trust_remote_code,
    ):  # fmt: skip
        rows.append(row)
        figures = f"{row.docs_per_second:>9.1f}{row.to_stock:>9.2f}{row.milliseconds:>9.1f}{row.gibibytes:>8.2f}"
        _print(f"{row.what:<46}{figures}")
    if options.json:
        _write_json(options.json, {"machine": title, "rows": [row._asdict() for row in rows]})
    return 0


def _bench_ngrams(options: argparse.Namespace) -> int:
    from ngramloss.bench import ngrams

    device = _device(options)
    for line in ngrams.measured(options.objective, batch=options.batch, longest=options.longest, device=device):
        _print(line)
    return 0


def _device(options: argparse.Namespace) -> str:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here. Leave --device out, or use --device cpu.")
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _refusal(refused: OSError) -> str:
    """What the operating system refused, as a sentence."""
    if refused.strerror is None:
        return str(refused)
    return f"{refused.strerror}: {refused.filename}" if refused.filename else refused.strerror


def _write_json(path: str, content: object) -> None:
    import json

    with open(path, "w") as file:
        json.dump(content, file, indent=1)
