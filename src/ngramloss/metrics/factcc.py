"""documents and summaries → FactCCX of each summary: how likely its sentences are correct, given the document."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ngramloss.data.sentences import split_many, splitting_notes
from ngramloss.errors import UserError
from ngramloss.metrics import pretrained
from ngramloss.metrics.nli import Classifier, by_document, classifier, judge_signature, named_outputs
from ngramloss.metrics.scores import Scores, check_lengths

LONGEST = 512  # the most tokens of a document and a sentence together
WORDS = {"correct": ("correct", "consistent"), "incorrect": ("incorrect", "inconsistent")}
"""Names of the two outputs in model configurations. The released one has none: there CORRECT is 0, INCORRECT 1."""
RENAMED = {"label_classifier.weight": "classifier.weight", "label_classifier.bias": "classifier.bias"}
"""Names of tensors in the released FactCCX checkpoint → their names in transformers."""
SPANS = tuple(f"{part}_{end}_classifier.weight" for part in ("ext", "aug") for end in ("start", "end"))
"""FactCCX's heads that point at spans. Scores do not need them."""


def factcc(
    documents: Sequence[str],
    predictions: Sequence[str],
    *,
    model: str,
    splitter: str = "pysbd",
    language: str = "auto",
    batch_size: int = 16,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """How far each summary's sentences are factually consistent with its document, as docs/metrics.md defines it.

    If both texts are longer than 256 tokens, which no real sentence is, the cut may differ from the released code by
    one token. An empty document is scored like any other.
    """
    check_lengths(documents=documents, predictions=predictions)
    judge = _judge(model, device)
    summaries = split_many(predictions, splitter, language=language)
    pairs = ([(text, sentence) for sentence in own] for text, own in zip(documents, summaries, strict=True))
    values: dict[str, list[float]] = {"factcc": [], "factcc_share": []}
    for rows in by_document(judge, pairs, metric="factcc", batch_size=batch_size, progress=progress):
        values["factcc"].append(_percent([correct for correct, _ in rows]))
        values["factcc_share"].append(_percent([float(correct >= incorrect) for correct, incorrect in rows]))
    return Scores(values, judge_signature("factcc", judge, splitter, language, own={}, read={}))


def notes(
    documents: Sequence[str], predictions: Sequence[str], *, splitter: str, language: str, **_: object
) -> list[str]:
    """Sentences about texts that are not split by the rules of their language."""
    return splitting_notes(predictions, splitter, language, "--set factcc.language")


def _percent(parts: Sequence[float]) -> float:
    return 100 * sum(parts) / len(parts) if parts else 0.0


def _judge(name: str, device: str | None) -> Classifier:
    source = pretrained.find(name, metric="factcc")
    config = pretrained.load_config(source, "BertConfig")
    if config.num_labels != 2:
        raise UserError(f"factcc: {source.name} has {config.num_labels} outputs; FactCC has 2, CORRECT and INCORRECT.")
    tokenizer = pretrained.load_tokenizer(source, "BertTokenizer")
    tensors = pretrained.load_state(source)
    state = {RENAMED.get(key, key): value for key, value in tensors.items() if key not in SPANS}
    model = pretrained.load_model(source, "BertForSequenceClassification", config, state=state)
    outputs = named_outputs(config, WORDS) or {"correct": 0, "incorrect": 1}
    columns = (outputs["correct"], 1 - outputs["correct"])
    return classifier(source, model, tokenizer, columns, longest=LONGEST, device=device)
