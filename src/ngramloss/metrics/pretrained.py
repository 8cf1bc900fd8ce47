"""a model's name → its folder here, and what metrics read from it: tokenizer, weights on a device, fingerprint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from os.path import isdir
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics.scores import Absent, fingerprint

SAFE = ("*.json", "*.txt", "*.model", "*.safetensors")
PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Files of a repository on the hub. Pickled ones are fetched only where there are no others."""

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Files of weights. Where there are any of the first kind the second is not read."""

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
READ = ("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
"""Files beside the weights that change figures."""

LOCAL = {"local_files_only": True, "trust_remote_code": False}
PATIENCE = 5.0
"""Seconds that the hub has for its first answer. Where there is no network a name is not found at once."""


class Source(NamedTuple):
    """Where a model lies, as what it is signed, and the metric that reads it, as the command line calls it."""

    folder: Path
    name: str
    metric: str


def packages(metric: str) -> Any:
    """The package transformers, imported when it is wanted."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise Absent(f"{metric} needs the package {error.name}: pip install 'ngramloss[hf,metrics]'.") from None
    return transformers


def find(name: str, *, metric: str) -> Source:
    """A model's folder: the one named; else the hub's, from its cache where it lies there whole, or fetched.

    A model of the cache is taken as it is, so figures do not change because a repository did. The hub is asked once:
    where there is no network the answer comes in seconds.
    """
    packages(metric)
    name = str(name)
    if isdir(name):
        return Source(Path(name), Path(name).absolute().name, metric)
    folder = cached(name)
    if folder is None:
        try:
            folder = _fetch(name)
        except Exception as error:   # the hub's client has had other kinds of errors in each of its versions
            raise Absent(
                f"{metric} needs the model {name!r}: it is no folder here, the hub's cache does not hold it whole, and "
                f"it did not come from the hub ({first_line(error)}). {_pointing(metric)}"
            ) from error
    return Source(folder, name, metric)


def load_tokenizer(source: Source, kind: str = "AutoTokenizer") -> Any:
    """The tokenizer, by the class of transformers that reads it."""
    with reading(source.folder, source.metric):
        tokenizer = getattr(packages(source.metric), kind).from_pretrained(source.folder, **LOCAL)
    if tokenizer.vocab_size <= len(set(tokenizer.all_special_tokens)):   # what comes of a config alone
        raise Absent(
            f"{source.metric}: {source.folder} lacks its tokenizer's vocabulary (tokenizer.json or vocab.txt). Copy it "
            "there from the model that was fine-tuned; docs/metrics.md says which."
        )
    return tokenizer


def load_config(source: Source, kind: str = "AutoConfig") -> Any:
    """The configuration, by the class of transformers that reads it."""
    with reading(source.folder, source.metric):
        return getattr(packages(source.metric), kind).from_pretrained(source.folder, **LOCAL)


def load_model(
    source: Source, kind: str, config: Any, *, state: dict[str, Any] | None = None, needless: Sequence[str] = ()
) -> Any:
    """The model in fp32, without dropout, by the class of transformers that reads it; all its weights are read.

    Args:
        source: where it lies.
        kind: the class.
        config: as ``load_config`` gave it.
        state: its tensors, where the files do not have them under the class's names.
        needless: patterns of tensors that may be missing, since they change no figure.
    """
    with reading(source.folder, source.metric):
        model, report = getattr(packages(source.metric), kind).from_pretrained(
            source.folder if state is None else None, config=config, state_dict=state, dtype="float32",
            output_loading_info=True, **(LOCAL if state is None else {}),
        )
    lost = sorted(key for key in report["missing_keys"] if not any(fnmatch(key, pattern) for pattern in needless))
    if lost:
        raise UserError(
            f"{source.metric}: the weights in {source.folder} lack {len(lost)} tensors of {type(model).__name__}, "
            f"{lost[0]} first: these would be random, and the figures noise. Give a model that was trained for this "
            "metric, saved with save_pretrained."
        )
    return model


