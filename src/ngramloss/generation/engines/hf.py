"""a Hugging Face model and source ids → ids of texts, by the model's own ``generate``: the specification."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.generation.engines.settings import Search
from ngramloss.steps.padding import padded

Ids = Sequence[int]


def load(
    model: Any, search: Search, *, precision: str, say: Callable[[str], None]
) -> Callable[[Sequence[Ids]], list[list[list[int]]]]:
    """A function from sources to the texts of each, best first, as ids."""
    model.eval()

    def write(sources: Sequence[Ids]) -> list[list[list[int]]]:
        own = not search.sample or search.seed is None  # also if the model's own settings sample
        rows = generated(model, sources, search.pad) if own else _sampled(model, search, sources)
        texts = [ended(row, search.ends) for row in rows]
        return [texts[start : start + search.texts] for start in range(0, len(texts), search.texts)]

    return write


def unsupported(model: Any, search: Search) -> list[str]:
    """What has left it; otherwise nothing, because it is the specification."""
    groups = getattr(model.generation_config, "num_beam_groups", None) or 1
    if search.groups == 1 and groups > 1:
        return [
            f"num_beam_groups in generation_config.json is {groups}, but transformers has no groups of beams any more: "
            f"set it to 1 there, and for groups use --groups {groups}"
        ]
    return ["transformers has no groups of beams"] if search.groups > 1 else []


def differences(model: Any, search: Search, *, precision: str) -> list[str]:
    """None, for the same reason."""
    return []


@torch.inference_mode()
def generated(model: Any, sources: Sequence[Ids], pad: int, **options: Any) -> list[list[int]]:
    """What ``generate`` returns for a batch, in lists."""
    # On the right: on the left, padding would shift the encoder's positions.
    batch = map(torch.from_numpy, padded(sources, len(sources), max(map(len, sources)), pad))  # [B, S] each
    ids, mask = (each.to(model.device) for each in batch)
    try:
        rows: list[list[int]] = model.generate(input_ids=ids, attention_mask=mask, **options).tolist()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as reason:
        raise UserError(
            "transformers cannot generate with this model's settings: "
            f"{type(reason).__name__}: {' '.join(str(reason).split())[:300].rstrip('.')}. Correct its "
            "generation_config.json, or choose settings with --preset or --set generation.…"
        ) from reason
    return rows


def ended(row: list[int], ends: Sequence[int]) -> list[int]:
    """A text up to its end token, without what fills the batch up.

    The start token may be an end token, too. A text without an end token has the greatest length.

    >>> ended([2, 5, 6, 2, 1, 1], [2]), ended([2, 5, 6], [2])
    ([2, 5, 6, 2], [2, 5, 6])
    """
    return next((row[: index + 1] for index, token in enumerate(row) if index and token in ends), row)


def _sampled(model: Any, search: Search, sources: Sequence[Ids]) -> list[list[int]]:
    """Sample the texts of each source. A text depends on the seed and its source alone, not on the batch.

    The token with the largest sum of log-probability and Gumbel noise is a sample. So ``generate`` searches greedily,
    and the noise comes from a generator for each text.
    """
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    copies = [source for source in sources for _ in range(search.texts)]
    noise = GumbelNoise([(search.seed, number, *source) for source in sources for number in range(search.texts)])
    warpers: list[Any] = [TemperatureLogitsWarper(search.temperature)] if search.temperature != 1 else []
    warpers += [TopPLogitsWarper(search.top_p)] if search.top_p < 1 else []
    return generated(
        model,
        copies,
        search.pad,
        do_sample=False,
        num_beams=1,
        early_stopping=False,
        num_return_sequences=1,
        logits_processor=LogitsProcessorList([*warpers, noise]),
    )


class GumbelNoise:
    """Adds noise to the scores of each row, from a generator of its own.

    Args:
        keys: for each row, the numbers that determine its noise.
    """

    def __init__(self, keys: Sequence[tuple[int | None, ...]]) -> None:
        digests = [hashlib.sha256(repr(key).encode()).digest() for key in keys]
        self._generators = [torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")) for digest in digests]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores with noise, [B, V]."""
        columns = scores.shape[-1]
        uniform = torch.stack([torch.rand(columns, generator=each, dtype=torch.float64) for each in self._generators])
        gumbel = -(-uniform.clamp_min(1e-300).log()).log()  # [B, V]
        return scores + gumbel.to(scores)
