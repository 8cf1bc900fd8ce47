"""rows of ids → tiny models that the loop of ``ngramloss train`` trained on them, with their logs."""

import json
import os
from typing import NamedTuple

import pytest
from forks import fork_ranks
from places import HELPERS, TESTS
from safetensors.torch import load_file
from trainings import rows

import ngramloss as ng
from ngramloss.training import checkpoints

SETTINGS = {
    "batch_size": 8,
    "accumulate": 1,
    "epochs": 2.0,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "log_every": 1,
    "eval_every": 0,
    "save_every": 1,
    "keep": 100,
}


class Trained(NamedTuple):
    """A training that ended."""

    model: object
    outcome: object
    log: list


def trained(folder=None, *, model, objective, data=22, validation=None, tokenizer=None, **changes):
    """Train with ``ng.train``; the log has the values that ``on_step`` gets."""
    log, data = [], rows(data) if isinstance(data, int) else data
    given = {"objective": objective, "validation": validation, "folder": folder, **SETTINGS | changes}
    outcome = ng.train(
        model, tokenizer, data, on_step=lambda step, values: log.append({"step": step, **values}), **given
    )
    return Trained(model, outcome, log)


def assert_same_log(one, other, names, tolerance=1e-4):
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for here, there in zip(one, other, strict=True):
        for name in names:
            assert here.get(name) == pytest.approx(there.get(name), abs=tolerance), name


WORKER = """
import json, sys
sys.path[:0] = {folders!r}
from {module} import work
work(sys.argv[1], **json.loads(sys.argv[2]))
"""


def in_two_processes(folder, module, **changes):
    """What two processes end with, each of which calls ``work(folder, **changes)`` of a module of tests.

    Returns the weights that they saved last in ``checkpoints``, and what the first wrote into ``found.json``.
    """
    folder.mkdir(exist_ok=True)
    folders = [str(HELPERS), *(str(path.parent) for path in TESTS.glob(f"*/{module}.py"))]
    codes, err = fork_ranks(
        WORKER.format(folders=folders, module=module),
        [str(folder), json.dumps(changes)],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert codes == [0, 0], err[-3000:]
    newest = checkpoints.find(folder / "checkpoints").newest
    return load_file(newest / "model.safetensors"), json.loads((folder / "found.json").read_text())
