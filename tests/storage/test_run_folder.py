"""A run is one thing: its names in one module, its lock, what --fresh deletes, and whose predictions it has."""

import ast
import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import ngramloss
from ngramloss import cli, recipe
from ngramloss.errors import UserError
from ngramloss.metrics.registry import Metric
from ngramloss.metrics.scores import Scores
from ngramloss.scoring import provenance, results, score_cache
from ngramloss.storage import files, run_folder
from ngramloss.storage.files import lock_folder
from ngramloss.storage.run_folder import NAMES, Busy, RunFolder
from ngramloss.training import claim, prepare, runner

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.slow]

SETTINGS = (
    "model.width=16",
    "model.vocabulary=400",
    "data.limit=40",
    "train.max_steps=2",
    "train.warmup_steps=0",
    "train.eval_every=0",
    "generation.max_length=12",
    "generation.num_beams=1",
    "model.feed_forward=16",
)
CUT = "0123456789abcdef"


def train(folder, *more):
    settings = [word for one in SETTINGS for word in ("--set", one)]
    return cli.main(["train", "demo", "--run", str(folder), *settings, *more])


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments), "--limit", "3"])


def score(*arguments):
    return cli.main(["score", *map(str, arguments), "--json", "--samples", "20", "--shuffles", "20"])


def label(capsys):
    return json.loads(capsys.readouterr().out)["systems"][0]["label"]


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with predictions, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "ours"
    assert train(folder) == 0
    assert generate(folder) == 0
    return folder


@pytest.fixture
def ours(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "ours")


# Names


def test_each_name_of_a_run_is_written_in_one_module():
    named = [name for name in NAMES if "." in name]  # the others are words
    for path in Path(ngramloss.__file__).parent.rglob("*.py"):
        if path.name != "run_folder.py":
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert not set(named) & set(map(str, texts)), path


def test_a_run_has_no_file_that_its_folder_does_not_name(ours):
    assert score(ours) == 0
    assert {path.name for path in ours.iterdir()} == set(NAMES) - {
        "tensorboard",
        "candidates.json",
        "candidates.jsonl",
    }, "candidates and a tracker are asked for"


def test_what_a_kill_cut_short_is_told_from_other_files(tmp_path):
    cut = [f"{name}.partial-{CUT}" for name in (*NAMES, "predictions.partial-3.jsonl")]
    others = ["card.md.partial-draft", "notes.txt", f"notes.txt.partial-{CUT}", "predictions.partial-3.jsonl"]
    for name in (*cut, *others):
        (tmp_path / name).write_text("")
    assert RunFolder(tmp_path).content() == sorted(others)
    RunFolder(tmp_path).tidy()
    assert sorted(os.listdir(tmp_path)) == sorted(others)


# Starting over


def test_fresh_deletes_all_of_the_run_and_nothing_else(ours, capsys):
    assert score(ours) == 0
    before = everything(ours)
    (ours / "notes.txt").write_text("mine")
    (ours / "predictions.partial-1.jsonl").write_text("{}\n")
    (ours / f"model.partial-{CUT}").mkdir()
    assert train(ours, "--fresh", "--set", "train.seed=7") == 0
    assert f"deleting the run in {ours}, with its predictions." in capsys.readouterr().err
    made = {"recipe.toml", "prepared.json", "log.jsonl", "checkpoints", "card.md", "weights.json", "model"}
    assert {path.name for path in ours.iterdir()} == {"notes.txt", *made}
    assert (ours / "notes.txt").read_text() == "mine"
    assert (ours / "model" / "model.safetensors").read_bytes() != before[Path("model/model.safetensors")]


def test_old_summaries_never_stand_under_a_new_objective(tmp_path, capsys):
    folder = tmp_path / "a"
    assert train(folder, "--set", "objective=ce") == 0
    assert generate(folder) == 0
    capsys.readouterr()
    assert score(folder) == 0
    assert label(capsys) == "ce"
    assert train(folder, "--fresh", "--set", "objective=ce + matches(2)") == 0
    capsys.readouterr()
    assert score(folder) == 2
    assert (
        f"error: no predictions in {folder}. Generate them with: ngramloss generate {folder}\n"
        == capsys.readouterr().err
    )
    assert generate(folder) == 0
    capsys.readouterr()
    assert score(folder) == 0
    assert label(capsys) == "ce + matches(2)"


