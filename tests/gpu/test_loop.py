"""Whole trainings on a GPU: captured steps train like eager ones, wait for nothing, and go on where they stopped."""

import pytest
import torch
from test_captured import OBJECTIVE, bart, rows

import ngramloss as ng
from ngramloss.gpu.captured import CapturedStep
from ngramloss.training import loop
from ngramloss.training.processes import start_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETTINGS = {
    "batch_size": 8,
    "accumulate": 2,
    "max_steps": 12,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "log_every": 1,
    "eval_every": 0,
    "seed": 3,
    "precision": "bf16",
}


def trained(model=None, *, data=96, objective=OBJECTIVE, folder=None, on_step=lambda number, values: None, **changes):
    """The log of a training, whether steps were captured, the model, and what was said."""
    log, said = [], []
    model = bart() if model is None else model
    job = loop.Job(
        model,
        None,
        rows(data) if isinstance(data, int) else data,
        loop.Train(**SETTINGS | changes),
        objective,
        folder=folder,
        continued_from=None if folder is None else loop.checkpoints.find(folder).newest,
        logs=[lambda line, step: log.append(dict(line) | {"step": step})],
        on_step=on_step,
        say=said.append,
    )
    loop.run(job, start_processes())
    return log, not any("not captured" in sentence for sentence in said), model, said


@pytest.fixture
def replays(monkeypatch):
    """How often a graph was replayed."""
    count = []
    call = CapturedStep.__call__
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, batch: count.append(1) or call(self, batch))
    return count


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_the_losses_of_a_captured_training_are_those_of_an_eager_one(replays, precision):
    captured, was, _, said = trained(max_steps=50, data=400, precision=precision)
    assert was, said
    assert len(replays) >= 50
    replays.clear()
    eager, *_ = trained(max_steps=50, data=400, precision=precision, capture=False)
    assert not replays
    for one, other in zip(captured, eager, strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)", "grad_norm"):
            limit = 0.05 if name == "grad_norm" else 0.02
            assert one[name] == pytest.approx(other[name], abs=limit), (one["step"], name)
    assert captured[-1]["ce"] < captured[0]["ce"]


def test_captured_steps_compare_candidates_like_eager_ones(replays):
    source, data = torch.Generator().manual_seed(9), rows(200)
    for index, row in enumerate(data):
        lengths = torch.randint(1, 24, (index % 5,), generator=source).tolist()
        row["candidates"] = [torch.randint(4, 40, (length,), generator=source).tolist() for length in lengths]
        row["gains"] = torch.rand(len(lengths), generator=source).tolist()
    rank = "rank(margin=0.1,alpha=1)"
    logs = [
        trained(max_steps=30, data=data, objective=f"ce + 10*{rank} + risk", capture=capture)[0]
        for capture in (True, False)
    ]
    assert len(replays) >= 30
    for one, other in zip(*logs, strict=True):
        for name in ("loss", "ce", rank, "risk"):
            assert one[name] == pytest.approx(other[name], abs=0.05 if name == "loss" else 0.02), (one["step"], name)


def test_dropout_differs_from_step_to_step_and_is_the_same_in_a_second_run(replays):
    losses = [
        [line["loss"] for line in trained(bart(dropout=0.5), data=16, learning_rate=0.0)[0]] for _ in range(2)
    ]  # every step has the same rows
    assert replays
    assert len(set(losses[0])) == 12
    assert losses[0] == losses[1]
    assert len({line["loss"] for line in trained(data=16, learning_rate=0.0)[0]}) == 1


def test_a_continued_captured_training_ends_at_the_same_weights(tmp_path, replays):
    _, _, whole, _ = trained(bart(dropout=0.1), folder=tmp_path / "whole", save_every=5, keep=9)
    for checkpoint in (5, 10):
        again = tmp_path / str(checkpoint)
        again.mkdir()
        (again / f"checkpoint-{checkpoint}").symlink_to(tmp_path / "whole" / f"checkpoint-{checkpoint}")
        log, _, made, _ = trained(bart(dropout=0.1), folder=again, save_every=100)
        assert log[0]["step"] == checkpoint + 1
        weights = made.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("capture", [True, False])
def test_no_step_waits_for_the_device(capture):
    def watch(number, values):
        torch.cuda.set_sync_debug_mode("error" if 4 <= number < 10 else "default")

    try:
        _, captured, _, _ = trained(data=16, log_every=100, on_step=watch, capture=capture)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert captured


def test_fp16_skips_a_step_with_infinite_gradients_and_the_schedule_waits():
    """The first scale of 65,536 is too large for these losses."""
    done = ng.train(bart(), None, rows(96), objective="1000*ce", **SETTINGS | {"precision": "fp16", "capture": False})
    assert done.step == 12
    assert 0 < done.state.updates < 12


def test_layer_drop_runs_eagerly_and_says_why():
    _, captured, _, said = trained(bart(encoder_layerdrop=0.5))
    assert not captured
    assert any("layer drop chooses layers on the host. Training is the same, but slower" in line for line in said)


def test_the_budget_comes_from_the_memory():
    _, _, _, said = trained(max_tokens=0)
    assert any("a step of 16 sequences is" in line and "shapes" in line for line in said)
