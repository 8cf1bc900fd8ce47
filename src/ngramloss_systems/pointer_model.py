"""ids of documents in their extended vocabularies → log-probabilities of a pointer-generator, and its best texts.

After See, Liu and Manning (2017), "Get To The Point: Summarization with Pointer-Generator Networks", and their code,
abisee/pointer-generator. Ids from the size of the vocabulary on are a document's own unknown words. Departures:

* The mixture of both distributions is computed from logarithms, so that no probability becomes 0.
* A search begins as training does, with an empty context and no coverage; theirs with the attention of the state that
  the decoder begins with, which also counts as covered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ngramloss as ng
from ngramloss_systems.pointer_words import END, PADDING, SPECIAL, START, UNKNOWN

CONFIG, WEIGHTS = "pointer_generator.json", "model.safetensors"
KIND = "pointer_generator"
UNIFORM, NORMAL = 0.02, 1e-4
"""The authors' initial weights: LSTMs uniform within ± the first; embeddings, output and the decoder's first state
normal with the second as deviation, cut at two of them; all others Glorot's uniform, TensorFlow's default."""
UNKNOWN_ID, PADDING_ID, START_ID, END_ID = (SPECIAL.index(token) for token in (UNKNOWN, PADDING, START, END))


class ReadDocument(NamedTuple):
    """What the decoder reads: ids [B, S] in the extended vocabulary, which are ``real``, ``states`` [B, S, 2D], and
    ``features`` [B, S, 2D], the part of attention that does not depend on the decoder.
    """

    ids: Tensor
    real: Tensor
    states: Tensor
    features: Tensor


class State(NamedTuple):
    """What the decoder remembers: its LSTM's two states, [B, D], the last context, [B, 2D], and coverage, [B, S]."""

    hidden: Tensor
    cell: Tensor
    context: Tensor
    coverage: Tensor


class Written(NamedTuple):
    """One position, or T of them: the vocabulary's features, [B, D], attention, [B, S], and the logit of p_gen, [B]."""

    features: Tensor
    attention: Tensor
    generates: Tensor


class Predicted(NamedTuple):
    """Log-probabilities of the extended vocabulary, [B, T, V + U], and the coverage loss of each position, [B, T]."""

    logp: Tensor
    penalty: Tensor


