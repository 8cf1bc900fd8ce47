"""Engines: the same texts as hf where they say so, a sentence where they do not, nothing half-written in the cache."""

import functools

import models
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ngramloss.generation.engines import ct2, hf
from ngramloss.generation.engines.settings import search_of

pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.usefixtures("own_cache")

FAMILIES = ["bart", "mbart", "pegasus", "marian", "m2m_100", "t5", "mt5", "umt5"]
SOURCES = [[5, 6, 7, 8, 2], [9, 2], [12, 4, 4, 10, 11, 5, 6, 9, 12, 2], [7, 2], [4, 5, 2], [11, 8, 10, 2]]


def silent(_):
    """Nobody listens."""


@functools.cache
def tiny(family, seed=0):
    """A random model with weights so large that hypotheses are far from ties."""
    model = models.tiny(family, seed=seed).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.4)
    return model


def with_settings(model, **settings):
    defaults = {"num_beams": 1, "max_length": 12, "min_length": 0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "early_stopping": True,
                "renormalize_logits": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": models.EOS,
                "bad_words_ids": None, "num_return_sequences": 1, "do_sample": False, "repetition_penalty": None}   # fmt: skip
    model.generation_config.update(max_new_tokens=None, **{**defaults, **settings})
    return search_of(model, seed=3 if settings.get("do_sample") else None)


def written(engine, model, search, sources=SOURCES, precision="fp32"):
    return engine.load(model, search, precision=precision, say=silent)(sources)


# The same texts

lengths = st.integers(2, 14).flatmap(lambda most: st.tuples(st.sampled_from([0, 3, most // 2, most]).map(lambda least: min(least, most)), st.just(most)))
searches = st.fixed_dictionaries({
    "num_beams": st.integers(1, 6), "length_penalty": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), "no_repeat_ngram_size": st.sampled_from([0, 2, 3]),
    "early_stopping": st.sampled_from([True, True, True, False]), "renormalize_logits": st.sampled_from([True, True, None]),
    "forced_bos_token_id": st.sampled_from([None, None, 6]), "forced_eos_token_id": st.sampled_from([None, models.EOS]),
    "decoder_start_token_id": st.sampled_from([models.EOS, models.EOS, models.PAD, 3]), "bad_words_ids": st.sampled_from([None, [[models.PAD], [5]]]),
    "num_return_sequences": st.sampled_from([1, 1, 2]),
})   # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(searches, lengths, st.integers(0, 2))
def test_ctranslate2_writes_the_texts_of_hf_token_for_token_wherever_it_says_so(family, drawn, length, seed):
    assume(drawn["num_return_sequences"] <= drawn["num_beams"])
    model = tiny(family, seed)
    if family == "m2m_100":   # to hf, a padding token in a text shifts the positions after it
        drawn = {**drawn, "bad_words_ids": [[models.PAD]]}
    search = with_settings(model, **drawn, min_length=length[0], max_length=length[1])
    assume(not [*ct2.unsupported(model, search), *ct2.differences(model, search, precision="fp32")])
    assert written(ct2, model, search) == written(hf, model, search)
