"""documents and summaries → a model that marks the sentences of a summary (BertSumExt), and the summaries it takes.

After Liu and Lapata (2019), "Text Summarization with Pretrained Encoders", and their code, PreSumm: an encoder reads
the document with a token before every sentence; layers over these tokens compare sentences; each gets a probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ngramloss as ng

NAME = "bertsum_ext"
HEAD = "sentences"
"""The part of the model above the encoder, and the beginning of the names of its weights."""
WEIGHTS = "model.safetensors"
BLOCKED = 3
"""Words in a row that two sentences of a summary may not share."""


# The model


class SentenceLayer(nn.Module):
    """A Transformer layer over the sentences of a document. The first one does not normalise its input, as theirs."""

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float, *, normalised: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6) if normalised else nn.Identity()
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, feed_forward),
            nn.GELU("tanh"),
            nn.Dropout(dropout),
            nn.Linear(feed_forward, width),
            nn.Dropout(dropout),
        )

    def forward(self, states: Tensor, absent: Tensor) -> Tensor:
        """States of sentences, [B, N, D], and which there are not, [B, N] → their next states, [B, N, D]."""
        read = self.norm(states)  # [B, N, D]
        found, _ = self.attention(read, read, read, key_padding_mask=absent, need_weights=False)  # [B, N, D]
        states = states + self.dropout(found)  # [B, N, D]
        states = states + self.feed_forward(states)  # [B, N, D]
        return states


class SentenceScorer(nn.Module):
    """Layers over sentences, and a score of each."""

    def __init__(self, width: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        heads, wide, dropout = options["heads"], options["feed_forward"], options["dropout"]
        self.layers = nn.ModuleList(
            SentenceLayer(width, heads, wide, dropout, normalised=number > 0) for number in range(options["layers"])
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.score = nn.Linear(width, 1)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, states: Tensor, present: Tensor) -> Tensor:
        """States of the tokens before sentences, [B, N, D], and which there are, [B, N] → logits, [B, N]."""
        states = states.where(present.unsqueeze(-1), 0.0) + sinusoids(*states.shape[1:]).to(states)  # [B, N, D]
        for layer in self.layers:
            states = layer(states, ~present)  # [B, N, D]
        logits: Tensor = self.score(self.norm(states)).squeeze(-1)  # [B, N]
        return logits


def sinusoids(count: int, width: int) -> Tensor:
    """Positions of sentences: sine and cosine by turns, of falling frequency, [count, width]."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))  # [D / 2]
    angles = torch.arange(count).unsqueeze(1) * rates  # [N, D / 2]
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]  # [N, D]


class Extractor(nn.Module):
    """An encoder, named as in models with a head so that ``AutoModel`` loads it, and what scores sentences."""

    def __init__(self, encoder: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = encoder.config.hidden_size, options["heads"]
        if width % heads:
            raise ng.UserError(f"system: heads: must divide the encoder's width of {width}, got {heads}.")
        self.encoder_name = encoder.base_model_prefix
        self.add_module(self.encoder_name, encoder)
        self.add_module(HEAD, SentenceScorer(width, options))

    @property
    def encoder(self) -> Any:
        """The encoder."""
        return getattr(self, self.encoder_name)

    def forward(self, batch: ng.padding.Batch) -> Tensor:
        """A batch of :func:`pad_rows` → logits of its sentences, [B, N]; of absent ones they mean nothing."""
        positions, present = batch["positions"], batch["labels"] != ng.IGNORE_INDEX  # [B, N]
        types = {"token_type_ids": batch["segments"]} if getattr(self.encoder.config, "type_vocab_size", 0) > 1 else {}
        states = self.encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **types)
        states = states.last_hidden_state  # [B, S, D]
        rows = torch.arange(len(positions), device=positions.device).unsqueeze(1)  # [B, 1]
        logits: Tensor = getattr(self, HEAD)(states[rows, positions], present)  # [B, N]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the encoder's configuration and all weights."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.encoder.config.save_pretrained(folder)
        state = self.state_dict() if state_dict is None else state_dict
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, Path(folder) / WEIGHTS, metadata={"format": "pt"})


def penalty(logits: Tensor, labels: Tensor) -> Tensor:
    """The binary cross-entropy of a row's sentences, summed, [B]; labels are −100 where there is no sentence."""
    present = labels != ng.IGNORE_INDEX  # [B, N]
    wanted = labels.clamp_min(0).to(logits)  # [B, N]
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").where(present, 0.0).sum(-1)


# Documents


class SplitDocument(NamedTuple):
    """A document as the model reads it; ``places`` are of ``sentences`` among the ``whole``, ``positions`` in ids."""

    whole: list[str]
    sentences: list[str]
    places: list[int]
    input_ids: list[int]
    positions: list[int]
    cut: bool


