"""What bench shows on a GPU alone: captured passes, time in which the device is busy."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import medians

from ngramloss.cli import main
from ngramloss_bench import head
from ngramloss_bench.clock import captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_replay_computes_the_gradients_of_what_the_inputs_contain_now():
    weight, rows = torch.randn(8, 8, device="cuda", requires_grad=True), torch.randn(4, 8, device="cuda")

    def clear():
        weight.grad = None

    def run():
        clear()
        (rows @ weight).square().sum().backward()

    replay, _ = captured(run, clear)
    rows.normal_()
    for _ in range(3):
        replay()  # overwrites the gradient, and does not add to it
    replayed = weight.grad.clone()
    run()
    torch.testing.assert_close(replayed, weight.grad)


def test_head_and_step_have_captured_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(head.SIZES, "tiny", head.Size(2, 16, 1_000, 64))
    out = str(tmp_path / "rows.json")
    assert main(["bench", "head", "--sizes", "tiny", "-o", out]) == 0
    rows = medians(out)
    for objective in head.OBJECTIVES:
        (row,) = (rows[name] for name in rows if name.endswith(f" fast, {objective}, captured"))
        assert (row["ms"] > 0, row["GiB"] > 0) == (True, True)
    sizes = ["--batch-size", "2", "--source", "32", "--target", "16"]
    assert main(["bench", "step", "--model", "bart-tiny", *sizes, "-o", out]) == 0
    rows = medians(out)
    assert {f"{objective}, captured" for objective in head.OBJECTIVES} <= set(rows)
    assert rows["ce, captured"]["+ ms to ce"] == 0
    assert rows["ce, captured"]["docs/s"] > rows["ce"]["docs/s"]


def test_train_measures_the_time_in_which_the_device_is_busy(tmp_path):
    out, trace = str(tmp_path / "train.json"), str(tmp_path / "trace.json")
    small = ["--model", "bart-tiny", "--lengths", "multi30k", "--documents", "256"]
    short = ["--warm-up", "2", "--steps", "3", "--repeats", "1"]
    assert main(["bench", "train", *small, *short, "-o", out, "--profile", trace]) == 0
    rows = medians(out)
    assert len(rows) >= 4
    for row in rows.values():
        assert 0 < row["GPU ms"] < row["ms a step"]
        assert 0 < row["peak GiB"] <= row["reserved GiB"]
    assert any(event.get("cat") == "kernel" for event in json.loads(Path(trace).read_text())["traceEvents"])
