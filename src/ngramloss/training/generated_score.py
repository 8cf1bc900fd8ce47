"""a model in training, and the validation split → the score of the texts that it generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ngramloss.data import Example
from ngramloss.errors import UserError
from ngramloss.metrics.on_examples import notes_on_references, scores_on
from ngramloss.metrics.scores import Absent, corpus_score
from ngramloss.training.best import Best

Write = Callable[[Any, Sequence[Sequence[int]]], list[str]]
TRIED = 8
"""Examples on which the metric is tried before training."""


class GeneratedScore:
    """The score of the texts that a model in training generates for the validation split.

    Each process generates its share. The first one scores all texts and sends the score to the others, so that all
    agree on the best checkpoint and on early stopping.

    Args:
        best: the score.
        sources: the ids of the sources.
        write: a model and source ids → texts.
        examples: the examples of these sources; empty in all processes but the first.
        process: the number of this process.
        processes: how many there are.
    """

    def __init__(
        self,
        best: Best,
        sources: Sequence[Sequence[int]],
        write: Write,
        *,
        examples: Sequence[Example],
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.best, self.sources, self.write, self.examples = best, sources, write, examples
        self.process, self.processes = process, processes

    def __call__(self, model: Any) -> dict[str, float]:
        """The score, and the seconds that it took."""
        began = time.perf_counter()
        score = self._shared(self._texts(model))
        return {self.best.name: score, "generation_runtime": time.perf_counter() - began}

    def _texts(self, model: Any) -> list[str]:
        """The texts of all sources, from all processes. Shares are equally long, because FSDP needs that."""
        count, each = len(self.sources), -(-len(self.sources) // self.processes)
        rows = range(self.process, each * self.processes, self.processes)
        mine = self.write(model, [self.sources[row % count] for row in rows])
        if self.processes == 1:
            return mine
        shares: list[Any] = [None] * self.processes
        torch.distributed.all_gather_object(shares, mine)
        return [shares[row % self.processes][row // self.processes] for row in range(count)]

    def _shared(self, texts: Sequence[str]) -> float:
        """The score that the first process computes."""
        score = [score_of(self.best, self.examples, texts) if self.process == 0 else 0.0]
        if self.processes > 1:
            torch.distributed.broadcast_object_list(score)
        return score[0]


def notes_on(best: Best, examples: Sequence[Example]) -> list[str]:
    """Try the metric on a few references; return sentences about texts that its options do not read well.

    Raises:
        UserError: the metric cannot score these texts, or does not compute the score.
    """
    tried = examples[:TRIED]
    score_of(best, tried, [example.target for example in tried])
    return notes_on_references(best.metric, tried, best.options)


def score_of(best: Best, examples: Sequence[Example], texts: Sequence[str]) -> float:
    """The score of texts that were generated for these examples."""
    try:
        scores = scores_on(best.metric, examples, texts, best.options)
    except Absent as reason:
        raise UserError(f"train.best: {reason}") from None
    if best.name not in scores.values:
        raise UserError(
            f"train.best: {best.metric} does not compute {best.name} with these options, only "
            f"{', '.join(scores.values)}. An option in train.best_options may change this: ngramloss list "
            "metrics."
        )
    return corpus_score(scores, best.name)
