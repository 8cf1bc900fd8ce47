"""ngramloss candidates: several distinct texts of each source, the beam's first, and what each scores."""

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise

import models
import pytest
import torch
from forks import fork, fork_ranks, killed_at_third_call
from searches import SOURCES, tiny, with_settings

from ngramloss import METRICS, Metric, Scores, cli
from ngramloss.data import Example, fingerprint, newswire
from ngramloss.data.candidates import about_candidates, check_candidates, read_candidates, text_hashes
from ngramloss.errors import MissingFileError, UserError
from ngramloss.generation import candidates, load_job, predictions
from ngramloss.generation.job import job
from ngramloss.metrics.candidate_scores import candidate_metric, check_metric, score_candidates
from ngramloss.metrics.overlap import bleu
from ngramloss.metrics.rouge import rouge as rouge_scores
from ngramloss.models.teacher_forced import text_logp
from ngramloss.output import progress
from ngramloss.scoring import provenance
from ngramloss.search import engines, writer
from ngramloss.search.engines import graph, hf
from ngramloss.search.engines.hf import search_of
from ngramloss.search.writer import Text, _by_probability
from ngramloss.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("own_cache")

ROW = {"id": "a", "candidates": ["x", "y"], "scores": [0.5, 1], "tokens": [3, 4]}


# Reading


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_candidates_are_read_by_id_in_the_order_of_the_file(tmp_path):
    path = written(tmp_path / "candidates.jsonl", ROW, {"id": 7, "candidates": [""], "scores": [0.0]})
    found = read_candidates(path)
    assert found.rows == {"a": (("x", "y"), (0.5, 1.0)), "7": (("",), (0.0,))}
    assert list(found.rows) == ["a", "7"]
    assert read_candidates(tmp_path) == found, "a folder stands for its file"
    assert len(found.fingerprint) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"id": "b"},
        {"candidates": ["y", "x"]},
        {"scores": [0.5, 0.9]},
        {"scores": [1, 0.5]},
        {"candidates": ["xy", ""]},
        {"candidates": ["x"], "scores": [0.5]},
    ],
)
def test_the_fingerprint_is_that_of_ids_texts_and_scores(tmp_path, change):
    def fingerprint(row):
        return read_candidates(written(tmp_path / "c.jsonl", row)).fingerprint

    assert fingerprint(ROW | change) != fingerprint(ROW) == fingerprint(ROW | {"tokens": [8, 9], "more": 1})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "c.jsonl:2: malformed JSON"),
        ("[1]", "c.jsonl:2: expected a JSON object, got list"),
        ({"id": "b", "candidates": ["x"]}, "c.jsonl:2: no key 'scores'"),
        ({"scores": [1]}, "no key 'id', 'candidates'"),
        ({"id": None, "candidates": ["x"], "scores": [1]}, "'id' should be text, got null"),
        ({"id": True, "candidates": ["x"], "scores": [1]}, "'id' should be text, got bool"),
        ({"id": "b", "candidates": "x", "scores": [1]}, "'candidates' should be a list, got str"),
        ({"id": "b", "candidates": ["x"], "scores": 1}, "'scores' should be a list, got int"),
        ({"id": "b", "candidates": [], "scores": []}, "'candidates' is empty"),
        ({"id": "b", "candidates": ["x", "y"], "scores": [1]}, "lengths differ: 2 candidates, 1 scores"),
        ({"id": "b", "candidates": ["x", 3], "scores": [1, 1]}, "candidate 2 should be text, got int"),
        ({"id": "b", "candidates": ["x", "\ud800"], "scores": [1, 1]}, "candidate 2 is not UTF-8 text, at character 1"),
        ({"id": "\ud800", "candidates": ["x"], "scores": [1]}, "'id' is not UTF-8 text, at character 1"),
        ({"id": "b", "candidates": ["x"], "scores": [None]}, "score 1 should be a number, got null"),
        ({"id": "b", "candidates": ["x"], "scores": [True]}, "score 1 should be a number, got bool"),
        ({"id": "b", "candidates": ["x"], "scores": [float("nan")]}, "score 1 should be between 0 and 1, got nan"),
        ({"id": "b", "candidates": ["x"], "scores": [float("inf")]}, "score 1 should be between 0 and 1, got inf"),
        (
            '{"id": "b", "candidates": ["x"], "scores": [1' + "0" * 400 + "]}",
            "score 1 should be between 0 and 1, got 1",
        ),
        ({"id": "b", "candidates": ["x"], "scores": [-0.1]}, "score 1 should be between 0 and 1, got -0.1"),
        ({"id": "b", "candidates": ["x", "y"], "scores": [1, 42.5]}, "score 2 should be between 0 and 1, got 42.5"),
        (ROW, "c.jsonl:2: id 'a' was already used in line 1"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(tmp_path, line, sentence):
    path = written(tmp_path / "c.jsonl", ROW, line, {"id": "c", "candidates": ["x"], "scores": [2]})
    with pytest.raises(UserError) as stop:
        read_candidates(path)
    assert sentence in str(stop.value)
    assert str(stop.value).startswith(f"2 of 3 rows of {path} cannot be used:"), "all of them at once"


# Checking that they are of the training examples

SOURCES_OF = [Example(str(number), f"Source {number}.", f"Target {number}.") for number in range(12)]
ABOUT = {"split": "train", "documents": 12, "fingerprint": fingerprint(SOURCES_OF)}


def check(folder, examples, *, row=text_hashes, about=(), made_from=SOURCES_OF):
    """Check candidates of some examples against others. Their rows have an id and what ``row`` says."""
    path = written(folder / "candidates.jsonl", *(ROW | {"id": example.id} | row(example) for example in made_from))
    return check_candidates(read_candidates(path), dict(about), examples, path=path)


def test_candidates_of_the_training_examples_are_taken_without_a_word(tmp_path):
    for about in ({}, ABOUT):
        assert check(tmp_path, SOURCES_OF, about=about) == ""
        assert check(tmp_path, SOURCES_OF[:3], about=about) == "", "training may use fewer examples"
        assert check(tmp_path, SOURCES_OF, about=about, made_from=SOURCES_OF[:3]) == "", "or more"
    assert check(tmp_path, SOURCES_OF[::-1], about=ABOUT) == "", "ids of their own move with their texts"


@pytest.mark.parametrize("row", [text_hashes, lambda example: {"source": example.source}], ids=["hash", "text"])
@pytest.mark.parametrize(
    ("change", "count", "ids"),
    [
        (lambda texts: texts[::-1], 12, "'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', …"),
        (lambda texts: [*texts[:4], texts[4] + "!", *texts[5:]], 1, "'4'"),
        (lambda texts: [*texts[:2], texts[3], texts[2], *texts[4:]], 2, "'2', '3'"),
    ],
    ids=["reversed", "edited", "swapped"],
)
def test_candidates_of_other_sources_are_refused_with_their_ids(tmp_path, row, change, count, ids):
    """Ids are row numbers here, so they stay where they are."""
    texts = change([example.source for example in SOURCES_OF])
    examples = [example._replace(source=text) for example, text in zip(SOURCES_OF, texts, strict=True)]
    with pytest.raises(UserError) as stop:
        check(tmp_path, examples, row=row, about=ABOUT)
    assert str(stop.value) == (
        f"{count} of 12 training examples have another source than the candidates with the same id in "
        f"{tmp_path / 'candidates.jsonl'}: {ids}. The data were edited, replaced, or reordered without an id column. "
        "Restore them, or make the candidates again with: ngramloss candidates RUN_OR_MODEL"
    )


@pytest.mark.parametrize("change", [{"target": "Another."}, {"references": ("Target 5.", "A second one.")}])
def test_candidates_whose_scores_are_of_other_references_are_refused_with_their_ids(tmp_path, change):
    examples = [*SOURCES_OF[:5], SOURCES_OF[5]._replace(**change), *SOURCES_OF[6:]]
    with pytest.raises(
        UserError,
        match=r"1 of 12 training examples have other references than those with which the scores in .*candidates\.jsonl "
        r"were computed: '5'\. Restore the data, or make the candidates again with: ngramloss candidates",
    ):
        check(tmp_path, examples, about=ABOUT)


def test_candidates_of_another_split_are_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=r"are for the split 'validation', but training needs candidates for the split 'train': make the candidates again "
        r"with: ngramloss candidates RUN_OR_MODEL --split train",
    ):
        check(tmp_path, SOURCES_OF, about=ABOUT | {"split": "validation"})


