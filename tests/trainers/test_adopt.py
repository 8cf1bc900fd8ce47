"""Every way of adopting gives the joint loss of the model's own logits, or an error at the call that would not."""

import copy
import functools
import os
import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from models import PAD, V, batch, tiny
from places import HELPERS
from torch.testing import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

import ngramloss as ng
from ngramloss.errors import UserError
from ngramloss.models.attached.attach import attach, detach, logits_of
from ngramloss.models.attached.step_loss import shifted

pytestmark = [pytest.mark.adopt, pytest.mark.filterwarnings("ignore")]

OBJECTIVE = "ce + matches(1,2) + bag(2)"
FAMILIES = ["bart", "llama"]  # an encoder-decoder, and a decoder-only model with a masked prompt


def truth(family, inputs, objective=OBJECTIVE):
    """The joint loss of a plain model's own logits."""
    logits = logits_of(tiny(family), dict(inputs))
    labels = inputs["labels"] if family == "bart" else shifted(inputs["labels"])
    return ng.JointLoss(objective)(logits, labels).item()


def rows(family, B=4):
    inputs = batch(family, B=B)
    if family == "bart":
        inputs["decoder_input_ids"] = tiny(family).prepare_decoder_input_ids_from_labels(inputs["labels"])
    return [{name: value[i] for name, value in inputs.items()} for i in range(B)]


