"""documents and summaries → SummaC-ZS or SummaC-Conv of each: how far the document's sentences entail the summary's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ngramloss.data.sentences import split_many
from ngramloss.errors import UserError
from ngramloss.metrics import pretrained
from ngramloss.metrics.nli import Classifier, Pair, check_finite, nli, probabilities
from ngramloss.metrics.scores import Absent, Scores, check_lengths, fingerprint, signature
from ngramloss.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

EDGES = (
    0.0, 0.01, 0.02, 0.03, 0.04, 0.07, 0.13, 0.37, 0.90, 0.91, 0.92, 0.93,
    0.94, 0.95, 0.955, 0.96, 0.965, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 1.0,
)
"""The bins that the published weights were trained with ("percentile"): each holds its lower edge, the last both."""

SHORTEST = 11
"""Characters of a sentence. Shorter ones are left out, of documents and summaries."""

SUMMARY_SENTENCES = 10
"""Conv looks at no more of a summary."""

WINDOW = 64
"""Documents at a time: pairs of like length are sought among theirs."""

WEIGHTS = "summac_conv_vitc_sent_perc_e.bin"
SHAPES = {
    "mlp.weight": (1, len(EDGES) - 1), "mlp.bias": (1,), "layer_final.weight": (2, 3), "layer_final.bias": (2,),
}
"""The published file of SummaC-Conv's own weights, and what it holds."""

FORMS = ("conv", "zs")


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
    document_sentences: int = 100,
    contradiction: bool = True,
    labels: Sequence[str] | None = None,
    batch_size: int = 32,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    r"""How consistent each summary is with its document (Laban et al., 2022), under ``summac_conv`` or ``summac_zs``.

    With :math:`e_{ij}` and :math:`c_{ij}` the probabilities that sentence i of the document entails or contradicts
    sentence j of the summary, of which there are S:

    .. math::
        \text{zs} = \frac{1}{S} \sum_j \left( \max_i e_{ij} - \max_i c_{ij} \right)
        \qquad
        \text{conv} = \operatorname{softmax}\Big( A \, [r, r, r] + a \Big)_1,\quad
        r = \frac{1}{S} \sum_j w \cdot \operatorname{histogram}_i(e_{ij}) + b

    * Conv is shown times 100, from 0 to 100. ZS is shown times 100 too, which is from −100 to 100.
    * As in the released package: sentences of 10 characters or fewer are left out; of a document the first 100 that
      remain are read; of a summary Conv reads the first 10, ZS all; a pair is cut to 500 tokens; histograms have the 23
      bins ``EDGES``. The package asks for truncation of the premise only, but its other arguments overrule that: the
      longer text is cut.
    * As there, a document or summary without sentences counts as one pair of which the model believes nothing: ZS is 0,
      and Conv what its weights make of a single entailment of 0. One word is such a summary.
    * Unlike there: sentences come from ``splitter``, not from NLTK's punkt; on a GPU the model runs in fp32, not fp16.
    * A probability within rounding of a bin's edge may change bins with the batch size or the device. Conv then moves
      by what one sentence weighs; nothing else does.

    Args:
        documents: the texts summarised.
        predictions: their summaries.
        model: ``vitc``, ``mnli``, ``anli``, a name on the hub, or a folder. The published weights fit ``vitc``.
        form: ``conv``, or ``zs``, which needs no weights.
        weights: for Conv, the published ``summac_conv_vitc_sent_perc_e.bin``, or .safetensors with the same names.
        splitter: see ``ngramloss.data.sentences``.
        document_sentences: how many of a document are read.
        contradiction: False leaves :math:`c_{ij}` out of ZS, which then is from 0 to 100. Conv has none.
        labels: the meanings of the model's outputs in order, where its configuration does not tell.
        batch_size: pairs of sentences at a time.
        device: None takes the first GPU, where there is one.
        progress: called with the number of documents done since the last call.
    """
    check_lengths(documents=documents, predictions=predictions)
    if form not in FORMS:
        raise UserError(f"unknown form of SummaC {form!r}; choose from {list(FORMS)}.")
    if document_sentences < 1:
        raise UserError(f"document_sentences must be 1 or more, got {document_sentences}.")
    metric = f"summac_{form}"
    transformers = pretrained.packages("summac")
    conv = _weights(weights) if form == "conv" else None
    judge = nli(model, metric="summac", labels=labels, device=device)
    sources = [split[:document_sentences] for split in _sentences(documents, splitter)]
    summaries = _sentences(predictions, splitter)
    images = _images(judge, sources, summaries, metric, batch_size, progress)
    figures = [convolved(image, conv) if conv else zero_shot(image, contradiction=contradiction) for image in images]
    own = {"weights": fingerprint([Path(weights)])} if weights and conv else {"contradiction": contradiction}
    signed = signature(
        metric, model=judge.name, files=judge.files, **own, splitter=splitter, shortest=SHORTEST,
        sentences=document_sentences, tokens=judge.longest, precision="fp32", transformers=transformers.__version__,
        version=__version__,
    )
    return Scores({metric: [100 * figure for figure in figures]}, signed)


