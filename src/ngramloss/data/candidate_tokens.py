"""examples, their candidates and a tokenizer → cached tokens of the candidates, and examples with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ngramloss.data import Example
from ngramloss.data.candidates import Candidates
from ngramloss.data.prompts import completion_ids
from ngramloss.data.tokens import (
    Arrays,
    Ids,
    Shape,
    Tokens,
    cached_arrays,
    cached_at,
    flat_ids,
    targets,
    tokenizer_fingerprint,
)
from ngramloss.errors import UserError
from ngramloss.output.console import logger

FORMAT = 1
"""Part of the cache key: increased when the same candidates give other tokens."""
NAMES = ("ids", "scores", "cut")
"""Arrays in a folder: ids, with the end of each candidate; scores and whether tokens were cut, with each row's."""


class CandidateTokens:
    """Tokenised candidates of examples in a folder, read on demand. An example may have none."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        flat = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in NAMES}
        self._flat = {name: np.asarray(values) for name, values in flat.items()}
        self._ends = {name: np.load(self.folder / f"{name}.ends.npy") for name in NAMES}

    def __reduce__(self) -> tuple[type[CandidateTokens], tuple[Path]]:
        return CandidateTokens, (self.folder,)  # another process reads the files itself

    def __len__(self) -> int:
        return len(self._ends["scores"])

    def __getitem__(self, row: int) -> tuple[list[Ids], NDArray[np.float32]]:
        rows, ends = self._ends["scores"], self._ends["ids"]
        own = range(int(rows[row - 1]) if row else 0, int(rows[row]))
        ids = [self._flat["ids"][(ends[index - 1] if index else 0) : ends[index]] for index in own]
        return ids, self._flat["scores"][own.start : own.stop]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Candidates of each example."""
        counts: NDArray[np.int64] = np.diff(self._ends["scores"], prepend=0)
        return counts

    def reduced(self, function: np.ufunc) -> NDArray[np.int64]:
        """A function of the lengths of each example's candidates, such as their sum; 0 if it has none."""
        found = np.zeros(len(self), np.int64)
        some = self.counts > 0
        starts = (self._ends["scores"] - self.counts)[some]
        if len(starts):
            found[some] = function.reduceat(np.diff(self._ends["ids"], prepend=0), starts)
        return found

    @property
    def cut(self) -> int:
        """How many candidates lost their end."""
        return int(self._flat["cut"].sum())


class WithCandidates(Dataset[dict[str, Any]]):
    """Tokenised examples with ``candidates``, a list of ids, and ``scores``."""

    def __init__(self, tokens: Tokens, candidates: CandidateTokens) -> None:
        if len(tokens) != len(candidates):
            raise ValueError(f"lengths differ: {len(tokens)} examples, candidates of {len(candidates)}.")
        self.tokens, self.candidates = tokens, candidates
        self.lengths, self.label_lengths = tokens.lengths, tokens.target_lengths
        self.target_lengths = np.maximum(self.label_lengths, candidates.reduced(np.maximum))
        self.all_target_lengths = self.label_lengths + candidates.reduced(np.add)
        self.texts = 1 + candidates.counts

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example = self.tokens[row]
        texts, scores = self.candidates[row % len(self)]
        return {**example, "candidates": texts, "scores": scores}

    @property
    def has_turns(self) -> bool:
        """As :attr:`Tokens.has_turns`."""
        return self.tokens.has_turns


def tokenise_candidates(
    examples: Sequence[Example],
    fingerprint: str,
    candidates: Candidates,
    tokenizer: Any,
    shape: Shape,
    *,
    cache: Path | None = None,
) -> CandidateTokens:
    """Tokenise the candidates of the examples, found by id, or read them from the cache."""
    found = sum(example.id in candidates.rows for example in examples)
    if not found:
        raise UserError(
            f"none of the {len(examples):,} training examples has candidates: an example has the id "
            f"{examples[0].id!r}, a candidate {next(iter(candidates.rows))!r}. Make candidates for the training split "
            "of the same data, or set data.id to the column with the ids."
        )
    what = [FORMAT, fingerprint, candidates.fingerprint, tokenizer_fingerprint(tokenizer), shape.max_target]
    what += [asdict(shape.prompt)] if shape.prompt is not None else []
    folder = cached_at("candidates", what, cache)

    def arrays(chunk: Sequence[Example]) -> Arrays:
        rows = [(example.source, *candidates.rows.get(example.id, ((), ()))) for example in chunk]
        texts, counts = [text for _, own, _ in rows for text in own], [len(own) for _, own, _ in rows]
        short: list[bool] = []
        if shape.prompt is not None:
            sources = [source for source, own, _ in rows for _ in own]
            ids = completion_ids(sources, texts, tokenizer, shape.prompt, shape.max_target, short) if texts else []
        else:
            ids = targets(texts, tokenizer, shape, short) if texts else []
        scores = np.array([score for _, _, own in rows for score in own], np.float32)
        return {
            "ids": (flat_ids(ids), list(map(len, ids))),
            "scores": (scores, counts),
            "cut": (np.array(short, np.uint8), counts),
        }

    made = CandidateTokens(cached_arrays(folder, examples, arrays, what="token cache of candidates"))
    if missing := len(examples) - found:
        logger.info(
            f"{missing:,} of {len(examples):,} training examples have no candidates; only the other terms of the "
            "objective train on them."
        )
    if made.cut:
        logger.info(
            f"{made.cut:,} of {int(made.counts.sum()):,} candidates are longer than data.max_target = "
            f"{shape.max_target} tokens and were cut."
        )
    return made
