"""Progress is a bar in a terminal, and a line now and then anywhere else."""

import io
import logging
import sys

import pytest

from ngramloss.output import console, progress
from ngramloss.output.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown():
    console.show_messages()


def test_a_terminal_gets_a_bar(shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("reading \x1b[31mtrain", total=2) as bar:
        bar.update(1, note="ce 3.2")
        bar._bar.refresh()
    assert "1/2" in sys.stderr.getvalue()
    assert "ce 3.2" in sys.stderr.getvalue()
    assert "\x1b[31m" not in sys.stderr.getvalue()


def test_a_file_gets_a_line_every_thirty_seconds(shown, capsys, monkeypatch):
    clock = [0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress("reading train", total=100, unit="documents") as bar:
        for _ in range(91):
            clock[0] += 1
            bar.update(1)
    assert capsys.readouterr().err.splitlines() == [
        "reading train: 30 of 100 documents, 1:10 left",
        "reading train: 60 of 100 documents, 0:40 left",
        "reading train: 90 of 100 documents, 0:10 left",
    ]


def test_a_file_gets_a_line_for_each_note_but_at_most_one_a_second_and_the_last(shown, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("training", total=100, unit="steps") as bar:
        for step in range(100):
            now += 1 / 32
            bar.update(1, note=f"ce {step + 1}")
    assert capsys.readouterr().err.splitlines() == [
        "training: 32 of 100 steps, 0:02 left · ce 32",
        "training: 64 of 100 steps, 0:01 left · ce 64",
        "training: 96 of 100 steps, 0:00 left · ce 96",
        "training: 100 of 100 steps · ce 100",
    ]


def test_a_note_is_shown_with_the_count_that_it_belongs_to_and_no_other(shown, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("training", total=4, unit="steps") as bar:
        for note in ("ce 2.556", "", ""):
            now += 40
            bar.update(1, note=note)
    assert capsys.readouterr().err.splitlines() == [
        "training: 1 of 4 steps, 2:00 left · ce 2.556",
        "training: 2 of 4 steps, 1:20 left",
        "training: 3 of 4 steps, 0:40 left",
    ]
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("training", total=1_100, unit="steps", done=1_000) as bar:
        bar.update(1, note="ce 2.556")
        bar._bar.refresh()
        assert ", ce 2.556]" in sys.stderr.getvalue()
        bar.update(1)
        bar._bar.refresh()
        assert ", at 1,001: ce 2.556]" in sys.stderr.getvalue()


def test_a_slow_step_is_one_line_with_its_own_note(shown, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("training", total=3, unit="steps") as bar:
        for step in range(2):
            now += 40
            bar.update(1, note=f"ce {step + 1}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["training: 1 of 3 steps, 1:20 left · ce 1", "training: 2 of 3 steps, 0:40 left · ce 2"]


def test_work_that_is_not_counted_is_named_in_a_terminal(shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("intervals and tests", unit=""):
        pass
    assert sys.stderr.getvalue().strip("\r \n") == "intervals and tests"


def test_continued_work_counts_its_speed_from_where_it_began(shown, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("training", total=100, unit="steps", done=40) as bar:
        now = 30
        bar.update(30)
    assert capsys.readouterr().err == "training: 70 of 100 steps, 0:30 left\n"


def test_a_library_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("reading", total=2) as bar:
        bar.update(1)
    console.logger.warning("a warning")
    assert not sys.stderr.getvalue()


@pytest.mark.parametrize(("rank", "told"), [("0", "message\nerror\n"), ("1", "error\n")])
def test_messages_come_from_the_first_process(shown, capsys, monkeypatch, rank, told):
    monkeypatch.setenv("RANK", rank)
    console.show_messages()
    logging.getLogger("ngramloss").info("message")
    logging.getLogger("ngramloss").error("error")
    assert capsys.readouterr().err == told


def test_messages_are_escaped(shown, capsys):
    logging.getLogger("ngramloss").info("a\x1b[31mname")
    assert "\x1b" not in capsys.readouterr().err
