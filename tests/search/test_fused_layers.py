"""Layers with fewer kernels: which of them get another forward, and that it is their own again."""

import contextlib
import copy

import pytest
import torch
from searches import tiny

from ngramloss.search.fused_layers import Joined, added, fused_forwards, norm_of, replaced, write_product


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("grouped", {"LlamaRMSNorm", "LlamaAttention", "LlamaDecoderLayer"}),
        ("qwen3", {"Qwen3RMSNorm", "Qwen3Attention", "Qwen3DecoderLayer"}),
        ("granite", {"GraniteRMSNorm"}),
        ("gemma", set()),  # its norm adds 1 to the weight
        ("gpt2", set()),
    ],
)
def test_layers_that_are_known_are_replaced(family, kinds):
    assert {type(module).__name__ for module in fused_forwards(tiny(family), Joined())} == kinds


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("grouped", {"LlamaRMSNorm", "LlamaAttention", "LlamaDecoderLayer"}),
        ("bart", {"LayerNorm", "BartAttention", "BartEncoderLayer"}),
        ("m2m_100", {"LayerNorm", "M2M100Attention", "M2M100EncoderLayer"}),
        ("t5", {"T5LayerNorm"}),
        ("gpt2", {"LayerNorm"}),
        ("gemma", set()),
    ],
)
def test_layers_that_read_sources_are_replaced(family, kinds):
    model = tiny(family)
    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    assert {type(module).__name__ for module in fused_forwards(reader, Joined(), reads_sources=True)} == kinds


def test_attention_that_is_not_that_of_pytorch_stays():
    model = copy.deepcopy(tiny("grouped"))
    model.set_attn_implementation("eager")
    forwards = fused_forwards(model, Joined(), reads_sources=True)
    assert {type(module).__name__ for module in forwards} == {"LlamaRMSNorm", "LlamaDecoderLayer"}


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("grouped", "model.layers.0.post_attention_layernorm"),
        ("grouped", "model.layers.0.mlp"),
        ("grouped", "model.layers.0.mlp.act_fn"),
        ("bart", "model.encoder.layers.0.self_attn_layer_norm"),
        ("bart", "model.encoder.layers.0.final_layer_norm"),
    ],
)
def test_a_layer_with_a_hook_in_it_stays(family, path):
    """In 16 bits, the comparison with the model's own forward may not notice that a hook was left out."""
    model = copy.deepcopy(tiny(family))
    layer = model.get_submodule(path[: path.index(".0") + 2])
    assert layer in fused_forwards(model, Joined(), reads_sources=True)
    model.get_submodule(path).register_forward_hook(lambda module, given, result: 2 * result)
    assert layer not in fused_forwards(model, Joined(), reads_sources=True)


def test_a_norm_of_another_precision_is_the_modules_own():
    norm = copy.deepcopy(tiny("grouped")).model.norm.half()
    forward = fused_forwards(tiny("grouped"), Joined())[tiny("grouped").model.norm].func
    hidden = torch.randn(2, 3, 16)
    assert torch.equal(forward(norm, norm_of(norm), hidden), norm(hidden))


def test_a_forward_that_somebody_put_there_in_the_meantime_stays():
    model = copy.deepcopy(tiny("grouped"))
    forwards = fused_forwards(model, Joined())
    model.model.norm.forward = own = lambda hidden: hidden
    with replaced(forwards):
        assert model.model.norm.forward is own
        assert model.model.layers[0].forward is forwards[model.model.layers[0]]
    assert model.model.norm.forward is own


@pytest.mark.parametrize("change", ["", "bias", "hook", "precision"])
def test_a_product_is_written_where_it_belongs(change):
    layer, hidden, rows = torch.nn.Linear(6, 8, bias=change != "bias"), torch.randn(2, 3, 6), torch.zeros(2, 3, 8)
    if change == "hook":
        layer.register_forward_hook(lambda module, given, result: result + 1)
    if change == "precision":
        rows = rows.double()
    with torch.no_grad():
        write_product(layer, hidden, rows)
        torch.testing.assert_close(rows, layer(hidden).to(rows))


def test_a_forward_is_the_modules_own_again():
    model = copy.deepcopy(tiny("grouped"))
    forwards = fused_forwards(model, Joined())
    with replaced(forwards):
        assert model.model.norm.forward is forwards[model.model.norm]
    with contextlib.suppress(ValueError), replaced(forwards):
        raise ValueError
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["norm", "layers.0", "layers.0.self_attn", "layers.0.post_attention_layernorm"])
def test_a_forward_that_somebody_else_replaced_stays(name):
    model = copy.deepcopy(tiny("grouped"))
    module = model.model.get_submodule(name)
    module.forward = own = lambda hidden: hidden
    forwards = fused_forwards(model, Joined())
    with replaced(forwards):
        assert module.forward is own
    assert module.forward is own
    assert (model.model.layers[0] in forwards) == (name in ("norm", "layers.0.self_attn"))


def test_layers_of_the_same_input_are_one_product():
    layers, hidden = [torch.nn.Linear(6, width) for width in (4, 8, 2)], torch.randn(2, 3, 6)
    joined = Joined([layers])
    assert len(joined.products) == 1
    with torch.no_grad():
        for layer in layers:
            layer.weight.add_(1)
            layer.bias.mul_(3)
    before = joined(hidden, *layers)
    joined.refresh()
    for found, stale, layer in zip(joined(hidden, *layers), before, layers, strict=True):
        torch.testing.assert_close(found, layer(hidden))
        assert not torch.allclose(stale, layer(hidden))


class Other(torch.nn.Linear):
    """Not a plain layer."""


@pytest.mark.parametrize("change", ["class", "forward", "hook", "hook before", "bias", "size"])
def test_layers_that_are_not_plain_stay_as_they_are(change, monkeypatch):
    layers, hidden = [torch.nn.Linear(6, 4), torch.nn.Linear(6, 5)], torch.randn(3, 6)
    if change == "class":
        layers[1] = Other(6, 5)
    elif change == "forward":
        layers[1].forward = lambda hidden: hidden
    elif change == "hook":
        layers[1].register_forward_hook(lambda module, given, result: result + 1)
    elif change == "hook before":
        layers[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    elif change == "bias":
        layers[1].bias = None
    else:
        monkeypatch.setattr("ngramloss.search.fused_layers.MOST_COPIED", 4 * 6 * 9 - 1)
    joined = Joined([layers])
    assert not joined.products
    assert all(map(torch.equal, joined(hidden, *layers), [layer(hidden) for layer in layers]))


def test_only_norms_that_are_known_are_norms():
    norm = torch.nn.LayerNorm(4)
    assert norm_of(norm).centred
    assert norm_of(torch.nn.LayerNorm(4, elementwise_affine=False)) is None
    assert norm_of(torch.nn.Linear(4, 4)) is None
    norm.forward = lambda hidden: hidden
    assert norm_of(norm) is None
    total, normed = added(torch.ones(2, 4), torch.ones(2, 4), norm, has_kernels=True)
    assert torch.equal(total, normed)
