"""Compiled layers: when ``train.compile = "auto"`` compiles, what it says, and that alike layers share their code."""

import os
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch

import ngramloss as ng
from ngramloss.data.batches import budget
from ngramloss.data.batches.plan import Grid
from ngramloss.data.batches.planned import ExampleLengths
from ngramloss.errors import UserError
from ngramloss.models.attached.unmasked import as_if_captured
from ngramloss.recipe import Train
from ngramloss.storage.files import user_cache
from ngramloss.training import compiling

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LONG = {"why_not_captured": "", "writes": False, "seconds": 3600.0}


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(compiling, "find_spec", lambda name: object())


# When


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("asked", [True, False])
def test_true_and_false_are_obeyed_without_a_word(device, asked, messages):
    short = {"why_not_captured": "train.capture is off", "writes": True, "seconds": 0.0}
    for facts in (LONG, short):
        assert compiling.decide(None, Train(compile=asked), device, **facts) is asked
    assert messages == []


def test_auto_compiles_a_long_captured_training_and_says_so(with_triton, messages):
    assert compiling.decide(models.tiny("llama"), Train(), GPU, **LONG)
    assert messages == [
        "layers are compiled before the first step, which takes about 10 s and saves about 60 minutes in this "
        "training. train.compile=false leaves it out."
    ]


def test_auto_wants_more_of_encoder_decoders_which_take_longer_to_compile(with_triton, messages):
    assert compiling.decide(models.tiny("bart"), Train(), GPU, **LONG)
    assert "takes about 45 s and saves about 60 minutes" in messages[0]
    assert not compiling.decide(models.tiny("bart"), Train(), GPU, **LONG | {"seconds": 80.0})
    assert "compiling takes about 45 s, and would save 80 s" in messages[1]
    assert compiling.decide(models.tiny("llama"), Train(), GPU, **LONG | {"seconds": 80.0})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seconds": 3.0}, "this training is short: compiling takes about 10 s, and would save 3 s"),
        ({"why_not_captured": "train.capture is off"}, "steps do not run as CUDA graphs, as train.capture is off"),
        ({"writes": True}, "the model generates during training, which was not tried with compiled layers"),
    ],
    ids=["short", "not captured", "writes"],
)
def test_auto_says_why_it_does_not_compile(with_triton, changes, why, messages):
    assert not compiling.decide(models.tiny("llama"), Train(), GPU, **LONG | changes)
    assert messages == [f"layers are not compiled: {why}. train.compile=true compiles them."]


def test_auto_does_not_compile_without_triton(monkeypatch, messages):
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    assert not compiling.decide(models.tiny("llama"), Train(), GPU, **LONG)
    assert "Triton is not installed" in messages[0]


def test_auto_is_silent_on_a_cpu_where_nobody_expects_it(messages):
    assert not compiling.decide(models.tiny("bart"), Train(), CPU, **LONG)
    assert messages == []


def lengths(source, target):
    sources, targets = np.full(9, source), np.full(9, target)
    return ExampleLengths(sources, targets, None, targets, np.ones(9, np.int64), sources)


def test_what_is_saved_is_what_was_measured():
    """SmolLM2's sizes, DialogSum's lengths, 32 rows: 21.7 ms a step."""
    width = SimpleNamespace(weight=torch.empty(1, 576))
    layers = torch.nn.Module()
    layers.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(30))
    layers.config, layers.get_input_embeddings = SimpleNamespace(is_encoder_decoder=False), lambda: width
    assert compiling.seconds_saved(layers, lengths(279, 30), rows=32, steps=1) == pytest.approx(0.0217, rel=0.05)
    assert compiling.seconds_saved(layers, lengths(279, 30), rows=64, steps=500) == pytest.approx(21.7, rel=0.05)
    assert compiling.seconds_saved(layers, lengths(279, 30), rows=32, steps=0) == 0


def test_an_encoder_reads_sources_and_a_decoder_targets():
    """BART-base's sizes, XSum's lengths, 32 rows: 5.6 ms a step."""
    width = SimpleNamespace(weight=torch.empty(1, 768))
    parts = [torch.nn.ModuleList(torch.nn.Identity() for _ in range(6)) for _ in range(2)]
    made = SimpleNamespace(
        get_encoder=lambda: parts[0], get_decoder=lambda: parts[1], get_input_embeddings=lambda: width
    )
    made.config = SimpleNamespace(is_encoder_decoder=True)
    assert compiling.seconds_saved(made, lengths(479, 31), rows=32, steps=1000) == pytest.approx(5.6, rel=0.05)
    assert compiling.seconds_saved(made, lengths(31, 31), rows=32, steps=1000) < 1


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("auto", "auto"), ('"auto"', "auto")])
def test_the_setting_is_true_false_or_auto(text, value):
    found = ng.recipe.load("demo", [f"train.compile={text}"]).train.compile
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["1", "yes", '"true"'])
def test_the_setting_is_nothing_else(text):
    with pytest.raises(UserError, match=r"train\.compile: must be true, false or auto, got"):
        ng.recipe.load("demo", [f"train.compile={text}"])


