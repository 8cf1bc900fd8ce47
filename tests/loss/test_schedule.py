"""Weights that depend on the progress of training: written, computed, logged, and the same after continuing."""

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainings import arguments, assert_same_weights, padded, rows, tiny, trained
from transformers import Seq2SeqTrainer

import ngramloss as ng
from ngramloss import JointLoss, UserError, recipe
from ngramloss.loss.terms import Term
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.weight_schedule import Schedule

RAMP = "ce + 0.5*matches(2)@ramp(0.2,0.6) + bag(2)@from(0.5)"


@pytest.mark.parametrize(
    "written",
    [
        "ce + matches(2,3,4)@from(0.5)",
        "ce + 0.5*bag(2):original@ramp(0.1,0.3)",
        "ce@from(0)",
        "ce(smoothing=0.1)@ramp(0,1) + dft + lcs@from(1)",
        "ce@until(0.67) + 0.5*matches(2,3,4)@from(0.67)",
        "ce@until(0.3333333333333333) + bag(2)@ramp(1e-05,0.1)",
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
        ("ce@after(0.5)", "unknown schedule 'after'"),
        ("ce@until(0.1,0.2)", "@until takes 1 share, got 2"),
        ("ce@until(1.5)", "from 0 to 1, got 1.5"),
        ("ce@", "expected 'from', 'until' or 'ramp'"),
        ("ce@from", "expected '(' after a schedule"),
        ("ce@from()", "expected a share"),
        ("matches(2)@from(0) + matches(2)", "given twice"),
        ("ce@until(0.5)", "no term of 'ce@until(0.5)' has a weight when 0.5 of all steps are done. Let another term"),
        ("ce@until(0.5) + matches(2)@from(0.6)", "has a weight when 0.5 of all steps are done"),
        ("ce@until(0.5) + matches(2)@ramp(0.5,0.6)", "has a weight when 0.5 of all steps are done"),
        ("ce@until(0.5) + 0*matches(2)@from(0.5)", "has a weight when 0.5 of all steps are done"),
        ("0*ce + matches(2)@from(0.5)", "has a weight at the beginning of the training"),
        ("ce@ramp(0,1) + lcs@from(1)", "has a weight at the beginning of the training"),
        ("0*ce@until(1) + matches(2)@from(0.5)", "has a weight at the beginning of the training"),
        ("ce@until(1)", "has a weight at the end of the training"),
    ],
)
def test_a_wrong_schedule_gets_a_sentence(written, sentence):
    with pytest.raises(UserError, match="(?s)" + re.escape(sentence)):
        JointLoss(written)


@st.composite
def schedules(draw):
    """A schedule, its beginning and end in sixths of the training."""
    kind = draw(st.sampled_from(["", "from", "until", "ramp"]))
    begin = draw(st.integers(0, 5 if kind == "ramp" else 6))
    return kind, begin, draw(st.integers(begin + 1, 6)) if kind == "ramp" else begin


def oracle(kind, begin, end, progress):
    """The share of a weight; all in sixths of the training."""
    if kind == "from":
        return 1 if progress >= begin else 0
    if kind == "until":
        return 1 if progress < begin else 0
    return min(max(progress - begin, 0) / (end - begin), 1) if kind == "ramp" else 1


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), schedules()), min_size=1, max_size=4), st.integers(1, 40))
def test_an_objective_is_refused_exactly_if_some_moment_has_no_term(made, total):
    terms = [
        Term(name, n, weight, schedule=Schedule(begin / 6, end / 6, kind == "until") if kind else None)
        for (name, n), (weight, (kind, begin, end)) in zip(
            [("ce", ()), ("dft", ()), ("lcs", ()), ("bag", (2,))], made, strict=False
        )
    ]
    written = " + ".join(map(str, terms))
    lowest = min(sum(weight * oracle(*each, moment / 2) for weight, each in made) for moment in range(13))
    if lowest == 0 and any(kind for _, (kind, *_) in made):
        for objective in (written, terms):
            with pytest.raises(UserError, match=r"no term of .* has a weight"):
                JointLoss(objective)
        return
    assert str(JointLoss(terms)) == written
    loss_fn = JointLoss(written)
    for step in range(total + 1):
        loss_fn.progress = step / total
        expected = [weight * oracle(*each, 6 * Fraction(step, total)) for weight, each in made]
        assert loss_fn.weights == pytest.approx([float(weight) for weight in expected], abs=1e-9)


