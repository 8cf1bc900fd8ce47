"""a data set's name → its files: released ones in the folder that NGRAMLOSS_DATA names, or a few of our own in stories/.

The stories were written for these tests. Their files have the names and the fields of the released ones.
"""

import json
import lzma
import os
from pathlib import Path

import pytest
from places import HELPERS

STORIES = HELPERS / "stories"


def data_folder(name):
    """The folder of a whole data set. Without NGRAMLOSS_DATA the test is skipped."""
    root = os.environ.get("NGRAMLOSS_DATA")
    if not root:
        pytest.skip(f"NGRAMLOSS_DATA is not set. It names the folder that holds {name}.")
    if not Path(root).is_dir():
        pytest.fail(f"NGRAMLOSS_DATA names {root}, which is not a folder.")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"The folder that NGRAMLOSS_DATA names has no {name}.")
    return Path(root) / name


def read_rows(folder, stem):
    """The rows of a JSONL file, compressed or not."""
    packed = folder / f"{stem}.jsonl.xz"
    with (
        lzma.open(packed, "rt", encoding="utf-8")
        if packed.exists()
        else (folder / f"{stem}.jsonl").open(encoding="utf-8") as file
    ):
        return [json.loads(line) for line in file]


def xsum_reference(row):
    """The cased text where one is known, else the tokens with four replacements, as for the authors' summaries."""
    text = row["summary_cased"] or row["summary"]
    if not row["summary_cased"]:
        for before, after in ((" n't", "n't"), (" `` ", ' "'), ("`` ", '"'), (" '' ", '" '), ("can not", "cannot")):
            text = text.replace(before, after)
    return text
