"""Losses of tiny trainings of every kind as they were recorded once: whatever changes in the loop, these numbers stay.

``python tests/training/test_recorded_losses.py [NAME …]`` records them anew, for a change that is meant to change them.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_tokenizers
import torch
from commands import TRAIN, assert_equal_runs
from forks import fork, fork_ranks
from models import TINY_MODEL
from transformers import LlamaConfig, LlamaForCausalLM

from ngramloss.data import newswire
from ngramloss.recipe import Model

RECORDED = Path(__file__).with_name("recorded_losses.json")
RECIPE = f"""
objective = "ce + matches(2) + bag(2)"
[data]
name = "{{data}}"
max_source = 96
max_target = 32
{TINY_MODEL}dropout = 0.0
[train]
max_steps = 8
batch_size = 4
accumulate = 2
learning_rate = 3e-3
warmup_steps = 2
log_every = 1
eval_every = 4
save_every = 4
precision = "fp32"
[generation]
num_beams = 1
max_length = 32
"""
SCHEDULES = ("linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial")
SETTINGS = {
    **{schedule: [f'train.schedule="{schedule}"'] for schedule in SCHEDULES},
    "one micro-batch": ["train.accumulate=1", "train.batch_size=8"],
    "by tokens": ["train.max_tokens=300"],
    "clipped": ["train.clip=0.5"],
    "not clipped": ["train.clip=0"],
    "weight decay": ["train.weight_decay=0.5", "train.beta2=0.9"],
    "grouped": ["train.group_by_length=true"],
    "seed": ["train.seed=7"],
    "epochs": ["train.max_steps=0", "train.epochs=1.5"],
    "a schedule of terms": ['objective="ce + matches(2)@from(0.5) + bag(2)@ramp(0.2,0.6)"'],
    "dropout": ["model.dropout=0.1"],
    "bf16": ['train.precision="bf16"'],
    "gradient checkpointing": ["train.gradient_checkpointing=true"],
}
LANGUAGE_MODEL = ["model.architecture=llama", "data.prompt={source} TL;DR:", "objective=ce + matches(2)"]
CHAT = ["model.name={here}/chat", "data.name={here}/talks", "data.max_source=200", "objective=ce + matches(2)"]
RANKED = ["data.name={here}/named", "data.candidates={here}/ranked"]
ENCODER = ["data.separator=none", "model.dropout=0.1"]
STUDENT = "ce + bag(2):student + matches(2):student"
BEFORE = {
    "start": ["objective=ce"],
    "words": ["model.architecture=llama", "data.prompt=none", "data.max_source=4", "objective=ce"],
    "extractor": [*ENCODER, "objective=ce", "train.best=loss", "system=bertsum_ext(layers=1,heads=2,feed_forward=16)"],
}
"""Runs that others begin with or read."""
NOT_OF_AN_LSTM = ("encoder_layers", "decoder_layers", "heads", "feed_forward", "dropout")
KINDS = {
    "twins": ["objective=ce + rdrop + gated(2):twin", "train.twins=true", "model.dropout=0.1", "train.best=ce"],
    "a teacher": ["objective=ce + distill(temperature=2)", "train.teacher={here}/runs/start"],
    "the start as teacher": ["objective=ce + keep:reverse", "model.name={here}/runs/start/model", "model.dropout=0.1"],
    "adapters": ["model.name={here}/runs/start/model", "model.lora=4"],
    "averages": ["train.ema=0.5"],
    "early stopping": ["train.early_stopping=2", "train.eval_every=2", "train.learning_rate=1"],
    "weights of words": ["data.weights=weights", "data.name={here}/weighted", "objective=ce + matches(2)"],
    "a language model": LANGUAGE_MODEL,
    "a language model with adapters": ["model.name={here}/runs/words/model", "model.lora=4", *LANGUAGE_MODEL[1:]],
    "conversations": CHAT,
    "weights of answers": [*CHAT, "data.weights=weight"],
    "candidates": [*RANKED, "objective=ce + rank(margin=0.1,alpha=1) + risk"],
    "candidates of a language model": [*RANKED, *LANGUAGE_MODEL[:2], "objective=ce + prefer"],
    "own samples": [
        "objective=ce + policy + credit(1,2)",
        "online.samples=2",
        "online.refresh=2",
        "online.metric=rouge",
    ],
    "own greedy texts": [f"objective={STUDENT}", "model.dropout=0.1"],
    "own samples of a language model": [*LANGUAGE_MODEL[:2], "objective=ce + risk", "online.samples=2"],
    "a margin to a language model": ["objective=ce + margin", "data.language_model={here}/runs/words"],
    "further tokens": ["objective=ce + future", "model.architecture=prophetnet"],
    "simcls": [
        *("system=simcls(margin=0.05)", "objective=ce", "train.best=score", *ENCODER, RANKED[0]),
        "data.candidates=train={here}/ranked/candidates.jsonl,validation={here}/ranked/validation.jsonl",
    ],
    "bertsum_ext": BEFORE["extractor"],
    "bertsum_abs": ["model.encoder={here}/runs/extractor/model", "train.encoder_learning_rate=1e-3", ENCODER[0]],
    "pointer_generator": [
        "system=pointer_generator(embeddings=6,coverage=0.7,coverage_from=0.5)",
        *("objective=ce + matches(2)", "train.best=ce", "train.weight_decay=0"),
        *(f"model.{name}={getattr(Model(), name)}" for name in NOT_OF_AN_LSTM),
    ],
    "gsum": ["system=gsum(guidance=oracle,sentences=2)", "model.architecture=bart", "train.best=loss", *ENCODER],
}
"""Trainings of every other kind. Each is killed and continued, too."""
STOPPED = """
import os, signal, sys
from ngramloss.storage import checksums
from ngramloss import cli
whole = checksums.seal
def seal(checkpoint, **facts):
    whole(checkpoint, **facts)
    if str(checkpoint).endswith("checkpoint-4"):
        os.kill(os.getpid(), signal.SIGKILL)
