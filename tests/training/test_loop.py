"""The loop of training: any cut of a step, any number of stops and processes ends at the same weights."""

import json
import math
import os
import re
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import models
import numpy as np
import pytest
import torch
import transformers
from looped import in_two_processes
from trainings import OBJECTIVE, RANKED, assert_same_weights, padded, rows, rows_with_candidates, tiny

import ngramloss as ng
from ngramloss import JointLoss
from ngramloss.data.batches.padding import Step
from ngramloss.data.batches.plan import COARSE, FINE, LONG
from ngramloss.data.batches.planned import Epochs, lengths_of
from ngramloss.errors import UserError
from ngramloss.models.attached.attach import attached_loss
from ngramloss.recipe import Train
from ngramloss.training import captured, checkpoints, compiling, loop, objective_task, planning, running
from ngramloss.training.best import Best
from ngramloss.training.captured import CapturedStep, Gradients, _state
from ngramloss.training.objective_task import ObjectiveTask
from ngramloss.training.processes import Processes, start_processes
from ngramloss.training.run import Run, python_run
from ngramloss.training.running import StepRunner

HERE = Processes(0, 1, torch.device("cpu"))
TERMS = ("loss", "ce", "matches(2)", "bag(2)", "grad_norm")
SETTINGS = {
    "batch_size": 8,
    "accumulate": 1,
    "epochs": 2.0,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "log_every": 1,
    "eval_every": 0,
    "save_every": 1,
    "keep": 100,
    "seed": 3,
}


class Trained(NamedTuple):
    """A training that ended."""

    model: object
    outcome: object
    log: list


def trained(folder=None, *, data=22, model=None, objective=OBJECTIVE, validation=None, **changes):
    """Train a tiny model with ``ng.train``; the log has the values that ``on_step`` gets."""
    model, log = tiny() if model is None else model, []
    outcome = ng.train(
        model,
        None,
        rows(data) if isinstance(data, int) else data,
        Train(**SETTINGS),
        objective=objective,
        validation=validation,
        folder=folder,
        on_step=lambda step, values: log.append({"step": step, **values}),
        **changes,
    )
    return Trained(model, outcome, log)


def run(*, model=None, data=22, validation=None, objective="ce", **changes):
    """Run the loop itself, with what ``ng.train`` does not offer."""
    best, score = changes.pop("best", None), changes.pop("score", None)
    around = {name: changes.pop(name) for name in ("folder", "logs", "on_step") if name in changes}
    asked = python_run(objective, Train(**SETTINGS | changes))
    asked = replace(asked, best=best or asked.best)
    task = ObjectiveTask(model or tiny(), None, rows(data), asked, validation=validation, score=score)
    return loop.run(task, task.settings, HERE, loop.Around(**around))


def assert_same_training(one, other, names=TERMS, tolerance=1e-4):
    assert_same_weights(one.model.state_dict(), other.model.state_dict())
    assert_same_log(one.log, other.log, names, tolerance)


def assert_same_log(one, other, names=TERMS, tolerance=1e-4):
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for here, there in zip(one, other, strict=True):
        for name in names:
            assert here.get(name) == pytest.approx(there.get(name), abs=tolerance), name


# One loop, in the dumbest Python


def dumbest(*, clip=1.0, weight_decay=0.01, schedule="linear", warmup=0, betas=(0.9, 0.999), epsilon=1e-8):
    """Six steps of 8 rows, each in one piece, with the classes of PyTorch and Transformers."""
    model, data, losses = tiny(), rows(22), []
    epochs = Epochs(lengths_of(data).sources, step=8, seed=3, grouped=True)
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decays, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1e-2, betas=betas, eps=epsilon)
    rates = transformers.get_scheduler(schedule, optimiser, warmup, 6)
    for step in [*epochs[0], *epochs[1]]:
        batch = padded(model)([data[row] for row in step])
        labels = batch.pop("labels")
        loss = JointLoss(OBJECTIVE)(model(**batch).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        optimiser.step()
        rates.step()
        model.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"clip": 0.1}, {"clip": 0.1}),
        ({"clip": 0}, {"clip": 0.0}),
        ({"weight_decay": 0.5}, {"weight_decay": 0.5}),
        ({"warmup": 3, "schedule": "cosine"}, {"warmup_steps": 3, "schedule": "cosine"}),
        ({"betas": (0.5, 0.6), "epsilon": 1e-3}, {"beta1": 0.5, "beta2": 0.6, "epsilon": 1e-3}),
    ],
    ids=str,
)
def test_a_training_is_that_of_the_dumbest_loop(theirs, ours):
    model, losses = dumbest(**theirs)
    got = trained(**ours)
    assert_same_weights(got.model.state_dict(), model.state_dict())
    assert [line["loss"] for line in got.log] == pytest.approx(losses, abs=1e-5)


# Any cut of a step


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("batch", "accumulate", "max_tokens"), [(4, 2, 0), (1, 8, 0), (8, 1, 30), (2, 4, 1), (4, 2, 10**6)]
)
def test_any_cut_of_a_step_ends_at_the_same_weights(batch, accumulate, max_tokens, grouped):
    reference = trained(group_by_length=grouped)
    got = trained(batch_size=batch, accumulate=accumulate, max_tokens=max_tokens, group_by_length=grouped)
    assert got.outcome.step == reference.outcome.step == 6
    assert_same_training(got, reference)


def test_one_long_row_may_exceed_the_budget_and_costs_no_step():
    got = trained(data=[*rows(21), {"input_ids": [5] * 40, "labels": [6] * 30}], max_tokens=1)
    assert got.outcome[:4] == (6, 6, True, 0)


