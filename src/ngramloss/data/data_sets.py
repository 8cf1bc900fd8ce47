"""the name of a data set and of a split → where its rows are: files, the hub or the built-in corpus."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ngramloss.data import rows as files
from ngramloss.data.rows import BadRow, RawRow
from ngramloss.errors import MissingFileError, UserError
from ngramloss.output import escape
from ngramloss.storage.files import inside

BUILT_IN = "newswire"


class Hub(NamedTuple):
    """A data set on the Hugging Face hub, with its columns if they are known."""

    id: str
    config: str | None = None
    source: str | None = None
    target: str | None = None

    def __str__(self) -> str:
        return self.id + (f":{self.config}" if self.config else "")


KNOWN = {
    "cnn_dailymail": Hub("abisee/cnn_dailymail", "3.0.0", "article", "highlights"),
    "xsum": Hub("EdinburghNLP/xsum", None, "document", "summary"),
    "samsum": Hub("knkarthick/samsum", None, "dialogue", "summary"),
    "dialogsum": Hub("knkarthick/dialogsum", None, "dialogue", "summary"),
    "multi30k": Hub("bentrevett/multi30k", None, "en", "de"),
}
ALIASES = {"cnndm": "cnn_dailymail", "cnn_dm": "cnn_dailymail", "cnn/dm": "cnn_dailymail"}
SPLIT_ALIASES = {"dev": "validation", "valid": "validation", "val": "validation"}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_SHARD = re.compile(r"(?P<split>.+)-(?P<index>\d{5})-of-(?P<of>\d{5})")


class Parallel(NamedTuple):
    """Files of plain lines that belong together, line by line: the column's name, which is the ending, → its file."""

    columns: dict[str, Path]

    @property
    def name(self) -> str:
        """The names of the files."""
        return " + ".join(path.name for path in self.columns.values())

    def rows(self) -> Iterator[RawRow | BadRow]:
        """The rows, or an error if the files do not have the same number of lines."""
        where = " + ".join(map(str, self.columns.values()))
        number = 0
        each = ((line for line, _ in files.lines(path)) for path in self.columns.values())
        for number, lines in enumerate(zip_longest(*each), 1):
            if None in lines:
                short = [path.name for path, line in zip(self.columns.values(), lines, strict=True) if line is None]
                raise UserError(
                    f"{where} do not have the same number of lines: {', '.join(short)} ends after line "
                    f"{number - 1}. Line n of one file must belong to line n of the others."
                )
            yield RawRow(where, number, dict(zip(self.columns, lines, strict=True)))


class Files(NamedTuple):
    """Local files for each split."""

    splits: dict[str, list[Path | Parallel]]


Origin = Files | Hub | str  # Local files, a data set on the hub, or the name of the built-in corpus


def origin(name: str) -> Origin:
    """Find a data set by its name. A known one is on the hub, even if there is a folder: write ``./xsum`` for it."""
    known = KNOWN.get(ALIASES.get(name, name))
    if name == BUILT_IN or known:
        return known or name
    path = Path(name).expanduser()
    if path == files.STDIN:
        return Files({"train": [path]})
    if path.is_dir():
        return Files(_saved_splits(path) or _folder_splits(path))
    if path.exists():
        return Files({"train": [path]})
    if "=" in name:
        return Files(_given_splits(name))
    if _HUB_ID.fullmatch(name) and not _looks_like_file(name):
        hub_id, _, config = name.partition(":")
        return KNOWN.get(canonical(name)) or Hub(hub_id, config or None)
    if "/" in name or _looks_like_file(name):
        raise MissingFileError(missing(path)).on_page("data")
    close = difflib.get_close_matches(name, [BUILT_IN, *KNOWN, *ALIASES], n=1)
    raise UserError(
        f"unknown data set {name!r}. {f'Did you mean {close[0]!r}? ' if close else ''}Known names are "
        f"{', '.join([BUILT_IN, *KNOWN])}; otherwise give a file, a folder of splits, train=FILE,validation=FILE,"
        f"test=FILE, or owner/name on the hub. Files are looked up from {Path.cwd()}, where this command runs."
    ).on_page("data")


