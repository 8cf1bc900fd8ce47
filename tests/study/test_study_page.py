"""The page of a study: the plot has the numbers of the tables, all that is known is there, and a browser shows it.

Studies are made as in test_study.py, in no time; the browser is that of test_page.py.
"""

# ruff: noqa: F401, F811 -- fixtures of other modules

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from browsers import browser, visit, written
from page_data import HOSTILE
from places import ROOT
from study_results import SCORES, STUDY, changed, compared, instant, made, path, shown

from ngramloss.cli import main
from ngramloss.report import forest
from ngramloss.study import page, plan, stages, tables
from ngramloss.study.plan import TEST, VALIDATION, Training
from ngramloss.study.results import DecodingResult

pytestmark = pytest.mark.usefixtures("own_cache")

SETTING = ("train.learning_rate=0.001",)
STEADY = {
    "news": {
        "ce": {11: 20.0, 12: 21.0, 13: 20.4},
        "ce + matches(2)": {11: 21.0, 12: 22.0, 13: 21.401},
        "ce + rewards(2)": {11: 20.1, 12: 20.8, 13: 20.9},
    },
    "pairs": {"ce": {11: 30.0, 12: 31.0, 13: 32.0}},
}


def stages_of(study, scores, results=None):
    return [
        stages.stages(study, data, results or {}, dict.fromkeys(scores[data.name], SETTING) if scores else None)
        for data in study.sets
    ]


def text_of(study, every, results, runs="nowhere"):
    """The page as text, without the markup of drawings and without entities."""
    sets = tables.set_tables(study, every, results)
    written = page.write_page(study, every, results, sets, Path(runs), Path("page"))
    assert written == Path("page/index.html")
    return unescape(written.read_text())


def confirmed(path, scores=SCORES, **options):
    study = plan.read(path)
    return text_of(study, stages_of(study, scores), made(study, scores), **options)


def section(text, name):
    return re.search(rf'<section id="{name}".*?</section>', text, re.S)[0]


def screened(study, scores):
    """Results of the tuning and of the screening: row → a score for each screening seed of the first set."""
    results = {}
    for row, values in scores.items():
        for seed, score in zip(study.screening, values, strict=True):
            settings = [*study.sets[0].grid] if seed == 1 and row in study.tuning.objectives else [SETTING]
            for setting in settings:
                training = Training("news", row, setting, seed, VALIDATION)
                for decoding in study.decodings:
                    value = score if setting == SETTING else score - 1
                    results[training, decoding] = DecodingResult(
                        training, decoding, {}, scores={"rouge2": value}, count=8
                    )
    return results


# What is drawn


@pytest.fixture
def drawn(monkeypatch):
    """The rows of each forest plot."""
    plots = []
    monkeypatch.setattr(
        page,
        "draw_forest",
        lambda rows, name, **options: plots.append(rows) or forest.draw_forest(rows, name, **options),
    )
    return plots


@pytest.mark.slow
def test_the_plot_has_the_differences_of_the_table_their_intervals_and_those_of_each_seed(path, drawn):
    _, rows = compared(path)
    confirmed(path)
    news, pairs = drawn  # R-2 and BLEU have no common axis
    assert [row.label for row in news] == ["ce", "ce + matches(2)", "ce + rewards(2)"]
    assert [row.is_first for row in news] == [True, False, False]
    assert {row.data for row in news} == {"news, R-2 of beam2"}
    row, test = news[1], rows["news", "ce + matches(2)"].against
    assert (row.difference, row.difference_low, row.difference_high) == (test["difference"], test["low"], test["high"])
    assert row.difference_runs == pytest.approx([1.0, 1.1, 1.2])
    assert row.runs == [21.0, 22.1, 21.6]
    assert row.low < row.value < row.high
    assert pairs[2].runs == [29.0, 31.2], "the third seed failed"


@pytest.mark.slow
def test_a_mark_stands_for_a_p_that_is_corrected_for_all_sets(path, drawn):
    text = confirmed(path, STEADY)
    assert [row.mark for row in drawn[0]] == ["", "**", ""]
    assert (
        "1 of 2 comparisons with ce is significant at 5% (Holm): ce + matches(2) is better on news (+1.00 R-2)." in text
    )
    confirmed(path)
    assert drawn[-2][1].mark == "*", "its p is 0.3%, and one of four"
    noise = {**STEADY, "news": {row: STEADY["news"][row] for row in ("ce", "ce + rewards(2)")}}
    assert "None of 1 comparison with ce is significant at 5% (Holm). 3 more are planned." in confirmed(path, noise)


