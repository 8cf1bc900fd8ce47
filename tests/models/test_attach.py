"""attach: the joint loss inside any model's forward, with everything else as it was."""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from lanes import few
from models import BART, BERT, DECODER_ONLY, ENCODER_DECODER, FAMILIES, LLAMA, PAD, SLIDING, V, batch, sliding, tiny
from own_logits import OBJECTIVE, assert_same_gradients, reference
from torch.testing import assert_close

from ngramloss import JointLoss
from ngramloss.errors import UserError
from ngramloss.models.attached.attach import attach, detach, last_parts
from ngramloss.models.attached.heads import head_module, head_of
from ngramloss.models.attached.step_loss import compute_loss_func, shifted

SHARPENING = "soft(2) + gated(1) + near(2) + convex + dft + tailr + mixce + unlikelihood"
SOME = ["bart", "t5", "bert2bert", "gemma2"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    dist.init_process_group(
        "gloo", rank=0, world_size=1, init_method=f"file://{tmp_path_factory.mktemp('dist')}/meeting"
    )
    yield
    dist.destroy_process_group()


# The loss


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_the_models_own_logits(family):
    fp32_inside = ("led", "prophetnet")  # their attention is: in fp64 their own masks give NaN
    model, inputs = tiny(family, dtype=torch.float32 if family in fp32_inside else torch.float64), batch(family)
    expected, other = reference(model, inputs)
    outputs = attach(model, OBJECTIVE)(**inputs)
    outputs.loss.backward()
    assert_close(outputs.loss, expected)
    assert_same_gradients(model, other)
    assert outputs.logits is None
    assert not any(name.startswith("logits") for name in outputs)
    assert list(last_parts(model)) == ["ce", "matches(1)", "matches(2)", "bag(2)"]


@pytest.mark.parametrize("family", FAMILIES)
def test_sharpening_and_weighted_objectives_too(family):
    model, inputs = tiny(family, dtype=torch.float32), batch(family)
    expected, other = reference(model, inputs, SHARPENING)
    loss = attach(model, SHARPENING)(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", SLIDING)
def test_windows_and_soft_caps_of_attention_are_the_models_own(family, side):
    model, inputs = sliding(family), batch(family)
    if side == "left":
        inputs = {name: tensor.flip(-1) for name, tensor in inputs.items()}
    expected, other = reference(model, inputs)
    loss = attach(model, OBJECTIVE)(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)
    assert not torch.allclose(loss, reference(sliding(family, window=64), inputs)[0])


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_decoder_inputs_given_are_used(family):
    model, inputs = tiny(family), batch(family)
    torch.manual_seed(0)
    ids = torch.randint(4, V, inputs["labels"].shape)
    expected, _ = reference(model, inputs | {"decoder_input_ids": ids})
    assert_close(attach(model, OBJECTIVE)(**inputs, decoder_input_ids=ids).loss, expected)
    assert not torch.allclose(model(**inputs).loss, expected)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_evaluation_gives_the_same_loss(family):
    model, inputs = tiny(family), batch(family)
    expected, _ = reference(model, inputs)
    with torch.no_grad():
        outputs = attach(model, OBJECTIVE).eval()(**inputs)
    assert_close(outputs.loss, expected)
    assert outputs.logits is None


@pytest.mark.parametrize("family", [*SOME, "prophetnet"])
def test_logits_in_evaluation_are_the_models_own(family):
    model, inputs = tiny(family), batch(family)
    expected, other = reference(model, inputs)
    attach(model, OBJECTIVE, logits=True)
    assert model.train()(**inputs).logits is None
    outputs = model.eval()(**inputs)
    assert_close(outputs.loss, expected)
    assert_close(outputs.logits, other.eval()(**inputs).logits)


def test_a_masked_prompt_does_not_count():
    model, inputs = attach(tiny("llama"), OBJECTIVE), batch("llama", equal=True)
    loss = model(**inputs).loss
    inputs["labels"][:, 5] = 7
    assert not torch.allclose(model(**inputs).loss, loss)
    inputs["labels"][:, 5] = -100
    assert_close(model(**inputs).loss, loss)


def test_labels_shifted_already_are_used_as_they_are():
    model, inputs = attach(tiny("llama"), OBJECTIVE), batch("llama")
    nonsense = torch.full_like(inputs["labels"], 5)
    assert_close(
        model(**inputs | {"labels": nonsense}, shift_labels=shifted(inputs["labels"])).loss, model(**inputs).loss
    )


def test_labels_may_be_positional():
    model, inputs = attach(tiny("bart"), OBJECTIVE), batch("bart")
    names = list(inspect.signature(model.forward).parameters)
    given = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    assert_close(model(*given).loss, model(**inputs).loss)


@pytest.mark.parametrize("family", ["bart", "mbart", "m2m_100", "bert2bert", "prophetnet", "llama"])
def test_a_tuple_starts_with_the_loss_and_leaves_out_the_logits(family):
    model, inputs = attach(tiny(family), OBJECTIVE), batch(family)
    outputs = model(**inputs)
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(outputs)
    assert_close(as_tuple[0], outputs.loss)
    if family in ENCODER_DECODER:
        assert_close(as_tuple[1], outputs.encoder_last_hidden_state)


def test_a_configuration_may_ask_for_tuples():
    model, inputs = attach(tiny("t5"), OBJECTIVE), batch("t5")  # most others fail by themselves then
    outputs = model(**inputs)
    model.config.return_dict = False
    assert_close(model(**inputs), outputs.to_tuple())


@pytest.mark.parametrize("options", [{"backend": "plain"}, {"backend": "chunked"}, {"memory": "lean"}], ids=str)
@pytest.mark.parametrize("family", SOME)
def test_every_backend_gives_the_same_loss(family, options):
    model, inputs = tiny(family), batch(family)
    expected, other = reference(model, inputs)
    loss = attach(model, OBJECTIVE, **options)(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)


def test_a_loss_for_each_row_is_not_for_trainers():
    message = r"a trainer needs one loss, so reduction must be 'mean', got 'none'\. .* JointLoss\(\.\.\., reduction='none'\) in your own loop"
    for build in (
        lambda: attach(tiny("bart"), "ce", reduction="none"),
        lambda: compute_loss_func("ce", reduction="none"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize("options", [{"backend": "plain"}, {"memory": "lean"}], ids=str)
def test_entropy_is_that_of_the_models_own_logits(options):
    model, inputs = tiny("gemma2"), batch("gemma2")
    expected, other = reference(model, inputs, "ce + eaft(alpha=2)")
    loss = attach(model, "ce + eaft(alpha=2)", **options)(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)


def test_a_term_that_needs_all_logits_is_refused_before_the_model_is_changed():
    model = tiny("bart")
    message = r"attach cannot compute eaft\(alpha=2\):released: it needs the 20 largest logits .* or write eaft without its variant"
    with pytest.raises(ValueError, match=message):
        attach(model, "ce + 0.5*eaft(alpha=2):released", logits=True)
    assert type(model) is hf.BartForConditionalGeneration
    inputs = batch("bart")
    loss = compute_loss_func("eaft:released")(model(**inputs), inputs["labels"])
    assert_close(loss, JointLoss("eaft:released")(model(**inputs).logits, inputs["labels"]))


def test_options_reach_the_joint_loss():
    model, inputs = attach(tiny("llama"), "ce", check=True), batch("llama")
    model.lm_head.weight.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="contain NaN or infinity"):
        model(**inputs)


# Everything else


@pytest.mark.parametrize("family", FAMILIES)
def test_without_labels_nothing_changes(family):
    model, inputs = tiny(family).eval(), batch(family)
    labels = inputs.pop("labels")
    start = {"decoder_input_ids": labels.clamp_min(4)} if family in ENCODER_DECODER else {}
    keys, signature, wrote = list(model.state_dict()), inspect.signature(model.forward), model.generate(**inputs)
    before = model(**inputs, **start)
    attach(model, OBJECTIVE)(**inputs, labels=labels)
    after = model(**inputs, **start)
    assert list(after) == list(before)
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(model.generate(**inputs), wrote)
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert isinstance(model, type(tiny(family)))
    assert str(type(model)) == str(type(tiny(family)))


@pytest.mark.parametrize("family", SOME)
def test_a_saved_model_is_the_plain_one(family, tmp_path):
    model, inputs = attach(tiny(family), OBJECTIVE), batch(family)
    model.save_pretrained(tmp_path)
    loaded = detach(copy.deepcopy(model)).__class__.from_pretrained(tmp_path)
    assert loaded.config.architectures == [type(loaded).__name__]
    assert "_ngramloss" not in vars(loaded)
    assert_close(attach(loaded, OBJECTIVE)(**inputs).loss, model(**inputs).loss)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("family", SOME)
def test_copies_are_attached_and_independent(family, copied):
    model, inputs = attach(tiny(family), OBJECTIVE), batch(family)
    loss = model(**inputs).loss.detach()
    twin = copied(model)
    twin_loss = twin(**inputs).loss
    twin_loss.backward()
    assert_close(twin_loss, loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    attach(twin, "ce")
    assert_close(model(**inputs).loss, loss)
    detach(model)
    assert_close(twin(**inputs).loss, reference(model, inputs, "ce")[0])
    assert_close(attach(detach(twin), OBJECTIVE)(**inputs).loss, loss)


def test_detach_restores_the_model():
    model, inputs = tiny("bart"), batch("bart")
    kind, expected = type(model), model(**inputs)
    assert detach(attach(model, OBJECTIVE)) is model
    assert type(model) is kind
    assert not vars(head_module(model))["_forward_pre_hooks"]
    outputs = model(**inputs)
    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(outputs.logits, expected.logits)
    assert detach(model) is model
    with pytest.raises(ValueError, match="has no objective"):
        last_parts(model)


def test_attaching_again_replaces_the_objective():
    model, inputs = attach(attach(tiny("bart"), OBJECTIVE), "ce"), batch("bart")
    assert_close(model(**inputs).loss, reference(model, inputs, "ce")[0])
    assert len(vars(head_module(model))["_forward_pre_hooks"]) == 1
    assert type(detach(model)) is hf.BartForConditionalGeneration


def test_a_resized_head_is_followed():
    model, inputs = attach(tiny("bart"), OBJECTIVE), batch("bart")
    model(**inputs)
    model.resize_token_embeddings(V + 6)
    inputs["labels"][1, 1] = V + 2
    expected, _ = reference(model, inputs)
    assert_close(model(**inputs).loss, expected)
    assert model(input_ids=inputs["input_ids"]).logits.shape[1:] == (12, V + 6)


def test_a_replaced_head_is_followed():
    model, inputs = attach(tiny("llama"), OBJECTIVE), batch("llama")
    old = model.lm_head
    model.set_output_embeddings(torch.nn.Linear(16, V))
    expected, _ = reference(model, inputs)
    assert_close(model(**inputs).loss, expected)
    assert not old._forward_pre_hooks


def test_the_head_is_checked_once(monkeypatch):
    calls = []
    monkeypatch.setattr("ngramloss.models.attached.calls.raise_unless_equal", lambda *given: calls.append(given))
    model, inputs = attach(tiny("llama"), OBJECTIVE), batch("llama")
    model(**inputs)
    model(**inputs)
    assert len(calls) == 1


def test_a_forward_that_fails_leaves_no_trace():
    model, inputs = attach(tiny("bart"), OBJECTIVE), batch("bart")
    hook = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**inputs)
    hook.remove()
    assert model(input_ids=inputs["input_ids"]).logits.shape == (3, 12, V)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_gradient_checkpointing_changes_no_gradient(family):
    model, inputs = tiny(family), batch(family)
    _, other = reference(model, inputs)
    attach(model, OBJECTIVE).gradient_checkpointing_enable()
    model.train()(**inputs).loss.backward()
    assert_same_gradients(model, other)


@pytest.mark.parametrize("family", SOME)
def test_autocast_is_followed(family):
    model, inputs = tiny(family), batch(family)
    with torch.autocast("cpu", torch.bfloat16):
        expected, other = reference(model, inputs)
        outputs = attach(model, OBJECTIVE)(**inputs)
    outputs.loss.backward()
    assert_close(outputs.loss, expected, rtol=2e-2, atol=2e-2)  # logits in bf16, each rounded in its own order
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is None or ours.grad.dtype == torch.float32
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad, rtol=0.1, atol=0.02)  # as above


@pytest.mark.parametrize("family", SOME)
def test_a_bf16_model_is_served(family):
    model, inputs = tiny(family, dtype=torch.bfloat16), batch(family)
    expected, _ = reference(model, inputs)
    assert_close(attach(model, OBJECTIVE)(**inputs).loss, expected, rtol=2e-2, atol=2e-2)  # logits in bf16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "when"),
    few(
        [("t5", "before"), ("llama", "after")],
        [("t5", "before"), ("t5", "after"), ("llama", "before"), ("llama", "after")],
    ),
)
def test_compile_and_attach_in_either_order(family, when):
    torch._dynamo.reset()
    model, inputs = tiny(family), batch(family)
    expected, other = reference(model, inputs)
    if when == "after":
        compiled = torch.compile(attach(model, OBJECTIVE), backend="eager", fullgraph=True)
    else:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(**inputs)
        assert attach(compiled, OBJECTIVE) is compiled
    for _ in range(2):
        model.zero_grad()
        outputs = compiled(**inputs)
        outputs.loss.backward()
        assert_close(outputs.loss, expected)
        assert outputs.logits is None
        assert_same_gradients(model, other)
    assert_close(last_parts(compiled)["ce"], reference(model, inputs, "ce")[0].detach())
    inputs.pop("labels")
    ids = {"decoder_input_ids": inputs["input_ids"]} if family == "t5" else {}
    assert compiled(**inputs, **ids).logits.shape[:2] == inputs["input_ids"].shape


@pytest.mark.slow
def test_aot_compile_keeps_the_gradients():
    torch._dynamo.reset()
    model, inputs = tiny("llama"), batch("llama")
    expected, other = reference(model, inputs)
    loss = torch.compile(attach(model, OBJECTIVE), backend="aot_eager")(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("first", ["attach", "wrap"])
def test_distributed_data_parallel_is_served(one_process, first):
    model, inputs = tiny("bart"), batch("bart")
    expected, other = reference(model, inputs)
    if first == "attach":
        wrapped = torch.nn.parallel.DistributedDataParallel(attach(model, OBJECTIVE))
    else:
        wrapped = attach(torch.nn.parallel.DistributedDataParallel(model), OBJECTIVE)
    for _ in range(2):
        wrapped.zero_grad()
        loss = wrapped(**inputs).loss
        loss.backward()
        assert_close(loss, expected)
    assert_same_gradients(model, other)
    assert "ce" in last_parts(wrapped)


def test_fully_sharded_data_parallel_is_served_where_the_head_belongs_to_the_root(one_process):
    from torch.distributed.fsdp import fully_shard

    model, inputs = tiny("llama"), batch("llama")
    expected, _ = reference(model, inputs)
    attach(model, OBJECTIVE)
    fully_shard(model.model.layers[0])
    fully_shard(model)
    for _ in range(2):
        loss = model(**inputs).loss
        loss.backward()
        assert_close(loss, expected)
    detach(model)
    assert model(**inputs).logits is not None


# Denominators


def test_counts_given_are_used_exactly():
    model, inputs = tiny("bart"), batch("bart")
    expected, _ = reference(model, inputs, num_tokens=100, num_sequences=7)
    assert_close(attach(model, OBJECTIVE)(**inputs, num_tokens=100, num_sequences=7).loss, expected)


@pytest.mark.filterwarnings("ignore:a stock Trainer")
@pytest.mark.parametrize("family", ["bart", "bert2bert", "llama"])
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_tokens_of_the_step_scale_every_term_by_the_share_of_this_batch(family, kind):
    model, inputs = tiny(family), batch(family)
    tokens = int((inputs["labels"] != -100).sum())
    expected, _ = reference(model, inputs)
    loss = attach(model, OBJECTIVE)(**inputs, num_items_in_batch=kind(4 * tokens)).loss
    assert_close(loss, expected / 4)


@pytest.mark.filterwarnings("ignore:a stock Trainer")
@pytest.mark.parametrize("of_the_step", [{}, {"num_items_in_batch": torch.tensor(20)}, {"num_items_in_batch": 0}])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_micro_batch_of_padding_alone_gives_zero(family, of_the_step):
    model, inputs = attach(tiny(family), OBJECTIVE), batch(family)
    inputs["labels"][:] = -100
    loss = model(**inputs, **of_the_step).loss
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_one_warning_names_the_exact_trainer():
    model, inputs = attach(tiny("bart"), OBJECTIVE), batch("bart")
    with pytest.warns(UserWarning, match=r"a stock Trainer counts the tokens.*NgramTrainer.*filterwarnings"):
        model(**inputs, num_items_in_batch=30)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a stock Trainer")
        model(**inputs, num_items_in_batch=30)


def test_cross_entropy_alone_and_exact_counts_give_no_warning():
    model, inputs = tiny("bart"), batch("bart")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a stock Trainer")
        attach(model, "ce")(**inputs, num_items_in_batch=30)
        attach(model, OBJECTIVE)(**inputs, num_items_in_batch=30, num_tokens=30, num_sequences=3)
        model(**inputs)


# Models that cannot be served


class Scaled(hf.LlamaForCausalLM):
    factor = 2.0

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.factor
        return outputs


class Functional(hf.LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        return hf.modeling_outputs.CausalLMOutput(logits=hidden @ self.lm_head.weight.T)


class Keyword(hf.LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        return hf.modeling_outputs.CausalLMOutput(logits=self.lm_head(input=hidden))


def renamed(family, kind):
    model = tiny(family)
    model.__class__ = kind
    return model


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 2), (torch.float32, 1.001), (torch.bfloat16, 1.1)])
def test_logits_changed_after_the_head_are_refused_at_the_first_step(dtype, factor):
    model = attach(renamed("llama", Scaled).to(dtype), OBJECTIVE)
    model.factor = factor
    with pytest.raises(ValueError, match=r"Scaled changes its logits after the head.*compute_loss_func"):
        model(**batch("llama"))


@pytest.mark.parametrize("family", ["bart", "gemma2", "cohere", "granite"])
def test_a_change_the_head_was_not_told_of_is_refused(family, monkeypatch):
    def plain(model, module):
        return head_of(model, module)._replace(bias=None, scale=1.0, softcap=None)

    monkeypatch.setattr("ngramloss.models.attached.calls.head_of", plain)
    with pytest.raises(ValueError, match="changes its logits after the head"):
        attach(tiny(family), OBJECTIVE)(**batch(family))


@pytest.mark.parametrize("kind", [Functional, Keyword])
def test_a_head_whose_input_is_not_seen_is_refused(kind):
    model = attach(renamed("llama", kind), OBJECTIVE)
    with pytest.raises(ValueError, match="did not call its output head"):
        model(**batch("llama"))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(TypeError, match=r"BartModel has no output head.*from_hidden"):
        attach(hf.BartModel(hf.BartConfig(**BART)), OBJECTIVE)
    with pytest.raises(TypeError, match="Linear has no output head"):
        attach(torch.nn.Linear(2, 2), OBJECTIVE)


def with_head(make):
    model = tiny("llama")
    model.lm_head = make(model.lm_head)
    return model


def test_a_quantised_head_is_refused():
    def quantised(head):
        head.weight = torch.nn.Parameter(torch.zeros(V, 16, dtype=torch.int8), requires_grad=False)
        return head

    class Packed(torch.nn.Parameter):
        pass

    def packed(head):
        head.weight = Packed(head.weight.data)
        return head

    with pytest.raises(TypeError, match=r"got Linear with a weight of torch.int8.*quantisation"):
        attach(with_head(quantised), OBJECTIVE)
    with pytest.raises(TypeError, match=r"got Sequential with no weight"):
        attach(with_head(torch.nn.Sequential), OBJECTIVE)
    with pytest.raises(TypeError, match=r"plain tensor as its weight, got Packed.*quantisation"):
        attach(with_head(packed), OBJECTIVE)


def test_a_sharded_head_is_refused(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    def distributed(head):
        mesh = init_device_mesh("cpu", (1,))
        head.weight = torch.nn.Parameter(distribute_tensor(head.weight.data, mesh, [Shard(0)]))
        return head

    with pytest.raises(ValueError, match=r"is sharded \(DTensor.*ZeRO-2"):
        attach(with_head(distributed), OBJECTIVE)
    zero = tiny("llama")
    zero.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError, match=r"is sharded .*ZeRO-3"):
        attach(zero, OBJECTIVE)
    later = attach(tiny("llama"), OBJECTIVE)
    fully_shard(later.lm_head)
    fully_shard(later)
    with pytest.raises(ValueError, match=r"is sharded .*shard the head only with the root module"):
        later(**batch("llama"))
    flat = tiny("llama")
    flat.lm_head.weight = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match=r"must have its weight \[V, D\].*got shape \[8\]"):
        attach(flat, OBJECTIVE)
    with pytest.raises(ValueError, match=r"must have its weight.* on meta: .*offloaded"):
        attach(with_head(lambda head: head.to("meta")), OBJECTIVE)