def split_names(name: str) -> list[str]:
    """The splits of a data set, training first."""
    data_set = origin(name)
    if isinstance(data_set, Files):
        present = list(data_set.splits)
    elif isinstance(data_set, Hub):
        datasets = files.needed("datasets", f"reading {data_set} from the hub", "hf")
        try:
            present = list(datasets.get_dataset_split_names(data_set.id, data_set.config))
        except Exception as error:
            raise _hub_error(name, data_set, error) from error
    else:
        from ngramloss.data import newswire

        present = list(newswire.SPLITS)
    first = ["train", "validation", "test"]
    return sorted(present, key=lambda split: (first.index(split) if split in first else len(first), split))


def split_rows(name: str, split: str, *, limit: int = 0) -> Iterator[RawRow | BadRow]:
    """The rows of one split, good and bad. Missing files raise an error at once; rows are read lazily."""
    data_set = origin(name)
    if isinstance(data_set, Files):
        paths = _split_files(name, data_set, split)
        return (row for path in paths for row in (path.rows() if isinstance(path, Parallel) else files.rows(path)))
    if isinstance(data_set, Hub):
        datasets = files.needed("datasets", f"reading {data_set} from the hub", "hf")
        try:
            table = datasets.load_dataset(data_set.id, data_set.config, split=split)
        except Exception as error:
            raise _hub_error(name, data_set, error) from error
        return (RawRow(f"{data_set}/{split}", number, values) for number, values in enumerate(table, 1))
    from ngramloss.data import newswire

    if split not in newswire.SPLITS:
        raise UserError(f"{BUILT_IN} has no split {split!r}; choose from {list(newswire.SPLITS)}.")
    names = "id", "document", "summary"
    items = enumerate(newswire.items(split, limit or None), 1)
    return (RawRow(f"{BUILT_IN}/{split}", at, {name: getattr(item, name) for name in names}) for at, item in items)


def canonical(name: str) -> str:
    """The known name of a data set for any of its spellings; other names are returned unchanged.

    >>> canonical("cnndm"), canonical("EdinburghNLP/xsum"), canonical("data/mine.csv")
    ('cnn_dailymail', 'xsum', 'data/mine.csv')
    """
    return ALIASES.get(name) or next((known for known, hub in KNOWN.items() if name in (hub.id, str(hub))), name)


def has_several_sentences(name: str) -> bool:
    """Whether summaries of a data set have several sentences: they are written one a line, where ROUGE-Lsum splits."""
    return canonical(name) == "cnn_dailymail"


def _saved_splits(folder: Path) -> dict[str, list[Path | Parallel]]:
    """The splits of a folder that ``save_to_disk`` of the package datasets wrote; none if it did not."""
    try:
        if files.is_saved(folder):
            split = json.loads((folder / "state.json").read_text(encoding="utf-8")).get("_split") or "train"
            return {str(split): [folder]}
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return {SPLIT_ALIASES.get(str(name), str(name)): [inside(folder, name, may_link=True)] for name in names}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder} looks like a saved data set, but its JSON files are damaged: {error}. Save it again."
        ) from None


def _folder_splits(folder: Path) -> dict[str, list[Path | Parallel]]:
    """The splits of a folder, by file stem, with parts (``train-00000-of-00002``) and parallel lines (``train.en``)."""
    splits: dict[str, list[Path | Parallel]] = {}
    parallel: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            if not files.has_format(path):
                stem, _, column = files.uncompressed(path).name.rpartition(".")
                if stem in ("train", "validation", "test", *SPLIT_ALIASES):
                    parallel.setdefault(SPLIT_ALIASES.get(stem, stem), {})[column] = path
                continue
            stem, kind, _ = files.parts(path)
            if kind == ".txt" and stem not in ("train", "validation", "test", *SPLIT_ALIASES):
                continue  # notes, not data
            shard = _SHARD.fullmatch(stem)
            split = shard["split"] if shard else stem
            splits.setdefault(SPLIT_ALIASES.get(split, split), []).append(path)
    for split, columns in parallel.items():
        if split not in splits and len(columns) > 1:
            splits[split] = [Parallel(columns)]
    if not splits:
        raise MissingFileError(
            f"the folder {folder} has no data files. Expected names like train.jsonl, validation.csv or "
            f"test.parquet; the folder {_contents(folder)}."
        )
    return splits