def test_what_a_link_in_the_run_names_is_not_deleted(ours, tmp_path):
    shutil.move(ours / "checkpoints", tmp_path / "large")
    (ours / "checkpoints").symlink_to(tmp_path / "large")
    before = everything(tmp_path / "large")
    RunFolder(ours).clear()
    assert not list(ours.iterdir())
    assert everything(tmp_path / "large") == before


def test_a_half_deleted_run_is_never_taken_for_a_finished_one(ours, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(ours).clear()
    assert not RunFolder(ours).finished
    assert not RunFolder(ours).has_predictions
    assert RunFolder(ours).recipe.exists()


# Which weights wrote the predictions


def test_predictions_of_other_weights_are_refused(ours, tmp_path, capsys):
    assert train(tmp_path / "other", "--set", "train.seed=7") == 0
    wrote = json.loads((ours / "generation.json").read_text())["weights"]
    shutil.rmtree(ours / "model")
    shutil.copytree(tmp_path / "other" / "model", ours / "model")
    own = RunFolder(tmp_path / "other").fingerprint
    capsys.readouterr()
    sentence = (
        f"error: the predictions in {ours} were written by other weights ({wrote}) than those in {ours / 'model'} ({own}). "
        f"Delete {ours / 'predictions.jsonl'} and make new ones with: ngramloss generate {ours}\n"
    )
    assert (score(ours), capsys.readouterr().err) == (2, sentence)
    assert (cli.main(["report", str(ours), "-o", str(tmp_path / "page")]), capsys.readouterr().err) == (2, sentence)
    assert not (tmp_path / "page").exists()
    assert generate(ours) == 2
    assert f"; weights: '{wrote}' → '{own}'). Choose another --out, or delete " in capsys.readouterr().err
    (ours / "predictions.jsonl").unlink()
    assert generate(ours) == 0
    assert score(ours) == 0


def test_texts_of_a_model_that_was_deleted_are_its_own_and_unfinished_ones_are_named(ours):
    run = RunFolder(ours)
    again = "run the same command again."
    shutil.rmtree(run.model)
    run.raise_unless_written_by(run, run.generation, run.predictions, again)
    run.predictions.rename(run.share(0))
    run.weights.write_text("{}")
    with pytest.raises(UserError, match=r"Delete \S+predictions\.partial-0\.jsonl and run the same command again\."):
        run.raise_unless_written_by(run, run.generation, run.predictions, again)


def test_the_fingerprint_is_recorded_and_made_anew_where_the_weights_changed(ours, monkeypatch):
    there = RunFolder(ours)
    true = files.fingerprint([ours / "model" / "model.safetensors"])
    assert json.loads((ours / "weights.json").read_text())["fingerprint"] == true
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "fingerprint", lambda _: pytest.fail("what is recorded needs no hash"))
        assert there.fingerprint == true
    os.utime(ours / "model" / "model.safetensors")
    assert there.fingerprint == true
    with (ours / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert there.fingerprint != true
    (ours / "weights.json").unlink()
    assert there.fingerprint == files.fingerprint([ours / "model" / "model.safetensors"])


def test_a_run_whose_model_was_deleted_keeps_its_label(ours):
    assert provenance.run(ours).label == "ce + matches(2,3,4)"
    shutil.rmtree(ours / "model")
    assert provenance.run(ours).label == "ce + matches(2,3,4)"
    about = json.loads((ours / "generation.json").read_text())
    (ours / "generation.json").write_text(json.dumps(about | {"weights": "0" * 12}))
    assert (provenance.run(ours).label, provenance.run(ours).setup) == ("ours", "")


def test_without_weights_to_compare_the_models_name_counts_unless_it_is_another_folders(ours, tmp_path):
    shutil.rmtree(ours / "model")
    (ours / "weights.json").unlink()
    (tmp_path / "elsewhere" / "ours").mkdir(parents=True)
    about = json.loads((ours / "generation.json").read_text())
    trained = "ce + matches(2,3,4)"
    for model, expected in (
        (str(ours), trained),
        ("runs/of/old/ours", trained),
        ("other", "other"),
        (str(tmp_path / "elsewhere" / "ours"), "ours"),
        ("lead-3", "lead-3"),
    ):
        (ours / "generation.json").write_text(json.dumps(about | {"model": model}))
        assert provenance.run(ours).label == expected


def test_a_run_that_was_moved_keeps_its_label(ours, tmp_path, capsys):
    ours.rename(tmp_path / "moved")
    assert score(tmp_path / "moved") == 0
    assert label(capsys) == "ce + matches(2,3,4)"


def test_predictions_of_another_system_in_a_runs_folder_have_its_name(ours, capsys):
    for name in ("predictions.jsonl", "generation.json"):
        (ours / name).unlink()
    assert generate("lead-3", "--data", "newswire", "--out", ours) == 0
    assert not (ours / "seen.jsonl").exists(), "of other predictions"
    capsys.readouterr()
    assert score(ours) == 0
    assert label(capsys) == "lead-3"
    found = provenance.run(ours)
    assert (found.seed, found.setup, found.recipe, found.is_baseline, found.own) == (None, "", {}, True, False)


def test_the_page_shows_no_training_beside_predictions_of_another_system(ours):
    from ngramloss.report.build import build_record
    from ngramloss.scoring import scored_texts

    def report():
        texts = scored_texts.align(None, [ours])
        return build_record(results.score_systems(texts, ["rouge"], samples=2, shuffles=2), texts)

    assert report().training
    (ours / "generation.json").write_text('{"model": "lead-3"}')
    assert not report().training


def test_predictions_that_nothing_tells_of_have_the_folders_name(ours):
    (ours / "generation.json").unlink()
    assert provenance.run(ours).label == "ours"


def test_a_run_that_starts_over_while_it_is_scored_changes_no_label_and_gets_no_figures(ours, capsys, monkeypatch):
    def slow(references, predictions):
        assert train(ours, "--fresh", "--set", "objective=ce") == 0
        return Scores({"slow": [1.0] * len(predictions)}, "slow")

    monkeypatch.setitem(results.METRICS, "slow", Metric(slow))
    assert score(ours, "--metrics", "slow") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["systems"][0]["label"] == "ce + matches(2,3,4)"
    assert f"warning: scores were not saved in {ours}: its predictions changed in the meantime.\n" in err
    assert not (ours / "scores.json").exists()


# One process at a time


def test_a_second_process_is_told_that_the_folder_is_in_use(ours, capsys):
    before = everything(ours)
    sentence = (
        f"error: another process is training, generating or scoring in {ours}. Wait for it to end, or choose another "
    )
    with lock_folder(ours, wait=False):
        for fresh in ([], ["--fresh"]):
            assert (train(ours, *fresh), capsys.readouterr().err) == (2, f"{sentence}--run.\n")
        assert (generate(ours), capsys.readouterr().err) == (2, f"{sentence}--out.\n")
    assert everything(ours) == before


def test_a_training_holds_its_folder_from_the_first_file_to_the_last(tmp_path, monkeypatch):
    free = []

    def noted(function):
        def asked(*args, **kwargs):
            try:
                with lock_folder(tmp_path / "a", wait=False):
                    free.append(function.__name__)
            except BlockingIOError:
                pass
            return function(*args, **kwargs)

        return asked

    for module, name in ((runner, "claim"), (prepare, "prepare_once"), (runner, "_run"), (runner, "_finish")):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    assert train(tmp_path / "a") == 0
    assert free == []
    with lock_folder(tmp_path / "a", wait=False):
        pass


def test_only_the_first_process_of_torchrun_holds_the_folder(tmp_path):
    with lock_folder(tmp_path, wait=False), claim.locked(RunFolder(tmp_path), 1):
        pass
    with lock_folder(tmp_path, wait=False), pytest.raises(Busy), claim.locked(RunFolder(tmp_path), 0):
        pass


def test_a_scoring_beside_a_training_prints_its_table_and_warns(ours, capsys, monkeypatch):
    monkeypatch.setattr(score_cache, "PATIENCE", 0.3)
    with lock_folder(ours, wait=False):
        began = time.monotonic()
        assert cli.main(["score", str(ours)]) == 0
        assert time.monotonic() - began < 20
    out, err = capsys.readouterr()
    assert "rouge1" in out
    assert err == f"warning: scores were not saved in {ours}: another process is using it.\n"
    assert not (ours / "scores.json").exists()


def test_a_lock_that_is_soon_free_is_waited_for(tmp_path, monkeypatch):
    other = lock_folder(tmp_path, wait=False)
    other.__enter__()
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            other.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", sleep)
    with RunFolder(tmp_path).lock(option="--run", patience=100):
        pass
    assert waits == [0.1] * 3


def test_where_the_file_system_has_no_locks_nothing_is_locked(tmp_path, monkeypatch):
    import fcntl

    def refused(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(fcntl, "flock", refused(errno.ENOLCK))
    with RunFolder(tmp_path).lock(option="--run"):
        pass
    monkeypatch.setattr(fcntl, "flock", refused(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), RunFolder(tmp_path).lock(option="--run"):
        pass


# Whose folder it is


def claimed(folder, *, fresh=False):
    return claim.claim(recipe.load("demo"), RunFolder(folder), fresh=fresh)


@pytest.mark.parametrize(
    "left",
    [
        ["checkpoints/"],
        [f"recipe.toml.partial-{CUT}"],
        ["checkpoints/", f"recipe.toml.partial-{CUT}"],
        [f"model.partial-{CUT}/"],
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_kill_leaves_at_the_very_start_is_taken(tmp_path, left, fresh):
    for name in left:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("obj")
    claimed(tmp_path, fresh=fresh)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "recipe.toml"]


@pytest.mark.parametrize(
    "theirs",
    [
        "checkpoints/checkpoint-500/model.bin",
        "log.jsonl",
        "model/config.json",
        "card.md",
        f"notes.partial-{CUT}",
        "card.md.partial-draft",
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_without_a_recipe_that_holds_anything_is_left_alone(tmp_path, theirs, fresh):
    path = tmp_path / theirs
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("years of work")
    with pytest.raises(
        UserError,
        match=rf"is not a run folder \(it contains {Path(theirs).parts[0]}\); nothing was changed\. Choose another --run\.",
    ):
        claimed(tmp_path, fresh=fresh)
    assert everything(tmp_path) == {Path(theirs): b"years of work"}


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_no_run_begins_in_a_folder_of_predictions(tmp_path, capsys, fresh):
    assert generate("lead-3", "--data", "newswire", "--out", tmp_path / "lead") == 0
    before = everything(tmp_path / "lead")
    capsys.readouterr()
    assert train(tmp_path / "lead", *fresh) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'lead'} has predictions but no run (it contains generation.json, predictions.jsonl, "
        "references.jsonl); nothing was changed. Choose another --run.\n"
    )
    assert everything(tmp_path / "lead") == before


def test_predictions_whose_model_and_checkpoints_were_deleted_get_no_other_settings(ours, capsys):
    shutil.rmtree(ours / "model")
    shutil.rmtree(ours / "checkpoints")
    assert train(ours, "--set", "objective=ce") == 2
    assert (
        "have changed since it was started:\n  objective: 'ce + matches(2,3,4)' → 'ce'. Set it back.\n"
        in capsys.readouterr().err
    )


def test_a_file_called_model_is_no_model_and_is_not_taken_for_one(ours, capsys):
    shutil.rmtree(ours / "model")
    (ours / "model").write_text("mine")
    assert train(ours) == 1
    assert "error: Not a directory" in capsys.readouterr().err
    assert (ours / "model").read_text() == "mine"


# Links


def test_no_prediction_is_written_through_a_link(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predictions.partial-0.jsonl").symlink_to(tmp_path / "elsewhere")  # which is not there yet
    assert generate("lead-3", "--data", "newswire", "--out", tmp_path / "out") == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", [*NAMES, "predictions.partial-0.jsonl"])
def test_only_the_model_of_a_run_may_be_elsewhere(name, tmp_path):
    (outside := tmp_path / "outside").mkdir()
    (folder := tmp_path / "run").mkdir()
    (folder / name).symlink_to(outside)
    run = RunFolder(folder)
    attribute = next((key for key, part in vars(RunFolder).items() if getattr(part, "name", "") == name), "")
    if attribute == "model":
        assert run.model.is_dir()
        return
    with pytest.raises(UserError, match=rf"{name} leads out of {folder}, to {outside}\. Replace the link by a copy"):
        run.share(0) if "partial" in name else getattr(run, attribute)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "run")
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    run = RunFolder(tmp_path / "elsewhere")  # a whole run may be a link
    assert run.share(0) if "partial" in name else getattr(run, attribute)
