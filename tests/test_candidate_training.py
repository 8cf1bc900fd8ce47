"""Training on candidates: scored beside the reference, each source read once, however a step is split."""

import copy

import models
import pytest
import torch
from models import DECODER_ONLY, ENCODER_DECODER, batch, tiny
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from ngramloss import JointLoss, attach, compute_loss_func, detach, last_parts
from ngramloss.errors import UserError
from ngramloss.hf.attach import aligned_labels, attached_loss, decoder_inputs, last_call, logits_of
from ngramloss.stats import CandidateStats, head

RANK = "ce + 10*rank(margin=0.01,alpha=1) + risk + prefer"
FAMILIES = [family for family in ENCODER_DECODER if family != "prophetnet"]


def candidates(B=3, K=4, T=7, seed=5):
    """Label ids and gains: texts of several lengths, one source with two absent candidates, one without any."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, 8, (B, K, T), generator=source)
    lengths = torch.randint(1, T + 1, (B, K), generator=source)
    lengths[0, 1] = T
    if B > 1:
        lengths[1, K // 2 :] = 0
    if B > 2:
        lengths[2] = 0
    labels[torch.arange(T) >= lengths.unsqueeze(-1)] = -100
    return {"candidates": labels, "gains": torch.rand(B, K, generator=source)}


def one_by_one(model, inputs, compared, objective=RANK):
    """The loss if every candidate is scored in a forward of its own, from all logits; gradients stay in a copy."""
    model = detach(copy.deepcopy(model))
    source = {name: value for name, value in inputs.items() if name != "labels"}
    labels, gains = compared["candidates"], compared["gains"]
    logp = torch.zeros(gains.shape, dtype=next(model.parameters()).dtype)
    for row in range(labels.shape[0]):
        for index in range(labels.shape[1]):
            own = labels[row, index][labels[row, index] != -100].unsqueeze(0)
            if own.numel():
                logits = model(**{name: value[row : row + 1] for name, value in source.items()}, labels=own).logits
                logp[row, index] = logits.log_softmax(-1).gather(-1, own.unsqueeze(-1)).sum()
    stats = CandidateStats(logp, (labels != -100).sum(-1), gains)
    loss = JointLoss(objective)(model(**inputs).logits, inputs["labels"], candidates=stats)
    loss.backward()
    return loss, model


def assert_same_gradients(model, other, **tolerance):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        zero = torch.zeros_like(ours)
        assert_close(ours.grad if ours.grad is not None else zero, theirs.grad if theirs.grad is not None else zero,
                     msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# The model


@pytest.mark.parametrize("length", [4, 12], ids=["shorter", "longer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_scored_together_are_those_scored_one_by_one(family, length):
    """References have nine tokens: candidates are shorter, or longer than them."""
    model = tiny(family, dtype=torch.float32 if family == "led" else torch.float64)   # its masks give NaN in fp64
    inputs, compared = batch(family), candidates(T=length)
    expected, other = one_by_one(model, inputs, compared)
    outputs = attach(model, RANK)(**inputs, **compared)
    outputs.loss.backward()
    assert_close(outputs.loss, expected)
    assert_same_gradients(model, other, atol=1e-5, rtol=1e-4)   # some families compute attention in fp32
    assert outputs.logits is None
    assert list(last_parts(model)) == ["ce", "rank(margin=0.01,alpha=1)", "risk", "prefer"]
    assert last_parts(model)["risk"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_inputs_made_ahead_change_nothing(family):
    model, inputs, compared = attach(tiny(family), RANK), batch(family), candidates()
    expected = model(**inputs, **compared).loss
    flat = decoder_inputs(model, compared["candidates"].flatten(0, 1)).view(compared["candidates"].shape)
    ready = {"candidate_inputs": flat, "decoder_input_ids": decoder_inputs(model, inputs["labels"])}
    assert_close(model(**inputs, **compared, **ready).loss, expected)
    ready["candidate_inputs"] = flat.flip(-1)
    assert not torch.allclose(model(**inputs, **compared, **ready).loss, expected)


@pytest.mark.parametrize("family", ["bart", "mbart", "t5", "bert2bert"])
def test_absent_candidates_change_nothing(family):
    model, inputs, compared = attach(tiny(family), RANK), batch(family), candidates()
    results = []
    for extra in (0, 3):
        model.zero_grad()
        labels = torch.nn.functional.pad(compared["candidates"], (0, 0, 0, extra), value=-100)
        loss = model(**inputs, candidates=labels, gains=torch.nn.functional.pad(compared["gains"], (0, extra), value=0.9)).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("family", ["bart", "t5", "led"])
def test_the_encoder_reads_each_source_once(family):
    model, rows = attach(tiny(family), RANK), []
    model.get_encoder().register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    model.get_decoder().register_forward_hook(lambda *_: rows.append("decoder"))
    model(**batch(family), **candidates()).loss.backward()
    assert rows == [3, "decoder"]


class Largest(TorchDispatchMode):
    """Remembers the most numbers of a tensor that any operation returned."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(value, torch.Tensor):
                self.most = max(self.most, value.numel())
        return made


