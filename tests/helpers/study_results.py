"""a study, stand-ins for its processes, and results that were made up, for tests of studies and of their page"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from ngramloss.cli import main
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study import plan, run, stages, tables
from ngramloss.study.plan import TEST, Training
from ngramloss.study.results import DecodingResult

STUDY = """
title = "Is it the n-grams?"
recipe = "demo"
objectives = ["ce", "ce + matches(2)", "ce + rewards(2)", "ce + bag(2)"]
confirm = 2

[seeds]
screening = [1, 2]
confirmation = [11, 12, 13]

[decodings]
greedy = ["generation.num_beams=1"]
beam2 = ["generation.num_beams=2"]

[tune]
"train.learning_rate" = [1e-3, 2e-3]
objectives = ["ce", "ce + matches(2)"]
others = "ce + matches(2)"
seed = 1

[[set]]
name = "news"
primary = "rouge2"
decoding = "beam2"
set = ["train.max_steps=3"]

[[set]]
name = "pairs"
primary = "bleu"
decoding = "beam2"
set = ["task=translation"]
"""
WORDS = re.findall(r"\w+", "the cat sat on a mat and it rained all day while prices rose by three per cent in town")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of a study, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(STUDY)
    return Path("mine.toml")


def changed(path, *pairs):
    """The file with pieces of its text replaced."""
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


class Instant:
    """Stands in for a process: it has written its files when it is started, and then has an exit code."""

    started: ClassVar[list] = []
    environments: ClassVar[list] = []
    failing: ClassVar[dict] = {}
    others: ClassVar[dict] = {}
    made_of: ClassVar[dict] = {}

    def __init__(self, arguments, log, environment):
        Instant.started.append(arguments)
        Instant.environments.append(environment)
        name = arguments[1].split("/")[-2] if arguments[0] == "train" else arguments[3].split("/")[-2]
        self.exitcode = Instant.failing.get(name, 0) if arguments[0] == "train" else 0
        log.write_text("a line\nerror: the loss became NaN.\n" if self.exitcode else "done\n")
        if not self.exitcode:
            (self._train if arguments[0] == "train" else self._write)(*arguments)

    def _train(self, _, settings, __, folder, *___):
        (Path(folder) / "model").mkdir(parents=True)
        (Path(folder) / "checkpoints").mkdir()
        (Path(folder) / "recipe.toml").write_text(Path(settings).read_text())
        (Path(folder) / "model" / "model.safetensors").write_text(
            Instant.others.get(Path(folder).parent.name, Path(settings).read_text())
        )
        RunFolder(Path(folder)).record_weights(Path(folder) / "model")
        (Path(folder) / "log.jsonl").write_text('{"docs_per_second": 50.0}\n')
        made_of = {"train data": "t1", "train tokens": "k1", "model: weights": "w1"} | Instant.made_of
        (Path(folder) / "prepared.json").write_text(json.dumps({"made_of": made_of}))

    def _write(self, _, trained, __, folder, *options):
        """Texts in which words are wrong more or less often: it depends on row, rate, seed and split, as in real life."""
        split = options[options.index("--split") + 1]
        recipe = (Path(trained) / "recipe.toml").read_text()
        objective, rate = (re.search(rf"{key} = (.+)", recipe)[1] for key in ("objective", "learning_rate"))
        without = recipe.replace('drafter = ""\n', "")  # which says nothing here, and would change what is drawn
        chance = random.Random(f"{without} {options}")
        wrong = 0.4 - 0.15 * ("matches" in objective) - 0.05 * ("rewards" in objective) + 20 * float(rate)
        references = [random.Random(f"{split} {document}").choices(WORDS, k=12) for document in range(8)]
        texts = [[word if chance.random() > wrong else "wrong" for word in text] for text in references]
        out = Path(folder)
        out.mkdir(parents=True)
        rows = [
            {"id": str(index), "reference": " ".join(text), "document": "x"} for index, text in enumerate(references)
        ]
        (out / "references.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"id": str(index), "prediction": " ".join(text)} for index, text in enumerate(texts)]
        (out / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        about = {"model": str(trained), "data": "newswire", "split": split, "fingerprint": f"f-{split}", "documents": 8}
        about["weights"] = RunFolder(Path(trained)).fingerprint
        (out / "generation.json").write_text(json.dumps(about))

    def terminate(self):
        raise AssertionError("it has ended")


@pytest.fixture
def instant(monkeypatch):
    """Processes that take no time; the list of their arguments, and dicts: name of a training → exit code, weights; what is made of."""
    monkeypatch.setattr(run, "start_process", Instant)
    monkeypatch.setattr(run, "POLL", 0.0)
    monkeypatch.setattr(run, "WAIT", 0.0)
    monkeypatch.setattr(run, "PAUSE", 0.0)
    monkeypatch.setattr(tables, "SAMPLES", 20)
    monkeypatch.setattr(tables, "SHUFFLES", 50)
    Instant.started, Instant.environments = [], []
    Instant.failing, Instant.others, Instant.made_of = {}, {}, {}
    return Instant


def shown(capsys, *arguments):
    """What a study prints without its plan and its speeds, and its exit code."""
    capsys.readouterr()
    code = main(["study", "mine.toml", *arguments])
    printed = capsys.readouterr()
    return code, without_speeds(printed.out), printed.err


def without_speeds(printed):
    tables = printed.partition("\n\n")[2].replace("−", "-")
    return re.sub(r"(?:[\d.]+|–) +(?:[\d.]+|–)$", "speeds", re.sub(r"Speeds were .+\n", "", tables), flags=re.M)


def made(study, scores, *, documents=None):
    """Results with these primary scores: set → row → seeds → score. None is a failure."""
    results = {}
    for name, rows in scores.items():
        data = study.data(name)
        for objective, seeds in rows.items():
            for seed, score in seeds.items():
                training = Training(name, objective, ("train.learning_rate=0.001",), seed, TEST)
                for decoding in study.decodings:
                    result = DecodingResult(training, decoding, {}, failed="" if score is not None else "no memory")
                    if score is not None:
                        each = [score + step for step in (-2.0, 2.0, -1.0, 1.0)] if documents is None else documents
                        each = [[1] * 10] * 4 if data.primary == "bleu" else each
                        result = replace(result, scores={data.primary: score}, count=4, documents=each)
                    results[result.key] = result
    return results


SCORES = {
    "news": {
        "ce": {11: 20.0, 12: 21.0, 13: 20.4},
        "ce + matches(2)": {11: 21.0, 12: 22.1, 13: 21.6},
        "ce + rewards(2)": {11: 20.1, 12: 20.8, 13: 20.9},
    },
    "pairs": {
        "ce": {11: 30.0, 12: 31.0, 13: 32.0},
        "ce + matches(2)": {11: 30.5, 12: 31.9, 13: 32.4},
        "ce + bag(2)": {11: 29.0, 12: 31.2, 13: None},
    },
}


def compared(path, scores=SCORES):
    study = plan.read(path)
    every = [
        stages.stages(study, data, {}, dict.fromkeys(scores[data.name], ("train.learning_rate=0.001",)))
        for data in study.sets
    ]
    rows = tables.comparisons(study, every, made(study, scores))
    return study, {(row.data.name, row.objective): row for row in rows}
