"""ngramloss study: the plan is checked before anything runs, killed studies end with the same tables, and these are right.

Most tests replace the processes of a study by a function that writes what they would write, in no time.
"""

# ruff: noqa: F401, F811 -- fixtures of another module

import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import fork
from lanes import few
from places import ROOT
from study_results import SCORES, STUDY, Instant, changed, compared, instant, made, path, shown, without_speeds

from ngramloss import recipe
from ngramloss.cli import main
from ngramloss.data.prompts import TODAY
from ngramloss.errors import DIVERGED, UserError
from ngramloss.scoring.significance import smallest_difference
from ngramloss.storage.files import fingerprint, lock_folder
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study import page, plan, run, stages, tables
from ngramloss.study import results as own_results
from ngramloss.study.plan import TEST, VALIDATION, Training
from ngramloss.study.results import DecodingResult, ResultFolder, _raise_unless_alike, score_texts

pytestmark = pytest.mark.usefixtures("own_cache")


# The plan


def test_a_study_names_rows_sets_seeds_and_what_is_tuned(path):
    study = plan.read(path)
    assert (study.name, study.baseline, study.confirm) == ("mine", "ce", 2)
    assert study.tuning.grid == (("train.learning_rate=0.001",), ("train.learning_rate=0.002",))
    assert [(data.name, data.metric, data.metrics) for data in study.sets] == [
        ("news", "rouge", ("rouge", "shape")),
        ("pairs", "bleu", ("bleu", "chrf", "shape")),
    ]
    training = Training("news", "ce + matches(2)", ("train.learning_rate=0.002",), 12, TEST)
    assert training.name == "matches2-learning_rate0.002-seed12"
    settings = study.recipe(training)
    assert (settings.objective, settings.train.learning_rate, settings.train.seed) == ("ce + matches(2)", 0.002, 12)
    assert settings.train.max_steps == 3
    assert study.facts(training, "beam2")["decodings.beam2"] == ["generation.num_beams=2"]
    assert "train.max_tokens" not in study.facts(training, "beam2")


def test_a_key_without_quotes_is_tuned_too_and_several_make_a_grid(path):
    changed(
        path, ('"train.learning_rate" = [1e-3, 2e-3]', "train.learning_rate = [1e-3, 2e-3]\ntrain.clip = [0.0, 1.0]")
    )
    assert plan.read(path).tuning.grid[:2] == (
        ("train.learning_rate=0.001", "train.clip=0.0"),
        ("train.learning_rate=0.001", "train.clip=1.0"),
    )


def test_a_row_may_have_settings_of_its_own(path):
    rows = (
        '{name = "ce, longer", objective = "ce", epochs = 2}, {objective = "ce + rdrop", set = ["train.twins=true"]}]'
    )
    study = plan.read(changed(path, ('"ce + bag(2)"]', rows)))
    assert study.objectives[-2:] == ("ce, longer", "ce + rdrop")
    longer, twins = (Training("news", row, (), 11, TEST) for row in study.objectives[-2:])
    assert (longer.name, twins.name) == ("ce_longer-seed11", "rdrop-seed11")
    assert (study.recipe(longer).objective, study.recipe(longer).train.max_steps) == ("ce", 6)
    assert study.recipe(longer._replace(objective="ce")).train.max_steps == 3
    assert (study.recipe(twins).train.twins, study.recipe(twins).train.max_steps) == (True, 3)
    usual = study.recipe(Training("pairs", "ce", (), 11, TEST)).train
    assert study.recipe(longer._replace(set="pairs")).train.epochs == 2 * usual.epochs


def test_a_set_may_have_values_of_its_own_to_try(path):
    changed(path, ('"task=translation"]', '"task=translation"]\ntune = {"train.learning_rate" = [3e-5]}'))
    study = plan.read(path)
    assert [len(data.grid) for data in study.sets] == [2, 1]
    tried = stages.stages(study, study.sets[1], {}).all[0].trainings
    assert {training.setting for training in tried} == {("train.learning_rate=3e-05",)}
    assert study.recipe(tried[0]).train.learning_rate == 3e-5


def test_a_decoding_may_sample_and_a_set_have_metrics_of_its_own(path, instant, capsys):
    sampled = ("beam2 = [", 'sample = ["temperature=0.7", "top_p=0.9", "seed=3"]\nbeam2 = [')
    changed(
        path,
        sampled,
        ('set = ["task=', 'metrics = ["rouge"]\nset = ["task='),
        ("confirm = 2", 'confirm = 2\nmetrics = ["chrf"]'),
    )
    study = plan.read(path)
    assert [data.more_metrics for data in study.sets] == [("chrf",), ("chrf", "rouge")]
    whole(capsys)
    options = [" ".join(words) for words in instant.started if words[0] == "generate"]
    sampled = [text for text in options if "--sample" in text]
    assert len(sampled) == len(options) / 3
    assert all("-sample --sample --temperature 0.7 --top-p 0.9 --seed 3 --split" in text for text in sampled)
    assert any("--set generation.num_beams=2 --split" in text for text in options)


@pytest.mark.slow
def test_a_set_may_be_screened_with_some_of_the_seeds(path, instant, capsys):
    changed(path, ('"task=translation"]', '"task=translation"]\nscreening = [2]'))
    study = plan.read(path)
    assert [data.screening for data in study.sets] == [(1, 2), (2,)]
    assert "pairs, BLEU of beam2: tune 4 of 4, screen 4 of 4, confirm 9 of 9" in whole(capsys) + said(capsys)
    trained = [words[3].split("/")[-3:-1] for words in instant.started if words[0] == "train"]
    of_bag = [(own, name.rpartition("seed")[2]) for own, name in trained if name.startswith("bag2")]
    assert {("news", "1"), ("news", "2"), ("pairs", "2")} <= {*of_bag}
    assert ("pairs", "1") not in of_bag
    table = said(capsys).partition("pairs: screened on validation data")[2].split("\n\n")[1]
    assert "of 2" not in table


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"task=translation"]', '"task=translation"]\nscreening = [3]', r"set pairs: screening: must be a list of some of the seeds in seeds\.screening, got \[3\]"),
        ('"task=translation"]', '"task=translation"]\nscreening = []', r"set pairs: screening: must be a list of some of"),
        ('"task=translation"]', '"task=translation"]\nscreening = 1', r"set pairs: screening: must be a list of some of"),
        ('"task=translation"]', '"task=translation"]\ntune = 3', r"set pairs: tune: must be a table"),
        ('"task=translation"]', '"task=translation"]\ntune = {"train.seed" = [3]}', r"set pairs: tune\.train\.seed: cannot be tuned"),
        ('"ce + bag(2)"]', '"ce + bags(2)"]', r"objectives: unknown objective 'bags'"),
        ('"ce + bag(2)"]', '"ce + matches( 2 )"]', r"objectives: 'ce \+ matches\(2\)' is there twice"),
        ('"ce + bag(2)"]', '{objective = "ce + bags(2)"}]', r"row 'ce \+ bags\(2\)': unknown objective 'bags'"),
        ('"ce + bag(2)"]', '{set = ["train.epochs=2"]}]', r"objectives: objective: is missing"),
        ('"ce + bag(2)"]', '{objective = "ce", epochs = 2}]', r"objectives: 'ce' is there twice"),
        ('"ce + bag(2)"]', '{objective = "ce", epochs = 0}]', r"objectives: epochs: must be above 0"),
        ('"ce + bag(2)"]', '{objective = "bags(", set = ["train.seed=3"]}]', r"row 'bags\(': set: the study chooses"),
        ('"ce + bag(2)"]', '{name = "dft", objective = "ce", epochs = 2}]', r"objectives: 'dft' must be a name of its own"),
        ('"ce + bag(2)"]', '{name = "xsum", objective = "ce", epochs = 2}]', r"objectives: 'xsum' must be a name of its own"),
        ('"ce + bag(2)"]', '{name = "l, x", objective = "ce"}, {name = "l x", objective = "ce"}]', r"'l, x' is there twice"),
        ('"ce + bag(2)"]', '{objective = "ce + bag(2)", set = ["train.seed=3"]}]', r"row 'ce \+ bag\(2\)': set: the study chooses"),
        ('"ce + bag(2)"]', '{objective = "ce + bag(2)", set = ["train.sed=3"]}]', r"(?s)set news: .*train\.sed: unknown key"),
        ('"ce + bag(2)"]', '{objective = "ce + bag(2)", sets = []}]', r"objectives: sets: unknown key\. Did you mean 'set'"),
        ("confirm = 2", "confirn = 2", r"confirn: unknown key\. Did you mean 'confirm'\?"),
        ("confirm = 2", "confirm = 4", r"confirm: at most 3 rows are left to choose from, got 4"),
        ("confirm = 2", 'confirm = 3\nalways = ["ce + bag(2)"]', r"confirm: at most 2 rows are left to choose from, got 3"),
        ("confirm = 2", 'confirm = 2\nalways = ["ce"]', r"always: 'ce' is not one of the objectives after the first"),
        ("confirm = 2", 'confirm = 2\nmetrics = ["chfr"]', r"metrics: there is no metric 'chfr'\. Did you mean 'chrf'\? See ngramloss list"),
        ('primary = "bleu"', 'primary = "blue"', r"set pairs: primary: there is no such score, 'blue'\. Did you mean 'bleu'"),
        ('primary = "bleu"', 'primary = "words"', r"set pairs: primary: there is no such score, 'words'"),
        ('primary = "bleu"\n', "", r"set pairs: primary: is missing"),
        ('primary = "bleu"', 'primary = "bleu"\nmetric_options = ["rouge.tokens=auto"]', r"set pairs: metric_options: takes METRIC\.OPTION=VALUE for a metric of the set, bleu, chrf, shape, got 'rouge"),
        ('primary = "bleu"', 'primary = "bleu"\nmetric_options = ["bleu.tokenise=zh"]', r"set pairs: metric_options: bleu\.tokenise: unknown option\. Did you mean"),
        ('primary = "bleu"', 'primary = "bertscore"', r"set pairs: metric_options: bertscore needs model\. Give it: metric_options = \[.bertscore\.model=…"),
        ('decoding = "beam2"\nset = ["task', 'decoding = "greedy"\nset = ["task', r"set: the primary scores are of beam2 and greedy"),
        ('decoding = "beam2"\nset = ["task', 'decoding = "gredy"\nset = ["task', r"set pairs: decoding: must be one of greedy, beam2, got 'gredy'"),
        ('name = "pairs"', 'name = "news"', r"set: two sets are called 'news'"),
        ('name = "pairs"', 'name = "../x"', r"set \.\./x: name: must be letters, digits"),
        ('"task=translation"', '"train.sed=3"', r"(?s)set pairs: recipe demo .*train\.sed: unknown key.*train\.seed"),
        ('"task=translation"', '"train.seed=3"', r"set pairs: set: the study chooses objectives and seeds"),
        ('recipe = "demo"', 'recipe = "dem"', r"set news: there is no recipe 'dem'.*Did you mean 'demo'"),
        ('recipe = "demo"\n', "", r"set news: recipe: is missing"),
        ("confirmation = [11, 12, 13]", "confirmation = [2, 11]", r"seeds: 2 are screening and confirmation seeds"),
        ("confirmation = [11, 12, 13]", "confirmation = [11, 11]", r"seeds\.confirmation: must be a list of different"),
        ("confirmation = [11, 12, 13]", "", r"seeds: give screening and confirmation"),
        ("seed = 1\n", "seed = 11\n", r"tune\.seed: 11 is a confirmation seed"),
        ("[1e-3, 2e-3]", "1e-3", r"tune\.train\.learning_rate: must be a list of the values to try"),
        ("[1e-3, 2e-3]", '["fast"]', r"train\.learning_rate: must be a number, got 'fast'"),
        ('objectives = ["ce", "ce + matches(2)"]\nothers', 'objectives = ["ce + matches(2)"]\nothers', r"must contain the baseline, 'ce'"),
        ('others = "ce + matches(2)"', 'others = "ce + bag(2)"', r"tune\.others: must be one of tune\.objectives"),
        ('"generation.num_beams=2"', '"train.seed=2"', r"decodings\.beam2: must be a list of settings in generation"),
        ('"generation.num_beams=2"', '"temprature=0.7"', r"decodings\.beam2: must be a list of .*, and of samples temperature, top_p, seed"),
        ('"generation.num_beams=2"', '"temperature=0"', r"decodings\.beam2\.temperature: must be above 0, got 0"),
        ('"generation.num_beams=2"', '"seed=one"', r"decodings\.beam2 is not TOML"),
        ('primary = "bleu"', 'primary = "bleu"\nmetrics = ["bertscor"]', r"set pairs: metrics: there is no metric 'bertscor'\. Did you mean 'bertscore'"),
        ("beam2 = [", "train = [", r"decodings\.train: must be a name of letters.*and not train"),
        ("[[set]]\nname = \"news\"", "[[st]]\nname = \"news\"", r"st: unknown key\. Did you mean 'set'"),
        ("title", "[[[", r"mine\.toml is not TOML"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_named_before_anything_runs(old, new, message, path, instant, capsys):
    path.write_text(STUDY.replace(old, new, 1))
    code, _, err = shown(capsys)
    assert (code, instant.started) == (2, [])
    assert re.search(message, err), err
    assert not Path("mine").exists()


def test_a_study_that_is_not_there(path, capsys):
    assert main(["study", "other.toml"]) == 2
    assert "there is no study other.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "set news: no such file or folder: nowhere.jsonl"),
        ("newswir", "set news: unknown data set 'newswir'. Did you mean 'newswire'"),
        ("only.jsonl", "set news: the data 'only.jsonl' have no validation and no test split"),
    ],
)
def test_a_data_set_that_is_not_there_or_lacks_a_split_is_an_error_before_training(
    name, message, path, instant, capsys
):
    Path("only.jsonl").write_text('{"source": "a", "target": "b"}\n')
    changed(path, ('"train.max_steps=3"', f'"data.name={name}"'))
    code, _, err = shown(capsys)
    assert (code, instant.started) == (2, []), err
    assert message in err, err


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_row_that_cannot_be_used_is_an_error_before_training(split, path, instant, capsys):
    Path("own").mkdir()
    for each in ("train", "validation", "test"):
        Path(f"own/{each}.jsonl").write_text('{"id": "1", "source": "a", "target": "b"}\n' * (1 + (each == split)))
    changed(path, ('"train.max_steps=3"', '"data.name=own"'))
    code, _, err = shown(capsys)
    assert (code, instant.started) == (2, [])
    assert f"set news: 1 of 2 rows of the split '{split}' of own cannot be used" in err
    assert err.endswith("see: ngramloss docs data#rows-that-cannot-be-used\n")
    Path(f"own/{split}.jsonl").write_text('{"id": "1", "source": "a", "other": "b"}\n')
    code, _, err = shown(capsys)
    assert (code, instant.started) == (2, [])
    assert err.endswith("see: ngramloss docs data#columns\n"), err


