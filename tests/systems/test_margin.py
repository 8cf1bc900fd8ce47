"""The margin to a language model: numbers beside the labels, from rows and batches to the loss."""

import functools

import oracle
import pytest
import torch
from models import batch, tiny
from trainings import arguments, joined_rows, rows

import ngramloss as ng
from ngramloss import JointLoss, attach, last_parts, token_stats
from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.data.batches.padding import Padder
from ngramloss.errors import UserError
from ngramloss.loss.explaining.compare_gradients import pushes
from ngramloss.loss.explaining.explain import explain
from ngramloss.models.attached.attach import logits_of
from ngramloss.models.attached.decoder_inputs import decoder_inputs

OBJECTIVE = "ce + 2*margin"


def example(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([[1, 3, 0, 2, -100], [4, 4, -100, 1, 2]])
    logits = torch.randn(2, 5, 6, generator=generator, dtype=dtype).requires_grad_()
    return logits, labels, numbers(labels).to(dtype)


def numbers(labels):
    """What the language model of the oracle says of labels."""
    return oracle.language_model(labels.clamp_min(0).double()).log()


def with_numbers(examples):
    """Rows of :mod:`trainings`, of which ids are below 40, with a language model that knows the ids alone."""
    return [{**row, "lm_logp": [-0.1 - (token % 7) / 3 for token in row["labels"]]} for row in examples]


# Given


def test_the_language_model_gets_no_gradient():
    logits, labels, lm_logp = example()
    lm_logp.requires_grad_()
    JointLoss("margin")(logits, labels, lm_logp=lm_logp).backward()
    assert lm_logp.grad is None
    assert logits.grad.any()


@pytest.mark.parametrize(("backend", "memory"), [("plain", "fast"), ("chunked", "fast"), ("chunked", "lean")])
def test_hidden_states_give_what_logits_give(backend, memory):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 4), (6, 4)))
    _, labels, lm_logp = example()
    loss_fn = JointLoss(OBJECTIVE, backend=backend, memory=memory)
    slopes = []
    for from_hidden in (False, True):
        inputs = [each.detach().requires_grad_() for each in (hidden, weight)]
        if from_hidden:
            loss = loss_fn.from_hidden(*inputs, labels, lm_logp=lm_logp)
        else:
            loss = loss_fn(inputs[0] @ inputs[1].T, labels, lm_logp=lm_logp)
        slopes.append(torch.autograd.grad(loss, inputs))
    torch.testing.assert_close(*slopes)


def test_packed_rows_are_their_texts():
    logits, labels, lm_logp = example()
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    whole = JointLoss("margin + matches(2)").with_parts(logits, labels, lm_logp=lm_logp, segments=segments)
    assert whole.parts["margin"] == JointLoss("margin")(logits, labels, lm_logp=lm_logp)


def test_every_row_has_its_share():
    logits, labels, lm_logp = example()
    shares = JointLoss(OBJECTIVE, reduction="none")(logits, labels, lm_logp=lm_logp)
    torch.testing.assert_close(shares.sum(), JointLoss(OBJECTIVE)(logits, labels, lm_logp=lm_logp))


def test_numbers_without_a_label_do_not_matter():
    logits, labels, lm_logp = example()
    strange = lm_logp.masked_fill(labels == -100, torch.nan)
    assert JointLoss("margin")(logits, labels, lm_logp=strange) == JointLoss("margin")(logits, labels, lm_logp=lm_logp)
    strange[0, 1] = torch.nan
    assert JointLoss("margin")(logits, labels, lm_logp=strange).isnan()


def test_missing_numbers_are_named_with_where_they_come_from():
    logits, labels, _ = example()
    message = "margin reads the log-probability of each label under a language model .* data.language_model"
    for compute in (
        lambda: JointLoss(OBJECTIVE)(logits, labels),
        lambda: JointLoss(OBJECTIVE).from_hidden(logits, torch.eye(6).double(), labels),
        lambda: JointLoss(OBJECTIVE).from_stats(token_stats(logits, labels), labels),
        lambda: attach(tiny("bart"), OBJECTIVE)(**batch("bart")),
    ):
        with pytest.raises(UserError, match=message):
            compute()


def test_numbers_that_no_term_reads_are_refused():
    logits, labels, lm_logp = example()
    with pytest.raises(UserError, match="lm_logp was given, but no term of 'ce' reads it: leave it out, or add a term"):
        JointLoss("ce")(logits, labels, lm_logp=lm_logp)
    given = batch("bart")
    with pytest.raises(UserError, match="lm_logp was given, but no term of 'ce' reads it"):
        attach(tiny("bart"), "ce")(**given, lm_logp=numbers(given["labels"]))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: x[:, :4], UserError, r"a number for each label, \[B, T\] = \[2, 5\], got \[2, 4\]. Pad it as"),
        (lambda x: x.exp(), UserError, "at most 0, got 0.25 at row 0, position 0. Pass the logarithm of a prob"),
        (
            lambda x: x.long(),
            TypeError,
            "lm_logp must be log-probabilities in floating point, a tensor .* got torch.int64",
        ),
        (lambda x: x.tolist(), TypeError, "in floating point, a tensor .* got list"),
    ],
)
def test_numbers_that_are_no_log_probabilities_are_refused(change, kind, message):
    logits, labels, lm_logp = example()
    with pytest.raises(kind, match=message):
        JointLoss("margin")(logits, labels, lm_logp=change(lm_logp))


