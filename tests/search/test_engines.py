"""Engines: the same texts as hf where they say so, a sentence where they do not, nothing half-written in the cache."""

import copy
import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
from types import SimpleNamespace

import models
import pytest
import tiny_tokenizers
import torch
from forks import fork, killed_at_third_call
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lanes import few
from searches import SOURCES, tiny, with_settings, written
from transformers import GenerationConfig

from ngramloss import cli, recipe
from ngramloss.cli.program import parser
from ngramloss.errors import UserError
from ngramloss.generation.job import job
from ngramloss.models.loading import from_scratch, prepare_generation
from ngramloss.recipe import Generation, Model
from ngramloss.scoring import provenance
from ngramloss.search import batches as batching
from ngramloss.search import engines
from ngramloss.search import registry as engine_registry
from ngramloss.search.engines import conversion, ct2, graph, hf
from ngramloss.search.engines.hf import search_of
from ngramloss.search.search import Options
from ngramloss.storage.files import cache_folder
from ngramloss_bench import generate as bench_generate

pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.usefixtures("own_cache")

FAMILIES = ["bart", "mbart", "pegasus", "marian", "m2m_100", "t5", "mt5", "umt5"]


def many():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 13, (length % 9 + 1,), generator=generator).tolist() for length in range(300)]


# The same texts

