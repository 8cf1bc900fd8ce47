"""The machine in the header of a log, and tests in random order: SHUFFLE=1 pytest tests/gpu."""

import datetime
import os
import platform
import random

import torch
import transformers


def pytest_report_header():
    """What a result depends on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{datetime.date.today()}, {device}, {versions}, SHUFFLE={os.environ.get('SHUFFLE', '')}"


def pytest_collection_modifyitems(items):
    """Put the tests in the random order of the seed in SHUFFLE."""
    if seed := os.environ.get("SHUFFLE"):
        random.Random(seed).shuffle(items)
