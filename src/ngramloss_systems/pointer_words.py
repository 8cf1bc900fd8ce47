"""texts → words and their ids, with ids of a document's own for its unknown words, and back: a word-level tokenizer.

A word is a run of letters, marks, digits and underscores; every other character that is not a space is a word of its
own. A joiner says on which side such a character touches its neighbour: ``said (Smith).`` is ``said``, ``(￭``,
``Smith``, ``￭)`` and ``￭.``. So a name is the same word wherever it stands, and a text of known words is exact again,
but for the kind and number of its spaces, a joiner in it, which becomes ``■``, and with ``lowercase`` its capitals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import ngramloss as ng

JOINER, INSTEAD = "￭", "■"
SPECIAL = UNKNOWN, PADDING, START, END = "<unk>", "<pad>", "<s>", "</s>"
"""Their ids are 0 to 3, as the authors'."""


def word_tokenizer(texts: Iterable[str], size: int, *, lowercase: bool) -> Any:
    """A tokenizer of the most frequent words, the first in the alphabet of equally frequent ones."""
    empty = _with_vocabulary({}, lowercase=lowercase)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(empty, text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - len(SPECIAL)]
    return _with_vocabulary({word: place for place, word in enumerate((*SPECIAL, *frequent))}, lowercase=lowercase)


def _with_vocabulary(ids: dict[str, int], *, lowercase: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    words.normalizer = normalizers.Sequence(
        [
            *([normalizers.Lowercase()] if lowercase else []),
            normalizers.Replace(JOINER, INSTEAD),
            normalizers.Replace(Regex(r"(?<=\S)(?=[^\w\s])"), f" {JOINER}"),
            normalizers.Replace(Regex(rf"(?<=[^\w\s{JOINER}])(?=\w)"), f"{JOINER} "),
        ]
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=JOINER, cleanup=False),
            decoders.Fuse(),
            decoders.Replace(f"{JOINER} ", ""),
            decoders.Replace(JOINER, ""),  # the last word's, or two in a row
        ]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words,
        bos_token=START,
        eos_token=END,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def cached_tokenizer(
    texts: Callable[[], Iterable[str]], count: int, fingerprint: str, size: int, *, lowercase: bool
) -> Any:
    """:func:`word_tokenizer`, made once for the same texts."""

    def train() -> Any:
        with ng.Progress("counting words", total=count, unit="texts") as progress:
            counted = (_counted(text, progress) for text in texts())
            return word_tokenizer(counted, size, lowercase=lowercase)

    return ng.loading.cached_tokenizer(["words", 1, fingerprint, size, lowercase, version("tokenizers")], train)[0]


def _counted(text: str, progress: ng.Progress) -> str:
    progress.update(1)
    return text


def split_words(tokenizer: Any, text: str) -> list[str]:
    """The words of a text, known or not, as the tokenizer splits them. Special tokens in it are words like others."""
    rules = tokenizer.backend_tokenizer
    return [word for word, _ in rules.pre_tokenizer.pre_tokenize_str(rules.normalizer.normalize_str(text))]


def join_words(tokenizer: Any, words: Sequence[str]) -> str:
    """The text of words, known or not."""
    text: str = tokenizer.backend_tokenizer.decoder.decode(list(words))
    return text


def extended_ids(words: Iterable[str], vocabulary: Mapping[str, int], unknown: dict[str, int], *, grow: bool) -> Any:
    """The ids of words, with ``unknown`` ones behind those of the vocabulary; it may ``grow``, as for a document."""
    found = []
    for word in words:
        known = vocabulary.get(word)
        if known is None:
            if grow:
                unknown.setdefault(word, len(vocabulary) + len(unknown))
            known = unknown.get(word, vocabulary[UNKNOWN])
        found.append(known)
    return found
