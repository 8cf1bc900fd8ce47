"""Training on candidates: scored beside the reference, each source read once, however a step is split."""

import copy
import functools
import json
import os
import pickle
import shutil
import signal

import datasets
import models
import numpy as np
import peft
import pytest
import tiny_tokenizers
import torch
import trainings
from commands import finished as ended
from forks import fork_ranks
from hypothesis import given
from hypothesis import strategies as st
from lanes import few
from models import DECODER_ONLY, ENCODER_DECODER, batch, tiny
from own_logits import assert_same_gradients
from places import HELPERS, TESTS
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import RANKED, moved, rows_with_candidates
from transformers import Seq2SeqTrainer

from ngramloss import JointLoss, LogParts, NgramTrainer, attach, cli, compute_loss_func, detach, last_parts, recipe
from ngramloss.data import Example, candidate_tokens, newswire
from ngramloss.data.batches.padding import Padder
from ngramloss.data.batches.plan import Grid, Plan, Size, fitted_grid
from ngramloss.data.batches.planned import Epochs, ExampleLengths, PlannedSteps, lengths_of
from ngramloss.data.candidate_tokens import WithCandidates, tokenise_candidates
from ngramloss.data.candidates import Candidates, read_candidates
from ngramloss.data.tokens import Shape, tokenise
from ngramloss.errors import UserError
from ngramloss.loss.stats import CandidateStats, head
from ngramloss.models.attached.attach import aligned_labels, attached_loss, last_call, logits_of
from ngramloss.models.attached.decoder_inputs import decoder_inputs

RANK = "ce + 10*rank(margin=0.01,alpha=1) + risk + prefer"
FAMILIES = [family for family in ENCODER_DECODER if family != "prophetnet"]


