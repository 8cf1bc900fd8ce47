"""rows of ids → tiny models that the loop of ``ngramloss train`` trained on them, with their logs."""

from typing import NamedTuple

import pytest
from trainings import rows

import ngramloss as ng

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
