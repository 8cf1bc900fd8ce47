"""Weights that depend on the progress of training: written, computed, logged, and the same after continuing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainings import arguments, assert_same_weights, padded, rows, tiny, trained
from transformers import Seq2SeqTrainer

import ngramloss as ng
from ngramloss import JointLoss, UserError, recipe
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.weight_schedule import Schedule

RAMP = "ce + 0.5*matches(2)@ramp(0.2,0.6) + bag(2)@from(0.5)"


@pytest.mark.parametrize(
    "written",
    [
        "ce + matches(2,3,4)@from(0.5)",
        "0.5*bag(2):original@ramp(0.1,0.3)",
        "ce@from(0)",
        "ce(smoothing=0.1)@ramp(0,1) + lcs@from(1)",
    ],
)
def test_the_written_form_is_printed_back(written):
    assert " + ".join(map(str, parse(written))) == written
    assert str(JointLoss(written)) == written
    assert " + ".join(map(str, parse(written.replace("@", " @ ").replace(",", " , ")))) == written
    assert not any("@" in part.name for part in JointLoss(written).parts)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("ce@from(1.5)", "from 0 to 1, got 1.5"),
        ("ce@from(-0.1)", "from 0 to 1, got -0.1"),
        ("ce@ramp(0.5,0.2)", "ends before it begins"),
        ("ce@ramp(0.5)", "@ramp takes 2 shares, got 1"),
        ("ce@from(0.1,0.2)", "@from takes 1 share, got 2"),
        ("ce@until(0.5)", "unknown schedule 'until'"),
        ("ce@", "expected 'from' or 'ramp'"),
        ("ce@from", "expected '(' after a schedule"),
        ("ce@from()", "expected a share"),
        ("matches(2)@from(0.5) + matches(2)", "given twice"),
    ],
)
def test_a_wrong_schedule_gets_a_sentence(written, sentence):
    with pytest.raises(UserError, match="(?s)" + sentence.replace("(", r"\(")):
        JointLoss(written)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_share_is_linear_between_its_ends(one, other, progress):
    begin, end = sorted((one, other))
    share = Schedule(begin, end).share(progress)
    assert 0 <= share <= 1
    if progress >= end:
        assert share == 1
    elif progress <= begin:
        assert share == 0
    else:
        assert share * (end - begin) == pytest.approx(progress - begin)


def test_the_loss_follows_the_progress():
    logits, labels = (
        torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0)),
        torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(1)),
    )
    loss_fn = JointLoss(RAMP)
    with pytest.raises(UserError, match=r"matches\(2\)@ramp\(0.2,0.6\) depends on the progress"):
        loss_fn(logits, labels)
    for progress, (first, second) in {0.0: (0, 0), 0.2: (0, 0), 0.4: (0.25, 0), 0.5: (0.375, 1), 1.0: (0.5, 1)}.items():
        loss_fn.progress = progress
        leaf = logits.clone().requires_grad_()
        other = logits.clone().requires_grad_()
        loss, parts = loss_fn.with_parts(leaf, labels)
        expected = JointLoss(f"ce + {first}*matches(2) + {second}*bag(2)")(other, labels)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(leaf.grad, other.grad)
        torch.testing.assert_close(loss.detach(), parts["ce"] + first * parts["matches(2)"] + second * parts["bag(2)"])
        loss_fn.diagnose(logits, labels)


@pytest.mark.slow
def test_a_training_logs_the_weights_and_ends_where_a_continued_one_does(tmp_path):
    settings = {"objective": RAMP, "save_strategy": "steps", "save_steps": 1, "data": 40}
    whole = trained(tmp_path, **settings)
    lines = [line for line in whole.state.log_history if "ce" in line]
    assert [line["weight/matches(2)"] for line in lines] == pytest.approx(
        [0, 0, 0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5]
    )
    assert [line["weight/bag(2)"] for line in lines] == [0] * 5 + [1] * 5
    for line in lines:
        expected = line["ce"] + line["weight/matches(2)"] * line["matches(2)"] + line["weight/bag(2)"] * line["bag(2)"]
        assert line["loss"] == pytest.approx(expected, abs=1e-4)
    for checkpoint in (2, 4, 7):  # before, in and after the ramp
        again = trained(tmp_path, resume=str(tmp_path / f"checkpoint-{checkpoint}"), **settings)
        assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)


def test_an_evaluation_has_the_full_weights(tmp_path):
    made = trained(tmp_path, objective=RAMP, eval_strategy="steps", eval_steps=1, max_steps=2)
    for line in made.state.log_history:
        if "eval_loss" in line:
            assert line["eval_loss"] == pytest.approx(
                line["eval_ce"] + 0.5 * line["eval_matches(2)"] + line["eval_bag(2)"], abs=1e-4
            )


def test_a_stock_trainer_needs_the_callback(tmp_path):
    model = ng.attach(tiny(), "ce + matches(2)@from(0.5)")
    settings = {"train_dataset": rows(22), "data_collator": padded(model)}
    with pytest.raises(UserError, match="LogParts"):
        Seq2SeqTrainer(model, arguments(tmp_path), **settings).train()
    trainer = Seq2SeqTrainer(model, arguments(tmp_path), callbacks=[ng.LogParts()], **settings)
    trainer.train()
    first, *_, last = [line for line in trainer.state.log_history if "ce" in line]
    assert first["loss"] == pytest.approx(first["ce"], abs=1e-3)
    assert last["loss"] == pytest.approx(last["ce"] + last["matches(2)"], abs=1e-3)
    assert ng.attached_loss(model).progress == pytest.approx(5 / 6)


def test_compiled_code_refuses_a_schedule():
    loss_fn = JointLoss("ce + matches(2)@from(0.5)")
    loss_fn.progress = 0.5
    compiled = torch.compile(loss_fn, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compiled code would"):
        compiled(torch.randn(1, 4, 9), torch.tensor([[1, 2, 3, 4]]))


def test_recipes_take_schedules_and_name_runs_after_them():
    made = recipe.load("demo", ["objective=ce + matches(2,3,4)@ramp(0.1,0.3)"])
    assert made.objective == "ce + matches(2,3,4)@ramp(0.1,0.3)"
    names = {
        recipe.load("demo", [f"objective=ce + matches(2){schedule}"]).slug
        for schedule in ("", "@from(0.5)", "@from(0.25)", "@ramp(0.25,0.5)")
    }
    assert len(names) == 4
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_+") for name in names)


def test_the_page_draws_the_weights_of_scheduled_terms():
    from ngramloss.report.build import curves
    from ngramloss.report.charts import _subjects
    from ngramloss.report.record import TrainingCurves

    log = TrainingCurves(
        "a",
        curves(
            [
                {
                    "step": 1,
                    "ce": 2.0,
                    "matches(2)": 0.5,
                    "dft": 0.1,
                    "bag(2):original": 1.0,
                    "grad_norm": 1.0,
                    "weight/matches(2)": 0.25,
                }
            ]
        ),
    )
    titles = [title for title, _ in _subjects([log])]
    assert titles.count("weight of matches(2)") == 1
    assert titles == [
        "joint loss",
        "ce",
        "matches(2)",
        "dft",
        "bag(2):original",
        "weight of matches(2)",
        "learning rate",
        "documents per second",
    ]
