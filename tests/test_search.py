"""Writing summaries and scoring them."""

import sys
import types

import pytest
import tiny_tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from searches import DOCUMENTS, hf_texts, ids, real_model, texts_of_run
from transformers import GenerationConfig

from ngramloss.generation.engines import hf
from ngramloss.generation.engines.hf import search_facts, search_of
from ngramloss.generation.search import Options
from ngramloss.metrics.rouge import rouge as rouge_of_many
from ngramloss.models import loading
from ngramloss.recipe import Generation


def rouge(references, predictions, **options):
    """Scores of documents with one reference each."""
    return rouge_of_many([[reference] for reference in references], predictions, **options).values


class Echo(torch.nn.Module):
    """A model that writes what it reads, to whom only what is attended to counts."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.generation_config = GenerationConfig(pad_token_id=1)
        self.config = types.SimpleNamespace(pad_token_id=1)
        self.seen = []

    def generate(self, input_ids, attention_mask):
        assert not self.training
        assert torch.is_inference_mode_enabled()
        assert attention_mask.shape == input_ids.shape
        assert attention_mask[:, 0].all(), "padding stands after the text"
        self.seen.append([int(length) for length in attention_mask.sum(1)])
        return input_ids.where(attention_mask.bool(), 1)


# Writing


@given(st.lists(st.text("abc de", min_size=1).map(str.strip), max_size=9), st.integers(1, 10))
def test_texts_come_in_the_order_of_the_sources_whatever_the_batch(texts, batch_size):
    assert hf_texts(Echo(), tiny_tokenizers.ours(), ids(texts, separator="none"), batch_size) == texts


def test_sources_of_like_length_go_together_longest_first():
    model = Echo()
    hf_texts(model, tiny_tokenizers.ours(), [[0] * length for length in (9, 2, 7, 3, 8)], batch_size=2)
    assert model.seen == [[9, 8], [7, 3], [2]]


def test_padding_stands_after_the_text_even_for_a_tokenizer_that_pads_before_it():
    tokenizer = tiny_tokenizers.bart_like()
    tokenizer.padding_side = "left"
    assert hf_texts(Echo(), tokenizer, [[5, 6, 7], [5]]) == [tokenizer.decode([5, 6, 7]), tokenizer.decode([5])]


@pytest.mark.parametrize("architecture", ["bart", "t5"])
def test_a_model_writes_the_same_whatever_the_batch_and_without_dropout(architecture):
    model = real_model(architecture).train()
    alone = [text for row in ids() for text in hf_texts(model, tiny_tokenizers.ours(), [row])]
    assert len(set(alone)) > 1
    for batch_size in (2, 5):
        assert hf_texts(model, tiny_tokenizers.ours(), ids(), batch_size) == alone


def test_a_run_reads_texts_as_its_training_data_and_writes_by_its_models_own_settings(small_run):
    prepared = ids(separator="<s>", splitter="period", prefix="summarize: ", max_source=20)
    assert max(map(len, prepared)) == 20
    assert texts_of_run(small_run, DOCUMENTS) == hf_texts(real_model(), tiny_tokenizers.ours(), prepared)


# Settings


def test_a_search_is_the_models_settings_changed_by_a_recipe_then_by_options():
    model = real_model()
    before = model.generation_config.to_dict()
    own = search_of(model)
    assert (own.num_beams, own.min_length, own.max_length, own.texts, own.seed, own.changes) == (2, 4, 12, 1, None, {})
    chosen = Generation(num_beams=6, max_length=9, length_penalty=0.5, no_repeat_ngram_size=3, renormalize=True)
    search = search_of(model, chosen)
    assert (search.num_beams, search.min_length, search.max_length, search.length_penalty) == (6, 0, 9, 0.5)
    assert (search.no_repeat_ngram_size, search.renormalize, search.early_stopping) == (3, True, True)
    search = search_of(model, chosen, Options(4, groups=3, diversity=0.5, rerank="probability"))
    assert (search.num_beams, search.texts, search.groups, search.diversity) == (6, 4, 3, 0.5)
    assert search.rerank == "probability"
    search = search_of(model, chosen, Options(5, sample=True, temperature=0.7, top_p=0.9, seed=3))
    assert (search.sample, search.num_beams, search.early_stopping, search.texts) == (True, 1, False, 5)
    assert (search.temperature, search.top_p, search.top_k, search.seed) == (0.7, 0.9, 0, 3)
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize("options", [Options(3, beams=0), Options(3, beams=3)])
def test_a_search_that_is_asked_for_beams_has_them_whatever_the_model_does(options):
    model = real_model()
    model.generation_config.update(num_beams=1, do_sample=True, early_stopping=False)
    search = search_of(model, options=options)
    assert (search.num_beams, search.texts, search.sample, search.early_stopping) == (3, 3, False, True)
    model.generation_config.update(num_beams=8)
    assert search_of(model, options=options).num_beams == (options.beams or 8)


def test_generate_gets_the_changes_and_the_model_keeps_its_settings():
    model, chosen = real_model(), Generation(num_beams=3, max_length=7)
    before = model.generation_config.to_dict()
    found = hf.load(model, search_of(model, chosen), precision="fp32")(ids())
    assert model.generation_config.to_dict() == before
    prepared = real_model()
    loading.prepare_generation(prepared, chosen)
    assert found == hf.load(prepared, search_of(prepared), precision="fp32")(ids())
    assert found != hf.load(model, search_of(model), precision="fp32")(ids())
    assert search_facts(model, search_of(model, chosen)) == search_facts(prepared, search_of(prepared))


# ROUGE


@pytest.mark.parametrize(
    ("reference", "prediction", "scores"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", (1, 1, 1, 1)),
        ("a b c d", "e f g", (0, 0, 0, 0)),
        ("a b c d", "a c", (2 * 2 / 6, 0, 2 * 2 / 6, 2 * 2 / 6)),  # 2 of 4 and 2 of 2
        ("a b c d", "d c b a", (1, 0, 1 / 4, 1 / 4)),
        ("a a b", "a b b", (2 / 3, 1 / 2, 2 / 3, 2 / 3)),  # counts are clipped
        ("The CATS, running!", "the cat runs", (1, 1, 1, 1)),  # case, punctuation, stems
        ("a b\nc d", "c d\na b", (1, 2 / 3, 1 / 2, 1)),  # Lsum takes lines by themselves
        ("", "a", (0, 0, 0, 0)),
        ("a", "", (0, 0, 0, 0)),
        ("", "", (0, 0, 0, 0)),
    ],
)
def test_rouge_is_what_one_counts_by_hand(reference, prediction, scores):
    found = rouge([reference], [prediction])
    assert list(found) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert [values[0] for values in found.values()] == pytest.approx([100 * score for score in scores])


def test_rouge_without_stems():
    assert rouge(["cats"], ["cat"])["rouge1"] == [100]
    assert rouge(["cats"], ["cat"], stemmer=False)["rouge1"] == [0]


def test_rouge_scores_each_document_by_itself():
    found = rouge(["a b", "a b", "a b"], ["a b", "x", "a"])
    assert found["rouge1"] == pytest.approx([100, 0, 200 / 3])
    assert rouge([], []) == {name: [] for name in found}


def test_rouge_needs_a_prediction_for_each_reference():
    with pytest.raises(ValueError, match=r"lengths differ: 2 references, 1 predictions"):
        rouge(["a", "b"], ["a"])


def test_rouge_says_which_package_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score_rs", types.ModuleType("rouge_score_rs"))
    with pytest.raises(ValueError, match=r"ROUGE needs the package rouge-score-rs: pip install 'ngramloss\[\w+\]'\."):
        rouge(["a"], ["a"])
