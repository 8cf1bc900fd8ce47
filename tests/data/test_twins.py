"""Trainings in which every example is in a step twice: any cut, process and stop gives the same weights."""

import json
import os
import warnings
from pathlib import Path

import models
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import GradientState
from forks import fork_ranks
from looped import assert_same_log, trained
from places import HELPERS, TESTS
from safetensors.torch import load_file
from trainings import arguments, assert_same_weights, padded, rows, rows_with_candidates, tiny

import ngramloss as ng
from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.data.batches.padding import Padder
from ngramloss.data.batches.plan import Size
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.recipe import Train
from ngramloss.training import checkpoints
from ngramloss.training.best import best_of
from ngramloss.training.processes import start_processes

OBJECTIVE = "ce + rdrop + rewards(2):twin + gated(1):twin"
TERMS = ("loss", "ce", "rdrop", "rewards(2):twin", "gated(1):twin", "grad_norm")


def noisy(model=None):
    """A model whose odd rows differ from the even ones, whatever the micro-batch: dropout would depend on the cut."""
    model = tiny() if model is None else model
    model.no_dropout = 0.1  # a name that the check for dropout finds

    def disturb(module, args, embedded):
        odd = torch.arange(len(embedded)).remainder(2).view(-1, 1, 1)
        return embedded * (1 + 2 * odd) if model.training else embedded

    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    reader.get_input_embeddings().register_forward_hook(disturb)
    return model


def by_hand(objective, model, batch):
    """Loss and terms of a batch whose every row is there twice, from the model's logits."""
    doubled = {name: value.repeat_interleave(2, 0) for name, value in batch.items()}
    labels = doubled.pop("labels")
    if model.config.is_encoder_decoder:
        doubled.setdefault("decoder_input_ids", decoder_inputs(model, labels))
        return ng.JointLoss(objective).with_parts(model(**doubled).logits, labels)
    return ng.JointLoss(objective).with_parts(model(**doubled).logits[:, :-1], labels[:, 1:])


# The loop


@pytest.fixture(scope="module")
def alone():
    return trained(model=noisy(), objective=OBJECTIVE, twins=True, validation=rows(5, seed=2), eval_every=3)


def test_a_step_has_the_loss_of_its_examples_twice():
    model = noisy()
    log = trained(model=noisy(), objective=OBJECTIVE, twins=True, data=8, max_steps=1).log
    loss, parts = by_hand(OBJECTIVE, model.train(), padded(model)(rows(8)))
    assert log[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert {name: log[0][name] for name in parts} == pytest.approx({k: v.item() for k, v in parts.items()}, abs=1e-5)
    assert parts["rdrop"] > 0


@pytest.mark.parametrize(
    "cut", [{"batch_size": 4, "accumulate": 2}, {"batch_size": 1, "accumulate": 8}, {"max_tokens": 50}], ids=str
)
def test_every_cut_of_a_step_gives_the_same_weights(alone, cut):
    other = trained(model=noisy(), objective=OBJECTIVE, twins=True, validation=rows(5, seed=2), eval_every=3, **cut)
    assert_same_weights(other.model.state_dict(), alone.model.state_dict())
    assert_same_log(other.log, alone.log, (*TERMS, "eval_ce", "eval_loss"))


def test_validation_leaves_terms_of_twins_out(alone):
    assert {name for line in alone.log for name in line if name.startswith("eval_")} == {
        "eval_loss", "eval_ce", "eval_runtime", "eval_samples_per_second",
    }  # fmt: skip
    only = trained(model=noisy(), objective="rdrop", twins=True, validation=rows(5), eval_every=3, max_steps=3)
    assert only.log[-1]["eval_loss"] == 0
    assert only.log[-1]["eval_ce"] > 0


WORKER = """
import json, sys
sys.path[:0] = {tests!r}
import test_twins
test_twins.work(sys.argv[1], **json.loads(sys.argv[2]))
"""


def work(folder, **changes):
    """What one process of two does."""
    got = trained(Path(folder, "checkpoints"), model=noisy(), objective=OBJECTIVE, twins=True, **changes)
    if start_processes().rank == 0:
        Path(folder, "found.json").write_text(json.dumps(got.log))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"batch_size": 4, "accumulate": 2}, {"fsdp": True, "max_tokens": 50}], ids=str)
def test_two_processes_end_at_the_weights_of_one(tmp_path, alone, changes):
    codes, err = fork_ranks(
        WORKER.format(tests=[str(HELPERS), str(TESTS / "data")]),
        [str(tmp_path), json.dumps(changes)],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert codes == [0, 0], err[-3000:]
    weights = load_file(checkpoints.find(tmp_path / "checkpoints").newest / "model.safetensors")
    assert_same_weights(weights, alone.model.state_dict())
    assert_same_log(json.loads((tmp_path / "found.json").read_text()), alone.log, TERMS)


def test_a_training_with_dropout_continues_with_the_same_bits(tmp_path):
    def model():
        torch.manual_seed(0)
        return transformers.BartForConditionalGeneration(transformers.BartConfig(**models.BART | {"dropout": 0.3}))

    settings = {"objective": OBJECTIVE, "twins": True}
    whole = trained(tmp_path / "whole", model=model(), **settings)
    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "again" / "checkpoint-2")
    again = trained(tmp_path / "again", model=model(), **settings)
    assert again.outcome.continued_from == 2
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)
    assert_same_log(again.log, whole.log[2:], TERMS, tolerance=0)
    assert all(line["rdrop"] > 1e-4 for line in whole.log)