def test_a_model_that_is_not_there_is_an_error_before_training(path, instant, capsys):
    changed(path, ('"train.max_steps=3"', '"model.name=models/none"'))
    code, _, err = shown(capsys)
    assert (code, instant.started) == (2, [])
    assert "models/none" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share", "3/2"], "--share takes K/N"),
        (["--only", "new"], "--only takes a set of the study, news, pairs; got 'new'"),
        (["--minutes", "-1"], "--minutes must be 0 or more"),
        (["--parallel", "0"], "--parallel must be 1 or more"),
        (["--resume", "nowhere"], "there is no folder nowhere to merge"),
    ],
)
def test_options_are_checked(options, message, path, instant, capsys):
    code, _, err = shown(capsys, *options)
    assert (code, instant.started) == (2, [])
    assert message in err


# From the plan to the tables


def whole(capsys, *arguments):
    code, text, _ = shown(capsys, *arguments)
    assert code == 0
    return text


DONE, KEPT = {}, tempfile.TemporaryDirectory()


def finished(capsys, *arguments):
    """What `whole` returns for STUDY, with the folders that it leaves. It is worked through once for all tests."""
    assert Path("mine.toml").read_text() == STUDY
    folders = arguments[1::2] or ("mine", "runs/mine")
    copies = [Path(KEPT.name) / name for name in folders]
    if arguments not in DONE:
        DONE[arguments] = whole(capsys, *arguments)
        pairs = zip(folders, copies, strict=True)
    else:
        pairs = zip(copies, folders, strict=True)
    for there, here in pairs:
        shutil.copytree(there, here)
    return DONE[arguments]


@pytest.mark.slow
def test_stages_follow_each_other_and_only_confirmed_rows_see_the_test_set(path, instant, capsys):
    text = whole(capsys)
    written = [words for words in instant.started if words[0] == "generate"]
    trained = [words[3].split("/")[-3:-1] for words in instant.started if words[0] == "train"]
    assert len(trained) == 2 * (4 + 8 - 2 + 9)  # two rows were screened with a seed with which they were tuned
    assert len({tuple(each) for each in trained}) == len(trained)
    tested = {words[3].rpartition("/")[0] for words in written if "test" in words}
    assert all(re.search(r"seed1[123]$", name) for name in tested)
    assert all(not re.search(r"seed1[123]$", words[3]) for words in written if "validation" in words)
    rows = {set: [*json.loads(Path(f"mine/{set}/confirmed.json").read_text())["rows"]] for set in ("news", "pairs")}
    assert all(len(confirmed) == 3 and confirmed[:2] == ["ce", "ce + matches(2)"] for confirmed in rows.values())
    assert len(tested) == 2 * 9
    others = [line for line in text.splitlines() if line.startswith("ce + bag(2)") and line.endswith("yes")]
    assert len(others) == sum("ce + bag(2)" in confirmed for confirmed in rows.values())
    assert whole(capsys) == text == whole(capsys, "--show")
    assert len(instant.started) == 2 * 19 * 3


@pytest.mark.slow
def test_rows_that_are_always_tested_do_not_wait_for_the_screening(path, instant, capsys):
    changed(path, ("confirm = 2", 'confirm = 1\nalways = ["ce + bag(2)"]'))
    study = plan.read(path)
    assert study.comparisons == 4
    text = whole(capsys)
    order = [words[3].split("/")[-3:-1] for words in instant.started if words[0] == "train"]
    news = [name for of, name in order if of == "news"]
    first = [re.sub("-learning_rate.*-", " ", name) for name in news[4:10]]  # after what is tuned
    assert sorted(first) == [f"{row} seed1{seed}" for row in ("bag2", "ce") for seed in (1, 2, 3)]
    assert len(order) == 2 * (4 + 8 - 2 + 9)
    for of in ("news", "pairs"):
        rows = [*json.loads(Path(f"mine/{of}/confirmed.json").read_text())["rows"]]
        assert rows == ["ce", "ce + matches(2)", "ce + bag(2)"]  # bag is the worst of the screening
    assert "corrected for 4 comparisons" in text
    assert "always 6 of 6, screen 6 of 6, confirm 3 of 3 trainings done" in said(capsys)


@pytest.mark.slow
def test_tests_of_rows_that_are_always_tested_are_shown_before_the_screening_ends(path, instant, capsys):
    changed(path, ("confirm = 2", 'confirm = 1\nalways = ["ce + bag(2)"]'))
    whole(capsys)
    for file in Path("mine/news").glob("*seed2*.validation.*"):
        file.unlink()
    Path("mine/news/confirmed.json").unlink()
    _, text, _ = shown(capsys, "--show")
    rows = text.partition("news: confirmed on test data")[2].split("\n\n")[1].splitlines()[1:]
    assert [row.split("  ")[0] for row in rows] == ["ce", "ce + bag(2)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("confirmation = [11, 12, 13]", "confirmation = [11, 12, 13, 14]", "the confirmation seeds of news were"),
        ('always = ["ce + bag(2)"]', 'always = ["ce + rewards(2)"]', r"was used for ce .*, ce \+ bag\(2\)"),
    ],
)
def test_what_is_always_tested_cannot_change_once_it_was_tested(old, new, message, path, instant, capsys):
    changed(path, ("confirm = 2", 'confirm = 1\nalways = ["ce + bag(2)"]'))
    whole(capsys)
    for file in Path("mine").glob("*/*seed2*.validation.*"):
        file.unlink()
    for file in Path("mine").glob("*/confirmed.json"):
        file.unlink()
    changed(path, (old, new))
    code, _, err = shown(capsys, "--show")
    assert code == 2
    assert re.search(message, err), err


@pytest.mark.slow
def test_texts_of_other_settings_are_not_taken_for_those_of_the_study(path, instant, capsys):
    finished(capsys)
    shutil.rmtree("mine")
    changed(path, ('beam2 = ["generation.num_beams=2"]', 'beam2 = ["generation.num_beams=3"]'))
    code, _, err = shown(capsys)
    assert code == 2
    assert "were not generated with --set generation.num_beams=3 --split validation" in err


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_texts_of_a_training_that_was_made_again_are_not_scored_as_those_of_the_new_one(whole, path, instant, capsys):
    finished(capsys)
    training = Path("runs/mine/news/ce-learning_rate0.001-seed1")
    for file in Path("mine/news").glob(f"{training.name}*"):
        file.unlink()
    shutil.rmtree(training / "run")
    instant.others = {training.name: "another training"}
    there = training / "validation-greedy" / "predictions.jsonl"
    if not whole:
        there = there.rename(there.with_name("predictions.partial-0.jsonl"))
    code, _, err = shown(capsys)
    assert code == 2
    assert re.search(
        rf"the predictions in {training}/validation-greedy were written by other weights \(\w+\) than those in "
        rf"{training}/run/model \(\w+\)\. Delete {there} and run the same command again\.",
        err,
    ), err
    assert not list(Path("mine/news").glob(f"{training.name}*"))
    for file in training.glob("validation-*/generation.json"):
        shutil.rmtree(file.parent)
    assert shown(capsys)[0] == 0


