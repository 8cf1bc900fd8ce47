"""Runs: what a recipe leaves in its folder, and what is left of it after a kill, a full disk or Ctrl-C."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from commands import SABOTAGE, assert_equal_runs, environment, finished, log, started, train, wait_for, weights
from forks import fork_ranks
from models import TINY_MODEL
from safetensors.torch import load_file

from ngramloss import recipe
from ngramloss.data import newswire
from ngramloss.errors import DIVERGED
from ngramloss.training import checkpoints
from ngramloss.training.run import run_of

STEPS = 16
RECIPE = f"""
objective = "ce + matches(2) + bag(2)"
[data]
name = "{{data}}"
max_source = 96
max_target = 32
{TINY_MODEL}dropout = 0.1
[train]
max_steps = {STEPS}
batch_size = 4
accumulate = 2
learning_rate = 1e-2
warmup_steps = 4
log_every = 2
eval_every = 6
save_every = 3
[generation]
num_beams = 1
max_length = 32
"""


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def write_split(path, split, count):
    lines = [json.dumps({"document": item.document, "summary": item.summary}) for item in newswire.items(split, count)]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data and a recipe."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    write_split(folder / "data" / "train.jsonl", "train", 60)
    write_split(folder / "data" / "validation.jsonl", "validation", 10)
    (folder / "tiny.toml").write_text(RECIPE.format(data=folder / "data"))
    return folder


def command(place, run, *more):
    return ["train", str(place / "tiny.toml"), "--run", str(run), *more]


@pytest.fixture(scope="module")
def undisturbed(place):
    """A run of the program as a person starts it, which all others are compared with."""
    arguments = [sys.executable, "-m", "ngramloss", *command(place, place / "undisturbed")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (place / "undisturbed.err").write_text(done.stderr)
    return place / "undisturbed"


def test_a_file_that_a_training_reports_to_has_whole_lines_and_no_bar(undisturbed):
    """Steps come faster than one a second, so a few of the twelve lines of the log are shown, and the last."""
    text = undisturbed.with_suffix(".err").read_text()
    assert "\r" not in text
    assert "█" not in text
    lines = text.splitlines()
    shown = [line for line in lines if line.startswith("training: ")]
    assert 1 <= len(shown) <= 12
    terms = r"ce \d+\.\d{3} · matches\(2\) \d\.\d{3} · bag\(2\) \d\.\d{3} · \d+ docs/s"
    assert re.fullmatch(rf"training: {STEPS} of {STEPS} steps · {terms}", shown[-1])
    first = [line.partition(":")[0] for line in lines if line not in shown]
    assert first == ["train", "validation", "step 6", "step 12", "step 16", "finished at step 16", "next"], text


def test_a_run_folder_holds_what_it_says(undisturbed):
    lines = log(undisturbed)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [
        1,
        2,
        3,
        4,
        6,
        8,
        9,
        10,
        12,
        14,
        15,
        16,
    ]  # each second, and where it is saved
    assert {"loss", "ce", "matches(2)", "bag(2)", "learning_rate", "matched/2", "grad_norm"} <= steps[0].keys()
    assert '"docs_per_second"' in (undisturbed / "log.jsonl").read_text().splitlines()[0]
    assert [line["step"] for line in lines if "eval_ce" in line] == [6, 12, STEPS]
    assert {"eval_loss", "eval_ce", "eval_matches(2)", "eval_bag(2)"} <= lines[-1].keys()

    settings = recipe.load(str(undisturbed / "recipe.toml"))
    assert settings.train.max_steps == STEPS
    card = (undisturbed / "card.md").read_text()
    assert "ce + matches(2) + bag(2)" in card
    assert "| train | 60 | 0 |" in card
    assert "From scratch: bart, width 16" in card
    assert "the paper" not in card, "these are not its data"
    assert "* processes: 1" in card

    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(undisturbed / "model")
    assert model.generation_config.max_length == 32
    assert AutoTokenizer.from_pretrained(undisturbed / "model").decode([0]) == "<s>"
    assert sorted(path.name for path in (undisturbed / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_model_is_the_checkpoint_with_the_lowest_validation_cross_entropy(undisturbed):
    evaluated = {line["step"]: line["eval_ce"] for line in log(undisturbed) if "eval_ce" in line}
    best = min(evaluated, key=evaluated.get)
    chosen = load_file(undisturbed / "checkpoints" / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(chosen[name], value) for name, value in weights(undisturbed).items())
    assert f"Weights of step {best} " in (undisturbed / "card.md").read_text()


def test_only_the_newest_and_the_best_checkpoints_are_kept(undisturbed):
    kept = sorted(checkpoints.step(path) for path in (undisturbed / "checkpoints").iterdir())
    assert kept[-2:] == [15, STEPS]
    assert len(kept) <= 3


@pytest.mark.parametrize("sabotage", ["saving:9", "sealing:9", "sealed:9", "pruning:3", "card:0", "model:0"])
def test_a_kill_at_the_worst_moment_loses_nothing(place, undisturbed, sabotage):
    run = place / sabotage.replace(":", "-")
    code, _, _ = finished(command(place, run), sabotage=sabotage)
    assert code == -signal.SIGKILL
    assert not (run / "model").exists()
    code, _, err = finished(command(place, run))
    assert code == 0, err[-2000:]
    assert_equal_runs(run, undisturbed)
    assert "continuing" in err or sabotage.endswith(":0")
    assert not list(run.glob("model.partial-*"))
    if sabotage in ("saving:9", "sealing:9"):
        assert "skipping checkpoint-9, which is incomplete (writing it did not finish)" in err


def test_kills_at_random_moments_lose_nothing(place, undisturbed):
    run, chance, kills = place / "random", random.Random(), 0
    for longest in (0.2, 0.5, 1.5):  # the whole run may take no longer than a second
        process = started(command(place, run))
        wait_for((run / "log.jsonl").exists, process)
        time.sleep(chance.uniform(0, longest))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.communicate()
    assert kills
    code, _, err = finished(command(place, run))
    assert code == 0, err[-2000:]
    assert_equal_runs(run, undisturbed)


def test_a_truncated_newest_checkpoint_is_recognised_and_the_one_before_used(place, undisturbed):
    run = place / "truncated"
    finished(command(place, run), sabotage="saving:9")
    newest = run / "checkpoints" / "checkpoint-6"
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    code, _, err = finished(command(place, run))
    assert code == 0, err[-2000:]
    assert "skipping checkpoint-6, which is incomplete (model.safetensors has 1000 bytes of" in err
    assert "continuing" in err
    assert "from step 3" in err
    assert_equal_runs(run, undisturbed)


def test_ctrl_c_saves_and_says_how_to_go_on(place, undisturbed):
    run = place / "interrupted"
    process = started(command(place, run))
    wait_for(lambda: (run / "log.jsonl").exists() and '"step": 1,' in (run / "log.jsonl").read_text(), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    if process.returncode == 0:
        pytest.skip("training ended before the signal came")
    assert process.returncode == 130, err[-2000:]
    assert "the same command continues it" in err
    assert "Traceback" not in err
    stopped = checkpoints.step(checkpoints.find(run / "checkpoints").newest)
    assert f"stopped at step {stopped} of {STEPS}" in err
    code, _, err = finished(command(place, run))
    assert code == 0, err[-2000:]
    assert f"from step {stopped}" in err
    ours, theirs = weights(run), weights(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_second_training_in_the_same_folder_is_refused_and_the_first_goes_on(place, undisturbed, capsys):
    run = place / "twice"
    process = started(command(place, run))
    wait_for((run / "recipe.toml").exists, process)
    process.send_signal(signal.SIGSTOP)  # it does not end while the others are refused
    try:
        for more in ([], ["--fresh"], ["--set", "train.seed=7"]):
            assert train(place / "tiny.toml", "--run", run, *more) == 2
            sentence = f"another process is training, generating or scoring in {run}. Wait for it to end, or choose another --run."
            assert capsys.readouterr().err == f"error: {sentence}\n"
    finally:
        process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    assert_equal_runs(run, undisturbed)


def test_a_full_disk_is_a_sentence_and_loses_no_earlier_checkpoint(place, undisturbed):
    run = place / "full"
    finished(command(place, run), sabotage="saving:9")
    before = checkpoints.find(run / "checkpoints").newest
    code, _, err = finished(command(place, run), limit=30_000)  # bytes a file may have; the weights need more
    assert code == 1
    assert "Traceback" not in err
    assert "error: " in err
    assert "cannot write" in err
    assert "the same command will then continue from step 6" in err
    assert checkpoints.find(run / "checkpoints") == (before, {})
    code, _, err = finished(command(place, run))
    assert code == 0, err[-2000:]
    assert_equal_runs(run, undisturbed)


def test_a_folder_that_cannot_be_written_is_a_sentence(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(place / "tiny.toml", "--run", tmp_path / "file" / "run") == 1
    assert "error: Not a directory" in capsys.readouterr().err
    assert train(place / "tiny.toml", "--run", tmp_path / "file") == 2
    assert "is a file, but --run needs a folder" in capsys.readouterr().err


def test_a_finished_run_is_left_alone_until_fresh(place, undisturbed, tmp_path, capsys):
    before = {path: path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()}
    assert train(place / "tiny.toml", "--run", undisturbed) == 0
    assert "is already finished. Start over with --fresh" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()} == before

    short = ["--set", "train.max_steps=2", "--set", "train.warmup_steps=0"]
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *short) == 0
    first = (tmp_path / "a" / "log.jsonl").read_text()
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *short, "--set", "train.seed=7", "--fresh") == 0
    assert (tmp_path / "a" / "log.jsonl").read_text() != first
    assert recipe.load(str(tmp_path / "a" / "recipe.toml")).train.seed == 7


@pytest.mark.parametrize("wrong", ["data.name=nowhere.jsonl", "data.source=nowhere", "model.name=nowhere/at/all"])
def test_fresh_deletes_nothing_before_the_new_run_can_start(place, tmp_path, capsys, wrong):
    short = ["--run", tmp_path / "a", "--set", "train.max_steps=2", "--set", "train.warmup_steps=0"]
    assert train(place / "tiny.toml", *short) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert train(place / "tiny.toml", *short, "--fresh", "--set", wrong) != 0
    assert "deleting" not in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == before


def test_fresh_deletes_no_folder_that_is_not_a_runs(place, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert train(place / "tiny.toml", "--run", tmp_path, "--fresh") == 2
    assert "is not a run folder (it contains thesis.txt); nothing was changed" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "thesis.txt").rename(tmp_path / "model")  # named like a part of a run, and still not one
    for fresh in ([], ["--fresh"]):
        assert train(place / "tiny.toml", "--run", tmp_path, *fresh) == 2
    assert (tmp_path / "model").read_text() == "years of work"


def test_a_loss_that_is_no_number_ends_the_run(place, tmp_path, capsys):
    changes = ["--set", "train.learning_rate=1e30", "--set", "train.clip=0", "--set", "train.early_stopping=1"]
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *changes) == DIVERGED
    err = capsys.readouterr().err
    assert "error: the loss became NaN or infinite at step" in err
    assert "Lower train.learning_rate" in err
    assert not (tmp_path / "a" / "model").exists()
    for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_damaged_best_checkpoint_does_not_become_the_model(place, tmp_path):
    """lr 0: the first validation stays the best, and is older than what is kept anyway."""
    settings = ["train.learning_rate=0", "train.eval_every=2", "train.save_every=2", "train.max_steps=10"]
    changes = [word for one in settings for word in ("--set", one)]
    assert finished(command(place, tmp_path / "a", *changes), sabotage="card:0")[0] == -signal.SIGKILL
    with (tmp_path / "a" / "checkpoints" / "checkpoint-2" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    code, _, err = finished(command(place, tmp_path / "a", *changes))
    assert code == 0, err[-2000:]
    assert "the best checkpoint, checkpoint-2, is incomplete (model.safetensors has 1000 bytes of" in err
    assert "Weights of step 10 (the last)" in (tmp_path / "a" / "card.md").read_text()
    assert weights(tmp_path / "a")


def test_saving_and_sealing_count_in_no_documents_a_second(place, tmp_path, monkeypatch):
    late, clock, seal = [0.0], time.perf_counter, checkpoints.seal

    def slow(*args, **facts):
        late[0] += 1000  # by the clock, saving takes long
        seal(*args, **facts)

    monkeypatch.setattr(checkpoints, "seal", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    changes = [
        "--set",
        "train.save_every=1",
        "--set",
        "train.log_every=1",
        "--set",
        "train.max_steps=4",
        "--set",
        "train.warmup_steps=0",
        "--set",
        "train.eval_every=0",
    ]
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *changes) == 0
    speeds = [json.loads(line)["docs_per_second"] for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert late[0] >= 4000
    assert min(speeds[1:]) > 0.1  # with the saving counted 8 documents would take 1,000 seconds


def test_other_settings_do_not_continue_a_run(place, undisturbed, capsys):
    assert train(place / "tiny.toml", "--run", undisturbed, "--set", "train.learning_rate=1e-3") == 2
    err = capsys.readouterr().err
    assert "have changed since it was started:\n  train.learning_rate: 0.01 → 0.001. Set it back.\n" in err
    assert "start over with --fresh" in err


def test_a_run_that_was_stopped_before_its_first_checkpoint_says_that_it_starts_again(place, tmp_path, capsys):
    said = []
    for _ in range(2):
        assert train(*command(place, tmp_path / "run", "--set", "train.max_steps=2")[1:]) == 0
        said.append("was stopped before its first checkpoint" in capsys.readouterr().err)
        for name in ("checkpoints", "model"):  # as if it had been killed before either was there
            shutil.rmtree(tmp_path / "run" / name)
    assert said == [False, True]


def test_a_run_that_never_began_may_begin_with_other_settings(place, tmp_path, capsys):
    assert train(place / "tiny.toml", "--run", tmp_path / "a", "--set", "model.name=nowhere/nothing") == 2
    assert (
        train(
            place / "tiny.toml", "--run", tmp_path / "a", "--set", "train.max_steps=1", "--set", "train.warmup_steps=0"
        )
        == 0
    )
    assert recipe.load(str(tmp_path / "a" / "recipe.toml")).model.name == "scratch"


@pytest.mark.parametrize(
    ("steps", "warmup", "used", "shortened"),
    [
        (["train.max_steps=0", "train.epochs=3"], 24, 2, True),  # 60 rows, 8 a step: 24 steps
        (["train.max_steps=0", "train.epochs=3"], 23, 23, False),
        (["train.max_steps=0", "train.epochs=3"], 0.25, 6, False),
        (["train.max_steps=2"], 1000, 0, True),
        (["train.max_steps=2"], 1, 1, False),
        (["train.max_steps=2"], 0.9, 1, False),
        (["train.max_steps=1"], 0, 0, False),
    ],
)
def test_a_warm_up_fits_into_every_training(place, tmp_path, capsys, monkeypatch, steps, warmup, used, shortened):
    from ngramloss.training import optimiser

    asked = set()
    made = optimiser.learning_rate
    monkeypatch.setattr(optimiser, "learning_rate", lambda *a, **k: asked.add(k["warmup"]) or made(*a, **k))
    changes = [
        word for one in [*steps, f"train.warmup_steps={warmup}", "train.eval_every=0"] for word in ("--set", one)
    ]
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *changes) == 0
    assert asked == {used}
    said = (
        rf"a warm-up of {warmup:,} steps does not end within this training of \d+ steps, so it takes a tenth of them, "
        rf"{used}\. A share, such as train\.warmup_steps=0\.05, fits every length\."
    )
    assert bool(re.search(said, capsys.readouterr().err)) == shortened


def test_other_data_do_not_continue_a_run(place, tmp_path):
    (tmp_path / "data").mkdir()
    write_split(tmp_path / "data" / "train.jsonl", "train", 40)
    write_split(tmp_path / "data" / "validation.jsonl", "validation", 5)
    (tmp_path / "tiny.toml").write_text(RECIPE.format(data=tmp_path / "data"))
    finished(command(tmp_path, tmp_path / "run"), sabotage="saving:6")
    write_split(tmp_path / "data" / "train.jsonl", "train", 41)
    code, _, err = finished(command(tmp_path, tmp_path / "run"))
    assert code == 2
    assert "have changed since it was started:\n  train data: " in err
    assert "Traceback" not in err


def test_without_validation_the_last_weights_are_the_model(place, tmp_path):
    assert (
        train(
            place / "tiny.toml",
            "--run",
            tmp_path / "a",
            "--set",
            "train.eval_every=0",
            "--set",
            "train.max_steps=4",
            "--set",
            "train.warmup_steps=0",
        )
        == 0
    )
    last = load_file(tmp_path / "a" / "checkpoints" / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(last[name], value) for name, value in weights(tmp_path / "a").items())
    assert "Weights of step 4 (the last) of 4" in (tmp_path / "a" / "card.md").read_text()


def test_early_stopping_ends_a_run_that_no_longer_improves(place, tmp_path):
    settings = ["train.learning_rate=0", "train.early_stopping=1", "train.eval_every=2", "train.save_every=100"]
    assert (
        train(place / "tiny.toml", "--run", tmp_path / "a", *(word for one in settings for word in ("--set", one))) == 0
    )
    assert [line["step"] for line in log(tmp_path / "a") if "eval_ce" in line] == [2, 4]
    assert "Weights of step 2 (lowest validation ce" in (tmp_path / "a" / "card.md").read_text()
    assert (
        train(place / "tiny.toml", "--run", tmp_path / "a", *(word for one in settings for word in ("--set", one))) == 0
    )


def test_a_continued_run_goes_on_counting_validations_without_a_new_best(place, tmp_path):
    settings = ["train.learning_rate=0", "train.early_stopping=3", "train.eval_every=2", "train.save_every=1"]
    changes = [word for one in settings for word in ("--set", one)]
    assert finished(command(place, tmp_path / "a", *changes), sabotage="saving:5")[0] == -signal.SIGKILL
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *changes) == 0
    assert [line["step"] for line in log(tmp_path / "a") if "eval_ce" in line] == [2, 4, 6, 8]


def test_bad_rows_are_reported_or_skipped_and_counted(place, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    write_split(tmp_path / "data" / "train.jsonl", "train", 20)
    write_split(tmp_path / "data" / "validation.jsonl", "validation", 5)
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write('{"document": "cut sh\n')
    (tmp_path / "tiny.toml").write_text(RECIPE.format(data=tmp_path / "data"))
    assert (
        train(
            tmp_path / "tiny.toml",
            "--run",
            tmp_path / "a",
            "--set",
            "train.max_steps=1",
            "--set",
            "train.warmup_steps=0",
        )
        == 2
    )
    assert "train.jsonl:21" in capsys.readouterr().err
    assert (
        train(
            tmp_path / "tiny.toml",
            "--run",
            tmp_path / "b",
            "--set",
            "train.max_steps=1",
            "--set",
            "train.warmup_steps=0",
            "--on-bad-row",
            "skip",
        )
        == 0
    )
    assert "skipped" in (err := capsys.readouterr().err)
    assert "train.jsonl:21" in err
    assert "| train | 20 | 1 |" in (tmp_path / "b" / "card.md").read_text()


def test_a_training_says_that_sentences_of_its_language_have_no_rules(place, tmp_path, capsys):
    rows = [
        json.dumps({"document": f"고양이가 잔다. 비가 {number}일 온다.", "summary": "고양이가 잔다."})
        for number in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "tiny.toml").write_text(RECIPE.format(data=tmp_path / "train.jsonl"))
    once = ["--set", "train.max_steps=1", "--set", "train.eval_every=0", "--set", "train.warmup_steps=0"]
    assert train(tmp_path / "tiny.toml", "--run", tmp_path / "a", *once) == 0
    err = capsys.readouterr().err
    assert err.count("sentencex has no rules for Korean: 8 of 8 texts are split at line ends") == 1
    assert train(tmp_path / "tiny.toml", "--run", tmp_path / "b", *once, "--set", "data.separator=none") == 0
    assert "Korean" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["xsum", "cnndm"])
def test_the_papers_recipes_run_on_a_small_model_and_a_file(place, undisturbed, tmp_path, name):
    """A stand-in for BART-base and the data set, neither of which can be fetched here; all other settings are the paper's."""
    changes = [
        f"data.name={place / 'data'}",
        f"model.name={undisturbed / 'model'}",
        "train.max_steps=3",
        "train.warmup_steps=2",
        "train.eval_every=2",
        "train.log_every=1",
    ]
    assert train(name, "--run", tmp_path / "a", *(word for one in changes for word in ("--set", one))) == 0
    lines = log(tmp_path / "a")
    assert {"ce", "matches(2)", "matches(3)", "matches(4)"} <= lines[0].keys()
    assert lines[1]["learning_rate"] == pytest.approx(3e-5 * 1 / 2)  # warming up from 0
    prepared = json.loads((tmp_path / "a" / "prepared.json").read_text())
    from ngramloss.data.tokens import Tokens

    separators = (Tokens(Path(prepared["splits"]["train"]["tokens"]))[0]["input_ids"] == 2).sum()
    assert separators >= 5  # one for each sentence, and the end
    from transformers import GenerationConfig

    written = GenerationConfig.from_pretrained(tmp_path / "a" / "model")
    beams = {"xsum": (6, 1.0, 11, 62), "cnndm": (4, 2.0, 56, 142)}[name]
    assert (written.num_beams, written.length_penalty, written.min_length, written.max_length) == beams


