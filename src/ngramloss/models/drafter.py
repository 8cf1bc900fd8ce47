"""a frozen model's last hidden state and the token it has just written → the hidden states of the tokens after it.

A drafter predicts k tokens at once, for the model to verify in one pass. It has one or two layers over k places, which
see each other; of an encoder-decoder they also see the states of the source. All places start from what the model's
head has read last, plus the token that the model chose from it, plus a vector of the place: so the layers need not
learn the language again, only to look further ahead. Without the token, each place would have to guess it, too. The
output goes through the model's own head, so a drafter has no vocabulary of its own and is a small file. Inputs are
divided by their root mean square and the output is multiplied by it: models of every family look alike.

On a CPU the rows of the head cost more than the layers. So drafts are chosen among a shortlist of frequent tokens, as
in FR-Spec (Zhao et al. 2025); the model verifies with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.data.batches.padding import Pad, Padder
from ngramloss.data.tokens import ids_fingerprint
from ngramloss.errors import MissingFileError, UserError
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.attached.heads import has_encoder
from ngramloss.models.attached.segments import POSITIONS
from ngramloss.models.attached.teachers import TeacherModel as TeacherModel
from ngramloss.storage.files import read_object, write_whole
from ngramloss.storage.run_folder import RunFolder, weights_mark
from ngramloss.storage.typed import typed

KIND = "drafter"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAIN = "Train one: ngramloss train drafter --set model.name=MODEL."


@dataclass(frozen=True)
class Sizes:
    """What a drafter is built from, and the model that it was trained for."""

    width: int  # of the model's hidden states
    heads: int
    feed_forward: int
    layers: int
    places: int  # tokens of a draft
    reads_source: bool  # whether the model is an encoder-decoder
    shortlist: int  # tokens that may be drafted
    weights: str | None  # the fingerprint of the model's weights; None: not known
    tokenizer: str  # the fingerprint of its tokenizer


class Drafter(nn.Module):
    """Layers that predict the tokens after those that a model has verified."""

    shortlist: Tensor  # tokens that may be drafted, [v]

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        D = sizes.width
        self.token = nn.Linear(D, D)
        self.place = nn.Embedding(sizes.places, D)
        layer: Any = nn.TransformerDecoderLayer if sizes.reads_source else nn.TransformerEncoderLayer
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(layer(D, sizes.heads, sizes.feed_forward, **options) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(D)
        nn.init.normal_(self.place.weight, std=0.02)
        self.register_buffer("shortlist", torch.arange(sizes.shortlist))

    def forward(
        self, hidden: Tensor, tokens: Tensor, states: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """What the head is to read at the k places behind each of A tokens of a text, [B, A, k, D].

        Args:
            hidden: what the head read before each token, [B, A, D].
            tokens: the rows of the head's weight for these tokens, [B, A, D].
            states: of the source, [B, S, D].
            mask: which of them are real, [B, S].
        """
        B, A, D = hidden.shape
        k, scale = self.sizes.places, _size(hidden)
        start = hidden / scale + self.token(tokens / _size(tokens))  # [B, A, D]
        made = (start.unsqueeze(2) + self.place.weight).flatten(1, 2)  # [B, A · k, D]
        block = torch.arange(A * k, device=made.device) // k  # [A · k]
        apart = block.unsqueeze(1) != block if A > 1 else None  # [A · k, A · k]: drafts do not see each other
        for layer in self.layers:
            if states is None:
                made = layer(made, src_mask=apart)
            else:
                hides = None if mask is None else ~mask.bool()  # [B, S]
                made = layer(made, states / _size(states), tgt_mask=apart, memory_key_padding_mask=hides)
        found: Tensor = self.norm(made).view(B, A, k, D) * scale.unsqueeze(2)
        return found

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights, and the sizes with the marks of the model that it was trained for."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / CONFIG, json.dumps({"model_type": KIND, **asdict(self.sizes)}, indent=1) + "\n")
        state = self.state_dict() if state_dict is None else state_dict
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, Path(folder) / WEIGHTS, metadata={"format": "pt"})


def _size(vectors: Tensor) -> Tensor:
    """The root mean square of each vector, never 0, [..., 1]."""
    return vectors.float().square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt().to(vectors.dtype)


def marks(model: Any, tokenizer: Any, name: str) -> tuple[str | None, str]:
    """The fingerprints of a model's weights, in the folder or on the hub, and of the ids that its tokenizer gives."""
    return weights_mark(Path(name), model.config), ids_fingerprint(tokenizer)


class Read(NamedTuple):
    """What a frozen model reads of a batch of texts."""

    head: Any  # ``Teacher``: what its head reads before each label, [B, T, D], and the head
    states: Tensor | None  # of the sources, [B, S, D], if it is an encoder-decoder
    mask: Tensor | None  # which of them are real, [B, S]; None: all


def padder(model: Any, pad: int) -> Pad:
    """What makes batches that a model reads."""
    return Padder(pad, partial(decoder_inputs, model)) if has_encoder(model) else JoinedPadder(pad)


@torch.no_grad()
def read_texts(frozen: TeacherModel, batch: Mapping[str, Any]) -> Read:
    """Let a frozen model read a batch of ``Padder`` or ``JoinedPadder``."""
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name not in ("labels", POSITIONS)}
    mask, states = inputs.get("attention_mask"), None
    model: Any = frozen.model.to(batch["labels"].device)
    if has_encoder(model):
        states = model.get_encoder()(input_ids=inputs.pop("input_ids"), attention_mask=mask).last_hidden_state
        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
    return Read(frozen.predictions(inputs, batch["labels"], batch.get(POSITIONS)), states, mask)


def load_drafter(folder: str, model: Any, tokenizer: Any, name: str) -> Drafter:
    """The drafter of a run or a folder, on the model's device and in its precision. Raises if it is another model's.

    ``name``: the folder or hub id that the model was loaded from.
    """
    run = RunFolder(Path(folder))
    if run.recipe.is_file() and not run.finished:
        raise MissingFileError(
            f"generation.drafter: {folder} has no {run.model.name}/: its training is not finished. The same ngramloss "
            "train command continues it."
        )
    path = run.model if run.finished else Path(folder)
    about = read_object(path / CONFIG, TRAIN) if (path / CONFIG).is_file() else {}
    if about.pop("model_type", None) != KIND or not (path / WEIGHTS).is_file():
        raise UserError(f"generation.drafter: {folder} is not a drafter. {TRAIN}")
    sizes: Sizes = typed(Sizes, about, path / CONFIG, TRAIN)
    weights, own = marks(model, tokenizer, name)
    for what, theirs, ours in (("other weights", sizes.weights, weights), ("another tokenizer", sizes.tokenizer, own)):
        if theirs != ours:
            raise UserError(
                f"generation.drafter: {folder} was trained for a model with {what} ({theirs}) than {name} ({ours}), "
                f"so few of its drafts would be accepted. {TRAIN}"
            )
    drafter = Drafter(sizes)
    try:
        drafter.load_state_dict(load_file(path / WEIGHTS))
    except (RuntimeError, OSError, ValueError) as reason:
        raise UserError(f"generation.drafter: {path / WEIGHTS} is damaged: {str(reason)[:200]}. {TRAIN}") from reason
    return drafter.to(model.device, model.dtype).eval().requires_grad_(False)