def read_documents(
    texts: Sequence[str], tokenizer: Any, reading: ng.recipe.Data, *, marks: tuple[int, int], min_words: int
) -> list[SplitDocument]:
    """Split documents into sentences and tokenise them, without short ones unless all of a document are short."""
    split = ng.data.split_documents(texts, reading)
    kept = [
        [place for place, sentence in enumerate(of_text) if len(ng.oracle.words(sentence)) >= min_words]
        or list(range(len(of_text)))
        for of_text in split
    ]
    flat = [of_text[place] for of_text, places in zip(split, kept, strict=True) for place in places]
    ids = iter(tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else [])
    return [
        _document(of_text, places, [next(ids) for _ in places], marks, reading.max_source)
        for of_text, places in zip(split, kept, strict=True)
    ]


def oracle_places(
    documents: Sequence[Sequence[str]], examples: Sequence[ng.data.Example], *, most: int
) -> Iterator[Sequence[int]]:
    """Which sentences of each document the greedy oracle takes, by their places. It reads the reference."""
    with ng.Progress("choosing sentences", total=len(examples), unit="documents") as progress:
        for sentences, example in zip(documents, examples, strict=True):
            yield ng.oracle.greedy_oracle(sentences, [example.target], most=most)
            progress.update(1)


def _document(
    whole: list[str], places: list[int], ids: Sequence[Sequence[int]], marks: tuple[int, int], longest: int
) -> SplitDocument:
    """Join the ids of sentences, and cut what is too long: the last token stays, a sentence without its first goes."""
    first, last = marks
    joined = [token for sentence in ids for token in (first, *sentence, last)]
    positions = [start for start, _ in pairwise(accumulate((len(sentence) + 2 for sentence in ids), initial=0))]
    cut = len(joined) > longest
    if cut:
        joined = [*joined[: longest - 1], last]
        positions = [position for position in positions if position < longest - 1]
    places = places[: len(positions)]
    return SplitDocument(whole, [whole[place] for place in places], places, joined, positions, cut)


def row_of(document: SplitDocument, chosen: Sequence[int] = ()) -> dict[str, Any]:
    """A document as a row: ids, positions, and a label of each sentence, 1 if its place was chosen."""
    return {
        "input_ids": np.array(document.input_ids, np.int32),
        "positions": np.array(document.positions, np.int32),
        "labels": np.array([place in chosen for place in document.places], np.int32),
    }