STILL = ["--set", "model.dropout=0", "--set", "train.max_steps=6", "--set", "model.architecture=mbart"]


@pytest.fixture(scope="module")
def one_process(place):
    code, _, err = finished(command(place, place / "one", *STILL))
    assert code == 0, err[-2000:]
    return weights(place / "one")


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_two_processes_of_torchrun_train_one_run(place, one_process, tmp_path, fsdp):
    """mBART names its attentions as units too, so that sharding meets units within units."""
    two = [*command(place, tmp_path / "two", *STILL), *(["--set", "train.fsdp=true"] if fsdp else [])]
    refuse = (  # only the first process may read the data
        "import os, sys\nfrom ngramloss import cli\nfrom ngramloss.training import prepare\n"
        "if os.environ['RANK'] == '1':\n    prepare.load = None\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    (tmp_path / "worker.py").write_text(refuse)
    if fsdp:
        codes, err = fork_ranks(refuse, two, environment=environment())
    else:
        launcher = [
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            "--",
        ]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, str(tmp_path / "worker.py"), *two],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
            timeout=300,
        )
        codes, err = [done.returncode], done.stderr
    assert not any(codes), err[-3000:]
    assert err.count("finished at step 6") == 1
    ours = weights(tmp_path / "two")
    for name in one_process:
        torch.testing.assert_close(ours[name], one_process[name], atol=1e-5, rtol=0)
    codes, err = fork_ranks(refuse, two, environment=environment())
    assert codes == [0, 0]
    assert "is already finished" in err


