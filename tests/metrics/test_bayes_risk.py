"""Minimum Bayes risk: the mean score of each text against the others of its source."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss import METRICS, Metric, Scores, cli
from ngramloss.data import Example
from ngramloss.errors import UserError
from ngramloss.metrics.candidate_scores import candidate_metric, check_utility, expected_scores, score_candidates
from ngramloss.metrics.overlap import bleu, chrf

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


@pytest.mark.parametrize(("metric", "kind", "options"), [(bleu, "BLEU", {"effective_order": True}), (chrf, "CHRF", {})])
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_the_score_of_a_document_is_sacrebleus_sentence_score(metric, kind, options, rows):
    from sacrebleu import metrics

    rows += [(text, rows[0][1]) for text, _ in rows]  # candidates of one source have the same references
    sentence = getattr(metrics, kind)(**options)
    (found,) = metric([golds for _, golds in rows], [text for text, _ in rows]).values.values()
    assert found == [sentence.sentence_score(text, golds).score for text, golds in rows]


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


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments)])


BEAMS = ("--set", "generation.num_beams=4", "--groups", "2", "--num-return", "4")
SAMPLES = ("--sample", "--num-return", "5", "--temperature", "0.5")


@pytest.mark.slow
@pytest.mark.parametrize(("search", "metric"), [(BEAMS, "chrf"), (SAMPLES, "chrf")], ids=["groups", "samples"])
def test_generate_orders_texts_by_how_much_they_agree(run, tmp_path, search, metric):
    assert generate(run, "--limit", 6, *search, "--out", tmp_path / "plain") == 0
    assert generate(run, "--limit", 6, *search, "--rerank", "mbr", "--metric", metric, "--out", tmp_path / "mbr") == 0
    plain_rows, found = rows_in(tmp_path / "plain"), rows_in(tmp_path / "mbr")
    moved = 0
    for before, row in zip(plain_rows, found, strict=True):
        texts = before["candidates"]
        means = plain(candidate_metric(metric, {}), Example(row["id"], "", ""), texts)
        order = sorted(range(len(texts)), key=lambda place: -round(means[place], 12))
        assert row["candidates"] == [texts[place] for place in order]
        assert row["prediction"] == row["candidates"][0]
        assert list(row) == list(before), "the same keys as without reranking"
        assert row["tokens"] == before["tokens"] or order[0], "the tokens are those of the chosen text"
        moved += order[0] != 0
    assert moved
    saved = json.loads((tmp_path / "mbr" / "generation.json").read_text())
    assert saved["generation"]["rerank"] == "mbr"
    assert saved["utility"]["scores"] == [metric]
    assert generate(run, "--limit", 6, *search, "--rerank", "mbr", "--metric", "rouge2", "--out", tmp_path / "mbr") == 2


def test_the_signature_names_the_utility_and_a_stopped_job_goes_on(run, tmp_path, capsys, monkeypatch):
    from ngramloss.generation import predictions
    from ngramloss.scoring import provenance

    command = (run, "--limit", 4, *SAMPLES, "--rerank", "mbr", "--out")
    assert generate(*command, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(predictions, "expected_scores", lambda *_: 1 / 0)
        assert generate(*command, tmp_path / "killed") == 1
    assert not (tmp_path / "killed" / "predictions.jsonl").exists()
    assert generate(*command, tmp_path / "killed") == 0
    assert rows_in(tmp_path / "killed") == rows_in(tmp_path / "whole")
    assert "|rerank:mbr|utility:rouge1+rouge2+rougeLsum|" in provenance.written_by(provenance.run(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metric", "bleu"], "--metric is what --rerank mbr compares texts by; add --rerank mbr"),
        (["--rerank", "mbr"], "--rerank orders several texts of a document, but the search has 1 beam."),
        ([*SAMPLES, "--rerank", "mbr", "--metric", "blue"], "--metric: unknown metric or score 'blue'."),
        (
            [*SAMPLES, "--rerank", "mbr", "--metric", "words"],
            "so candidates cannot be scored by it. Use rouge, bleu or chrf.",
        ),
        ([*SAMPLES, "--rerank", "mbr", "--set", "bleu.tokenize=zh"], "options of the metric, rouge.*, got"),
        ([*SAMPLES, "--set", "bleu.tokenize=zh"], "bleu"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(run, tmp_path, capsys, arguments, sentence):
    options = ("--limit", 2, "--set", "generation.num_beams=1", "--out", tmp_path / "x")
    assert generate(run, *options, *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_options_of_the_metric_reach_the_utility(run, tmp_path):
    mbr = ("--rerank", "mbr", "--metric", "chrf", "--set", "chrf.word_order=2")
    assert generate(run, "--limit", 2, *SAMPLES, *mbr, "--out", tmp_path) == 0
    assert json.loads((tmp_path / "generation.json").read_text())["utility"]["options"] == {"word_order": "2"}


@pytest.mark.slow
def test_rerank_apply_mbr_chooses_what_generate_would(run, tmp_path, capsys):
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
    assert "--metric is what mbr compares texts by, and first compares none." in capsys.readouterr().err
