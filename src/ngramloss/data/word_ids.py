"""a byte-level BPE tokenizer → a function: texts → their ids, without special tokens; each word is encoded once.

The tokenizers library encodes about two megabytes of text a second on a core. A byte-level BPE (GPT-2, BART, RoBERTa,
our own) cuts a text into words by a fixed pattern and encodes each on its own, so the ids of a word can be looked up.
Texts with added tokens, or with characters that another version of Unicode may class differently, go to the tokenizer.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from ngramloss.errors import UserError

Encode = Callable[[Sequence[str]], list[list[int]]]

MOST_WORDS = 500_000
"""Words that are remembered: about 150 MB. After that, all are forgotten."""
CHECKED = 200
"""Texts that the tokenizer encodes, too, for comparison."""

_KNOWN = "".join(map(chr, [9, 10, *range(0x20, 0x7F), *range(0xA0, 0x250), *range(0x2010, 0x2028), 0x20AC]))
"""Characters whose class is the same in every version of Unicode: Latin letters and usual punctuation."""


def word_encoder(tokenizer: Any) -> Encode | None:
    """A function: texts → the same ids as :func:`bare_ids`, if the tokenizer is a byte-level BPE."""
    return _WordEncoder(tokenizer) if _encodes_words(tokenizer) else None


def bare_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The ids of texts by the tokenizer itself, without special tokens."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, verbose=False, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]
    return ids


def special_tokens(tokenizer: Any, argument: str = "text") -> tuple[list[int], list[int]]:
    """The special tokens before and after a text; a target is a ``text_target``."""
    framed = list(tokenizer(**{argument: "a"})["input_ids"])
    bare = list(tokenizer(**{argument: "a"}, add_special_tokens=False)["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        if bare and framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    raise UserError(
        f"{type(tokenizer).__name__} encodes a text differently with special tokens than without. "
        "Such tokenizers are not supported."
    )


class _WordEncoder(dict[str, tuple[int, ...]]):
    """Word → its ids, computed when they are first needed. Called with texts, it gives their ids."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import pre_tokenizers

        super().__init__()
        rules = _rules(tokenizer)
        self._tokenizer, self._model = tokenizer, tokenizer.backend_tokenizer.model
        self._spaced: bool = rules["pre_tokenizer"]["add_prefix_space"]
        self._bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._words = _word_pattern().findall
        added = [re.escape(token["content"]) for token in rules["added_tokens"]]
        self._added = re.compile("|".join(added) or "(?!)").search
        self._unknown = re.compile(f"[^{re.escape(_KNOWN)}]").search
        self._agrees: bool | None = None

    def __missing__(self, word: str) -> tuple[int, ...]:
        ((written, _),) = self._bytes.pre_tokenize_str(word)
        self[word] = ids = tuple(token.id for token in self._model.tokenize(written))
        return ids

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts."""
        if self._agrees is None and texts:
            self._agrees = self._ids(texts[:CHECKED]) == bare_ids(self._tokenizer, texts[:CHECKED])
        if len(self) > MOST_WORDS:
            self.clear()
        return self._ids(texts) if self._agrees else bare_ids(self._tokenizer, texts)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids = [self._looked_up(text) if self._has_words(text) else [] for text in texts]
        others = [index for index, found in enumerate(ids) if not found]
        for index, found in zip(others, bare_ids(self._tokenizer, [texts[index] for index in others]), strict=True):
            ids[index] = found
        return ids

    def _has_words(self, text: str) -> bool:
        """Whether the pattern finds the words of a text as the tokenizer does."""
        plain = (text.isascii() and text.isprintable()) or not self._unknown(text)
        return bool(text) and plain and not self._added(text)

    def _looked_up(self, text: str) -> list[int]:
        if self._spaced and text[0] != " ":
            text = " " + text
        return list(chain.from_iterable(map(self.__getitem__, self._words(text))))


def _encodes_words(tokenizer: Any) -> bool:
    """Whether a tokenizer is a byte-level BPE without a normaliser, called as the library's base class calls it."""
    from transformers import PreTrainedTokenizerFast

    own = [
        getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus")
    ]
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(own):
        return False
    rules = _rules(tokenizer)
    pre, model = rules["pre_tokenizer"] or {}, rules["model"]
    return (
        rules["normalizer"] is None
        and pre.get("type") == "ByteLevel"
        and bool(pre.get("use_regex"))
        and model["type"] == "BPE"
        and not model["dropout"]
    )


def _rules(tokenizer: Any) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return rules


@cache
def _word_pattern() -> re.Pattern[str]:
    """GPT-2's pattern of words, for known characters."""
    letter, number = (
        "".join(re.escape(sign) for sign in _KNOWN if unicodedata.category(sign).startswith(kind)) for kind in "LN"
    )
    space = "".join(re.escape(sign) for sign in _KNOWN if sign.isspace())
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{space}{letter}{number}]+"
        rf"|[{space}]+(?![^{space}])|[{space}]+"
    )
