"""Captured trainings, written for ``NgramTrainer(max_tokens=...)``, to be rewritten for the loop. Not collected."""

import os
from functools import partial
from pathlib import Path

import models
import pytest
import torch
import transformers as hf
from forks import fork_ranks
from test_captured import OBJECTIVE, bart, rows
from test_trainer import assert_same_weights

from ngramloss import NgramTrainer
from ngramloss.hf.attach import attached_loss, decoder_inputs
from ngramloss.steps.padding import Padder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def trainer(folder, model=None, *, data=96, objective=OBJECTIVE, say=print, kind=NgramTrainer, ours=(), **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "seed": 3,
        "disable_tqdm": True,
        "save_strategy": "no",
        "bf16": True,
        "train_sampling_strategy": "group_by_length",
        "logging_nan_inf_filter": False,
    }
    return kind(
        bart() if model is None else model,
        hf.Seq2SeqTrainingArguments(**settings | changes),
        objective=objective,
        train_dataset=rows(data) if isinstance(data, int) else data,
        say=say,
        **{"max_tokens": 0} | dict(ours),
    )


def trained(folder, *args, **kwargs):
    made = trainer(folder, *args, **kwargs)
    made.train(resume_from_checkpoint=kwargs.get("resume"))
    return made


def rows_with_candidates(count):
    """Up to four candidates of each source."""
    source, made = torch.Generator().manual_seed(9), rows(count)
    for index, row in enumerate(made):
        lengths = torch.randint(1, 24, (index % 5,), generator=source).tolist()
        row["candidates"] = [torch.randint(4, 40, (length,), generator=source).tolist() for length in lengths]
        row["gains"] = torch.rand(len(lengths), generator=source).tolist()
    return made


# Trainings


@pytest.mark.parametrize("changes", [{}, {"bf16": False}, {"bf16": False, "fp16": True}], ids=["bf16", "fp32", "fp16"])
def test_the_losses_of_a_captured_training_are_those_of_an_eager_one(tmp_path, changes):
    logs = {}
    for capture in (True, False):
        said = []
        made = trained(
            tmp_path / str(capture), max_steps=50, data=400, say=said.append, ours={"capture": capture}, **changes
        )
        logs[capture] = [line for line in made.state.log_history if "ce" in line]
        assert (made.planned.captured is not None) is capture, said
        assert not any("not captured" in line for line in said)
    for one, other in zip(logs[True], logs[False], strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)", "grad_norm"):
            assert one[name] == pytest.approx(other[name], abs=0.05 if name == "grad_norm" else 0.02), (
                one["step"],
                name,
            )
    assert logs[True][-1]["ce"] < logs[True][0]["ce"]


def test_captured_steps_compare_candidates_like_eager_ones(tmp_path):
    objective, rank = "ce + 10*rank(margin=0.1,alpha=1) + risk", "rank(margin=0.1,alpha=1)"
    logs = {}
    for capture in (True, False):
        said = []
        made = trained(
            tmp_path / str(capture),
            max_steps=30,
            data=rows_with_candidates(200),
            objective=objective,
            say=said.append,
            ours={"capture": capture},
        )
        logs[capture] = [line for line in made.state.log_history if "ce" in line]
        assert (made.planned.captured is not None) is capture, said
        assert not any("not captured" in line for line in said)
    for one, other in zip(logs[True], logs[False], strict=True):
        for name in ("loss", "ce", rank, "risk"):
            assert one[name] == pytest.approx(other[name], abs=0.05 if name == "loss" else 0.02), (one["step"], name)
    assert logs[True][-1][rank] < logs[True][0][rank]


def test_dropout_differs_from_step_to_step_and_is_the_same_in_a_second_run(tmp_path):
    one = trained(tmp_path / "1", bart(dropout=0.5), data=16, learning_rate=0.0)  # every step has the same rows
    two = trained(tmp_path / "2", bart(dropout=0.5), data=16, learning_rate=0.0)
    losses = [[line["loss"] for line in made.state.log_history if "loss" in line] for made in (one, two)]
    assert one.planned.captured is not None
    assert len(set(losses[0])) == 12
    assert losses[0] == losses[1]
    still = trained(tmp_path / "3", bart(), data=16, learning_rate=0.0)
    assert len({line["loss"] for line in still.state.log_history if "loss" in line}) == 1


def test_a_continued_captured_training_ends_at_the_same_weights(tmp_path):
    whole = trained(tmp_path / "whole", bart(dropout=0.1), save_strategy="steps", save_steps=5)
    for checkpoint in (5, 10):
        made = trainer(tmp_path / "whole", bart(dropout=0.1))
        made.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{checkpoint}"))
        assert made.planned.captured is not None
        assert_same_weights(made.model.state_dict(), whole.model.state_dict(), 0)