def zero_shot(image: Tensor, *, contradiction: bool = True) -> float:
    """The mean over summary sentences of the best entailment, less the worst contradiction: −1 to 1.

    Args:
        image: probabilities in the order of ``RELATIONS``, [document sentences, summary sentences, 3].
        contradiction: whether to subtract it.
    """
    highest = image.amax(0)                                             # [S, 3]
    against = highest[:, 1] if contradiction else 0.0
    return float((highest[:, 0] - against).mean())


def convolved(image: Tensor, conv: Conv) -> float:
    """The probability of consistency that Conv's weights give to the histograms of entailment, 0 to 1."""
    counts = histograms(image[..., 0])[:SUMMARY_SENTENCES].double()     # [S, bins]
    mean = (counts @ conv.weight.T + conv.bias).mean()
    logits = conv.final_weight @ mean.expand(3) + conv.final_bias       # [2]
    return float(logits.softmax(0)[1])


def histograms(entailment: Tensor) -> Tensor:
    """How many document sentences fall into each bin of ``EDGES``, for each summary sentence.

    ``numpy.histogram(entailment[:, j], bins=EDGES)[0]``, for every j.

    Args:
        entailment: probabilities, [document sentences, summary sentences].
    """
    import torch

    inner = torch.tensor(EDGES[1:-1], dtype=torch.float64)
    bins = torch.bucketize(entailment.double().contiguous(), inner, right=True)   # [D, S]
    return torch.nn.functional.one_hot(bins, len(EDGES) - 1).sum(0)     # [S, bins]


def _sentences(texts: Sequence[str], splitter: str) -> list[list[str]]:
    return [[piece for piece in pieces if len(piece) >= SHORTEST] for pieces in split_many(texts, splitter)]


def _images(
    judge: Classifier, sources: Sequence[Sequence[str]], summaries: Sequence[Sequence[str]], metric: str,
    batch_size: int, progress: Callable[[int], None] | None,
) -> Iterator[Tensor]:
    """Probabilities of each document's pairs, [document sentences, summary sentences, 3], all 0 where there is none."""
    import torch

    known: dict[Pair, tuple[float, ...]] = {}
    for start in range(0, len(sources), WINDOW):
        both = list(zip(sources[start : start + WINDOW], summaries[start : start + WINDOW], strict=True))
        pairs = [[(premise, hypothesis) for premise in source for hypothesis in summary] for source, summary in both]
        probabilities(judge, [pair for some in pairs for pair in some], batch_size=batch_size, known=known)
        for index, (some, (source, summary)) in enumerate(zip(pairs, both, strict=True), start):
            rows = [known[pair] for pair in some]
            check_finite(rows, metric=metric, document=index)
            flat = torch.tensor(rows or [(0.0, 0.0, 0.0)], dtype=torch.float64)
            yield flat.view(len(source), len(summary), 3) if rows else flat.view(1, 1, 3)
        if progress:
            progress(len(both))


def _weights(path: Path | None) -> Conv:
    if path is None or not Path(path).is_file():
        raise Absent(
            f"summac_conv needs the weights that its authors released{f', and {path} is no file' if path else ''}. "
            f"Fetch {WEIGHTS} from the repository tingofurro/summac on GitHub and point to it with --set "
            "summac.weights=FILE, in Python weights=; or choose the form that needs none, --set summac.form=zs."
        )
    with pretrained.reading(Path(path), "summac"):
        state = pretrained.read_state(Path(path))
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if shapes != SHAPES:
        raise UserError(f"{path} holds {shapes}; SummaC-Conv's weights are {SHAPES}.")
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise UserError(f"{path} holds values that are not finite; it is damaged. Fetch it again.")
    return Conv(*(state[name].double() for name in SHAPES))
