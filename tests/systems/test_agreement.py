"""Minimum Bayes risk: the mean score of each text against the others of its source."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss import METRICS, Metric, Scores, cli
from ngramloss.data import Example
from ngramloss.errors import UserError
from ngramloss.metrics.candidate_scores import candidate_metric, score_candidates
from ngramloss_systems.agreement import check_utility, expected_scores

WORDS = ["cats", "dogs", "sat", "ran", "."]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)


def plain(metric, example, texts):
    """The definition: each text against each other text, one call a pair."""
    means = []
    for place, text in enumerate(texts):
        others = [other for number, other in enumerate(texts) if number != place]
        scores = [
            score_candidates(metric, [Example(example.id, example.source, other)], [[text]])[0][0] for other in others
        ]
        means.append(sum(scores) / len(scores) if scores else 0.0)
    return means


@pytest.mark.parametrize("name", ["rouge", "rouge2", "bleu", "chrf"])
@settings(max_examples=25, deadline=None)
@given(groups=st.lists(st.lists(TEXTS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_mean_score_against_the_others_is_that_of_plain_loops(name, groups):
    metric = candidate_metric(name, {})
    examples = [Example("same id", "a source", "unused") for _ in groups]
    found = expected_scores(metric, examples, groups)
    for example, group, means in zip(examples, groups, found, strict=True):
        assert means == pytest.approx(plain(metric, example, group), abs=1e-12)


def test_a_text_counts_as_often_as_it_occurs():
    """The two copies agree with each other, so they are ahead of a text that is as near to each of the others."""
    texts = ["dogs ran", "cats sat", "cats sat"]
    (found,) = expected_scores(candidate_metric("rouge1", {}), [Example("a", "", "")], [texts])
    assert found == [0.0, 0.5, 0.5]


def test_one_text_alone_and_texts_of_others_are_not_compared():
    metric = candidate_metric("rouge1", {})
    found = expected_scores(
        metric, [Example("a", "", ""), Example("b", "", "")], [["cats sat"], ["cats sat", "dogs sat"]]
    )
    assert found == [[0.0], [0.5, 0.5]]


def test_sentences_of_both_sides_are_put_on_lines():
    metric = candidate_metric("rougeLsum", {})
    texts = ["The cat sat. The dog ran.", "The dog ran. The cat sat."]
    (flat,), (lines,) = (
        expected_scores(each, [Example("a", "", "")], [texts]) for each in (metric, metric._replace(lines="en"))
    )
    assert lines == [1.0, 1.0]
    assert max(flat) < 1


def test_a_metric_reads_the_source_of_the_texts():
    def echo(documents, references, predictions):
        values = [100.0 * (document == gold[0]) for document, gold in zip(documents, references, strict=True)]
        return Scores({"echo": values}, "echo")

    METRICS["echo"] = Metric(echo, reads=("documents", "references", "predictions"))
    try:
        found = expected_scores(
            candidate_metric("echo", {}), [Example("a", "x", ""), Example("b", "y", "")], [["x", "y"]] * 2
        )
    finally:
        del METRICS["echo"]
    assert found == [[0.0, 1.0], [1.0, 0.0]]


def test_a_metric_with_a_model_of_its_own_is_refused():
    metric = candidate_metric("rouge", {})._replace(name="bertscore")
    with pytest.raises(UserError, match=r"--metric bertscore has a model of its own, .*\. Use rouge, bleu or chrf\."):
        check_utility(metric, [Example("a", "", "")])


# The commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny finished run on the built-in corpus."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    changes = ["model.width=16", "model.vocabulary=400", "data.limit=40", "train.max_steps=2", "train.warmup_steps=0"]
    changes += ["train.eval_every=0", "generation.max_length=12", "model.feed_forward=16", "model.init_std=0.5"]
    assert cli.main(["train", "demo", "--run", str(folder), *(word for one in changes for word in ("--set", one))]) == 0
    return folder


def rows_in(folder, name="predictions.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_rerank_apply_mbr_chooses_the_text_that_agrees_most(run, tmp_path, capsys):
    assert cli.main(["candidates", str(run), "--limit", "6", "--count", "4", "--out", str(tmp_path / "made")]) == 0
    command = ["rerank", "apply", "mbr", str(tmp_path / "made"), "--out"]
    assert cli.main([*command, str(tmp_path / "usual")]) == 0
    assert "texts are compared by rouge (rouge1 + rouge2 + rougeLsum" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path / "chrf"), "--metric", "chrf"]) == 0
    made = rows_in(tmp_path / "made", "candidates.jsonl")
    for row, chosen in zip(made, rows_in(tmp_path / "chrf"), strict=True):
        means = plain(candidate_metric("chrf", {}), Example(row["id"], "", ""), row["candidates"])
        assert chosen["prediction"] == row["candidates"][max(range(4), key=lambda place: round(means[place], 12))]
    saved = json.loads((tmp_path / "chrf" / "generation.json").read_text())
    assert (saved["model"], saved["utility"]["name"]) == ("mbr", "chrf")
    assert cli.main([*command, str(tmp_path / "usual"), "--metric", "chrf"]) == 2, "other settings"
    assert cli.main(["rerank", "apply", "first", *command[3:], str(tmp_path / "x"), "--metric", "chrf"]) == 2
    assert "--metric is an option of mbr, not of first." in capsys.readouterr().err
