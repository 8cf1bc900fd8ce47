"""The program as a user meets it, in a process of its own where that matters."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks import medians

import ngramloss
from ngramloss import recipe
from ngramloss.cli import doctor, main
from ngramloss.cli.list_ import FIRST, LISTS
from ngramloss.cli.program import parser
from ngramloss.cli.verbs import VERBS
from ngramloss.errors import UserError
from ngramloss.loss.stats import BACKENDS, chosen_backend
from ngramloss.loss.terms import OBJECTIVES
from ngramloss.metrics.registry import METRICS
from ngramloss.output.console import logger
from ngramloss.output.progress import Progress
from ngramloss.search.registry import ENGINES, engine_packages
from ngramloss.storage.files import cache_folder

PAIR = ["explain", "--reference", "the cat sat on the mat", "--candidate", "the cat lay on the mat"]


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "ngramloss", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("chosen", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_threads_that_wait_sleep_soon_unless_somebody_chose_otherwise(chosen, spins):
    """OpenMP of torch reads it when torch is loaded, so it must be set before that."""
    program = """
import os, sys
from ngramloss.cli import main
print("torch" in sys.modules)
main([])
print(os.environ.get("GOMP_SPINCOUNT"))
"""
    others = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**others, **chosen})
    assert done.stdout.splitlines()[0] == "False"
    assert done.stdout.splitlines()[-1] == spins


def test_help_answers_without_loading_torch_or_metrics():
    program = (
        "import sys, json; from ngramloss.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(json.dumps([name in sys.modules for name in ('torch', 'ngramloss.metrics')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, False]
    assert "explain" in done.stdout


@pytest.mark.parametrize("command", ["score", "report"])
def test_help_of_a_command_that_scores_names_every_metric(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"separated by commas: {', '.join(METRICS)} (default: rouge" in " ".join(capsys.readouterr().out.split())


def options_of(parser, path=()):
    """Every option of every command: (command, option)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                if below.fill:
                    below.fill()
                yield from options_of(below, (*path, name))
        else:
            yield from ((" ".join(path), action, flag) for flag in action.option_strings)


TWO_MEANINGS = {
    "--source": "a column; in bench the number of tokens",
    "--target": "a column; in bench the number of tokens",
    "--documents": "a file; in bench train how many",
}
"""Options that take something else in some commands, and what."""


def test_an_option_takes_the_same_kind_of_value_in_every_command():
    kinds = {}
    for _, action, flag in options_of(parser()):
        takes = None if action.nargs == 0 else (action.type or str).__name__
        kinds.setdefault(flag, set()).add((takes, action.metavar == "FILE"))
    several = {flag for flag, found in kinds.items() if len(found) > 1}
    assert several <= TWO_MEANINGS.keys() | {"-o", "--out"}  # a file or a folder


def test_what_a_command_writes_is_named_by_out_and_the_folder_of_a_training_by_run():
    by_flag = {}
    for command, action, flag in options_of(parser()):
        if action.help != argparse.SUPPRESS:  # -o works in a training, too, and is not shown
            by_flag.setdefault(flag, set()).add(command)
    assert by_flag["-o"] == by_flag["--out"]
    assert by_flag["--run"] == {"train", "rerank train"}
    assert not by_flag["--run"] & by_flag["--out"]
    assert by_flag["--runs"] == {"study", "reproduce"}
    assert not {flag for flag in by_flag if re.fullmatch(r"--(output|output-dir|dir|folder|batch|file)", flag)}


def test_version():
    assert run("--version").stdout == f"ngramloss {ngramloss.__version__}\n"


