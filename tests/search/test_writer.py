"""Texts of sources: the same whatever the batch, in the order of the sources."""

import types

import pytest
import tiny_tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from searches import DOCUMENTS, hf_texts, ids, real_model, texts_of_run
from transformers import GenerationConfig


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
