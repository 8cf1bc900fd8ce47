"""a model's name → its folder on this machine, its tokenizer, its weights on a device, and their hash."""

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
from ngramloss.output.console import quiet_loading

SAFE = ("*.json", "*.txt", "*.model", "*.safetensors")
PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Files to download from the hub. Pickled weights are downloaded only if there are no others."""
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Files of weights. If there are safetensors, pickled weights are not read."""
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
READ = ("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
"""Other files that can change scores."""
LOCAL = {"local_files_only": True, "trust_remote_code": False}
PATIENCE = 5.0  # seconds to wait for the hub's first answer


class Source(NamedTuple):
    """A model's folder, its name in signatures, and the name of the metric that uses it."""

    folder: Path
    name: str
    metric: str


def packages(metric: str) -> Any:
    """The package transformers, imported when it is needed."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise Absent(f"{metric} needs the package {error.name}: pip install 'ngramloss[hf,metrics]'.") from None
    return transformers


def find(name: str, *, metric: str) -> Source:
    """The folder of that name, else a whole copy in the hub's cache, else a download; the hub is asked once."""
    packages(metric)
    name = str(name)
    if isdir(name):
        return Source(Path(name), Path(name).absolute().name, metric)
    folder = cached(name)
    if folder is None:
        try:
            folder = _fetch(name)
        except Exception as error:  # the hub's client raises other errors in each version
            raise Absent(
                f"{metric} needs the model {name!r}: there is no folder of that name, the hub's cache has no complete "
                f"copy, and the download failed ({first_line(error)}). Give a folder with config.json, "
                "model.safetensors and the tokenizer's files, or the id of a model on the hub if it can be reached: "
                f"--set {metric}.model=FOLDER_OR_HUB_ID (in Python model=). ngramloss docs metrics says which fit."
            ) from error
    return Source(folder, name, metric)


def load_tokenizer(source: Source, kind: str = "AutoTokenizer") -> Any:
    """The tokenizer, loaded by this class of transformers."""
    with reading(source.folder, source.metric):
        tokenizer = getattr(packages(source.metric), kind).from_pretrained(source.folder, **LOCAL)
    if tokenizer.vocab_size <= len(set(tokenizer.all_special_tokens)):  # transformers made it from a config alone
        raise Absent(
            f"{source.metric}: {source.folder} lacks its tokenizer's vocabulary (tokenizer.json or vocab.txt). Copy it "
            "there from the model that was fine-tuned; ngramloss docs metrics says which."
        )
    return tokenizer


def load_config(source: Source, kind: str = "AutoConfig") -> Any:
    """The configuration, loaded by this class of transformers."""
    with reading(source.folder, source.metric):
        return getattr(packages(source.metric), kind).from_pretrained(source.folder, **LOCAL)


def load_model(
    source: Source, kind: str, config: Any, *, state: dict[str, Any] | None = None, needless: Sequence[str] = ()
) -> Any:
    """The model of a class ``kind`` in fp32, without dropout; raises for missing weights, except ``needless``."""
    with reading(source.folder, source.metric):
        model, report = getattr(packages(source.metric), kind).from_pretrained(
            source.folder if state is None else None,
            config=config,
            state_dict=state,
            dtype="float32",
            output_loading_info=True,
            **(LOCAL if state is None else {}),
        )
    lost = sorted(key for key in report["missing_keys"] if not any(fnmatch(key, pattern) for pattern in needless))
    if lost:
        raise UserError(
            f"{source.metric}: the weights in {source.folder} lack {len(lost)} tensors of {type(model).__name__}, "
            f"{lost[0]} first. They would be random, and the scores meaningless. Give a model that was trained for "
            "this metric, saved with save_pretrained."
        )
    return model


def load_state(source: Source) -> dict[str, Any]:
    """All tensors of a folder by name."""
    files = weight_files(source.folder)
    if not files:
        raise Absent(
            f"{source.metric}: {source.folder} has neither model.safetensors nor pytorch_model.bin. ngramloss docs "
            "metrics says how to obtain one."
        )
    state: dict[str, Any] = {}
    for path in files:
        with reading(path, source.metric):
            state |= read_state(path)
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The tensors of a .safetensors file or of a torch pickle. A pickle may contain only tensors."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError("it is not a dictionary of tensors")
    return dict(state)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights to read."""
    return next((paths for pattern in WEIGHTS if (paths := sorted(folder.glob(pattern)))), [])


def files_hash(source: Source) -> str:
    """A hash of the files that can change a score, for signatures. Other files do not count."""
    beside = {path for pattern in READ for path in source.folder.glob(pattern) if path.is_file()}
    return fingerprint([*beside, *weight_files(source.folder)])


def placed(model: Any, device: str | None, metric: str) -> Any:
    """The model on a device; None means the first GPU, if there is one."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(chosen)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"{metric}: device {chosen!r} cannot be used ({first_line(error)}). Leave it out, or use the CPU: --set "
            f"{metric}.device=cpu (in Python device='cpu')."
        ) from error


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """The most tokens of an input, by the model's positions and the tokenizer's limit. None if there is no limit."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith(("position_embeddings", "embed_positions")) and hasattr(module, "num_embeddings")
    ]
    # RoBERTa's positions start after the id of its padding, BART's after an offset.
    rows = [
        table.num_embeddings - (getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
    ] or [getattr(model.config, "max_position_embeddings", None)]
    limits = [limit for limit in (*rows, tokenizer.model_max_length) if limit and 0 < limit < 10**9]
    return min(limits, default=None)


def readable(text: str) -> str:
    """The text with a question mark for half a surrogate pair, which tokenizers reject."""
    return text.encode("utf-8", "replace").decode()


def check_tokens(ids: Iterable[Iterable[int]], model: Any, name: str) -> None:
    """Raise if the tokenizer gives ids for which the model has no embedding."""
    rows = model.get_input_embeddings().num_embeddings
    if max((token for text in ids for token in text), default=0) >= rows:
        raise UserError(
            f"the tokenizer of {name} has tokens that its model lacks (it has {rows}): they do not belong together. "
            "Save tokenizer and model of one source with save_pretrained."
        )


@contextmanager
def computing(metric: str, batch_size: int) -> Iterator[None]:
    """Turn an out-of-memory error into a message that says what to lower."""
    import torch

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"{metric} ran out of memory with batch_size {batch_size}: lower it (--set {metric}.batch_size="
            f"{max(1, batch_size // 4)}), shorten the texts, or use the device 'cpu'. ({first_line(error)}.)"
        ) from error


@contextmanager
def reading(path: Path, metric: str) -> Iterator[None]:
    """Turn an error in reading a folder or file into a message with its path. Loading prints nothing."""
    try:
        with quiet_loading():
            yield
    except OSError as error:
        raise Absent(
            f"{metric}: {path} lacks files of its model, or they are damaged ({first_line(error)}). ngramloss docs "
            "metrics says which it needs."
        ) from error
    except Exception as error:  # damaged files and other formats can raise anything
        raise UserError(f"{metric}: {path} cannot be loaded: {first_line(error)}.") from error


def first_line(error: BaseException) -> str:
    """The first line of another library's error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")[:300]


def cached(name: str) -> Path | None:
    """The model's folder in the hub's cache, if it is complete. Loading by name would ask the hub even then."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path that does not exist
        return None
    return Path(config).parent if isinstance(config, str) and _is_whole(Path(config).parent) else None


def _is_whole(folder: Path) -> bool:
    files = weight_files(folder)
    parts = {int(match[1]) for path in files if (match := re.search(r"-of-(\d+)$", path.stem))}
    return bool(files) and parts <= {len(files)} and any(any(folder.glob(pattern)) for pattern in VOCABULARIES)


def _fetch(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    listed = HfApi().model_info(name, timeout=PATIENCE).siblings or ()  # a download would retry for 20 seconds
    safe = any(file.rfilename.endswith(".safetensors") for file in listed)
    return Path(snapshot_download(name, allow_patterns=[*SAFE, *(() if safe else PICKLED)]))
