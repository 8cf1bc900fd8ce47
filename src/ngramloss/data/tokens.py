"""examples and a tokenizer → cached tokens on disk."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ngramloss.data import Example, prompts, split_many
from ngramloss.data.prompts import Prompt
from ngramloss.data.token_ids import bare_ids
from ngramloss.data.token_ids import special_tokens as special_tokens
from ngramloss.errors import UserError
from ngramloss.output.progress import Progress
from ngramloss.recipe import Data
from ngramloss.storage.checksums import cached_folder
from ngramloss.storage.files import cache_folder
from ngramloss.storage.files import fingerprint as files_fingerprint
from ngramloss.version import installed

Ids = NDArray[np.int32]
FORMAT = 3
"""Part of the cache key: increased when the same settings give other tokens."""
CHUNK = 1000
"""Examples that are tokenised at a time."""
NAMES = ("input_ids", "labels")
SETTINGS = (
    "truncation_side",
    "padding_side",
    "split_special_tokens",
    "model_max_length",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "src_lang",
    "tgt_lang",
)
"""Settings of a tokenizer that may change ids or texts."""
PROBES = (
    "Hello, world! It's 1,234.5 degrees – isn't it?",
    "  two  spaces\tand\na line \r\n ",
    "naïve café, Łódź, ﬁne, Å, “quotes” … ½ €",
    "Привет, мир. Γειά σου. مرحبا بالعالم. שלום. नमस्ते। 你好，世界。こんにちは。안녕하세요. สวัสดี",
    "🙂👩‍👩‍👧 a\u00a0b\u200bc\u00ad",
    "internationalisation " * 20 + "the end",
    "",
)
"""Texts by which tokenizers are compared: several scripts, spaces, characters that may be normalised, a long one."""
CUT = "cut"
"""An array beside these: whether the source of a row lost its end, and whether its target did, one after the other."""


@dataclass(frozen=True)
class Shape:
    """How a text becomes tokens. With a ``prompt``, separators and prefix are not used.

    ``separator`` is a token before every source sentence, which are split by ``language``; ``auto`` is the tokenizer's.
    ``max_source`` counts separators and special tokens.
    """

    separator: str = "auto"
    splitter: str = "sentencex"
    prefix: str = ""
    max_source: int = 1024
    max_target: int = 128
    language: str = "auto"
    prompt: Prompt | None = None

    @classmethod
    def of(cls, data: Data, prompt: Prompt | None = None) -> Shape:
        """The settings of a recipe."""
        if prompt is not None:
            return cls("none", max_source=data.max_source, max_target=data.max_target, prompt=prompt)
        return cls(data.separator, data.splitter, data.prefix, data.max_source, data.max_target, data.language)


class Tokens(Dataset[dict[str, Any]]):
    """Tokenised examples in a folder, read on demand.

    For a decoder-only model ``input_ids`` is the prompt and ``labels`` all that follows it; there a token that is read,
    but not learnt, is stored as ``~id``, which is negative.

    Args:
        beside: name → file with a number for each label of all rows, one row after the other; rows have these, too.
    """

    def __init__(self, folder: Path, beside: Mapping[str, Path] | None = None) -> None:
        self.folder, self.beside = Path(folder), dict(beside or {})
        flat = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in NAMES}
        self._flat = {name: np.asarray(ids) for name, ids in flat.items()}  # parts of a memmap are slow to make
        self._ends = {name: np.load(self.folder / f"{name}.ends.npy") for name in self._flat}
        lengths: list[NDArray[np.int64]] = [np.diff(self._ends[name], prepend=0) for name in NAMES]
        self.lengths, self.target_lengths = lengths  # of each row
        for name, file in self.beside.items():
            self._flat[name] = np.asarray(np.load(file, mmap_mode="r"))
            self._ends[name] = self._ends["labels"]
            if len(self._flat[name]) != len(self._flat["labels"]):
                raise ValueError(f"{file} has {len(self._flat[name])} numbers for {len(self._flat['labels'])} labels.")

    def __reduce__(self) -> tuple[type[Tokens], tuple[Path, dict[str, Path]]]:
        return Tokens, (self.folder, self.beside)  # another process reads the files itself

    def __len__(self) -> int:
        return len(self._ends["labels"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return {name: self._flat[name][(ends[row - 1] if row else 0) : ends[row]] for name, ends in self._ends.items()}

    @property
    def has_turns(self) -> bool:
        """Whether some tokens behind a prompt are read but not learnt, such as between the turns of a conversation."""
        return bool((self._flat["labels"] < 0).any())

    @property
    def cut(self) -> tuple[int, int]:
        """How many sources and how many targets lost their end."""
        cut = np.load(self.folder / f"{CUT}.npy")
        return int(cut[::2].sum()), int(cut[1::2].sum())


def tokenise(
    examples: Sequence[Example], fingerprint: str, tokenizer: Any, shape: Shape, *, cache: Path | None = None
) -> Tokens:
    """Tokenise the examples, or read the tokens from the cache if it has them, undamaged."""
    if not examples:
        raise UserError("there are no examples to tokenise, expected at least one.")
    what = [FORMAT, fingerprint, tokenizer_fingerprint(tokenizer), asdict(shape)]
    if shape.splitter == "sentencex" and shape.separator != "none":
        what.append(installed("sentencex"))  # its rules change from version to version
    folder = cached_at("tokens", what, cache)

    def arrays(chunk: Sequence[Example]) -> Arrays:
        short: tuple[list[bool], list[bool]] = [], []
        collects = gc.isenabled()
        gc.disable()  # Python's cycle collector would go through all examples again and again, and find nothing
        try:
            if shape.prompt is not None:
                both = prompts.rows(chunk, tokenizer, shape.prompt, shape.max_source, shape.max_target, short)
            else:
                separator = separator_id(tokenizer, shape.separator)
                inputs = sources([row.source for row in chunk], tokenizer, shape, separator, short[0])
                both = inputs, targets([row.target for row in chunk], tokenizer, shape, short[1])
            found: Arrays = {name: (flat_ids(ids), list(map(len, ids))) for name, ids in zip(NAMES, both, strict=True)}
        finally:
            if collects:
                gc.enable()
        cut = np.array(short, np.uint8).T.flatten()  # whether the source and the target of each example were cut
        return {**found, CUT: (cut, [2] * len(chunk))}

    return Tokens(cached_arrays(folder, examples, arrays, what="token cache"))


def cached_at(kind: str, made_of: Sequence[Any], cache: Path | None = None) -> Path:
    """The folder in the cache for what is made of these things."""
    return (cache or cache_folder()) / kind / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


def flat_ids(texts: Sequence[Sequence[int]]) -> Ids:
    """The ids of all texts, one after the other."""
    return np.fromiter(chain.from_iterable(texts), dtype=np.int32)


Arrays = dict[str, tuple[NDArray[Any], list[int]]]
"""Name → numbers of some examples, and how many of them are in each group, such as a text."""


def cached_arrays(
    folder: Path, examples: Sequence[Example], arrays: Callable[[Sequence[Example]], Arrays], *, what: str
) -> Path:
    """The folder in the cache with the arrays of all examples and the ends of groups."""

    def fill(new: Path) -> None:
        pieces: dict[str, list[NDArray[Any]]] = {}  # arrays: lists would need ten times the memory
        lengths: dict[str, list[int]] = {}
        with Progress("tokenising", total=len(examples), unit="examples") as progress:
            for start in range(0, len(examples), CHUNK):
                chunk = examples[start : start + CHUNK]
                for name, (numbers, groups) in arrays(chunk).items():
                    pieces.setdefault(name, []).append(numbers)
                    lengths.setdefault(name, []).extend(groups)
                progress.update(len(chunk))
        for name in pieces:
            np.save(new / f"{name}.npy", np.concatenate(pieces[name]))
            np.save(new / f"{name}.ends.npy", np.cumsum(lengths[name], dtype=np.int64))

    return cached_folder(folder, fill, what=what)


def prompt_ids(texts: Sequence[str], tokenizer: Any, shape: Shape, *, cut: list[bool] | None = None) -> list[list[int]]:
    """What a model reads of sources, as ids; ``cut`` is extended by whether each text lost its end."""
    if shape.prompt is not None:
        return prompts.prompt_ids(texts, tokenizer, shape.prompt, shape.max_source, cut)
    return sources(texts, tokenizer, shape, separator_id(tokenizer, shape.separator), cut=cut)


def target_ids(sources: Sequence[str], texts: Sequence[str], tokenizer: Any, shape: Shape) -> list[list[int]]:
    """What a model is trained to write: the ids of targets, each with its end; sources decide what stands between."""
    if shape.prompt is not None:
        return prompts.completion_ids(sources, texts, tokenizer, shape.prompt, shape.max_target)
    return targets(texts, tokenizer, shape)


def sources(
    texts: Sequence[str], tokenizer: Any, shape: Shape, separator: int | None, cut: list[bool] | None = None
) -> list[list[int]]:
    """Source ids. Separators are inserted before truncation, so only texts that are too long lose their end."""
    before, after = special_tokens(tokenizer)
    room = shape.max_source - len(before) - len(after)
    if room < 1:
        raise UserError(f"max_source={shape.max_source} is too small for the tokenizer's special tokens. Raise it.")
    if separator is None:
        bodies = bare_ids(tokenizer, [shape.prefix + text for text in texts])
    else:
        split = split_many(texts, shape.splitter, language=shape.language)
        spaced = [" " * (index > 0) + sentence for document in split for index, sentence in enumerate(document)]
        pieces = bare_ids(tokenizer, spaced)
        for piece in pieces:
            piece.insert(0, separator)
        prefix = bare_ids(tokenizer, [shape.prefix])[0] if shape.prefix else []
        rest = iter(pieces)
        bodies = [[*prefix, *chain.from_iterable(islice(rest, len(document)))] for document in split]
    if cut is not None:
        cut += [len(body) > room for body in bodies]
    return [[*before, *body[:room], *after] for body in bodies]


def targets(texts: Sequence[str], tokenizer: Any, shape: Shape, cut: list[bool] | None = None) -> list[list[int]]:
    """Target ids, truncated; ``cut`` is extended by whether each text lost its end."""
    limit = shape.max_target
    made = list(tokenizer(text_target=list(texts), truncation=True, max_length=limit)["input_ids"])
    if cut is not None:  # with room for one more token, what lost its end has more
        full = [text for text, ids in zip(texts, made, strict=True) if len(ids) >= limit]
        longer = iter(tokenizer(text_target=full, truncation=True, max_length=limit + 1)["input_ids"] if full else [])
        cut += [len(ids) >= limit and len(next(longer)) > limit for ids in made]
    return made


def separator_id(tokenizer: Any, separator: str) -> int | None:
    """The id of the token before every source sentence."""
    if separator == "none":
        return None
    token = tokenizer.sep_token or tokenizer.eos_token if separator == "auto" else separator
    if token is None:
        raise UserError('this tokenizer has no separator. Set data.separator to a token, or to "none".')
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or (token_id == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise UserError(f"the tokenizer has no token {token!r}. Set data.separator to a token of its vocabulary.")
    return int(token_id)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its rules, its settings and :func:`tokenizer_behaviour`.

    Two tokenizers with the same hash give the same ids. Earlier calls do not change it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": sorted(tokenizer.get_vocab().items())}
    rules |= {"truncation": None, "padding": None}  # these depend on the last call
    if hasattr(tokenizer, "sp_model"):  # splits the text before the vocabulary is consulted, as in M2M100
        rules["pieces"] = hashlib.sha256(tokenizer.sp_model.serialized_model_proto()).hexdigest()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    settings = [str(getattr(tokenizer, name, "")) for name in SETTINGS]
    return _hash([type(tokenizer).__name__, rules, special, settings, tokenizer_behaviour(tokenizer)])


def tokenizer_behaviour(tokenizer: Any) -> str:
    """A hash of ids and texts of fixed inputs. Unlike the fingerprint it ignores how a library writes rules."""
    texts = [*PROBES, *(f"a {token} b{token}" for token in sorted(map(str, tokenizer.all_special_tokens)))]
    bare = bare_ids(tokenizer, texts)
    encoded = [bare] + [
        tokenizer(**{argument: texts}, verbose=False, **truncated)["input_ids"]
        for argument in ("text", "text_target")
        for truncated in ({}, {"truncation": True, "max_length": 8})
    ]
    decoded = [tokenizer.batch_decode(bare, skip_special_tokens=skipped) for skipped in (False, True)]
    return _hash([sorted(tokenizer.get_vocab().items()), encoded, decoded])


def ids_fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's ids and of those that it gives to texts, without what stands around a text."""
    return _hash([sorted(tokenizer.get_vocab().items()), bare_ids(tokenizer, list(PROBES))])


def same_ids(tokenizer: Any, other: Any) -> bool:
    """Whether two tokenizers have the same ids and give them to the same texts. Tokens around a text may differ."""
    texts = list(PROBES)
    same_vocabulary = tokenizer.get_vocab() == other.get_vocab()
    return bool(same_vocabulary) and bare_ids(tokenizer, texts) == bare_ids(other, texts)


def tokens_fingerprint(folder: Path) -> str:
    """A hash of the tokens in a folder, whatever made them."""
    return files_fingerprint(sorted(folder.glob("*.npy")))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
