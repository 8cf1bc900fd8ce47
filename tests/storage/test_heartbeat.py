"""Heartbeats: a process that lives is heard however slow it is, and one that is silent is not waited for."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from ngramloss.storage import heartbeat
from ngramloss.storage.heartbeat import Listener


@pytest.fixture(autouse=True)
def pass_time(monkeypatch):
    """A function that lets time pass for those who listen. Beats are real, and waited for: a machine may be busy."""
    now = [0.0]
    monkeypatch.setattr(heartbeat, "EVERY", 0.001)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def wait_for_a_beat(path):
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        time.sleep(0.001)


def test_a_process_is_heard_as_long_as_it_works_and_leaves_no_file(tmp_path, pass_time):
    listener = Listener(tmp_path / "beat")
    with heartbeat.heartbeat(tmp_path / "beat"):
        for _ in range(5):
            assert not listener.is_dead
            wait_for_a_beat(tmp_path / "beat")
            pass_time(2 * heartbeat.SILENCE)
    assert not list(tmp_path.iterdir())
    assert listener.is_dead


def test_who_was_never_heard_is_dead_after_the_same_time(tmp_path, pass_time):
    listener = Listener(tmp_path / "beat")
    pass_time(heartbeat.SILENCE)
    assert not listener.is_dead
    pass_time(0.001)
    assert listener.is_dead


def test_a_beat_that_was_left_by_a_killed_process_is_no_sign_of_life_whatever_its_time(tmp_path, pass_time):
    (tmp_path / "beat").touch()
    os.utime(tmp_path / "beat", (2**32, 2**32))  # by a clock that is far ahead
    listener = Listener(tmp_path / "beat")
    assert not listener.is_dead
    pass_time(heartbeat.SILENCE + 1)
    assert listener.is_dead


def test_a_beat_that_was_deleted_is_not_made_again(tmp_path):
    with heartbeat.heartbeat(tmp_path / "beat"):
        (beats,) = [thread for thread in threading.enumerate() if "beat" in thread.name]
        (tmp_path / "beat").unlink()
        beats.join()  # it ends when it finds no file
        assert not list(tmp_path.iterdir())


def test_an_error_ends_the_beats(tmp_path):
    with pytest.raises(KeyError), heartbeat.heartbeat(tmp_path / "beat"):
        raise KeyError
    assert not list(tmp_path.iterdir())
