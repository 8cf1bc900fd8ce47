"""attach with PEFT's adapters on the head, or beside it: loss and gradients are those of PEFT's own logits."""

import peft
import pytest
import torch
import transformers as hf
from models import LLAMA, V, batch, tiny
from own_logits import OBJECTIVE, assert_same_gradients, reference
from torch.testing import assert_close

from ngramloss import JointLoss
from ngramloss.loss.stats import head as sweeping
from ngramloss.models.adapters import raise_unless_mergeable
from ngramloss.models.attached.attach import attach
from ngramloss.models.attached.heads import bare, head_module, head_of
from ngramloss.models.attached.step_loss import shifted

FAMILIES = ["llama", "bart", "gemma2", "cohere", "t5"]  # only the head of llama is not tied to the embeddings
ON_HEAD = {"target_modules": ["lm_head"]}


def lora(model, **options):
    """The real PEFT around a model, with every adapter away from zero, so that a dropped one shows."""
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))


def assert_same(wrapped, inputs, **options):
    """Loss and all gradients of an attached model are those of its own logits. Returns the loss."""
    model = bare(wrapped)
    expected, other = reference(model, inputs, **options)
    model.zero_grad()
    loss = wrapped(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)
    return loss.item()


def distinct(*losses):
    return len({round(loss, 5) for loss in losses}) == len(losses)


# LoRA on the head


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", ["attach", "wrap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_the_head(family, first, dtype):
    model, inputs = tiny(family, dtype=dtype), batch(family)
    query = "q" if family == "t5" else "q_proj"
    if first == "attach":
        attach(model, OBJECTIVE)
    wrapped = lora(model, target_modules=[query, "lm_head"]).to(dtype)
    if first == "wrap":
        attach(wrapped, OBJECTIVE)
    adapted = assert_same(wrapped, inputs)
    head = head_module(bare(wrapped))
    assert all(part["default"].weight.grad.abs().sum() > 0 for part in (head.lora_A, head.lora_B))
    assert head.base_layer.weight.grad is None  # it is not trained
    with wrapped.disable_adapter():
        bare(wrapped).requires_grad_(True)
        assert distinct(adapted, assert_same(wrapped, inputs))


def test_the_head_s_own_weight_may_be_trained_beside_its_adapter():
    wrapped = attach(lora(tiny("llama"), **ON_HEAD), OBJECTIVE)
    bare(wrapped).requires_grad_(True)
    assert_same(wrapped, batch("llama"))
    assert head_module(bare(wrapped)).base_layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("backend", ["plain", "chunked"])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_lora_on_the_head_with_every_backend(backend, memory):
    wrapped = attach(lora(tiny("llama"), **ON_HEAD), OBJECTIVE, backend=backend, memory=memory)
    assert_same(wrapped, batch("llama"))


def test_several_adapters_of_the_head_add_up_and_may_be_merged():
    wrapped, inputs = lora(tiny("llama"), **ON_HEAD, use_rslora=True, lora_alpha=3), batch("llama")
    attach(wrapped, OBJECTIVE)
    wrapped.add_adapter("second", peft.LoraConfig(r=3, init_lora_weights=False, **ON_HEAD))
    wrapped.add_adapter("elsewhere", peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["v_proj"]))
    losses = []
    for active in (["default"], ["second"], ["default", "second"], ["second", "elsewhere"]):
        wrapped.base_model.set_adapter(active)
        losses.append(assert_same(wrapped, inputs))
    assert distinct(*losses)
    wrapped.base_model.set_adapter(["default", "second"])
    wrapped.merge_adapter()
    bare(wrapped).requires_grad_(True)
    assert assert_same(wrapped, inputs) == pytest.approx(losses[2], rel=1e-5)
    wrapped.unmerge_adapter()
    assert assert_same(wrapped, inputs) == pytest.approx(losses[2], rel=1e-5)


