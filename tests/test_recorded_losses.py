"""Losses of tiny trainings as they were recorded once: whatever changes in the loop, these numbers stay.

``python tests/test_recorded_losses.py [NAME …]`` records them anew, for a change that is meant to change them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from commands import TRAIN
from forks import fork, fork_ranks
from models import TINY_MODEL

from ngramloss.data import newswire

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
TIMED = ("docs_per_second", "memory_gib", "runtime", "per_second", "total_flos")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def prepare(folder):
    (folder / "data").mkdir()
    for split, count in (("train", 40), ("validation", 6)):
        lines = [json.dumps({"document": x.document, "summary": x.summary}) for x in newswire.items(split, count)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.toml").write_text(RECIPE.format(data=folder / "data"))


def trained(folder, name, *settings, processes=1, stopped=False):
    """The log of a training, without times."""
    run = folder / "runs" / name.replace(" ", "-")
    options = [text for setting in settings for text in ("--set", setting)]
    arguments = ["train", str(folder / "tiny.toml"), "--run", str(run), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes > 1:
        codes, err = fork_ranks(TRAIN, arguments, environment=environment, count=processes)
        assert set(codes) == {0}, err
    else:
        for program in (STOPPED, TRAIN) if stopped else (TRAIN,):
            process = fork(program, arguments, environment=environment)
            _, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    prepare(folder)
    return folder


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
        made = {
            name: trained(folder, name, *settings)
            for name, settings in SETTINGS.items()
            if not sys.argv[1:] or name in sys.argv[1:]
        }
        made = json.loads(RECORDED.read_text()) | made if sys.argv[1:] else made
        made["two processes with dropout"] = trained(folder, "two", *SETTINGS["dropout"], processes=2)
        lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, log)) + "\n]" for name, log in made.items()]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each step, so that a change can be read
    sys.exit()
