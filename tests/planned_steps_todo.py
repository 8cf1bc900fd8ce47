"""Planned, captured and sharded steps, written for ``NgramTrainer``, to be rewritten for the loop. Not collected."""

from types import SimpleNamespace

import models
import pytest
import torch
from ngramloss.hf.planned import PlannedSteps
from test_candidate_training import assert_same_training
from test_candidate_training import trained as trained_on_candidates
from test_one_of_two_processes import be_one_of_two
from test_packing import arguments as packing_arguments
from test_trainer import OBJECTIVE, arguments, assert_same_weights, in_two_processes, padded, rows, tiny, trained, whole  # noqa: F401

from ngramloss import NgramTrainer
from ngramloss.errors import UserError
from ngramloss.gpu.captured import CapturedStep, _state
from ngramloss.hf import planned as planned_steps
from ngramloss.hf.attach import attached_loss

# Training


def planned(folder, *, max_tokens=0, ours=(), **changes):
    return trained(folder, ours={"max_tokens": max_tokens, **dict(ours)}, **changes)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize(
    ("batch", "accumulate", "max_tokens"), [(8, 1, 0), (4, 2, 0), (1, 8, 0), (8, 1, 30), (2, 4, 1), (4, 2, 10**6)]
)
def test_any_cut_of_planned_steps_ends_at_the_same_weights(tmp_path, batch, accumulate, max_tokens, strategy):
    reference = planned(tmp_path / "one", train_sampling_strategy=strategy)
    got = planned(
        tmp_path / "other",
        max_tokens=max_tokens,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy=strategy,
    )
    assert got.state.global_step == reference.state.global_step == 6
    assert_same_weights(got.model.state_dict(), reference.model.state_dict())
    for here, there in zip(got.state.log_history[:-1], reference.state.log_history[:-1], strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)", "grad_norm"):
            assert here[name] == pytest.approx(there[name], abs=1e-4), name


def test_planned_steps_train_like_those_of_a_loader(tmp_path, whole):  # noqa: F811
    expected, log = whole["group_by_length"]
    got = planned(tmp_path, train_sampling_strategy="group_by_length")
    assert_same_weights(got.model.state_dict(), expected)
    assert got.state.log_history[0]["loss"] == pytest.approx(log[0]["loss"], abs=1e-5)