REMARK = (
    "12 of 12 rows of candidates in {} have no source, so only their ids were compared. Make sure that they belong "
    "to these data, in this order, or give each row a key 'source' with the text of its source, which is then "
    "checked."
)


def test_candidates_that_do_not_say_what_they_are_of_are_taken_with_a_remark(tmp_path):
    remark = REMARK.format(tmp_path / "candidates.jsonl")
    assert check(tmp_path, SOURCES_OF, row=lambda _: {}) == remark
    assert check(tmp_path, SOURCES_OF, row=lambda _: {"source": 7}) == remark
    assert check(tmp_path, SOURCES_OF, row=lambda _: {"reference": "Another one."}) == remark, "other keys are not read"
    some = check(tmp_path, SOURCES_OF, row=lambda example: text_hashes(example) if example.id < "2" else {})
    assert some.startswith("8 of 12 rows"), "of rows with and without, the latter are counted"


def test_only_what_lies_beside_a_file_of_ours_is_about_it(tmp_path):
    written(tmp_path / "candidates.jsonl", ROW)
    assert about_candidates(tmp_path) == {}
    (tmp_path / "candidates.json").write_text('{"split": "train"}')
    assert about_candidates(tmp_path) == about_candidates(tmp_path / "candidates.jsonl") == {"split": "train"}
    assert about_candidates(written(tmp_path / "others.jsonl", ROW)) == {}


def test_files_that_are_none_get_a_sentence(tmp_path):
    with pytest.raises(
        MissingFileError, match=r"has no candidates\.jsonl\. Make candidates with: ngramloss candidates RUN_OR_MODEL"
    ):
        read_candidates(tmp_path)
    with pytest.raises(MissingFileError, match=r"there is no file .*c\.jsonl\. Make candidates with"):
        read_candidates(tmp_path / "c.jsonl")
    with pytest.raises(UserError, match=r"c\.jsonl is empty\. Make candidates with"):
        read_candidates(written(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match=r"c\.csv should be a file of JSON lines, with a name that ends in \.jsonl"):
        read_candidates(written(tmp_path / "c.csv", "id,candidates"))


# Making


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny finished run on the built-in corpus."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    settings = [
        "model.width=16",
        "model.vocabulary=400",
        "data.limit=40",
        "train.max_steps=2",
        "train.warmup_steps=0",
        "train.eval_every=0",
        "generation.max_length=8",
        "generation.min_length=4",
        "model.feed_forward=16",
        "model.init_std=0.5",
    ]
    assert (
        cli.main(["train", "demo", "--run", str(folder), *(word for one in settings for word in ("--set", one))]) == 0
    )
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def make(folder, *arguments):
    return cli.main(["candidates", *map(str, arguments), "--out", str(folder)])