def candidates(B=3, K=4, T=7, seed=5):
    """Label ids and scores: texts of several lengths, one source with two absent candidates, one without any."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, 8, (B, K, T), generator=source)
    lengths = torch.randint(1, T + 1, (B, K), generator=source)
    lengths[0, 1] = T
    if B > 1:
        lengths[1, K // 2 :] = 0
    if B > 2:
        lengths[2] = 0
    labels[torch.arange(T) >= lengths.unsqueeze(-1)] = -100
    return {"candidates": labels, "scores": torch.rand(B, K, generator=source)}


def one_by_one(model, inputs, compared, objective=RANK):
    """The loss if every candidate is scored in a forward of its own, from all logits; gradients stay in a copy."""
    model = detach(copy.deepcopy(model))
    source = {name: value for name, value in inputs.items() if name != "labels"}
    labels, scores = compared["candidates"], compared["scores"]
    logp = torch.zeros(scores.shape, dtype=next(model.parameters()).dtype)
    for row in range(labels.shape[0]):
        for index in range(labels.shape[1]):
            own = labels[row, index][labels[row, index] != -100].unsqueeze(0)
            if own.numel():
                logits = model(**{name: value[row : row + 1] for name, value in source.items()}, labels=own).logits
                logp[row, index] = logits.log_softmax(-1).gather(-1, own.unsqueeze(-1)).sum()
    stats = CandidateStats(logp, (labels != -100).sum(-1), scores)
    loss = JointLoss(objective)(model(**inputs).logits, inputs["labels"], candidates=stats)
    loss.backward()
    return loss, model


# The model


@pytest.mark.parametrize("length", [4, 12], ids=["shorter", "longer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_scored_together_are_those_scored_one_by_one(family, length):
    """References have nine tokens: candidates are shorter, or longer than them."""
    model = tiny(family, dtype=torch.float32 if family == "led" else torch.float64)  # its masks give NaN in fp64
    inputs, compared = batch(family), candidates(T=length)
    expected, other = one_by_one(model, inputs, compared)
    outputs = attach(model, RANK)(**inputs, **compared)
    outputs.loss.backward()
    assert_close(outputs.loss, expected)
    assert_same_gradients(model, other, atol=1e-5, rtol=1e-4)  # some families compute attention in fp32
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
        loss = model(
            **inputs, candidates=labels, scores=torch.nn.functional.pad(compared["scores"], (0, extra), value=0.9)
        ).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("family", ["bart", "t5", "led"])
def test_the_encoder_reads_each_source_once(family):
    model, rows = attach(tiny(family), RANK), []
    model.get_encoder().register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
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
    monkeypatch.setattr(head, "LEAN_BYTES", 1)  # as if there were more candidates than memory
    with Largest() as seen:
        model(**inputs, **compared).loss.backward()
    assert seen.most == 3 * 17 * 5000  # one position of each text; all of the candidates would be 19 times as many


def test_in_evaluation_without_candidates_the_loss_is_that_of_the_other_terms():
    model, inputs = attach(tiny("bart"), RANK), batch("bart")
    with pytest.raises(UserError, match="needs candidates"):
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


def compiled_in_place(model):
    for body in (model.get_encoder(), model.get_decoder()):
        body.compile(dynamic=True, backend="aot_eager")
    return model


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model


WAYS = {
    "gradient checkpointing": checkpointed,
    "compiled bodies": compiled_in_place,
    "torch.compile": functools.partial(torch.compile, backend="aot_eager"),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "an adapter": lambda model: attach(
        peft.get_peft_model(detach(model), peft.LoraConfig(target_modules=["q_proj"])), RANK
    ),
}
SLOW_WAYS = {"compiled bodies": pytest.mark.slow, "torch.compile": pytest.mark.thorough}


@pytest.mark.parametrize("way", [pytest.param(way, marks=SLOW_WAYS.get(way, [])) for way in WAYS])
def test_it_computes_the_same_with(way):
    model, inputs, compared = attach(tiny("bart"), RANK), batch("bart"), candidates()
    expected = model(**inputs, **compared).loss
    made = WAYS[way](model)
    loss = made(**inputs, **compared).loss
    loss.backward()
    assert_close(loss, expected)
    with torch.no_grad():
        assert_close(made.eval()(**inputs).loss, attach(tiny("bart"), "ce").eval()(**inputs).loss)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scores": None}, r"candidates need `scores` \[B, K\] = \[3, 4\], .* got none"),
        ({"scores": torch.zeros(3, 5)}, r"got a tensor of shape \[3, 5\]"),
        ({"candidates": torch.zeros(3, 4, dtype=torch.long)}, r"must be label ids \[B, K, T\] with B = 3"),
        ({"candidates": torch.zeros(2, 4, 5, dtype=torch.long)}, r"must be label ids \[B, K, T\] with B = 3"),
        ({"candidates": None}, "but `candidates` are missing"),
        ({"decoder_attention_mask": torch.ones(3, 9)}, "decoder_attention_mask is for the reference alone"),
        ({"decoder_input_ids": torch.ones(3, 5, dtype=torch.long)}, "decoder_input_ids and labels must have one shape"),
    ],
)
def test_candidates_that_cannot_be_read_are_refused(changes, sentence):
    model = attach(tiny("bart"), RANK)
    with pytest.raises(UserError, match=sentence):
        model(**batch("bart") | candidates() | changes)


def test_a_batch_without_room_for_candidates_has_no_greedy_text():
    given = batch("bart")
    B = len(given["labels"])
    none = {"candidates": torch.zeros(B, 0, 3).long(), "scores": torch.zeros(B, 0), "greedy": torch.zeros(B, 0).bool()}
    with pytest.raises(UserError, match=r"reads the model's own greedy text, but the candidates do not mark it"):
        attach(tiny("bart"), "ce + bag(1):student").train()(**given, **none)


def test_candidates_that_nothing_would_read_are_refused():
    with pytest.raises(UserError, match="no term of 'ce' compares them"):
        attach(tiny("bart"), "ce")(**batch("bart"), **candidates())
    with pytest.raises(UserError, match=r"gets only the logits of the reference. Use attach"):
        compute_loss_func(RANK)


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_decoder_only_models_are_accepted(family):
    attach(tiny(family), RANK)  # tests/data/test_joined.py has their batches


def test_a_model_whose_scores_depend_on_padding_is_refused():
    model = tiny("prophetnet").eval()
    source = {name: value for name, value in batch("prophetnet").items() if name != "labels"}
    ids = torch.full((3, 6), 5)
    alone, padded = model(**source, decoder_input_ids=ids[:, :4]).logits, model(**source, decoder_input_ids=ids).logits
    assert not torch.allclose(alone, padded[:, :4], atol=1e-2), "transformers has corrected it: allow candidates"
    with pytest.raises(UserError, match="change with padding"):
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


# Batches and plans


SOME = [
    {
        "input_ids": [5, 6, 7],
        "labels": [8, 9],
        "candidates": [[4], np.array([6, 7, 2], np.int32)],
        "scores": [0.25, 0.5],
    },
    {"input_ids": [4], "labels": [3, 2], "candidates": [], "scores": np.zeros(0, np.float32)},
]


def test_a_batch_has_candidates_their_decoder_inputs_and_scores():
    made = Padder(1, moved)(SOME)
    assert made["labels"].tolist() == [[8, 9, -100], [3, 2, -100]]
    assert made["candidates"].tolist() == [[[4, -100, -100], [6, 7, 2]], [[-100] * 3] * 2]
    assert made["candidate_inputs"].tolist()[0] == [[99, 4, 1], [99, 6, 7]]
    assert made["scores"].tolist() == [[0.25, 0.5], [0, 0]]
    assert made["scores"].dtype == torch.float32
    filled = Padder(1, moved)(SOME, Size(3, 4, 6, texts=5))
    assert filled["candidates"].shape == filled["candidate_inputs"].shape == (3, 4, 6)
    assert filled["scores"].shape == (3, 4)
    assert (filled["candidates"] != -100).sum(-1).tolist() == [[1, 3, 0, 0], [0] * 4, [0] * 4]


def test_candidates_without_as_many_scores_are_refused():
    for scores in ([0.5], []):
        with pytest.raises(UserError, match=f"a row has 2 candidates and {len(scores)} scores"):
            Padder(1, moved)([SOME[0] | {"scores": scores}])


def test_a_batch_without_any_candidate_has_room_for_one_and_others_have_no_key():
    assert Padder(1, moved)(SOME[1:])["candidates"].tolist() == [[[-100, -100]]]
    assert Padder(1, moved)([], Size(2, 3, 4, texts=3))["candidates"].shape == (2, 2, 4)
    assert "candidates" not in Padder(1, moved)([{"input_ids": [4], "labels": [3]}])


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=40),
    st.integers(1, 50),
    st.one_of(st.none(), st.integers(1, 900)),
    st.booleans(),
)
def test_a_plan_counts_every_text_of_a_source(examples, most_rows, max_tokens, on_grid):
    sources, targets, texts = (np.array(column) for column in zip(*examples, strict=True))
    numbers = list(range(len(examples)))
    grid = fitted_grid(sources, targets, [numbers], texts=max(texts.max(), 2)) if on_grid else None
    plan = Plan(sources, targets, most_rows, max_tokens, grid, texts)
    cut = plan.cut(numbers)
    assert sorted(row for micro in cut for row in micro.rows) == numbers
    for micro in cut:
        own = micro.rows
        room = max(2, texts[own].max())
        size = micro.size or Size(len(own), sources[own].max(), targets[own].max(), room)
        assert size.texts >= room
        assert size.tokens == size.rows * (size.source + size.texts * size.target)
        assert max_tokens is None or size.tokens <= max_tokens or len(own) == 1
        assert grid is None or size in plan.sizes(len(examples))
    assert 0 <= plan.padding([numbers]) < 1


def test_more_candidates_make_smaller_micro_batches():
    sources, targets = np.full(12, 40), np.full(12, 10)
    sizes = [
        [len(micro.rows) for micro in Plan(sources, targets, 12, 600, grid, texts).cut(range(12))]
        for texts, grid in ((None, None), (np.full(12, 17), None), (np.full(12, 17), Grid((40,), (10,), 17)))
    ]
    assert sizes == [[12], [2] * 6, [2] * 6]
    none = Plan(sources[:2], targets[:2], 12, 119, texts=np.ones(2, np.int64))  # a batch has room for one all the same
    assert [len(micro.rows) for micro in none.cut([0, 1])] == [1, 1]


def test_a_process_without_rows_has_a_micro_batch_with_candidates():
    sources, targets, texts = np.array([3, 1]), np.array([3, 2]), np.array([3, 1])
    for limit in (None, 50):
        steps = PlannedSteps(
            SOME,
            Epochs(sources, step=2, seed=0, grouped=False),
            Plan(sources, targets, 4, limit, None, texts),
            Padder(1, moved),
            lengths=ExampleLengths(sources, targets, texts, np.array([2, 2]), np.array([1, 1]), sources),
            total=1,
            process=2,
            processes=3,
        )
        (made,) = steps.step([0, 1]).batches
        assert made["candidates"].shape == (1, 1, 1)


def test_lengths_are_read_from_rows_that_do_not_know_them():
    assert [None if column is None else column.tolist() for column in lengths_of(SOME)] == [
        [3, 1],
        [3, 2],
        [3, 1],
        [2, 2],
        [1, 1],
        [3, 1],
    ]
    assert lengths_of([{"input_ids": [4], "labels": [3]}]).texts is None


# Steps

TERMS = ("loss", "ce", "matches(2)", "rank(margin=0.1,alpha=1)", "prefer(beta=1)", "grad_norm")


def trained(folder, *, data=22, family="bart", **changes):
    """A training on rows with candidates; validation has none."""
    torch.manual_seed(0)
    model = ENCODER_DECODER[family]()
    trainer = NgramTrainer(
        model,
        trainings.arguments(folder, **changes),
        objective=RANKED,
        train_dataset=rows_with_candidates(data) if isinstance(data, int) else data,
        eval_dataset=trainings.rows(7, seed=2),
        data_collator=Padder(models.PAD, functools.partial(decoder_inputs, model)),
    )
    trainer.train()
    return trainer


def assert_same_training(one, other):
    weights, log = one if isinstance(one, tuple) else (one.model.state_dict(), one.state.log_history)
    trainings.assert_same_weights(weights, other.model.state_dict())
    for here, there in zip(log, other.state.log_history, strict=True):
        for name in (*TERMS, "eval_loss", "eval_ce", "eval_matches(2)"):
            assert here.get(name) == pytest.approx(there.get(name), abs=2e-4), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Training with batches of 8 in one piece."""
    return trained(tmp_path_factory.mktemp("whole"), train_sampling_strategy="group_by_length", eval_strategy="epoch")