def test_texts_of_different_engines_are_noticed(path, instant, capsys):
    assert "different engines" not in finished(capsys)
    for number, file in enumerate(sorted(Path("mine/news").glob("*seed*.json"))):
        content = json.loads(file.read_text())
        content["generation"] += f"|engine:{'hf' if number < 3 else 'graph'}"
        file.write_text(json.dumps(content))
    _, text, _ = shown(capsys, "--show")
    assert text.count("Texts were written by different engines, graph in None (35) and hf in None (3):") == 1


def said(capsys):
    """What a study prints of its plan."""
    main(["study", "mine.toml", "--show"])
    return capsys.readouterr().out


def unscreened(path):
    return changed(path, ("screening = [1, 2]\n", ""), ("confirm = 2\n", ""))


@pytest.mark.slow
def test_without_screening_seeds_all_rows_are_tested(path, instant, capsys):
    study = plan.read(unscreened(path))
    text = whole(capsys)
    assert (study.screening, study.confirm) == ((), 3)
    assert "screened" not in text
    for name in ("news: compared on test data, R-2 of beam2, 3 seeds", "pairs: compared on test data, BLEU of beam2"):
        rows = text.partition(name)[2].split("\n\n")[1].splitlines()[1:]
        assert [row.split("  ")[0] for row in rows] == list(study.objectives)
    assert "corrected for 6 comparisons" in text
    assert whole(capsys, "--show") == text
    changed(path, ("confirmation = [11, 12, 13]", "confirmation = [11, 12]"))
    assert "the confirmation seeds of news were [11, 12, 13]" in shown(capsys, "--show")[2]


@pytest.mark.slow
def test_without_screening_and_tuning_no_validation_split_is_needed(path, instant, capsys):
    path.write_text(re.sub(r"\[tune\].*?(?=\[\[set)", "", unscreened(path).read_text(), flags=re.S))
    Path("data").mkdir()
    for split in ("train", "test"):
        Path(f"data/{split}.jsonl").write_text('{"source": "a", "target": "b"}\n')
    changed(path, ('"train.max_steps=3"', '"data.name=data"'))
    assert "compared on test data" in whole(capsys)


def test_how_many_rows_are_confirmed_is_refused_without_a_screening(path, instant, capsys):
    changed(path, ("screening = [1, 2]\n", ""))
    code, _, err = shown(capsys)
    assert (code, instant.started) == (2, [])
    assert "confirm: without screening seeds all rows are confirmed. Leave it out" in err


def test_texts_that_are_written_as_the_recipe_says_are_in_the_run_itself(path, instant, capsys):
    changed(path, ('beam2 = ["generation.num_beams=2"]', "beam2 = []"))
    study = plan.read(path)
    training = Training("news", "ce", (), 1, TEST)
    folders = [study.text_folder(training, decoding, Path("runs")).as_posix() for decoding in study.decodings]
    assert folders == ["runs/news/ce-seed1/test-greedy", "runs/news/ce-seed1/run"]


@pytest.mark.slow
def test_a_study_that_grows_leaves_results_of_other_rows_and_seeds_alone(path, instant, capsys):
    study = plan.read(unscreened(path))
    whole(capsys)
    less = replace(study, objectives=study.objectives[:2], confirmation=(11,), confirm=1)
    with pytest.raises(UserError, match="which the study no longer has"):
        ResultFolder(Path("mine"), less).read()
    shutil.rmtree("mine/news")
    folder = ResultFolder(Path("mine"), replace(less, grows=True))
    Path("mine/pairs/confirmed.json").unlink()
    tested = {(one.objective, one.seed) for one, _ in folder.read() if one.split == TEST}
    assert tested == {(row, 11) for row in less.objectives}
    folder.confirm(study.sets[1], {"ce": ()})
    assert folder.confirmed(study.sets[1]) is None


def test_a_failure_with_other_settings_says_nothing(path):
    study = plan.read(path)
    folder = ResultFolder(Path("mine"), study)
    training = Training("news", "ce", study.sets[0].grid[0], 1, VALIDATION)
    failure = DecodingResult(training, "beam2", study.facts(training, "beam2"), failed="no memory")
    folder.write(failure)
    assert [*folder.read()] == [(training, "beam2")]
    now = plan.read(changed(path, ("train.max_steps=3", "train.max_steps=4")))
    assert ResultFolder(Path("mine"), now).read() == {}
    folder.write(replace(failure, failed="", scores={"rouge2": 1.0}, count=1, documents=[1.0]))
    with pytest.raises(UserError, match=r"settings changed after .*\n  train.max_steps: 3 → 4"):
        ResultFolder(Path("mine"), now).read()


@pytest.mark.slow
def test_a_finished_training_of_other_settings_is_refused(path, instant, capsys):
    finished(capsys)
    for file in Path("mine").glob("news/*.json"):
        file.unlink()
    changed(path, ("train.max_steps=3", 'train.max_steps=3", "train.max_tokens=4096'))
    whole(capsys)
    for file in Path("mine").glob("news/*.json"):
        file.unlink()
    changed(path, ("train.max_steps=3", "train.max_steps=4"))
    code, _, err = shown(capsys)
    assert code == 2
    assert "train.max_steps: 3 → 4" in err
    assert "train.max_tokens" not in err


def test_tuned_rows_have_their_own_value_and_others_take_that_of_the_named_row(path, instant, capsys):
    finished(capsys)
    study = plan.read(path)
    folder = ResultFolder(Path("mine"), study)
    results = folder.read()
    last = Training("pairs", "ce + matches(2)", study.sets[1].grid[1], 1, VALIDATION), "beam2"
    assert stages.stages(study, study.sets[1], results).settings["ce"] == study.sets[1].grid[0]
    results[last] = replace(results[last], scores={"bleu": 99.0})
    for data in study.sets:
        chosen = stages.stages(study, data, results).settings
        for row in study.tuning.objectives:
            scores = {
                setting: results[Training(data.name, row, setting, 1, VALIDATION), data.decoding].scores[data.primary]
                for setting in data.grid
            }
            assert scores[chosen[row]] == max(scores.values())
        assert chosen["ce + rewards(2)"] == chosen["ce + bag(2)"] == chosen["ce + matches(2)"]


def test_of_settings_with_equal_scores_the_first_is_taken(path):
    study = plan.read(path)
    data = study.data("news")
    tried = [
        Training(data.name, row, setting, study.tuning.seed, VALIDATION)
        for row in study.tuning.objectives
        for setting in data.grid
    ]
    results = {
        (training, decoding): DecodingResult(training, decoding, {}, scores={data.primary: 20.0})
        for training in tried
        for decoding in study.decodings
    }
    assert {*stages.stages(study, data, results).settings.values()} == {("train.learning_rate=0.001",)}


def test_every_result_is_a_small_file_of_its_own_with_signatures_and_the_documents_of_the_primary_score(
    path, instant, capsys
):
    finished(capsys)
    files = sorted(Path("mine").glob("*/*seed*.json"))
    assert len(files) == 2 * 19 * 2
    assert max(file.stat().st_size for file in files) < 8000
    one = json.loads(Path("mine/news/ce-learning_rate0.001-seed1.validation.beam2.json").read_text())
    assert len(one["documents"]) == one["count"] == 8
    assert statistics.mean(one["documents"]) == pytest.approx(one["scores"]["rouge2"], abs=1e-3)
    assert one["signatures"]["rouge"].startswith("rouge|refs:1")
    assert re.match(
        r"generation\|weights:\w+\|data:newswire\|split:validation\|documents:8\|fingerprint:f-val", one["generation"]
    )
    assert one["made_of"] == {
        "validation": "f-validation",
        "train data": "t1",
        "train tokens": "k1",
        "model: weights": "w1",
    }
    assert (one["docs_per_second"], one["parallel"]) == (50.0, 1)
    greedy = json.loads(Path("mine/news/ce-learning_rate0.001-seed1.validation.greedy.json").read_text())
    assert greedy["documents"] == []
    counts = json.loads(Path("mine/pairs/ce-learning_rate0.001-seed1.validation.beam2.json").read_text())["documents"]
    assert (len(counts), len(counts[0])) == (8, 10)  # what BLEU is made of


