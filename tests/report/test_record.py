"""From scored runs and files to the page's record, and the command that writes the page."""

import base64
import gzip
import json
import math
import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import REFERENCES, TEXTS, run

from ngramloss import cli
from ngramloss.data.statistics import words_of
from ngramloss.metrics.registry import METRICS, Metric, score_owners, scores_of
from ngramloss.metrics.scores import Scores
from ngramloss.metrics.shape import shape
from ngramloss.output.tabular import Cell
from ngramloss.report import page, tables
from ngramloss.report.build import build_record
from ngramloss.report.record import PaperRow, TeacherForced, TrainingCurves
from ngramloss.scoring import paper, results, scored_texts


def record(*folders, metrics=("rouge", "bleu", "shape"), **options):
    texts = scored_texts.align(None, list(folders))
    return build_record(results.score_systems(texts, metrics, samples=20, shuffles=20), texts, **options)


def test_the_record_has_everything(tmp_path):
    folder = run(tmp_path / "a", objective="ce + matches(2)")
    (folder / "log.jsonl").write_text('{"step": 1, "ce": 2.0, "docs_per_second": 8.0, "note": "x"}\n{"ce": 1.0}\n')
    (folder / "seen.jsonl").write_text(
        '{"id": "b", "tokens": ["x"], "best": ["y"], "confidence": [0.5], "label_probability": [0.1]}\n'
    )
    found = record(folder, title="T", deviations=["less"])
    (system,) = found.systems
    assert (system.name, system.label, system.is_baseline) == ("a", "ce + matches(2)", False)
    assert system.settings["written by"].startswith("generation|model:")
    assert system.settings["recipe.train.seed"] == "1"
    assert system.forced == {"b": TeacherForced(["x"], ["y"], [0.5], [0.1])}
    assert system.objective == "ce + matches(2)"
    assert found.training == [
        TrainingCurves("ce + matches(2)", {"ce": [(1, 2.0)], "docs_per_second": [(1, 8.0)]}, "", "ce + matches(2)")
    ]
    assert found.cases.ids == ["a", "b", "c"]
    assert found.cases.references == [[text] for text in REFERENCES.values()]
    assert found.cases.texts == [list(TEXTS.values())]
    assert found.cases.documents[0] == "the cat sat on the mat as was said"
    assert found.cases.scores["rouge1"] == [[83.33, 100.0, 90.91]]
    assert (found.title, found.deviations, found.ablations, found.paper) == ("T", ["less"], [], None)
    assert found.scores == {
        name: scores_of(metric)[name]
        for metric, names in {
            "rouge": ["rouge1", "rouge2", "rougeL", "rougeLsum"],
            "bleu": ["bleu"],
            "shape": [
                "words",
                "repeated3",
                "compression",
                "novel1",
                "novel2",
                "novel3",
                "novel4",
                "coverage",
                "density",
            ],
        }.items()
        for name in names
    }


def test_the_title_names_systems_and_data(tmp_path):
    folders = [run(tmp_path / "a"), run(tmp_path / "b", objective="ce + matches(2)"), run(tmp_path / "c", seed=2)]
    assert record(*folders, metrics=("rouge",)).title == "ce and ce + matches(2) on newswire"
    more = [run(tmp_path / str(n), objective=f"ce + matches({n})") for n in (3, 4)]
    assert record(*folders, *more, metrics=("rouge",)).title == "4 systems on newswire"
    assert record(folders[1], metrics=("rouge",)).title == "ce + matches(2) on newswire"
    (tmp_path / "p.jsonl").write_text((tmp_path / "a" / "predictions.jsonl").read_text())
    texts = scored_texts.align(tmp_path / "a" / "references.jsonl", [tmp_path / "p.jsonl"])
    assert build_record(results.score_systems(texts, ["rouge"], samples=2, shuffles=2), texts).title == "p"


