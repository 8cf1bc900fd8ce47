"""Tiny random models of each family, with whatever their heads add to a plain product switched on."""

import torch
import transformers as hf

V, PAD, EOS, START = 13, 1, 2, 3  # few ids, so that predictions match

WIDTH = {"d_model": 16, "vocab_size": V, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": START}
BART = {
    **WIDTH,
    "bos_token_id": 0,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5 = {**WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
LLAMA = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
BERT = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert2bert():
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(
        hf.BertConfig(**BERT), hf.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    )
    config.pad_token_id, config.decoder_start_token_id, config.eos_token_id = PAD, START, EOS
    return hf.EncoderDecoderModel(config)


def t5gemma():
    part = {**LLAMA, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5, "layer_types": ["full_attention"]}
    module = hf.T5GemmaModuleConfig(**part)
    config = hf.T5GemmaConfig(encoder=module, decoder=module, vocab_size=V, dropout_rate=0.0, attention_dropout=0.0)
    config.decoder.bos_token_id = config.decoder.decoder_start_token_id = START
    return hf.T5GemmaForConditionalGeneration(config)


def prophetnet():
    config = hf.ProphetNetConfig(
        vocab_size=V,
        hidden_size=16,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        ngram=2,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        num_buckets=8,
        relative_max_distance=16,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=START,
    )
    return hf.ProphetNetForConditionalGeneration(config)


def led():
    sizes = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
    bart = {name: value for name, value in BART.items() if name != "max_position_embeddings"}
    return hf.LEDForConditionalGeneration(hf.LEDConfig(**bart, **sizes, attention_window=4))


ENCODER_DECODER = {
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**BART)),
    "pegasus": lambda: hf.PegasusForConditionalGeneration(hf.PegasusConfig(**BART)),
    "pegasus_x": lambda: hf.PegasusXForConditionalGeneration(
        hf.PegasusXConfig(**BART, num_global_tokens=2, block_size=4)
    ),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**BART, scale_embedding=True)),
    "m2m_100": lambda: hf.M2M100ForConditionalGeneration(hf.M2M100Config(**BART)),
    "led": led,
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**T5)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**T5)),
    "longt5": lambda: hf.LongT5ForConditionalGeneration(hf.LongT5Config(**T5, local_radius=3)),
    "prophetnet": prophetnet,
    "bert2bert": bert2bert,
    "t5gemma": t5gemma,
}
DECODER_ONLY = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=V,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**LLAMA, final_logit_softcapping=0.5, query_pre_attn_scalar=8, layer_types=["full_attention"])
    ),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**{k: v for k, v in LLAMA.items() if k != "head_dim"})),
    "granite": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(**{k: v for k, v in LLAMA.items() if k != "head_dim"}, logits_scaling=4.0)
    ),
}
PLAIN = {name: value for name, value in LLAMA.items() if name != "head_dim"}
GROUPED = {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Queries that share keys, in two layers."""
WINDOWED = {**GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {
    "grouped": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, attention_bias=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=6)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED)),
    "gemma2_sliding": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**WINDOWED, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=30.0)
    ),
    "gemma3_text": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**WINDOWED, query_pre_attn_scalar=8)),
    "qwen2_sliding": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**WINDOWED, use_sliding_window=True)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0])),
    "olmo": lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**PLAIN, clip_qkv=4.0)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**PLAIN)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**PLAIN, partial_rotary_factor=0.5)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**PLAIN)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{k: v for k, v in PLAIN.items() if k != "num_key_value_heads"}, rotary_pct=0.5)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=V,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=8,
            dropout=0.0,
            bos_token_id=0,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    ),
}
"""Further decoder-only models: kinds that need no test of their head, and settings of attention."""
FAMILIES = {**ENCODER_DECODER, **DECODER_ONLY}
TWO_LAYERS = {**LLAMA, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
SLIDING = {
    "mistral": lambda window: hf.MistralForCausalLM(
        hf.MistralConfig(**{k: v for k, v in TWO_LAYERS.items() if k != "layer_types"}, sliding_window=window)
    ),
    "gemma2": lambda window: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **TWO_LAYERS,
            sliding_window=window,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=0.5,
            final_logit_softcapping=0.5,
        )
    ),
    "gemma3": lambda window: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**TWO_LAYERS, sliding_window=window, query_pre_attn_scalar=8)
    ),
    "qwen2": lambda window: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**TWO_LAYERS, use_sliding_window=True, sliding_window=window, max_window_layers=0)
    ),
}
"""Decoder-only models whose positions see only so many before them, in one layer at least."""


def tiny(family, seed=0, dtype=torch.float32):
    """A model of a family, dropout off, its weights large enough that every part of the head shows in the loss."""
    return random_weights({**FAMILIES, **OTHERS}[family], seed, dtype)


def sliding(family, window=4, dtype=torch.float32):
    """A model whose positions see only so many before them."""
    return random_weights(lambda: SLIDING[family](window), 0, dtype)


def random_weights(make, seed, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("final_logits_bias"):
                    buffer.normal_()
    model.generation_config.update(max_length=None, max_new_tokens=6, do_sample=False)
    return model.to(dtype)


def batch(family, B=3, T=9, seed=0, equal=False):
    """Inputs with labels: a source and a target, or a prompt masked and its continuation."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, V, (B, 12), generator=generator)
    target = torch.randint(4, 8, (B, T), generator=generator)
    if not equal:
        target[0, T // 2 :] = -100
        target[1, 2:4] = -100
    mask = torch.ones_like(source)
    mask[-1, 9:] = 0
    if family in ENCODER_DECODER:
        return {"input_ids": source.where(mask.bool(), PAD), "attention_mask": mask, "labels": target}
    ids = torch.cat([source, target.where(target >= 0, PAD)], 1)
    labels = torch.cat([torch.full_like(source, -100), target], 1)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


TINY_MODEL = """\
[model]
name = "scratch"
width = 16
encoder_layers = 1
decoder_layers = 1
heads = 2
feed_forward = 32
vocabulary = 400
"""
"""The section of a recipe: a model from scratch that trains in a second."""
SHORT_TRAINING = """\
[train]
max_steps = 2
batch_size = 4
accumulate = 1
warmup_steps = 0
learning_rate = 1e-2
log_every = 1
eval_every = 1
save_every = 1
keep = 9
[generation]
num_beams = 1
max_length = 8
"""
"""Two steps, each of them logged, validated and saved."""
