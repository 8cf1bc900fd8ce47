"""examples → lengths of texts and share of novel bigrams: the paper's Table 1 for any data set."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import pairwise
from math import fsum
from operator import add
from typing import Any, NamedTuple

from ngramloss.data.data_sets import canonical, split_names
from ngramloss.data.examples import Example, Split, load
from ngramloss.data.languages import AUTO, special_pattern, word_pattern
from ngramloss.data.sentences import LOOKED_AT, split_many, splitting_notes
from ngramloss.errors import UserError
from ngramloss.output.console import aligned, fixed
from ngramloss.output.progress import Progress

WORD = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['’-]\w+)*")
"""A word in the standard rules: a number with its points and commas, or letters and digits with inner ' ’ and -."""

DEFINITIONS = {
    "standard": [
        f"words: matches of {WORD.pattern} after NFC and case folding, with their combining marks; a character of "
        "Chinese, Japanese, Thai, Lao, Khmer or Burmese is a word; punctuation is not counted",
        "sents: sentences by pysbd's rules for the language; a line end also ends a sentence",
        "bigrams: two neighbouring words, also across sentences",
    ],
    "released": [
        "words: len(text.split(' ')), as the paper's authors count; line ends do not separate words",
        "sents: len(text.split('.')) for a source, len(text.split('\\n')) for a target, including empty pieces",
        "bigrams: two neighbouring pieces of text.split(), with case and punctuation",
    ],
}
NOVEL = [
    "% novel: bigrams of a target that do not occur in its source",
    "  types: percentage of the target's distinct bigrams; mean over examples",
    "  tokens: the same, with repeated bigrams counted each time; mean over examples",
    "  pooled: novel distinct bigrams of all targets, as a percentage of all their distinct bigrams",
]


# Zhu et al. (2022), "Differentiable N-gram objective on abstractive summarization", Table 1. The paper does not say
# over which splits it averages.
PAPER = {
    "cnn_dailymail": ("287K/13K/11K", 690.90, 42.38, 49.08, 3.81, 62.22),
    "xsum": ("204K/11K/11K", 431.07, 19.77, 23.26, 1.00, 88.13),
}
"""Data set → the row of the paper's table: sizes of splits, then the columns up to the novel bigrams."""


@dataclass(frozen=True)
class Statistics:
    """Counts over examples, which can be added, and means; percentages of bigrams are None if no target has one."""

    examples: int
    source_words_total: int
    source_sentences_total: int
    target_words_total: int
    target_sentences_total: int
    with_bigrams: int
    novel_types_shares: float
    novel_tokens_shares: float
    novel_types_total: int
    types_total: int

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def means(self) -> dict[str, float | None]:
        """The columns of the table by name: mean lengths, and percentages of bigrams as in ``NOVEL``."""
        return {
            "source_words": self.source_words_total / self.examples,
            "source_sentences": self.source_sentences_total / self.examples,
            "target_words": self.target_words_total / self.examples,
            "target_sentences": self.target_sentences_total / self.examples,
            "novel_bigrams": _percent(self.novel_types_shares, self.with_bigrams),
            "novel_bigram_tokens": _percent(self.novel_tokens_shares, self.with_bigrams),
            "novel_bigrams_pooled": _percent(self.novel_types_total, self.types_total),
        }

    def record(self) -> dict[str, float | int | None]:
        """The values by name, ready for JSON."""
        return {"examples": self.examples, "with_bigrams": self.with_bigrams, **self.means}


class Measurement(NamedTuple):
    """The statistics of a data set: its splits, without their examples, their counts, and notes on their sentences."""

    name: str
    rules: str
    splits: dict[str, Split]
    statistics: dict[str, Statistics]
    notes: dict[str, list[str]]

    def record(self) -> dict[str, object]:
        """Everything by name, ready for JSON."""
        return {
            "name": self.name,
            "rules": self.rules,
            "definitions": [*DEFINITIONS[self.rules], *NOVEL],
            "splits": {
                name: {
                    **self.statistics[name].record(),
                    "fingerprint": split.fingerprint,
                    "skipped": [str(row) for row in split.skipped],
                    "notes": self.notes[name],
                }
                for name, split in self.splits.items()
            },
        }

    def __str__(self) -> str:
        return table(self.name, self.statistics, rules=self.rules)