def test_without_a_command_the_first_ones_are_shown(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert [verb for verb in re.findall(r"^  ngramloss (\w+)", shown.out, re.M)] == [
        "new", "train", "generate", "score", "report",
    ]  # fmt: skip


def test_help_shows_all_commands_and_a_group_its_own(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert re.findall(r"^    (\w+)\s+\w+", shown, re.M) == [
        *("new", "train", "generate", "score", "report", "explain", "list", "data", "study", "reproduce"),
        *("candidates", "rerank", "publish", "import", "bench", "docs", "doctor"),
    ]
    assert all(verb.about in shown for verb in VERBS.values())
    for group, part in (("bench", "ngrams"), ("data", "stats")):
        assert main([group]) == 2
        assert re.search(rf"^    {part}\s+\w+", capsys.readouterr().err, re.M)


def test_explain_alone_shows_an_example(capsys):
    assert main(["explain"]) == 0
    shown = capsys.readouterr()
    assert "this pair is an example" in shown.err
    assert main(PAIR) == 0
    assert capsys.readouterr() == (shown.out, "")
    assert main(PAIR[:3]) == 2
    assert "--reference and --candidate belong together" in capsys.readouterr().err


def test_list_alone_shows_what_can_be_listed(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["ngramloss", "list", name] for name in LISTS]
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize(
    ("given", "usage", "hint"),
    [
        (["score", "--metric-s", "x"], "score", " Did you mean '--metrics'?"),
        (["bench", "head", "--frobnicate"], "bench head", ""),
        (["bench", "--frobnicate", "head", "--sizes", "cpu"], "bench", ""),
        (["--frobnicate", "list"], "", ""),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_own_command(given, usage, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith(f"usage: ngramloss {usage}".rstrip() + " [-h]")
    unknown = next(word for word in given if word.startswith(("--f", "--metric-")))
    assert shown.rstrip().endswith(f"error: unrecognized arguments: {unknown}.{hint}")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["trian", "demo"], "). Did you mean 'train'?"),
        (["new", "x", "--task", "poem"], ")"),
        (["candidates", "a", "--json", "b"], "arguments: b. Name everything together, before or behind the options."),
        (["publish", "a", "b"], "arguments: b."),
    ],
)
def test_a_wrong_choice_or_place_is_an_error_with_a_hint(given, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(hint)


def test_every_recipe_has_a_whole_sentence_and_is_in_the_help_of_train(capsys):
    for name in recipe.builtin():
        about = recipe.about(name)
        assert about.endswith(".")
        assert about.count("(") == about.count(")"), about
        assert "al." not in about.split()[-1]
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = re.findall(r"[\w-]+", capsys.readouterr().out)
    assert set(recipe.builtin()) <= set(words)


@pytest.mark.parametrize(
    "command",
    [
        "explain",
        "doctor",
        "train",
        "rerank train",
        "rerank apply",
        "data stats",
        "bench head",
        "bench step",
        "bench attach",
        "bench train",
        "bench scaling",
        "bench ngrams",
    ],
)
def test_help_has_examples_that_can_be_pasted(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  ngramloss {command}" in capsys.readouterr().out


@pytest.mark.slow
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
        (
            ["--objective", "matches(2"],
            "error: expected ',' or ')', got the end of the text:\n  matches(2\n           ^\n",
        ),
        (["--confidence", "0.9", "0.8"], "error: expected 1 confidence, or 6 (one for each word), got 2."),
        (["--confidence", "1.5"], "error: the confidence at position 1 must be above 0.143"),
        (["--candidate", " "], "error: the candidate has no words. Give a sentence in quotes."),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(more, message, capsys):
    assert main([*PAIR, *more]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_bench_candidates_compares_a_step_with_its_parts(tmp_path, capsys):
    tiny = [
        "--model",
        "bart-tiny",
        "--count",
        "2",
        "--batch-size",
        "2",
        "--source",
        "16",
        "--target",
        "8",
        "--device",
        "cpu",
    ]
    assert main(["bench", "candidates", *tiny, "-o", str(tmp_path / "a.json")]) == 0
    names = ["ce", "the encoder alone", "ce + 10*rank(margin=0.001,alpha=2), 2 candidates"]
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]] == names
    plain, encoder, found = medians(tmp_path / "a.json").values()
    parts = encoder["ms"] + 3 * (plain["ms"] - encoder["ms"])
    assert found["/ parts"] == pytest.approx(found["ms"] / parts)
    assert "/ parts" not in plain
    for change, sentence in (
        (["--objective", "ce"], "no term of 'ce' compares candidates. Add one, such as rank."),
        (["--source", "2000"], "bart-tiny has 1,024 positions, but 2,000 tokens were asked for."),
        (["--target", "0"], "expected numbers of at least 1, got 2, 2, 16, 0."),
    ):
        assert main(["bench", "candidates", *tiny, *change]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bart-tiny", "llama-tiny"])
def test_bench_candidates_online_trains_on_texts_that_the_model_writes(tmp_path, capsys, model):
    tiny = f"--online --model {model} --count 2 --batch-size 2 --source 16 --target 8 --device cpu --steps 2".split()
    tiny += ["--refresh", "1", "2", "--objective", "ce + risk", "--repeats", "2"]
    assert main(["bench", "candidates", *tiny, "-o", str(tmp_path / "a.json")]) == 0
    names = ["ce, without writing", *(f"ce + risk, 2 samples, refresh {steps}" for steps in (1, 2))]
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]] == names
    plain, *written = medians(tmp_path / "a.json").values()
    assert "writing %" not in plain
    assert all(0 < row["writing %"] <= 100 and row["texts/s"] > 0 for row in written)
    assert main(["bench", "candidates", *tiny, "--refresh", "0"]) == 2
    assert "expected numbers of at least 1, got 2, 2, 16, 8, 2, 0." in capsys.readouterr().err


def test_bench_ngrams_shows_the_curve(capsys):
    arguments = ["bench", "ngrams", "--longest", "1024", "--batch-size", "1", "--device", "cpu"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["ms", "spread", "%", "×", "T=512"]
    assert [line.split()[0] for line in lines[3:]] == ["128", "256", "512", "1,024"]


def test_every_benchmark_writes_what_it_measured_in_the_same_form(tmp_path, capsys):
    written = tmp_path / "a.json"
    arguments = f"bench ngrams --longest 512 --batch-size 1 --device cpu --repeats 3 -o {written} --json".split()
    assert main(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(written.read_text())
    assert content["benchmark"] == "ngrams"
    assert content["command"] == shlex.join(["ngramloss", *arguments])
    assert content["versions"]["torch"] == version("torch")
    assert content["settings"]["repeats"] == 3
    assert (content["failed"], content["notes"]) == ([], [])
    for row in content["rows"]:
        low, middle, high = sorted(row["values"])
        assert row["median"] == middle
        assert row["spread"] == pytest.approx((high - low) / 2)
    last = content["rows"][-1]
    assert (last["group"], last["name"], last["column"], last["unit"]) == ("", "512", "× T=512", "×")
    assert last["median"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["ngrams", "--objective", "bag(2)"],
            "reads more than [B, T] numbers. Use matches, rewards or precision here.",
        ),
        (["ngrams", "--longest", "64"], "expected T of at least 128 and a batch of at least 1, got 64 and 4."),
        (["step", "--model", "bart-tiny", "--batch-size", "0"], "--batch-size must be 1 or more, got 0."),
        (["step", "--model", "bart-tiny", "--target", "2000"], "lengths from 1 to 1024, got 16, 1024 and 2000."),
        *(
            (
                [kind, "--objective", "ce + rank"],
                "rank reads candidates, and bench has none. Leave it out of 'ce + rank'.",
            )
            for kind in ("head", "step", "train", "ngrams")
        ),
        (["head", "--objectives", "ce", "ce + ce"], "ce is given twice in 'ce + ce'."),
        (["head", "--sizes", "huge"], "unknown size 'huge'. Choose from bart-16, "),
        pytest.param(
            ["step", "--device", "cuda"],
            "no CUDA device found. Leave --device out",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "lead-3", "--data", "newswire", "--out", "x", "--limit", "-1"],
            "--limit must be 0 or more, got -1.",
        ),
        (
            ["generate", "lead-3", "--data", "newswire", "--out", "x", "--limit", str(2**40)],
            "--limit must be at most 4,294,967,295, got 1,099,511,627,776.",
        ),
        (
            ["generate", "lead-3", "--data", "newswire", "--out", "x", "--batch-size", "0"],
            "--batch-size must be 1 or more, got 0.",
        ),
        (
            ["generate", "lead-3", "--data", "newswire", "--out", "x", "--batch-size", str(10**9)],
            "--batch-size must be at most 65,536, got 1,000,000,000.",
        ),
        (["data", "stats", "newswire", "--limit", "-1"], "--limit must be 0 or more, got -1."),
        (
            ["reproduce", "cases", "--data", "newswire", "--runs", "x", "--limit", "-1"],
            "--limit must be 0 or more, got -1.",
        ),
        (
            ["reproduce", "cases", "--data", "newswire", "--runs", "x", "--seeds", "0"],
            "--seeds must be 1 or more, got 0.",
        ),
        (
            ["reproduce", "cases", "--data", "newswire", "--runs", "x", "--seeds", "1000000"],
            "--seeds must be at most 1,000, got 1,000,000.",
        ),
        (["score", "a.jsonl", "--samples", "0"], "--samples must be 1 or more, got 0."),
        (["score", "a.jsonl", "--samples", str(10**12)], "--samples must be at most 1,000,000, got 1,000,000,000,000."),
        (["report", "a.jsonl", "--shuffles", "-1"], "--shuffles must be 0 or more, got -1."),
        (["score", "a.jsonl", "--seed", "-1"], "--seed must be 0 or more, got -1."),
        (
            ["bench", "step", "--model", "bart-tiny", "--batch-size", str(10**9)],
            "--batch-size must be at most 65,536, got 1,000,000,000.",
        ),
        (["bench", "ngrams", "--longest", str(10**12)], "--longest must be at most 16,777,216, got 1,000,000,000,000."),
    ],
)
def test_a_number_out_of_range_is_told_before_any_work(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not list(tmp_path.iterdir())


def absent_peers(written):
    """Peers of a benchmark's file that have neither a time nor a reason."""
    from ngramloss_bench import peers

    content = json.loads(Path(written).read_text())
    failed = {row["name"]: row["why_not"] for row in content["failed"]}
    if find_spec("liger_kernel") is None:
        assert failed["Liger-Kernel, cross-entropy"] == "not installed: pip install liger-kernel"
    return {*peers.PEERS} - {row["name"] for row in content["rows"]} - {*failed}


@pytest.mark.slow
def test_bench_head_compares_with_stock_and_floor(tmp_path, capsys, monkeypatch):
    from ngramloss_bench import head

    monkeypatch.setitem(head.SIZES, "tiny", head.Size(2, 8, 101, 16))
    written = tmp_path / "head.json"
    assert main(["bench", "head", "--sizes", "tiny", "--loops", "--device", "cpu", "-o", str(written)]) == 0
    rows = medians(written)
    assert rows[head.STOCK]["/ stock"] == rows[head.FLOOR]["/ bound"] == 1
    assert {f"ngramloss chunked fast, {objective}" for objective in head.OBJECTIVES} <= set(rows)
    assert absent_peers(written) == set()
    assert "the paper's loops, ce + rewards(2,3,4)" in rows
    assert "three matrix products (lower bound)" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_head_measures_labelled_positions_alone(tmp_path, capsys, monkeypatch):
    from ngramloss_bench import head

    monkeypatch.setitem(head.SIZES, "tiny", head.Size(2, 100, 101, 16))
    arguments = ["bench", "head", "--sizes", "tiny", "--device", "cpu", "--objectives", "ce + matches(2)"]
    assert main([*arguments, "--labelled", "0.1", "-o", str(tmp_path / "head.json")]) == 0
    assert "ngramloss chunked fast, ce + matches(2), labelled positions" in medians(tmp_path / "head.json")
    with pytest.raises(SystemExit):
        main([*arguments, "--labelled", "0"])
    assert "must be above 0 and at most 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_step_counts_documents_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    written = str(tmp_path / "step.json")
    arguments = ["--model", "bart-tiny", "--batch-size", "2", "--source", "16", "--target", "8", "--device", "cpu"]
    assert main(["bench", "step", *arguments, "-o", written]) == 0
    rows = medians(written)
    stock = "the model's own cross-entropy"
    compiled = [f"{stock}, torch.compile", f"{stock}, torch.compile, vocabulary padded"]
    assert list(rows)[:3] == [stock, *compiled]
    assert list(rows)[-2:] == ["ce", "ce + matches(2,3,4)"]
    assert absent_peers(written) == set()
    assert all(row["docs/s"] == pytest.approx(2e3 / row["ms"]) for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_bench_step_in_other_precisions(precision, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    arguments = ["--model", "bart-tiny", "--batch-size", "2", "--source", "8", "--target", "8", "--device", "cpu"]
    assert main(["bench", "step", *arguments, "--objectives", "ce + rewards(2)", "--precision", precision]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f", {precision}")
    names = [line.split("  ")[0] for line in lines[3:]]
    assert names[0] == "the model's own cross-entropy"
    assert "ce + rewards(2)" in names


@pytest.mark.parametrize("name", ["bart-tiny", "llama-tiny"])
def test_peers_get_what_the_models_own_head_gets(name):
    from ngramloss_bench import models, peers

    model = models.built(name).eval()
    inputs = models.example(model, 2, 9, 5, "cpu")
    inputs["labels"][0, -2:] = -100
    losses = [
        peers.stock,
        *([peers.linear_cross_entropy] if hasattr(torch.nn.functional, "linear_cross_entropy") else []),
    ]
    for loss in losses:
        hidden, labels = models.head_inputs(model, inputs)
        torch.testing.assert_close(loss(hidden, model.lm_head.weight, labels), model(**inputs).loss)


def test_bench_step_shows_what_captured_objectives_add_to_ce(monkeypatch):
    from ngramloss_bench import benchmark, clock, peers, step

    def captured(run, clear):  # there is no GPU: the function itself stands for its graph
        run()
        if not captures:
            raise RuntimeError("CUDA error:\nout of memory")
        return run, captures.pop(0)

    captures, times = [0.5, 0.75], iter([4, 4, 4, 10, 12, 14, 20])
    monkeypatch.setattr(step, "captured_objectives", lambda options: ["ce", "ce + bag(2)", "matches(2)"])
    monkeypatch.setattr(clock, "cost", lambda run, device, **_: {"ms": [next(times)]})
    monkeypatch.setattr(clock, "captured", captured)
    monkeypatch.setattr(clock, "milliseconds", lambda run, device, **_: [run(), [next(times)]][1])
    words = ["bench", "step", "--model", "bart-tiny", "--batch-size", "2", "--source", "8", "--target", "8"]
    options = parser().parse_args([*words, "--device", "cpu", "--precision", "fp32"])
    monkeypatch.setattr(step, "OBJECTIVES", [])
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(peers, "PEERS", {})
    measured = benchmark.measure(step.rows(options))
    rows = measured[-3:]
    step.compare(measured)
    assert [row.name for row in rows] == ["ce, captured", "ce + bag(2), captured", "matches(2), captured"]
    assert [(row.median("ms"), row.median("GiB"), row.median("+ ms to ce")) for row in rows[:2]] == [
        (12, 0.5, 0),
        (20, 0.75, 4),
    ]
    assert rows[1].median("docs/s") == 100
    assert rows[2].why_not == "RuntimeError: CUDA error: out of memory"


@pytest.mark.slow
def test_bench_head_captures_every_objective_on_a_gpu():
    from ngramloss_bench import head

    inputs = head.example(head.Size(1, 4, 16, 8), "cpu", torch.float32)
    names = [what for what, *_ in head.contestants(*inputs, objectives=head.OBJECTIVES, loops=False, capture=True)]
    assert names[-5:] == [f"ngramloss chunked fast, {objective}, captured" for objective in head.OBJECTIVES]


def test_bench_head_has_the_same_loss_of_labelled_positions_found_or_known():
    from ngramloss.loss.joint_loss import JointLoss
    from ngramloss.loss.stats import labelled
    from ngramloss_bench import head, peers

    hidden, weight, labels = head.example(head.Size(3, 70, 16, 8), "cpu", torch.float32)
    labels[:, :60] = -100
    names = [
        what for what, *_ in head.contestants(hidden, weight, labels, objectives=["ce"], loops=False, capture=True)
    ]
    assert names[-1] == "ngramloss chunked fast, ce, labelled positions, captured"
    loss_fn, (_, packed) = JointLoss("ce + matches(2)"), labelled(labels)
    expected = loss_fn.from_hidden(hidden, weight, labels)
    torch.testing.assert_close(peers.of_labelled(loss_fn, hidden, weight, labels), expected)
    torch.testing.assert_close(peers.of_known(loss_fn, packed, hidden, weight, labels), expected)


@pytest.fixture
def bench_head(monkeypatch, capsys):
    """A function: what ``bench head`` prints if its contestants take these times, or raise."""
    from ngramloss_bench import clock, head

    def run(times, memory=0.5):
        def cost(run, device, **_):
            if isinstance(times[run], Exception):
                raise times[run]
            return {"ms": [times[run]], "GiB": [memory]}

        monkeypatch.setitem(head.SIZES, "tiny", head.Size(1, 4, 16, 8))
        monkeypatch.setattr(clock, "cost", cost)
        monkeypatch.setattr(clock, "captured_cost", lambda run, device, **_: {"ms": [times[run] / 2]})
        monkeypatch.setattr(head, "contestants", lambda *_, **__: [(name, name, []) for name in times])
        assert main(["bench", "head", "--sizes", "tiny", "--device", "cpu"]) == 0
        shown = capsys.readouterr()
        return shown.out.splitlines()[4:], shown.err  # behind the title, sizes, machine and heads

    return run


def test_bench_head_times_what_is_captured_as_a_graph(bench_head):
    from ngramloss_bench import head

    lines, _ = bench_head({head.FLOOR: 1.0, head.STOCK: 4.0, "mine, captured": 4.0})
    assert lines[2].split()[-4:] == ["2.00", "–", "0.50", "2.00"]


def test_bench_head_prints_a_dash_with_a_reason_for_what_it_could_not_measure(bench_head, monkeypatch):
    from ngramloss_bench import benchmark, head

    names = [head.FLOOR, head.STOCK, "mine"]
    lines, said = bench_head(dict.fromkeys(names, 2.0))
    assert [line.split()[-4:] for line in lines] == [["2.00", "0.50", "1.00", "1.00"]] * 3
    assert "note" not in said
    no_room = ValueError("no room")
    lines, _ = bench_head({head.FLOOR: 2.0, head.STOCK: no_room, "mine": 2.0})
    assert lines[1].split() == ["mine", "2.00", "0.50", "1.00"]
    assert lines[2] == f"{head.STOCK}: ValueError: no room"
    lines, _ = bench_head({head.FLOOR: no_room, head.STOCK: no_room, "mine": 2.0})
    assert lines[0].split() == ["mine", "2.00", "0.50"]
    monkeypatch.setattr(benchmark, "STATM", "/nowhere")
    lines, said = bench_head(dict.fromkeys(names, 2.0), memory=float("nan"))
    assert lines[2].split() == ["mine", "2.00", "1.00", "1.00"]
    assert "note: GiB is missing because this system has no /proc, where the memory of a process is read.\n" in said


@pytest.mark.parametrize(("what", "warned"), [("mine", True), ("mine, labelled positions", False)])
def test_bench_head_does_not_trust_a_time_below_its_lower_bound(bench_head, what, warned):
    """Of a part of the positions, it may be below."""
    from ngramloss_bench import head

    _, said = bench_head({head.FLOOR: 3.0, head.STOCK: 4.0, what: 2.0})
    warning = (
        "warning: 'mine' took less time than the lower bound, so the machine was busy with something else and no time "
        "in this table can be trusted. Measure again when it is free.\n"
    )
    assert (warning in said) is warned


@pytest.mark.slow
def test_bench_head_in_another_precision(monkeypatch, capsys):
    from ngramloss_bench import head

    monkeypatch.setitem(head.SIZES, "tiny", head.Size(1, 4, 16, 8))
    arguments = ["bench", "head", "--sizes", "tiny", "--device", "cpu", "--dtype", "bfloat16"]
    assert main([*arguments, "--objective", "ce", "matches(2)", "eaft"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(", bfloat16")
    assert "ngramloss chunked fast, eaft" in out
    assert "rewards" not in out
    assert main([*arguments, "--objective", "ce", "metches(2)"]) == 2
    assert "metches" in capsys.readouterr().err


def test_the_papers_loops_are_the_objectives():
    from ngramloss import JointLoss
    from ngramloss_bench import peers

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (3, 9), generator=generator)
    labels[1, 6:] = -100
    weight = torch.randn(4, 8, generator=generator)
    hidden = torch.randn(3, 9, 8, generator=generator) + weight[labels.clamp_min(0)]
    for placed, name in ((False, "matches"), (True, "rewards")):
        loops = peers.papers_loops(hidden, weight, labels, placed=placed, lengths=(2, 3))
        torch.testing.assert_close(loops, JointLoss(f"ce + {name}(2,3)").from_hidden(hidden, weight, labels))


def test_doctor_says_which_metrics_can_run_and_what_others_need(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.partition("metrics:\n")[2].splitlines()}
    assert lines["rouge"].split() == ["rouge", "ready"]
    assert lines["wmd"].endswith("needs --set wmd.vectors=…, see: ngramloss docs metrics")
    assert "needs --set bertscore.model=FOLDER_OR_HUB_ID; roberta-large is" in lines["bertscore"]
    monkeypatch.setattr("ngramloss.metrics.registry.installed", lambda package: None if package == "sacrebleu" else "1")
    assert main(["doctor"]) == 0
    assert "needs the package sacrebleu: pip install 'ngramloss[score]'" in capsys.readouterr().out


def test_doctor_names_the_backend_and_the_reason(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "torch " in shown
    assert "→" in shown
    assert "plain" in shown


def test_doctor_prints_the_same_as_json(capsys, monkeypatch):
    monkeypatch.setattr("ngramloss.metrics.registry.installed", lambda package: None if package == "sacrebleu" else "1")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert list(known) == [
        "ngramloss",
        "python",
        "packages",
        "torch",
        "gpu",
        "chosen",
        "backends",
        "engines",
        "objectives",
        "metrics",
    ]
    assert known["packages"]["torch"] == version("torch")
    assert known["packages"].keys() == {*doctor.PACKAGES, *engine_packages()}
    assert known["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    first = known["chosen"][0]
    assert (first["device"], first["dtype"], first["backend"]) == (
        "cpu",
        "float32",
        chosen_backend(torch.device("cpu"), torch.float32).backend,
    )
    assert known["backends"] == BACKENDS
    assert known["engines"].keys() == set(ENGINES)
    assert known["engines"]["hf"] == {
        "ready": True,
        "state": "ready",
        "version": version("transformers"),
        "precision": "fp32, bf16 or fp16",
    }
    assert known["objectives"]["ce"] == {"ready": True, "state": "ready", "origin": None}
    assert known["metrics"]["bleu"] == {
        "ready": False,
        "state": "needs the package sacrebleu: pip install 'ngramloss[score]'",
        "origin": None,
    }
    assert known["metrics"].keys() == set(METRICS)
    assert "\n".join(doctor.lines(known)) + "\n" == shown, "nothing is printed that JSON does not have"


def test_doctor_separates_every_name_from_what_it_says(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    first = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
    assert {*doctor.PACKAGES, *BACKENDS, *ENGINES, *OBJECTIVES, *METRICS} <= set(first)


NAKED = "import sys; sys.path.insert(0, sys.argv[1]); from ngramloss.cli import main; sys.exit(main(sys.argv[2:]))"


def naked(*arguments, before=""):
    """Run a command in a Python that has no packages but its own, after a line of code."""
    source = str(Path(doctor.__file__).parents[2])
    program = [sys.executable, "-S", "-E", "-c", before + NAKED, source, *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_doctor_works_where_nothing_is_installed():
    ended = naked("doctor")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "training and generation: needs the package torch: pip install 'ngramloss[torch]'\n" in ended.stdout
    needed = "needs the package torch: pip install 'ngramloss[torch]'"
    known = json.loads(naked("doctor", "--json").stdout)
    assert (known["torch"], known["chosen"], set(known["packages"].values())) == (needed, [], {None})
    assert {entry["state"] for kind in ("objectives", "engines") for entry in known[kind].values()} == {needed}
    assert known["metrics"]["bleu"]["state"].startswith("needs the package sacrebleu")
    assert known["metrics"]["facts"]["ready"]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["transformers", "numpy"])
def test_doctor_works_without_other_packages(package):
    blocked = f"import sys; sys.path[:0] = {[*filter(None, sys.path)]!r}; sys.modules[{package!r}] = None; "
    ended = naked("doctor", before=blocked)
    assert ended.returncode == 0, ended.stderr
    assert "GPU: " in ended.stdout
    assert "metrics:\n" in ended.stdout


def test_doctor_shows_why_torch_cannot_be_imported(monkeypatch, capsys):
    class Damaged:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Damaged(), *sys.meta_path])
    assert main(["doctor"]) == 0
    reason = "needs torch, which cannot be imported: OSError: libcudart.so.12: cannot open shared object file"
    assert f"training and generation: {reason}\n" in capsys.readouterr().out


# train


def test_show_prints_the_recipe_as_it_would_be_run_and_stops(tmp_path, capsys, monkeypatch):
    from ngramloss import recipe

    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "train",
                "xsum",
                "--show",
                "--set",
                "train.seed=7",
                "--set",
                "objective=ce+matches(2)",
                "--on-bad-row",
                "skip",
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.toml").write_text(captured.out)
    assert recipe.differences(recipe.load("xsum"), recipe.load("mine.toml")) == [
        "objective: 'ce + matches(2,3,4)' → 'ce + matches(2)'",
        "data.on_bad_row: 'error' → 'skip'",
        "train.seed: 42 → 7",
    ]
    assert captured.out.endswith("\n")
    assert not captured.out.endswith("\n\n")


def test_on_bad_row_counts_more_than_a_setting(capsys):
    assert main(["train", "demo", "--show", "--set", "data.on_bad_row=skip", "--on-bad-row", "error"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["data"]["on_bad_row"] == "error"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["demmo"],
            f"error: there is no recipe 'demmo': neither a file nor one of {', '.join(recipe.builtin())}. Did you mean 'demo'?\n",
        ),
        (
            ["demo", "--set", "train.seed"],
            "error: --set takes key=value, got 'train.seed'; for example --set train.batch_size=8.\n",
        ),
        (
            ["demo", "--set", "train.bach_size=1", "--set", "train.seed=-1"],
            "error: recipe demo with your options has 2 mistakes:\n  train.bach_size: unknown key. Did you mean train.batch_size?\n  train.seed: must be at least 0, got -1.\nsee: ngramloss docs settings#every-setting\n",
        ),
    ],
)
def test_train_tells_mistakes_without_making_a_folder(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr() == ("", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["demo", "--on-bad-row", "drop"], ["demo", "--sat", "x=1"], ["demo", "cnndm"]]
)
def test_train_misused_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments])
    assert stop.value.code == 2
    assert "usage: ngramloss" in capsys.readouterr().err


@pytest.fixture
def training(monkeypatch):
    """What the program asks of training, and an end for it to come to."""
    from ngramloss.training import runner

    seen = {"outcome": runner.RunOutcome(Path("folder"), True, 3, 0)}

    def train(run, folder, *, fresh):
        seen.update(settings=run.settings, folder=folder, fresh=fresh)
        logger.info("a sentence")
        if isinstance(seen["outcome"], BaseException):
            raise seen["outcome"]
        return seen["outcome"]

    monkeypatch.setattr(runner, "train", train)
    return seen


def test_a_runs_folder_is_named_after_the_recipe_unless_told_otherwise(training, capsys):
    assert main(["train", "xsum", "--set", "objective=ce"]) == 0
    assert (training["folder"], training["fresh"], training["settings"].objective) == (
        Path("runs/xsum-ce"),
        False,
        "ce",
    )
    assert capsys.readouterr() == ("", "a sentence\nnext: ngramloss generate runs/xsum-ce\n")
    assert main(["train", "xsum", "--run", "there", "--fresh"]) == 0
    assert (training["folder"], training["fresh"]) == (Path("there"), True)


def test_a_stopped_run_exits_with_130_and_a_failed_one_with_1(training, capsys):
    from ngramloss.training import runner
    from ngramloss.training.prepared import Stopped

    training["outcome"] = runner.RunOutcome(Path("folder"), False, 3, 0)
    assert main(["train", "demo"]) == 130
    for outcome, code, told in [
        (Stopped("elsewhere"), 1, "a sentence\n"),
        (KeyboardInterrupt(), 130, "a sentence\nstopped.\n"),
        (
            OSError(28, "No space left on device", "runs/x"),
            1,
            "a sentence\nerror: No space left on device: runs/x. Free some disk space, or choose a folder on another "
            "disk; then run the same command again.\n",
        ),
        (
            OSError(28, "No space left on device", str(cache_folder() / "tokens" / "x")),
            1,
            f"a sentence\nerror: No space left on device: {cache_folder()}/tokens/x. Free some disk space, or name a "
            "cache on another disk with NGRAMLOSS_CACHE; then run the same command again.\n",
        ),
        (
            OSError(122, "Disk quota exceeded"),
            1,
            "a sentence\nerror: Disk quota exceeded. Free some disk space, or choose a folder on another disk; then run "
            "the same command again.\n",
        ),
        (
            OSError("the checkpoint could not be written."),
            1,
            "a sentence\nerror: the checkpoint could not be written.\n",
        ),
        (PermissionError(13, "Permission denied", "runs"), 1, "a sentence\nerror: Permission denied: runs\n"),
        (UserError("other settings"), 2, "a sentence\nerror: other settings\n"),
    ]:
        capsys.readouterr()
        training["outcome"] = outcome
        assert main(["train", "demo"]) == code
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "bug",
    [ValueError("a shape"), TypeError("a kind"), RuntimeError("a graph"), ModuleNotFoundError("x", name="ngramloss.x")],
)
def test_a_bug_of_ours_shows_its_traceback_and_is_not_blamed_on_the_user(training, capsys, bug):
    training["outcome"] = bug
    assert main(["train", "demo"]) == 1
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told
    assert f"{type(bug).__name__}: {bug}" in told
    assert told.endswith(
        "error: unexpected error. This is probably a bug in ngramloss, not a mistake of yours. Please report it "
        "with the traceback above and the output of `ngramloss doctor`.\n"
    )


def test_an_error_of_a_library_names_the_library(training, capsys):
    with pytest.raises(ValueError) as raised:
        torch.nn.functional.dropout(torch.zeros(1), p=3)
    training["outcome"] = raised.value
    assert main(["train", "demo"]) == 1
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told
    assert told.endswith(
        "error: torch raised ValueError. If the model, the data and the versions are what they should be, this is a bug "
        "in ngramloss. Please report it with the traceback above and the output of `ngramloss doctor`.\n"
    )


def test_a_lack_of_memory_is_no_bug_and_says_what_to_lower(training, capsys):
    import torch

    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ):
        training["outcome"] = error
        assert main(["train", "demo"]) == 1
        told = capsys.readouterr().err
        assert "error: not enough memory: " in told
        assert "Lower train.max_tokens, train.batch_size" in told
        assert "Traceback" not in told


def test_a_command_that_writes_names_its_own_option_and_who_else_may_use_the_gpu(monkeypatch, capsys):
    import torch

    def fail(options):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 18.81 MiB "
            "is free. Process 598 has 66.00 MiB memory in use. Process 773 has 10.53 GiB memory in use. " + "x" * 500
        )

    monkeypatch.setattr("ngramloss.cli.generate.run", fail)
    assert main(["generate", "runs/mine"]) == 1
    told = capsys.readouterr().err
    assert "18.81 MiB is free. Lower --batch-size or data.max_source. nvidia-smi shows which" in told
    assert "598" not in told