class Killed(BaseException):
    """Stands in for a kill: nothing after it is done."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "count"),
    few(
        [("start_process", 1), ("write", 7), ("score_texts", 60), ("confirm", 1)],
        [
            *((place, count) for place in ("start_process", "write", "score_texts") for count in (1, 7, 60)),
            *(("confirm", count) for count in (1, 7)),
        ],
    ),
)
def test_a_study_killed_at_any_moment_ends_with_the_same_tables(place, count, path, instant, capsys, monkeypatch):
    undisturbed = finished(capsys, "--results", "a", "--runs", "b")
    owner = ResultFolder if place in ("write", "confirm") else run
    calls, real = [], getattr(owner, place)

    def killing(*arguments, **options):
        calls.append(place)
        if len(calls) == count:
            raise Killed
        return real(*arguments, **options)

    monkeypatch.setattr(owner, place, killing)
    with pytest.raises(Killed):
        main(["study", "mine.toml", "--parallel", "3"])
    assert whole(capsys, "--parallel", "2") == undisturbed == whole(capsys, "--show")


@pytest.mark.slow
def test_what_is_done_is_not_done_again(path, instant, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run, "score_texts", lambda *_: _raise())
        with pytest.raises(Killed):
            main(["study", "mine.toml"])
    assert [words[0] for words in instant.started] == ["train", "generate"]
    whole(capsys)
    names = [" ".join(words) for words in instant.started]
    assert len(names) == len({*names}) == 2 * 19 * 3


# Failures


def test_a_process_that_ends_without_its_files_has_failed(path, instant, capsys, monkeypatch):
    monkeypatch.setattr(instant, "_write", lambda *_: None)
    code, text, err = shown(capsys)
    assert code == 1
    assert "failed: it ended without its files, see" in err
    assert "No row is chosen, because trainings failed" in text


@pytest.mark.slow
def test_a_failed_seed_is_named_and_in_no_mean_and_the_study_goes_on(path, instant, capsys):
    undisturbed = finished(capsys, "--results", "a", "--runs", "b")
    settings = json.loads(Path("a/news/confirmed.json").read_text())["rows"]
    pairs = json.loads(Path("a/pairs/confirmed.json").read_text())["rows"]
    rates = [rows["ce + matches(2)"][0].removeprefix("train.").replace("=", "") for rows in (settings, pairs)]
    instant.failing = {f"matches2-{rate}-seed12": 1 for rate in rates}
    code, text, err = shown(capsys)
    assert code == 1
    assert "train failed: the loss became NaN." in err
    assert "ce + matches(2), seed 12 failed and is in no mean: train: the loss became NaN." in text
    confirmed = text[text.index("news: confirmed") :]
    row = next(line for line in confirmed.splitlines() if line.startswith("ce + matches(2)"))
    study = plan.read(path)
    results = ResultFolder(Path("mine"), study).read()

    def score(objective, seed):
        training = Training("news", objective, tuple(settings[objective]), seed, TEST)
        return results[training, "beam2"].scores["rouge2"]

    ours, theirs = ([score(objective, seed) for seed in (11, 13)] for objective in ("ce + matches(2)", "ce"))
    assert row.split()[3:6] == ["2", "of", "3"]
    assert f"{statistics.mean(ours):.2f}" in row
    difference = statistics.mean(a - b for a, b in zip(ours, theirs, strict=True))
    assert f"{difference:+.2f}" in row
    count = len(instant.started)
    assert shown(capsys, "--show")[:2] == (0, text)
    assert "confirm 8 of 9 (1 failed) trainings done" in said(capsys)
    code, _, again = shown(capsys)
    assert code == 1
    assert len(instant.started) == count + 2  # tried again, once in each set
    assert again.count("train failed: the loss became NaN.\n") == 2
    assert not re.search(r"study: (\d+) of (?!\1)", again)  # the failed one is not counted twice
    instant.failing = {}
    assert whole(capsys) == undisturbed


@pytest.mark.slow
def test_a_training_that_fails_once_is_tried_again_before_rows_are_chosen_and_after_the_others(path, instant, capsys):
    undisturbed = finished(capsys, "--results", "a", "--runs", "b")
    instant.started = []

    class Once(dict):
        def get(self, key, default):
            return self.pop(key, default)

    name = "rewards2-learning_rate0.001-seed2"  # of the screening
    instant.failing = Once({name: 1})
    code, text, err = shown(capsys)
    assert (code, text) == (0, undisturbed)
    assert err.count("train failed: the loss became NaN. It is tried again, once, after the others.") == 1
    trained = ["/".join(words[1].split("/")[-3:-1]) for words in instant.started if words[0] == "train"]
    (again,) = {each for each in trained if trained.count(each) > 1}
    assert again.endswith(name)
    assert trained.index(again) + 1 < max(place for place, each in enumerate(trained) if each == again)
    others = [place for place, each in enumerate(trained) if each.endswith("seed2") and each != again]
    assert max(place for place, each in enumerate(trained) if each == again) > max(others)


def test_the_next_try_waits_a_while_and_a_stopped_study_remembers_the_first(path, instant, capsys, monkeypatch):
    name, begun, now = "ce-learning_rate0.002-seed1", [], [0.0]
    instant.failing = {name: 1}

    def sleep(_):
        now[0] += 1

    class Timed(instant):
        def __init__(self, arguments, log, environment):
            if f"/news/{name}/" in f"/{arguments[1]}":
                begun.append(now[0])
                if len(begun) == 2:
                    raise Killed
            super().__init__(arguments, log, environment)

    def tries():
        return {json.loads(file.read_text())["tries"] for file in Path("mine/news").glob(f"{name}.*.json")}

    monkeypatch.setattr(run, "start_process", Timed)
    monkeypatch.setattr(run, "PAUSE", 500.0)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(Killed):
        main(["study", "mine.toml", "--only", "news"])
    assert begun[1] - begun[0] >= 500
    assert tries() == {1}
    assert capsys.readouterr().err.count("It is tried again, once, after the others.") == 1
    assert "It is tried again" not in shown(capsys, "--only", "news")[2]
    assert len(begun) == 3
    assert tries() == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        ["ce-learning_rate0.001", "ce-learning_rate0.002"],
        ["matches2-learning_rate0.001", "matches2-learning_rate0.002"],
    ],
)
def test_nothing_is_tested_if_the_baseline_or_all_other_rows_diverged(rows, path, instant, capsys):
    instant.failing = {f"{row}-seed1": DIVERGED for row in rows}  # the others take the rate of matches
    code, text, _ = shown(capsys)
    assert code == 1
    assert "news: Nothing is tested: ce or all other rows diverged, so there is nothing to compare." in text
    assert not list(Path("mine").glob("*/confirmed.json"))
    assert not any("test" in words for words in instant.started)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "seed"), [("tune", 1), ("screen", 2)])
def test_a_failure_of_the_machine_excludes_no_row_and_nothing_is_tested_before_another_try_succeeds(
    stage, seed, path, instant, capsys
):
    undisturbed = finished(capsys, "--results", "a", "--runs", "b")
    instant.failing, instant.started = {f"matches2-learning_rate0.001-seed{seed}": 1}, []
    if stage == "screen":
        instant.failing |= {f"matches2-learning_rate0.002-seed{seed}": 1}
    code, text, _ = shown(capsys)
    assert code == 1
    assert not list(Path("mine").glob("*/confirmed.json"))
    assert not any("test" in words for words in instant.started)
    trained = [words[3] for words in instant.started if words[0] == "train"]
    assert any("bag2" in name and "seed2" in name for name in trained) == (stage == "screen")
    assert "news: No row is chosen, because trainings failed, which says nothing about their rows." in text
    assert f"seed {seed}: train: the loss became NaN." in text.partition("news: No row is chosen")[2]
    assert shown(capsys, "--show")[1] == text
    instant.failing = {}
    assert whole(capsys) == undisturbed


@pytest.mark.slow
def test_a_row_is_given_up_by_removing_it_from_the_study(path, instant, capsys):
    instant.failing = {f"bag2-learning_rate0.00{digit}-seed2": 1 for digit in (1, 2)}
    assert shown(capsys)[0] == 1
    changed(path, (', "ce + bag(2)"]', "]"))
    for file in Path("mine").glob("*/bag2*"):
        file.unlink()
    assert "bag(2)" not in whole(capsys)


@pytest.mark.slow
def test_a_row_with_a_diverged_screening_seed_is_not_confirmed_nor_tried_again_after_the_choice(path, instant, capsys):
    finished(capsys, "--results", "a", "--runs", "b")
    rate = json.loads(Path("a/news/confirmed.json").read_text())["rows"]["ce + matches(2)"][0].removeprefix("train.")
    changed(path, (STUDY[STUDY.index('[[set]]\nname = "pairs"') :], ""))
    instant.failing = {f"matches2-{rate.replace('=', '')}-seed2": DIVERGED}
    assert shown(capsys)[0] == 1
    rows = [*json.loads(Path("mine/news/confirmed.json").read_text())["rows"]]
    assert rows == ["ce", "ce + rewards(2)", "ce + bag(2)"]
    instant.failing, instant.started = {}, []
    assert shown(capsys)[0] == 1
    assert instant.started == []


@pytest.mark.slow
def test_a_row_whose_tuning_diverged_is_left_out(path, instant, capsys):
    changed(path, ('others = "ce + matches(2)"', 'others = "ce"'))
    instant.failing = {f"matches2-learning_rate0.00{digit}-seed1": DIVERGED for digit in (1, 2)}
    code, text, _ = shown(capsys)
    assert code == 1
    assert "failed" in text
    rows = [*json.loads(Path("mine/news/confirmed.json").read_text())["rows"]]
    assert rows == ["ce", "ce + rewards(2)", "ce + bag(2)"]


@pytest.mark.slow
def test_a_metric_that_fails_on_the_texts_of_one_training_does_not_end_the_study(path, instant, capsys, monkeypatch):
    undisturbed = finished(capsys, "--results", "a", "--runs", "b")
    (folder,) = Path("b/news").glob("rewards2-*-seed2")
    rate, real = re.search(r"rate([\d.]+)-", folder.name)[1], own_results.compute_scores

    def failing(metric, texts, *options, **more):
        if metric == "shape" and texts["predictions"] == lost:
            raise ZeroDivisionError("no words")
        return real(metric, texts, *options, **more)

    rows = (folder / "validation-beam2" / "predictions.jsonl").read_text().splitlines()
    lost = [json.loads(row)["prediction"] for row in rows]
    with monkeypatch.context() as patch:
        patch.setattr(own_results, "compute_scores", failing)
        code, text, err = shown(capsys)
    assert code == 1
    failed = f"news, ce + rewards(2), train.learning_rate={rate}, seed 2: score failed: the metric shape raised"
    assert failed in err
    assert "ZeroDivisionError: no words. The same happens with `ngramloss score runs/mine/news/" in text
    assert "--metrics shape`. It is tried again, once, after the others.\n" in err
    assert "other processes" not in err  # the second try scores again, which starts no process
    assert "pairs: confirmed on test data" in text
    assert "news: confirmed on test data" not in text
    assert whole(capsys) == undisturbed


@pytest.mark.slow
def test_a_failure_recorded_with_a_clock_that_was_ahead_is_tried_again_at_once(path, instant, capsys, monkeypatch):
    instant.failing = {"ce-learning_rate0.002-seed1": 1}
    shown(capsys, "--only", "news")
    for file in Path("mine/news").glob("ce-learning_rate0.002-seed1*"):
        content = json.loads(file.read_text()) | {"tries": 1, "attempt": str(time.time_ns() + 3600 * 10**9)}
        file.write_text(json.dumps(content))
    instant.failing = {}
    monkeypatch.setattr(run, "PAUSE", 30.0)
    turns = iter(range(2000))
    monkeypatch.setattr(run.time, "sleep", lambda _: next(turns))
    assert "waiting for them" not in shown(capsys)[2]


def test_a_process_that_was_killed_for_its_memory_says_so(tmp_path):
    assert "Perhaps the memory was full: lower --parallel" in run._reason(tmp_path / "none.log", -9)
    assert run._reason(tmp_path / "none.log", 3) == "it ended with exit code 3 and printed nothing."
    (tmp_path / "some.log").write_text("a line\n")
    assert run._reason(tmp_path / "some.log", 3) == f"it ended with exit code 3, see {tmp_path / 'some.log'}."


@pytest.mark.parametrize("code", [130, -signal.SIGINT, -signal.SIGTERM])
def test_a_process_that_somebody_else_stops_is_not_a_failure(path, instant, capsys, code):
    instant.failing = {"ce-learning_rate0.002-seed1": code}
    code, _, err = shown(capsys)
    assert code == 130
    assert "train was stopped." in err
    assert not list(Path("mine").glob("*/ce-learning_rate0.002-seed1*"))
    assert len(instant.started) == 4


# Folders


def test_two_studies_do_not_share_a_folder(path, instant, capsys):
    finished(capsys)
    Path("other.toml").write_text(STUDY)
    for options in (
        ["--results", "mine"],
        ["--runs", "runs/mine"],
        ["--results", "mine", "--show"],
        ["--resume", "mine"],
    ):
        assert main(["study", "other.toml", *options]) == 2
        assert "belongs to the study 'mine', and this is 'other'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("train.max_steps=3", "train.max_steps=4", "train.max_steps: 3 → 4"),
        ('primary = "rouge2"\ndecoding = "beam2"', 'primary = "rouge1"\ndecoding = "beam2"', "set.primary: 'rouge2' → 'rouge1'"),
        ('"generation.num_beams=2"', '"generation.num_beams=3"', "decodings.beam2: ['generation.num_beams=2'] → ['generation.num_beams=3']"),
        ("train.max_steps=3\"]", "train.max_steps=3\"]\nlimit = 5", "set.limit: 0 → 5"),
        ('"ce + rewards(2)", ', "", "'ce + rewards(2)', beam2, which the study no longer has"),
        ('name = "pairs"', 'name = "couples"', "the set 'pairs', which the study no longer has"),
        ("confirmation = [11, 12, 13]", "confirmation = [11, 12, 13, 14]", "confirmation seeds of news were [11, 12, 13] and are [11, 12, 13, 14] now"),
        ("confirm = 2", "confirm = 1", "the test set of news was used for ce"),
    ],
)  # fmt: skip
def test_a_study_that_changed_after_its_runs_is_refused_with_what_changed(old, new, named, path, instant, capsys):
    finished(capsys)
    count = len(instant.started)
    changed(path, (old, new))
    for options in ([], ["--show"]):
        code, _, err = shown(capsys, *options)
        assert code == 2
        assert named in err, err
        assert re.search(r"[Pp]ut (it|them) back", err)
    assert len(instant.started) == count


def test_a_training_that_another_version_of_the_study_began_is_refused(path, instant, capsys, monkeypatch):
    monkeypatch.setattr(run, "start_process", lambda *_: _raise())
    with pytest.raises(Killed):
        main(["study", "mine.toml"])
    begun = Path("runs/mine/news/ce-learning_rate0.001-seed1/run")
    (begun / "checkpoints" / "step-1").mkdir(parents=True)
    (begun / "recipe.toml").write_text((begun.parent / "settings.toml").read_text())
    changed(path, ("train.max_steps=3", "train.max_steps=4"))
    code, _, err = shown(capsys)
    assert code == 2
    assert "settings changed after" in err
    assert "train.max_steps: 3 → 4" in err


@pytest.mark.parametrize(("named", "begun_with", "same"), [("texts", "texts", True), ("texts", "others", False)])
def test_a_training_that_was_stopped_has_the_whole_path_of_its_candidates(
    named, begun_with, same, tmp_path, monkeypatch
):
    """The study names it as seen from the folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    begun = RunFolder(tmp_path / "run")
    (begun.checkpoints / "checkpoint-1").mkdir(parents=True)
    saved, now = (
        recipe.load("demo", [f"data.candidates={place}", "objective=ce + rank"])
        for place in (tmp_path / begun_with, named)
    )
    begun.recipe.write_text(recipe.dump(saved))
    with nullcontext() if same else pytest.raises(UserError, match=r"data\.candidates: '.*others' → 'texts'"):
        run.raise_unless_same_settings(SimpleNamespace(grows=False), now, begun)


