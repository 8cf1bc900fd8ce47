"""LoRA: adapters are trained instead of the model, and merged into it."""

import sys
from dataclasses import replace

import pytest
import tiny_tokenizers
import torch
from transformers import AutoModelForCausalLM

from ngramloss import attach
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.adapters import add_lora, merged, save
from ngramloss.recipe import Model

SETTINGS = Model(
    name="scratch", architecture="llama", width=16, decoder_layers=2, heads=2, feed_forward=24, init_std=0.2, lora=3
)
IDS = torch.tensor([[0, 5, 7, 9, 11, 30, 2]])


def adapted(settings=SETTINGS):
    """A model whose adapters are no longer zero."""
    torch.manual_seed(0)
    model = add_lora(loading.load(settings, tiny_tokenizers.ours()), settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_()
    return model.eval()


@pytest.mark.parametrize("architecture", ["llama", "bart"])
def test_the_merged_model_computes_the_same_and_the_adapted_one_is_not_changed(architecture):
    model = adapted(replace(SETTINGS, architecture=architecture, encoder_layers=1))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    more = {"decoder_input_ids": IDS} if architecture == "bart" else {}
    with torch.no_grad():
        logits = model(input_ids=IDS, **more).logits
        plain = merged(model)
        with model.disable_adapter():
            base = model(input_ids=IDS, **more).logits
        torch.testing.assert_close(plain(input_ids=IDS, **more).logits, logits, atol=1e-5, rtol=1e-5)
    assert (logits - base).abs().max() > 0.1
    assert not hasattr(plain, "get_base_model")
    assert not any("lora" in name for name in plain.state_dict())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_only_adapters_are_trained_and_the_head_has_none():
    model = adapted()
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name and "lm_head" not in name for name in trained)
    assert {name.split(".")[-4] for name in trained} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    attach(model, "ce + matches(2)")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    with torch.no_grad():
        torch.testing.assert_close(
            merged(model)(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-5, rtol=1e-5
        )


def test_settings_reach_the_adapters():
    model = adapted(replace(SETTINGS, lora_alpha=12.0, lora_dropout=0.25, lora_targets=["q_proj", "v_proj"]))
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    layer = next(iter(layers.values()))
    assert (layer.scaling["default"], layer.lora_dropout["default"].p) == (4.0, 0.25)
    layer = next(part for part in adapted().modules() if hasattr(part, "lora_A"))
    assert (layer.scaling["default"], layer.r["default"]) == (2.0, 3)


def test_adapter_and_merged_model_are_saved(tmp_path):
    from peft import PeftModel

    model = adapted()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        save(model, tmp_path / "model")
        assert {path.name for path in (tmp_path / "model" / "adapter").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        torch.testing.assert_close(plain(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-5)
        torch.manual_seed(0)
        base = loading.load(replace(SETTINGS, lora=0), tiny_tokenizers.ours())
        again = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter").eval()
        torch.testing.assert_close(again(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-5)


def test_without_a_rank_nothing_changes(tmp_path):
    model = loading.load(replace(SETTINGS, lora=0), tiny_tokenizers.ours())
    assert add_lora(model, replace(SETTINGS, lora=0)) is model
    assert merged(model) is model
    save(model, tmp_path)
    assert not (tmp_path / "adapter").exists()


def test_layers_that_the_model_does_not_have_are_told():
    with pytest.raises(UserError, match=r"model.lora_targets = \['query'\]: .* are called down_proj, gate_proj, "):
        adapted(replace(SETTINGS, lora_targets=["query"]))


def test_without_peft_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model.lora needs the package 'peft'.*pip install 'ngramloss\[lora\]'"):
        adapted()