class PointerGenerator(nn.Module):
    """A bidirectional LSTM, a decoder with attention and coverage, and a mixture of writing and copying."""

    def __init__(self, *, vocabulary: int, width: int, embeddings: int, coverage: bool = False) -> None:
        super().__init__()
        self.sizes = {"vocabulary": vocabulary, "width": width, "embeddings": embeddings}
        self.vocabulary, self.coverage = vocabulary, coverage
        both = 2 * width
        self.embedding = nn.Embedding(vocabulary, embeddings)
        self.encoder = nn.LSTM(embeddings, width, batch_first=True, bidirectional=True)
        self.first_hidden, self.first_cell = nn.Linear(both, width), nn.Linear(both, width)
        self.merge = nn.Linear(embeddings + both, embeddings)
        self.decoder = nn.LSTMCell(embeddings, width)
        self.document_features = nn.Linear(both, both, bias=False)
        self.decoder_features = nn.Linear(both, both)
        self.coverage_features = nn.Parameter(torch.empty(both))
        self.energy = nn.Parameter(torch.empty(both))
        self.generates = nn.Linear(both + both + embeddings, 1)
        self.word_features = nn.Linear(width + both, width)
        self.words = nn.Linear(width, vocabulary)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for lstm in (self.encoder, self.decoder):
            for name, weight in lstm.named_parameters():
                if name.startswith("weight"):
                    nn.init.uniform_(weight, -UNIFORM, UNIFORM)
                else:
                    weight.zero_()
                if name.startswith("bias_hh"):  # a second bias would double the first one's steps
                    weight.requires_grad_(False)
                elif name.startswith("bias"):
                    weight.view(4, -1)[1] = 1.0  # the forget gate's
        for part in (self.embedding, self.words, self.first_hidden, self.first_cell):
            for weight in part.parameters():
                nn.init.trunc_normal_(weight, std=NORMAL, a=-2 * NORMAL, b=2 * NORMAL)
        for linear in (self.merge, self.document_features, self.decoder_features, self.generates, self.word_features):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                linear.bias.zero_()
        nn.init.uniform_(self.energy, -((3 / len(self.energy)) ** 0.5), (3 / len(self.energy)) ** 0.5)
        nn.init.xavier_uniform_(self.coverage_features.unsqueeze(-1))

    def read(self, ids: Tensor, real: Tensor) -> tuple[ReadDocument, State]:
        """Documents in their extended vocabularies, [B, S], and which of it is real → what the decoder begins with."""
        embedded = self.embedding(self._known(ids))  # [B, S, E]
        lengths = real.sum(-1).cpu()  # [B]
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        packed, (hidden, cell) = self.encoder(packed)
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])  # [B, S, 2D]
        hidden = F.relu(self.first_hidden(torch.cat([*hidden], -1)))  # [B, D]
        cell = F.relu(self.first_cell(torch.cat([*cell], -1)))  # [B, D]
        context, coverage = states.new_zeros(states[:, 0].shape), states.new_zeros(ids.shape)  # [B, 2D], [B, S]
        return ReadDocument(ids, real, states, self.document_features(states)), State(hidden, cell, context, coverage)

    def step(self, tokens: Tensor, state: State, document: ReadDocument) -> tuple[State, Written]:
        """The tokens that were written last, [B] → the next state, and what it writes."""
        read = self.merge(torch.cat([self.embedding(self._known(tokens)), state.context], -1))  # [B, E]
        hidden, cell = self.decoder(read, (state.hidden, state.cell))  # [B, D] each
        features = document.features + self.decoder_features(torch.cat([cell, hidden], -1)).unsqueeze(1)  # [B, S, 2D]
        if self.coverage:
            features = features + state.coverage.unsqueeze(-1) * self.coverage_features  # [B, S, 2D]
        energy = features.tanh() @ self.energy  # [B, S]
        attention = energy.masked_fill(~document.real, float("-inf")).softmax(-1)  # [B, S]
        context = (attention.unsqueeze(1) @ document.states).squeeze(1)  # [B, 2D]
        generates = self.generates(torch.cat([context, cell, hidden, read], -1)).squeeze(-1)  # [B]
        word_features = self.word_features(torch.cat([hidden, context], -1))  # [B, D]
        state = State(hidden, cell, context, state.coverage + attention)
        return state, Written(word_features, attention, generates)

    def log_probabilities(self, written: Written, ids: Tensor, own: Tensor) -> Tensor:
        """log(p_gen · P_vocab(w) + (1 − p_gen) · attention to w), [B, T, V + U]; ``own``: unknown words, [B, U].

        A word that a document does not have gets the logarithm of the smallest number above 0, and no gradient.
        """
        words = self.words(written.features)  # [B, T, V]
        words = words.to(torch.promote_types(words.dtype, torch.float32)).log_softmax(-1)  # [B, T, V]
        attention, generates = written.attention.to(words), written.generates.to(words).unsqueeze(-1)
        tiny = torch.finfo(words.dtype).tiny
        copied = words.new_zeros(*words.shape[:2], self.vocabulary + own.shape[1])  # [B, T, V + U]
        copied = copied.scatter_add(-1, ids.unsqueeze(1).expand_as(attention), attention)  # [B, T, V + U]
        copied = copied.clamp_min(tiny).log() + F.logsigmoid(-generates)  # [B, T, V + U]
        known = torch.logaddexp(words + F.logsigmoid(generates), copied[..., : self.vocabulary])  # [B, T, V]
        absent = torch.full((), tiny, dtype=words.dtype, device=words.device).log()  # []
        return torch.cat([known, copied[..., self.vocabulary :].where(own.unsqueeze(1), absent)], -1)

    def forward(self, batch: ng.padding.Batch) -> Predicted:
        """A batch of :func:`pad_rows` → its predictions of the labels, each after the labels before it."""
        document, state = self.read(batch["input_ids"], batch["attention_mask"].bool())
        labels = batch["labels"].masked_fill(batch["labels"] == ng.IGNORE_INDEX, PADDING_ID)  # [B, T]
        inputs = F.pad(labels[:, :-1], (1, 0), value=START_ID)  # [B, T]
        positions = []
        for tokens in inputs.unbind(-1):
            state, written = self.step(tokens, state, document)
            positions.append(written)
        written = Written(*(torch.stack(values, 1) for values in zip(*positions, strict=True)))  # [B, T, …]
        own = batch["unknown"].bool()  # [B, U]
        return Predicted(self.log_probabilities(written, document.ids, own), coverage_penalty(written.attention))

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write sizes, whether coverage is on, and all weights."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        config = {"model_type": KIND, **self.sizes, "coverage": self.coverage}
        (Path(folder) / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        state = self.state_dict() if state_dict is None else state_dict
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, Path(folder) / WEIGHTS, metadata={"format": "pt"})

    def _known(self, ids: Tensor) -> Tensor:
        return ids.masked_fill(ids >= self.vocabulary, UNKNOWN_ID)