def test_no_step_waits_for_the_device(tmp_path):
    class Strict(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("error" if 4 <= state.global_step < 10 else "default")

        def on_train_end(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("default")

    made = trainer(tmp_path, logging_strategy="no", data=16)
    made.add_callback(Strict())
    try:
        made.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.planned.captured is not None
    assert made.state.global_step == 12


def test_frozen_weights_stay_and_thawed_ones_are_captured_again(tmp_path):
    class Thaw(hf.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 6:
                kept.append(model.model.encoder.layers[0].fc1.weight.clone())
                model.model.encoder.requires_grad_(True)

    kept, model = [], bart()
    first = model.model.encoder.layers[0].fc1.weight.clone()
    model.model.encoder.requires_grad_(False)
    model.model.shared.requires_grad_(True)
    made = trainer(tmp_path, model)
    made.add_callback(Thaw())
    made.optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    made.train()
    assert made.planned.captured is not None
    assert torch.equal(kept[0].cpu(), first)
    assert not torch.equal(model.model.encoder.layers[0].fc1.weight.cpu(), first)


def test_changed_weights_of_terms_reach_captured_steps(tmp_path):
    from dataclasses import replace

    class Change(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            loss_fn = attached_loss(made.model)
            loss_fn.parts = tuple(replace(part, weight=7.0) for part in loss_fn.parts)

    made = trainer(tmp_path, objective="ce + matches(2)", max_steps=2, data=16, learning_rate=0.0)
    made.add_callback(Change())
    made.train()
    lines = [line for line in made.state.log_history if "ce" in line]
    assert lines[0]["loss"] == pytest.approx(lines[0]["ce"] + lines[0]["matches(2)"], rel=1e-3)
    assert lines[1]["loss"] == pytest.approx(7 * (lines[1]["ce"] + lines[1]["matches(2)"]), rel=1e-3)


def test_evaluation_between_captured_steps(tmp_path):
    made = trainer(
        tmp_path, bart(dropout=0.1), eval_strategy="steps", eval_steps=3, ours={"eval_dataset": rows(20, seed=9)}
    )
    made.data_collator = Padder(models.PAD, partial(decoder_inputs, made.model))
    made.train()
    assert made.planned.captured is not None
    assert len([line for line in made.state.log_history if "eval_ce" in line]) == 4


# What cannot be captured


class Waiting(hf.BartForConditionalGeneration):
    def forward(self, input_ids=None, **kwargs):
        assert input_ids.sum().item() > 0
        return super().forward(input_ids=input_ids, **kwargs)


class OwnLoss(NgramTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": OwnLoss}, "OwnLoss has its own compute_loss"),
        ({"gradient_checkpointing": True}, "gradient checkpointing"),
        ({"model": lambda: bart(encoder_layerdrop=0.3)}, "layer drop"),
        ({"model": lambda: Waiting(bart().config)}, ""),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(tmp_path, changes, reason):
    said = []
    model = changes.pop("model", bart)()
    made = trained(tmp_path, model, say=said.append, **changes)
    assert made.planned.captured is None
    assert any("not captured" in line and reason in line for line in said), said
    assert made.state.global_step == 12
    lines = [line["ce"] for line in made.state.log_history if "ce" in line]
    assert lines[-1] < lines[0]
    torch.cuda.synchronize()
    assert torch.rand(4, device="cuda").sum() > 0  # the generator still works


# Processes

WORKER = """
import sys; sys.path[:0] = [{tests!r}, {gpu!r}]
import torch, test_captured as t
made = t.trained(sys.argv[1], max_steps=8, data=90, bf16=False, ours={{"max_tokens": int(sys.argv[2])}}, per_device_train_batch_size=4, ddp_backend="gloo")
assert made.planned.captured is not None
if made.args.process_index == 0:
    torch.save({{name: value.cpu() for name, value in made.model.state_dict().items()}}, sys.argv[1] + "/weights.pt")
"""


@pytest.mark.parametrize("max_tokens", [0, 300])
def test_two_processes_on_one_gpu_end_at_the_weights_of_one(tmp_path, max_tokens):
    here = Path(__file__).parent
    folder = tmp_path / "two"
    folder.mkdir()
    program = WORKER.format(tests=str(here.parent), gpu=str(here))
    codes, err = fork_ranks(program, [str(folder), str(max_tokens)], environment=dict(os.environ), one_device=True)
    assert codes == [0, 0], err[-3000:]
    alone = trained(tmp_path / "one", max_steps=8, data=90, bf16=False)
    assert_same_weights(
        {name: value.cpu() for name, value in alone.model.state_dict().items()}, torch.load(folder / "weights.pt"), 2e-4
    )
