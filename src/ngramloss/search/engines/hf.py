"""a Hugging Face model and source ids → ids of texts, by the model's own ``generate``: the specification.

No other file of generation reads a ``generation_config``, and none changes it: changes are passed to ``generate``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.padding import padded
from ngramloss.errors import UserError
from ngramloss.models.loading import generation_changes, is_causal
from ngramloss.output.console import logger
from ngramloss.recipe import Generation
from ngramloss.search.sampling import sampled, text_seeds
from ngramloss.search.search import NAMED, Options, Search, effective

UNLIMITED = Generation().max_length
"""The most tokens of a decoder-only model's text if nothing says it: Hugging Face's 20 cut most within a sentence."""
KNOWN = (
    NAMED.keys() - {"num_beam_groups", "diversity_penalty", "rerank"}
    | {"min_new_tokens", "max_new_tokens"}
    | {"forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "decoder_start_token_id"}
    | {"pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "cache_implementation", "return_dict_in_generate"}
    | {"output_scores", "output_logits", "output_attentions", "output_hidden_states"}
    | {"transformers_version", "_from_model_config"}
)
"""Settings of a generation_config that :class:`Search` contains, or that do not change texts."""
OF_SAMPLING = {"min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
"""Settings that change texts only where ``generate`` itself samples: beams and :func:`_sampled` do not."""
UNPADDED = ("rwkv", "recurrent_gemma")  # decoder-only models that read padding, although it is masked
Ids = Sequence[int]


def search_of(
    model: Any,
    generation: Generation | None = None,
    options: Options = Options(),  # noqa: B008
    *,
    only: Collection[str] = (),
    **changes: Any,
) -> Search:
    """The model's own ``generation_config``, changed by a recipe (by default all of it), then by options."""
    causal = is_causal(model.config)
    changes |= {} if generation is None else generation_changes(generation, causal=causal, only=only)
    early = generation.early_stopping if generation and (not only or "early_stopping" in only) else True
    changes |= _asked(options, _changed_config(model, changes).num_beams or 1, early=early)
    config = _changed_config(model, changes)
    if causal and config.max_new_tokens is None and config.max_length is None:
        logger.info(
            f"neither the model's own settings nor a recipe limit the length of texts: they get at most {UNLIMITED} "
            "tokens (set generation.max_length)."
        )
        changes["max_new_tokens"] = UNLIMITED
        config = _changed_config(model, changes)
    defaults = config._get_default_generation_params()

    def value(name: str) -> Any:
        chosen = getattr(config, name, None)
        return defaults.get(name) if chosen is None else chosen

    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = tuple(token for token in named if token is not None)
    pads = [token for token in (config.pad_token_id, model.config.pad_token_id, 0) if token is not None]
    words = config.bad_words_ids or []
    banned = tuple(word[0] for word in words if len(word) == 1 and word[0] not in ends)
    known = KNOWN if value("do_sample") and not options.sample else KNOWN | OF_SAMPLING
    others = [
        name
        for name, chosen in config.to_diff_dict().items()
        if name not in known and chosen not in (None, False) and chosen != defaults.get(name, 0)
    ]
    others += ["bad_words_ids"] * any(len(word) != 1 for word in words)
    others += ["decoder_start_token_id"] * (not isinstance(start, int) and not causal)
    forced = {name: _only(getattr(config, name)) for name in ("forced_bos_token_id", "forced_eos_token_id")}
    others += [name for name, token in forced.items() if isinstance(token, list)]
    asked: dict[str, Any] = {field: value(name) for name, field in NAMED.items()}
    asked |= {name: float(asked[name]) for name in ("length_penalty", "temperature", "top_p")}
    asked |= {"groups": options.groups, "diversity": options.diversity, "rerank": options.rerank}
    asked["max_length"] = _max_length(model, config, value("max_length"))
    if config.min_new_tokens is not None:
        asked["min_length"] = config.min_new_tokens + 1
    asked["renormalize"] = bool(config.renormalize_logits)
    return Search(
        **asked,
        start=None if causal else start,
        ends=ends,
        pad=pads[0],
        first=forced["forced_bos_token_id"],
        last=forced["forced_eos_token_id"],
        banned=banned,
        seed=options.seed if options.sample else None,
        others=tuple(sorted(others)),
        counts_prompts=causal and _counts_prompts(config),
        changes=changes,
    )