@pytest.mark.slow
@pytest.mark.parametrize(("rows_", "accumulate"), few([(2, 4)], [(4, 2), (2, 4), (1, 8)]))
def test_any_split_of_a_step_ends_at_the_same_weights(tmp_path, whole, rows_, accumulate):
    got = trained(
        tmp_path,
        per_device_train_batch_size=rows_,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
    )
    assert_same_training(got, whole)


@pytest.mark.slow
def test_the_log_has_every_term_and_validation_those_without_candidates(whole):
    first, last = whole.state.log_history[0], [line for line in whole.state.log_history if "eval_loss" in line][-1]
    assert set(TERMS) <= first.keys()
    assert first["loss"] == pytest.approx(
        first["ce"] + first["matches(2)"] + 10 * first[TERMS[3]] + 0.5 * first[TERMS[4]], abs=1e-4
    )
    assert first[TERMS[3]] > 0
    assert {"gradient/ce", "matched/2"} <= first.keys()
    assert last["eval_loss"] == pytest.approx(last["eval_ce"] + last["eval_matches(2)"])
    assert not any("rank" in name or "prefer" in name for name in last)


@pytest.mark.slow
def test_evaluation_on_rows_with_candidates_has_their_terms_too(tmp_path):
    trainer = trained(tmp_path, max_steps=1)
    with_candidates, without = trainer.evaluate(rows_with_candidates(7, seed=2)), trainer.evaluate()
    rank = f"eval_{TERMS[3]}"
    assert with_candidates[rank] > 0
    assert with_candidates["eval_ce"] == pytest.approx(without["eval_ce"], abs=1e-5)
    assert with_candidates["eval_loss"] > without["eval_loss"]
    assert rank not in without


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_evaluation_on_rows_with_and_without_candidates_is_refused(tmp_path, first):
    trainer = trained(tmp_path, max_steps=1)
    kinds = [rows_with_candidates(4, seed=2), trainings.rows(4, seed=2)]
    mixed = [*kinds[not first], *kinds[first]]
    trainer.args.per_device_eval_batch_size = 4
    with pytest.raises(UserError, match="some rows for evaluation have candidates and others have none"):
        trainer.evaluate(mixed)


