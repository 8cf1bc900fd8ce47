"""a loaded model → the same model, if its token ids and generation settings have the types that everything expects."""

from __future__ import annotations

from typing import Any

import torch

from ngramloss.errors import UserError
from ngramloss.models.attached.heads import has_encoder
from ngramloss.settings import Setting

IDS = tuple(f"{name}_token_id" for name in ("pad", "bos", "eos", "decoder_start", "forced_bos", "forced_eos"))
"""Settings that are a token's number, several of them, or nothing."""
_LENGTH = Setting(kind=int, least=1)
_COUNT = Setting(kind=int, least=0)
NUMBERS = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "max_length", "max_new_tokens"), _LENGTH),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "top_k"), _COUNT),
    "top_p": Setting(kind=float, above=0, most=1),
    "temperature": Setting(kind=float, least=0),
    "length_penalty": Setting(kind=float, least=-64, most=64),
}
"""Settings of a generation_config that are numbers, or nothing."""
LAYERS = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers")
"""Settings of a config that are numbers of layers. A negative one would be a model without layers."""


def pad_id(whose: str, *owners: Any) -> int:
    """The id that fills shorter rows, of the first owner that has one; ``whose`` begins the error if none has."""
    found = next((owner.pad_token_id for owner in owners if getattr(owner, "pad_token_id", None) is not None), None)
    if found is None:
        raise UserError(f"{whose} no padding token (pad_token_id). Batches need one.")
    return int(found)


def check_settings(model: Any) -> None:
    """Raise if a token id or a setting of generation is invalid: libraries fail later and do not name it."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for config, file in ((model.config, "config.json"), (model.generation_config, "generation_config.json")):
        for name in IDS:
            _check_ids(f"{name} in {file}", getattr(config, name, None), vocabulary)
    pad_id("config.json has", model.config)
    for name, setting in NUMBERS.items():
        if (value := getattr(model.generation_config, name, None)) is not None:
            setting.check(f"{name} in generation_config.json", value)
    for name in LAYERS:
        if (value := getattr(model.config, name, None)) is not None:
            _LENGTH.check(f"{name} in config.json", value)
    words = getattr(model.generation_config, "bad_words_ids", None)
    is_list = isinstance(words, list) and all(isinstance(word, list) and word for word in words)
    if words is not None and not (is_list and words):
        raise UserError(f"bad_words_ids in generation_config.json: must be lists of token ids, got {words!r}.")
    for word in words or ():
        _check_ids("bad_words_ids in generation_config.json", word, vocabulary)


def _check_ids(key: str, value: Any, vocabulary: int) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if value == [] or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise UserError(f"{key}: must be the number of a token, 0 to {vocabulary - 1:,}, got {value!r}.")


@torch.inference_mode()
def try_out(model: Any) -> None:
    """Compute a few logits. A configuration of wrong sizes or types fails here, and not in the middle of a job."""
    if all(weight.device.type == "cpu" and weight.numel() for weight in model.parameters()):  # not meta, nor sharded
        ids = torch.zeros(1, 2, dtype=torch.long)  # [1, 2]
        more = {"decoder_input_ids": ids} if has_encoder(model) else {}
        model.eval()(input_ids=ids, **more)  # not labels: the start token may depend on the language
