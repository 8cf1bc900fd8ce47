"""The settings of a search: those of the model, changed by a recipe, then by options."""

import models
import pytest
from logged import logged
from searches import ids, real_model

from ngramloss.generation.job import job
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.models import loading
from ngramloss.recipe import Generation
from ngramloss.search.engines import hf
from ngramloss.search.engines.hf import search_facts, search_of
from ngramloss.search.search import Options


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


def test_a_recipe_decides_whatever_the_model_samples_and_counts():
    model = real_model()
    model.generation_config.update(do_sample=True, temperature=0.7, max_new_tokens=3, min_new_tokens=2)
    search = search_of(model, Generation(num_beams=2, max_length=9))
    assert (search.sample, search.min_length, search.max_length) == (False, 0, 9)
    model = real_model()
    model.generation_config.update(do_sample=True)
    loading.prepare_generation(model, Generation())
    assert not model.generation_config.do_sample


def test_a_model_that_samples_by_itself_is_a_warning(messages, small_run):
    work = job(str(small_run / "model"), data="newswire", overrides=["generation.engine=hf"])
    model, tokenizer = load_model(work)
    model.generation_config.update(do_sample=True, num_beams=1)
    writer_of(work, model, tokenizer)
    (warned,) = [line for line in messages if "do_sample" in line]
    assert warned.endswith("Use --sample --seed N, or beam search: --set generation.num_beams=4.")
    writer_of(work, model, tokenizer, Options(2, sample=True, seed=1))
    assert len([line for line in messages if "do_sample" in line]) == 1


def test_settings_that_are_given_for_a_model_of_somebody_else_leave_its_others_alone():
    model = real_model()
    model.generation_config.update(length_penalty=2.0, no_repeat_ngram_size=3, do_sample=True)
    own, search = search_of(model), search_of(model, Generation(num_beams=8, min_length=5), only=("num_beams",))
    assert (search.num_beams, search.sample) == (8, False)
    for name in ("min_length", "max_length", "length_penalty", "no_repeat_ngram_size", "early_stopping"):
        assert getattr(search, name) == getattr(own, name)
    assert job("some/model", data="newswire", overrides=["generation.num_beams=8"]).only == ("num_beams",)
    assert job("some/model", preset="xsum", overrides=["generation.num_beams=8"]).only == ()


@pytest.mark.parametrize("options", [Options(3, beams=0), Options(3, beams=3)])
def test_a_search_that_is_asked_for_beams_has_them_whatever_the_model_does(options):
    model = real_model()
    model.generation_config.update(num_beams=1, do_sample=True, early_stopping=False)
    search = search_of(model, options=options)
    assert (search.num_beams, search.texts, search.sample, search.early_stopping) == (3, 3, False, True)
    model.generation_config.update(num_beams=8)
    assert search_of(model, options=options).num_beams == (options.beams or 8)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_candidates_of_a_recipe_with_one_beam_stop_as_its_beams_would(early, groups):
    model, options = real_model(), Options(4, beams=4, groups=groups, diversity=groups - 1.0)
    several = search_of(model, Generation(num_beams=4, early_stopping=early), options)
    search = search_of(model, Generation(num_beams=1, early_stopping=early), options)
    assert search.early_stopping == several.early_stopping == early
    of_another = search_of(model, Generation(early_stopping=early), options, only=["early_stopping"], num_beams=1)
    assert of_another.early_stopping == early
    assert search_of(model, Generation(early_stopping=early), options, only=["max_length"], num_beams=1).early_stopping


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


def test_texts_of_a_decoder_only_model_are_not_cut_at_hugging_faces_twenty_tokens():
    model = models.tiny("llama")
    model.generation_config.update(max_length=None, max_new_tokens=None)
    with logged() as said:
        search = search_of(model)
    assert (search.max_length, search.changes["max_new_tokens"]) == (129, 128)
    assert said == [
        "neither the model's own settings nor a recipe limit the length of texts: they get at most 128 tokens (set "
        "generation.max_length)."
    ]
    assert search_of(model, max_new_tokens=20).max_length == 21
    assert search_of(model, Generation(max_length=30)).max_length == 31
