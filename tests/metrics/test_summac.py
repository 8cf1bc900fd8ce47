"""SummaC: as the published definition in plain loops, on small models and hand-made weights."""

import math
import random

import numpy as np
import pytest
import torch
from judges import TEXTS, made, plain
from safetensors.torch import save_file

from ngramloss.data.sentences import sentences
from ngramloss.metrics import summac as room
from ngramloss.metrics.nli import nli
from ngramloss.metrics.scores import Absent
from ngramloss.metrics.summac import convolved, histograms, summac, zero_shot

POOL = [sentence for text in TEXTS for sentence in sentences(text)] + [
    "Yes.",
    "Ten chars.",
    "Ten chars!!",
    "It rained in Łódź, 东京 said.",
]
EDGES = [
    0.0,
    0.01,
    0.02,
    0.03,
    0.04,
    0.07,
    0.13,
    0.37,
    *(k / 100 for k in range(90, 95)),
    *(k / 1000 for k in range(950, 1001, 5)),
]
EDGE_CASES = [
    ("", "The cat sat on the mat."),
    ("The cat sat on the mat.", ""),
    ("", ""),
    ("The cat sat on the mat.", "Cats"),
    (" ".join(POOL * 20), " ".join(POOL + POOL[::-1])),  # over 100 sentences, and over 10
    ("The wind " * 200 + "fell.", "Rain and wind came."),  # over the model's length
    ("一二三四五六七八九十十一。 二二三四五六七八九十十二。", "Ünïcödé 😀 text, all of it."),
]


def texts():
    draw = random.Random(3)
    some = [tuple(" ".join(draw.sample(POOL, draw.randint(1, 6))) for _ in range(2)) for _ in range(12)]
    return [list(side) for side in zip(*some, *EDGE_CASES, strict=True)]


DOCUMENTS, PREDICTIONS = texts()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder, its weights of Conv, and one pair's entailment, contradiction and neutrality."""
    folder = tmp_path_factory.mktemp("albert")
    model = made(
        folder, "albert", outputs=("neutral", "entailment", "contradiction"), positions=64, sharpness=20, seed=1
    )
    tokenizer = nli(str(folder), metric="m").tokenizer
    draw = torch.Generator().manual_seed(5)
    state = {name: torch.randn(shape, generator=draw) / 4 for name, shape in room.SHAPES.items()}
    path = tmp_path_factory.mktemp("conv") / "conv.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    cache = {}

    def believed(premise, hypothesis):
        if (premise, hypothesis) not in cache:
            neutral, entailed, contradicted = plain(model, tokenizer, (premise, hypothesis), 64)
            cache[premise, hypothesis] = entailed, contradicted, neutral
        return cache[premise, hypothesis]

    return str(folder), path, state, believed


def split(text):
    return [sentence for sentence in sentences(text) if len(sentence) > 10]


def plain_zs(believed, document, summary, contradiction=True):
    source, claims = split(document)[:100], split(summary)
    if not source or not claims:
        return 0.0
    total = 0.0
    for claim in claims:
        total += max(believed(sentence, claim)[0] for sentence in source)
        if contradiction:
            total -= max(believed(sentence, claim)[1] for sentence in source)
    return total / len(claims)


def plain_conv(believed, state, document, summary):
    source, claims = split(document)[:100], split(summary)
    columns = (
        [[believed(sentence, claim)[0] for sentence in source] for claim in claims] if source and claims else [[0.0]]
    )
    results = []
    for column in columns[:10]:
        counts = np.histogram(column, bins=EDGES, range=(0, 1))[0]
        results.append(
            sum(float(w) * c for w, c in zip(state["mlp.weight"][0], counts, strict=True)) + float(state["mlp.bias"])
        )
    mean = sum(results) / len(results)
    bad, good = (
        mean * sum(map(float, row)) + float(b)
        for row, b in zip(state["layer_final.weight"], state["layer_final.bias"], strict=True)
    )
    return math.exp(good) / (math.exp(good) + math.exp(bad))


def test_zero_shot_agrees_with_plain_loops(small):
    folder, _, _, believed = small
    found = summac(DOCUMENTS, PREDICTIONS, model=folder, form="zs")
    truth = [100 * plain_zs(believed, *pair) for pair in zip(DOCUMENTS, PREDICTIONS, strict=True)]
    assert found.values == {"summac_zs": pytest.approx(truth, abs=1e-3)}  # 1e-5 of what the model gives, times 100
    assert min(truth) < -5 < 5 < max(truth)
    alone = summac(DOCUMENTS, PREDICTIONS, model=folder, form="zs", contradiction=False)
    truth = [100 * plain_zs(believed, *pair, contradiction=False) for pair in zip(DOCUMENTS, PREDICTIONS, strict=True)]
    assert alone.values == {"summac_zs": pytest.approx(truth, abs=1e-3)}
    assert "contradiction:yes" in found.signature
    assert "contradiction:no" in alone.signature