def test_worse_is_said_and_lower_may_be_better(path):
    worse = {**STEADY["news"], "ce + matches(2)": {11: 18.0, 12: 19.0, 13: 18.401}}
    text = confirmed(path, {**STEADY, "news": worse})
    assert (
        "1 of 2 comparisons with ce is significant at 5% (Holm): ce + matches(2) is worse on news (−2.00 R-2)." in text
    )
    assert "ce + matches(2) is worse on news (−2.00 R-2)." in section(text, "set-0")
    changed(path, ('primary = "rouge2"', 'primary = "wmd"\nmetric_options = ["wmd.vectors=v"]'))
    assert "ce + matches(2) is better on news (−2.000 WMD)" in confirmed(path, {**STEADY, "news": worse})


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ({11: 0.0, 12: 0.0, 13: 0.0}, "was not tested: its difference is the same with every seed (+0.00 R-2)."),
        ({11: 3.0}, "was not tested: a test needs two seeds or more of it and of ce."),
        ({}, "was not compared: no seed has a score of it and of ce yet."),
    ],
)
def test_why_there_is_no_test_is_said(scores, sentence, path):
    study = plan.read(path)
    rows = {"news": {"ce": dict.fromkeys((11, 12, 13), 0.0), "ce + bag(2)": scores}, "pairs": {}}
    every, results = stages_of(study, rows), made(study, rows)
    shown = tables.as_text(tables.set_tables(study, every, results))
    headline = text_of(study, every, results).partition("</header>")[0]
    assert f"ce + bag(2) on news {sentence}" in shown
    assert (f"ce + bag(2) on news {sentence}" if scores else "No row was compared yet.") in headline
    (row,) = [line for line in shown.splitlines() if line.startswith("ce + bag(2)  ")][:1]
    assert row.split()[-1] == "–", "it could show nothing"


def test_a_row_without_a_score_is_not_drawn(path, drawn):
    rows = {**SCORES["pairs"], "ce + bag(2)": dict.fromkeys((11, 12, 13))}
    text = confirmed(path, {**SCORES, "pairs": rows})
    assert [row.label for row in drawn[1]] == ["ce", "ce + matches(2)"]
    assert "ce + bag(2), seed 11 failed and is in no mean: no memory" in text


def test_sets_that_are_not_confirmed_yet_are_named_below_the_plot(path, drawn):
    text = confirmed(path, {**SCORES, "pairs": {}})
    assert len(drawn) == 1
    assert "Not confirmed yet: pairs." in text
    assert "There are no results of this set yet." in section(text, "set-1")


def test_without_anything_confirmed_the_screening_is_drawn_without_intervals_and_the_page_says_so(path, drawn):
    study = plan.read(path)
    results = screened(study, {"ce": (20.0, 21.0), "ce + matches(2)": (23.0, 22.0), "ce + bag(2)": (20.0, 20.5)})
    text = text_of(study, stages_of(study, {}, results), results)
    assert "Nothing is confirmed yet. The plot shows the screening, on validation data" in text
    assert "Screened on validation data</h2>" in text
    row = drawn[0][1]
    assert (row.difference, row.difference_runs, row.runs) == (2.0, [3.0, 1.0], [23.0, 22.0])
    assert not any(end == end for end in (row.low, row.high, row.difference_low, row.difference_high))  # all are NaN
    assert "with their 95% interval" not in text
    assert re.search(r"<details open>\s*<summary>Screened", text)
    assert "Nothing of this set is confirmed yet." in section(text, "set-0")


def test_a_study_without_results_has_a_page_that_says_so(path, drawn):
    study = plan.read(path)
    text = text_of(study, stages_of(study, {}), {})
    assert drawn == []
    assert "There are no results yet." in text
    assert 'id="results"' not in text
    assert '<h1 dir="auto">Is it the n-grams?</h1>' in text
    assert "8 trainings without a result" in text


# Tables, trainings, plan


