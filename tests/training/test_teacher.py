"""Trainings beside a teacher: another model, or the model itself before training."""

import copy
import json
import shutil
from pathlib import Path

import models
import pytest
import torch
import transformers
from looped import assert_same_log, in_two_processes, trained
from safetensors.torch import load_file
from trainings import arguments, assert_same_weights, joined_rows, padded, rows, rows_with_candidates, tiny
from trainings import trained as trainers

import ngramloss as ng
from ngramloss import cli
from ngramloss.data import newswire
from ngramloss.models.adapters import add_lora
from ngramloss.models.attached import teachers
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.recipe import Model
from ngramloss.training.processes import start_processes

TERMS = ("loss", "ce", "distill(temperature=2)", "grad_norm")
DISTILL = "ce + 0.5*distill(temperature=2)"


def wide(dropout=0.3):
    """A teacher of another width, with dropout that must not be seen."""
    torch.manual_seed(7)
    settings = models.BART | {"d_model": 24, "dropout": dropout}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**settings))
    for weight in model.parameters():
        weight.data *= 4  # so that it is sure of something
    return model.train()


def logits_of(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", decoder_inputs(model, batch["labels"]))
    with torch.no_grad():
        return copy.deepcopy(model).eval()(**inputs).logits


def by_hand(objective, model, teacher, batch):
    """Loss and terms of a batch from the logits of both models."""
    own, other, labels = logits_of(model, batch), logits_of(teacher, batch), batch["labels"]
    if not model.config.is_encoder_decoder:
        own, other, labels = own[:, :-1], other[:, :-1], labels[:, 1:]
    return ng.JointLoss(objective).with_parts(own, labels, teacher=other)


@pytest.mark.parametrize("family", ["bart", "t5", "llama", "gemma2", "gpt2"])
def test_an_attached_model_is_compared_with_its_teacher(family):
    torch.manual_seed(1)
    teacher = models.FAMILIES[family]()
    torch.manual_seed(0)
    model, batch = models.FAMILIES[family](), models.batch(family)
    loss, parts = by_hand(DISTILL, model, teacher, batch)
    ng.attach(model, DISTILL, teacher=teacher)
    before = [weight.clone() for weight in teacher.parameters()]
    for mode in (True, False):  # evaluation has the same terms
        got = model.train(mode)(**batch).loss
        torch.testing.assert_close(got, loss, atol=1e-5, rtol=1e-5)
        assert ng.last_parts(model).keys() == parts.keys()
    got.backward()
    assert all(weight.grad is None for weight in teacher.parameters())
    assert all(torch.equal(one, two) for one, two in zip(before, teacher.parameters(), strict=True))
    assert not any("teacher" in name for name in model.state_dict())
    ng.attach(model, DISTILL, teacher=teacher, logits=True)
    torch.testing.assert_close(model.eval()(**batch).loss, loss, atol=1e-5, rtol=1e-5)


def test_packed_documents_are_read_alike():
    torch.manual_seed(1)
    teacher = models.DECODER_ONLY["llama"]()
    torch.manual_seed(0)
    model = models.DECODER_ONLY["llama"]()
    ids = torch.randint(4, models.V, (1, 12), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(7), torch.arange(5)]).view(1, -1)}
    found = []
    for cached in (True, False):  # transformers looks for packed documents only if there is no cache
        given = {**batch, "labels": ids, "use_cache": cached}
        loss, _ = by_hand("ce + keep", model, teacher, given)
        got = ng.attach(model, "ce + keep", teacher=teacher)(**given).loss
        torch.testing.assert_close(got, loss, atol=1e-5, rtol=1e-5)
        ng.detach(model)
        found.append(got.item())
    assert found[0] != found[1]


def test_attached_candidates_beside_a_teacher():
    data = rows_with_candidates(8)
    settings = {"objective": "ce + keep + rank(margin=0.1,alpha=1)", "data": data, "max_steps": 3}
    log = trained(model=tiny(), **settings).log
    assert log[0]["keep"] == pytest.approx(0, abs=1e-6)
    assert log[2]["keep"] > 1e-4
    cut = trained(model=tiny(), **settings, batch_size=2, accumulate=4).log
    assert_same_log(cut, log, ("loss", "keep", "grad_norm"))