class Seeded(torch.nn.Dropout):
    """Dropout that is the same at every call with the same shape."""

    def forward(self, input):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return super().forward(input)


def test_dropout_of_the_adapter_is_that_of_the_model_and_is_not_taken_for_a_difference():
    wrapped, inputs = lora(tiny("llama"), **ON_HEAD, lora_dropout=0.5), batch("llama")
    head = bare(wrapped).lm_head
    head.lora_dropout["default"] = Seeded(0.5)
    attach(wrapped.train(), OBJECTIVE)
    trained = assert_same(wrapped, inputs)
    assert head.lora_dropout["default"].training
    assert assert_same(wrapped, inputs) == trained  # the second call does not compare with the model's logits
    assert distinct(trained, assert_same(wrapped.eval(), inputs))
    head.lora_dropout["default"] = torch.nn.Dropout(0.5)
    wrapped.train()
    assert distinct(*(wrapped(**inputs).loss.item() for _ in range(3)))


def test_only_positions_with_a_label_go_through_a_head_with_lora(monkeypatch):
    wrapped, inputs = attach(lora(tiny("llama"), **ON_HEAD), OBJECTIVE), batch("llama", B=8, T=30)
    inputs["labels"][:, :-3] = -100
    computed = []
    rows = sweeping._rows
    monkeypatch.setattr(sweeping, "_rows", lambda hidden, *rest: computed.append(hidden.shape) or rows(hidden, *rest))
    assert_same(wrapped, inputs)
    assert computed[0][-1] == 16 + 2
    assert computed[0][:-1].numel() < inputs["labels"].numel() / 2


def test_lora_on_the_head_in_bf16_with_adapters_in_fp32():
    wrapped, inputs = lora(tiny("llama", dtype=torch.bfloat16), **ON_HEAD), batch("llama")
    head = bare(wrapped).lm_head
    assert head.lora_A["default"].weight.dtype == torch.float32
    attach(wrapped, OBJECTIVE)
    expected, _ = reference(bare(wrapped), inputs)
    loss = wrapped(**inputs).loss
    loss.backward()
    assert_close(loss, expected, atol=0.02, rtol=0.02, check_dtype=False)  # PEFT rounds the sum once more
    assert head.lora_B["default"].weight.grad.dtype == torch.float32


