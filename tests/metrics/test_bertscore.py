"""BERTScore against its definition in loops, on tiny random models."""

import math
import shutil
from types import SimpleNamespace

import pytest
import tiny_tokenizers
import torch
import transformers as hf

from ngramloss.metrics import bertscore as module
from ngramloss.metrics.bertscore import bertscore
from ngramloss.metrics.scores import Absent

pytestmark = pytest.mark.slow

PARTS = ("bertscore_precision", "bertscore_recall", "bertscore")
POSITIONS = 40
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
REFERENCES = [
    ["The cat sat on the mat.", "A cat was there."],
    ["Dogs ran home quickly in 2024."],
    ["Nobody came."],
    ["rain is expected in the north, and wind in the south", "rain in the south", "wind"],
    ["Łódź café “no” 雨 😀"],
    ["The cat"],
]
PREDICTIONS = [
    "The cat sat on a mat",
    "A dog ran home.",
    "Nobody",
    "wind is expected in the north",
    "naïve café — 雪",
    "The cat",
]


def family(name):
    tokenizer = {
        "bert": tiny_tokenizers.bert_like,
        "albert": tiny_tokenizers.bert_like,
        "t5": tiny_tokenizers.t5_like,
    }.get(name, tiny_tokenizers.bart_like)()
    V, pad = len(tokenizer), tokenizer.pad_token_id
    return tokenizer, {
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(**SIZES, vocab_size=V, max_position_embeddings=POSITIONS, pad_token_id=pad)
        ),
        "roberta": lambda: hf.RobertaForMaskedLM(
            hf.RobertaConfig(**SIZES, vocab_size=V, max_position_embeddings=POSITIONS + pad + 1, pad_token_id=pad)
        ),
        "albert": lambda: hf.AlbertModel(
            hf.AlbertConfig(
                **SIZES, vocab_size=V, embedding_size=8, max_position_embeddings=POSITIONS, pad_token_id=pad
            )
        ),
        "bart": lambda: hf.BartModel(
            hf.BartConfig(
                vocab_size=V,
                d_model=16,
                encoder_layers=3,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                max_position_embeddings=POSITIONS,
                pad_token_id=pad,
            )
        ),
        "t5": lambda: hf.T5Model(
            hf.T5Config(
                vocab_size=V,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=3,
                num_decoder_layers=2,
                num_heads=2,
                pad_token_id=pad,
            )
        ),
    }[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("bert", "roberta", "albert", "bart", "t5"):
        tokenizer, made = family(name)
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            model = made()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def bert(folders):
    return str(folders / "bert")


def read(name, tokenizer, text):
    text = text.strip()
    spaced = " " + text if text and name in ("roberta", "bart") else text
    return tokenizer(spaced, truncation=name != "t5", max_length=POSITIONS)["input_ids"]


def states(name, model, ids, layer):
    """Of one text alone, at a layer, from all that the model shows."""
    encoder = model.encoder if name in ("bart", "t5") else model
    with torch.no_grad():
        shown = encoder(torch.tensor([ids]), output_hidden_states=True).hidden_states
        found = shown[layer]
        if name == "t5" and layer < 3:  # the norm after the last layer comes after the chosen one
            found = encoder.final_layer_norm(found)
    return found[0].tolist()


def cosine(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))


def oracle(folder, references, predictions, layer):
    """The definition, in the dumbest Python that can express it. F, P, R of each document, 0 to 1."""
    name = folder.name
    tokenizer, model = hf.AutoTokenizer.from_pretrained(folder), hf.AutoModel.from_pretrained(folder).eval()
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id}

    def side(ids, rows, others):
        weights = [0.0 if token in special else 1.0 for token in ids]
        if sum(weights) == 0:
            return 0.0
        return sum(w * max(cosine(row, other) for other in others) for w, row in zip(weights, rows, strict=True)) / sum(
            weights
        )

    def one(prediction, reference):
        if min(len(prediction), len(reference)) == len(read(name, tokenizer, "")):
            return (0.0, 0.0, 0.0)
        x, y = states(name, model, prediction, layer), states(name, model, reference, layer)
        P, R = side(prediction, x, y), side(reference, y, x)
        return (2 * P * R / (P + R) if P + R else 0.0, P, R)

    return [
        max(one(read(name, tokenizer, prediction), read(name, tokenizer, text)) for text in those)
        for prediction, those in zip(predictions, references, strict=True)
    ]