lengths = st.integers(2, 14).flatmap(
    lambda most: st.tuples(st.sampled_from([0, 3, most // 2, most]).map(lambda least: min(least, most)), st.just(most))
)
searches = st.fixed_dictionaries(
    {
        "num_beams": st.integers(1, 6),
        "length_penalty": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
        "no_repeat_ngram_size": st.sampled_from([0, 2, 3]),
        "early_stopping": st.sampled_from([True, False, False, "never"]),
        "renormalize_logits": st.sampled_from([True, True, None]),
        "forced_bos_token_id": st.sampled_from([None, None, 4, 7]),
        "bad_words_ids": st.sampled_from([None, [[models.PAD], [5]]]),
        "num_return_sequences": st.sampled_from([1, 1, 2]),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("family", few(["bart", "t5"], FAMILIES))
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    searches,
    lengths,
    st.sampled_from([models.EOS, 0, 3, 5, 7, 10, 12]),
    st.booleans(),
    st.sampled_from([None, None, models.PAD, 3]),
    st.integers(0, 2),
)
def test_ctranslate2_writes_the_texts_of_hf_token_for_token_wherever_it_says_so(
    family, drawn, length, end, forced, start, seed
):
    """The end token is one of several, because a random model writes some of them often and others never."""
    assume(drawn["num_return_sequences"] <= drawn["num_beams"])
    model = tiny(family, seed)
    if family == "m2m_100":  # to hf, a padding token in a text shifts the positions after it
        drawn = {**drawn, "bad_words_ids": [[models.PAD]]}
    ends = {
        "eos_token_id": end,
        "forced_eos_token_id": end if forced else None,
        "decoder_start_token_id": end if start is None else start,
    }
    search = with_settings(model, **drawn, **ends, min_length=length[0], max_length=length[1])
    assume(not [*ct2.unsupported(model, search), *ct2.differences(model, search, precision="fp32")])
    assert written(ct2, model, search) == written(hf, model, search)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "most"),
    few([("bart", 7), ("t5", 5)], [(family, most) for family in ("bart", "t5") for most in (5, 7, 9)]),
)
def test_texts_that_reach_the_greatest_length_are_ranked_as_hf_ranks_them(family, most):
    """Hundreds of documents: it is rare that hypotheses end of their own just before the greatest length, and matter."""
    for end, penalty, least in itertools.product((3, 7, 10, 12), (0.5, 2.0), (0, most - 4, most - 3)):
        model = tiny(family, 1)
        ends = {"eos_token_id": end, "forced_eos_token_id": end, "decoder_start_token_id": end}
        search = with_settings(
            model,
            num_beams=4,
            max_length=most,
            min_length=least,
            length_penalty=penalty,
            renormalize_logits=True,
            **ends,
        )
        assert written(ct2, model, search, many()) == written(hf, model, search, many())


LIMITS = {"no_repeat_ngram_size": 3, "min_length": 6}
LATE = list(itertools.product(("bart", "marian"), (2, 4, 5), (0.6, 1.0, 2.0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "beams", "penalty"), few([("bart", 2, 0.6), ("bart", 4, 1.0), ("marian", 5, 2.0)], LATE)
)
def test_a_search_that_does_not_stop_early_stops_where_hf_does(family, beams, penalty):
    """In many of these, hf stops later than with early stopping, and that changes texts."""
    changed = 0
    for end, seed, limits, forced in itertools.product((3, 7, 10), (0, 1), ({}, LIMITS), (False, True)):
        model = tiny(family, seed)
        ends = {"eos_token_id": end, "forced_eos_token_id": end if forced else None, "decoder_start_token_id": end}
        drawn = {"num_beams": beams, "length_penalty": penalty, "max_length": 24, "renormalize_logits": True}
        early, late = (
            with_settings(model, **drawn, **limits, **ends, early_stopping=stops_early) for stops_early in (True, False)
        )
        texts = written(ct2, model, late, many()[:60])
        assert texts == written(hf, model, late, many()[:60])
        early_texts = written(ct2, model, early, many()[:60])
        changed += sum(text != early_text for text, early_text in zip(texts, early_texts, strict=True))
    assert changed


def ended_at(*hypotheses):
    """What CTranslate2 returns: tokens and sums of log-probabilities, with a length penalty of 1. 9 is the end token."""
    tokens = [[str(token) for token in each] for each, _ in hypotheses]
    scores = [logp / len(each) for each, logp in hypotheses]
    return SimpleNamespace(hypotheses=tokens, scores=scores)


A, B = ([1, 9], -1.0), ([2, 9], -2.0)
LONG = ([1, 2, 3, 4, 5, 9], -2.4)


@pytest.mark.parametrize(
    ("hypotheses", "look", "found"),
    [
        # One of two beams has ended: hf goes on.
        ([A, ([1, 2, 3], -3.0)], ct2._Look(3), ct2._Look(ct2._rounded(4), 3)),
        # Both have ended, and what goes on is as good as the worse one at the third token, but not better.
        ([A, B, ([1, 2, 3], -3.0)], ct2._Look(3), [["1", "9"]]),
        # It is better at the third token, but perhaps not at the second.
        ([A, B, ([1, 2, 3], -2.9)], ct2._Look(3), ct2._Look(2, 1)),
        ([A, B, ([1, 2, 3], -2.9)], ct2._Look(3, 2), ct2._Look(ct2._rounded(4), 3)),
        # It is better at both.
        ([A, B, ([1, 2, 3], -1.9)], ct2._Look(3), ct2._Look(ct2._rounded(4), 3)),
        # A better text ends at the sixth token: hf has it unless it stopped at the second.
        ([LONG, A, B, ([1, 2, 3, 4, 5, 6], -6.0)], ct2._Look(6), ct2._Look(2, 1)),
        ([LONG, A, B, ([1, 2, 3, 4, 5, 6], -6.0)], ct2._Look(6, 2), [["1", "2", "3", "4", "5", "9"]]),
        ([A, B, ([1, 2], -2.5)], ct2._Look(2, 1), [["1", "9"]]),
        # All end at the greatest length.
        ([A, ([1, 2, 3, 4, 5, 6, 7, 8], -3.2)], ct2._Look(8), [["1", "2", "3", "4", "5", "6", "7", "8"]]),
        ([A, ([1, 2, 3, 4, 5, 6, 7, 8], -4.2)], ct2._Look(8), [["1", "9"]]),
    ],
)
def test_the_text_is_known_or_the_tokens_to_search_for(hypotheses, look, found):
    search = with_settings(
        tiny("bart"), num_beams=2, max_length=9, eos_token_id=9, decoder_start_token_id=9, early_stopping=False
    )
    assert ct2._texts_or_look(ended_at(*hypotheses), search, look) == found


def test_a_text_that_reaches_the_greatest_length_gets_its_forced_end_unless_hf_stopped_before():
    ends = {"eos_token_id": 9, "decoder_start_token_id": 9, "forced_eos_token_id": 9}
    search = with_settings(tiny("bart"), num_beams=2, max_length=6, early_stopping=False, **ends)
    whole = [str(token) for token in LONG[0]]
    assert ct2._texts_or_look(ended_at(A, ([1, 2, 3, 4], -2.2)), search, ct2._Look(4)) == [[*whole[:4], "9"]]
    assert ct2._texts_or_look(ended_at(A, ([1, 2, 3, 4], -2.6)), search, ct2._Look(4)) == [["1", "9"]]
    # with the end token it would be the best, but it comes after hf has stopped at the fourth token
    ended = ended_at(A, ([2, 9], -1.0), ([1, 2, 3, 4], -2.2))
    assert ct2._texts_or_look(ended, search, ct2._Look(4, 3)) == [["1", "9"]]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_best_hypotheses_are_those_of_hf_in_their_order(penalty):
    model = tiny("t5", 1)
    search = with_settings(
        model, num_beams=4, num_return_sequences=3, length_penalty=penalty, eos_token_id=7, decoder_start_token_id=7
    )
    assert written(ct2, model, search, many()) == written(hf, model, search, many())


@pytest.mark.parametrize(
    "lengths",
    [{"max_new_tokens": 6, "max_length": None}, {"max_new_tokens": 6, "min_new_tokens": 3}, {"max_length": None}],
)
def test_lengths_may_be_counted_in_new_tokens_or_not_be_named(lengths):
    model = tiny("m2m_100", 2)
    with_settings(model)
    model.generation_config.update(**lengths)
    try:
        search = search_of(model)
        texts = written(hf, model, search)
        assert written(ct2, model, search) == texts
        assert max(len(text) for (text,) in texts) == search.max_length == (7 if "max_new_tokens" in lengths else 21)
    finally:
        model.generation_config.update(max_new_tokens=None, min_new_tokens=None)


@pytest.mark.parametrize("engine", [hf, graph, ct2], ids=["hf", "graph", "ctranslate2"])
def test_an_end_token_among_the_bad_words_is_not_banned(engine):
    """As in generate. The model would end every text at once."""
    model = copy.deepcopy(tiny("bart"))
    model.final_logits_bias[0, models.EOS] = 1e3
    search = with_settings(model, decoder_start_token_id=3, bad_words_ids=[[models.EOS], [models.PAD]])
    assert search.banned == (models.PAD,)
    assert written(engine, model, search) == [[[3, models.EOS]]] * len(SOURCES)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("engine", [hf, graph, ct2], ids=["hf", "graph", "ctranslate2"])
def test_a_text_may_end_right_after_the_least_number_of_new_tokens(engine, beams):
    """The model would end every text at once: start token, so many tokens, end token."""
    model = copy.deepcopy(tiny("bart"))
    model.final_logits_bias[0, models.EOS] = 1e3
    with_settings(model, num_beams=beams, decoder_start_token_id=3, renormalize_logits=True)
    for least in (0, 1, 4):
        model.generation_config.update(min_new_tokens=least)
        texts = written(engine, model, search_of(model))
        assert [(len(text), text[-1]) for (text,) in texts] == [(1 + least + 1, models.EOS)] * len(SOURCES)


def test_the_end_token_is_that_of_the_generation_settings():
    model = tiny("bart")
    for end in (1, 10):
        search = with_settings(model, num_beams=2, eos_token_id=end, decoder_start_token_id=3)
        texts = written(ct2, model, search)
        assert texts == written(hf, model, search)
        assert any(text[-1] == end for (text,) in texts)


@pytest.mark.parametrize("architecture", ["bart", "mbart", "m2m100", "pegasus", "marian", "t5"])
def test_models_from_scratch_are_served_as_they_are_trained(architecture):
    torch.manual_seed(0)
    model = from_scratch(
        Model(
            "scratch",
            architecture=architecture,
            width=16,
            heads=2,
            encoder_layers=1,
            decoder_layers=1,
            feed_forward=16,
            init_std=0.5,
        ),
        tiny_tokenizers.ours(),
    ).eval()
    prepare_generation(
        model,
        Generation(
            num_beams=3,
            min_length=4,
            max_length=16,
            no_repeat_ngram_size=0 if architecture == "t5" else 3,
            renormalize=True,
        ),
    )
    search = search_of(model)
    assert not [*ct2.unsupported(model, search), *ct2.differences(model, search, precision="fp32")]
    assert written(ct2, model, search) == written(hf, model, search)


def test_the_paper_s_settings_are_the_same_if_they_renormalise():
    model = tiny("bart")
    for name in ("xsum", "cnndm"):
        for renormalize in (False, True):
            prepare_generation(
                model,
                recipe.changed(recipe.load(name), [f"generation.renormalize={str(renormalize).lower()}"]).generation,
            )
            reasons = list(ct2.differences(model, search_of(model), precision="fp32"))
            assert (not reasons) == renormalize


# Where texts may differ


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 2, "early_stopping": "never"}, "does not know when a search stops with"),
        ({"num_beams": 2, "min_length": 5}, "always works as with generation.renormalize = true"),
        ({"num_beams": 2, "no_repeat_ngram_size": 2}, "always works as with generation.renormalize = true"),
        ({"num_beams": 2, "bad_words_ids": [[1]]}, "always works as with generation.renormalize = true"),
        ({"no_repeat_ngram_size": 2, "decoder_start_token_id": 3}, "the start token is a part of the n-grams"),
        ({"no_repeat_ngram_size": 1}, "the start token is a part of the n-grams"),
        ({"num_beams": 2, "forced_bos_token_id": 6}, "never writes an empty text"),
        ({"forced_bos_token_id": 2}, "a text ends if its forced first token is the end token"),
        ({"num_beams": 2, "forced_bos_token_id": 2, "min_length": 5, "renormalize_logits": True}, "a text ends if"),
        ({"num_beams": 2, "forced_eos_token_id": 2, "num_return_sequences": 2}, "are ranked differently"),
        ({"num_beams": 2, "forced_eos_token_id": 2, "length_penalty": -1.0}, "are ranked differently"),
        ({"do_sample": True, "top_k": 0}, "draws other random numbers"),
    ],
)
def test_settings_with_which_texts_may_differ_are_named_and_auto_leaves_them_to_hf(settings, reason):
    model = tiny("bart")
    search = with_settings(model, **settings)
    (only,) = ct2.differences(model, search, precision="fp32")
    assert reason in only
    loaded = engines.load("auto", model, search)
    assert (loaded.name, loaded.note) == ("hf", f"engine hf; ctranslate2 is not used: {only}.")
    loaded = engines.load("ctranslate2", model, search)
    assert loaded.name == "ctranslate2"
    assert loaded.note == f"engine ctranslate2: outputs may differ from hf's, because {only}."


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_length": 5},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 2},
        {"forced_bos_token_id": 6},
        {"num_beams": 2, "num_return_sequences": 2},
    ],
)
def test_greedy_search_and_plain_beams_are_the_same_without_renormalising(settings):
    model = tiny("bart")
    assert not list(ct2.differences(model, with_settings(model, **settings), precision="fp32"))


