"""references and predictions → BERTScore of each document, 0 to 100."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics import pretrained
from ngramloss.metrics.scores import Scores, check_lengths, reference_count, reference_facts, signature
from ngramloss.version import __version__, installed

if TYPE_CHECKING:
    from torch import Tensor

# The layers that BERTScore's authors chose by agreement with human judgements, by the last part of a model's name.
_BY_LAYER = {
    5: "distilbert-base-multilingual-cased distilbert-base-uncased distilroberta-base",
    6: "bart-base t5-small",
    7: "longformer-base-4096",
    8: "albert-xxlarge-v2 bert-base-chinese mpnet-base scibert_scivocab_uncased",
    9: "albert-base-v2 bart-large-xsum bert-base-multilingual-cased bert-base-uncased deberta-base deberta-base-mnli "
    "deberta-v3-base electra-base-discriminator xlm-roberta-base",
    10: "bart-large bart-large-cnn roberta-base",
    11: "bart-large-mnli t5-base",
    12: "deberta-v3-large",
    13: "albert-xlarge-v2",
    14: "albert-large-v2 electra-large-discriminator longformer-large-4096",
    16: "deberta-large",
    17: "roberta-large xlm-roberta-large",
    18: "bert-large-uncased deberta-large-mnli deberta-xlarge",
    19: "roberta-large-mnli",
    23: "t5-large",
    40: "deberta-xlarge-mnli",
}
LAYERS = {name: layer for layer, names in _BY_LAYER.items() for name in names.split()}
FAMILIES = "Choose an encoder of the BERT, RoBERTa, DeBERTa, ALBERT, ELECTRA, BART or T5 families."
BLOCK = 1 << 16  # tokens whose states are held at a time: a quarter of a gigabyte at width 1024
Ids = tuple[int, ...]


class Match(NamedTuple):
    """The scores of one prediction and one reference. F comes first, so that the best match is the greatest tuple."""

    f: float
    precision: float
    recall: float


class Encoder(NamedTuple):
    """A model cut at a layer, its tokenizer and limits, and its source."""

    model: Any
    tokenizer: Any
    layer: int
    longest: int | None  # the most tokens it accepts, special ones included
    spaced: bool  # whether to put a space before a text, as byte-level vocabularies expect
    source: pretrained.Source


def bertscore(
    references: Sequence[Sequence[str]],
    predictions: Sequence[str],
    *,
    model: str,
    layer: int | None = None,
    batch_size: int = 64,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Precision, recall and F of each document, 0 to 100, as docs/metrics.md defines them.

    For a byte-level vocabulary such as RoBERTa's, one space is put before a text (``space``), as the package bert-score
    did when its numbers were published. With several references the package takes the best P, R and F, each from any.
    There, the zeros of padding can be a token's best match if all cosines are negative; and a text of two tokens,
    special ones included, is empty, so that with T5, which adds only one, texts of one token score 0 and empty texts do
    not.

    Scores do not depend on the order of the documents; batches change them by fp32 rounding (1e-6).
    """
    refs = reference_count(references)
    check_lengths(references=references, predictions=predictions)
    encoder = _encoder(model, layer, device)
    ids = _token_ids(encoder, {text for texts in references for text in texts} | set(predictions))
    documents = [
        (ids[prediction], [ids[text] for text in texts])
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    best = _best_matches(encoder, documents, batch_size, progress or (lambda _: None))
    return Scores(
        {
            "bertscore_precision": [100 * match.precision for match in best],
            "bertscore_recall": [100 * match.recall for match in best],
            "bertscore": [100 * match.f for match in best],
        },
        signature(
            "bertscore",
            model=encoder.source.name,
            files=pretrained.files_hash(encoder.source),
            layer=encoder.layer,
            idf=False,
            rescaled="no",
            **reference_facts(refs, "best-f"),
            cut=encoder.longest or "no",
            space=encoder.spaced,
            transformers=installed("transformers"),
            version=__version__,
        ),
    )


def _best_matches(
    encoder: Encoder, documents: Sequence[tuple[Ids, list[Ids]]], batch_size: int, progress: Callable[[int], None]
) -> list[Match]:
    """The best match of each document. A text is encoded once; its states are freed after the last use."""
    added = encoder.tokenizer.num_special_tokens_to_add()
    special = {encoder.tokenizer.cls_token_id, encoder.tokenizer.sep_token_id}
    nothing = Match(0.0, 0.0, 0.0)
    pairs = [
        [(prediction, reference) for reference in references if min(len(prediction), len(reference)) > added]
        for prediction, references in documents
    ]
    uses_left = Counter(text for of_one in pairs for pair in of_one for text in pair)
    states: dict[Ids, Tensor] = {}
    best = [nothing] * len(documents)
    for block in _blocks(documents):
        texts = {text for number in block for pair in pairs[number] for text in pair}
        states |= _states(encoder, texts - states.keys(), batch_size)
        for number in block:
            best[number] = max((_match(*pair, states, special) for pair in pairs[number]), default=nothing)
            uses_left.subtract(text for pair in pairs[number] for text in pair)
        states = {text: held for text, held in states.items() if uses_left[text]}
        progress(len(block))
    return best


def _blocks(documents: Sequence[tuple[Ids, list[Ids]]]) -> Iterator[list[int]]:
    """Indices of documents, sorted by length, in blocks of at most ``BLOCK`` tokens."""
    sizes = [len(prediction) + sum(map(len, references)) for prediction, references in documents]
    block: list[int] = []
    held = 0
    for number in sorted(range(len(documents)), key=lambda number: (sizes[number], documents[number])):
        if block and held + sizes[number] > BLOCK:
            yield block
            block, held = [], 0
        block.append(number)
        held += sizes[number]
    if block:
        yield block


def _states(encoder: Encoder, texts: Iterable[Ids], batch_size: int) -> dict[Ids, Tensor]:
    import torch

    ordered = sorted(texts, key=lambda ids: (len(ids), ids))
    pad = encoder.tokenizer.pad_token_id or 0  # RoBERTa counts positions by it; to others only the mask matters
    states = {}
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        longest = len(batch[-1])
        tokens = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in batch])  # [B, T]
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch])  # [B, T]
        with torch.inference_mode(), pretrained.computing("bertscore", batch_size):
            device = encoder.model.device
            hidden = encoder.model(tokens.to(device), attention_mask=mask.to(device)).last_hidden_state.cpu()
        for ids, rows in zip(batch, hidden, strict=True):
            states[ids] = rows[: len(ids)].clone()  # [T, D]
            if not states[ids].isfinite().all():
                text = encoder.tokenizer.decode(ids, skip_special_tokens=True)
                raise UserError(
                    f"bertscore's model returned NaN or infinite values for the text {text[:80]!r}. Its "
                    "weights are damaged, or this device computes it wrongly."
                )
    return states


