"""reproduce --systems: other systems as rows of Table 2, with what is made before them, each once."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from in_process import processes_run_here

from ngramloss import cli, recipe
from ngramloss.errors import UserError
from ngramloss.scoring import paper
from ngramloss.storage.files import lock_folder
from ngramloss.study import reproduce, run
from ngramloss.study import system_rows as rows
from ngramloss.training import runner
from ngramloss.training.run import run_of
from ngramloss.training.system_registry import SYSTEMS, System

pytestmark = pytest.mark.usefixtures("own_cache")

FEW_STEPS = ["train.max_steps=2", "train.warmup_steps=0", "train.eval_every=0", "train.log_every=1"]
TINY = ["model.width=16", "model.feed_forward=16", "model.heads=2", "model.vocabulary=400"]
OF_SYSTEMS = {
    "bertsum_abs": ["train.encoder_warmup_steps=0", "generation.max_length=12"],
    "simcls": TINY,
    "bertsum_ext": TINY,
    "pointer_generator": ["model.width=8", "model.vocabulary=300"],
    "fes": [*TINY, "generation.max_length=12"],
    "lm": TINY,
    "prophetnet": [*TINY, "generation.max_length=12"],
    "gsum": [*TINY, "generation.max_length=12"],
    "parallel": TINY,
}
"""System → what makes it tiny. Another one is trained as its small recipe says."""


def planned(folder, systems, *overrides, table="table2", data="newswire", **options):
    return reproduce.make_plan(table, folder, data=data, systems=systems, overrides=overrides, **options)


def settings_of(plan, row, seed=1):
    return plan.study.recipe(next(one for one in plan.trainings if (one.objective, one.seed) == (row, seed)))


# The plan


def test_all_systems_are_rows_after_the_objectives(tmp_path):
    names = rows.chosen("all")
    plan = planned(tmp_path, names, data="xsum", seeds=2)
    assert names == [name for name in SYSTEMS if name != "drafter"]
    with pytest.raises(UserError, match="drafter writes no texts of its own"):
        rows.chosen("drafter")
    assert plan.study.objectives == (*paper.objectives("table2"), *names)
    assert plan.study.comparisons == len(plan.study.objectives) - 1
    assert plan.baselines == ("lead-3", "ext-oracle")
    assert [one.name for one in plan.trainings[-2:]] == [f"{names[-1]}-seed1", f"{names[-1]}-seed2"]


def test_every_system_of_the_papers_table_that_is_here_has_its_values_beside_it(tmp_path):
    ours = {row.system for row in paper.TABLE2["cnn_dailymail"] if row.system}
    assert {"simcls", "bertsum_abs"} <= ours & {*SYSTEMS}
    assert {*SYSTEMS} - ours <= {"bertsum_ext", "drafter", "parallel"}
    printed = reproduce._printed(planned(tmp_path, ["simcls"], data="xsum"))
    assert printed["simcls"] == ("SimCLS", (47.61, 24.57, 39.44))


def test_without_systems_the_plan_is_what_it_was(tmp_path):
    plan = planned(tmp_path, [], data="xsum")
    assert (plan.study.systems, plan.study.objectives) == ({}, tuple(paper.objectives("table2")))
    assert plan.baselines == ("lead-3",)
    assert not any("system" in note.lower() for note in plan.notes)


def test_a_system_reads_the_runs_of_its_own_seed(tmp_path):
    plan = planned(tmp_path, ["simcls", "bertsum_abs"], data="xsum", seeds=2)
    home = tmp_path / "xsum"
    for seed in (1, 2):
        assert settings_of(plan, "bertsum_abs", seed).model.encoder == str(home / f"bertsum_ext-seed{seed}/run/model")
        splits = [f"{split}={home}/ce-seed{seed}/candidates-{split}" for split in ("train", "validation")]
        assert settings_of(plan, "simcls", seed).data.candidates == ",".join(splits)
        assert settings_of(plan, "simcls", seed).train.seed == seed
    assert "bertsum_ext" in plan.study.systems
    assert "bertsum_ext" not in plan.study.objectives


def test_an_option_of_a_system_may_name_a_run(tmp_path, monkeypatch):
    entry = System("x", ("bertsum-ext", "bertsum-ext-demo"), first={"system.layers": "{bertsum_ext}"})
    monkeypatch.setitem(SYSTEMS._added, "mine", entry)
    row = rows.SystemRow(recipe.load("bertsum-ext-demo"), entry.first, tmp_path, True)
    assert row.made == [rows.Needed("bertsum_ext")]
    (setting,) = row.settings(lambda made: Path("runs") / made.row)
    assert setting.endswith(',min_words=0,layers=runs/bertsum_ext)"')
    assert rows.with_needed(["mine"]) == ["mine", "bertsum_ext"]


def test_recipes_are_the_published_ones_or_the_small_ones_with_the_published_objective(tmp_path):
    large, small = planned(tmp_path, ["bertsum_abs"], data="cnndm"), planned(tmp_path, ["bertsum_abs"])
    apart = recipe.differences(recipe.load("bertsum-abs"), settings_of(large, "bertsum_abs"))
    assert [line.partition(":")[0] for line in apart] == ["model.encoder", "train.seed"]
    apart = recipe.differences(recipe.load("bertsum-abs-demo"), settings_of(small, "bertsum_abs"))
    assert [line.partition(":")[0] for line in apart] == ["objective", "model.encoder", "train.seed"]
    assert settings_of(small, "bertsum_abs").objective == "ce(smoothing=0.1)"


def test_on_other_data_than_cnndm_the_settings_are_those_for_xsum(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"source": "a", "target": "b"}\n')
    for data in ("xsum", str(tmp_path)):
        settings = settings_of(planned(tmp_path, ["bertsum_abs", "simcls"], data=data, model="m"), "bertsum_abs")
        assert (settings.data.name, settings.generation.min_length) == (data, 20)
    assert settings_of(planned(tmp_path, ["simcls"], data="xsum"), "simcls").data.max_target == 80
    assert settings_of(planned(tmp_path, ["simcls"], data="cnndm"), "simcls").data.max_target == 120


def test_settings_of_the_data_are_passed_on_and_the_others_are_named(tmp_path):
    plan = planned(tmp_path, ["bertsum_ext"], "data.limit=40", "train.max_steps=2", "bertsum_ext.train.max_steps=3")
    settings = settings_of(plan, "bertsum_ext")
    assert (settings.data.limit, settings.train.max_steps) == (40, 3)
    assert plan.set.base.train.max_steps == 2
    told = "Not passed on to systems: train.max_steps=2. For one of them: --set bertsum_ext.train.max_steps=2"
    assert told in plan.notes
    assert "bertsum_ext.train.max_steps=3, not its recipe's" in reproduce.deviations(plan)


def test_data_without_a_validation_split_train_a_reranker_without_it(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"source": "a", "target": "b"}\n')
    plan = planned(tmp_path / "runs", ["simcls"], data=str(tmp_path), model="m")
    assert settings_of(plan, "simcls").data.candidates.endswith("/ce-seed1/candidates-train")


@pytest.mark.parametrize(
    ("systems", "overrides", "options", "told"),
    [
        (["simcls"], (), {"table": "table3"}, "--systems adds rows only to table2, not to table3"),
        (["simcls"], (), {"table": "cases"}, "--systems adds rows only to table2, not to cases"),
        (["simcls"], ("bertsum_ext.train.max_steps=2",), {}, "bertsum_ext is not one of --systems"),
        (["bertsum_abs"], ("bertsum_abs.model.encoder=x",), {}, "--set bertsum_abs.model.encoder=x: reproduce chooses"),
        (["bertsum_ext"], ("bertsum_ext.train.seed=3",), {}, "train.seed=3: reproduce chooses it"),
        (["bertsum_ext"], ("bertsum_ext.train.zzz=3",), {}, "(?s)^bertsum_ext: .*train.zzz: unknown"),
        (["bertsum_ext"], ("bertsum_ext.train.fsdp=true",), {}, "train.fsdp: is not a setting of bertsum_ext"),
        (["bertsum_ext"], (), {"data": "multi30k"}, "bertsum_ext is not for translation. Choose from fes, "),
        (["bertsum_ext", "bertsum_abs"], (), {"data": "multi30k"}, "bertsum_ext, bertsum_abs are not for translation"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, systems, overrides, options, told):
    with pytest.raises(ValueError, match=told):
        planned(tmp_path, systems, *overrides, **options)


def test_a_folder_with_a_comma_is_refused_where_files_are_listed_with_commas(tmp_path):
    with pytest.raises(ValueError, match="it must not have a comma"):
        planned(tmp_path / "a,b", ["simcls"])
    assert planned(tmp_path / "a,b", ["bertsum_ext"]).systems == ("bertsum_ext",)


def test_translations_may_be_reranked(tmp_path):
    plan = planned(tmp_path, ["simcls"], data="multi30k")
    assert settings_of(plan, "simcls").task == "translation"
    assert plan.baselines == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [("simcs", "unknown system 'simcs'. Did you mean 'simcls'"), ("all,simcls", "give all, or names, not both")],
)
def test_names_of_systems_are_checked(text, told, capsys):
    assert cli.main(["reproduce", "table2", "--data", "newswire", "--systems", text]) == 2
    assert told in capsys.readouterr().err


def test_the_other_tables_refuse_systems_on_the_command_line(capsys, tmp_path):
    for table in ("table1", "table3"):
        words = ["reproduce", table, "--data", "newswire", "--systems", "simcls", "--runs", str(tmp_path / "x")]
        assert cli.main(words) == 2
        assert f"--systems adds rows only to table2, not to {table}" in capsys.readouterr().err


def test_the_facts_of_a_row_have_all_that_is_made_before_it(tmp_path):
    def facts(*overrides):
        plan = planned(tmp_path, ["bertsum_abs", "simcls"], *overrides)
        found = {one.objective: plan.study.facts(one, plan.set.decoding) for one in plan.trainings}
        assert json.loads(json.dumps(found)) == found
        return found

    usual = facts()
    assert facts("bertsum_ext.train.max_steps=7")["bertsum_abs"] != usual["bertsum_abs"]
    assert facts("train.max_steps=7")["simcls"] != usual["simcls"], "its writer is another one"
    assert facts("data.validation_limit=7")["simcls"]["made.validation"] != usual["simcls"]["made.validation"]
    assert facts("train.max_steps=7")["bertsum_abs"] == usual["bertsum_abs"]


# Whole runs


@pytest.fixture
def started(monkeypatch):
    """Processes of the study run here; the arguments of each."""
    return processes_run_here(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small model that is fine-tuned; it writes a few words, so that candidates have an order."""
    folder = tmp_path_factory.mktemp("base") / "base"
    small = ["model.width=32", "model.feed_forward=32", "model.heads=2", "model.vocabulary=1000", "data.limit=100"]
    steps = ["train.max_steps=20", "train.warmup_steps=2", "train.eval_every=0", "train.batch_size=8"]
    lengths = ["data.max_source=48", "data.max_target=16", "generation.max_length=16"]
    settings = recipe.load("demo", ["objective=ce", "train.learning_rate=1e-2", *small, *steps, *lengths])
    assert runner.train(run_of(settings), folder).finished
    return str(folder / "model")


