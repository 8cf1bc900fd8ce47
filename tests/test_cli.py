"""The program as a user meets it, in a process of its own where that matters."""

import json
import subprocess
import sys
import time

import pytest
import torch

import ngramloss
from ngramloss.cli import main

PAIR = ["explain", "--reference", "the cat sat on the mat", "--candidate", "the cat lay on the mat"]


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "ngramloss", *arguments], capture_output=True, text=True, timeout=60)


def test_help_answers_without_loading_torch():
    program = (
        "import sys, json; from ngramloss.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(json.dumps(['torch' in sys.modules]))"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5   # half a second here; slow machines are not the program's fault
    assert json.loads(done.stdout.splitlines()[-1]) == [False]
    assert "explain" in done.stdout


def test_version_and_missing_command():
    assert run("--version").stdout == f"ngramloss {ngramloss.__version__}\n"
    assert run().returncode == 2


@pytest.mark.parametrize("command", ["explain", "doctor", "bench head", "bench step", "bench ngrams"])
def test_help_has_examples_that_can_be_pasted(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  ngramloss {command}" in capsys.readouterr().out


def test_explain_shows_windows_and_total():
    done = run(*PAIR, "--objective", "ce + 0.5*matches(2)")
    assert done.returncode == 0
    assert "   1  the cat              ×1       1       0.8100  0.1620" in done.stdout
    assert "   2  cat lay               –       1       0.8100       –" in done.stdout
    assert done.stdout.endswith("\nce + 0.5*matches(2) = 0.7702 + 0.5·0.5140 = 1.0272\n")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "matchs(2)"], "error: unknown objective 'matchs'. Did you mean 'matches'?"),
        (["--objective", "matches(2"], "error: expected ',' or ')', got the end of the text:\n  matches(2\n           ^\n"),
        (["--confidence", "0.9", "0.8"], "error: expected one confidence, or 6 of them, one for each word, got 2."),
        (["--confidence", "1.5"], "error: the confidence at position 1 must be above 0.143"),
        (["--candidate", " "], "error: the candidate has no words. Give a sentence in quotes."),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(more, message, capsys):
    assert main([*PAIR, *more]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_bench_ngrams_shows_the_curve(capsys):
    assert main(["bench", "ngrams", "--longest", "1024", "--batch", "1", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["128", "256", "512", "1,024"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ngrams", "--objective", "bag(2)"], "reads more than [B, T] numbers. Time matches, rewards or precision."),
        (["ngrams", "--longest", "64"], "expected T of at least 128 and a batch of at least 1, got 64 and 4."),
        (["step", "--model", "bart-tiny", "--batch", "0"], "expected a batch of at least 1 and lengths from 1 to 1024, got 0,"),
        (["step", "--model", "bart-tiny", "--target", "2000"], "lengths from 1 to 1024, got 16, 1024 and 2000."),
        (["head", "--sizes", "huge"], "unknown size 'huge'. Choose from bart-16, "),
        pytest.param(
            ["step", "--device", "cuda"], "there is no CUDA device here. Leave --device out",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_bench_refuses_what_it_cannot_measure(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bench_head_compares_with_stock_and_floor(tmp_path, capsys, monkeypatch):
    from ngramloss.bench import head

    monkeypatch.setitem(head.SIZES, "tiny", head.Size(2, 8, 101, 16))
    written, drawn = tmp_path / "head.json", tmp_path / "head.png"
    arguments = ["bench", "head", "--sizes", "tiny", "--loops", "--device", "cpu", "--json", str(written), "--plot", str(drawn)]
    assert main(arguments) == 0
    rows = {row["what"]: row for row in json.loads(written.read_text())["rows"]}
    assert rows[head.STOCK]["to_stock"] == rows[head.FLOOR]["to_floor"] == 1
    assert {f"ngramloss chunked fast, {objective}" for objective in head.OBJECTIVES} <= set(rows)
    assert "the paper's loops, ce + rewards(2,3,4)" in rows
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "three matrix products (the floor)" in capsys.readouterr().out


def test_bench_step_counts_documents_a_second(tmp_path, capsys):
    written = tmp_path / "step.json"
    arguments = ["--model", "bart-tiny", "--batch", "2", "--source", "16", "--target", "8", "--loops", "--device", "cpu"]
    assert main(["bench", "step", *arguments, "--json", str(written)]) == 0
    rows = json.loads(written.read_text())["rows"]
    assert [row["what"] for row in rows][:3] == ["the model's own cross-entropy", "ce", "ce + matches(2,3,4)"]
    assert all(row["docs_per_second"] > 0 for row in rows)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_bench_step_in_other_precisions(precision, capsys):
    arguments = ["--model", "bart-tiny", "--batch", "2", "--source", "8", "--target", "8", "--device", "cpu"]
    assert main(["bench", "step", *arguments, "--objective", "ce + rewards(2)", "--precision", precision]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f", {precision}, " in lines[0]
    assert [line.split("  ")[0] for line in lines[2:]] == ["the model's own cross-entropy", "ce + rewards(2)"]


def test_bench_step_refuses_loops_for_a_model_they_are_not_written_for(monkeypatch, capsys):
    from models import tiny

    from ngramloss.bench import step

    monkeypatch.setattr(step, "built", lambda name: tiny("t5"))
    assert main(["bench", "step", "--loops", "--source", "8", "--target", "8", "--device", "cpu"]) == 2
    assert "the paper's loops are written for BART, not for T5ForConditionalGeneration. Leave --loops out." in capsys.readouterr().err


def test_bench_head_in_another_precision(monkeypatch, capsys):
    from ngramloss.bench import head

    monkeypatch.setitem(head.SIZES, "tiny", head.Size(1, 4, 16, 8))
    monkeypatch.setattr(head, "OBJECTIVES", ["ce", "matches(2)"])
    assert main(["bench", "head", "--sizes", "tiny", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(", bfloat16")


def test_the_papers_loops_are_the_objectives():
    from ngramloss import JointLoss
    from ngramloss.bench import peers

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (3, 9), generator=generator)
    labels[1, 6:] = -100
    weight = torch.randn(4, 8, generator=generator)
    hidden = torch.randn(3, 9, 8, generator=generator) + weight[labels.clamp_min(0)]
    for placed, name in ((False, "matches"), (True, "rewards")):
        loops = peers.papers_loops(hidden, weight, labels, placed=placed, lengths=(2, 3))
        torch.testing.assert_close(loops, JointLoss(f"ce + {name}(2,3)").from_hidden(hidden, weight, labels))


def test_doctor_names_the_backend_and_the_reason(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "torch " in shown
    assert "→" in shown
    assert "plain" in shown