def percent(triples):
    return {
        "bertscore": [100 * f for f, _, _ in triples],
        "bertscore_precision": [100 * p for _, p, _ in triples],
        "bertscore_recall": [100 * r for _, _, r in triples],
    }


def assert_same(got, expected, tolerance=1e-4):  # of 100: fp32 states of another batch
    assert set(got) == set(expected) == set(PARTS)
    for name in PARTS:
        assert got[name] == pytest.approx(expected[name], abs=tolerance)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("bert", 2), ("bert", 3), ("roberta", 1), ("roberta", 2), ("albert", 2), ("bart", 2), ("t5", 2), ("t5", 3)],
)
def test_agrees_with_the_definition(folders, name, layer):
    expected = percent(oracle(folders / name, REFERENCES, PREDICTIONS, layer))
    got = bertscore(REFERENCES, PREDICTIONS, model=str(folders / name), layer=layer, device="cpu")
    assert_same(got.values, expected)
    assert min(got.values["bertscore"]) < 99  # the texts are told apart


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batches_change_nothing(folders, batch_size):
    whole = bertscore(REFERENCES, PREDICTIONS, model=str(folders / "roberta"), layer=2)
    parts = bertscore(REFERENCES, PREDICTIONS, model=str(folders / "roberta"), layer=2, batch_size=batch_size)
    assert_same(parts.values, whole.values)
    assert parts.signature == whole.signature


def test_the_order_of_documents_and_references_changes_nothing_at_all(bert):
    whole = bertscore(REFERENCES, PREDICTIONS, model=bert, layer=2, batch_size=3).values
    order = [3, 0, 5, 1, 4, 2]
    moved = bertscore(
        [REFERENCES[i][::-1] for i in order], [PREDICTIONS[i] for i in order], model=bert, layer=2, batch_size=3
    ).values
    assert all(moved[name] == [whole[name][i] for i in order] for name in PARTS)


def test_blocks_that_memory_asks_for_change_nothing(bert, monkeypatch):
    whole = bertscore(REFERENCES * 2, PREDICTIONS + PREDICTIONS[::-1], model=bert, layer=2).values
    monkeypatch.setattr(module, "BLOCK", 30)
    assert_same(bertscore(REFERENCES * 2, PREDICTIONS + PREDICTIONS[::-1], model=bert, layer=2).values, whole)


def test_each_text_is_encoded_once_and_no_more_is_held_than_awaited(bert, monkeypatch):
    seen, held, kept = [], [], []
    inner, match = module._states, module._match

    def counted(encoder, texts, batch_size):
        seen.extend(texts)
        found = inner(encoder, texts, batch_size)
        held.append(len(found))
        return found

    monkeypatch.setattr(module, "_states", counted)
    monkeypatch.setattr(module, "_match", lambda *of: kept.append(len(of[2])) or match(*of))
    monkeypatch.setattr(module, "BLOCK", 30)
    bertscore([*REFERENCES, ["Nobody came."]], [*PREDICTIONS, "wind"], model=bert, layer=2)
    assert len(seen) == len(set(seen)) == len({text for those in REFERENCES for text in those} | set(PREDICTIONS))
    assert len(held) > 2
    assert max(held) <= max(kept) < len(seen)


def test_a_block_holds_as_many_tokens_as_may_be_held_or_one_document(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 10)
    documents = [((1,) * size, [(2,) * 2]) for size in (3, 9, 1, 20, 3, 2)]  # 5, 11, 3, 22, 5, 4 tokens
    assert list(module._blocks(documents)) == [[2, 5], [0, 4], [1], [3]]
    assert list(module._blocks([])) == []


