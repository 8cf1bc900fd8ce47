"""A column of weights: read, passed on from words to tokens, trained with, and refused where it does not fit."""

import json
import shutil

import numpy as np
import pytest
import tiny_multilingual
import tiny_tokenizers
import tokenizers
from commands import TRAIN as TRAIN_PROGRAM
from commands import environment
from forks import fork_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SHORT_TRAINING, TINY_MODEL
from transformers import PreTrainedTokenizerFast

from ngramloss import cli
from ngramloss.data import Example, Split, load
from ngramloss.data.examples import fingerprint
from ngramloss.data.label_weights import _label_weights, _texts, _token_weights, prepare_weights
from ngramloss.data.prompts import prompt_of
from ngramloss.data.tokens import Shape, tokenise
from ngramloss.errors import UserError
from ngramloss.recipe import Data
from ngramloss.training.prepared import Prepared

pytestmark = pytest.mark.usefixtures("own_cache")

TARGET = "The cat sat, and the  uncommonly large dog\nran."
TOKENIZERS = {
    name: getattr(tiny_tokenizers, name) for name in ("ours", "bart_like", "t5_like", "bert_like", "mbart_like")
}


def a_split(examples, column="document"):
    return Split("rows", "train", examples, [], fingerprint(examples), column=column)


def numbers(examples, tokenizer, shape, cache, column="document"):
    """The ids and the weights of the labels of each example."""
    split = a_split(examples, column)
    tokens = tokenise(examples, split.fingerprint, tokenizer, shape, cache=cache)
    found = np.load(prepare_weights(split, tokens, tokenizer, shape, cache=cache))
    rows = [tokens[row]["labels"].tolist() for row in range(len(tokens))]
    ends = np.cumsum([len(row) for row in rows])
    return [(row, found[end - len(row) : end].tolist()) for row, end in zip(rows, ends, strict=True)]


def expected(tokenizer, target, weights):
    """Each word by itself, with the space before it, in plain loops."""
    made = []
    for number, (word, weight) in enumerate(zip(target.split(), weights, strict=True)):
        own = tokenizer(" " * bool(number) + word, add_special_tokens=False)["input_ids"]
        made += [weight] * len(own)
    return made


# Words and tokens