UNKNOWN = {
    "the decoder half of an encoder-decoder": lambda: hf.BartForCausalLM(hf.BartConfig(**BART)),
    "masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "masked, with the usual loss": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=PAD,
            bos_token_id=0,
            eos_token_id=2,
            cls_token_id=0,
            sep_token_id=2,
        )
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_of_unknown_shift_is_refused_until_told(kind):
    model, inputs = UNKNOWN[kind](), batch("llama")
    with pytest.raises(ValueError, match=r"cannot tell whether position t of .* Use attach\(..., shift=True\)"):
        attach(model, "ce")
    expected = model(**inputs).loss
    assert_close(attach(model, "ce", shift=False)(**inputs).loss, expected)


def test_a_forward_replaced_on_the_object_is_refused():
    model = tiny("bart")
    model.forward = functools.partial(type(model).forward, model)
    with pytest.raises(ValueError, match=r"replaced on the object itself.*Attach first"):
        attach(model, OBJECTIVE)


@pytest.mark.parametrize("by_config", [False, True])
def test_the_loss_of_a_router_is_kept(by_config):
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=1)).train()
    inputs = batch("llama")
    more = {} if by_config else {"output_router_logits": True}
    model.config.output_router_logits = by_config
    outputs = model(**inputs, **more)
    extra = model.router_aux_loss_coef * outputs.aux_loss
    assert extra > 1e-4
    plain = model(**{**inputs, "output_router_logits": False}).loss
    assert_close(outputs.loss, plain + extra)
    attach(model, "ce")
    assert_close(model(**inputs, **more).loss, outputs.loss)
    tokens = (inputs["labels"] != -100).sum().item()
    for name in ("num_tokens", "num_items_in_batch"):  # half of a step
        assert_close(model(**inputs, **more, **{name: 2 * tokens}).loss, outputs.loss / 2)
    gradient = torch.autograd.grad(model(**inputs, **more).loss, model.model.layers[0].mlp.gate.weight)[0]
    detach(model)
    assert_close(gradient, torch.autograd.grad(model(**inputs, **more).loss, model.model.layers[0].mlp.gate.weight)[0])