def made(folder, *arguments):
    assert make(folder, *arguments) == 0
    return rows(folder / "candidates.jsonl")


def generated(folder, *arguments):
    """What generate writes of the same sources."""
    assert cli.main(["generate", *map(str, arguments), "--split", "train", "--out", str(folder)]) == 0
    return rows(folder / "predictions.jsonl")


def distinct(texts):
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize(
    ("how", "as_generate"),
    [
        ("groups", ["--set", "generation.num_beams=4", "--groups", 4, "--num-return", 4]),
        ("beams", ["--set", "generation.num_beams=4", "--num-return", 4]),
        ("sample", []),
        ("mixed", ["--set", "generation.num_beams=2", "--groups", 2, "--num-return", 2]),
    ],
)
def test_every_source_has_so_many_distinct_texts_and_those_of_the_search_come_first(
    run, tmp_path, how, as_generate, capsys
):
    found = made(tmp_path / "c", run, "--limit", 5, "--count", 4, "--search", how, "--batch-size", 2)
    assert [row["id"] for row in found] == [item.id for item in newswire.items("train", 5)], "in the order of the data"
    searched = generated(tmp_path / "g", run, "--limit", 5, *as_generate)
    for row, other in zip(found, searched, strict=True):
        own = distinct(other.get("candidates", [other["prediction"]]))
        assert row["candidates"][: len(own)] == own, "as generate writes them, the best first"
        assert row["candidates"][0] == other["prediction"]
        assert len(set(row["candidates"])) == len(row["candidates"]) == len(row["scores"]) == len(row["tokens"]) == 4
        assert row["tokens"][0] == other["tokens"]
        assert all(4 <= tokens <= 8 for tokens in row["tokens"])
    ours, theirs = (
        json.loads((tmp_path / name).read_text())["generation"] for name in ("c/candidates.json", "g/generation.json")
    )
    assert {"num_return_sequences": 1, "do_sample": False, **theirs} == ours, "the same settings, too"
    assert not list((tmp_path / "c").glob("*partial*"))
    assert not (tmp_path / "c" / "references.jsonl").exists()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == str(tmp_path / "c" / "candidates.jsonl")
    assert lines[0].split() == ["sources", "a", "source", "first", "mean", "best", "worst"]
    assert lines[1].split()[:2] == ["5", "4.0"]


def test_texts_that_are_equal_are_one_however_many_tokens_they_have():
    texts = [Text("a b", 4), Text("c", 3), Text("a b", 5), Text("a  b", 4)]
    assert candidates._distinct(texts) == [Text("a b", 4), Text("c", 3), Text("a  b", 4)]


def test_equal_texts_are_replaced_by_samples_of_the_seed(run, tmp_path):
    found = made(
        tmp_path / "c",
        run,
        "--limit",
        4,
        "--count",
        4,
        "--diversity",
        0,
        "--seed",
        3,
        "--top-p",
        0.9,
        "--temperature",
        2,
    )
    same = generated(
        tmp_path / "g",
        run,
        "--limit",
        4,
        "--set",
        "generation.num_beams=4",
        "--groups",
        4,
        "--diversity",
        0,
        "--num-return",
        4,
    )
    assert all(len(set(row["candidates"])) == 1 for row in same), "without diversity, all groups write the same"
    samples = generated(
        tmp_path / "s",
        run,
        "--limit",
        4,
        "--sample",
        "--num-return",
        4,
        "--seed",
        3,
        "--top-p",
        0.9,
        "--temperature",
        2,
        "--engine",
        "graph",
    )
    for row, first, drawn in zip(found, same, samples, strict=True):
        assert row["candidates"] == distinct([first["prediction"], *drawn["candidates"]])[:4]
    again = made(
        tmp_path / "d",
        run,
        "--limit",
        4,
        "--count",
        4,
        "--diversity",
        0,
        "--seed",
        4,
        "--top-p",
        0.9,
        "--temperature",
        2,
    )
    assert [row["candidates"][0] for row in again] == [row["candidates"][0] for row in found]
    assert again != found


def test_samples_do_not_depend_on_the_batch(run, tmp_path):
    """Nor does it matter, then, where a job was stopped."""
    for size in (1, 3):
        made(
            tmp_path / str(size),
            run,
            "--limit",
            4,
            "--count",
            3,
            "--search",
            "mixed",
            "--diversity",
            0,
            "--batch-size",
            size,
        )
    assert (tmp_path / "1" / "candidates.jsonl").read_text() == (tmp_path / "3" / "candidates.jsonl").read_text()


def test_a_source_without_enough_distinct_texts_has_fewer_and_the_end_says_so(run, tmp_path, capsys):
    arguments = [
        run,
        "--limit",
        3,
        "--count",
        5,
        "--search",
        "sample",
        "--temperature",
        1e-6,
        "--set",
        "generation.num_beams=1",
    ]
    found = made(tmp_path, *arguments)
    lacking = [5 - len(row["candidates"]) for row in found]
    assert all(lacking), "so cold, all samples are the greedy text, up to rounding"
    told = capsys.readouterr().err
    assert (
        f"3 of 3 sources have fewer than 5 candidates, {sum(lacking)} too few in all: the search found no others."
        in told
    )
    assert make(tmp_path, *arguments, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["fewer"], summary["missing"], summary["sources"]) == (3, sum(lacking), 3)
    assert summary["candidates"] == pytest.approx(5 - sum(lacking) / 3)