def again(folder, model, systems, *arguments, seeds=1):
    settings = [*FEW_STEPS, "data.limit=30", "data.validation_limit=8", "generation.max_length=16"]
    for name in rows.with_needed(rows.chosen(systems)):
        settings += [f"{name}.{setting}" for setting in (*FEW_STEPS[:3], *OF_SYSTEMS.get(name, []))]
    where = ["--runs", str(folder / "runs"), "-o", str(folder / "page"), "--model", model]
    words = ["reproduce", "table2", "--data", "newswire", "--objectives", "ce", "--systems", systems, *where]
    words += ["--limit", "5", "--seeds", str(seeds), *arguments]
    return cli.main([*words, *(word for setting in settings for word in ("--set", setting))])


def scored(out, row):
    """The R-1 of a row in the table of all scores."""
    table = out.partition(": all scores of")[2]
    found = re.search(rf"^{re.escape(row)} +(\d+\.\d\d)", table, re.M)
    return float(found[1]) if found else None


@pytest.mark.slow
def test_every_row_is_trained_written_and_scored(tmp_path, base, capsys, started):
    assert again(tmp_path, base, "all") == 0, capsys.readouterr().err
    out, _ = capsys.readouterr()
    for row in ("lead-2", "ext-oracle", "ce", *(name for name in SYSTEMS if SYSTEMS[name].writes)):
        assert scored(out, row) is not None, row
    assert "the paper, on CNN/DailyMail" in out
    assert re.search(r"^simcls .* SimCLS +46\.67 +22\.15 +43\.54", out, re.M)
    assert re.search(r"^bertsum_ext .*[^-]$", out, re.M)
    trained = [Path(words[words.index("--run") + 1]).parent.name for words in started if words[0] == "train"]
    assert len(trained) == len({*trained}), "each training once, whoever needs it"
    assert trained.index("bertsum_ext-seed1") < trained.index("bertsum_abs-seed1")
    page = (tmp_path / "page" / "index.html").read_text()
    assert all(name in page for name in ("simcls", "BertSumExtAbs", "ext-oracle"))
    started.clear()
    assert again(tmp_path, base, "all") == 0
    assert started == []
    assert capsys.readouterr().out == out


