"""predictions and references → how far our BERTScore and WMD differ from the packages bert-score and gensim.

    pip install bert-score gensim
    python studies/compare_metrics.py texts.jsonl --model models/minilm --layer 6 --vectors models/glove.6B.50d.bin

Each line of the file has a ``prediction`` and a ``reference``. The scripts in bases/ make models and vectors.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ngramloss.metrics.bertscore import bertscore
from ngramloss.metrics.wmd import wmd, words


def compare_bertscore(predictions: list[str], references: list[str], model: Path, layer: int) -> None:
    """Print the largest differences of precision, recall and F, of 100."""
    from bert_score import score

    ours = bertscore([[text] for text in references], predictions, model=str(model), layer=layer).values
    theirs = score(predictions, references, model_type=str(model), num_layers=layer)
    for name, values in zip(("bertscore_precision", "bertscore_recall", "bertscore"), theirs, strict=True):
        report(f"{model.name} layer {layer} {name}", ours[name], [100 * value for value in values.tolist()])


def compare_wmd(predictions: list[str], references: list[str], vectors: Path) -> None:
    """Print the largest differences on the same words, and gensim's mean on words split at spaces."""
    from gensim.models import KeyedVectors

    known = KeyedVectors.load_word2vec_format(vectors, binary=vectors.suffix == ".bin")
    pairs = list(zip(predictions, references, strict=True))
    for normalise in (True, False):
        ours = wmd([[text] for text in references], predictions, vectors=vectors, normalise=normalise).values["wmd"]
        theirs = [known.wmdistance(words(one), words(other), norm=normalise) for one, other in pairs]
        report(f"{vectors.name} wmd{' unit vectors' * normalise}", ours, theirs)
    spaced = [known.wmdistance(one.lower().split(), other.lower().split()) for one, other in pairs]
    print(f"gensim on words split at spaces: mean {sum(spaced) / len(spaced):.4f}")


def report(title: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Print the means and the largest difference of a document."""
    means = [sum(values) / len(values) for values in (ours, theirs)]
    largest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    print(f"{title}: means {means[0]:.4f} {means[1]:.4f}, largest difference {largest:.1e} of {len(ours)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="a JSONL file")
    parser.add_argument("--model", type=Path, help="an encoder's folder")
    parser.add_argument("--layer", type=int, help="its layer, counted from 1")
    parser.add_argument("--vectors", type=Path, help="a file of word vectors")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.texts.read_text().splitlines()]
    texts = [row["prediction"] for row in rows], [row["reference"] for row in rows]
    if given.model:
        compare_bertscore(*texts, given.model, given.layer)
    if given.vectors:
        compare_wmd(*texts, given.vectors)
