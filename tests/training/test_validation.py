"""Texts that validation generates: written as the recipe says, and the model in training does not notice."""

import copy
import os
import random

import numpy as np
import pytest
import tiny_tokenizers
import torch
from forks import fork_ranks
from places import HELPERS, TESTS
from searches import hf_texts, ids, real_model

from ngramloss import recipe
from ngramloss.output import progress
from ngramloss.search import writer
from ngramloss.training.validation import unchanged, write_texts

PLACES = [str(HELPERS), str(TESTS / "training")]


def settings(*overrides, name="demo"):
    return recipe.load(name, ["train.best=rouge2", "generation.max_length=12", "generation.min_length=4", *overrides])


def written(model, chosen):
    return write_texts(model, ids(), settings=chosen, tokenizer=tiny_tokenizers.ours(), batch_size=4)


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_of_the_recipes_settings_with_the_beams_of_validation(beams):
    model, chosen = (
        real_model(),
        settings("generation.num_beams=2", f"train.best_beams={beams}", "generation.no_repeat_ngram_size=2"),
    )
    texts = written(model, chosen)
    by_hand = real_model()
    by_hand.generation_config.update(
        num_beams=beams,
        length_penalty=1.0,
        min_length=4,
        max_length=12,
        no_repeat_ngram_size=2,
        early_stopping=beams > 1,
    )
    assert texts == hf_texts(by_hand, tiny_tokenizers.ours(), ids())
    assert len(set(texts)) > 1


def test_the_model_and_all_random_numbers_stay_as_they_are():
    model = real_model().train()
    model.generation_config.update(do_sample=True, num_beams=1)
    own, before = model.generation_config, copy.deepcopy(model.generation_config).to_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    texts = written(model, settings())
    assert model.generation_config is own
    assert own.to_dict() == before
    assert all(module.training for module in model.modules())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
    assert written(model, settings()) == texts
    with unchanged(model):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), drawn[0])


@pytest.mark.slow
def test_compiled_code_is_not_compiled_again_for_every_length():
    model, compiled = real_model(), []
    texts = written(model, settings())
    model.get_encoder().compile(backend=lambda module, inputs: compiled.append(module) or module.forward)
    assert written(model, settings()) == texts
    assert compiled == []
    with torch.inference_mode():
        model.generate(torch.tensor([ids()[0]]))
    assert compiled  # as it would be


def test_a_model_that_fails_to_generate_stays_as_it_was(monkeypatch):
    model = real_model().train()
    monkeypatch.setattr(writer, "decoded", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(model, settings())
    assert model.training


def test_summaries_of_several_sentences_are_written_one_a_line(monkeypatch):
    monkeypatch.setattr(writer, "decoded", lambda tokenizer, rows: ["One came. Two left." for _ in rows])
    assert set(written(real_model(), settings(name="cnndm"))) == {"One came.\nTwo left."}
    assert set(written(real_model(), settings(name="xsum"))) == {"One came. Two left."}


def test_a_long_validation_shows_how_far_it_is(monkeypatch, messages):
    written(real_model(), settings())
    assert messages == []
    monkeypatch.setattr(progress, "SECONDS", 0)
    written(real_model(), settings())
    assert messages[0].startswith("validating: 4 of 6 documents")


SHARDED = f"""
import sys
sys.path[:0] = {PLACES!r}
import torch, tiny_tokenizers
from ngramloss.training.sharding import shard
from ngramloss.training.validation import texts_of_all, write_texts
from searches import ids, real_model
from test_validation import settings, written

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
alone, model = real_model(), real_model()
for one in (alone, model):
    one.final_logits_bias[:, 2] = 6   # texts end after 6, 10, 11 or 12 tokens
alone = written(alone, settings())
shard(model)
model(torch.tensor([ids()[0]]), decoder_input_ids=torch.tensor([[2]]))   # as training did
model.reshard()
how = dict(settings=settings(), tokenizer=tiny_tokenizers.ours(), batch_size=1)
assert texts_of_all(lambda mine: write_texts(model, mine, **how), ids()[:5], rank, 2) == alone[:5]
assert "_is_fsdp_managed_module" not in model.__dict__
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_that_share_a_sharded_model_wait_for_the_longest_text():
    codes, err = fork_ranks(SHARDED, [], environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert codes == [0, 0], err[-3000:]