@pytest.mark.slow
def test_columns_with_candidates_are_used(tmp_path):
    made = trained(tmp_path, data=datasets.Dataset.from_list(rows_with_candidates(8)), max_steps=1)
    assert made.state.log_history[0][TERMS[3]] > 0


@pytest.mark.slow
def test_a_stock_trainer_trains_on_candidates_and_logs_their_terms(tmp_path):
    model = attach(trainings.tiny(), RANKED)
    settings = {"remove_unused_columns": False, "eval_strategy": "epoch", "num_train_epochs": 4}
    trainer = Seq2SeqTrainer(
        model,
        trainings.arguments(tmp_path, **settings),
        train_dataset=rows_with_candidates(16),
        eval_dataset=trainings.rows(7, seed=2),
        data_collator=Padder(models.PAD, functools.partial(decoder_inputs, model)),
        callbacks=[LogParts()],
    )
    with pytest.warns(UserWarning, match="a stock Trainer counts the tokens"):
        trainer.train()
    steps = [line for line in trainer.state.log_history if "ce" in line]
    assert steps[-1][TERMS[3]] < steps[0][TERMS[3]]
    evaluated = [line for line in trainer.state.log_history if "eval_ce" in line]
    assert evaluated
    assert all(f"eval_{TERMS[3]}" not in line and "eval_matches(2)" in line for line in evaluated)


