"""documents and summaries → SummaC-ZS or SummaC-Conv of each summary: how far its document entails it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ngramloss.data.sentences import split_many, splitting_notes
from ngramloss.errors import UserError
from ngramloss.metrics import pretrained
from ngramloss.metrics.nli import by_document, judge_signature, nli
from ngramloss.metrics.scores import Absent, Scores, check_lengths, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

EDGES = (
    0.0, 0.01, 0.02, 0.03, 0.04, 0.07, 0.13, 0.37, 0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.955, 0.96, 0.965, 0.97, 0.975,
    0.98, 0.985, 0.99, 0.995, 1.0,
)  # fmt: skip
"""The edges of the bins of the published weights ("percentile"); a bin includes its lower edge, the last one both."""
SHORTEST = 11  # fewest characters of a sentence. Shorter sentences of documents and summaries are ignored
SUMMARY_SENTENCES = 10  # the most sentences of a summary that Conv reads
WEIGHTS = "summac_conv_vitc_sent_perc_e.bin"
SHAPES = {"mlp.weight": (1, len(EDGES) - 1), "mlp.bias": (1,), "layer_final.weight": (2, 3), "layer_final.bias": (2,)}
"""The tensors in the published file ``WEIGHTS`` of SummaC-Conv, and their shapes."""


class Conv(NamedTuple):
    """SummaC-Conv's own weights, in fp64."""

    weight: Tensor
    bias: Tensor
    final_weight: Tensor
    final_bias: Tensor


def summac(
    documents: Sequence[str],
    predictions: Sequence[str],
    *,
    model: str = "vitc",
    form: str = "conv",
    weights: Path | None = None,
    splitter: str = "pysbd",
    language: str = "auto",
    document_sentences: int = 100,
    contradiction: bool = True,
    labels: Sequence[str] | None = None,
    batch_size: int = 32,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """How consistent each summary is with its document, by Conv or ZS, as docs/metrics.md defines them.

    Of a summary Conv reads the first 10 sentences, ZS all. The package asks to cut only the premise of a pair, but its
    other arguments override that: the longer text is cut. As in the package, a text without sentences counts as one
    pair with probabilities of 0.
    """
    check_lengths(documents=documents, predictions=predictions)
    metric = f"summac_{form}"
    pretrained.packages("summac")
    import torch

    conv = _weights(weights) if form == "conv" else None
    judge = nli(model, metric="summac", labels=labels, device=device)
    sources = [split[:document_sentences] for split in _sentences(documents, splitter, language)]
    summaries = _sentences(predictions, splitter, language)
    pairs = (
        [(premise, hypothesis) for premise in source for hypothesis in summary]
        for source, summary in zip(sources, summaries, strict=True)
    )
    scores = []
    found = by_document(judge, pairs, metric=metric, batch_size=batch_size, progress=progress)
    for rows, summary in zip(found, summaries, strict=True):
        size = (-1, len(summary), 3) if rows else (1, 1, 3)  # one pair of probabilities 0 if there are none
        image = torch.tensor(rows or [(0.0, 0.0, 0.0)], dtype=torch.float64).view(size)
        scores.append(100 * (convolved(image, conv) if conv else zero_shot(image, contradiction=contradiction)))
    own = {"weights": fingerprint([Path(weights)])} if weights and conv else {"contradiction": contradiction}
    read = {"shortest": SHORTEST, "sentences": document_sentences}
    return Scores({metric: scores}, judge_signature(metric, judge, splitter, language, own=own, read=read))


def zero_shot(image: Tensor, *, contradiction: bool = True) -> float:
    """The mean over summary sentences of the best entailment minus the best contradiction; image [D, S, 3]."""
    highest = image.amax(0)  # [S, 3]
    against = highest[:, 1] if contradiction else 0.0
    return float((highest[:, 0] - against).mean())


def convolved(image: Tensor, conv: Conv) -> float:
    """The probability of consistency by SummaC-Conv, from the histograms of entailment, 0 to 1."""
    counts = histograms(image[..., 0])[:SUMMARY_SENTENCES].double()  # [S, bins]
    mean = (counts @ conv.weight.T + conv.bias).mean()
    logits = conv.final_weight @ mean.expand(3) + conv.final_bias  # [2]
    return float(logits.softmax(0)[1])


def histograms(entailment: Tensor) -> Tensor:
    """``numpy.histogram(entailment[:, j], bins=EDGES)[0]`` of document sentences, for every summary sentence j."""
    import torch

    inner = torch.tensor(EDGES[1:-1], dtype=torch.float64)
    bins = torch.bucketize(entailment.double().contiguous(), inner, right=True)  # [D, S]
    return torch.nn.functional.one_hot(bins, len(EDGES) - 1).sum(0)  # [S, bins]


def notes(
    documents: Sequence[str], predictions: Sequence[str], *, splitter: str, language: str, **_: object
) -> list[str]:
    """Sentences about texts that are not split by the rules of their language."""
    return splitting_notes([*documents, *predictions], splitter, language, "--set summac.language")


def _sentences(texts: Sequence[str], splitter: str, language: str) -> list[list[str]]:
    split = split_many(texts, splitter, language=language)
    return [[piece for piece in pieces if len(piece) >= SHORTEST] for pieces in split]


def _weights(path: Path | None) -> Conv:
    if path is None or not Path(path).is_file():
        raise Absent(
            f"summac_conv needs the weights that its authors released{f'; there is no file {path}' if path else ''}. "
            f"Download {WEIGHTS} from the repository tingofurro/summac on GitHub and give it with --set "
            "summac.weights=FILE (in Python weights=), or use the variant without weights: --set summac.form=zs."
        )
    with pretrained.reading(Path(path), "summac"):
        state = pretrained.read_state(Path(path))
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if shapes != SHAPES:
        raise UserError(f"{path} contains {shapes}; SummaC-Conv's weights are {SHAPES}.")
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise UserError(f"{path} contains NaN or infinite values: it is damaged. Download it again.")
    return Conv(*(state[name].double() for name in SHAPES))