def measurement(
    name: str, *, splits: Sequence[str] = (), rules: str = "standard", language: str = AUTO, **options: Any
) -> Measurement:
    """Read the splits of a data set, all by default, and compute the statistics of each. ``options`` go to ``load``."""
    _check(rules)
    found = Measurement(name, rules, {}, {}, {})
    for wanted in splits or split_names(name):
        loaded = load(name, wanted, **options)
        split, examples = loaded.split, loaded.readable
        with Progress(f"counting {split}", total=2 * len(examples), unit="texts") as progress:
            found.statistics[split] = statistics(examples, rules=rules, language=language, progress=progress.update)
        first = [example.source for example in examples[:LOOKED_AT]] if rules == "standard" else []
        found.notes[split] = splitting_notes(first, "pysbd", language, "--language")
        found.splits[split] = loaded._replace(examples=[])
    return found


def statistics(
    examples: Sequence[Example],
    *,
    rules: str = "standard",
    language: str = AUTO,
    progress: Callable[[int], None] | None = None,
) -> Statistics:
    """Count words, sentences and novel bigrams by the ``DEFINITIONS`` of ``rules``; ``progress`` gets numbers of texts.

    >>> counts = statistics([Example("1", "The cat sat. It slept.", "The cat slept.")])
    >>> counts.means["source_words"], counts.means["source_sentences"], counts.means["novel_bigrams"]
    (5.0, 2.0, 50.0)
    """
    _check(rules)
    if not examples:
        raise UserError("expected at least one example for statistics, got none.")
    standard = rules == "standard"
    sources, targets = [example.source for example in examples], [example.target for example in examples]
    if standard:
        lengths = list(map(len, split_many([*sources, *targets], language=language, progress=progress)))
    else:
        lengths = [len(text.split(".")) for text in sources] + [len(text.split("\n")) for text in targets]
    source_words = target_words = 0
    bigrams = []  # of each target: distinct, novel and distinct, all, novel
    for source, target in zip(sources, targets, strict=True):
        words = [words_of(text) if standard else text.split() for text in (source, target)]
        source_words += len(words[0] if standard else source.split(" "))
        target_words += len(words[1] if standard else target.split(" "))
        every = list(pairwise(words[1]))
        new = set(every).difference(pairwise(words[0]))
        bigrams.append((len(set(every)), len(new), len(every), sum(bigram in new for bigram in every)))
    return Statistics(
        len(examples),
        source_words,
        sum(lengths[: len(examples)]),
        target_words,
        sum(lengths[len(examples) :]),
        with_bigrams=sum(types > 0 for types, *_ in bigrams),
        novel_types_shares=fsum(novel / types for types, novel, _, _ in bigrams if types),
        novel_tokens_shares=fsum(novel / tokens for _, _, tokens, novel in bigrams if tokens),
        novel_types_total=sum(novel for _, novel, _, _ in bigrams),
        types_total=sum(types for types, *_ in bigrams),
    )


def table(name: str, splits: Mapping[str, Statistics], *, rules: str = "standard") -> str:
    """Format the statistics of each split and of all together, the paper's values if known, and the definitions."""
    named = {**splits, **({"all": reduce(add, splits.values())} if len(splits) > 1 else {})}
    rows = [
        [split, f"{counts.examples:,}", *(fixed(mean, 2) for mean in counts.means.values())]
        for split, counts in named.items()
    ]
    definitions = [*DEFINITIONS[rules], *NOVEL]
    if paper := PAPER.get(canonical(name)):
        rows.append(["paper", str(paper[0]), *(f"{value:.2f}" for value in paper[1:]), "", ""])
        definitions.append("paper: Table 1 of the paper, which does not say over which splits it averages")
    over = ["", "", "source", "", "target", "", "% novel bigrams", "", ""]
    heads = ["split", "examples", "words", "sents", "words", "sents", "types", "tokens", "pooled"]
    lines = aligned([heads, *rows])
    top = ""
    for head, below in zip(over, re.finditer(r"\S+", lines[0]), strict=True):
        top = top.ljust(below.start()) + head if head else top
    return "\n".join([f"{name}, {rules} rules", "", top, *lines, "", *definitions])


def words_of(text: str) -> list[str]:
    """The words of a text by the standard rules, with case folded.

    >>> words_of("It's well-known: 3.5% of 北京"), words_of("हिन्दी")
    (["it's", 'well-known', '3.5', 'of', '北', '京'], ['हिन्दी'])
    """
    folded = unicodedata.normalize("NFC", text).casefold()
    plain = folded.isascii() or not special_pattern().search(folded)
    return (WORD if plain else word_pattern()).findall(folded)


def _percent(part: float, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _check(rules: str) -> None:
    if rules not in DEFINITIONS:
        raise UserError(f"unknown rules {rules!r}; choose from {list(DEFINITIONS)}.")