def test_a_batch_that_processes_cannot_share_and_a_model_that_does_not_fit_are_refused(place, tmp_path):

    from ngramloss.training import runner

    with pytest.raises(
        ValueError, match=r"train\.batch_size counts rows over all processes: 5 cannot be divided by 2 processes"
    ):
        run_of(recipe.load(str(place / "tiny.toml"), ["train.batch_size=5"])).on(2, torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="Set NGRAMLOSS_CACHE to a folder that all machines share"):
        runner._present(tmp_path / "elsewhere")
    settings = recipe.load(str(place / "tiny.toml"))
    model = SimpleNamespace(config=SimpleNamespace(), get_input_embeddings=lambda: SimpleNamespace(num_embeddings=3))
    for tokenizer, sentence in (
        (Pieces("abcd", 1), "4 tokens but the model has 3 embeddings"),
        (Pieces("ab", None), "no padding token"),
    ):
        with pytest.raises(ValueError, match=sentence):
            runner._raise_unless_it_fits(model, tokenizer, settings)


class Pieces(str):
    def __new__(cls, pieces, pad):
        made = super().__new__(cls, pieces)
        made.pad_token_id = pad
        return made


def test_two_processes_that_are_killed_go_on_as_if_nothing_had_happened(place, tmp_path):
    """61 rows: in the epoch that is continued the last round has repeated rows, which must count for nothing."""
    (tmp_path / "data").mkdir()
    write_split(tmp_path / "data" / "train.jsonl", "train", 61)

    def run(folder, where):
        changes = [f"data.name={tmp_path / 'data'}", "train.eval_every=0", "train.max_steps=10"]
        arguments = command(place, folder, *(word for one in changes for word in ("--set", one)))
        return fork_ranks(SABOTAGE, [where, *arguments], environment=environment())

    codes, _ = run(tmp_path / "killed", "saving:6")
    assert -signal.SIGKILL in codes
    assert not (tmp_path / "killed" / "model").exists()
    codes, err = run(tmp_path / "killed", "nowhere:0")
    assert codes == [0, 0], err[-3000:]
    assert "from step 3" in err
    assert run(tmp_path / "whole", "nowhere:0")[0] == [0, 0]
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole")