def test_labels_that_are_padding_are_a_warning_one_time():
    model = attach(tiny("bart"), "ce")
    pad = model.config.pad_token_id
    inputs = batch("bart")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(tiny("bart"), "ce")(**inputs)
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, pad)
    inputs["labels"][:, -1] = pad
    with pytest.warns(
        UserWarning, match=rf"labels of this batch are the padding token, {pad}, and count in the loss.*-100"
    ):
        model(**inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs)


def test_a_name_is_no_model():
    with pytest.raises(TypeError, match=r"attach takes a model, got 'facebook/bart-base'\. Load it first"):
        attach("facebook/bart-base", "ce")


def test_labels_of_a_decoder_only_model_are_beside_its_inputs():
    model = attach(tiny("llama"), "ce")
    ids = torch.randint(3, 20, (2, 8))
    with pytest.raises(
        ValueError, match=r"shape of input_ids, \[2, 8\], got \[2, 4\]: .*Do not shift them: the model does"
    ):
        model(input_ids=ids, labels=ids[:, 4:])


def test_a_loss_that_a_model_adds_from_its_logits_is_refused():
    from transformers import BambaConfig, BambaForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "mamba_n_heads": 8}
    config = BambaConfig(**sizes, mamba_d_head=8, mamba_d_state=8, z_loss_coefficient=0.1)
    with pytest.raises(
        ValueError, match=r"BambaForCausalLM adds a loss of its own, z_loss_coefficient = 0.1, and attach"
    ):
        attach(BambaForCausalLM(config), "ce")