def test_groups_of_runs_are_known_to_systems_trainings_and_notes(tmp_path):
    folders = [run(tmp_path / name, objective=name[:-1], seed=int(name[-1])) for name in ("ce1", "ce2", "m1", "m2")]
    for folder in folders:
        (folder / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    lead = run(tmp_path / "lead", dict(TEXTS, b="it"))
    (lead / "recipe.toml").unlink()
    found = record(*folders, lead, metrics=("rouge",))
    assert [system.group for system in found.systems] == ["ce", "ce", "m", "m", "lead"]
    assert [(log.group, log.objective) for log in found.training] == [
        ("ce", "ce"),
        ("ce", "ce"),
        ("m", "m"),
        ("m", "m"),
    ]
    assert [(group.label, len(group.names)) for group in found.seeds] == [("ce", 2), ("m", 2), ("lead", 1)]
    assert found.notes == ["3 systems, 5 runs, on 3 documents; differences are to ce."]
    assert found.seed_notes == [
        "* and **: the mean over seeds differs from that of ce at 5% and 1% (Student's t, paired by seed).",
        "No test over seeds with lead, of one run: a test needs two runs or more of both.",
        "No test over seeds where the difference to ce does not vary: m (rouge1, rouge2, rougeL, rougeLsum).",
    ]
    first, _, single = found.seeds
    value = found.systems[4].values["rouge1"].value
    assert single.spread["rouge1"]["mean"] == value
    test = single.against_first["rouge1"]
    assert test["difference"] == pytest.approx(value - first.spread["rouge1"]["mean"])
    assert test["difference"] < 0
    assert all(math.isnan(test[name]) for name in ("low", "high", "p", "p_holm"))


def test_groups_that_share_a_label_stay_two_rows(tmp_path):
    rates = {"a1": 1e-5, "a2": 1e-5, "b1": 2e-5, "b2": 2e-5}
    folders = [run(tmp_path / name, seed=int(name[-1]), rate=rate) for name, rate in rates.items()]
    found = record(*folders, metrics=("rouge",))
    assert [(group.label, group.names) for group in found.seeds] == [
        ("ce (a1, …)", ["a1", "a2"]),
        ("ce (b1, …)", ["b1", "b2"]),
    ]
    assert [system.group for system in found.systems] == ["ce (a1, …)"] * 2 + ["ce (b1, …)"] * 2


def test_a_baseline_that_the_groups_are_compared_with_is_a_row(tmp_path):
    given = [run(tmp_path / name, seed=int(name[-1])) for name in ("c4", "a1", "a2")]
    about = json.loads((given[0] / "generation.json").read_text())
    (given[0] / "recipe.toml").unlink()
    (given[0] / "generation.json").write_text(json.dumps(about | {"model": "lead-3"}))
    groups = zip(given, ["", "ours", "ours"], strict=True)
    texts = scored_texts.align(None, [scored_texts.Given(path, "", group) for path, group in groups])
    found = build_record(results.score_systems(texts, ["rouge"], samples=2, shuffles=2), texts)
    assert [(group.label, bool(group.against_first)) for group in found.seeds] == [("c4", False), ("ours", True)]


def test_the_first_note_calls_the_first_system_as_the_table_does(tmp_path):
    found = record(run(tmp_path / "x"), run(tmp_path / "y", objective="ce + matches(2)"), metrics=("rouge",))
    assert found.notes == ["2 systems on 3 documents; differences are to ce."]


def test_every_group_is_a_row_also_with_one_run(tmp_path):
    given = [run(tmp_path / name, seed=int(name[-1])) for name in ("a1", "a2", "b3", "c4")]
    about = json.loads((given[3] / "generation.json").read_text())
    (given[3] / "recipe.toml").unlink()
    (given[3] / "generation.json").write_text(json.dumps(about | {"model": "lead-3"}))
    groups = ["ours", "ours", "one", ""]
    texts = scored_texts.align(
        None, [scored_texts.Given(path, "", group) for path, group in zip(given, groups, strict=True)]
    )
    found = build_record(results.score_systems(texts, ["rouge"], samples=2, shuffles=2), texts)
    assert [(group.label, group.names) for group in found.seeds] == [("ours", ["a1", "a2"]), ("one", ["b3"])]
    assert [system.group for system in found.systems] == groups
    assert math.isnan(found.seeds[1].spread["rouge1"]["spread"])
    assert math.isnan(found.seeds[1].against_first["rouge1"]["p"])
    assert found.title == "ours and one on newswire"
    assert [row.label for row in tables.seeds(found, ["rouge1"]).baselines] == ["lead-3"]
    assert "No test over seeds with one, of one run" in page.page_text(found)
    texts = scored_texts.align(
        None, [scored_texts.Given(given[0]), scored_texts.Given(given[3], "", "leads"), scored_texts.Given(given[2])]
    )
    found = build_record(results.score_systems(texts, ["rouge"], samples=2, shuffles=2), texts)
    assert [group.label for group in found.seeds] == ["a1", "b3"]
    assert [row.label for row in tables.seeds(found, ["rouge1"]).baselines] == ["lead-3"]
    baseline = replace(found.systems[1], group="leads")
    grouped = replace(found, systems=[found.systems[0], baseline, found.systems[2]])
    assert tables.seeds(grouped, ["rouge1"]).baselines == [], "it has a row of its group"


def test_texts_with_the_most_tokens_that_the_search_allows_are_known(tmp_path):
    counted = run(tmp_path / "a", dict(TEXTS, b=" "), tokens={"a": 12, "b": 4, "c": 12}, limits=(0, 12))
    found = record(counted, run(tmp_path / "b"), metrics=("rouge",))
    assert found.cases.cut_off == [[0, 2], []]
    assert [system.most_tokens for system in found.systems] == [12, None], (
        "nothing is known of a folder that did not count"
    )
    assert found.cases.empty == [[1], []]
    page_text = page.page_text(found)
    assert "of 3 texts, 1 empty; 2 with the most tokens allowed, 12, which may be cut off." in page_text
    marks = re.search(r'id="pack-marks">(.*?)</script>', page_text)[1]
    assert json.loads(gzip.decompress(base64.b64decode(marks))) == {"empty": [[1], []], "cutOff": [[0, 2], []]}


def test_values_have_their_intervals_and_tests(tmp_path):
    folders = [run(tmp_path / "a"), run(tmp_path / "b", REFERENCES), run(tmp_path / "c", dict(TEXTS, b="it"))]
    texts = scored_texts.align(None, folders)
    result = results.score_systems(texts, ["rouge"], samples=20, shuffles=20)
    first, second, _ = (system.values["rouge1"] for system in build_record(result, texts).systems)
    assert first.difference is None
    assert len({second.p_bootstrap, second.p_randomisation, second.p_holm}) == 3
    assert second == result.scores["rouge1"][1]


def test_a_value_that_no_document_has_is_none(tmp_path, monkeypatch):
    monkeypatch.setitem(
        METRICS, "none", Metric(lambda references, predictions: Scores({"none": [math.nan] * 3}, "none"))
    )
    found = record(run(tmp_path / "a"), run(tmp_path / "b"), metrics=("none",))
    assert all(math.isnan(system.values["none"].value) for system in found.systems)
    assert [row.cells[0] for row in tables.results(found, ["none"]).systems] == [Cell("–")] * 2
    assert found.cases.scores["none"] == [[None] * 3] * 2


SHAPES = {"a": "It's 3.5 km, not 4.", "b": "Rain", "c": "U.S.-led peace-talks in Côte d’Ivoire: 1,200 dead"}


@pytest.mark.parametrize("metrics", [("rouge",), ("rouge", "shape")])
def test_words_and_novelty_of_a_case_are_those_of_shape(tmp_path, metrics):
    found = record(run(tmp_path / "a", SHAPES), metrics=metrics).cases
    expected = shape(list(SHAPES.values()), found.documents).values
    assert found.scores["words"] == [expected["words"]] == [[5.0, 1.0, 9.0]]
    assert found.scores["novel2"] == [[round(value, 2) for value in expected["novel2"]]]
    assert found.scores["novel2"][0][1] == 0.0, "a text without a bigram has 0, as in shape"
    assert found.described["words"] == scores_of("shape")["words"]
    assert found.reference_words == [len(words_of(text)) for text in REFERENCES.values()]


def test_words_are_counted_without_documents_too(tmp_path):
    folder = run(tmp_path / "a", SHAPES)
    rows = [json.loads(line) for line in (folder / "references.jsonl").read_text().splitlines()]
    (folder / "references.jsonl").write_text(
        "".join(json.dumps({"id": row["id"], "reference": row["reference"]}) + "\n" for row in rows)
    )
    found = record(folder, metrics=("rouge",)).cases
    assert found.scores["words"] == [[5.0, 1.0, 9.0]]
    assert "novel2" not in found.scores


def test_the_page_has_the_words_and_novelty_of_the_record(tmp_path):
    """As they are stored in the page, so that nothing between counts them anew."""
    report = record(run(tmp_path / "a", SHAPES), metrics=("rouge",))
    text = page.page_text(report)
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.S)[1])
    for index, score in enumerate(facts["figures"]):
        block = re.search(rf'id="pack-figure-{index}">(.*?)</script>', text, re.S)[1]
        codes = array("H", gzip.decompress(base64.b64decode(block)))
        shown = [None if code == facts["nothing"] else score["low"] + code / 10 ** score["decimals"] for code in codes]
        stored = (
            report.cases.reference_words
            if score["name"] == "reference words"
            else report.cases.scores[score["name"]][0]
        )
        assert shown == pytest.approx(list(stored)), score["name"]
    assert {"words", "novel2", "reference words"} <= {score["name"] for score in facts["figures"]}


