"""NgramTrainer: one optimiser step is one step, however it is split."""

import json
import os

import models
import pytest
import torch
from forks import fork_ranks
from lanes import few
from places import HELPERS, TESTS
from trainings import OBJECTIVE, arguments, assert_same_weights, padded, row_count, rows, tiny, trained
from transformers import Seq2SeqTrainer, TrainingArguments

from ngramloss import JointLoss, NgramTrainer, UserError, detach

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights after training with batches of 8 in one piece, and their log."""
    results = {}
    for strategy in ("random", "group_by_length"):
        trainer = trained(tmp_path_factory.mktemp("whole"), train_sampling_strategy=strategy)
        results[strategy] = trainer.model.state_dict(), trainer.state.log_history
    return results


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize(("batch", "accumulate"), few([(2, 4)], [(4, 2), (2, 4), (1, 8)]))
def test_micro_batches_end_at_the_weights_of_whole_batches(tmp_path, whole, batch, accumulate, strategy):
    trainer = trained(
        tmp_path,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy=strategy,
    )
    weights, log = whole[strategy]
    assert_same_weights(trainer.model.state_dict(), weights)
    for here, there in zip(trainer.state.log_history, log, strict=True):
        for name in ("loss", "ce", "matches(2)", "matches(3)", "bag(2)", "grad_norm"):
            assert here.get(name) == pytest.approx(there.get(name), abs=1e-4), name


def test_plain_cross_entropy_trains_like_the_stock_trainer(tmp_path):
    ours = trained(tmp_path / "a", objective="ce")
    stock = trained(tmp_path / "b", kind=Seq2SeqTrainer)
    assert_same_weights(ours.model.state_dict(), stock.model.state_dict())
    losses = [[line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_logged_terms_are_those_of_the_steps_rows(tmp_path, accumulate):
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    log = trained(
        tmp_path,
        model=model,
        train_sampling_strategy="sequential",
        learning_rate=0,
        max_steps=2,
        logging_steps=2,
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
    ).state.log_history
    model.load_state_dict(before)
    detach(model)
    terms = []
    for first in (0, 8):
        batch = padded(model)(rows(22)[first : first + 8])
        labels = batch.pop("labels")
        terms.append(JointLoss(OBJECTIVE).with_parts(model(**batch).logits, labels)[1])
    for name in terms[0]:
        assert log[0][name] == pytest.approx((terms[0][name] + terms[1][name]).item() / 2, abs=1e-5), name


def test_a_model_that_says_it_takes_no_counts_is_scaled_once(tmp_path, whole):
    model = tiny()
    model.accepts_loss_kwargs = False  # what a stock trainer needs to be right
    trainer = trained(tmp_path, model=model, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_same_weights(trainer.model.state_dict(), whole["random"][0])


def test_the_model_is_left_in_training_mode(tmp_path):
    assert trained(tmp_path, max_steps=1).model.training


def test_the_loss_is_that_of_its_terms_and_the_log_has_them_with_diagnostics(tmp_path):
    first, *_ = trained(tmp_path, objective="ce + 0.5*matches(2) + bag(2)").state.log_history
    assert first["loss"] == pytest.approx(first["ce"] + 0.5 * first["matches(2)"] + first["bag(2)"], abs=1e-5)
    assert {"matched/2", "placed/2", "confidence/2", "floor/bag(2)", "gradient/ce"} <= first.keys()
    assert first["docs_per_second"] > 0
    assert first["memory_gib"] > 0.01
    assert first["learning_rate"] > 0
    assert sum(value for name, value in first.items() if name.startswith("gradient/")) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("batch", [7, 3, 2])
def test_evaluation_gives_exact_means_whatever_the_batch(tmp_path, batch):
    from ngramloss import attach

    model = tiny()
    trainer = NgramTrainer(
        model,
        arguments(tmp_path, per_device_eval_batch_size=batch),
        objective="matches(2)",
        eval_dataset=rows(7, seed=2),
        data_collator=padded(model),
    )
    metrics = trainer.evaluate()
    everything = padded(model)(rows(7, seed=2))
    attach(model, "matches(2) + 0*ce", logits=True).eval()
    with torch.no_grad():
        outputs = model(**everything)
    _, parts = JointLoss("ce + matches(2)").with_parts(outputs.logits, everything["labels"])
    assert metrics["eval_ce"] == pytest.approx(parts["ce"].item(), abs=1e-5)
    assert metrics["eval_matches(2)"] == pytest.approx(parts["matches(2)"].item(), abs=1e-5)
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_matches(2)"], abs=1e-6)


def test_generated_predictions_of_a_decoder_only_model_would_see_the_reference(tmp_path):
    trainer = NgramTrainer(
        models.tiny("llama"),
        arguments(tmp_path, predict_with_generate=True),
        objective="ce",
        eval_dataset=[{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}] * 2,
        compute_metrics=row_count,
    )
    with pytest.raises(UserError, match=r"would show a decoder-only model the reference.*ScoreTexts"):
        trainer.evaluate()


@pytest.mark.parametrize("name", ["ce", "eval_matches(2)"])
def test_the_lowest_value_of_a_term_is_the_best(tmp_path, name):
    args = arguments(tmp_path, metric_for_best_model=name)
    assert args.greater_is_better  # as Hugging Face takes it
    model = tiny()
    trainer = NgramTrainer(model, args, objective="ce + matches(2)", train_dataset=rows(4), data_collator=padded(model))
    assert not trainer.args.greater_is_better


def test_virtual_tokens_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(models.tiny("llama"), config)
    with pytest.raises(UserError, match="virtual tokens"):
        NgramTrainer(model, arguments(tmp_path), objective="ce", train_dataset=rows(4))


def test_generated_predictions_reach_compute_metrics_beside_the_terms(tmp_path):
    model = tiny()
    model.generation_config.max_length = 12
    trainer = NgramTrainer(
        model,
        arguments(tmp_path, predict_with_generate=True, per_device_eval_batch_size=3),
        objective="ce",
        eval_dataset=rows(7),
        data_collator=padded(model),
        compute_metrics=row_count,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 7
    assert metrics["eval_ce"] == metrics["eval_loss"]


def test_logits_reach_compute_metrics_where_nothing_is_generated(tmp_path):
    model, shapes = tiny(), []

    def look(predicted):
        shapes.append((predicted.predictions[0].shape, predicted.label_ids.shape))
        return {}

    NgramTrainer(
        model,
        arguments(tmp_path),
        objective="ce",
        eval_dataset=rows(7),
        data_collator=padded(model),
        compute_metrics=look,
    ).evaluate()
    ((logits, labels),) = shapes
    assert logits == (*labels, models.V)


def test_plain_training_arguments_will_do(tmp_path):
    model = tiny()
    plain = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    trainer = NgramTrainer(model, plain, objective="ce", train_dataset=rows(8), data_collator=padded(model))
    assert trainer.train().global_step == 1


def test_a_model_made_late_gets_the_objective_too(tmp_path):
    made = []

    def model_init():
        made.append(tiny())
        return made[-1]

    trainer = NgramTrainer(
        args=arguments(tmp_path, max_steps=2),
        objective=OBJECTIVE,
        model_init=model_init,
        train_dataset=rows(8),
        data_collator=lambda batch: padded(made[-1])(batch),
    )
    trainer.train()
    assert "bag(2)" in trainer.state.log_history[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"bf16": True},
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_trains_with(tmp_path, changes):
    log = trained(tmp_path, max_steps=2, **changes).state.log_history
    assert log[0]["loss"] == pytest.approx(
        log[0]["ce"] + log[0]["matches(2)"] + log[0]["matches(3)"] + log[0]["bag(2)"], rel=1e-3
    )
    plain = trained(tmp_path / "plain", max_steps=2).state.log_history
    assert log[0]["loss"] == pytest.approx(plain[0]["loss"], rel=2e-2)


def trained_decoder(folder, *, family="llama", kind=NgramTrainer, data=8, **changes):
    """A training of a decoder-only model."""

    def collate(batch):
        made = padded(tiny())(batch)
        return {name: made[name] for name in ("input_ids", "attention_mask", "labels")}

    torch.manual_seed(0)
    trainer = kind(
        models.DECODER_ONLY[family](),
        arguments(folder, **changes),
        objective=OBJECTIVE,
        train_dataset=[{"input_ids": row["labels"], "labels": row["labels"]} for row in rows(data)],
        data_collator=collate,
    )
    trainer.train()
    return trainer


def test_a_decoder_only_model_is_counted_by_the_labels_that_are_predicted(tmp_path):
    whole = trained_decoder(tmp_path, max_steps=2)
    pieces = trained_decoder(tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert whole.state.log_history[1]["loss"] == pytest.approx(pieces.state.log_history[1]["loss"], abs=1e-4)


def test_a_continued_training_ends_at_the_same_weights(tmp_path):
    """From Hugging Face's own checkpoints, in the middle and at the end of an epoch of five steps."""
    settings = {"objective": "ce + matches(2)@ramp(0.2,0.6)", "save_strategy": "steps", "save_steps": 1, "data": 40}
    for strategy in ("random", "group_by_length"):
        settings |= {"train_sampling_strategy": strategy, "gradient_accumulation_steps": 2}
        once = trained(tmp_path / strategy, per_device_train_batch_size=4, **settings)
        for checkpoint in (2, 5, 7):
            folder = tmp_path / strategy / f"checkpoint-{checkpoint}"
            again = trained(tmp_path / "again", per_device_train_batch_size=4, resume=str(folder), **settings)
            assert again.state.global_step == once.state.global_step == 10
            assert_same_weights(again.model.state_dict(), once.model.state_dict(), 0)