checksums.seal = seal
from ngramloss.training import checkpoints
checkpoints.seal = seal
sys.exit(cli.main(sys.argv[1:]))
"""
TIMED = ("docs_per_second", "memory_gib", "runtime", "per_second", "total_flos", "writing_share")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def prepare(folder):
    """Data of every kind, and what trainings begin with."""
    for split, count in (("train", 40), ("validation", 6)):
        items = [*newswire.items(split, count)]
        rows = [{"document": item.document, "summary": item.summary} for item in items]
        named = [{"id": f"{split}-{number}", **row} for number, row in enumerate(rows)]
        weights = [[1 + number % 3 / 2 for number, _ in enumerate(row["summary"].split())] for row in rows]
        write(folder / "data" / f"{split}.jsonl", rows)
        write(
            folder / "weighted" / f"{split}.jsonl", [row | {"weights": w} for row, w in zip(rows, weights, strict=True)]
        )
        write(folder / "talks" / f"{split}.jsonl", map(conversation, rows, rows[1:] + rows[:1]))
        write(folder / "named" / f"{split}.jsonl", named)
        write(
            folder / "ranked" / ("candidates.jsonl" if split == "train" else "validation.jsonl"), map(candidates, named)
        )
    (folder / "tiny.toml").write_text(RECIPE.format(data=folder / "data"))
    tokenizer = tiny_tokenizers.gpt_like()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "chat")
    tokenizer.save_pretrained(folder / "chat")


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(first, second):
    talk = [("user", first["document"]), ("assistant", first["summary"])]
    talk += [("user", second["document"][:40]), ("assistant", second["summary"])]
    messages = [{"role": role, "content": text} for role, text in talk]
    return {"messages": [messages[0], messages[1] | {"weight": 0.5}, *messages[2:]]}


def candidates(row):
    words = row["summary"].split()
    texts = [" ".join(words[::-1]), row["summary"], " ".join(words[: len(words) // 2])]
    return {"id": row["id"], "source": row["document"], "candidates": texts, "scores": [0.1, 1.0, 0.5]}


def trained(folder, name, *settings, processes=1, stopped=False):
    """The log of a training, without times."""
    run = folder / "runs" / name.replace(" ", "-")
    options = [text for setting in settings for text in ("--set", setting.replace("{here}", str(folder)))]
    arguments = ["train", str(folder / "tiny.toml"), "--run", str(run), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes > 1:
        codes, err = fork_ranks(TRAIN, arguments, environment=environment, count=processes)
        assert set(codes) == {0}, err
    else:
        for program in (STOPPED, TRAIN) if stopped else (TRAIN,):
            process = fork(program, arguments, environment=environment)
            _, err = process.communicate()
            assert process.returncode == (-signal.SIGKILL if program == STOPPED else 0), err[-3000:]
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def beside(place):
    for name, settings in BEFORE.items():
        trained(place, name, *settings)
    return place


def assert_recorded(log, name, tolerance=2e-6, same_split=True):
    """Diagnostics, whose names have a slash, are of the last micro-batch: they depend on how a step is split."""
    expected = json.loads(RECORDED.read_text())[name]
    expected = [{key: line[key] for key in line if same_split or "/" not in key} for line in expected]
    assert [line["step"] for line in log] == [line["step"] for line in expected]
    for line, wanted in zip(log, expected, strict=True):
        assert wanted.keys() <= line.keys(), f"step {wanted['step']}"
        assert {key: line[key] for key in wanted} == pytest.approx(wanted, rel=tolerance, abs=tolerance), wanted["step"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_has_the_losses_that_were_recorded(place, name):
    log = trained(place, name, *SETTINGS[name])
    assert_recorded(log, name, tolerance=2e-2 if name == "bf16" else 2e-6)  # bf16 is rounded otherwise by other CPUs


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_training_has_the_losses_that_were_recorded_and_the_weights_of_one_that_was_killed(beside, name):
    assert_recorded(trained(beside, name, *KINDS[name]), name)
    trained(beside, f"stopped {name}", *KINDS[name], stopped=True)
    assert_equal_runs(*(beside / "runs" / run.replace(" ", "-") for run in (name, f"stopped {name}")))


@pytest.mark.parametrize("name", ["linear", "dropout"])
def test_a_killed_and_continued_training_has_the_losses_of_one_that_was_not(place, name):
    assert_recorded(trained(place, f"stopped {name}", *SETTINGS[name], stopped=True), name)


def test_two_processes_have_the_losses_of_one(place):
    assert_recorded(trained(place, "two", processes=2), "linear", 1e-5, same_split=False)


def test_two_processes_with_dropout_have_the_losses_that_were_recorded(place):
    """Dropout is drawn in each process, so this is another training than with one."""
    assert_recorded(trained(place, "two dropped", *SETTINGS["dropout"], processes=2), "two processes with dropout")


def test_sharded_weights_have_the_losses_of_whole_ones(place):
    assert_recorded(trained(place, "sharded", "train.fsdp=true", processes=2), "linear", 1e-5, same_split=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"NGRAMLOSS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        prepare(folder)
        for name, settings in BEFORE.items():
            trained(folder, name, *settings)
        made = {
            name: trained(folder, name, *settings)
            for name, settings in (SETTINGS | KINDS).items()
            if not sys.argv[1:] or name in sys.argv[1:]
        }
        made = json.loads(RECORDED.read_text()) | made if sys.argv[1:] else made
        if not sys.argv[1:]:
            made["two processes with dropout"] = trained(folder, "two", *SETTINGS["dropout"], processes=2)
        lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, log)) + "\n]" for name, log in made.items()]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each step, so that a change can be read
    sys.exit()
