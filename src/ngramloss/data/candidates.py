"""a file of candidates, or the folder it is in → texts and scores of each source, checked, and their fingerprint.

Candidates belong to examples by their ids, which are row numbers if the data have none. So each row also has hashes of
the source and of the references that it was made from, and training compares them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.data.examples import Example
from ngramloss.data.rows import SHOWN, BadRow, bad_row_lines, kind_of, parts, rows, text_fault
from ngramloss.errors import MissingFileError, UserError
from ngramloss.storage.run_folder import RunFolder, read_about

if TYPE_CHECKING:
    from ngramloss.data.candidate_tokens import WithCandidates
    from ngramloss.data.tokens import Shape

KEYS = ("id", "candidates", "scores")
"""What every row has."""
ADVICE = "Make candidates with: ngramloss candidates RUN_OR_MODEL"


class Candidates(NamedTuple):
    """Candidates of sources and what they score.

    Attributes:
        rows: id of a source → its texts, and the score of each, 0 to 1, in the order of the file.
        fingerprint: 16 hexadecimal digits that depend on ids, texts and scores.
        sources: id → the hash of the source of the candidates, where the file says it.
        references: id → the hash of the references of the scores, where the file says it.
        trained_on: id → whether the model that wrote the candidates was trained on the source, where the file says it.
    """

    rows: dict[str, tuple[tuple[str, ...], tuple[float, ...]]]
    fingerprint: str
    sources: Mapping[str, str] = {}
    references: Mapping[str, str] = {}
    trained_on: Mapping[str, bool] = {}


def text_hashes(example: Example) -> dict[str, str]:
    """The hashes in a row of candidates: which texts it was made from."""
    return {"source_hash": source_hash(example), "reference_hash": _text_hash(example.references or [example.target])}


def source_hash(example: Example) -> str:
    """The hash of a source alone."""
    return _text_hash([example.source])


def read_candidates(path: Path, *, need_scores: bool = True) -> Candidates:
    """Read a file that ``ngramloss candidates`` wrote, or one with the same rows.

    A row is a JSON object with ``id``, ``candidates`` (a list of texts) and ``scores`` (as many numbers). It may say
    which texts it was made from: ``source_hash`` and ``reference_hash``, or ``source``, the text itself. Other keys are
    ignored.

    ``need_scores``: whether a row without ``scores`` is an error; otherwise its scores are empty.

    Raises:
        UserError: rows that cannot be used, all of them listed at once, or none at all.
        MissingFileError: there is no such file.
    """
    file = RunFolder(path).candidates if path.is_dir() else path
    if not file.is_file():
        where = f"{path} has no {file.name}" if path.is_dir() else f"there is no file {path}"
        raise MissingFileError(f"{where}. {ADVICE}")
    if parts(file)[1] != ".jsonl":
        raise UserError(f"{file} should be a file of JSON lines, with a name that ends in .jsonl. {ADVICE}")
    found: dict[Any, tuple[tuple[str, ...], tuple[float, ...]]] = {}
    lines: dict[Any, int] = {}
    hashes: dict[str, dict[str, str]] = {"source": {}, "reference": {}}
    trained_on: dict[str, bool] = {}
    bad: list[BadRow] = []
    for row in rows(file):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        key, texts, scores = map(row.values.get, KEYS)  # type: Any, Any, Any
        without = not need_scores and KEYS[2] not in row.values
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        missing = [repr(name) for name in (KEYS[:2] if without else KEYS) if name not in row.values]
        fault = f"no key {', '.join(missing)}" if missing else text_fault("'id'", key)
        fault = fault or _list_fault(texts, [0.0] * len(texts) if without and isinstance(texts, list) else scores)
        if not fault and key in lines:
            fault = f"id {key!r} was already used in line {lines[key]}"
        if fault:
            bad.append(BadRow(row.file, row.line, fault))
            continue
        found[key] = tuple(texts), () if without else tuple(map(float, scores))
        lines[key] = row.line
        for name, known in hashes.items():
            text, given = row.values.get(name), row.values.get(f"{name}_hash")
            if given is not None:
                known[key] = str(given)
            elif name == "source" and isinstance(text, str):
                known[key] = _text_hash([text])
        if isinstance(said := row.values.get("trained_on"), bool):
            trained_on[key] = said
    if bad:
        counts = f"{len(bad):,} of {len(bad) + len(found):,} rows of {file} cannot be used:"
        advice = "Fix them, or make the file again with ngramloss candidates."
        raise UserError("\n".join([counts, *bad_row_lines(bad), advice]))
    if not found:
        raise UserError(f"{file} is empty. {ADVICE}")
    return Candidates(found, candidates_fingerprint(found), hashes["source"], hashes["reference"], trained_on)


def about_candidates(path: Path) -> dict[str, Any]:
    """What ``ngramloss candidates`` saved of the candidates in a file or folder; empty if they are from elsewhere."""
    folder = RunFolder(path if path.is_dir() else path.parent)
    if path not in (folder.path, folder.candidates) or not folder.about_candidates.is_file():
        return {}
    return read_about(folder.about_candidates)


def about_of(path: Path) -> dict[str, Any]:
    """What is saved beside candidates, or beside predictions with several texts each; empty for another file."""
    folder = RunFolder(path.parent)
    if path == folder.predictions and folder.generation.is_file():
        return read_about(folder.generation)
    return about_candidates(path)


def check_candidates(
    candidates: Candidates, about: Mapping[str, Any], examples: Sequence[Example], *, path: Path, split: str = "train"
) -> str:
    """Check that candidates are of the examples that have their ids. Returns a doubt to tell the user, or nothing."""
    again = "make the candidates again with: ngramloss candidates RUN_OR_MODEL"
    if (theirs := about.get("split", split)) != split:
        raise UserError(
            f"the candidates in {path} are for the split {theirs!r}, but training needs candidates for the split "
            f"{split!r}: {again} --split {split}"
        )
    noun = "training" if split == "train" else split
    own = [example for example in examples if example.id in candidates.rows]
    now = {example.id: text_hashes(example) for example in own}
    others = [key for key in now if candidates.sources.get(key, now[key]["source_hash"]) != now[key]["source_hash"]]
    if others:
        raise UserError(
            f"{len(others):,} of {len(own):,} {noun} examples have another source than the candidates with the same "
            f"id in {path}: {_listed(others)}. The data were edited, replaced, or reordered without an id column. "
            f"Restore them, or {again}"
        )
    others = [
        key for key in now if candidates.references.get(key, now[key]["reference_hash"]) != now[key]["reference_hash"]
    ]
    if others:
        raise UserError(
            f"{len(others):,} of {len(own):,} {noun} examples have other references than those with which the scores "
            f"in {path} were computed: {_listed(others)}. Restore the data, or {again}"
        )
    unknown = sum(example.id not in candidates.sources for example in own)
    if not unknown:
        return ""
    return (
        f"{unknown:,} of {len(own):,} rows of candidates in {path} have no source, so only their ids were compared. "
        "Make sure that they belong to these data, in this order, or give each row a key 'source' with the text of "
        "its source, which is then checked."
    )


def note_on_training(candidates: Candidates, examples: Sequence[Example], *, path: Path) -> str:
    """A sentence about candidates whose writer was trained on their sources; empty if the file names none."""
    own = [example for example in examples if example.id in candidates.rows]
    seen = sum(candidates.trained_on.get(example.id, False) for example in own)
    if not seen:
        return ""
    return (
        f"{seen:,} of {len(own):,} sources with candidates in {path} were training sources of the model that "
        "generated them. A model's outputs for seen sources differ from its outputs for new ones. To avoid this, "
        "train two models, with data.leave_out=1/2 and 2/2, then: ngramloss candidates RUN1 RUN2 --out DIR"
    )


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:SHOWN])) + (", …" if len(ids) > SHOWN else "")


def _list_fault(texts: Any, scores: Any) -> str:
    for name, value in zip(KEYS[1:], (texts, scores), strict=True):
        if not isinstance(value, list):
            return f"{name!r} should be a list, got {kind_of(value)}"
    if not texts:
        return "'candidates' is empty"
    if len(texts) != len(scores):
        return f"lengths differ: {len(texts)} candidates, {len(scores)} scores"
    if fault := next(filter(None, (text_fault(f"candidate {at}", text) for at, text in enumerate(texts, 1))), ""):
        return fault
    for number, score in enumerate(scores, 1):
        if not isinstance(score, (int, float)) or isinstance(score, bool):
            return f"score {number} should be a number, got {kind_of(score)}"
        if not 0 <= score <= 1:
            return f"score {number} should be between 0 and 1, got {str(score)[:20]}"
    return ""


def _text_hash(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:12]


def candidates_fingerprint(found: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]]) -> str:
    """Hash the content to 16 hexadecimal digits. Lengths come first, so different candidates give different input."""
    digest = hashlib.sha256()
    for key, (texts, scores) in found.items():
        digest.update(struct.pack(f">Q{len(scores)}d", len(texts), *scores))
        for text in (key, *texts):
            content = text.encode()
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def named_files(text: str) -> dict[str, list[Path]]:
    """Split → its files of candidates, from ``data.candidates``: one path, or ``train=a,train=b,validation=c``.

    >>> {split: [path.name for path in paths] for split, paths in named_files("train=a,train=b,validation=c").items()}
    {'train': ['a', 'b'], 'validation': ['c']}
    """
    found: dict[str, list[Path]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        split, equals, path = part.partition("=")
        key, name = (split.strip(), path.strip()) if equals else ("train", part)
        if key not in ("train", "validation") or not name:
            raise UserError(
                f"data.candidates: expected a path, or train=PATH,validation=PATH; train may be repeated. Got {part!r}."
            )
        found.setdefault(key, []).append(Path(name))
    return found


def tokenise(
    examples: Sequence[Example], fingerprint: str, candidates: Candidates, tokenizer: Any, shape: Shape
) -> WithCandidates:
    """The tokens of examples and of their candidates; arguments as in :func:`ngramloss.data.tokens.tokenise`."""
    from ngramloss.data import candidate_tokens, tokens

    made = candidate_tokens.tokenise_candidates(examples, fingerprint, candidates, tokenizer, shape)
    return candidate_tokens.WithCandidates(tokens.tokenise(examples, fingerprint, tokenizer, shape), made)


def raise_if_comma(path: Path) -> None:
    """Raise if a path has a comma, which separates files in ``data.candidates``."""
    if "," in str(path):
        raise UserError(f"{path} has a comma in its name, but commas separate files of candidates. Rename it.")