@given(st.integers(1, 3000), st.data())
def test_of_until_and_from_exactly_one_is_active_at_every_step(total, data):
    first = data.draw(st.integers(0, total), label="first step of the second term")
    share = data.draw(st.sampled_from([first / total, round(first / total, 2)]) | st.floats(0, 1), label="share")
    loss_fn = JointLoss(f"ce@until({share!r}) + matches(2)@from({share!r})")
    for step in {*range(max(first - 2, 0), min(first + 2, total)), 0, total - 1}:
        loss_fn.progress = step / total
        assert sorted(loss_fn.weights) == [0, 1]
        if share == first / total:
            assert loss_fn.weights == ((1, 0) if step < first else (0, 1))


def test_a_term_that_has_ended_gives_exactly_no_gradient():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(3, 6, 5, generator=generator), torch.randn(9, 5, generator=generator)
    labels = torch.randint(0, 9, (3, 6), generator=generator)
    for backend in ("plain", "chunked"):
        for progress, alone in ((0.4, "0*matches(2) + ce(smoothing=0.1)"), (0.5, "matches(2) + 0*ce(smoothing=0.1)")):
            found = []
            for written in ("matches(2)@from(0.5) + ce(smoothing=0.1)@until(0.5)", alone):
                loss_fn, leaf = JointLoss(written, backend=backend), hidden.clone().requires_grad_()
                loss_fn.progress = progress
                loss = loss_fn.from_hidden(leaf, head, labels)
                loss.backward()
                found.append((loss.detach(), leaf.grad))
            assert all(map(torch.equal, *found)), (backend, progress)
    logits, single = torch.randn(3, 6, 9, generator=generator), []
    for written in ("ce@until(0.5) + matches(2)@from(0.5)", "matches(2)"):
        loss_fn, leaf = JointLoss(written), logits.clone().requires_grad_()
        loss_fn.progress = 0.5
        loss_fn(leaf, labels).backward()
        single.append(leaf.grad)
    assert torch.equal(*single)


def test_a_part_of_an_objective_may_have_moments_without_terms():
    loss_fn = JointLoss("ce@until(0.5) + rank@from(0.5)")
    loss_fn.progress = 0.75
    rest = loss_fn.without("candidates")
    assert (str(rest), rest.weights, rest.progress) == ("ce@until(0.5)", (0,), 0.75)


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


@pytest.mark.parametrize(("objective", "ce"), [(RAMP, 1), ("ce@until(0.3) + lcs" + RAMP[2:], 0)])
def test_an_evaluation_has_the_weights_of_the_end(tmp_path, objective, ce):
    made = trained(tmp_path, objective=objective, eval_strategy="steps", eval_steps=1, max_steps=2)
    for line in made.state.log_history:
        if "eval_loss" in line:
            expected = ce * line["eval_ce"] + 0.5 * line["eval_matches(2)"] + line["eval_bag(2)"]
            assert line["eval_loss"] == pytest.approx(expected + line.get("eval_lcs", 0), abs=1e-4)


SWITCH = "ce@until(0.5) + matches(2)@from(0.5)"


def test_a_training_switches_from_one_objective_to_the_other(tmp_path):
    """Up to the switch it is a training on ce; at the next step its loss is matches(2) on the weights of then."""
    settings = {"data": 40, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    settings |= {"per_device_train_batch_size": 4}
    whole = trained(tmp_path / "whole", objective=SWITCH, **settings)
    alone = trained(tmp_path / "alone", objective="ce + 0*matches(2)", **settings)
    assert whole.state.max_steps == 10
    ours, theirs = ([line for line in made.state.log_history if "ce" in line] for made in (whole, alone))
    for step, (line, other) in enumerate(zip(ours[:6], theirs[:6], strict=True)):
        assert (line["weight/ce"], line["weight/matches(2)"]) == ((1, 0) if step < 5 else (0, 1))
        assert [line[name] for name in ("ce", "matches(2)")] == [other[name] for name in ("ce", "matches(2)")]
        assert line["loss"] == pytest.approx(other["ce" if step < 5 else "matches(2)"], abs=1e-4)
    assert ours[6]["ce"] != theirs[6]["ce"]
    for checkpoint in (3, 5, 6):  # before, at and after the switch
        resume = str(tmp_path / "whole" / f"checkpoint-{checkpoint}")
        again = trained(tmp_path / "again", resume=resume, objective=SWITCH, **settings)
        assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)


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
        for schedule in ("", "@from(0.5)", "@from(0.25)", "@until(0.25)", "@ramp(0.25,0.5)")
    }
    assert len(names) == 5
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
    ]