def test_no_part_of_the_report_asks_the_record_whether_it_has_a_field():
    for path in {*Path(page.__file__).parent.glob("*.py")} - {Path(page.__file__).with_name("publish.py")}:
        assert ".get(" not in path.read_text(), path.name
    assert ".get(" not in Path(page.__file__).with_name("page.html").read_text()


def test_every_figure_of_every_metric_has_a_label():
    from ngramloss.metrics import newswire_facts, shape

    named = [
        *newswire_facts.facts([], []).values,
        *shape.shape(["a"], ["a"]).values,
        "rouge1",
        "rouge2",
        "rougeL",
        "rougeLsum",
        "bleu",
        "chrf",
        "bertscore",
        "bertscore_precision",
        "bertscore_recall",
        "wmd",
        "wmd_known",
        "summac_zs",
        "summac_conv",
        "factcc",
        "factcc_share",
    ]
    assert set(named) <= score_owners(METRICS).keys()
    assert set(paper.SCORES) <= score_owners(METRICS).keys()


@pytest.mark.parametrize(
    ("seeds", "labels"), [((1, 2), ["ce (seed 1)", "ce (seed 2)"]), ((3, 3), ["ce (a)", "ce (b)"])]
)
def test_systems_that_share_a_label_are_told_apart(tmp_path, seeds, labels):
    found = record(run(tmp_path / "a", seed=seeds[0]), run(tmp_path / "b", seed=seeds[1]))
    assert [system.label for system in found.systems] == labels


