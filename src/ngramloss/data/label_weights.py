"""weights of words, tokens or answers, and tokens → a weight for every label, on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramloss.data.examples import Example, Split
from ngramloss.data.prompts import led_texts
from ngramloss.data.rows import bad_row_lines
from ngramloss.data.token_ids import special_tokens
from ngramloss.data.tokens import Shape, Tokens, cached_at, tokenizer_fingerprint, tokens_fingerprint
from ngramloss.errors import UserError
from ngramloss.storage.checksums import cached_folder

Numbers = NDArray[np.float32]
NAME = "weights"
FORMAT = 1
"""Part of the cache key: increased when the same weights give other numbers."""
CHUNK = 1000
"""Examples that are tokenised at a time."""


def has_label_weights(split: Split, *, messages: bool) -> bool:
    """Whether labels need weights. Answers with a weight of 0 are no labels, so weights of 0 and 1 need none."""
    return any(weight not in (0, 1) or not messages for example in split.examples for weight in example.weights)


def prepare_weights(split: Split, tokens: Tokens, tokenizer: Any, shape: Shape, *, cache: Path | None = None) -> Path:
    """The file with a weight for each label of a split, from the cache if it has it."""
    what = [FORMAT, split.fingerprint, tokens_fingerprint(tokens.folder), tokenizer_fingerprint(tokenizer)]
    fill = partial(_write_weights, split, tokens, tokenizer, shape)
    return cached_folder(cached_at(NAME, what, cache), fill, what="cache of weights") / f"{NAME}.npy"


def _write_weights(split: Split, tokens: Tokens, tokenizer: Any, shape: Shape, folder: Path) -> None:
    messages = shape.prompt is not None and shape.prompt.messages
    rows = (tokens[row]["labels"] for row in range(len(tokens)))
    pieces: list[Numbers] = []
    faults: list[str] = []
    if messages:
        pieces = [answer_weights(one, ids, shape) for one, ids in zip(split.examples, rows, strict=True)]
    else:
        for example, text in zip(split.examples, _texts(split.examples, tokenizer, shape), strict=True):
            labels, found = next(rows).tolist(), _token_weights(example.weights, text)
            if found is None:
                counts = f"{len(text.words)} words and {len(text.ids)} tokens"
                faults.append(f"row {example.id!r}: {len(example.weights)} weights for {counts}")
            else:
                pieces.append(_label_weights(labels, text, found, example.id))
    if faults:
        lines = "\n".join(bad_row_lines(faults))
        raise UserError(
            f"data.weights: {len(faults):,} of {len(split.examples):,} rows of the split {split.split!r} need one "
            f"weight for each word of the target, or one for each token:\n{lines}\nWords are separated by white "
            "space. Tokens are counted with the model's tokenizer, without special tokens and before truncation."
        )
    np.save(folder / f"{NAME}.npy", np.concatenate(pieces))


class _Text(NamedTuple):
    """A target as the tokenizer reads it."""

    ids: list[int]
    """Without special tokens."""
    words: list[range]
    """The characters of each word."""
    touched: list[range] | None
    """The words that each token is a part of: one, or more if a token spans them. None if that cannot be known."""
    before: list[int]
    """Special tokens before the ids."""
    after: list[int]


def _texts(examples: Sequence[Example], tokenizer: Any, shape: Shape) -> Iterator[_Text]:
    prompt = shape.prompt
    argument = "text_target" if prompt is None else "text"
    frame = special_tokens(tokenizer, argument) if prompt is None else ([], list(prompt.ending))
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    for start in range(0, len(examples), CHUNK):
        chunk = examples[start : start + CHUNK]
        texts = [example.target for example in chunk]
        if prompt is not None:
            texts = led_texts([example.source for example in chunk], texts, tokenizer, prompt)
        found = encode(**{argument: texts}, return_offsets_mapping=bool(tokenizer.is_fast))
        for number, text in enumerate(texts):
            ids, words = list(found["input_ids"][number]), [range(*match.span()) for match in re.finditer(r"\S+", text)]
            if tokenizer.is_fast:
                touched: list[range] | None = _touched(found["offset_mapping"][number], words, len(text))
            else:
                starts = [0, *(word.stop for word in words)]
                parts = [text[first : word.stop] for first, word in zip(starts, words, strict=False)]
                by_parts = encode(**{argument: parts})["input_ids"]
                words_of = [range(number, number + 1) for number, part in enumerate(by_parts) for _ in part]
                touched = words_of if [token for part in by_parts for token in part] == ids else None
            yield _Text(ids, words, touched, *frame)


def _touched(offsets: Sequence[tuple[int, int]], words: list[range], length: int) -> list[range]:
    """The words of each token, by the characters that it stands for. White space belongs to the next word.

    >>> _touched([(0, 1), (1, 4), (4, 5), (0, 5)], [range(0, 2), range(3, 5)], 5)
    [range(0, 1), range(0, 2), range(1, 2), range(0, 2)]
    """
    last = len(words) - 1
    following = np.searchsorted([word.stop for word in words], np.arange(length + 1), side="right").clip(max=last)
    current = np.searchsorted([word.start for word in words], np.arange(length + 1), side="right") - 1
    found = []
    for start, end in offsets:
        first = int(following[start])
        found.append(range(first, max(int(current[max(end - 1, start)]), first) + 1))
    return found


def _token_weights(weights: Sequence[float], text: _Text) -> list[float] | None:
    """The weight of each token; None if there are neither as many weights as words nor as tokens."""
    of_words = None
    if len(weights) == len(text.words) and text.touched is not None:  # a token that spans words has their mean
        of_words = [sum(weights[word] for word in words) / len(words) for words in text.touched]
    of_tokens = list(weights) if len(weights) == len(text.ids) else None
    if len(weights) == len(text.words) and text.touched is None and of_tokens is None:
        raise UserError(
            "data.weights: this tokenizer encodes a word differently inside a text than alone, so word weights "
            "cannot become token weights. Give one weight for each token."
        )
    if of_tokens is not None and of_words is not None and of_tokens != of_words:
        return None  # as many words as tokens, and yet other ones
    return of_words if of_tokens is None else of_tokens


def _label_weights(labels: list[int], text: _Text, weights: list[float], row: str) -> Numbers:
    before, ids, after = text.before, text.ids, text.after
    most = max(len(labels) - len(before) - len(after), 0)
    for part in (slice(0, len(ids)), slice(0, most), slice(len(ids) - most, len(ids))):
        own = weights[part] or weights[:1]
        framed = [own[0]] * len(before) + weights[part] + [own[-1]] * len(after)
        if labels == [*before, *ids[part], *after][: len(labels)]:
            return np.array(framed[: len(labels)], np.float32)
    raise UserError(
        f"data.weights: the labels of row {row!r} are not the tokens of its target, so its weights cannot be assigned "
        "to tokens. Raise data.max_target, or leave the weights out."
    )


def answer_weights(example: Example, labels: NDArray[Any], shape: Shape) -> Numbers:
    """The weight of each label of a conversation; tokens between answers, which are not learnt, have 0."""
    learnt = labels >= 0  # [T]
    begins = learnt & ~np.concatenate([[False], learnt[:-1]])  # [T]
    answers = int(begins.sum())
    weights = [weight for weight in example.weights if weight]
    cut = len(labels) == shape.max_target
    if answers > len(weights) or (answers < len(weights) and not cut):
        raise UserError(
            f"data.weights: row {example.id!r} has weights for {len(weights)} answers, but its tokens have {answers} "
            "separate answers: the chat template puts nothing between two of them. Join these two."
        )
    return np.where(learnt, np.array(weights, np.float32)[begins.cumsum() - 1], np.float32(0))