@pytest.mark.slow
def test_seeds_are_means_with_tests_against_the_first_row(tmp_path, base, capsys, started):
    assert again(tmp_path, base, "bertsum_abs", seeds=2) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "R-2 of greedy, 2 seeds" in out
    assert re.search(r"^bertsum_abs +2 ", out, re.M)
    values = [
        json.loads((tmp_path / f"runs/newswire/bertsum_abs-seed{seed}/run/scores.json").read_text())["scores"]["chrf"]
        for seed in (1, 2)
    ]
    page = (tmp_path / "page" / "index.html").read_text()
    assert f"{sum(values) / 2:.2f}" in page, "runs of a system are one row, although each names another encoder"
    rows_of_page = {path.name for path in (tmp_path / "runs" / "newswire").iterdir()}
    assert rows_of_page == {f"{row}-seed{seed}" for row in ("ce", "bertsum_ext", "bertsum_abs") for seed in (1, 2)}
    assert scored(out, "bertsum_ext") is None, "it was only needed"
    capsys.readouterr()
    plain = ["reproduce", "table2", "--data", "newswire", "--objectives", "ce", "--model", base, "--limit", "5"]
    plain += ["--runs", str(tmp_path / "runs"), "-o", str(tmp_path / "other"), "--seeds", "2"]
    few = [*FEW_STEPS, "data.limit=30", "data.validation_limit=8", "generation.max_length=16"]
    assert cli.main([*plain, *(word for setting in few for word in ("--set", setting))]) == 0
    assert scored(capsys.readouterr().out, "bertsum_abs") is None, "results of systems are left alone"