def _asked(options: Options, beams: int, *, early: bool) -> dict[str, Any]:
    """What options change, by Hugging Face's names; ``early``: whether beams that replace greedy search stop so."""
    changes: dict[str, Any] = {}
    if options.sample:
        changes = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        changes |= {"num_beams": 1, "early_stopping": False}
        beams = 1
    elif options.beams is not None:
        was_greedy, beams = beams == 1, options.beams or max(options.texts, beams)
        changes = {"do_sample": False, "num_beams": beams}
        changes |= {"early_stopping": early} if was_greedy and beams > 1 else {}
    if beams % options.groups:
        raise UserError(
            f"--groups {options.groups} needs a multiple of {options.groups} beams, but the search has {beams}. Use "
            f"--set generation.num_beams={options.groups}."
        )
    texts = options.texts or beams
    if options.rerank and texts == 1:
        raise UserError(
            "--rerank orders several texts of a document, but the search has 1 beam. Use --set "
            "generation.num_beams=4, or --sample --num-return 4."
        )
    if texts > beams and not options.sample:
        raise UserError(
            f"--num-return {texts} needs at least {texts} beams, but the search has {beams}. Use --set "
            f"generation.num_beams={texts}, or --sample."
        )
    return changes | ({"num_return_sequences": texts} if texts > 1 or options.beams is not None else {})