def test_twins_with_candidates():
    objective = "ce + rdrop + rank(margin=0.1,alpha=1)"
    settings = {"objective": objective, "twins": True, "data": rows_with_candidates(8), "max_steps": 2}
    whole, cut = (trained(model=noisy(), **settings, **more) for more in ({}, {"batch_size": 2, "accumulate": 4}))
    assert_same_weights(cut.model.state_dict(), whole.model.state_dict())
    once = trained(model=tiny(), objective="rank(margin=0.1,alpha=1)", data=rows_with_candidates(8), max_steps=1)
    twice = trained(
        model=tiny(), objective="rank(margin=0.1,alpha=1)", data=rows_with_candidates(8), max_steps=1, twins=True
    )
    assert twice.log[0]["loss"] == pytest.approx(once.log[0]["loss"], abs=1e-5)


def test_candidates_of_decoder_only_twins_may_be_rows_of_their_own():
    rows = rows_with_candidates(3)
    batch, once = ng.twins(JoinedPadder(0))(rows), JoinedPadder(0)(rows)
    for name in ("labels", "candidates", "scores"):
        assert torch.equal(batch[name], once[name].repeat_interleave(2, 0))


TURNS = [
    {"input_ids": [5, 6, 7], "labels": [8, 9, ~4, ~5, 6, 7, 8]},
    {"input_ids": [4, 5], "labels": [6, 7, 8]},
    {"input_ids": [9, 9, 9], "labels": [5, ~6, 7, 7, ~8, 9]},
    {"input_ids": [6], "labels": [9, 8]},
]


def test_the_turns_of_decoder_only_twins_are_neighbours():
    for size in (None, Size(5, 16, 8, 3, "turns")):
        batch = ng.twins(JoinedPadder(0))(TURNS, size)
        labels, ids = batch["labels"], batch["input_ids"]
        assert torch.equal(labels[0::2], labels[1::2])
        places = batch["label_positions"]
        real = labels != -100
        assert torch.equal(ids.flatten()[places[real] + 1], labels[real])
        rows_of = places // ids.shape[1]
        assert (rows_of[0::2][real[0::2]] + 1 == rows_of[1::2][real[1::2]]).all()
        assert (rows_of[0::2][real[0::2]] % 2 == 0).all()
        weighted = [row | {"weights": [float(max(label, 0)) for label in row["labels"]]} for row in TURNS]
        weights = ng.twins(JoinedPadder(0))(weighted, size)["weights"]
        assert torch.equal(weights[real], labels[real].float())
    assert len(ng.twins(JoinedPadder(0))([])["input_ids"]) == 2
    assert len(ng.twins(Padder(1, lambda labels: labels))([])["labels"]) == 2


def test_every_cut_of_a_decoder_only_step_gives_the_same_weights():
    def model():
        torch.manual_seed(0)
        return noisy(models.DECODER_ONLY["llama"]())

    settings = {"objective": OBJECTIVE, "twins": True, "data": TURNS, "batch_size": 4, "max_steps": 2}
    whole, *others = (
        trained(model=model(), **settings | cut) for cut in ({}, {"batch_size": 1, "accumulate": 4}, {"max_tokens": 20})
    )
    assert whole.log[0]["rdrop"] > 0
    for other in others:
        assert_same_weights(other.model.state_dict(), whole.model.state_dict())
        assert_same_log(other.log, whole.log, TERMS)


def test_what_cannot_be_trained_is_said_at_once():
    with pytest.raises(ng.UserError, match=r"rdrop compares each row with its twin, .* Set train.twins=true"):
        trained(model=noisy(), objective="ce + rdrop")
    with pytest.raises(ng.UserError, match=r"has no dropout, so twins are equal: .* model.lora_dropout"):
        trained(model=tiny(), objective="ce + gated(1):twin", twins=True)
    settings = ng_recipe("ce + rdrop", best="rdrop")
    with pytest.raises(ng.UserError, match=r"train.best: rdrop compares twins, which validation does not have"):
        best_of(settings)
    with pytest.raises(ng.UserError, match=r"without the terms that compare twins, validation has no loss"):
        best_of(ng_recipe("rdrop + 0*ce", best="loss"))
    with pytest.raises(ng.UserError, match=r"best: 'rdrop' is not a term"):
        trained(model=noisy(), objective="ce + rdrop", twins=True, best="rdrop")
    with pytest.raises(ng.UserError, match=r"twins wraps a collator, .* got list"):
        ng.twins([1])