def test_a_finished_training_names_the_next_command(training, capsys, monkeypatch):
    assert main(["train", "demo", "--run", "my runs/x"]) == 0
    assert capsys.readouterr().err == "a sentence\nnext: ngramloss generate 'my runs/x'\n"
    assert main(["train", "demo", "--run", "x", "--trust-remote-code"]) == 0
    assert capsys.readouterr().err == "a sentence\nnext: ngramloss generate x --trust-remote-code\n"
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "demo"]) == 0
    assert capsys.readouterr().err == ""


# generate


@pytest.mark.parametrize("command", ["generate", "candidates"])
def test_a_run_that_does_not_exist_is_named_as_missing(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert main([command, "runs/demmo"]) == 2
    assert capsys.readouterr().err == (
        "error: no such file or folder: runs/demmo. Did you mean demo? For a model of the hub, choose the documents with "
        "--data.\n"
    )


# list


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("objectives", "matches(2)"),
        ("objectives", "bag(2):original"),
        ("metrics", "rouge"),
        ("recipes", "xsum"),
        ("baselines", "lead-N"),
        ("baselines", "random-facts"),
    ],
)
def test_list_has_a_line_for_each_name(what, line, capsys):
    assert main(["list", what, "--all"]) == 0
    rows = dict(row.split("  ", 1) for row in capsys.readouterr().out.splitlines())
    about = {name.strip(): text.strip() for name, text in rows.items()}[line]
    assert len(about.split()) > 3


