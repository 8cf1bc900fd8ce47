"""Whole trainings on a GPU: captured steps train like eager ones, wait for nothing, and go on where they stopped."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from captures import OBJECTIVE, bart, llama, rows
from forks import fork_ranks
from logged import logged
from places import HELPERS

import ngramloss as ng
from ngramloss.recipe import Train
from ngramloss.training import checkpoints, compiling, loop, planning
from ngramloss.training.captured import CapturedStep
from ngramloss.training.objective_task import ObjectiveTask
from ngramloss.training.processes import start_processes
from ngramloss.training.run import python_run

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


def trained(
    model=None,
    *,
    data=96,
    objective=OBJECTIVE,
    folder=None,
    validation=None,
    on_step=lambda number, values: None,
    teacher=None,
    **changes,
):
    """The log of a training, whether steps were captured, the model, and what was said."""
    log = []
    model = bart() if model is None else model
    run = python_run(objective, Train(**SETTINGS | changes))
    examples = rows(data) if isinstance(data, int) else data
    task = ObjectiveTask(model, None, examples, run, validation=validation, teacher=teacher)
    around = loop.Around(
        folder,
        continued_from=None if folder is None else checkpoints.find(folder).newest,
        logs=[lambda line, step: log.append(dict(line) | {"step": step})],
        on_step=on_step,
    )
    with logged() as said:
        loop.run(task, task.settings, start_processes(), around)
    return log, not any("not captured" in sentence for sentence in said), model, said


@pytest.fixture
def replays(monkeypatch):
    """How often a graph was replayed."""
    count = []
    call = CapturedStep.__call__
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, batch: count.append(1) or call(self, batch))
    return count


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (bart, {"precision": "bf16"}),
        (bart, {"precision": "fp32"}),
        (bart, {"precision": "fp16"}),
        (llama, {"precision": "bf16"}),
        (llama, {"precision": "fp32"}),
        (llama, {"precision": "bf16", "compile": True}),
        (bart, {"precision": "bf16", "compile": True}),
        (bart, {"precision": "fp32", "compile": True}),
    ],
    ids=[
        "bart-bf16",
        "bart-fp32",
        "bart-fp16",
        "llama-bf16",
        "llama-fp32",
        "llama-compiled",
        "bart-compiled",
        "bart-compiled-fp32",
    ],
)
def test_the_losses_of_a_captured_training_are_those_of_an_eager_one(replays, model, changes):
    captured, was, _, said = trained(model(), max_steps=50, data=400, **changes)
    assert was, said
    assert len(replays) >= 50
    replays.clear()
    eager, *_ = trained(model(), max_steps=50, data=400, **changes | {"capture": False, "compile": False})
    assert not replays
    for one, other in zip(captured, eager, strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)", "grad_norm"):
            limit = 0.05 if name == "grad_norm" else 0.02
            assert one[name] == pytest.approx(other[name], abs=limit), (one["step"], name)
    assert captured[-1]["ce"] < captured[0]["ce"]


@pytest.mark.parametrize(
    ("model", "changes"),
    [(bart, {}), (llama, {}), (llama, {"compile": True}), (llama, {"max_tokens": 400})],
    ids=["bart", "llama", "llama-compiled", "llama-in-small-pieces"],
)
def test_captured_steps_compare_candidates_like_eager_ones(replays, model, changes):
    source, data = torch.Generator().manual_seed(9), rows(200)
    for index, row in enumerate(data):
        lengths = torch.randint(1, 24, (index % 5,), generator=source).tolist()
        row["candidates"] = [torch.randint(4, 40, (length,), generator=source).tolist() for length in lengths]
        row["scores"] = torch.rand(len(lengths), generator=source).tolist()
    rank = "rank(margin=0.1,alpha=1)"
    given = {"max_steps": 30, "data": data, "objective": f"ce + 10*{rank} + risk"}
    captured, was, _, said = trained(model(), **given, **changes)
    assert was, said
    assert not any("share their prompt" in line for line in said), said
    assert len(replays) >= 30
    eager, *_ = trained(model(), **given, capture=False, compile=False)
    for one, other in zip(captured, eager, strict=True):
        for name in ("loss", "ce", rank, "risk"):
            assert one[name] == pytest.approx(other[name], abs=0.05 if name == "loss" else 0.02), (one["step"], name)


def test_a_captured_step_with_shared_prompts_is_one_with_a_prompt_before_each_text(replays, monkeypatch):
    source, data = torch.Generator().manual_seed(9), rows(64)
    for row in data:
        row["candidates"] = [torch.randint(4, 40, (5 + k,), generator=source).tolist() for k in range(4)]
        row["scores"] = torch.rand(4, generator=source).tolist()
    given = {"data": data, "objective": "ce + risk", "precision": "fp32"}
    shared, was, _, said = trained(llama(), **given)
    assert was, said
    monkeypatch.setattr(planning, "why_not_shared", lambda *args, **more: "of a test")
    repeated, was, _, said = trained(llama(), **given)
    assert was, said
    assert any("do not share their prompt" in line for line in said)
    for one, other in zip(shared, repeated, strict=True):
        for name in ("loss", "ce", "risk", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), (one["step"], name)


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
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{checkpoint}", again / f"checkpoint-{checkpoint}")
        log, _, made, _ = trained(bart(dropout=0.1), folder=again, save_every=100)
        assert log[0]["step"] == checkpoint + 1
        weights = made.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in whole.state_dict().items())


def test_compiled_dropout_differs_from_step_to_step_and_is_the_same_in_a_second_run(replays):
    losses = [
        [line["loss"] for line in trained(bart(dropout=0.5), data=16, learning_rate=0.0, compile=True)[0]]
        for _ in range(2)
    ]
    assert replays
    assert len(set(losses[0])) == 12
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)  # the second may be tuned otherwise


def test_a_continued_compiled_training_ends_at_the_same_weights(tmp_path, replays):
    settings = {"save_every": 5, "keep": 9, "compile": True}
    _, _, whole, _ = trained(bart(dropout=0.1), folder=tmp_path / "whole", **settings)
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-5", again / "checkpoint-5")
    log, _, made, _ = trained(bart(dropout=0.1), folder=again, **settings)
    assert log[0]["step"] == 6
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], value, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(("model", "pieces"), [(bart, 2), (llama, 1)])
def test_every_shape_of_a_training_runs_the_same_compiled_code(model, pieces, replays):
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    _, captured, _, said = trained(model(), data=400, max_steps=25, compile=True)
    assert captured, said
    assert counters["stats"]["unique_graphs"] == pieces
    assert not counters["graph_break"]


def test_a_short_training_is_not_compiled_and_says_so_and_a_long_one_is(monkeypatch):
    said = trained()[3]
    assert any("layers are not compiled: this training is short" in line for line in said)
    monkeypatch.setattr(compiling, "EARNED", 0.0)
    torch._dynamo.reset()  # another test may have compiled the same layers
    torch._dynamo.utils.counters.clear()
    said = trained()[3]
    assert any("layers are compiled before the first step" in line for line in said)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_compiler_that_fails_leaves_captured_steps_as_they_are(monkeypatch, replays):
    def fails(module, inputs):
        raise RuntimeError("no C compiler")

    compile_it = torch.nn.Module.compile
    monkeypatch.setattr(compiling, "EARNED", 0.0)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: compile_it(self, backend=fails, **given))
    log, captured, _, said = trained()
    assert captured
    assert len(replays) >= 12
    assert any("layers are not compiled: " in line and "no C compiler" in line for line in said), said
    assert log[-1]["ce"] < log[0]["ce"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model", [bart, llama])
def test_no_captured_step_waits_for_the_device(replays, model, compiled):
    def watch(number, values):
        torch.cuda.set_sync_debug_mode("error" if 4 <= number < 10 else "default")

    try:
        trained(model(), data=16, log_every=100, on_step=watch, compile=compiled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(replays) >= 12


def test_weights_that_are_thawed_are_captured_again(replays):
    kept, model = [], bart()
    first = model.model.encoder.layers[0].fc1.weight.clone()

    def thaw(number, values):
        if number == 6:
            kept.append(model.model.encoder.layers[0].fc1.weight.clone())
            model.model.encoder.layers.requires_grad_(True)

    model.model.encoder.layers.requires_grad_(False)
    trained(model, on_step=thaw)
    assert len(replays) >= 12
    assert torch.equal(kept[0].cpu(), first)


@pytest.mark.parametrize("ends", [False, True])
def test_a_schedule_of_terms_reaches_captured_steps(replays, ends):
    objective = f"ce{'@until(0.5)' * ends} + matches(2)@from(0.5)"
    log, *_ = trained(objective=objective, data=16, learning_rate=0.0)
    assert replays
    for line in log:
        late = line["step"] > 6
        expected = line["ce"] * (not (late and ends)) + line["matches(2)"] * late
        assert line["loss"] == pytest.approx(expected, rel=1e-3), line["step"]


def test_validation_between_captured_steps_changes_nothing(replays):
    def ce(**changes):
        return [line["ce"] for line in trained(bart(dropout=0.1), **changes)[0] if "ce" in line]

    log = ce(validation=rows(20, seed=9), eval_every=3)
    assert log == ce()
    assert replays


class Waiting(hf.BartForConditionalGeneration):
    def forward(self, input_ids=None, **kwargs):
        assert input_ids.sum().item() > 0
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        (lambda: bart(encoder_layerdrop=0.3), {}, "layer drop chooses layers on the host"),
        (lambda: Waiting(bart().config), {}, ""),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(model, changes, reason):
    log, captured, _, said = trained(model(), **changes)
    assert not captured
    assert any(f"not captured as CUDA graphs: {reason}" in line and "same, but slower" in line for line in said), said
    assert log[-1]["ce"] < log[0]["ce"]
    assert torch.rand(4, device="cuda").sum() > 0  # the generator still works


WORKER = """
import sys; sys.path[:0] = [{tests!r}, {gpu!r}]
import torch, test_whole_trainings as t
_, captured, model, said = t.trained(max_steps=8, data=90, precision="fp32", max_tokens=int(sys.argv[2]))
assert captured, said
if torch.distributed.get_rank() == 0:
    torch.save({{name: value.cpu() for name, value in model.state_dict().items()}}, sys.argv[1])