def test_labels_that_do_not_count_are_not_counted():
    """Prompt tokens with the label −100 leave the denominators; a row without any label is no sequence."""
    blanked = [{**row, "labels": [-100, *row["labels"][1:]]} for row in rows(7)]
    blanked.append({"input_ids": [5, 6], "labels": [-100, -100]})
    (line,) = trained(data=blanked, max_steps=1, learning_rate=0.0, batch_size=4, accumulate=2).log
    model = tiny()
    batch = padded(model)(blanked)
    labels = batch.pop("labels")
    _, parts = JointLoss(OBJECTIVE).with_parts(model(**batch).logits[:7], labels[:7])
    for name, value in parts.items():
        assert line[name] == pytest.approx(value.item(), abs=1e-5), name


def test_the_log_has_means_of_the_steps_since_the_last_line():
    every, seldom = trained().log, trained(log_every=3).log
    logged = [line for line in seldom if "loss" in line]
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6], "every step is saved, so every step is logged"
    seldom = trained(log_every=3, save_every=100).log
    logged = [line for line in seldom if "loss" in line]
    assert [line["step"] for line in seldom] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in logged] == [1, 3, 6]
    for line, steps in zip(logged, ([0], [1, 2], [3, 4, 5]), strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)"):
            assert line[name] == pytest.approx(sum(every[step][name] for step in steps) / len(steps), abs=1e-6)
        assert line["grad_norm"] == pytest.approx(every[steps[-1]]["grad_norm"], abs=1e-6)
        assert line["epoch"] == line["step"] / 3


def test_a_line_has_terms_diagnostics_and_costs():
    first = trained(objective="ce + 0.5*matches(2) + bag(2)", max_steps=1).log[0]
    assert first["loss"] == pytest.approx(first["ce"] + 0.5 * first["matches(2)"] + first["bag(2)"], abs=1e-5)
    assert {"matched/2", "placed/2", "confidence/2", "floor/bag(2)", "gradient/ce"} <= first.keys()
    assert first["docs_per_second"] > 0
    assert first["memory_gib"] > 0.01
    assert first["learning_rate"] == 1e-2
    assert sum(value for name, value in first.items() if name.startswith("gradient/")) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model": models.DECODER_ONLY["llama"], "data": [{"input_ids": [4, 5, 2], "labels": [-100, 5, 2]}]},
            "`input_ids` are the prompt alone",
        ),
        ({"data": [{"text": "no ids"}]}, "`input_ids` and `labels`"),
        ({"data": [{"input_ids": [4, 5, 2], "labels": [6, 7, 8, 2], "segments": [0, 0, 1, 1]}]}, "`segments`"),
        ({"data": []}, "there are no examples to train on"),
        ({"precision": "fp16"}, "fp16 needs a GPU"),
        ({"fsdp": True}, "fsdp needs several processes"),
        ({"best": "last", "early_stopping": 2}, "train.best is last"),
    ],
    ids=["whole rows", "no ids", "segments", "no examples", "fp16", "fsdp", "last"],
)
def test_what_cannot_be_trained_is_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        trained(**{name: made() if name == "model" else made for name, made in changes.items()})


@pytest.mark.parametrize(
    ("family", "layers"), [("bart", ["BartEncoderLayer", "BartDecoderLayer"]), ("llama", ["LlamaDecoderLayer"])]
)
def test_layers_are_those_of_encoder_and_decoder(family, layers):
    assert [type(layer).__name__ for layer in compiling.layers(models.tiny(family))] == layers


@pytest.mark.slow
@pytest.mark.parametrize("made", [tiny, lambda: models.tiny("llama")], ids=["bart", "llama"])
def test_layers_can_be_compiled(made):
    one, other = (trained(model=made(), compile=on, max_steps=3) for on in (True, False))
    assert_same_weights(one.model.state_dict(), other.model.state_dict(), 1e-4)
    assert all("_orig_mod" not in name for name in one.model.state_dict())


# In Python


def test_every_step_is_told_and_logged_ones_with_their_values(tmp_path):
    got = trained(save_every=4, log_every=100, max_steps=6)
    assert [line["step"] for line in got.log] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in got.log if "loss" in line] == [1, 4, 6]
    assert got.model.training


def test_settings_are_given_by_keyword_and_unknown_ones_refused():
    assert trained(max_steps=2).outcome.total == 2
    assert trained(epochs=1.0).outcome.total == 3
    assert ng.train(tiny(), None, rows(8), max_steps=1, batch_size=8, eval_every=0).total == 1
    with pytest.raises(TypeError, match=r"train has no setting 'learning'\. Did you mean 'learning_rate'\?"):
        trained(learning=1)


def test_a_warm_up_that_does_not_end_is_said_to_be_shortened(messages):
    run(warmup_steps=1000)
    assert messages == [
        "a warm-up of 1,000 steps does not end within this training of 6 steps, so it takes a tenth of them, 0. A "
        "share, such as train.warmup_steps=0.05, fits every length."
    ]


# Continuing


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_training_continues_in_the_middle_of_an_epoch_with_the_same_bits(tmp_path, dropout):
    def model():
        torch.manual_seed(0)
        return transformers.BartForConditionalGeneration(
            transformers.BartConfig(**models.BART | {"dropout": dropout, "num_hidden_layers": 1})
        )

    settings = {"data": 40, "clip": 0.5, "warmup_steps": 3, "schedule": "cosine"}
    whole = trained(tmp_path / "whole", model=model(), **settings)
    for step in (2, 5, 7):
        folder = tmp_path / str(step)
        folder.mkdir()
        (tmp_path / "whole" / f"checkpoint-{step}").rename(folder / f"checkpoint-{step}")
        again = trained(folder, model=model(), **settings)
        assert again.outcome[:4] == (10, 10, True, step)
        assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)
        assert_same_log(again.log, whole.log[step:], tolerance=0)


