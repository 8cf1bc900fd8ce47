"""a recipe's model section → an encoder that reads whole texts, loaded or from scratch; the same with a new decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ngramloss.errors import UserError
from ngramloss.models.loading import explained, is_causal, load_weights, loading_options, refuse_foreign_kernels
from ngramloss.models.settings import pad_id
from ngramloss.output.console import quiet_loading
from ngramloss.recipe import Model

NEEDLESS = ("pooler.",)
"""Weights that may be missing: they read the first token for another task."""
POSITIONS = 1024
"""Of an encoder from scratch."""


def load_encoder_config(settings: Model) -> Any:
    """The configuration of an encoder, None of one from scratch. Raises if the model is none."""
    from transformers import AutoConfig

    if settings.name == "scratch":
        return None
    with explained(settings.name, "model"):
        config = AutoConfig.from_pretrained(settings.name, **loading_options(settings))
        refuse_foreign_kernels(config)
    if getattr(config, "is_encoder_decoder", False) or is_causal(config):
        kind = "a decoder-only model" if is_causal(config) else "an encoder-decoder"
        raise UserError(
            f"{settings.name} is {kind} (its type is {config.model_type}), but an encoder is needed, such as "
            "FacebookAI/roberta-base or google-bert/bert-base-uncased."
        )
    return config


def load_encoder(settings: Model, tokenizer: Any, *, longest: int = 0, name: str = "") -> Any:
    """Load an encoder in fp32, or create a BERT from scratch with torch's seed; a head in its folder is left out.

    ``longest``: tokens that it must have positions for; 0 is not checked. ``name``: for messages.
    """
    from transformers import AutoModel, BertModel

    if settings.name == "scratch":
        made: Any = BertModel
        layers, pad = settings.encoder_layers, tokenizer.pad_token_id
        encoder = made(_bert_config(settings, len(tokenizer), settings.width, layers=layers, pad=pad))
    else:
        config = load_encoder_config(settings)
        with explained(settings.name, "model"), quiet_loading():
            options = loading_options(settings)
            encoder = load_weights(AutoModel, settings.name, needless=NEEDLESS, config=config, **options)
    if longest:
        raise_unless_it_fits(encoder, tokenizer, name or settings.name, longest=longest)
    return encoder


def _bert_config(settings: Model, vocabulary: int, width: int, *, layers: int, pad: int | None, **more: Any) -> Any:
    """The configuration of a BERT with the heads, dropout and start of a recipe."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=settings.heads,
        intermediate_size=settings.feed_forward,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        initializer_range=settings.init_std,
        max_position_embeddings=POSITIONS,
        pad_token_id=pad,
        **more,
    )


def with_decoder_config(settings: Model) -> Any:
    """The configuration of an encoder-decoder whose encoder is ``settings.encoder`` and whose decoder is new."""
    from transformers import EncoderDecoderConfig

    encoder = load_encoder_config(replace(settings, name=settings.encoder, encoder=""))
    if encoder.hidden_size % settings.heads:
        raise UserError(
            f"model.heads: must divide the width of {settings.encoder}, {encoder.hidden_size}, got {settings.heads}."
        )
    decoder = _bert_config(
        settings,
        encoder.vocab_size,
        encoder.hidden_size,
        layers=settings.decoder_layers,
        pad=encoder.pad_token_id,
        is_decoder=True,
        add_cross_attention=True,
    )
    return EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def with_new_decoder(settings: Model, tokenizer: Any) -> Any:
    """A pretrained encoder and a new decoder, whose embeddings and head begin as the encoder's embeddings."""
    from transformers import BertLMHeadModel, EncoderDecoderModel

    config = with_decoder_config(settings)
    encoder = load_encoder(replace(settings, name=settings.encoder, encoder=""), tokenizer)
    made: Any = BertLMHeadModel
    decoder = made(config.decoder)
    with torch.no_grad():
        decoder.get_input_embeddings().weight.copy_(encoder.get_input_embeddings().weight)
    model: Any = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    first, last = marks_of(tokenizer, settings.encoder)
    for part in (model.config, model.generation_config):
        part.decoder_start_token_id, part.eos_token_id, part.pad_token_id = first, last, tokenizer.pad_token_id
    return model


def marks_of(tokenizer: Any, name: str) -> tuple[int, int]:
    """The ids before and after a text or a sentence that an encoder reads."""
    first = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    last = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if first is None or last is None:
        raise UserError(
            f"the tokenizer of {name} has no tokens for the beginning and the end of a text. Choose another."
        )
    return int(first), int(last)


def longest_text(encoder: Any) -> int | None:
    """The most tokens that an encoder reads; None if it has no limit. RoBERTa leaves its first positions out."""
    for name, part in encoder.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, torch.nn.Embedding):
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return getattr(encoder.config, "max_position_embeddings", None)


def raise_unless_it_fits(encoder: Any, tokenizer: Any, name: str, *, longest: int) -> None:
    """Raise if an encoder has fewer positions than ``longest``, or does not belong to the tokenizer."""
    positions = longest_text(encoder)
    if positions is not None and positions < longest:
        raise UserError(
            f"{name} reads at most {positions} tokens, and the recipe asks for {longest}. Lower data.max_source and "
            "data.max_target; longer documents then lose their end. Or choose an encoder that reads more."
        )
    pad_id(f"the tokenizer of {name} has", tokenizer)
    rows = encoder.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens but {name} has {rows} embeddings.")