def test_ctranslate2_leaves_torch_its_threads():
    model, before = tiny("bart"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        written(ct2, model, with_settings(model))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_auto_takes_ctranslate2_and_says_why():
    model = tiny("bart")
    loaded = engines.load("auto", model, with_settings(model))
    assert loaded.facts == {"name": "ctranslate2", "precision": "fp32"}
    assert loaded.note.startswith("engine ctranslate2 4.")
    assert loaded.note.endswith(
        ", fp32: on a CPU it is faster than hf, and its texts are the same with these settings."
    )


def test_int8_is_taken_by_name_only_and_says_that_it_differs():
    model = tiny("bart")
    search = with_settings(model, num_beams=2)
    loaded = engines.load("ctranslate2-int8", model, search)
    assert loaded.facts == {"name": "ctranslate2-int8", "precision": "int8"}
    assert loaded.note == "engine ctranslate2-int8: outputs may differ from hf's, because it computes in int8."
    assert [len(texts) for texts in loaded.write(SOURCES)] == [1] * len(SOURCES)
    assert [(name, engine.automatic) for name, engine in engines.ENGINES.items() if engine.automatic] == [
        ("graph", "cuda"),
        ("ctranslate2", "cpu"),
    ]


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("led", {}, "it has no models of the kind 'led', only bart, mbart"),
        ("llama", {"eos_token_id": [2, 3]}, "it serves encoder-decoders here, and llama is decoder-only"),
        ("bart", {"eos_token_id": [2, 3]}, "it ends texts at one token, but the model has 2 end tokens"),
        (
            "bart",
            {"repetition_penalty": 1.3},
            "it does not know these generation settings of the model: repetition_penalty",
        ),
        ("bart", {"bad_words_ids": [[5, 6]]}, "it does not know these generation settings of the model: bad_words_ids"),
        ("bart", {"forced_eos_token_id": 1}, "ends its longest texts with another token"),
        ("bart", {"forced_eos_token_id": 2, "max_length": 2}, "a text of at most 2 tokens has none between"),
    ],
)
def test_what_ctranslate2_cannot_do_is_refused_by_name_and_left_to_hf_by_auto(family, settings, reason):
    model = tiny(family)
    search = with_settings(model, **settings)
    with pytest.raises(UserError, match=f"the engine ctranslate2 cannot be used: .*{reason}.* Use --engine hf."):
        engines.load("ctranslate2", model, search)
    loaded = engines.load("auto", model, search)
    assert loaded.name == "hf"
    assert reason in loaded.note


