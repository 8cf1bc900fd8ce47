"""a GGUF file → a model's folder that `from_pretrained` reads."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as version

COMMON = "the words of a language"
"""Words that are a token each. transformers 5.17 reads Gemma's tokenizer so that it cuts them into letters."""


def write(source: str, file: str, folder: Path, config_class: Any, model_class: Any) -> None:
    """Write the model in bf16, and its tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=file)
    if len(tokenizer.tokenize(COMMON)) > 2 * len(COMMON.split()):
        raise SystemExit(
            f"transformers {version} reads the tokenizer of {file} wrongly: it cuts {COMMON!r} into "
            f"{len(tokenizer.tokenize(COMMON))} tokens. Use transformers 5.22 or newer."
        )
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # transformers does not save a model that it has read from a GGUF file, so the weights move into a new one.
    left_out = ("quantization_config", "_name_or_path", "_model_name_or_path")
    settings = {name: value for name, value in read.config.to_diff_dict().items() if name not in left_out}
    plain = model_class(config_class(**settings))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.to(torch.bfloat16).save_pretrained(folder)
    # transformers 5.17 sets it for GGUF files, ignores it in a vocabulary of this type, and warns about that.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)