@pytest.mark.slow
def test_generating_from_rows_with_candidates_is_refused(tmp_path):
    model = trainings.tiny()
    trainer = NgramTrainer(
        model,
        trainings.arguments(tmp_path, predict_with_generate=True),
        objective=RANKED,
        eval_dataset=rows_with_candidates(4),
        data_collator=Padder(models.PAD, functools.partial(decoder_inputs, model)),
        compute_metrics=trainings.row_count,
    )
    with pytest.raises(UserError, match="Leave them out of the rows for evaluation"):
        trainer.evaluate()


WORKER = """
import json, sys
sys.path[:0] = {tests!r}
import torch
import test_candidate_training as t
folder = sys.argv[1]
trainer = t.trained(folder, **json.loads(sys.argv[2]))
if trainer.args.process_index == 0:
    torch.save(trainer.model.state_dict(), folder + "/weights.pt")
    json.dump(trainer.state.log_history, open(folder + "/log.json", "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_end_at_the_weights_of_one(tmp_path, whole, accumulate):
    """22 rows: the last round of an epoch is filled with repeated rows, whose candidates must count for nothing."""
    settings = {
        "per_device_train_batch_size": 4 // accumulate,
        "gradient_accumulation_steps": accumulate,
        "train_sampling_strategy": "group_by_length",
        "eval_strategy": "epoch",
    }
    program = WORKER.format(tests=[str(HELPERS), str(TESTS / "training")])
    codes, err = fork_ranks(
        program, [str(tmp_path), json.dumps(settings)], environment={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert codes == [0, 0], err[-3000:]
    assert_same_training((torch.load(tmp_path / "weights.pt"), json.loads((tmp_path / "log.json").read_text())), whole)


# Data

EXAMPLES = [Example(name, f"Source {name}. It is here.", f"Reference {name} is here.") for name in ("a", "b", "c", "d")]
FOUND = Candidates(
    {
        "a": (("One dog", "One dog ran home quickly, slept there, and was awake until it was dark"), (0.5, 0.25)),
        "d": (("Rain in the park",), (1.0,)),
        "elsewhere": (("Wind",), (0.0,)),
        "c": (("Cats", "Dogs", "Birds and cats and dogs"), (0.1, 0.2, 0.3)),
    },
    "f" * 16,
)


def prepared(folder, *, max_target=64, found=FOUND, tokenizer=None):
    tokenizer = tiny_tokenizers.ours() if tokenizer is None else tokenizer
    return tokenise_candidates(EXAMPLES, "e" * 16, found, tokenizer, Shape(max_target=max_target), cache=folder)


@pytest.mark.parametrize("family", tiny_tokenizers.FAMILIES)
def test_candidates_are_tokenised_like_targets_and_found_by_id(tmp_path, family):
    tokenizer = tiny_tokenizers.FAMILIES[family]()
    made = prepared(tmp_path, tokenizer=tokenizer)
    for row, example in enumerate(EXAMPLES):
        texts, scores = FOUND.rows.get(example.id, ((), ()))
        expected = tokenizer(text_target=list(texts))["input_ids"] if texts else []
        assert [ids.tolist() for ids in made[row][0]] == expected
        assert made[row][1].tolist() == pytest.approx(scores)
    assert made.counts.tolist() == [2, 0, 3, 1]
    longest = [max((len(ids) for ids in made[row][0]), default=0) for row in range(4)]
    assert made.reduced(np.maximum).tolist() == longest


def test_an_example_comes_with_its_candidates(tmp_path):
    tokens = tokenise(EXAMPLES, "e" * 16, tiny_tokenizers.ours(), Shape(), cache=tmp_path)
    made = WithCandidates(tokens, prepared(tmp_path))
    assert len(made) == 4
    assert list(made[0]) == ["input_ids", "labels", "candidates", "scores"]
    assert made[-1]["scores"].tolist() == made[3]["scores"].tolist() == [1.0]
    with pytest.raises(IndexError):
        made[4]
    assert made.texts.tolist() == [3, 1, 4, 2]
    assert made.lengths.tolist() == tokens.lengths.tolist()
    assert made.label_lengths.tolist() == [len(tokens[row]["labels"]) for row in range(4)]
    assert made.target_lengths.tolist() == [
        max(map(len, [made[row]["labels"], *made[row]["candidates"]])) for row in range(4)
    ]
    assert made.target_lengths[0] > made.label_lengths[0]
    again = pickle.loads(pickle.dumps(made))
    assert [ids.tolist() for ids in again[2]["candidates"]] == [ids.tolist() for ids in made[2]["candidates"]]
    assert [column.tolist() for column in lengths_of(made)] == [
        column.tolist() for column in (made.lengths, made.target_lengths, made.texts, made.label_lengths)
    ] + [[1, 1, 1, 1], made.lengths.tolist()]
    joined = lengths_of(made, joined="shared")
    assert joined.order.tolist() == (made.lengths + made.target_lengths).tolist()
    assert joined.sources.tolist() == [
        len(row["input_ids"]) + sum(map(len, [row["labels"], *row["candidates"]]))
        for row in map(made.__getitem__, range(4))
    ]
    with pytest.raises(ValueError, match="lengths differ: 4 examples, candidates of 3"):
        WithCandidates(
            tokens, tokenise_candidates(EXAMPLES[:3], "x", FOUND, tiny_tokenizers.ours(), Shape(), cache=tmp_path)
        )


def test_it_says_which_examples_have_no_candidates_and_how_many_were_cut(tmp_path, messages):
    prepared(tmp_path)
    assert messages == [
        "1 of 4 training examples have no candidates; only the other terms of the objective train on them."
    ]
    tokenizer = tiny_tokenizers.ours()
    lengths = [
        len(ids)
        for texts, _ in (FOUND.rows[key] for key in "acd")
        for ids in tokenizer(text_target=list(texts))["input_ids"]
    ]
    limit = sorted(lengths)[-2]  # one is as long as the limit, which is not cut
    for _ in range(2):  # from the cache, too
        messages.clear()
        made = prepared(tmp_path, max_target=limit)
        assert messages[1:] == [f"1 of 6 candidates are longer than data.max_target = {limit} tokens and were cut."]
        assert made.reduced(np.maximum).max() == limit


def test_the_same_candidates_are_tokenised_once_and_others_apart(tmp_path, monkeypatch):
    folders = [prepared(tmp_path).folder]
    monkeypatch.setattr(candidate_tokens, "targets", None)
    folders.append(prepared(tmp_path).folder)
    monkeypatch.undo()
    folders += [
        prepared(tmp_path, found=FOUND._replace(fingerprint="0" * 16)).folder,
        prepared(tmp_path, max_target=5).folder,
    ]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3


@pytest.mark.parametrize("chunk", [1, 3])
def test_candidates_in_chunks_are_those_in_one_piece(tmp_path, monkeypatch, chunk):
    """A chunk may have no candidate at all."""
    whole_ = prepared(tmp_path / "whole")
    monkeypatch.setattr("ngramloss.data.tokens.CHUNK", chunk)
    made = prepared(tmp_path / "chunks")
    assert made.counts.tolist() == whole_.counts.tolist()
    for row in range(4):
        assert [ids.tolist() for ids in made[row][0]] == [ids.tolist() for ids in whole_[row][0]]
        assert made[row][1].tolist() == whole_[row][1].tolist()


def test_candidates_of_other_data_are_refused(tmp_path):
    found = FOUND._replace(rows={"7": (("One",), (0.5,))})
    with pytest.raises(
        UserError, match="none of the 4 training examples has candidates: an example has the id 'a', a candidate '7'"
    ):
        prepared(tmp_path, found=found)


# Runs

RECIPE = (
    """
