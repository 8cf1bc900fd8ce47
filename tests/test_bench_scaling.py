"""How the cost of a training grows: the trainings, their losses, what is computed, and the command."""

import json
import os

import pytest

from ngramloss.bench import child, scaling
from ngramloss.cli import main

TINY = ["bench", "scaling", "--model", "bart-tiny", "--device", "cpu", "--warm-up", "1", "--steps", "2"]


def row(processes=1, *, batch=8, milliseconds=20.0, loss=3.0, fsdp=False, why_not=""):
    return scaling.Row(
        f"{processes} processes",
        processes,
        fsdp,
        batch,
        64,
        tokens=10.0 * batch,
        step_milliseconds=milliseconds,
        communication=0.25,
        start_seconds=1.0,
        gradient_bytes=4e6,
        loss=loss,
        why_not=why_not,
    )


# On paper


def test_the_line_is_that_of_steps_in_one_process():
    rows = [row(batch=4, milliseconds=9.0), row(batch=8, milliseconds=13.0), row(2, batch=8, milliseconds=99.0)]
    assert scaling.line_of(rows) == pytest.approx((5.0, 0.1))
    assert scaling.line_of([*rows, row(batch=16, why_not="no memory")]) == pytest.approx((5.0, 0.1))


def test_one_size_of_steps_has_no_line():
    fixed, slope = scaling.line_of([row(), row(milliseconds=22.0)])
    assert fixed != fixed
    assert slope != slope


def test_several_devices_take_the_time_of_the_formula():
    """A ring all-reduce sends 2 · (N − 1) / N of 4 MB: 6 MB for 4 devices, 6 ms at 1 GB per second."""
    found = scaling.forecast(row(), scaling.Line(5.0, 0.1), devices=4, bandwidth=1.0)
    assert found == pytest.approx(
        (
            4,
            6.0,
            5 + 0.1 * 80 / 4 + 6,
            1e3 * 8 / (5 + 2 + 6),
            1e3 * 32 / (5 + 8 + 6),
            1e3 * 32 / (5 + 8 + 9),  # FSDP sends 3 · (N − 1) / N
        )
    )


def test_one_device_sends_nothing():
    alone = scaling.forecast(row(), scaling.Line(5.0, 0.1), devices=1, bandwidth=1.0)
    assert alone == pytest.approx((1, 0.0, 13.0, 1e3 * 8 / 13, 1e3 * 8 / 13, 1e3 * 8 / 13))


# Losses, and text


def test_losses_are_compared_among_trainings_of_the_same_steps():
    same = [row(loss=3.0), row(2, loss=3.0001), row(batch=4, loss=2.0)]
    assert scaling.losses_agree(same)
    assert scaling.losses_agree([*same, row(2, fsdp=True, loss=9.0, why_not="no")])
    assert not scaling.losses_agree([*same, row(2, fsdp=True, loss=3.01)])
    assert scaling.losses_agree([*same, row(2, fsdp=True, loss=3.01)], precision="bf16")
    assert scaling.losses_agree(same[1:]) is None  # no two have the same steps


def test_a_training_that_failed_has_a_line_of_its_own():
    lines = scaling.as_text([row(), row(2, why_not="RuntimeError: no")]).splitlines()
    assert lines[1].split() == ["1", "processes", "400.0", "20.0", "80", "25", "1.0", "3.000000"]
    assert lines[2] == "2 processes: RuntimeError: no"


# Processes


def ranks(failing):
    if os.environ["RANK"] == failing:
        raise ValueError("broken")
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


@pytest.mark.slow
def test_processes_know_their_ranks_and_one_that_fails_says_why():
    answers = child.in_children(2, ranks, "none")
    assert [answer.result["RANK"] for answer in answers] == ["0", "1"]
    assert {answer.result["WORLD_SIZE"] for answer in answers} == {"2"}
    assert child.in_children(2, ranks, "1")[1].why_not == "ValueError: broken"


# The command


@pytest.mark.slow
def test_trainings_with_more_processes_have_the_same_losses(tmp_path, capsys):
    written = tmp_path / "scaling.json"
    sizes = ["--batch-size", "4", "8", "--rows", "64", "128", "--bandwidth", "10", "--devices", "2", "8"]
    assert main([*TINY, *sizes, "-o", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "losses of the same steps are the same." in printed
    assert "computed, not measured: devices like this one with 10 GB per second each" in printed
    content = json.loads(written.read_text())
    assert [each["what"] for each in content["rows"]] == [
        "4 rows in a step",
        "8 rows in a step",
        "128 rows in all",
        "2 processes",
        "2 processes, FSDP",
    ]
    assert [0 < each["communication"] < 1 for each in content["rows"]] == [False, False, False, True, True]
    assert content["rows"][1]["loss"] == pytest.approx(content["rows"][4]["loss"], rel=1e-5)
    assert content["losses_agree"]
    assert [each["devices"] for each in content["computed"]] == [2, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "9"], "--batch-size counts rows over all processes: 9 cannot be divided by 2."),
        (["--batch-size", "8", "--bandwidth", "10"], "--bandwidth computes with two sizes of steps or more"),
        (["--bandwidth", "0"], "--bandwidth must be above 0, got 0."),
        (["--rows", "8", "--batch-size", "16"], "a step of 16 rows needs at least as many, but --rows has 8."),
        (["--processes", "0"], "numbers must be at least 1, got 0."),
        (["--objective", "ce + rank"], "rank reads candidates, and bench has none."),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments, message, capsys):
    assert main([*TINY, *arguments]) == 2
    assert message in capsys.readouterr().err
