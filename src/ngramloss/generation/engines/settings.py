"""a model and its generation_config → the settings of a search, as every engine reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KNOWN = {
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "num_beams",
    "early_stopping",
    "length_penalty",
    "no_repeat_ngram_size",
    "renormalize_logits",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "bad_words_ids",
    "num_return_sequences",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "use_cache",
    "cache_implementation",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "transformers_version",
    "_from_model_config",
}
"""Settings of a generation_config that :class:`Search` contains, or that do not change texts."""


@dataclass(frozen=True)
class Search:
    """The settings of a search. Lengths count tokens, including the start token and the end token."""

    num_beams: int
    max_length: int
    min_length: int
    length_penalty: float
    early_stopping: bool | str
    no_repeat_ngram_size: int
    renormalize: bool
    """Whether the probabilities of the tokens that are still allowed are made to sum to 1."""
    start: int
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

    @property
    def end(self) -> int | None:
        """The token that ends a text, if there is one; ``others`` has ``eos_token_id`` if there are more or none."""
        return self.ends[0] if self.ends else None

    @property
    def limits_tokens(self) -> bool:
        """Whether a minimum length, repeated n-grams or a list rule tokens out."""
        return bool(self.min_length > 1 or self.no_repeat_ngram_size or self.banned)


def search_of(model: Any, *, seed: int | None = None) -> Search:
    """The settings with which ``model.generate`` would search.

    Args:
        model: a Hugging Face encoder-decoder.
        seed: of the random numbers, if texts are sampled.
    """
    config = model.generation_config
    defaults = config._get_default_generation_params()
    given = config.to_diff_dict()

    def value(name: str) -> Any:
        chosen = getattr(config, name, None)
        return defaults.get(name) if chosen is None else chosen

    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = tuple(token for token in named if token is not None)
    pads = [token for token in (config.pad_token_id, model.config.pad_token_id, 0) if token is not None]
    words = config.bad_words_ids or []
    banned = tuple(word[0] for word in words if len(word) == 1 and word[0] not in ends)
    others = [
        name
        for name, chosen in given.items()
        if name not in KNOWN and chosen not in (None, False) and chosen != defaults.get(name, 0)
    ]
    others += ["eos_token_id"] * (len(ends) != 1)
    others += ["bad_words_ids"] * any(len(word) != 1 for word in words)
    others += ["decoder_start_token_id"] * (not isinstance(start, int))
    forced = {name: _only(getattr(config, name)) for name in ("forced_bos_token_id", "forced_eos_token_id")}
    others += [name for name, token in forced.items() if isinstance(token, list)]
    return Search(
        num_beams=value("num_beams"),
        max_length=_max_length(model, value("max_length")),
        min_length=(config.min_new_tokens + 1 if config.min_new_tokens is not None else value("min_length")),
        length_penalty=float(value("length_penalty")),
        early_stopping=value("early_stopping"),
        no_repeat_ngram_size=value("no_repeat_ngram_size"),
        renormalize=bool(config.renormalize_logits),
        start=start,
        ends=ends,
        pad=pads[0],
        first=forced["forced_bos_token_id"],
        last=forced["forced_eos_token_id"],
        banned=banned,
        texts=value("num_return_sequences"),
        sample=value("do_sample"),
        temperature=float(value("temperature")),
        top_p=float(value("top_p")),
        top_k=value("top_k"),
        seed=seed,
        others=tuple(sorted(others)),
    )


def _only(token: Any) -> Any:
    """The token of a list of one token."""
    return token[0] if isinstance(token, list) and len(token) == 1 else token


def _max_length(model: Any, otherwise: int) -> int:
    """The largest length that ``generate`` reaches: without a setting, 20 tokens after the start token."""
    config = model.generation_config
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens) + 1
    if config.max_length is not None:
        return int(config.max_length)
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(otherwise + 1, positions) if positions is not None else otherwise + 1
