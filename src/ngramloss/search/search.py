"""the options of a command → what is asked of a search, checked; and ``Search``: all settings of one search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from ngramloss.errors import UserError

PROBABILITY, MBR = RERANK = ("probability", "mbr")
"""What may order the texts of a document instead of the search: the model, or how much the texts agree."""
USUAL = {
    "num_beams": 1,
    "length_penalty": 1.0,
    "min_length": 0,
    "max_length": 20,
    "early_stopping": False,
    "no_repeat_ngram_size": 0,
}
"""Settings that every search has, by Hugging Face's names, and the defaults of those that nobody set."""
BESIDE = {
    "min_new_tokens": None,
    "max_new_tokens": None,
    "repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "min_p": None,
    "renormalize_logits": False,
    "num_return_sequences": 1,
    "rerank": None,
}
"""Further settings that change texts, likewise."""
BEAMS, SAMPLING = ("length_penalty", "early_stopping"), ("temperature", "top_k", "top_p", "typical_p", "min_p")
"""Settings that have no effect on a search without beams, and without samples."""
HOW = {
    "groups": "groups of beams that avoid each other's tokens",
    "beams": "the best of one beam search",
    "sample": "the best of the model's own search, then samples",
    "mixed": "half by groups of beams, half samples",
}
"""How candidates are made."""


class Options(NamedTuple):
    """What is asked of a search besides the settings of a recipe.

    Attributes:
        texts: of each document; 0 means as many as there are beams.
        sample: sample tokens instead of searching for the most probable text.
        temperature: below 1, probable tokens become more probable.
        top_p: sample only from the most probable tokens whose probabilities sum to this.
        seed: of the random numbers.
        groups: of beams that avoid each other's tokens.
        diversity: what a token's log-probability loses for each beam of an earlier group that takes it.
        rerank: what orders the texts, one of ``RERANK``; empty: the search.
        beams: of the search, which then never samples; 0 means those of the recipe, or more if there are more texts;
            None leaves all this to the recipe.
    """

    texts: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    groups: int = 1
    diversity: float = 0.0
    rerank: str = ""
    beams: int | None = None


@dataclass(frozen=True)
class Search:
    """All settings of a search. Lengths count tokens, including the start token and the end token."""

    num_beams: int
    max_length: int
    min_length: int
    length_penalty: float
    early_stopping: bool | str
    no_repeat_ngram_size: int
    renormalize: bool
    """Whether the probabilities of the tokens that are still allowed are made to sum to 1."""
    start: int | None
    """The token that texts start with; None: the last token of each prompt."""
    ends: tuple[int, ...]
    """The tokens that end a text; usually one."""
    pad: int
    first: int | None
    """The token that must follow the start token."""
    last: int | None
    """The token that must be the last one of a text as long as ``max_length``."""
    banned: tuple[int, ...]
    """Tokens that are never written."""
    texts: int
    """Texts for each document."""
    sample: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    """Of the random numbers; None: not asked for."""
    others: tuple[str, ...]
    """Names of other settings that change texts."""
    groups: int = 1
    """Groups of beams that avoid each other's tokens. Hugging Face has them no longer, so no configuration has."""
    diversity: float = 0.0
    """What a token's log-probability loses for each beam of an earlier group that takes it at the same place."""
    rerank: str = ""
    """What orders the texts of a document instead of the search, one of ``RERANK``."""
    counts_prompts: bool = False
    """Whether lengths count prompts, too, as ``max_length`` in the settings of a decoder-only model does."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the model's ``generation_config``, by Hugging Face's names."""

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
