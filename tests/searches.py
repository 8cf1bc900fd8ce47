"""Tiny models that search, and the texts that an engine finds."""

import functools

import models
import torch

from ngramloss.generation.engines.settings import search_of

SOURCES = [[5, 6, 7, 8, 2], [9, 2], [12, 4, 4, 10, 11, 5, 6, 9, 12, 2], [7, 2], [4, 5, 2], [11, 8, 10, 2]]


def silent(_):
    """Nobody listens."""


@functools.cache
def tiny(family, seed=0):
    """A random model with weights so large that hypotheses are far from ties."""
    model = models.tiny(family, seed=seed).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.4)
    return model


def with_settings(model, **settings):
    defaults = {
        "num_beams": 1,
        "max_length": 12,
        "min_length": 0,
        "length_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "early_stopping": True,
        "renormalize_logits": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "decoder_start_token_id": models.EOS,
        "bad_words_ids": None,
        "num_return_sequences": 1,
        "do_sample": False,
        "repetition_penalty": None,
        "eos_token_id": models.EOS,
        "top_k": 50,
        "top_p": 1.0,
        "temperature": 1.0,
    }
    model.generation_config.update(max_new_tokens=None, **{**defaults, **settings})
    return search_of(model, seed=3 if settings.get("do_sample") else None)


def written(engine, model, search, sources=SOURCES, precision="fp32"):
    return engine.load(model, search, precision=precision, say=silent)(sources)