def test_other_devices_are_seeded_too(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    loop.seed_step(1, 2, 0)
    assert seeded == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loop.seed_step(1, 2, 0)
    assert seeded == [(1_000_003 + 2) * 4099]


def test_dropout_differs_from_step_to_step_and_with_the_seed():
    def losses(**changes):
        torch.manual_seed(0)
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**models.BART | {"dropout": 0.5}))
        made = trained(model=model, data=rows(1) * 8, learning_rate=0.0, max_steps=3, **changes)
        return [line["ce"] for line in made.log]

    first, second, third = losses()
    assert min(abs(first - second), abs(second - third), abs(first - third)) > 1e-3
    assert losses() == [first, second, third]
    assert losses(seed=4) != [first, second, third]


def test_a_finished_training_is_left_as_it_is(tmp_path):
    whole = trained(tmp_path)
    again = trained(tmp_path)
    assert again.outcome[:4] == (6, 6, True, 6)
    assert again.log == []
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)


def test_a_longer_training_continues_a_finished_one(tmp_path):
    trained(tmp_path, max_steps=4, schedule="constant_with_warmup")
    longer = trained(tmp_path, max_steps=6, schedule="constant_with_warmup")
    assert [line["step"] for line in longer.log] == [5, 6]
    assert_same_training(longer._replace(log=[]), trained(schedule="constant_with_warmup")._replace(log=[]))


def with_column(count=8, **columns):
    """Rows with one more column, whose first value is given."""
    return [row | {name: [value] * len(row["labels"]) for name, value in columns.items()} for row in rows(count)]


def last_changed(made, name, value):
    return [*made[:-1], made[-1] | {name: value}]


def dropping(p):
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**models.BART | {"dropout": p}))


def frozen(part):
    """A model one part of which is not trained."""
    model = dropping(0.1)
    model.get_parameter(f"model.encoder.layers.0.self_attn.{part}.weight").requires_grad_(False)
    return model


LARGE = rows(250)
COMPARED = rows_with_candidates(8)
COMPARED[-1] |= {"candidates": [[5, 6], [7]], "scores": [0.5, 0.25]}
VALIDATED = {"validation": rows(2), "eval_every": 1}
CHANGED = {
    "objective: .* → 'ce'": ({"objective": "ce + matches(2)"}, {"objective": "ce"}),
    "train.learning_rate: .* → 1e-05. Set it back.": ({}, {"learning_rate": 1e-5}),
    r"train.precision: 'auto' → 'bf16'. Set .*\n  precision of training: fp32 → bf16. This is made from": (
        {},
        {"precision": "bf16"},
    ),
    r"rows: 22 \(.*\) → 7 ": ({}, {"data": 7}),
    "rows: a late label": ({"data": LARGE}, {"data": last_changed(LARGE, "labels", [5, 5])}),
    "rows: weights": ({"data": with_column(weights=1.0)}, {"data": with_column(weights=0.5)}),
    "rows: lm_logp": ({"objective": "margin", "data": with_column(lm_logp=-1.0)}, {"data": with_column(lm_logp=-2.0)}),
    "rows: scores": ({"objective": RANKED, "data": COMPARED}, {"data": last_changed(COMPARED, "scores", [0.25, 0.5])}),
    "rows: candidates": (
        {"objective": RANKED, "data": COMPARED},
        {"data": last_changed(COMPARED, "candidates", [[5, 6], [8]])},
    ),
    "train.best: 'ce' → 'matches": (VALIDATED | {"objective": "ce + matches(2)"}, {"best": "matches(2)"}),
    "trained weights: ": ({"model": frozen("q_proj")}, {"model": frozen("k_proj")}),
    "validation rows: ": (VALIDATED, {"validation": rows(2, seed=2)}),
    r"config.dropout: 0.1 → 0.3. Give .*\n  dropout: \{.*'0.1'.* → ": (
        {"model": dropping(0.1)},
        {"model": dropping(0.3)},
    ),
}


@pytest.mark.parametrize("named", CHANGED)
def test_another_training_in_the_same_folder_is_refused(tmp_path, named, messages):
    first, changes = CHANGED[named]
    first = {"objective": "ce", "max_steps": 1} | first
    trained(tmp_path, **first)
    with pytest.raises(
        UserError, match=rf"have changed since it was started:\n  {named.partition(': ')[0]}"
    ) as refused:
        trained(tmp_path, **first | changes)
    assert "→" not in named or re.search(named, str(refused.value))
    assert str(refused.value).endswith("To train with the new ones, choose another folder.")
    again = first | {"model": None, "max_steps": 2, "log_every": 2, "keep": 1}
    if "model" in first:  # loaded, as a caller may do who has lost the first one
        again["model"] = type(first["model"]).from_pretrained(tmp_path / "checkpoint-1")
        for name, weight in first["model"].named_parameters():
            again["model"].get_parameter(name).requires_grad_(weight.requires_grad)
    assert trained(tmp_path, **again).outcome.continued_from == 1
    assert f"continuing {tmp_path} from step 1." in messages


def test_rows_are_the_same_as_lists_and_as_arrays(tmp_path):
    made = [{**row, "kind": None, "name": "é"} for row in with_column(weights=0.5)]
    given = {"objective": "ce"}
    trained(tmp_path, data=made, max_steps=1, **given)
    arrays = [row | {"input_ids": np.array(row["input_ids"]), "labels": torch.tensor(row["labels"])} for row in made]
    assert trained(tmp_path, data=arrays, max_steps=2, **given).outcome.continued_from == 1


def test_a_checkpoint_is_a_model_with_the_weights_of_its_step(tmp_path):
    got = trained(tmp_path)
    loaded = type(got.model).from_pretrained(tmp_path / "checkpoint-6", use_safetensors=True)
    assert_same_weights(loaded.state_dict(), got.model.state_dict(), 0)
    facts = [checkpoints.facts(tmp_path / f"checkpoint-{step}") for step in (5, 6)]
    assert [known["finished"] for known in facts] == [False, True]