def test_mlflow_receives_what_the_log_has(place, tmp_path, monkeypatch):
    """With a stand-in that has what the loop calls: the real package starts a database."""
    calls = []
    stand_in = ModuleType("mlflow")
    stand_in.__spec__ = ModuleSpec("mlflow", None)
    for name in ("start_run", "end_run", "log_params", "log_metrics"):
        setattr(stand_in, name, lambda *given, name=name, **options: calls.append((name, given, options)))
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    few = [
        word
        for one in (
            'train.report_to=["mlflow"]',
            "train.best=chrf",
            "train.max_steps=2",
            "train.eval_every=2",
            "train.warmup_steps=0",
        )
        for word in ("--set", one)
    ]
    assert train(place / "tiny.toml", "--run", tmp_path / "a", *few) == 0
    assert calls[0][0] == "start_run"
    assert calls[-1][0] == "end_run"
    sent = [options for name, _, options in calls if name == "log_metrics"]
    for line in log(tmp_path / "a"):
        assert any(
            options["step"] == line["step"]
            and options["metrics"].items()
            >= {
                name.replace("(", "_").replace(")", "_"): value for name, value in line.items() if name != "step"
            }.items()
            for options in sent
        ), line


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["model.name=nowhere/nothing"], "cannot load the model of"),
        (["data.name=nowhere.jsonl"], "nowhere.jsonl"),
        (["data.separator=<gap>"], "the tokenizer has no token '<gap>'"),
        (["data.max_source=2000"], "supports 1024 positions, but the recipe asks for 2000 tokens"),
        (["train.fsdp=true"], "needs several processes: start with torchrun"),
        (["train.precision=fp16"], "fp16 needs a GPU"),
        (['train.report_to=["wandb"]'], "train.report_to: wandb is not installed"),
        (
            ['train.report_to=["mlflow"]'],
            "train.report_to: mlflow is not installed. Install it with: pip install mlflow",
        ),
        (
            ["train.best=rouge"],
            "train.best: 'rouge' is neither a term nor a score. Did you mean 'rougeL'? Terms of this objective: loss, ce, matches(2), bag(2). Scores",
        ),
        (["objective=ce + matchs(2)"], "Did you mean 'matches'"),
    ],
    ids=str,
)
def test_what_is_wrong_gets_a_sentence(place, tmp_path, capsys, changes, sentence):
    assert (
        train(place / "tiny.toml", "--run", tmp_path / "a", *(word for one in changes for word in ("--set", one))) == 2
    )
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err