def test_one_long_row_may_exceed_the_budget_and_padding_costs_no_step(tmp_path):
    got = planned(tmp_path, max_tokens=1, per_device_train_batch_size=8)
    assert got.state.global_step == 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": lambda: models.DECODER_ONLY["llama"]()}, "encoder-decoders only"),
        ({"data": [{"text": "no ids"}]}, "`input_ids` and `labels`"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        NgramTrainer(
            changes.get("model", tiny)(),
            arguments(tmp_path),
            objective=OBJECTIVE,
            max_tokens=0,
            train_dataset=changes.get("data", rows(4)),
        ).train()


def test_labels_that_do_not_count_are_not_counted(tmp_path):
    """Prompt tokens with the label −100 leave the denominators, as in any other batch."""
    blanked = [{**row, "labels": [-100, *row["labels"][1:]]} for row in rows(22)]
    logs = [
        trained(tmp_path / name, data=blanked, ours=ours, train_sampling_strategy="group_by_length").state.log_history
        for name, ours in (("planned", {"max_tokens": 0}), ("loader", {}))
    ]
    for one, other in zip(*logs, strict=True):
        for name in ("ce", "matches(2)", "grad_norm") if "ce" in one else ():
            assert one[name] == pytest.approx(other[name], abs=1e-4), name


def test_a_planned_training_goes_on_in_the_middle_of_an_epoch(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "data": 40}
    whole_run = planned(tmp_path, **settings)
    for checkpoint in (2, 5, 7):
        again = planned(tmp_path, resume=str(tmp_path / f"checkpoint-{checkpoint}"), **settings)
        assert again.state.global_step == whole_run.state.global_step == 10
        assert_same_weights(again.model.state_dict(), whole_run.model.state_dict(), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulate", "max_tokens"), [(4, 1, 0), (2, 2, 0), (4, 1, 25)])
def test_two_processes_with_planned_steps_end_at_the_weights_of_one(tmp_path, batch, accumulate, max_tokens):
    """22 rows: the last step of an epoch has 6, of which each process gets 3; no model is wrapped."""
    weights, found = in_two_processes(
        tmp_path / "two",
        ours={"max_tokens": max_tokens},
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
    )
    alone = planned(tmp_path / "one", train_sampling_strategy="group_by_length", eval_strategy="epoch")
    assert_same_weights(weights, alone.model.state_dict())
    for here, there in zip(found["log"], alone.state.log_history, strict=True):
        for name in ("loss", "ce", "matches(2)", "grad_norm", "eval_ce") if "epoch" in here else ():
            assert (name in here) == (name in there)
            if name in here:
                assert here[name] == pytest.approx(there[name], abs=1e-4), name


@pytest.mark.slow
def test_encoder_and_decoder_can_be_compiled(tmp_path):
    one, other = (planned(tmp_path / str(on), ours={"compile": on}, max_steps=3) for on in (True, False))
    assert_same_weights(one.model.state_dict(), other.model.state_dict(), 1e-4)
    assert all("_orig_mod" not in name for name in one.model.state_dict())


@pytest.mark.parametrize("max_tokens", [0, 40])
def test_what_surrounds_a_graph_trains_like_an_eager_step(tmp_path, monkeypatch, max_tokens):
    """Gradient buffers, warm-up, copies of inputs, terms in the log and clipping; graphs themselves need a GPU."""
    settings = {"max_tokens": max_tokens, "train_sampling_strategy": "group_by_length", "max_grad_norm": 0.5}
    eager = planned(tmp_path / "eager", **settings)
    monkeypatch.setattr("ngramloss.hf.planned.CapturedStep", WithoutGraphs)
    monkeypatch.setattr(PlannedSteps, "_raise_unless_capturable", lambda self: None)
    captured = planned(tmp_path / "captured", **settings)
    assert captured.planned.captured is not None
    assert eager.planned.captured is None
    assert_same_weights(captured.model.state_dict(), eager.model.state_dict(), 1e-6)
    for here, there in zip(captured.state.log_history[:-1], eager.state.log_history[:-1], strict=True):
        for name in there.keys() - {"docs_per_second", "memory_gib"}:
            assert here[name] == pytest.approx(there[name], abs=1e-5), name


def test_a_schedule_changes_weights_in_captured_steps_without_capturing_again(tmp_path, monkeypatch):
    captures = []
    monkeypatch.setattr(
        WithoutGraphs,
        "_warm_up",
        lambda self, held, warm_up=WithoutGraphs._warm_up: (captures.append(1), warm_up(self, held)),
    )
    monkeypatch.setattr("ngramloss.hf.planned.CapturedStep", WithoutGraphs)
    monkeypatch.setattr(PlannedSteps, "_raise_unless_capturable", lambda self: None)
    made = planned(tmp_path, objective="ce + 4*matches(2)@ramp(0,1)", logging_steps=1)
    lines = [line for line in made.state.log_history if "ce" in line]
    weights = [line["weight/matches(2)"] for line in lines]
    assert weights == sorted(set(weights))
    for line in lines:
        assert line["loss"] == pytest.approx(line["ce"] + line["weight/matches(2)"] * line["matches(2)"], abs=1e-4)
    assert len(captures) == len(made.planned.captured.graphs)


def test_weights_that_are_thawed_or_moved_are_captured_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ngramloss.hf.planned.CapturedStep", WithoutGraphs)
    monkeypatch.setattr(PlannedSteps, "_raise_unless_capturable", lambda self: None)
    made = planned(tmp_path, max_steps=2)
    captured, model = made.planned.captured, made.model
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


# Graphs on a CPU


class WithoutGraphs(CapturedStep):
    """A captured step on a CPU: everything but the graph, instead of which the function runs again."""

    def _reset(self):
        self.gradients, self.graphs, self.modules = None, {}, list(self.model.modules())
        self.seen = _state(self.modules)

    def _capture(self, key, batch):
        held = {name: value.clone() for name, value in batch.items()}
        self._warm_up(held)
        result = torch.empty(1 + len(attached_loss(self.model).parts))
        graph = SimpleNamespace(replay=lambda: result.copy_(self.function(held)))
        self.graphs[key] = graph, held, result


# From test_candidate_training.py; there SPLITS also had (8, 1, 0), (4, 2, 0), (8, 1, 120), (2, 4, 1), (4, 2, 10**6) as
# rows, accumulation and max_tokens of test_any_split_of_a_step_ends_at_the_same_weights, and
# test_two_processes_end_at_the_weights_of_one had max_tokens 0 and 100, and FSDP.


@pytest.mark.slow
def test_what_surrounds_a_graph_trains_on_candidates_like_an_eager_step(tmp_path, monkeypatch):
    settings = {"train_sampling_strategy": "group_by_length", "max_grad_norm": 0.5, "planned": 150}
    eager = trained_on_candidates(tmp_path / "eager", **settings)
    monkeypatch.setattr("ngramloss.hf.planned.CapturedStep", WithoutGraphs)
    monkeypatch.setattr(PlannedSteps, "_raise_unless_capturable", lambda self: None)
    captured = trained_on_candidates(tmp_path / "captured", **settings)
    assert captured.planned.captured is not None
    assert_same_training(captured, eager)


# From test_packing.py


def test_planned_steps_refuse_rows_with_segments(tmp_path):
    rows = [{"input_ids": [4, 5, 2], "labels": [6, 7, 8, 2], "segments": [0, 0, 1, 1]}] * 4
    trainer = NgramTrainer(
        tiny("bart"), packing_arguments(tmp_path), objective=OBJECTIVE, train_dataset=rows, max_tokens=100
    )
    with pytest.raises(ValueError, match="max_tokens plans rows of one text each, and these have `segments`"):
        trainer.train()


# From test_one_of_two_processes.py; test_the_order_of_the_rows_is_that_of_data_seed_even_if_it_is_0 also had max_tokens=100


@pytest.mark.parametrize(("two", "times"), [(False, 0), (True, 1)])
def test_planned_steps_average_gradients_once_and_only_for_others(tmp_path, monkeypatch, two, times):
    model, averaged = tiny(), []
    trainer = NgramTrainer(
        model, arguments(tmp_path), objective="ce", train_dataset=rows(22), data_collator=padded(model), max_tokens=40
    )
    step = next(iter(trainer.planned.loader()))
    assert len(step.batches) > 1
    if two:
        be_one_of_two(monkeypatch)
    monkeypatch.setattr(planned_steps.reduction, "average_gradients", lambda *_: averaged.append(1))
    trainer.planned.run(model, step, step.counts, eager=lambda *_: torch.zeros(()))
    assert len(averaged) == times


# From test_trainer.py


@pytest.mark.slow
def test_sharded_processes_train_alike_and_save_a_model_that_loads(tmp_path, whole):  # noqa: F811
    weights, found = in_two_processes(
        tmp_path / "two",
        per_device_train_batch_size=4,
        fsdp=True,
        fsdp_config={"version": 2},
        save=str(tmp_path / "saved"),
    )
    assert found["sharded"], "the parameters are not DTensors"
    expected, _ = whole["random"]
    assert_same_weights(weights, expected)
    loaded = type(tiny()).from_pretrained(tmp_path / "saved", use_safetensors=True)
    assert_same_weights(loaded.state_dict(), expected)
