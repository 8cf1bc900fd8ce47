"""Layers with fewer kernels: which of them get another forward, and that it is their own again."""

import contextlib
import copy

import pytest
from searches import tiny

from ngramloss.generation.fused_layers import fused_forwards, replaced


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("grouped", {"LlamaRMSNorm", "LlamaAttention"}),
        ("qwen3", {"Qwen3RMSNorm", "Qwen3Attention"}),
        ("granite", {"GraniteRMSNorm"}),
        ("gemma", set()),  # its norm adds 1 to the weight
        ("gpt2", set()),
    ],
)
def test_norms_and_rotary_attention_are_replaced(family, kinds):
    assert {type(module).__name__ for module in fused_forwards(tiny(family))} == kinds


def test_a_forward_is_the_modules_own_again():
    model = copy.deepcopy(tiny("grouped"))
    forwards = fused_forwards(model)
    with replaced(forwards):
        assert model.model.norm.forward is forwards[model.model.norm]
    with contextlib.suppress(ValueError), replaced(forwards):
        raise ValueError
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_else_replaced_stays():
    model = copy.deepcopy(tiny("grouped"))
    model.model.norm.forward = own = lambda hidden: hidden
    with replaced(fused_forwards(model)):
        assert model.model.norm.forward is own
    assert model.model.norm.forward is own
