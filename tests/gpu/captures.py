"""A small BART, a small Llama, and rows for them, large enough that steps on a GPU differ in shape."""

import models
import torch
import transformers as hf

OBJECTIVE = "ce + matches(2,3) + rewards(2) + bag(2)"


def bart(dropout=0.0, **changes):
    torch.manual_seed(0)
    settings = {
        **models.BART,
        "d_model": 64,
        "vocab_size": 301,
        "dropout": dropout,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        **changes,
    }
    return hf.BartForConditionalGeneration(hf.BartConfig(**settings))


def llama(**changes):
    torch.manual_seed(0)
    settings = {
        **models.LLAMA,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 301,
        "head_dim": 16,
        **changes,
    }
    return hf.LlamaForCausalLM(hf.LlamaConfig(**settings))


def rows(count, seed=1):
    source = torch.Generator().manual_seed(seed)

    def ids(least, most):
        length = int(torch.randint(least, most, (1,), generator=source))
        return torch.randint(4, 40, (length,), generator=source).tolist()

    return [{"input_ids": ids(3, 40), "labels": ids(2, 20)} for _ in range(count)]