def _match(prediction: Ids, reference: Ids, states: Mapping[Ids, Tensor], special: Collection[int]) -> Match:
    from torch.nn.functional import normalize

    x, y = (normalize(states[text].double(), dim=-1) for text in (prediction, reference))
    cosines = x @ y.T  # [T, U]
    precision, recall = _mean(cosines.amax(1), prediction, special), _mean(cosines.amax(0), reference, special)
    total = precision + recall
    return Match(2 * precision * recall / total if total else 0.0, precision, recall)


def _mean(values: Tensor, ids: Ids, special: Collection[int]) -> float:
    kept = [value for value, token in zip(values.tolist(), ids, strict=True) if token not in special]
    return math.fsum(kept) / len(kept) if kept else 0.0


def _token_ids(encoder: Encoder, texts: Iterable[str]) -> dict[str, Ids]:
    """Token ids of each text. Half a surrogate pair, which tokenizers reject, is read as a question mark."""
    ordered = sorted(texts)
    clean = [pretrained.readable(text.strip()) for text in ordered]
    read = [" " + text if encoder.spaced and text else text for text in clean]
    cut = {} if encoder.longest is None else {"truncation": True, "max_length": encoder.longest}
    sequences = [tuple(ids) for ids in encoder.tokenizer(read, **cut)["input_ids"]] if read else []
    pretrained.check_tokens(sequences, encoder.model, encoder.source.name)
    return dict(zip(ordered, sequences, strict=True))


def _encoder(name: str, layer: int | None, device: str | None) -> Encoder:
    source = pretrained.find(name, metric="bertscore")
    config = pretrained.load_config(source)
    layer = _chosen_layer(source.name, layer, config)  # before gigabytes are read
    tokenizer = pretrained.load_tokenizer(source)
    model = pretrained.load_model(source, "AutoModel", config, needless=("*pooler*", "decoder.*"))
    model = model.get_encoder() if hasattr(model, "encoder") and hasattr(model, "decoder") else model
    longest = pretrained.longest_input(model, tokenizer)
    _cut(model, layer)
    spaced = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)).__name__ == "ByteLevel"
    return Encoder(pretrained.placed(model, device, "bertscore"), tokenizer, layer, longest, spaced, source)


def _chosen_layer(name: str, layer: int | None, config: Any) -> int:
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None:
        raise UserError(f"{name!r} ({config.model_type}) does not say how many layers it has. {FAMILIES}")
    if layer is None:
        layer = LAYERS.get(Path(name).name)
        if layer is None:
            raise UserError(
                f"there is no default layer for {name!r}. Choose one from 1 to {layers} with --set "
                "bertscore.layer=N (in Python layer=N), and report it with the scores."
            )
    if not 1 <= layer <= layers:
        raise UserError(f"{name!r} has {layers} layers: `layer` must be from 1 to {layers}, got {layer}.")
    return layer


def _cut(model: Any, layer: int) -> None:
    """Keep only the first layers. A norm after the last layer, if any, then follows these, as in the package."""
    from torch.nn import ModuleList

    total = model.config.num_hidden_layers
    if model.config.model_type == "albert":  # one layer, applied repeatedly
        model.config.num_hidden_layers = layer
        return
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, ModuleList) and len(child) == total:
                setattr(module, name, child[:layer])
                return
    raise UserError(f"bertscore cannot find the layers of {type(model).__name__}. {FAMILIES}")
