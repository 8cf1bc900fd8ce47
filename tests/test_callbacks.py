"""What watches a trainer: a log that continues, sealed checkpoints, a stop that loses nothing."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
from ngramloss.training.callbacks import Finite, Log, Patience, Progress, Sealing, Stopping, discard_unsealed

from ngramloss import JointLoss
from ngramloss.training import checkpoints


def state(**changes):
    usual = {
        "is_world_process_zero": True,
        "global_step": 10,
        "max_steps": 100,
        "best_metric": None,
        "best_global_step": None,
    }
    return SimpleNamespace(**usual | changes)


def control(**changes):
    flags = ("should_save", "should_evaluate", "should_log", "should_training_stop")
    return SimpleNamespace(**dict.fromkeys(flags, False) | changes)


ARGS = SimpleNamespace(metric_for_best_model="ce", greater_is_better=False, logging_steps=1, device="cpu")
HIGHER = SimpleNamespace(metric_for_best_model="ce", greater_is_better=True, eval_steps=10)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# The log


def test_a_logging_step_is_a_line_of_json(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path, 0)
    assert path.read_text() == ""
    log.on_log(ARGS, state(), control(), {"loss": 1.5, "matches(2)": 0.25})
    log.on_log(ARGS, state(global_step=20), control(), {"eval_ce": 2, "epoch": 0.5})
    assert lines(path) == [{"step": 10, "loss": 1.5, "matches(2)": 0.25}, {"step": 20, "eval_ce": 2, "epoch": 0.5}]
    assert path.read_text().endswith("\n")


def test_what_is_not_finite_is_null_so_that_a_line_is_json(tmp_path):
    path = tmp_path / "log.jsonl"
    Log(path, 0).on_log(ARGS, state(), control(), {"loss": math.nan, "grad_norm": math.inf, "ce": -math.inf, "lr": 0.0})
    assert path.read_text() == '{"step": 10, "loss": null, "grad_norm": null, "ce": null, "lr": 0.0}\n'


def test_only_the_first_process_writes_and_the_closing_summary_is_no_step(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path, 0)
    log.on_log(ARGS, state(is_world_process_zero=False), control(), {"loss": 1.0})
    log.on_log(ARGS, state(), control(), {"train_runtime": 3.0, "train_loss": 1.0})
    assert path.read_text() == ""


def test_lines_after_the_step_a_run_continues_from_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": step / 2}) + "\n" for step in (1, 10, 20, 20, 30)))
    log = Log(path, 20)
    assert [line["step"] for line in lines(path)] == [1, 10, 20, 20]
    log.on_log(ARGS, state(global_step=30), control(), {"loss": 9.0})
    assert lines(path)[-1] == {"step": 30, "loss": 9.0}
    Log(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "torn", ['{"step": 20, "lo', '{"step": 2', "{", "\x00\x00\x00", "7", "null", '{"loss": 1.0}', '{"step": null}']
)
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n' + torn)
    log = Log(path, 50)
    log.on_log(ARGS, state(global_step=60), control(), {"loss": 2.0})
    assert lines(path) == [{"step": 10, "loss": 1.0}, {"step": 60, "loss": 2.0}]


def test_a_line_cut_within_a_character_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 10, "loss": 1.0}\n{"step": 11, "name": "\xc3')
    Log(path, 50)
    assert lines(path) == [{"step": 10, "loss": 1.0}]


# The progress line


def test_the_line_shows_terms_speed_and_validations(capsys):
    progress = Progress(JointLoss("ce + matches(2)"))
    progress.on_train_begin(ARGS, state(global_step=10), control())
    progress.on_step_end(ARGS, state(global_step=12), control())
    assert (progress.bar.initial, progress.bar.n) == (10, 12)
    assert progress.bar.total == 100
    progress.on_log(ARGS, state(), control(), {"loss": 3.0, "ce": 2.0, "matches(2)": 1.0, "docs_per_second": 12.3})
    assert progress.bar.postfix == "ce 2.000 · matches(2) 1.000 · 12 docs/s"
    progress.on_log(ARGS, state(global_step=50), control(), {"eval_loss": 3.0, "eval_ce": 2.0, "eval_matches(2)": 1.0})
    assert "step 50: validation ce 2.0000 · matches(2) 1.0000\n" in capsys.readouterr().err
    progress.on_train_end(ARGS, state(), control())


def test_a_score_of_generated_texts_is_shown_with_its_seconds(capsys):
    progress = Progress(JointLoss("ce"), "bleu")
    progress.on_train_begin(ARGS, state(), control())
    progress.on_log(
        ARGS,
        state(global_step=50),
        control(),
        {"eval_loss": 2.0, "eval_ce": 2.0, "eval_bleu": 31.256, "eval_generation_runtime": 12.4},
    )
    progress.on_train_end(ARGS, state(), control())
    assert "step 50: validation ce 2.0000 · bleu 31.26 (generated in 12 s)\n" in capsys.readouterr().err


def test_cross_entropy_is_shown_in_validation_even_where_it_is_not_trained(capsys):
    progress = Progress(JointLoss("matches(2)"))
    progress.on_train_begin(ARGS, state(), control())
    progress.on_log(ARGS, state(global_step=50), control(), {"eval_loss": 1.0, "eval_ce": 2.0, "eval_matches(2)": 1.0})
    progress.on_train_end(ARGS, state(), control())
    assert "validation ce 2.0000 · matches(2) 1.0000\n" in capsys.readouterr().err


def test_other_processes_show_no_line(capsys):
    progress = Progress(JointLoss("ce"))
    for event in (progress.on_train_begin, progress.on_step_end, progress.on_train_end):
        event(ARGS, state(is_world_process_zero=False), control())
    progress.on_log(ARGS, state(), control(), {"eval_loss": 1.0})
    assert progress.bar is None
    assert capsys.readouterr() == ("", "")


# Sealing


def sealing(folder, *, keep=2, ended=False, wait=lambda: None):
    return Sealing(folder, keep=keep, wait=wait, ended=lambda: ended)


@pytest.mark.parametrize("event", ["should_save", "should_evaluate", "should_log", None])
def test_a_step_that_is_saved_or_evaluated_is_logged(tmp_path, event):
    asked = control(**{event: True} if event else {})
    sealing(tmp_path).on_step_end(ARGS, state(), asked)
    assert asked.should_log is (event is not None)


@pytest.mark.parametrize(
    ("best", "value", "stops", "saved"),
    [
        (None, 3.0, False, True),
        (2.0, 1.9, False, True),
        (2.0, 2.0, False, False),
        (2.0, 2.1, False, False),
        (2.0, math.nan, False, False),
        (2.0, 3.0, True, True),
    ],
)
def test_a_new_best_is_saved_and_so_is_whatever_training_ends_with(tmp_path, best, value, stops, saved):
    asked = control(should_training_stop=stops)
    sealing(tmp_path).on_evaluate(ARGS, state(best_metric=best), asked, {"eval_ce": value, "eval_loss": 0.0})
    assert asked.should_save is saved


@pytest.mark.parametrize(("value", "saved"), [(2.1, True), (2.0, False), (1.9, False), (math.nan, False)])
def test_where_higher_is_better_a_higher_value_is_saved(tmp_path, value, saved):
    asked = control()
    sealing(tmp_path).on_evaluate(HIGHER, state(best_metric=2.0), asked, {"eval_ce": value})
    assert asked.should_save is saved


def test_an_evaluation_without_the_metric_is_no_new_best(tmp_path):
    asked = control()
    sealing(tmp_path).on_evaluate(ARGS, state(best_metric=2.0), asked, {"eval_loss": 0.0})
    assert asked.should_save is False


def written(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_text("weights")
    return path


def test_what_was_saved_is_sealed_with_its_facts(tmp_path):
    path = written(tmp_path, 10)
    sealing(tmp_path).on_save(ARGS, state(best_metric=1.5, best_global_step=5), control())
    assert checkpoints.fault(path) == ""
    facts = checkpoints.facts(path)
    assert {name: facts[name] for name in ("step", "best_step", "best", "finished")} == {
        "step": 10,
        "best_step": 5,
        "best": 1.5,
        "finished": False,
    }


@pytest.mark.parametrize(
    ("step", "stops", "ended", "finished"),
    [
        (10, False, False, False),
        (100, False, False, True),
        (10, True, False, False),
        (10, True, True, True),
        (100, True, True, True),
    ],
)
def test_a_run_is_finished_at_its_last_step_or_where_it_ends_early_and_not_where_it_is_stopped(
    tmp_path, step, stops, ended, finished
):
    path = written(tmp_path, step)
    sealing(tmp_path, ended=ended).on_save(ARGS, state(global_step=step), control(should_training_stop=stops))
    assert checkpoints.facts(path)["finished"] is finished


def test_older_checkpoints_than_are_kept_go_but_not_the_best(tmp_path):
    watcher = sealing(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        written(tmp_path, step)
        watcher.on_save(ARGS, state(global_step=step, best_global_step=10, best_metric=1.0), control())
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-30", "checkpoint-40"]


def test_all_processes_wait_before_sealing_and_after_deleting(tmp_path):
    path, old = written(tmp_path, 10), written(tmp_path, 5)
    seen = []
    watcher = sealing(tmp_path, keep=1, wait=lambda: seen.append(((path / checkpoints.SEAL).exists(), old.exists())))
    watcher.on_save(ARGS, state(), control())
    assert seen == [(False, True), (True, False)]
    seen.clear()
    (path / checkpoints.SEAL).unlink()
    watcher.on_save(ARGS, state(is_world_process_zero=False), control())
    assert seen == [(False, False)] * 2  # another process waits and touches nothing


def test_a_checkpoint_whose_writing_failed_is_discarded_and_no_other(tmp_path):
    for step in (5, 10):
        checkpoints.seal(written(tmp_path, step))
    written(tmp_path, 15)
    discard_unsealed(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-5"]


# Patience


@pytest.mark.parametrize(
    ("step", "best_step", "value", "ends"),
    [
        (50, None, 9.0, False),
        (50, 40, 3.0, False),
        (50, 30, 3.0, True),
        (50, 30, 2.0, True),
        (50, 30, 1.9, False),
        (50, 10, 1.9, False),
        (60, 30, 3.0, True),
    ],
)
def test_training_ends_after_so_many_validations_without_a_new_best(step, best_step, value, ends):
    args, asked = SimpleNamespace(metric_for_best_model="ce", greater_is_better=False, eval_steps=10), control()
    before = state(global_step=step, best_global_step=best_step, best_metric=None if best_step is None else 2.0)
    Patience(2).on_evaluate(args, before, asked, {"eval_ce": value, "eval_loss": 0.0})
    assert asked.should_training_stop is ends


@pytest.mark.parametrize(("value", "ends"), [(2.1, False), (2.0, True), (1.9, True), (math.nan, True)])
def test_where_higher_is_better_a_lower_value_counts_against_patience(value, ends):
    asked = control()
    Patience(2).on_evaluate(
        HIGHER, state(global_step=50, best_global_step=30, best_metric=2.0), asked, {"eval_ce": value}
    )
    assert asked.should_training_stop is ends


# Stopping


@pytest.fixture
def stopping():
    watcher = Stopping(processes=1)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    watcher.on_train_begin(ARGS, state(), control())
    yield watcher
    watcher.restore()
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_after_the_step_and_saves_it(stopping, number, capsys):
    asked = control()
    stopping.on_step_end(ARGS, state(), asked)
    assert (asked.should_save, asked.should_training_stop) == (False, False)
    os.kill(os.getpid(), number)
    assert "stopping after this step and saving it. Press Ctrl-C again to stop at once." in capsys.readouterr().err
    assert (asked.should_save, asked.should_training_stop) == (False, False)
    stopping.on_step_end(ARGS, state(), asked)
    assert (asked.should_save, asked.should_training_stop) == (True, True)


def test_a_second_ctrl_c_stops_at_once(stopping):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_is_patient(stopping):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.asked


def test_the_end_of_training_gives_the_signals_back():
    before = signal.getsignal(signal.SIGINT)
    watcher = Stopping(processes=1)
    watcher.on_train_begin(ARGS, state(), control())
    assert signal.getsignal(signal.SIGINT) != before
    watcher.on_train_end(ARGS, state(), control())
    assert signal.getsignal(signal.SIGINT) == before
    watcher.restore()  # a second time does nothing
    assert signal.getsignal(signal.SIGINT) == before


def test_processes_stop_together_and_on_a_gpu_ask_each_other_at_every_tenth_step(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "tensor", lambda value, device, tensor=torch.tensor: tensor(value))

    asked_by_all = []

    def add_up(value):
        asked_by_all.append(value.item())
        value.add_(1)  # another process was asked

    monkeypatch.setattr(torch.distributed, "all_reduce", add_up)
    watcher, args, asked = Stopping(processes=2), SimpleNamespace(device=torch.device("cuda")), control()
    watcher.on_step_end(args, state(global_step=9), asked)
    assert asked_by_all == []
    assert not asked.should_training_stop
    watcher.on_step_end(args, state(global_step=10), asked)
    assert asked_by_all == [0.0]
    assert watcher.asked  # so that this process too knows the run to be stopped, not finished
    assert asked.should_save
    assert asked.should_training_stop


def test_a_process_that_is_asked_alone_waits_for_the_others(monkeypatch):
    import torch

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: None)
    monkeypatch.setattr(torch, "tensor", lambda value, device, tensor=torch.tensor: tensor(value))
    watcher, args, asked = Stopping(processes=2), SimpleNamespace(device=torch.device("cuda")), control()
    watcher.asked = True
    watcher.on_step_end(args, state(global_step=9), asked)
    assert not asked.should_training_stop
    watcher.on_step_end(args, state(global_step=10), asked)
    assert asked.should_training_stop


def test_processes_on_a_cpu_ask_each_other_at_every_step(monkeypatch):
    import torch

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: None)
    watcher, asked = Stopping(processes=2), control()
    watcher.asked = True
    watcher.on_step_end(SimpleNamespace(device=torch.device("cpu")), state(global_step=7), asked)
    assert asked.should_training_stop


def test_patience_ends_training_after_its_validations_and_counts_no_number_as_no_best():
    args = SimpleNamespace(metric_for_best_model="ce", greater_is_better=False, eval_steps=10)
    for best, value, step, ends in (
        (None, 3.0, 10, False),
        (2.0, 1.9, 50, False),
        (2.0, 2.0, 20, False),
        (2.0, 2.1, 30, True),
        (2.0, math.nan, 30, True),
    ):
        watcher, told = Patience(2), control()
        watcher.on_evaluate(
            args, state(global_step=step, best_metric=best, best_global_step=10), told, {"eval_ce": value}
        )
        assert watcher.ended is told.should_training_stop is ends, (best, value, step)
    never, told = Patience(0), control()
    never.on_evaluate(args, state(global_step=900, best_metric=1.0, best_global_step=10), told, {"eval_ce": 2.0})
    assert not told.should_training_stop


def test_a_loss_that_is_no_number_is_told_before_it_is_saved():
    args = SimpleNamespace(fp16=False)
    Finite().on_log(args, state(), control(), {"loss": 1.0})
    for logs in ({"loss": math.nan}, {"eval_loss": math.inf}):
        with pytest.raises(FloatingPointError, match=r"at step 10. Lower train.learning_rate"):
            Finite().on_log(args, state(), control(), logs)
    searching = Finite()  # fp16: the scaler may need a few
    for _ in range(2):
        searching.on_log(SimpleNamespace(fp16=True), state(), control(), {"loss": math.inf})
    with pytest.raises(FloatingPointError):
        searching.on_log(SimpleNamespace(fp16=True), state(), control(), {"loss": math.inf})
