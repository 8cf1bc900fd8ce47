"""From scored runs and files to the page's record, and the command that writes the page."""

import json

import pytest
from test_score_runs import REFERENCES, TEXTS, run

from ngramloss import cli, paper
from ngramloss.metrics.registry import METRICS, score_owners
from ngramloss.report.record import build_record
from ngramloss.scoring import results, systems


def record(*folders, metrics=("rouge", "bleu", "shape"), **options):
    texts = systems.align(None, list(folders))
    return build_record(results.score_systems(texts, metrics, samples=20, shuffles=20), texts, **options)


def test_the_record_is_whole_and_json(tmp_path):
    folder = run(tmp_path / "a", objective="ce + matches(2)")
    (folder / "log.jsonl").write_text('{"step": 1, "ce": 2.0, "docs_per_second": 8.0}\n')
    (folder / "seen.jsonl").write_text('{"id": "b", "tokens": ["x"], "best": ["y"], "confidence": [0.5], "label_probability": [0.1]}\n')
    found = record(folder, title="T", deviations=["less"])
    json.dumps(found, allow_nan=False)
    system, = found["systems"]
    assert (system["name"], system["label"], system["docs_per_second"], system["baseline"]) == ("a", "ce + matches(2)", 8.0, False)
    assert system["settings"]["written by"].startswith("generation|model:")
    assert system["settings"]["recipe"]["train"]["seed"] == 1
    assert found["training"] == [{"system": "a", "label": "ce + matches(2)", "rows": [{"step": 1, "ce": 2.0, "docs_per_second": 8.0}]}]
    assert found["seen"] == {"a": {"b": {"tokens": ["x"], "best": ["y"], "confidence": [0.5], "label_probability": [0.1]}}}
    assert found["objectives"] == {"a": "ce + matches(2)"}
    assert found["cases"]["ids"] == ["a", "b", "c"]
    assert found["cases"]["references"] == [[text] for text in REFERENCES.values()]
    assert found["cases"]["texts"] == [list(TEXTS.values())]
    assert found["cases"]["documents"][0] == "the cat sat on the mat as was said"
    assert found["cases"]["scores"]["rouge1"] == [[83.33, 100.0, 90.91]]
    assert (found["title"], found["deviations"], found["ablation"]) == ("T", ["less"], [])
    assert {name: one["metric"] for name, one in found["figures"].items()} == {
        **dict.fromkeys(["rouge1", "rouge2", "rougeL", "rougeLsum"], "rouge"), "bleu": "bleu",
        **dict.fromkeys(["words", "repeated3", "compression", "novel1", "novel2", "novel3", "novel4", "coverage", "density"], "shape")}


def test_every_figure_of_every_metric_has_a_label():
    from ngramloss.metrics import facts, shape

    named = [*facts.facts([], []).values, *shape.shape(["a"], ["a"]).values, "rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf",
             "bertscore", "bertscore_precision", "bertscore_recall", "wmd", "wmd_known", "summac_zs", "summac_conv", "factcc", "factcc_share"]
    assert set(named) <= score_owners(METRICS).keys()
    assert set(paper.FIGURES) <= score_owners(METRICS).keys()


@pytest.mark.parametrize(("seeds", "labels"), [((1, 2), ["ce (seed 1)", "ce (seed 2)"]), ((3, 3), ["ce (a)", "ce (b)"])])
def test_systems_that_share_a_label_are_told_apart(tmp_path, seeds, labels):
    found = record(run(tmp_path / "a", seed=seeds[0]), run(tmp_path / "b", seed=seeds[1]))
    assert [system["label"] for system in found["systems"]] == labels


def test_the_ablation_has_the_papers_rows_and_means_over_seeds(tmp_path):
    folders = [run(tmp_path / "ce"), run(tmp_path / "m2", objective="ce + matches(2)"),
               run(tmp_path / "m2-2", dict(TEXTS, b="it"), objective="ce + matches(2)", seed=2),
               run(tmp_path / "m12", objective="ce + matches(1,2)")]
    part, = record(*folders)["ablation"]
    assert part["title"] == "N-gram matches"
    assert [row["label"] for row in part["rows"]] == ["ce", *(label for label, _, _ in paper.TABLE3["N-gram matches"][1:])]
    rows = {row["label"]: row for row in part["rows"]}
    assert rows["+ 2-gram"]["paper"] == {"rouge1": 43.33, "rouge2": 20.56, "rougeLsum": 40.56}
    assert rows["+ 3-gram"]["scores"] == {}
    each = [system["scores"]["rouge1"] for system in record(*folders)["systems"]]
    assert rows["+ 2-gram"]["scores"]["rouge1"] == pytest.approx((each[1] + each[2]) / 2)


def test_the_papers_rows_stand_beside_its_own_data(tmp_path):
    folder = run(tmp_path / "a")
    assert record(folder)["paper"] is None
    about = json.loads((folder / "generation.json").read_text())
    (folder / "generation.json").write_text(json.dumps(about | {"data": "xsum"}))
    found = record(folder)["paper"]
    assert found["title"] == "the paper, BART-base on XSum"
    assert {"label": "BART-base", "scores": dict(zip(paper.FIGURES, (41.63, 18.75, 33.73, 91.53, 4.5206, 48.76, 24.33), strict=True)),
            "docs_per_second": 29.0, "ratio": 1.0} in found["rows"]


def test_beside_other_data_only_the_papers_rows_of_what_was_trained_stand(tmp_path):
    found = record(run(tmp_path / "a"), run(tmp_path / "b", objective="ce + matches(2)"), paper_of="cnn_dailymail")["paper"]
    assert [row["label"] for row in found["rows"]] == ["BART-base", "+ 2-gram matches"]


def test_the_command_scores_and_writes_the_page(tmp_path, capsys):
    one, two = run(tmp_path / "a"), run(tmp_path / "b", dict(TEXTS, a="a cat & <script>alert(1)</script>"))
    assert cli.main(["report", str(one), str(two), "-o", str(tmp_path / "page"), "--samples", "20", "--shuffles", "20"]) == 0
    page = tmp_path / "page" / "index.html"
    assert capsys.readouterr().out.strip() == str(page)
    assert "<script>alert" not in page.read_text()
    assert (one / "scores.jsonl").exists()
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(one), "-o", str(tmp_path / "file")]) == 2
    assert "is a file; -o takes a folder" in capsys.readouterr().err


def test_files_without_folders_make_a_page_too(tmp_path, capsys):
    folder = run(tmp_path / "a")
    arguments = ["--references", folder / "references.jsonl", folder / "predictions.jsonl", "-o", tmp_path / "page", "--samples", "20", "--shuffles", "20"]
    assert cli.main(["report", *map(str, arguments)]) == 0
    assert "1 system on 3 documents" in (tmp_path / "page" / "index.html").read_text()