def test_conv_agrees_with_plain_loops(small):
    folder, path, state, believed = small
    found = summac(DOCUMENTS, PREDICTIONS, model=folder, weights=path)
    truth = [100 * plain_conv(believed, state, *pair) for pair in zip(DOCUMENTS, PREDICTIONS, strict=True)]
    assert found.values == {"summac_conv": pytest.approx(truth, abs=1e-3)}
    assert max(truth) - min(truth) > 20
    seen = [
        believed(a, b)[0]
        for pair in zip(DOCUMENTS, PREDICTIONS, strict=True)
        for a in split(pair[0])
        for b in split(pair[1])
    ]
    assert (np.histogram(seen, bins=EDGES)[0] > 0).sum() > 6  # several bins are met


@pytest.mark.parametrize("form", ["zs", "conv"])
def test_order_batches_and_windows_change_nothing(form, small, monkeypatch):
    folder, path, _, _ = small
    whole = summac(DOCUMENTS, PREDICTIONS, model=folder, form=form, weights=path).values[f"summac_{form}"]
    monkeypatch.setattr("ngramloss.metrics.nli.WINDOW", 5)
    for size in (1, 7):
        order = random.Random(size).sample(range(len(whole)), len(whole))
        mixed = summac(
            [DOCUMENTS[i] for i in order],
            [PREDICTIONS[i] for i in order],
            model=folder,
            form=form,
            weights=path,
            batch_size=size,
        )
        assert mixed.values[f"summac_{form}"] == pytest.approx([whole[i] for i in order], abs=1e-3)


def test_a_text_without_sentences_counts_as_one_sentence_that_nothing_supports(small):
    folder, path, state, _ = small
    mean = float(state["mlp.weight"][0, 0] + state["mlp.bias"][0])
    expected = 100 * float((state["layer_final.weight"].sum(1) * mean + state["layer_final.bias"]).softmax(0)[1])
    documents, predictions = (
        ["", "The cat sat on the mat.", "", "The cat sat on the mat."],
        ["The dog sat on it.", "", "", "Ten chars."],
    )
    assert summac(documents, predictions, model=folder, weights=path).values["summac_conv"] == pytest.approx(
        [expected] * 4
    )
    assert summac(documents, predictions, model=folder, form="zs").values["summac_zs"] == [0] * 4


def test_no_documents_give_no_figures(small):
    assert summac([], [], model=small[0], form="zs").values == {"summac_zs": []}


def test_the_bins_are_the_published_ones():
    assert list(room.EDGES) == EDGES
    assert len(EDGES) == 24


def test_a_pair_has_500_tokens_at_most(tmp_path):
    made(tmp_path, positions=512)
    assert "|tokens:500|" in summac(["wind " * 900], ["The rain came."], model=str(tmp_path), form="zs").signature


def test_outputs_without_names_are_asked_for_and_taken(small, tmp_path):
    made(tmp_path, outputs=("LABEL_0", "LABEL_1", "LABEL_2"))
    with pytest.raises(ValueError, match=r"Give labels="):
        summac([], [], model=str(tmp_path), form="zs")
    one, two = (
        summac(DOCUMENTS[:4], PREDICTIONS[:4], model=str(tmp_path), form="zs", labels=labels).values["summac_zs"]
        for labels in (["entailment", "contradiction", "neutral"], ["contradiction", "entailment", "neutral"])
    )
    assert one == pytest.approx([-figure for figure in two], abs=1e-3)


def test_histograms_count_an_edge_with_the_bin_above_it_and_one_with_the_last():
    values = torch.tensor([EDGES, [np.nextafter(edge, -1) for edge in EDGES]], dtype=torch.float64)[:, 1:].reshape(
        -1, 1
    )
    assert histograms(values)[0].tolist() == [1] + [2] * 21 + [3]
    drawn = torch.rand(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 0.1
    expected = [np.histogram(drawn[:, j].numpy(), bins=EDGES)[0].tolist() for j in range(4)]
    assert histograms(drawn).tolist() == expected


def test_conv_by_hand():
    """Two claims, one document sentence each in bin 0 and 22: r = (1 + 23) / 2 + 0.5; logits 3·0.1·r and −1."""
    image = torch.zeros(1, 2, 3, dtype=torch.float64)
    image[0, 1, 0] = 1.0
    conv = room.Conv(
        torch.arange(1.0, 24.0).double()[None],
        torch.tensor([0.5]).double(),
        torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.1, 0.1]]).double(),
        torch.tensor([-1.0, 0.0]).double(),
    )
    assert convolved(image, conv) == pytest.approx(1 / (1 + math.exp(-1 - 0.3 * 12.5)))


def test_zero_shot_by_hand():
    image = torch.tensor([[[0.9, 0.0, 0.1], [0.2, 0.7, 0.1]], [[0.1, 0.3, 0.6], [0.4, 0.5, 0.1]]])
    assert zero_shot(image) == pytest.approx((0.9 - 0.3 + 0.4 - 0.7) / 2)
    assert zero_shot(image, contradiction=False) == pytest.approx((0.9 + 0.4) / 2)


