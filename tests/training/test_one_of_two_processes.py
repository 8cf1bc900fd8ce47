"""What one process of two does in a step, with the other one made up: no process is started."""

import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import GradientState
from models import batch
from torch.testing import assert_close
from trainings import OBJECTIVE, arguments, padded, rows, tiny

from ngramloss import NgramTrainer
from ngramloss.training.captured import Gradients
from ngramloss.training.running import average_gradients


def be_one_of_two(monkeypatch, process=0):
    """Let the trainer think that there is another process."""
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 2))
    monkeypatch.setattr(Accelerator, "process_index", property(lambda _: process))


def trainer_of(folder, data=22, **settings):
    model = tiny()
    return NgramTrainer(
        model, arguments(folder, **settings), objective=OBJECTIVE, train_dataset=rows(data), data_collator=padded(model)
    )


def gradients(trainer, inputs, counts):
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, inputs, num_items_in_batch=counts).backward()
    return [parameter.grad.clone() for parameter in trainer.model.parameters()]


def test_a_process_takes_its_loss_twice_because_gradients_are_averaged(tmp_path, monkeypatch):
    trainer, counts = trainer_of(tmp_path), torch.tensor([20.0, 3.0])
    inputs = batch("bart")
    alone = trainer.compute_loss(trainer.model.train(), inputs, num_items_in_batch=counts)
    be_one_of_two(monkeypatch)
    assert_close(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=counts), 2 * alone)
    evaluated = trainer.compute_loss(trainer.model.eval(), inputs, num_items_in_batch=counts[0])
    assert_close(evaluated, trainer.model(**inputs).loss)


def test_the_mean_gradient_of_two_processes_is_that_of_one(tmp_path, monkeypatch):
    trainer, inputs = trainer_of(tmp_path), batch("bart", B=4)
    counts = torch.stack([(inputs["labels"] != -100).sum(), torch.tensor(4)]).float()
    whole = gradients(trainer, inputs, counts)
    be_one_of_two(monkeypatch)
    halves = [
        gradients(trainer, {name: value[part] for name, value in inputs.items()}, counts)
        for part in (slice(0, 1), slice(1, 4))
    ]
    for one, other, both in zip(*halves, whole, strict=True):
        assert_close((one + other) / 2, both)


@pytest.mark.parametrize("in_buffers", [False, True])
def test_gradients_become_their_mean_over_the_processes(monkeypatch, in_buffers):
    """The other process has gradients of 3 everywhere."""
    monkeypatch.setattr(dist, "all_reduce", lambda flat: flat.add_(3.0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(3, 1).double()})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model["a"].bias.grad = None
    having = [parameter for parameter in model.parameters() if parameter.grad is not None]
    kept = Gradients(having) if in_buffers else None
    if kept is not None:
        torch._foreach_copy_(kept.views, [parameter.grad for parameter in having])
        for parameter, view in zip(having, kept.views, strict=True):
            parameter.grad = view
    average_gradients(model, kept)
    assert all(bool((parameter.grad == 2).all()) for parameter in having)
    assert model["a"].bias.grad is None


@pytest.mark.parametrize(
    ("process", "count", "ends", "kept"),
    [
        (0, 7, True, 4),  # of 8 rows in the last round, the first 7 are new: this process has 4, the other 3
        (1, 7, True, 3),
        (1, 4, True, 0),
        (0, 3, True, 3),
        (1, 8, True, 4),
        (1, 15, True, 3),
        (1, 7, False, 4),
    ],
)
def test_rows_that_fill_the_last_round_lose_their_labels(tmp_path, monkeypatch, process, count, ends, kept):
    trainer, inputs = trainer_of(tmp_path, data=count), batch("bart", B=4, equal=True)
    be_one_of_two(monkeypatch, process)
    monkeypatch.setattr(GradientState, "end_of_dataloader", property(lambda _: ends))
    monkeypatch.setattr(Accelerator, "reduce", lambda _, values, how: {"sum": values + 100}[how])  # the other process
    before = inputs["labels"].clone()
    (found,), counts = trainer.get_batch_samples(iter([inputs]), 1, torch.device("cpu"))
    assert (found["labels"] != -100).any(-1).tolist() == [True] * kept + [False] * (4 - kept)
    assert torch.equal(found["labels"][:kept], before[:kept])
    assert counts.tolist() == [100 + kept * before.shape[1], 100 + kept]


@pytest.mark.parametrize(
    ("process", "count", "kept", "warns"),
    [
        (0, 7, True, False),  # of the 8 rows of the last round, 7 are new: this process has 4 of them
        (1, 4, False, False),  # all of its rows are repeated
        (1, 7, True, True),  # one of its 4 rows is repeated, and nobody knows where it begins
        (1, 8, True, False),
    ],
)
def test_repeated_rows_in_a_flattened_batch_are_all_blanked_or_said(tmp_path, monkeypatch, process, count, kept, warns):
    trainer = trainer_of(tmp_path, data=count, per_device_train_batch_size=4)
    inputs = {name: value.flatten()[None] for name, value in batch("bart", B=4, equal=True).items()}
    be_one_of_two(monkeypatch, process)
    monkeypatch.setattr(GradientState, "end_of_dataloader", property(lambda _: True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer._blank_repeated_rows(inputs, trainer.train_dataset, trainer._train_batch_size)
    assert (inputs["labels"] != -100).any().item() == kept
    assert any("Accelerate repeats rows" in str(each.message) for each in caught) == warns


def test_with_one_process_or_without_the_last_round_every_row_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(GradientState, "end_of_dataloader", property(lambda _: True))
    inputs = batch("bart", B=4, equal=True)
    (found,), _ = trainer_of(tmp_path, data=7).get_batch_samples(iter([dict(inputs)]), 1, torch.device("cpu"))
    assert (found["labels"] != -100).all()
    dropping = trainer_of(tmp_path, data=7, dataloader_drop_last=True)
    be_one_of_two(monkeypatch, 1)
    monkeypatch.setattr(Accelerator, "reduce", lambda _, values, how: values)
    (found,), _ = dropping.get_batch_samples(iter([dict(inputs)]), 1, torch.device("cpu"))
    assert (found["labels"] != -100).all()


# The order of the rows


@pytest.mark.parametrize(("seeds", "same_as"), [((0, 3), (0, 0)), ((None, 3), (3, 0)), ((5, 3), (5, 0))], ids=str)
def test_the_order_of_the_rows_is_that_of_data_seed_even_if_it_is_0(tmp_path, seeds, same_as):
    orders = []
    for data_seed, seed in (seeds, same_as):
        trainer = NgramTrainer(
            tiny(),
            arguments(tmp_path, seed=seed, data_seed=data_seed, train_sampling_strategy="group_by_length"),
            objective="ce",
            train_dataset=rows(22),
            data_collator=padded(tiny()),
        )
        orders.append(list(trainer.get_train_dataloader().batch_sampler))
    assert orders[0] == orders[1]
