"""a Hugging Face model and source ids → ids of texts, by a search that is tensors only: the same texts as ``hf``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngramloss.data.batches.padding import padded
from ngramloss.errors import UserError
from ngramloss.loss.kernels import graphs
from ngramloss.models.attached.heads import TOLERANCES, head_module, head_of
from ngramloss.search import beams
from ngramloss.search.decoders import DECODERS, PaddedHead, difference, joined, padded_head
from ngramloss.search.engines.hf import ended
from ngramloss.search.fused_layers import Joined
from ngramloss.search.kernel_check import kernels_agree
from ngramloss.search.sampling import sampled, text_seeds
from ngramloss.search.search import Search

LOOKED = 8  # whether all texts are done is looked at after this many tokens: to look, the host waits for the device
MOST_SHAPES, MOST_MEMORY = 8, 0.25
"""Shapes of sources whose caches and graphs are kept on a GPU: their number, and their share of its memory."""
BY_LENGTH = {"dynamic", "longrope"}
"""Types of rotary positions that change with the length of the text, which only the device knows."""
FAMILIES = tuple(DECODERS)  # the types of models that it serves
Ids = Sequence[int]


def unsupported(model: Any, search: Search) -> Iterator[str]:
    """What it cannot do at all, as clauses."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        yield f"it serves {', '.join(FAMILIES)}, not {kind}"
    elif head_of(model, head_module(model)).low_rank is not None:
        yield "the output head has an adapter: merge it first"
    positions = None if kind == "m2m_100" else getattr(model.config, "max_position_embeddings", None)
    if positions is not None and search.max_length > positions:
        yield f"texts may have {search.max_length:,} tokens, but the model has {positions:,} positions"
    if rotary := _rope_types(model.config) & BY_LENGTH:
        yield f"with rope_type {' and '.join(sorted(rotary))}, positions depend on the longest text of a batch"
    if search.counts_prompts:
        yield (
            "max_length and min_length in generation_config.json count the tokens of prompts: there, name them "
            "max_new_tokens and min_new_tokens, or set generation.max_length in a recipe"
        )
    if search.start is None and search.first is not None:
        yield "forced_bos_token_id concerns only prompts of one token"
    if search.sample and search.seed is None:
        yield "the model's own settings sample, but --sample was not given"
    if search.sample and search.num_beams > 1:
        yield "it samples without beams only"
    if search.texts > 1 and search.num_beams == 1 and not search.sample:
        yield "greedy search has one text for each document"
    if search.num_beams % search.groups:
        yield f"{search.num_beams} beams are not {search.groups} groups of equal size"
    if search.others:
        yield f"it does not know {', '.join(search.others)}"


def _rope_types(config: Any) -> set[str]:
    whole = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in whole.values() if isinstance(part, dict)] or [whole]
    return {str(part.get("rope_type")) for part in parts}


def differences(model: Any, search: Search, *, precision: str) -> list[str]:
    """Nothing: texts and samples are those of ``hf``."""
    return []


def load(model: Any, search: Search, *, precision: str) -> Callable[..., list[list[list[int]]]]:
    """A function from sources to the texts of each, best first, as ids. It reads the weights as they are then."""
    model.eval()
    apart = difference(model)
    if not apart <= TOLERANCES.get(model.dtype, 1e-3):  # also if it is NaN
        raise UserError(
            f"{type(model).__name__} computes its logits in a way that this engine does not know "
            f"(log-probabilities differ by {apart:.2g})."
        )

    head, layers = padded_head(model), joined(model)
    if beams.has_kernels(model.device) and not kernels_agree(search, head.vocabulary, model.device):
        raise UserError(
            "on this GPU the kernels of this engine choose other tokens than PyTorch's operations. Please report it "
            "with the output of `ngramloss doctor`."
        )
    new = partial(Searcher, model, search, head=head, layers=layers)
    searcher = _searchers_on_gpu(new, model.device) if model.device.type == "cuda" else new

    def write(sources: Sequence[Ids], *, seeds: Sequence[int] | None = None) -> list[list[list[int]]]:
        """``seeds`` of the sources' samples, if these do not have that of the search."""
        length = max(map(len, sources))
        head.refresh(model)
        layers.refresh()
        texts = found(lambda count: searcher(count, length), sources, seeds=seeds)
        return [[ended(row, search.ends) for row in rows] for rows in texts]

    return write