def test_a_damaged_newest_checkpoint_is_left_out_and_replaced(tmp_path):
    """It must not count among those that are kept, or the others would be deleted in its favour."""
    whole = trained(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoint-6"]
    (tmp_path / "checkpoint-6" / "optimizer.pt").write_bytes(b"torn")
    (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-99")
    again = trained(tmp_path, keep=1)
    assert again.outcome.continued_from == 5
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]


def test_a_folder_of_a_hugging_face_trainer_is_left_alone(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match="checkpoint-3 was saved by a Hugging Face trainer"):
        trained(tmp_path)
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_after_a_step_that_is_saved(tmp_path, number):
    def interrupt(step, values):
        if step == 2:
            os.kill(os.getpid(), number)

    settings = Train(**SETTINGS | {"save_every": 100})
    outcome = ng.train(tiny(), None, rows(22), settings, objective=OBJECTIVE, folder=tmp_path, on_step=interrupt)
    assert outcome[:4] == (3, 6, False, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert not checkpoints.facts(tmp_path / "checkpoint-3")["finished"]
    again = trained(tmp_path)
    assert again.outcome[:4] == (6, 6, True, 3)
    assert_same_weights(again.model.state_dict(), trained().model.state_dict(), 0)


# Validation


def test_validation_has_exact_means_whatever_the_batch():
    for size in (7, 3, 2):
        got = trained(objective="matches(2)", validation=rows(7, seed=2), eval_every=6, eval_batch_size=size)
        evaluated = [line for line in got.log if "eval_loss" in line]
        assert [line["step"] for line in evaluated] == [6]
        batch = padded(got.model)(rows(7, seed=2))
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = ng.detach(got.model).eval()(**batch).logits
        _, parts = JointLoss("ce + matches(2)").with_parts(logits, labels)
        assert evaluated[0]["eval_ce"] == pytest.approx(parts["ce"].item(), abs=1e-5)
        assert evaluated[0]["eval_matches(2)"] == pytest.approx(parts["matches(2)"].item(), abs=1e-5)
        assert evaluated[0]["eval_loss"] == pytest.approx(evaluated[0]["eval_matches(2)"], abs=1e-6)


def test_validation_changes_no_training():
    quiet, checked = trained(), trained(validation=rows(7, seed=2), eval_every=2)
    assert [line["step"] for line in checked.log if "eval_ce" in line] == [2, 4, 6]
    assert_same_weights(checked.model.state_dict(), quiet.model.state_dict(), 0)


@pytest.mark.parametrize(("schedule", "ce"), [("", 1), ("@until(0.5)", 0)])
def test_validation_has_the_final_weights_of_scheduled_terms(schedule, ce):
    objective = f"ce{schedule} + 0.5*matches(2)@ramp(0.2,0.6)"
    got = trained(objective=objective, validation=rows(7, seed=2), eval_every=1, max_steps=2)
    for line in got.log:
        assert line["eval_loss"] == pytest.approx(ce * line["eval_ce"] + 0.5 * line["eval_matches(2)"], abs=1e-4)


@pytest.mark.parametrize("stopped", [2, 3, 4])
def test_a_training_that_was_killed_switches_objectives_where_it_would_have(tmp_path, stopped):
    objective = "ce(smoothing=0.1)@until(0.5) + matches(2)@from(0.5)"
    whole, alone = trained(objective=objective), trained(objective="ce(smoothing=0.1) + 0*matches(2)")
    assert [line["weight/matches(2)"] for line in whole.log] == [0, 0, 0, 1, 1, 1]
    for line, other in zip(whole.log[:4], alone.log[:4], strict=True):
        name = "ce(smoothing=0.1)" if line["step"] <= 3 else "matches(2)"
        assert line["loss"] == line[name] == other[name]
    assert whole.log[4]["ce"] != alone.log[4]["ce"]
    trained(tmp_path, objective=objective)
    for path in tmp_path.iterdir():
        if checkpoints.step(path) > stopped:
            shutil.rmtree(path)
    again = trained(tmp_path, objective=objective)
    assert again.outcome.continued_from == stopped
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)


def validated(monkeypatch, folder, values, *, higher=False, **changes):
    """Steps that were saved, when validations have these values; the outcome."""
    found = iter(values)
    best = Best("bleu", "bleu", higher=True) if higher else Best("ce")
    monkeypatch.setattr(objective_task, "terms_on", lambda *_: {"eval_loss": 0.0, f"eval_{best.name}": next(found)})
    settings = {"max_steps": len(values), "eval_every": 1, "save_every": 1000} | changes
    outcome = run(folder=folder, validation=rows(1), best=best, **settings)
    return sorted(map(checkpoints.step, folder.iterdir())), outcome


@pytest.mark.parametrize(
    ("values", "higher", "saved", "best"),
    [
        ([3.0, 2.0, 2.0, 2.5, 1.0, 1.5], False, [1, 2, 5, 6], 5),
        ([3.0, 2.0, 2.0, 2.5, 4.0, 1.5], True, [1, 5, 6], 5),
        ([3.0, math.nan, 2.0, 9.0], False, [1, 3, 4], 3),
        ([math.nan, 2.0, 3.0], False, [2, 3], 2),
        ([math.nan, 2.0, 3.0], True, [2, 3], 3),
    ],
)
def test_each_new_best_is_saved_and_the_last_step(tmp_path, monkeypatch, values, higher, saved, best):
    steps, outcome = validated(monkeypatch, tmp_path, values, higher=higher)
    assert steps == saved
    assert (outcome.state.best_step, outcome.state.best) == (best, values[best - 1])
    facts = checkpoints.facts(tmp_path / f"checkpoint-{saved[-1]}")
    assert (facts["best_step"], facts["best"], facts["finished"]) == (best, values[best - 1], True)


def test_the_best_is_kept_among_newer_ones(tmp_path, monkeypatch):
    steps, _ = validated(monkeypatch, tmp_path, [3.0, 1.0, 2.0, 2.0, 2.0], keep=2, save_every=1)
    assert steps == [2, 4, 5]


def test_a_validation_without_the_score_is_no_best(tmp_path, monkeypatch):
    monkeypatch.setattr(objective_task, "terms_on", lambda *_: {"eval_loss": 0.0})
    outcome = run(folder=tmp_path, validation=rows(1), best=Best("ce"), eval_every=1)
    assert outcome.state.best is None
    assert outcome.state.best_step is None


def test_a_score_of_generated_texts_is_logged_and_selects(tmp_path):
    scores, lines = iter([1.0, 5.0, 2.0]), []
    outcome = run(
        folder=tmp_path,
        validation=rows(3),
        best=Best("bleu", "bleu", higher=True),
        score=lambda model: {"bleu": next(scores), "generation_runtime": 0.5},
        eval_every=2,
        save_every=100,
        logs=[lambda line, step: lines.append((step, dict(line)))],
    )
    assert outcome.state.best_step == 4
    assert [(step, line["eval_bleu"]) for step, line in lines if "eval_loss" in line] == [(2, 1.0), (4, 5.0), (6, 2.0)]


@pytest.mark.parametrize(
    ("values", "higher", "every", "ends"),
    [
        ([3.0, 2.0, 2.0, 2.5, 1.0, 1.0], False, 1, 4),
        ([3.0, 2.0, 2.0, 1.0, 1.0, 0.5], False, 1, None),
        ([3.0, 2.0, 2.5, 4.0, 4.0, 4.0], True, 1, 3),
        ([2.0, math.nan, math.nan, 1.0], False, 1, 3),
        ([3.0, 3.0, 3.0], False, 2, 6),
    ],
)
def test_training_ends_after_two_validations_without_a_new_best(tmp_path, monkeypatch, values, higher, every, ends):
    settings = {"early_stopping": 2, "eval_every": every, "max_steps": every * len(values) + 1}
    steps, outcome = validated(monkeypatch, tmp_path, [*values, 9.0], higher=higher, **settings)
    assert outcome.finished
    assert outcome.state.ended_early is (ends is not None)
    assert outcome.step == steps[-1] == (ends or settings["max_steps"])
    assert checkpoints.facts(tmp_path / f"checkpoint-{steps[-1]}")["finished"]


def test_a_training_that_ended_early_is_not_continued(tmp_path):
    settings = {"validation": rows(3), "eval_every": 1, "early_stopping": 1, "learning_rate": 0.0}
    first, again = (trained(tmp_path, **settings) for _ in range(2))
    assert first.outcome[:4] == (2, 6, True, 0)
    assert again.outcome[:4] == (2, 6, True, 2)
    assert again.log == []


def test_without_early_stopping_no_number_of_validations_ends_it(tmp_path, monkeypatch):
    _, outcome = validated(monkeypatch, tmp_path, [1.0] + [2.0] * 8)
    assert not outcome.state.ended_early
    assert outcome.step == 9


def test_python_selects_the_best_by_the_term_of_the_settings(tmp_path):
    got = trained(tmp_path, validation=rows(5), eval_every=1, best="matches(2)")
    values = {line["step"]: line["eval_matches(2)"] for line in got.log}
    assert got.outcome.state.best == min(values.values()) == values[got.outcome.state.best_step]
    with pytest.raises(UserError, match=r"'rouge2' is not a term of .* Choose one of loss, ce, matches"):
        trained(best="rouge2")
    with pytest.raises(UserError, match=r"'rank' is not a term .* loss, ce, last\."):
        trained(objective="ce + rank", best="rank")


# Divergence


def test_a_loss_that_is_no_number_ends_training_before_it_is_saved(tmp_path):
    with pytest.raises(loop.Diverged, match=r"NaN or infinite at step \d. Lower train.learning_rate"):
        run(folder=tmp_path, learning_rate=1e38)
    for path in tmp_path.glob("*/model.safetensors"):
        assert checkpoints.step(path.parent) == 1, "the loss of the first step was finite"


def test_a_validation_that_is_no_number_ends_training(tmp_path, monkeypatch):
    monkeypatch.setattr(objective_task, "terms_on", lambda *_: {"eval_loss": math.inf, "eval_ce": math.inf})
    with pytest.raises(loop.Diverged, match="at step 2"):
        run(folder=tmp_path, validation=rows(1), eval_every=2, save_every=2)
    assert list(tmp_path.iterdir()) == []


def test_fp16_tolerates_two_lines_in_a_row():
    log = SimpleNamespace(broken=0)
    for loss in (math.inf, math.nan, 1.0, math.inf, math.inf):
        loop.raise_if_diverged(loss, 5, log, fp16=True)
    with pytest.raises(loop.Diverged):
        loop.raise_if_diverged(math.nan, 6, log, fp16=True)
    log = SimpleNamespace(broken=0)
    loop.raise_if_diverged(1.0, 5, log, fp16=False)
    with pytest.raises(loop.Diverged):
        loop.raise_if_diverged(-math.inf, 6, log, fp16=False)


# fp16 without a GPU


class Scaler:
    """Scales by 1, and finds infinite gradients in the third step, as ``torch.amp.GradScaler`` does."""

    def __init__(self, device):
        self.value, self.calls, self.loaded = 2.0**16, 0, None

    def is_enabled(self):
        return True

    def scale(self, loss):
        return loss

    def unscale_(self, optimiser):
        self.calls += 1

    def step(self, optimiser):
        if self.calls != 3:
            optimiser.step()

    def update(self):
        self.value *= 0.5 if self.calls == 3 else 2.0 if self.calls == 5 else 1.0

    def get_scale(self):
        return self.value

    def _get_growth_tracker(self):
        return 7

    def state_dict(self):
        return {"scale": self.value, "growth_factor": 2.0, "_growth_tracker": 0}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.fixture
def scalers(monkeypatch):
    """What stands in for scalers of fp16; computing is in fp32."""
    made = []
    monkeypatch.setattr(Run, "on", lambda *_: "fp16")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: made.append(Scaler(device)) or made[-1])
    return made


