"""labels → the decoder's inputs that an encoder-decoder derives from them, with rows for candidates."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.stats import IGNORE_INDEX
from ngramloss.models.attached.heads import bare

if TYPE_CHECKING:
    from ngramloss.models.attached.candidates import CandidateRows


def decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    """The ``decoder_input_ids`` that an encoder-decoder derives from labels, [B, T]."""
    model = bare(model)
    blank = (labels == IGNORE_INDEX).all(-1)  # [B]: mBART's function fails without a label
    first = labels[:, 0].masked_fill(blank, int(_pad(model) == 0))  # [B]
    labels = torch.cat([first.unsqueeze(-1), labels[:, 1:]], -1)  # [B, T]
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", getattr(model, "_shift_right", None))
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    ids: Tensor
    if prepare is not None:
        ids = prepare(labels)  # [B, T]
    elif shift is not None and shift.__code__.co_argcount == 3:
        ids = shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)  # [B, T]
    else:
        raise UserError(
            f"{type(model).__name__} has no function that derives `decoder_input_ids` from labels. Pass them: the "
            "labels shifted right by one, with the start token first and padding instead of -100."
        )
    return ids


def add_decoder_inputs(
    model: Any, inputs: dict[str, Any], labels: Tensor, candidates: CandidateRows | None = None
) -> None:
    """Add the inputs that an encoder-decoder derives from labels, because the labels are not passed to it."""
    if inputs.get("use_cache") is None:
        inputs["use_cache"] = False
    if inputs.get("decoder_inputs_embeds") is not None:
        return
    given = inputs.get("decoder_input_ids")  # [B, T]
    if given is not None and candidates is None:
        return
    ids = decoder_inputs(model, labels) if given is None else given  # [B, T]
    if candidates is not None:
        ids = candidates.beside(ids, _pad(model))  # [B·(1 + K), T'']
    inputs["decoder_input_ids"] = ids  # [B, T], or with candidates
    if model.config.model_type == "encoder-decoder" and inputs.get("decoder_attention_mask") is None:
        inputs["decoder_attention_mask"] = (ids != model.config.pad_token_id).to(ids.dtype)  # [B, T]


def _pad(model: Any) -> int:
    return int(getattr(model.config, "pad_token_id", None) or 0)
