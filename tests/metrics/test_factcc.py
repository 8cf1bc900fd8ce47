"""FactCCX: as one sentence at a time, from folders as they were released and as transformers writes them."""

import json
import math
import random
import re

import pytest
import torch
from judges import PAIRS, TEXTS, made, plain, wordpiece
from safetensors.torch import save_file
from transformers import BertTokenizer

from ngramloss.data.sentences import sentences
from ngramloss.metrics import factcc as room
from ngramloss.metrics import pretrained
from ngramloss.metrics.factcc import factcc
from ngramloss.metrics.scores import Absent

OLD_CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "finetuning_task": "factcc_generated",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 16,
    "initializer_range": 0.25,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_labels": 2,
    "output_attentions": False,
    "output_hidden_states": False,
    "pruned_heads": {},
    "torchscript": False,
    "type_vocab_size": 2,
}
"""The fields that pytorch_transformers 1.0 wrote; no model_type."""

DOCUMENTS = [*TEXTS, "", TEXTS[0], "wind " * 300 + TEXTS[2], "东京 下雨了。 Łódź 😀", TEXTS[1], TEXTS[0]]
PREDICTIONS = [
    TEXTS[1],
    TEXTS[2],
    TEXTS[0],
    "The cat sat.",
    "",
    "Rain in the north. Wind in the south!",
    "café. 😀",
    "dog",
    "rain and wind " * 60,
]


def released(folder, *, pickled=True):
    """A folder as FactCCX's: old configuration, BERT's vocabulary, the classifier under its own name, and span heads."""
    model = made(folder, outputs=("CORRECT", "INCORRECT"), seed=2)
    for path in folder.iterdir():
        path.unlink()
    vocabulary = wordpiece().get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(OLD_CONFIG | {"vocab_size": len(words)}))
    state = {
        f"label_{name}" if name.startswith("classifier.") else name: value for name, value in model.state_dict().items()
    }
    state |= {
        f"{part}_{end}_classifier.weight": torch.randn(1, 16) for part in ("ext", "aug") for end in ("start", "end")
    }
    if pickled:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # as torch 1.3 wrote
    else:
        save_file(state, folder / "model.safetensors")
    return model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("factccx")
    model = released(folder)
    return str(folder), model, BertTokenizer.from_pretrained(folder)


def plain_factcc(model, tokenizer, document, summary):
    correct = [plain(model, tokenizer, (document, sentence), 64)[0] for sentence in sentences(summary)]
    if not correct:
        return 0.0, 0.0
    return 100 * sum(correct) / len(correct), 100 * sum(p >= 0.5 for p in correct) / len(correct)


def check(found, model, tokenizer):
    truth = [plain_factcc(model, tokenizer, *pair) for pair in zip(DOCUMENTS, PREDICTIONS, strict=True)]
    assert found.values["factcc"] == pytest.approx([mean for mean, _ in truth], abs=1e-3)
    assert found.values["factcc_share"] == pytest.approx([share for _, share in truth], abs=1e-9)
    assert len({share for _, share in truth}) > 2
    assert list(found.values) == ["factcc", "factcc_share"]


@pytest.mark.parametrize("pickled", [True, False])
def test_the_released_format_agrees_with_one_sentence_at_a_time(pickled, tmp_path):
    model = released(tmp_path, pickled=pickled)
    check(factcc(DOCUMENTS, PREDICTIONS, model=str(tmp_path)), model, BertTokenizer.from_pretrained(tmp_path))


def test_all_tensors_of_the_released_file_are_accounted_for(small):
    found = pretrained.load_state(pretrained.find(small[0], metric="factcc"))
    assert {room.RENAMED.get(name, name) for name in found} - set(small[1].state_dict()) == set(room.SPANS)


@pytest.mark.parametrize("outputs", [("LABEL_0", "LABEL_1"), ("CORRECT", "INCORRECT")])
def test_a_folder_of_transformers_agrees_too(outputs, tmp_path):
    model = made(tmp_path, outputs=outputs, seed=2)
    check(factcc(DOCUMENTS, PREDICTIONS, model=str(tmp_path)), model, BertTokenizer.from_pretrained(tmp_path))


def test_the_names_of_the_outputs_are_heeded(tmp_path):
    made(tmp_path / "one", outputs=("CORRECT", "INCORRECT"))
    made(tmp_path / "two", outputs=("INCORRECT", "CORRECT"))
    one, two = (factcc(DOCUMENTS, PREDICTIONS, model=str(tmp_path / name)).values["factcc"] for name in ("one", "two"))
    assert [a + b for a, b in zip(one, two, strict=True)] == pytest.approx([100 if text else 0 for text in PREDICTIONS])


def test_an_empty_summary_scores_0_and_an_empty_document_is_read(small):
    folder, model, tokenizer = small
    found = factcc(["The cat sat.", ""], ["", "The cat sat."], model=folder).values
    assert found["factcc"][0] == found["factcc_share"][0] == 0
    assert found["factcc"][1] == pytest.approx(100 * plain(model, tokenizer, ("", "The cat sat."), 64)[0], abs=1e-3)
    assert factcc([], [], model=folder).values == {"factcc": [], "factcc_share": []}