def ng_recipe(objective, **train):
    from ngramloss.recipe import Recipe

    return Recipe("demo", objective=objective, train=Train(**train))


def test_twins_without_a_term_that_reads_them_are_the_same_training():
    once, twice = (trained(model=tiny(), objective="ce + matches(2)", twins=on, max_steps=2) for on in (False, True))
    assert_same_weights(twice.model.state_dict(), once.model.state_dict())


# Other trainers


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_hugging_faces_trainer_with_our_collator(tmp_path, family, pieces):
    examples = [
        {name: value[row] for name, value in models.batch(family, B=4, T=5, equal=True).items()} for row in range(4)
    ]
    model, reference = (noisy(models.tiny(family)) for _ in range(2))
    objective = "ce + rdrop + gated(1):twin"
    ng.attach(model, objective)
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4 // pieces, gradient_accumulation_steps=pieces, max_steps=1,
        learning_rate=0.0, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no",
        max_grad_norm=0.0, per_device_eval_batch_size=4,
    )  # fmt: skip

    def collator(rows):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    gradients = {}

    class Seen(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gradients.update({name: p.grad.clone() for name, p in kwargs["model"].named_parameters()})

    trainer = transformers.Trainer(
        model, args, train_dataset=examples, eval_dataset=examples, data_collator=ng.twins(collator), callbacks=[Seen()]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a stock Trainer")
        trainer.train()
    loss, parts = by_hand(objective, reference.train(), collator(examples))
    assert parts["rdrop"] > 0
    loss.backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)
    evaluated = by_hand("ce", reference.eval(), collator(examples)).total
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated.item(), abs=1e-5)
    trainer.args.prediction_loss_only = False
    trainer.compute_metrics = lambda outputs: {}
    with pytest.raises(ng.UserError, match=r"puts every example into a batch twice, so there would be two predictions"):
        trainer.predict(examples)
    trainer.data_collator = trainer.data_collator.collator
    assert len(trainer.predict(examples).label_ids) == 4


@pytest.mark.slow
def test_ngram_trainer_evaluates_every_example_once(tmp_path):
    model = noisy()
    trainer = ng.NgramTrainer(
        model,
        arguments(tmp_path, max_steps=1, per_device_train_batch_size=4),
        objective="ce + rdrop",
        train_dataset=rows(6),
        eval_dataset=rows(3),
        data_collator=ng.twins(padded(model)),
        compute_metrics=lambda outputs: {"rows": len(outputs.label_ids)},
    )
    trainer.train()
    assert trainer.state.log_history[0]["rdrop"] > 0
    found = trainer.evaluate()
    assert found["eval_rows"] == 3
    assert "eval_rdrop" not in found
    assert len(trainer.predict(rows(3)).label_ids) == 3


@pytest.mark.parametrize(("process", "count", "kept"), [(0, 3, 4), (1, 3, 2), (1, 2, 0), (1, 4, 4)])
def test_twins_that_fill_the_last_round_lose_their_labels(tmp_path, monkeypatch, process, count, kept):
    """Two processes with two examples each, four rows, of which the last round has ``count`` new ones."""
    model = tiny()
    trainer = ng.NgramTrainer(
        model, arguments(tmp_path), objective="ce", train_dataset=rows(count), data_collator=ng.twins(padded(model))
    )
    inputs = models.batch("bart", B=4, equal=True)
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 2))
    monkeypatch.setattr(Accelerator, "process_index", property(lambda _: process))
    monkeypatch.setattr(GradientState, "end_of_dataloader", property(lambda _: True))
    monkeypatch.setattr(Accelerator, "reduce", lambda _, values, how: values)
    (found,), _ = trainer.get_batch_samples(iter([inputs]), 1, torch.device("cpu"))
    assert (found["labels"] != -100).any(-1).tolist() == [True] * kept + [False] * (4 - kept)


def test_an_attached_model_without_dropout_says_that_twins_are_equal():
    model = ng.attach(models.tiny("bart"), "ce + rdrop")
    batch = {name: value.repeat_interleave(2, 0) for name, value in models.batch("bart").items()}
    with pytest.warns(UserWarning, match=r"has no dropout, so unless .* twins are equal"):
        model.train()(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch)  # once
        noisy(models.tiny("bart"))
    assert ng.last_parts(model)["rdrop"] == 0
    with pytest.raises(ValueError, match=r"an odd number of rows, 3, cannot be twins"):
        model(**models.batch("bart"))
    model.eval()(**models.batch("bart"))
    assert ng.last_parts(model).keys() == {"ce"}


def test_collators_that_change_their_examples_get_copies():
    def collator(rows):
        return [row.pop("labels") for row in rows]

    examples = [{"labels": [1]}, {"labels": [2, 3]}]
    assert ng.twins(collator)(examples) == [[1], [1], [2, 3], [2, 3]]
    assert examples == [{"labels": [1]}, {"labels": [2, 3]}]
