"""a recipe, objectives and seeds → each trained, its translations or summaries of a split, and BLEU beside the first's.

    python examples/compare.py examples/multi30k.toml --data FOLDER --seeds 1 2 3 --parallel 15 \
        --objectives ce "ce + matches(2,3,4)" "ce + rewards(2,3,4)" "ce + bag(2)" "ce + precision(2)"

Trainings run side by side. A run that is finished is not trained again, and one that has its predictions keeps them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ngramloss as ng
from ngramloss import recipe
from ngramloss.data import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True, help="a folder of splits")
    parser.add_argument("--objectives", nargs="+", default=["ce"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--set", action="append", default=[], help="as in ngramloss train")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--only-score", action="store_true", help="predictions are there already")
    options = parser.parse_args()

    jobs = [(objective, seed) for objective in options.objectives for seed in options.seeds]
    if not options.only_score:
        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(lambda job: _train_and_write(options, *job), jobs))
    print(f"{'objective':<26}{'BLEU by seed':<40}{'mean':>7}{'difference':>12}  95% interval over seeds")
    split = load(options.data, options.split)
    references = [example.target for example in split.examples]
    first: list[float] = []
    for objective in options.objectives:
        folders = [_folder(options, objective, seed) for seed in options.seeds]
        bleu = [_bleu(_predictions(folder, options.split, split.fingerprint), references) for folder in folders]
        first = first or bleu
        each = " ".join(f"{score:.2f}" for score in bleu)
        print(f"{objective:<26}{each:<40}{statistics.mean(bleu):>7.2f}{_difference(bleu, first)}")


def _train_and_write(options: argparse.Namespace, objective: str, seed: int) -> None:
    folder = _folder(options, objective, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = [f"data.name={options.data}", f"objective={objective}", f"train.seed={seed}", *options.set]
    command = [sys.executable, "-m", "ngramloss", "train", options.recipe, "--run", str(folder)]
    output_path = folder.with_name(f"{folder.name}.output.txt")
    with output_path.open("a") as output:
        for setting in settings:
            command += ["--set", setting]
        if subprocess.run(command, check=False, stdout=output, stderr=output).returncode:
            sys.exit(f"{folder.name} could not be trained; {output_path} tells why.")
        write = [sys.executable, __file__, options.recipe, "--data", options.data, "--split", options.split]
        subprocess.run([*write, "--write", str(folder)], check=True, stdout=output, stderr=output)


def _folder(options: argparse.Namespace, objective: str, seed: int) -> Path:
    slug = recipe.load(options.recipe, [f"objective={objective}"]).slug
    return Path(options.runs) / f"{slug}-{seed}"


def _predictions(folder: Path, split: str, fingerprint: str) -> list[str]:
    found = json.loads((folder / f"{split}.json").read_text())
    if found["fingerprint"] != fingerprint:
        sys.exit(f"{folder / split}.json was written for other data. Delete it, or give the same --data.")
    texts: list[str] = found["predictions"]
    return texts


def _bleu(predictions: list[str], references: list[str]) -> float:
    import sacrebleu

    return float(sacrebleu.corpus_bleu(predictions, [references]).score)


def _difference(bleu: list[float], first: list[float]) -> str:
    """The mean difference of runs of the same seed, and its interval by Student's t."""
    pairs = [here - there for here, there in zip(bleu, first, strict=True)]
    if bleu is first or len(pairs) < 2:
        return ""
    from scipy.stats import t

    mean = statistics.mean(pairs)
    half = t.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"{mean:>+12.2f}  {mean - half:+.2f} to {mean + half:+.2f}"


def _write() -> None:
    """One run's predictions, in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    for name in ("--data", "--split", "--write"):
        parser.add_argument(name)
    options = parser.parse_args()
    split, path = load(options.data, options.split), Path(options.write) / f"{options.split}.json"
    if path.exists() and json.loads(path.read_text())["fingerprint"] == split.fingerprint:
        return
    generate = ng.TextGenerator(options.write, source="document", batch_size=250)
    texts = generate({"document": [example.source for example in split.examples]})["prediction"]
    found = {"fingerprint": split.fingerprint, "predictions": texts}
    path.write_text(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    _write() if "--write" in sys.argv else main()