def test_the_loss_of_a_router_that_is_not_returned_is_refused():
    config = hf.SwitchTransformersConfig(
        d_model=16,
        d_kv=8,
        d_ff=16,
        vocab_size=13,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = attach(hf.SwitchTransformersForConditionalGeneration(config), "ce")
    with pytest.raises(ValueError, match=r"adds the loss of its router.*aux_loss"):
        model(**batch("bart"), output_router_logits=True)


def test_data_parallel_threads_are_refused():
    replica = attach(tiny("bart"), OBJECTIVE)._replicate_for_data_parallel()
    with pytest.raises(ValueError, match=r"DataParallel.*torchrun"):
        replica(**batch("bart"))


def test_an_encoder_decoder_of_unknown_start_is_refused():
    class Unsaid(hf.M2M100ForConditionalGeneration):
        pass  # in a module without `shift_tokens_right`

    model = attach(renamed("m2m_100", Unsaid), OBJECTIVE)
    with pytest.raises(ValueError, match="has no function that derives `decoder_input_ids`"):
        model(**batch("m2m_100"))


def test_a_refused_model_is_left_as_it_was():
    model = tiny("llama")
    model.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError):
        attach(model, OBJECTIVE)
    with pytest.raises(ValueError):
        attach(tiny("llama"), "ce + nothing")
    assert type(model) is hf.LlamaForCausalLM
    assert "_ngramloss" not in vars(model)
    assert not model.lm_head._forward_pre_hooks