objective = "ce + 10*rank(margin=0.001,alpha=2)"
[data]
name = "{data}"
candidates = "{candidates}"
max_source = 96
max_target = 32
"""
    + models.TINY_MODEL
    + """[train]
max_steps = 24
batch_size = 4
accumulate = 2
learning_rate = 1e-2
warmup_steps = 4
log_every = 4
eval_every = 12
save_every = 8
[generation]
num_beams = 1
max_length = 32
"""
)
RANK_TERM = "rank(margin=0.001,alpha=2)"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, candidates written by hand and a recipe: the better a candidate, the more of the reference it has."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    for split, count in (("train", 40), ("validation", 8)):
        items = newswire.items(split, count)
        write_lines(
            folder / "data" / f"{split}.jsonl",
            [
                {"id": f"{split}-{index}", "document": item.document, "summary": item.summary}
                for index, item in enumerate(items)
            ],
        )
    (folder / "compared").mkdir()
    write_lines(
        folder / "compared" / "candidates.jsonl",
        [made_up(index, item) for index, item in enumerate(newswire.items("train", 40)) if index != 7],
    )
    (folder / "tiny.toml").write_text(RECIPE.format(data=folder / "data", candidates=folder / "compared"))
    return folder


def made_up(index, item):
    words = item.summary.split()
    better = [item.summary, " ".join(words[::-1]), " ".join(words[: len(words) // 2] * 2), "zzz " * len(words)]
    kept = better[: 2 + index % 3]  # two, three or four of them
    return {
        "id": f"train-{index}",
        "candidates": kept[::-1],
        "scores": [round(1 / (1 + place), 3) for place in range(len(kept))][::-1],
    }


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_train(place, run, *more, sabotage=None):
    arguments = ["train", str(place / "tiny.toml"), "--run", str(run), *more]
    code, _, err = ended(arguments, sabotage=sabotage)
    return code, err


@pytest.fixture(scope="module")
def finished(place, own_cache):
    code, err = run_train(place, place / "run")
    assert code == 0, err[-2000:]
    return place / "run", err


@pytest.mark.slow
def test_a_run_learns_the_order_of_candidates(place, finished):
    run, err = finished
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    rank = [line[RANK_TERM] for line in lines if RANK_TERM in line]
    assert rank[-1] < 0.5 * rank[0]
    evaluated = [line for line in lines if "eval_ce" in line]
    assert evaluated
    assert all(line["eval_loss"] == line["eval_ce"] and f"eval_{RANK_TERM}" not in line for line in evaluated)
    assert "1 of 40 training examples have no candidates" in err
    card = (run / "card.md").read_text()
    fingerprint = read_candidates(place / "compared").fingerprint
    assert f"candidates of 39 training examples, from `{place / 'compared'}`, fingerprint `{fingerprint}`." in card
    assert recipe.load(str(run / "recipe.toml")).data.candidates == str(place / "compared")


@pytest.mark.slow
def test_a_run_stopped_and_continued_is_that_of_one_go(place, finished):
    run = place / "stopped"
    code, _ = run_train(place, run, sabotage="sealed:8")
    assert code == -signal.SIGKILL
    assert not (run / "model").exists()
    code, err = run_train(place, run)
    assert code == 0, err[-2000:]
    assert "continuing" in err
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, finished[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_run_is_not_continued_with_other_candidates(place, finished):
    run = place / "other"
    shutil.copytree(finished[0], run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-24")
    file = place / "compared" / "candidates.jsonl"
    before = file.read_text()
    file.write_text(before.replace("zzz", "yyy"))
    code, err = run_train(place, run)
    file.write_text(before)
    assert code == 2
    assert "have changed since it was started:\n  candidates: " in err
    code, err = run_train(place, run)
    assert code == 0, err[-2000:]


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("settings", "code", "sentence"),
    [
        (["data.candidates="], 2, f"{RANK_TERM} compares candidates, but data.candidates is empty. Make candidates"),
        (["data.candidates={place}/nowhere.jsonl"], 2, "there is no file"),
        (["data.candidates={place}/data"], 2, "has no candidates.jsonl"),
        (["data.candidates={run}/candidates.jsonl"], 2, "data.candidates is in the run's own folder"),
        (["data.id=none"], 2, "none of the 40 training examples has candidates: an example has the id"),
        (
            [f"train.best={RANK_TERM}"],
            2,
            f"train.best: {RANK_TERM} compares candidates, which validation does not have",
        ),
        (
            ["objective=ce", "train.max_steps=1", "train.warmup_steps=0"],
            0,
            "data.candidates is not used: no term of 'ce' compares candidates.",
        ),
    ],
)
def test_a_run_says_what_is_wrong_with_its_candidates(place, tmp_path, capsys, settings, code, sentence):
    given = [part for setting in settings for part in ("--set", setting.format(place=place, run=tmp_path / "run"))]
    assert cli.main(["train", str(place / "tiny.toml"), "--run", str(tmp_path / "run"), *given]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_the_card_says_what_scored_the_candidates(place, tmp_path):
    shutil.copytree(place / "compared", tmp_path / "compared")
    (tmp_path / "compared" / "candidates.json").write_text(
        json.dumps({"metric": {"name": "rouge", "scores": ["rouge1", "rouge2"]}})
    )
    given = [
        f"data.candidates={tmp_path}/compared/candidates.jsonl",
        "train.max_steps=1",
        "train.warmup_steps=0",
        "data.max_target=6",
    ]
    assert (
        cli.main(
            [
                "train",
                str(place / "tiny.toml"),
                "--run",
                str(tmp_path / "run"),
                *(part for one in given for part in ("--set", one)),
            ]
        )
        == 0
    )
    card = (tmp_path / "run" / "card.md").read_text()
    assert "training examples, scored with `rouge1, rouge2`, from" in card
    assert "of them were cut." in card
    assert "data.candidates:" not in card
