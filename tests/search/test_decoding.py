"""The kernels of the search in tensors against what PyTorch computes."""

import copy

import models
import pytest
import torch
import transformers
from lanes import few
from searches import SERVED, SOURCES, tiny, with_settings, written
from torch.nn.functional import scaled_dot_product_attention

from ngramloss.search import beams, decoders
from ngramloss.search.engines import graph, hf
from ngramloss.search.fused_layers import norm_of
from ngramloss.search.kernels import attention as decoding

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no products in bf16
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, HALF: {"atol": 2e-2, "rtol": 2e-2}}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("position", "d"), [(0, 16), (5, 8), (32, 16), (69, 20)])
def test_attention_to_texts_that_several_beams_wrote(position, d, biased, dtype):
    B, K, H, L = 2, 3, 2, 70
    queries, keys, values = (drawn(B, K, H * d, dtype=dtype, seed=seed) for seed in range(3))
    cached = tuple(drawn(B * K, H, L, d, dtype=dtype, seed=seed) for seed in (3, 4))
    before = [each.clone() for each in cached]
    origin = torch.randint(K, (B, K, L), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    bias = drawn(H, L, seed=6) if biased else None
    found = decoding.attend_to_text(
        queries, keys, values, cached, origin, torch.tensor(position, device=DEVICE), scale=0.3, bias=bias
    )
    for k in range(K):
        for b in range(B):
            rows = [[each[b * K + origin[b, k, t], :, t] for t in range(position)] for each in before]
            texts = [
                torch.stack([*row, new[b, k].view(H, d)], 1).float()
                for row, new in zip(rows, (keys, values), strict=True)
            ]  # [H, t, d]
            scores = torch.einsum("hd,htd->ht", queries[b, k].view(H, d).float(), texts[0]) * 0.3
            scores = scores if bias is None else scores + bias[:, : position + 1]
            expected = torch.einsum("ht,htd->hd", scores.softmax(-1), texts[1]).flatten()
            torch.testing.assert_close(found[b, k].float(), expected, **CLOSE[dtype])
    for cache, old, new in zip(cached, before, (keys, values), strict=True):
        old[:, :, position] = new.view(B * K, H, d)
        assert torch.equal(cache, old)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("K", "S", "d"), [(1, 7, 8), (6, 130, 16), (20, 64, 20), (70, 70, 16)])