def test_on_a_gpu_auto_is_hf_for_a_family_that_graph_does_not_serve():
    model = tiny("prophetnet")
    search = with_settings(model)

    class OnGpu:
        device, dtype, config, eval = torch.device("cuda"), model.dtype, model.config, model.eval
        generation_config = model.generation_config

    loaded = engines.load("auto", OnGpu(), search)
    assert loaded.name == "hf"
    assert loaded.note.startswith("engine hf; graph is not used: it serves bart, mbart, pegasus, marian, m2m_100, t5, ")
    assert loaded.note.endswith(", opt, not prophetnet.")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoder_no_repeat_ngram_size": 1}, "encoder_no_repeat_ngram_size"),
        ({"remove_invalid_values": True}, "remove_invalid_values"),
    ],
)
def test_a_setting_that_is_1_or_true_counts_unless_that_is_its_default(changes, reason):
    model = copy.deepcopy(tiny("bart"))
    model.generation_config.update(repetition_penalty=1.0, typical_p=1.0, epsilon_cutoff=0.0)
    assert search_of(model).others == ()
    model.generation_config.update(**changes)
    assert search_of(model).others == (reason,)


@pytest.mark.parametrize("name", ["min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"])
def test_settings_of_sampling_count_only_where_generate_itself_samples(name):
    model = copy.deepcopy(tiny("bart"))
    model.generation_config.update(**{name: 0.5})
    assert search_of(model).others == search_of(model, options=Options(2, sample=True)).others == ()
    model.generation_config.do_sample = True
    assert search_of(model).others == (name,)
    assert search_of(model, options=Options(2, sample=True)).others == ()
    assert search_of(model, options=Options(2, beams=2)).others == ()


def test_graph_says_that_the_model_has_too_few_positions():
    from ngramloss.search.engines import graph

    model = tiny("bart")
    positions = model.config.max_position_embeddings
    assert list(graph.unsupported(model, with_settings(model, max_length=positions))) == []
    (reason,) = graph.unsupported(model, with_settings(model, max_length=positions + 1))
    assert reason == f"texts may have {positions + 1:,} tokens, but the model has {positions:,} positions"


def test_the_precision_is_that_of_the_weights_and_is_recorded():
    model = copy.deepcopy(tiny("bart")).bfloat16()
    search = with_settings(model)
    assert engines.load("hf", model, search).facts == {"name": "hf", "precision": "bf16"}
    assert engines.load("graph", model, search).facts == {"name": "graph", "precision": "bf16"}
    loaded = engines.load("auto", model, search)
    assert loaded.facts == {"name": "hf", "precision": "bf16"}
    assert "weights in fp32, but generation.precision is another" in loaded.note
    with pytest.raises(UserError, match="the engine ctranslate2 cannot be used: it is made of weights in fp32"):
        engines.load("ctranslate2", model, search)


def test_an_unknown_engine_gets_the_nearest_name():
    with pytest.raises(
        UserError,
        match=r"unknown engine 'ctranslate'. Did you mean 'ctranslate2'. Choose from auto, hf, graph, draft, ctranslate2, ctranslate2-int8.",
    ):
        engines.load("ctranslate", tiny("bart"), with_settings(tiny("bart")))


def test_without_its_package_it_is_refused_by_name_and_left_to_hf_by_auto(monkeypatch):
    monkeypatch.setattr(engine_registry, "installed", lambda package: None if package == "ctranslate2" else "1")
    model = tiny("bart")
    with pytest.raises(
        UserError, match=r"the engine ctranslate2 needs the package ctranslate2: pip install 'ngramloss\[fast\]'."
    ):
        engines.load("ctranslate2", model, with_settings(model))
    loaded = engines.load("auto", model, with_settings(model))
    assert loaded.name == "hf"
    assert loaded.note == (
        "engine hf; ctranslate2 is not used: it needs the package ctranslate2: pip install 'ngramloss[fast]'."
    )


# Conversion


def cached():
    folder = cache_folder() / "ctranslate2"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("empty_cache")
def test_a_model_is_converted_once_for_its_content(messages):
    for _ in range(2):
        conversion.converted(tiny("bart"))
    assert messages == ["converting the model for ctranslate2; this is done once."]
    conversion.converted(tiny("bart", 1))
    assert len(cached()) == len(messages) == 2
    damaged = conversion.converted(tiny("bart")) / "model.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    conversion.converted(tiny("bart"))
    assert "is damaged (model.bin was changed); rebuilding it." in messages[2]
    assert len(cached()) == 2


def test_another_version_and_another_configuration_are_other_content(monkeypatch):
    model = tiny("bart")
    key = conversion._key(model)
    assert conversion._key(model) == key
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "activation_function", "relu")
        assert conversion._key(model) != key
    monkeypatch.setattr(conversion, "installed", lambda _: "5.0")
    assert conversion._key(model) != key


