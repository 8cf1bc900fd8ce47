"""BertSumExt: its loss, its rows and its choice are those of plain Python; it trains, is killed and continued."""

import json
import math
import random

import pytest
import tiny_tokenizers
import torch
from commands import assert_equal_runs, assert_two_processes_train_as_one, finished
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoders import MODEL, STEPS
from transformers import AutoModel, BertConfig, BertModel

from ngramloss import cli
from ngramloss.data import newswire
from ngramloss.metrics.oracle import greedy_oracle
from ngramloss.recipe import Data
from ngramloss.training.system_registry import read_system, run_of
from ngramloss_systems import bertsum_ext as ext

pytestmark = pytest.mark.usefixtures("own_cache")

OPTIONS = read_system("bertsum_ext(heads=2,feed_forward=16,dropout=0.0)").options
RECIPE = f"""
system = "bertsum_ext(layers=2,heads=2,feed_forward=16,dropout=0.1,oracle=2,sentences=2,min_words=2)"
[data]
name = "data"
max_source = 96
{MODEL}{STEPS}best = "loss"
"""


# The formulas


@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), max_size=4), min_size=1, max_size=3))
def test_the_loss_is_the_sum_of_each_sentence_s_cross_entropy(rows):
    most = max(map(len, rows))
    logits, labels = torch.zeros(len(rows), most, dtype=torch.float64), torch.full((len(rows), most), -100)
    for index, row in enumerate(rows):
        for place, (logit, label) in enumerate(row):
            logits[index, place], labels[index, place] = logit, int(label)

    def cost(logit, label):
        probability = 1 / (1 + math.exp(-logit))
        return -math.log(probability if label else 1 - probability)

    expected = [sum(cost(*sentence) for sentence in row) for row in rows]
    assert ext.penalty(logits, labels).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_loss_has_its_gradient():
    logits = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([[1, 0, -100], [0, 0, 1]])
    assert torch.autograd.gradcheck(lambda logits: ext.penalty(logits, labels), (logits,))
    ext.penalty(logits, labels).sum().backward()
    assert logits.grad[0, 2] == 0


