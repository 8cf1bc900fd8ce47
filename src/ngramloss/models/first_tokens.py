"""a model and its tokenizer → the tokens that generation begins with, the same ones as in training."""

from __future__ import annotations

from typing import Any

import torch

from ngramloss.errors import UserError
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.attached.heads import bare
from ngramloss.models.languages import codes
from ngramloss.output.console import logger

EOS_STARTS = ("m2m_100", "nllb-moe")
"""Models whose decoder starts with the token that ends a text, even if their configuration does not say so."""


def align_start(model: Any, tokenizer: Any, *, name: str, training: bool) -> None:
    """Set the tokens that generation begins with to those that training begins with, derived from the labels.

    mBART begins with the target language, which its labels end with; mBART-50, M2M100 and NLLB begin with ``</s>``, and
    the target language is the first label. In training, labels must tell it.
    """
    model = bare(model)
    _complete_config(model, tokenizer, name)
    before, labels = _target_start(tokenizer)
    start = int(decoder_inputs(model, torch.tensor([labels]))[0, 0])
    language = codes(tokenizer).get(str(getattr(tokenizer, "tgt_lang", None)))
    first = before[0] if before else None
    if language is not None and language not in (start, first):
        if training:
            raise UserError(
                f"the tokenizer of {name} puts the target language after the text, where the decoder does not see it "
                "in time. Set legacy_behaviour to false in its tokenizer_config.json."
            )
        first = language
    config = model.generation_config
    begun = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    if begun != start:
        logger.info(
            f"generation will start with {_shown(tokenizer, start)}, as training does, and not with "
            f"{_shown(tokenizer, begun)}, as the settings of {name} say."
        )
    config.decoder_start_token_id = start
    forced = config.forced_bos_token_id
    if forced is not None and forced != first and before is not None:
        logger.info(
            f"the first generated token will be {_shown(tokenizer, first)}, as in training, and not "
            f"{_shown(tokenizer, forced)}, as the settings of {name} say."
        )
    if language is not None or (forced is not None and before is not None):
        config.forced_bos_token_id = first


def _complete_config(model: Any, tokenizer: Any, name: str) -> None:
    """Give the model's configuration a start token if the labels cannot be shifted without it."""
    config = model.config
    if getattr(config, "decoder_start_token_id", None) is not None:
        return
    start = model.generation_config.decoder_start_token_id
    if start is None and config.model_type in EOS_STARTS:
        start = tokenizer.eos_token_id
    try:
        decoder_inputs(model, torch.tensor([_target_start(tokenizer)[1]]))  # mBART needs none
    except (TypeError, ValueError):
        if start is None:
            raise UserError(
                f"{name} has no decoder_start_token_id, the token that the decoder starts with. Set it in its "
                "config.json to the token that the model was trained with."
            ) from None
        config.decoder_start_token_id = start


def _target_start(tokenizer: Any) -> tuple[list[int] | None, list[int]]:
    """The special tokens before a target, None if they cannot be found, and the labels of a short target."""
    labels = list(tokenizer(text_target="a")["input_ids"])
    text = list(tokenizer(text_target="a", add_special_tokens=False)["input_ids"])
    starts = [index for index in range(len(labels)) if text and labels[index : index + len(text)] == text]
    return labels[: starts[0]] if starts else None, labels


def _shown(tokenizer: Any, token: Any) -> str:
    return "any token" if token is None else f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"
