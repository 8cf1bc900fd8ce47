"""documents and what the memory allows → batches of similar length, and the texts of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from ngramloss.output.console import logger
from ngramloss.search.search import Search

AHEAD = 512  # documents that are tokenised at a time
CPU_TOKENS = 8192  # source tokens of a batch on a CPU, padding included. More of them did not make generation faster
MOST_DOCUMENTS = 512  # documents of a batch, however short they are
SHARE = 0.5  # of the free memory that a batch may need by our estimate, which is rough
Document = TypeVar("Document")
Text = TypeVar("Text")


@dataclass(frozen=True)
class Budget:
    """How much one batch may contain."""

    documents: int = 0  # their number; 0 means that ``tokens`` decides
    tokens: float = inf  # source tokens, padding included
    rest: int = 0  # tokens that are added to each source, for what a document needs whatever its length
    padded: float = inf  # source tokens, padding included and ``rest`` not

    def allows(self, documents: int, longest: int) -> bool:
        """Whether a batch may have this number of documents, the longest of this number of tokens."""
        if self.documents:
            return documents <= self.documents
        fits = documents * longest <= self.padded and documents * (longest + self.rest) <= self.tokens
        return fits and documents <= MOST_DOCUMENTS


def budget_for(model: Any, searches: Sequence[Search], batch_size: int) -> Budget:
    """The documents asked for; if 0, the tokens for which there is memory, on a CPU not more than is fast."""
    if batch_size:
        return Budget(documents=batch_size)
    on_gpu = model.device.type == "cuda"
    padded, free = (inf, _free_on_gpu(model.device)) if on_gpu else (CPU_TOKENS, _free_memory())
    if free is None:
        return Budget(padded=padded)
    per_token, per_document = _bytes(model, searches)
    tokens = max(1, int(SHARE * free / per_token))
    return Budget(tokens=tokens, rest=-(-per_document // per_token), padded=padded)


def _free_on_gpu(device: Any) -> int:
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _free_memory() -> int | None:
    """The free memory of this machine in bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _bytes(model: Any, searches: Sequence[Search]) -> tuple[int, int]:
    """Bytes that a search needs for each source token, and for each document whatever its length."""
    config, rows = model.config, max(search.rows for search in searches)
    width = model.get_input_embeddings().weight.shape[1]
    V = model.get_output_embeddings().weight.shape[0]
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer")
    layers = next((getattr(config, name) for name in names if getattr(config, name, None)), 12)
    size = model.dtype.itemsize
    cached = 2 * layers * width * size * rows  # keys and values of one position; there are two while beams are sorted
    encoder = 16 * width * size
    return 2 * cached + encoder, 2 * cached * max(search.max_length for search in searches) + 8 * 4 * V * rows


def batches(
    documents: Sequence[Document],
    ids: Callable[[Sequence[Document]], list[list[int]]],
    write: Callable[[Sequence[Document], Sequence[Sequence[int]]], list[Text]],
    budget: Budget,
) -> Iterator[tuple[list[Document], list[Text]]]:
    """Write the texts of all documents, by length and batch by batch; a batch that memory cannot hold is halved."""
    pairs = _tokenised(documents, ids)
    waiting: deque[tuple[Document, list[int]]] = deque()
    while batch := _taken(waiting, pairs, budget):
        chosen, sources = [document for document, _ in batch], [source for _, source in batch]
        try:
            texts = write(chosen, sources)
        except RuntimeError as error:
            if len(batch) == 1 or type(error).__name__ != "OutOfMemoryError" or _computes_in_step():
                raise
            budget = Budget(documents=len(batch) // 2)
            logger.warning(
                "%d documents at a time did not fit into memory; continuing with %d.", len(batch), budget.documents
            )
            waiting.extendleft(reversed(batch))
            continue
        yield chosen, texts


def _computes_in_step() -> bool:
    """Whether this process shares a model with others: then all of them need equally many batches."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _tokenised(
    documents: Sequence[Document], ids: Callable[[Sequence[Document]], list[list[int]]]
) -> Iterator[tuple[Document, list[int]]]:
    for start in range(0, len(documents), AHEAD):
        chunk = documents[start : start + AHEAD]
        yield from zip(chunk, ids(chunk), strict=True)


def _taken(
    waiting: deque[tuple[Document, list[int]]], pairs: Iterator[tuple[Document, list[int]]], budget: Budget
) -> list[tuple[Document, list[int]]]:
    """Take as many documents as the budget allows, at least one; none if none are left."""
    batch: list[tuple[Document, list[int]]] = []
    longest = 0
    while pair := waiting.popleft() if waiting else next(pairs, None):
        longest = max(longest, len(pair[1]))
        if batch and not budget.allows(len(batch) + 1, longest):
            waiting.appendleft(pair)
            break
        batch.append(pair)
    return batch