def test_the_time_of_evaluations_and_checkpoints_is_not_that_of_documents(tmp_path, monkeypatch):
    """Every call of the clock is a second later, and an evaluation takes a thousand."""
    now = [0.0]

    def tick():
        now[0] += 1
        return now[0]

    def evaluate(self, *args, **kwargs):
        now[0] += 1000
        return {}

    monkeypatch.setattr("ngramloss.trainers.exact_steps.time.perf_counter", tick)
    monkeypatch.setattr(NgramTrainer, "_evaluate", evaluate)
    for every in (1, 3):
        settings = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": every, "max_steps": 6, "data": 48}
        log = trained(tmp_path, **settings).state.log_history
        speeds = [line["docs_per_second"] for line in log if "loss" in line]
        assert len(speeds) == 6 // every
        assert min(speeds) > 1  # of 8 documents a step, which takes a few seconds


def test_rows_without_labels_are_predicted_without_terms(tmp_path):
    trainer = trained(tmp_path, max_steps=1)
    unlabelled = [{name: row[name] for name in ("input_ids",)} for row in rows(4)]
    trainer.data_collator = lambda batch: {
        "input_ids": torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in batch], True, 1)
    }
    assert not {"test_loss", "test_ce"} & trainer.predict(unlabelled).metrics.keys()
    trainer.data_collator = padded(trainer.model)
    assert trainer.predict(rows(4)).metrics["test_ce"] > 0


