"""a model with a drafter and source ids → ids of its greedy texts, several tokens in a pass: the same texts as ``hf``.

A drafter proposes k tokens. The model reads them in one pass and keeps those that it would have written itself, plus
one token of its own: at least one token in a pass, at most k + 1. Rows of a batch keep different numbers of tokens, so
each row has its own positions; keys and values of refused tokens stay where they are and are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ngramloss.data.batches.padding import padded
from ngramloss.errors import UserError
from ngramloss.models.attached.heads import TOLERANCES
from ngramloss.search import beams
from ngramloss.search.decoders import DECODERS, PaddedHead, difference, padded_head
from ngramloss.search.engines import graph
from ngramloss.search.engines.hf import ended
from ngramloss.search.search import Search

FAMILIES = graph.FAMILIES  # the types of models that it serves
Ids = Sequence[int]


def unsupported(model: Any, search: Search) -> Iterator[str]:
    """What it cannot do at all, as clauses."""
    if search.drafter is None:
        yield (
            "it needs a drafter: train one with ngramloss train drafter --set model.name=MODEL, and name it with --set "
            "generation.drafter=RUN"
        )
    if search.num_beams > 1:
        yield f"it has no beams, and generation.num_beams is {search.num_beams}: set it to 1"
    if search.sample:
        yield "it does not sample"
    yield from graph.unsupported(model, search)


def differences(model: Any, search: Search, *, precision: str) -> list[str]:
    """Rounding in 16 bits: it depends on how many tokens are computed at a time."""
    return [] if precision == "fp32" else [f"rounding in {precision} depends on how many tokens a pass reads"]


def load(model: Any, search: Search, *, precision: str) -> Callable[..., list[list[list[int]]]]:
    """A function from sources to the text of each, as ids. It reads the weights as they are then."""
    model.eval()
    apart = difference(model, plain=True)
    if not apart <= TOLERANCES.get(model.dtype, 1e-3):  # also if it is NaN
        raise UserError(
            f"{type(model).__name__} computes its logits in a way that this engine does not know "
            f"(log-probabilities differ by {apart:.2g})."
        )
    head = padded_head(model)

    def write(sources: Sequence[Ids], *, seeds: Sequence[int] | None = None) -> list[list[list[int]]]:
        head.refresh(model)
        texts = found(model, search, head, sources).tolist()
        return [[ended(row, search.ends)] for row in texts]

    return write


@torch.inference_mode()
def found(model: Any, search: Search, head: PaddedHead, sources: Sequence[Ids]) -> Tensor:
    """The text of each source, [B, L]; what stands behind its end means nothing."""
    drafter, limits, device, L = search.drafter, beams.limits(search, model.device), model.device, search.max_length
    few = head._replace(  # the head of the tokens that may be drafted
        weight=head.weight[drafter.shortlist],
        bias=None if head.bias is None else head.bias[drafter.shortlist],
        vocabulary=len(drafter.shortlist),
    )
    k, B = drafter.sizes.places, len(sources)
    read = sources if search.start is not None else [row[:-1] for row in sources]
    decoder = DECODERS[model.config.model_type](
        model, sources=B, beams=1, source_length=max(map(len, read)), text_length=L, head=head, plain=True
    )
    longest = max(map(len, sources)) + L - 2  # the last token has no position
    if decoder.most_positions is not None and longest > decoder.most_positions:
        raise UserError(
            f"a prompt and its text may need {longest:,} positions, but the model has {decoder.most_positions:,}. "
            "Lower data.max_source or generation.max_length."
        )
    source, mask = (torch.from_numpy(each).to(device) for each in padded(read, search.pad))  # [B, S] each
    decoder.read(source, mask)
    states = decoder.source_states  # [B, S, D], of an encoder-decoder
    starts = [row[-1] if search.start is None else search.start for row in sources]
    ids = torch.full((B, L + k + 1), search.pad, device=device)  # with room for a draft behind the longest text
    ids[:, 0] = torch.tensor(starts, device=device)
    length = torch.ones(B, 1, dtype=torch.long, device=device)  # [B, 1]
    done = torch.zeros(B, 1, dtype=torch.bool, device=device)  # [B, 1]
    draft = ids[:, :0]  # [B, 0]: before the first pass there is nothing to draft from
    while True:
        ahead = torch.arange(draft.shape[1] + 1, device=device)  # [K]: the newest token, and each of the draft
        places = length + ahead  # [B, K], where the token after each of them is to stand
        ids.scatter_(1, places[:, 1:] - 1, draft)
        tokens = ids.gather(1, places - 1)  # [B, K]
        hidden = decoder.hidden(tokens, (places - 1).clamp_max(L - 1))  # [B, K, D]
        own = chosen(head.logits(hidden), ids, places, limits)  # [B, K]
        kept = (own[:, :-1] == draft).cumprod(-1).sum(-1, keepdim=True)  # [B, 1]
        ids.scatter_(1, places, own)
        stops = torch.isin(own, limits.ends) | (places >= L - 1)  # [B, K]
        length = (length + kept + 1).where(~done, length).clamp_max(L)
        done = done | (stops & (ahead <= kept)).any(-1, keepdim=True)
        if done.all():
            break
        last = kept.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])  # [B, 1, D]
        draft = proposed(drafter, head, few, hidden.gather(1, last), ids, length, states, mask)  # [B, k]
    return ids[:, :L]


def proposed(
    drafter: Any, head: PaddedHead, few: PaddedHead, hidden: Tensor, ids: Tensor, length: Tensor, *source: Tensor | None
) -> Tensor:
    """A draft of what follows the first ``length`` ids, [B, 1], of which ``head`` chose the last from ``hidden``."""
    newest = embedding(ids.gather(1, length - 1), head.weight)  # [B, 1, D]
    ahead: Tensor = drafter(hidden, newest, *source)  # [B, 1, k, D]
    drafted: Tensor = drafter.shortlist[few.logits(ahead.squeeze(1)).argmax(-1)]  # [B, k]
    return drafted


def chosen(logits: Tensor, ids: Tensor, places: Tensor, given: beams.Limits) -> Tensor:
    """The model's own token at these places, [B, K], by logits [B, K, V], changed in place, after ids [B, L + …]."""
    rows, length = logits.flatten(0, 1), places.flatten().unsqueeze(-1)  # [B · K, V], [B · K, 1]
    beams.rule_out(rows, ids.repeat_interleave(places.shape[1], 0), length, given)
    tokens = rows.argmax(-1, keepdim=True)  # [B · K, 1]
    for token, is_here in beams.forced(length, given.search):
        tokens = tokens.masked_fill(is_here, token)
    return tokens.view_as(places)
