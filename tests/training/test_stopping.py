"""Signals: a training ends after a step, in all processes the same one, and gives the signals back."""

import os
import signal
import threading

import pytest
import torch

from ngramloss.training.processes import Processes
from ngramloss.training.stopping import Stopping

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def stopping():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with Stopping(Processes(0, 1, CPU)) as watcher:
        yield watcher
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_to_stop_after_the_step(stopping, number, messages):
    assert not stopping.asked(1)
    os.kill(os.getpid(), number)
    assert messages == ["stopping after this step and saving it. Press Ctrl-C again to stop at once."]
    assert stopping.asked(1)
    assert stopping.asked(2)


def test_a_second_ctrl_c_stops_at_once(stopping):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_is_patient(stopping):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.asked(1)


def test_only_the_first_process_says_so(messages):
    with Stopping(Processes(1, 1, CPU)) as watcher:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watcher.asked(1)
    assert messages == []


def test_a_failure_gives_the_signals_back():
    before = [signal.getsignal(number) for number in SIGNALS]

    def fail():
        with Stopping(Processes(0, 1, CPU)):
            assert [signal.getsignal(number) for number in SIGNALS] != before
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_thread_gets_no_signals_and_trains_all_the_same():
    asked = []

    def train():
        with Stopping(Processes(0, 1, CPU)) as watcher:
            asked.append(watcher.asked(1))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert asked == [False]


# Several processes


@pytest.fixture
def exchanged(monkeypatch):
    """What this process tells the others; ``exchanged.others`` of them were asked to stop."""

    class Exchanged(list):
        others = 0

    seen = Exchanged()

    def add_up(value):
        seen.append(value.item())
        value.add_(seen.others)

    monkeypatch.setattr(torch.distributed, "all_reduce", add_up)
    monkeypatch.setattr(torch, "tensor", lambda value, device, tensor=torch.tensor: tensor(value))
    return seen


def test_processes_stop_together_and_on_a_gpu_ask_each_other_at_every_tenth_step(exchanged):
    exchanged.others = 1
    with Stopping(Processes(0, 2, CUDA)) as watcher:
        assert not any(watcher.asked(step) for step in range(1, 10))
        assert exchanged == []
        assert watcher.asked(10)
        assert exchanged == [0.0]


def test_a_process_that_is_asked_alone_waits_for_the_others(exchanged):
    with Stopping(Processes(1, 2, CUDA)) as watcher:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not watcher.asked(9)
        assert watcher.asked(10)
        assert exchanged == [1.0]


def test_processes_on_a_cpu_ask_each_other_at_every_step(exchanged):
    with Stopping(Processes(1, 2, CPU)) as watcher:
        assert not watcher.asked(6)
        os.kill(os.getpid(), signal.SIGTERM)
        assert watcher.asked(7)
    assert exchanged == [0.0, 1.0]