def test_a_second_loss_is_refused(tmp_path):
    with pytest.raises(TypeError, match="do not pass `compute_loss_func`"):
        NgramTrainer(tiny(), arguments(tmp_path), objective="ce", compute_loss_func=print)
    with pytest.raises(ValueError, match=r"Write it in the objective: ce\(smoothing=0.1\)"):
        NgramTrainer(tiny(), arguments(tmp_path, label_smoothing_factor=0.1), objective="ce")


@pytest.mark.parametrize("option", [{"max_tokens": 0}, {"capture": False}, {"compile": True}], ids=str)
def test_planned_and_captured_steps_are_found_elsewhere(tmp_path, option):
    (name,) = option
    with pytest.raises(TypeError, match=rf"does not take `{name}`.*ng\.train\(.*`ngramloss train`"):
        NgramTrainer(tiny(), arguments(tmp_path), objective="ce", **option)


def test_a_tied_encoder_decoder_is_refused_under_fsdp(tmp_path, monkeypatch):
    """Accelerate 1.15 puts the shared embeddings and those of the encoder into two groups, and the first step fails."""

    class Sharding(NgramTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled = True

    monkeypatch.setattr("accelerate.Accelerator.is_fsdp2", property(lambda _: True))
    with pytest.raises(UserError, match=r"(?s)cannot shard this BartForConditionalGeneration.*`ngramloss train`"):
        Sharding(tiny(), arguments(tmp_path), objective="ce")
    Sharding(models.DECODER_ONLY["gpt2"](), arguments(tmp_path), objective="ce")


def test_parallelism_within_a_sequence_or_the_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(NgramTrainer, "get_tp_size", lambda self: 2)  # a model so split needs several processes
    with pytest.raises(ValueError, match=r"does not support. Use data parallelism \(DDP, FSDP\)"):
        NgramTrainer(tiny(), arguments(tmp_path), objective="ce")


# Several processes

WORKER = """
import json, sys
sys.path[:0] = {tests!r}
import torch
import test_trainer as t
from torch.distributed.tensor import DTensor
folder, changes = sys.argv[1], json.loads(sys.argv[2])
save, generates = changes.pop("save", None), changes.get("predict_with_generate")
if "family" in changes:
    trainer = t.trained_decoder(folder, kind=t.OnCpus, **changes)
else:
    trainer = t.trained(folder, compute_metrics=t.row_count if generates else None, **changes)
sharded = [isinstance(parameter, DTensor) for parameter in trainer.model.parameters()]
if save:
    trainer.save_model(save)
weights = {{name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in trainer.model.state_dict().items()}}
if trainer.args.process_index == 0:
    torch.save(weights, folder + "/weights.pt")
    json.dump({{"log": trainer.state.log_history, "any": any(sharded)}}, open(folder + "/log.json", "w"))
"""


def in_two_processes(folder, **changes):
    folder.mkdir(exist_ok=True)
    program = WORKER.format(tests=[str(HELPERS), str(TESTS / "trainers")])
    codes, err = fork_ranks(
        program, [str(folder), json.dumps(changes)], environment={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert codes == [0, 0], err[-3000:]
    return torch.load(folder / "weights.pt"), json.loads((folder / "log.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize(("batch", "accumulate"), few([(2, 2)], [(4, 1), (2, 2)]))
def test_two_processes_end_at_the_weights_of_one(tmp_path, whole, batch, accumulate, strategy):
    """22 rows: the last round of an epoch is filled with repeated rows, which must count for nothing."""
    weights, found = in_two_processes(
        tmp_path / "two",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy=strategy,
        eval_strategy="epoch",
        per_device_eval_batch_size=2,
        predict_with_generate=True,
        generation_max_length=6,
    )
    expected, log = whole[strategy]
    assert_same_weights(weights, expected)
    assert not found["any"]
    steps = [line for line in found["log"] if "loss" in line]
    for here, there in zip(steps, [line for line in log if "loss" in line], strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)"):
            assert here[name] == pytest.approx(there[name], abs=1e-4), name
    last = trained(tmp_path / "one", train_sampling_strategy=strategy, eval_strategy="epoch").state.log_history
    evaluated = [[line for line in lines if "eval_loss" in line][-1] for lines in (found["log"], last)]
    assert evaluated[0]["eval_rows"] == 7
    for name in ("eval_loss", "eval_ce", "eval_matches(2)", "eval_bag(2)"):
        assert evaluated[0][name] == pytest.approx(evaluated[1][name], abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", few(["group_by_length"], ["random", "group_by_length"]))
def test_two_processes_that_continue_within_the_second_epoch_end_at_the_same_weights(tmp_path, whole, strategy):
    """Three steps an epoch: the fourth is followed by two that must have the rows they would have had."""
    settings = {"per_device_train_batch_size": 4, "train_sampling_strategy": strategy}
    in_two_processes(tmp_path / "once", save_strategy="steps", save_steps=1, **settings)
    weights, _ = in_two_processes(tmp_path / "again", resume=str(tmp_path / "once" / "checkpoint-4"), **settings)
    assert_same_weights(weights, whole[strategy][0])


class OnCpus(NgramTrainer):
    """Lets Accelerate shard on CPU processes, where it would silently use DDP, because there is no GPU here."""

    def create_accelerator_and_postprocess(self):
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        super().create_accelerator_and_postprocess()
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # an own head, and one that is the embeddings
def test_a_decoder_only_model_sharded_by_accelerate_trains_alike_and_is_saved(tmp_path, family):
    weights, found = in_two_processes(
        tmp_path / "two",
        family=family,
        data=22,
        per_device_train_batch_size=4,
        fsdp=True,
        fsdp_config={"version": 2},
        save=str(tmp_path / "saved"),
    )
    assert found["any"], "no parameter is a DTensor"  # the head is whole after a forward without a backward
    alone = trained_decoder(tmp_path / "one", family=family, data=22)
    assert_same_weights(weights, alone.model.state_dict())
    for here, there in zip(found["log"], alone.state.log_history, strict=True):
        for name in ("loss", "ce", "matches(2)", "bag(2)"):
            assert here.get(name) == pytest.approx(there.get(name), abs=1e-4), name
    loaded = type(models.DECODER_ONLY[family]()).from_pretrained(tmp_path / "saved", use_safetensors=True)
    assert_same_weights(loaded.state_dict(), alone.model.state_dict())