def test_a_misspelled_argument_is_refused():
    logits, labels, lm_logp = example()
    with pytest.raises(TypeError, match=r"JointLoss takes no argument 'lm_lopg'. Did you mean 'lm_logp'?"):
        JointLoss("margin")(logits, labels, lm_lopg=lm_logp)


def test_the_log_has_its_gradient():
    logits, labels, lm_logp = example()
    watched = JointLoss(OBJECTIVE).diagnose(logits, labels, lm_logp=lm_logp)
    assert watched["gradient/margin"] > 0
    torch.testing.assert_close(watched["gradient/margin"] + watched["gradient/ce"], torch.ones((), dtype=torch.float64))
    assert "gradient/margin" not in JointLoss(OBJECTIVE).diagnose(logits, labels)


@pytest.mark.parametrize("refused", [lambda: explain("a b", "a c", "margin"), lambda: pushes("a b", "a c", ["margin"])])
def test_sentences_have_no_language_model(refused):
    with pytest.raises(UserError, match="reads a second model's probabilities or further streams, which a pair of"):
        refused()


def test_a_function_of_logits_alone_is_refused():
    with pytest.raises(
        UserError, match=r"reads lm_logp, but a compute_loss_func gets only logits and labels. Use attach"
    ):
        ng.compute_loss_func(OBJECTIVE)


# Models and trainings


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_an_attached_model_has_the_loss_of_its_logits(family):
    model, given = attach(tiny(family), OBJECTIVE), batch(family)
    beside = numbers(given["labels"] % 8)
    loss = model(**given, lm_logp=beside).loss
    logits, labels = logits_of(model, given), given["labels"]
    if family == "llama":
        logits, labels, beside = logits[:, :-1], labels[:, 1:], beside[:, 1:]
    expected, parts = JointLoss(OBJECTIVE).with_parts(logits, labels, lm_logp=beside)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(last_parts(model)["margin"], parts["margin"])


def test_a_batch_has_numbers_where_it_has_labels():
    model = tiny("bart")
    made = Padder(1, functools.partial(decoder_inputs, model))(with_numbers(rows(5)))
    for own, row, labels in zip(made["lm_logp"], with_numbers(rows(5)), made["labels"], strict=True):
        torch.testing.assert_close(own[: len(row["labels"])], torch.tensor(row["lm_logp"]))
        assert not own[labels == -100].any()


def test_a_batch_of_joined_rows_has_numbers_where_it_has_labels():
    examples = joined_rows(9)
    made = JoinedPadder(0)([{**row, "lm_logp": [float(x % 11) for x in row["labels"]]} for row in examples])
    real = made["labels"] != -100
    assert torch.equal(made["lm_logp"][real], (made["labels"][real] % 11).float())
    assert not made["lm_logp"][~real].any()


def test_rows_must_have_what_the_objective_reads():
    model, some = tiny("bart"), with_numbers(rows(2))
    pad = Padder(1, functools.partial(decoder_inputs, model), beside=["lm_logp"])
    with pytest.raises(UserError, match="a row has no lm_logp, which the objective reads: a number for each of its"):
        pad([some[0], *rows(1)])
    with pytest.raises(UserError, match=r"lengths differ: a row has .* labels and 1 numbers of lm_logp"):
        pad([{**some[0], "lm_logp": [-1.0]}])
    with pytest.raises(UserError, match=r"the rows have lm_logp, which no term of the objective reads. Leave it out"):
        Padder(1, functools.partial(decoder_inputs, model), beside=[])(some)
    assert pad([])["lm_logp"].shape == pad([])["labels"].shape  # for a shape that is captured first


def losses(family, examples, **changes):
    torch.manual_seed(0)
    found = []
    ng.train(
        tiny(family),
        None,
        with_numbers(examples),
        objective=OBJECTIVE,
        validation=with_numbers(examples[:7]),
        on_step=lambda step, line: found.append(
            {k: v for k, v in line.items() if k.removeprefix("eval_") in ("loss", "margin")}
        ),
        **{"batch_size": 8, "accumulate": 1, "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, **changes},
        log_every=1,
        eval_every=1,
        precision="fp32",
    )
    return found


@pytest.mark.parametrize(("family", "examples"), [("bart", rows(20)), ("llama", joined_rows(20))])
def test_every_split_of_a_step_is_the_same_step(family, examples):
    whole = losses(family, examples)
    assert {"loss", "margin", "eval_loss", "eval_margin"} <= whole[-1].keys()
    for split in ({"batch_size": 4, "accumulate": 2}, {"max_tokens": 40}):
        for one, other in zip(whole, losses(family, examples, **split), strict=True):
            assert one == pytest.approx(other, rel=2e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_trainer_of_hugging_face_keeps_the_numbers(tmp_path):
    model = tiny("bart")
    trainer = ng.NgramTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        objective=OBJECTIVE,
        train_dataset=with_numbers(rows(8)),
        data_collator=Padder(1, functools.partial(decoder_inputs, model)),
    )
    trainer.train()
    assert any("margin" in line for line in trainer.state.log_history)
