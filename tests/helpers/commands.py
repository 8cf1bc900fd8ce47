"""arguments of ``ngramloss`` → a process that runs it, is killed on the way or ends, and what its run folder has then."""

import json
import os
import random
import time

import pytest
import torch
from forks import fork, fork_ranks
from models import TINY_MODEL
from safetensors.torch import load_file

from ngramloss import cli

SABOTAGE = """
import os, shutil, signal, sys
import torch
from ngramloss.storage import checksums
from ngramloss import cli
from ngramloss.training import card, checkpoints

where, at = sys.argv[1].split(":")
here = f"checkpoint-{at}"

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, name, when):
    whole = getattr(module, name)
    def broken(*args, **kwargs):
        if when(*args):
            die()
        return whole(*args, **kwargs)
    setattr(module, name, broken)

def half_saved(thing, path, *args, whole=torch.save, **kwargs):
    if str(path).endswith(f"{here}/optimizer.pt"):
        open(path, "wb").write(b"half")
        die()
    return whole(thing, path, *args, **kwargs)

def half_deleted(path, *args, whole=shutil.rmtree, **kwargs):
    if str(path).endswith(here):
        os.unlink(os.path.join(path, "model.safetensors"))
        die()
    return whole(path, *args, **kwargs)

def half_sealed(path, text, whole=checksums.write_whole):
    if str(path).endswith(f"{here}/whole.json"):
        path.with_name("whole.json.partial-0").write_text(text[:20])
        die()
    return whole(path, text)

if where == "saving":
    torch.save = half_saved
elif where == "sealing":
    checksums.write_whole = half_sealed
elif where == "pruning":
    shutil.rmtree = half_deleted
elif where == "sealed":
    before(checkpoints, "prune", lambda folder: (folder / here / "whole.json").exists())
elif where == "card":
    before(card, "card_text", lambda *_: True)
elif where == "model":
    whole = checkpoints.copy_model
    checkpoints.copy_model = lambda *args: (whole(*args), die())
sys.exit(cli.main(sys.argv[2:]))
"""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


TRAIN = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"


def started(arguments, *, sabotage=None, limit=None):
    """A process that trains: it can be killed as any other, and need not import torch again."""
    program = (SABOTAGE, [sabotage, *arguments]) if sabotage else (TRAIN, arguments)
    return fork(*program, environment=environment(), limit=limit)


def finished(arguments, **options):
    process = started(arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def assert_equal_runs(one, other):
    """The same weights bit for bit, and the same log but for times."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert log(one) == log(other)


def log(run):
    timed = ("docs_per_second", "memory_gib", "runtime", "per_second", "writing_share")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(timed)} for line in lines]


def assert_two_processes_train_as_one(folder, *settings):
    """Train, with a moving average, in one process and in two: equal weights and values but for rounding.

    The last step of an epoch has one row, so that one of the two has none.
    """
    settings += ("train.ema=0.5", "train.learning_rate=1e-3", "data.limit=17")
    arguments = ["tiny.toml", *(part for setting in settings for part in ("--set", setting))]
    assert train(*arguments, "--run", folder / "one") == 0
    asked = ["train", *map(str, arguments), "--run", str(folder / "two")]
    codes, err = fork_ranks(TRAIN, asked, environment=environment())
    assert codes == [0, 0], err[-3000:]
    for name in ("model", "checkpoints/ema"):
        one, two = (load_file(folder / each / name / "model.safetensors") for each in ("one", "two"))
        assert one.keys() == two.keys()
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(log(folder / "two"), log(folder / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def wait_for(happened, process, seconds=100):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "nothing happened"
        assert process.poll() is None, process.stderr.read()[-2000:]
        time.sleep(0.02)


def train(*arguments):
    return cli.main(["train", *map(str, arguments)])


EASY_STEPS = 12


EASY_RECIPE = f"""
objective = "ce + matches(2)"
[data]
name = "{{data}}"
max_source = 48
max_target = 24
separator = "none"
{TINY_MODEL}dropout = 0.1
[train]
max_steps = {EASY_STEPS}
batch_size = 4
accumulate = 2
learning_rate = 1e-2
warmup_steps = 4
log_every = 2
eval_every = 2
save_every = 2
keep = 9
best = "rouge2"
[generation]
num_beams = 3
max_length = 24
min_length = 3
"""


def write_easy_rows(path, count, seed):
    """Data that are learned quickly."""
    chance = random.Random(seed)
    pairs = [(chance.choice(("cat", "dog", "bird")), chance.choice(("mat", "roof", "lawn"))) for _ in range(count)]
    rows = [
        {
            "document": f"Once more the {who} came home. Then it sat on the {where} and slept.",
            "summary": f"the {who} sat on the {where} and slept all day long",
        }
        for who, where in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
