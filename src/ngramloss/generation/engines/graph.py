"""a Hugging Face model and source ids → ids of texts, by a search that is tensors only: the same texts as ``hf``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.generation import beams
from ngramloss.generation.decoders import DECODERS, TOLERANCE, difference
from ngramloss.generation.engines.hf import ended
from ngramloss.generation.engines.settings import Search

LOOKED = 8
"""Whether all texts are done is looked at after this many tokens: to look, the host waits for the device."""

Ids = Sequence[int]


def unsupported(model: Any, search: Search) -> Iterator[str]:
    """What it cannot do at all, as clauses."""
    kind = model.config.model_type
    if kind not in DECODERS:
        yield f"it serves {', '.join(DECODERS)}, not {kind}"
    if search.sample and search.num_beams > 1:
        yield "it samples without beams only"
    if search.texts > 1 and search.num_beams == 1 and not search.sample:
        yield "greedy search has one text for each document"
    if search.num_beams % search.groups:
        yield f"{search.num_beams} beams are not {search.groups} groups of equal size"
    if search.others:
        yield f"it does not know {', '.join(search.others)}"


def differences(model: Any, search: Search, *, precision: str) -> Iterator[str]:
    """Why texts may differ from those of ``hf``, as clauses."""
    if search.sample:
        yield "its random numbers are others"


def load(
    model: Any, search: Search, *, precision: str, say: Callable[[str], None]
) -> Callable[[Sequence[Ids]], list[list[list[int]]]]:
    """A function from sources to the texts of each, best first, as ids."""
    model.eval()
    apart = difference(model)
    if model.dtype == torch.float32 and apart > TOLERANCE:
        raise UserError(f"{type(model).__name__} computes its logits in a way that this engine does not know (a "
                        f"log-probability differs by {apart:.2g}).")

    def write(sources: Sequence[Ids]) -> list[list[list[int]]]:
        return [[ended(row, search.ends) for row in rows] for rows in found(model, search, sources).tolist()]

    return write


@torch.inference_mode()
def found(model: Any, search: Search, sources: Sequence[Ids]) -> Tensor:
    """The texts of each source, [B, texts, L]."""
    device, alone = model.device, search.sample or search.num_beams == 1
    B, K, S = len(sources), search.texts if alone else search.num_beams, max(map(len, sources))
    ids = torch.tensor([[*source, *[search.pad] * (S - len(source))] for source in sources])     # [B, S]
    mask = torch.tensor([[1] * len(source) + [0] * (S - len(source)) for source in sources])     # [B, S]
    decoder = DECODERS[model.config.model_type](
        model, sources=B, beams=K, source_length=S, text_length=search.max_length
    )
    decoder.read(ids.to(device), mask.to(device))
    groups = [beams.Beams.begin(B, K // search.groups, search, device) for _ in range(search.groups)]
    given = beams.limits(search, model.get_output_embeddings().weight.shape[0], device)
    seeds = torch.tensor([_seed(search, source, text) for source in sources for text in range(K)], device=device)

    def token() -> None:
        newest = torch.cat([group.newest for group in groups], 1)        # [B, K]
        logits = decoder.logits(newest, groups[0].length - 1).float()    # [B, K, V]
        if not alone:
            decoder.reorder(beams.advance_groups(groups, logits.log_softmax(-1), given))
            return
        (state,) = groups
        scores = beams.allowed(logits.flatten(0, 1), state.ids.flatten(0, 1), state.length, given)   # [B · K, V]
        if search.sample:
            scores = beams.sampled(scores, seeds, state.length, search)
        beams.write_on(state, scores.view_as(logits), given)

    for count in range(1, search.max_length):
        token()
        if count % LOOKED == 0 and bool(torch.stack([beams.is_done(group, search).all() for group in groups]).all()):
            break
    return groups[0].ids if alone else beams.best_ended(groups, search.texts)[0]


def _seed(search: Search, source: Ids, text: int) -> int:
    """The seed of one text, from those of the search and the source."""
    digest = hashlib.sha256(repr((search.seed, text, *source)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