def load_state(source: Source) -> dict[str, Any]:
    """All tensors of a folder by name."""
    files = weight_files(source.folder)
    if not files:
        raise Absent(
            f"{source.metric}: {source.folder} holds neither model.safetensors nor pytorch_model.bin. docs/metrics.md "
            "says how to obtain one."
        )
    state: dict[str, Any] = {}
    for path in files:
        with reading(path, source.metric):
            state |= read_state(path)
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The tensors of a file, .safetensors or pickled by torch. Of a pickle nothing but tensors is let in."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError("it holds no tensors by name")
    return dict(state)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that are read."""
    return next((paths for pattern in WEIGHTS if (paths := sorted(folder.glob(pattern)))), [])


def files_hash(source: Source) -> str:
    """A hash of the files that can change a figure, for signatures. Others beside them do not count."""
    beside = {path for pattern in READ for path in source.folder.glob(pattern) if path.is_file()}
    return fingerprint([*beside, *weight_files(source.folder)])


def placed(model: Any, device: str | None, metric: str) -> Any:
    """The model on a device; None takes the first GPU, where there is one."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(chosen)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"{metric}: device {chosen!r} cannot be used ({first_line(error)}). Leave it out, or give the CPU: --set "
            f"{metric}.device=cpu, in Python device='cpu'."
        ) from error


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Tokens that positions are there for, or the tokenizer's own limit. None where neither knows any."""
    tables = [module for name, module in model.named_modules()
              if name.endswith(("position_embeddings", "embed_positions")) and hasattr(module, "num_embeddings")]
    # RoBERTa's positions begin after its padding's id, BART's after an offset.
    rows = [table.num_embeddings - (getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1)
            for table in tables] or [getattr(model.config, "max_position_embeddings", None)]
    limits = [limit for limit in (*rows, tokenizer.model_max_length) if limit and 0 < limit < 10**9]
    return min(limits, default=None)


def readable(text: str) -> str:
    """The text with a question mark for half a surrogate pair, which no tokenizer takes.

    >>> readable("a\\ud83d")
    'a?'
    """
    return text.encode("utf-8", "replace").decode()


def check_tokens(ids: Iterable[Iterable[int]], model: Any, name: str) -> None:
    """Raise if the tokenizer gives ids that the model has no embedding for."""
    rows = model.get_input_embeddings().num_embeddings
    if max((token for text in ids for token in text), default=0) >= rows:
        raise UserError(
            f"the tokenizer of {name} has tokens that its model lacks (it has {rows}); they are not of one model. Save "
            "both of one model with save_pretrained."
        )


@contextmanager
def computing(metric: str, batch_size: int) -> Iterator[None]:
    """Out of memory → a sentence with the way out."""
    import torch

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"{metric} ran out of memory with batch_size {batch_size}: give less (--set {metric}.batch_size="
            f"{max(1, batch_size // 4)}), shorter texts, or the device 'cpu'. ({first_line(error)}.)"
        ) from error


@contextmanager
def reading(path: Path, metric: str) -> Iterator[None]:
    """What goes wrong while a folder or a file is read → a sentence with its path. Nothing is printed."""
    try:
        with _quiet(packages(metric)):
            yield
    except OSError as error:
        raise Absent(
            f"{metric}: {path} lacks files of its model, or they are damaged ({first_line(error)}). docs/metrics.md "
            "says which it needs."
        ) from error
    except Exception as error:    # damaged files and foreign formats: anything may come of them
        raise UserError(f"{metric}: {path} cannot be loaded: {first_line(error)}.") from error


def first_line(error: BaseException) -> str:
    """What an error of another library says, as part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")[:300]


def _pointing(metric: str) -> str:
    return (
        "Give the path of a folder with config.json, model.safetensors and the tokenizer's files, or the name of a "
        f"model on the hub, where it can be reached: --set {metric}.model=FOLDER_OR_HUB_ID, in Python model=. "
        "docs/metrics.md says which."
    )


def cached(name: str) -> Path | None:
    """The hub's snapshot, if all is there. By its name even a cached model would be asked for on the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:   # a path, and there is nothing
        return None
    return Path(config).parent if isinstance(config, str) and _is_whole(Path(config).parent) else None


def _is_whole(folder: Path) -> bool:
    """Whether weights, all parts of them, and a vocabulary are there."""
    files = weight_files(folder)
    parts = {int(match[1]) for path in files if (match := re.search(r"-of-(\d+)$", path.stem))}
    return bool(files) and parts <= {len(files)} and any(any(folder.glob(pattern)) for pattern in VOCABULARIES)


def _fetch(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    listed = HfApi().model_info(name, timeout=PATIENCE).siblings or ()    # once; a download would try for 20 seconds
    safe = any(file.rfilename.endswith(".safetensors") for file in listed)
    return Path(snapshot_download(name, allow_patterns=[*SAFE, *(() if safe else PICKLED)]))


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the bar and the table of unused weights that loading prints: what matters of it is checked here."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
