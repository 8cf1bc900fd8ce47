"""Weights of tokens in batches: under attach, other trainers' names, Hugging Face's trainer and our own loop."""

import models
import pytest
import torch
from trainings import arguments, padded, rows, tiny

import ngramloss as ng
from ngramloss import JointLoss, NgramTrainer, attach
from ngramloss.errors import UserError
from ngramloss.models.attached.segments import predicted
from ngramloss.models.attached.step_loss import shifted
from ngramloss.recipe import Train

OBJECTIVE = "ce + matches(2) + near(2)"


def seq2seq_batch():
    generator = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(4, models.V, (3, length), generator=generator) for length in (6, 7))
    labels[1, 4:] = -100
    return ids, labels, torch.rand(3, 7, generator=generator)


@pytest.mark.parametrize("name", ["weights", "loss_weights", "loss_scale"])
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_decoder_takes_weights_from_its_batch(name, training):
    model = tiny().train(training)
    ids, labels, weights = seq2seq_batch()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = JointLoss(OBJECTIVE)(model(input_ids=ids, labels=labels).logits, labels, weights=weights)
    attach(model, OBJECTIVE)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = model(input_ids=ids, labels=labels, **{name: weights}).loss
    torch.testing.assert_close(found, expected)


def causal_batch():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(4, models.V, (3, 9), generator=generator)
    labels = ids.masked_fill(torch.arange(9) < 4, -100)
    labels[2, 7:] = -100
    return ids, labels, torch.rand(3, 9, generator=generator)


def test_weights_are_shifted_with_the_labels_of_a_decoder_only_model():
    model = models.tiny("llama").eval()
    ids, labels, weights = causal_batch()
    own = torch.nn.functional.pad(weights, (0, 1))[:, 1:]
    expected = JointLoss(OBJECTIVE)(model(input_ids=ids).logits, shifted(labels), weights=own)
    torch.testing.assert_close(attach(model, OBJECTIVE)(input_ids=ids, labels=labels, weights=weights).loss, expected)


def test_weights_follow_the_documents_of_packed_rows():
    model = models.tiny("llama").eval()
    ids, labels, weights = causal_batch()
    own = torch.nn.functional.pad(weights, (0, 1))[:, 1:]
    segments = torch.tensor([[0] * 6 + [1] * 3]).expand(3, 9)
    expected = JointLoss(OBJECTIVE)(
        model(input_ids=ids).logits, shifted(labels), weights=own, segments=predicted(segments)
    )
    attach(model, OBJECTIVE)
    found = model(input_ids=ids, labels=labels, weights=weights, segments=segments).loss
    torch.testing.assert_close(found, expected)
    assert found != model(input_ids=ids, labels=labels, weights=weights).loss


@pytest.mark.filterwarnings("ignore")
def test_a_compute_loss_func_with_the_model_sees_the_weights_of_the_batch():
    model = models.tiny("llama").eval()
    ids, labels, weights = causal_batch()
    function = ng.compute_loss_func(OBJECTIVE, model=model)
    outputs = model(input_ids=ids, loss_weights=weights)
    own = torch.nn.functional.pad(weights, (0, 1))[:, 1:]
    expected = JointLoss(OBJECTIVE)(outputs.logits, shifted(labels), weights=own)
    torch.testing.assert_close(function(outputs, labels), expected)


def test_two_names_or_labels_that_are_shifted_already_are_refused():
    model = attach(models.tiny("llama").eval(), "ce")
    ids, labels, weights = causal_batch()
    with pytest.raises(UserError, match=r"the batch has weights and loss_scale, which are two names for one input"):
        model(input_ids=ids, labels=labels, weights=weights, loss_scale=weights)
    with pytest.raises(UserError, match=r"weights for its labels, and `shift_labels`"):
        model(input_ids=ids, labels=labels, shift_labels=labels, weights=weights)
    with pytest.raises(UserError, match=r"weights must have a number for each label"):
        model(input_ids=ids, labels=labels, weights=weights[:, :3])


# Trainers


def weighted(rows):
    """Rows with weights: those of odd places weigh nothing."""
    return [row | {"weights": [float(place % 2 == 0) for place in range(len(row["labels"]))]} for row in rows]