def test_what_changes_no_score_may_change(path, instant, capsys):
    text = finished(capsys)
    changed(path, ("train.max_steps=3", 'train.max_steps=3", "train.max_tokens=4096'), ("Is it", "Was it"))
    assert whole(capsys) == text


def test_settings_that_a_later_version_adds_do_not_make_results_useless(path, instant, capsys):
    text = finished(capsys)
    for file in Path("mine").glob("*/*seed*.json"):
        content = json.loads(file.read_text())
        del content["facts"]["train.twins"]
        file.write_text(json.dumps(content))
    assert whole(capsys) == text
    changed(path, ("train.max_steps=3", 'train.max_steps=3", "train.twins=true'))
    assert "train.twins: False → True" in shown(capsys)[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "should contain a JSON object"),
        ("{}", "is not a result of a study: it has no set,"),
    ],
)
def test_a_damaged_or_foreign_file_among_results_is_named_and_nobody_is_told_to_delete_it(
    content, message, path, instant, capsys
):
    finished(capsys)
    damaged = Path("mine/news/mine.json")
    damaged.write_text(content)
    code, _, err = shown(capsys, "--show")
    assert code == 2
    assert f"{damaged} {message}" in err
    assert "Move it out of the folder. If this study wrote it, its texts are scored again." in err
    assert "elete" not in err


WRONG = {  # field of a result → values that no study writes
    "setting": ["x", ["x"], [1], None],
    "seed": ["1", 1.5, True, None, -1, 10**30],
    "split": [3, "x/../../../outside/evil"],
    "failed": [None, {}],
    "attempt": ["x", 3],
    "tries": ["1", None],
    "scores": [None, [], {"rouge2": "x"}, {"rouge2": []}, {"rouge2": math.inf}, {"rouge2": 10**400}],
    "count": ["8", None, 7],
    "documents": [[], "x", [1.0] * 7, ["1"] * 8, [1.0] * 7 + ["x"], [[1, 2]] * 7 + [[1]], [[1, 2]] * 8, [1e999] * 8],
    "signatures": [[], {"rouge": 1}],
    "generation": [3, None],
    "made_of": ["x", {"train": {}}],
    "facts": [None, []],
    "train_seconds": ["x", [], math.nan],
    "write_seconds": ["x"],
    "docs_per_second": ["x", {}],
    "parallel": [[], None],
    "version": [None, 1],
    "something else": [1],
}


@pytest.mark.slow
def test_every_wrong_value_in_a_result_is_refused_with_the_name_of_the_file(path, instant, capsys):
    finished(capsys)
    study, file = plan.read(path), Path("mine/news/ce-learning_rate0.001-seed11.test.beam2.json")
    content = json.loads(file.read_text())
    for field, values in WRONG.items():
        for value in values:
            file.write_text(json.dumps(content | {field: value}))
            with pytest.raises(UserError, match=re.escape(str(file))):
                ResultFolder(Path("mine"), study).read()
    file.write_text(json.dumps(content))
    file = Path("mine/news/confirmed.json")
    for value in ([], {"ce": 3}, {"ce": [3]}, None):
        file.write_text(json.dumps({"rows": value, "seeds": [11, 12, 13]}))
        with pytest.raises(UserError, match=r"confirmed\.json: rows.* should be .*Restore it"):
            ResultFolder(Path("mine"), study).confirmed(study.data("news"))


@pytest.mark.slow
def test_no_text_of_a_result_reaches_the_page_with_what_a_reader_does_not_see(path, instant, capsys):
    finished(capsys)
    odd = "v\x1b[2J\u202e<b>"
    for file in Path("mine/news").glob("*seed*.json"):
        content = json.loads(file.read_text()) | {"version": odd, "generation": f"generation|{odd}"}
        content |= {"signatures": {"rouge": odd}, "made_of": {"train": odd}}
        file.write_text(json.dumps(content))
    file.write_text(json.dumps(content | {"failed": odd}))
    assert shown(capsys, "--show", "--page", "page")[0] == 0
    page = Path("page/index.html").read_text()
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("v\\x1b[2J\\u202e&lt;b&gt;") >= 3


def test_the_results_of_a_stranger_write_nothing_outside_of_the_results(path, instant, capsys):
    finished(capsys)
    shutil.move("mine", "theirs")
    file = Path("theirs/news/ce-learning_rate0.001-seed1.validation.beam2.json")
    file.write_text(file.read_text().replace('"validation"', '"x/../../../outside/evil"'))
    code, _, err = shown(capsys, "--show", "--resume", "theirs")
    assert code == 2
    assert f"{file} is not a result of a study: split has a value that no study writes." in err
    evil = Training("news", "ce", (), 1, "x/../../../outside/evil")
    Path("mine/news/ce-seed1.x").mkdir(parents=True)
    Path("outside").mkdir()
    with pytest.raises(
        UserError, match=r"ce-seed1\.x/.*evil\.beam2\.json' is not the name of a file or folder in mine"
    ):
        ResultFolder(Path("mine"), plan.read(path)).write(DecodingResult(evil, "beam2", {}))
    assert not list(Path("outside").iterdir())
    file.unlink()
    file.symlink_to(Path("mine.toml").resolve())
    assert shown(capsys, "--show", "--resume", "theirs")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed_part",
    few(
        ["train data", "model: config.json"],
        ["train data", "validation data", "train tokens", "model: weights", "model: config.json", "teacher: x"],
    ),
)
def test_a_training_of_other_things_than_those_before_is_refused_before_its_result_is_saved(
    changed_part, path, instant, capsys
):
    instant.made_of = {changed_part: "before"}
    shown(capsys, "--share", "1/2")
    count = len(list(Path("mine").glob("*/*seed*")))
    instant.made_of = {changed_part: "after", "plugin objective own": "only some rows have it"}
    code, _, err = shown(capsys)
    assert code == 2
    assert f"were made from different inputs, so they cannot be compared:\n  {changed_part}: before → after\n" in err
    assert "Undo the change, and delete the result and the run made after it; or start again with" in err
    assert len(list(Path("mine").glob("*/*seed*"))) == count
    instant.made_of = {changed_part: "before"}
    for run_of in Path("runs/mine").glob("*/*/run"):
        if "after" in (run_of / "prepared.json").read_text():
            shutil.rmtree(run_of.parent)
    assert shown(capsys)[0] == 0


def test_rows_differ_in_what_their_own_settings_choose_and_in_nothing_else():
    def raises(changes, own):
        """Whether a row that is made of other things, with other settings, cannot be compared with the baseline."""
        results = {}
        for row, facts, made_of in (("ce", {}, {}), ("other", own, changes)):
            base = {"train data": "t", "train tokens": "k", "model: weights": "w", "model: config.json": "c"}
            result = DecodingResult(Training("news", row, (), 11, TEST), "beam2", facts, made_of=base | made_of)
            results[result.key] = result
        try:
            _raise_unless_alike(results, {})
        except UserError:
            return True
        return False

    assert raises({"train tokens": "l"}, {})
    assert not raises({"train tokens": "l"}, {"data.max_source": 9})
    assert raises({"train data": "u"}, {"data.max_source": 9})
    assert not any(raises({"train data": "u"}, {key: "other"}) for key in (*recipe.affecting("rows"), "data.weights"))
    assert raises({"model: weights": "v"}, {"model.dropout": 0.1})
    assert not raises({"model: config.json": "d", "train data": "u"}, {"system.row": "other"})