def test_only_the_first_sentences_of_a_document_are_read_as_asked(small):
    folder = small[0]
    document, short = " ".join(POOL), " ".join([POOL[0], "Yes.", POOL[1]])  # too short ones do not count
    one = summac([document], [POOL[3]], model=folder, form="zs", document_sentences=2)
    two = summac([short], [POOL[3]], model=folder, form="zs")
    assert one.values == two.values
    assert "sentences:2" in one.signature


def test_the_splitter_is_used_and_signed(small):
    lines = "The cat sat on the mat. It slept\nall the day there."
    found = summac([lines], [lines], model=small[0], form="zs", splitter="newline")
    believed = small[3]
    first, second = lines.splitlines()
    best = [
        max(believed(a, b)[0] for a in (first, second)) - max(believed(a, b)[1] for a in (first, second))
        for b in (first, second)
    ]
    assert found.values["summac_zs"] == [pytest.approx(50 * sum(best), abs=1e-3)]
    assert "splitter:newline" in found.signature


def test_the_language_is_used_and_signed(small):
    text = "Am Donnerstag, dem 3. Oktober kommt er nach Hause."
    found = summac([text], [text], model=small[0], form="zs", language="de")
    assert found.values == summac([text], [text], model=small[0], form="zs", splitter="newline").values
    assert found.values != summac([text], [text], model=small[0], form="zs").values
    assert "|splitter:pysbd|language:de|" in found.signature


def test_safetensors_give_the_same(small, tmp_path):
    folder, path, state, _ = small
    save_file(state, tmp_path / "conv.safetensors")
    one = summac(DOCUMENTS[:3], PREDICTIONS[:3], model=folder, weights=path)
    two = summac(DOCUMENTS[:3], PREDICTIONS[:3], model=folder, weights=tmp_path / "conv.safetensors")
    assert one.values == two.values


def test_the_signature_says_what_could_change_the_figures(small):
    folder, path, _, _ = small
    signed = summac(DOCUMENTS[:1], PREDICTIONS[:1], model=folder, weights=path).signature
    for part in (
        r"summac_conv|model:albert",
        "|files:",
        "|weights:",
        "|splitter:pysbd|shortest:11|sentences:100|tokens:64|precision:fp32|transformers:",
        "|version:",
    ):
        assert part in signed
    assert folder not in signed
    assert "weights" not in summac(DOCUMENTS[:1], PREDICTIONS[:1], model=folder, weights=path, form="zs").signature


def test_progress_counts_documents(small, monkeypatch):
    monkeypatch.setattr("ngramloss.metrics.nli.WINDOW", 4)
    told = []
    summac(DOCUMENTS[:10], PREDICTIONS[:10], model=small[0], form="zs", progress=told.append)
    assert told == [4, 4, 2]


def test_without_weights_conv_is_absent(small, tmp_path):
    said = r"Download summac_conv_vitc_sent_perc_e.bin from the repository tingofurro/summac on GitHub and give it with --set summac.weights=FILE \(in Python weights=\), or use .*--set summac.form=zs"
    with pytest.raises(Absent, match=said):
        summac([], [], model=small[0])
    with pytest.raises(Absent, match=rf"there is no file {tmp_path}/no.bin. {said}"):
        summac([], [], model=small[0], weights=tmp_path / "no.bin")


def test_weights_of_another_shape_are_refused(small, tmp_path):
    wrong = dict(small[2], **{"mlp.weight": torch.zeros(1, 50)})
    torch.save(wrong, tmp_path / "wrong.bin")
    with pytest.raises(
        ValueError,
        match=r"wrong.bin contains .*'mlp.weight': \(1, 50\).*; SummaC-Conv's weights are .*'mlp.weight': \(1, 23\)",
    ):
        summac([], [], model=small[0], weights=tmp_path / "wrong.bin")
    (tmp_path / "text.bin").write_text("<html>")
    with pytest.raises(ValueError, match=r"text.bin cannot be loaded"):
        summac([], [], model=small[0], weights=tmp_path / "text.bin")


def test_weights_that_are_not_finite_are_refused(small, tmp_path):
    torch.save(dict(small[2], **{"layer_final.bias": torch.tensor([0.0, math.nan])}), tmp_path / "nan.bin")
    with pytest.raises(ValueError, match=r"nan.bin contains NaN or infinite values: it is damaged. Download it again"):
        summac([], [], model=small[0], weights=tmp_path / "nan.bin")


def test_mistakes_get_sentences(small):
    with pytest.raises(ValueError, match="lengths differ: 1 documents, 2 predictions"):
        summac(["a"], ["b", "c"], model=small[0], form="zs")


def test_nan_is_told_with_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr("ngramloss.metrics.nli.WINDOW", 2)
    model = made(tmp_path)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[
            nli(str(tmp_path), metric="m").tokenizer.convert_tokens_to_ids("cat")
        ] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"summac_zs: the model gave NaN for document 3 \(the first is 0\)"):
        summac(
            ["Dogs ran home quickly."] * 5,
            ["Nobody came to the hall."] * 3 + ["The cat came home."] * 2,
            model=str(tmp_path),
            form="zs",
        )