def refuse(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def fail(*_):
    raise KeyError("activation")


def differ(model, whole=conversion._specification):
    spec = whole(model)
    spec.decoder.projection.weight = spec.decoder.projection.weight * 1.5
    return spec


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    ("name", "instead", "sentence"),
    [
        (
            "_raise_if_different",
            refuse,
            "cannot write the converted model to .*ctranslate2: No space left on device. Make room there, or name another folder with NGRAMLOSS_CACHE",
        ),
        (
            "_specification",
            fail,
            "BartForConditionalGeneration cannot be converted for ctranslate2: KeyError: 'activation'",
        ),
        ("_specification", differ, "the converted model has other probabilities"),
    ],
)
def test_a_failed_conversion_is_a_sentence_and_leaves_nothing_in_the_cache(monkeypatch, name, instead, sentence):
    model = tiny("bart")
    search = with_settings(model)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, name, instead)
        with pytest.raises(UserError, match=sentence):
            engines.load("ctranslate2", model, search)
        assert cached() == []
        loaded = engines.load("auto", model, search)
        assert loaded.name == "hf"
        assert loaded.note.startswith("engine hf; ctranslate2 is not used: ")
    assert engines.load("ctranslate2", model, search).write(SOURCES) == written(hf, model, search)


@pytest.mark.usefixtures("empty_cache")
def test_a_conversion_leaves_the_model_as_it_was():
    model = tiny("mbart", 2)
    before = model.config.to_dict()
    conversion.converted(model)
    assert model.config.to_dict() == before
    assert not hasattr(model.config, "normalize_before")


# Samples and several texts


def test_a_sample_depends_on_the_seed_and_its_source_alone():
    model = tiny("bart")
    search = with_settings(model, do_sample=True, top_k=0, num_return_sequences=3)
    whole = written(hf, model, search)
    assert whole == [texts for source in SOURCES for texts in written(hf, model, search, [source])]
    assert whole == written(hf, model, search, SOURCES[::-1])[::-1]
    assert [len(texts) for texts in whole] == [3] * len(SOURCES)
    assert len({tuple(text) for texts in whole for text in texts}) > len(SOURCES)
    assert written(hf, model, dataclasses.replace(search, seed=4)) != whole


def test_transformers_does_not_warn_of_the_settings_of_samples(monkeypatch):
    model, asked = tiny("bart"), {}
    search = with_settings(model, do_sample=True, top_k=0, top_p=0.9, temperature=0.7)
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: asked.update(given) or generate(**given))
    written(hf, model, search)
    chosen = {name: asked[name] for name in ("do_sample", "temperature", "top_p", "top_k")}
    GenerationConfig(**chosen).validate(strict=True)


@pytest.mark.parametrize("family", ["bart", "t5", "grouped"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8, "num_return_sequences": 3},
        {"top_k": 3, "min_length": 6, "no_repeat_ngram_size": 2},
        {"forced_bos_token_id": 6, "forced_eos_token_id": 2, "bad_words_ids": [[5]], "renormalize_logits": True},
    ],
)
def test_hf_and_graph_draw_the_same_samples(family, settings):
    model = tiny(family)
    search = with_settings(model, **{"do_sample": True, "top_k": 0, "num_return_sequences": 2, **settings})
    samples = written(hf, model, search, many())
    assert written(graph, model, search, many()) == samples
    assert len({tuple(text) for texts in samples for text in texts}) > len(samples)
    assert graph.differences(model, search, precision="fp32") == []


@pytest.mark.parametrize("settings", [{"temperature": 0.01}, {"top_p": 0.01}])
def test_a_low_temperature_and_a_low_top_p_leave_the_most_probable_text(settings):
    model = tiny("bart")
    greedy = written(hf, model, with_settings(model))
    for engine in (hf, ct2):
        search = with_settings(model, do_sample=True, **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **settings})
        assert written(engine, model, search) == greedy
    model.generation_config.update(temperature=1.0, top_p=1.0)


def test_ctranslate2_samples_and_begins_in_the_same_way_every_time():
    model = tiny("bart")
    search = with_settings(model, do_sample=True, top_k=0, num_return_sequences=4)
    first, again = (written(ct2, model, search) for _ in range(2))
    assert first == again
    assert len({tuple(text) for text in first[0]}) > 1
    assert written(ct2, model, dataclasses.replace(search, seed=8)) != first


def test_samples_of_ctranslate2_are_not_sorted_by_their_probability():
    model = tiny("bart")
    search = with_settings(model, do_sample=True, top_k=0, num_return_sequences=4)
    words = [[str(token) for token in source] for source in many()]
    by_probability = ct2._translate(ct2._translator(model, search, "fp32"), search, words, hypotheses=4, steps=11)
    sorted_texts = [[[search.start, *map(int, text)] for text in result.hypotheses] for result in by_probability]
    texts = written(ct2, model, search, many())
    assert [sorted(row) for row in texts] == [sorted(row) for row in sorted_texts]
    first = sum(row[0] == best[0] for row, best in zip(texts, sorted_texts, strict=True))
    assert 40 < first < 130, "one of four by chance; some of the four are equal"


# Settings of a model that few engines know


def test_several_forced_last_tokens_are_left_to_hf_and_one_in_a_list_is_that_token():
    model = tiny("bart")
    one, same = (with_settings(model, num_beams=2, forced_eos_token_id=token) for token in (models.EOS, [models.EOS]))
    assert one == same
    search = with_settings(model, num_beams=2, forced_eos_token_id=[2, 3])
    assert search.others == ("forced_eos_token_id",)
    loaded = engines.load("auto", model, search)
    assert loaded.name == "hf"
    assert "does not know these generation settings of the model: forced_eos_token_id" in loaded.note
    assert len(written(hf, model, search)) == len(SOURCES)
    with pytest.raises(
        UserError, match=r"graph cannot be used: it does not know forced_eos_token_id\. Use --engine hf"
    ):
        engines.load("graph", model, search)