@pytest.mark.slow
def test_rows_that_decoded_differently_are_named_above_the_table(path):
    study = plan.read(path)
    results = {
        key: replace(result, generation=f"generation|engine:hf|num_beams:{1 + (key[0].objective == 'ce')}")
        for key, result in made(study, SCORES).items()
    }
    every = stages_of(study, SCORES)
    text = section(text_of(study, every, results), "set-0")
    warning = "num_beams 2 (ce) against 1 (ce + matches(2), ce + rewards(2))."
    assert 0 < text.index(warning) < text.index("<table")
    printed = tables.as_text(tables.set_tables(study, every, results))
    assert printed.index(warning) < printed.index("difference")


@pytest.mark.slow
def test_every_cell_that_is_printed_is_in_the_page(path, instant, capsys):
    code, printed, _ = shown(capsys, "--page", "page")
    assert code == 0
    assert printed.endswith("page/index.html\n")
    text = unescape(Path("page/index.html").read_text())
    lines = [line for line in printed.splitlines() if re.search(r" {2,}", line)]
    assert len(lines) > 30
    words = set(re.sub(r"<[^>]+>", " ", text).replace("-", "−").split())
    for line in lines:
        for cell in re.split(r" {2,}", line.removesuffix("speeds").strip()):
            assert all(word.rstrip("*") in words for word in cell.replace("-", "−").split(" ")), line
    assert re.search(r"<details>\s*<summary>Screened on validation data, R-2 of beam2</summary>", text)
    assert re.search(r"<details>\s*<summary>Tuned on validation data, R-2 of beam2, seed 1</summary>", text)
    assert "corrected for 4 comparisons" in section(text, "set-0")
    assert "nothing is left" in section(text, "plan")
    assert text.count("All scores of greedy on test data</h3>") == 2


@pytest.mark.slow
def test_the_page_says_what_the_trainings_were(path, instant, capsys):
    assert shown(capsys, "--page", "page")[0] == 0
    trainings = section(unescape(Path("page/index.html").read_text()), "trainings")
    for name, value in {
        "confirmation seeds": "11, 12, 13",
        "screening seeds": "1, 2",
        "seed of the tuning": "1",
        "fingerprint of train data": "t1",
        "texts of test": "8",
        "model.width": "128",
    }.items():
        assert re.search(rf"<th[^>]*>{name}</th><td[^>]*>{value}</td>", trainings), name
    assert re.search(r"<th[^>]*>task</th><td[^>]*>summarisation</td><td[^>]*>translation</td>", trainings)
    assert "rouge|" in trainings
    assert "generation|" in trainings
    assert "weights:" not in trainings


def test_what_failed_and_what_is_left_are_named(path, instant, capsys):
    instant.failing = {"bag2-learning_rate0.001-seed2": 1}
    code, _, _ = shown(capsys, "--only", "news", "--page", "page")
    assert code == 130
    plan_section = section(unescape(Path("page/index.html").read_text()), "plan")
    assert "<b>news, ce + bag(2), train.learning_rate=0.001, seed 2</b>: train: the loss became NaN." in plan_section
    assert '<li dir="auto">pairs, ce, train.learning_rate=0.001, seed 1</li>' in plan_section
    assert '<li dir="auto">news, ce' not in plan_section


@pytest.mark.slow
def test_the_command_that_opens_the_texts_is_in_the_page_and_printed(path, instant, capsys):
    code, _, told = shown(capsys, "--page", "page")
    assert code == 0
    news, pairs = told.splitlines()[-2:]
    assert news.startswith(
        "news, texts of seed 11: ngramloss report runs/mine/news/ce-learning_rate0.001-seed11/test-beam2 "
    )
    assert pairs.startswith("pairs, texts of seed 11: ngramloss report runs/mine/pairs/ce-")
    texts = section(unescape(Path("page/index.html").read_text()), "texts")
    assert news in texts
    assert pairs in texts
    assert main([*shlex.split(news.partition(": ngramloss ")[2]), "--samples", "20"]) == 0
    assert Path("news-texts/index.html").is_file()
    shutil.rmtree("runs")
    assert "ngramloss report" not in shown(capsys, "--show", "--page", "page")[2]
    assert 'id="texts"' not in Path("page/index.html").read_text()


