"""pairs of premise and hypothesis → the probabilities that a classifier gives each pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from os.path import isdir
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics import pretrained
from ngramloss.metrics.registry import VITC
from ngramloss.metrics.scores import signature
from ngramloss.version import __version__, installed

Pair = tuple[str, str]
RELATIONS = ("entailment", "contradiction", "neutral")
"""The relations of a hypothesis to its premise, in the order of a row of ``probabilities``."""
PUBLISHED = {
    "vitc": (VITC, ("entailment", "contradiction", "neutral")),
    "mnli": ("roberta-large-mnli", ("contradiction", "neutral", "entailment")),
    "anli": ("ynie/roberta-large-snli_mnli_fever_anli_R1_R2_R3-nli", ("entailment", "neutral", "contradiction")),
}
"""Short name → hub id, and the meanings of its outputs in order, as SummaC's authors use them."""
WORDS = {
    "entailment": ("entailment", "entails", "entailed", "supports", "supported"),
    "contradiction": ("contradiction", "contradicts", "contradictory", "refutes", "refuted"),
    "neutral": ("neutral", "not enough info", "nei"),
}
"""Names of the relations in model configurations, in lower case."""
WINDOW = 64  # documents scored together: their pairs are sorted by length into batches
LONG = 1 << 14  # characters. If both texts of a pair are longer, they are shortened before they are tokenised


class Classifier(NamedTuple):
    """A model that reads two texts, and the columns of its outputs that are used, in order."""

    model: Any
    tokenizer: Any
    columns: tuple[int, ...]
    longest: int
    name: str
    metric: str
    files: str


def nli(
    name: str, *, metric: str, labels: Sequence[str] | None = None, longest: int = 500, device: str | None = None
) -> Classifier:
    """A model of natural language inference in fp32, its columns in the order of ``RELATIONS``.

    ``labels`` are the meanings of its outputs, by default those in ``PUBLISHED``, else those of the configuration. A
    pair has at most ``longest`` tokens, special ones too, and fewer if the model has fewer positions.
    """
    hub, known = _published_model(name)
    source = pretrained.find(hub, metric=metric)
    config = pretrained.load_config(source)
    columns = _columns(config, labels or known, source.name)
    model = pretrained.load_model(source, "AutoModelForSequenceClassification", config)
    return classifier(source, model, pretrained.load_tokenizer(source), columns, longest=longest, device=device)


def classifier(
    source: pretrained.Source, model: Any, tokenizer: Any, columns: tuple[int, ...], *, longest: int, device: str | None
) -> Classifier:
    """A classifier on its device, from a loaded model and tokenizer."""
    read = min(longest, pretrained.longest_input(model, tokenizer) or longest)
    model = pretrained.placed(model, device, source.metric)
    return Classifier(model, tokenizer, columns, read, source.name, source.metric, pretrained.files_hash(source))


