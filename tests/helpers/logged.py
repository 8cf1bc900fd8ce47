"""What the library logs, in a list."""

import logging
from contextlib import contextmanager

LOGGER = logging.getLogger("ngramloss")


class Listed(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def logged():
    """A list that every message comes into."""
    handler, level = Listed(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield handler.lines
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)
