"""Data sets: names and files → checked examples, sentences, statistics. Needs no torch."""

from ngramloss.data.data_sets import KNOWN, canonical, split_names
from ngramloss.data.examples import Example, Split, columns_of, fingerprint, from_rows, has_split, load
from ngramloss.data.overview import lost_ends
from ngramloss.data.rows import SHOWN, BadRow
from ngramloss.data.sentences import SPLITTERS, note_splitting, split_documents, split_many
from ngramloss.data.splits import in_part, load_split, without_part
from ngramloss.data.statistics import Measurement, Statistics, measurement, table, words_of

__all__ = [
    "KNOWN",
    "SHOWN",
    "SPLITTERS",
    "BadRow",
    "Example",
    "Measurement",
    "Split",
    "Statistics",
    "canonical",
    "columns_of",
    "fingerprint",
    "from_rows",
    "has_split",
    "in_part",
    "load",
    "load_split",
    "lost_ends",
    "measurement",
    "note_splitting",
    "split_documents",
    "split_many",
    "split_names",
    "table",
    "without_part",
    "words_of",
]
