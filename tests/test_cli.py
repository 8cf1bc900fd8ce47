"""The program as a user meets it, in a process of its own where that matters."""

import json
import subprocess
import sys
import time

import pytest

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


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_help_has_examples_that_can_be_pasted(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
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


def test_bench_shows_the_curve(capsys):
    assert main(["bench", "ngrams", "--longest", "1024", "--batch", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["128", "256", "512", "1,024"]
    assert main(["bench", "ngrams", "--objective", "bag(2)"]) == 2
    assert "reads T² numbers a row by nature" in capsys.readouterr().err
