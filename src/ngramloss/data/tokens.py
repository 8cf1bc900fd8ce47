"""examples and a tokenizer → cached tokens on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ngramloss.checksums import cached_folder
from ngramloss.data import Example, split_many
from ngramloss.errors import UserError
from ngramloss.files import cache_folder
from ngramloss.recipe import Data

Ids = NDArray[np.int32]
FORMAT = 1
"""Part of the cache key: increased when the same settings give other tokens."""
CHUNK = 1000


@dataclass(frozen=True)
class Shape:
    """The settings for turning a text into tokens.

    Attributes:
        separator: token before every source sentence; ``auto`` is the tokenizer's own, ``none`` omits it.
        splitter: how to split sentences.
        prefix: text before every source.
        max_source: maximum source length in tokens, including separators and special tokens.
        max_target: maximum target length in tokens.
        language: for splitting sentences; ``auto`` chooses by script.
    """

    separator: str = "auto"
    splitter: str = "pysbd"
    prefix: str = ""
    max_source: int = 1024
    max_target: int = 128
    language: str = "auto"

    @classmethod
    def of(cls, data: Data) -> Shape:
        """The settings of a recipe."""
        return cls(data.separator, data.splitter, data.prefix, data.max_source, data.max_target, data.language)


class Tokens(Dataset[dict[str, Ids]]):
    """Tokenised examples in a folder, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._flat = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ("input_ids", "labels")}
        self._ends = {name: np.load(self.folder / f"{name}.ends.npy") for name in self._flat}

    def __len__(self) -> int:
        return len(self._ends["labels"])

    def __getitem__(self, row: int) -> dict[str, Ids]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return {name: self._flat[name][(ends[row - 1] if row else 0) : ends[row]] for name, ends in self._ends.items()}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Source tokens of each row."""
        lengths: NDArray[np.int64] = np.diff(self._ends["input_ids"], prepend=0)
        return lengths

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """Target tokens of each row."""
        lengths: NDArray[np.int64] = np.diff(self._ends["labels"], prepend=0)
        return lengths


def tokenise(
    examples: Sequence[Example], fingerprint: str, tokenizer: Any, shape: Shape, *,
    cache: Path | None = None, progress: Callable[[int], None] | None = None, say: Callable[[str], None] = print,
) -> Tokens:
    """Tokenise the examples, or read the tokens from the cache if it has them, undamaged.

    Args:
        examples: what to tokenise.
        fingerprint: of the examples' content.
        tokenizer: a Hugging Face tokenizer.
        shape: the settings.
        cache: folder for prepared data, :func:`cache_folder` by default.
        progress: called with the number of examples done since the last call.
        say: shows a message to the user, if the cache is damaged.
    """
    if not examples:
        raise UserError("there are no examples to tokenise, expected at least one.")
    what = [FORMAT, fingerprint, tokenizer_fingerprint(tokenizer), asdict(shape)]
    folder = (cache or cache_folder()) / "tokens" / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]

    def fill(partial: Path) -> None:
        _write(partial, examples, tokenizer, shape, progress or (lambda _: None))

    return Tokens(cached_folder(folder, fill, what="token cache", say=say))


def _write(
    folder: Path, examples: Sequence[Example], tokenizer: Any, shape: Shape, progress: Callable[[int], None]
) -> None:
    separator = separator_id(tokenizer, shape.separator)
    pieces: dict[str, list[Ids]] = {"input_ids": [], "labels": []}   # arrays: lists would need ten times the memory
    lengths: dict[str, list[int]] = {"input_ids": [], "labels": []}
    for start in range(0, len(examples), CHUNK):
        chunk = examples[start : start + CHUNK]
        targets = tokenizer(text_target=[example.target for example in chunk], truncation=True,
                            max_length=shape.max_target)["input_ids"]
        inputs = sources([example.source for example in chunk], tokenizer, shape, separator)
        for name, rows in (("input_ids", inputs), ("labels", targets)):
            pieces[name].append(np.fromiter(chain.from_iterable(rows), dtype=np.int32))
            lengths[name] += map(len, rows)
        progress(len(chunk))
    for name in pieces:
        np.save(folder / f"{name}.npy", np.concatenate(pieces[name]))
        np.save(folder / f"{name}.ends.npy", np.cumsum(lengths[name], dtype=np.int64))


def sources(texts: Sequence[str], tokenizer: Any, shape: Shape, separator: int | None) -> list[list[int]]:
    """Source ids. Separators are inserted before truncation, so only texts that are too long lose their end."""
    before, after = _frame(tokenizer)
    room = shape.max_source - len(before) - len(after)
    if room < 1:
        raise UserError(f"max_source={shape.max_source} is too small for the tokenizer's special tokens. Raise it.")
    if separator is None:
        bodies = _bare(tokenizer, [shape.prefix + text for text in texts])
    else:
        split = split_many(texts, shape.splitter, language=shape.language)
        spaced = [[" " * (index > 0) + sentence for index, sentence in enumerate(document)] for document in split]
        pieces = iter(_bare(tokenizer, [sentence for document in spaced for sentence in document]))
        prefix = _bare(tokenizer, [shape.prefix])[0] if shape.prefix else []
        bodies = [prefix + [token for _ in document for token in (separator, *next(pieces))] for document in split]
    return [[*before, *body[:room], *after] for body in bodies]


def separator_id(tokenizer: Any, separator: str) -> int | None:
    """The id of the token before every source sentence."""
    if separator == "none":
        return None
    token = tokenizer.sep_token or tokenizer.eos_token if separator == "auto" else separator
    if token is None:
        raise UserError("this tokenizer has no separator. Set data.separator to a token, or to \"none\".")
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or (token_id == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise UserError(f"the tokenizer has no token {token!r}. Set data.separator to a token of its vocabulary.")
    return int(token_id)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of how a tokenizer encodes text, independent of earlier calls."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": sorted(tokenizer.get_vocab().items())}
    rules |= {"truncation": None, "padding": None}   # these depend on the last call
    if hasattr(tokenizer, "sp_model"):   # splits the text before the vocabulary is consulted, as in M2M100
        rules["pieces"] = hashlib.sha256(tokenizer.sp_model.serialized_model_proto()).hexdigest()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    languages = [str(getattr(tokenizer, name, "")) for name in ("src_lang", "tgt_lang")]
    what = [type(tokenizer).__name__, rules, special, languages]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _bare(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return ids


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    (bare,), framed = _bare(tokenizer, ["a"]), list(tokenizer("a")["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        if bare and framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    raise UserError(f"{type(tokenizer).__name__} encodes a text differently with special tokens than without. "
                    "Such tokenizers are not supported.")