def test_a_skipped_step_does_not_advance_the_learning_rate(tmp_path, scalers):
    got = trained(tmp_path)
    rates = [line["learning_rate"] for line in got.log]
    assert rates == pytest.approx([1e-2 * (6 - done) / 6 for done in (0, 1, 2, 2, 3, 4)])
    assert (got.outcome.state.step, got.outcome.state.updates) == (6, 5)


def test_a_skipped_step_is_not_taken_into_the_moving_average(tmp_path, scalers):
    trained(tmp_path, ema=0.5)
    first, second, third = (torch.load(tmp_path / f"checkpoint-{step}" / checkpoints.EMA) for step in (1, 2, 3))
    assert not all(map(torch.equal, first, second))
    assert all(map(torch.equal, second, third))


def test_a_continued_training_has_the_scale_and_the_updates_of_its_checkpoint(tmp_path, scalers):
    trained(tmp_path, max_steps=3)
    again = trained(tmp_path)
    assert scalers[1].loaded == {"scale": 2.0**15, "growth_factor": 2.0, "_growth_tracker": 7}
    assert again.log[0]["learning_rate"] == pytest.approx(1e-2 * 4 / 6)


# Several processes


def work(folder, *, candidates=False, **changes):
    """What one process of two does: train, and save the weights and the log in the first."""
    train = on_candidates if candidates else trained
    got = train(Path(folder) / "checkpoints", validation=rows(7, seed=2), **changes)
    kinds = [type(parameter).__name__ for parameter in got.model.parameters()]
    if start_processes().rank == 0:
        content = {"log": got.log, "kinds": kinds, "outcome": got.outcome[:4]}
        Path(folder, "found.json").write_text(json.dumps(content))


