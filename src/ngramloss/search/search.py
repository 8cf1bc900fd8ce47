"""the options of a command → what is asked of a search, checked; and ``Search``: all settings of one search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, NamedTuple

from ngramloss.errors import UserError

PROBABILITY = "probability"
"""What may order the texts of a document instead of the search: the model's log-probability of whole texts."""
BEAMS, SAMPLING = ("length_penalty", "early_stopping"), ("temperature", "top_k", "top_p", "typical_p", "min_p")
"""Settings that have no effect on a search without beams, and without samples."""
HOW = {
    "groups": "groups of beams that avoid each other's tokens",
    "beams": "the best of one beam search",
    "sample": "the best output of the model's own search, then samples",
    "mixed": "half by groups of beams, half samples",
}
"""How candidates are made."""


class Options(NamedTuple):
    """What is asked of a search besides the settings of a recipe."""

    texts: int = 1  # of each document; 0 means as many as there are beams
    sample: bool = False  # sample tokens instead of searching for the most probable text
    temperature: float = 1.0  # below 1, probable tokens become more probable
    top_p: float = 1.0  # sample only from the most probable tokens whose probabilities sum to this
    seed: int = 0  # of the random numbers
    groups: int = 1  # of beams that avoid each other's tokens
    diversity: float = 0.0  # what a token's log-probability loses for each beam of an earlier group that takes it
    rerank: str = ""  # what orders the texts, ``PROBABILITY``; empty: the search
    beams: int | None = None
    """Of the search, which then never samples; 0: the recipe's, or more for more texts; None: the recipe decides."""


def _named(name: str, default: Any, *, usual: bool = False) -> Any:
    """A setting by its name in a ``generation_config``, with Hugging Face's default; a usual one is always shown."""
    return field(metadata={"name": name, "default": default, "usual": usual})


@dataclass(frozen=True, kw_only=True)
class Search:
    """All settings of a search; lengths count start and end token.

    A field with a name in a ``generation_config`` is read from there, and part of what is saved, compared and shown. An
    engine that cannot do what a new one asks says so in its ``unsupported``.
    """

    num_beams: int = _named("num_beams", 1, usual=True)
    length_penalty: float = _named("length_penalty", 1.0, usual=True)
    min_length: int = _named("min_length", 0, usual=True)
    max_length: int = _named("max_length", 20, usual=True)
    early_stopping: bool | str = _named("early_stopping", False, usual=True)
    no_repeat_ngram_size: int = _named("no_repeat_ngram_size", 0, usual=True)
    groups: int = _named("num_beam_groups", 1)
    """Groups of beams that avoid each other's tokens. Hugging Face has them no longer, so no configuration has."""
    diversity: float = _named("diversity_penalty", 0.0)
    """What a token's log-probability loses for each beam of an earlier group that takes it at the same place."""
    sample: bool = _named("do_sample", False)
    temperature: float = _named("temperature", 1.0)
    top_k: int = _named("top_k", 50)
    top_p: float = _named("top_p", 1.0)
    renormalize: bool = _named("renormalize_logits", False)
    """Whether the probabilities of the tokens that are still allowed are made to sum to 1."""
    texts: int = _named("num_return_sequences", 1)  # texts for each document
    rerank: str = _named("rerank", None)  # what orders the texts of a document instead of the search, ``PROBABILITY``
    start: int | None  # the token that texts start with; None: the last token of each prompt
    ends: tuple[int, ...]  # the tokens that end a text; usually one
    pad: int
    first: int | None  # the token that must follow the start token
    last: int | None  # the token that must be the last one of a text as long as ``max_length``
    banned: tuple[int, ...]  # tokens that are never written
    seed: int | None  # of the random numbers; None: not asked for
    others: tuple[str, ...]  # names of other settings that change texts
    counts_prompts: bool = False
    """Whether lengths count prompts, too, as ``max_length`` in the settings of a decoder-only model does."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the model's ``generation_config``, by Hugging Face's names."""
    drafter: Any = field(default=None, compare=False, repr=False)
    """What proposes tokens to the engine ``draft``. It changes no text, so it is not saved with texts."""

    @property
    def end(self) -> int | None:
        """The first of the tokens that end a text, if there is one."""
        return self.ends[0] if self.ends else None

    @property
    def limits_tokens(self) -> bool:
        """Whether a minimum length, repeated n-grams or a list rule tokens out."""
        return bool(self.min_length > 1 or self.no_repeat_ngram_size or self.banned)

    @property
    def rows(self) -> int:
        """Texts of a document that are searched at the same time."""
        return self.texts if self.sample else self.num_beams


_META = {each.name: each.metadata for each in fields(Search) if each.metadata}
NAMED = {meta["name"]: name for name, meta in _META.items()}
"""Settings by Hugging Face's names → the fields of :class:`Search`."""
USUAL = {meta["name"]: meta["default"] for meta in _META.values() if meta["usual"]}
"""Settings that every search has, and the defaults of those that nobody set."""
_UNREAD = {"min_new_tokens": None, "max_new_tokens": None, "repetition_penalty": 1.0, "typical_p": 1.0, "min_p": None}
BESIDE = _UNREAD | {meta["name"]: meta["default"] for meta in _META.values() if not meta["usual"]}
"""Further settings that change texts, likewise; some are known to ``hf`` alone."""


def effective(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved settings of a search, with the defaults of what every search has; a length has one name.

    >>> effective({"max_new_tokens": 9})["num_beams"], "max_length" in effective({"max_new_tokens": 9})
    (1, False)
    """
    known = {name: value for name, value in saved.items() if value is not None}
    names = [name for name in USUAL if not {name, name.replace("length", "new_tokens")} & known.keys()]
    return known | {name: USUAL[name] for name in names}


def check_options(options: Options) -> None:
    """Raise if options contradict each other."""
    if options.groups == 1 and options.diversity:
        raise UserError("--diversity is an option of groups of beams; add --groups N.")
    if options.groups > 1 and options.sample:
        raise UserError("--groups are groups of beams, and --sample has no beams. Leave one of them out.")
    if not (isfinite(options.diversity) and options.diversity >= 0):
        raise UserError(f"--diversity must be 0 or more, got {options.diversity:g}.")
    if options.rerank and (options.texts == 1 or (options.sample and not options.texts)):
        raise UserError("--rerank orders several texts of a document; add --num-return N.")
    if not options.sample and (options.temperature, options.top_p) != (1.0, 1.0):
        raise UserError("--temperature and --top-p are options of sampling; add --sample.")
    if not options.temperature > 0:
        raise UserError(f"--temperature must be above 0, got {options.temperature:g}.")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {options.top_p:g}.")
