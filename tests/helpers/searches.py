"""Tiny models that search, and the texts that an engine finds."""

import dataclasses
import functools

import models
import tiny_tokenizers
import torch

from ngramloss.data.tokens import Shape, separator_id, sources
from ngramloss.generation.job import job
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.models import loading
from ngramloss.recipe import Data, Generation, Model
from ngramloss.search.batches import Budget
from ngramloss.search.decoders import CAUSAL, DECODERS
from ngramloss.search.engines import Loaded, hf
from ngramloss.search.engines.hf import search_of
from ngramloss.search.writer import Writer

PROMPTED = [name for name in (*models.DECODER_ONLY, *models.OTHERS) if name != "gemma2"]
"""Decoder-only models that ``graph`` serves; the logits of gemma2 are equal there, because its head is bounded so tightly."""
SERVED = [*(family for family in DECODERS if family not in CAUSAL), *PROMPTED]
"""All tiny models that ``graph`` serves."""
SOURCES = [[5, 6, 7, 8, 2], [9, 2], [12, 4, 4, 10, 11, 5, 6, 9, 12, 2], [7, 2], [4, 5, 2], [11, 8, 10, 2]]


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
    """A search with these settings. The lengths of a decoder-only model count the last token of the prompt, as a start."""
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
    chosen = {**defaults, **settings, "max_new_tokens": None, "min_new_tokens": None}
    if loading.is_causal(model.config):
        chosen |= {
            "max_new_tokens": chosen["max_length"] - 1,
            "min_new_tokens": max(chosen["min_length"] - 1, 0) or None,
        }
        chosen |= {"max_length": None, "min_length": None, "forced_bos_token_id": None}
    model.generation_config.update(**chosen)
    return dataclasses.replace(search_of(model), seed=3 if settings.get("do_sample") else None)


def written(engine, model, search, sources=SOURCES, precision="fp32"):
    return engine.load(model, search, precision=precision)(sources)


def writer(model, tokenizer, batch_size=32, data=None, has_lines=False):
    """A writer that has the model's own settings and ``generate``."""
    search = search_of(model)
    engine = Loaded("hf", "fp32", hf.load(model, search, precision="fp32"))
    return Writer(model, tokenizer, Shape.of(data or Data()), search, engine, Budget(documents=batch_size), has_lines)


def hf_texts(model, tokenizer, ids, batch_size=32):
    """The best text of each source, by the model's own settings and ``generate``."""
    return writer(model, tokenizer, batch_size).best(ids)


def texts_of_run(folder, documents):
    """The text of each document, by a finished run's model and ``generate``."""
    work = job(str(folder), overrides=["generation.engine=hf"], batch_size=32)
    found = writer_of(work, *load_model(work, device="cpu"))
    return found.best(found.ids(documents))


DOCUMENTS = [
    "The cat sat on the mat. It slept.",
    "Dogs ran.",
    "Nobody came to the café. Rain is expected in the north. Wind.",
    "A dog!",
    "Mats. Mats. Mats.",
    "Dr. Who left.",
]


def ids(texts=DOCUMENTS, **shape):
    tokenizer = tiny_tokenizers.ours()
    return sources(texts, tokenizer, Shape(**shape), separator_id(tokenizer, shape.get("separator", "auto")))


def real_model(architecture="bart"):
    torch.manual_seed(0)
    settings = Model(
        name="scratch",
        architecture=architecture,
        width=16,
        heads=2,
        encoder_layers=1,
        decoder_layers=1,
        feed_forward=16,
        dropout=0.5,
        init_std=0.5,
    )
    model = loading.from_scratch(settings, tiny_tokenizers.ours())
    loading.prepare_generation(model, Generation(num_beams=2, min_length=4, max_length=12))
    return model