def test_blocks_and_batches_do_not_depend_on_any_order(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 10)
    documents = [((1, token), [(2, 3)]) for token in (5, 3, 9, 4, 7)]  # all of one size
    blocks = [
        [[those[number] for number in block] for block in module._blocks(those)]
        for those in (documents, documents[::-1])
    ]
    assert blocks[0] == blocks[1]
    seen = []

    def model(tokens, attention_mask):
        seen.append((tokens.tolist(), attention_mask.tolist()))
        return SimpleNamespace(last_hidden_state=torch.ones(*tokens.shape, 2))

    model.device = "cpu"
    encoder = SimpleNamespace(model=model, tokenizer=SimpleNamespace(pad_token_id=8))
    texts = [(5, 1, 2), (3, 1), (4, 1), (2, 1, 2)]
    for order in (texts, texts[::-1]):
        assert set(module._states(encoder, order, 3)) == set(texts)
    assert (
        seen[:2]
        == seen[2:]
        == [([[3, 1, 8], [4, 1, 8], [2, 1, 2]], [[1, 1, 0], [1, 1, 0], [1, 1, 1]]), ([[5, 1, 2]], [[1, 1, 1]])]
    )


def test_progress_counts_each_document_once(bert, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 30)
    told = []
    bertscore(REFERENCES, PREDICTIONS, model=bert, layer=2, progress=told.append)
    assert len(told) > 1
    assert sum(told) == len(PREDICTIONS)


def test_identical_texts_score_100(bert):
    values = bertscore([["the cat sat"], ["雨"]], ["the cat sat", "雨"], model=bert, layer=3).values
    assert all(values[name] == pytest.approx([100, 100], abs=1e-9) for name in PARTS)


def test_special_tokens_weigh_nothing_and_may_still_be_the_best_match(folders, bert):
    tokenizer, model = hf.AutoTokenizer.from_pretrained(bert), hf.AutoModel.from_pretrained(bert).eval()
    texts = ["cat", "dog", "rain", "wind", "north", "mat", "home", "day"]
    found = {text: states("bert", model, tokenizer(text)["input_ids"], 2) for text in texts}
    pairs = [(a, b) for a in texts for b in texts]
    scored = bertscore([[b] for _, b in pairs], [a for a, _ in pairs], model=bert, layer=2).values[
        "bertscore_precision"
    ]
    differing = 0
    for (a, b), precision in zip(pairs, scored, strict=True):
        tokens, others = found[a][1:-1], found[b]
        with_special = sum(max(cosine(token, other) for other in others) for token in tokens) / len(tokens)
        without = sum(max(cosine(token, other) for other in others[1:-1]) for token in tokens) / len(tokens)
        assert precision == pytest.approx(100 * with_special, abs=1e-4)
        differing += with_special - without > 1e-3
    if not differing:
        pytest.skip("no special token of this random model is the best match of a word")


@pytest.mark.parametrize(
    ("name", "empty"), [("bert", ""), ("bert", " \n\t"), ("bert", "\x00"), ("roberta", " "), ("bart", ""), ("t5", "\n")]
)
def test_an_empty_text_scores_0_on_either_side(folders, name, empty):
    values = bertscore(
        [["the cat"], [empty], [empty]], [empty, "the cat", empty], model=str(folders / name), layer=2
    ).values
    assert values == {part: [0.0, 0.0, 0.0] for part in PARTS}


def test_an_empty_reference_among_others_does_not_count(bert):
    alone = bertscore([["the mat"]], ["the cat"], model=bert, layer=2).values
    assert_same(bertscore([["", "the mat"]], ["the cat"], model=bert, layer=2).values, alone)


def test_one_token_beside_one_special_token_is_not_empty(folders):
    values = bertscore([["a"]], ["a"], model=str(folders / "t5"), layer=2).values
    assert values["bertscore"] == pytest.approx([100.0])


