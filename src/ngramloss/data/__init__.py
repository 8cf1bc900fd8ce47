"""Data sets: names and files → checked examples, sentences, statistics. Needs no torch."""

from ngramloss.data.data_sets import KNOWN, split_names
from ngramloss.data.examples import Example, Split, columns_of, fingerprint, from_rows, has_split, load
from ngramloss.data.rows import BadRow
from ngramloss.data.sentences import SPLITTERS, split_many
from ngramloss.data.splits import in_part, load_split, without_part
from ngramloss.data.statistics import Measurement, Statistics, measurement, table

__all__ = [
    "KNOWN",
    "SPLITTERS",
    "BadRow",
    "Example",
    "Measurement",
    "Split",
    "Statistics",
    "columns_of",
    "fingerprint",
    "from_rows",
    "has_split",
    "in_part",
    "load",
    "load_split",
    "measurement",
    "split_many",
    "split_names",
    "table",
    "without_part",
]