def test_rows_of_a_system_have_the_same_data_with_every_seed_but_models_of_their_seed():
    def results(changes, **facts):
        pairs = [
            (11, {"train data": "t", "model: weights": "w"}),
            (12, {"train data": "t", "model: weights": "w"} | changes),
        ]
        facts = {"system.row": "simcls", **facts}
        made = [
            DecodingResult(Training("news", "simcls", (), seed, TEST), "b", facts, made_of=of) for seed, of in pairs
        ]
        return {result.key: result for result in made}

    _raise_unless_alike(results({"model: weights": "v"}, **{"made.ce": {}}), {})
    for changes, facts in (({"model: weights": "v"}, {}), ({"train data": "u"}, {"made.ce": {}})):
        with pytest.raises(UserError, match="cannot be compared"):
            _raise_unless_alike(results(changes, **facts), {})


def test_results_of_an_earlier_version_are_compared_with_those_of_this_one():
    training = Training("news", "ce", (), 11, TEST)
    made = [
        DecodingResult(training, "a", {}, made_of={"train": "t", "base": ""}),
        DecodingResult(training, "b", {}, made_of={"train data": "u"}),
    ]
    with pytest.raises(UserError, match="train data: t → u"):
        _raise_unless_alike({result.key: result for result in made}, {})


def test_a_run_that_does_not_say_what_it_is_made_of_is_refused(path, instant, capsys, monkeypatch):
    real = Instant._train
    monkeypatch.setattr(
        Instant, "_train", lambda self, *words: (real(self, *words), (Path(words[3]) / "prepared.json").unlink())
    )
    assert "does not say what it was trained on, so it cannot be compared" in shown(capsys)[2]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["auto", "bf16"])
def test_trainings_on_machines_that_choose_another_precision_are_not_compared(
    asked, path, instant, capsys, monkeypatch
):
    real = Instant._train

    def train(self, *words):
        real(self, *words)
        file = Path(words[3]) / "prepared.json"
        precision = "fp32" if "matches" in words[3] and asked == "auto" else "bf16"
        prepared = json.loads(file.read_text())
        prepared["made_of"]["precision of training"] = precision
        file.write_text(json.dumps(prepared))

    monkeypatch.setattr(Instant, "_train", train)
    code, _, err = shown(capsys)
    assert code == (2 if asked == "auto" else 0)
    assert ("cannot be compared" in err) == ("  precision of training: bf16 → fp32\n" in err) == (asked == "auto")
    results = ResultFolder(Path("mine"), study := plan.read(path)).read()
    assert page._settings(study.data("news"), results)["precision of training"] == "bf16"


def test_code_of_a_metric_that_changed_is_noticed(path, instant, capsys, monkeypatch):
    sources = iter(["first", *["second"] * 99])
    monkeypatch.setattr(type(own_results.METRICS), "origin", lambda self, name: "own.py" * (name == "shape"))
    monkeypatch.setattr(type(own_results.METRICS), "source", lambda self, name: next(sources))
    assert "plugin metric shape of the scores: first → second" in shown(capsys)[2]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["made_of", "signatures"])
def test_results_of_other_data_or_scored_otherwise_are_not_compared(part, path, instant, capsys):
    finished(capsys)
    file = Path("mine/news/ce-learning_rate0.001-seed1.validation.beam2.json")
    content = json.loads(file.read_text())
    content[part] = dict.fromkeys(content[part], "other")
    file.write_text(json.dumps(content))
    code, _, err = shown(capsys, "--show")
    assert code == 2
    assert "cannot be compared" in err


def test_rows_may_have_different_candidates_but_not_those_of_one_folder_before_and_after_they_were_written_again(path):
    study = plan.read(path)
    results = {}
    for seed, term, folder, key in (
        (11, "rank", "seen", "a"),
        (12, "prefer", "seen", "a"),
        (11, "rank", "unseen", "b"),
        (12, "prefer", "unseen", "b"),
    ):
        training = Training("news", f"{term}, {folder}", (), seed, TEST)
        facts = {"data.candidates": folder, "objective": training.objective}
        results[training, "beam2"] = DecodingResult(training, "beam2", facts, made_of={"train": "t", "candidates": key})
    _raise_unless_alike(results, {})
    again = next(reversed(results))
    results[again] = replace(results[again], made_of={"train": "t", "candidates": "c"})
    with pytest.raises(UserError, match="candidates: b → c") as raised:
        _raise_unless_alike(results, {})
    assert "seed 12" in str(raised.value)
    assert "fingerprint of unseen" in page._settings(study.data("news"), results)
    assert "fingerprint of seen" in page._settings(study.data("news"), results)


@pytest.mark.slow
def test_what_a_metric_cannot_read_stays_in_the_tables_and_options_of_a_set_mend_it(path, instant, capsys, monkeypatch):
    monkeypatch.setattr("study_results.WORDS", ["猫坐", "在垫", "子上", "下雨", "一整", "天价", "格上", "涨了"])
    note = "bleu: the tokenizer 13a does not split texts in scripts without spaces"
    changed(path, ('"task=translation"]', '"task=translation"]\nmetric_options = ["bleu.tokenize=13a"]'))
    code, text, err = shown(capsys)
    assert (code, err.count(note)) == (0, 1)
    pairs = text.partition("pairs: screened")[2]
    assert pairs.count(note) == 2  # screened and confirmed
    assert "A study names such options in metric_options of the set." in pairs
    assert shown(capsys, "--show", "--page", "page")[1].startswith(text.strip())
    assert note in Path("page/index.html").read_text()
    changed(path, ("bleu.tokenize=13a", "bleu.tokenize=zh"))
    assert "set.metric_options: ['bleu.tokenize=13a'] → ['bleu.tokenize=zh']" in shown(capsys, "--show")[2]
    text = whole(capsys, "--results", "a", "--runs", "b")
    assert note not in text
    assert "|tok:zh|" in text


@pytest.mark.slow
def test_prompts_of_all_rows_have_the_day_on_which_the_study_began(path, instant, capsys, monkeypatch):
    monkeypatch.setenv(TODAY, "2026-01-31")
    shown(capsys, "--share", "1/2")
    monkeypatch.setenv(TODAY, "2026-02-01")
    whole(capsys)
    assert len(instant.environments) == 2 * 19 * 3
    assert all(environment == {TODAY: "2026-01-31"} for environment in instant.environments)


# Several machines, and time


@pytest.mark.slow
def test_shares_of_machines_without_a_common_folder_are_merged_stage_by_stage(path, instant, capsys):
    alone = finished(capsys, "--results", "a", "--runs", "b")
    instant.started = []
    for _ in range(3):
        for number, other in ((1, 2), (2, 1)):
            merged = ["--resume", f"r{other}"] if Path(f"r{other}").exists() else []
            code, _, err = shown(
                capsys, "--share", f"{number}/2", "--results", f"r{number}", "--runs", f"m{number}", *merged
            )
            assert code in (0, 130), err
    assert whole(capsys, "--results", "r1", "--runs", "m1", "--resume", "r2") == alone
    trained = [tuple(words[3].split("/")[-3:]) for words in instant.started if words[0] == "train"]
    assert len(trained) == len({*trained}) == 2 * 19


def test_a_share_ends_where_it_needs_the_others(path, instant, capsys):
    code, _, err = shown(capsys, "--share", "1/2")
    assert code == 130
    assert "share 1 of 2 is done as far as the results allow; the rest is left to others" in err
    assert sum(words[0] == "train" for words in instant.started) == 4  # half of what is tuned, in two sets


def test_one_set_can_be_done_where_the_data_of_the_others_are_not(path, instant, capsys):
    changed(path, ("task=translation", 'task=translation", "data.name=nowhere.jsonl'))
    code, text, err = shown(capsys, "--only", "news")
    assert code == 130
    assert "--only news is done as far as the results allow" in err
    assert "corrected for 4 comparisons" in text
    assert sum(words[0] == "train" for words in instant.started) == 19
    assert not any("pairs" in word for words in instant.started for word in words)


@pytest.mark.slow
def test_a_training_that_another_process_has_is_left_to_it(path, instant, capsys, monkeypatch):
    place = Path("runs/mine/news/ce-learning_rate0.001-seed1")
    place.mkdir(parents=True)
    slept = []
    with lock_folder(place, wait=False) as _:
        monkeypatch.setattr(run.time, "sleep", lambda seconds: slept.append(seconds) or (len(slept) > 400 and _raise()))
        with pytest.raises(Killed):
            main(["study", "mine.toml"])
    assert "waiting for them" in capsys.readouterr().err
    assert not (place / "run").exists()
    assert (
        sum(words[0] == "train" for words in instant.started) == 19 + 3
    )  # all of the other set, the rest of this stage


def _raise():
    raise Killed


@pytest.mark.slow
def test_a_process_of_a_killed_study_is_left_to_end(path, instant, capsys, monkeypatch):
    running = Path("runs/mine/news/ce-learning_rate0.001-seed1/run")
    running.mkdir(parents=True)
    slept = []
    with lock_folder(running, wait=False):
        monkeypatch.setattr(run.time, "sleep", lambda seconds: slept.append(seconds) or (len(slept) > 400 and _raise()))
        with pytest.raises(Killed):
            main(["study", "mine.toml"])
    assert not any("news/ce-learning_rate0.001-seed1/" in " ".join(words) for words in instant.started)


def timed(result_folder, seconds):
    """Let every result of a folder say that training and decoding took so long."""
    for file in Path(result_folder).glob("*/*seed*.json"):
        content = json.loads(file.read_text()) | {"train_seconds": seconds, "write_seconds": seconds / 2}
        file.write_text(json.dumps(content))


def test_the_plan_estimates_from_what_is_finished(path, instant, capsys):
    main(["study", "mine.toml", "--show"])
    plan_of = capsys.readouterr().out.splitlines()
    assert plan_of[1] == "  news, R-2 of beam2: tune 0 of 4, screen 0 of 6, confirm 0 of 9 trainings done"
    assert plan_of[3] == "  38 trainings, 76 decodings; how long they take is not known before the first is finished"
    shown(capsys, "--share", "1/2")
    timed("mine", 60.0)
    main(["study", "mine.toml", "--show", "--parallel", "4"])
    plan_of = capsys.readouterr().out.splitlines()
    assert plan_of[1] == "  news, R-2 of beam2: tune 2 of 4, screen 0 of 6, confirm 0 of 9 trainings done"
    assert plan_of[3].endswith("about 17 minutes left")  # 34 × 2 minutes, four at a time


