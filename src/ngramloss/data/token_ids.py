"""a tokenizer and texts → their ids without special tokens; the special tokens around a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngramloss.errors import UserError


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