VALIDATED = (*TERMS, "eval_loss", "eval_ce", "eval_matches(2)", "epoch", "learning_rate")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "accumulate", "max_tokens", "fsdp"),
    [(8, 1, 0, False), (4, 2, 0, False), (8, 1, 25, False), (8, 1, 0, True), (8, 1, 25, True)],
)
def test_two_processes_end_at_the_weights_of_one(tmp_path, batch, accumulate, max_tokens, fsdp):
    """22 rows: the last step of an epoch has 6, of which each process gets 3."""
    cut = {"batch_size": batch, "accumulate": accumulate, "max_tokens": max_tokens, "fsdp": fsdp}
    weights, found = in_two_processes(tmp_path / "two", __name__, eval_every=3, **cut)
    alone = trained(validation=rows(7, seed=2), eval_every=3)
    assert_same_weights(weights, alone.model.state_dict())
    assert_same_log(found["log"], alone.log, VALIDATED)
    assert set(found["kinds"]) == {"DTensor" if fsdp else "Parameter"}


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_without_enough_rows_for_both_end_at_the_weights_of_one(tmp_path, fsdp):
    weights, found = in_two_processes(tmp_path, __name__, data=17, eval_every=0, fsdp=fsdp)  # the last step has one row
    alone = trained(data=17)
    assert_same_weights(weights, alone.model.state_dict())
    assert_same_log(found["log"], alone.log)


@pytest.mark.slow
def test_sharded_processes_save_a_model_that_loads_and_continue_exactly(tmp_path):
    weights, found = in_two_processes(tmp_path, __name__, fsdp=True, eval_every=3)
    loaded = type(tiny()).from_pretrained(tmp_path / "checkpoints" / "checkpoint-6", use_safetensors=True)
    assert_same_weights(loaded.state_dict(), trained().model.state_dict())
    for step in (5, 6):
        checkpoints.delete(tmp_path / "checkpoints" / f"checkpoint-{step}")
    again, continued = in_two_processes(tmp_path, __name__, fsdp=True, eval_every=3)
    assert continued["outcome"] == [6, 6, True, 4]
    assert_same_weights(again, weights, 0)
    assert_same_log(continued["log"], found["log"][4:], VALIDATED, 0)


@pytest.mark.slow
def test_a_training_of_two_processes_continues_in_one(tmp_path):
    in_two_processes(tmp_path, __name__, eval_every=0)
    for step in (4, 5, 6):
        checkpoints.delete(tmp_path / "checkpoints" / f"checkpoint-{step}")
    again = trained(tmp_path / "checkpoints", validation=rows(7, seed=2))
    assert again.outcome.continued_from == 3
    assert_same_weights(again.model.state_dict(), trained().model.state_dict())


@pytest.mark.parametrize(
    ("processes", "sharded", "times"), [(1, False, 0), (2, False, 1), (2, True, 0)], ids=["one", "two", "sharded"]
)
def test_gradients_are_averaged_once_a_step_and_only_for_others(monkeypatch, processes, sharded, times):
    averaged = []
    monkeypatch.setattr(running, "average_gradients", lambda *_: averaged.append(1))
    runner = StepRunner(
        tiny(),
        lambda batch, counts: torch.ones(3),
        device=HERE.device,
        processes=processes,
        sharded=sharded,
        why_not_captured="this is a test",
    )
    values = runner.run(Step([{"input_ids": torch.ones(1, 2)}] * 3, torch.ones(2)))
    assert values.tolist() == [3.0] * 3
    assert len(averaged) == times


# Captured steps