@pytest.mark.parametrize("by_token", [False, True])
def test_attention_of_all_beams_to_their_source(K, S, d, dtype, by_token):
    B, H = 3, 2
    queries = drawn(B, K, H * d, dtype=dtype)
    keys, values = (drawn(B, H, S, d, dtype=dtype, seed=seed) for seed in (1, 2))
    if by_token:  # all heads of a token side by side
        keys, values = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values))
    lengths = torch.tensor([S, 1, S // 2], device=DEVICE)
    mask = (torch.arange(S, device=DEVICE) < lengths[:, None])[:, None, None]
    split = queries.view(B, K, H, d).transpose(1, 2).float()
    expected = (
        scaled_dot_product_attention(split, keys.float(), values.float(), attn_mask=mask, scale=0.4)
        .transpose(1, 2)
        .reshape(B, K, -1)
    )
    found = decoding.attend_to_source(queries, keys, values, lengths, scale=0.4)
    torch.testing.assert_close(found.float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("K", "G", "S", "position", "d", "softcap", "window"),
    [
        (1, 1, 7, 0, 8, None, None),
        (1, 2, 40, 3, 130, 1.5, None),
        (1, 2, 40, 33, 16, None, 4),
        (2, 3, 130, 33, 16, 2.0, 40),
        (2, 3, 130, 33, 16, None, 200),
        (3, 2, 64, 5, 20, None, 4),
        (34, 2, 3, 2, 16, None, None),
    ],
)
def test_attention_to_a_prompt_and_the_text_behind_it(K, G, S, position, d, softcap, window, dtype):
    """Prompts of different lengths, one of them empty, and queries that share keys, against one softmax over both."""
    B, H, L = 4, 2, 41
    queries, keys, values = (drawn(B, K, size * d, dtype=dtype, seed=seed) for seed, size in enumerate((H * G, H, H)))
    prompt = [drawn(B, H, S, d, dtype=dtype, seed=seed) for seed in (3, 4)]
    cached = tuple(drawn(B * K, H, L, d, dtype=dtype, seed=seed) for seed in (5, 6))
    before = [each.clone() for each in cached]
    origin = torch.randint(K, (B, K, L), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    lengths, here = torch.tensor([S, 0, 1, S // 2], device=DEVICE), torch.tensor(position, device=DEVICE)
    bounds = {"scale": 0.4, "softcap": softcap, "window": window}
    part = decoding.attend_to_prompt(queries, *prompt, lengths, here, **bounds)
    found = decoding.attend_to_text(queries, keys, values, cached, origin, here, prompt=part, **bounds)
    for b in range(B):
        for k in range(K):
            rows = [
                [*whole[b, :, : lengths[b]].unbind(1)]
                + [old[b * K + origin[b, k, t], :, t] for t in range(position)]
                + [new[b, k].view(H, d)]
                for whole, old, new in zip(prompt, before, (keys, values), strict=True)
            ]
            seen = [torch.stack(row[-window:] if window else row, 1).float() for row in rows]  # [H, t, d] each
            scores = torch.einsum("hgd,htd->hgt", queries[b, k].view(H, G, d).float(), seen[0]) * 0.4
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            expected = torch.einsum("hgt,htd->hgd", scores.softmax(-1), seen[1]).flatten()
            torch.testing.assert_close(found[b, k].float(), expected, **CLOSE[dtype])
    for cache, old, new in zip(cached, before, (keys, values), strict=True):
        old[:, :, position] = new.view(B * K, H, d)
        assert torch.equal(cache, old)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", ["llama", "t5", "layer", "layer_without_bias"])
def test_norms_are_those_of_transformers(kind, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    makers = {"llama": LlamaRMSNorm, "t5": T5LayerNorm, "layer": torch.nn.LayerNorm}
    own = makers[kind](40, eps=1e-5) if kind in makers else torch.nn.LayerNorm(40, bias=False)
    for seed, parameter in enumerate(own.parameters()):
        parameter.data = drawn(40, seed=seed)
    own = own.to(DEVICE, dtype)
    for shape in ((3, 5, 40), (2, 3, 4, 40)):
        hidden, part = drawn(*shape, dtype=dtype) + 2, drawn(*shape, dtype=dtype, seed=1)
        torch.testing.assert_close(decoding.norm(hidden, norm_of(own)), own(hidden), **CLOSE[dtype])
        for other in (part, part.flatten(0, -2)[:1], part.transpose(0, 1).contiguous().transpose(0, 1)):
            total, normed = decoding.added_norm(hidden, other, norm_of(own))
            assert torch.equal(total, hidden + other)
            torch.testing.assert_close(normed, own(hidden + other), **CLOSE[dtype])
            assert torch.equal(decoding.norm(hidden, norm_of(own), part=other), normed)


@pytest.mark.parametrize("dtype", CLOSE)
def test_gates_are_those_of_pytorch(dtype):
    both = drawn(2, 3, 2 * 1100, dtype=dtype) * 4
    gate, up = both.split(1100, -1)
    torch.testing.assert_close(decoding.gated(gate, up), torch.nn.functional.silu(gate) * up, **CLOSE[dtype])


@pytest.mark.parametrize(("K", "L", "position"), [(3, 70, 64), (6, 20, 0), (1, 5, 4)])
def test_beams_continue_others(K, L, position):
    generator = torch.Generator().manual_seed(0)
    own = torch.arange(K).view(1, -1, 1).expand(2, -1, L)
    origin = torch.randint(K, (2, K, L), generator=generator).where(torch.arange(L) <= position, own)
    parents = torch.randint(K, (2, K), generator=generator)
    expected = origin.gather(1, parents.unsqueeze(-1).expand_as(origin)).where(torch.arange(L) <= position, own)
    found = origin.to(DEVICE)
    decoding.reorder(found, parents.to(DEVICE), torch.tensor(position, device=DEVICE))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", CLOSE)
def test_rows_may_be_parts_of_longer_ones(dtype):
    """Queries, keys and values of one product."""
    B, K, H, G, S, L, d = 2, 3, 2, 2, 20, 8, 16
    rows = drawn(B, K, (G + 2) * H * d, dtype=dtype).split([G * H * d, H * d, H * d], -1)
    cached = [drawn(B * K, H, L, d, dtype=dtype, seed=seed) for seed in (1, 2)]
    prompt = [drawn(B, H, S, d, dtype=dtype, seed=seed) for seed in (3, 4)]
    origin, here = torch.zeros(B, K, L, dtype=torch.long, device=DEVICE), torch.tensor(5, device=DEVICE)
    lengths, angles = torch.tensor([S, 7], device=DEVICE), [drawn(B, K, d, dtype=dtype, seed=seed) for seed in (5, 6)]
    results = []
    for queries, keys, values in (rows, [each.contiguous() for each in rows]):
        decoding.rotate(queries, keys, *angles)
        part = decoding.attend_to_prompt(queries, *prompt, lengths, here, scale=0.4)
        caches = tuple(each.clone() for each in cached)
        found = decoding.attend_to_text(queries, keys, values, caches, origin, here, scale=0.4, prompt=part)
        results.append([found, *caches, decoding.attend_to_source(queries[..., : H * d], *prompt, lengths, scale=0.4)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("d", [8, 20])
@pytest.mark.parametrize("each", [True, False], ids=["positions of each row", "positions of all rows"])
def test_rotary_positions_are_those_of_transformers(d, dtype, each):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    B, K, heads = 2, 3, (6, 2)
    rows = [drawn(B, K, H * d, dtype=dtype, seed=H) for H in heads]
    cos, sin = (drawn(B if each else 1, K, d, dtype=dtype, seed=seed) for seed in (7, 8))
    split = [row.unflatten(-1, (-1, d)).transpose(1, 2) for row in rows]
    expected = [row.transpose(1, 2).flatten(2) for row in apply_rotary_pos_emb(*split, cos, sin)]
    decoding.rotate(*rows, cos, sin)
    torch.testing.assert_close(rows, expected, **CLOSE[dtype])


@pytest.fixture
def all_kernels(monkeypatch):
    """Let a search on a CPU use all kernels, in the interpreter."""
    for module in (beams, decoders):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


KERNEL_SEARCHES = [
    ("grouped", {"num_beams": 3, "no_repeat_ngram_size": 2}),
    ("qwen2_sliding", {}),
    ("gemma2_sliding", {"num_beams": 2}),
    ("gpt2", {}),
    ("bart", {"num_beams": 3, "no_repeat_ngram_size": 2}),
    ("t5", {"num_beams": 2, "min_length": 5, "forced_eos_token_id": 7}),
    ("mistral", {}),
    ("qwen3", {"num_beams": 2}),
    ("granite", {}),
    ("mbart", {}),
    ("m2m_100", {"bad_words_ids": [[1]]}),
    ("marian", {}),
    ("pegasus", {}),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu does it without the interpreter")
@pytest.mark.parametrize(("family", "changes"), few(KERNEL_SEARCHES[:6], KERNEL_SEARCHES))
def test_texts_with_all_kernels_are_those_of_hf(family, changes, all_kernels):
    model = tiny(family)
    search = with_settings(model, eos_token_id=7, decoder_start_token_id=7, max_length=8, **changes)
    assert written(graph, model, search, SOURCES[:3]) == written(hf, model, search, SOURCES[:3])


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu does it without the interpreter")
@pytest.mark.parametrize("family", ["bart", "grouped"])
def test_copies_of_weights_are_those_of_a_model_that_has_changed(family, all_kernels):
    model = copy.deepcopy(tiny(family))
    search = with_settings(model, eos_token_id=7, decoder_start_token_id=7, max_length=8, num_beams=2)
    write = graph.load(model, search, precision="fp32")
    before = write(SOURCES[:3])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name:
                parameter.mul_(-1.5)
    assert before != write(SOURCES[:3]) == written(hf, model, search, SOURCES[:3])


# Sources that are read by kernels


def read(model, rows):
    """A decoder that has read these sources."""
    B, S = len(rows), max(map(len, rows))
    decoder = decoders.DECODERS[model.config.model_type](
        model, sources=B, beams=2, source_length=S, text_length=3, head=decoders.padded_head(model),
        joined=decoders.joined(model),
    )  # fmt: skip
    ids, mask = torch.full((B, S), models.PAD), torch.zeros(B, S, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    decoder.read(ids.to(DEVICE), mask.to(DEVICE))
    return decoder


@torch.no_grad()
def own_states(model, row):
    """Keys and values of each layer, [H, S, d] each, by the model's own forward of this source alone."""
    ids, cache = torch.tensor([row], device=DEVICE), transformers.DynamicCache()
    if model.config.is_encoder_decoder:
        cache = model(input_ids=ids, decoder_input_ids=ids[:, :1]).past_key_values.cross_attention_cache
    else:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def differences(model, rows):
    """How far keys and values that kernels read are from the model's own: the largest, and the root mean square."""
    decoder, apart = read(model, rows), []
    for b, row in enumerate(rows):
        for index, states in enumerate(own_states(model, row)):
            for cache, own in zip((decoder.source_keys, decoder.source_values), states, strict=True):
                found = cache[index, b, :, : len(row)]
                assert found.shape == own.shape
                apart.append(((found - own).float() / own.float().square().mean().sqrt()).flatten())
    every = torch.cat(apart)
    return float(every.abs().max()), float(every.square().mean().sqrt())


RAGGED = [[5, 6, 7, 8, 2], [9], [12, 4, 4, 10, 11, 5, 6, 9, 12, 2, 3, 3, 7], [7, 2]]
ROWS = {"ragged": RAGGED, "without padding": [[5, 6, 7, 2], [9, 8, 4, 3]], "one token each": [[5], [9]]}


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu compares texts without the interpreter")
@pytest.mark.parametrize("family", SERVED)
def test_sources_read_by_kernels_are_those_of_the_models_own_forward(family, all_kernels):
    model = tiny(family)
    for rows in ROWS.values():
        assert differences(model, rows)[0] < 1e-4
    largest, mean = differences(copy.deepcopy(model).bfloat16(), RAGGED)
    assert mean < 0.05
    assert largest < 0.5


def deep(family):
    """An encoder-decoder of two layers each, with dropout that only a training may have."""
    more = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.5)
    config = models.tiny(family).config
    config.update({**more, "encoder_layers": 2, "decoder_layers": 3, "scale_embedding": True})
    return models.random_weights(lambda: type(models.tiny(family))(config), 0, torch.float32).eval()


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu compares texts without the interpreter")
@pytest.mark.parametrize("family", ["bart", "marian", "mbart", "pegasus", "m2m_100"])
def test_encoders_of_several_layers_are_read_by_kernels(family, all_kernels, monkeypatch):
    model, sums = deep(family), []
    norm = decoding.norm

    def counted(*given, part=None, **more):
        sums.append(part is not None)
        return norm(*given, part=part, **more)

    monkeypatch.setattr(decoding, "norm", counted)
    assert differences(model, RAGGED)[0] < 1e-4
    norms_first = family in ("mbart", "pegasus", "m2m_100")
    assert sum(sums) == (2 if norms_first else 4)  # sums that are part of a norm
    assert len(decoders.joined(model).products) == 5
    model.set_attn_implementation("eager")
    assert differences(model, RAGGED)[0] < 1e-4


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu compares texts without the interpreter")
def test_the_largest_numbers_of_fp16_are_bounded_as_in_transformers(all_kernels):
    model = copy.deepcopy(tiny("mbart")).half()
    (layer,) = model.get_encoder().layers
    with torch.no_grad():
        layer.fc2.bias.fill_(6e4)
        hidden = drawn(1, 3, 16, dtype=torch.float16) + 3e4
        own = layer(hidden, None)
        with decoders.replaced(decoders.fused_forwards(model.get_encoder(), decoders.Joined(), reads_sources=True)):
            found = layer(hidden, None)
    assert own.max() == torch.finfo(torch.float16).max - 1000
    torch.testing.assert_close(found, own, **CLOSE[HALF])


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu compares texts without the interpreter")
@pytest.mark.parametrize("family", ["bart", "grouped"])
def test_modules_are_as_before_when_reading_fails(family, all_kernels):
    model = copy.deepcopy(tiny(family))

    def fail(*given):
        raise ValueError("stop")

    name = "fc2" if family == "bart" else "down_proj"
    last = [module for path, module in model.named_modules() if path.endswith(name) and "decoder" not in path][-1]
    hook = last.register_forward_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        read(model, RAGGED)
    assert not any("forward" in vars(module) for module in model.modules())
    hook.remove()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    read(model, RAGGED)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu compares texts without the interpreter")
def test_adapters_read_sources_too(all_kernels):
    peft = pytest.importorskip("peft")
    for family, targets in (("bart", ["q_proj", "k_proj", "fc2"]), ("grouped", ["k_proj", "down_proj"])):
        model = copy.deepcopy(tiny(family))
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
        assert differences(model.eval(), RAGGED)[0] < 1e-4


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu does it without the interpreter")
@pytest.mark.parametrize("family", ["bart", "grouped"])
def test_sources_that_go_on_in_a_smaller_search_keep_their_keys(family, all_kernels):
    model = tiny(family)
    few, all_of_them = read(model, [RAGGED[2], RAGGED[1]]), read(model, RAGGED)
    few.take(all_of_them, torch.tensor([3, 0], device=DEVICE))
    for mine, theirs in ((few.source_keys, all_of_them.source_keys), (few.source_values, all_of_them.source_values)):
        assert torch.equal(mine, theirs[:, [3, 0]])