@pytest.mark.parametrize("name", ["bert", "roberta", "bart", "albert"])
def test_a_text_beyond_the_longest_input_is_cut(folders, name):
    long = "the cat sat on the mat and the dog ran home " * 40
    values, signature, _ = bertscore([[long], ["the dog"]], ["the cat", long], model=str(folders / name), layer=2)
    assert_same(values, percent(oracle(folders / name, [[long], ["the dog"]], ["the cat", long], 2)))
    assert f"|cut:{POSITIONS}|" in signature
    same = bertscore([[long]], [long + " and something else"], model=str(folders / name), layer=2).values
    assert same["bertscore"] == pytest.approx([100.0])


def test_the_tokenizer_may_cut_earlier(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "bert")
    hf.AutoTokenizer.from_pretrained(folders / "bert", model_max_length=6).save_pretrained(tmp_path / "bert")
    values, signature, _ = bertscore(
        [["the cat sat on the mat"]], ["the cat sat on nobody"], model=str(tmp_path / "bert"), layer=2
    )
    assert values["bertscore"] == pytest.approx([100.0])
    assert "|cut:6|" in signature


def test_without_positions_nothing_is_cut(folders):
    long = "the cat sat on the mat and the dog ran home " * 40
    values, signature, _ = bertscore([[long]], [long + "wind wind"], model=str(folders / "t5"), layer=2)
    assert values["bertscore"][0] != pytest.approx(100, abs=1e-4)
    assert "|cut:no|" in signature


def test_an_encoder_saved_without_its_decoder_serves(folders, tmp_path):
    hf.T5EncoderModel.from_pretrained(folders / "t5").save_pretrained(tmp_path / "t5")
    hf.AutoTokenizer.from_pretrained(folders / "t5").save_pretrained(tmp_path / "t5")
    alone, whole = (
        bertscore([["the cat"]], ["a dog ran"], model=str(root / "t5"), layer=2).values for root in (tmp_path, folders)
    )
    assert alone == whole


def test_spaces_around_a_text_change_nothing(folders):
    for name, space in (("bert", "no"), ("roberta", "yes")):
        plain = bertscore([["the cat sat"]], ["a dog ran"], model=str(folders / name), layer=2)
        padded = bertscore([["  the cat sat\n"]], [" a dog ran "], model=str(folders / name), layer=2)
        assert padded == plain
        assert f"|space:{space}|" in plain.signature


def test_half_a_surrogate_pair_is_read_as_a_question_mark(bert):
    assert bertscore([["the \ud83d cat"]], ["the cat"], model=bert, layer=2) == bertscore(
        [["the ? cat"]], ["the cat"], model=bert, layer=2
    )


def test_several_references_give_the_best_f_and_its_precision_and_recall(bert):
    texts = ["the cat", "wind in the south", "Dogs ran home quickly in 2024."]
    each = [bertscore([[text]], ["the cat ran in the wind"], model=bert, layer=2).values for text in texts]
    best = max(each, key=lambda values: values["bertscore"])
    assert len({values["bertscore"][0] for values in each}) == 3
    assert_same(bertscore([texts], ["the cat ran in the wind"], model=bert, layer=2).values, best)


def test_the_signature_says_what_could_change_a_figure(folders, bert, tmp_path):
    found = bertscore([["a"]], ["a"], model=bert, layer=2).signature
    assert found.startswith("bertscore|model:bert|files:")
    assert f"|layer:2|idf:no|rescaled:no|refs:1|cut:40|space:no|transformers:{hf.__version__}|version:" in found
    assert "|refs:var|" in bertscore(REFERENCES, PREDICTIONS, model=bert, layer=2).signature
    copy = tmp_path / "bert"
    shutil.copytree(folders / "bert", copy)
    (copy / "tokenizer_old").mkdir()
    assert bertscore([["a"]], ["a"], model=str(copy), layer=2).signature == found
    hf.BertModel.from_pretrained(copy, num_hidden_layers=2).save_pretrained(copy)
    assert bertscore([["a"]], ["a"], model=str(copy), layer=2).signature != found


