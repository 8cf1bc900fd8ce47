"""a model, its tokenizer, an engine and the settings of a search → the texts of sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ngramloss.data import Example
from ngramloss.data.sentences import sentences
from ngramloss.data.tokens import Shape, prompt_ids
from ngramloss.models import loading
from ngramloss.models.languages import codes
from ngramloss.models.teacher_forced import text_logp
from ngramloss.output.progress import Progress
from ngramloss.search import engines
from ngramloss.search.batches import Budget, batches
from ngramloss.search.search import PROBABILITY, Search

Ids = Sequence[int]


class Text(NamedTuple):
    """A text and its number of tokens, including the start and end tokens but not padding."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Writer:
    """A model that writes the texts of sources by one search."""

    model: Any  # on its device
    tokenizer: Any  # the model's own
    shape: Shape  # how sources are tokenised, and the language of the texts
    search: Search  # the settings of the search
    engine: engines.Loaded  # what searches
    budget: Budget  # how much one batch may contain
    has_lines: bool = False  # whether each sentence of a text is a line

    def ids(self, sources: Sequence[str]) -> list[list[int]]:
        """The ids of sources, with their special tokens; of a decoder-only model, those of whole prompts."""
        return prompt_ids(sources, self.tokenizer, self.shape)

    def ids_of(self, examples: Sequence[Example]) -> list[list[int]]:
        """The ids of the sources of examples."""
        return self.ids([example.source for example in examples])

    def write(self, ids: Sequence[Ids], **more: Any) -> list[list[Text]]:
        """The texts of each source of a batch, best first; ``more``: tensors by name, which only ``hf`` takes."""
        hypotheses = self.engine.write(ids, **more)
        if self.search.rerank == PROBABILITY:
            hypotheses = _by_probability(self.model, self.search, ids, hypotheses)
        first = int(loading.is_causal(self.model.config))  # a text behind a prompt starts with the prompt's last token
        rows = [[row[first:] for row in rows] for rows in hypotheses]
        texts = iter(decoded(self.tokenizer, [row for group in rows for row in group]))
        return [[Text(self._in_lines(next(texts)), len(row)) for row in group] for group in rows]

    def best(self, ids: Sequence[Ids], *, what: str = "writing", unit: str = "documents") -> list[str]:
        """The best text of each source, in order; progress names the work ``what`` and the sources ``unit``."""
        found = [""] * len(ids)
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]), reverse=True)
        with Progress(what, len(ids), unit=unit) as progress:
            for rows, texts in batches(
                order,
                lambda rows: [list(ids[row]) for row in rows],
                lambda _, encoded: self.write(encoded),
                self.budget,
            ):
                for row, (text, *_) in zip(rows, texts, strict=True):
                    found[row] = text.text
                progress.update(len(rows))
        return found

    def _in_lines(self, text: str) -> str:
        return "\n".join(sentences(text, language=self.shape.language)) if self.has_lines else text


def decoded(tokenizer: Any, rows: Sequence[Ids]) -> list[str]:
    """The texts of rows of ids, without special tokens and codes of languages."""
    languages = set(codes(tokenizer).values())  # to M2M100 these are not special tokens
    bare = [[token for token in row if token not in languages] for row in rows]
    return [text.strip() for text in tokenizer.batch_decode(bare, skip_special_tokens=True)]


def _by_probability(
    model: Any, search: Search, sources: Sequence[Ids], hypotheses: Sequence[list[list[int]]]
) -> list[list[list[int]]]:
    """The texts of each source, that with the highest log-probability by length first."""
    ordered = []
    for rows, sums in zip(hypotheses, text_logp(model, sources, hypotheses, pad=search.pad), strict=True):
        scores = [
            value / float(max(len(row) - 1, 1)) ** search.length_penalty for row, value in zip(rows, sums, strict=True)
        ]
        ordered.append([rows[number] for number in sorted(range(len(rows)), key=lambda number: -scores[number])])
    return ordered
