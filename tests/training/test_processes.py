"""Processes and trackers: what the environment says, what a single process does alone, names in a tracker."""

import os

import pytest
import torch

from ngramloss.errors import UserError
from ngramloss.training import trackers
from ngramloss.training.processes import Processes, start_processes


@pytest.fixture
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return start_processes()


def test_without_torchrun_there_is_one_process_and_no_group(alone):
    assert alone == Processes(0, 1, torch.device("cpu"))
    assert alone.first
    assert not torch.distributed.is_initialized()
    assert alone.device_name == f"CPU, {os.uname().machine}"


def test_one_process_waits_for_nobody_and_is_the_sum(alone, monkeypatch):
    for name in ("barrier", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, None)
    alone.wait()
    assert alone.total(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert alone.any(True)
    assert not alone.any(False)


def test_several_processes_join_the_group_that_torchrun_started(monkeypatch):
    joined = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: joined.append(args))
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    here = start_processes()
    assert here == Processes(3, 4, torch.device("cpu"))
    assert not here.first
    assert joined == [("gloo",)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert start_processes() == here
    assert len(joined) == 1, "a second training joins nothing"


# Trackers


def test_training_and_validation_are_groups_in_a_tracker():
    assert trackers.grouped({"loss": 1.0, "matched/2": 0.5, "eval_matches(2)": 2.0, "eval_runtime": 3.0}) == {
        "train/loss": 1.0,
        "train/matched/2": 0.5,
        "eval/matches(2)": 2.0,
        "eval/runtime": 3.0,
    }


def test_a_tracker_that_is_not_installed_is_a_sentence(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed\. Install it with: pip install wandb"):
        trackers.check_trackers(["wandb"])


def test_each_tracker_is_started_with_the_run(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(trackers, "TRACKERS", {"a": lambda *given: started.append(given) or "tracker"})
    assert trackers.start_trackers(["a"], run_name="run", folder=tmp_path, settings={"seed": 1}) == ["tracker"]
    assert started == [("run", tmp_path, {"seed": 1})]
