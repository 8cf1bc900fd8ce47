"""The further streams of a ProphetNet as a term."""

import pytest
import torch
from models import V, batch, tiny
from trainings import rows
from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

import ngramloss as ng
from ngramloss import JointLoss, attach, last_parts
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.recipe import Model


def prophetnet(streams, **changes):
    torch.manual_seed(streams)
    sizes = {f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")}
    sizes |= {f"num_{side}_layers": 1 for side in ("encoder", "decoder")}
    sizes |= {f"num_{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    off = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    config = ProphetNetConfig(
        vocab_size=V,
        hidden_size=16,
        ngram=streams,
        max_position_embeddings=64,
        num_buckets=4,
        relative_max_distance=8,
        **sizes,
        **off,
        **changes,
    )
    return ProphetNetForConditionalGeneration(config).train()


def gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("streams", [2, 3])
def test_ce_and_future_are_hugging_faces_loss_times_the_streams(streams, smoothing):
    model, inputs = prophetnet(streams, eps=smoothing), batch("prophetnet")
    expected, slopes = gradients(model, inputs)
    written = f"(smoothing={smoothing})" if smoothing else ""
    loss, ours = gradients(attach(model, f"ce{written} + future{written}"), inputs)
    assert loss.item() == pytest.approx(streams * expected.item(), rel=1e-6)
    assert ours.keys() == slopes.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(ours[name], streams * slope, rtol=1e-4, atol=1e-6)


def test_padding_does_not_count():
    model, inputs = prophetnet(3), batch("prophetnet", equal=True)
    assert (inputs["labels"] != -100).all()
    longer = {**inputs, "labels": torch.nn.functional.pad(inputs["labels"], (0, 0, 0, 1), value=-100)}
    for name in ("input_ids", "attention_mask"):
        longer[name] = torch.cat([inputs[name], inputs[name][:1]])
    attach(model, "ce + future")
    torch.testing.assert_close(model(**longer).loss, model(**inputs).loss)


def test_logits_that_are_returned_give_the_same_loss():
    model, inputs = attach(prophetnet(3), "ce + future(smoothing=0.1)", logits=True).eval(), batch("prophetnet")
    outputs = model(**inputs)
    assert outputs.logits_ngram.shape[1] == 2
    again = attach(model, "ce + future(smoothing=0.1)").eval()(**inputs)
    assert again.logits is None
    torch.testing.assert_close(again.loss, outputs.loss)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_backends_agree(memory):
    model, inputs = prophetnet(2), batch("prophetnet")
    plain, slopes = gradients(attach(model, "future(smoothing=0.2)", backend="plain"), inputs)
    loss, ours = gradients(attach(model, "future(smoothing=0.2)", backend="chunked", memory=memory), inputs)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, slopes)


def test_without_the_term_the_first_stream_alone_is_trained():
    model, inputs = prophetnet(2), batch("prophetnet")
    alone, _ = gradients(attach(model, "ce"), inputs)
    both, _ = gradients(attach(model, "ce + 0*future"), inputs)
    torch.testing.assert_close(alone, both)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_models_without_further_streams_are_refused(family):
    with pytest.raises(
        UserError, match=r"reads streams that look further ahead, which this .* does not have. future is"
    ):
        attach(tiny(family), "ce + future")


def test_a_prophetnet_of_one_stream_is_refused():
    with pytest.raises(UserError, match="with an ngram of 2 or more"):
        attach(prophetnet(1), "ce + future")


def test_logits_alone_are_refused():
    with pytest.raises(
        UserError, match=r"future reads the further streams of a ProphetNet, .* Logits alone do not have"
    ):
        JointLoss("ce + future")(torch.zeros(1, 2, 4), torch.tensor([[1, 2]]))
    with pytest.raises(UserError, match="reads future_logp, but a compute_loss_func gets only logits and labels"):
        ng.compute_loss_func("ce + future")


def test_a_training_has_the_term_in_its_log_and_its_validation():
    found = []
    model = tiny("prophetnet")
    ng.train(
        model,
        None,
        rows(12),
        objective="ce + future",
        validation=rows(5),
        max_steps=2,
        batch_size=4,
        accumulate=2,
        warmup_steps=0,
        log_every=1,
        eval_every=2,
        on_step=lambda step, line: found.append(line),
    )
    assert found[-1]["loss"] == pytest.approx(found[-1]["ce"] + found[-1]["future"])
    assert found[-1]["eval_loss"] == pytest.approx(found[-1]["eval_ce"] + found[-1]["eval_future"])
    assert "gradient/future" not in found[-1]
    assert last_parts(model).keys() == {"ce", "future"}


def test_a_prophetnet_from_scratch_writes(tmp_path):
    tokenizer = loading.train_tokenizer(["a b c d", "b c d e"] * 9, 300)
    sizes = {"width": 16, "encoder_layers": 1, "decoder_layers": 1, "heads": 2, "feed_forward": 16}
    model = loading.from_scratch(Model("scratch", architecture="prophetnet", **sizes), tokenizer)
    model.save_pretrained(tmp_path)
    model = ProphetNetForConditionalGeneration.from_pretrained(tmp_path).eval()
    ids = torch.tensor([tokenizer("a b c")["input_ids"]])
    assert model.generate(ids, num_beams=2, max_new_tokens=5, min_new_tokens=3).shape[1] >= 4
    with pytest.raises(UserError, match="has no `encoder_attn` to initialise as the identity"):
        loading.from_scratch(Model("scratch", architecture="prophetnet", copying=True, **sizes), tokenizer)