def test_a_second_round_draws_other_samples(run, tmp_path, monkeypatch):
    """With few texts in each round, one round is not enough."""
    whole, asked = graph.load, []

    def counted(model, search, **options):
        asked.append((search.seed, search.sample))
        write = whole(model, search, **options)
        return (lambda sources: [texts[:1] for texts in write(sources)]) if search.sample else write

    monkeypatch.setattr(graph, "load", counted)
    found = made(tmp_path, run, "--limit", 3, "--count", 4, "--diversity", 0, "--seed", 9)
    assert [len(set(row["candidates"])) for row in found] == [4, 4, 4]
    seeds = [seed for seed, sample in asked if sample]
    assert seeds[0] == 9
    assert 3 <= len(set(seeds)) == len(seeds) <= 4


def test_of_more_beams_than_candidates_every_so_many_th_is_kept(run, tmp_path):
    found = made(tmp_path / "c", run, "--limit", 4, "--count", 4, "--beams", 8, "--groups", 4)
    every = generated(
        tmp_path / "g", run, "--limit", 4, "--set", "generation.num_beams=8", "--groups", 4, "--num-return", 8
    )
    for row, other in zip(found, every, strict=True):
        own = distinct(other["candidates"][::2])
        assert row["candidates"][: len(own)] == own
    assert made(tmp_path / "d", run, "--limit", 2, "--count", 4, "--search", "beams", "--beams", 6)[0]["candidates"][0]