def test_no_tensor_ever_has_the_logits_of_all_candidates(monkeypatch):
    wide = models.hf.BartForConditionalGeneration(models.hf.BartConfig(**models.BART | {"vocab_size": 5000}))
    model, inputs, compared = attach(wide, RANK), batch("bart"), candidates(K=16, T=20)
    monkeypatch.setattr(head, "LEAN_BYTES", 1)   # as if there were more candidates than memory
    with Largest() as seen:
        model(**inputs, **compared).loss.backward()
    assert seen.most == 3 * 17 * 5000   # one position of each text; all of the candidates would be 19 times as many


def test_in_evaluation_without_candidates_the_loss_is_that_of_the_other_terms():
    model, inputs = attach(tiny("bart"), RANK), batch("bart")
    with pytest.raises(UserError, match="reads candidates, and there are none"):
        model(**inputs)
    with torch.no_grad():
        loss = model.eval()(**inputs).loss
        assert_close(loss, attach(copy.deepcopy(model), "ce")(**inputs).loss)
        assert list(last_parts(model)) == ["ce"]
        whole = model(**inputs, **candidates()).loss
    assert whole > loss
    assert list(last_parts(model))[1:] == ["rank(margin=0.01,alpha=1)", "risk", "prefer"]


def test_a_schedule_is_followed_in_evaluation_without_candidates():
    model, inputs = attach(tiny("bart"), "ce + matches(2)@ramp(0,1) + rank").eval(), batch("bart")
    attached_loss(model).progress = 0.5
    loss, parts = model(**inputs).loss, last_parts(model)
    assert_close(loss, parts["ce"] + 0.5 * parts["matches(2)"])


@pytest.mark.parametrize("family", ["bart", "t5", "bert2bert"])
def test_logits_in_evaluation_are_those_of_the_references(family):
    model, inputs, compared = tiny(family), batch(family), candidates(T=12)
    expected, other = one_by_one(model, inputs, compared)
    outputs = attach(model, RANK, logits=True).eval()(**inputs, **compared)
    assert_close(outputs.loss, expected)
    assert_close(outputs.logits, other.eval()(**inputs).logits, atol=1e-5, rtol=1e-5)
    assert model.train()(**inputs, **compared).logits is None


def test_what_reads_a_batch_leaves_its_candidates_out():
    model, inputs, compared = attach(tiny("bart"), RANK).eval(), batch("bart"), candidates()
    plain, whole = logits_of(model, inputs), logits_of(model, inputs | compared)
    assert_close(plain, whole)
    assert aligned_labels(model, inputs | compared) is inputs["labels"]
    model.train()(**inputs, **compared)
    assert last_call(model).labels.shape == inputs["labels"].shape


