"""A BART with guidance: both attentions are those of plain Python, and without the first it is BART."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, BartConfig, BartForConditionalGeneration

import ngramloss as ng
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.recipe import Generation, Model
from ngramloss.search.engines import hf
from ngramloss.search.search import Options
from ngramloss_systems.guided_bart import GuidedBart, guided, load_guided


def bart(seed=0, **changes):
    settings = dict(
        vocab_size=40,
        d_model=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_position_embeddings=32,
        dropout=0.1,
        attention_dropout=0.1,
        init_std=0.4,
        pad_token_id=1,
        forced_eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = BartForConditionalGeneration(BartConfig(**{**settings, **changes}))
    shake(model.named_parameters())
    return model.eval()


def shake(weights):
    """Give norms and biases values, too, or some mistakes would not show, and texts that depend on what is read."""
    for name, weight in weights:
        is_norm = weight.ndim == 1 and name.endswith("weight")
        nn.init.normal_(weight, mean=float(is_norm), std=0.9 if weight.ndim > 1 else 0.2)


def with_guidance(seed=0, **changes):
    model = guided(bart(seed, **changes))
    torch.manual_seed(seed + 1)
    shake((name, weight) for name, weight in model.named_parameters() if "guidance" in name)
    return model.eval()


def ids(rows, length, seed=0):
    return torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(rows=3):
    """Documents and guidance of different lengths."""
    document, guidance = ids(rows, 7, 1), ids(rows, 5, 2)
    seen, guide = torch.ones_like(document), torch.ones_like(guidance)
    seen[1, 4:], guide[0, 2:] = 0, 0
    return {
        "input_ids": document.masked_fill(seen == 0, 1),
        "attention_mask": seen,
        "guidance_input_ids": guidance.masked_fill(guide == 0, 1),
        "guidance_attention_mask": guide,
    }


# The definition, one row and one head at a time


def slow_attention(attention, heads, hidden, states, allowed):
    """Attention of every position of ``hidden`` [T, D] to those of ``states`` [S, D] that are allowed, in loops."""
    queries, keys, values = attention.q_proj(hidden), attention.k_proj(states), attention.v_proj(states)
    size, rows = hidden.shape[1] // heads, []
    for position in range(len(hidden)):
        pieces = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            places = [place for place in range(len(states)) if allowed(position, place)]
            scores = [float(queries[position, part] @ keys[place, part]) / math.sqrt(size) for place in places]
            shares = [math.exp(score - max(scores)) for score in scores]
            pieces.append(sum(s / sum(shares) * values[p, part] for s, p in zip(shares, places, strict=True)))
        rows.append(torch.cat(pieces))
    return attention.out_proj(torch.stack(rows))


def slow_feed_forward(layer, hidden):
    wide = layer.fc1(hidden)
    gelu = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    return layer.final_layer_norm(hidden + layer.fc2(gelu))


def slow_embedding(part, tokens):
    places = torch.arange(len(tokens)) + 2
    return part.layernorm_embedding(part.embed_tokens.weight[tokens] + part.embed_positions.weight[places])


def slow_encoder(encoder, layers, tokens):
    hidden = slow_embedding(encoder, tokens)
    for layer in layers:
        found = slow_attention(layer.self_attn, 2, hidden, hidden, lambda *_: True)
        hidden = slow_feed_forward(layer, layer.self_attn_layer_norm(hidden + found))
    return hidden


def slow_logits(model, document, guidance, inputs):
    """The logits of one text: lists of ids without padding → [T, V]."""
    encoder, decoder = model.model.encoder, model.model.decoder
    read = slow_encoder(encoder, encoder.layers, document)
    guide = slow_encoder(encoder, [*encoder.layers[:-1], model.guidance_layer], guidance)
    hidden = slow_embedding(decoder, inputs)
    for layer in decoder.layers:
        found = slow_attention(layer.self_attn, 2, hidden, hidden, lambda at, place: place <= at)
        hidden = layer.self_attn_layer_norm(hidden + found)
        found = slow_attention(layer.guidance_attn, 2, hidden, guide, lambda *_: True)
        hidden = layer.guidance_attn_layer_norm(hidden + found)
        found = slow_attention(layer.encoder_attn, 2, hidden, read, lambda *_: True)
        hidden = slow_feed_forward(layer, layer.encoder_attn_layer_norm(hidden + found))
    return hidden @ model.lm_head.weight.T + model.final_logits_bias[0]


@torch.no_grad()
def test_the_logits_are_those_of_plain_python_whatever_the_padding():
    model, given, inputs = with_guidance().double(), batch(), ids(3, 4, 3)
    logits = model(**given, decoder_input_ids=inputs).logits
    for row in range(3):
        document = given["input_ids"][row][given["attention_mask"][row] == 1]
        guidance = given["guidance_input_ids"][row][given["guidance_attention_mask"][row] == 1]
        expected = slow_logits(model, document, guidance, inputs[row])
        torch.testing.assert_close(logits[row], expected)


@torch.no_grad()
def test_without_the_guidance_s_attention_it_is_bart():
    plain, given, inputs = bart(), batch(), ids(3, 4, 3)
    model = guided(plain)
    for layer in model.model.decoder.layers:
        nn.init.zeros_(layer.guidance_attn.out_proj.weight)
        nn.init.zeros_(layer.guidance_attn.out_proj.bias)
        layer.guidance_attn_layer_norm = nn.Identity()
    expected = plain(input_ids=given["input_ids"], attention_mask=given["attention_mask"], decoder_input_ids=inputs)
    assert torch.equal(model.eval()(**given, decoder_input_ids=inputs).logits, expected.logits)


def test_it_begins_as_in_the_authors_code():
    """The top layer of the encoder is copied for the guidance; the attention to the guidance is new."""
    plain = bart()
    torch.manual_seed(5)
    model = guided(plain)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    top = plain.model.encoder.layers[-1].state_dict()
    assert all(torch.equal(weight, top[name]) for name, weight in model.guidance_layer.state_dict().items())
    assert model.guidance_layer.fc1.weight is not model.model.encoder.layers[-1].fc1.weight
    for layer in model.model.decoder.layers:
        own = layer.guidance_attn.k_proj.weight
        assert not torch.allclose(own, layer.encoder_attn.k_proj.weight)
        assert own.std().item() == pytest.approx(0.4, rel=0.3), "config.init_std"
        assert (layer.guidance_attn_layer_norm.weight == 1).all()
    assert model.generation_config is plain.generation_config
    copies = guided(plain, copying=True).model.decoder.layers[0].guidance_attn
    assert torch.equal(copies.v_proj.weight, torch.eye(8))
    assert torch.equal(copies.out_proj.weight, torch.eye(8))


def test_gradients_reach_both_texts_and_every_weight():
    model, given = with_guidance(), batch()
    model(**given, labels=ids(3, 4, 4)).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    for name in ("input_ids", "guidance_input_ids"):  # the embedding of a token that only this text has
        other = "guidance_input_ids" if name == "input_ids" else "input_ids"
        model.zero_grad()
        single = {**given, name: torch.full_like(given[name], 39), other: torch.full_like(given[other], 38)}
        model(**single, labels=torch.full((3, 4), 5)).loss.backward()
        assert model.model.encoder.embed_tokens.weight.grad[39].any()


@torch.no_grad()
def test_more_padding_of_the_guidance_changes_nothing():
    model, given, inputs = with_guidance(), batch(), ids(3, 4, 3)
    wider = {name: nn.functional.pad(value, (0, 3)) for name, value in given.items() if name.startswith("guidance")}
    expected = model(**given, decoder_input_ids=inputs).logits
    torch.testing.assert_close(model(**{**given, **wider}, decoder_input_ids=inputs).logits, expected)
    given["guidance_input_ids"] = given["guidance_input_ids"].flip(0)
    assert not torch.allclose(model(**given, decoder_input_ids=inputs).logits, expected), "the guidance counts"


@pytest.mark.parametrize("search", [{"num_beams": 1}, {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2}])
def test_a_batch_is_written_as_its_documents_one_by_one(search):
    model, given = with_guidance(), batch()
    options = {**search, "max_length": 12, "do_sample": False, "length_penalty": 2.0, "no_repeat_ngram_size": 2}
    written = model.generate(**given, **options)
    count = search.get("num_return_sequences", 1)
    for row in range(3):
        seen, guide = (given[name][row] == 1 for name in ("attention_mask", "guidance_attention_mask"))
        alone = {
            "input_ids": given["input_ids"][row][seen],
            "guidance_input_ids": given["guidance_input_ids"][row][guide],
        }
        texts = model.generate(**{name: value.unsqueeze(0) for name, value in alone.items()}, **options)
        for ours, theirs in zip(written[row * count : (row + 1) * count], texts, strict=True):
            assert ours[: len(theirs)].tolist() == theirs.tolist()
            assert (ours[len(theirs) :] == 1).all()
    assert len({tuple(text.tolist()) for text in written}) > 1


@pytest.mark.parametrize("options", [Options(), Options(texts=2, sample=True, seed=3)], ids=["beams", "samples"])
def test_the_engine_gives_each_source_its_own_guidance(options):
    model, given = with_guidance(), batch()
    search = hf.search_of(model, Generation(num_beams=2, max_length=9), options)
    write = hf.load(model, search, precision="fp32")
    documents = [ids[mask == 1].tolist() for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
    guidance = {name: value for name, value in given.items() if name.startswith("guidance")}
    texts = write(documents, **guidance)
    assert [len(group) for group in texts] == [options.texts] * 3
    alone = [
        write([documents[row]], **{name: value[row : row + 1] for name, value in guidance.items()})[0]
        for row in range(3)
    ]
    assert texts == alone
    assert write(documents, **{name: value.flip(0) for name, value in guidance.items()}) != texts


@torch.no_grad()
def test_a_greedy_text_is_that_of_whole_forward_passes():
    """Nothing that is kept from token to token is out of place."""
    model, given = with_guidance(), batch()
    written = model.generate(**given, num_beams=1, do_sample=False, max_length=9, eos_token_id=None)
    inputs = torch.full((3, 1), model.config.decoder_start_token_id)
    for _ in range(8):
        best = model(**given, decoder_input_ids=inputs, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        inputs = torch.cat([inputs, best], 1)
    assert written.tolist() == inputs.tolist()
    other = given["guidance_input_ids"].flip(0)
    assert model.generate(**{**given, "guidance_input_ids": other}, max_length=9).tolist() != written.tolist()


def test_the_objective_of_attach_is_that_of_its_logits():
    model, given, labels = with_guidance().double(), batch(), ids(3, 4, 4)
    labels[0, 3] = -100
    logits = model(**given, labels=labels).logits
    expected = ng.JointLoss("ce(smoothing=0.1) + matches(2)")(logits, labels)
    ng.attach(model, "ce(smoothing=0.1) + matches(2)")
    torch.testing.assert_close(model(**given, labels=labels).loss, expected)


@torch.no_grad()
def test_a_saved_model_is_loaded_again_and_never_as_a_plain_bart(tmp_path):
    model, given, inputs = with_guidance(), batch(), ids(3, 4, 3)
    model.save_pretrained(tmp_path)
    again = load_guided(Model(name=str(tmp_path)), None).eval()
    assert type(again) is GuidedBart
    assert torch.equal(again(**given, decoder_input_ids=inputs).logits, model(**given, decoder_input_ids=inputs).logits)
    assert AutoConfig.from_pretrained(tmp_path).model_type == loading.GUIDED != "bart"
    for load in (lambda named: loading.load(named, None), loading.load_config):
        with pytest.raises(UserError, match="is a guided BART, which needs a guidance beside the document"):
            load(Model(name=str(tmp_path)))
    attached = ng.attach(model, "ce")
    attached.save_pretrained(tmp_path / "attached")
    assert type(load_guided(Model(name=str(tmp_path / "attached")), None)) is GuidedBart


def test_missing_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    with_guidance().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("guidance_layer.fc1.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its weights lack 1 tensors, such as guidance_layer.fc1.weight"):
        load_guided(Model(name=str(tmp_path)), None)


def test_what_is_missing_is_said():
    model, given = with_guidance(), batch()
    document = {name: given[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(UserError, match="reads a guidance beside the document: pass guidance_input_ids"):
        model(**document, labels=ids(3, 4, 4))
    with pytest.raises(UserError, match="reads a guidance beside the document: pass guidance_input_ids"):
        model.generate(**document)
    with pytest.raises(UserError, match="needs decoder_input_ids or labels"):
        model(**given)
    with pytest.raises(
        UserError, match=r"guidance needs a BART, such as facebook/bart-large, and model\.architecture is t5"
    ):
        load_guided(Model(name="scratch", architecture="t5"), None)