def _searchers_on_gpu(new: Callable[..., Searcher], device: torch.device) -> Callable[[int, int], Searcher]:
    """A number of sources and their length → a search with room for them, with those that were made before kept."""
    made: OrderedDict[tuple[int, int], Searcher] = OrderedDict()
    most_bytes = MOST_MEMORY * torch.cuda.mem_get_info(device)[1]

    def pool() -> Any:
        return graphs.shared_pool(each.graph for each in made.values() if each.graph is not None)

    return lambda sources, length: _searcher(made, partial(new, pool=pool), _room_on_gpu(sources, length), most_bytes)


def _room_on_gpu(sources: int, length: int) -> tuple[int, int]:
    """Sources rounded up to a power of two, their length to a multiple of 64: few shapes, so few graphs."""
    return max(8, 1 << (sources - 1).bit_length()), -(-length // 64) * 64


def _searcher(
    made: OrderedDict[tuple[int, int], Searcher],
    new: Callable[[int, int], Searcher],
    shape: tuple[int, int],
    most_bytes: float,
) -> Searcher:
    """A search of this shape. Of those kept, the ones that were used least recently make room for a new one."""
    if shape not in made:
        try:
            made[shape] = new(*shape)
        except torch.cuda.OutOfMemoryError:
            made.clear()
            made[shape] = new(*shape)
    made.move_to_end(shape)
    while len(made) > MOST_SHAPES or (len(made) > 1 and sum(each.bytes for each in made.values()) > most_bytes):
        made.popitem(last=False)
    return made[shape]


class Searcher:
    """A search over a fixed number of sources of ``length`` tokens, its tensors and CUDA graph of a token in place."""

    def __init__(
        self,
        model: Any,
        search: Search,
        sources: int,
        length: int,
        *,
        head: PaddedHead | None = None,
        layers: Joined | None = None,
        pool: Callable[[], Any] = lambda: None,
    ) -> None:
        device, self.search, self.pool = model.device, search, pool
        self.alone = search.sample or search.num_beams == 1
        K = search.texts if self.alone else search.num_beams
        self.decoder = DECODERS[model.config.model_type](
            model,
            sources=sources,
            beams=K,
            source_length=length,
            text_length=search.max_length,
            head=head or padded_head(model),
            joined=layers,
        )
        self.groups = [beams.Beams.begin(sources, K // search.groups, search, device) for _ in range(search.groups)]
        self.limits = beams.limits(search, device)
        self.seeds = torch.zeros(sources, K, dtype=torch.long, device=device)  # [B, K]
        self.is_blank = torch.zeros(sources, dtype=torch.bool, device=device)  # [B]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captures = device.type == "cuda"

    @property
    def bytes(self) -> int:
        """The size of its caches."""
        caches = self.decoder.keys, self.decoder.values, self.decoder.source_keys, self.decoder.source_values
        return sum(cache.nbytes for cache in caches)

    def begin(self, sources: Sequence[Ids], *, seeds: Sequence[int] | None = None) -> None:
        """Read the sources, the rest blank; ``seeds`` of their samples, if these do not have the search's."""
        B, S = self.decoder.source_keys.shape[1], self.decoder.source_keys.shape[3]
        search, device, most = self.search, self.seeds.device, self.decoder.most_positions
        longest = max(map(len, sources)) + search.max_length - 2  # the last token has no position
        if most is not None and longest > most:
            raise UserError(
                f"a prompt and its text may need {longest:,} positions, but the model has {most:,}. Lower "
                "data.max_source or generation.max_length."
            )
        rows = [*sources, *[[search.pad]] * (B - len(sources))]
        if search.sample:
            self.seeds[: len(sources)].copy_(text_seeds(search, sources, seeds=seeds))
        read = rows if search.start is not None else [row[:-1] for row in rows]
        starts = [row[-1] if search.start is None else search.start for row in rows]
        numbers = torch.tensor([starts, [*map(len, read)]], device=device)  # [2, B]
        ids = _sent(torch.from_numpy(padded(read, search.pad, B, S)[0]), device)  # [B, S]
        self.is_blank.copy_(torch.arange(B, device=device) >= len(sources))
        for group in self.groups:
            group.restart(search, numbers[0])
        mask = torch.arange(S, device=device) < numbers[1].unsqueeze(-1)  # [B, S]
        self.decoder.read(ids, mask.long())

    def take(self, other: Searcher, rows: Sequence[int]) -> None:
        """Go on with these sources of another search that has as much room for each."""
        chosen, count = torch.tensor(rows, device=self.seeds.device), len(rows)
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.take(theirs, chosen)
        self.decoder.take(other.decoder, chosen)
        self.seeds[:count].copy_(other.seeds[chosen])
        self.is_blank.copy_(torch.arange(len(self.is_blank)) >= count)

    def token(self) -> None:
        """Add a token to all beams."""
        if self.captures and self.graph is None:
            try:
                self._capture()
            except graphs.CannotCapture as reason:
                self.captures = False
                graphs.warn_not_captured("tokens of generation", str(reason))
        if self.graph is None:
            self._token()
        else:
            self.graph.replay()

    @property
    def is_done(self) -> Tensor:
        """Which sources are done, [B]."""
        done = torch.stack([beams.is_done(group, self.search) for group in self.groups])  # [G, B]
        return done.all(0) | self.is_blank

    @property
    def texts(self) -> Tensor:
        """The texts of each source, best first, [B, texts, L]."""
        return self.groups[0].ids if self.alone else beams.best_ended(self.groups, self.search.texts)[0]

    def _token(self) -> None:
        position, texts = self.groups[0].length - 1, [group.ids for group in self.groups]  # [], [B, K/G, L]
        ids = torch.cat(texts, 1) if len(texts) > 1 else texts[0]  # [B, K, L]
        newest = ids.index_select(-1, position.view(1)).squeeze(-1)  # [B, K]
        logits = self.decoder.logits(newest, position)  # [B, K, V]
        if not self.alone:
            self.decoder.reorder(beams.advance_groups(self.groups, logits, self.limits), position)
            return
        (state,) = self.groups
        rows = logits.flatten(0, 1)  # [B · K, V]
        beams.rule_out(rows, state.ids.flatten(0, 1), state.length, self.limits)
        if self.search.sample:
            kernels = self.decoder.has_kernels
            tokens = sampled(rows, self.seeds.flatten(), state.length, self.search, has_kernels=kernels)  # [B · K]
        else:
            tokens = beams.greedy(rows)  # [B · K]
        beams.write_on(state, tokens.view_as(newest), self.limits)

    def _capture(self) -> None:
        """Capture one token. The warm-up writes a token, so the state is put back."""
        state = [self.decoder.origin, *(tensor for group in self.groups for tensor in vars(group).values())]
        with graphs.restored(state):
            self.graph, _ = graphs.capture(self._token, pool=self.pool())


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the device. The host does not wait for a GPU to have it: PyTorch keeps pinned memory until then."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@torch.inference_mode()
def found(
    searcher_of: Callable[[int], Searcher], sources: Sequence[Ids], *, seeds: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """The texts of each source, filled up; when half of them are done, the others continue in a smaller search."""
    searcher, rows = searcher_of(len(sources)), list(range(len(sources)))
    texts: list[list[list[int]]] = [[]] * len(sources)
    searcher.begin(sources, seeds=seeds)
    for count in range(1, searcher.search.max_length):
        searcher.token()
        if count % LOOKED:
            continue
        left = [place for place, done in enumerate(searcher.is_done.tolist()) if not done]
        if not left:
            break
        smaller = searcher_of(len(left)) if len(left) <= len(searcher.seeds) // 2 else searcher
        if len(smaller.seeds) < len(searcher.seeds):
            _keep(texts, rows, searcher)
            smaller.take(searcher, left)
            searcher, rows = smaller, [rows[place] for place in left]
    _keep(texts, rows, searcher)
    return texts


def _keep(texts: list[list[list[int]]], rows: Sequence[int], searcher: Searcher) -> None:
    for row, found_here in zip(rows, searcher.texts.tolist(), strict=False):  # blank sources come last
        texts[row] = found_here