def load_model(folder: Path, tokenizer: Any) -> PointerGenerator:
    """Load a saved model. Raises if it is another model's, or not the tokenizer's."""
    config = ng.files.read_object(folder / CONFIG)
    sizes: dict[str, Any] = {name: config.get(name) for name in ("vocabulary", "width", "embeddings")}
    if config.get("model_type") != KIND or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise ng.UserError(f"{folder} is not a model of {KIND}: its {CONFIG} says otherwise. Train it again.")
    if sizes["vocabulary"] != len(tokenizer):
        raise ng.UserError(
            f"{folder} has a vocabulary of {sizes['vocabulary']:,} words, and its tokenizer {len(tokenizer):,}: one of "
            "them is another model's. Restore both, or train again."
        )
    model = PointerGenerator(**sizes, coverage=config.get("coverage") is True)
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except RuntimeError as reason:
        raise ng.UserError(
            f"the weights in {folder} do not fit its {CONFIG}: {' '.join(str(reason).split())} Restore both, or train "
            "again."
        ) from reason
    return model


def coverage_penalty(attention: Tensor) -> Tensor:
    """The coverage loss, [B, T], of attention [B, T, S]: the part that goes where it went before."""
    before = attention.cumsum(1) - attention  # [B, T, S]
    return torch.minimum(attention, before).sum(-1)


@torch.no_grad()
def search(model: PointerGenerator, batch: ng.padding.Batch, *, beams: int, least: int, most: int) -> list[list[int]]:
    """The text of each document with the highest mean log-probability, as ids without start and end.

    The authors' search: of the best extensions of all beams, in order, those that end are results, or dropped if they
    have fewer than ``least`` words, and the first ``beams`` others live on. It stops at ``beams`` results or ``most``
    tokens; the best result is the text, or the best beam if there is none. Means count the start and the end token.
    """
    own = batch["unknown"].bool()  # [B, U]
    B, V = len(own), model.vocabulary + own.shape[1]
    if 2 * beams > model.vocabulary:
        raise ng.UserError(
            f"generation.num_beams: a vocabulary of {model.vocabulary:,} words allows at most "
            f"{model.vocabulary // 2:,} beams, got {beams:,}."
        )
    document, state = model.read(batch["input_ids"], batch["attention_mask"].bool())
    document = ReadDocument(*(part.repeat_interleave(beams, 0) for part in document))  # [B·K, …]
    state = State(*(part.repeat_interleave(beams, 0) for part in state))  # [B·K, …]
    own = own.repeat_interleave(beams, 0)  # [B·K, U]
    device = own.device
    rows = torch.arange(B, device=device).unsqueeze(1)  # [B, 1]
    sums = torch.full((B, beams), float("-inf"), device=device)  # [B, K]
    sums[:, 0] = 0.0  # all beams begin alike
    texts = torch.full((B, beams, 1), START_ID, device=device)  # [B, K, 1 + t]
    best, best_mean = texts[:, 0], torch.full((B,), float("-inf"), device=device)  # [B, 1 + t], [B]
    results = torch.zeros(B, dtype=torch.long, device=device)  # [B]
    for count in range(most):
        state, written = model.step(texts[:, :, -1].flatten(), state, document)
        each = Written(*(part.unsqueeze(1) for part in written))  # [B·K, 1, …]
        logp = model.log_probabilities(each, document.ids, own).view(B, beams, V)  # [B, K, V + U]
        found, places = (sums.unsqueeze(-1) + logp).flatten(1).topk(2 * beams)  # [B, 2K], best first
        beam, token = places // V, places % V  # [B, 2K] each
        longer = torch.cat([texts[rows, beam], token.unsqueeze(-1)], -1)  # [B, 2K, 2 + t]

        ends = token == END_ID  # [B, 2K]
        result = ends & (count >= least)  # [B, 2K]
        lives_before = (~ends).cumsum(-1) - (~ends).long()  # [B, 2K]
        results_before = results.unsqueeze(-1) + result.cumsum(-1) - result.long()  # [B, 2K]
        result &= (lives_before < beams) & (results_before < beams)  # [B, 2K]
        mean = (found / longer.shape[-1]).masked_fill(~result, float("-inf"))  # [B, 2K]
        top = mean.argmax(-1)  # [B]
        better = mean.amax(-1) > best_mean  # [B]
        best = F.pad(best, (0, 1), value=END_ID)  # [B, 2 + t]
        best = longer[rows.squeeze(1), top].where(better.unsqueeze(-1), best)  # [B, 2 + t]
        best_mean = mean.amax(-1).where(better, best_mean)  # [B]
        results = results + result.sum(-1)  # [B]

        lives = ends.sort(dim=-1, stable=True).indices[:, :beams]  # [B, K]: the first that do not end
        sums, texts = found.gather(-1, lives), longer[rows, lives]  # [B, K], [B, K, 2 + t]
        chosen = (rows * beams + beam.gather(-1, lives)).flatten()  # [B·K]
        state = State(*(part[chosen] for part in state))  # [B·K, …]
        if bool((results >= beams).all()):
            break
    text = best.where((results > 0).unsqueeze(-1), texts[:, 0])  # [B, 1 + t]
    return [[token for token in row[1:] if token != END_ID] for row in text.tolist()]
