"""pairs of premise and hypothesis → what a classifier believes of each, by batches of like length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.metrics.scores import Absent, fingerprint

Pair = tuple[str, str]

RELATIONS = ("entailment", "contradiction", "neutral")
"""What a hypothesis may be to its premise; the order of a row of ``probabilities``."""

PUBLISHED = {
    "vitc": ("tals/albert-xlarge-vitaminc-mnli", ("entailment", "contradiction", "neutral")),
    "mnli": ("roberta-large-mnli", ("contradiction", "neutral", "entailment")),
    "anli": ("ynie/roberta-large-snli_mnli_fever_anli_R1_R2_R3-nli", ("entailment", "neutral", "contradiction")),
}
"""Short name → name on the hub, and what its outputs mean, in order, as SummaC's authors use them."""

WORDS = {
    "entailment": ("entailment", "entails", "entailed", "supports", "supported"),
    "contradiction": ("contradiction", "contradicts", "contradictory", "refutes", "refuted"),
    "neutral": ("neutral", "not enough info", "nei"),
}
"""How configurations call the relations, in small letters. The last two lists begin with FEVER's words."""

SAFE = ("*.json", "*.txt", "*.model", "*.safetensors")
PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Files of a repository on the hub. Pickled ones are fetched only where there are no others."""


class Classifier(NamedTuple):
    """A model that reads two texts, and which of its outputs are wanted, in which order."""

    model: Any
    tokenizer: Any
    columns: tuple[int, ...]
    longest: int
    name: str
    fingerprint: str


def nli(
    name: str, *, metric: str, labels: Sequence[str] | None = None, longest: int = 500, device: str | None = None
) -> Classifier:
    """A model of natural language inference in fp32, its columns in the order of ``RELATIONS``.

    What its outputs mean is taken from ``labels``; else, for a published name, a folder called like one included, from
    ``PUBLISHED``; else from the configuration's own names (``id2label``, then ``label2id``).

    Args:
        name: of ``PUBLISHED``, of a repository on the hub, or the path of a folder.
        metric: for whom, in what is said when the model is not there.
        labels: the outputs' meanings in order, words of ``RELATIONS``.
        longest: tokens of a pair, special ones included; SummaC's 500. A model with fewer positions reads fewer.
        device: None takes the first GPU, where there is one.
    """
    transformers = needed(metric)
    hub, known = _published(name)
    folder = local_folder(hub, metric)
    tokenizer = load_tokenizer(transformers.AutoTokenizer, folder, metric)
    with loading(folder, metric):
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="float32", output_loading_info=True
        )
    check_complete(report, folder, metric)
    columns = _columns(model.config, labels or known, hub)
    return classifier(model, tokenizer, columns, folder, name=hub, longest=longest, device=device)


def classifier(
    model: Any, tokenizer: Any, columns: tuple[int, ...], folder: Path, *, name: str, longest: int, device: str | None
) -> Classifier:
    """The parts put together, on the device and in evaluation mode."""
    import torch

    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"{folder.name}: the tokenizer has {len(tokenizer)} tokens, the model {rows}; they are not of one model."
        )
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.eval().to(chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {chosen!r} cannot be used ({_first_line(error)}). Give 'cpu', or leave device out."
        ) from error
    read = min(longest, tokenizer.model_max_length, _positions(model))
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".txt", ".model", ".safetensors", ".bin")]
    shown = folder.name if Path(name).is_dir() else name
    return Classifier(model, tokenizer, columns, read, shown, fingerprint(files))


def probabilities(
    classifier: Classifier, pairs: Sequence[Pair], *, batch_size: int,
    known: dict[Pair, tuple[float, ...]] | None = None,
) -> list[tuple[float, ...]]:
    """The probabilities of each pair's wanted outputs, ``softmax(logits)[columns]``, in the pairs' order.

    A pair that comes twice is computed once. Pairs of like length go together, padded after the text. A pair longer
    than ``classifier.longest`` loses tokens at the end of its longer text, one at a time, which is of the premise
    until it is as short as the hypothesis.

    Args:
        classifier: the model.
        pairs: premise and hypothesis; either may be empty.
        batch_size: pairs at a time. It changes figures only by rounding, 1e-7 or so.
        known: pairs that need not be computed. The new ones are added.
    """
    import torch

    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}.")
    known = {} if known is None else known
    fresh = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    ids = _encoded(classifier, fresh)
    order = sorted(range(len(fresh)), key=lambda place: -len(ids[place]["input_ids"]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        batch = classifier.tokenizer.pad([ids[place] for place in places], padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            logits = classifier.model(**batch.to(classifier.model.device)).logits           # [B, L]
            rows = logits.float().softmax(-1)[:, list(classifier.columns)].tolist()
        known.update((fresh[place], tuple(row)) for place, row in zip(places, rows, strict=True))
    return [known[pair] for pair in pairs]


def check_finite(rows: Sequence[Sequence[float]], *, metric: str, document: int) -> None:
    """Raise if the model gave anything but numbers for a document, counted from 0."""
    if not all(isfinite(value) for row in rows for value in row):
        raise ValueError(
            f"{metric}: the model gave NaN for document {document} (the first is 0). Its weights are damaged, or "
            "overflow; obtain them again."
        )


def needed(metric: str) -> Any:
    """The package transformers, imported when it is wanted."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise Absent(f"{metric} needs the package {error.name}: pip install 'ngramloss[hf,metrics]'.") from None
    return transformers