def adapted(settings=None):
    torch.manual_seed(0)
    return add_lora(models.DECODER_ONLY["llama"](), settings or Model(lora=2, lora_dropout=0.3))


def test_the_start_of_adapters_has_no_dropout_and_the_model_has_it_again():
    """Dropout of the base model would make the start another one at every step."""
    pytest.importorskip("peft")
    model = adapted().train()
    model.lm_head.eval()  # what was not training stays so
    with teachers._as_it_began(model):
        assert not any(part.training for part in model.modules())
    assert [part for part in model.modules() if not part.training] == [model.lm_head]


def test_a_model_without_its_adapters_is_its_own_start():
    pytest.importorskip("peft")
    plain, model, batch = models.DECODER_ONLY["llama"], adapted(), models.batch("llama")
    torch.manual_seed(0)
    start = plain()
    ng.attach(model, "ce + keep + keep:reverse", teacher=model)
    model.train()(**batch).loss.backward()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            assert weight.grad is not None
            torch.nn.init.normal_(weight.data, std=0.3)
    assert model.training
    model.eval()
    got, moved = model(**batch).loss, copy.deepcopy(model)
    loss, parts = by_hand("ce + keep + keep:reverse", ng.detach(model), start, batch)
    torch.testing.assert_close(got, loss, atol=1e-5, rtol=1e-5)
    assert parts["keep"] > 1e-3
    torch.testing.assert_close(moved(**batch).loss, loss, atol=1e-5, rtol=1e-5)


def test_teachers_that_do_not_fit_are_refused():
    model = tiny()
    for objective, teacher, error in [
        ("ce + distill", None, r"distill needs a teacher. .*attach\(model, ..., teacher=a model with the same"),
        ("ce + keep", None, r"keep needs a teacher. .*teacher=copy.deepcopy\(model\), or teacher=model if"),
        ("ce", tiny(), "no term of 'ce' uses it"),
        ("ce + keep", model, "the teacher is the model itself, which changes in training"),
        ("ce + distill", "folder", "teacher must be a Hugging Face model, got str"),
        (
            "ce + distill",
            models.DECODER_ONLY["llama"](),
            "the teacher is decoder-only, but the model is an encoder-dec",
        ),
    ]:
        with pytest.raises(ng.UserError, match=error):
            ng.attach(model, objective, teacher=teacher)
    larger = transformers.BartForConditionalGeneration(transformers.BartConfig(**models.BART | {"vocab_size": 14}))
    with pytest.raises(ng.UserError, match=r"vocabulary has 14 ids and the model's 13, .* tokenizer and voc"):
        ng.attach(model, "ce + distill", teacher=larger)
    with pytest.raises(ng.UserError, match=r"compares with a teacher, but a compute_loss_func .* teacher=...\)"):
        ng.compute_loss_func("ce + distill")
    pytest.importorskip("peft")
    trains_more = adapted()
    trains_more.get_base_model().lm_head.weight.requires_grad_()
    with pytest.raises(ng.UserError, match=r"without its adapters, but .*lm_head.weight is trained too"):
        ng.attach(trains_more, "ce + keep", teacher=trains_more)


