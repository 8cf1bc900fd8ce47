"""Decoders one token at a time: what a decoder-only model needs besides, and what is refused."""

import copy

import models
import pytest
import torch
import transformers
from searches import PROMPTED, SOURCES, tiny, with_settings, written
from torch.utils._python_dispatch import TorchDispatchMode

from ngramloss.errors import UserError
from ngramloss.search import engines
from ngramloss.search.decoders import CAUSAL, CausalDecoder, difference, padded_head
from ngramloss.search.engines import graph, hf
from ngramloss.search.engines.hf import search_of

PROMPTS = [[5, 6, 7, 8, 2], [9], [12, 4, 4, 10, 11, 5, 6, 9, 12, 2, 3, 3, 7], [7, 2], [4, 5, 2], [11, 8, 10, 2]]


def test_every_kind_has_a_tiny_model():
    assert {tiny(family).config.model_type for family in (*PROMPTED, "gemma2")} == set(CAUSAL)


@pytest.mark.parametrize("family", PROMPTED)
def test_log_probabilities_are_those_of_the_models_own_forward(family):
    """Beams stand where a model has positions, some of them continue others, and prompts have different lengths."""
    model, B, K, T = tiny(family), len(PROMPTS), 3, 9
    generator = torch.Generator().manual_seed(0)
    decoder = CausalDecoder(model, sources=B, beams=K, source_length=14, text_length=T, head=padded_head(model))
    ids, mask = torch.full((B, 14), models.PAD), torch.zeros(B, 14, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    texts: list = [[[] for _ in range(K)] for _ in PROMPTS]
    with torch.inference_mode():
        decoder.read(ids, mask)
        for position in range(T):
            tokens = torch.randint(0, models.V, (B, K), generator=generator)
            texts = [[[*texts[b][k], int(tokens[b, k])] for k in range(K)] for b in range(B)]
            found = decoder.logits(tokens, torch.tensor(position)).log_softmax(-1)
            for b, prompt in enumerate(PROMPTS):
                for k in range(K):
                    own = model(input_ids=torch.tensor([[*prompt, *texts[b][k]]])).logits[0, -1].log_softmax(-1)
                    torch.testing.assert_close(found[b, k], own, atol=1e-4, rtol=1e-4)
            parents = torch.randint(0, K, (B, K), generator=generator)
            decoder.reorder(parents, torch.tensor(position))
            texts = [[texts[b][parents[b, k]] for k in range(K)] for b in range(B)]


class NoHost(TorchDispatchMode):
    """Raise where the host reads a value or a size that only the device knows: no CUDA graph could be captured."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.name() not in (
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::masked_select",
            "aten::equal",
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", PROMPTED)
def test_a_token_asks_the_device_for_no_value(family):
    model = tiny(family)
    for changes in ({"num_beams": 3}, {}, {"do_sample": True}):
        search = with_settings(model, no_repeat_ngram_size=2, min_length=3, **changes)
        searcher = graph.Searcher(model, search, len(PROMPTS), 13)
        with torch.no_grad():
            searcher.begin(PROMPTS)
            with NoHost():
                searcher.token()
    with pytest.raises(AssertionError), NoHost():
        torch.ones(1).item()


@pytest.mark.parametrize("prompts", [[[5]], [[5], [7]], [[5], [7, 8]], PROMPTS], ids=["one", "ones", "two", "all"])
@pytest.mark.parametrize("changes", [{"num_beams": 3}, {}, {"do_sample": True, "num_return_sequences": 2}])
def test_prompts_of_any_length_get_the_texts_of_hf(prompts, changes):
    for family in ("grouped", "gpt2", "opt"):
        model = tiny(family)
        search = with_settings(model, eos_token_id=[7, 3], no_repeat_ngram_size=2, min_length=3, **changes)
        texts = written(graph, model, search, prompts)
        assert texts == written(hf, model, search, prompts)
        assert [[text[0] for text in rows] for rows in texts] == [[prompt[-1]] * search.texts for prompt in prompts]


def test_tokens_of_a_prompt_may_be_repeated_and_those_of_a_text_not():
    model = tiny("llama")
    search = with_settings(model, num_beams=2, no_repeat_ngram_size=1, max_length=7)
    texts = written(graph, model, search)
    assert texts == written(hf, model, search)
    assert all(len({*text[1:]}) == len(text) - 1 for (text,) in texts)
    assert any({*text[1:]} & {*source} for (text,), source in zip(texts, SOURCES, strict=True))


def test_adapters_in_training_are_part_of_the_model():
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(tiny("grouped"))
    before = written(graph, model, with_settings(model, num_beams=2))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    search = search_of(adapted)
    assert written(graph, adapted, search) == written(hf, adapted, search) != before


def test_the_attention_of_the_model_is_its_own_again():
    model = copy.deepcopy(tiny("llama"))
    before = model.config._attn_implementation
    written(graph, model, with_settings(model))
    assert model.config._attn_implementation == before
    decoder = CausalDecoder(model, sources=1, beams=1, source_length=1, text_length=2, head=padded_head(model))
    decoder.heads = 3
    with pytest.raises(RuntimeError):
        decoder.logits(torch.tensor([[3]]), torch.tensor(0))
    assert model.config._attn_implementation == before


# What is refused


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.GROUPED, **changes)).eval()


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rotary_positions_may_be_scaled(kind):
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaled = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16, **more}
    model = llama(rope_parameters=scaled)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    search = with_settings(model, num_beams=3, max_length=20)
    assert written(graph, model, search) == written(hf, model, search)


def test_rotary_positions_that_depend_on_the_batch_are_refused():
    model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    search = with_settings(model)
    (reason,) = graph.unsupported(model, search)
    assert reason == "with rope_type dynamic, positions depend on the longest text of a batch"
    with pytest.raises(UserError, match=r"cannot be used: with rope_type dynamic.* Use --engine hf"):
        engines.load("graph", model, search)
    config = models.OTHERS["gemma3_text"]().config
    assert not graph._rope_types(config) & graph.BY_LENGTH
    config.rope_parameters["sliding_attention"]["rope_type"] = "longrope"
    assert graph._rope_types(config) & graph.BY_LENGTH == {"longrope"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_new_tokens": None, "max_length": 30}, "count the tokens of prompts: there, name them max_new_tokens"),
        ({"min_new_tokens": None, "min_length": 4}, "count the tokens of prompts"),
        ({"forced_bos_token_id": 5}, "forced_bos_token_id concerns only prompts of one token"),
        ({"repetition_penalty": 1.2}, "it does not know repetition_penalty"),
    ],
)
def test_settings_that_depend_on_prompts_are_refused(changes, reason):
    model = copy.deepcopy(tiny("llama"))
    with_settings(model)
    assert not list(graph.unsupported(model, search_of(model)))
    model.generation_config.update(**changes)
    (only,) = graph.unsupported(model, search_of(model))
    assert reason in only


def test_without_lengths_a_text_has_as_many_tokens_whatever_its_prompt():
    model = copy.deepcopy(tiny("llama"))
    model.config.max_position_embeddings = 256
    with_settings(model, eos_token_id=None)
    model.generation_config.update(max_new_tokens=None)
    search = search_of(model)
    assert not list(graph.unsupported(model, search))
    texts = written(graph, model, search)
    assert texts == written(hf, model, search)
    assert {len(text) for (text,) in texts} == {129}


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_as_many_as_the_model_has(family):
    model = tiny(family)
    search = with_settings(model, max_length=12, eos_token_id=None)
    longest = [5, 6] * 27  # 54 tokens and 11 that are written, of which the last has no position
    assert written(graph, model, search, [longest[1:], [5]]) == written(hf, model, search, [longest[1:], [5]])
    searcher = graph.Searcher(model, search, 2, 128)  # as on a GPU, where the length is rounded up
    searcher.begin([longest, [5]])
    with pytest.raises(UserError, match=r"may need 65 positions, but the model has 64\. Lower data\.max_source"):
        searcher.begin([[*longest, 5], [5]])


def test_rounding_of_a_deep_model_is_not_taken_for_a_mistake_and_a_mistake_is_not_taken_for_rounding(monkeypatch):
    shape = transformers.LlamaConfig(
        vocab_size=3000, hidden_size=32, intermediate_size=64, num_hidden_layers=30, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = models.random_weights(lambda: transformers.LlamaForCausalLM(shape), 0, torch.bfloat16)
    largest = []
    monkeypatch.setattr(torch.Tensor, "square", lambda apart: largest.append(apart.abs().max()) or apart**2)
    assert difference(model) < 0.1 < largest[0]
    graph.load(model, with_settings(model), precision="bf16")
    real = CausalDecoder.read

    def read(self, *source):
        real(self, *source)
        self.source_lengths += 1  # positions of the text are wrong by one

    monkeypatch.setattr(CausalDecoder, "read", read)
    with pytest.raises(UserError, match=r"\(log-probabilities differ by"):
        graph.load(model, with_settings(model), precision="bf16")


def test_a_setting_of_the_model_that_attention_here_does_not_know_is_refused():
    """As any change would be that is not passed to the attention function."""
    model = copy.deepcopy(tiny("grouped"))
    assert difference(model) < 1e-4
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def other(hidden_states, *args, **options):
        if options.get("cached") is not None:
            hidden_states = hidden_states * 1.1
        return own(hidden_states, *args, **options)

    attention.forward = other
    with pytest.raises(
        UserError, match=r"LlamaForCausalLM computes its logits in a way that this engine does not know"
    ):
        graph.load(model, with_settings(model), precision="fp32")


@pytest.mark.parametrize(
    ("attention", "window"), [("Llama", None), ("Mistral", 30)], ids=["llama has none", "mistral reads its config"]
)
def test_fused_attention_has_the_window_of_the_model(attention, window, monkeypatch):
    from ngramloss.search import fused_layers
    from ngramloss.search.kernels import attention as decoding

    config = getattr(transformers, f"{attention}Config")(**models.LLAMA, sliding_window=30)
    layer = getattr(transformers, f"{attention}ForCausalLM")(config).model.layers[0].self_attn
    seen = {}

    class Cached:
        width = 8

        def attend(self, index, queries, keys, values, position, **options):
            seen.update(options)
            return queries

    monkeypatch.setattr(decoding, "rotate", lambda *rows: None, raising=False)
    fused_layers._attended(
        layer, fused_layers.Joined(), torch.zeros(1, 2, 16), position_embeddings=(), cached=Cached(), text_position=None
    )
    assert seen["window"] == window


def test_an_adapter_on_the_head_is_refused():
    peft = pytest.importorskip("peft")
    model = models.tiny("llama")
    search = search_of(model, max_new_tokens=4)
    assert not list(graph.unsupported(model, search))
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert list(graph.unsupported(model, search)) == ["the output head has an adapter: merge it first"]