def local_folder(name: str, metric: str) -> Path:
    """The folder that holds a model: the one named, or the hub's, fetched unless it was before."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(SAFE)))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*SAFE, *PICKLED]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise Absent(
            f"{metric} needs the model {name!r}, which is no folder here and did not come from the hub "
            f"({_first_line(error)}). Give the path of a folder that holds config.json, the tokenizer's files and "
            "model.safetensors, as docs/metrics.md describes."
        ) from error
    return folder


def read_state(path: Path) -> dict[str, Any]:
    """The tensors of a file, .safetensors or pickled by torch. Of a pickle nothing but tensors is let in."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it holds no tensors by name")
    return dict(state)


def check_complete(report: Mapping[str, Any], folder: Path, metric: str) -> None:
    """Raise if some weights were not in the files: they would be random, and so would the scores."""
    if report["missing_keys"]:
        raise ValueError(
            f"{metric}: {folder.name} is no classifier of pairs; its files lack {sorted(report['missing_keys'])}."
        )


@contextmanager
def loading(folder: Path, metric: str) -> Iterator[None]:
    """What goes wrong while a model is read → a sentence with its folder."""
    try:
        yield
    except OSError as error:
        raise Absent(
            f"{metric}: {folder} lacks files of its model ({_first_line(error)}). docs/metrics.md says which it needs."
        ) from error
    except Exception as error:    # damaged files and foreign formats: anything may come of them
        raise ValueError(f"{metric}: {folder} cannot be loaded: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def load_tokenizer(kind: Any, folder: Path, metric: str) -> Any:
    """The tokenizer of a folder, by the class that reads it."""
    with loading(folder, metric):
        tokenizer = kind.from_pretrained(folder)
    if tokenizer.vocab_size <= len(set(tokenizer.all_special_tokens)):   # what comes of a config alone
        raise Absent(
            f"{metric}: {folder} lacks its tokenizer's vocabulary (tokenizer.json or vocab.txt). Copy it there from "
            "the model that was fine-tuned; docs/metrics.md says which."
        )
    return tokenizer


def _published(name: str) -> tuple[str, tuple[str, ...] | None]:
    if name in PUBLISHED:
        return PUBLISHED[name]
    for hub, labels in PUBLISHED.values():
        if name == hub or (Path(name).is_dir() and Path(name).resolve().name == hub.rsplit("/", 1)[-1]):
            return name, labels
    return name, None


def _columns(config: Any, labels: Sequence[str] | None, name: str) -> tuple[int, ...]:
    places = named_outputs(config, WORDS) if labels is None else {label: at for at, label in enumerate(labels)}
    if set(places) != set(RELATIONS) or sorted(places.values()) != list(range(config.num_labels)):
        raise ValueError(
            f"which outputs of {Path(name).name} mean {', '.join(RELATIONS)}? "
            + (f"It calls them {list(config.id2label.values())}" if labels is None else f"Got labels={list(labels)!r}")
            + f" and has {config.num_labels}. Give labels= those three words in the order of its outputs."
        )
    return tuple(places[relation] for relation in RELATIONS)


def named_outputs(config: Any, words: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The meanings that the configuration's own names of outputs give, by ``id2label``, else by ``label2id``."""
    for names in (
        {int(at): str(label) for at, label in (config.id2label or {}).items()},
        {int(at): str(label) for label, at in (config.label2id or {}).items()},
    ):
        heard = {at: label.lower().replace("_", " ").replace("-", " ").strip() for at, label in names.items()}
        found = {meaning: at for meaning, said in words.items() for at, label in heard.items() if label in said}
        if found:
            return found
    return {}


def _positions(model: Any) -> int:
    """Tokens that the model has positions for. RoBERTa's begin after its padding's id."""
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    skipped = getattr(table, "padding_idx", None)
    count = getattr(model.config, "max_position_embeddings", None)
    return 10**9 if not count else int(count) - (0 if skipped is None else int(skipped) + 1)


def _encoded(classifier: Classifier, pairs: Sequence[Pair]) -> list[dict[str, list[int]]]:
    if not pairs:
        return []
    premises, hypotheses = zip(*pairs, strict=True)
    # Asked for by name: since transformers 5 ALBERT's tokenizer leaves segments out; the model then takes them for 0.
    segments = (getattr(classifier.model.config, "type_vocab_size", None) or 0) > 1
    made = classifier.tokenizer(
        list(premises), list(hypotheses), truncation="longest_first", max_length=classifier.longest,
        return_token_type_ids=segments,
    )
    return [{name: made[name][place] for name in made} for place in range(len(pairs))]
