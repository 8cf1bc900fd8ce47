"""arguments of ``ngramloss generate`` → a folder with predictions."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, add_columns, add_trust, recipe_settings, verb
from ngramloss.cli.output import print_result, tell
from ngramloss.errors import UserError

GENERATE = """\
Write a summary or a translation of every source of a split: predictions.jsonl, with references.jsonl and the settings
in generation.json.

MODEL is a run's folder, a model's folder or hub id, or a baseline such as lead-3, the first three sentences. `ngramloss
list baselines` lists all baselines. To continue a stopped job, run the same command again. Under torchrun, each process
writes a share of the texts. A multilingual model needs data.source_language and data.target_language."""

GENERATE_EXAMPLES = """\
examples:
  ngramloss generate runs/demo-matches234
  ngramloss generate facebook/bart-large-cnn --data cnn_dailymail --preset cnndm --out bart-large
  ngramloss generate lead-3 --data newswire --out lead
  ngramloss generate runs/mine --set generation.num_beams=8 --limit 100 --out beams8
  ngramloss generate runs/mine --engine ctranslate2-int8 --out fast
  ngramloss generate runs/mine --sample --num-return 8 --top-p 0.95 --seed 1 --out samples
  ngramloss generate facebook/m2m100_418M --data my/pairs --preset translation --out m2m100 \\
    --set data.source_language=en --set data.target_language=de
"""

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{rate_noinv_fmt}, {remaining} left]"


def add(verbs: Verbs) -> None:
    """Add the command and its options."""
    generate = verb(verbs, "generate", "write summaries or translations of a split", GENERATE, GENERATE_EXAMPLES)
    generate.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder or hub id, or a baseline")
    generate.add_argument("--data", metavar="NAME", help="data set (default: that of the run or of the preset)")
    generate.add_argument("--split", default="test", metavar="SPLIT", help="split to read (default: %(default)s)")
    generate.add_argument("--preset", choices=["cnndm", "xsum", "translation"],
                          help="use the search settings of this recipe; those of cnndm and xsum are the paper's")
    generate.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting in generation.* or data.*, or task; repeatable",
    )
    generate.add_argument("--on-bad-row", choices=["error", "skip"], help="same as --set data.on_bad_row=...")
    generate.add_argument("--limit", type=int, default=0, metavar="N", help="read at most N sources")
    generate.add_argument("--engine", metavar="NAME",
                          help="what searches: auto, hf, ctranslate2 or ctranslate2-int8; same as --set "
                          "generation.engine=... (default: auto, the fastest whose texts are those of hf)")
    generate.add_argument("--batch-size", type=int, metavar="N",
                          help="documents per batch (default: as many as the memory allows)")
    generate.add_argument("--num-return", type=int, default=1, metavar="N",
                          help="texts of each document: the best of the beams, or samples (default: %(default)s)")
    generate.add_argument("--sample", action="store_true", help="sample tokens instead of searching with beams")
    generate.add_argument("--temperature", type=float, default=1.0, metavar="X",
                          help="of the samples; below 1, probable tokens become more probable (default: %(default)s)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P",
                          help="sample from the most probable tokens, P of the probability (default: %(default)s)")
    generate.add_argument("--seed", type=int, default=0, metavar="N",
                          help="random seed of the samples (default: %(default)s)")
    generate.add_argument("--out", metavar="DIR", help="output folder (default: the run's folder)")
    add_columns(generate, source="of the sources", target="of the targets")
    add_trust(generate)
    generate.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from pathlib import Path

    from tqdm import tqdm

    from ngramloss.generation import predictions
    from ngramloss.recipe import WORDS
    from ngramloss.run_folder import RunFolder

    model = options.model
    work = predictions.job(
        model, data=options.data, split=options.split, preset=options.preset,
        overrides=[*recipe_settings(options), *([f"generation.engine={options.engine}"] if options.engine else [])],
        limit=options.limit, batch_size=options.batch_size or 0, trust_remote_code=options.trust_remote_code,
        sampling=predictions.Sampling(
            options.num_return, options.sample, options.temperature, options.top_p, options.seed
        ),
    )  # fmt: skip
    if options.out is None and not RunFolder(Path(model)).recipe.exists():
        raise UserError("give an output folder with --out DIR. It may be left out only if MODEL is a run's folder.")
    bars: list[tqdm[object]] = []   # created late, so that an error message does not end up behind an empty bar

    def show(done: int, total: int) -> None:
        words = WORDS[work.task]
        bars.extend([] if bars else [tqdm(
            unit=f" {words.sources}", desc=f"writing {words.texts}", total=total, bar_format=BAR)])
        bars[0].update(done)

    try:
        path = predictions.write_predictions(work, Path(options.out or model), progress=show, say=tell)
    finally:
        for bar in bars:
            bar.close()
    print_result(path)
    return 0