# How


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pieces"),
    [
        ("llama", 1),
        ("gpt2", 1),
        ("bart", 2),  # a layer of the encoder, and one of the decoder
        pytest.param("marian", 2, marks=pytest.mark.slow),
        pytest.param("mbart", 2, marks=pytest.mark.slow),
        pytest.param("t5", 4, marks=pytest.mark.slow),  # and the first of each, which has the positions
    ],
)
def test_alike_layers_of_any_lengths_share_one_piece_of_code(family, pieces, tmp_path, monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of earlier tests
    config = models.tiny(family).config
    for name in ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers"):
        if hasattr(config, name):
            setattr(config, name, 3)
    model = type(models.tiny(family))(config).train()
    made, compile_it = [], torch.nn.Module.compile

    def backend(module, inputs):
        made.append(module)
        return module.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: compile_it(self, backend=backend, **given))
    monkeypatch.setenv(compiling.CACHE, str(tmp_path))
    compiling.compile_layers(model)
    assert len(compiling.layers(model)) == (6 if config.is_encoder_decoder else 3)
    for rows, source, target in [(3, 24, 8), (4, 16, 24), (2, 32, 16), (6, 8, 8)]:
        ids, labels = torch.full((rows, source), 5), torch.full((rows, target), 6)
        given = {"input_ids": ids, "labels": labels if config.is_encoder_decoder else ids}
        if config.is_encoder_decoder:
            given["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.tensor([source - 1]), 0)
        if config.is_encoder_decoder and rows == 2:  # nothing is padded
            given["attention_mask"] = torch.ones_like(ids)
        with torch.autocast("cpu", torch.bfloat16), as_if_captured():
            model(**given, use_cache=False).loss.backward()
    assert len(made) == pieces
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_compiled_code_is_kept_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv(compiling.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path / "shared"))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: None)
    compiling.compile_layers(models.tiny("llama"))
    assert os.environ[compiling.CACHE] == str(tmp_path / "ngramloss" / "compiled") == str(compiling.code_folder())
    assert user_cache() == tmp_path / "ngramloss"
    monkeypatch.setenv(compiling.CACHE, "mine")
    compiling.compile_layers(models.tiny("llama"))
    assert os.environ[compiling.CACHE] == "mine"


def test_where_the_cache_cannot_be_written_pytorch_chooses(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(compiling.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: None)
    compiling.compile_layers(models.tiny("llama"))
    assert compiling.CACHE not in os.environ


def broken_compiler(module, inputs):
    raise RuntimeError("Failed to find\nC compiler")


def test_layers_that_cannot_be_compiled_run_as_they_are_and_it_says_why(messages):
    model = models.tiny("llama").train()
    inputs = {"input_ids": torch.full((2, 5), 6), "labels": torch.full((2, 5), 6)}
    expected = model(**inputs).loss
    for layer in compiling.layers(model):
        layer.compile(backend=broken_compiler)
    assert compiling.run_compiled(model, lambda: model(**inputs), asked=False) is False
    assert "layers are not compiled: " in messages[0]
    assert "Failed to find C compiler" in messages[0]
    assert messages[0].endswith("Training is the same, but slower.")
    torch.testing.assert_close(model(**inputs).loss, expected)


def test_a_compiler_that_fails_although_it_was_asked_for_is_an_error(messages):
    model = models.tiny("llama").train()
    for layer in compiling.layers(model):
        layer.compile(backend=broken_compiler)
    with pytest.raises(Exception, match="C compiler"):
        compiling.run_compiled(model, lambda: model(input_ids=torch.full((2, 5), 6)), asked=True)
    assert messages == []
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("width", "source", "target", "first"),
    [(10, 64, 64, (64, 56)), (10, 64, 32, (64, 32)), (64, 64, 64, (56, 48)), (56, 64, 64, (64, 48)), (8, 8, 8, (8, 8))],
)
def test_lengths_of_the_first_batch_differ_from_each_other_and_from_widths(width, source, target, first, monkeypatch):
    """The compiler would take them for the same number, and compile again for every other length."""
    sizes = []
    monkeypatch.setattr(budget, "_peak", lambda *_: 0)
    model = torch.nn.Linear(width, 3)
    budget.try_batch(model, None, Grid((16, source), (8, target)), lambda rows, size: sizes.append(size), CPU)
    assert sizes[0][:3] == (3, *first)


def test_dropout_of_a_step_is_that_of_the_documented_seed():
    from ngramloss.training.loop import seed_step

    seed_step(3, 5, 1)
    found = torch.rand(4)
    torch.manual_seed((3 * 1_000_003 + 5) * 4099 + 1)
    assert torch.equal(found, torch.rand(4))


def test_masks_before_a_capture_are_those_of_the_capture():
    """While a graph is captured, BART's decoder gets a mask of what comes before a token; otherwise it gets none."""
    model, seen = models.tiny("bart").train(), []
    model.model.decoder.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    ids = torch.full((2, 6), 5)
    plain = model(input_ids=ids, labels=ids).loss
    with as_if_captured():
        masked = model(input_ids=ids, labels=ids).loss
    model(input_ids=ids, labels=ids)
    assert [mask is None for mask in seen] == [True, False, True]
    torch.testing.assert_close(masked, plain)


def test_without_memory_auto_goes_on_uncompiled_and_true_is_an_error(messages):
    def fails():
        raise torch.OutOfMemoryError("3 rows of the longest examples")

    model = models.tiny("llama")
    assert not compiling.run_compiled(model, fails, asked=False)
    assert "OutOfMemoryError: 3 rows" in messages[0]
    with pytest.raises(torch.OutOfMemoryError):
        compiling.run_compiled(model, fails, asked=True)


def test_a_trained_model_is_left_uncompiled():
    model = models.tiny("llama")
    compiling.compile_layers(model)
    compiling.leave(model)
    assert all(layer._compiled_call_impl is None for layer in compiling.layers(model))