def test_lora_on_the_head_under_autocast():
    wrapped, inputs = attach(lora(tiny("llama"), **ON_HEAD), OBJECTIVE), batch("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = reference(bare(wrapped), inputs)
        assert_close(wrapped(**inputs).loss, expected, atol=0.02, rtol=0.02, check_dtype=False)


@pytest.mark.slow
def test_a_compiled_model_with_lora_on_the_head():
    wrapped, inputs = lora(tiny("llama"), **ON_HEAD), batch("llama")
    expected, _ = reference(bare(wrapped), inputs)
    attach(wrapped, OBJECTIVE)
    assert_close(torch.compile(wrapped, backend="eager")(**inputs).loss, expected)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_of_lora_on_the_head_are_refused_unless_they_are_inactive(options):
    model = tiny("llama")
    if "lora_bias" in options:
        model.lm_head = torch.nn.Linear(16, V)
    wrapped = lora(model, **ON_HEAD, **options)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM is wrapped by an adapter \('default': LoRA with a bias.*Use plain LoRA"
    ):
        attach(wrapped, OBJECTIVE)
    with wrapped.disable_adapter():
        attach(wrapped, OBJECTIVE)
    with pytest.raises(ValueError, match="name it in `modules_to_save` instead"):
        wrapped(**batch("llama"))


def test_other_adapters_of_the_head_are_refused():
    config = peft.LoHaConfig(r=2, target_modules=["lm_head"])
    with pytest.raises(ValueError, match=r"wrapped by an adapter \(Linear\).*remove the head from `target_modules`"):
        attach(peft.get_peft_model(tiny("llama"), config), OBJECTIVE)


def test_different_adapters_in_one_batch_are_refused_on_the_head():
    wrapped = attach(lora(tiny("llama"), **ON_HEAD), OBJECTIVE).eval()
    wrapped.add_adapter("second", peft.LoraConfig(r=3, init_lora_weights=False, **ON_HEAD))
    wrapped(**batch("llama"))
    with pytest.raises(ValueError, match="changes its logits after the head"):
        wrapped(**batch("llama"), adapter_names=["default", "second", "default"])


def test_another_adapter_of_the_head_is_compared_again(monkeypatch):
    wrapped, inputs = attach(lora(tiny("llama"), **ON_HEAD), OBJECTIVE), batch("llama")
    wrapped.add_adapter("second", peft.LoraConfig(r=3, init_lora_weights=False, **ON_HEAD))
    compared = []
    monkeypatch.setattr("ngramloss.models.attached.calls.raise_unless_equal", lambda *given: compared.append(given))
    for active, times in (("default", 1), ("default", 1), ("second", 2), ("second", 2), ("default", 3)):
        wrapped.set_adapter(active)
        wrapped(**inputs)
        assert len(compared) == times


def test_candidates_with_lora_on_the_head():
    models, inputs = [tiny("bart"), tiny("bart")], batch("bart")
    for model in models:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(1)
    inputs["candidates"] = torch.randint(4, V, (3, 2, 5), generator=generator)
    inputs["scores"] = torch.rand(3, 2, generator=generator)
    wrapped, other = (lora(model, **ON_HEAD) for model in models)
    losses = [attach(model, "ce + rank")(**inputs).loss for model in (wrapped, other.merge_and_unload())]
    assert_close(*losses)


@pytest.mark.parametrize("family", ["bart", "gemma2"])
@pytest.mark.parametrize("how", ["target_modules", "modules_to_save"])
def test_adapters_of_tied_embeddings_that_stay_tied(family, how):
    embedding = "shared" if family == "bart" else "embed_tokens"
    targets = {"target_modules": ["q_proj"]}
    targets[how] = [*targets.get(how, ()), embedding]
    # Two models, because views, which PEFT makes here, cannot be copied.
    models = [lora(tiny(family), **targets, ensure_weight_tying=True) for _ in range(2)]
    for wrapped in models:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in wrapped.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    inputs = batch(family)
    labels = inputs["labels"] if family == "bart" else shifted(inputs["labels"])
    expected = JointLoss(OBJECTIVE)(models[1](**inputs).logits, labels)
    expected.backward()
    loss = attach(models[0], OBJECTIVE)(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(*map(bare, models))


# Single tokens


@pytest.mark.parametrize("family", ["llama", "bart", "gemma2", "cohere"])
def test_trained_tokens_are_those_of_the_embedding_and_of_a_tied_head(family):
    model, inputs = tiny(family), batch(family)
    attach(model, OBJECTIVE)
    wrapped = lora(model, target_modules=["q_proj"], trainable_token_indices=[4, 5, 9])
    tied = bare(wrapped).config.tie_word_embeddings
    head = bare(wrapped).get_output_embeddings()
    assert hasattr(head, "token_adapter") == tied
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "trainable_tokens_delta" in name:
                weight.add_(torch.randn_like(weight))
    adapted = assert_same(wrapped, inputs)
    with wrapped.disable_adapter():
        bare(wrapped).requires_grad_(True)
        plain = assert_same(wrapped, inputs)
    wrapped.merge_adapter()
    assert assert_same(wrapped, inputs) == pytest.approx(adapted, rel=1e-5)
    assert distinct(adapted, plain)


def test_tokens_of_an_untied_head_may_be_trained():
    indices = {"embed_tokens": [4, 5], "lm_head": [4, 7]}
    wrapped = attach(lora(tiny("llama"), target_modules=["q_proj"], trainable_token_indices=indices), OBJECTIVE)
    assert_same(wrapped, batch("llama"))
    only = attach(
        peft.get_peft_model(
            tiny("llama"), peft.TrainableTokensConfig(token_indices=[4, 7], target_modules=["lm_head"])
        ),
        OBJECTIVE,
    )
    assert_same(only, batch("llama"))


def test_a_bias_that_peft_leaves_out_is_left_out():
    model = tiny("llama")
    model.lm_head = torch.nn.Linear(16, V)
    wrapped = lora(model, target_modules=["q_proj"], trainable_token_indices={"lm_head": [4, 7]})
    attach(wrapped, OBJECTIVE)
    assert_same(wrapped, batch("llama"))
    assert head_of(bare(wrapped), head_module(bare(wrapped))).bias is None


# The head in modules_to_save


@pytest.mark.parametrize("first", ["attach", "wrap"])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_a_head_in_modules_to_save_is_the_active_adapter_s_copy(family, first):
    model, inputs = tiny(family), batch(family)
    if first == "attach":
        attach(model, OBJECTIVE)
    options = {"r": 2, "init_lora_weights": False, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    wrapped = lora(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped.add_adapter("second", peft.LoraConfig(**options))
    head = bare(wrapped).get_output_embeddings()
    with torch.no_grad():
        for number, copied in enumerate(head.modules_to_save.values()):
            copied.weight.add_(torch.randn_like(copied.weight), alpha=0.1 * (number + 1))
    if first == "wrap":
        attach(wrapped, OBJECTIVE)
    losses = []
    for name in ("default", "second"):
        wrapped.set_adapter(name)
        expected, other = reference(model, inputs)
        model.zero_grad()
        loss = wrapped(**inputs).loss
        loss.backward()
        assert_close(loss, expected)
        assert_same_gradients(model, other)
        assert head.modules_to_save[name].weight.grad.abs().sum() > 0
        assert head.original_module.weight.grad is None or family == "bart"
        losses.append(loss.item())
    with wrapped.disable_adapter():
        model.requires_grad_(True)
        expected, _ = reference(model, inputs)
        assert_close(wrapped(**inputs).loss, expected)
        losses.append(expected.item())
    assert len(set(losses)) == 3


@pytest.mark.parametrize("first", ["attach", "wrap"])
@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_lora_away_from_the_head_is_served(family, first):
    model, inputs = tiny(family), batch(family)
    modules = ["q", "v"] if family == "t5" else ["q_proj", "v_proj"]
    if first == "attach":
        attach(model, OBJECTIVE)
    wrapped = lora(model, target_modules=modules)
    expected, other = reference(model, inputs)
    if first == "wrap":
        assert attach(wrapped, OBJECTIVE) is wrapped
    loss = wrapped(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_merged_adapter_is_a_plain_model_again():
    wrapped, inputs = lora(tiny("llama"), target_modules=["q_proj", "lm_head"]), batch("llama")
    model = wrapped.merge_and_unload().requires_grad_(True)
    expected, _ = reference(model, inputs)
    assert_close(attach(model, OBJECTIVE)(**inputs).loss, expected)


# Quantised models


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]], ids=str)
def test_adapters_of_a_model_in_4_bits(targets, tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, **sizes})).save_pretrained(tmp_path)
    four_bits = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)

    def loaded():
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits)
        return lora(peft.prepare_model_for_kbit_training(model), target_modules=targets)

    wrapped, other, inputs = loaded(), loaded(), batch("llama")
    assert type(bare(wrapped).model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    expected = JointLoss(OBJECTIVE)(other(**inputs).logits, shifted(inputs["labels"]))
    expected.backward()
    loss = attach(wrapped, OBJECTIVE)(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(bare(wrapped), bare(other))
    with pytest.raises(ValueError, match=r"\(Linear4bit\) cannot be merged.*the weight is quantised"):
        raise_unless_mergeable(wrapped)
