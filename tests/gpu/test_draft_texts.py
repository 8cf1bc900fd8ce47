"""The engine draft on a GPU: the texts of hf, for every family that it serves."""

import copy
import dataclasses

import models
import pytest
import torch
from searches import SERVED, SOURCES, tiny, with_settings, written

from ngramloss.models.drafter import Drafter, Sizes
from ngramloss.search.decoders import difference
from ngramloss.search.engines import draft, hf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", SERVED)
def test_texts_are_those_of_hf_token_for_token(family):
    model = copy.deepcopy(tiny(family)).cuda()
    if difference(model) > 1e-3:
        pytest.skip("this version of transformers computes a whole text otherwise than token by token")
    width = model.get_output_embeddings().weight.shape[1]
    torch.manual_seed(0)
    sizes = Sizes(width, 2, 16, 1, 4, bool(model.config.is_encoder_decoder), None, "")
    drafter = Drafter(sizes).eval().cuda()
    for rules in ({"max_length": 24}, {"min_length": 9, "no_repeat_ngram_size": 2}, {"eos_token_id": [models.EOS, 7]}):
        search = with_settings(model, **{"max_length": 16, **rules})
        ours = written(draft, model, dataclasses.replace(search, drafter=drafter), SOURCES)
        assert ours == written(hf, model, search, SOURCES), rules