def pad_rows(pad: int, rows: Sequence[Mapping[str, Any]]) -> ng.padding.Batch:
    """Rows → a batch: ids and their mask, segments 0 and 1 by turns of sentences, positions and labels of these."""
    ids, mask = ng.padding.padded([row["input_ids"] for row in rows], pad)  # [B, S]
    positions, _ = ng.padding.padded([row["positions"] for row in rows], 0)  # [B, N]
    labels, _ = ng.padding.padded([row["labels"] for row in rows], ng.IGNORE_INDEX)  # [B, N]
    begins = np.zeros_like(ids)  # [B, S]
    for index, row in enumerate(rows):
        begins[index, row["positions"]] = 1
    segments = (begins.cumsum(-1) - 1).clip(0) % 2 * mask  # [B, S]
    arrays = {"input_ids": ids, "attention_mask": mask, "segments": segments, "positions": positions, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# Training


def task(run: ng.Run) -> ng.SystemTask:
    """What ``ngramloss train bertsum-ext`` trains: documents with the oracle's labels, and the model."""
    settings, options = run.settings, run.system.options
    config = ng.encoders.load_encoder_config(settings.model)  # a mistake is found before data are read
    splits = run.read_splits()
    tokenizer = run.tokenizer(splits["train"])
    model = Extractor(ng.encoders.load_encoder(settings.model, tokenizer, longest=settings.data.max_source), options)
    ng.data.note_splitting([example.source for example in splits["train"].examples], settings.data)
    marks = ng.encoders.marks_of(tokenizer, settings.model.name)
    documents, rows, used = {}, {}, []
    for split, of_split in splits.items():
        texts = [example.source for example in of_split.examples]
        documents[split] = read_documents(texts, tokenizer, settings.data, marks=marks, min_words=options["min_words"])
        chosen = oracle_places([read.whole for read in documents[split]], of_split.examples, most=options["oracle"])
        rows[split] = [row_of(*each) for each in zip(documents[split], chosen, strict=True)]
        used.append(_described(split, documents[split], rows[split], settings))

    def validate(batches: Any) -> dict[str, float]:
        """The loss, and the score of the summaries that are taken."""
        total, taken = 0.0, [""] * len(rows["validation"])
        for numbers, batch in batches:
            logits = model(batch)
            total += float(penalty(logits, batch["labels"]).sum())
            for number, values in zip(numbers, logits.tolist(), strict=True):
                taken[number] = summary_of(documents["validation"][number], values, options)
        metric = ng.candidate_scores.candidate_metric(ng.candidate_scores.BY_TASK[settings.task], {})
        values = ng.candidate_scores.score_candidates(metric, splits["validation"].examples, [[text] for text in taken])
        return {"loss": total / len(taken), "score": sum(value for (value,) in values) / len(taken)}

    return ng.SystemTask(
        run,
        model,
        tokenizer,
        rows,
        partial(pad_rows, tokenizer.pad_token_id),
        ("bce",),
        validate,
        splits=splits,
        loss_of=lambda batch, _: {"bce": penalty(model(batch), batch["labels"])},
        config=config,
        made_of={"sentencex": version("sentencex")},
        used=used,
    )


def _described(
    split: str, documents: Sequence[SplitDocument], rows: Sequence[Mapping[str, Any]], settings: ng.recipe.Recipe
) -> str:
    """What is used of a split, as a sentence. Raises if there is nothing to choose in any document."""
    counts = [len(document.sentences) for document in documents]
    if max(counts) < 2:
        raise ng.UserError(
            f"every document of the {split} split has one sentence, so there is nothing to choose. Choose another "
            f"data.splitter than {settings.data.splitter}, or name the language: data.language."
        )
    chosen = sum(int(row["labels"].sum()) for row in rows) / len(rows)
    alone, cut = sum(count < 2 for count in counts), sum(document.cut for document in documents)
    few = f" {alone:,} documents have one sentence." if alone else ""
    lost = (
        f" {cut:,} are longer than data.max_source = {settings.data.max_source} tokens and lost their end."
        if cut
        else ""
    )
    mean = sum(counts) / len(counts)
    return f"{split}: {len(rows):,} documents of {mean:.1f} sentences, {chosen:.2f} of them the oracle's.{few}{lost}"


# Taking sentences


def summary_of(document: SplitDocument, scores: Sequence[float], options: Mapping[str, Any]) -> str:
    """The best sentences in order, one per line; with blocking, none that shares three words in a row with another."""
    taken: list[int] = []
    seen: set[tuple[str, ...]] = set()
    order = sorted(range(len(document.sentences)), key=lambda place: -scores[place])
    for place in order:
        if len(taken) == options["sentences"]:
            break
        grams = _runs(document.sentences[place])
        if not (options["blocking"] and grams & seen):
            taken.append(place)
            seen |= grams
    return "\n".join(document.sentences[place] for place in sorted(taken))


def _runs(text: str) -> set[tuple[str, ...]]:
    found = ng.oracle.words(text)
    return {tuple(found[start : start + BLOCKED]) for start in range(len(found) - BLOCKED + 1)}


class Extraction(NamedTuple):
    """A trained extractor: examples → their summaries; whether each document lost its end; what could change them."""

    write: Callable[[Sequence[ng.data.Example]], list[str]]
    lost: list[bool]
    facts: dict[str, Any]


def load_extraction(folder: str, reading: ng.recipe.Data | None = None) -> Extraction:
    """Load a run of this system."""
    run = ng.saved_run(folder, NAME, command="ngramloss train bertsum-ext")
    tokenizer, options, reading = run.tokenizer, run.options, reading or run.settings.data
    base = ng.recipe.Model(name=str(run.model))
    model = Extractor(ng.encoders.load_encoder(base, tokenizer, longest=reading.max_source, name=folder), options)
    model.load_state_dict(load_file(run.model / WEIGHTS))
    model.to(run.device).eval()
    marks = ng.encoders.marks_of(tokenizer, folder)
    lost: list[bool] = []

    @torch.no_grad()
    def write(examples: Sequence[ng.data.Example]) -> list[str]:
        texts = [example.source for example in examples]
        documents = read_documents(texts, tokenizer, reading, marks=marks, min_words=options["min_words"])
        lost.extend(document.cut for document in documents)
        some = [number for number, document in enumerate(documents) if document.sentences]
        written = [""] * len(documents)
        rows = [row_of(documents[number]) for number in some]
        for numbers, batch in run.batches(rows, partial(pad_rows, tokenizer.pad_token_id)):
            for number, scores in zip(numbers, model(batch).tolist(), strict=True):
                written[some[number]] = summary_of(documents[some[number]], scores, options)
        return written

    read = {"sentences": reading.splitter, "language": reading.language, "max_source": reading.max_source}
    return Extraction(write, lost, run.facts | read)


def generate(work: ng.Job, folder: Path) -> Path:
    """Write the summaries of a run's model, as ``ngramloss generate`` writes predictions."""
    taken = load_extraction(work.model, work.data)
    path = ng.predictions.write_texts(work, folder, taken.write, taken.facts)
    if any(taken.lost):
        ng.console.logger.info(ng.data.lost_ends(sum(taken.lost), len(taken.lost), "documents", work.data.max_source))
    return path