@pytest.mark.slow
def test_a_step_that_fails_is_named_and_the_other_rows_go_on(tmp_path, base, capsys, started, monkeypatch):
    real = run.start_process

    def failing(arguments, log, _):
        fails = arguments[0] == "train" and "bertsum_ext-seed1" in arguments[1]
        process = real(["list", "objectives"] if fails else arguments, log, {})
        if fails:
            log.write_text("error: the disk is full.\n")
            process.exitcode = 1
        return process

    monkeypatch.setattr(run, "start_process", failing)
    assert again(tmp_path, base, "simcls,bertsum_abs") == 1
    out = capsys.readouterr().out
    assert "bertsum_abs, seed 1 failed and is in no mean: train bertsum_ext: the disk is full." in out
    assert scored(out, "simcls") is not None
    assert scored(out, "bertsum_abs") is None
    monkeypatch.setattr(run, "start_process", real)
    started.clear()
    assert again(tmp_path, base, "simcls,bertsum_abs") == 0
    assert [words[0] for words in started] == ["train", "train", "generate"], "only what was missing"


class _Killed(BaseException):
    """Stands in for a kill: nothing after it is done."""


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_step_continues(tmp_path, base, capsys, monkeypatch, started):
    real, done = run.start_process, []

    def killing(arguments, log, _):
        process = real(arguments, log, {})
        done.append(arguments[0])
        if len(done) % 2:  # after every other step
            raise _Killed
        return process

    monkeypatch.setattr(run, "start_process", killing)
    for _ in range(20):
        with contextlib.suppress(_Killed):
            if again(tmp_path, base, "simcls") == 0:
                break
    out = capsys.readouterr().out
    assert scored(out, "simcls") is not None
    assert done == ["train", "generate", "candidates", "candidates", "train", "generate"], "none of them twice"


@pytest.mark.slow
def test_what_several_rows_need_is_not_made_by_two_loops_at_once(tmp_path, base, capsys, started, monkeypatch):
    place = tmp_path / "runs" / "newswire" / "bertsum_ext-seed1"
    place.mkdir(parents=True)
    waited = []

    def sleep(_):
        waited.append(len(started))
        if len(waited) > 50:
            raise _Killed

    monkeypatch.setattr(run.time, "sleep", sleep)
    with lock_folder(place, wait=False), pytest.raises(_Killed):
        again(tmp_path, base, "bertsum_abs")
    assert [words[0] for words in started] == ["train", "generate"], "those of ce"
    assert "other processes are at the trainings that are left" in capsys.readouterr().err


@pytest.mark.slow
def test_candidates_of_other_settings_are_not_taken(tmp_path, base, capsys, started):
    assert again(tmp_path, base, "simcls") == 0, capsys.readouterr().err
    for file in (tmp_path / "runs" / "results").rglob("simcls*"):
        file.unlink()
    (tmp_path / "runs/newswire/ce-seed1/candidates-train.json").write_text('["--split", "train", "--count", "3"]')
    assert again(tmp_path, base, "simcls") == 2
    assert (
        "were not generated with --split train --count 8 --limit 30, which the study now asks for"
        in capsys.readouterr().err
    )
