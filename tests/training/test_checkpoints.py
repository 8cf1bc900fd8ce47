"""Checkpoints: whatever happened while one was written, the newest whole one is found."""

import dataclasses
import json
import math
import os
import shutil
import zlib
from types import SimpleNamespace

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from ngramloss.errors import UserError
from ngramloss.recipe import Train
from ngramloss.storage import checksums
from ngramloss.training import checkpoints
from ngramloss.training.checkpoints import SEAL, copy_model, fault, find, prune, seal
from ngramloss.training.loop import State, restored
from ngramloss.training.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))


def checkpoint(folder, step, *, sealed=True, **facts):
    path = folder / f"checkpoint-{step}"
    (path / "deep").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(range(200)) * 3)
    (path / "deep" / "optimizer.bin").write_bytes(b"moments")
    (path / "empty").touch()
    if sealed:
        seal(path, step=step, **facts)
    return path


# Whole or not


def test_a_sealed_checkpoint_is_whole_and_tells_its_facts(tmp_path):
    path = checkpoint(tmp_path, 7, best=0.5)
    assert fault(path) == ""
    facts = checkpoints.facts(path)
    assert (facts["step"], facts["best"]) == (7, 0.5)
    assert set(facts["files"]) == {"model.safetensors", os.path.join("deep", "optimizer.bin"), "empty"}
    assert checkpoints.step(path) == 7


def test_a_checkpoint_may_be_sealed_again(tmp_path):
    path = checkpoint(tmp_path, 7, best=0.5)
    seal(path, step=7, best=0.25)
    assert fault(path) == ""
    assert checkpoints.facts(path)["best"] == 0.25
    assert SEAL not in checkpoints.facts(path)["files"]


def test_a_checkpoint_that_moved_is_still_whole(tmp_path):
    path = checkpoint(tmp_path, 7)
    path.rename(tmp_path / "checkpoint-8")
    assert fault(tmp_path / "checkpoint-8") == ""


DAMAGE = {
    "writing it did not finish": lambda path: (path / SEAL).unlink(),
    "model.safetensors has 599 bytes of 600": lambda path: os.truncate(path / "model.safetensors", 599),
    "model.safetensors has 0 bytes of 600": lambda path: os.truncate(path / "model.safetensors", 0),
    "model.safetensors was changed": lambda path: (path / "model.safetensors").write_bytes(bytes(600)),
    "model.safetensors is missing": lambda path: (path / "model.safetensors").unlink(),
    os.path.join("deep", "optimizer.bin") + " is missing": lambda path: shutil.rmtree(path / "deep"),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_is_found(tmp_path, why):
    before, newest = checkpoint(tmp_path, 100), checkpoint(tmp_path, 200)
    DAMAGE[why](newest)
    assert fault(newest) == why
    assert find(tmp_path) == (before, {newest: why})


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b"\x00" * 50,
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"files": 3}',
        b'{"files": {"model.safetensors": 1}}',
        b'{"files": {"model.safetensors": [1, 2, 3]}}',
        b'{"files": [1]}',
    ],
)
def test_a_seal_of_garbage_seals_nothing(tmp_path, garbage):
    before, newest = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (newest / SEAL).write_bytes(garbage)
    assert find(tmp_path) == (before, {newest: f"its {SEAL} cannot be read"})