def collate_weighted(model):
    plain = padded(model)

    def collate(batch):
        length = max(len(row["labels"]) for row in batch)
        weights = [row["weights"] + [0.0] * (length - len(row["weights"])) for row in batch]
        return plain(batch) | {"weights": torch.tensor(weights)}

    return collate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainers_keep_the_column_and_agree(tmp_path):
    import datasets

    model = tiny()
    data = weighted(rows(16))
    options = {"max_steps": 2, "per_device_train_batch_size": 8, "lr_scheduler_type": "constant"}
    trainer = NgramTrainer(
        model,
        arguments(tmp_path, **options),
        objective="ce + matches(2)",
        train_dataset=datasets.Dataset.from_list(data),
        data_collator=collate_weighted(model),
    )
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    plain = NgramTrainer(
        tiny(),
        arguments(tmp_path, **options),
        objective="ce + matches(2)",
        train_dataset=datasets.Dataset.from_list(rows(16)),
        data_collator=padded(model),
    )
    plain.train()
    assert logged[0] < 0.8 * next(line["loss"] for line in plain.state.log_history if "loss" in line)


SETTINGS = Train(batch_size=8, accumulate=1, max_steps=2, warmup_steps=0, log_every=1, eval_every=0, seed=3)


def first_loss(model, data, **changes):
    found = []
    ng.train(model, None, data, SETTINGS, objective=OBJECTIVE, on_step=lambda _, line: found.append(line), **changes)
    return found[0]["loss"]


def test_our_loop_weights_the_labels_of_an_encoder_decoder():
    model, data = tiny(), weighted(rows(8))
    batch = padded(model)(data)
    length = batch["labels"].shape[1]
    weights = torch.tensor([row["weights"] + [0.0] * (length - len(row["weights"])) for row in data])
    labels = batch.pop("labels")
    expected = JointLoss(OBJECTIVE)(model(**batch).logits, labels, weights=weights)
    assert first_loss(model, data) == pytest.approx(expected.item(), abs=1e-5)
    some = [row if index % 2 else {key: row[key] for key in ("input_ids", "labels")} for index, row in enumerate(data)]
    ones = weights.where(torch.arange(8)[:, None] % 2 == 1, 1.0)
    model = tiny()
    expected = JointLoss(OBJECTIVE)(model(**batch).logits, labels, weights=ones)
    assert first_loss(model, some) == pytest.approx(expected.item(), abs=1e-5), "rows without weights have 1"
    assert first_loss(tiny(), data, max_tokens=40) == pytest.approx(first_loss(tiny(), data), abs=1e-5), "however cut"


def test_our_loop_weights_the_labels_of_a_decoder_only_model_with_turns():
    """A token that is read but not learnt has a weight, too, which is not read."""
    data = [
        {"input_ids": [5, 6], "labels": [7, 8, ~9, ~10, 11, 4], "weights": [1.0, 0.5, 9.0, 9.0, 2.0, 0.0]},
        {"input_ids": [6], "labels": [8, 8, 9], "weights": [0.25, 1.0, 1.0]},
    ]
    model = models.tiny("llama")
    total, count = 0.0, 0
    for row in data:
        ids = [*row["input_ids"], *(token if token >= 0 else ~token for token in row["labels"])]
        with torch.no_grad():
            logp = model.eval()(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for place, (token, weight) in enumerate(zip(row["labels"], row["weights"], strict=True)):
            if token >= 0:
                total -= weight * logp[len(row["input_ids"]) + place - 1, token].item()
                count += 1
    found = []
    ng.train(model, None, data, SETTINGS, objective="ce", on_step=lambda _, line: found.append(line["ce"]))
    assert found[0] == pytest.approx(total / count, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights": [1.0]}, r"lengths differ: a row has \d labels and 1 weights"),
        ({"loss_scale": [1.0]}, r"rows have loss_scale, which is not read here\. Call it weights"),
    ],
)
def test_rows_whose_weights_cannot_be_used_are_refused(change, sentence):
    data = [row | change for row in rows(4) if len(row["labels"]) > 1]
    with pytest.raises(UserError, match=sentence):
        ng.train(tiny(), None, data, SETTINGS)


@pytest.mark.adopt
def test_trls_trainer_refuses_what_its_collator_drops():
    import datasets

    trl = pytest.importorskip("trl")
    plain = datasets.Dataset.from_list([{"input_ids": [1, 2]}])
    weighted = datasets.Dataset.from_list([{"input_ids": [1, 2], "loss_weights": [1.0, 1.0]}])
    segmented = datasets.Dataset.from_list([{"input_ids": [1, 2], "segments": [0, 1]}])
    stream = datasets.IterableDataset.from_generator(lambda: iter(weighted))
    assert stream.column_names is None
    for name, given in {
        "loss_weights": {"train_dataset": weighted},
        "segments": {"train_dataset": segmented},
        "loss_weights ": {"train_dataset": stream},
        "segments ": {"train_dataset": plain, "eval_dataset": {"one": plain, "other": segmented}},
    }.items():
        with pytest.raises(UserError, match=rf"the rows have {name.strip()}, and TRL's collator would drop them"):
            ng.NgramSFTTrainer("m", trl.SFTConfig(report_to=[], use_cpu=True, bf16=False), objective="ce", **given)