class WithoutGraphs(CapturedStep):
    """A captured step on a CPU: everything but the graph, instead of which the function runs again."""

    made: list = []  # noqa: RUF012, emptied by the fixture

    def __init__(self, *args):
        super().__init__(*args)
        self.made.append(self)

    def _reset(self):
        self.gradients, self.graphs, self.modules = None, {}, list(self.model.modules())
        self.state, self.captures = _state(self.modules), getattr(self, "captures", 0)

    def _capture(self, key, batch):
        held = {name: value.clone() for name, value in batch.items()}
        self._warm_up(held)
        self.captures += 1
        result = torch.empty(1 + len(attached_loss(self.model).parts))

        def replay():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(JointLoss, "refresh_weights", bool)  # a graph runs no Python
                result.copy_(self._run(held))

        self.graphs[key] = SimpleNamespace(replay=replay), held, result


@pytest.fixture
def without_graphs(monkeypatch):
    """Captured steps on a CPU, as they are made."""
    monkeypatch.setattr(WithoutGraphs, "made", [])
    monkeypatch.setattr(running, "CapturedStep", WithoutGraphs)
    monkeypatch.setattr(planning, "why_not_captured", lambda *_, **__: "")
    return WithoutGraphs.made


@pytest.mark.parametrize("max_tokens", [0, 40])
def test_what_surrounds_a_graph_trains_like_an_eager_step(request, max_tokens):
    """Gradient buffers, warm-up, copies of inputs, terms in the log and clipping; graphs themselves need a GPU."""
    settings = {"max_tokens": max_tokens, "clip": 0.5}
    eager = trained(**settings)
    made = request.getfixturevalue("without_graphs")
    captured = trained(**settings)
    assert len(made) == 1
    assert made[0].graphs
    names = eager.log[0].keys() - {"docs_per_second", "memory_gib"}
    assert len(names) > 10
    assert_same_weights(captured.model.state_dict(), eager.model.state_dict(), 1e-6)
    assert_same_log(captured.log, eager.log, names, 1e-5)


@pytest.mark.parametrize(
    "objective", ["ce + 0.5*distill(temperature=2)", "ce + keep", "ce + matches(2) + keep:reverse"]
)
def test_a_teacher_is_read_in_captured_steps(request, objective):
    torch.manual_seed(7)
    teacher = {} if "keep" in objective else {"teacher": transformers.BartForConditionalGeneration(tiny().config)}
    eager = trained(objective=objective, **teacher)
    made = request.getfixturevalue("without_graphs")
    captured = trained(objective=objective, **teacher)
    assert made[0].graphs
    name = next(name for name in eager.log[-1] if name.startswith(("distill", "keep")))
    assert eager.log[-1][name] > 1e-6
    assert_same_weights(captured.model.state_dict(), eager.model.state_dict(), 1e-6)
    assert_same_log(captured.log, eager.log, ("loss", "ce", name), 1e-5)


def test_a_schedule_changes_weights_in_captured_steps_without_capturing_again(without_graphs):
    got = trained(objective="ce + 4*matches(2)@ramp(0,1)")
    weights = [line["weight/matches(2)"] for line in got.log]
    assert weights == pytest.approx([4 * step / 6 for step in range(6)])
    for line in got.log:
        assert line["loss"] == pytest.approx(line["ce"] + line["weight/matches(2)"] * line["matches(2)"], abs=1e-4)
    assert without_graphs[0].captures == len(without_graphs[0].graphs)


def test_a_term_ends_in_captured_steps_as_in_others(request):
    objective = "ce@until(0.5) + matches(2)@from(0.5)"
    eager = trained(objective=objective)
    request.getfixturevalue("without_graphs")
    captured = trained(objective=objective)
    assert_same_log(captured.log, eager.log, ("loss", "ce", "matches(2)", "weight/ce"), 1e-5)
    assert_same_weights(captured.model.state_dict(), eager.model.state_dict(), 1e-6)


def test_weights_that_are_thawed_or_moved_are_captured_again(without_graphs):
    model = trained(max_steps=2).model
    (captured,) = without_graphs
    batch = {name: value.clone() for name, value in captured.held(next(iter(captured.graphs.values()))[1]).items()}
    before = captured.gradients
    model.train()
    captured.begin([batch])
    assert captured.gradients is before
    model.model.encoder.layers[0].fc1.weight.requires_grad_(False)
    captured.begin([batch])
    assert captured.gradients is not before
    assert len(captured.gradients.parameters) == len(before.parameters) - 1
    before = captured.gradients
    model.model.encoder.layers[0].fc2.weight.data = model.model.encoder.layers[0].fc2.weight.data.clone()
    captured.begin([batch])
    assert captured.gradients is not before


def test_what_cannot_be_captured_is_said_once_and_trained_without(monkeypatch, without_graphs, messages):
    def fail(self, key, batch):
        raise running.CannotCapture("layer drop chooses layers on the host")

    monkeypatch.setattr(WithoutGraphs, "_capture", fail)
    model = tiny()
    run(model=model, objective=OBJECTIVE)
    assert messages == [
        "steps are not captured as CUDA graphs: layer drop chooses layers on the host. Training is the same, but slower."
    ]
    assert_same_weights(model.state_dict(), trained().model.state_dict(), 0)


def test_auto_decides_by_the_whole_training(without_graphs, monkeypatch):
    """Twins count twice, and a continued training decides as the one that it continues."""
    seen = []
    monkeypatch.setattr(compiling, "decide", lambda *_, **facts: seen.append(facts) or False)
    for changes in ({}, {"twins": True}, {"max_steps": 12}, {"batch_size": 16, "max_steps": 6}):
        run(model=models.tiny("llama"), **changes)
    each = [facts["seconds"] for facts in seen]
    assert each[0] > 0
    assert each == pytest.approx([each[0], 2 * each[0], 2 * each[0], 2 * each[0]])
    assert seen[0] | {"seconds": 0} == {"why_not_captured": "", "writes": False, "seconds": 0}


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cpu", "there is no NVIDIA GPU"),
        ({"capture": False}, "cuda", "train.capture is off"),
        ({"fsdp": True}, "cuda", "gathers parameters"),
        ({"gradient_checkpointing": True}, "cuda", "computes activations again"),
        ({}, "cuda", ""),
    ],
    ids=str,
)
def test_a_reason_not_to_capture_is_given(changes, device, reason):
    found = planning.why_not_captured(Train(**changes), torch.device(device))
    assert bool(found) is bool(reason)
    assert reason in found


