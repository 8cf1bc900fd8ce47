"""SimCLS: its penalties are those of slow plain Python; it trains, is killed and continued, and chooses."""

import json
import math
import re
import shutil

import pytest
import torch
from commands import assert_equal_runs, assert_two_processes_train_as_one, finished
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoders import MODEL, STEPS

from ngramloss import cli
from ngramloss.data import newswire
from ngramloss.data.batches.padding import Padder
from ngramloss.data.candidates import named_files
from ngramloss.errors import MissingFileError, UserError
from ngramloss.recipe import Data
from ngramloss.training.system_registry import SYSTEMS, read_system
from ngramloss_systems import simcls
from ngramloss_systems.candidate_sets import read_set

pytestmark = pytest.mark.usefixtures("own_cache")

RECIPE = f"""
system = "simcls(margin=0.05)"
[data]
name = "data"
separator = "none"
max_source = 64
max_target = 40
{MODEL}{STEPS}best = "score"
"""


# The formula


def oracle(similarity, reference, score, *, margin, gold_margin):
    """The penalties of one row, in the dumbest Python that can express them."""
    order = sorted(range(len(similarity)), key=lambda place: -score[place])
    ranked = [similarity[place] for place in order]
    K = len(ranked)
    ranking = 0.0
    for d in range(1, K):
        ranking += sum(max(0.0, ranked[i + d] - ranked[i] + d * margin) for i in range(K - d)) / (K - d)
    return ranking, sum(max(0.0, one - reference + gold_margin) for one in similarity) / K if K else 0.0


cosines = st.integers(-8, 8).map(lambda number: number / 8)
rows = st.lists(st.tuples(cosines, st.integers(0, 4).map(lambda number: number / 4)), max_size=5)


@given(st.lists(st.tuples(rows, cosines), min_size=1, max_size=3), st.integers(0, 2), st.sampled_from([0.0, 0.25]))
def test_penalties_are_those_of_the_oracle_whatever_the_padding(batch, padding, margin):
    K = max(len(row) for row, _ in batch) + padding
    similarity, score = torch.full((len(batch), K), 0.5), torch.full((len(batch), K), 0.75)  # also where there is none
    present = torch.zeros(len(batch), K, dtype=torch.bool)
    for index, (row, _) in enumerate(batch):
        for place, (one, worth) in enumerate(row):
            similarity[index, place], score[index, place], present[index, place] = one, worth, True
    reference = torch.tensor([value for _, value in batch])
    found = simcls.penalties(similarity, reference, score, present, margin=margin, gold_margin=0.125)
    expected = [
        oracle([one for one, _ in row], value, [worth for _, worth in row], margin=margin, gold_margin=0.125)
        for row, value in batch
    ]
    assert found.order.tolist() == pytest.approx([order for order, _ in expected])
    assert found.reference.tolist() == pytest.approx([above for _, above in expected])


