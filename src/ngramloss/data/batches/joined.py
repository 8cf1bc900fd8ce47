"""prompts and what follows them → padded batches of a decoder-only model, with the position that predicts each label.

Rows are padded on the right: no token sees what comes after it, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ngramloss.data.batches.padding import Batch, candidates_of, names_beside, numbers_beside, of_own_texts
from ngramloss.data.batches.plan import Joined, Size
from ngramloss.errors import UserError
from ngramloss.loss.stats import IGNORE_INDEX

Ids = NDArray[np.int64]
TEXT_NUMBERS = "text_numbers"
"""Which text of its row each position belongs to: 0 is the prompt, 1 the reference, then candidates, [R, L]."""
NO_TEXT = -1  # The number of padding
SEVERAL_TURNS = "a row has candidates and several turns. Candidates are compared for a single text."


def split_turns(labels: Any) -> tuple[Ids, list[range]]:
    """The token ids behind a prompt, and where the learnt texts are among them. ``~id`` is read but not learnt.

    >>> split_turns([5, 6, ~7, 8])
    (array([5, 6, 7, 8]), [range(0, 2), range(3, 4)])
    """
    stored = np.asarray(labels, np.int64)  # [T]
    learnt = np.concatenate([[False], stored >= 0, [False]])  # [T + 2]
    (edges,) = (learnt[1:] != learnt[:-1]).nonzero()
    return stored ^ (stored >> 63), [range(*pair) for pair in edges.reshape(-1, 2).tolist()]


@dataclass
class JoinedPadder:
    """Collate rows with ``input_ids``, the prompt, and ``labels``, what follows it.

    A batch has ``input_ids`` [R, L]; ``labels`` [S, T], one text a row, with −100 where there is none; and
    ``label_positions`` [S, T]: the index among the R·L positions of the one that predicts the label. With candidates it
    also has ``candidates`` [B, K, T], ``candidate_positions`` [B, K, T] and ``scores`` [B, K]. If they share their
    prompt, it has ``position_ids`` and ``text_numbers``, [R, L] each; otherwise their rows follow those of references.
    Numbers beside the labels of rows, ``lm_logp`` or ``weights``, are in the shape of the labels.
    Only experts with a router need ``always_mask``. ``multiple`` and ``shared`` count where no size is given.
    """

    pad: int
    _: KW_ONLY
    multiple: int = 1
    always_mask: bool = False
    beside: Collection[str] | None = None
    own: Collection[str] = ()
    shared: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]], size: Size | None = None) -> Batch:
        """Collate these rows into a batch of this size, or the smallest that holds them."""
        parts = [split_turns(row["labels"]) for row in rows]
        size = size or self._smallest(rows, parts)
        B, L, T, K = size.rows, size.source, size.target, size.texts
        shared, compared = size.joined == "shared", size.joined != "turns" and K > 1
        own = np.arange(B)[:, None].repeat(K, 1)  # the row of each text, [B, K]
        if size.joined == "repeated":  # candidates are in rows behind all references
            own[:, 1:] = B + np.arange(B * (K - 1)).reshape(B, K - 1)
        ids = np.full((int(own.max()) + 1, L), self.pad)  # [R, L]
        mask, positions, numbers = np.zeros_like(ids), np.zeros_like(ids), np.full_like(ids, NO_TEXT)  # [R, L] each
        mask[:, 0] = 1
        labels = np.full((B * K, T), IGNORE_INDEX)  # [S, T]
        places = own.reshape(-1, 1) * L + np.minimum(np.arange(T), L - 1)  # [S, T], spread over each row
        scores = np.zeros((B, K - 1), np.float32)  # [B, K − 1]
        beside = {name: np.zeros((B * K, T), np.float32) for name in names_beside(rows, self.beside)}  # [S, T] each
        for b, (row, (text, turns)) in enumerate(zip(rows, parts, strict=True)):
            prompt = np.asarray(row["input_ids"], np.int64)
            texts = [(text, turns)]
            if compared:
                if len(turns) > 1:
                    raise UserError(SEVERAL_TURNS)
                candidates, values = candidates_of(row)
                scores[b, : len(values)] = values
                texts += [(np.asarray(ids, np.int64), [range(len(ids))]) for ids in candidates]
            start = len(prompt)
            for k, (tokens, spans) in enumerate(texts):
                r, end = int(own[b, k]), start + len(tokens)
                ids[r, : len(prompt)], ids[r, start:end] = prompt, tokens
                mask[r, :end] = 1
                numbers[r, : len(prompt)], numbers[r, start:end] = 0, 1 + k
                positions[r, : len(prompt)] = np.arange(len(prompt))
                positions[r, start:end] = len(prompt) + np.arange(len(tokens))
                by = np.concatenate([[len(prompt) - 1], np.arange(start, end)])  # what predicts each token
                for turn, span in enumerate(spans):
                    # Without a prompt, nothing predicts the first token.
                    first = min(max(span.start, 1 - len(prompt)), span.stop)
                    s, length = b * K + k + turn, span.stop - first
                    labels[s, :length] = tokens[first : span.stop]
                    places[s, :length] = r * L + by[first : span.stop]
                    if k == 0:  # candidates have no such numbers
                        for name, given in beside.items():
                            given[s, :length] = numbers_beside(row, name)[first : span.stop]
                start = end if shared else start
        batch = {"input_ids": torch.from_numpy(ids)}
        if shared:
            batch |= {"position_ids": torch.from_numpy(positions), TEXT_NUMBERS: torch.from_numpy(numbers)}
        if self.always_mask:
            batch["attention_mask"] = torch.from_numpy(mask)
        both = {"labels": torch.from_numpy(labels), "label_positions": torch.from_numpy(places)}  # [S, T] each
        both |= {name: torch.from_numpy(given) for name, given in beside.items()}
        if not compared:
            return batch | both
        of_texts = {name: value.view(B, K, T) for name, value in both.items()}
        batch |= {name: value[:, 0] for name, value in of_texts.items()}  # [B, T] each
        return (
            batch
            | {
                "candidates": of_texts["labels"][:, 1:],  # [B, K − 1, T]
                "candidate_positions": of_texts["label_positions"][:, 1:],  # [B, K − 1, T]
                "scores": torch.from_numpy(scores),
            }
            | of_own_texts(rows, self.own, B, K - 1)
        )

    def _smallest(self, rows: Sequence[dict[str, Any]], parts: Sequence[tuple[Ids, list[range]]]) -> Size:
        """The smallest size that holds these rows; if they have candidates, with room for one at least."""
        compared = any("candidates" in row for row in rows)
        source = target = texts = 1
        for row, (text, turns) in zip(rows, parts, strict=True):
            lengths = [len(text), *map(len, row.get("candidates", ()))]
            source = max(source, len(row["input_ids"]) + (sum if self.shared else max)(lengths))
            target = max(target, *map(len, turns), *lengths[1:], 1)
            texts = max(texts, len(lengths) if compared else len(turns))
        source, target = (-(-length // self.multiple) * self.multiple for length in (source, target))
        texts = max(texts, 2) if compared else texts
        joined: Joined = ("shared" if self.shared else "repeated") if compared else "turns"
        return Size(max(len(rows), 1), source, target, texts, joined)