def probabilities(
    classifier: Classifier,
    pairs: Sequence[Pair],
    *,
    batch_size: int,
    known: dict[Pair, tuple[float, ...]] | None = None,
) -> list[tuple[float, ...]]:
    """``softmax(logits)[columns]`` of each pair of premise and hypothesis, in order; ``known`` gets new ones.

    Pairs of similar length share a batch, which changes scores by about 1e-7. One longer than ``classifier.longest``
    loses tokens from the end of its longer text, one at a time.
    """
    import torch

    known = {} if known is None else known
    fresh = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    ids = _encode(classifier, fresh)
    order = sorted(range(len(fresh)), key=lambda index: -len(ids[index]["input_ids"]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = classifier.tokenizer.pad([ids[index] for index in indices], padding_side="right", return_tensors="pt")
        with torch.inference_mode(), pretrained.computing(classifier.metric, batch_size):
            logits = classifier.model(**batch.to(classifier.model.device)).logits  # [B, L]
            rows = logits.float().softmax(-1)[:, list(classifier.columns)].tolist()
        known.update((fresh[index], tuple(row)) for index, row in zip(indices, rows, strict=True))
    return [known[pair] for pair in pairs]


def by_document(
    judge: Classifier,
    documents: Iterable[Sequence[Pair]],
    *,
    metric: str,
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> Iterator[list[tuple[float, ...]]]:
    """The :func:`probabilities` of each document's pairs. Raises if one is not finite."""
    known: dict[Pair, tuple[float, ...]] = {}
    left = enumerate(documents)
    while window := list(islice(left, WINDOW)):
        probabilities(judge, [pair for _, pairs in window for pair in pairs], batch_size=batch_size, known=known)
        for number, pairs in window:
            rows = [known[pair] for pair in pairs]
            check_finite(rows, metric=metric, document=number)
            yield rows
        if progress:
            progress(len(window))


def check_finite(rows: Sequence[Sequence[float]], *, metric: str, document: int) -> None:
    """Raise if the model gave NaN or infinite values for a document, counted from 0."""
    if not all(isfinite(value) for row in rows for value in row):
        raise UserError(
            f"{metric}: the model gave NaN for document {document} (the first is 0). Its weights are damaged or "
            "overflow. Download them again."
        )


def judge_signature(
    metric: str, judge: Classifier, splitter: str, language: str, *, own: Mapping[str, Any], read: Mapping[str, Any]
) -> str:
    """The signature of a metric that judges sentences: ``own`` are its settings, ``read`` says what it reads."""
    named = {} if language == "auto" or splitter != "pysbd" else {"language": language}
    return signature(
        metric,
        model=judge.name,
        files=judge.files,
        **own,
        splitter=splitter,
        **named,
        **read,
        tokens=judge.longest,
        precision="fp32",
        transformers=installed("transformers"),
        version=__version__,
    )


def _published_model(name: str) -> tuple[str, tuple[str, ...] | None]:
    if name in PUBLISHED:
        return PUBLISHED[name]
    for hub, labels in PUBLISHED.values():
        if name == hub or (isdir(name) and Path(name).absolute().name == hub.rsplit("/", 1)[-1]):
            return name, labels
    return name, None


def _columns(config: Any, labels: Sequence[str] | None, name: str) -> tuple[int, ...]:
    outputs = named_outputs(config, WORDS) if labels is None else {label: at for at, label in enumerate(labels)}
    if set(outputs) != set(RELATIONS) or sorted(outputs.values()) != list(range(config.num_labels)):
        raise UserError(
            f"which outputs of {Path(name).name} mean {', '.join(RELATIONS)}? "
            + (f"It calls them {list(config.id2label.values())}" if labels is None else f"Got labels={list(labels)!r}")
            + f" and has {config.num_labels}. Give labels= those three words in the order of its outputs."
        )
    return tuple(outputs[relation] for relation in RELATIONS)


def named_outputs(config: Any, words: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Meaning → output, from the names in a configuration: ``id2label``, else ``label2id``."""
    for names in (
        {int(at): str(label) for at, label in (config.id2label or {}).items()},
        {int(at): str(label) for label, at in (config.label2id or {}).items()},
    ):
        lower = {at: label.lower().replace("_", " ").replace("-", " ").strip() for at, label in names.items()}
        outputs = {meaning: at for meaning, aliases in words.items() for at, label in lower.items() if label in aliases}
        if outputs:
            return outputs
    return {}


def _encode(classifier: Classifier, pairs: Sequence[Pair]) -> list[dict[str, list[int]]]:
    if not pairs:
        return []
    premises, hypotheses = zip(*(_shortened(classifier, pair) for pair in pairs), strict=True)
    # Requested explicitly: since transformers 5 ALBERT's tokenizer omits segments, and the model then assumes 0.
    segments = (getattr(classifier.model.config, "type_vocab_size", None) or 0) > 1
    encoded = classifier.tokenizer(
        list(premises),
        list(hypotheses),
        truncation="longest_first",
        max_length=classifier.longest,
        return_token_type_ids=segments,
    )
    pretrained.check_tokens(encoded["input_ids"], classifier.model, classifier.name)
    return [{name: encoded[name][index] for name in encoded} for index in range(len(pairs))]


def _shortened(classifier: Classifier, pair: Pair) -> list[str]:
    """Both texts, shortened if both are enormous: a tokenizer takes quadratic time to cut such a pair."""
    texts = [pretrained.readable(text) for text in pair]
    return texts if min(map(len, texts)) <= LONG else [_beginning(classifier, text) for text in texts]


def _beginning(classifier: Classifier, text: str) -> str:
    size = LONG
    while size < len(text):
        if len(classifier.tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > 2 * classifier.longest:
            break
        size *= 2
    return text[:size]