def _changed_config(model: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of the model's ``generation_config`` with these changes."""
    config = copy.deepcopy(model.generation_config)
    with _explained():
        config.update(**changes)
    return config


def _only(token: Any) -> Any:
    return token[0] if isinstance(token, list) and len(token) == 1 else token


def _max_length(model: Any, config: Any, otherwise: int) -> int:
    """The largest length that ``generate`` reaches: without a setting, 20 tokens after the start token."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens) + 1
    if config.max_length is not None:
        return int(config.max_length)
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(otherwise + 1, positions) if positions is not None else otherwise + 1


def _counts_prompts(config: Any) -> bool:
    """Whether the lengths of a configuration count the tokens that ``generate`` is given."""
    most = config.max_new_tokens is None and config.max_length is not None
    return most or (config.min_new_tokens is None and bool(config.min_length))


def search_facts(model: Any, search: Search) -> dict[str, Any]:
    """The settings of a search that are saved with its texts."""
    config = _changed_config(model, search.changes)
    own = {"max_length": search.max_length} if config.max_new_tokens is None else {}
    facts: dict[str, Any] = effective({**own, **config.to_diff_dict()})
    facts.pop("transformers_version", None)
    if search.groups > 1:
        facts |= {"num_beam_groups": search.groups, "diversity_penalty": search.diversity}
    return facts | ({"rerank": search.rerank} if search.rerank else {})


def load(model: Any, search: Search, *, precision: str) -> Callable[..., list[list[list[int]]]]:
    """A function from sources to the texts of each, best first, as ids."""
    model.eval()

    def write(sources: Sequence[Ids], *, seeds: Sequence[int] | None = None, **more: Tensor) -> list[list[list[int]]]:
        """``seeds``: of the sources' samples, if not the search's; ``more``: what else the model reads, [B, …]."""
        sent = {name: value.to(model.device) for name, value in more.items()}
        own = not search.sample or search.seed is None  # also if the model's own settings sample
        if own:
            rows = _generated(model, sources, search, **sent)
        else:
            rows = _sampled(model, sources, search, text_seeds(search, sources, seeds=seeds), **sent)
        texts = [ended(row, search.ends) for row in rows]
        return [texts[start : start + search.texts] for start in range(0, len(texts), search.texts)]

    return write


def unsupported(model: Any, search: Search) -> list[str]:
    """Groups of beams, which transformers does not have any more."""
    groups = getattr(model.generation_config, "num_beam_groups", None) or 1
    if search.groups == 1 and groups > 1:
        return [
            f"num_beam_groups in generation_config.json is {groups}, which transformers no longer supports: set it to "
            f"1 there, and for groups use --groups {groups}"
        ]
    return ["transformers has no groups of beams"] if search.groups > 1 else []


def differences(model: Any, search: Search, *, precision: str) -> list[str]:
    """Nothing: it is the specification."""
    return []


@torch.inference_mode()
def _generated(model: Any, sources: Sequence[Ids], search: Search, **options: Any) -> list[list[int]]:
    """What ``generate`` returns for a batch, in lists that begin with a start token, the last one of a prompt.

    Sources of an encoder are padded on the right, as positions would shift; prompts, written behind, on the left.
    """
    causal, S = is_causal(model.config), max(map(len, sources))
    if causal and model.config.model_type in UNPADDED and min(map(len, sources)) < S:
        raise UserError(f"{type(model).__name__} generates other outputs for padded prompts. Use --batch-size 1.")
    if causal and search.no_repeat_ngram_size:  # transformers would also ban what the prompt contains
        options = _without_prompts(search.no_repeat_ngram_size, S, options)
    rows = [source[::-1] for source in sources] if causal else sources
    batch = [torch.from_numpy(array) for array in padded(rows, search.pad, length=S)]  # [B, S] each
    ids, mask = ((each.flip(-1) if causal else each).to(model.device) for each in batch)
    with _explained():
        written = model.generate(input_ids=ids, attention_mask=mask, **{**search.changes, **options})  # [B · texts, T]
    lists: list[list[int]] = (written[:, S - 1 :] if causal else written).tolist()
    return lists


def _without_prompts(n: int, prompt: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with which no n-gram of a text is repeated, whatever the prompt of this length contains."""
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

    ban: Any = NoRepeatNGramLogitsProcessor(n)
    own = options.get("logits_processor") or ()
    first = [lambda input_ids, scores: ban(input_ids[:, prompt:], scores)]
    return {**options, "no_repeat_ngram_size": 0, "logits_processor": LogitsProcessorList([*first, *own])}


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what transformers raises because of a setting into one message."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as reason:
        raise UserError(
            "transformers cannot generate with this model's settings: "
            f"{type(reason).__name__}: {' '.join(str(reason).split())[:300].rstrip('.')}. Correct its "
            "generation_config.json, or choose settings with --preset or --set generation.…"
        ) from reason


def ended(row: list[int], ends: Sequence[int]) -> list[int]:
    """A text up to its end token, which the start token may be too, without what fills the batch up.

    >>> ended([2, 5, 6, 2, 1, 1], [2]), ended([2, 5, 6], [2])
    ([2, 5, 6, 2], [2, 5, 6])
    """
    return next((row[: index + 1] for index, token in enumerate(row) if index and token in ends), row)


def _sampled(model: Any, sources: Sequence[Ids], search: Search, of_texts: Tensor, **more: Tensor) -> list[list[int]]:
    """Sample the texts of each source, with these seeds, [B, texts]; ``generate`` is left one token at each step."""
    from transformers import LogitsProcessorList

    seeds = of_texts.flatten().to(model.device)  # [B · texts]
    prompt = max(map(len, sources)) - 1 if is_causal(model.config) else 0  # padding must not change a sample

    def leave_one(input_ids: Tensor, scores: Tensor) -> Tensor:
        length = torch.tensor(input_ids.shape[1] - prompt)  # []
        tokens = sampled(scores, seeds, length, search)  # [B · texts]
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)  # [B · texts, V]

    return _generated(
        model,
        [source for source in sources for _ in range(search.texts)],
        search,
        do_sample=False,
        temperature=1.0,  # transformers warns of other values in a greedy search
        top_p=1.0,
        top_k=50,
        num_beams=1,
        early_stopping=False,
        num_return_sequences=1,
        logits_processor=LogitsProcessorList([leave_one]),
        **{name: value.repeat_interleave(search.texts, 0) for name, value in more.items()},
    )
