"""How the cost of a training grows: the trainings, their losses, what is computed, and the command."""

import json
import os
from functools import partial

import pytest
from benchmarks import medians

from ngramloss.cli import main
from ngramloss_bench import child, scaling
from ngramloss_bench.benchmark import Measured
from ngramloss_bench.scaling import Training

TINY = [
    "bench",
    "scaling",
    "--model",
    "bart-tiny",
    "--device",
    "cpu",
    "--warm-up",
    "1",
    "--steps",
    "2",
    "--repeats",
    "2",
]


def row(name="", *, batch=8, milliseconds=20.0, loss=3.0, why_not=""):
    values = {"tokens a step": [10.0 * batch], "ms a step": [milliseconds], "loss": [loss]}
    return Measured(name, values={} if why_not else values, why_not=why_not)


# On paper


def test_the_line_is_that_of_the_steps():
    rows = [row(batch=4, milliseconds=9.0), row(batch=8, milliseconds=13.0)]
    assert scaling.line_of([*rows, row(batch=16, why_not="no memory")]) == pytest.approx((5.0, 0.1))


def test_one_size_of_steps_has_no_line():
    fixed, slope = scaling.line_of([row(), row(milliseconds=22.0)])
    assert fixed != fixed
    assert slope != slope


def forecast(devices):
    """Of a step of 8 rows and 80 tokens, with 4 MB of gradients and 1 GB per second."""
    alone = Measured("", values={"tokens a step": [80.0], scaling.GRADIENTS: [4e6]})
    found = scaling.forecast(alone, scaling.Line(5.0, 0.1), 8, devices, 1.0)
    return [found.median(name) for name in ("sending ms", "ms a step", scaling.SHARED, scaling.GROWN, scaling.SHARDED)]


def test_several_devices_take_the_time_of_the_formula():
    """A ring all-reduce sends 2 · (N − 1) / N of 4 MB: 6 MB for 4 devices, 6 ms."""
    each = 6.0, 5 + 0.1 * 80 / 4 + 6, 1e3 * 8 / (5 + 2 + 6), 1e3 * 32 / (5 + 8 + 6)
    assert forecast(4) == pytest.approx([*each, 1e3 * 32 / (5 + 8 + 9)])  # FSDP sends 3 · (N − 1) / N


def test_one_device_sends_nothing():
    assert forecast(1) == pytest.approx([0.0, 13.0, *[1e3 * 8 / 13] * 3])


# Losses


def test_losses_are_compared_among_trainings_of_the_same_steps():
    each = {"a": Training(8, 64), "b": Training(8, 64, 2), "c": Training(4, 64), "d": Training(8, 64, 2, True)}
    same = [row("a", loss=3.0), row("b", loss=3.0001), row("c", loss=2.0)]
    agree = partial(scaling.losses_agree, each=each, precision="fp32")
    assert agree(same)
    assert agree([*same, row("d", loss=9.0, why_not="no")])
    assert not agree([*same, row("d", loss=3.01)])
    assert agree([*same, row("d", loss=3.01)], precision="bf16")
    assert agree(same[1:]) is None  # no two have the same steps


# Processes


def ranks(failing):
    if os.environ["RANK"] == failing:
        raise ValueError("broken")
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


@pytest.mark.slow
def test_processes_know_their_ranks_and_one_that_fails_says_why():
    results = child.in_children(2, ranks, "none")
    assert [each["RANK"] for each in results] == ["0", "1"]
    assert {each["WORLD_SIZE"] for each in results} == {"2"}
    with pytest.raises(child.Failed, match=r"^ValueError: broken$"):
        child.in_children(2, ranks, "1")


# The command


@pytest.mark.slow
def test_trainings_with_more_processes_have_the_same_losses(tmp_path, capsys):
    written = tmp_path / "scaling.json"
    sizes = ["--batch-size", "4", "8", "--rows", "64", "128", "--bandwidth", "10", "--devices", "2", "8"]
    assert main([*TINY, *sizes, "-o", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "losses of the same steps are the same." in printed
    assert "computed, not measured: devices like this one with 10 GB per second each" in printed
    content, lines = json.loads(written.read_text()), medians(written)
    assert list(lines) == [
        "4 rows in a step",
        "8 rows in a step",
        "128 rows in all",
        "2 processes",
        "2 processes, FSDP",
        "2",
        "8",
    ]
    assert {len(row["values"]) for row in content["rows"] if row["group"] == ""} == {2}
    assert [0 < each["sending %"] < 100 for each in list(lines.values())[:5]] == [False, False, False, True, True]
    assert lines["8 rows in a step"]["loss"] == pytest.approx(lines["2 processes, FSDP"]["loss"], rel=1e-5)
    assert content["notes"][0] == "losses of the same steps are the same."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "9"], "--batch-size counts rows over all processes: 9 cannot be divided by 2."),
        (["--batch-size", "8", "--bandwidth", "10"], "--bandwidth needs two batch sizes or more"),
        (["--bandwidth", "0"], "--bandwidth must be above 0, got 0."),
        (["--rows", "8", "--batch-size", "16"], "--rows must be at least 16, the rows of a step, got 8."),
        (["--processes", "0"], "numbers must be at least 1, got 0."),
        (["--objective", "ce + rank"], "rank reads candidates, and bench has none."),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments, message, capsys):
    assert main([*TINY, *arguments]) == 2
    assert message in capsys.readouterr().err
