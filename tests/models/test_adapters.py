"""LoRA: adapters are trained instead of the model, and merged into it."""

import sys
from dataclasses import replace

import pytest
import tiny_tokenizers
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from ngramloss import attach, train
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.adapters import add_lora, merged, restore, save
from ngramloss.recipe import Model

SETTINGS = Model(
    name="scratch", architecture="llama", width=16, decoder_layers=2, heads=2, feed_forward=24, init_std=0.2, lora=3
)
IDS = torch.tensor([[0, 5, 7, 9, 11, 30, 2]])


def plain(settings=SETTINGS, *, tied=True):
    torch.manual_seed(0)
    model = loading.load(settings, tiny_tokenizers.ours())
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.7)
    return model


def adapted(settings=SETTINGS, *, tied=True):
    """A model whose adapters are no longer zero."""
    model = add_lora(plain(settings, tied=tied), settings)
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
        new = merged(model)
        with model.disable_adapter():
            base = model(input_ids=IDS, **more).logits
        torch.testing.assert_close(new(input_ids=IDS, **more).logits, logits, atol=1e-5, rtol=1e-5)
    assert (logits - base).abs().max() > 0.1
    assert not hasattr(new, "get_base_model")
    assert not any("lora" in name for name in new.state_dict())
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


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "lm_head"], ["embed_tokens"]], ids=str)
def test_adapter_and_merged_model_are_saved_and_restored(targets, tmp_path):
    settings, tied = replace(SETTINGS, lora_targets=targets), targets == ["all-linear"]
    model = adapted(settings, tied=tied)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        save(model, tmp_path / "model")
        assert {path.name for path in (tmp_path / "model" / "adapter").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        torch.testing.assert_close(whole(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-5)
        again = PeftModel.from_pretrained(plain(tied=tied), tmp_path / "model" / "adapter").eval()
        torch.testing.assert_close(again(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-5)
        other = adapted(settings, tied=tied)
        for weight in other.parameters():
            if weight.requires_grad:
                weight.zero_()
        restore(other, tmp_path / "model")
        torch.testing.assert_close(other(input_ids=IDS).logits, logits)


def test_without_a_rank_nothing_changes(tmp_path):
    model = loading.load(replace(SETTINGS, lora=0), tiny_tokenizers.ours())
    assert add_lora(model, replace(SETTINGS, lora=0)) is model
    assert merged(model) is model
    save(model, tmp_path)
    assert not (tmp_path / "adapter").exists()


def test_layers_that_the_model_does_not_have_are_told():
    with pytest.raises(UserError, match=r"no layer 'query'\. Its linear layers are called down_proj, gate_proj, "):
        adapted(replace(SETTINGS, lora_targets=["query"]))
    for targets in (["q_proj", "v_porj"], ["all-linear", "q_proj"]):  # PEFT takes those that it finds
        with pytest.raises(
            UserError,
            match=rf"model.lora_targets: the model has no layer '{targets[len(targets) - 1 - ('all-linear' in targets)]}'",
        ):
            adapted(replace(SETTINGS, lora_targets=targets))


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"]], ids=str)
def test_adapters_of_one_of_two_tied_layers_are_refused(targets):
    with pytest.raises(UserError, match=r"embeddings and head are tied. Leave both out of model.lora_targets"):
        adapted(replace(SETTINGS, lora_targets=targets))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head is trained whole or in single"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[4]), "train the whole model without adapters"),
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "uses a bias, DoRA or another variant.*Use plain LoRA"),
        (LoHaConfig(target_modules=["q_proj"]), r"q_proj \(Linear\) cannot be merged.*not LoRA.*attach with another"),
    ],
    ids=["modules_to_save", "tokens", "dora", "loha"],
)
def test_adapters_that_checkpoints_cannot_merge_are_refused_before_training(config, said, tmp_path):
    model = get_peft_model(plain(tied=False), config)
    rows = [{"input_ids": [0, 5, 7], "labels": [9, 11, 2]}]
    options = {"max_steps": 1, "batch_size": 1, "objective": "ce + matches(2)"}
    with pytest.raises(UserError, match=said):
        train(model, tiny_tokenizers.ours(), rows, folder=tmp_path, **options)
    assert train(model, tiny_tokenizers.ours(), rows, **options).finished  # it saves nothing


@pytest.mark.parametrize("targets", [["all-linear"], ["v_proj", "lm_head"]], ids=str)
def test_gradient_checkpointing_does_not_change_the_losses_of_adapters(targets):
    rows = [{"input_ids": [0, 5, 7 + i], "labels": [9, 11, 20 + i, 2]} for i in range(4)]
    losses = {}
    for checkpointing in (False, True):
        model = adapted(replace(SETTINGS, lora_targets=targets, lora_dropout=0.3), tied=False)
        found = losses[checkpointing] = []
        train(
            model,
            tiny_tokenizers.ours(),
            rows,
            objective="ce + matches(2)",
            max_steps=3,
            batch_size=4,
            log_every=1,
            learning_rate=1e-2,
            gradient_checkpointing=checkpointing,
            on_step=lambda step, line, found=found: found.append(line["loss"]),
        )
        assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
    assert len(set(losses[True])) == 3


def test_without_peft_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model.lora needs the package 'peft'.*pip install 'ngramloss\[lora\]'"):
        adapted()


def test_adapters_that_are_merged_already_are_not_merged_again():
    model = adapted()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        model.merge_adapter()
        torch.testing.assert_close(merged(model)(input_ids=IDS).logits, logits, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
            torch.testing.assert_close(merged(model)(input_ids=IDS).logits, base, atol=1e-4, rtol=1e-4)