@pytest.mark.slow
def test_ngram_trainer_has_the_exact_steps_of_a_teacher(tmp_path):
    ours = {"teacher": wide()}
    one = trainers(tmp_path / "one", objective=DISTILL, ours=ours, eval_strategy="epoch")
    two = trainers(
        tmp_path / "two", objective=DISTILL, ours=ours, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    assert_same_weights(two.model.state_dict(), one.model.state_dict(), 1e-4)
    assert one.state.log_history[0]["distill(temperature=2)"] > 0.01
    assert any("eval_distill(temperature=2)" in line for line in one.state.log_history)
    with pytest.raises(ng.UserError, match="distill needs a teacher"):
        ng.NgramTrainer(tiny(), arguments(tmp_path), objective="distill", data_collator=padded(tiny()))


# The loop


def test_a_step_has_the_loss_of_both_models():
    model, teacher = tiny(), wide()
    log = trained(
        model=tiny(), objective=DISTILL, teacher=teacher, data=8, max_steps=1, validation=rows(5, seed=2), eval_every=1
    ).log
    loss, parts = by_hand(DISTILL, model, wide(dropout=0.0), padded(model)(rows(8)))
    assert log[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert {name: log[0][name] for name in parts} == pytest.approx({k: v.item() for k, v in parts.items()}, abs=1e-5)
    assert log[0]["eval_distill(temperature=2)"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_student_of_another_width_approaches_its_teacher(family):
    teacher, student, data = wide(), tiny(), rows(16)
    if family == "llama":
        teacher = models.DECODER_ONLY["llama"]()
        for weight in teacher.parameters():
            weight.data *= 3
        student = transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.LLAMA | {"hidden_size": 20}))
        data = joined_rows(16)
    settings = {"objective": "distill", "teacher": teacher, "data": data, "epochs": 60.0, "save_every": 999}
    log = trained(model=student, **settings).log
    assert log[-1]["distill"] < 0.2 * log[0]["distill"]
    assert log[-1]["loss"] == pytest.approx(log[-1]["distill"])


def test_keep_holds_a_model_to_its_start():
    free = trained(model=tiny(), objective="ce + 0*keep", epochs=6.0)
    held = trained(model=tiny(), objective="ce + 5*keep", epochs=6.0)
    assert free.log[0]["keep"] == pytest.approx(0, abs=1e-6)
    assert held.log[-1]["keep"] < 0.3 * free.log[-1]["keep"]
    assert held.log[-1]["ce"] > free.log[-1]["ce"]
    both = trained(model=tiny(), objective="ce + keep + keep:reverse", max_steps=3).log
    assert 0 < both[-1]["keep:reverse"] != both[-1]["keep"]


@pytest.mark.parametrize("objective", ["ce + keep", "ce + 0.5*distill(temperature=2)"])
def test_a_continued_training_has_the_same_teacher(tmp_path, objective):
    teacher = wide() if "distill" in objective else None
    settings = {"objective": objective, "teacher": teacher}
    whole = trained(tmp_path / "whole", model=tiny(), **settings)
    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "again" / "checkpoint-2")
    again = trained(tmp_path / "again", model=tiny(), **settings)
    assert again.outcome.continued_from == 2
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)
    names = {"loss", "ce", "grad_norm", *objective.replace("0.5*", "").split(" + ")}
    assert_same_log(again.log, whole.log[2:], names, tolerance=0)
    shutil.rmtree(tmp_path / "again" / "checkpoint-6")
    changed = {"model": whole.model} if teacher is None else {"model": tiny(), "teacher": tiny()}
    changed_name = "weights before training" if teacher is None else "teacher: "
    with pytest.raises(ng.UserError, match=rf"have changed since it was started:\n  {changed_name}"):
        trained(tmp_path / "again", **settings | changed)


def test_a_continued_training_of_adapters_keeps_to_the_same_start(tmp_path):
    pytest.importorskip("peft")
    settings = {"objective": "ce + keep", "data": joined_rows(22)}
    whole = trained(tmp_path / "whole", model=adapted(), **settings)
    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "again" / "checkpoint-2")
    again = trained(tmp_path / "again", model=adapted(), **settings)
    assert again.outcome.continued_from == 2
    assert_same_log(again.log, whole.log[2:], ("loss", "ce", "keep", "grad_norm"), tolerance=0)
    assert whole.log[0]["keep"] == pytest.approx(0, abs=1e-6)
    assert whole.log[-1]["keep"] > 1e-6


def test_adapters_are_not_continued_on_another_base(tmp_path):
    pytest.importorskip("peft")
    trained(tmp_path, model=adapted(), objective="ce", data=joined_rows(22), max_steps=1)
    other = adapted()
    next(weight for weight in other.parameters() if not weight.requires_grad).data[-1, -1] += 1
    with pytest.raises(ng.UserError, match=r"have changed since it was started:\n  weights before training: "):
        trained(tmp_path, model=other, objective="ce", data=joined_rows(22), max_steps=2)


