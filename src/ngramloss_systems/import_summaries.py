"""a file or folder of summaries that others released → predictions with the references' ids, one sentence per line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ngramloss as ng

MARKS = ("<q>", "<t>", "</t>", "<n>", "<S_SEP>", "[X_SEP]", "[SEP]", r"\n")
"""Sentence separators in released files of BertSum, UniLM, ProphetNet and Pegasus. The last is a backslash and n."""

UNLIKE = 0.01
"""The share of released references that may differ from ours in letters or digits."""

LOOKED_AT = 20
"""The fewest summaries for which the order is checked, by comparing words with the references."""

_BRACKETS = {"lrb": "(", "rrb": ")", "lsb": "[", "rsb": "]", "lcb": "{", "rcb": "}"}
_BRACKET = re.compile(rf"-({'|'.join(_BRACKETS)})-", re.IGNORECASE)
_REWRITTEN = [
    (re.compile(r"\s+([,.;:!?%]+)(?!\S)"), r"\1"),
    (re.compile(r"(?<!\S)``(?:\s+|$)"), '"'),  # opening: join it to the next word
    (re.compile(r"(?<!\S)`(?:\s+|$)"), "'"),
    (re.compile(r"(?:\s+|^)''(?![^\s,.;:!?%)\]}])"), '"'),  # closing: join it to the last word
    (re.compile(r"\s+'(?![^\s,.;:!?%)\]}])"), "'"),  # closing too, or the players ' union
    (re.compile(r"\s+(n't|'(?:s|m|d|re|ve|ll))\b", re.IGNORECASE), r"\1"),
    (re.compile(r"\b(can) (not)\b", re.IGNORECASE), r"\1\2"),
    (re.compile(r"([(\[{])\s+"), r"\1"),
    (re.compile(r"\s+([)\]}])"), r"\1"),
    (re.compile(r"(?<!\S)([$£€#])\s+(?=[\d.])"), r"\1"),
    (re.compile(r"\\([/*])"), r"\1"),
]


class Imported(NamedTuple):
    """Predictions by id in the order of the references, the count of each separator, and notes for the user."""

    predictions: dict[str, str]
    marks: dict[str, int]
    notes: list[str]


def read_summaries(
    path: Path,
    references: Path,
    *,
    marks: Sequence[str] | None = None,
    ptb: bool = False,
    order: Path | None = None,
    gold: Path | None = None,
) -> Imported:
    """Read released summaries and give each the id of its reference: by order, or by the texts of ``gold`` references.

    ``marks`` separate sentences; None looks for ``MARKS``. ``ptb`` calls ``plain_text``. ``order`` is a file of ids.
    """
    if order and gold:
        raise ng.UserError("order and gold both give the ids of the summaries. Use only one of them.")
    if marks is not None and not all(marks):
        raise ng.UserError("a sentence separator cannot be empty. To split at no separator, use --sentences none.")
    ours = {key: _first(value) for key, value in ng.texts.read_texts(references, "reference").by_id.items()}
    texts, has_ids = _texts(path)
    notes: list[str] = []
    if has_ids and not order and not gold:
        ids = list(texts)
    elif gold:
        golds, gold_has_ids = _texts(gold, "reference")
        if has_ids and gold_has_ids:
            ng.texts.check_ids(list(texts), golds, path, gold, " To pair them by row, remove the ids of one of them.")
            texts = {key: texts[key] for key in golds}
            notes.append(f"summaries belong to the references of {gold} by their ids.")
        elif has_ids or gold_has_ids:
            notes.append(f"summaries belong to the references of {gold} by row: only one of the two files has ids.")
        released = [_split(text, _mark_counts([text], MARKS)) for text in map(_first, golds.values())]
        ids = _ids_by_text(released, ours, gold, references, notes)
    else:
        ids = _ids_in(order) if order else list(ours)
    texts = _matching_texts(texts, len(ids), path, order or gold or references, notes)
    ng.texts.check_ids(ids, ours, path if has_ids and not order else order or references, references)
    mark_counts = _mark_counts(list(texts.values()), MARKS if marks is None else marks)
    split = dict(zip(ids, (_split(text, mark_counts) for text in texts.values()), strict=True))
    predictions = {key: plain_text(split[key]) if ptb else split[key] for key in ours}
    notes += _oddities(predictions, ours)
    return Imported(predictions, mark_counts, notes)


def write_summaries(imported: Imported, path: Path) -> None:
    """Write predictions as JSONL. The file appears only when it is complete."""
    rows = ({"id": key, "prediction": text} for key, text in imported.predictions.items())
    ng.files.write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def plain_text(text: str) -> str:
    r"""Turn Penn Treebank tokens into plain text. ROUGE's tokenizer sees brackets (``lrb``) and ``do n't`` differ.

    Capitals cannot be restored. ``#`` is kept, although it often stands for £.

    Example:
        >>> plain_text("`` it ca n't be '' , said mr smith -lrb- 42 -rrb- .")
        '"it can\'t be", said mr smith (42).'
    """
    return "\n".join(_plain_line(line) for line in text.split("\n"))


def _plain_line(line: str) -> str:
    line = _BRACKET.sub(lambda match: _BRACKETS[match[1].lower()], line)
    for pattern, replacement in _REWRITTEN:
        line = pattern.sub(replacement, line)
    return line.strip()


def _texts(path: Path, what: str = "prediction") -> tuple[dict[str, Any], bool]:
    """Texts by id or line number, a list where there are several references, and whether they have ids."""
    if path.is_dir():
        return _documents(path), False
    texts, numbered = ng.texts.read_texts(path, what)
    return texts, not numbered


def _documents(folder: Path) -> dict[str, str]:
    numbered: dict[int, Path] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        number = re.search(r"\d+", path.name)
        if number is None:
            raise ng.UserError(f"{path} has no number in its name. A folder must have one numbered file per document.")
        if int(number[0]) in numbered:
            raise ng.UserError(f"{numbered[int(number[0])]} and {path} have the same number. Remove one of them.")
        numbered[int(number[0])] = ng.files.inside(folder, path.name)
    if not numbered:
        raise ng.UserError(f"{folder} has no files. A folder must have one numbered file per document.")
    numbers = sorted(numbered)
    lost = sorted(set(range(numbers[0], numbers[-1] + 1)).difference(numbers))
    if lost:
        raise ng.UserError(
            f"{folder} lacks {len(lost)} numbers between {numbers[0]} and {numbers[-1]}, first {lost[0]}."
        )
    return {str(document): "\n".join(ng.texts.lines(numbered[document])) for document in numbers}


def _ids_in(path: Path) -> list[str]:
    if not path.is_file():
        raise ng.MissingFileError(f"there is no file of ids {path}. It should have one id per line.")
    ids = [line.strip() for line in ng.texts.lines(path) if line.strip()]
    twice = [key for key, count in Counter(ids).items() if count > 1]
    if twice:
        raise ng.UserError(f"{path} repeats {len(twice)} ids ({ng.texts.listed(twice)}).")
    return ids


def _matching_texts(texts: dict[str, str], wanted: int, path: Path, other: Path, notes: list[str]) -> dict[str, str]:
    """The texts, without extra empty ones at the end."""
    wanted_texts = dict(list(texts.items())[:wanted])
    rest = [text for text in list(texts.values())[wanted:] if text.strip()]
    if len(wanted_texts) < wanted or rest:
        raise ng.UserError(
            f"{path} has {len(texts)} summaries and {other} has {wanted}. Usual causes: another split or version of "
            "the data set, documents that were left out, or one sentence per line. Nothing was written."
        )
    if len(texts) > wanted:
        notes.append(f"{len(texts) - wanted} empty lines at the end were ignored.")
    return wanted_texts


def _mark_counts(texts: Sequence[str], marks: Sequence[str]) -> dict[str, int]:
    counts = {mark: sum(text.count(mark) for text in texts) for mark in marks}
    return {mark: count for mark, count in counts.items() if count}


def _split(text: str, marks: Mapping[str, int]) -> str:
    for mark in marks:
        text = text.replace(mark, "\n")
    return "\n".join(sentence for sentence in (line.strip() for line in text.split("\n")) if sentence)


def _first(reference: object) -> str:
    return str(reference[0] if isinstance(reference, list) else reference)


def _ids_by_text(
    released: Sequence[str], ours: Mapping[str, str], gold: Path, references: Path, notes: list[str]
) -> list[str]:
    """The ids of released references: first by equal letters and digits, the rest by most shared words."""
    ids_by_letters: dict[str, list[str]] = {}
    for key, text in ours.items():
        ids_by_letters.setdefault(_letters(text), []).append(key)
    twice = sum(len(keys) for keys in ids_by_letters.values() if len(keys) > 1)
    ids = [ids_by_letters[text].pop(0) if ids_by_letters.get(text) else None for text in map(_letters, released)]
    unlike = [index for index, key in enumerate(ids) if key is None]
    if len(released) != len(ours) or len(unlike) > UNLIKE * len(ours):
        raise ng.UserError(
            f"{gold} has {len(released)} references, but only {len(released) - len(unlike)} are among the {len(ours)} "
            f"of {references}. Both must be the same test set. If they are not, give the ids with --order."
        )
    left = {key: set(ng.data.words_of(ours[key])) for keys in ids_by_letters.values() for key in keys}
    for index in unlike:
        words = set(ng.data.words_of(released[index]))
        nearest = max(left, key=lambda key: _overlap(words, left[key]))
        ids[index] = nearest
        del left[nearest]
    if unlike:
        notes.append(f"{len(unlike)} released references differ from ours; each got the id of the most similar one.")
    if twice:
        notes.append(f"{twice} references have the same text as another; their ids follow the order of the file.")
    return [key for key in ids if key is not None]


def _overlap(words: set[str], other: set[str]) -> float:
    return len(words & other) / (len(words | other) or 1)


def _letters(text: str) -> str:
    return "".join(character for character in _BRACKET.sub(" ", text).casefold() if character.isalnum())


def _oddities(predictions: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Warnings: empty texts, and texts that are not more similar to their own reference than to the next one."""
    notes = []
    empty = [key for key, text in predictions.items() if not text]
    if empty:
        notes.append(f"{len(empty)} summaries are empty ({ng.texts.listed(empty)}).")
    if len(predictions) >= LOOKED_AT:
        texts = [set(ng.data.words_of(text)) for text in predictions.values()]
        golds = [set(ng.data.words_of(ours[key])) for key in predictions]
        own, other = _shared_words(texts, golds), _shared_words(texts, golds[1:] + golds[:1])
        if own < 1.5 * other:
            notes.append(
                f"the order looks wrong: a summary shares {own:.0%} of its words with its own reference and "
                f"{other:.0%} with the next one. Give the order with --order or --gold."
            )
    return notes


def _shared_words(texts: Sequence[set[str]], golds: Sequence[set[str]]) -> float:
    pairs = zip(texts, golds, strict=True)
    return sum(len(text & gold) / (len(text) or 1) for text, gold in pairs) / len(texts)