def test_the_ablation_has_the_papers_rows_and_means_over_seeds(tmp_path):
    folders = [
        run(tmp_path / "ce"),
        run(tmp_path / "m2", objective="ce + matches(2)"),
        run(tmp_path / "m2-2", dict(TEXTS, b="it"), objective="ce + matches(2)", seed=2),
        run(tmp_path / "m12", objective="ce + matches(1,2)"),
    ]
    (part,) = record(*folders, paper_of="cnn_dailymail").ablations
    assert part.title == "N-gram matches"
    assert part.scores == ["rouge1", "rouge2", "rougeLsum"]
    assert [row.label for row in part.rows] == ["ce", *(label for label, _, _ in paper.TABLE3["N-gram matches"][1:])]
    rows = {row.label: row for row in part.rows}
    assert {name: value for name, value in rows["+ 2-gram"].paper.items() if value is not None} == {
        "rouge1": 43.33,
        "rouge2": 20.56,
        "rougeLsum": 40.56,
    }
    assert set(rows["+ 3-gram"].here.values()) == {None}
    each = [system.values["rouge1"].value for system in record(*folders).systems]
    assert rows["+ 2-gram"].here["rouge1"] == pytest.approx((each[1] + each[2]) / 2)
    (part,) = record(*folders).ablations
    assert [row.label for row in part.rows] == ["ce", "+ 2-gram", "+ 1,2-gram"], "of other data, what was trained"
    assert {value for row in part.rows for value in row.paper.values()} == {None}


def test_the_papers_rows_stand_beside_its_own_data(tmp_path):
    folder = run(tmp_path / "a")
    assert record(folder).paper is None
    about = json.loads((folder / "generation.json").read_text())
    (folder / "generation.json").write_text(json.dumps(about | {"data": "xsum"}))
    found = record(folder, metrics=("rouge",)).paper
    assert found.title == "the paper, BART-base on XSum"
    assert (
        PaperRow("BART-base", {"rouge1": 41.63, "rouge2": 18.75, "rougeL": 33.73, "rougeLsum": None}, 29.0, 1.0)
        in found.rows
    )


def test_beside_other_data_only_the_papers_rows_of_what_was_trained_stand(tmp_path):
    found = record(
        run(tmp_path / "a"), run(tmp_path / "b", objective="ce + matches(2)"), paper_of="cnn_dailymail"
    ).paper
    assert [row.label for row in found.rows] == ["BART-base", "+ 2-gram matches"]


def test_the_command_scores_and_writes_the_page(tmp_path, capsys):
    one, two = run(tmp_path / "a"), run(tmp_path / "b", dict(TEXTS, a="a cat & <script>alert(1)</script>"))
    assert (
        cli.main(["report", str(one), str(two), "-o", str(tmp_path / "page"), "--samples", "20", "--shuffles", "20"])
        == 0
    )
    page = tmp_path / "page" / "index.html"
    assert capsys.readouterr().out.strip() == str(page)
    assert "<script>alert" not in page.read_text()
    assert (one / "scores.jsonl").exists()
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(one), "-o", str(tmp_path / "file")]) == 2
    assert "is a file; -o takes a folder" in capsys.readouterr().err


def test_files_without_folders_make_a_page_too(tmp_path, capsys):
    folder = run(tmp_path / "a")
    arguments = [
        "--references",
        folder / "references.jsonl",
        folder / "predictions.jsonl",
        "-o",
        tmp_path / "page",
        "--samples",
        "20",
        "--shuffles",
        "20",
    ]
    assert cli.main(["report", *map(str, arguments)]) == 0
    assert "1 system on 3 documents" in (tmp_path / "page" / "index.html").read_text()