@pytest.mark.slow
def test_nothing_is_started_that_would_not_end_in_time(path, instant, capsys):
    shown(capsys, "--share", "1/2")
    timed("mine", 300.0)
    count = len(instant.started)
    code, _, err = shown(capsys, "--minutes", "9")  # a training and two decodings take ten
    assert code == 130
    assert "what is left does not fit into --minutes" in err
    assert len(instant.started) == count
    assert shown(capsys, "--minutes", "11")[0] == 0


@pytest.mark.slow
def test_at_the_end_of_the_time_processes_save_their_work(path, monkeypatch, capsys):
    asked = []

    class Slow:
        def __init__(self, arguments, log, environment):
            self.exitcode = None

        def terminate(self):
            asked.append(self)
            self.exitcode = 130

    monkeypatch.setattr(run, "start_process", Slow)
    began = time.monotonic()
    code, _, err = shown(capsys, "--minutes", "0.01", "--parallel", "3")
    assert time.monotonic() - began < 30
    assert (code, len(asked)) == (130, 3)
    assert "the time is up" in err
    assert not list(Path("mine").glob("*/*seed*"))


@pytest.mark.slow
def test_models_are_kept_or_deleted_and_checkpoints_are_deleted(path, instant, capsys):
    whole(capsys)
    assert len(list(Path("runs").glob("mine/*/*/run/model"))) == 38
    assert not list(Path("runs").glob("mine/*/*/run/checkpoints"))
    whole(capsys, "--results", "a", "--runs", "b", "--delete-models")
    assert not list(Path("b").glob("*/*/run/model"))
    assert len(list(Path("b").glob("*/*/run/log.jsonl"))) == 38
    assert whole(capsys, "--results", "a", "--runs", "b", "--delete-models")


@pytest.mark.slow
def test_options_of_the_command_reach_every_process(path, instant, capsys):
    Path("own.py").write_text("")
    whole(capsys, "--plugin", "own.py", "--trust-remote-code")
    assert all(words[-3:] == ["--plugin", "own.py", "--trust-remote-code"] for words in instant.started)


@pytest.mark.slow
def test_merged_results_replace_failures_and_nothing_else(path, instant, capsys):
    finished(capsys, "--results", "a", "--runs", "b")
    instant.failing = {"ce-learning_rate0.001-seed1": 1}
    shown(capsys, "--share", "1/2")
    failed, kept = (Path(f"mine/news/{name}.validation.beam2.json") for name in _tuned("ce", 0.001, "matches2", 0.001))
    assert json.loads(failed.read_text())["failed"]
    content = json.loads(kept.read_text()) | {"train_seconds": 77.0}
    kept.write_text(json.dumps(content))
    assert "results of a were merged into mine" in shown(capsys, "--show", "--resume", "a")[2]
    assert not json.loads(failed.read_text())["failed"]
    assert json.loads(kept.read_text())["train_seconds"] == 77.0
    assert whole(capsys) == whole(capsys, "--results", "a", "--runs", "b")


def _tuned(*rows):
    return [f"{row}-learning_rate{rate}-seed1" for row, rate in zip(rows[::2], rows[1::2], strict=True)]


@pytest.mark.slow
def test_the_time_of_a_continued_training_is_not_known(path, instant, capsys):
    begun = Path("runs/mine/news/ce-learning_rate0.001-seed1/run/checkpoints")
    (begun / "step-1").mkdir(parents=True)
    real = Instant._train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Instant, "_train", lambda self, *words: (shutil.rmtree(words[3], ignore_errors=True), real(self, *words))
        )
        whole(capsys)
    times = {
        name: json.loads(Path(f"mine/news/{name}.validation.beam2.json").read_text())["train_seconds"]
        for name in _tuned("ce", 0.001, "ce", 0.002)
    }
    assert [value is None for value in times.values()] == [True, False]


# The numbers


def two_sided_p(t, freedom):
    """P of Student's t in plain Python: the density integrated by the midpoint rule."""
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    steps, inside = 100_000, 0.0
    for step in range(steps):
        x = abs(t) * (step + 0.5) / steps
        inside += constant * (1 + x * x / freedom) ** (-(freedom + 1) / 2) * abs(t) / steps
    return 1 - 2 * inside


CRITICAL = {1: 12.706205, 2: 4.302653}
"""97.5% quantiles of Student's t."""


@pytest.mark.slow
def test_differences_intervals_and_holm_are_those_of_plain_python(path):
    _, rows = compared(path)
    chances = {}
    for (name, objective), row in rows.items():
        if objective == "ce":
            assert row.against == {}
            continue
        base, own = SCORES[name]["ce"], SCORES[name][objective]
        pairs = [own[seed] - base[seed] for seed in own if own[seed] is not None]
        mean, error = statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))
        freedom = len(pairs) - 1
        chances[name, objective] = two_sided_p(mean / error, freedom)
        assert row.against["difference"] == pytest.approx(mean)
        assert row.against["low"] == pytest.approx(mean - CRITICAL[freedom] * error, rel=1e-5)
        assert row.against["high"] == pytest.approx(mean + CRITICAL[freedom] * error, rel=1e-5)
        assert row.against["p"] == pytest.approx(chances[name, objective], abs=1e-6)
        assert row.smallest == pytest.approx(
            smallest_difference(statistics.stdev(pairs), len(pairs), level=0.05 / 4, power=0.8)
        )
    order, largest = sorted(chances, key=chances.get), 0.0
    assert len(order) == 4  # two rows in each of two sets
    for place, key in enumerate(order):
        largest = max(largest, min(1.0, chances[key] * (4 - place)))
        assert rows[key].against["p_holm"] == pytest.approx(largest, abs=1e-5)


def test_comparisons_that_are_still_to_come_count_in_the_correction(path):
    _, rows = compared(path, {"news": SCORES["news"], "pairs": {}})
    row = rows["news", "ce + matches(2)"]
    assert row.against["p_holm"] == pytest.approx(4 * row.against["p"])
    _, rows = compared(
        path, {"news": {row: dict([*seeds.items()][:1]) for row, seeds in SCORES["news"].items()}, "pairs": {}}
    )
    row = rows["news", "ce + matches(2)"]
    assert row.against["difference"] == pytest.approx(1.0)
    assert math.isnan(row.against["p"])
    assert math.isnan(row.against["p_holm"])
    assert math.isnan(row.smallest)


def test_a_seed_that_the_baseline_lacks_is_in_no_difference(path):
    rows = {**SCORES["news"], "ce": {**SCORES["news"]["ce"], 12: None}}
    _, found = compared(path, {**SCORES, "news": rows})
    row = found["news", "ce + matches(2)"]
    assert row.scores == SCORES["news"]["ce + matches(2)"]
    assert row.against["difference"] == pytest.approx(statistics.mean([21.0 - 20.0, 21.6 - 20.4]))
    assert found["news", "ce"].failed == {12: "no memory"}


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "level"), [(2, 0.05), (5, 0.05), (5, 0.05 / 9)])
def test_the_smallest_difference_is_found_in_four_of_five_trials(pairs, level):
    difference = smallest_difference(0.7, pairs, level=level)
    critical = {(2, 0.05): 12.706205, (5, 0.05): 2.776445, (5, 0.05 / 9): 5.447649}[pairs, level]
    chance, found, trials = random.Random(1), 0, 8000
    for _ in range(trials):
        drawn = [chance.gauss(difference, 0.7) for _ in range(pairs)]
        found += abs(statistics.fmean(drawn)) / (statistics.stdev(drawn) / math.sqrt(pairs)) > critical
    assert found / trials == pytest.approx(0.8, abs=0.015)
    assert math.isnan(smallest_difference(1.0, 1))


def test_documents_are_compared_over_all_seeds_that_both_rows_have(path, monkeypatch):
    seen = []
    real = tables.significance.compare
    monkeypatch.setattr(
        tables.significance, "compare", lambda systems, **options: seen.append(systems) or real(systems, **options)
    )
    _, rows = compared(path)
    base, matches = seen[0]
    mean = statistics.mean(SCORES["news"]["ce"].values())
    assert base["rouge2"] == pytest.approx([mean - 2, mean + 2, mean - 1, mean + 1])
    mean = statistics.mean(SCORES["news"]["ce + matches(2)"].values())
    assert matches["rouge2"] == pytest.approx([mean - 2, mean + 2, mean - 1, mean + 1])
    assert seen[3][1]["bleu"].statistics.tolist() == [[2.0] * 10] * 4  # two seeds of three, and sums of counts
    first = real(seen[0])["rouge2"][1]
    assert 0 < max(first.p_bootstrap, first.p_randomisation) <= rows["news", "ce + matches(2)"].p_documents <= 1


@pytest.mark.slow
def test_the_table_says_what_was_computed_and_how(path):
    study, rows = compared(path)
    every = [
        stages.stages(study, data, {}, dict.fromkeys(SCORES[data.name], ("train.learning_rate=0.001",)))
        for data in study.sets
    ]
    text = tables.as_text(tables.set_tables(study, every, made(study, SCORES)))
    row = rows["news", "ce + matches(2)"]
    line = next(line for line in text.splitlines() if line.startswith("ce + matches(2)"))
    assert f"21.57 ±{statistics.stdev([21.0, 22.1, 21.6]):.2f}" in line
    assert "+1.10" in line
    assert f"{row.smallest:.2f}" in line
    assert "ce + bag(2), seed 13 failed and is in no mean: no memory" in text
    assert "corrected for 4 comparisons" in text
    assert "paired t-test at 5% / 4 finds with a probability of 80%" in text
    assert text.count("| --- |") == 0
    shown = tables.set_tables(study, every, made(study, SCORES))
    assert tables.as_text(shown, markdown=True).count("| --- |") > 3


def test_lower_scores_are_better_where_the_score_says_so(path):
    study = plan.read(changed(path, ('primary = "rouge2"', 'primary = "wmd"\nmetric_options = ["wmd.vectors=v"]')))
    data = study.sets[0]
    chosen = {}
    results = {}
    for row, score in zip(study.objectives, (3.0, 2.0, 4.0, 1.0), strict=True):
        for seed in study.screening:
            training = Training("news", row, ("train.learning_rate=0.001",), seed, VALIDATION)
            for decoding in study.decodings:
                results[training, decoding] = DecodingResult(training, decoding, {}, scores={"wmd": score})
    for row in study.tuning.objectives:
        for rate, score in ((0.001, 2.0), (0.002, 3.0)):
            training = Training("news", row, (f"train.learning_rate={rate}",), 1, VALIDATION)
            for decoding in study.decodings:
                results[training, decoding] = DecodingResult(
                    training, decoding, {}, scores={"wmd": score if row == "ce" else 2 * rate}
                )
    chosen = stages.stages(study, data, results)
    assert chosen.settings["ce"] == ("train.learning_rate=0.001",)
    assert [*chosen.confirmed] == ["ce", "ce + matches(2)", "ce + bag(2)"]