@pytest.mark.parametrize("engine", ["hf", "auto"])
def test_groups_of_beams_in_a_model_s_settings_are_refused_with_what_to_do(engine):
    model = tiny("bart", 2)
    search = with_settings(model, num_beams=4, num_beam_groups=2)
    try:
        with pytest.raises(
            UserError,
            match=r"^the engine hf cannot be used: num_beam_groups in generation_config\.json is 2, which transformers "
            r"no longer supports: set it to 1 there, and for groups use --groups 2\.$",
        ):
            engines.load(engine, model, search)
    finally:
        model.generation_config.update(num_beam_groups=None)


def test_settings_that_transformers_refuses_are_a_sentence():
    model = tiny("bart", 2)
    search = with_settings(model, repetition_penalty="x")
    try:
        with pytest.raises(UserError, match=r"transformers cannot generate with this model's settings: ValueError: .*"):
            written(hf, model, search)
    finally:
        model.generation_config.update(repetition_penalty=None)


# Batches


def test_a_batch_has_as_many_documents_as_the_budget_allows():
    lengths = [9, 8, 8, 3, 3, 2, 1, 1, 1]

    def sizes(budget):
        made = batching.batches(lengths, lambda some: [[0] * length for length in some], lambda some, _: some, budget)
        return [batch for batch, _ in made]

    assert sizes(batching.Budget(documents=4)) == [[9, 8, 8, 3], [3, 2, 1, 1], [1]]
    assert sizes(batching.Budget(tokens=18)) == [[9, 8], [8, 3], [3, 2, 1, 1, 1]]
    assert sizes(batching.Budget(tokens=40, rest=10)) == [[9, 8], [8, 3], [3, 2, 1], [1, 1]]
    assert sizes(batching.Budget(padded=18, rest=10)) == [[9, 8], [8, 3], [3, 2, 1, 1, 1]]
    assert sizes(batching.Budget(tokens=40, rest=10, padded=9)) == [[9], [8], [8], [3, 3, 2], [1, 1, 1]]
    assert sizes(batching.Budget(tokens=1)) == [[length] for length in lengths], "never none"
    assert sizes(batching.Budget()) == [lengths]
    assert batching.Budget(tokens=10**9).allows(batching.MOST_DOCUMENTS, 1)
    assert not batching.Budget(tokens=10**9).allows(batching.MOST_DOCUMENTS + 1, 1)


def test_on_a_cpu_the_free_memory_bounds_a_batch_however_short_its_sources_are(monkeypatch):
    model = tiny("bart")
    search = with_settings(model, num_beams=16, max_length=50)
    per_token, per_document = batching._bytes(model, [search])
    assert batching.budget_for(model, [search], 7) == batching.Budget(documents=7)
    assert batching._free_memory() > 2**20
    monkeypatch.setattr(batching, "_free_memory", lambda: 40 * (per_document + 10 * per_token))
    budget = batching.budget_for(model, [search], 0)
    assert budget.allows(18, 10)
    assert not budget.allows(21, 10)
    assert not budget.allows(2, batching.CPU_TOKENS), "nor more tokens than are fast"
    monkeypatch.setattr(batching, "_free_memory", lambda: None)
    assert batching.budget_for(model, [search], 0) == batching.Budget(padded=batching.CPU_TOKENS)


def test_a_batch_that_does_not_fit_is_halved_and_no_document_is_lost(messages):
    asked = []

    def write(some, _):
        asked.append(len(some))
        if len(some) > 3:
            raise torch.OutOfMemoryError("short")
        return some

    documents = list(range(10))
    made = list(batching.batches(documents, lambda some: [[0]] * len(some), write, batching.Budget()))
    assert [document for batch, _ in made for document in batch] == documents
    assert asked == [10, 5, 2, 2, 2, 2, 2]
    assert messages == [
        "10 documents at a time did not fit into memory; continuing with 5.",
        "5 documents at a time did not fit into memory; continuing with 2.",
    ]
    with pytest.raises(torch.OutOfMemoryError):
        list(batching.batches([1], lambda some: [[0]], lambda *_: write([0] * 4, 0), batching.Budget()))


def test_an_error_that_is_not_of_memory_is_raised():
    def write(*_):
        raise RuntimeError("other")

    with pytest.raises(RuntimeError, match="other"):
        list(batching.batches([1, 2], lambda some: [[0]] * len(some), write, batching.Budget()))


# ngramloss generate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    torch.manual_seed(0)
    settings = recipe.load(
        "demo", ["data.max_source=20", "generation.num_beams=3", "generation.max_length=14", "model.architecture=bart"]
    )
    model = from_scratch(
        Model("scratch", width=16, heads=2, encoder_layers=1, decoder_layers=1, feed_forward=16, init_std=0.5),
        tiny_tokenizers.ours(),
    )
    prepare_generation(model, settings.generation)
    model.save_pretrained(folder / "model")
    tiny_tokenizers.ours().save_pretrained(folder / "model")
    (folder / "recipe.toml").write_text(recipe.dump(settings))
    return folder


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments), "--limit", "6"])