# compute_loss_func


@pytest.mark.parametrize("family", SOME)
def test_compute_loss_func_gives_the_same_loss(family):
    model, inputs = tiny(family), batch(family)
    expected, _ = reference(model, inputs)
    for loss_fn in (compute_loss_func(OBJECTIVE), pickle.loads(pickle.dumps(compute_loss_func(OBJECTIVE)))):
        assert_close(loss_fn(model(**inputs), inputs["labels"]), expected)
    told = compute_loss_func(OBJECTIVE, shift=family in DECODER_ONLY)
    assert_close(told({"logits": model(**inputs).logits}, inputs["labels"]), expected)


def test_compute_loss_func_scales_and_warns_as_attach_does():
    model, inputs = tiny("bart"), batch("bart")
    expected, _ = reference(model, inputs)
    tokens = (inputs["labels"] != -100).sum()
    with pytest.warns(UserWarning, match="a stock Trainer"):
        loss = compute_loss_func(OBJECTIVE)(model(**inputs), inputs["labels"], num_items_in_batch=3 * tokens)
    assert_close(loss, expected / 3)


def test_compute_loss_func_names_the_cause_of_a_wrong_length():
    model, inputs = tiny("bart"), batch("bart")
    labels = inputs.pop("labels")
    with pytest.raises(
        ValueError, match=r"logits \[3, 12, 13\] and labels \[3, 9\].*DataCollatorForSeq2Seq\(tokenizer, model"
    ):
        compute_loss_func(OBJECTIVE)(model(**inputs), labels)
    with pytest.raises(ValueError, match="no labels"):
        compute_loss_func(OBJECTIVE)(model(**inputs), None)


def test_compute_loss_func_asks_where_the_outputs_do_not_tell():
    with pytest.raises(ValueError, match=r"outputs of type dict .*shift=False"):
        compute_loss_func(OBJECTIVE)({"logits": torch.zeros(1, 3, V)}, torch.full((1, 3), PAD))


@pytest.mark.slow
def test_attach_needs_torch_alone():
    program = "import sys; sys.modules['transformers'] = None; import ngramloss.models.attached.attach; print('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_a_decoder_that_sees_later_tokens_is_refused():
    """As UMT5's in transformers 5.17."""
    model = tiny("umt5")
    attention = model.get_decoder().block[0].layer[0].SelfAttention
    if attention.is_causal:
        detach(attach(model, "ce"))
    attention.is_causal = False
    with pytest.raises(UserError, match="lets the decoder of UMT5 see later tokens"):
        attach(model, "ce")