def test_a_tie_counts_as_correct(tmp_path):
    model = made(tmp_path, outputs=("CORRECT", "INCORRECT"))
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
    model.save_pretrained(tmp_path)
    assert factcc(["a"], ["b"], model=str(tmp_path)).values == {"factcc": [50], "factcc_share": [100]}


def test_order_batches_and_windows_change_nothing(small, monkeypatch):
    whole = factcc(DOCUMENTS, PREDICTIONS, model=small[0]).values
    monkeypatch.setattr("ngramloss.metrics.nli.WINDOW", 4)
    for size in (1, 3):
        order = random.Random(size).sample(range(len(DOCUMENTS)), len(DOCUMENTS))
        told = []
        mixed = factcc(
            [DOCUMENTS[i] for i in order],
            [PREDICTIONS[i] for i in order],
            model=small[0],
            batch_size=size,
            progress=told.append,
        ).values
        assert told == [4, 4, 1]
        for name, values in whole.items():
            assert mixed[name] == pytest.approx([values[i] for i in order], abs=1e-3)


def test_what_is_cut_cannot_change_the_figure(small):
    long = "wind " * 300
    one = factcc([long], ["Rain came."], model=small[0]).values
    assert one == factcc([long + "The cat sat. " * 50], ["Rain came."], model=small[0]).values
    assert one != factcc(["The cat sat. " * 50 + long], ["Rain came."], model=small[0]).values


def test_the_splitter_and_the_model_are_signed(small):
    folder = small[0]
    found = factcc(["a b"], ["The cat. The dog.\nRain."], model=folder, splitter="newline")
    parts = [plain(small[1], small[2], ("a b", claim), 64)[0] for claim in ("The cat. The dog.", "Rain.")]
    assert found.values["factcc"] == [pytest.approx(50 * sum(parts), abs=1e-3)]
    assert re.fullmatch(
        r"factcc\|model:factccx0\|files:[0-9a-f]{12}\|splitter:newline\|tokens:64\|precision:fp32\|transformers:[^|]+\|version:[^|]+",
        found.signature,
    )


def test_the_language_is_used_and_signed(small):
    text = "Am 3. Oktober kommt z. B. er."
    found = factcc(["a b"], [text], model=small[0], language="de")
    assert found.values["factcc"] == factcc(["a b"], [text], model=small[0], splitter="newline").values["factcc"]
    assert found.values != factcc(["a b"], [text], model=small[0]).values
    assert "|splitter:pysbd|language:de|" in found.signature


def test_a_pair_has_512_tokens_at_most(tmp_path):
    made(tmp_path, outputs=("CORRECT", "INCORRECT"), positions=700)
    assert "|tokens:512|" in factcc(["wind " * 900], ["Rain."], model=str(tmp_path)).signature


def test_absences_say_what_to_fetch(tmp_path):
    released(tmp_path)
    (tmp_path / "vocab.txt").rename(tmp_path / "kept")
    with pytest.raises(
        Absent, match=r"lacks its tokenizer's vocabulary .* Copy it there from the model that was fine-tuned"
    ):
        factcc([], [], model=str(tmp_path))
    (tmp_path / "kept").rename(tmp_path / "vocab.txt")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(
        Absent, match=r"has neither model.safetensors nor pytorch_model.bin. ngramloss docs metrics says how"
    ):
        factcc([], [], model=str(tmp_path))


def test_other_models_are_refused(tmp_path):
    made(tmp_path / "three")
    with pytest.raises(ValueError, match="three has 3 outputs; FactCC has 2, CORRECT and INCORRECT"):
        factcc([], [], model=str(tmp_path / "three"))
    made(tmp_path / "bare", outputs=("CORRECT", "INCORRECT")).bert.save_pretrained(tmp_path / "bare")
    with pytest.raises(
        ValueError, match=r"bare lack 2 tensors of BertForSequenceClassification, classifier.bias first"
    ):
        factcc([], [], model=str(tmp_path / "bare"))
    (tmp_path / "broken").mkdir()
    released(tmp_path / "broken")
    (tmp_path / "broken" / "pytorch_model.bin").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be loaded"):
        factcc([], [], model=str(tmp_path / "broken"))
    with pytest.raises(ValueError, match="lengths differ: 1 documents, 0 predictions"):
        factcc(["a"], [], model=str(tmp_path / "three"))


def test_nan_is_told_with_the_document(tmp_path):
    model = made(tmp_path, outputs=("CORRECT", "INCORRECT"))
    cat = BertTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("cat")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[cat] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"factcc: the model gave NaN for document 2 \(the first is 0\)"):
        factcc(["a", "b", "The cat."], [pair[1] for pair in PAIRS[1:3]] + ["Rain."], model=str(tmp_path))