def rows(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def saved(folder):
    return json.loads((folder / "generation.json").read_text())


def test_every_engine_writes_the_same_files(run, tmp_path, capsys):
    for engine in ("hf", "ctranslate2", "auto", "ctranslate2-int8"):
        assert generate(run, "--out", tmp_path / engine, "--engine", engine) == 0
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    for engine in ("ctranslate2", "auto"):
        assert {path.name for path in (tmp_path / engine).iterdir()} == names
        assert rows(tmp_path / engine) == rows(tmp_path / "hf")
        assert saved(tmp_path / engine)["engine"] == {"name": "ctranslate2", "precision": "fp32"}
    assert [row["id"] for row in rows(tmp_path / "ctranslate2-int8")] == [row["id"] for row in rows(tmp_path / "hf")]
    assert saved(tmp_path / "hf")["engine"] == {"name": "hf", "precision": "fp32"}
    assert "ctranslate2" not in saved(tmp_path / "hf")["versions"]
    told = capsys.readouterr().err
    assert told.count("its texts are the same with these settings.") == 1
    assert told.count("outputs may differ from hf's, because it computes in int8.") == 1
    signature = provenance.written_by(provenance.run(tmp_path / "ctranslate2-int8"))
    assert "|engine:ctranslate2-int8|precision:int8|" in signature
    assert "|ctranslate2:4." in signature


def test_predictions_of_one_engine_are_not_continued_with_another(run, tmp_path, capsys):
    assert generate(run, "--out", tmp_path, "--engine", "hf") == 0
    assert generate(run, "--out", tmp_path, "--engine", "ctranslate2") == 2
    assert (
        "made with other settings (engine.name: 'hf' → 'ctranslate2'). Choose another --out, or delete "
        in capsys.readouterr().err
    )
    assert generate(run, "--out", tmp_path) == 0, "auto continues with the engine that began"
    assert f"engine hf, which began the predictions in {tmp_path}." in capsys.readouterr().err
    assert generate(run, "--out", tmp_path, "--engine", "ctranslate2-int8") == 2
    assert "engine.precision: 'fp32' → 'int8'" in capsys.readouterr().err


def test_an_engine_alone_does_not_change_the_search(run, tmp_path):
    assert generate(run, "--out", tmp_path / "a", "--engine", "hf") == 0
    assert generate(run, "--out", tmp_path / "b", "--set", "generation.engine=hf") == 0
    assert saved(tmp_path / "a")["generation"] == saved(tmp_path / "b")["generation"]
    assert generate(run / "model", "--data", "newswire", "--out", tmp_path / "model", "--engine", "hf") == 0
    assert saved(tmp_path / "model")["generation"]["max_length"] == 14, "the model's own"
    assert generate(run, "--out", tmp_path / "c", "--engine", "fast") == 2


def test_a_preset_keeps_the_engine_of_the_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "recipe.toml").write_text(
        recipe.dump(recipe.changed(recipe.load(str(run / "recipe.toml")), ["generation.engine=ctranslate2-int8"]))
    )
    work = job(str(tmp_path / "run"), preset="xsum")
    assert (work.engine, work.generation.num_beams) == ("ctranslate2-int8", 6)


def test_a_minimum_length_is_left_to_hf_unless_probabilities_are_renormalised(run, tmp_path, capsys):
    for renormalize, engine in (("false", "hf"), ("true", "ctranslate2")):
        settings = ["--set", "generation.min_length=5", "--set", f"generation.renormalize={renormalize}"]
        assert generate(run, "--out", tmp_path / engine, *settings) == 0
        assert saved(tmp_path / engine)["engine"]["name"] == engine
    assert saved(tmp_path / "ctranslate2")["generation"]["renormalize_logits"] is True
    assert "renormalize_logits" not in saved(tmp_path / "hf")["generation"]
    assert generate(run, "--out", tmp_path / "both", *settings, "--engine", "hf") == 0
    assert rows(tmp_path / "both") == rows(tmp_path / "ctranslate2")


@pytest.mark.parametrize("engine", ["hf", "ctranslate2"])
def test_several_texts_stand_beside_the_best(run, tmp_path, engine):
    assert generate(run, "--out", tmp_path / "one", "--engine", engine) == 0
    assert generate(run, "--out", tmp_path / "three", "--engine", engine, "--num-return", "3") == 0
    for one, three in zip(rows(tmp_path / "one"), rows(tmp_path / "three"), strict=True):
        assert "candidates" not in one
        assert len(three["candidates"]) == 3
        assert three["candidates"][0] == three["prediction"] == one["prediction"]
    assert cli.main(["score", str(tmp_path / "three")]) == 0


