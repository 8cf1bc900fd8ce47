"""Heartbeats: a process that lives is heard however slow it is, and one that is silent is not waited for."""

import os
import time

import pytest

from ngramloss import heartbeat
from ngramloss.heartbeat import Listener


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.4)


def test_a_process_is_heard_as_long_as_it_works_and_leaves_no_file(tmp_path):
    listener = Listener(tmp_path / "beat")
    with heartbeat.heartbeat(tmp_path / "beat"):
        for _ in range(15):
            assert not listener.is_dead
            time.sleep(0.1)
    assert not list(tmp_path.iterdir())
    time.sleep(0.5)
    assert listener.is_dead


def test_who_was_never_heard_is_dead_after_the_same_time(tmp_path):
    listener = Listener(tmp_path / "beat")
    assert not listener.is_dead
    time.sleep(0.5)
    assert listener.is_dead


def test_a_beat_that_was_left_by_a_killed_process_is_no_sign_of_life_whatever_its_time(tmp_path):
    (tmp_path / "beat").touch()
    os.utime(tmp_path / "beat", (2**32, 2**32))  # by a clock that is far ahead
    listener = Listener(tmp_path / "beat")
    assert not listener.is_dead
    time.sleep(0.5)
    assert listener.is_dead


def test_a_beat_that_was_deleted_is_not_made_again(tmp_path):
    with heartbeat.heartbeat(tmp_path / "beat"):
        (tmp_path / "beat").unlink()
        time.sleep(0.1)
        assert not list(tmp_path.iterdir())


def test_an_error_ends_the_beats(tmp_path):
    with pytest.raises(KeyError), heartbeat.heartbeat(tmp_path / "beat"):
        raise KeyError
    assert not list(tmp_path.iterdir())