# Other programs


@pytest.mark.slow
def test_show_needs_no_torch_and_no_model(path, instant, capsys):
    text = finished(capsys)
    program = "import sys; from ngramloss.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "study", "mine.toml", "--show"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert without_speeds(done.stdout).splitlines()[:20] == text.splitlines()[:20]


@pytest.mark.slow
def test_show_ends_with_the_error_that_a_run_begins_with_if_data_of_what_is_left_are_missing(path, instant, capsys):
    """A recipe of another folder names its data as seen from the folder in which the command runs."""
    Path("below/data").mkdir(parents=True)
    for split in ("train", "validation", "test"):
        Path(f"below/data/{split}.jsonl").write_text('{"source": "a", "target": "b"}\n')
    Path("below/small.toml").write_text('base = "demo"\n[data]\nname = "data"\n')
    changed(path, ('recipe = "demo"', 'recipe = "below/small.toml"'))
    for options in (["--show"], []):
        code, _, err = shown(capsys, *options)
        assert code == 2
        assert "error: set news: unknown data set 'data'." in err
        assert f"Files are looked up from {Path.cwd()}, where this command runs." in err
    assert shown(capsys, "--show")[1] == "There are no results yet.\n"
    Path("below/data").rename("data")
    text = whole(capsys)
    Path("data").rename("away")
    assert whole(capsys, "--show") == text  # nothing is left, so nothing is missing


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "comparisons"), [("ngram-terms", 9, 9), ("pairs", 10, 6)])
def test_the_results_of_our_studies_are_complete_and_of_their_files(name, rows, comparisons, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = plan.read(ROOT / f"studies/{name}.toml")
    assert (len(study.objectives), study.comparisons, len(study.confirmation)) == (rows, comparisons, 5)
    folder = ResultFolder(ROOT / "studies" / name, study)
    results = folder.read()
    for of_set in run.stages_of_sets(folder, results):
        for stage in of_set.all:
            assert all(stages.is_done(study, training, results) for training in stage.trainings)
            assert stage.trainings or not stage.planned


def test_the_study_of_rank_has_the_objectives_of_brio_and_rows_that_differ_in_their_candidates_only(monkeypatch):
    monkeypatch.chdir(ROOT)
    study = plan.read(ROOT / "studies" / "rank.toml")
    (data,) = study.sets
    rows = {name: study.recipe(Training(data.name, name, (), 11, TEST)) for name in study.objectives}
    brio = {name: row for name, row in rows.items() if name.startswith("BRIO for ")}
    for name, row in brio.items():
        assert row.objective == recipe.load("brio-xsum" if "XSum" in name else "brio-cnndm").objective
        assert (row.train.learning_rate == 2e-5) == name.endswith("2e-5")
    assert len(brio) == 3
    assert study.baseline == "ce"
    (change,) = recipe.differences(rows["ce + 0.1*rank, unseen"], rows["ce + 0.1*rank, seen"])
    assert change.partition(":")[0] == "data.candidates"
    assert {row.data.leave_out for row in rows.values()} == {"2/2"}
    assert {row.train.max_steps for name, row in rows.items() if name != "as it was"} == {288}


TINY = (
    "model.width=16", "model.heads=2", "model.feed_forward=16", "model.encoder_layers=1", "model.decoder_layers=1",
    "model.vocabulary=400", "data.limit=40", "data.validation_limit=4", "data.max_source=48", "data.max_target=16",
    "train.max_steps=3", "train.warmup_steps=0", "train.log_every=1", "train.eval_every=0", "generation.max_length=12",
)  # fmt: skip
SMALL = f"""
title = "Does a tiny model gain?"
recipe = "demo"
objectives = ["ce", "ce + matches(2)"]

[seeds]
screening = [1]
confirmation = [11, 12]

[decodings]
beam2 = ["generation.num_beams=2"]

[[set]]
name = "newswire"
primary = "rouge1"
decoding = "beam2"
limit = 5
set = {json.dumps(TINY)}
"""
KILLED = """
import os, signal, sys
from ngramloss import cli
from ngramloss.study import run
from ngramloss.study.results import ResultFolder

def killed(owner, name, count):
    real, calls = getattr(owner, name), []
    def some(*arguments):
        calls.append(0)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    setattr(owner, name, some)
{kill}
sys.exit(cli.main(["study", "mine.toml", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_real_study_that_is_killed_or_shared_ends_with_the_same_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(SMALL)

    def begun(*arguments, kill=""):
        program = f"import os; os.chdir({str(tmp_path)!r})\n" + KILLED.replace("{kill}", kill)
        return fork(program, list(arguments), environment=dict(os.environ))

    def study(*arguments, kill=""):
        process = begun(*arguments, kill=kill)
        out, err = process.communicate()
        return process.returncode, out, err

    code, _, err = study("--results", "a", "--runs", "b", "--parallel", "2")
    assert code == 0, err
    kills = ["killed(run.Loop, '_start_next', 2)", "killed(run, 'score_texts', 2)", "killed(ResultFolder, 'write', 3)"]
    for kill in [*kills, "killed(run.Loop, '_advance', 3)"]:
        code, _, err = study(kill=kill)
        assert code in (-signal.SIGKILL, 0), err
    assert study()[0] == 0

    def numbers(folder):
        content = {}
        for file in Path(folder).glob("*/*seed*.json"):
            one = json.loads(file.read_text())
            content[file.name] = {key: one[key] for key in ("scores", "documents", "facts", "signatures", "made_of")}
            content[file.name]["texts"] = re.sub(r"weights:\w+", "", one["generation"])
        return content

    assert numbers("mine") == numbers("a")
    together = [begun("--results", "c", "--runs", "d") for _ in range(2)]
    assert [process.wait() for process in together] == [0, 0]
    assert numbers("c") == numbers("a")
    logs = [path.read_text() for path in Path("d").glob("*/*/train.log")]
    assert [text.count("finished at step") for text in logs] == [1] * 6
    assert len(numbers("a")) == 6

    def table(*options):
        code, text, _ = shown(capsys, "--show", *options)
        return code, text.partition("newswire: all scores")[0]

    assert table() == table("--results", "a")
    assert any(value for one in numbers("a").values() for value in one["scores"].values())


def ended(process):
    while process.exitcode is None:
        time.sleep(0.05)
    return process.exitcode


@pytest.mark.slow
def test_a_real_process_runs_the_command(tmp_path):
    log = tmp_path / "log"
    assert ended(run.start_process(["--version"], log)) == 0
    assert log.read_text().startswith("ngramloss ")
    plugin = tmp_path / "own.py"
    plugin.write_text("import os\nprint(os.environ['OWN'])\n")
    assert (
        ended(run.start_process(["list", "objectives", "--plugin", str(plugin)], log, {"OWN": "of this process"})) == 0
    )
    assert "of this process" in log.read_text()
    assert ended(run.start_process(["score", str(tmp_path / "nothing")], log)) == 2
    assert "\nerror: " in log.read_text()  # behind what was there


@pytest.mark.slow
def test_a_process_is_warm_and_its_commands_are_its_own(tmp_path):
    """What is imported once is there in every process, and one process changes nothing for the next."""
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "import os, sys\n"
        "print('transformers.modeling_utils' in sys.modules, 'torch' in sys.modules, hasattr(sys, 'seen'))\n"
        "import torch\n"
        "print(torch.cuda.is_initialized(), os.getcwd())\n"
        "sys.seen = True\n"
    )
    log = tmp_path / "log"
    for _ in range(2):
        assert ended(run.start_process(["list", "objectives", "--plugin", str(plugin)], log)) == 0
    lines = log.read_text().splitlines()
    warm = sys.platform == "linux"
    assert lines.count(f"{warm} {warm} False") == 2
    assert lines.count(f"False {Path.cwd()}") == 2


@pytest.mark.slow
def test_a_process_that_is_asked_to_stop_has_the_exit_code_of_that(tmp_path):
    plugin = tmp_path / "own.py"
    plugin.write_text("print('begun', flush=True)\nimport time\ntime.sleep(600)\n")
    log = tmp_path / "log"
    for end in ("terminate", "kill"):
        process = run.start_process(["list", "objectives", "--plugin", str(plugin)], log)
        while not log.exists() or "begun" not in log.read_text():
            time.sleep(0.05)
        getattr(process, end)()
        assert ended(process) == {"terminate": -signal.SIGTERM, "kill": -signal.SIGKILL}[end]
        log.unlink()


def test_metrics_are_named_before_anything_is_scored(path, instant, capsys):
    finished(capsys)
    path.write_text(path.read_text().replace("confirm = 2\n", 'confirm = 2\nmetrics = ["chrf"]\n'))
    with pytest.raises(UserError, match=r"metrics: \[\] → \['chrf'\]"):
        ResultFolder(Path("mine"), plan.read(path)).read()


COUNTING = """
import os, ngramloss as ng
def slow(predictions, *, word: str = "a"):
    with open("computed", "a") as file:
        print(os.getpid(), file=file)
    return ng.Scores({"slow": [float(len(text) + len(word)) for text in predictions]}, f"slow|word:{word}")
ng.METRICS["slow"] = ng.Metric(slow, reads=("predictions",), options={"word": ng.Setting("a")})
"""


@pytest.mark.slow
def test_a_metric_that_takes_long_is_computed_once_by_a_process_of_its_own(tmp_path, monkeypatch):
    """Or all trainings would wait while one is scored."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(COUNTING)
    metrics = 'metrics = ["slow"]\nmetric_options = ["slow.word=abc"]\n'
    Path("mine.toml").write_text(SMALL.replace("limit = 5\n", metrics + "limit = 5\n", 1))
    program = "import os, sys; from ngramloss import cli; sys.exit(cli.main(sys.argv[1:]))"
    process = fork(program, ["study", "mine.toml", "--plugin", "own.py"], environment=dict(os.environ))
    process.communicate()
    assert process.returncode == 0
    computed = [int(number) for number in Path("computed").read_text().split()]
    assert process.pid == computed[0], "the metric is tried before anything is trained"
    assert process.pid not in computed[1:]
    assert len(computed[1:]) == 6
    for file in Path("mine/newswire").glob("*seed*.json"):
        result = json.loads(file.read_text())
        assert result["scores"]["slow"] > 0
        assert result["signatures"]["slow"] == "slow|word:abc"