def test_no_documents_have_no_scores(bert):
    assert bertscore([], [], model=bert, layer=2).values == {part: [] for part in PARTS}


def test_a_known_name_brings_its_layer(folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "bert", tmp_path / "roberta-base")
    monkeypatch.setitem(module.LAYERS, "roberta-base", 2)
    found = bertscore([["the cat"]], ["a dog"], model=str(tmp_path / "roberta-base"))
    assert "|layer:2|" in found.signature
    assert found.values == bertscore([["the cat"]], ["a dog"], model=str(folders / "bert"), layer=2).values


def test_the_layers_of_the_papers_models_are_the_published_ones():
    published = {
        "roberta-large": 17,
        "roberta-base": 10,
        "bert-base-uncased": 9,
        "bert-large-uncased": 18,
        "deberta-xlarge-mnli": 40,
    }
    assert {name: module.LAYERS[name] for name in published} == published


def test_the_layer_is_asked_for_before_anything_large_is_read(folders, tmp_path):
    shutil.copy(folders / "bert" / "config.json", tmp_path)
    with pytest.raises(ValueError, match="there is no default layer"):
        bertscore([["a"]], ["a"], model=str(tmp_path))


def test_an_unknown_name_asks_for_a_layer(bert):
    with pytest.raises(
        ValueError, match=r"there is no default layer for 'bert'. Choose one from 1 to 3 with --set bertscore.layer=N"
    ):
        bertscore([["a"]], ["a"], model=bert)


@pytest.mark.parametrize("layer", [0, 4, -1])
def test_a_layer_that_is_not_there_is_refused(bert, layer):
    with pytest.raises(ValueError, match=f"bert' has 3 layers: `layer` must be from 1 to 3, got {layer}") as caught:
        bertscore([["a"]], ["a"], model=bert, layer=layer)
    assert not isinstance(caught.value, Absent)


def test_weights_that_lack_the_encoder_are_refused(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "bert")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "bert" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layer.1." not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lack 16 tensors of BertModel, encoder\.layer\.1\..* first. They would be random"
    ):
        bertscore([["a"]], ["a"], model=str(tmp_path / "bert"), layer=2)


def test_a_tokenizer_of_another_model_is_refused(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "bert")
    tiny_tokenizers.bart_like().save_pretrained(tmp_path / "bert")
    with pytest.raises(
        ValueError, match=r"has tokens that its model lacks \(it has \d+\): they do not belong together"
    ):
        bertscore([["the cat sat on the mat. Łódź"]], ["a"], model=str(tmp_path / "bert"), layer=2)


def test_values_that_are_not_finite_are_named(folders, tmp_path):
    model = hf.BertModel.from_pretrained(folders / "bert")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[3] = math.nan
    model.save_pretrained(tmp_path / "bert")
    tiny_tokenizers.bert_like().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="returned NaN or infinite values for the text 'the cat'"):
        bertscore([["the cat"]], ["the cat"], model=str(tmp_path / "bert"), layer=2)


def test_layers_that_cannot_be_told_apart_are_refused(bert):
    model = torch.nn.Module()
    model.config = hf.BertConfig(num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"bertscore cannot find the layers of Module. Choose an encoder of the BERT"):
        module._cut(model, 2)


def test_a_model_that_does_not_count_its_layers_is_refused():
    with pytest.raises(ValueError, match=r"'x' \(clip\) does not say how many layers it has. Choose an encoder"):
        module._chosen_layer("x", 2, hf.CLIPConfig())


def test_misuse_gets_a_sentence(bert):
    with pytest.raises(ValueError, match="lengths differ: 1 references, 2 predictions"):
        bertscore([["a"]], ["a", "b"], model=bert, layer=2)
    with pytest.raises(TypeError, match=r"document 2 has the text 'abc'. Put it in a list"):
        bertscore([["a"], "abc"], ["a", "b"], model=bert, layer=2)
    with pytest.raises(ValueError, match="document 1 has no reference"):
        bertscore([[]], ["a"], model=bert, layer=2)
