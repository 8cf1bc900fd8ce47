"""Data sets: names and files → checked examples, sentences, statistics. Needs no torch."""

from ngramloss.corpus.examples import Example, Split, fingerprint, load
from ngramloss.corpus.origins import KNOWN, split_names
from ngramloss.corpus.rows import BadRow
from ngramloss.corpus.sentences import SPLITTERS, split_many
from ngramloss.corpus.statistics import Measurement, Statistics, measurement, table

__all__ = [
    "KNOWN",
    "SPLITTERS",
    "BadRow",
    "Example",
    "Measurement",
    "Split",
    "Statistics",
    "fingerprint",
    "load",
    "measurement",
    "split_many",
    "split_names",
    "table",
]
