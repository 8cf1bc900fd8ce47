"""a Hugging Face encoder-decoder → a folder in the cache with the same model for CTranslate2, converted once.

Its vocabulary is the numbers of the tokens, so it needs no tokenizer. Weights are fp32; other precisions are made of
them when the model is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.search.decoders import random_ids
from ngramloss.storage.checksums import cached_folder
from ngramloss.storage.files import cache_folder
from ngramloss.version import installed

FORMAT = 1  # part of the cache key: increased when the same model is converted in another way
TOLERANCE = 1e-3  # the largest difference of a log-probability after the conversion; rounding gives about 1e-5
FAMILIES: dict[str, dict[str, bool]] = {
    "bart": {"normalize_before": False, "normalize_embedding": True},
    "mbart": {"normalize_before": True, "normalize_embedding": True},
    "pegasus": {"normalize_before": True, "normalize_embedding": False},
    "marian": {"normalize_before": False, "normalize_embedding": False},
    "m2m_100": {"normalize_before": True, "normalize_embedding": False},
    "t5": {},
    "mt5": {},
    "umt5": {},
}
"""Types of models → whether they normalise before each part (else after), and after the embeddings."""


def converted(model: Any) -> Path:
    """The folder of an fp32 model, converted, in the cache; raises and leaves nothing if it cannot be converted."""
    folder = cache_folder() / "ctranslate2" / _key(model)
    try:
        return cached_folder(folder, partial(_convert, model), what="converted model")
    except OSError as reason:
        raise UserError(
            f"cannot write the converted model to {folder.parent}: {reason.strerror or reason}. Make room "
            "there, or name another folder with NGRAMLOSS_CACHE."
        ) from reason


def _key(model: Any) -> str:
    """A hash of everything on which the converted model depends."""
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    described = json.dumps([FORMAT, installed("ctranslate2"), config], sort_keys=True, default=str)
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:24]


def _convert(model: Any, folder: Path) -> None:
    logger.info("converting the model for ctranslate2; this is done once.")
    with _on_cpu(model):
        try:
            spec = _specification(model)
            spec.validate()
            spec.optimize()
        except (ValueError, KeyError, AttributeError, TypeError, NotImplementedError, RuntimeError) as reason:
            raise UserError(
                f"{type(model).__name__} cannot be converted for ctranslate2: {type(reason).__name__}: "
                f"{' '.join(str(reason).split())[:200]}"
            ) from reason
        spec.save(str(folder))
        _raise_if_different(model, folder)


@torch.no_grad()
def _specification(model: Any) -> Any:
    """The model's weights in the layout of CTranslate2."""
    from ctranslate2.converters import transformers as loaders
    from ctranslate2.specs.model_spec import OPTIONAL

    config = model.config
    # Its loader for Marian takes the last token for padding, and the embedding of the start token for zero.
    kind = "BartConfig" if config.model_type == "marian" else type(config).__name__
    loader = loaders._MODEL_LOADERS[kind]
    with patch.dict(vars(config), FAMILIES[config.model_type]):  # for the loader, which reads them there
        spec = loader.get_model_spec(model)
    if config.model_type in ("t5", "mt5"):  # transformers has a setting of its own for this, and none for mT5
        scaled = getattr(config, "scale_decoder_outputs", False)
        spec.decoder.scale_outputs = config.d_model**-0.5 if scaled else OPTIONAL
    loader.set_vocabulary(spec, [str(token) for token in range(spec.decoder.embeddings.weight.shape[0])])
    end = config.eos_token_id
    spec.config.bos_token = spec.config.eos_token = str(end[0] if isinstance(end, list) else end)
    spec.config.unk_token = "none"
    spec.config.decoder_start_token = None  # it is the first token of each target
    return spec


@contextmanager
def _on_cpu(model: Any) -> Iterator[None]:
    device = model.device
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)


def _raise_if_different(model: Any, folder: Path) -> None:
    """Compare random tokens with the original: unknown settings would change texts without an error."""
    import ctranslate2

    source, target = random_ids(model, 1, 48, 16)  # [1, S], [1, T]
    expected = _log_probabilities(model, source, target)  # [T - 1]
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=torch.get_num_threads())
    words = [[[str(token) for token in row] for row in ids.tolist()] for ids in (source, target)]
    (scored,) = translator.score_batch(*words, max_input_length=0)
    found = torch.tensor(scored.log_probs[: target.shape[1] - 1])
    if not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
        difference = float((found - expected).abs().max())
        raise UserError(
            f"{type(model).__name__} cannot be converted for ctranslate2: the converted model has other "
            f"probabilities (a log-probability differs by {difference:.2g})."
        )


@torch.no_grad()
def _log_probabilities(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """The log-probability of each target token but the first, [T - 1]."""
    training = model.training
    logits = model.eval()(input_ids=source, decoder_input_ids=target[:, :-1]).logits  # [1, T - 1, V]
    model.train(training)
    chosen: Tensor = logits.float().log_softmax(-1).gather(-1, target[:, 1:, None])  # [1, T - 1, 1]
    return chosen.flatten()