def test_samples_are_the_same_whatever_the_batch_and_wherever_the_job_was_stopped(run, tmp_path):
    arguments = [
        "--sample",
        "--num-return",
        "2",
        "--top-p",
        "0.9",
        "--temperature",
        "0.8",
        "--seed",
        "5",
        "--engine",
        "hf",
    ]
    for size in ("1", "4"):
        assert generate(run, "--out", tmp_path / size, *arguments, "--batch-size", size) == 0
    assert rows(tmp_path / "1") == rows(tmp_path / "4")
    assert saved(tmp_path / "1")["seed"] == 5
    whole = (tmp_path / "1" / "predictions.jsonl").read_text()
    (tmp_path / "1" / "predictions.partial-0.jsonl").write_text("".join(whole.splitlines(keepends=True)[2:4]))
    (tmp_path / "1" / "predictions.jsonl").unlink()
    assert generate(run, "--out", tmp_path / "1", *arguments) == 0
    assert (tmp_path / "1" / "predictions.jsonl").read_text() == whole
    assert generate(run, "--out", tmp_path / "1", *arguments[:-3], "6", *arguments[-2:]) == 2, "another seed"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--num-return", "4"],
            "--num-return 4 needs at least 4 beams, but the search has 3. Use --set generation.num_beams=4, or --sample.",
        ),
        (["--num-return", "0"], "--num-return must be 1 or more, got 0."),
        (["--temperature", "0.5"], "--temperature and --top-p are options of sampling; add --sample."),
        (["--sample", "--temperature", "0"], "--temperature must be above 0, got 0."),
        (["--sample", "--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5."),
        (
            ["--engine", "fast"],
            "generation.engine: must be one of auto, hf, graph, draft, ctranslate2, ctranslate2-int8, got 'fast'.",
        ),
    ],
)
def test_options_that_cannot_be_are_a_sentence(run, tmp_path, capsys, arguments, sentence):
    assert generate(run, "--out", tmp_path / "x", *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_baseline_does_not_sample(tmp_path, capsys):
    assert generate("lead-3", "--data", "newswire", "--out", tmp_path / "x", "--sample") == 2
    assert (
        "lead-3 is a baseline, which writes one text of each document and samples nothing." in capsys.readouterr().err
    )


STOP = killed_at_third_call("ngramloss.search.engines.ct2", "_translate")


@pytest.mark.slow
def test_a_killed_job_goes_on_with_ctranslate2_and_writes_no_id_twice(run, tmp_path):
    arguments = [
        "generate",
        str(run),
        "--out",
        str(tmp_path / "a"),
        "--engine",
        "ctranslate2",
        "--batch-size",
        "2",
        "--limit",
        "6",
    ]
    assert fork(STOP, arguments, environment={**os.environ, "OMP_NUM_THREADS": "1"}).wait() == -signal.SIGKILL
    before = (tmp_path / "a" / "predictions.partial-0.jsonl").read_text()
    assert len(before.splitlines()) == 4
    assert cli.main(arguments) == 0
    assert generate(run, "--out", tmp_path / "b", "--engine", "hf") == 0
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert all(line in (tmp_path / "a" / "predictions.jsonl").read_text() for line in before.splitlines())


FULL = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"


@pytest.mark.slow
def test_a_full_disk_while_converting_is_a_sentence_and_auto_goes_on_with_hf(run, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NGRAMLOSS_CACHE": str(tmp_path / "cache")}
    size = max(path.stat().st_size for path in (run / "model").iterdir())
    for engine, code in (("ctranslate2", 2), ("auto", 0)):
        arguments = ["generate", str(run), "--out", str(tmp_path / engine), "--engine", engine, "--limit", "6"]
        done = fork(FULL, arguments, environment=environment, limit=size // 2)
        assert done.wait() == code
        assert "cannot write the converted model to" in done.communicate()[1]
        assert list((tmp_path / "cache" / "ctranslate2").iterdir()) == []
    assert len(rows(tmp_path / "auto")) == 6
    shutil.rmtree(tmp_path / "cache")


# A new engine is one file and one entry


@pytest.fixture
def reversing(monkeypatch):
    entry = engine_registry.Engine("the texts of hf, backwards", "reversing_engine", "torch")
    monkeypatch.setitem(engine_registry.ENGINES, "reversing", entry)
    return entry


@pytest.mark.slow
def test_a_new_engine_is_accepted_shown_used_and_measured(run, tmp_path, capsys, reversing):
    assert recipe.load("xsum", ["generation.engine=reversing"]).generation.engine == "reversing"
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "ctranslate2-int8 or reversing; same as" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["list", "engines"]) == 0
    assert "the texts of hf, backwards" in capsys.readouterr().out
    assert generate(run, "--out", tmp_path / "a", "--engine", "reversing") == 0
    assert "engine reversing: outputs may differ from hf's, because it writes backwards." in capsys.readouterr().err
    assert saved(tmp_path / "a")["engine"] == {"name": "reversing", "precision": "fp32"}
    assert generate(run, "--out", tmp_path / "hf", "--engine", "hf") == 0
    assert rows(tmp_path / "a") != rows(tmp_path / "hf")
    assert [row["tokens"] for row in rows(tmp_path / "a")] == [row["tokens"] for row in rows(tmp_path / "hf")]
    assert generate(run, "--out", tmp_path / "b", "--engine", "reversing", "--num-return", "2") == 2
    assert "the engine reversing cannot be used: it writes one text of each document. Use --engine hf." in (
        capsys.readouterr().err
    )
    assert bench_generate.chosen([]) == ["hf", "graph", "ctranslate2", "ctranslate2-int8", "reversing"]
    measured = ["bench", "generate", "--model", "bart-tiny", "--source", "12", "--length", "8", "--batch-size", "2"]
    options = parser().parse_args([*measured, "--device", "cpu", "--precision", "fp32"])
    values, _ = bench_generate.written(options, tmp_path, "reversing", 2)
    assert min(values["docs/s"] + values["peak GiB"]) > 0


def test_what_an_engine_can_do_is_asked_of_its_entry(run, tmp_path, capsys, monkeypatch, reversing):
    model = tiny("bart")
    search = with_settings(model, num_beams=2)
    assert engines.load_in_training("auto", model, search).name == "hf"
    monkeypatch.setattr("reversing_engine.differences", lambda *_, **__: [])
    able = reversing._replace(automatic="cpu", has_groups=True)
    monkeypatch.setitem(engine_registry.ENGINES, "reversing", able)
    assert engines.load_in_training("auto", model, search).name == "reversing"
    assert engines.load_in_training("reversing", model, search).name == "reversing"
    assert engines.load_in_training("hf", model, search).name == "hf"
    assert engines.load_in_training("ctranslate2", model, search).name == "hf"
    monkeypatch.setitem(engine_registry.ENGINES, "reversing", able._replace(in_torch=False))
    assert engines.load_in_training("auto", model, search).name == "hf"
    engines.check_groups("reversing", "led")
    with pytest.raises(UserError, match="groups of beams need the engine graph or reversing, not hf"):
        engines.check_groups("hf")
    monkeypatch.setattr("reversing_engine.FAMILIES", ["bart"], raising=False)
    with pytest.raises(UserError, match="need the engine reversing, which serves bart, not led"):
        engines.check_groups("reversing", "led")
