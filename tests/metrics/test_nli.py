"""Classifiers of pairs: as one pair at a time without padding, and their outputs found by name."""

import json
import random
import re
import shutil

import pytest
import torch
import transformers
from judges import PAIRS, made, plain

from ngramloss.metrics import nli as room
from ngramloss.metrics import pretrained
from ngramloss.metrics.nli import PUBLISHED, nli, probabilities


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, made(folder)


@pytest.mark.parametrize(("kind", "positions", "read"), [("bert", 64, 64), ("albert", 90, 80), ("roberta", 66, 64)])
def test_every_family_agrees_with_one_pair_at_a_time(kind, positions, read, tmp_path):
    model = made(tmp_path, kind, positions=positions)
    judge = nli(str(tmp_path), metric="m", longest=80)
    assert judge.longest == read
    found = probabilities(judge, PAIRS, batch_size=4)
    for pair, row in zip(PAIRS, found, strict=True):
        assert row == pytest.approx(plain(model, judge.tokenizer, pair, read), abs=1e-5)
    assert (
        max(max(column) - min(column) for column in zip(*found, strict=True)) > 0.1
    )  # else the comparison says little


def test_batches_and_order_change_nothing(bert):
    judge = nli(str(bert[0]), metric="m")
    whole = dict(zip(PAIRS, probabilities(judge, PAIRS, batch_size=len(PAIRS)), strict=True))
    for size in (1, 2, 5):
        mixed = random.Random(size).sample(PAIRS, len(PAIRS))
        for pair, row in zip(mixed, probabilities(judge, mixed, batch_size=size), strict=True):
            assert row == pytest.approx(whole[pair], abs=1e-5)


def rows_read(judge):
    counts = []
    judge.model.register_forward_pre_hook(
        lambda _, __, inputs: counts.append(inputs["input_ids"].shape), with_kwargs=True
    )
    return counts


def test_a_pair_is_computed_once_and_known_ones_never(bert):
    judge = nli(str(bert[0]), metric="m")
    counts, known = rows_read(judge), {PAIRS[0]: (0.5, 0.25, 0.25)}
    rows = probabilities(judge, [*PAIRS, *PAIRS], batch_size=3, known=known)
    assert sum(size for size, _ in counts) == len(PAIRS) - 1
    assert rows[: len(PAIRS)] == rows[len(PAIRS) :]
    assert rows[0] == (0.5, 0.25, 0.25)
    assert set(known) == set(PAIRS)


def test_pairs_of_like_length_go_together(bert):
    judge = nli(str(bert[0]), metric="m")
    counts = rows_read(judge)
    pairs = [("cat " * length, "dog") for length in (1, 40, 2, 41)]
    probabilities(judge, pairs, batch_size=2)
    assert [width for _, width in counts] == [45, 6]


def test_half_a_surrogate_pair_is_read_as_a_question_mark(bert):
    judge = nli(str(bert[0]), metric="m")
    odd, plain_text = probabilities(judge, [("The \ud83d cat", "\udc00"), ("The ? cat", "?")], batch_size=1)
    assert odd == plain_text


@pytest.mark.slow
def test_two_enormous_texts_are_read_as_far_as_any_pair(bert, monkeypatch):
    judge = nli(str(bert[0]), metric="m")
    first, second = "The cat sat on the mat. ", "Rain and wind in the north. "
    enormous = (first * 4000, second * 4000)
    (row,) = probabilities(judge, [enormous], batch_size=1)
    assert row == pytest.approx(plain(bert[1], judge.tokenizer, (first * 100, second * 100), 64), abs=1e-5)
    assert [len(text) for text in room._shortened(judge, enormous)] == [room.LONG, room.LONG]
    kept = room._shortened(judge, ("mat " * 9000, "x" * 9000 + " rain" * 9000))
    assert len(kept[1]) == room.LONG  # one unknown word, and enough words after it
    assert (
        room._shortened(judge, ("x" * 40_000, "mat " * 9000))[0] == "x" * 40_000
    )  # one token is not enough to stop at
    assert room._shortened(judge, ("mat " * 9000, second)) == ["mat " * 9000, second]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    model = made(tmp_path)
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has tokens that its model lacks \(it has 50\): they do not belong together"):
        probabilities(nli(str(tmp_path), metric="m"), PAIRS, batch_size=2)