def work(folder, **changes):
    """What one process of two does."""
    got = trained(Path(folder, "checkpoints"), model=tiny(), objective=DISTILL, teacher=wide(), **changes)
    if start_processes().rank == 0:
        Path(folder, "found.json").write_text(json.dumps(got.log))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"batch_size": 4, "accumulate": 2}, {"fsdp": True, "max_tokens": 50}], ids=str)
def test_two_processes_end_at_the_weights_of_one(tmp_path, changes):
    alone = trained(model=tiny(), objective=DISTILL, teacher=wide())
    weights, log = in_two_processes(tmp_path, __name__, **changes)
    assert_same_weights(weights, alone.model.state_dict())
    assert_same_log(log, alone.log, TERMS)


def test_settings_of_the_loop_in_python_are_refused_if_they_are_not_read():
    for changes in ({"settings": ng.recipe.Train(teacher="x")}, {"objective": "keep", "teacher": tiny()}):
        with pytest.raises(ng.UserError, match=r"train\(..., teacher=model\). keep needs none"):
            ng.train(tiny(), None, rows(4), **{"objective": "distill"} | changes)


# Recipes


RECIPE = f"""
objective = "ce + distill"
[data]
name = "data"
separator = "none"
max_source = 96
max_target = 32
{models.TINY_MODEL}
[train]
max_steps = 4
batch_size = 4
accumulate = 1
warmup_steps = 0
learning_rate = 1e-2
log_every = 1
eval_every = 2
save_every = 2
keep = 9
[generation]
num_beams = 1
max_length = 8
"""


def train(*settings, run):
    given = [word for one in settings for word in ("--set", one)]
    return cli.main(["train", "distill.toml", "--run", run, *given])


@pytest.fixture(scope="module")
def place(tmp_path_factory, own_cache):
    """Data, a recipe, and a teacher with another width."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    for split, count in (("train", 12), ("validation", 4), ("test", 3)):
        items = newswire.items(split, count)
        made = [json.dumps({"document": item.document, "summary": item.summary}) for item in items]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(made) + "\n")
    (folder / "distill.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("objective=ce", "model.width=24", run="teacher") == 0
    return folder


@pytest.mark.slow
def test_a_recipe_names_its_teacher(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert train("train.teacher=teacher", "train.best=distill", run="student") == 0
    log = [json.loads(line) for line in Path("student/log.jsonl").read_text().splitlines()]
    assert log[0]["distill"] > 0
    assert any("eval_distill" in line for line in log)
    assert train("objective=ce + keep", "model.dropout=0", run="kept") == 0
    assert json.loads(Path("kept/log.jsonl").read_text().splitlines()[0])["keep"] < 1e-5
    capsys.readouterr()
    for settings, error in [
        ((), "distill compares the model with a teacher, but train.teacher is empty"),
        (("objective=ce + keep", "train.teacher=teacher"), "keep compares the model with its own start"),
        (("train.teacher=refused/x",), "refused/x"),
    ]:
        assert train(*settings, run="refused") != 0
        assert error in capsys.readouterr().err
    assert train("train.teacher=teacher", "model.vocabulary=320", run="other") != 0
    assert "has another tokenizer than the model" in capsys.readouterr().err
    assert train("objective=ce", "train.teacher=teacher", run="unused") == 0
    assert "train.teacher is not used" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_first_weights_as_its_start(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for objective, run in (("objective=ce + keep", "whole"), ("objective=ce + distill", "taught")):
        more = () if run == "whole" else ("train.teacher=teacher",)
        assert train(objective, *more, run=run) == 0
        shutil.copytree(run, f"{run}-again")
        for folder in ("model", "checkpoints/checkpoint-4"):
            shutil.rmtree(Path(f"{run}-again", folder))
        assert train(objective, *more, run=f"{run}-again") == 0
        one, two = (load_file(Path(name, "model", "model.safetensors")) for name in (run, f"{run}-again"))
        assert_same_weights(two, one, 0)
