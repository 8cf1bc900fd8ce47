"""ngramloss score on folders: their own references, figures that are kept, spread over seeds, and what is odd."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import REFERENCES, TEXTS, run
from scipy import stats

from ngramloss import cli
from ngramloss.metrics.registry import Metric, Score
from ngramloss.metrics.scores import Absent, Pooled, Scores
from ngramloss.scoring import provenance, results, score_cache, scored_texts, significance, tables
from ngramloss.scoring.audit import LengthLimits, limits, oddities
from ngramloss.settings import Setting
from ngramloss.storage.files import lock_folder
from ngramloss.version import __version__, installed


def score(capsys, *arguments):
    code = cli.main(["score", *map(str, arguments), "--json", "--samples", "20", "--shuffles", "20"])
    out = capsys.readouterr()
    return json.loads(out.out) if code == 0 else (code, out.err)


def test_a_run_is_scored_by_its_own_references_and_documents(tmp_path, capsys):
    found = score(capsys, run(tmp_path / "demo-matches2", objective="ce + matches(2)"), "--metrics", "rouge,shape")
    (system,) = found["systems"]
    assert (system["name"], system["label"]) == ("demo-matches2", "ce + matches(2)")
    assert system["scores"]["rouge1"] > 80
    assert "coverage" in system["scores"], "documents are read with the references"
    assert system["generation"] == (
        f"generation|model:{tmp_path / 'demo-matches2'}|weights:01231|data:newswire|split:test|documents:3|fingerprint:f00"
        "|num_beams:6|min_length:0|max_length:20|transformers:5.22|ngramloss:0.1.0"
    )


def test_figures_of_documents_are_kept_in_the_run(tmp_path, capsys):
    folder = run(tmp_path / "a")
    found = score(capsys, folder)
    rows = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["rouge1"] == 100.0
    about = json.loads((folder / "scores.json").read_text())
    assert about["scores"] == found["systems"][0]["scores"]
    assert about["metrics"]["rouge"]["signature"].startswith("rouge|refs:1|")


def test_kept_figures_are_read_again_and_others_added(tmp_path, capsys, monkeypatch):
    folder, asked = run(tmp_path / "a"), []

    def counted(references, predictions, *, scale: float = 1.0):
        asked.append(scale)
        return Scores({"counted": [scale * len(text) for text in predictions]}, f"counted|{scale}")

    monkeypatch.setitem(results.METRICS, "counted", Metric(counted, options={"scale": Setting(1.0)}))
    first = score(capsys, folder, "--metrics", "counted")
    second = score(capsys, folder, "--metrics", "rouge,counted")
    assert asked == [1.0]
    assert second["systems"][0]["scores"]["counted"] == first["systems"][0]["scores"]["counted"]
    score(capsys, folder, "--metrics", "rouge")
    assert {"counted", "rouge1"} <= json.loads((folder / "scores.jsonl").read_text().splitlines()[0]).keys()
    score(capsys, folder, "--metrics", "counted", "--set", "counted.scale=2")
    assert asked == [1.0, 2.0], "another option is another figure"
    (folder / "predictions.jsonl").write_text((folder / "predictions.jsonl").read_text().replace("rained", "poured"))
    score(capsys, folder, "--metrics", "counted", "--set", "counted.scale=2")
    assert asked == [1.0, 2.0, 2.0], "other texts are other figures"


def test_a_long_metric_shows_how_far_it_is(tmp_path, monkeypatch):
    def slow(references, predictions, *, progress=None):
        for _ in predictions:
            progress(1)
        return Scores({"slow": [1.0] * len(predictions)}, "slow")

    monkeypatch.setitem(results.METRICS, "slow", Metric(slow))
    shown = []
    monkeypatch.setattr(results.Progress, "update", lambda self, count: shown.append((self.what, self.total, count)))
    results.score_systems(scored_texts.align(None, [run(tmp_path / "a")]), ["slow"], samples=2, shuffles=2)
    assert shown == [("slow of a", 3, 1)] * 3


@pytest.mark.parametrize(
    "damage", ["{", "[" * 100_000, "[]", "null", '{"metrics": {"rouge": 3}}', '{"metrics": {"rouge": {}}}']
)
def test_damaged_kept_figures_count_as_none(tmp_path, capsys, damage):
    folder = run(tmp_path / "a")
    before = score(capsys, folder)
    (folder / "scores.json").write_text(damage)
    assert score_cache.read(folder, ["a", "b", "c"], list(TEXTS.values())).metrics == {}
    assert score(capsys, folder) == before


def edited(path, *change):
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change, 1))


EDITS = {
    "scores.jsonl was changed": lambda folder: edited(folder / "scores.jsonl", "100.0", "12.3"),
    "scores.json was changed": lambda folder: edited(folder / "scores.json", "rouge|refs:1", "rouge|refs:2"),
    "scores.json has no checksum": lambda folder: edited(folder / "scores.json", '"seal"', '"steal"'),
    "scores.jsonl is missing": lambda folder: (folder / "scores.jsonl").unlink(),
    "{}/scores.json is not JSON: Expecting value: line 1 column 1 (char 0)": lambda folder: (
        folder / "scores.json"
    ).write_text(""),
    "{}/scores.json should contain a JSON object, got list": lambda folder: (folder / "scores.json").write_text("[]"),
}


@pytest.mark.parametrize("why", EDITS)
def test_kept_figures_that_were_edited_are_computed_again_and_it_is_said(tmp_path, capsys, why):
    folder = run(tmp_path / "a")
    before = score(capsys, folder)
    sound = [(folder / name).read_text() for name in ("scores.json", "scores.jsonl")]
    EDITS[why](folder)
    assert cli.main(["score", str(folder), "--json", "--samples", "20", "--shuffles", "20"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == before
    assert (
        err == f"warning: the scores saved in {folder} were not used ({why.format(folder)}); they are computed again.\n"
    )
    assert [(folder / name).read_text() for name in ("scores.json", "scores.jsonl")] == sound
    assert score(capsys, folder) == before
    assert capsys.readouterr().err == ""


def kept(folder):
    return set(json.loads((folder / "scores.json").read_text())["scores"])


def test_figures_of_other_references_do_not_stay_beside_new_ones(tmp_path, capsys):
    folder = run(tmp_path / "a")
    score(capsys, folder, "--metrics", "bleu,chrf,shape")
    assert {"bleu", "chrf", "words"} <= kept(folder)
    edited(folder / "references.jsonl", "it rained all day", "it poured all day")  # the document is as before
    score(capsys, folder, "--metrics", "rouge")
    assert {"rouge1", "words"} <= kept(folder)
    assert not {"bleu", "chrf"} & kept(folder)


def test_figures_of_other_documents_do_not_stay_and_those_without_documents_do(tmp_path, capsys):
    folder = run(tmp_path / "a")
    score(capsys, folder, "--metrics", "chrf,shape")
    score(capsys, folder, "--metrics", "bleu", "--references", folder / "references.jsonl")  # without documents
    assert {"chrf", "coverage", "bleu"} <= kept(folder)
    edited(folder / "references.jsonl", "as was said", "as was written")
    score(capsys, folder, "--metrics", "rouge")
    assert {"chrf", "bleu", "rouge1"} <= kept(folder)
    assert "coverage" not in kept(folder)


def test_kept_figures_of_other_documents_are_not_taken(tmp_path, capsys):
    folder = run(tmp_path / "a")
    score(capsys, folder)
    assert score_cache.read(folder, ["a", "b", "c"], list(TEXTS.values())).metrics
    assert score_cache.read(folder, ["c", "b", "a"], list(TEXTS.values())).metrics == {}
    assert score_cache.read(folder, ["a", "b", "c"], ["x", "y", "z"]).metrics == {}
    rows = (folder / "scores.jsonl").read_text().splitlines(keepends=True)
    (folder / "scores.jsonl").write_text("".join(reversed(rows)))
    assert score_cache.read(folder, ["a", "b", "c"], list(TEXTS.values())).metrics == {}


def test_figures_of_earlier_texts_do_not_stay_beside_new_ones(tmp_path, capsys):
    folder = run(tmp_path / "a")
    score(capsys, folder, "--metrics", "rouge")
    (folder / "predictions.jsonl").write_text((folder / "predictions.jsonl").read_text().replace("rained", "poured"))
    score(capsys, folder, "--metrics", "chrf")
    assert json.loads((folder / "scores.jsonl").read_text().splitlines()[0]).keys() == {"id", "chrf"}
    assert json.loads((folder / "scores.json").read_text())["scores"].keys() == {"chrf"}


def test_metrics_kept_before_stay_with_their_figures_pooled_ones_too(tmp_path, capsys, monkeypatch):
    folder = run(tmp_path / "a")
    first = score(capsys, folder, "--metrics", "bleu,shape")["systems"][0]["scores"]
    second = score(capsys, folder, "--metrics", "rouge")["systems"][0]["scores"]
    assert json.loads((folder / "scores.json").read_text())["scores"] == first | second
    assert {"bleu", "words", "rouge1"} <= json.loads((folder / "scores.jsonl").read_text().splitlines()[0]).keys()
    assert score(capsys, folder, "--metrics", "bleu")["systems"][0]["scores"] == {"bleu": first["bleu"]}, (
        "no mean of sentences"
    )


@pytest.mark.parametrize("lines", ["rouge", "bleu,chrf,shape"])
def test_kept_figures_equal_fresh_ones(tmp_path, capsys, lines):
    folders = [run(tmp_path / "a"), run(tmp_path / "b", REFERENCES)]
    fresh = score(capsys, *folders, "--metrics", lines)
    assert score(capsys, *folders, "--metrics", lines) == fresh


def test_a_folder_that_cannot_be_written_to_costs_a_warning_alone(tmp_path, capsys, monkeypatch):
    folder, other = run(tmp_path / "a"), run(tmp_path / "b", REFERENCES)
    (folder / "scores.jsonl").mkdir()
    assert cli.main(["score", str(folder), str(other)]) == 0
    out, err = capsys.readouterr()
    assert "rouge1" in out
    assert err == f"warning: scores were not saved in {folder}: Is a directory.\n"
    assert not (folder / "scores.json").exists()
    assert (other / "scores.json").exists()


def test_a_full_disk_leaves_nothing_half_written(tmp_path, capsys):
    folder = run(
        tmp_path / "a", {str(place): "x y" for place in range(400)}, {str(place): "x y z" for place in range(400)}
    )
    program = f"ulimit -f 8; '{sys.executable}' -m ngramloss score '{folder}'"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"warning: scores were not saved in {folder}: File too large.\n")
    assert "rouge1" in done.stdout
    assert not list(folder.glob("scores*"))


@pytest.mark.slow
def test_two_that_score_a_run_at_once_both_keep_their_figures(tmp_path):
    folder = run(tmp_path / "a")
    with lock_folder(folder, wait=True):
        arguments = [sys.executable, "-m", "ngramloss", "score", str(folder), "--json", "--metrics"]
        jobs = [
            subprocess.Popen([*arguments, metric], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for metric in ("rouge", "bleu", "chrf", "shape")
        ]
        with pytest.raises(subprocess.TimeoutExpired):  # both wait here
            jobs[0].wait(timeout=3)
    told = [job.communicate(timeout=100) for job in jobs]
    assert [(job.returncode, err) for job, (_, err) in zip(jobs, told, strict=True)] == [(0, "")] * 4
    each = [json.loads(out)["systems"][0]["scores"] for out, _ in told]
    assert json.loads((folder / "scores.json").read_text())["scores"] == {
        name: value for one in each for name, value in one.items()
    }
    rows = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert {"rouge1", "bleu", "chrf", "coverage"} <= rows[0].keys()


def test_a_key_changes_with_the_content_of_a_file_it_names(tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("a 1 2")
    before = score_cache.key("wmd", {"vectors": vectors}, {})
    os.utime(vectors)
    assert score_cache.key("wmd", {"vectors": vectors}, {}) == before
    vectors.write_text("a 1 3")
    assert score_cache.key("wmd", {"vectors": vectors}, {}) != before
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "weights").write_text("1")
    before = score_cache.key("bertscore", {"model": str(tmp_path / "model")}, {})
    (tmp_path / "model" / "deep" / "weights").write_text("2")
    assert score_cache.key("bertscore", {"model": str(tmp_path / "model")}, {}) != before


def test_a_key_changes_with_all_that_could_change_a_figure(monkeypatch):
    needed = {"packages": ["rouge-score-rs"]}
    before = score_cache.key("rouge", {"stemmer": True}, {"predictions": ["a"]}, **needed)
    assert score_cache.key("rouge", {"stemmer": True}, {"predictions": ["a"]}, **needed) == before
    others = [
        score_cache.key("bleu", {"stemmer": True}, {"predictions": ["a"]}, **needed),
        score_cache.key("rouge", {"stemmer": False}, {"predictions": ["a"]}, **needed),
        score_cache.key("rouge", {"stemmer": True}, {"predictions": ["b"]}, **needed),
        score_cache.key("rouge", {"stemmer": True}, {"predictions": ["a"]}, **needed, source="another plugin"),
    ]
    monkeypatch.setattr(score_cache, "__version__", "0.0.7")
    others.append(score_cache.key("rouge", {"stemmer": True}, {"predictions": ["a"]}, **needed))
    monkeypatch.undo()
    for package in ("rouge-score-rs", "numpy"):
        newer = {package: "9.9"}
        monkeypatch.setattr(score_cache, "installed", lambda name, newer=newer: newer.get(name) or installed(name))
        others.append(score_cache.key("rouge", {"stemmer": True}, {"predictions": ["a"]}, **needed))
    assert len({before, *others}) == 8


def test_figures_kept_in_part_count_as_none(tmp_path, capsys, monkeypatch):
    """The program ends between the rows, which have other figures now, and what tells of them."""
    folder, whole = run(tmp_path / "a"), score_cache.write_whole
    score(capsys, folder)

    def ends(path, text):
        if path.name == "scores.json":
            raise KeyboardInterrupt
        whole(path, text)

    monkeypatch.setattr(score_cache, "write_whole", ends)
    assert cli.main(["score", str(folder), "--set", "rouge.stemmer=false"]) == 130
    assert score_cache.read(folder, ["a", "b", "c"], list(TEXTS.values())).metrics == {}


def test_several_seeds_of_a_system_have_mean_and_spread(tmp_path, capsys):
    worse = dict(TEXTS, b="it snowed all day")
    folders = [
        run(tmp_path / "ce-1"),
        run(tmp_path / "ce-2", worse, seed=2),
        run(tmp_path / "m-1", REFERENCES, objective="matches(2)"),
        run(tmp_path / "m-2", objective="matches(2)", seed=2),
    ]
    found = score(capsys, *folders)
    ce, matches = found["over_seeds"]
    each = [system["scores"]["rouge1"] for system in found["systems"]]
    assert (ce["label"], ce["runs"]) == ("ce", ["ce-1", "ce-2"])
    assert ce["scores"]["rouge1"]["mean"] == pytest.approx((each[0] + each[1]) / 2)
    assert ce["against_first"] == {}
    assert matches["against_first"]["rouge1"]["difference"] == pytest.approx(
        (each[2] + each[3] - each[0] - each[1]) / 2
    )
    assert cli.main(["score", *map(str, folders)]) == 0
    assert "± standard deviation over seeds" in capsys.readouterr().out


def test_every_system_over_seeds_is_compared_with_the_first(tmp_path, capsys):
    worse, worst = dict(TEXTS, b="it snowed all day"), dict(TEXTS, b="no")
    folders = [
        run(tmp_path / f"{name}-{seed}", texts, objective=name, seed=seed)
        for name, pair in (("ce", (TEXTS, worse)), ("bag(2)", (worse, worst)), ("matches(2)", (worst, TEXTS)))
        for seed, texts in enumerate(pair)
    ]
    found = score(capsys, *folders)["over_seeds"]
    means = [one["scores"]["rouge1"]["mean"] for one in found]
    for one, mean in zip(found[1:], means[1:], strict=True):
        assert one["against_first"]["rouge1"]["difference"] == pytest.approx(mean - means[0])
        assert one["against_first"]["rouge1"]["difference"] != 0


def test_equal_runs_over_seeds_are_not_called_different(tmp_path, capsys):
    folders = [
        run(tmp_path / f"{name}-{seed}", objective=name, seed=seed) for name in ("ce", "bag(2)") for seed in (1, 2)
    ]
    test = score(capsys, *folders)["over_seeds"][1]["against_first"]["rouge1"]
    assert (test["difference"], test["p"], test["p_holm"]) == (0.0, None, 1.0)


def test_runs_that_differ_in_more_than_the_seed_are_systems_of_their_own(tmp_path, capsys):
    found = score(capsys, run(tmp_path / "a"), run(tmp_path / "b", seed=2, rate=1e-4), run(tmp_path / "c", seed=1))
    assert found["over_seeds"] == [], "another rate; the same seed twice"
    for place, (name, value) in enumerate(
        {"data": "xsum", "split": "validation", "fingerprint": "f11", "generation": {"num_beams": 1}}.items()
    ):
        folder = run(tmp_path / f"other{place}", seed=2)
        about = json.loads((folder / "generation.json").read_text()) | {name: value}
        (folder / "generation.json").write_text(json.dumps(about))
        assert score(capsys, tmp_path / "a", folder)["over_seeds"] == [], name


def test_the_order_of_a_recipe_makes_no_other_system(tmp_path):
    one, other = run(tmp_path / "a"), run(tmp_path / "b", seed=2)
    (other / "recipe.toml").write_text("[train]\nlearning_rate = 3e-05\nseed = 2\n")
    (one / "recipe.toml").write_text("[train]\nseed = 1\nlearning_rate = 3e-05\n")
    (one / "recipe.toml").write_text("x = 1\ny = 2\n" + (one / "recipe.toml").read_text())
    (other / "recipe.toml").write_text("y = 2\nx = 1\n" + (other / "recipe.toml").read_text())
    assert provenance.run(one).setup == provenance.run(other).setup != ""


def test_what_a_training_used_of_its_data_is_read_if_it_is_there(tmp_path):
    folder = run(tmp_path / "a")
    assert provenance.used(folder) == []
    for content, expected in (
        ('{"used": ["train: 3 rows.", 3]}', ["train: 3 rows."]),
        ('{"used": 1}', []),
        ("oops", []),
    ):
        (folder / "prepared.json").write_text(content)
        assert provenance.used(folder) == expected


def test_a_comparison_over_seeds_is_paired_where_the_seeds_are_the_same():
    one, other = {1: 2.0, 2: 4.0, 3: 7.0}, {3: 6.5, 1: 1.0, 2: 3.5}
    paired = significance.between_seeds(one, other)
    assert paired["p"] == pytest.approx(stats.ttest_rel([2, 4, 7], [1, 3.5, 6.5]).pvalue)
    assert paired["difference"] == pytest.approx(2 / 3)
    assert paired["low"] < 2 / 3 < paired["high"]
    half = stats.t.ppf(0.975, 2) * stats.sem([1.0, 0.5, 0.5])
    assert (paired["low"], paired["high"]) == pytest.approx((2 / 3 - half, 2 / 3 + half))
    apart = significance.between_seeds(one, {4: 6.5, 5: 1.0})
    assert apart["difference"] == pytest.approx(13 / 3 - 7.5 / 2)
    assert apart["p"] == pytest.approx(stats.ttest_ind([2, 4, 7], [6.5, 1.0], equal_var=False).pvalue)
    untested = significance.between_seeds(one, {1: 1.0})
    assert untested.pop("difference") == pytest.approx(13 / 3 - 1)
    assert all(map(math.isnan, untested.values()))


def test_a_folder_without_predictions_says_how_to_make_them(tmp_path, capsys):
    (tmp_path / "begun").mkdir()
    assert score(capsys, tmp_path / "begun") == (
        2,
        f"error: no predictions in {tmp_path / 'begun'}, and it is not a run's folder. Give a run's folder after ngramloss generate, or a file of predictions.\n",
    )
    (tmp_path / "begun" / "recipe.toml").write_text("")
    assert score(capsys, tmp_path / "begun") == (
        2,
        f"error: no predictions in {tmp_path / 'begun'}. Generate them with: ngramloss generate {tmp_path / 'begun'}\n",
    )
    (tmp_path / "begun" / "predictions.partial-0.jsonl").write_text("")
    code, said = score(capsys, tmp_path / "begun")
    assert (code, "are not finished. Generate them with: ngramloss generate" in said) == (2, True)


def test_runs_for_other_references_are_not_compared(tmp_path, capsys):
    other = run(tmp_path / "b", references=dict(REFERENCES, b="it was dry"))
    code, said = score(capsys, run(tmp_path / "a"), other)
    assert (code, "have different references for 1 ids ('b')" in said) == (2, True)


def test_scores_of_documents_are_left_out_where_runs_have_others(tmp_path, capsys):
    folders = [run(tmp_path / name) for name in "ab"]
    path = folders[1] / "references.jsonl"
    rows = [json.loads(line) | {"document": "other words"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    together = score(capsys, *folders, "--metrics", "shape")
    alone = [score(capsys, folder, "--metrics", "shape")["systems"][0]["scores"] for folder in folders]
    assert "coverage" not in together["systems"][0]["scores"]
    assert alone[0]["coverage"] > alone[1]["coverage"]


def unlabelled(folder, **changes):
    """A folder as generate leaves it of data without targets."""
    path = run(folder) / "references.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    documents = [{"id": row["id"], "document": changes.get(row["id"], row["document"])} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in documents))
    return folder


NO_TARGETS = "needs the references, and the data of these texts have no targets. Give them with --references FILE."


def test_texts_without_references_are_scored_by_metrics_that_need_none(tmp_path, capsys):
    folder, whole = unlabelled(tmp_path / "a"), run(tmp_path / "b")
    assert score(capsys, folder) == (2, f"error: nothing was scored.\n  rouge: {NO_TARGETS}\n")
    found = score(capsys, folder, "--metrics", "rouge,shape")
    assert found["absent"] == {"rouge": NO_TARGETS}
    assert found["systems"][0]["scores"] == score(capsys, whole, "--metrics", "shape")["systems"][0]["scores"]
    assert "coverage" in found["systems"][0]["scores"], "of the documents"
    found = score(capsys, folder, "--references", whole / "references.jsonl")
    assert found["systems"][0]["scores"] == score(capsys, whole)["systems"][0]["scores"]
    code, said = score(capsys, folder, "--references", folder / "references.jsonl", "--metrics", "shape")
    assert (code, "references.jsonl:1 has no reference. Its columns are id, document;" in said) == (2, True)
    code, said = score(capsys, folder, "--target", "gold")
    assert (code, "has no column 'gold' for the reference" in said) == (2, True)


def test_a_report_needs_references(tmp_path, capsys):
    folder, out = unlabelled(tmp_path / "a"), tmp_path / "page"
    assert cli.main(["report", str(folder), "--metrics", "shape", "-o", str(out)]) == 2
    assert "the data of these texts have no targets. Give them with --references FILE." in capsys.readouterr().err
    assert not out.exists()


def test_systems_without_references_must_have_the_same_documents(tmp_path, capsys):
    folders = [unlabelled(tmp_path / "a"), unlabelled(tmp_path / "b"), unlabelled(tmp_path / "c", b="another")]
    assert len(score(capsys, *folders[:2], "--metrics", "shape")["systems"]) == 2
    code, said = score(capsys, *folders, "--metrics", "shape")
    assert (code, "have different documents for 1 ids ('b')" in said) == (2, True)


@pytest.mark.parametrize("first", [0, 1])
def test_systems_with_and_without_references_are_not_scored_by_those_of_one(tmp_path, capsys, first):
    folders = [unlabelled(tmp_path / "a"), run(tmp_path / "b")]
    code, said = score(capsys, folders[first], folders[1 - first])
    assert (code, f"{folders[0]} has no references, because its data have no targets, and {folders[1]}" in said) == (
        2,
        True,
    )
    references = ("--references", folders[1] / "references.jsonl")
    assert len(score(capsys, *folders, *references)["systems"]) == 2


def test_a_folder_that_is_not_there_is_named_with_those_that_are(tmp_path, capsys):
    run(tmp_path / "mine")
    code, said = score(capsys, tmp_path / "mien")
    assert (code, f"no such file or folder: {tmp_path / 'mien'}. Did you mean mine?" in said) == (2, True)
    assert cli.main(["generate", str(tmp_path / "mien")]) == 2
    assert "Did you mean mine?" in capsys.readouterr().err


def test_files_alone_need_references(tmp_path, capsys):
    path = run(tmp_path / "a") / "predictions.jsonl"
    code, said = score(capsys, path)
    assert (code, "give --references FILE" in said) == (2, True)
    (tmp_path / "a" / "references.jsonl").unlink()
    assert score(capsys, tmp_path / "a")[0] == 2


def test_documents_that_are_given_are_read_instead_of_a_runs_own(tmp_path, capsys):
    folder = run(tmp_path / "a")
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"id": key, "document": "x y"}) + "\n" for key in TEXTS))
    own, given = (
        score(capsys, folder, "--metrics", "shape"),
        score(capsys, folder, "--metrics", "shape", "--documents", tmp_path / "docs.jsonl"),
    )
    assert own["systems"][0]["scores"]["coverage"] > given["systems"][0]["scores"]["coverage"] == 0.0


def test_a_run_without_documents_is_measured_without_them(tmp_path, capsys):
    folder = run(tmp_path / "a")
    (folder / "references.jsonl").write_text(
        "".join(json.dumps({"id": key, "reference": text}) + "\n" for key, text in REFERENCES.items())
    )
    found = score(capsys, folder, "--metrics", "shape")["systems"][0]
    assert found["scores"].keys() == {"words", "repeated3"}
    assert "documents:no" in found["signature"]["shape"]


def test_nothing_is_kept_where_nothing_was_found(tmp_path, capsys):
    folder = run(tmp_path / "a")
    assert cli.main(["score", str(folder), "--metrics", "factcc"]) == 2
    assert not list(folder.glob("scores*"))


def test_a_metric_that_is_lost_half_way_is_told_of_and_not_kept(tmp_path, capsys, monkeypatch):
    def fleeting(references, predictions):
        if predictions != list(TEXTS.values()):
            raise Absent("gone.")
        return Scores({"fleeting": [1.0, 2.0, 3.0]}, "fleeting")

    monkeypatch.setitem(results.METRICS, "fleeting", Metric(fleeting))
    folders = [run(tmp_path / "a"), run(tmp_path / "b", REFERENCES)]
    found = score(capsys, *folders, "--metrics", "rouge,fleeting")
    assert found["absent"] == {"fleeting": "gone."}
    assert found["systems"][0]["signature"].keys() == {"rouge"}
    assert "fleeting" not in (folders[0] / "scores.jsonl").read_text()


def test_runs_and_files_are_scored_together(tmp_path, capsys):
    folder = run(tmp_path / "a")
    other = tmp_path / "other.jsonl"
    other.write_text((folder / "predictions.jsonl").read_text())
    found = score(capsys, folder, other)
    assert [system["name"] for system in found["systems"]] == ["a", "other"]
    assert found["systems"][1]["against_first"]["rouge1"]["difference"] == 0.0


# What is odd


def test_texts_outside_their_limits_are_told_of(tmp_path, capsys):
    folder = run(tmp_path / "a", tokens={"a": 9, "b": 4, "c": 12}, limits=(5, 12))
    assert score(capsys, folder)["systems"][0]["audit"] == [
        "1 text with fewer than 5 tokens",
        "1 text with exactly the maximum of 12 tokens, which may be cut off",
    ]
    assert score(capsys, folder, "--limits", ":8")["systems"][0]["audit"] == ["2 texts with more than 8 tokens"]
    about = json.loads((folder / "generation.json").read_text())
    search = about["generation"]  # of a decoder-only model, which counts new tokens
    about["generation"] = {"min_new_tokens": search.pop("min_length"), "max_new_tokens": search.pop("max_length")}
    (folder / "generation.json").write_text(json.dumps(about))
    assert len(score(capsys, folder)["systems"][0]["audit"]) == 2


def test_without_tokens_words_are_counted_and_said_to_be(tmp_path, capsys):
    folder = run(tmp_path / "a", limits=(5, 20))  # of tokens: words are not held against them
    assert score(capsys, folder)["systems"][0]["audit"] == []
    assert score(capsys, folder, "--limits", "5:20")["systems"][0]["audit"] == [
        "1 text with fewer than 5 words (words were counted; a text has more tokens)"
    ]


@given(st.lists(st.integers(0, 9)), st.integers(0, 5), st.integers(5, 9))
def test_the_audit_counts_what_a_loop_counts(lengths, least, most):
    told = oddities(["x"] * len(lengths), lengths, LengthLimits(least, most))[len(lengths) > 1 :]
    short, long, full = sum(n < least for n in lengths), sum(n > most for n in lengths), sum(n == most for n in lengths)
    assert [int(one.split()[0]) for one in told] == [count for count in (short, long, full) if count]


def test_empty_and_repeated_texts_are_counted_apart():
    assert oddities(["", "", " ", "a", "a", "a", "b"]) == ["3 empty", "2 texts identical to another document's"]


def test_words_say_nothing_of_texts_that_were_cut_off():
    assert oddities(["a b"], None, LengthLimits(0, 2)) == []
    assert oddities(["a b"], [2], LengthLimits(0, 2)) == [
        "1 text with exactly the maximum of 2 tokens, which may be cut off"
    ]


def test_limits_may_be_one_number_or_open():
    assert limits("5:5") == LengthLimits(5, 5)
    assert limits("5:") == LengthLimits(5, 0)


@pytest.mark.parametrize("wrong", ["5", "a:b", ":", "9:3", "-1:5", "1:2:3"])
def test_limits_that_cannot_be_read_get_a_sentence(wrong):
    with pytest.raises(ValueError, match="limits must be written MIN:MAX"):
        limits(wrong)


# Figures that are no numbers


def test_documents_without_a_figure_are_counted_and_written_as_null(tmp_path, capsys, monkeypatch):
    def partly(references, predictions):
        return Scores({"partly": [1.0, math.nan, 3.0]}, "partly")

    monkeypatch.setitem(results.METRICS, "partly", Metric(partly))
    folder = run(tmp_path / "a")
    found = score(capsys, folder, "--metrics", "partly")
    assert found["systems"][0]["scores"] == {"partly": 2.0}
    assert found["left_out"] == {"partly": 1}
    assert '"partly": null' in (folder / "scores.jsonl").read_text()
    again = score(capsys, folder, "--metrics", "partly")
    assert again == found
    assert cli.main(["score", str(folder), "--metrics", "partly"]) == 0
    assert "partly: 1 documents without a score in some system are left out." in capsys.readouterr().out


@pytest.mark.slow
def test_documents_that_another_system_lacks_count_in_the_saved_scores_of_a_run(tmp_path, capsys, monkeypatch):
    def lengths(references, predictions):
        words = [float(len(text.split())) if text else math.nan for text in predictions]
        letters = np.array([[len(text), 1.0 if text else math.nan] for text in predictions])
        pooled = {"mean_letters": Pooled(letters, lambda sums: sums[..., 0] / sums[..., 1])}
        return Scores({"mean_words": words, "mean_letters": words}, "lengths", pooled)

    def saved(folder):
        about = json.loads((folder / "scores.json").read_text())
        return about["scores"], about["intervals"]

    names = ("mean_words", "mean_letters")
    monkeypatch.setitem(results.METRICS, "lengths", Metric(lengths, scores={name: Score(name) for name in names}))
    whole, weak = run(tmp_path / "whole"), run(tmp_path / "weak", TEXTS | {"a": ""})
    alone = {}
    for folder in (whole, weak):
        score(capsys, folder, "--metrics", "lengths")
        alone[folder] = saved(folder)
        (folder / "scores.json").unlink()
    found = score(capsys, weak, whole, "--metrics", "lengths")
    assert found["left_out"] == {"mean_words": 1, "mean_letters": 1}
    assert [system["scores"]["mean_words"] for system in found["systems"]] == [4.5, 4.5], "of the same two documents"
    assert alone[whole][0]["mean_words"] == 5.0
    for folder in (whole, weak):
        assert saved(folder) == alone[folder]


def test_a_figure_that_no_document_has_is_none_over_seeds_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        results.METRICS, "none", Metric(lambda references, predictions: Scores({"none": [math.nan] * 3}, "none"))
    )
    folders = [
        run(tmp_path / "ce-1"),
        run(tmp_path / "ce-2", seed=2),
        run(tmp_path / "m-1", objective="bag(2)"),
        run(tmp_path / "m-2", objective="bag(2)", seed=2),
    ]
    found = score(capsys, *folders, "--metrics", "none")["over_seeds"]
    assert found[0]["scores"]["none"] == dict.fromkeys(("mean", "spread", "low", "high"))
    assert cli.main(["score", *map(str, folders), "--metrics", "none"]) == 0
    assert ["ce", "2", "–"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_figure_without_bounds_is_left_out_kept_or_fresh(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        results.METRICS, "most", Metric(lambda references, predictions: Scores({"most": [1.0, math.inf, 3.0]}, "most"))
    )
    folder = run(tmp_path / "a")
    fresh = score(capsys, folder, "--metrics", "most")
    assert fresh["left_out"] == {"most": 1}
    assert score(capsys, folder, "--metrics", "most") == fresh


def test_a_figure_that_no_document_has_is_null(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        results.METRICS, "none", Metric(lambda references, predictions: Scores({"none": [math.nan] * 3}, "none"))
    )
    assert score(capsys, run(tmp_path / "a"), run(tmp_path / "b"), "--metrics", "none")["systems"][0]["scores"] == {
        "none": None
    }
    assert cli.main(["score", str(tmp_path / "a"), "--metrics", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "–"]


def test_lower_is_better_is_marked(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        results.METRICS,
        "far",
        Metric(
            lambda references, predictions: Scores({"far": [1.0] * 3}, "far"),
            scores={"far": Score("Far", better="lower")},
        ),
    )
    folder = run(tmp_path / "a")
    assert score(capsys, folder, "--metrics", "far")["lower_is_better"] == ["far"]
    assert cli.main(["score", str(folder), "--metrics", "far"]) == 0
    out = capsys.readouterr().out
    assert "far ↓" in out
    assert "↓: lower is better." in out
    assert cli.main(["score", str(folder), "--metrics", "far", "--latex"]) == 0
    assert r"far $\downarrow$" in capsys.readouterr().out


def test_marks_are_corrected_for_several_comparisons():
    figures = significance.compare(
        [{"x": [1.0, 2.0, 3.0, 4.0] * 5}] + [{"x": [1.1, 2.0, 3.2, 4.1] * 5}] * 3, samples=50, shuffles=50
    )["x"]
    larger = [max(one.p_bootstrap, one.p_randomisation) for one in figures[1:]]
    assert [one.p_holm for one in figures[1:]] == significance.holm(larger)
    assert figures[0].p_holm is None
    for p_holm, mark in ((0.5, ""), (0.02, "*")):
        score = significance.CorpusScore(50.0, 49.0, 52.0, 1.0, 0.1, 2.0, 0.001, 0.001, p_holm)
        cell = tables.cell(score, Score("R-1"))
        assert (cell.text, cell.value, cell.mark, cell.interval) == ("50.00", 50.0, mark, "±1.50")


def test_json_tells_each_chance_and_both_ends_of_the_difference(tmp_path, capsys):
    texts = scored_texts.align(None, [run(tmp_path / "a"), run(tmp_path / "b", REFERENCES)])
    one = results.score_systems(texts, samples=20, shuffles=20).scores["rouge1"][1]
    told = score(capsys, tmp_path / "a", tmp_path / "b")["systems"][1]
    assert told["against_first"]["rouge1"] == {
        "difference": one.difference,
        "interval": [one.difference_low, one.difference_high],
        "p_bootstrap": one.p_bootstrap,
        "p_randomisation": one.p_randomisation,
        "p_holm": one.p_holm,
    }
    assert told["intervals"]["rouge1"] == [one.low, one.high]
    assert len({one.p_bootstrap, one.p_randomisation}) == 2
    assert cli.main(["score", str(tmp_path / "a")]) == 0
    assert f"a: generation|model:{tmp_path / 'a'}|weights:01231|" in capsys.readouterr().out


# Better and worse


def test_better_and_worse_are_said_by_what_is_better_in_a_score(tmp_path, capsys, monkeypatch):
    def errors(predictions):
        counts = [[float(text.count(word)) for text in predictions] for word in ("wrong", "right", "long")]
        return Scores(dict(zip(("errors", "hits", "length"), counts, strict=True)), "errors|1")

    described = {
        "errors": Score("Errors", better="lower"),
        "hits": Score("Hits"),
        "length": Score("L", better="neither"),
    }
    monkeypatch.setitem(results.METRICS, "errors", Metric(errors, reads=("predictions",), scores=described))
    keys = [str(number) for number in range(12)]
    texts = {"first": "wrong right long", "good": "right right", "bad": "wrong wrong right", "same": "right wrong long"}
    folders = [
        run(tmp_path / name, dict.fromkeys(keys, text), dict.fromkeys(keys, "x")) for name, text in texts.items()
    ]
    assert cli.main(["score", *map(str, folders), "--metrics", "errors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[8:10] == ["Better than first: good (errors, hits).", "Worse than first: bad (errors)."]
    assert cli.main(["report", *map(str, folders), "--metrics", "errors", "-o", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "Better than ce (first): ce (good) (errors, hits)." in page


def test_over_seeds_zero_variance_and_too_few_seeds_are_different_sentences(tmp_path, capsys):
    def seeds(name, *values):
        return [
            run(tmp_path / f"{name}{seed}", {"a": "the cat sat"[:size], "b": "x"}, {"a": "the cat sat", "b": "x"})
            for seed, size in enumerate(values)
        ]

    given = {
        "first": seeds("f", 3, 7, 3),
        "steady": seeds("s", 3, 7, 3),
        "few": seeds("l", 3),
        "up": seeds("u", 7, 11, 7),
    }
    groups = [word for name, folders in given.items() for word in ("--group", f"{name}={','.join(map(str, folders))}")]
    assert cli.main(["score", *groups, "--samples", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tested = [line for line in lines if line.startswith(("Better", "Worse", "No test"))]
    assert tested[0].startswith("Better than first: up (rouge1")
    assert tested[1:] == [
        "No test over seeds with few, of one run: a test needs two runs or more of both.",
        "No test over seeds where the difference to first does not vary: steady (rouge1, rouge2, rougeL, rougeLsum).",
    ]


# How outputs were decoded


def decoded(folder, search, *, max_source=512, prompt=None, precision="fp32", **texts):
    """A run whose predictions were decoded so, as ``generate`` records it."""
    made = run(folder, **texts)
    about = json.loads((made / "generation.json").read_text())
    about |= {"generation": search, "shape": {"max_source": max_source, "prefix": "", "prompt": prompt}}
    about |= {"engine": {"name": "hf", "precision": precision}}
    (made / "generation.json").write_text(json.dumps(about))
    return made


def test_a_prompt_with_a_bar_is_one_part_of_a_signature(tmp_path, capsys):
    template = {"before": "Text | ", "after": " | TL;DR:", "lead": None}
    folders = [decoded(tmp_path / "run", {}), decoded(tmp_path / "base", {}, prompt=template)]
    (warning,) = score(capsys, *folders)["decoded_differently"]
    assert warning.endswith(": prompt none (run) against Text ¦ {source} ¦ TL;DR: (base).")


def test_every_difference_in_decoding_is_named_above_the_table(tmp_path, capsys):
    search = {"num_beams": 4, "length_penalty": 2.0, "max_length": 62, "repetition_penalty": 1.2}
    template = {"before": "Text:\n", "after": "\nTL;DR:", "lead": None}
    folders = [
        decoded(tmp_path / "run", search),
        decoded(
            tmp_path / "base",
            {"max_new_tokens": 20},
            max_source=1024,
            prompt=template,
            precision="bf16",
            objective="bag(2)",
        ),
    ]
    warning = (
        "warning: decoded differently, which may change scores by itself: max_source 512 (run) against 1024 (base); "
        "prompt none (run) against Text:\\n{source}\\nTL;DR: (base); precision fp32 (run) against bf16 (base); "
        "num_beams 4 (run) against 1 (base); max_length 62 (run) against 20 (base); "
        "repetition_penalty 1.2 (run) against 1 (base)."
    )
    assert score(capsys, *folders)["decoded_differently"] == [warning]
    for form, stream in (("--metrics=rouge", "out"), ("--markdown", "err"), ("--latex", "err")):
        assert cli.main(["score", *map(str, folders), form, "--samples", "20"]) == 0
        assert getattr(capsys.readouterr(), stream).startswith(f"{warning}\n")
    assert cli.main(["report", *map(str, folders), "--samples", "20", "-o", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    as_in_table = warning.replace("(run)", "(ce)").replace("(base)", "(bag(2))")
    assert page.index(as_in_table) < page.index("Table of results")
    (shown,) = re.findall(r"<tr><th[^>]*>generation.generation.num_beams</th>(.*?)</tr>", page)
    assert re.findall("<td[^>]*>(.*?)</td>", shown) == ["4", "1"]


@pytest.mark.parametrize(
    "other",
    [
        {"num_beams": 1, "length_penalty": 1.0, "min_length": 0, "max_length": 20, "no_repeat_ngram_size": 0},
        {"max_length": 20, "length_penalty": 2, "early_stopping": True, "temperature": 0.5},
        {"max_new_tokens": 20, "repetition_penalty": 1.0, "do_sample": False, "renormalize_logits": None},
    ],
)
def test_a_missing_value_is_its_default_and_settings_without_effect_do_not_count(tmp_path, other):
    runs = [provenance.run(decoded(tmp_path / name, search)) for name, search in (("a", {}), ("b", other))]
    (tmp_path / "lead").mkdir()
    (tmp_path / "lead" / "generation.json").write_text('{"model": "lead-3"}')
    runs.append(provenance.run(tmp_path / "lead"))  # no search wrote its texts
    assert provenance.decoded_differently((each.label, provenance.written_by(each)) for each in runs) == []


def test_what_all_systems_share_is_printed_once(tmp_path, capsys):
    folders = [run(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"), 1)]
    assert cli.main(["score", *map(str, folders), "--samples", "20"]) == 0
    *_, shared, a, b = capsys.readouterr().out.splitlines()
    assert shared.startswith("generation|data:newswire|split:test|")
    assert (a, b) == tuple(
        f"{folder.name}: model:{folder}|weights:0123{seed}" for seed, folder in enumerate(folders, 1)
    )


# What a folder says


def test_a_folder_says_what_it_knows(tmp_path):
    folder = run(tmp_path / "x", objective="ce + rewards(2)", seed=7)
    (folder / "log.jsonl").write_text(
        '{"step": 1, "docs_per_second": 10.0}\n{"step": 2, "docs_per_second": 30.0}\n{"step": 2, "eval_ce": 1}\n{"st'
    )
    found = provenance.run(folder)
    assert (found.label, found.seed, found.is_baseline) == ("ce + rewards(2)", 7, False)
    assert provenance.docs_per_second(folder) == 20.0
    assert len(provenance.log(folder)) == 3
    (tmp_path / "bare").mkdir()
    bare = provenance.run(tmp_path / "bare")
    assert (
        bare.label,
        bare.seed,
        bare.setup,
        provenance.written_by(bare),
        provenance.docs_per_second(tmp_path / "bare"),
    ) == ("bare", None, "", "", None)
    (tmp_path / "bare" / "generation.json").write_text('{"model": "lead-3"}')
    assert provenance.run(tmp_path / "bare").is_baseline
    (tmp_path / "bare" / "generation.json").write_text('{"model": "lead-3-large"}')
    assert not provenance.run(tmp_path / "bare").is_baseline
    (tmp_path / "bare" / "generation.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation\.json is not JSON"):
        provenance.run(tmp_path / "bare")
    (folder / "recipe.toml").write_text("= 3")
    with pytest.raises(ValueError, match=r"recipe\.toml is not TOML"):
        provenance.run(folder)


@pytest.mark.parametrize(
    "recipe", ["train = 3\n", "objective = 3\n[train]\nseed = [1]\n", "[train]\nseed = 1\nday = 2026-01-01\n"]
)
@pytest.mark.parametrize(
    "generation",
    [
        [],
        {"generation": [1]},
        {"model": 3, "versions": 3, "generation": {"num_beams": 2}},
        {"generation": {"min_length": "x", "max_length": [3]}},
    ],
)
def test_files_of_other_tools_say_what_they_can(tmp_path, capsys, recipe, generation):
    folder = run(tmp_path / "a", tokens=dict.fromkeys(TEXTS, 5))
    (folder / "recipe.toml").write_text(recipe)
    (folder / "generation.json").write_text(json.dumps(generation))
    assert score(capsys, folder)["systems"][0]["scores"]["rouge1"] > 80


def test_broken_references_of_a_run_are_named(tmp_path, capsys):
    folder = run(tmp_path / "a")
    (folder / "references.jsonl").write_text("{\n")
    code, said = score(capsys, folder)
    assert (code, f"{folder / 'references.jsonl'}:1: malformed JSON" in said) == (2, True)


def test_no_file_of_a_run_is_written_over(tmp_path, capsys):
    folder = run(tmp_path / "a")
    code, said = score(capsys, folder, "--per-document", folder / "references.jsonl")
    assert (code, "is an input and would be overwritten" in said) == (2, True)
    assert score(capsys, folder, "--per-document", folder / "each.jsonl")["documents"] == 3


def test_a_run_and_its_own_file_are_one_system(tmp_path, capsys):
    folder = run(tmp_path / "a")
    code, said = score(capsys, folder, folder / "predictions.jsonl")
    assert (code, "are the same file" in said) == (2, True)


def test_names_of_folders_are_theirs_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(run(tmp_path / "xsum-v1.5"))
    assert scored_texts.align(None, [tmp_path / "xsum-v1.5"]).names == ["xsum-v1.5"]
    assert scored_texts.align(None, [type(tmp_path)(".")]).names == ["xsum-v1.5"]


def test_a_folder_has_the_interval_of_each_score_and_keeps_it_when_another_metric_is_scored(tmp_path, capsys):
    folder = run(tmp_path / "a")
    assert cli.main(["score", str(folder), "--metrics", "rouge", "--json"]) == 0
    (system,) = json.loads(capsys.readouterr().out)["systems"]
    saved = json.loads((folder / "scores.json").read_text())
    assert {name: tuple(ends) for name, ends in saved["intervals"].items()} == {
        name: pytest.approx(tuple(ends)) for name, ends in system["intervals"].items()
    }
    low, high = saved["intervals"]["rouge1"]
    assert low < saved["scores"]["rouge1"] < high
    assert cli.main(["score", str(folder), "--metrics", "chrf"]) == 0
    again = json.loads((folder / "scores.json").read_text())
    assert again["intervals"]["rouge1"] == [low, high]
    assert again["metrics"]["rouge"]["version"] == __version__


@pytest.mark.slow
def test_whatever_a_folder_says_of_its_texts_a_report_has_it_as_text(tmp_path, capsys):
    folder, other = run(tmp_path / "a"), run(tmp_path / "b", seed=2)
    about = json.loads((folder / "generation.json").read_text())
    fields = ("model", "data", "split", "generation", "versions")
    for value in ([], {}, "\x1b\u202e<b>"):
        (folder / "generation.json").write_text(json.dumps(about | dict.fromkeys(fields, value)))
        assert cli.main(["report", str(folder), str(other), "-o", str(tmp_path / "page")]) == 0
        assert not {"\x1b", "\u202e"} & {*(tmp_path / "page" / "index.html").read_text()}
    (folder / "generation.json").write_text(json.dumps(about | {"weights": "x"}))
    (folder / "weights.json").write_text(json.dumps({"fingerprint": "x"}))
    seen = {"id": "a", "tokens": ["the"], "best": ["a"], "confidence": [0.5], "label_probability": [None]}
    for field, value in {"best": "x", "confidence": [{}], "tokens": None}.items():
        (folder / "seen.jsonl").write_text(json.dumps(seen | {field: value}) + "\n")
        assert cli.main(["report", str(folder), "-o", str(tmp_path / "page")]) == 2
        assert f"seen.jsonl: {field}" in capsys.readouterr().err