def test_penalties_have_the_gradient_of_their_formula():
    draw = torch.Generator().manual_seed(0)
    similarity, reference = (torch.rand(shape, generator=draw, dtype=torch.float64) for shape in ((3, 5), (3,)))
    score, present = torch.rand(3, 5, generator=draw), torch.arange(5) < torch.tensor([[5], [1], [3]])

    def loss(similarity, reference):
        return sum(simcls.penalties(similarity, reference, score, present, margin=0.1, gold_margin=0.05))

    inputs = (similarity.requires_grad_(), reference.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


class Lookup(torch.nn.Module):
    """An encoder whose states are embeddings: what it makes of a text can be computed by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(9, 3)

    def forward(self, input_ids, attention_mask):
        states = self.table(input_ids)
        return type("Output", (), {"last_hidden_state": states})


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.sqrt(
        sum(a * a for a in one) * sum(b * b for b in other)
    )


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_score_is_the_cosine_of_document_and_text_however_they_are_batched(pooling):
    encoder = Lookup()

    def vector(ids):
        states = [encoder.table.weight[token].tolist() for token in ids]
        return states[0] if pooling == "first" else [sum(column) / len(ids) for column in zip(*states, strict=True)]

    examples = [
        {"input_ids": [1, 2, 3, 4], "labels": [5, 6], "candidates": [[7, 8, 1], [2]], "scores": [0.5, 0.25]},
        {"input_ids": [3], "labels": [6, 4, 4], "candidates": [[8]], "scores": [1.0]},
    ]
    for batch in ([examples[0], examples[1]], [examples[1]]):
        found = simcls.cosines_of_batch(encoder, Padder(0, lambda labels: labels)(batch), pad=0, pooling=pooling)
        for index, row in enumerate(batch):
            document = vector(row["input_ids"])
            assert found.reference[index].item() == pytest.approx(cosine(document, vector(row["labels"])), abs=1e-6)
            expected = [cosine(document, vector(ids)) for ids in row["candidates"]]
            assert found.candidates[index, : len(expected)].tolist() == pytest.approx(expected, abs=1e-6)
            assert found.present[index].sum() == len(expected)


def test_the_first_of_equally_good_texts_is_chosen():
    scores = simcls.Cosines(torch.zeros(1), torch.tensor([[-0.5, -0.25, -0.25, 0.0]]), torch.arange(4)[None] < 3)
    assert simcls._choice(scores).tolist() == [1]
    assert simcls._highest([0.1, 0.3, 0.3]) == 1


# Files


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def worse(text, number):
    """The text without its first words: the more, the worse."""
    return " ".join(text.split()[2 * number :])


def texts_in(folder):
    return [json.loads(line)["prediction"] for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, and candidates of each split in an order that does not say which is best."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    for split, count in (("train", 24), ("validation", 8)):
        examples = [
            {"id": f"{split}-{number}", "document": item.document, "summary": item.summary}
            for number, item in enumerate(newswire.items(split, count))
        ]
        write_rows(folder / "data" / f"{split}.jsonl", examples)
        write_rows(
            folder / f"{split}.jsonl",
            [
                {
                    "id": row["id"],
                    "source": row["document"],
                    "candidates": [worse(row["summary"], k) for k in (2, 0, 1)],
                }
                | {"scores": [0.5, 1.0, 0.75]}
                for row in examples
            ],
        )
    (folder / "tiny.toml").write_text(RECIPE.replace('"data"', json.dumps(str(folder / "data"))))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


FILES = ("--set", "data.candidates=train=train.jsonl,validation=validation.jsonl")


@pytest.fixture(scope="module")
def undisturbed(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.main(["train", "tiny.toml", "--run", "undisturbed", *FILES]) == 0
    return place / "undisturbed"


def test_a_changed_setting_is_named_alone_if_only_some_sources_have_candidates(here, tmp_path, capsys):
    some = (here / "train.jsonl").read_text().splitlines()[:20]
    (tmp_path / "train.jsonl").write_text("\n".join(some) + "\n")
    arguments = ["train", "tiny.toml", "--run", str(tmp_path / "run"), "--set", "train.eval_every=0"]
    arguments += ["--set", f"data.candidates=train={tmp_path / 'train.jsonl'}", "--set", "train.best=last"]
    assert cli.main([*arguments, "--set", "train.max_steps=2"]) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    capsys.readouterr()
    assert cli.main([*arguments, "--set", "train.seed=7"]) == 2
    said = capsys.readouterr().err
    assert "train.seed: " in said
    assert "data: " not in said


@pytest.mark.slow
def test_two_processes_train_as_one(here, tmp_path):
    settings = "model.dropout=0.0", "model.init_std=0.5", "train.epsilon=1e-3"  # AdamW does not divide by rounding
    assert_two_processes_train_as_one(tmp_path, FILES[1], *settings)


def test_a_reranker_is_a_run_like_any_other(undisturbed):
    assert {path.name for path in undisturbed.iterdir()} == {
        "recipe.toml",
        "prepared.json",
        "log.jsonl",
        "checkpoints",
        "card.md",
        "weights.json",
        "model",
    }
    lines = [json.loads(line) for line in (undisturbed / "log.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] == pytest.approx(line["order"] + line["reference"]) for line in training)
    assert all(0 <= line["eval_score"] <= 1 for line in lines if "eval_score" in line)
    card = (undisturbed / "card.md").read_text()
    assert re.search(r"train: 24 sources of .*data \(train\), 3\.0 candidates each\.", card)
    assert "margin = `0.05`" in card


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["saving:4", "sealed:4", "model:0"])
def test_a_killed_training_continues_to_the_same_weights(undisturbed, here, tmp_path, sabotage):
    files = f"data.candidates=train={here / 'train.jsonl'},validation={here / 'validation.jsonl'}"
    arguments = ["train", str(here / "tiny.toml"), "--run", str(tmp_path / "run"), "--set", files]
    assert finished(arguments, sabotage=sabotage)[0] == -9
    assert finished(arguments)[0] == 0
    assert_equal_runs(tmp_path / "run", undisturbed)


def test_a_step_is_the_same_however_it_is_cut(undisturbed, here):
    changes = ("train.batch_size=8", "train.accumulate=1", "train.max_tokens=200")
    options = [word for change in changes for word in ("--set", change)]
    assert cli.main(["train", "tiny.toml", "--run", "cut", "--set", "model.dropout=0.0", *FILES]) == 0
    assert cli.main(["train", "tiny.toml", "--run", "whole", "--set", "model.dropout=0.0", *options, *FILES]) == 0
    logs = [
        [
            row["loss"]
            for line in (here / run / "log.jsonl").read_text().splitlines()
            if "loss" in (row := json.loads(line))
        ]
        for run in ("cut", "whole")
    ]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    assert len(set(logs[0])) == 6, "it learns"


def test_another_file_of_candidates_does_not_continue_a_run(undisturbed, here, tmp_path, capsys):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    shutil.rmtree(run / "model")
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{step}")
    file = here / "train.jsonl"
    before = file.read_text()
    try:
        file.write_text(before.replace("0.75]", "0.5]", 1))
        assert cli.main(["train", "tiny.toml", "--run", str(run), *FILES]) == 2
    finally:
        file.write_text(before)
    message = capsys.readouterr().err
    assert "have changed since it was started:\n  train candidates: " in message


def apply(*arguments):
    return cli.main(["rerank", "apply", *map(str, arguments)])


def test_its_choice_is_written_like_predictions_and_scores(undisturbed, here, tmp_path, capsys):
    file, data = "validation.jsonl", ("--data", "data", "--split", "validation")
    assert apply("undisturbed", file, *data, "--out", tmp_path / "chosen", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sources"], found["first"], found["best"], found["mean"]) == (8, 0.5, 1.0, 0.75)
    assert apply("first", file, *data, "--out", tmp_path / "first") == 0
    assert apply("best", file, *data, "--out", tmp_path / "best") == 0
    texts = {name: texts_in(tmp_path / name) for name in ("first", "chosen", "best")}
    rows = [json.loads(line) for line in (here / file).read_text().splitlines()]
    assert texts["first"] == [row["candidates"][0] for row in rows]
    assert texts["best"] == [row["candidates"][1] for row in rows]
    values = {0: 0.5, 1: 1.0, 2: 0.75}
    scores = [values[row["candidates"].index(text)] for row, text in zip(rows, texts["chosen"], strict=True)]
    assert found["chosen"] == pytest.approx(sum(scores) / 8)
    reranker = simcls.Reranker(undisturbed)
    scores = reranker.cosines([row["source"] for row in rows], [row["candidates"] for row in rows])
    best = [row["candidates"][simcls._highest(one)] for row, one in zip(rows, scores, strict=True)]
    assert texts["chosen"] == best
    capsys.readouterr()
    assert cli.main(["score", *(str(tmp_path / name) for name in texts)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:4]] == ["first", "chosen", "best"]


def test_a_choice_is_not_mixed_with_another(undisturbed, here, tmp_path, capsys):
    options = ("validation.jsonl", "--data", "data", "--split", "validation", "--out", tmp_path / "out")
    assert apply("first", *options) == 0
    assert apply("first", *options) == 0
    assert apply("best", *options) == 2
    assert "made with other settings" in capsys.readouterr().err


def test_scores_do_not_depend_on_what_else_is_scored(undisturbed, here):
    reranker = simcls.Reranker(undisturbed)
    rows = [json.loads(line) for line in (here / "train.jsonl").read_text().splitlines()]
    together = reranker.cosines([row["source"] for row in rows], [row["candidates"] for row in rows])
    alone = reranker.cosines([rows[3]["source"]], [rows[3]["candidates"][1:2]])
    assert alone[0] == pytest.approx(together[3][1:2], abs=1e-5)


def test_an_empty_text_is_never_chosen_and_nan_is_refused(undisturbed, here):
    reranker = simcls.Reranker(undisturbed)
    row = json.loads((here / "train.jsonl").read_text().splitlines()[0])
    scores = reranker.cosines([row["source"]], [["", " ", *row["candidates"]]])[0]
    assert scores[:2] == [-math.inf, -math.inf]
    assert all(-1 <= score <= 1 for score in scores[2:])
    next(reranker.encoder.parameters()).data.fill_(math.nan)
    with pytest.raises(UserError, match=r"has a cosine that is NaN for a candidate of document 1: its weights"):
        reranker.cosines([row["source"]], [row["candidates"]])


def test_a_text_without_a_first_token_is_not_pooled_by_it(undisturbed):
    from ngramloss.models import loading
    from ngramloss.recipe import Model

    tokenizer, _ = loading.load_tokenizer(Model(name=str(undisturbed / "model")), lambda: (), "")
    simcls.raise_unless_pooled(tokenizer, "mine", "first")

    def bare(text, **options):
        return tokenizer(text, **options | {"add_special_tokens": False})

    bare.__dict__.update(backend_tokenizer=tokenizer.backend_tokenizer, is_fast=True)
    simcls.raise_unless_pooled(bare, "mine", "mean")
    with pytest.raises(UserError, match=r"pooling=first needs a token before every text, .* of mine adds none"):
        simcls.raise_unless_pooled(bare, "mine", "first")


def test_candidates_name_their_data_and_split(here, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(here / "validation.jsonl", folder / "candidates.jsonl")
    (folder / "candidates.json").write_text(json.dumps({"data": "data", "split": "validation", "model": "m"}))
    assert apply("first", folder, "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "generation.json").read_text())["split"] == "validation"


def test_predictions_with_several_texts_are_candidates_without_scores(here, tmp_path):
    rows = [json.loads(line) for line in (here / "validation.jsonl").read_text().splitlines()]
    for row in rows:
        del row["scores"], row["source"]
    write_rows(tmp_path / "predictions.jsonl", rows)
    (tmp_path / "generation.json").write_text(json.dumps({"data": "data", "split": "validation"}))
    found = read_set([tmp_path / "predictions.jsonl"], Data(), "summarisation", "test")
    assert found.split == "validation"
    assert all(scores[1] == 1.0 > max(scores[0], scores[2]) for scores in found.scores), "the second is the reference"


def test_several_writers_share_the_sources(here, tmp_path, undisturbed):
    lines = (here / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:10]))
    (tmp_path / "b.jsonl").write_text("".join(lines[10:]))
    halves = read_set([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], Data(name="data"), "summarisation", "train")
    whole = read_set([here / "train.jsonl"], Data(name="data"), "summarisation", "train")
    assert (halves.examples, halves.candidates.rows) == (whole.examples, whole.candidates.rows)
    with pytest.raises(
        UserError, match=r"10 of the ids in .* have candidates in an earlier file, too, such as 'train-0'"
    ):
        read_set([here / "train.jsonl", tmp_path / "a.jsonl"], Data(name="data"), "summarisation", "train")


def folder_of(file, folder, **about):
    """A folder of candidates that says where they are from."""
    folder.mkdir()
    shutil.copy(file, folder / "candidates.jsonl")
    (folder / "candidates.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("chooser", ["reranker", "first"])
def test_translations_are_scored_as_such(undisturbed, here, tmp_path, chooser, capsys):
    """The task is that of the reranker, or of the candidates."""
    rows = [json.loads(line) for line in (here / "validation.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "some.jsonl", [{key: row[key] for key in ("id", "candidates")} for row in rows])
    about = {"data": str(here / "data"), "split": "validation", "task": "translation"}
    made = folder_of(tmp_path / "some.jsonl", tmp_path / "made", **about)
    if chooser == "reranker":
        del about["task"]
        (made / "candidates.json").write_text(json.dumps(about))
        chooser = shutil.copytree(undisturbed, tmp_path / "run")
        text = (chooser / "recipe.toml").read_text()
        (chooser / "recipe.toml").write_text(text.replace('task = "summarisation"', 'task = "translation"'))
    columns = ("--source", "document", "--target", "summary")
    assert apply(chooser, made, *columns, "--out", tmp_path / "out") == 0
    assert "scores: bleu" in capsys.readouterr().out
    saved = json.loads((tmp_path / "out" / "generation.json").read_text())
    assert (saved["task"], saved["metric"]["name"]) == ("translation", "bleu")
    assert apply(chooser, made, *columns, "--set", "task=summarisation", "--out", tmp_path / "other") == 2
    assert "task: the reranker or the candidates are for translation" in capsys.readouterr().err


def test_a_reranker_has_the_task_of_its_candidates(undisturbed, here, tmp_path, capsys):
    about = {"data": str(here / "data"), "split": "validation", "task": "translation"}
    made = folder_of("validation.jsonl", tmp_path / "made", **about)
    columns = ["--source", "document", "--target", "summary"]
    options = ["--recipe", "tiny.toml", "--run", str(tmp_path / "run"), "--set", "train.max_steps=1", *columns]
    assert cli.main(["rerank", "train", str(made), *options]) == 0
    assert 'task = "translation"' in (tmp_path / "run" / "recipe.toml").read_text()
    capsys.readouterr()
    assert apply("undisturbed", made, *columns, "--out", tmp_path / "out") == 2
    assert (
        "undisturbed was trained for summarisation, but these candidates are for translation" in capsys.readouterr().err
    )


def test_another_metric_than_the_reranker_s_is_said(undisturbed, here, tmp_path, capsys):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    for file in run.glob("checkpoints/*/data.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"metric": json.dumps(ROUGE)}))
    for metric, is_other in ((CHRF, True), (ROUGE, False)):
        made = folder_of("validation.jsonl", tmp_path / metric["name"], data="data", split="validation", metric=metric)
        assert apply(run, made, "--out", tmp_path / f"out-{metric['name']}") == 0
        printed = capsys.readouterr()
        assert (
            "was trained on scores by rouge (rouge1 + rouge2 + rougeLsum), but these candidates are scored by"
            in printed.err
        ) == is_other
    assert printed.out.endswith("scores: rouge (rouge1 + rouge2 + rougeLsum)\n")


# Mistakes


def test_what_contradicts_the_candidates_is_refused(here, small_run, tmp_path, capsys):
    made = folder_of("validation.jsonl", tmp_path / "made", data="data", split="validation", model=str(small_run))
    recipe = (small_run / "recipe.toml").read_text()
    run = tmp_path / "writer"
    run.mkdir()
    (run / "recipe.toml").write_text(recipe.replace('name = "newswire"', 'name = "data"'))
    (made / "candidates.json").write_text(json.dumps({"data": "data", "split": "validation", "model": str(run)}))
    out = ("--out", tmp_path / "out")
    for options, sentence in (
        (["--split", "train"], "are for the split 'validation', but 'train' was asked for"),
        (["--data", "newswire"], "have data.name = 'data', but 'newswire' was asked for"),
        (["--set", "data.name=newswire"], "have data.name = 'data', but 'newswire' was asked for"),
        (["--source", "text"], "have data.source = '', but 'text' was asked for"),
        (["--set", "data.max_source=7"], "rerank apply does not read data.max_source. It accepts --set for"),
        (["--set", "train.seed=7"], "rerank apply does not read train.seed."),
    ):
        assert apply("first", made, *options, *out) == 2
        assert sentence in capsys.readouterr().err
    assert apply("first", made, "--split", "validation", "--data", here / "data", *out) == 0, "another spelling"


def test_candidates_of_two_splits_are_not_chosen_among_together(here, tmp_path, capsys):
    paths = [
        folder_of(f"{split}.jsonl", tmp_path / split, data="data", split=split) for split in ("train", "validation")
    ]
    assert apply("first", *paths, "--out", tmp_path / "out") == 2
    assert "expected candidates of one data set and one split, got" in (message := capsys.readouterr().err)
    assert "data (train)" in message
    assert "data (validation)" in message


def test_a_run_with_the_name_of_a_choice_is_not_mistaken_for_it(undisturbed, here, tmp_path, capsys, monkeypatch):
    shutil.copytree(undisturbed, tmp_path / "best")
    monkeypatch.chdir(tmp_path)
    options = (here / "validation.jsonl", "--data", here / "data", "--split", "validation", "--out", "out")
    assert apply("best", *options) == 2
    assert (
        "best is a built-in choice, but also the folder of a run here. For the run, write ./best"
        in capsys.readouterr().err
    )
    assert apply("./best", *options) == 0
    assert json.loads((tmp_path / "out" / "generation.json").read_text())["system"]


def test_a_reranker_is_neither_trained_nor_validated_on_the_test_split(here, tmp_path, capsys):
    made = folder_of("train.jsonl", tmp_path / "made", data="data", split="test")
    for files in (f"train={made}", f"train=train.jsonl,validation={made}"):
        run = ("--run", str(tmp_path / "run"), "--set", f"data.candidates={files}")
        assert cli.main(["train", "tiny.toml", *run]) == 2
        assert "are for the split 'test', on which a reranker is evaluated. Make others" in capsys.readouterr().err


def test_a_reranker_is_not_validated_on_its_training_sources(here, tmp_path, capsys):
    whole = folder_of("train.jsonl", tmp_path / "made", data="data", split="train")
    lines = (here / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[:3]))
    part = folder_of(tmp_path / "some.jsonl", tmp_path / "part", data=str(here / "data"), split="train")
    run = ("--run", str(tmp_path / "run"), "--set", f"data.candidates=train={whole},validation={part}")
    assert cli.main(["train", "tiny.toml", *run]) == 2
    message = capsys.readouterr().err
    assert "3 of 3 validation sources are training sources, too, such as 'train-0' of" in message
    (tmp_path / "some.jsonl").write_text("".join(lines[3:]))
    rest = folder_of(tmp_path / "some.jsonl", tmp_path / "rest", data="data", split="train")
    run = ("--run", str(tmp_path / "run"), "--set", f"data.candidates=train={rest},validation={part}")
    assert cli.main(["train", "tiny.toml", *run, "--set", "train.max_steps=1"]) == 0, "another part of the split"


ROUGE = {"name": "rouge", "scores": ["rouge1", "rouge2", "rougeLsum"], "options": {}, "sentence_a_line": False}
CHRF = {"name": "chrf", "scores": ["chrf"], "options": {"word_order": "2"}, "sentence_a_line": False}


def test_scores_of_one_training_have_one_metric(here, tmp_path, capsys):
    train = folder_of("train.jsonl", tmp_path / "train", data="data", split="train", metric=ROUGE)
    dev = folder_of("validation.jsonl", tmp_path / "dev", data="data", split="validation", metric=CHRF)
    options = ["tiny.toml", "--run", str(tmp_path / "run"), "--set", "train.max_steps=1"]
    assert cli.main(["train", *options, "--set", f"data.candidates=train={train},validation={dev}"]) == 2
    message = capsys.readouterr().err
    assert "but the train candidates have rouge (rouge1 + rouge2 + rougeLsum) and the" in message
    assert "validation candidates have chrf (word_order=2). Make one of them again" in message
    assert cli.main(["train", *options, "--set", f"data.candidates=train={train}"]) == 0
    assert "scores: rouge (rouge1 + rouge2 + rougeLsum)." in (tmp_path / "run" / "card.md").read_text()
    (train / "candidates.json").write_text(json.dumps({"data": "data", "split": "train", "metric": CHRF}))
    shutil.rmtree(tmp_path / "run" / "model")
    assert cli.main(["train", *options, "--set", f"data.candidates=train={train}"]) == 2
    assert "have changed since it was started:\n  metric: " in capsys.readouterr().err


def test_equal_scores_are_said_and_refused_if_all_are(here, tmp_path, capsys):
    rows = [json.loads(line) for line in (here / "train.jsonl").read_text().splitlines()]
    equal = [row | {"scores": [0.5, 0.5, 0.5]} for row in rows]
    write_rows(tmp_path / "equal.jsonl", equal)
    options = ["tiny.toml", "--run", str(tmp_path / "run"), "--set", f"data.candidates={tmp_path / 'equal.jsonl'}"]
    assert cli.main(["train", *options]) == 2
    assert "have equal scores, so there is no order to learn" in capsys.readouterr().err
    alone = [row | {"candidates": row["candidates"][:1], "scores": row["scores"][:1]} for row in rows]
    write_rows(tmp_path / "equal.jsonl", [*alone[:3], *equal[3:]])
    assert cli.main(["train", *options]) == 2
    assert "have equal scores, so there is no order to learn" in capsys.readouterr().err
    write_rows(tmp_path / "equal.jsonl", [*equal[:3], *rows[3:]])
    assert cli.main(["train", *options, "--set", "train.max_steps=1"]) == 0
    assert "3 sources have candidates of equal scores, which have no order." in capsys.readouterr().err


def test_candidates_without_references_are_refused(here, tmp_path, messages):
    write_rows(tmp_path / "c.jsonl", [{"id": "x", "candidates": ["a", "b"], "scores": [0, 1]}])
    with pytest.raises(UserError, match=r"no candidate in .* has a source and a reference: .* has ids like 'train-0'"):
        read_set([tmp_path / "c.jsonl"], Data(name="data"), "summarisation", "train")
    write_rows(tmp_path / "d.jsonl", [{"id": name, "candidates": ["a"], "scores": [0]} for name in ("x", "train-1")])
    assert len(read_set([tmp_path / "d.jsonl"], Data(name="data"), "summarisation", "train").examples) == 1
    assert any("1 of 2 rows of candidates" in line and "are left out" in line for line in messages)


def test_one_candidate_only_is_nothing_to_choose(here, tmp_path, capsys):
    rows = [json.loads(line) for line in (here / "train.jsonl").read_text().splitlines()]
    alone = [row | {"candidates": row["candidates"][:1], "scores": [0.5]} for row in rows]
    write_rows(tmp_path / "alone.jsonl", alone)
    options = ["tiny.toml", "--run", str(tmp_path / "run"), "--set", f"data.candidates={tmp_path / 'alone.jsonl'}"]
    assert cli.main(["train", *options]) == 2
    assert "has only one candidate, so there is nothing to choose. Make several" in capsys.readouterr().err
    write_rows(tmp_path / "alone.jsonl", [*alone[:3], *rows[3:]])
    assert cli.main(["train", *options, "--set", "train.max_steps=1"]) == 0
    assert "3 sources have one candidate only, which has no order." in capsys.readouterr().err
    write_rows(tmp_path / "alone.jsonl", alone[:3])
    assert apply("first", tmp_path / "alone.jsonl", "--data", "data", "--split", "train", "--out", tmp_path / "o") == 0
    assert "3 of 3 sources have only one candidate, which is chosen." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.candidates="], "data.candidates has none to train on. Make some with ngramloss candidates"),
        (["data.candidates=test=a"], "data.candidates: expected a path, or train=PATH,validation=PATH"),
        (["system=simcls(margn=1)"], "simcls takes OPTION=VALUE with the options margin, gold_margin"),
        (["system=simcls(pooling=last)"], "system: pooling: must be one of first, mean, got 'last'."),
        (["system=simcls(margin=-1)"], "system: margin: must be at least 0, got -1"),
        (["system=simcsl"], "unknown system 'simcsl'. Did you mean 'simcls'?"),
        (["system=(a"], "system: expected a name and options, such as simcls(margin=0.01), got '(a'."),
        (["objective=ce + matches(2)", "train.fsdp=true"], "train.fsdp: is not a setting of simcls."),
        (["objective=ce + matches(2)"], "objective: simcls has an objective of its own. Leave it out."),
        (["train.best=rouge2"], "train.best: must be one of score, loss, last for simcls."),
        (["train.precision=fp16", "data.candidates=nowhere"], "systems train in bf16 or fp32, not in fp16."),
        (["data.max_source=2000"], "scratch reads at most 1024 tokens, and the recipe asks for 2000. Lower"),
        (["model.name=nowhere"], "cannot load the model of 'nowhere'"),
    ],
)
def test_mistakes_are_sentences(here, tmp_path, capsys, settings, sentence):
    changes = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *FILES, *changes]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_not_a_reranker_is_said(small_run, here, tmp_path):
    with pytest.raises(UserError, match=r"is not a reranker\. Train one with: ngramloss rerank train"):
        simcls.Reranker(small_run)
    with pytest.raises(MissingFileError, match=r"is not a run: it has no recipe\.toml"):
        simcls.Reranker(tmp_path)


def test_rerank_train_names_data_encoder_and_files(here, undisturbed, tmp_path, capsys):
    options = ["--validation", "validation.jsonl", "--recipe", "tiny.toml", "--run", str(tmp_path / "run")]
    assert cli.main(["rerank", "train", "train.jsonl", *options]) == 2
    assert "does not name the data of its candidates" in capsys.readouterr().err
    assert cli.main(["rerank", "train", "nowhere", *options]) == 2
    assert "there is no file or folder nowhere. Make candidates with" in capsys.readouterr().err
    shutil.copy("train.jsonl", tmp_path / "a,b.jsonl")
    assert cli.main(["rerank", "train", str(tmp_path / "a,b.jsonl"), "--data", "data", *options]) == 2
    assert "a,b.jsonl has a comma in its name, but commas separate files of candidates" in capsys.readouterr().err
    assert cli.main(["rerank", "train", "train.jsonl", "--data", "data", *options]) == 0
    assert_equal_runs(tmp_path / "run", undisturbed)
    settings = (tmp_path / "run" / "recipe.toml").read_text()
    assert f"train={here / 'train.jsonl'},validation={here / 'validation.jsonl'}" in settings
    assert "next: ngramloss rerank apply" in capsys.readouterr().err
    assert cli.main(["rerank", "train", "train.jsonl", "--data", "data", "--recipe", "demo"]) == 2
    assert "the recipe demo is for a model that generates text" in capsys.readouterr().err


def test_an_encoder_that_is_none_is_refused(here, small_run, tmp_path, capsys):
    settings = ("--set", f"model.name={small_run / 'model'}")
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *FILES, *settings]) == 2
    assert "is an encoder-decoder (its type is" in (message := capsys.readouterr().err)
    assert "but an encoder is needed, such as" in message


def test_the_written_form_is_read():
    assert read_system("simcls").options == {"margin": 0.01, "gold_margin": 0.0, "gold_weight": 1.0, "pooling": "first"}
    assert read_system(" simcls( pooling = mean , margin=0.5)").options["pooling"] == "mean"
    assert [path.name for path in named_files("folder")["train"]] == ["folder"]


def test_systems_are_listed(capsys):
    assert cli.main(["list", "systems"]) == 0
    assert "simcls" in capsys.readouterr().out


PLUGIN = """
import torch
from ngramloss import SYSTEMS, Setting, System

SYSTEMS["mine"] = System(
    "a system of my own", (), "mine_system", options={"size": Setting(3, least=1)}, bests={"loss": False}
)
"""


def test_a_plugin_adds_a_system(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SYSTEMS, "_added", {})
    (tmp_path / "mine.py").write_text(PLUGIN)
    assert cli.main(["list", "systems", "--plugin", str(tmp_path / "mine.py")]) == 0
    assert "a system of my own (plugin)" in capsys.readouterr().out
    assert read_system("mine(size=4)").options == {"size": 4}


def test_a_changed_system_of_a_plugin_is_not_continued_with(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SYSTEMS, "_added", {})
    plugin = tmp_path / "mine.py"
    plugin.write_text('import ngramloss as ng\nng.SYSTEMS["mine"] = ng.SYSTEMS.entry("simcls")\n')
    arguments = ["train", "tiny.toml", "--run", str(tmp_path / "run"), *FILES, "--plugin", str(plugin)]
    arguments += ["--set", "system=mine", "--set", "train.max_steps=1"]
    assert cli.main(arguments) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    SYSTEMS._added.clear()
    plugin.write_text(plugin.read_text() + "size = 2\n")
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert "have changed since it was started:\n  plugin system mine: " in capsys.readouterr().err


@pytest.mark.slow
def test_generate_lets_the_writer_of_the_candidates_write_and_then_chooses(small_run, tmp_path, monkeypatch, capsys):
    """The candidates of a run say who wrote them and how."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    options = ["--data", "newswire", "--count", "3", "--search", "beams", "--beams", "4", "--metric", "chrf"]
    assert cli.main(["candidates", str(small_run), *options, "--limit", "6", "--out", "made"]) == 0
    train = ["rerank", "train", "made", "--recipe", "tiny.toml", "--run", "run", "--set", "train.max_steps=1"]
    assert cli.main(train) == 0
    assert cli.main(["generate", "run", "--limit", "2", "--out", "texts"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "texts" / "candidates.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    chosen = texts_in(tmp_path / "texts")
    assert all(text in row["candidates"] for text, row in zip(chosen, rows, strict=True))
    about, made = (json.loads((tmp_path / name / "candidates.json").read_text()) for name in ("texts", "made"))
    assert about["candidates"] == made["candidates"]
    assert about["generation"] == made["generation"]
    assert about["metric"] == made["metric"]
    again = ["generate", "run", "--limit", "2", "--out", "other"]
    assert cli.main([*again, "--set", "data.max_source=9"]) == 2
    assert "keeps the data.max_source of its training. It accepts --set for task, data.name" in capsys.readouterr().err
    assert cli.main([*again, "--set", "task=translation"]) == 2
    assert "was trained for summarisation, not for translation" in capsys.readouterr().err
    for change, sentence in (
        ({"weights": "other"}, "have changed since it wrote the candidates that run was trained on"),
        ({"model": "elsewhere/mine"}, "the outputs of the model elsewhere/mine, but"),
    ):
        (tmp_path / "made" / "candidates.json").write_text(json.dumps(made | change))
        assert cli.main(again) == 2
        assert sentence in capsys.readouterr().err
    for name, change in (("made", {}), ("more", {"weights": "other"})):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "candidates.json").write_text(json.dumps(made | change))
    text = (tmp_path / "run" / "recipe.toml").read_text()
    file = f"train={tmp_path / 'made'}"
    assert file in text
    (tmp_path / "run" / "recipe.toml").write_text(text.replace(file, f"{file},train={tmp_path / 'more'}"))
    assert cli.main(again) == 2
    assert "was trained on candidates of 2 models:" in (message := capsys.readouterr().err)
    assert "ngramloss rerank apply run CANDIDATES" in message
    (tmp_path / "made" / "candidates.json").unlink()
    assert cli.main(again) == 2
    assert "made does not name this model" in capsys.readouterr().err
