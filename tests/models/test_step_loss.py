"""One optimiser step of a stock Seq2SeqTrainer: any split into micro-batches and processes gives the same model."""

import copy
import os

import pytest
import torch
from forks import fork_ranks
from models import batch, tiny
from places import HELPERS, TESTS
from torch.testing import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from ngramloss import JointLoss
from ngramloss.models.attached.attach import attach
from ngramloss.models.attached.step_loss import compute_loss_func, shifted

pytestmark = [pytest.mark.filterwarnings("ignore:a stock Trainer"), pytest.mark.slow]

PLACES = [str(HELPERS), str(TESTS / "models")]

OBJECTIVE = "ce + matches(1,2) + bag(2)"
RATE = 0.5
CASES = {  # objective, equal lengths
    "every term, equal lengths": (OBJECTIVE, True),
    "cross-entropy, unequal lengths": ("ce", False),
    "every term, a micro-batch without labels": (OBJECTIVE, None),
}
SPLITS = {"8×1": (8, 1), "2×4": (2, 4)}


def rows(family="bart", equal=True):
    """Eight examples; unequal ones have 4 tokens where others have 9; with None, the first two have no label."""
    inputs = batch(family, B=8, equal=True)
    if equal is None:
        inputs["labels"][:2] = -100
    elif not equal:
        inputs["labels"][::3, -5:] = -100
    if family == "bart":
        inputs["decoder_input_ids"] = tiny(family).prepare_decoder_input_ids_from_labels(inputs["labels"])
    return [{name: value[i] for name, value in inputs.items()} for i in range(8)]


def collated(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def trained(folder, way, objective, equal, size, accumulation, family="bart"):
    """The loss logged at the first step, and the parameters after it."""
    model, options = tiny(family), {}
    if way == "attach":
        attach(model, objective)
    else:
        options["compute_loss_func"] = compute_loss_func(objective)
    trainer_class, arguments_class = (
        (Seq2SeqTrainer, Seq2SeqTrainingArguments) if family == "bart" else (Trainer, TrainingArguments)
    )
    arguments = arguments_class(
        output_dir=str(folder),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=rows(family, equal), data_collator=collated, **options
    )
    trainer.train()
    return trainer.state.log_history[0]["loss"], {name: p.detach() for name, p in model.named_parameters()}


def by_hand(objective, equal, family="bart"):
    """The whole batch in one step of plain gradient descent, on the model's own logits."""
    model, inputs = tiny(family), collated(rows(family, equal))
    labels = inputs["labels"] if family == "bart" else shifted(inputs["labels"])
    loss = JointLoss(objective)(model(**inputs).logits, labels)
    loss.backward()
    steps = {
        name: p.detach() - RATE * p.grad if p.grad is not None else p.detach() for name, p in model.named_parameters()
    }
    return loss.item(), steps


def assert_same_step(ours, theirs):
    assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)  # the log is rounded
    assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5)  # sums of micro-batches, in another order


@pytest.mark.parametrize("way", ["attach", "compute_loss_func"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_make_the_same_step(case, split, way, tmp_path):
    assert_same_step(trained(tmp_path, way, *CASES[case], *SPLITS[split]), by_hand(*CASES[case]))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_a_decoder_only_model_makes_the_same_step(case, split, tmp_path):
    step = trained(tmp_path, "attach", *CASES[case], *SPLITS[split], "llama")
    assert_same_step(step, by_hand(*CASES[case], "llama"))


@pytest.mark.slow
def test_two_processes_make_the_same_step(tmp_path):
    program = (
        f"import sys; sys.path[:0] = {PLACES!r}\n"
        "import torch, torch.distributed as dist\n"
        "from test_step_loss import CASES, trained\n"
        f"folder = {str(tmp_path)!r}\n"
        "steps = {f'{case}, {way}, {size}×{pieces}': trained(folder, way, *CASES[case], size, pieces)\n"
        "         for case in CASES for way in ('attach', 'compute_loss_func') for size, pieces in ((4, 1), (2, 2))}\n"
        "assert dist.get_world_size() == 2\n"
        f"if dist.get_rank() == 0: torch.save(steps, {str(tmp_path / 'steps.pt')!r})\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    codes, err = fork_ranks(program, [], environment=os.environ | {"OMP_NUM_THREADS": "1"})
    assert codes == [0, 0], err[-3000:]
    steps = torch.load(tmp_path / "steps.pt")
    assert len(steps) == 4 * len(CASES)
    for name, step in steps.items():
        case = next(case for case in CASES if name.startswith(case))
        assert_same_step(step, by_hand(*CASES[case]))


def test_unequal_lengths_scale_each_micro_batch_by_its_share_of_the_tokens(tmp_path):
    loss, _ = trained(tmp_path, "attach", OBJECTIVE, False, 2, 4)
    model, inputs = tiny("bart"), collated(rows(equal=False))
    expected = attach(model, "ce")(**inputs).loss
    attach(model, "matches(1,2) + bag(2)")
    for i in range(0, 8, 2):
        piece = {name: value[i : i + 2] for name, value in inputs.items()}
        expected = expected + model(**piece).loss * (piece["labels"] != -100).sum() / (inputs["labels"] != -100).sum()
    assert_close(loss, expected.item(), rtol=1e-4, atol=1e-4)  # the log is rounded


def test_evaluation_and_generation_run_as_before(tmp_path):
    model, data = attach(tiny("bart"), OBJECTIVE), rows()
    for row in data:
        row.pop("decoder_input_ids")
    inputs = collated(data)
    wrote = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        per_device_eval_batch_size=8,
        predict_with_generate=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    seen = {}

    def metrics(predicted):
        seen["ids"] = predicted.predictions
        return {}

    trainer = Seq2SeqTrainer(model=model, args=arguments, data_collator=collated, compute_metrics=metrics)
    assert_close(trainer.evaluate(data)["eval_loss"], model(**inputs).loss.item())
    assert torch.equal(torch.tensor(seen["ids"])[:, : wrote.shape[1]], wrote)


def test_bf16_training_runs_through_accelerate(tmp_path):
    model = attach(tiny("bart"), OBJECTIVE)
    before = copy.deepcopy(model.state_dict())
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        bf16=True,
        max_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows(), data_collator=collated)
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"] - by_hand(OBJECTIVE, True)[0]) < 0.5
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
