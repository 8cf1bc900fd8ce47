"""Damaged configurations and tokenizers of a model: loading and generating end in a sentence, or in texts."""

import copy
import functools
import json
import shutil
from random import Random

import pytest
import tiny_tokenizers
import torch

from ngramloss.errors import UserError
from ngramloss.generation.job import Job
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.models import loading
from ngramloss.recipe import Data, Generation, Model

pytestmark = pytest.mark.fuzz

ABSENT = object()
DAMAGES = [None, [], {}, "x", -1, 77, 0.5, [2, 3], True, ABSENT]
NOT_SAVED = {  # settings of generation that a saved model lacks, with their defaults
    "forced_eos_token_id": 2,
    "forced_bos_token_id": None,
    "num_beam_groups": 1,
    "bad_words_ids": [[5]],
    "min_new_tokens": None,
    "max_new_tokens": None,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "sequence_bias": None,
    "constraints": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "exponential_decay_length_penalty": None,
}


def places(content, path=(), depth=3):
    """The path of each value in JSON, not too deep."""
    keys = content if isinstance(content, dict) else range(min(len(content), 1)) if isinstance(content, list) else ()
    for key in list(keys)[:60] if depth else ():
        yield (*path, key)
        yield from places(content[key], (*path, key), depth - 1)


def damaged(content, path, value):
    content = copy.deepcopy(content)
    *outer, last = path
    inner = functools.reduce(lambda within, key: within[key], outer, content)
    if value is ABSENT:
        del inner[last]
    else:
        inner[last] = value
    return content


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    tokenizer = tiny_tokenizers.ours()
    sizes = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 16}
    model = loading.from_scratch(Model("scratch", **sizes), tokenizer)
    loading.prepare_generation(model, Generation(num_beams=2, max_length=10))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_tokenizer_that_lacks_its_special_tokens_is_refused(small_model, tmp_path):
    """The library panics in Rust, which is no Exception in Python."""
    folder = shutil.copytree(small_model, tmp_path / "copy")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="cannot load the tokenizer of"):
        loading.load_tokenizer(Model(name=str(folder)), list, "")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_damaged_file_of_a_model_is_an_error_that_is_told_or_does_not_matter(small_model, name, tmp_path):
    random, folder = Random(name), shutil.copytree(small_model, tmp_path / "copy")
    content = json.loads((folder / name).read_text()) | (NOT_SAVED if name == "generation_config.json" else {})
    chosen = [(path, value) for path in places(content) for value in random.sample(DAMAGES, 3)]
    refused = 0
    for path, value in random.sample(chosen, min(len(chosen), 120)):
        (folder / name).write_text(json.dumps(damaged(content, path, value)))
        try:
            data = Data(name="x", separator="none", max_source=20)
            work = Job("a run", Model(name=str(folder)), data, "test", None, None, 0, 1)
            writer = writer_of(work, *load_model(work, device="cpu"), engine=random.choice(["hf", "graph"]))
            writer.best(writer.ids(["a cat sat."]))
        except UserError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {path} = {value!r}: {type(error).__name__}: {error}")
    assert refused > 5