def collated(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def trainer(model, family, folder, *, kind=None, callbacks=None, options=None, **settings):
    kind = kind or (Seq2SeqTrainer if family == "bart" else Trainer)
    arguments = (Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments)(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    data = rows(family)
    return kind(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collated,
        callbacks=callbacks,
        **(options or {}),
    )


def logged_loss(it):
    it.train()
    return it.state.log_history[0]["loss"]


# The same loss everywhere


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loop_of_ones_own(family):
    inputs = batch(family)
    assert attach(tiny(family), OBJECTIVE)(**inputs).loss.item() == pytest.approx(truth(family, inputs), abs=1e-5)


@pytest.mark.parametrize(("family", "kind"), [("bart", Seq2SeqTrainer), ("bart", Trainer), ("llama", Trainer)])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_stock_trainers(family, kind, settings, tmp_path):
    """With bf16 Accelerate sets ``model.forward`` on the object, around ours."""
    found = logged_loss(trainer(attach(tiny(family), OBJECTIVE), family, tmp_path, kind=kind, **settings))
    assert found == pytest.approx(
        truth(family, collated(rows(family))), abs=0.05 if settings else 1e-5
    )  # bf16 has 8 bits


@pytest.fixture
def accelerate():
    """Without what a trainer before it left: the precision is remembered by the process."""
    package = pytest.importorskip("accelerate")
    package.state.AcceleratorState._reset_state()
    yield package
    package.state.AcceleratorState._reset_state()


@pytest.mark.parametrize("family", FAMILIES)
def test_accelerate(family, accelerate):
    accelerator = accelerate.Accelerator(cpu=True)
    model = attach(tiny(family), OBJECTIVE)
    prepared, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loss = prepared(**batch(family)).loss
    accelerator.backward(loss)
    optimiser.step()
    assert loss.item() == pytest.approx(truth(family, batch(family)), abs=1e-5)


def test_accelerate_in_mixed_precision_wraps_ours_and_unwraps_it_again(accelerate):
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(attach(tiny("bart"), OBJECTIVE))
    assert model.forward.__func__ is not type(model).forward
    assert model(**batch("bart")).loss.item() == pytest.approx(truth("bart", batch("bart")), abs=0.05)
    plain = accelerate.Accelerator(cpu=True, mixed_precision="bf16").unwrap_model(model, keep_fp32_wrapper=False)
    assert plain(**batch("bart")).loss.item() == pytest.approx(truth("bart", batch("bart")), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_lightning(family, tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    seen = {}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = attach(tiny(family), OBJECTIVE)

        def training_step(self, inputs, index):
            loss = self.model(**inputs).loss
            seen.update({name: value.item() for name, value in ng.last_parts(self.model).items()}, loss=loss.item())
            self.log_dict(ng.last_parts(self.model))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    loader = torch.utils.data.DataLoader(rows(family), batch_size=4, collate_fn=collated)
    lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(Module(), loader)
    assert seen["loss"] == pytest.approx(truth(family, collated(rows(family))), abs=1e-5)
    assert seen["loss"] == pytest.approx(sum(value for name, value in seen.items() if name != "loss"), abs=1e-5)


# TRL: whether the trainer asks the model for a loss depends on its version and its loss_type

TRL = """
import sys
sys.path.insert(0, {tests!r})
import trl
from datasets import Dataset
from test_adopt import OBJECTIVE, batch, packed_truth, tiny, truth, word_tokenizer
import ngramloss as ng

def rows():
    inputs = batch("llama", B=4)
    for i in range(4):
        real = inputs["attention_mask"][i].bool()
        yield dict(input_ids=inputs["input_ids"][i][real].tolist(), completion_mask=(inputs["labels"][i][real] != -100).long().tolist())

def loss(model, options=None, **settings):
    arguments = trl.SFTConfig(output_dir={folder!r}, per_device_train_batch_size=4, max_steps=1, learning_rate=0.0, logging_steps=1, use_cpu=True,
                              bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, **settings)
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(list(rows())), processing_class=word_tokenizer(), **(options or dict()))
    inputs = trainer.data_collator(list(trainer.train_dataset))
    trainer.train()
    packs = arguments.packing or arguments.padding_free
    return trainer.state.log_history[0]["loss"], (packed_truth if packs else truth)("llama", inputs)

def attached(**settings):
    return loss(ng.attach(tiny("llama"), OBJECTIVE), **settings)

def by_function(**settings):
    model = tiny("llama")
    return loss(model, options=dict(compute_loss_func=ng.compute_loss_func(OBJECTIVE, model=model)), **settings)

print("version", trl.__version__)
for way in ({ways}):
    try:
        print("loss", *way())
    except ng.UserError as mistake:
        print("error", mistake)
"""


def packed_truth(family, inputs):
    """The loss of a packed row, from the model's own logits and each document by itself."""
    logits = tiny(family)(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits
    (starts,) = (inputs["position_ids"][0] == 0).nonzero(as_tuple=True)
    documents = [
        (logits[0, first:end], inputs["labels"][0, first:end])
        for first, end in zip(starts.tolist(), [*starts.tolist()[1:], logits.shape[1]], strict=True)
    ]
    rows, labels = zip(*documents, strict=True)
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ng.JointLoss(OBJECTIVE)(rows, shifted(padded)).item()


def word_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(V)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}", eos_token="t2", bos_token="t0")


def trl(tmp_path, ways, path=()):
    """In a process of its own: two versions of TRL cannot live in one, and it changes Trainer for those after it."""
    program = TRL.format(tests=str(HELPERS), folder=str(tmp_path), ways=ways)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line.partition(" ")[::2]
        for line in done.stdout.splitlines()
        if line.startswith(("version ", "loss ", "error "))
    ]
    return lines[0][1], lines[1:]


def test_trl_of_today_never_asks_the_model_for_a_loss(tmp_path):
    pytest.importorskip("trl")
    version, (default, nll, function) = trl(tmp_path, 'attached, lambda: attached(loss_type="nll"), by_function,')
    assert tuple(map(int, version.split(".")[:2])) >= (1, 15)
    for kind, told in (default, nll):
        assert kind == "error"
        assert (
            "does not come from the objective attached to this LlamaForCausalLM: after attach, `model.forward` was replaced (by trl.trainer.utils)"
            in told
        )
        assert "train with ng.NgramSFTTrainer(..., objective=...)" in told
    assert function[0] == "loss"
    found, expected = map(float, function[1].split())
    assert found == pytest.approx(expected, abs=1e-5)


PACKED = """lambda: {way}(padding_free=True, max_length=None{more}), lambda: {way}(packing=True, packing_strategy="bfd", max_length=64{more}),
lambda: {way}(packing=True, packing_strategy="wrapped", max_length=64{more}),"""


def check_packed(padding_free, bfd, wrapped):
    for kind, told in (padding_free, bfd):
        assert kind == "loss", told
        found, expected = map(float, told.split())
        assert found == pytest.approx(expected, abs=1e-5)
    assert wrapped[0] == "error"
    assert "packing_strategy='wrapped' puts documents into rows without saying where they begin" in wrapped[1]


def test_packed_rows_of_trl_are_unpacked_and_those_without_a_trace_refused(tmp_path):
    pytest.importorskip("trl")
    _, results = trl(tmp_path, PACKED.format(way="by_function", more=""))
    check_packed(*results)


def test_packed_rows_of_an_older_trl_are_unpacked_by_attach(tmp_path):
    older = Path(sys.prefix) / "older"
    if not (older / "trl").is_dir():
        pytest.skip("no older TRL is installed: make setup does")
    _, results = trl(tmp_path, PACKED.format(way="attached", more=', loss_type="nll"'), [str(older)])
    check_packed(*results)


def test_trl_before_1_15_is_served_by_attach_with_nll_and_refused_with_its_chunked_default(tmp_path):
    older = Path(sys.prefix) / "older"
    if not (older / "trl").is_dir():
        pytest.skip("no older TRL is installed: make setup does")
    version, (default, nll, function) = trl(
        tmp_path, 'attached, lambda: attached(loss_type="nll"), lambda: by_function(loss_type="nll"),', [str(older)]
    )
    assert version == "1.14.2"
    assert default[0] == "error"
    assert "was replaced (by trl.trainer.sft_trainer)" in default[1]
    for kind, told in (nll, function):
        assert kind == "loss"
        found, expected = map(float, told.split())
        assert found == pytest.approx(expected, abs=1e-5)


# A forward that a library sets on the object


def own_loss(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
    """A loss without the objective, as a fused one."""
    return types.SimpleNamespace(loss=self.get_output_embeddings().weight.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_set_later_that_computes_a_loss_of_its_own_is_an_error(family):
    model = attach(tiny(family), OBJECTIVE)
    model.forward = types.MethodType(own_loss, model)
    with pytest.raises(
        UserError,
        match=r"the loss does not come from the objective attached to this \w+: after attach, `model\.forward` was replaced \(by test_adopt\)",
    ):
        model(**batch(family))
    with pytest.raises(UserError, match="does not come from the objective"):
        torch.nn.Sequential(model)[0](**batch(family))
    inputs = {name: value for name, value in batch(family).items() if name != "labels"}
    assert model(**inputs).loss is not None  # without labels nothing was promised


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_set_later_that_calls_ours_gives_our_loss(family):
    model = attach(tiny(family), OBJECTIVE)
    ours = model.forward

    def wrapped(*args, **kwargs):
        return ours(*args, **kwargs)

    model.forward = wrapped
    assert model(**batch(family)).loss.item() == pytest.approx(truth(family, batch(family)), abs=1e-5)
    model.forward = types.MethodType(lambda self, **kwargs: type(self).forward(self, **kwargs), model)
    assert model(**batch(family)).loss.item() == pytest.approx(truth(family, batch(family)), abs=1e-5)
    del model.forward
    assert model(**batch(family)).loss.item() == pytest.approx(truth(family, batch(family)), abs=1e-5)
    with pytest.raises(AttributeError, match="forward"):
        del model.forward


def test_a_loss_of_before_does_not_excuse_a_forward_that_was_replaced():
    model = attach(tiny("bart"), OBJECTIVE)
    model(**batch("bart"))
    model.forward = types.MethodType(own_loss, model)
    with pytest.raises(UserError, match="does not come from the objective"):
        model(**batch("bart"))


def test_another_attached_model_within_does_not_excuse_it_either():
    model, other = attach(tiny("bart"), OBJECTIVE), attach(tiny("t5"), OBJECTIVE)
    model.forward = types.MethodType(lambda self, **inputs: other(**batch("t5")), model)
    with pytest.raises(UserError, match="does not come from the objective"):
        model(**batch("bart"))


@pytest.mark.parametrize("family", FAMILIES)
def test_running_the_objective_is_not_enough_if_another_loss_is_returned(family):
    model, plain = attach(tiny(family), OBJECTIVE), tiny(family)
    ours = model.forward

    def unheard(**inputs):
        with torch.no_grad():
            ours(**inputs)
        return plain(**inputs)

    def replaced(**inputs):
        outputs = ours(**inputs)
        outputs.loss = plain(**inputs).loss
        return outputs

    for forward in (unheard, replaced):
        model.forward = forward
        with pytest.raises(UserError, match="does not come from the objective"):
            model(**batch(family))


def test_a_forward_that_is_a_method_of_something_else_keeps_its_own_self():
    class Engine:
        def __init__(self, model):
            self.ours, self.calls = model.forward, 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            return self.ours(*args, **kwargs)

    model = attach(tiny("bart"), OBJECTIVE)
    engine = Engine(model)
    model.forward = engine.forward
    assert model(**batch("bart")).loss.item() == pytest.approx(truth("bart", batch("bart")), abs=1e-5)
    assert engine.calls == 1


def test_a_loss_that_is_computed_from_ours_is_served():
    model = attach(tiny("bart"), OBJECTIVE)
    ours = model.forward

    def scaled(**inputs):
        outputs = ours(**inputs)
        outputs.loss = 2 * outputs.loss.double() + 1
        return outputs

    model.forward = scaled
    assert model(**batch("bart")).loss.item() == pytest.approx(2 * truth("bart", batch("bart")) + 1, abs=1e-4)
    with torch.no_grad():
        model(**batch("bart"))
    model.requires_grad_(False)
    model(**batch("bart"))


def test_an_attached_teacher_beside_the_objective_is_served_and_does_not_stand_in_for_it():
    student, teacher = attach(tiny("bart"), OBJECTIVE), attach(tiny("bart", seed=1), OBJECTIVE)
    ours = student.forward

    def distilled(**inputs):
        outputs = ours(**inputs)
        outputs.loss = outputs.loss + teacher(**inputs).loss.detach()
        return outputs

    student.forward = distilled
    assert student(**batch("bart")).loss.requires_grad
    copied = copy.deepcopy(teacher)
    copied.forward = lambda **inputs: teacher(**inputs)
    with pytest.raises(UserError, match="does not come from the objective"):
        copied(**batch("bart"))


def test_a_copy_made_after_accelerate_wrapped_the_model_has_weights_of_its_own(accelerate):
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(attach(tiny("bart"), "ce"))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(3)
    first, second = (one(**batch("bart")).loss for one in (model, other))
    assert abs(first.item() - second.item()) > 0.1
    second.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in other.parameters())


def test_two_models_that_share_a_head_get_their_own_losses():
    one, other = tiny("bart"), tiny("bart", seed=1)
    other.lm_head = one.lm_head
    other.final_logits_bias = one.final_logits_bias
    expected = [
        ng.JointLoss(OBJECTIVE)(logits_of(model, batch("bart")), batch("bart")["labels"]).item()
        for model in (one, other)
    ]
    for model, loss in zip((attach(one, OBJECTIVE), attach(other, OBJECTIVE)), expected, strict=True):
        assert model(**batch("bart")).loss.item() == pytest.approx(loss, abs=1e-5)


def test_positions_cut_off_before_the_loss_are_refused():
    with pytest.raises(UserError, match="logits_to_keep removes positions before the loss"):
        attach(tiny("llama"), OBJECTIVE)(**batch("llama"), logits_to_keep=2)


def test_a_replaced_forward_is_checked_inside_torch_compile_too():
    model = attach(tiny("llama"), OBJECTIVE)
    ours = model.forward
    model.forward = lambda **kwargs: ours(**kwargs)
    compiled = torch.compile(model, backend="eager")
    assert compiled(**batch("llama")).loss.item() == pytest.approx(truth("llama", batch("llama")), abs=1e-5)
    torch._dynamo.reset()
    model.forward = types.MethodType(own_loss, model)
    with pytest.raises(Exception, match="does not come from the objective"):
        torch.compile(model, backend="eager")(**batch("llama"))


def test_a_forward_that_is_compiled_by_itself_is_ours_still():
    model = attach(tiny("llama"), OBJECTIVE)
    model.forward = torch.compile(model.forward, backend="eager")
    assert model(**batch("llama")).loss.item() == pytest.approx(truth("llama", batch("llama")), abs=1e-5)


def test_a_copy_of_a_model_with_a_replaced_forward_and_one_that_is_detached_behave_as_before():
    model = attach(tiny("bart"), OBJECTIVE)
    model.forward = functools.partial(type(model).forward, model)
    assert copy.deepcopy(model)(**batch("bart")).loss.item() == pytest.approx(truth("bart", batch("bart")), abs=1e-5)
    own = tiny("bart")(**batch("bart")).loss.item()
    assert detach(model)(**batch("bart")).loss.item() == pytest.approx(own, abs=1e-6)
    assert isinstance(vars(model)["_ngramloss_forward"], functools.partial)  # what was set on it stays set
    assert attach(model, OBJECTIVE)(**batch("bart")).loss.item() == pytest.approx(
        truth("bart", batch("bart")), abs=1e-5
    )


# A trainer that makes the loss itself


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("does", ["train", "evaluate", "predict"])
def test_label_smoothing_of_the_trainer_is_an_error_and_says_what_to_write(family, does, tmp_path):
    it = trainer(attach(tiny(family), "ce + 100*matches(2)"), family, tmp_path, label_smoothing_factor=0.3)
    with pytest.raises(
        UserError,
        match=r"label_smoothing_factor computes the loss from the logits, so the attached objective 'ce \+ 100\*matches\(2\)' "
        r"would not run\. Remove label_smoothing_factor, and write it in the objective: ce\(smoothing=0\.3\)",
    ):
        it.predict(it.eval_dataset) if does == "predict" else getattr(it, does)()


def test_label_smoothing_beside_generation_is_an_error_too(tmp_path):
    it = trainer(
        attach(tiny("bart"), OBJECTIVE), "bart", tmp_path, label_smoothing_factor=0.1, predict_with_generate=True
    )
    with pytest.raises(UserError, match="label_smoothing_factor"):
        it.predict(it.eval_dataset)


def test_label_smoothing_inside_torch_compile_is_an_error_too(tmp_path):
    it = trainer(
        attach(tiny("llama"), OBJECTIVE),
        "llama",
        tmp_path,
        label_smoothing_factor=0.1,
        torch_compile=True,
        torch_compile_backend="eager",
    )
    with pytest.raises(Exception, match="label_smoothing_factor computes the loss from the logits"):
        it.train()


def test_label_smoothing_of_a_model_without_an_objective_is_none_of_our_business(tmp_path):
    trainer(detach(attach(tiny("bart"), OBJECTIVE)), "bart", tmp_path, label_smoothing_factor=0.1).train()


def test_prediction_without_labels_works_whatever_the_smoothing(tmp_path):
    it = trainer(attach(tiny("bart"), OBJECTIVE), "bart", tmp_path, label_smoothing_factor=0.1)
    unlabelled = [{name: value for name, value in row.items() if name != "labels"} for row in rows("bart")]
    assert it.predict(unlabelled).predictions[0].shape == (4, 9, V)


def test_a_loss_function_of_the_trainer_is_an_error_but_ours(tmp_path):
    custom = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()}
    with pytest.raises(
        UserError,
        match=r"compute_loss_func computes the loss from the logits.*Remove compute_loss_func, or detach\(model\)",
    ):
        trainer(attach(tiny("bart"), "ce"), "bart", tmp_path, options=custom).train()
    ours = trainer(
        attach(tiny("bart"), "ce"), "bart", tmp_path, options={"compute_loss_func": ng.compute_loss_func(OBJECTIVE)}
    )
    assert logged_loss(ours) == pytest.approx(truth("bart", collated(rows("bart"))), abs=1e-5)


def test_a_teacher_within_a_students_training_is_none_of_the_trainers_business(tmp_path):
    teacher = attach(tiny("bart", seed=1), OBJECTIVE)

    class Distils(Seq2SeqTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
            with torch.no_grad():
                teacher(**unlabelled)
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    trainer(tiny("bart"), "bart", tmp_path, kind=Distils, label_smoothing_factor=0.1).train()


# Logits for those who read them


def own_logits(family):
    with torch.no_grad():
        return logits_of(tiny(family).eval(), collated(rows(family)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_predict_gives_the_models_own_logits(family, kind, tmp_path):
    options = {"objective": OBJECTIVE} if kind == "ours" else {}
    model = tiny(family) if kind == "ours" else attach(tiny(family), OBJECTIVE)
    it = trainer(model, family, tmp_path, kind=ng.NgramTrainer if kind == "ours" else None, options=options)
    predictions = it.predict(it.eval_dataset).predictions
    found = predictions[0] if isinstance(predictions, tuple) else predictions
    assert_close(torch.from_numpy(found), own_logits(family), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("compiled", [False, True])
def test_compute_metrics_and_preprocessing_get_the_models_own_logits(kind, compiled, tmp_path):
    seen = {}

    def preprocess(logits, labels):
        seen["shape"] = logits[0].shape
        return logits[0].argmax(-1)

    def metrics(prediction):
        seen["predictions"] = prediction.predictions
        return {"right": float((prediction.predictions == prediction.label_ids).mean())}

    options = {"compute_metrics": metrics, "preprocess_logits_for_metrics": preprocess} | (
        {"objective": OBJECTIVE} if kind == "ours" else {}
    )
    model = tiny("bart") if kind == "ours" else attach(tiny("bart"), OBJECTIVE)
    settings = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    it = trainer(model, "bart", tmp_path, kind=ng.NgramTrainer if kind == "ours" else None, options=options, **settings)
    found = it.evaluate()
    assert seen["shape"] == (2, 9, V)
    assert (torch.from_numpy(seen["predictions"]) == own_logits("bart").argmax(-1)).all()
    assert "eval_right" in found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_reach_a_trainer_whose_methods_are_written_by_its_user(family, tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if kwargs.get("return_outputs") else outputs.loss

    class Direct(Trainer):
        def prediction_step(self, model, inputs, *args, **kwargs):
            with torch.no_grad():
                outputs = model(**self._prepare_inputs(inputs))
            return outputs.loss, outputs.logits, inputs["labels"]

    for kind in (Own, Direct):
        it = trainer(attach(tiny(family), OBJECTIVE), family, tmp_path, kind=kind)
        predictions = it.predict(it.eval_dataset).predictions
        found = predictions[0] if isinstance(predictions, tuple) else predictions
        assert_close(torch.from_numpy(found), own_logits(family), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_of_the_loss_alone_and_training_make_no_logits(family, tmp_path):
    it = trainer(attach(tiny(family), OBJECTIVE), family, tmp_path)
    head, widths = it.model.get_output_embeddings(), []
    head.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    whole = collated(rows(family))["labels"].shape[1]
    it.evaluate()
    it.train()
    # Ours moves behind a hook that comes later, so this one saw whole inputs; what the head was handed is its output.
    outputs = []
    handle = head.register_forward_hook(lambda _, args, output: outputs.append(output.shape[1]))
    it.evaluate()
    handle.remove()
    assert set(widths) == {whole}
    assert set(outputs) == {1}


# Hooks on the head


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_that_changes_the_heads_input_later_is_followed(family):
    model = attach(tiny(family), OBJECTIVE)
    model(**batch(family))
    plain = tiny(family)
    for one in (model, plain):
        one.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    logits = logits_of(plain, batch(family))
    labels = batch(family)["labels"] if family == "bart" else shifted(batch(family)["labels"])
    assert model(**batch(family)).loss.item() == pytest.approx(ng.JointLoss(OBJECTIVE)(logits, labels).item(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_that_changes_the_heads_output_later_is_an_error(family):
    model = attach(tiny(family), OBJECTIVE)
    model(**batch(family))
    handle = model.get_output_embeddings().register_forward_hook(lambda _, args, output: output * 1.5)
    with pytest.raises(ValueError, match="changes its logits after the head"):
        model(**batch(family))
    handle.remove()
    assert model(**batch(family)).loss.item() == pytest.approx(truth(family, batch(family)), abs=1e-5)


def test_a_hook_on_the_heads_output_is_looked_at_at_every_call():
    model, change = attach(tiny("bart"), OBJECTIVE), [1.0]
    model.get_output_embeddings().register_forward_hook(lambda _, args, output: output * change[0])
    model(**batch("bart"))
    change[0] = 2.0
    with pytest.raises(ValueError, match="changes its logits after the head"):
        model(**batch("bart"))


def test_a_head_whose_class_is_changed_later_is_looked_at_again():
    model = attach(tiny("bart"), OBJECTIVE)
    model(**batch("bart"))

    class Tripled(torch.nn.Linear):
        def forward(self, hidden):
            return 3 * super().forward(hidden)

    model.lm_head.__class__ = Tripled
    with pytest.raises(ValueError, match="changes its logits after the head"):
        model(**batch("bart"))


def test_a_hook_on_every_modules_output_is_looked_at_too():
    model = attach(tiny("bart"), OBJECTIVE)
    model(**batch("bart"))
    head = model.get_output_embeddings()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if module is head else None
    )
    try:
        with pytest.raises(ValueError, match="changes its logits after the head"):
            model(**batch("bart"))
    finally:
        handle.remove()


def test_a_hook_that_only_looks_changes_nothing():
    model, seen = attach(tiny("bart"), OBJECTIVE), []
    model.get_output_embeddings().register_forward_hook(lambda _, args, output: seen.append(output.shape))
    for _ in range(3):
        assert model(**batch("bart")).loss.item() == pytest.approx(truth("bart", batch("bart")), abs=1e-5)
    assert len(seen) == 3


# Threads


def test_threads_that_share_a_model_get_right_answers():
    model = attach(tiny("bart"), OBJECTIVE).eval()
    batches = [batch("bart", B=2 + seed % 3, T=5 + seed % 4, seed=seed) for seed in range(8)]
    losses = [truth("bart", inputs) for inputs in batches]
    unlabelled = [{name: value for name, value in inputs.items() if name != "labels"} for inputs in batches]
    shapes = [tiny("bart")(**inputs).logits.shape for inputs in unlabelled]
    wrong = []

    def work(number):
        for turn in range(40):
            place = (number + turn) % len(batches)
            try:
                if number % 2:
                    loss = model(**batches[place]).loss
                    if abs(loss.item() - losses[place]) > 1e-5:
                        wrong.append(("loss", place, loss.item()))
                    if abs(sum(ng.last_parts(model).values()).item() - losses[place]) > 1e-5:
                        wrong.append(("parts", place))
                elif model(**unlabelled[place]).logits.shape != shapes[place]:
                    wrong.append(("logits", place))
            except Exception as error:
                wrong.append(("error", place, repr(error)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_thread_that_computed_nothing_reads_the_last_terms_of_all():
    model, found = attach(tiny("bart"), OBJECTIVE), {}
    model(**batch("bart"))
    reader = threading.Thread(target=lambda: found.update(ng.last_parts(model)))
    reader.start()
    reader.join()
    assert found == ng.last_parts(model)


def test_an_attached_model_is_pickled_without_its_threads():
    model = attach(tiny("bart"), OBJECTIVE)
    model(**batch("bart"))
    again = pickle.loads(pickle.dumps(model))
    assert again(**batch("bart")).loss.item() == pytest.approx(truth("bart", batch("bart")), abs=1e-5)
    assert sum(ng.last_parts(again).values()).item() == pytest.approx(truth("bart", batch("bart")), abs=1e-5)


# Every term in a stock trainer's log


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [4, 2, 1])
def test_log_parts_logs_every_term_in_training_and_evaluation(family, size, tmp_path):
    it = trainer(attach(tiny(family), "ce + 0.5*matches(2) + bag(2)"), family, tmp_path, callbacks=[ng.LogParts()])
    it.args.per_device_train_batch_size = it._train_batch_size = size
    it.args.gradient_accumulation_steps = 4 // size
    it.args.per_device_eval_batch_size = size
    it.train()
    log = it.state.log_history[0]
    assert log["loss"] == pytest.approx(log["ce"] + 0.5 * log["matches(2)"] + log["bag(2)"], abs=1e-4)
    labels = collated(rows(family))["labels"]
    with torch.no_grad():
        _, parts = ng.JointLoss("ce + 0.5*matches(2) + bag(2)").with_parts(
            own_logits(family), labels if family == "bart" else shifted(labels)
        )
    assert log["ce"] == pytest.approx(parts["ce"].item(), abs=1e-5)
    validated = it.evaluate()
    predicted = it.predict(it.eval_dataset).metrics
    for name, value in parts.items():
        assert validated[f"eval_{name}"] == pytest.approx(value.item(), abs=1e-5)
        assert predicted[f"test_{name}"] == pytest.approx(value.item(), abs=1e-5)
    assert "eval_bag(2)" in it.state.log_history[-1]


def test_log_parts_averages_where_the_trainer_gives_no_counts(tmp_path):
    model = attach(tiny("bart"), "ce + matches(2)")
    model.accepts_loss_kwargs = False
    it = trainer(model, "bart", tmp_path, callbacks=[ng.LogParts()], gradient_accumulation_steps=2)
    it.args.per_device_train_batch_size = it._train_batch_size = 2
    it.train()
    log = it.state.log_history[0]
    assert log["loss"] == pytest.approx(log["ce"] + log["matches(2)"], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_last_parts_are_means_of_each_batch_whatever_the_loss_is_divided_by(family, tmp_path):
    class Collects(TrainerCallback):
        def on_substep_end(self, *args, model, **kwargs):
            seen.append({name: value.item() for name, value in ng.last_parts(model).items()})

        on_step_end = on_substep_end

    seen, model, loss_fn = [], attach(tiny(family), OBJECTIVE), ng.JointLoss(OBJECTIVE)
    it = trainer(model, family, tmp_path, callbacks=[Collects(), ng.LogParts()], gradient_accumulation_steps=4)
    it.args.per_device_train_batch_size = it._train_batch_size = 1
    it.train()
    for row in rows(family)[:4]:
        model(**collated([row]), num_tokens=60, num_sequences=7.0)
        seen.append({name: value.item() for name, value in ng.last_parts(model).items()})
    logits, labels = own_logits(family), collated(rows(family))["labels"]  # [4, T, V], [4, T]
    labels = labels if family == "bart" else shifted(labels)  # [4, T]
    wanted = [loss_fn.with_parts(logits[at : at + 1], labels[at : at + 1])[1] for at in range(4)]
    assert seen == [pytest.approx({name: value.item() for name, value in parts.items()}) for parts in wanted * 2]
    counts = (labels[:4] != -100).sum(-1).tolist()
    mean = sum(parts["ce"] * count for parts, count in zip(seen[:4], counts, strict=True)) / sum(counts)
    assert it.state.log_history[0]["ce"] == pytest.approx(mean)


def test_log_parts_comes_before_whoever_reports(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer(attach(tiny("bart"), OBJECTIVE), "bart", tmp_path, callbacks=[Reporter(), ng.LogParts()]).train()
    assert {"ce", "matches(1)", "matches(2)", "bag(2)"} <= seen[0].keys()


def test_log_parts_without_an_objective_is_an_error(tmp_path):
    with pytest.raises(
        UserError, match=r"found no objective.*Call ng\.attach\(model, \.\.\.\) before .*compute_loss_func=ng\.compute"
    ):
        trainer(tiny("bart"), "bart", tmp_path, callbacks=[ng.LogParts()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", ["found", "given", "added"])
def test_log_parts_knows_a_compute_loss_func_and_its_schedule(family, given, tmp_path):
    model = tiny(family)
    function = ng.compute_loss_func("ce + matches(2)@from(0.5)", model=model if family == "llama" else None)
    callback = ng.LogParts(function) if given == "given" else ng.LogParts()
    first = [] if given == "added" else [callback]
    it = trainer(model, family, tmp_path, callbacks=first, options={"compute_loss_func": function})
    if given == "added":
        it.add_callback(callback)
    it.args.max_steps = 2
    if given != "added":
        assert {"eval_ce", "eval_matches(2)"} <= it.evaluate().keys()  # before training
    it.train()
    before, after = it.state.log_history[:2]
    assert before["loss"] == pytest.approx(before["ce"], abs=1e-4)
    assert after["loss"] == pytest.approx(after["ce"] + after["matches(2)"], abs=1e-4)
    assert it.callback_handler.callbacks[0] is callback  # before whoever reports
    labels = collated(rows(family))["labels"]
    with torch.no_grad():
        _, parts = ng.JointLoss("ce + matches(2)").with_parts(
            own_logits(family), labels if family == "bart" else shifted(labels)
        )
    validated = it.evaluate()
    for name, value in parts.items():
        assert validated[f"eval_{name}"] == pytest.approx(value.item(), abs=1e-5)


def test_a_schedule_without_progress_says_who_knows_it(tmp_path):
    function = ng.compute_loss_func("ce + matches(2)@from(0.5)")
    with pytest.raises(UserError, match=r"depends on the progress of training.*callbacks=\[ng\.LogParts\(\)\]"):
        trainer(tiny("bart"), "bart", tmp_path, options={"compute_loss_func": function}).train()


def test_log_parts_takes_no_function_of_another(tmp_path):
    with pytest.raises(TypeError, match=r"takes what ng\.compute_loss_func\(\.\.\.\) returned, got builtin_function"):
        ng.LogParts(print)


def test_a_batch_without_labels_adds_nothing_to_any_log(tmp_path):
    it = trainer(attach(tiny("bart"), OBJECTIVE), "bart", tmp_path, callbacks=[ng.LogParts()])
    it.evaluate()
    it.predict([{name: value for name, value in row.items() if name != "labels"} for row in rows("bart")])
    it.train()
    assert not [key for log in it.state.log_history for key in log if key.startswith("train_") and "(" in key]
    assert "train_ce" not in it.state.log_history[-1]


def test_an_evaluation_that_was_broken_off_does_not_count_in_the_next(tmp_path):
    it = trainer(attach(tiny("bart"), OBJECTIVE), "bart", tmp_path, callbacks=[ng.LogParts()])
    expected = it.evaluate()["eval_ce"]
    whole, calls = it.prediction_step, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    it.prediction_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        it.evaluate([*rows("bart")[:2], *rows("bart")[:1], *rows("bart")[:1]])
    it.prediction_step = whole
    assert it.evaluate()["eval_ce"] == pytest.approx(expected, abs=1e-6)


# One walk of the call stack a call


@pytest.fixture
def walks(monkeypatch):
    """Who of us began to walk the call stack."""
    begun, own = [], sys._getframe

    def counted(depth=0):
        name = own(1).f_globals.get("__name__", "")
        if name.startswith("ngramloss."):
            begun.append(name)
        return own(depth + 1)

    monkeypatch.setattr(sys, "_getframe", counted)
    return begun


@pytest.mark.parametrize("does", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("way", ["attach", "compute_loss_func"])
def test_a_call_walks_the_call_stack_once(way, does, walks, tmp_path):
    attached = way == "attach"
    model, function = tiny("llama"), ng.compute_loss_func(OBJECTIVE)
    it = trainer(
        attach(model, OBJECTIVE) if attached else model,
        "llama",
        tmp_path,
        gradient_accumulation_steps=2,
        options={} if attached else {"compute_loss_func": function},
    )
    calls = []
    model.register_forward_pre_hook(lambda *given: calls.append(given))
    walks.clear()
    it.predict(it.eval_dataset) if does == "predict" else getattr(it, does)()
    assert calls
    assert walks == ["ngramloss.models.attached.callers"] * len(calls)


@pytest.mark.parametrize("labels", [True, False])
def test_a_call_without_a_trainer_walks_it_once_too(labels, walks):
    model, inputs = attach(tiny("bart"), OBJECTIVE), batch("bart")
    if not labels:
        inputs |= {"decoder_input_ids": inputs.pop("labels").clamp_min(0)}
    walks.clear()
    model(**inputs)
    assert walks == ["ngramloss.models.attached.callers"]
