"""The log of a training: lines of JSON that continue, means since the last line, a line on the terminal."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from ngramloss import JointLoss
from ngramloss.data.batches.padding import Step
from ngramloss.models.attached.diagnosing import scheduled_weights
from ngramloss.output.progress import Progress
from ngramloss.training.log import Log, LogFile, show_lines
from ngramloss.training.processes import Processes

HERE = Processes(0, 1, torch.device("cpu"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# The file


def test_a_logging_step_is_a_line_of_json(tmp_path):
    path = tmp_path / "log.jsonl"
    log = LogFile(path, 0)
    assert path.read_text() == ""
    log({"loss": 1.5, "matches(2)": 0.25}, 10)
    log({"eval_ce": 2, "epoch": 0.5}, 20)
    assert lines(path) == [{"step": 10, "loss": 1.5, "matches(2)": 0.25}, {"step": 20, "eval_ce": 2, "epoch": 0.5}]
    assert path.read_text().endswith("\n")


def test_what_is_not_finite_is_null_so_that_a_line_is_json(tmp_path):
    path = tmp_path / "log.jsonl"
    LogFile(path, 0)({"loss": math.nan, "grad_norm": math.inf, "ce": -math.inf, "lr": 0.0}, 10)
    assert path.read_text() == '{"step": 10, "loss": null, "grad_norm": null, "ce": null, "lr": 0.0}\n'


def test_lines_after_the_step_a_run_continues_from_are_deleted(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": step / 2}) + "\n" for step in (1, 10, 20, 20, 30)))
    log = LogFile(path, 20)
    assert [line["step"] for line in lines(path)] == [1, 10, 20, 20]
    log({"loss": 9.0}, 30)
    assert lines(path)[-1] == {"step": 30, "loss": 9.0}
    LogFile(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "torn", ['{"step": 20, "lo', '{"step": 2', "{", "\x00\x00\x00", "7", "null", '{"loss": 1.0}', '{"step": null}']
)
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n' + torn)
    LogFile(path, 50)({"loss": 2.0}, 60)
    assert lines(path) == [{"step": 10, "loss": 1.0}, {"step": 60, "loss": 2.0}]


def test_a_line_cut_within_a_character_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 10, "loss": 1.0}\n{"step": 11, "name": "\xc3')
    LogFile(path, 50)
    assert lines(path) == [{"step": 10, "loss": 1.0}]


def test_no_line_is_written_through_a_link(tmp_path):
    log = LogFile(tmp_path / "log.jsonl", 0)
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"log\.jsonl"):
        log({"loss": 1.0}, 1)
    assert not (tmp_path / "elsewhere").exists()


# What a line has


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when they are told to."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


def log_of(*writers, objective="ce + matches(2)", since=0):
    terms = [part.name for part in JointLoss(objective).parts]
    return Log(writers, terms, SimpleNamespace(epochs=SimpleNamespace(steps=4)), HERE, since=since)


def step(sequences, number=0):
    return Step([], torch.tensor([99.0, sequences]), number)


def write(log, number):
    return log.write(number, norm=torch.tensor(2.5), rate=1e-3, more={"matched/2": 0.5})


def test_a_line_has_means_since_the_last_one_and_goes_to_every_writer(clock):
    seen = []
    log = log_of(lambda line, step: seen.append((step, dict(line))), lambda line, step: seen.append(step), since=10)
    for number, values in ((11, [3.0, 2.0, 1.0]), (12, [5.0, 4.0, 1.0])):
        log.add(torch.tensor(values), step(8, number))
        clock.seconds += 1
    line = write(log, 12)
    assert seen == [(12, line), 12]
    assert line.pop("memory_gib") > 0.01
    assert line == {
        "loss": 4.0,
        "ce": 3.0,
        "matches(2)": 1.0,
        "grad_norm": 2.5,
        "learning_rate": 1e-3,
        "docs_per_second": 8.0,
        "matched/2": 0.5,
        "epoch": 3.0,
    }
    log.add(torch.tensor([7.0, 7.0, 7.0]), step(3))
    assert write(log, 13)["loss"] == 7.0


def test_a_line_has_the_weights_of_scheduled_terms_alone():
    loss_fn = JointLoss("ce + 4*matches(2)@ramp(0,1)")
    loss_fn.progress = 0.25
    assert scheduled_weights(loss_fn) == {"weight/matches(2)": 1.0}


def test_pauses_before_and_after_a_line_do_not_count_as_training(clock):
    log = log_of()
    for number in (1, 2):
        log.add(torch.ones(3), step(8))
        clock.seconds += 2
        with log.paused():
            clock.seconds += 1000  # diagnostics
            line = write(log, number)
            clock.seconds += 500
        with log.paused():
            clock.seconds += 300  # a checkpoint
        assert line["docs_per_second"] == 4.0


def test_a_validation_is_a_line_of_its_own():
    seen = []
    log_of(lambda line, step: seen.append((step, dict(line)))).write_validation(6, {"eval_ce": 2.0})
    assert seen == [(6, {"eval_ce": 2.0, "epoch": 1.5})]


def test_terms_of_several_processes_are_added_up(monkeypatch):
    """A process has its share of the step's loss."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.mul_(3))
    log = log_of()
    log.here = Processes(0, 3, torch.device("cpu"))
    log.add(torch.tensor([1.0, 2.0, 3.0]), step(8))
    line = write(log, 1)
    assert (line["loss"], line["ce"], line["matches(2)"]) == (3.0, 6.0, 9.0)


# The line on the terminal


def test_terms_and_speed_are_shown_beside_the_progress_and_validations_as_messages(messages):
    progress = Progress("training", total=100, unit="steps", done=10)
    show = show_lines(progress, ["ce", "matches(2)"])
    show({"loss": 3.0, "ce": 2.0, "matches(2)": 1.0, "docs_per_second": 12.3}, 12)
    assert str(progress).startswith("training: 12 of 100 steps, ")
    assert str(progress).endswith(" left · ce 2.000 · matches(2) 1.000 · 12 docs/s")
    show({"eval_loss": 3.0, "eval_ce": 2.0, "eval_matches(2)": 1.0}, 50)
    assert messages == ["step 50: validation ce 2.0000 · matches(2) 1.0000"]


@pytest.mark.parametrize(("speed", "shown"), [(0.42, "ce 2.000 · 0.42 docs/s"), (9.96, "ce 2.000 · 10 docs/s")])
def test_a_slow_training_does_not_write_0_docs_a_second(speed, shown):
    progress = Progress("training", total=100, unit="steps", done=10)
    show = show_lines(progress, ["ce"])
    show({"ce": 3.0, "docs_per_second": 1.0}, 11)
    assert str(progress).endswith("· ce 3.000")  # the first step also loads, compiles and captures
    show({"ce": 2.0, "docs_per_second": speed}, 12)
    assert str(progress).endswith(f"· {shown}")


def test_a_score_of_generated_texts_is_shown_with_its_seconds(messages):
    show = show_lines(Progress("training"), ["ce"], score="bleu")
    show({"eval_loss": 2.0, "eval_ce": 2.0, "eval_bleu": 31.256, "eval_generation_runtime": 12.4}, 50)
    assert messages == ["step 50: validation ce 2.0000 · bleu 31.26 (generated in 12 s)"]


def test_cross_entropy_is_shown_in_validation_even_where_it_is_not_trained(messages):
    show = show_lines(Progress("training"), ["matches(2)"])
    show({"eval_loss": 1.0, "eval_ce": 2.0, "eval_matches(2)": 1.0}, 50)
    assert messages == ["step 50: validation ce 2.0000 · matches(2) 1.0000"]