def _given_splits(name: str) -> dict[str, list[Path | Parallel]]:
    """Parse ``train=a.jsonl,test=b.csv`` into the files of each split; ``train=a.en+a.de`` has parallel lines."""
    splits: dict[str, list[Path | Parallel]] = {}
    for part in name.split(","):
        split, sign, file = (piece.strip() for piece in part.partition("="))
        if not (split and sign and file):
            raise UserError(f"expected train=FILE,validation=FILE,test=FILE, got {name!r}: {part!r} is not SPLIT=FILE.")
        split = SPLIT_ALIASES.get(split, split)
        if split in splits:
            raise UserError(f"expected one file for each split, got {split!r} twice in {name!r}.")
        path = Path(file).expanduser()
        if "+" in file and not path.exists():
            paths = [Path(piece.strip()).expanduser() for piece in file.split("+")]
            columns = {files.uncompressed(piece).name.rpartition(".")[2]: piece for piece in paths}
            if len(columns) < len(paths):
                raise UserError(f"files of parallel lines need different endings, such as .en and .de, got {file!r}.")
            splits[split] = [Parallel(columns)]
        else:
            splits[split] = [path]
    return splits


def _split_files(name: str, data_set: Files, split: str) -> list[Path | Parallel]:
    if split not in data_set.splits:
        other = {"validation": "train.eval_every=0 trains without it", "test": "--split train reads all of its rows"}
        if "validation" in data_set.splits:
            other["test"] = "--split validation reads another split"
        hint = f", or hold a part of the training split out with data.{split}_fraction=0.1" if split in other else ""
        hint += f". {other[split]}" if split in other else ""
        if Path(name).expanduser().is_file():
            raise UserError(
                f"{name} is a single file, so it has no split {split!r}, only 'train' and what is held out of it. Give "
                f"a folder with a file for each split, name the files (train={name},{split}=FILE){hint}."
            ).on_page("own file")
        raise MissingFileError(
            f"{name} has no split {split!r}; its splits are {sorted(data_set.splits)}. Add a file for it{hint}."
        )
    paths = data_set.splits[split]
    plain = [file for path in paths for file in (path.columns.values() if isinstance(path, Parallel) else [path])]
    for path in plain:
        if not (path.is_file() or files.is_saved(path) or path == files.STDIN):
            raise MissingFileError(missing(path))
    if len(plain) == 1 and plain[0].is_dir():
        return paths
    shards = [_SHARD.fullmatch(files.parts(path)[0]) for path in paths if not isinstance(path, Parallel)]
    numbers = [(int(shard["index"]), int(shard["of"])) for shard in shards if shard]
    if len(paths) > 1 and len(numbers) < len(paths):  # a split of several files must be shards
        raise UserError(f"expected one file for the split {split!r} of {name}, got {[path.name for path in paths]}.")
    if numbers and Path(name).expanduser().is_dir() and numbers != [(index, len(paths)) for index in range(len(paths))]:
        raise MissingFileError(
            f"the split {split!r} of {name} is incomplete: it has only the parts {[path.name for path in paths]}."
        )
    return paths


def _hub_error(name: str, hub: Hub, error: Exception) -> Exception:
    """An error for any failure of the hub's client: UserError for a wrong split or config, else MissingFileError."""
    error_type = UserError if isinstance(error, ValueError) else MissingFileError
    lines = str(error).strip().splitlines() or [""]
    folder = f"for the local folder {name}, write ./{name}. Or " if Path(name).is_dir() else ""
    tried = f"tried the data set {hub} on the Hugging Face hub"
    tried += "" if folder else f"; there is no local file or folder {name!r}"
    return error_type(
        f"cannot load {name!r}: {tried} ({type(error).__name__}: "
        f"{lines[0].rstrip('.')}). You can use local files instead: {folder}give a file, a folder with train.jsonl, "
        "validation.jsonl and test.jsonl (.csv, .tsv and .parquet too), or train=FILE,validation=FILE,test=FILE."
    )


def _looks_like_file(name: str) -> bool:
    return name.startswith((".", "/", "~")) or files.has_format(Path(name))


def missing(path: Path) -> str:
    """A message that a file is missing, with similar names or the folder's contents."""
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    close = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=3)
    if folder == path.parent and close:
        return f"no such file or folder: {path}. Did you mean {' or '.join(map(escape.name, close))}?"
    return f"no such file or folder: {path}. The folder {folder} {_contents(folder)}."


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not names:
        return "is empty"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"contains {', '.join(map(escape.name, names[:10]))}{more}"