def logged(folder, *losses):
    folder.mkdir(parents=True)
    rows = [{"step": step, "ce": loss} for step, loss in enumerate(losses, 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_curves_are_drawn_of_the_trainings_that_are_there_as_means_over_seeds(path):
    study = plan.read(path)
    assert "The folders of the trainings are not here, so there are no curves." in confirmed(path)
    for seed in (11, 12):
        logged(Training("news", "ce", SETTING, seed, TEST).run_folder(Path("runs")), 3.0, float(seed))
    logged(Training("news", "ce", SETTING, 1, VALIDATION).run_folder(Path("runs")), 9.0, 9.0)
    found = page._curves(stages_of(study, SCORES), Path("runs"))
    assert [(own["data"], own["rows"], [label for label, _ in own["runs"]]) for own in found] == [
        ("news", "that were confirmed", ["ce train.learning_rate=0.001"])
    ]
    (curve,) = found[0]["panels"][0].series
    assert (curve.y, curve.low, curve.high) == ([3.0, 11.5], [3.0, 11.0], [3.0, 12.0])
    text = confirmed(path, runs="runs")
    assert "there are no curves" not in text
    assert "2 seeds</small>" in section(text, "training")


# Other programs


@pytest.mark.slow
def test_the_page_needs_no_torch_and_no_runs(path, instant, capsys):
    assert shown(capsys)[0] == 0
    program = "import sys; from ngramloss.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "study", "mine.toml", "--show", "--runs", "nowhere", "--page", "page"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "there are no curves" in Path("page/index.html").read_text()
    assert not Path("nowhere").exists()


def test_a_page_that_cannot_be_written_is_an_error_before_training(path, instant, capsys):
    code, _, err = shown(capsys, "--page", "mine.toml")
    assert (code, instant.started) == (2, [])
    assert "mine.toml is a file. Choose another --page." in err


# In a browser


def whole(folder):
    """A whole study with curves of both sets, in its own folder."""
    study, every = plan.read(Path("mine.toml")), None
    every = stages_of(study, SCORES)
    for data, rows in SCORES.items():
        for row in rows:
            for seed in (11, 12):
                logged(Training(data, row, SETTING, seed, TEST).run_folder(folder / "runs"), 3.0, 2.0, float(seed))
    results = made(study, SCORES)
    return page.write_page(
        study, every, results, tables.set_tables(study, every, results), folder / "runs", folder / "page"
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_opens_without_an_error_or_a_request_and_nothing_is_wider_than_the_screen(
    path, tmp_path, visit, width, scheme
):
    tab = visit(lambda: whole(tmp_path), viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    plot = tab.locator(".estimates figure").first
    assert "R-2, difference to ce" in plot.inner_text()
    assert plot.bounding_box()["y"] < 600, "the plot comes first"
    assert "+1.10" in plot.locator("svg").text_content()
    tab.locator("#set-0 th button", has_text="R-2").first.click()
    assert tab.locator("#set-0 .systems th").first.inner_text() == "ce + matches(2)"
    tab.locator("#theme").click()
    assert tab.evaluate("document.documentElement.dataset.theme") == {"light": "dark", "dark": "light"}[scheme]


def test_a_run_that_is_hidden_in_one_set_is_shown_in_the_other_and_values_are_read_off(path, tmp_path, visit):
    tab = visit(lambda: whole(tmp_path))
    parts = tab.locator("[data-training]")
    assert parts.count() == 2
    lines = [parts.nth(place).locator('.panel [data-run="1"]').first for place in range(2)]
    parts.nth(0).locator("input").nth(1).uncheck()
    assert [line.evaluate("line => line.style.display") for line in lines] == ["none", ""]
    panel = parts.nth(1).locator(".panel").first
    panel.focus()
    tab.keyboard.press("ArrowLeft")
    assert panel.locator("output").inner_text().startswith("step 2")


def test_hostile_text_stays_text(path, tmp_path, visit):
    path.write_text(STUDY.replace('"Is it the n-grams?"', json.dumps(HOSTILE[0] + HOSTILE[1])))

    def hostile():
        study = plan.read(path)
        every = stages_of(study, SCORES)
        results = {
            key: result
            if not result.failed
            else DecodingResult(result.training, result.decoding, {}, failed=HOSTILE[1])
            for key, result in made(study, SCORES).items()
        }
        sets = tables.set_tables(study, every, results)
        return page.write_page(study, every, results, sets, tmp_path / "runs", tmp_path / "page")

    tab = visit(hostile)
    assert tab.inner_text("h1") == HOSTILE[0] + HOSTILE[1]
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("main img, main script").count() == 0
    assert "onerror='window.hacked = 1'" in tab.inner_text("#plan")
