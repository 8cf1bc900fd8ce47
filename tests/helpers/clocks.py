"""The clock that chat templates read, and ours, on another day."""

import datetime

from transformers.utils import chat_template_utils

from ngramloss.data import prompts


def clock_at(monkeypatch, *day):
    """Let it be noon of this day."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(*day, 12, tzinfo=tz)

    class Calendar(datetime.date):
        @classmethod
        def today(cls):
            return cls(*day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(prompts, "date", Calendar)