def test_no_pairs_give_no_rows(bert):
    assert probabilities(nli(str(bert[0]), metric="m"), [], batch_size=2) == []


def test_the_model_reads_in_fp32_without_dropout(tmp_path):
    made(tmp_path, hidden_dropout_prob=0.5).bfloat16().save_pretrained(tmp_path)
    judge = nli(str(tmp_path), metric="m", device="cpu")
    assert judge.model.dtype == torch.float32
    assert probabilities(judge, PAIRS, batch_size=2) == probabilities(judge, PAIRS, batch_size=2)


def test_a_tokenizer_that_reads_less_is_heeded(bert, tmp_path):
    shutil.copytree(bert[0], tmp_path, dirs_exist_ok=True)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | {"model_max_length": 20}))
    judge = nli(str(tmp_path), metric="m")
    assert judge.longest == 20
    counts = rows_read(judge)
    probabilities(judge, PAIRS, batch_size=4)
    assert max(width for _, width in counts) == 20


@pytest.mark.parametrize(
    ("outputs", "columns"),
    [
        (("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), (2, 0, 1)),
        (("entailment", "neutral", "contradiction"), (0, 2, 1)),
        (("SUPPORTS", "REFUTES", "NOT ENOUGH INFO"), (0, 1, 2)),
        (("NEI", "Refuted", "Supported"), (2, 1, 0)),
        (("not_enough_info", "supports", "refutes"), (1, 2, 0)),
    ],
)
def test_outputs_are_found_by_their_names(outputs, columns):
    config = transformers.BertConfig(id2label=dict(enumerate(outputs)))
    assert room._columns(config, None, "x") == columns


def test_names_may_stand_in_label2id_alone_as_texts():
    label2id = {"ENTAILMENT": "2", "NEUTRAL": "0", "CONTRADICTION": "1"}
    config = transformers.BertConfig(id2label={0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, label2id=label2id)
    assert room._columns(config, None, "x") == (2, 1, 0)


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (None, None),
        (("entailment", "not_entailment"), None),
        (("entailment", "neutral", "other"), None),
        (("entailment", "entails", "contradiction"), None),
        (None, ["entailment", "neutral"]),
        (None, ["entailment", "contradiction", "neutral", "neutral"]),
        (None, ["yes", "no", "neutral"]),
    ],
)
def test_outputs_that_cannot_be_told_apart_are_asked_for(outputs, labels):
    config = transformers.BertConfig(id2label=dict(enumerate(outputs or ("LABEL_0", "LABEL_1", "LABEL_2"))))
    said = re.escape(str(labels)) if labels else re.escape(str(list(config.id2label.values())))
    with pytest.raises(
        ValueError, match=rf"which outputs of x mean entailment, contradiction, neutral\? .*{said}.*Give labels="
    ):
        room._columns(config, labels, "some/x")


def test_outputs_without_names_are_taken_as_told(tmp_path):
    model = made(tmp_path, outputs=None, num_labels=3)
    judge = nli(str(tmp_path), metric="m", labels=["neutral", "contradiction", "entailment"])
    (row,) = probabilities(judge, PAIRS[:1], batch_size=1)
    assert row == pytest.approx(plain(model, judge.tokenizer, PAIRS[0], 64)[::-1], abs=1e-5)


@pytest.mark.parametrize(("short", "columns"), [("vitc", (0, 1, 2)), ("mnli", (2, 0, 1)), ("anli", (0, 2, 1))])
def test_published_models_have_their_documented_outputs(short, columns, bert, tmp_path, monkeypatch):
    hub = PUBLISHED[short][0]
    local = tmp_path / hub.split("/")[-1]
    made(local, outputs=None, num_labels=3)
    assert nli(str(local), metric="m").columns == columns
    assert nli(str(local), metric="m").name == local.name
    assert nli(str(local), metric="m", labels=["neutral", "contradiction", "entailment"]).columns == (2, 1, 0)
    monkeypatch.setattr(pretrained, "cached", lambda name: {hub: local}[name])
    assert nli(short, metric="m").columns == nli(hub, metric="m").columns == columns
    assert nli(short, metric="m").name == hub
