"""Fifty kills of a training, from its first file operation to its last: the same command ends at the same weights."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from lanes import few
from places import HELPERS

from ngramloss.data import newswire

pytestmark = pytest.mark.slow

POINTS, SEED = 50, 20261115
PARTS = 5  # tests of their own: the first is enough for `make test`, and processes can share the others
RECIPE = """
objective = "{objective}"
[data]
name = "{data}"
max_source = 24
max_target = 12
separator = "none"
[model]
name = "scratch"
width = 8
encoder_layers = 1
decoder_layers = 1
heads = 1
feed_forward = 8
vocabulary = 300
dropout = 0.1
[train]
max_steps = 4
batch_size = 2
accumulate = 2
learning_rate = 1e-2
warmup_steps = 2
log_every = 1
eval_every = 2
save_every = 1
keep = 1
best = "{best}"
[generation]
num_beams = 1
max_length = 12
"""


ONLINE = "[online]\nsamples = 2\nrefresh = 3\n"


def report(place, kind, *numbers, best="ce", objective="ce + matches(2)", more=""):
    """What ``crashes.py`` found out, in one process that forks."""
    (place / "data").mkdir()
    for split, count in (("train", 40), ("validation", 6)):
        rows = [
            json.dumps({"document": item.document, "summary": item.summary}) for item in newswire.items(split, count)
        ]
        (place / "data" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (place / "tiny.toml").write_text(RECIPE.format(data=place / "data", best=best, objective=objective) + more)
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HELPERS / "crashes.py"), str(place), kind, *map(str, numbers)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def wrong(outcomes):
    return [one for one in outcomes if one["again"] != 0 or one["differs"]]


@pytest.mark.parametrize("part", few([0], range(PARTS)))
def test_after_a_kill_at_any_of_fifty_points_the_same_command_ends_at_the_same_weights(tmp_path, part):
    found = report(tmp_path, "killed", SEED, POINTS, part, PARTS)
    outcomes = found["outcomes"]
    assert len(outcomes) == POINTS / PARTS
    assert [one["kill_at"] for one in outcomes[: 10 // PARTS]] == list(range(1, 11))[part::PARTS], (
        "the first moments are among them"
    )
    assert [one["code"] for one in outcomes] == [-signal.SIGKILL] * len(outcomes)
    assert found["operations"] > 150
    assert not wrong(outcomes)


@pytest.mark.parametrize("part", few([1], [1, 4]))
def test_a_kill_of_a_training_that_generates_in_validation_changes_nothing_either(tmp_path, part):
    outcomes = report(tmp_path, "killed", SEED, 30, part, 6, best="chrf")["outcomes"]
    assert [one["code"] for one in outcomes] == [-signal.SIGKILL] * 5
    assert not wrong(outcomes)


@pytest.mark.parametrize("part", few([2], [2, 5]))
def test_a_kill_of_a_training_on_texts_that_it_writes_changes_nothing_either(tmp_path, part):
    outcomes = report(tmp_path, "killed", SEED, 30, part, 6, objective="ce + risk(sharpness=1)", more=ONLINE)[
        "outcomes"
    ]
    assert [one["code"] for one in outcomes] == [-signal.SIGKILL] * 5
    assert not wrong(outcomes)


def test_a_kill_while_an_earlier_run_is_deleted_leaves_what_fresh_starts_over(tmp_path):
    outcomes = report(tmp_path, "fresh")["outcomes"]
    assert [one["code"] for one in outcomes] == [-signal.SIGKILL] * 6
    assert not wrong(outcomes)


def test_a_disk_that_is_full_from_the_start_is_a_sentence_and_the_same_command_works_later(tmp_path):
    outcomes = report(tmp_path, "full")["outcomes"]
    assert len(outcomes) == 5
    for one in outcomes:
        assert one["code"] == 1, one
        assert re.match(
            rf"error: No space left on device: {tmp_path}/full/\S+\. Free some disk space, or .+; then run the same "
            r"command again\.$",
            one["said"].splitlines()[-1],
        ), one
        assert "Traceback" not in one["said"]
    assert not wrong(outcomes)