@pytest.mark.parametrize("name", TOKENIZERS)
def test_weights_of_words_are_those_of_their_tokens(name, tmp_path):
    tokenizer, target = TOKENIZERS[name](), "The cat sat, and the uncommonly large dog ran."
    weights = [1.0, 2.0, 0.5, 0.0, 3.0, 4.0, 1.5, 2.5, 0.25]
    ((labels, found),) = numbers(
        [Example("1", "a", target, weights=tuple(weights))], tokenizer, Shape("none"), tmp_path
    )
    body = tokenizer(target, add_special_tokens=False)["input_ids"]
    start = next(at for at in range(len(labels)) if labels[at : at + len(body)] == body)
    inside = expected(tokenizer, target, weights)
    assert len(inside) == len(body)
    assert found == [1.0] * start + inside + [0.25] * (len(labels) - start - len(body))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_weights_of_tokens_are_taken_as_they_are(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    body = tokenizer(TARGET, add_special_tokens=False)["input_ids"]
    weights = tuple(float(number) for number in range(1, len(body) + 1))
    ((labels, found),) = numbers([Example("1", "a", TARGET, weights=weights)], tokenizer, Shape("none"), tmp_path)
    start = next(at for at in range(len(labels)) if labels[at : at + len(body)] == body)
    assert found[start : start + len(body)] == list(weights)
    assert found[:start] == [1.0] * start
    assert set(found[start + len(body) :]) == {weights[-1]}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("longest", [4, 7])
def test_a_target_that_is_cut_keeps_the_weights_of_what_is_left(name, longest, tmp_path):
    tokenizer = TOKENIZERS[name]()
    weights = tuple(float(number) for number in range(1, len(TARGET.split()) + 1))
    examples = [Example("1", "a", TARGET, weights=weights)]
    ((whole_ids, whole),) = numbers(examples, tokenizer, Shape("none"), tmp_path)
    ((labels, found),) = numbers(examples, tokenizer, Shape("none", max_target=longest), tmp_path)
    assert len(labels) == longest < len(whole_ids)
    kept = [at for at in range(longest) if labels[at] == whole_ids[at]]
    assert [found[at] for at in kept] == [whole[at] for at in kept]
    assert all(found[at] == found[kept[-1]] for at in range(kept[-1], longest)), "the end has its neighbour's weight"


@pytest.mark.parametrize("family", ["m2m100", "mbart50", "nllb"])
def test_multilingual_tokenizers_read_targets_in_the_language_of_the_target(family, tmp_path):
    tokenizer = tiny_multilingual.tokenizer(family, tmp_path / family)
    tokenizer.src_lang, tokenizer.tgt_lang = tiny_multilingual.LANGUAGES[family]
    target = tiny_multilingual.PAIRS[0][1]
    weights = tuple(float(number + 1) for number in range(len(target.split())))
    ((labels, found),) = numbers([Example("1", "a", target, weights=weights)], tokenizer, Shape("none"), tmp_path)
    body = tokenizer(text_target=target, add_special_tokens=False)["input_ids"]
    start = next(at for at in range(len(labels)) if labels[at : at + len(body)] == body)
    inside = found[start : start + len(body)]
    assert inside == sorted(inside)
    assert set(inside) == set(weights)


class Slow:
    """A tokenizer without offsets: one token for each letter, and ▁ before each word; ``together`` joins words."""

    is_fast = False

    def __init__(self, *, together=False):
        self.together = together

    def __call__(self, text=None, *, text_target=None, add_special_tokens=True, **_):
        texts = text if text is not None else text_target
        ids = [[ord(letter) for letter in self.pieces(one)] for one in ([texts] if isinstance(texts, str) else texts)]
        ids = [[*one, 2] if add_special_tokens else one for one in ids]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def pieces(self, text):
        return text.strip() if self.together else "".join(f"▁{word}" for word in text.split())


def test_without_offsets_words_are_tokenised_by_themselves_and_compared_with_the_whole():
    example = Example("1", "a", "ab  c", weights=(1.0, 2.0))
    (text,) = _texts([example], Slow(), Shape("none"))
    assert _token_weights(example.weights, text) == [1.0, 1.0, 1.0, 2.0, 2.0]
    labels = [*map(ord, "▁ab▁c"), 2]
    assert _label_weights(labels, text, [1.0, 1.0, 1.0, 2.0, 2.0], "1").tolist() == [1, 1, 1, 2, 2, 2]
    (other,) = _texts([example], Slow(together=True), Shape("none"))
    with pytest.raises(UserError, match="encodes a word differently inside a text than alone"):
        _token_weights(example.weights, other)
    with pytest.raises(UserError, match="the labels of row '7' are not the tokens of its target"):
        _label_weights([5, 6], text, [1.0] * 5, "7")


@given(st.lists(st.text("ab é\t\n", min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_token_of_a_word_has_its_weight_whatever_the_white_space(parts, seed):
    target = "".join(parts)
    words = target.split()
    if not words:
        return
    tokenizer = LIKE_BART
    weights = np.random.default_rng(seed).integers(0, 9, len(words)).astype(float)
    (text,) = _texts([Example("1", "a", target, weights=tuple(weights))], tokenizer, Shape("none"))
    found = _token_weights(tuple(weights), text)
    offsets = tokenizer(text_target=target, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(words) == len(text.ids) and found is None:
        return  # refused: it could be either
    for (start, end), weight in zip(offsets, found, strict=True):
        touched = {len(target[: at + 1].split()) - 1 for at in range(start, end) if not target[at].isspace()}
        following = min(len(target[:start].split()), len(words) - 1)
        mean = np.mean([weights[word] for word in touched]) if touched else weights[following]
        assert weight == pytest.approx(mean)


LIKE_BART = tiny_tokenizers.bart_like()


def test_a_token_that_spans_words_has_their_mean():
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the cat": 3, ",": 4, " sat on": 5}, unk_token=","))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Split(",", "isolated")
    example = Example("1", "a", "the cat, sat on", weights=(1.0, 3.0, 5.0, 6.0))
    (text,) = _texts([example], PreTrainedTokenizerFast(tokenizer_object=pieces), Shape("none"))
    assert text.ids == [3, 4, 5]
    assert _token_weights(example.weights, text) == [2.0, 3.0, 5.5]


def test_a_list_that_has_neither_length_is_refused_with_its_row(tmp_path):
    examples = [Example("good", "a", "a b c", weights=(1, 2, 3))]
    examples += [Example(f"bad{number}", "a", "a uncommonly", weights=(1.0,) * 77) for number in range(12)]
    with pytest.raises(UserError) as error:
        numbers(examples, tiny_tokenizers.ours(), Shape("none"), tmp_path)
    said = str(error.value)
    assert "12 of 13 rows of the split 'train' need one weight for each word of the target, or one for" in said
    count = len(tiny_tokenizers.ours()("a uncommonly", add_special_tokens=False)["input_ids"])
    assert f"row 'bad0': 77 weights for 2 words and {count} tokens" in said
    assert "… and 2 more" in said


# Decoder-only models


@pytest.mark.parametrize("bos", [True, False])
def test_completions_have_weights_behind_their_prompts(bos, tmp_path):
    tokenizer = tiny_tokenizers.gpt_like(bos=bos)
    prompt = prompt_of(Data(), "summarisation", "document", tokenizer, [1])
    target = "The uncommonly large cat"
    examples = [Example("1", "A text.", target, weights=(1.0, 2.0, 3.0, 4.0))]
    for longest in (99, 6):
        ((labels, found),) = numbers(examples, tokenizer, Shape("none", max_target=longest, prompt=prompt), tmp_path)
        inside = expected(tokenizer, f" {target}", (1.0, 2.0, 3.0, 4.0))
        first = len(tokenizer(" The", add_special_tokens=False)["input_ids"])
        inside = [1.0] * first + inside[len(tokenizer("The", add_special_tokens=False)["input_ids"]) :]
        assert found == [*inside, 4.0][: len(labels)]
        assert len(labels) == min(longest, len(inside) + 1)


def conversation(*weights):
    """Questions and answers with these weights; None is none."""
    messages = []
    for number, weight in enumerate(weights):
        answer = {"role": "assistant", "content": f"Because {number}."}
        messages += [{"role": "user", "content": "Why?"}, answer if weight is None else {**answer, "weight": weight}]
    return {"messages": messages}


def messages_of(tmp_path, *rows, weights="weight"):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(str(path), "train", weights=weights)


def learnt(tokenizer, labels):
    return tokenizer.decode([token for token in labels if token >= 0])


def test_an_answer_with_the_weight_0_is_read_but_not_learnt(tmp_path):
    tokenizer = tiny_tokenizers.gpt_like()
    prompt = prompt_of(Data(), "summarisation", "messages", tokenizer, [1])
    split = messages_of(tmp_path, conversation(0, 1, 0, 2.5, 0), conversation(None, 1))
    first, second = split.examples
    assert first.target == "Because 3."
    assert first.weights == (0, 1, 0, 2.5)
    assert second.weights == (1, 1)
    shape = Shape("none", prompt=prompt)
    tokens = tokenise(split.examples, split.fingerprint, tokenizer, shape, cache=tmp_path)
    found = np.load(prepare_weights(split, tokens, tokenizer, shape, cache=tmp_path))
    row = tokens[0]
    assert "Because 0." in tokenizer.decode(row["input_ids"])
    assert "Because 2." not in learnt(tokenizer, row["labels"].tolist())
    assert learnt(tokenizer, row["labels"].tolist()).count("Because") == 2
    labels = row["labels"]
    own, half = found[: len(labels)], int((labels < 0).argmax())
    assert set(own[:half].tolist()) == {1.0}
    assert set(own[labels < 0].tolist()) == {0.0}
    assert set(own[half:][labels[half:] >= 0].tolist()) == {2.5}
    assert set(found[len(labels) :][tokens[1]["labels"] >= 0].tolist()) == {1.0}


def test_a_conversation_that_is_cut_keeps_the_weights_of_its_first_answers(tmp_path):
    tokenizer = tiny_tokenizers.gpt_like()
    prompt = prompt_of(Data(), "summarisation", "messages", tokenizer, [1])
    split = messages_of(tmp_path, conversation(3, 0.5))
    for longest in (9, 500):
        shape = Shape("none", max_target=longest, prompt=prompt)
        tokens = tokenise(split.examples, split.fingerprint, tokenizer, shape, cache=tmp_path)
        found = np.load(prepare_weights(split, tokens, tokenizer, shape, cache=tmp_path))
        answers = found[tokens[0]["labels"] >= 0]
        assert answers[0] == 3
        assert (0.5 in answers) == (longest == 500)


def test_a_chat_without_learnt_answers_is_a_bad_row(tmp_path):
    with pytest.raises(UserError, match=r"chat.jsonl:1: 'messages' has no answer to learn: all have the weight 0"):
        messages_of(tmp_path, conversation(0, 0), conversation(1))
    with pytest.raises(UserError, match=r"chat.jsonl:2: number 1 of 'weights of the answers' is -1, and weights are"):
        messages_of(tmp_path, conversation(1), conversation(-1))
    unknown = conversation(1, 1)
    unknown["messages"][-1]["weight"] = None
    with pytest.raises(UserError, match=r"chat.jsonl:1: number 2 of 'weights of the answers' should be a number, got"):
        messages_of(tmp_path, unknown)


def test_weights_of_messages_that_are_not_read_are_named(tmp_path, caplog):
    split = messages_of(tmp_path, conversation(0, 1), weights=None)
    assert split.examples[0].weights == ()
    said = "have the key weight, which is ignored: every answer has the weight 1"
    assert said in caplog.text
    caplog.clear()
    late = [
        {"messages": [{k: v for k, v in one.items() if k != "weight"} for one in conversation(1)["messages"]]}
    ] * 100
    as_text = {"messages": json.dumps(conversation(0, 1)["messages"])}
    messages_of(tmp_path, *late, as_text, weights=None)
    assert caplog.text.count(said) == 1


# Rows


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing", "no column 'w'"),
        (None, "'w' should be a list of numbers, such as .*, got null"),
        (0.5, "'w' should be a list of numbers, such as .*, got float"),
        ("often", "'w' should be a list of numbers, such as .*, got other text"),
        ([], "'w' is an empty list"),
        ([1, "2"], "number 2 of 'w' should be a number, got str"),
        ([[1, 2]], "number 1 of 'w' should be a number, got list"),
        ([1, None], "number 2 of 'w' should be a number, got null"),
        ([-0.5, 1], "number 1 of 'w' is -0.5, and weights are finite and 0 or more"),
        ([1, float("nan")], "number 2 of 'w' is nan, and weights are finite"),
        ([1, float("inf")], "number 2 of 'w' is inf, and weights are finite and at most"),
        ([10**400, 1], r"number 1 of 'w' is 1\S*, and weights are finite and at most"),
    ],
)
def test_weights_that_cannot_be_are_bad_rows(tmp_path, value, reason):
    rows = [{"document": "a", "summary": "b c", "w": [1, 2]}, {"document": "a", "summary": "b c", "w": value}]
    if value == "missing":
        del rows[1]["w"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"rows.jsonl:2: {reason}"):
        load(str(path), "train", weights="w")
    assert len(load(str(path), "train", weights="w", on_bad_row="skip").examples) == 1
    assert load(str(path), "train").examples[0].weights == ()


def test_weights_are_read_from_csv_too_and_change_the_fingerprint(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('document,summary,w,v\na,b c,"[1, 0.5]","[1, 1]"\n')
    read = {name: load(str(path), "train", weights=name) for name in ("w", "v", None)}
    assert read["w"].examples[0].weights == (1.0, 0.5)
    assert len({split.fingerprint for split in read.values()}) == 3
    with pytest.raises(UserError, match=r"no column 'x' for the weights.*Its columns are 'document'"):
        load(str(path), "train", weights="x")


# Training


RECIPE = (
    """
objective = "ce + 0.5*matches(2)"
[data]
name = "data"
separator = "none"
max_source = 96
max_target = 40
weights = "w"
"""
    + TINY_MODEL
    + "dropout = 0.0\n"
    + SHORT_TRAINING
)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, own_cache):
    """Data with weights, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "data").mkdir()
    chooser = np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 5), ("test", 3)):
        rows = []
        for number in range(count):
            words = chooser.choice(WORDS, chooser.integers(3, 9)).tolist()
            rows.append(
                {
                    "id": f"{split}{number}",
                    "document": " ".join(chooser.choice(WORDS, 12)),
                    "summary": " ".join(words),
                    "w": chooser.choice([0.0, 0.5, 1.0, 2.0], len(words)).tolist(),
                    "ones": [1] * len(words),
                }
            )
        if split == "test":
            rows = [{name: value for name, value in row.items() if name != "w"} for row in rows]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("first") == 0
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "place"))
    return tmp_path / "place"


def train(run, *changes):
    return cli.main(["train", "tiny.toml", "--run", run, *(word for one in changes for word in ("--set", one))])


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def value(run, name, step=1):
    return next(line[name] for line in log(run) if name in line and line["step"] == step)


def test_weights_of_1_are_no_weights_and_others_weigh(place):
    assert train("ones", "data.weights=ones") == 0
    assert train("none", "data.weights=") == 0
    for name in ("loss", "ce", "matches(2)", "eval_loss", "eval_ce", "eval_matches(2)"):
        assert value(place / "ones", name) == pytest.approx(value(place / "none", name), rel=1e-6)
        assert value(place / "ones", name) != pytest.approx(value(place / "first", name), rel=1e-3)


def test_the_loss_is_the_weighted_sum_over_the_number_of_tokens(place):
    """At the start a model from scratch is nearly uniform: the weighted loss is about the mean weight times the loss."""
    prepared = Prepared.read(place / "first" / "prepared.json")
    split = prepared.splits["validation"]
    weights = np.load(split.beside["weights"])
    assert train("lr0", "train.learning_rate=0") == 0
    assert train("none", "train.learning_rate=0", "data.weights=") == 0
    ratio = value(place / "lr0", "eval_ce") / value(place / "none", "eval_ce")
    assert ratio == pytest.approx(weights.mean(), rel=0.03)
    said = (place / "first" / "card.md").read_text()
    assert "tokens of the training targets weigh from 0 to 2, on average" in said


@pytest.mark.slow
def test_any_split_of_a_step_twins_and_a_continued_run_have_the_same_losses(place):
    names = ("loss", "ce", "matches(2)", "grad_norm")
    assert train("whole", "train.capture=false") == 0
    assert train("cut", "train.max_tokens=150", "train.accumulate=2", "train.batch_size=2") == 0
    for step in (1, 2):
        for name in names:
            assert value(place / "whole", name, step) == pytest.approx(value(place / "cut", name, step), rel=1e-4)
    assert train("twins", "train.twins=true", "objective=ce + 0.5*matches(2) + rdrop", "model.dropout=1e-6") == 0
    for name in names[1:3]:  # with so little dropout twins are equal
        assert value(place / "twins", name) == pytest.approx(value(place / "whole", name), rel=1e-4)
    shutil.rmtree(place / "first" / "model")
    shutil.rmtree(place / "first" / "checkpoints" / "checkpoint-2")
    assert train("first") == 0
    assert value(place / "first", "loss", 2) == pytest.approx(value(place / "whole", "loss", 2), rel=1e-6)


def test_other_weights_do_not_continue_a_run(place, capsys):
    shutil.rmtree(place / "first" / "model")
    shutil.rmtree(place / "first" / "checkpoints" / "checkpoint-2")
    assert train("first", "data.weights=ones") == 2
    assert "data.weights: 'w' → 'ones'" in capsys.readouterr().err
    path = place / "data" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["w"][0] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train("first") == 2
    assert (
        "settings, data or code of first have changed since it was started:\n  train data: " in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("objective=ce + precision(2)",), "precision(2) cannot weight single tokens"),
        (("objective=ce + bag(2)",), "bag(2) cannot weight single tokens"),
        (("data.weights=nothing",), "no column 'nothing' for the weights"),
        (("data.weights=id",), "'id' should be a list of numbers"),
        (("data.weights=zeros",), "all weights of the training data are 0, so that nothing would be learnt"),
    ],
)
def test_what_cannot_be_is_refused_before_training(place, capsys, changes, message):
    for split in ("train", "validation"):
        path = place / "data" / f"{split}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "zeros": [0] * len(row["w"])}) + "\n" for row in rows))
    assert train("new", *changes) == 2
    assert message in capsys.readouterr().err
    assert not (place / "new" / "prepared.json").exists()


def test_a_validation_split_without_the_column_is_named(place, capsys):
    path = place / "data" / "validation.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({"document": row["document"], "summary": row["summary"]}) + "\n" for row in rows)
    )
    assert train("new") == 2
    assert "validation.jsonl has no column 'w' for the weights" in capsys.readouterr().err


def test_systems_have_no_weights(place, capsys):
    assert cli.main(["train", "bertsum-ext-demo", "--run", "system", "--set", "data.weights=w"]) == 2
    assert "data.weights: is not a setting of bertsum_ext. Leave it out." in capsys.readouterr().err


def test_answers_of_weight_0_and_1_need_no_weights_beside_the_labels(place, capsys):
    tokenizer = tiny_tokenizers.gpt_like()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(place / "chat")
    rows = [conversation(0, 1, 1), conversation(1), conversation(1, 0, 1), conversation(1)]
    for split in ("train", "validation"):
        (place / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "data" / "test.jsonl").unlink()
    changes = ("data.weights=weight", 'model.architecture="llama"', "model.tokenizer=chat", "objective=ce + bag(2)")
    assert train("chat-run", *changes, "data.max_target=200") == 0
    assert "2 answers of the training data have the weight 0: they are read, but not learnt" in capsys.readouterr().err
    assert not Prepared.read(place / "chat-run" / "prepared.json").splits["train"].beside
    assert train("other", *changes[:3], "data.weights=importance") == 2
    assert "no answer of the training data has a 'importance' other than 1" in capsys.readouterr().err
    rows[1]["messages"][-1]["weight"] = 0.5
    (place / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train("other", *changes) == 2
    assert "bag(2) cannot weight single tokens" in capsys.readouterr().err
    assert train("half", *changes[:3], "data.max_target=200", "objective=ce + matches(2)") == 0
    assert "weights" in Prepared.read(place / "half" / "prepared.json").splits["train"].beside


@pytest.mark.slow  # starts two processes
def test_two_processes_have_the_losses_of_one(place):
    codes, err = fork_ranks(
        TRAIN_PROGRAM,
        ["train", str(place / "tiny.toml"), "--set", f"data.name={place / 'data'}", "--run", str(place / "two")],
        environment=environment(),
    )
    assert codes == [0, 0], err
    for name in ("loss", "ce", "matches(2)", "eval_loss", "eval_ce"):
        for step in (1, 2):
            assert value(place / "two", name, step) == pytest.approx(value(place / "first", name, step), rel=1e-4)
