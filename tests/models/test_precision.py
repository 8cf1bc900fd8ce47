"""Models in 16 bits: weights are cast, frequencies of rotary positions are not."""

import models
import pytest
import torch

from ngramloss.models.precision import to_precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bart", "m2m_100", "t5", "mt5"])
def test_a_model_in_16_bits_is_the_one_that_transformers_loads(family, dtype, tmp_path):
    model = models.tiny(family)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    cast = to_precision(model, dtype)
    own, theirs = (
        {name: (value.dtype, value.float().flatten().tolist()) for name, value in each.named_buffers()}
        | {name: (value.dtype, value.float().flatten().tolist()) for name, value in each.named_parameters()}
        for each in (cast, loaded)
    )
    assert own == theirs


def test_far_positions_of_a_model_in_16_bits_are_those_of_the_model():
    model = models.tiny("llama")
    rotary = model.get_decoder().rotary_emb
    places = torch.tensor([[0, 300, 4000]])
    expected = rotary(torch.zeros(1), places)[0]
    to_precision(model, torch.bfloat16)
    assert (rotary(torch.zeros(1), places)[0] - expected).abs().max() < 1e-6
    assert model.dtype == torch.bfloat16