@pytest.fixture(scope="module")
def own_data(run, tmp_path_factory):
    """Sources whose references the model writes: scores are not all zero."""
    folder = tmp_path_factory.mktemp("data")
    lines = [{"id": str(number), "document": f"Word {number} of a short text.", "summary": "x"} for number in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = made(folder / "first", run, "--data", folder, "--count", 4)
    pools = [[text for text in row["candidates"] if any(map(str.isalnum, text))] for row in found]
    assert all(len(pool) > 1 for pool in pools)
    for line, pool in zip(lines, pools, strict=True):
        line["summary"] = [f"{pool[0]} and more words", pool[1]]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_score_is_the_metric_by_hand_with_the_best_of_several_references(run, own_data, tmp_path):
    lines = {line["id"]: line["summary"] for line in rows(own_data / "train.jsonl")}
    found = made(tmp_path, run, "--data", own_data, "--count", 4)
    for row in found:
        for text, score in zip(row["candidates"], row["scores"], strict=True):
            each = [rouge_scores([[reference]], [text]).values for reference in lines[row["id"]]]
            best = [max(values[name][0] for values in each) for name in ("rouge1", "rouge2", "rougeLsum")]
            assert score == pytest.approx(sum(best) / 300)
        assert max(row["scores"]) == pytest.approx(1) or len(lines[row["id"]][1].split()) < 2, (
            "one reference is a candidate"
        )
    assert read_candidates(tmp_path).rows["0"] == (tuple(found[0]["candidates"]), tuple(found[0]["scores"]))


def test_the_end_says_what_an_oracle_the_mean_the_worst_and_the_first_score(run, own_data, tmp_path, capsys):
    scores = [row["scores"] for row in made(tmp_path, run, "--data", own_data, "--count", 4)]
    shown = capsys.readouterr().out.splitlines()[-1].split()
    expected = [
        sum(column) / 4 for column in zip(*[(row[0], sum(row) / 4, max(row), min(row)) for row in scores], strict=True)
    ]
    assert shown == ["4", "4.0", *(f"{value:.4f}" for value in expected)]
    assert expected[2] > expected[1] > expected[3]
    assert make(tmp_path, run, "--data", own_data, "--count", 4, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert [summary[name] for name in ("first", "mean", "best", "worst")] == pytest.approx(expected)
    assert summary["file"] == str(tmp_path / "candidates.jsonl")


def test_a_translation_scores_sentence_bleu(run, own_data, tmp_path):
    from sacrebleu import sentence_bleu

    lines = {line["id"]: line["summary"] for line in rows(own_data / "train.jsonl")}
    found = made(
        tmp_path / "a",
        run,
        "--data",
        own_data,
        "--count",
        4,
        "--set",
        "task=translation",
        "--set",
        "data.source=document",
        "--set",
        "data.target=summary",
    )
    scores = [score for row in found for score in row["scores"]]
    assert scores == pytest.approx(
        [sentence_bleu(text, lines[row["id"]]).score / 100 for row in found for text in row["candidates"]]
    )
    assert max(scores) > 0
    plus = made(tmp_path / "b", run, "--data", own_data, "--count", 4, "--metric", "chrf", "--set", "chrf.word_order=2")
    expected = METRICS["chrf"].load()([lines["0"]] * 4, plus[0]["candidates"], word_order=2).values["chrf"]
    assert plus[0]["scores"] == pytest.approx([value / 100 for value in expected])


def test_what_was_written_and_how_is_kept(run, tmp_path):
    made(tmp_path, run, "--limit", 2, "--count", 4, "--metric", "rouge2", "--set", "rouge.stemmer=false")
    about = json.loads((tmp_path / "candidates.json").read_text())
    assert len(about["weights"]) == 12
    assert (about["data"], about["split"], about["documents"]) == ("newswire", "train", 2)
    assert about["engine"] == about["candidates"]["samples"] == {"name": "graph", "precision": "fp32"}
    assert about["metric"] == {
        "name": "rouge",
        "scores": ["rouge2"],
        "options": {"stemmer": "False"},
        "sentence_a_line": False,
    }
    assert (
        about["generation"]["num_beam_groups"],
        about["generation"]["diversity_penalty"],
        about["candidates"]["count"],
    ) == (4, 1.0, 4)
    assert {"torch", "transformers", "ngramloss", "rouge-score-rs"} <= about["versions"].keys()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--seed", 1], "candidates.seed: 0 → 1"),
        (["--metric", "rouge1"], "metric.scores: ['rouge1', 'rouge2', 'rougeLsum'] → ['rouge1']"),
        (["--search", "mixed"], "candidates.search: 'groups' → 'mixed'"),
        (["--diversity", 0.5], "generation.diversity_penalty: 1.0 → 0.5"),
        (["--limit", 3], "documents: 2 → 3"),
        (["--split", "test"], "split: 'train' → 'test'"),
        (["--count", 2], "candidates.count: 4 → 2"),
        (["--temperature", 2], "candidates.temperature: 1.0 → 2.0"),
        (["--top-p", 0.9], "candidates.top_p: 1.0 → 0.9"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(run, tmp_path, capsys, change, named):
    first = made(tmp_path, run, "--limit", 2, "--count", 4)
    assert make(tmp_path, run, "--limit", 2, "--count", 4, *change) == 2
    told = capsys.readouterr().err
    assert "has candidates made with other settings (" in told
    assert named in told
    assert told.rstrip().endswith(f"Choose another --out, or delete {tmp_path / 'candidates.jsonl'}.")
    assert rows(tmp_path / "candidates.jsonl") == first


def test_candidates_and_predictions_of_a_run_lie_side_by_side_and_are_cleared_with_it(run, tmp_path):
    made(tmp_path, run, "--limit", 2, "--count", 2)
    generated(tmp_path, run, "--limit", 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "candidates.json",
        "candidates.jsonl",
        "generation.json",
        "references.jsonl",
        "predictions.jsonl",
        "seen.jsonl",
    }
    (tmp_path / "candidates.partial-1.jsonl").write_text("")
    RunFolder(tmp_path).clear()
    assert not list(tmp_path.iterdir())


def test_a_held_out_part_of_the_training_split_gets_no_candidates(run, tmp_path):
    texts = [{"id": number, "document": f"Text {number}.", "summary": "A b."} for number in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    some = made(tmp_path / "c", run, "--data", tmp_path, "--count", 2, "--set", "data.validation_fraction=0.3")
    others = made(
        tmp_path / "v",
        run,
        "--data",
        tmp_path,
        "--count",
        2,
        "--set",
        "data.validation_fraction=0.3",
        "--split",
        "validation",
    )
    assert (len(some), len(others)) == (7, 3)
    assert {row["id"] for row in some}.isdisjoint(row["id"] for row in others)


# Stopped, continued, shared


STOP = killed_at_third_call("ngramloss.search.writer", "decoded")
STOP_SCORING = """
import os, signal, sys
from ngramloss import cli
from ngramloss.metrics import candidate_scores
whole = candidate_scores.score_candidates
def some(metric, examples, texts, **more):
    if len(examples) == 9:   # not the trial before anything is written
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(metric, examples, texts, **more)
candidate_scores.score_candidates = some
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "done"), [(STOP, 4), (STOP_SCORING, 9)])
def test_a_killed_job_goes_on_and_nothing_is_doubled_or_written_again(run, tmp_path, monkeypatch, program, done):
    arguments = [
        "candidates",
        str(run),
        "--limit",
        "9",
        "--count",
        "3",
        "--out",
        str(tmp_path / "a"),
        "--batch-size",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert fork(program, arguments, environment=environment).wait() == -signal.SIGKILL
    partial = tmp_path / "a" / "candidates.partial-0.jsonl"
    assert len(rows(partial)) == done
    assert not (tmp_path / "a" / "candidates.jsonl").exists()
    with partial.open("a") as file:
        file.write('{"id": "newswire-tr')  # a line that the kill cut short
    whole, decoded = writer.decoded, []
    monkeypatch.setattr(writer, "decoded", lambda *given: decoded.append(given) or whole(*given))
    assert cli.main(arguments) == 0
    assert sum(len(texts) for _, texts in decoded) == 3 * (9 - done), "only what was missing is searched"
    monkeypatch.undo()
    made(tmp_path / "b", run, "--limit", 9, "--count", 3)
    assert (tmp_path / "a" / "candidates.jsonl").read_text() == (tmp_path / "b" / "candidates.jsonl").read_text()


@pytest.mark.slow
def test_processes_share_the_sources(run, tmp_path):
    arguments = ["candidates", str(run), "--limit", "5", "--count", "3", "--out", str(tmp_path / "two")]
    program = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"
    codes, err = fork_ranks(program, arguments, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert codes == [0, 0], err[-2000:]
    found = made(tmp_path / "one", run, "--limit", 5, "--count", 3)
    assert rows(tmp_path / "two" / "candidates.jsonl") == found
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"candidates.json", "candidates.jsonl"}


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--count", "1"], "--count must be 2 or more, got 1."),
        (
            ["--search", "beams", "--groups", "2"],
            "--groups and --diversity are options of --search groups and mixed, not of beams.",
        ),
        (
            ["--search", "sample", "--diversity", "0"],
            "--groups and --diversity are options of --search groups and mixed, not of sample.",
        ),
        (
            ["--search", "sample", "--beams", "4"],
            "--search sample takes no --beams. Set generation.num_beams for the first output.",
        ),
        (["--search", "beams", "--beams", "4"], "--beams must be at least --count, 16, got 4."),
        (["--beams", "24"], "--beams must be a multiple of the 16 groups, got 24."),
        (["--beams", "24", "--groups", "8"], "--beams must be a multiple of the 16 candidates of the search, got 24."),
        (
            ["--groups", "1"],
            "one group is a plain beam search, which has no diversity. Use --search beams, or more groups.",
        ),
        (["--search", "mixed", "--count", "2", "--diversity", "1"], "one group is a plain beam search"),
        (["--diversity", "-1"], "--diversity must be 0 or more, got -1."),
        (["--diversity", "nan"], "--diversity must be 0 or more, got nan."),
        (["--temperature", "0"], "--temperature must be above 0, got 0."),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5."),
        (
            ["--engine", "hf"],
            "groups of beams need the engine graph, not hf. Leave --engine out. Without groups of beams, any engine",
        ),
        (
            ["--set", "train.seed=1"],
            "candidates accepts --set only for generation.*, data.*, task and options of the metric, rouge.*, got 'train.seed=1'.",
        ),
        (["--set", "rouge.stem=1"], "rouge.stem: unknown option. Did you mean 'stemmer'?"),
        (["--metric", "rogue"], "--metric: unknown metric or score 'rogue'. Did you mean 'rouge'?"),
        (["--metric", "shape"], "--metric shape is not a single score. Use rouge, bleu or chrf."),
        (
            ["--metric", "summac"],
            "--metric summac is not a single score. Choose one of its scores: summac_conv, summac_zs.",
        ),
        (
            ["--metric", "words"],
            "--metric words: higher values of words are not better, so candidates cannot be scored by it. Use rouge, bleu or chrf.",
        ),
        (["--metric", "wmd"], "--metric wmd: higher values of wmd are not better"),
        (
            ["--metric", "bertscore"],
            "--metric bertscore needs --set bertscore.model=…; ngramloss docs metrics says what to give.",
        ),
        (["--metric", "rouge2_recall"], "--metric rouge has no rouge2_recall of each document with these options."),
    ],
)
def test_what_is_wrong_gets_a_sentence_before_the_model_is_loaded(
    run, tmp_path, capsys, monkeypatch, arguments, sentence
):
    monkeypatch.setattr(candidates, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    assert make(tmp_path / "x", run, "--limit", 2, *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_model_without_groups_says_what_to_do_before_it_is_loaded(tmp_path, capsys):
    (tmp_path / "led").mkdir()
    (tmp_path / "led" / "config.json").write_text('{"model_type": "led"}')
    assert make(tmp_path / "x", tmp_path / "led", "--data", "newswire") == 2
    told = capsys.readouterr().err
    assert "groups of beams need the engine graph, which serves bart, " in told
    assert (
        "not led. Without groups of beams, any engine will do; for candidates use --search sample or --search beams."
        in told
    )


def test_settings_that_the_engine_does_not_know_are_told_with_what_to_do_instead():
    model = tiny("bart")
    search = replace(with_settings(model, num_beams=4, repetition_penalty=1.5), groups=2)
    with pytest.raises(
        UserError,
        match=r"groups of beams need the engine graph, which cannot be used: it does not know repetition_penalty\. "
        r"Without groups of beams, any engine will do; for candidates use --search sample or --search beams\.$",
    ):
        engines.load("auto", model, search)


def test_baselines_have_no_candidates_and_folders_must_be_named(run, tmp_path, capsys):
    assert make(tmp_path / "x", "lead-3", "--data", "newswire") == 2
    assert (
        "lead-3 is a baseline, which gives one output per document. Candidates need a model." in capsys.readouterr().err
    )
    assert cli.main(["candidates", str(run / "model"), "--data", "newswire"]) == 2
    assert "model is not a run's folder, so give an output folder: --out DIR." in capsys.readouterr().err


# Scores


EXAMPLES = [
    Example(str(number), "A text.", f"the cat {number} sat on the mat", ("the cat sat", "a dog") if number % 2 else ())
    for number in range(600)
]
TEXTS = [[f"the cat {number} sat", "a dog sat on the mat", ""][: 1 + number % 3] for number in range(600)]


def test_processes_share_the_texts_and_change_nothing(messages, monkeypatch):
    metric = candidate_metric("rouge", {})
    monkeypatch.setattr(progress, "SECONDS", 0)
    alone = score_candidates(metric, EXAMPLES, TEXTS, processes=1)
    done = [line.partition(",")[0] for line in messages]
    assert done == [f"scoring candidates: {count} of 600 examples" for count in (256, 512, 600)]
    assert score_candidates(metric, EXAMPLES, TEXTS, processes=2) == alone
    assert [len(values) for values in alone] == [len(texts) for texts in TEXTS]
    values = rouge_scores([["the cat 8 sat on the mat"]], ["a dog sat on the mat"]).values
    assert alone[8][1] == pytest.approx(sum(values[name][0] for name in ("rouge1", "rouge2", "rougeLsum")) / 300)


def test_letters_that_the_metric_does_not_read_are_told():
    examples = [Example("1", "文", "今天天气很好"), Example("2", "文", "明天也很好")]
    (note,) = check_metric(candidate_metric("rouge", {"tokens": "default"}), examples)
    assert "the default rules read only a–z and 0–9" in note
    assert check_metric(candidate_metric("rouge", {}), examples) == []
    assert check_metric(candidate_metric("rouge", {}), EXAMPLES) == []


def test_if_most_candidates_score_the_same_the_end_says_so(run, own_data, tmp_path, capsys):
    arguments = [run, "--data", own_data, "--count", 4, "--search", "sample"]
    made(tmp_path / "a", *arguments)
    assert "have candidates with equal scores" not in capsys.readouterr().err
    lines = (own_data / "train.jsonl").read_text().splitlines()
    (tmp_path / "other").mkdir()
    unlike = [json.dumps({**json.loads(line), "target": "§", "references": ["§"], "summary": "§"}) for line in lines]
    (tmp_path / "other" / "train.jsonl").write_text("\n".join(unlike) + "\n")
    made(tmp_path / "b", *[tmp_path / "other" if word == own_data else word for word in arguments])
    assert "4 of 4 sources have candidates with equal scores" in capsys.readouterr().err


def test_texts_of_a_model_that_looks_ahead_are_not_reranked(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(load_job, "NOT_CAUSAL", ("mbart", "bart"))
    assert (
        cli.main(
            [
                "generate",
                str(run),
                "--limit",
                "2",
                "--out",
                str(tmp_path / "x"),
                "--set",
                "generation.num_beams=2",
                "--rerank",
                "probability",
            ]
        )
        == 2
    )
    assert "whose probabilities change with padding" in capsys.readouterr().err


def test_sentences_are_put_on_lines_where_the_data_set_has_several():
    example, text = (
        Example("1", "x", "The dog ran home and a cat sat on the mat."),
        "And a cat sat on the mat. The dog ran home.",
    )
    whole, split = (
        score_candidates(candidate_metric("rougeLsum", {}, lines=lines), [example], [[text]])[0][0]
        for lines in (None, "auto")
    )
    assert split == pytest.approx(1)
    assert whole < 1
    assert candidate_metric("rouge", {}, lines="auto").settings["sentence_a_line"] == "auto"


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ({"mine": [50.0, float("nan")]}, "--metric mine has no score for candidate 2 of '1', 'b'. Correct its plugin,"),
        (
            {"mine": [50.0, 140.0]},
            "--metric mine has a score of 140, not between 0 and 100, for candidate 2 of '1', 'b'.",
        ),
        ({"mine": [-3.0, 1.0]}, "--metric mine has a score of -3, not between 0 and 100, for candidate 1 of '1', 'a'."),
        ({}, "--metric mine has no mine of each document with these options. Use rouge, bleu or chrf."),
    ],
)
def test_scores_outside_0_to_100_are_refused(scores, sentence):
    METRICS["mine"] = Metric(lambda references, predictions: Scores(scores, "mine"))
    with pytest.raises(UserError) as stop:
        score_candidates(candidate_metric("mine", {}), [Example("1", "x", "y")], [["a", "b"]])
    assert str(stop.value).startswith(sentence)


def test_a_metric_of_ones_own_makes_scores_and_its_code_is_part_of_the_settings(run, tmp_path):
    (tmp_path / "own.py").write_text("""
import ngramloss as ng
def vowels(references, predictions):
    return ng.Scores({"vowels": [min(100.0, 10.0 * sum(letter in "aeiou" for letter in text)) for text in predictions]}, "vowels")
ng.METRICS["vowels"] = ng.Metric(vowels)
""")
    found = made(tmp_path / "c", run, "--limit", 2, "--count", 3, "--metric", "vowels", "--plugin", tmp_path / "own.py")
    for row in found:
        assert row["scores"] == [min(1, sum(letter in "aeiou" for letter in text) / 10) for text in row["candidates"]]
    assert len(json.loads((tmp_path / "c" / "candidates.json").read_text())["metric"]["source"]) == 12


def test_a_metric_is_tried_before_anything_is_generated():
    METRICS["none"] = Metric(lambda references, predictions: Scores({}, "none"))
    with pytest.raises(UserError, match="has no none of each document"):
        check_metric(candidate_metric("none", {}), EXAMPLES)
    check_metric(candidate_metric("bleu", {}), EXAMPLES)
    assert bleu([["a b"]], ["a b"]).values["bleu"]


# Reranking


def logp_one_by_one(model, source, text):
    """The log-probability of one text, token by token."""
    total = 0.0
    for place in range(1, len(text)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text[:place]])).logits[
                0, -1
            ]
        total += float(logits.double().log_softmax(-1)[text[place]])
    return total


@pytest.mark.parametrize(
    "family", ["bart", "mbart", "pegasus", "marian", "m2m_100", "t5", "umt5", "led", "longt5", "bert2bert"]
)
def test_log_probabilities_of_texts_are_those_of_the_model_one_by_one(family, monkeypatch):
    model = tiny(family)
    texts = [
        [[models.EOS, 5 + number, 6, 7][: 2 + number], [models.EOS, 9, 2], [models.EOS, 8, 8, 4, 4, 2]]
        for number in range(3)
    ]
    sources = SOURCES[:3]
    expected = [
        [logp_one_by_one(model, source, text) for text in rows] for source, rows in zip(sources, texts, strict=True)
    ]
    for most in (2**28, 2 * 13 * 6):  # all at a time, or two texts
        monkeypatch.setattr("ngramloss.models.teacher_forced.MOST_LOGITS", most)
        found = text_logp(model, sources, texts, pad=models.PAD)
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=1e-4, abs=1e-4)


def test_the_encoder_runs_once_for_each_source(monkeypatch):
    model, seen = tiny("bart"), []
    encoder = model.get_encoder()
    handle = encoder.register_forward_hook(lambda module, given, output: seen.append(output.last_hidden_state.shape[0]))
    text_logp(model, SOURCES, [[[2, 5, 2], [2, 6, 2]]] * len(SOURCES), pad=models.PAD)
    handle.remove()
    assert seen == [len(SOURCES)]


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_reranking_orders_the_texts_by_the_models_own_probability_by_length(run, tmp_path, alpha):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    # A minimum length leaves probability out of the search's scores, so that its order is another.
    search = [
        "--limit",
        6,
        "--set",
        "generation.num_beams=4",
        "--set",
        f"generation.length_penalty={alpha}",
        "--set",
        "generation.min_length=6",
        "--set",
        "generation.renormalize=true",
        "--engine",
        "hf",
    ]
    plain = generated(tmp_path / "plain", run, *search, "--num-return", 4)
    found = generated(tmp_path / "reranked", run, *search, "--rerank", "probability")
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(run / "model").eval(),
        AutoTokenizer.from_pretrained(run / "model"),
    )
    saved = json.loads((tmp_path / "reranked" / "generation.json").read_text())["generation"]
    model.generation_config.update(**{key: value for key, value in saved.items() if key != "rerank"})
    write = hf.load(model, search_of(model), precision="fp32")
    moved = 0
    for row, before, item in zip(found, plain, newswire.items("train", 6), strict=True):
        source = tokenizer(item.document, truncation=True, max_length=256)["input_ids"]
        (texts,) = write([source])
        ordered = sorted(texts, key=lambda text: -logp_one_by_one(model, source, text) / (len(text) - 1) ** alpha)
        assert row["candidates"] == [text.strip() for text in tokenizer.batch_decode(ordered, skip_special_tokens=True)]
        assert row["prediction"] == row["candidates"][0]
        assert row["tokens"] == len(ordered[0])
        assert sorted(row["candidates"]) == sorted(before["candidates"])
        moved += row["candidates"] != before["candidates"]
    assert moved


@pytest.mark.parametrize("alpha", [-1.0, 2.0])
def test_the_length_of_a_text_counts_the_tokens_after_its_start_token(alpha):
    model = tiny("bart")
    search = with_settings(model, length_penalty=alpha)
    texts = [[2, first, *more] for first in range(4, 13) for more in ([], *([second] for second in range(4, 13)))]
    (found,) = _by_probability(model, search, [SOURCES[0]], [texts])
    scores = [logp_one_by_one(model, SOURCES[0], text) / (len(text) - 1) ** alpha for text in found]
    assert sorted(found) == sorted(texts)
    assert all(better >= worse - 1e-4 for better, worse in pairwise(scores))


def test_reranking_and_groups_are_part_of_the_signature(run, tmp_path, capsys):
    arguments = [run, "--limit", 2, "--set", "generation.num_beams=4"]
    generated(tmp_path, *arguments, "--groups", 2, "--diversity", 0.5, "--rerank", "probability")
    signature = provenance.written_by(provenance.run(tmp_path))
    assert "|num_beam_groups:2|diversity_penalty:0.5|" in signature
    assert "|num_return_sequences:4|rerank:probability|" in signature
    assert (
        cli.main(
            [
                "generate",
                *map(str, arguments),
                "--split",
                "train",
                "--groups",
                "2",
                "--diversity",
                "0.5",
                "--num-return",
                "4",
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "other settings (generation.rerank: 'probability' → not set)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rerank", "probability"], "--rerank orders several texts of a document, but the search has 1 beam."),
        (
            ["--rerank", "probability", "--num-return", "1"],
            "--rerank orders several texts of a document; add --num-return N.",
        ),
        (["--rerank", "probability", "--sample"], "--rerank orders several texts of a document; add --num-return N."),
        (
            ["--groups", "3"],
            "--groups 3 needs a multiple of 3 beams, but the search has 1. Use --set generation.num_beams=3.",
        ),
        (["--diversity", "0.5"], "--diversity is an option of groups of beams; add --groups N."),
        (
            ["--groups", "2", "--sample"],
            "--groups are groups of beams, and --sample has no beams. Leave one of them out.",
        ),
        (
            ["--groups", "2", "--set", "generation.num_beams=2", "--engine", "hf"],
            "groups of beams need the engine graph, not hf.",
        ),
    ],
)
def test_options_of_generate_that_cannot_be_are_a_sentence(run, tmp_path, capsys, arguments, sentence):
    assert (
        cli.main(
            [
                "generate",
                str(run),
                "--limit",
                "2",
                "--out",
                str(tmp_path / "x"),
                "--set",
                "generation.num_beams=1",
                *arguments,
            ]
        )
        == 2
    )
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_samples_can_be_reranked(run, tmp_path):
    drawn = generated(tmp_path / "a", run, "--limit", 3, "--sample", "--num-return", 4)
    ordered = generated(tmp_path / "b", run, "--limit", 3, "--sample", "--num-return", 4, "--rerank", "probability")
    assert [sorted(row["candidates"]) for row in ordered] == [sorted(row["candidates"]) for row in drawn]
    assert ordered != drawn


def test_a_long_job_says_how_far_it_is_after_each_batch(run, tmp_path, messages, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    work = job(str(run), limit=3, batch_size=2, overrides=["generation.engine=hf"])
    predictions.write_predictions(work, tmp_path / "x")
    predictions.write_predictions(work, tmp_path / "x")  # nothing is left
    assert [line.partition(",")[0] for line in messages if line.startswith("writing")] == [
        "writing predictions: 2 of 3 documents",
        "writing predictions: 3 of 3 documents",
    ]


@pytest.mark.parametrize(
    "wrong", [{"split": []}, {"data": 3}, {"model": {}}, {"metric": "rouge"}, {"candidates": 3}, {"task": None}]
)
def test_wrong_types_in_what_is_said_of_candidates_are_refused_with_file_and_field(wrong, tmp_path):
    (tmp_path / "candidates.json").write_text(json.dumps(wrong))
    with pytest.raises(UserError, match=rf"candidates\.json: {next(iter(wrong))} should be .*Make the texts again"):
        about_candidates(tmp_path)