def test_list_names_every_objective_metric_recipe_and_baseline(capsys):
    from ngramloss import OBJECTIVES, recipe
    from ngramloss.generation.baselines import BASELINES
    from ngramloss.metrics.registry import METRICS

    for what, names in {
        "objectives": OBJECTIVES,
        "metrics": METRICS,
        "recipes": recipe.builtin(),
        "baselines": BASELINES,
    }.items():
        assert main(["list", what, "--all"]) == 0
        listed = [
            re.split("[(:]", row)[0].split()[0]
            for row in capsys.readouterr().out.splitlines()
            if not row.startswith(" ")
        ]
        assert set(listed) == set(names)


@pytest.mark.parametrize(("what", "every"), [("objectives", OBJECTIVES), ("recipes", recipe.builtin())])
def test_a_long_list_shows_the_five_to_start_with_and_how_to_see_the_rest(what, every, capsys):
    assert main(["list", what]) == 0
    shown = capsys.readouterr()
    names = [re.split(r"[( ]", row)[0] for row in shown.out.splitlines()]
    assert sorted(names) == sorted(FIRST[what])
    assert len(names) == 5
    assert {*names} <= {*every}
    assert re.fullmatch(rf"ngramloss list {what} --all lists \d+ more\.\n", shown.err)
    assert main(["list", what, "--all"]) == 0
    assert capsys.readouterr().err == ""