def test_a_model_attached_again_or_detached_repeats_nothing():
    model = attach(attach(tiny("bart"), RANK), RANK)
    assert len(model.get_decoder()._forward_pre_hooks) == 1
    attach(model, "ce")
    assert not model.get_decoder()._forward_pre_hooks
    assert not detach(attach(model, RANK)).get_decoder()._forward_pre_hooks
    twin = copy.deepcopy(attach(model, RANK))
    inputs, compared = batch("bart"), candidates()
    assert_close(twin(**inputs, **compared).loss, model(**inputs, **compared).loss)
    assert not detach(twin).get_decoder()._forward_pre_hooks
    assert model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"compile": True}], ids=str)
def test_it_computes_the_same_with(changes):
    model, inputs, compared = attach(tiny("bart"), RANK), batch("bart"), candidates()
    expected = model(**inputs, **compared).loss
    if "compile" in changes:
        for body in (model.get_encoder(), model.get_decoder()):
            body.compile(dynamic=True, backend="aot_eager")
    else:
        model.gradient_checkpointing_enable()
    loss = model(**inputs, **compared).loss
    loss.backward()
    assert_close(loss, expected)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"gains": None}, r"candidates need `gains` \[B, K\] = \[3, 4\], .* got none"),
    ({"gains": torch.zeros(3, 5)}, r"got a tensor of shape \[3, 5\]"),
    ({"candidates": torch.zeros(3, 4, dtype=torch.long)}, r"must be label ids \[B, K, T\] with B = 3"),
    ({"candidates": torch.zeros(2, 4, 5, dtype=torch.long)}, r"must be label ids \[B, K, T\] with B = 3"),
    ({"candidates": None}, "belong to `candidates`, which are missing"),
    ({"decoder_attention_mask": torch.ones(3, 9)}, "decoder_attention_mask is not known for the candidates"),
    ({"decoder_input_ids": torch.ones(3, 5, dtype=torch.long)}, "decoder_input_ids and labels must have one shape"),
])
def test_candidates_that_cannot_be_read_are_refused(changes, sentence):
    model = attach(tiny("bart"), RANK)
    with pytest.raises(UserError, match=sentence):
        model(**batch("bart") | candidates() | changes)


def test_candidates_that_nothing_would_read_are_refused():
    with pytest.raises(UserError, match="no term of 'ce' compares them"):
        attach(tiny("bart"), "ce")(**batch("bart"), **candidates())
    with pytest.raises(UserError, match=r"gets only the logits of the reference. Use attach"):
        compute_loss_func(RANK)


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_decoder_only_models_are_refused(family):
    with pytest.raises(UserError, match="candidates need an encoder-decoder"):
        attach(tiny(family), RANK)


def test_a_model_whose_scores_depend_on_padding_is_refused():
    model = tiny("prophetnet").eval()
    source = {name: value for name, value in batch("prophetnet").items() if name != "labels"}
    ids = torch.full((3, 6), 5)
    alone, padded = model(**source, decoder_input_ids=ids[:, :4]).logits, model(**source, decoder_input_ids=ids).logits
    assert not torch.allclose(alone, padded[:, :4], atol=1e-2), "transformers has corrected it: allow candidates"
    with pytest.raises(UserError, match="another probability if padding follows it"):
        attach(model, RANK)


def test_a_decoder_that_gets_its_sources_otherwise_is_refused(monkeypatch):
    model = tiny("bart")
    monkeypatch.setattr(model, "get_decoder", lambda: torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="takes no `encoder_hidden_states`"):
        attach(model, RANK)


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_decoder_inputs_are_made_for_rows_without_labels(family):
    labels = torch.tensor([[5, 6, 2], [-100, -100, -100]])
    made = decoder_inputs(tiny(family), labels)
    assert_close(made[:1], decoder_inputs(tiny(family), labels[:1]))
    assert made.min() >= 0