"""


@pytest.mark.parametrize("max_tokens", [0, 300])
def test_two_processes_on_one_gpu_end_at_the_weights_of_one(tmp_path, max_tokens):
    here = Path(__file__).parent
    program = WORKER.format(tests=str(HELPERS), gpu=str(here))
    given = [str(tmp_path / "weights.pt"), str(max_tokens)]
    codes, err = fork_ranks(program, given, environment=dict(os.environ), one_device=True)
    assert codes == [0, 0], err[-3000:]
    _, _, alone, _ = trained(max_steps=8, data=90, precision="fp32")
    two = torch.load(tmp_path / "weights.pt")
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(two[name], value.cpu(), atol=2e-4, rtol=1e-3)


def test_fp16_skips_a_step_with_infinite_gradients_and_the_schedule_waits():
    """The first scale of 65,536 is too large for these losses."""
    done = ng.train(bart(), None, rows(96), objective="1000*ce", **SETTINGS | {"precision": "fp16", "capture": False})
    assert done.step == 12
    assert 0 < done.state.updates < 12


def test_the_budget_comes_from_the_memory():
    _, _, _, said = trained(max_tokens=0)
    assert any("a step of 16 sequences is" in line and "shapes" in line for line in said)


@pytest.mark.parametrize("make", [bart, llama], ids=["bart", "llama"])
@pytest.mark.parametrize("objective", ["ce + 0.5*distill(temperature=2)", "ce + keep", "ce + keep:reverse"])
def test_a_teacher_is_read_in_captured_steps(make, objective):
    torch.manual_seed(5)
    teacher = make() if "distill" in objective else None
    settings = {"objective": objective, "teacher": teacher, "precision": "fp32"}
    torch.manual_seed(0)
    log, captured, one, said = trained(make(), **settings)
    assert captured, said
    torch.manual_seed(0)
    eager, _, other, _ = trained(make(), capture=False, **settings)
    for line, expected in zip(log, eager, strict=True):
        for name in expected.keys() - {"docs_per_second", "memory_gib"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, atol=1e-4, rtol=1e-3)