@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({"fsdp": True}, "cuda", True),
        ({"gradient_checkpointing": True}, "cuda", True),
        ({"gradient_checkpointing": True, "capture": False}, "cuda", False),
        ({"gradient_checkpointing": True}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_the_reason_is_said_where_capturing_was_wanted(changes, device, said, messages):
    planning.why_not_captured(Train(**changes), torch.device(device))
    assert len(messages) == said
    assert all(remark.startswith("steps are not captured as CUDA graphs: ") for remark in messages)


@pytest.mark.parametrize("most", [0.01, 1.0, 1e6])
def test_gradients_in_a_buffer_are_clipped_like_separate_ones(most):
    one, other = tiny(), tiny()
    kept = Gradients([p for p in one.parameters() if p.requires_grad])
    kept.begin()
    for model in (one, other):
        model(**padded(model)(rows(3))).loss.backward()
    assert kept.clip(most).item() == pytest.approx(
        torch.nn.utils.clip_grad_norm_(other.parameters(), most).item(), rel=1e-5
    )
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, atol=1e-7, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_gradients_of_small_parameters_are_added_to_their_buffer_at_once(monkeypatch):
    """Also those of a second micro-batch; large ones are added one by one, and both to the same numbers."""
    model, expected = tiny(), tiny()
    sizes = sorted({p.numel() for p in model.parameters()})
    monkeypatch.setattr(captured, "SMALL", sizes[len(sizes) // 2])
    kept = Gradients([p for p in model.parameters() if p.requires_grad])
    assert 0 < len(kept.small) < len(kept.parameters)
    added = []
    add = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda *lists: added.append(len(lists[0])) or add(*lists))
    kept.begin()
    for number in (3, 2):
        batch = padded(model)(rows(number))
        with kept.small_at_once():
            assert all(parameter.grad is None for parameter, _ in kept.small)
            model(**batch).loss.backward()
        expected(**batch).loss.backward()
    assert added == [len(kept.small)] * 2
    for parameter, view, other in zip(kept.parameters, kept.views, expected.parameters(), strict=True):
        assert parameter.grad is view
        assert torch.equal(view, other.grad)


@pytest.mark.parametrize(
    ("steps", "captures", "most"), [(LONG, True, FINE), (LONG - 1, True, COARSE), (LONG, False, COARSE)]
)
def test_a_long_training_with_graphs_pads_to_more_lengths(steps, captures, most):
    model = ng.attach(tiny(), OBJECTIVE)
    data = [{"input_ids": [5] * (8 * row), "labels": [6] * (8 * row)} for row in range(1, 31)]
    settings = Train(batch_size=1, accumulate=1, max_steps=steps, max_tokens=4096)
    task = ObjectiveTask(model, None, data, python_run(OBJECTIVE, settings))
    task.here = Processes(0, 1, torch.device("cuda"))  # where nothing runs: plans are made on the host
    task.joined, task.lengths, task.why_not_captured = "", lengths_of(data), "" if captures else "this is a test"
    made = task.plan()
    assert (len(made.plan.grid.sources), len(made.plan.grid.targets)) == most


# Candidates


COMPARED = ("loss", "ce", "matches(2)", "rank(margin=0.1,alpha=1)", "prefer(beta=1)", "grad_norm")


def on_candidates(folder=None, **changes):
    return trained(folder, data=rows_with_candidates(22), objective=RANKED, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "accumulate", "max_tokens"), [(4, 2, 0), (1, 8, 0), (8, 1, 120), (2, 4, 1), (4, 2, 10**6)]
)
def test_any_cut_of_a_step_with_candidates_ends_at_the_same_weights(batch, accumulate, max_tokens):
    got = on_candidates(batch_size=batch, accumulate=accumulate, max_tokens=max_tokens)
    assert got.log[0]["rank(margin=0.1,alpha=1)"] > 0
    assert_same_training(got, on_candidates(), COMPARED, 2e-4)


def test_validation_leaves_out_terms_that_compare_candidates():
    got = on_candidates(validation=rows(7, seed=2), eval_every=3, max_steps=3)
    last = got.log[-1]
    assert last["eval_loss"] == pytest.approx(last["eval_ce"] + last["eval_matches(2)"])
    assert not any(name.startswith("eval_") and ("rank" in name or "prefer" in name) for name in last)


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "fsdp"), [(0, False), (100, False), (100, True)])
def test_two_processes_on_candidates_end_at_the_weights_of_one(tmp_path, max_tokens, fsdp):
    weights, found = in_two_processes(
        tmp_path, __name__, candidates=True, max_tokens=max_tokens, fsdp=fsdp, eval_every=3
    )
    alone = on_candidates(validation=rows(7, seed=2), eval_every=3)
    assert_same_weights(weights, alone.model.state_dict())
    assert_same_log(found["log"], alone.log, (*COMPARED, "eval_loss", "eval_ce", "eval_matches(2)"), 2e-4)


@pytest.mark.slow
def test_what_surrounds_a_graph_trains_on_candidates_like_an_eager_step(request):
    eager = on_candidates(max_tokens=150, clip=0.5)
    made = request.getfixturevalue("without_graphs")
    captured = on_candidates(max_tokens=150, clip=0.5)
    assert made[0].graphs
    assert_same_training(captured, eager, COMPARED)