@pytest.mark.parametrize(
    ("facts", "sound"),
    [
        ({}, True),
        ({"finished": True}, True),
        ({"best_step": 1, "best": 0.5}, True),
        ({"best": "x"}, False),
        ({"finished": "yes"}, False),
        ({"finished": None}, False),
        ({"best_step": 1}, False),
        ({"best_step": "1", "best": 1.0}, False),
        ({"best_step": True, "best": 1}, False),
    ],
)
def test_a_seal_may_say_less_but_nothing_of_another_kind(tmp_path, facts, sound):
    before, newest = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2, **facts)
    assert find(tmp_path).newest == (newest if sound else before)
    said = checkpoints.facts(find(tmp_path).newest)
    assert said["finished"] is (facts.get("finished") is True and sound)
    assert said["best_step"] == (facts.get("best_step") if sound else None)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_one_flipped_bit_anywhere_is_seen(tmp_path_factory, data):
    path = checkpoint(tmp_path_factory.mktemp("flip"), 1)
    file = path / data.draw(st.sampled_from(["model.safetensors", "deep/optimizer.bin"]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    assert fault(path).endswith(" was changed")


@pytest.mark.parametrize("place", [0, (1 << 22) - 1, 1 << 22, (1 << 22) + 4])
def test_a_file_longer_than_one_reading_is_checked_from_its_beginning_to_its_end(tmp_path, place):
    path = checkpoint(tmp_path, 1, sealed=False)
    (path / "big").write_bytes(bytes((1 << 22) + 5))
    seal(path)
    with (path / "big").open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert fault(path) == "big was changed"


def test_nothing_is_found_where_nothing_is_whole(tmp_path):
    assert find(tmp_path / "absent") == (None, {})
    paths = [checkpoint(tmp_path, step, sealed=False) for step in (1, 2)]
    assert find(tmp_path) == (None, dict.fromkeys(paths[::-1], "writing it did not finish"))


def test_the_newest_is_by_number_and_not_by_name(tmp_path):
    for step in (9, 100, 20):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-final").mkdir()
    (tmp_path / "checkpoint-500").write_text("a file")
    assert find(tmp_path) == (tmp_path / "checkpoint-100", {})


# Deleting


def left(folder):
    return sorted(checkpoints.step(path) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("keep", "best", "remain"),
    [
        (2, None, [30, 100]),
        (1, None, [100]),
        (1, 9, [9, 100]),
        (2, 100, [30, 100]),
        (2, 30, [30, 100]),
        (9, None, [9, 20, 30, 100]),
        (1, 7, [100]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep, best, remain):
    for step in (9, 20, 30, 100):
        checkpoint(tmp_path, step)
    prune(tmp_path, keep=keep, best=best)
    assert left(tmp_path) == remain
    assert all(not fault(path) for path in tmp_path.glob("checkpoint-*"))


def test_a_checkpoint_half_deleted_does_not_count_as_whole(tmp_path, monkeypatch):
    old, newest = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)

    def killed(path, **_):
        assert path == old
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, keep=1, best=None)
    assert fault(old) == "writing it did not finish"
    assert fault(newest) == ""


def test_of_a_linked_checkpoint_only_the_link_is_deleted(tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (folder := tmp_path / "checkpoints").mkdir()
    theirs = checkpoint(elsewhere, 1)
    (folder / "checkpoint-1").symlink_to(theirs)
    checkpoint(folder, 2)
    prune(folder, keep=1, best=None)
    assert left(folder) == [2]
    assert not fault(theirs), "no file of it was touched, not even its seal"


def test_a_checkpoint_whose_files_are_elsewhere_is_neither_continued_nor_copied(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (folder := tmp_path / "checkpoints").mkdir()
    for number in (1, 2, 3):
        checkpoint(folder, number)
    (folder / "checkpoint-2" / "secret.json").symlink_to(secret)
    sealed = json.loads((folder / "checkpoint-3" / SEAL).read_text())
    sealed["files"]["../../secret.json"] = [2, zlib.crc32(b"{}")]
    sealed["checksum"] = checksums._own_checksum(sealed)
    (folder / "checkpoint-3" / SEAL).write_text(json.dumps(sealed))
    (folder / "checkpoint-4").symlink_to(shutil.copytree(folder / "checkpoint-1", tmp_path / "checkpoint-4"))
    found = find(folder)
    assert found.newest == folder / "checkpoint-1"
    assert "checkpoint-4 leads out of" in found.broken[folder / "checkpoint-4"]
    assert "'..' is not the name of a file" in found.broken[folder / "checkpoint-3"]
    assert "secret.json leads out of" in found.broken[folder / "checkpoint-2"]
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"secret\.json leads out of"):
        copy_model(folder / "checkpoint-2", tmp_path / "model")
    assert not (tmp_path / "model" / "secret.json").exists()


def test_one_that_was_never_sealed_is_deleted_like_any_other(tmp_path):
    checkpoint(tmp_path, 1, sealed=False)
    checkpoint(tmp_path, 2)
    prune(tmp_path, keep=1, best=None)
    assert left(tmp_path) == [2]


# Copying the model


def test_what_is_copied_loads_and_is_nothing_of_training(tmp_path):
    model = models.tiny("bart")
    source, target = tmp_path / "checkpoint-3", tmp_path / "model"
    model.save_pretrained(source, max_shard_size="10KB")
    shards = {path.name for path in source.glob("model-*-of-*.safetensors")}
    assert len(shards) > 1
    words = {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        "added_tokens.json",
        "chat_template.jinja",
    }
    training = {
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "rng_state_0.pth",
        "rng_state_11.pth",
        "trainer_state.json",
        "training_args.bin",
        "data.json",
        "pytorch_model_fsdp.bin",
        "whole.json.partial",
    }
    for name in words | training:
        (source / name).write_text("x")
    (source / "pytorch_model_fsdp_0").mkdir()
    seal(source)
    target.mkdir()
    copy_model(source, target)
    assert set(os.listdir(target)) == shards | words | {
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
    }
    for name in words:
        (target / name).unlink()
    again = AutoModelForSeq2SeqLM.from_pretrained(target, use_safetensors=True)
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )


# Writing


def test_files_reach_the_disk_before_they_are_declared_whole(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, 1, sealed=False)
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
    )
    seal(path)
    assert sorted(synced[:-1]) == ["empty", "model.safetensors", "optimizer.bin"]
    assert synced[-1].startswith(f"{SEAL}.partial-")
    assert json.loads((path / SEAL).read_text())["files"]


# Of a training

STATE = State(step=3, updates=2, best=1.5, best_step=2, scale=8.0, scale_grows_in=5)


def in_training(family="bart", seed=0):
    """A model after an update, and its optimiser."""
    model = models.tiny(family, seed=seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(**models.batch(family)).loss.backward()
    optimiser.step()
    return model, optimiser


def save(folder, model, optimiser, *, here=ALONE, state=STATE, finished=False, more=None, **settings):
    task, settings = SimpleNamespace(model=model, tokenizer=None), Train(**{"keep": 2} | settings)
    checkpoints.save(folder, task, optimiser, state, here, settings, more or {}, finished=finished)
    return folder / f"checkpoint-{state.step}"


@pytest.mark.parametrize("family", sorted(models.ENCODER_DECODER))
def test_what_is_saved_is_restored_to_the_bit(tmp_path, family):
    model, optimiser = in_training(family)
    path = save(tmp_path, model, optimiser)
    other, others = in_training(family, seed=1)
    assert State(**checkpoints.restore(path, other, others, sharded=False)) == STATE
    saved = load_file(path / "model.safetensors").keys()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs) or not (name in saved or ours.requires_grad), name  # some positions are fixed
    for (name, ours), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    one, two = optimiser.state_dict(), others.state_dict()
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for number, moments in one["state"].items():
        assert all(torch.equal(value, two["state"][number][name]) for name, value in moments.items())


@pytest.mark.parametrize("finished", [False, True])
def test_what_was_saved_is_sealed_with_its_facts(tmp_path, finished):
    path = save(tmp_path, *in_training(), finished=finished, more={"data.json": '{"train": "ä"}'})
    assert fault(path) == ""
    facts = checkpoints.facts(path)
    assert {name: facts[name] for name in ("step", "best_step", "best", "finished")} == {
        "step": 3,
        "best_step": 2,
        "best": 1.5,
        "finished": finished,
    }
    assert (path / "data.json").read_text(encoding="utf-8") == '{"train": "ä"}'
    assert {"data.json", "state.json", "optimizer.pt", "model.safetensors"} <= facts["files"].keys()


def test_older_checkpoints_than_are_kept_go_but_not_the_best(tmp_path):
    model, optimiser = in_training()
    for number in (1, 2, 3, 4):
        save(tmp_path, model, optimiser, state=dataclasses.replace(STATE, step=number, best_step=1), keep=2)
    assert left(tmp_path) == [1, 3, 4]


def test_what_an_earlier_attempt_left_is_gone(tmp_path):
    path = checkpoint(tmp_path, 3, sealed=False)
    save(tmp_path, *in_training())
    assert fault(path) == ""
    assert not (path / "deep").exists()


def test_only_the_first_process_writes_and_all_wait_for_it(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(Processes, "wait", lambda here: waited.append((here.rank, left(tmp_path))))
    model, optimiser = in_training()
    for rank in (1, 0):
        save(tmp_path, model, optimiser, here=Processes(rank, 2, torch.device("cpu")))
    assert waited == [(1, []), (0, [3])]


@pytest.mark.parametrize("reason", [OSError(28, "No space left on device"), RuntimeError("file write failed")], ids=str)
def test_a_checkpoint_that_cannot_be_written_is_a_sentence_and_not_sealed(tmp_path, monkeypatch, reason):
    before = save(tmp_path, *in_training(), state=dataclasses.replace(STATE, step=1))

    def full(*_):
        raise reason

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(checkpoints.CheckpointError, match=rf"cannot write .*checkpoint-3: .*{reason.args[-1]}\.$"):
        save(tmp_path, *in_training(), keep=1)
    assert find(tmp_path) == (before, {tmp_path / "checkpoint-3": "writing it did not finish"})


@pytest.mark.parametrize("reason", [OSError(28, "No space left on device"), SafetensorError("file write failed")])
def test_an_average_that_cannot_be_written_is_a_sentence_and_not_sealed(tmp_path, monkeypatch, reason):
    def full(*_, **__):
        raise reason

    model, _ = in_training()
    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(checkpoints.CheckpointError, match=rf"cannot write .*average: .*{reason.args[-1]}\.$"):
        checkpoints.save_model(tmp_path / "average", model, None)
    assert not (tmp_path / "average" / SEAL).exists()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    torch.save({"state": {}, "param_groups": Payload(str(tmp_path / "ran"))}, path / "optimizer.pt")
    with pytest.raises(UserError, match=r"contains more than tensors and plain numbers.*Delete the checkpoint"):
        checkpoints.restore(path, model, optimiser, sharded=False)
    assert not (tmp_path / "ran").exists()


def test_no_weights_are_read_from_a_pickle(tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    torch.save(Payload(str(tmp_path / "ran")), path / "pytorch_model.bin")
    torch.save(Payload(str(tmp_path / "ran")), path / "scheduler.pt")
    checkpoints.restore(path, model, optimiser, sharded=False)
    assert not (tmp_path / "ran").exists()


def test_a_state_that_is_no_object_is_a_sentence(tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    (path / "state.json").write_text("[1")
    with pytest.raises(UserError, match=r"state\.json.*Delete the checkpoint to continue from the previous"):
        checkpoints.restore(path, model, optimiser, sharded=False)


STATES = {
    "step": ["3", None, True, 10**30, 4, -1],
    "updates": ["x", [], -1, 9],
    "best": ["x", [], 1e999],
    "best_step": [1.5, {}],
    "ended_early": [None, 0],
    "scale": ["x", math.nan, 0.0],
    "scale_grows_in": [1.5, -1],
    "averages": [[], {"ema": "x"}, {"ema": []}],
    "something else": [1],
}


def test_every_wrong_value_in_a_state_is_refused_with_the_name_of_the_file(tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    content = json.loads((path / "state.json").read_text())
    assert restored(path, model, optimiser, sharded=False) == STATE
    for field, values in STATES.items():
        for value in values:
            (path / "state.json").write_text(json.dumps(content | {field: value}))
            with pytest.raises(UserError, match=r"checkpoint-3/state\.json.*Delete the checkpoint"):
                restored(path, model, optimiser, sharded=False)


def of_the_first(**changes):
    """A change of what an optimiser has of its first parameter."""
    return lambda saved: {**saved, "state": {**saved["state"], 0: {**saved["state"][0], **changes}}}


MOMENTS = {
    "nothing": lambda saved: None,
    "a list": lambda saved: [saved],
    "no state": lambda saved: {"param_groups": saved["param_groups"]},
    "another state": lambda saved: {**saved, "state": [1]},
    "a name": lambda saved: {**saved, "state": {"x": saved["state"][0]}},
    "a parameter more": lambda saved: {**saved, "state": {9999: saved["state"][0]}},
    "a number for a parameter": lambda saved: {**saved, "state": {0: 3}},
    "a moment less": lambda saved: {**saved, "state": {0: {"step": torch.tensor(1.0)}}},
    "another shape": of_the_first(exp_avg=torch.zeros(3)),
    "a sparse tensor": lambda saved: of_the_first(exp_avg=saved["state"][0]["exp_avg"].to_sparse())(saved),
    "whole numbers": lambda saved: of_the_first(exp_avg_sq=saved["state"][0]["exp_avg_sq"].long())(saved),
    "a text": of_the_first(exp_avg="x"),
    "many steps": of_the_first(step=torch.zeros(3)),
}


@pytest.mark.parametrize("change", MOMENTS)
def test_an_optimisers_state_that_is_not_of_these_weights_is_refused(change, tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    saved = torch.load(path / "optimizer.pt")
    torch.save(MOMENTS[change](saved), path / "optimizer.pt")
    with pytest.raises(
        UserError, match=r"checkpoint-3/optimizer\.pt does not fit this optimiser: .*Delete the checkpoint"
    ):
        checkpoints.restore(path, model, optimiser, sharded=False)


def test_an_optimiser_keeps_the_settings_of_this_training(tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    before = optimiser.state_dict()
    torch.save({**before, "param_groups": [{"params": "x", "betas": 3}]}, path / "optimizer.pt")
    checkpoints.restore(path, model, optimiser, sharded=False)
    assert optimiser.state_dict()["param_groups"] == before["param_groups"]


def test_damaged_tensors_and_weights_of_another_shape_are_refused(tmp_path):
    model, optimiser = in_training()
    path = save(tmp_path, model, optimiser)
    weights = load_file(path / "model.safetensors")
    for name in ("final_logits_bias", next(iter(dict(model.named_parameters())))):  # a buffer and a weight
        save_file({**weights, name: torch.zeros(3)}, path / "model.safetensors")
        with pytest.raises(UserError, match=rf"checkpoint-3 do not fit Bart.*: {name} should have the shape"):
            checkpoints.restore(path, model, optimiser, sharded=False)
    for name in ("model.safetensors", "optimizer.pt"):
        (path / name).write_bytes(b"no tensors")
        with pytest.raises(UserError, match=rf"{name} is damaged"):
            checkpoints.restore(path, model, optimiser, sharded=False)


def test_weights_of_another_model_are_refused(tmp_path):
    """Without their names matching, the model would go on with its first weights."""
    path = save(tmp_path, *in_training())
    other, others = in_training("t5")
    with pytest.raises(UserError, match=r"the weights in .*checkpoint-3 do not fit T5ForConditionalGeneration"):
        checkpoints.restore(path, other, others, sharded=False)