def test_positions_are_sinusoids():
    found = ext.sinusoids(3, 4)
    for position in range(3):
        for column in range(4):
            angle = position / 10000 ** (2 * (column // 2) / 4)
            wave = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert found[position, column].item() == pytest.approx(wave, abs=1e-6)


def test_padding_does_not_change_a_sentence_s_score():
    torch.manual_seed(0)
    scorer = ext.SentenceScorer(8, OPTIONS).eval()
    states = torch.randn(1, 3, 8)
    alone = scorer(states, torch.ones(1, 3, dtype=torch.bool))
    wider = torch.cat([states, torch.randn(1, 2, 8)], 1)
    beside = scorer(wider, torch.tensor([[True, True, True, False, False]]))
    assert torch.allclose(alone, beside[:, :3], atol=1e-6)
    assert not torch.allclose(scorer(states.flip(1), torch.ones(1, 3, dtype=torch.bool)), alone.flip(1)), "order counts"


@pytest.mark.slow
def test_it_learns_to_find_a_sentence_by_one_of_its_words():
    chance, generator = random.Random(0), torch.manual_seed(0)
    texts, wanted = [], []
    for _ in range(96):
        sentences = [[chance.choice(("cat", "day", "rain", "rose")) for _ in range(3)] for _ in range(4)]
        wanted.append(chance.randrange(4))
        sentences[wanted[-1]][chance.randrange(3)] = "no"
        texts.append(" ".join(" ".join(words) + "." for words in sentences))
    batch = ext.pad_rows(
        1, [ext.row_of(document, [place]) for document, place in zip(documents(texts), wanted, strict=True)]
    )
    encoder = BertModel(
        BertConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    model = ext.Extractor(encoder, OPTIONS)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(150):
        picked = torch.randperm(len(wanted), generator=generator)[:24]
        part = {name: values[picked] for name, values in batch.items()}
        optimiser.zero_grad()
        ext.penalty(model(part), part["labels"]).mean().backward()
        optimiser.step()
    found = model(batch).argmax(-1)
    assert (found == torch.tensor(wanted)).float().mean() > 0.6, "by position alone it would be a quarter"


# Documents


TOKENIZER = tiny_tokenizers.ours()
MARKS = (0, 2)


def documents(texts, *, min_words=0, max_source=50):
    data = Data(max_source=max_source, splitter="period")
    return ext.read_documents(texts, TOKENIZER, data, marks=MARKS, min_words=min_words)


def test_every_sentence_has_its_own_first_and_last_token():
    text = "the cat sat. it rained all day. no."
    (found,) = documents([text])
    assert found.sentences == found.whole == ["the cat sat.", "it rained all day.", "no."]
    assert [found.input_ids[position] for position in found.positions] == [0, 0, 0]
    pieces = [TOKENIZER(sentence, add_special_tokens=False)["input_ids"] for sentence in found.sentences]
    assert found.input_ids == [token for piece in pieces for token in (0, *piece, 2)]
    assert not found.cut


def test_short_sentences_are_left_out_unless_all_are_short():
    first, second, none = documents(["the cat sat. no. it rained all day.", "no. yes.", ""], min_words=3)
    assert (first.sentences, first.places) == (["the cat sat.", "it rained all day."], [0, 2])
    assert ext.row_of(first, [2])["labels"].tolist() == [0, 1]
    assert second.sentences == ["no.", "yes."]
    assert (none.sentences, none.input_ids) == ([], [])


@given(st.integers(4, 40))
def test_a_document_beyond_the_encoder_s_end_is_cut_at_its_last_token(longest):
    text = "the cat sat. it rained all day. prices rose by three per cent."
    (whole,), (found,) = documents([text], max_source=999), documents([text], max_source=longest)
    if len(whole.input_ids) <= longest:
        assert found == whole
        return
    assert found.cut
    assert found.input_ids == [*whole.input_ids[: longest - 1], 2]
    assert found.positions == [position for position in whole.positions if position < longest - 1]
    assert found.sentences == whole.sentences[: len(found.positions)]


def test_a_batch_has_positions_segments_and_labels_of_each_row():
    first, second = documents(["the cat sat. it rained. no.", "yes."])
    batch = ext.pad_rows(1, [ext.row_of(first, [0, 2]), ext.row_of(second, [])])
    assert batch["labels"].tolist() == [[1, 0, 1], [0, -100, -100]]
    assert batch["positions"][0].tolist() == first.positions
    assert batch["attention_mask"].sum(-1).tolist() == [len(first.input_ids), len(second.input_ids)]
    bounds = [*first.positions, len(first.input_ids)]
    expected = [index % 2 for index in range(3) for _ in range(bounds[index], bounds[index + 1])]
    assert batch["segments"][0].tolist() == expected
    assert batch["segments"][1].tolist() == [0] * len(expected)


def document_of(*sentences):
    return ext.SplitDocument(list(sentences), list(sentences), list(range(len(sentences))), [], [], False)


@pytest.mark.parametrize(
    ("blocking", "expected"),
    [(True, "no news\nwe saw a cat\nno more of it"), (False, "we saw a cat\nthere We saw a dog\nno more of it")],
)
def test_a_sentence_that_shares_three_words_with_a_better_one_is_left_out(blocking, expected):
    document = document_of("no news", "we saw a cat", "there We saw a dog", "no more of it")
    options = {"sentences": 3, "blocking": blocking}
    assert ext.summary_of(document, [0.1, 0.9, 0.7, 0.8, 9.0], options) == expected


@given(st.lists(st.tuples(st.lists(st.sampled_from("ab"), max_size=5).map(" ".join), st.integers(0, 9)), max_size=5))
def test_sentences_are_taken_as_in_plain_python(rows):
    sentences, scores = [text for text, _ in rows], [score for _, score in rows]

    def runs(text):
        words = text.split()
        return {" ".join(words[start : start + 3]) for start in range(len(words) - 2)}

    taken = []
    for score in sorted(set(scores), reverse=True):
        for place in [place for place, one in enumerate(scores) if one == score]:
            if len(taken) < 3 and not any(runs(sentences[place]) & runs(sentences[one]) for one in taken):
                taken.append(place)
    found = ext.summary_of(document_of(*sentences), scores, {"sentences": 3, "blocking": True})
    assert found == "\n".join(sentences[place] for place in sorted(taken))


# Training


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    for split, count in (("train", 24), ("validation", 6), ("test", 5)):
        items = enumerate(newswire.items(split, count))
        rows = [{"id": f"{number}", "document": item.document, "summary": item.summary} for number, item in items]
        write_rows(folder / "data" / f"{split}.jsonl", rows)
    (folder / "tiny.toml").write_text(RECIPE.replace('"data"', json.dumps(str(folder / "data"))))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def undisturbed(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.main(["train", "tiny.toml", "--run", "undisturbed"]) == 0
    return place / "undisturbed"


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["saving:4", "model:0"])
def test_a_killed_training_continues_to_the_same_weights(undisturbed, here, tmp_path, sabotage):
    arguments = ["train", str(here / "tiny.toml"), "--run", str(tmp_path / "run")]
    assert finished(arguments, sabotage=sabotage)[0] == -9
    assert finished(arguments)[0] == 0
    assert_equal_runs(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_two_processes_train_as_one(here, tmp_path):
    without_dropout = "system=bertsum_ext(layers=1,heads=2,feed_forward=16,dropout=0.0,min_words=2)"
    assert_two_processes_train_as_one(tmp_path, "model.dropout=0.0", without_dropout)


def test_generate_needs_no_targets(undisturbed, here, tmp_path):
    for name, options in (("with", []), ("without", ["--target", "none"])):
        assert cli.main(["generate", "undisturbed", "--out", str(tmp_path / name), *options]) == 0
    texts = [(tmp_path / name / "predictions.jsonl").read_text() for name in ("with", "without")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_generate_score_and_report_take_the_run(undisturbed, here, tmp_path, capsys):
    assert cli.main(["generate", "undisturbed", "--out", str(tmp_path / "texts")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "texts" / "predictions.jsonl").read_text().splitlines()]
    originals = [json.loads(line) for line in (here / "data" / "test.jsonl").read_text().splitlines()]
    for row, original in zip(rows, originals, strict=True):
        lines = row["prediction"].split("\n")
        assert 1 <= len(lines) <= 2
        assert all(line in original["document"] for line in lines)
    again = ["generate", "undisturbed", "--out", str(tmp_path / "texts")]
    assert cli.main(again) == 0
    for setting in ("data.max_source=20", "data.language=de", "data.splitter=newline"):
        assert cli.main([*again, "--set", setting]) == 2
        assert "has predictions made with other settings" in capsys.readouterr().err
    assert cli.main(["generate", "undisturbed", "--out", str(tmp_path / "other"), "--sample"]) == 2
    assert "is a run of bertsum_ext, which has no search of its own" in capsys.readouterr().err
    for search in (["--set", "generation.num_beams=8"], ["--engine", "hf"], ["--preset", "cnndm"]):
        assert cli.main(["generate", "undisturbed", "--out", str(tmp_path / "other"), *search]) == 2
        assert "leave options of a search out" in capsys.readouterr().err
    assert cli.main(["generate", "lead-2", "--like", "undisturbed", "--out", str(tmp_path / "lead")]) == 0
    assert cli.main(["score", str(tmp_path / "lead"), str(tmp_path / "texts")]) == 0
    assert cli.main(["report", str(tmp_path / "lead"), str(tmp_path / "texts"), "-o", str(tmp_path / "page")]) == 0


def test_the_encoder_of_a_run_is_read_like_any_other(undisturbed):
    encoder, report = AutoModel.from_pretrained(undisturbed / "model", output_loading_info=True)
    assert not report["missing_keys"]
    from safetensors.torch import load_file

    saved = load_file(undisturbed / "model" / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(saved[f"bert.{name}"], encoder.state_dict()[name])


def test_validation_has_the_loss_and_what_the_summaries_score(undisturbed):
    lines = [json.loads(line) for line in (undisturbed / "log.jsonl").read_text().splitlines()]
    validations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in validations] == [2, 4, 6]
    assert all(0 <= line["eval_score"] <= 1 for line in validations)
    best = min(validations, key=lambda line: line["eval_loss"])
    assert f"step {best['step']} (lowest validation loss" in (undisturbed / "card.md").read_text()


def test_labels_are_the_oracle_s(here):
    from ngramloss import recipe

    task = ext.task(run_of(recipe.load("tiny.toml")))
    rows = [json.loads(line) for line in (here / "data" / "train.jsonl").read_text().splitlines()]
    data = Data(max_source=96)
    first = ext.read_documents([rows[0]["document"]], task.tokenizer, data, marks=(0, 2), min_words=2)[0]
    chosen = greedy_oracle(first.whole, [rows[0]["summary"]], most=2)
    assert task.examples[0]["labels"].tolist() == [int(place in chosen) for place in first.places]
    assert sum(int(row["labels"].sum()) for row in task.examples) > 0


# Mistakes


def test_generate_says_which_documents_are_cut_and_refuses_those_beyond_the_encoder(
    undisturbed, here, tmp_path, capsys
):
    def generate(longest):
        settings = ("--set", f"data.max_source={longest}", "--out", str(tmp_path / str(longest)))
        return cli.main(["generate", "undisturbed", *settings]), capsys.readouterr().err

    code, message = generate(2000)
    assert code == 2
    assert "undisturbed reads at most 1024 tokens, and the recipe asks for 2000. Lower data.max_source" in message
    code, message = generate(20)
    assert code == 0
    assert "5 of 5 documents are longer than data.max_source = 20 tokens and lost their end." in message
    assert "lost their end" not in generate(1000)[1]


def test_documents_of_one_sentence_are_said_and_refused_if_all_are(here, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    rows = [{"id": str(number), "document": "One sentence only", "summary": "One sentence"} for number in range(4)]
    for split in ("train", "validation"):
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    options = ["--set", f"data.name={tmp_path / 'data'}", "--run", str(tmp_path / "run")]
    assert cli.main(["train", "tiny.toml", *options]) == 2
    assert (
        "every document of the train split has one sentence, so there is nothing to choose" in capsys.readouterr().err
    )
    two = {"id": "x", "document": "One sentence. Another sentence.", "summary": "One sentence"}
    for split in ("train", "validation"):
        write_rows(tmp_path / "data" / f"{split}.jsonl", [*rows, two])
    assert cli.main(["train", "tiny.toml", *options, "--set", "train.max_steps=1"]) == 0
    assert "4 documents have one sentence." in capsys.readouterr().err
    write_rows(tmp_path / "data" / "test.jsonl", [rows[0], {"id": "y", "document": "...", "summary": "none"}])
    assert cli.main(["generate", str(tmp_path / "run"), "--out", str(tmp_path / "texts")]) == 0
    texts = [
        json.loads(line)["prediction"] for line in (tmp_path / "texts" / "predictions.jsonl").read_text().splitlines()
    ]
    assert texts == ["One sentence only", "..."]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.max_source=1025", "scratch reads at most 1024 tokens, and the recipe asks for 1025. Lower"),
        ("data.candidates=x", "data.candidates: is not a setting of bertsum_ext. Leave it out."),
        ("data.prefix=a", "data.prefix: is not a setting of bertsum_ext. Leave it out."),
        ("train.best=ce", "train.best: must be one of loss, score, last for bertsum_ext"),
        ("system=bertsum_ext(heads=3)", "system: heads: must divide the encoder's width of 16, got 3."),
    ],
)
def test_mistakes_are_sentences(here, tmp_path, capsys, setting, sentence):
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), "--set", setting]) == 2
    assert sentence in capsys.readouterr().err