def test_list_shows_the_options_of_metrics_and_objectives(capsys):
    assert main(["list", "metrics"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  bertscore\.model +folder or hub id of the model \(required\)$", shown, re.M)
    assert re.search(r"^  wmd\.stop_words +words to ignore; one of none, english \(default none\)$", shown, re.M)
    assert main(["list", "objectives", "--all"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  ce\(smoothing=…\) +.*\(default 0\.0\)$", shown, re.M)
    assert re.search(r"^  near\(2,power=…\) +.*\(default 4\.0\)$", shown, re.M)


# data stats

ROWS = [
    {"article": "The cat sat. It slept.", "summary": "The cat slept."},
    {"article": "", "summary": "Nobody came."},
    {"article": "Dogs ran home.", "summary": "A dog fled — naïvely."},
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_stats_counts_and_says_how(data, capsys):
    assert main(["data", "stats", data, "--on-bad-row", "skip"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{data}, standard rules\n")
    (row,) = [line.split() for line in captured.out.splitlines() if line.startswith("train ")]
    assert row == ["train", "2", "4.00", "1.50", "3.50", "1.00", "75.00", "75.00", "80.00"]
    assert f"skipped {data}:2: 'article' is empty\n" in captured.err


def test_stats_as_json_is_json_alone(data, capsys):
    assert main(["data", "stats", data, "--on-bad-row", "skip", "--json", "--rules", "released"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["rules"] == "released"
    assert found["splits"]["train"]["examples"] == 2
    assert found["splits"]["train"]["skipped"] == [f"{data}:2: 'article' is empty"]
    assert f"skipped {data}:2: 'article' is empty\n" in captured.err


def test_stats_tells_bad_rows_and_stops(data, capsys):
    assert main(["data", "stats", data]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: 1 of 3 rows of the split 'train'" in captured.err
    assert f"{data}:2: 'article' is empty" in captured.err
    assert "--on-bad-row skip" in captured.err


def test_stats_of_named_columns_splits_and_a_limit(data, capsys):
    assert (
        main(
            [
                "data",
                "stats",
                data,
                "--source",
                "summary",
                "--target",
                "article",
                "--limit",
                "1",
                "--split",
                "train",
                "--json",
            ]
        )
        == 0
    )
    (split,) = json.loads(capsys.readouterr().out)["splits"].values()
    assert (split["examples"], split["source_words"], split["target_words"]) == (1, 3, 5)
    assert main(["data", "stats", "newswire", "--split", "test", "dev", "--limit", "3", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["splits"]) == ["test", "validation"]


def test_stats_counts_every_text_once_on_its_line(monkeypatch, data):
    bars = []
    monkeypatch.setattr(Progress, "__exit__", lambda self, *_: bars.append((self.what, self.done, self.total)))
    monkeypatch.setattr("ngramloss.data.sentences.CHUNK", 1)
    assert main(["data", "stats", data, "--on-bad-row", "skip"]) == 0
    assert bars[-1] == ("counting train", 4, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "error: "),
        (["newswire", "--limit", "-1"], "error: --limit must be 0 or more, got -1.\n"),
        (["newswire", "--split", "tset"], "tset"),
    ],
)
def test_stats_tells_what_it_cannot_read(arguments, message, capsys):
    assert main(["data", "stats", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("option", ["-o", "--out"])
@pytest.mark.parametrize(
    "words", ["train demo", "generate lead-3", "candidates runs/a", "report a", "reproduce table2", "import a.txt"]
)
def test_what_a_command_writes_is_named_alike(words, option):
    references = ["--references", "r"] if words.startswith("import") else []
    options = parser().parse_args([*words.split(), *references, option, "x"])
    assert (options.run if words == "train demo" else options.out) == "x"
    assert parser().parse_args(["train", "demo", "--run", "x"]).run == "x"
